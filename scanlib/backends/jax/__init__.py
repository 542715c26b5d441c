"""The JAX backend: what PyTensor's JAX linker calls for scanlib's Ops.

Imported by `scanlib.backends.jax_hook` when the linker runs. Importing it imports jax and
registers a rule for every Op with `pytensor.link.jax.dispatch.jax_funcify`.
"""

import jax

from scanlib.backends.jax import compiled_loops, rows


def combines_in_trees() -> bool:
    """Whether associative scans are combined in trees: not on a CPU, where a walk is less work."""
    return jax.default_backend() != "cpu"


def takes_steps() -> bool:
    """Whether matrix recurrences are taken step by step: on one CPU, where steps are kernels."""
    return jax.default_backend() == "cpu" and jax.device_count() == 1


__all__ = ["combines_in_trees", "compiled_loops", "rows", "takes_steps"]
