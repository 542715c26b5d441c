"""How PyTensor's linkers run scanlib's Ops. Each backend loads with the first loop."""

# Registers what loads the JAX and PyTorch backends.
from scanlib.backends import jax_hook, torch_hook  # noqa: F401
from scanlib.ops.execution import register_loader


def load_numba() -> None:
    """Register the numba backend."""
    from scanlib.backends import numba  # noqa: F401


def load_c() -> None:
    """Register what the C linker runs."""
    from scanlib.backends.handler import c_code  # noqa: F401


register_loader(load_numba)
register_loader(load_c)
