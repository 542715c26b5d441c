"""How PyTensor's linkers run scanlib's Ops. Each backend loads with the first loop."""

from functools import partial
from importlib import import_module

# Registers what loads the JAX and PyTorch backends, and what the C linker's calls.
from scanlib.backends import c_hook, jax_hook, torch_hook  # noqa: F401
from scanlib.ops.execution import register_loader

register_loader(partial(import_module, "scanlib.backends.numba"))
register_loader(partial(import_module, "scanlib.backends.handler.thunks"))  # the C linker's
