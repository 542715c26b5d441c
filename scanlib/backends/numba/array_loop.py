"""The function of a loop whose steps work on arrays.

All arrays of a step are places in memory (`places`): rows of sequences and histories, workspaces,
and for each carry two buffers that change roles from step to step, so that a step never writes
what it reads. Results are computed straight into the row or buffer that holds them. What a step
adds to a carry, or writes into a few places of it, is done in the carry's own buffer if nothing
else reads that.

Sizes are compared before the first step wherever they are known there. A carry may have another
shape after a step; its sizes are the one thing that is compared at every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytensor.graph.basic import Variable
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.subtensor import IncSubtensor
from pytensor.tensor.type import DenseTensorType

from scanlib.backends.numba.array_carries import (
    SHAPE,
    CarryDestination,
    CarryWriter,
    SizesChangeError,
    is_array,
)
from scanlib.backends.numba.array_emit import Emitter
from scanlib.backends.numba.array_values import Destination, is_zero_dim
from scanlib.backends.numba.body import prepare_body
from scanlib.backends.numba.contiguous import contiguous_steps
from scanlib.backends.numba.lazy import lazily
from scanlib.backends.numba.places import Place
from scanlib.backends.numba.pointers import address
from scanlib.ops.scan import Scan
from scanlib.source_keys import source_key

VERSION = source_key(__name__)


class ArrayLoopWriter(CarryWriter):
    """Writes the function of one loop."""

    version = VERSION
    emitter: Emitter

    def start(self, op: Scan) -> None:
        super().start(op)
        self.emitter = Emitter(self.source)
        self.sizes = self.emitter.sizes
        # The names of parts: of non-sequences, and of the carries' memory.
        self.source.reserve("wcdqu", max(op.signature.n_non_sequences, op.signature.n_carries))
        self.source.object("contiguous_steps", contiguous_steps)
        self.source.object("address", address)
        self.rows: dict[str, tuple[str, ...]] = {}  # the sizes of an array's rows
        self.in_place: set[int] = set()

    def write(self) -> tuple[Callable[..., Any], str | None]:
        """Return the loop's function and its cache key."""
        line, emitter = self.source.line, self.emitter
        self.write_checks()
        self.write_storage()
        self.source.mark_prelude()
        line("i = 0")
        line("stopped = False")
        with self.source.block("while i < steps and not stopped:"):
            self.write_step()
            line("i += 1")
        emitter.memory.allocate()
        self.source.finish_prelude("steps > 0")
        for i, variable in enumerate(self.inner.carries):
            if is_array(variable) and i not in self.in_place:
                with self.source.block(f"if q{i}:"):
                    line(f"c{i} = d{i}")
        self.write_return()
        return self.source.compile("scan_loop", self.arguments, self.version)

    def assume_kept_sizes(self, otherwise: Callable[..., Any], key: str) -> None:
        """Let carries keep their sizes; where they do not, another function runs."""
        kinds = [taps[0].type for taps in self.inner.taps]
        results = [(kind.dtype, kind.ndim + 1) for kind in kinds]
        results += [(part.type.dtype, part.type.ndim) for part in self.result.carries]
        results += [(part.type.dtype, part.type.ndim + 1) for part in self.result.outputs]
        name = self.source.function(lazily(otherwise, key, results, True), f"other {key}", "other")
        self.leave = f"return {name}(({', '.join(self.arguments)},))"
        self.source.check_before_loop("False", self.leave)  # the first of all checks

    # Before the first step

    def write_storage(self) -> None:
        line, emitter = self.source.line, self.emitter
        line(f"capacity = min(steps, {self.first_capacity})" if self.grows else "capacity = steps")
        for i, name in enumerate(self.outer.non_sequences):
            variable = self.inner.non_sequences[i]
            if is_zero_dim(variable.type):
                line(f"w{i} = as_scalar({name})")
                emitter.bind_scalar(variable, self.sizes.add_static(f"w{i}"))
            elif not is_array(variable):
                emitter.bind_opaque(variable, name)
            else:
                line(f"wa{i} = contiguous({name})")
                line(f"wp{i} = pointer(wa{i})")
                emitter.memory.arrays.append(f"wa{i}")
                emitter.bind_array(variable, f"wa{i}", f"wp{i}", fixed=True)
        for i, name in enumerate(self.outer.carries):
            self.write_carry_storage(i, name)
        for i, variable in enumerate(self.inner.rows):
            if is_array(variable):
                name = self.outer.sequences[i]
                line(f"xa{i} = contiguous_steps({name})")
                line(f"xp{i} = pointer(xa{i})")
                line(f"xs{i} = xa{i}.strides[0] // xa{i}.itemsize")
                emitter.memory.arrays.append(f"xa{i}")
                self.name_rows(f"xa{i}", variable)
        for i in range(self.signature.n_states):
            self.write_state_storage(i)
            if not self.scalar_state[i]:
                line(f"hp{i} = pointer(h{i})")
                self.name_rows(f"h{i}", self.inner.taps[i][0])
        self.write_output_storage()
        for i, value in enumerate(self.result.outputs):
            if is_array(value) and self.known_rows[i]:
                line(f"zp{i} = pointer(z{i})")
                self.name_rows(f"z{i}", value)

    def name_rows(self, array: str, variable: Variable) -> None:
        """Name the sizes of an array's rows."""
        self.sizes.add_static(array)
        sizes = []
        for axis, known in enumerate(variable.type.shape):
            size = self.sizes.define(f"{array}.shape[{axis + 1}]", array)
            if known is not None:
                size = self.sizes.require_equal(size, str(known), SHAPE)
            sizes.append(size)
        self.rows[array] = tuple(sizes)

    def row_place(self, array: str, start: str) -> Place:
        sizes = tuple(map(self.sizes.same, self.rows[array]))
        return Place(start, sizes, self.sizes.contiguous_strides(sizes), memory=array)

    def row_items(self, array: str) -> str:
        return self.sizes.product(*self.rows[array])

    # One step

    def write_step(self) -> None:
        line, emitter = self.source.line, self.emitter
        line("t = steps - 1 - i" if self.reverse else "t = i")
        if self.grows:
            self.write_growth()
        nodes = emitter.plan_joins(self.body.fgraph, self.body.fgraph.toposort())
        emitter.plan(nodes, self.body.fgraph.outputs)
        self.bind_inputs()
        self.choose_destinations()
        for position, node in enumerate(nodes):
            emitter.position = position
            emitter.emit(node)
        results = self.result
        held = {
            value: emitter.scalar(value)
            for value in self.body.fgraph.outputs
            if is_zero_dim(value.type)
        }
        if results.stop is not None:
            line(f"stopped = {held[results.stop]} != 0")
        for i, value in enumerate(results.states):
            if self.scalar_state[i]:
                self.write_state(i, held[value])
            else:
                self.store(value, self.state_row(i), self.state_failure(i))
        for i, value in enumerate(results.outputs):
            if is_array(value):
                self.store_output(i, value)
            else:
                line(f"z{i}[t] = {held[value]}")
        names = [self.next_carry(i, value, held) for i, value in enumerate(results.carries)]
        self.advance([held.get(value, "") for value in results.states], names)
        for i, value in enumerate(results.carries):
            if is_array(value) and i not in self.in_place:
                self.turn(i, value)
        for name in emitter.called:
            line(f"keep({name})")

    def bind_inputs(self) -> None:
        line, emitter = self.source.line, self.emitter
        for i, variable in enumerate(self.inner.rows):
            if is_array(variable):
                line(f"xq{i} = shift(xp{i}, t * xs{i})")
                emitter.bind_place(variable, self.row_place(f"xa{i}", f"xq{i}"))
            else:
                line(f"x{i}_t = {self.outer.sequences[i]}[t]")
                emitter.bind_scalar(variable, f"x{i}_t")
        for i, taps in enumerate(self.inner.taps):
            for offset, variable in zip(self.signature.taps[i], taps, strict=True):
                self.bind_tap(i, offset, variable)
        for i, variable in enumerate(self.inner.carries):
            if is_array(variable):
                emitter.bind_place(variable, self.carry_place(i, f"cp{i}"))
            elif is_zero_dim(variable.type):
                emitter.bind_scalar(variable, f"c{i}")
            else:
                emitter.bind_opaque(variable, f"c{i}")

    def bind_tap(self, i: int, offset: int, variable: Variable) -> None:
        if self.in_registers[i]:
            self.emitter.bind_scalar(variable, f"r{i}_{-offset}")
            return
        name, row = f"y{i}_{-offset}", self.tap_row(i, offset)
        if self.scalar_state[i]:
            self.source.line(f"{name} = h{i}[{row}]")
            self.emitter.bind_scalar(variable, name)
            return
        self.source.line(f"{name} = shift(hp{i}, ({row}) * {self.row_items(f'h{i}')})")
        self.emitter.bind_place(variable, self.row_place(f"h{i}", name))

    # Where results go

    def choose_destinations(self) -> None:
        """Let results go straight into the row or the buffer that will hold them."""
        destinations = self.emitter.destinations
        for i, value in enumerate(self.result.states):
            if not self.scalar_state[i] and self.is_free(value):
                destinations[value] = Destination(self.state_row(i), self.state_failure(i))
        for i, value in enumerate(self.result.outputs):
            if is_array(value) and self.known_rows[i] and self.is_free(value):
                destinations[value] = Destination(self.output_row(i), self.output_failure(i))
        for i, value in enumerate(self.result.carries):
            if not is_array(value) or not self.is_free(value):
                continue
            if self.can_stay(i, value):
                self.in_place.add(i)
                place = self.carry_place(i, f"cp{i}")
                destinations[value] = Destination(place, lambda *_: (SHAPE, SHAPE))
            else:
                destinations[value] = CarryDestination(self, i)

    def is_free(self, value: Variable) -> bool:
        return value.owner is not None and value not in self.emitter.destinations

    def can_stay(self, i: int, value: Variable) -> bool:
        """Whether the new value of a carry may be written over the old one."""
        carry, node = self.inner.carries[i], value.owner
        clients = self.body.fgraph.clients[carry]
        if len(clients) != 1 or clients[0][0] is not node:
            return False
        same = value.type.dtype == carry.type.dtype and all(
            (a == 1) == (b == 1) for a, b in zip(value.type.shape, carry.type.shape, strict=True)
        )
        if isinstance(node.op, Elemwise):
            return same
        return isinstance(node.op, IncSubtensor) and clients[0][1] == 0

    def state_row(self, i: int) -> Place:
        name = f"hr{i}"
        if name not in self.rows:
            self.rows[name] = ()
            self.source.line(
                f"{name} = shift(hp{i}, ({self.written_row(i)}) * {self.row_items(f'h{i}')})"
            )
        return self.row_place(f"h{i}", name)

    def output_row(self, i: int) -> Place:
        name = f"zr{i}"
        if name not in self.rows:
            self.rows[name] = ()
            self.source.line(f"{name} = shift(zp{i}, t * {self.row_items(f'z{i}')})")
        return self.row_place(f"z{i}", name)

    def state_failure(self, i: int) -> Callable[[int, str, str], tuple[str, str]]:
        return lambda axis, expected, size: self._failures(
            self.messages.state_shape(i, axis), expected, size
        )

    def output_failure(self, i: int) -> Callable[[int, str, str], tuple[str, str]]:
        return lambda axis, expected, size: self._failures(
            self.messages.output_shape(i, axis), expected, size
        )

    def _failures(self, message: str, expected: str, size: str) -> tuple[str, str]:
        numbers = f"np.int64({expected}), np.int64({size})"
        return _at(message, "i", numbers), _at(message, "0", numbers)

    # Storing

    def store(
        self, value: Variable, row: Place, failure: Callable[[int, str, str], tuple[str, str]]
    ) -> None:
        """Write a result into its row, if it is not there yet."""
        place = self.emitter.place(value)
        if place.start == row.start:
            return
        self.emitter.at_destination(Destination(row, failure), place.sizes)
        self.emitter.write_copy(place, row)

    def store_output(self, i: int, value: Variable) -> None:
        if not self.known_rows[i]:
            self.allocate_output(i, value)
        self.store(value, self.output_row(i), self.output_failure(i))

    def allocate_output(self, i: int, value: Variable) -> None:
        """Write the allocation of an output whose row shape only a step tells."""
        sizes = list(map(self.sizes.same, self.emitter.place(value).sizes))
        dtype = self.emitter._dtype(value)
        array = f"z{i} = new_array({', '.join([dtype, 'capacity', *sizes])})"
        if self.sizes.is_static(*sizes):
            self.source.before_loop(array)
            self.source.before_loop(f"zp{i} = pointer(z{i})")
            self.rows[f"z{i}"] = tuple(sizes)
            return
        self.source.before_loop(f"zp{i} = pointer(z{i})")
        with self.source.block("if i == 0:"):
            self.source.line(array)
            self.source.line(f"zp{i} = pointer(z{i})")
        names = [f"z{i}_{axis}" for axis in range(len(sizes))]
        for axis, name in enumerate(names):
            self.source.line(f"{name} = z{i}.shape[{axis + 1}]")
        self.rows[f"z{i}"] = tuple(names)

    def write_growth(self) -> None:
        super().write_growth()
        with self.source.block("if i > 0:"):
            for i, untraced in enumerate(self.signature.untraced):
                if not untraced and not self.scalar_state[i]:
                    self.source.line(f"hp{i} = pointer(h{i})")
            for i, value in enumerate(self.result.outputs):
                if is_array(value):
                    self.source.line(f"zp{i} = pointer(z{i})")

    # After the last step

    def write_return(self) -> None:
        for name in self.emitter.memory.arrays:
            self.source.line(f"keep({name})")
        super().write_return()


def write(op: Scan) -> tuple[Callable[..., Any], str | None]:
    """Return the function of a loop and its cache key."""
    body = prepare_body(op)
    function, key = ArrayLoopWriter(op, body).write()
    writer = ArrayLoopWriter(op, body)
    carries = writer.result.carries
    if key is None or op.signature.has_stop or not any(map(is_array, carries)):
        return function, key
    if not all(isinstance(part.type, DenseTensorType) for part in carries):
        return function, key
    writer.assume_kept_sizes(function, key)
    try:
        return writer.write()
    except SizesChangeError:
        return function, key


def _at(message: str, step: str, numbers: str) -> str:
    return f"raise StepShapeError({message!r}, np.int64({step}), {numbers})"
