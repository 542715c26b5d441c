"""The PyTorch backend: what PyTensor's PyTorch linker calls for scanlib's Ops.

Imported by `scanlib.backends.torch_hook` when the linker runs. Importing it imports torch and
registers a rule for every Op with `pytensor.link.pytorch.dispatch.pytorch_funcify`.
"""

from scanlib.backends.torch import conversions, loops, static_sizes

__all__ = ["conversions", "loops", "static_sizes"]
