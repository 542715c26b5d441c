"""Calls of loop programs from C: one handler for all loops, compiled once on a machine.

`programs` says of a loop what C has to know; `thunks` runs it for PyTensor's C linker, and
`scanlib.backends.jax.kernels` for XLA.
"""
