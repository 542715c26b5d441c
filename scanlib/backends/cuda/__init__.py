"""CUDA kernels of elementwise loops and matrix recurrences, for PyTorch and JAX.

`printer` writes a loop, and `linear` a matrix recurrence; `template` holds what all share.
`schedule` chooses how they are walked, `launch` says with which numbers, `nvidia`
compiles for the device at hand, loads and launches. `import scanlib` imports none of
it; the backends for PyTorch and JAX do, when they meet a loop on a CUDA device.
"""
