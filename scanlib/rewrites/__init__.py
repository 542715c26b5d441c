"""What the compiler does with loops. `database` holds the order."""

import sys

from scanlib.ops.execution import register_loader
from scanlib.rewrites import database

__all__ = ["database"]


def load_densities() -> bool:
    """Tell PyMC of loops that draw, if it has been imported; return whether it was."""
    if "pymc.logprob" not in sys.modules:
        return False
    from scanlib.rewrites import densities  # noqa: F401

    return True


register_loader(load_densities)
