"""scanlib: symbolic loops for PyTensor that the compiler understands.

The loop users already know::

    ys, updates = scanlib.scan(fn, sequences=..., outputs_info=..., non_sequences=..., n_steps=...)

Compile it with `pytensor.function`, differentiate it with `pytensor.grad`.
"""

# Imported for what they register with PyTensor: flags, linkers' rules, rewrites.
from scanlib import backends, config, rewrites  # noqa: F401
from scanlib.adoption import disable, enable, enabled
from scanlib.explain import explain
from scanlib.frontend.associative_functions import associative_reduce, associative_scan
from scanlib.frontend.direct_functions import (
    cumlogsumexp,
    cummax,
    cummin,
    discounted_cumsum,
    linear_scan,
    pscan,
)
from scanlib.frontend.filtering import lfilter
from scanlib.frontend.lags import lags
from scanlib.frontend.loop_function import loop
from scanlib.frontend.methods import newton_iterations
from scanlib.frontend.scan_function import scan
from scanlib.frontend.statespace import StateSpace, kalman_filter, kalman_sample, kalman_smoother
from scanlib.frontend.step_function import until
from scanlib.frontend.stepping import step_through
from scanlib.frontend.wrappers import filter, foldl, foldr, map, reduce, scan_checkpoints
from scanlib.ops.checkpoint_schedules import Levels, Memory
from scanlib.ops.lowered.newton_scan import Newton
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
    "pscan",
    "reduce",
    "scan",
    "scan_checkpoints",
    "shard",
    "step_through",
    "until",
]
