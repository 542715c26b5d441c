"""Where the arrays of a step lie: pointers, sizes and strides, all as names of the source.

The shapes of nearly everything in a step are known before the first one. So sizes are computed,
compared and multiplied once, before the loop, and each result gets a *workspace* there that all
steps use. `Sizes` knows which names exist before the loop (`is_static`) and which sizes are the
same; two steps away from it all is as it would be in C: a pointer and index arithmetic.

A workspace is given back when the last value in it has been read, for later results of the same
step; the caller says when.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scanlib.backends.numba.source import Source

PADDING = 16  # workspaces start at multiples of so many items: none shares a cache line


def _sum(name: str, number: int) -> str:
    return f"{name} + {number}" if name else str(number)


@dataclass(eq=False)
class Workspace:
    """Memory for one result of a step: its pointer, and what it can be used for again."""

    start: str
    dtype: str
    items: str
    pinned: bool = False  # read by something that may hold on to it


@dataclass(frozen=True)
class Place:
    """An array in memory. Strides count items.

    `fixed` says that it is the same at all steps. `memory` names what other steps read and write
    other parts of: the history of a state, the two buffers of a carry.
    """

    start: str
    sizes: tuple[str, ...]
    strides: tuple[str, ...]
    workspace: Workspace | None = None
    fixed: bool = False
    memory: str = ""

    @property
    def ndim(self) -> int:
        return len(self.sizes)


class Sizes:
    """Integers of the source: which are known before the loop, and which are equal."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._static: set[str] = set()
        self._same: dict[str, str] = {}
        self._defined: dict[str, str] = {}
        self._checked: set[tuple[str, str]] = set()

    def is_static(self, *texts: str) -> bool:
        """Whether names (or numbers) are known before the loop."""
        return all(text.lstrip("-").isdigit() or text in self._static for text in texts)

    def add_static(self, name: str) -> str:
        """Say that a name is known before the loop."""
        self._static.add(name)
        return name

    def define(self, text: str, *parts: str, prefix: str = "n") -> str:
        """Name an integer expression of other names, before the loop if these are known there."""
        if text in self._defined:
            return self._defined[text]
        if text.lstrip("-").isdigit():
            return text
        name = self.source.name(prefix)
        if self.is_static(*parts):
            self.source.before_loop(f"{name} = {text}")
            self._static.add(name)
        else:
            self.source.line(f"{name} = {text}")
        self._defined[text] = name
        return name

    def same(self, size: str) -> str:
        """Return the name that stands for all sizes known to be equal to this one."""
        while size in self._same:
            size = self._same[size]
        return size

    def product(self, *sizes: str) -> str:
        """Return the product of sizes."""
        number, names = 1, []
        for size in map(self.same, sizes):
            if size.isdigit():
                number *= int(size)
            else:
                names.append(size)
        if number == 0 or not names:
            return str(number)
        factors = [*([str(number)] if number != 1 else []), *names]
        return names[0] if factors == names[:1] else self.define(" * ".join(factors), *names)

    def contiguous_strides(self, sizes: Sequence[str]) -> tuple[str, ...]:
        """Return the strides of an array that fills its memory in order."""
        return tuple(self.product(*sizes[axis + 1 :]) for axis in range(len(sizes)))

    def is_contiguous(self, place: Place) -> bool:
        """Whether an array is known to fill its memory in order."""
        expected = self.contiguous_strides(place.sizes)
        return all(
            size == "1" or self.same(stride) == wanted
            for size, stride, wanted in zip(place.sizes, place.strides, expected, strict=True)
        )

    def require_equal(self, size: str, other: str, failure: str, static_failure: str = "") -> str:
        """Write that two sizes must be equal, and return the name for both.

        `failure` is the statement that raises; `static_failure` what stands for it before the
        loop, where no step has a number yet.
        """
        size, other = self.same(size), self.same(other)
        if size == other:
            return size
        both_static = self.is_static(size, other)
        if (size, other) not in self._checked and (other, size) not in self._checked:
            self._checked.add((size, other))
            if both_static:
                # A loop without steps compares nothing.
                self.source.check_before_loop(f"{size} != {other}", static_failure or failure)
            else:
                with self.source.block(f"if {size} != {other}:"):
                    self.source.line(failure)
        if size.isdigit() or other.isdigit():
            kept, dropped = (size, other) if size.isdigit() else (other, size)
        elif self.is_static(size):
            kept, dropped = size, other
        else:
            kept, dropped = other, size
        if not dropped.isdigit():
            self._same[dropped] = kept
        return kept


class Memory:
    """Hands out workspaces."""

    def __init__(self, source: Source, sizes: Sizes) -> None:
        self.source = source
        self.sizes = sizes
        self.arrays: list[str] = []  # what must live until the loop has ended
        self._free: list[Workspace] = []
        self._planned: list[tuple[str, str, str, bool]] = []

    def take(self, dtype: str, items: str, *, zeros: bool = False) -> Workspace:
        """Return memory for so many items, as they were left or all zero."""
        if not zeros:
            for workspace in self._free:
                if (workspace.dtype, workspace.items) == (dtype, items):
                    self._free.remove(workspace)
                    return workspace
        start = self.source.name("p")
        if self.sizes.is_static(items) and self.source.has_loop:
            self._planned.append((start, dtype, items, zeros))
            return Workspace(start, dtype, items)
        array, before = self.source.name("w"), self.source.before_loop
        self.arrays.append(array)
        if not self.source.has_loop:
            # What computes sizes is used at once.
            before(f"{array} = np.{'zeros' if zeros else 'empty'}({items}, {dtype})")
            before(f"{start} = pointer({array})")
            return Workspace(start, dtype, items, pinned=True)
        before(f"{array} = np.empty(0, {dtype})")
        before(f"{start} = pointer({array})")
        with self.source.block(f"if {array}.size < {items}:"):
            self.source.line(f"{array} = np.empty({items}, {dtype})")
            self.source.line(f"{start} = pointer({array})")
        # Its size changes: it is never used for anything else.
        return Workspace(start, dtype, items, pinned=True)

    def allocate(self) -> None:
        """Write the allocation of all workspaces of known sizes, as parts of one array per dtype.

        An array more is a reference count more to release wherever the function ends.
        """
        line = self.source.after_checks
        for dtype in dict.fromkeys(planned[1] for planned in self._planned):
            mine = [planned for planned in self._planned if planned[1] == dtype]
            array, base = self.source.name("w"), self.source.name("p")
            offsets, total, known = [], "", 0
            for _, _, items, _ in mine:
                offsets.append(_sum(total, known))
                if items.isdigit():
                    known += -(-int(items) // PADDING) * PADDING
                else:
                    name = self.source.name("o")
                    padded = f"(({items} + {PADDING - 1}) & -{PADDING})"
                    line(f"{name} = {f'{total} + ' if total else ''}{padded}")
                    total = name
            line(f"{array} = np.empty({_sum(total, known)}, {dtype})")
            line(f"{base} = pointer({array})")
            self.arrays.append(array)
            for (start, _, items, zeros), offset in zip(mine, offsets, strict=True):
                line(f"{start} = opaque(shift({base}, {offset}))")
                if zeros:
                    index = self.source.name("j")
                    line(f"for {index} in range({items}):")
                    line(f"    store({start}, {index}, {dtype}(0))")
        self._planned.clear()

    def give_back(self, workspace: Workspace) -> None:
        """Let later results use a workspace."""
        if not workspace.pinned and workspace not in self._free:
            self._free.append(workspace)
