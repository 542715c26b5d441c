"""CUDA kernels of elementwise loops, for PyTorch and JAX.

`printer` writes the loop, `template` holds what all loops share, `schedule` chooses how a loop is
walked, `geometry` and `launch` say with which numbers, `compiler` compiles for the device at hand,
and `driver` loads and launches. `import scanlib` imports none of it; the backends for PyTorch and
JAX do, when they meet a loop on a CUDA device.
"""
