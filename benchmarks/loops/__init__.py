"""The loops that are timed, each written once and built with either library.

The goals are ratios to the loops of :mod:`benchmarks.hand`. Hand-written loops are imported by
name, when they are needed, so that a process that measures compilation does not load numba before
its clock starts.
"""

from benchmarks.loops import (
    affine,
    cumulative,
    filters,
    gated,
    iterations,
    matrix,
    recurrent,
    series,
)

LOOPS = {
    loop.name: loop
    for group in (affine, series, cumulative, matrix, iterations, recurrent, gated, filters)
    for loop in group.LOOPS
}
