"""Carries of a loop: two buffers each, which change roles from step to step.

A step may give a carry another shape. Hardly any does, and code for it in every step takes long to
compile: the function of a loop assumes that carries keep their sizes, which it compares before the
first step with those that a step gives them. If they differ, it calls a function without the
assumption, which is compiled then.
"""

from __future__ import annotations

from dataclasses import replace

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.type import DenseTensorType

from scanlib.backends.numba.array_emit import Emitter
from scanlib.backends.numba.array_values import Destination, is_zero_dim
from scanlib.backends.numba.loop import LoopWriter
from scanlib.backends.numba.places import Place, Sizes

SHAPE = "raise ValueError('An array inside a scan has not the shape of its type')"


def is_array(variable: Variable) -> bool:
    """Whether a variable is a tensor with axes."""
    return isinstance(variable.type, DenseTensorType) and variable.type.ndim > 0


class SizesChangeError(Exception):
    """The sizes of a carry after a step are not known before the loop."""


class CarryWriter(LoopWriter):
    """Writes the storage of carries, and what becomes of them at the end of a step."""

    emitter: Emitter
    sizes: Sizes
    in_place: set[int]
    # The statement that leaves to another function, if carries are assumed to keep their sizes.
    leave = ""

    def write_carry_storage(self, i: int, name: str) -> None:
        line, variable = self.source.line, self.inner.carries[i]
        if is_zero_dim(variable.type):
            line(f"c{i} = as_scalar({name})")
            return
        if not is_array(variable):
            line(f"c{i} = numba_deepcopy({name})")
            return
        ndim = variable.type.ndim
        for buffer in (f"c{i}", f"d{i}"):
            self.new_like(buffer, name, range(ndim))
        self.copy_array(f"c{i}", (), name, (), ndim)
        line(f"cp{i} = pointer(c{i})")
        line(f"dp{i} = pointer(d{i})")
        line(f"q{i} = False")
        for axis in range(ndim):
            line(f"c{i}_{axis} = {name}.shape[{axis}]")
            if self.leave:
                self.sizes.add_static(f"c{i}_{axis}")

    def carry_place(self, i: int, start: str) -> Place:
        shape = self.inner.carries[i].type.shape
        sizes = [
            f"c{i}_{axis}" if known is None else str(known) for axis, known in enumerate(shape)
        ]
        return Place(start, tuple(sizes), self.sizes.contiguous_strides(sizes), memory=f"c{i}")

    def next_carry(self, i: int, value: Variable, held: dict[Variable, str]) -> str:
        """Return what a carry becomes by assignment; arrays are written where they belong."""
        if value in held:
            return held[value]
        if not is_array(value):
            name = self.emitter.find(value).array
            assert name is not None
            return name
        place = self.emitter.place(value)
        if i not in self.in_place and place.start != f"dp{i}":
            target = CarryDestination(self, i).fit(place.sizes)
            if isinstance(value.owner, Apply) and value.owner.op.destroy_map:
                # The Op may have worked in the carry's own memory.
                self.source.line(f"u{i} = address({place.start}) == address(cp{i})")
                with self.source.block(f"if not u{i}:"):
                    self.emitter.write_copy(place, target)
            else:
                self.emitter.write_copy(place, target)
        return f"c{i}"

    def turn(self, i: int, value: Variable) -> None:
        """Let the two buffers of a carry change roles."""
        line, place = self.source.line, self.emitter.place(value)
        if (
            place.start != f"dp{i}"
            and isinstance(value.owner, Apply)
            and value.owner.op.destroy_map
        ):
            with self.source.block(f"if not u{i}:"):
                self._swap(i)
        else:
            self._swap(i)
        changed = self.changed_sizes(i, place.sizes)
        if changed:
            with self.source.block(f"if {' or '.join(f'{a} != {b}' for a, b in changed)}:"):
                self.write_spare(i, place.sizes)
                for own, size in changed:
                    line(f"{own} = {size}")

    def _swap(self, i: int) -> None:
        self.source.line(f"cp{i}, dp{i} = dp{i}, cp{i}")
        self.source.line(f"q{i} = not q{i}")

    def changed_sizes(self, i: int, sizes: tuple[str, ...]) -> list[tuple[str, str]]:
        """Return the sizes of a carry that may be others than before.

        Raises
        ------
        SizesChangeError
        """
        own = [f"c{i}_{axis}" for axis in range(len(sizes))]
        if self.leave:
            for mine, size in zip(own, map(self.sizes.same, sizes), strict=True):
                if not self.sizes.is_static(size):
                    raise SizesChangeError
                self.sizes.require_equal(mine, size, self.leave)
            return []
        return [
            (mine, self.sizes.same(size))
            for mine, size in zip(own, sizes, strict=True)
            if self.sizes.same(mine) != self.sizes.same(size)
        ]

    def write_spare(self, i: int, sizes: tuple[str, ...]) -> None:
        """Write that the buffer which is not read gets another shape."""
        line, name = self.source.line, self.source.name("g")
        dtype = self.emitter._dtype(self.inner.carries[i])
        line(f"{name} = new_array({', '.join([dtype, *map(self.sizes.same, sizes)])})")
        with self.source.block(f"if q{i}:"):
            line(f"c{i} = {name}")
        with self.source.block("else:"):
            line(f"d{i} = {name}")
        line(f"dp{i} = pointer({name})")

    def final_carry(self, i: int) -> str:
        return f"c{i}" if is_array(self.inner.carries[i]) else super().final_carry(i)


class CarryDestination(Destination):
    """The buffer of a carry that is not read in this step; it takes any shape."""

    def __init__(self, writer: CarryWriter, number: int) -> None:
        super().__init__(writer.carry_place(number, f"dp{number}"), lambda *_: (SHAPE, SHAPE))
        self.writer, self.number = writer, number

    def fit(self, sizes: tuple[str, ...]) -> Place:
        """Return the buffer, made anew where it has another shape."""
        writer, i = self.writer, self.number
        changed = writer.changed_sizes(i, sizes)
        if changed:
            with writer.source.block(f"if {' or '.join(f'{a} != {b}' for a, b in changed)}:"):
                writer.write_spare(i, sizes)
        kept = tuple(map(writer.sizes.same, sizes))
        return replace(self.place, sizes=kept, strides=writer.sizes.contiguous_strides(kept))
