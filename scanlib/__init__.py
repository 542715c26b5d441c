"""scanlib: symbolic loops for PyTensor that the compiler understands.

The loop users already know::

    ys, updates = scanlib.scan(fn, sequences=..., outputs_info=..., non_sequences=..., n_steps=...)

Compile it with `pytensor.function`, differentiate it with `pytensor.grad`.
"""

# Imported for what they register with PyTensor: flags, linkers' rules, rewrites.
from scanlib import backends, config, rewrites  # noqa: F401
from scanlib.adoption import disable, enable, enabled
from scanlib.explain import explain
from scanlib.frontend import (
    Levels,
    Memory,
    Newton,
    StateSpace,
    associative_reduce,
    associative_scan,
    cumlogsumexp,
    cummax,
    cummin,
    discounted_cumsum,
    discounted_cumsum_left,
    discounted_cumsum_right,
    filter,
    foldl,
    foldr,
    kalman_filter,
    kalman_sample,
    kalman_smoother,
    lags,
    lfilter,
    linear_scan,
    loop,
    map,
    newton_iterations,
    prefix_scan,
    pscan,
    reduce,
    reduce_scan,
    scan,
    scan_checkpoints,
    step_through,
    until,
)
from scanlib.sharding import shard

__version__ = "1.0.0rc1"

__all__ = [
    "Levels",
    "Memory",
    "Newton",
    "StateSpace",
    "__version__",
    "associative_reduce",
    "associative_scan",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "disable",
    "discounted_cumsum",
    "discounted_cumsum_left",
    "discounted_cumsum_right",
    "enable",
    "enabled",
    "explain",
    "filter",
    "foldl",
    "foldr",
    "kalman_filter",
    "kalman_sample",
    "kalman_smoother",
    "lags",
    "lfilter",
    "linear_scan",
    "loop",
    "map",
    "newton_iterations",
    "prefix_scan",
    "pscan",
    "reduce",
    "reduce_scan",
    "scan",
    "scan_checkpoints",
    "shard",
    "step_through",
    "until",
]
