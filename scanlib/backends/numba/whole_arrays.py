"""Statements about whole arrays, written as loops over their items."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from scanlib.backends.numba.source import Source


class WholeArrays:
    """What writers of loops have in common that make arrays and copy them."""

    source: Source

    def new_like(self, name: str, like: str, axes: Iterable[int], *lead: str) -> None:
        """Write a new array of some sizes, then of those that another array has on some axes."""
        sizes = [*lead, *(f"{like}.shape[{axis}]" for axis in axes)]
        self.source.line(f"{name} = new_array({', '.join([f'{like}.dtype', *sizes])})")

    def copy_array(
        self,
        target: str,
        target_index: tuple[str, ...],
        source: str,
        source_index: tuple[str, ...],
        ndim: int,
        first_size: str | None = None,
    ) -> None:
        """Write loops that copy an array of `ndim` dimensions item by item.

        Numba's own assignment of arrays brings in code that formats error messages: more than
        a second of compile time.
        """
        inner = [self.source.name("j") for _ in range(ndim)]
        sizes = [f"{target}.shape[{axis + len(target_index)}]" for axis in range(ndim)]
        if first_size is not None:
            sizes[0] = first_size
        with ExitStack() as stack:
            for index, size in zip(inner, sizes, strict=True):
                stack.enter_context(self.source.block(f"for {index} in range({size}):"))
            left = ", ".join([*target_index, *inner]) or "()"
            right = ", ".join([*source_index, *inner]) or "()"
            self.source.line(f"{target}[{left}] = {source}[{right}]")
