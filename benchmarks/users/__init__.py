"""Loops that users might write, each with one step for PyTensor and JAX."""

from benchmarks.users import algorithms, equations, filters, learning, nested, series
from benchmarks.users.declared import LOOPS

__all__ = ["LOOPS", "algorithms", "equations", "filters", "learning", "nested", "series"]
