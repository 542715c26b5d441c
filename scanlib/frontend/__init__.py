"""The functions users call: they turn a step function and its arguments into a loop."""

from scanlib.frontend.associative_functions import (
    associative_reduce,
    associative_scan,
    prefix_scan,
    reduce_scan,
)
from scanlib.frontend.cumulative import cumlogsumexp, cummax, cummin
from scanlib.frontend.filtering import lfilter
from scanlib.frontend.lags import lags
from scanlib.frontend.linear_recurrences import (
    discounted_cumsum,
    discounted_cumsum_left,
    discounted_cumsum_right,
    linear_scan,
    pscan,
)
from scanlib.frontend.loop_function import loop
from scanlib.frontend.newton import newton_iterations
from scanlib.frontend.scan_function import scan
from scanlib.frontend.statespace import (
    StateSpace,
    kalman_filter,
    kalman_sample,
    kalman_smoother,
)
from scanlib.frontend.step_function import until
from scanlib.frontend.stepping import step_through
from scanlib.frontend.wrappers import filter, foldl, foldr, map, reduce, scan_checkpoints
from scanlib.ops.checkpoint_schedules import Levels, Memory
from scanlib.ops.lowered.newton_scan import Newton

__all__ = [
    "Levels",
    "Memory",
    "Newton",
    "StateSpace",
    "associative_reduce",
    "associative_scan",
    "cumlogsumexp",
    "cummax",
    "cummin",
    "discounted_cumsum",
    "discounted_cumsum_left",
    "discounted_cumsum_right",
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
    "step_through",
    "until",
]
