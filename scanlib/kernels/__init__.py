"""Kernels: what compiled loops run, written once in a small typed loop language.

`language` has the grammar and `Writer`, which makes trees of it; `printers` make LLVM and C of it.
`elementary` has the elementary functions, `scalars` what PyTensor's scalar Ops mean.

Nothing here knows numba, PyTensor's linkers or JAX: `scanlib.backends` brings kernels to them.
"""
