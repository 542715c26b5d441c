"""What the compiler does with loops. `database` holds the order."""

import logging
import sys

from scanlib.ops.execution import register_loader
from scanlib.rewrites import database

__all__ = ["database"]

_logger = logging.getLogger("scanlib.rewrites")


def load_densities() -> bool:
    """Tell PyMC of loops that draw, if it has been imported; return whether it was.

    With a release that has something else inside, densities alone are missing, not loops.
    """
    if "pymc.logprob" not in sys.modules:
        return False
    try:
        from scanlib.rewrites import densities  # noqa: F401
    except (ImportError, AttributeError) as error:
        _logger.warning("PyMC derives no density of draws in loops with this release: %s", error)
    return True


register_loader(load_densities)
