"""One step of a loop over arrays: how its variables are held, and which rule writes which Op.

A variable without axes is a number; an integer that is known before the first step is a size as
well (`scanlib.kernels.arrays.sizes`). Every other one has a `Place` in memory. Elementwise results
that one other elementwise Op, reduction or join reads, at the same indices, are not stored at all:
they are computed where they are read. So are those of which a few single items are read.

An Op has one rule, a function that takes the step and the node; the modules beside this one have
them. An Op without a rule has no kernel (`NoKernelError`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import toposort, walk
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarMaximum, ScalarMinimum, ScalarType
from pytensor.tensor.basic import Alloc, Join
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, Shape, Shape_i
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.type import TensorType, integer_dtypes

from scanlib._compat import INDEX_READS, INDEX_WRITES, join_of
from scanlib.kernels.arrays.sizes import (
    Changing,
    Check,
    Limits,
    Size,
    SizeValues,
    changes,
    combined,
    limits,
    limits_of,
    limits_of_node,
    product,
)
from scanlib.kernels.arrays.workspace import Part, Place, Workspace, bytes_of, is_contiguous
from scanlib.kernels.language import DTYPES, Block, Type, Value, Writer
from scanlib.kernels.scalars import NoKernelError, Number, Scalars, parts_of, real
from scanlib.kernels.spans import itemsize, lane_pieces, load_number, store_number
from scanlib.lengths.numbers import constant_index
from scanlib.ops.graph import ByOp
from scanlib.ops.messages import NodeMessages

MOST_ITEMS = 4  # that are read of a result which is not stored
MOST_CONSTANTS = 1024  # numbers of one array that a kernel writes itself

Rule = Callable[["Step", Apply], None]
RULES: ByOp[Rule] = ByOp()
rule = RULES.register

# What return the results of an Op that may be written over what they come from, which stands first
# in each pair.
WRITES: ByOp[Callable[[Apply], list[tuple[Variable, Variable]]]] = ByOp()
writes = WRITES.register
writes(*INDEX_WRITES, CheckAndRaise)(lambda node: [(node.inputs[0], node.outputs[0])])


def written(node: Apply) -> list[tuple[Variable, Variable]]:
    """Return the arrays that a node may write into, each with what it is then."""
    found = WRITES.of(node.op)
    pairs = [] if found is None else found(node)
    return [pair for pair in pairs if isinstance(pair[0].type, TensorType) and pair[0].type.ndim]


def before_write(array: Variable) -> Variable | None:
    """Return what an array was before its node wrote into it; None if that does not."""
    pairs = [] if array.owner is None else written(array.owner)
    return next((base for base, out in pairs if out is array), None)


class StepOrder:
    """In which order the nodes of a step are computed, and what may be written over what.

    Nodes that write into arrays come as late as they can: others have read these by then.
    """

    def __init__(self, graph: FunctionGraph) -> None:
        self.graph = graph
        self.nodes = self._writes_last()
        self.position = {node: k for k, node in enumerate(self.nodes)}

    def _writes_last(self) -> list[Apply]:
        nodes = self.graph.toposort()
        ranks = {node: (bool(written(node)), k) for k, node in enumerate(nodes)}
        missing = {node: {inp.owner for inp in node.inputs if inp.owner} for node in nodes}
        sorter, found, ready = TopologicalSorter(missing), [], list[tuple[bool, int]]()
        sorter.prepare()
        while sorter.is_active():
            for node in sorter.get_ready():
                heappush(ready, ranks[node])
            found.append(nodes[heappop(ready)[1]])
            sorter.done(found[-1])
        return found

    def overwrites(self, array: Variable) -> bool:
        """Whether an array may be written over what it was before: nobody else reads that memory
        from then on."""
        base, node = before_write(array), array.owner
        return node.inputs.count(base) == 1 and not self._is_read_from(node, base, self.copied)

    @cached_property
    def copied(self) -> set[Variable]:
        """The parts of arrays, of fewer axes, that are read after their array is written over: they
        are copied as soon as they can be, and the array is not."""
        found: set[Variable] = set()
        for node in self.nodes:
            for base, _ in written(node):
                for client, _ in self.graph.clients[base]:
                    part = client.outputs[0] if isinstance(client.op, Subtensor) else base
                    if 0 < part.type.ndim < base.type.ndim and self._is_read_from(node, part):
                        found.add(part)
        return found

    def _is_read_from(self, node: Apply, base: Variable, copied: Collection[Variable] = ()) -> bool:
        """Whether the memory of a variable is read when a node writes there, by others than that,
        or later; `copied` parts of it are read before."""
        graph, position = self.graph, self.position
        is_written = any(base is own for own, _ in written(node))

        def readers(variable: Variable) -> list[Apply]:
            clients = [client for client, _ in graph.clients[variable]]
            by_others = is_written and variable is base
            return [c for c in clients if c is not node] if by_others else clients

        def read_later(variable: Variable) -> list[Variable]:
            nodes = [] if variable in graph.outputs else readers(variable)
            outs = [(reader, out) for reader in nodes for out in reader.outputs]
            return [o for n, o in outs if o not in copied and _reads_when_read(graph, n, o)]

        return any(
            variable in graph.outputs
            or any(position[reader] >= position[node] for reader in readers(variable))
            for variable in walk([base], read_later)
        )


def _reads_when_read(graph: FunctionGraph, node: Apply, out: Variable) -> bool:
    """Whether a result may read what it is computed of when it is read itself: views do, and what
    is computed where it is read."""
    if isinstance(node.op, Elemwise):
        return out.type.ndim > 0 and _is_computed_where_read(graph, out)
    return out.type.ndim > 0 and not isinstance(node.op, (CAReduce, Dot, *INDEX_READS[1:]))


@dataclass(frozen=True)
class Destination:
    """Memory that a result of the step must end in: `place` returns where a result of some sizes
    goes. The `templates` of `error`, one for each axis, get the step, the size of the place, and
    the result's."""

    place: Callable[[tuple[Size, ...]], Place]
    error: str
    templates: tuple[str, ...]


