"""Scalar code for kernels. Knows scalar graphs only."""
