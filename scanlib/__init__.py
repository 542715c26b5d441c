"""scanlib: symbolic loops for PyTensor that the compiler understands.

The loop users already know::

    ys, updates = scanlib.scan(fn, sequences=..., outputs_info=..., non_sequences=..., n_steps=...)

Compile it with `pytensor.function`, differentiate it with `pytensor.grad`.
"""

# Imported for what they register with PyTensor: flags, linkers' rules, rewrites.
from scanlib import backends, config, rewrites  # noqa: F401
from scanlib.frontend import filter, foldl, foldr, map, reduce, scan, until

__version__ = "0.1.0"

__all__ = ["__version__", "filter", "foldl", "foldr", "map", "reduce", "scan", "until"]