class Step:
    """Writes the nodes of a body; `node` is the one that is written.

    `fail` takes the name of an exception, a message, and how many numbers it shows, and returns the
    code of that failure; `library` takes a function outside and returns its address; `space` is the
    address of the workspace, `frame` returns that of the kernel's frame. `before` is what the
    kernel does before the first step, `i` the number of the step, None outside of loops. `fixed`
    are inputs of a loop that are the same for all steps, and views of them; `by_item` are arrays of
    which single items are written, before or after; `copied` parts of arrays are read right away.
    """

    messages = NodeMessages()
    frame: Callable[[], Value]
    i: Value | None = None
    node: Apply | None = None

    def __init__(
        self,
        writer: Writer,
        scalars: Scalars,
        values: SizeValues,
        workspace: Workspace,
        space: Value,
        fail: Callable[[str, str, int], int],
        library: Callable[[Any], Value],
    ) -> None:
        self.writer, self.scalars, self.size_values = writer, scalars, values
        self.workspace, self.space, self.fail, self.library = workspace, space, fail, library
        self.sizes, self.before = workspace.sizes, Block()
        self.numbers: dict[Variable, Number] = {}
        self.known: dict[Variable, Size] = {}
        self.changing: dict[Variable, Changing] = {}
        self._limited: dict[Variable, Limits] = {}
        self.fixed: set[Variable] = set()
        self.items: dict[Variable, list[Variable]] = {}  # of arrays that are made of numbers
        self.places: dict[Variable, Place] = {}
        self.deferred: set[Variable] = set()
        self.copied: set[Variable] = set()
        self.by_item: set[Variable] = set()
        self.destinations: dict[Variable, Destination] = {}
        self.arrived: dict[Variable, tuple[Destination, Value]] = {}
        self.position, self._changes = -1, 0
        self.last_use: dict[Variable, float] = {}
        self.readers: dict[Part, set[Variable]] = {}
        self._claimed: set[Part] = set()

    # The whole step

    def emit(self, order: StepOrder) -> None:
        """Write all nodes of a body whose inputs are bound."""
        graph, nodes = order.graph, order.nodes
        for position, node in enumerate(nodes):
            for inp in node.inputs:
                self.last_use[inp] = position
        for out in graph.outputs:
            self.last_use[out] = float("inf")
        self._plan_fusion(graph, nodes)
        self._plan_writes(order)
        for position, node in enumerate(nodes):
            self.position, self.node = position, node
            if node.outputs[0] not in self.deferred:
                try:
                    self.apply(node)
                except NoKernelError as error:
                    error.node = node
                    raise
                self._finish_node()

    def apply(self, node: Apply) -> None:
        found = RULES.of(node.op)
        if found is None:
            raise NoKernelError(f"{node.op} has no kernel for arrays")
        for variable in (*node.inputs, *node.outputs):
            if isinstance(variable.type, TensorType | ScalarType):
                parts_of(variable.type.dtype)
        found(self, node)

    def _plan_fusion(self, graph: FunctionGraph, nodes: Sequence[Apply]) -> None:
        """Choose the elementwise results that are computed where they are read.

        What they read is not given back before that.
        """
        for node in reversed(nodes):
            out = node.outputs[0]
            if not isinstance(node.op, Elemwise) or len(node.outputs) > 1:
                continue
            if not _is_computed_where_read(graph, out):
                continue
            self.deferred.add(out)
            later = [client.outputs[0] for client, _ in graph.clients[out]]
            uses = [self.last_use[read] for read in later if read in self.deferred]
            self.last_use[out] = last = max([self.last_use[out], *uses])
            for inp in node.inputs:
                self.last_use[inp] = max(self.last_use[inp], last)

    def _plan_writes(self, order: StepOrder) -> None:
        """Choose the arrays that are computed where those go that differ in what a node writes."""
        self.copied = order.copied
        for node in reversed(order.nodes):
            if isinstance(node.op, INDEX_WRITES) and node.inputs[1].type.ndim == 0:
                self.by_item |= {node.inputs[0], node.outputs[0]}
            for base, out in written(node):
                if out not in self.destinations or base in self.destinations:
                    continue
                above = base.owner
                is_alone = above and isinstance(above.op, Elemwise) and len(above.outputs) == 1
                is_full = (
                    above and isinstance(above.op, Alloc) and isinstance(above.inputs[0], Constant)
                )
                is_made = is_alone or is_full or before_write(base) is not None
                if is_made and order.overwrites(out):
                    self.destinations[base] = self.destinations[out]

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget, afterwards, what is read in a part of a step that runs never or often."""
        numbers, places = dict(self.numbers), dict(self.places)
        changing = dict(self.changing)
        try:
            yield
        finally:
            constants = {v: place for v, place in self.places.items() if isinstance(v, Constant)}
            self.numbers, self.places = numbers, {**places, **constants}
            self.changing = changing

    # How variables are held

    def bind_number(self, variable: Variable, number: Number) -> None:
        self.numbers[variable] = number

    def bind_known(self, variable: Variable, size: Size) -> None:
        """Bind an integer that is known before the first step."""
        self.known[variable] = self.sizes.same(size)

    def bind_items(self, variable: Variable, numbers: Sequence[Number]) -> None:
        """Bind a vector whose items are numbers, besides where it lies."""
        self.items[variable] = [variable.type.clone(shape=())() for _ in numbers]
        self.numbers |= zip(self.items[variable], numbers, strict=True)

    def shape_of_items(self, variable: Variable) -> tuple[int, ...]:
        """Return the shape of an array that is made of numbers."""
        vector = variable.type.ndim == 1
        return (len(self.items[variable]),) if vector else variable.type.shape

    def store_items(self, variable: Variable, place: Place) -> None:
        """Write a vector that is made of numbers into memory of its size."""
        for k, member in enumerate(self.items[variable]):
            store_number(self.writer, place.pointer, k * place.itemsize, self.number(member))

    def bind_place(self, variable: Variable, place: Place) -> None:
        sizes = list(place.sizes)
        for axis, known in enumerate(variable.type.shape):
            if known is not None and sizes[axis] != known:
                text = f"axis {axis} has size {{}}, the type of the array says {known}"
                given = (sizes[axis],)
                sizes[axis] = self.require(*given, known, "ValueError", text, given, variable)
        place = place.view(sizes, place.strides)
        self.places[variable] = place
        if place.part is not None:
            self.readers.setdefault(place.part, set()).add(variable)

    def alias(self, out: Variable, inp: Variable) -> None:
        """Bind a variable to what another one is."""
        if inp in self.arrived and self.arrived[inp][0] is self.destinations.get(out):
            self.arrived[out] = self.arrived[inp]
        if inp in self.known:
            self.known[out] = self.known[inp]
        if inp in self.items:
            self.items[out] = self.items[inp]
        elif out.type.ndim == 0:
            self.numbers[out] = self.number(inp)
        else:
            self.bind_place(out, self.place(inp))

    def size_of(self, variable: Variable | int) -> Size:
        """Return an integer as a size, which changes from step to step if only these tell it."""
        number = constant_index(variable)
        if number is not None:
            return number
        assert isinstance(variable, Variable)
        if variable not in self.known and variable not in self.changing:
            derived = self._derived(variable)
            if derived is None:
                self._changes += 1
                value = self.writer.cast(real(self.number(variable)), "int64")
                self.changing[variable] = Changing(self._changes, value, self._limits(variable))
            else:
                self.known[variable] = derived
        found = self.known if variable in self.known else self.changing
        return self.sizes.same(found[variable])

    def _limits(self, variable: Variable) -> Limits:
        """Return known integers between which one of the step, or all of an array, are, as far as
        its nodes tell."""
        if self.is_known(variable):
            return limits(self.size_of(variable))
        node, is_integer = variable.owner, variable.type.dtype in integer_dtypes
        if isinstance(variable, Constant) and is_integer and variable.data.size:
            return int(variable.data.min()), int(variable.data.max())
        if node is None or not is_integer:
            return None, None
        if variable not in self._limited:
            chosen = _chosen_from(node)
            parts = list(map(self._limits, chosen or node.inputs))
            found = limits_of("choice", parts) if chosen else limits_of_node(node, parts)
            self._limited[variable] = found
        return self._limited[variable]

    def _derived(self, variable: Variable) -> Size | None:
        """Return an integer that is computed of known ones by way of other numbers, None if it is
        not."""
        found: dict[Variable, Any] = dict(self.known)
        for node in toposort([variable], blockers=list(found)):
            for inp in node.inputs:
                if isinstance(inp, Constant) and inp.type.dtype in DTYPES and inp.data.size == 1:
                    found[inp] = inp.data.item()
            is_number = isinstance(node.op, Elemwise) and node.outputs[0].type.ndim == 0
            if not is_number or not all(inp in found for inp in node.inputs):
                break
            parts = [found[inp] for inp in node.inputs]
            scalar = node.op.make_scalar_node(*node.inputs)
            found |= {out: combined((scalar, k), *parts) for k, out in enumerate(node.outputs)}
        return found.get(variable)

    def is_known(self, variable: Variable | int) -> bool:
        if isinstance(variable, int):
            return True
        if isinstance(variable, Constant):
            return np.size(variable.data) == 1 and np.dtype(variable.type.dtype).kind in "iub"
        return variable in self.known

    def number(self, variable: Variable) -> Number:
        """Return the number that a variable without axes is."""
        if variable not in self.numbers:
            if isinstance(variable, Constant):
                return self.scalars.constant(variable.data, variable.type.dtype)
            if variable in self.known:
                return self.writer.cast(self.value(self.known[variable]), variable.type.dtype)
            place = self.places[variable]
            self.numbers[variable] = load_number(self.writer, place.dtype, place.pointer, 0)
        return self.numbers[variable]

    def only_number(self, variable: Variable) -> Number | None:
        """Return the number of a variable that is known to be the same at all its indices."""
        if variable.type.ndim == 0:
            return self.number(variable)
        if isinstance(variable, Constant) and variable.data.size:
            data = np.asarray(variable.data).reshape(-1)
            if data.tobytes() == data.size * data[:1].tobytes():
                return self.scalars.constant(data[0], variable.type.dtype)
        if all(known == 1 for known in variable.type.shape) and variable in self.numbers:
            return self.numbers[variable]
        return None

    def place(self, variable: Variable) -> Place:
        """Return where an array lies."""
        if variable in self.places:
            return self.places[variable]
        if isinstance(variable, Constant):
            self.places[variable] = self._constant(variable)
        elif variable in self.items:
            place = self.fresh(variable.type.dtype, self.shape_of_items(variable))
            self.store_items(variable, place)
            self.bind_place(variable, place)
        else:
            place = self.fresh(variable.type.dtype, (1,) * variable.type.ndim)
            store_number(self.writer, place.pointer, 0, self.number(variable))
            self.bind_place(variable, place)
        return self.places[variable]

    def _constant(self, variable: Constant) -> Place:
        """Write the numbers of a constant into the workspace, before the first step."""
        data, dtype = np.asarray(variable.data, order="C"), variable.type.dtype
        if data.size > MOST_CONSTANTS:
            raise NoKernelError("large constants inside a step have no kernel")
        sizes = tuple(map(int, data.shape))
        part = self.workspace.take(bytes_of(dtype, sizes), pinned=True)
        with self.writer.inside(self.before):
            place = self._at(part, dtype, sizes)
            flat = data.reshape(-1)
            for k, lanes in lane_pieces(flat.size, 1 if parts_of(dtype) is not None else 8):
                if lanes == 1:
                    number = self.scalars.constant(flat[k], dtype)
                else:
                    number = self.writer.constant(flat[k : k + lanes], Type(dtype, lanes))
                store_number(self.writer, place.pointer, k * place.itemsize, number)
        return place

    # Sizes as values

    def value(self, size: Size) -> Value:
        return self.size_values.value(self.sizes.same(size))

    def bytes(self, count: Value | Size, stride: Size) -> Value:
        """Return a number of strides in bytes."""
        if not isinstance(count, Value):
            return self.value(product(count, stride))
        stride = self.sizes.same(stride)
        return count * (stride if isinstance(stride, int) else self.value(stride))

    def moved(self, pointer: Value, count: Value | Size, stride: Size) -> Value:
        """Return a pointer so many strides after another."""
        return self.writer.offset(pointer, self.bytes(count, stride))

    def known_results(self, node: Apply, scalar: Apply) -> list[Size] | None:
        """Return numbers as sizes, if all they are computed from is known."""
        if any(np.dtype(v.type.dtype).kind not in "iub" for v in (*node.inputs, *node.outputs)):
            return None
        if not all(map(self.is_known, node.inputs)):
            return None
        parts = tuple(map(self.size_of, node.inputs))
        if len(node.outputs) == 1 and all(isinstance(part, int) for part in parts):
            operands = zip(parts, scalar.inputs, strict=True)
            numbers = [np.dtype(inp.type.dtype).type(part) for part, inp in operands]
            with np.errstate(all="ignore"):
                result = np.asarray(scalar.op.impl(*numbers)).astype(node.outputs[0].type.dtype)
            return [int(result)]
        return [combined((scalar, place), *parts) for place in range(len(node.outputs))]

    # Memory

    def _at(self, part: Part, dtype: str, sizes: tuple[Size, ...]) -> Place:
        pointer = self.writer.offset(self.space, self.value(part.start))
        return self.contiguous(pointer, dtype, sizes, part)

    def contiguous(
        self, pointer: Value, dtype: str, sizes: tuple[Size, ...], part: Part | None = None
    ) -> Place:
        """Return an array that fills its memory in order."""
        sizes = tuple(map(self.sizes.same, sizes))
        strides = self.sizes.contiguous_strides(itemsize(dtype), sizes)
        return Place(pointer, dtype, sizes, strides, part)

    def fresh(self, dtype: str, sizes: Sequence[Size]) -> Place:
        """Return memory for a result."""
        part = self.workspace.take(bytes_of(dtype, tuple(sizes)))
        self.readers.setdefault(part, set())
        return self._at(part, dtype, tuple(sizes))

    def pinned(self, dtype: str, sizes: Sequence[Size]) -> Place:
        """Return memory that is kept for the whole loop."""
        part = self.workspace.take(bytes_of(dtype, tuple(sizes)), pinned=True)
        return self._at(part, dtype, tuple(sizes))

    def target(
        self, out: Variable, sizes: Sequence[Size], read: Sequence[tuple[Variable, Place]] = ()
    ) -> Place:
        """Return where a result of these sizes goes.

        `read` are the arguments of an Op that writes an item after it has read the items of the
        arguments at the same index, and none later.
        """
        if out in self.destinations:
            destination = self.destinations[out]
            place = self.at_destination(destination, sizes)
            self.arrived[out] = destination, place.pointer
            return place
        for variable, place in read:
            if self._may_overwrite(out, sizes, variable, place, read):
                assert place.part is not None
                self._claimed.add(place.part)
                return place
        return self.fresh(out.type.dtype, sizes)

    def at_destination(self, destination: Destination, sizes: Sequence[Size]) -> Place:
        same = self.sizes.same
        place = destination.place(tuple(map(same, sizes)))
        for axis, text in enumerate(destination.templates):
            size, own = sizes[axis], same(place.sizes[axis])
            self._compare("ne", size, own, destination.error, text, (own, same(size)))
        return place

    def is_last_reader(self, variable: Variable, place: Place) -> bool:
        """Whether nobody reads a part of the workspace after this node."""
        part = place.part
        if part is None or part.pinned or part in self._claimed:
            return False
        readers = self.readers.get(part, set())
        return all(self.last_use.get(reader, -1) <= self.position for reader in readers)

    def _may_overwrite(
        self,
        out: Variable,
        sizes: Sequence[Size],
        variable: Variable,
        place: Place,
        read: Sequence[tuple[Variable, Place]],
    ) -> bool:
        same = self.sizes.same
        if place.dtype != out.type.dtype or not self.is_last_reader(variable, place):
            return False
        if list(map(same, place.sizes)) != list(map(same, sizes)):
            return False
        assert place.part is not None
        if same(place.part.size) != same(bytes_of(place.dtype, place.sizes)):
            return False
        if not is_contiguous(self.sizes, place):
            return False
        others = [other for _, other in read if other.part is place.part]
        return all(other.strides == place.strides for other in others) and all(
            other.pointer is place.pointer and other.sizes == place.sizes for other in others
        )

    def _finish_node(self) -> None:
        """Give back what nobody reads after this node."""
        self._claimed.clear()
        for part, readers in list(self.readers.items()):
            if all(self.last_use.get(reader, -1) <= self.position for reader in readers):
                del self.readers[part]
                self.workspace.give_back(part)

    # Failures

    def template(self, detail: str, what: Variable | None = None) -> str:
        """Return the message of an error of this node, or of an input."""
        about = self.node if self.node is not None else what
        return detail if about is None else self.messages.template(about, detail)

    def fail_when(self, condition: Value, error: str, detail: str, *numbers: Value) -> None:
        """Write that the loop fails at this step where a condition holds."""
        shown = numbers if self.i is None else (self.i, *numbers)
        with self.writer.when(condition):
            self.writer.fail(self.fail(error, self.template(detail), len(shown)), *shown)

    def require(
        self,
        size: Size,
        other: Size,
        error: str,
        detail: str,
        numbers: Sequence[Size] = (),
        what: Variable | None = None,
    ) -> Size:
        """Note that two sizes must be equal; return what stands for both."""
        return self._compare("ne", size, other, error, self.template(detail, what), numbers)

    def require_not_below(
        self, size: Size, least: int, error: str, detail: str, numbers: Sequence[Size] = ()
    ) -> None:
        """Note that a size must not be below a number."""
        self._compare("lt", size, least, error, self.template(detail), numbers)

    def _compare(
        self, wrong: str, size: Size, other: Size, error: str, text: str, numbers: Sequence[Size]
    ) -> Size:
        """Compare two sizes; the message shows the step, if there is one, and the `numbers`."""
        is_known = not changes(*map(self.sizes.same, (size, other)), *numbers)
        at: list[Size] = []
        if self.i is not None:
            at = [0 if is_known else Changing(0, self.i, (None, None))]
        return self.check(Check(wrong, (size, other), error, text, (*at, *numbers)))

    def check(self, check: Check) -> Size:
        """Compare two sizes, before the first step if they are known then; return what stands for
        both if they must be equal."""
        size, other = map(self.sizes.same, check.sizes)
        if not changes(size, other, *check.values):
            return self.sizes.require(check)
        if size != other:
            one, another, *shown = map(self.value, (size, other, *check.values))
            with self.writer.when(
                one.differs(another) if check.operation == "ne" else one < another
            ):
                code = self.fail(check.error, check.template, len(shown))
                self.writer.fail(code, *shown)
        return other if changes(size) else size


def _chosen_from(node: Apply) -> list[Variable]:
    """Return the arrays whose items are those of a result, as far as these are moved alone."""
    op = node.op
    if isinstance(op, Join):
        return list(join_of(node)[1])
    is_extreme = isinstance(op, CAReduce) and isinstance(
        op.scalar_op, ScalarMinimum | ScalarMaximum
    )
    is_moved = is_extreme or isinstance(op, DimShuffle | Reshape | Subtensor)
    return node.inputs[:1] if is_moved else []


def _is_computed_where_read(graph: FunctionGraph, out: Variable) -> bool:
    """Whether an elementwise result is read by one node at its own indices, or item by item; its
    shape may be read besides."""
    readers = [client for client, _ in graph.clients[out]]
    clients = [client for client in readers if not isinstance(client.op, Shape | Shape_i)]
    if out.type.ndim == 0 or out in graph.outputs:
        return False
    if len(clients) <= MOST_ITEMS and all(map(_reads_item, clients)):
        return True
    client = clients[0]
    if len(clients) > 1 or not isinstance(client.op, Elemwise | CAReduce | Join):
        return False
    if isinstance(client.op, Join):
        return join_of(client)[0] is not None
    read = client.outputs[0].type
    return isinstance(client.op, CAReduce) or read.broadcastable == out.type.broadcastable


def _reads_item(node: Apply) -> bool:
    return isinstance(node.op, Subtensor) and node.outputs[0].type.ndim == 0
