"""How PyTensor's linkers run scanlib's Ops. Each backend loads with the first loop."""

from functools import partial
from importlib import import_module

# Registers what loads the JAX and PyTorch backends.
from scanlib.backends import jax_hook, torch_hook  # noqa: F401
from scanlib.ops.execution import register_loader

register_loader(partial(import_module, "scanlib.backends.numba"))
for name in ("thunks", "clusters"):  # the C linker's
    register_loader(partial(import_module, f"scanlib.backends.handler.{name}"))
