"""Side-by-side timings of scanlib and its alternatives: ``python -m benchmarks``.

Everything is compared on one thread. Libraries of matrix products read the number of their threads
when they load, before any code of the benchmarks could set it, so it is set here, in the package
that Python imports first. A number that the environment gives stays as it is.
"""

import os

for _variable in (
    "BLIS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "PJRT_NPROC",  # JAX
):
    os.environ.setdefault(_variable, "1")
