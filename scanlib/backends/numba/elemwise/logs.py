"""Cumulative logaddexp of a block of steps (compiled code only)."""

from __future__ import annotations

from typing import Any


def logaddexp_steps(b: Any, h: Any, start: int, n: int) -> bool:
    """Placeholder."""
    return False
