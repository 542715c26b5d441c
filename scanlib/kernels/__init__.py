"""Kernels: what compiled loops run, written once in a small typed loop language.

`language` has the grammar and `Writer`, which makes trees of it; `verifier` names the first thing
that is wrong with a tree; `interpreter` runs one in Python and is what its operations mean;
`printers` make LLVM and C of it. `vectors` has the elementary functions, `scalars` what PyTensor's
scalar Ops mean.

Nothing here knows numba, PyTensor's linkers or JAX: `scanlib.backends` brings kernels to them.
"""
