r"""Loops whose steps work on arrays: one step after the other, all results of a step in memory.

Rows of sequences and histories are where they are in the loop's inputs and outputs, results of a
step in a workspace that all steps use (`scanlib.kernels.arrays`); what a result of the loop is made
of is computed where it belongs. A carry has two buffers, its output and one in the workspace, which
change roles from step to step, so that no step writes what it reads; it keeps its size.

Inputs whose items are not in order of memory are copied, once, before the first step.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from pytensor.graph.basic import Variable
from pytensor.tensor.elemwise import Elemwise

from scanlib._compat import INDEX_WRITES, thaw_graph
from scanlib.kernels.arrays.array_step import Destination, Step
from scanlib.kernels.arrays.nests import deliver, write_copy
from scanlib.kernels.arrays.places import Place, Workspace
from scanlib.kernels.arrays.sizes import Check, Size, Sizes, product
from scanlib.kernels.language import POINTER, Block, Kernel, Value
from scanlib.kernels.program import ArrayType, Kernels, LoopProgram, Output, Words
from scanlib.kernels.scalars import Scalars
from scanlib.kernels.spans import itemsize
from scanlib.ops.scan import Scan
from scanlib.schedules.array_kernels import (
    bind_input,
    inline,
    items_of,
    place_input,
    size_values,
    step_work,
    write_checks,
)
from scanlib.schedules.elementwise import Array, Checks, Loop, Start, Storage
from scanlib.schedules.step_by_step import TakesSteps
from scanlib.schedules.turns import steps_of_a_turn

LONGEST_TURN = 64  # steps


class ArrayLoop(Loop):
    """A loop whose steps work on arrays.

    Raises
    ------
    NoKernelError
        Where an input is no array.
    """

    def __init__(self, op: Scan) -> None:
        graph = thaw_graph(op.body)
        inline(graph)
        types = op.outer_input_types()
        super().__init__(op, graph, types)
        self.outer = self.signature.split_inputs([f"x{i}" for i in range(len(types))])
        self.outputs = tuple(self._outputs())
        self.words = Words(self.inputs, self.outputs, self.functions)
        self.arrays = {array.name: array for array in self._arrays()}
        # What the step turns out to need.
        self.workspace = Workspace(Sizes())
        self.checks: list[Check] = []
        self.work: Size = 1  # numbers that it computes
        self.rows: dict[int, tuple[Size, ...]] = {}  # the sizes of a stacked output's rows

    def _outputs(self) -> Iterator[Output]:
        signature, inner = self.signature, self.inner
        for i, depth in enumerate(signature.depths):
            variable = inner.taps[i][0]
            kind = ArrayType(variable.type.dtype, 1 + variable.type.ndim)
            yield Output(kind, not signature.untraced[i], depth)
        for variable in inner.carries:
            yield Output(ArrayType(variable.type.dtype, variable.type.ndim))
        for variable in self.result.outputs:
            yield Output(ArrayType(variable.type.dtype, 1 + variable.type.ndim), grows=True)

    def _arrays(self) -> Iterator[Array]:
        outer, n = self.outer, self.signature.n_states
        leading = {*outer.initials, *outer.sequences}
        for number, kind in enumerate(self.inputs):
            lead = int(f"x{number}" in leading)
            axes = tuple(range(kind.ndim - lead))
            yield Array(f"x{number}", False, number, kind.dtype, axes, lead)
        m = n + self.signature.n_carries
        for number, output in enumerate(self.outputs):
            letter = "h" if number < n else "c" if number < m else "z"
            first = {"h": 0, "c": n, "z": m}[letter]
            lead = int(letter != "c")
            axes = tuple(range(output.type.ndim - lead))
            name = f"{letter}{number - first}"
            yield Array(name, True, number, output.type.dtype, axes, lead)


class PrepareArrays(Checks[ArrayLoop]):
    """Writes the kernel that checks the inputs and computes the sizes of everything."""

    def __init__(self, loop: ArrayLoop) -> None:
        super().__init__(loop, "prepare")
        self.before = Block()
        self.values = size_values(self, self.before, lambda: loop.workspace)

    def kernel(self) -> Kernel:
        loop, w, words = self.loop, self.w, self.words
        steps = self.checked_steps()
        write_checks(self, self.values, loop.checks, steps > 0)
        capacity = self.capacity(steps)
        n, m = loop.signature.n_states, loop.signature.n_states + loop.signature.n_carries
        for number in range(len(loop.outputs)):
            if number < n:
                dims = self.state_dims(number, capacity)
            elif number < m:
                dims = self.carry_dims(number - n)
            else:
                dims = [capacity, *map(self.values.value, loop.rows[number - m])]
            for axis, size in enumerate(dims):
                self.out.write_word(words.outputs[number] + 1 + axis, size)
        space = self.space_bytes() + self.values.value(loop.workspace.end)
        self.out.write_word(words.workspace_size, space)
        turn = steps_of_a_turn(w, self.values.value(loop.work), LONGEST_TURN)
        self.out.write_word(words.turn, turn)
        for word, value in ((words.part, 0), (words.parts, 1), (words.choice, 0)):
            self.out.write_word(word, value)
        w.block.statements[:0] = self.before.statements
        return self.out.kernel(runs_once=True)


class ArraysRun(TakesSteps[ArrayLoop]):
    """Writes the kernel that takes the steps."""

    def __init__(self, loop: ArrayLoop) -> None:
        super().__init__(loop, "arrays")
        self.first, self.before = Block(), Block()
        self.scalars = Scalars(self.w, self.call_outside)
        self.values = size_values(self, self.first, lambda: self.body.workspace)

    def kernel(self) -> Kernel:
        loop, w, words = self.loop, self.w, self.words
        self.storage = Storage(self)
        self.steps = self.out.number(words.steps, "steps")
        self.begin = self.out.number(words.begin, "begin")
        space = w.offset(
            self.out.word(words.workspace, POINTER, "workspace"), self.storage.end_of_spaces
        )
        memory, w.block.statements = w.block.statements, []
        self.body = Step(
            w, self.scalars, self.values, space, self.before, loop.failure, self.routine
        )
        self.body.messages = loop.messages.at_step(loop.inner)
        self.place_inputs()
        taken = self.take_steps()
        self.finish_carries(taken)
        self.finish(taken)
        w.block.statements[:0] = [
            *memory,
            *self.first.statements,
            *self.before.statements,
        ]
        loop.workspace, loop.checks = self.body.workspace, self.body.sizes.checks
        loop.work = step_work(self.body, loop.graph)
        return self.out.kernel()

    # Before the first step

    def place_inputs(self) -> None:
        """Write where sequences, non-sequences and the second buffers of carries are."""
        loop, body = self.loop, self.body
        self.given_places: dict[str, Place] = {}
        with self.w.inside(self.before):
            for name in (*loop.outer.sequences, *loop.outer.non_sequences):
                self.given_places[name] = place_input(self, body, loop.arrays[name])
        self.second: dict[int, Place] = {}
        for i, name in enumerate(loop.outer.carries):
            if items_of(loop.arrays[name]) and not self.stays(i):
                self.second[i] = body.pinned(loop.arrays[name].dtype, items_of(loop.arrays[name]))

    # One step

    def step(self, i: Value) -> None:
        loop, body, w = self.loop, self.body, self.w
        self.i = body.i = i
        self.t = self.steps - 1 - i if loop.reverse else i
        self.bind_inputs()
        self.results = list(self.all_destinations())
        self.choose_destinations()
        body.emit(loop.graph)
        results = loop.result
        if results.stop is not None:
            w.assign(self.stopped, self.scalars.truth(body.number(results.stop)))
        for value in loop.graph.outputs:
            if value.type.ndim == 0:
                body.number(value)  # it is read before anything is overwritten
        for value, destination in self.results:
            deliver(body, value, destination)

    def bind_inputs(self) -> None:
        loop, body = self.loop, self.body
        for variable, name in zip(loop.inner.rows, loop.outer.sequences, strict=True):
            whole = self.given_places[name]
            row = self.w.offset(whole.pointer, body.bytes(self.t, whole.strides[0]))
            body.bind_place(variable, Place(row, whole.dtype, whole.sizes[1:], whole.strides[1:]))
        for i, taps in enumerate(loop.inner.taps):
            for offset, variable in zip(loop.signature.taps[i], taps, strict=True):
                body.bind_place(variable, self.row_place(f"h{i}", offset))
        for i, variable in enumerate(loop.inner.carries):
            body.bind_place(variable, self.carry(i, 0))
        for variable, name in zip(loop.inner.non_sequences, loop.outer.non_sequences, strict=True):
            bind_input(body, variable, name, self.given_places[name])
            body.fixed.add(variable)

    def row_place(self, name: str, offset: int = 0) -> Place:
        """Return a row of a state's history."""
        loop, i = self.loop, int(name[1:])
        pointer = self.w.offset(self.memory_of(i), self.row_of(i, offset))
        sizes = items_of(loop.arrays[loop.outer.initials[i]])
        return self.contiguous(pointer, loop.arrays[name].dtype, sizes)

    def contiguous(self, pointer: Value, dtype: str, sizes: tuple[Size, ...]) -> Place:
        sizes = tuple(map(self.body.sizes.same, sizes))
        strides = self.body.sizes.contiguous_strides(itemsize(dtype), sizes)
        return Place(pointer, dtype, sizes, strides)

    def carry(self, i: int, ahead: int) -> Place:
        """Return the buffer that holds a carry, or, one step ahead, the one for its next value."""
        loop, w = self.loop, self.w
        name = loop.outer.carries[i]
        first = self.contiguous(
            self.data(f"c{i}"), loop.arrays[name].dtype, items_of(loop.arrays[name])
        )
        if i not in self.second:
            return first
        is_second = ((self.i + ahead) & 1).differs(0)
        pointer = w.select(is_second, self.second[i].pointer, first.pointer)
        return first.view(list(first.sizes), list(first.strides), pointer)

    def stays(self, i: int) -> bool:
        """Whether the new value of a carry may be written over the old one.

        Only its own node reads the old one, at the same index and before it writes there.
        """
        loop = self.loop
        carry, value = loop.inner.carries[i], loop.result.carries[i]
        node = value.owner
        clients = loop.graph.clients[carry]
        if node is None or len(clients) != 1 or clients[0][0] is not node:
            return False
        if loop.graph.outputs.count(value) > 1:
            return False
        same = value.type.dtype == carry.type.dtype and all(
            (a == 1) == (b == 1) for a, b in zip(value.type.shape, carry.type.shape, strict=True)
        )
        if isinstance(node.op, Elemwise):
            return same and len(node.outputs) == 1
        return isinstance(node.op, INDEX_WRITES) and clients[0][1] == 0

    # Where results go

    def all_destinations(self) -> Iterator[tuple[Variable, Destination]]:
        """Yield each result, with where it goes."""
        loop = self.loop
        for i, value in enumerate(loop.result.states):
            texts = tuple(loop.messages.state_shape(i, axis) for axis in range(value.type.ndim))
            yield value, Destination(partial(self.next_row, i), "StepShapeError", texts)
        for i, value in enumerate(loop.result.outputs):
            texts = tuple(loop.messages.output_shape(i, axis) for axis in range(value.type.ndim))
            yield value, Destination(partial(self.output_row, i), "StepShapeError", texts)
        for i, value in enumerate(loop.result.carries):
            texts = (CARRY,) * value.type.ndim
            yield value, Destination(partial(self.next_carry, i), CARRY_ERROR, texts)

    def choose_destinations(self) -> None:
        """Let results be computed in the row or the buffer that will hold them."""
        destinations = self.body.destinations
        for value, destination in self.results:
            if value.owner is not None and value.type.ndim and value not in destinations:
                destinations[value] = destination

    def next_row(self, i: int, sizes: tuple[Size, ...]) -> Place:
        return self.row_place(f"h{i}")

    def output_row(self, i: int, sizes: tuple[Size, ...]) -> Place:
        """Return the row of an output; the first result says how large it is."""
        body, array = self.body, self.loop.arrays[f"z{i}"]
        sizes = self.loop.rows.setdefault(i, sizes)
        row = body.sizes.same(product(array.itemsize, *sizes))
        pointer = self.w.offset(self.data(f"z{i}"), body.bytes(self.t, row))
        return self.contiguous(pointer, array.dtype, sizes)

    def next_carry(self, i: int, sizes: tuple[Size, ...]) -> Place:
        return self.carry(i, 1)

    # After the last step

    def finish_carries(self, taken: Value) -> None:
        """Write carries that are in their second buffers to the outputs."""
        loop, w = self.loop, self.w
        with w.when((taken & 1).differs(0)):
            for i, place in self.second.items():
                array = loop.arrays[loop.outer.carries[i]]
                output = self.contiguous(self.data(f"c{i}"), array.dtype, items_of(array))
                write_copy(self.body, place, output)


CARRY_ERROR, CARRY = "CarryShapeError", "a carry gets another shape"


def array_program(op: Scan) -> LoopProgram:
    """Return the kernels of a loop whose steps work on arrays.

    Raises
    ------
    NoKernelError
        If an Op or a dtype of its body has none.
    """
    loop = ArrayLoop(op)
    run = ArraysRun(loop).kernel()
    prepare = PrepareArrays(loop).kernel()
    codes = [code for code, failure in loop.failures.items() if failure.error == CARRY_ERROR]
    rings = any(map(loop.has_ring, range(loop.signature.n_states)))
    return LoopProgram(
        name=op.name or "loop",
        inputs=loop.inputs,
        outputs=loop.outputs,
        words=loop.words,
        kernels=Kernels(prepare, Start(loop).kernel(), (run,)),
        failures=loop.failures,
        functions=tuple(loop.functions),
        may_be_full=loop.grows,
        may_stop=loop.signature.has_stop,
        has_workspace=rings or bool(loop.workspace.parts),
        unfit=codes[0] if codes else 0,
    )
