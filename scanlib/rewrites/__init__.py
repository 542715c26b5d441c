"""What the compiler does with loops. `database` holds the order."""

from scanlib.rewrites import database

__all__ = ["database"]
