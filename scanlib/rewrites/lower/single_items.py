"""Items that a step reads or writes at constant places of arrays become parts of the loop.

A step may take its data from one array, ``row[0]`` and ``row[1]`` of the rows of a matrix, or its
parameters, ``theta[2]`` of a vector. Each item of a row becomes a sequence, a view of the matrix,
and each item of a whole array a non-sequence. The gradient of such a loop writes items into rows of
zeros, or adds them to an accumulator: each item becomes an output, or an accumulator, and is
written into the array behind the loop.

This is done where the loop is elementwise then, and each of its states of a recurrence class, or
where it can work on few numbers only then: others gain nothing by it on processors. Where an array
may lack an item, a `CheckedItems` raises the error of the step that reads it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar.basic import Second
from pytensor.tensor.subtensor import Subtensor

from scanlib.analysis.recognition import analyse
from scanlib.analysis.scalar_body import NotElementwiseError, scalar_loop
from scanlib.lengths.numbers import constant_place
from scanlib.ops.gradient.cotangents import is_zeros
from scanlib.ops.graph import Readers, applies, index_text, readers_of, row_type, writes_of
from scanlib.ops.loop import Carry, Loop, NonSequence, Output
from scanlib.ops.loop import Sequence as Rows
from scanlib.ops.loop_rewrite import LowersLoops
from scanlib.ops.messages import out_of_bounds
from scanlib.ops.row_ops.checked_rows import CheckedItems, Item
from scanlib.ops.small_arrays import works_on_numbers
from scanlib.rewrites.edit import Lookup, LoopEdit, replace
from scanlib.rewrites.lower.lower_elementwise import specialize_elementwise
from scanlib.rewrites.simplify.redundant import drop_unread_inputs

# Kernels read more items faster row by row, and each item that is written into rows is a pass.
MOST_READ, MOST_WRITTEN = 8, 4

Place = tuple[Any, ...]  # integers and slices
Given = Rows | NonSequence
Array = Given | Carry


class Access(NamedTuple):
    """A node that reads a place of an `Array`, or writes there: None if it is known to have it."""

    node: Apply
    place: Place
    array: Any = None

    @property
    def value(self) -> Variable:
        """What is written."""
        return self.node.inputs[1]


class SplitItems(LowersLoops):
    """Replace loops whose steps may be taken several at once but for items of arrays."""

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        if not (config.scanlib__lower and config.scanlib__simplify):
            return False
        items = _Items(LoopEdit(fgraph, node))
        if not items.split() or not _gains(node, items.loop.apply().node):
            return False
        replace(fgraph, items.edit.replacements(), "scanlib_items")
        return True


def items_apart(node: Apply, limited: bool = False) -> Loop | None:
    """Return a loop whose items are parts, None if there are none, or with `limited` too many."""
    items = _Items(LoopEdit(FunctionGraph([], [], clone=False), node))
    return items.loop if items.split(limited) else None


def _gains(node: Apply, new: Apply) -> bool:
    """Whether steps of a loop may be taken several at once, or small states stay in registers."""
    loop = Loop.from_node(new)
    arrays = any(getattr(part.type, "ndim", 0) for part in loop.recurrent)
    if arrays and not works_on_numbers(node.op):
        return works_on_numbers(new.op)
    try:
        specialize_elementwise(loop)
        return loop.stop is None and None not in analyse(scalar_loop(loop)).families
    except NotElementwiseError:
        return False


class _Items:
    """The arrays of one loop, and which items of them its steps read and write."""

    def __init__(self, edit: LoopEdit) -> None:
        self.edit, self.loop = edit, edit.loop
        self.arrays: dict[Variable, Given] = {part.row: part for part in self.loop.sequences}
        self.arrays |= {part.inner: part for part in self.loop.non_sequences}
        self.missing: dict[Array, dict[tuple[int, int], Item]] = {}
        self.checked: dict[Array, Variable] = {}

    def split(self, limited: bool = True) -> bool:
        """Change the loop; return whether there is anything to change, and with `limited` not too
        much."""
        loop = self.loop
        nodes = list(toposort(loop.body_outputs()))
        readers = readers_of(loop.body_outputs())
        reads = [read for node in nodes if (read := self.read(node))]
        outputs = {part: self.written(part) for part in loop.outputs}
        carries = {part: self.added(part, readers) for part in loop.carries}
        writes = [each for own in (*outputs.values(), *carries.values()) for each in own]
        kinds = {(read.array, index_text(read.node)) for read in reads}
        most = max(map(len, outputs.values()), default=0)
        too_many = len(kinds) > MOST_READ or most > MOST_WRITTEN
        if (limited and too_many) or not (reads or writes):
            return False
        accesses = {access.node: access for access in (*reads, *writes)}
        self.check([accesses[node] for node in nodes if node in accesses])
        for output, own in outputs.items():
            if own:
                self.split_output(output, own)
        for carry, own in carries.items():
            if own:
                self.split_carry(carry, own)
        self.replace(reads)
        drop_unread_inputs(self.edit)
        return True

    # Which items

    def read(self, node: Apply) -> Access | None:
        if not isinstance(node.op, Subtensor) or node.inputs[0] not in self.arrays:
            return None
        place = constant_place(node)
        return None if place is None else Access(node, place, self.arrays[node.inputs[0]])

    def written(self, output: Output) -> list[Access]:
        """Return what is written into the zeros that an output is besides, the first one first."""
        base, writes = writes_of(output.value)
        if not writes or not is_zeros(base):
            return []
        array = None
        if None in base.type.shape:
            array = self.arrays.get(base.owner.inputs[0]) if applies(base.owner, Second) else None
            if array is None:
                return []
        return [Access(*write, array) for write in writes]

    def added(self, carry: Carry, readers: Readers) -> list[Access]:
        """Return what is added to items of an accumulator that nothing else reads, the first one
        first."""
        base, writes = writes_of(carry.next)
        values = [base, *(node.outputs[0] for node, _ in writes)]
        if base is not carry.value or any(len(readers[value]) > 1 for value in values):
            return []
        if any(node.op.set_instead_of_inc for node, _ in writes):
            return []
        indices = [index for _, place in writes for index in place]
        same = len({len(place) for _, place in writes}) == 1
        if not same or any(isinstance(index, slice) or index < 0 for index in indices):
            return []  # one item may be in several places
        return [Access(*write, carry) for write in writes]

    # Arrays that have the items

    def check(self, accesses: Sequence[Access]) -> None:
        """Note which arrays must be checked for items, and for which, in the order of the step."""
        loop = self.loop
        inputs = loop.signature().split_body_inputs(loop.body_inputs())
        messages = loop.messages().at_step(inputs)
        for node, place, array in accesses:
            if array is None:
                continue
            for axis, index in enumerate(place):
                if isinstance(index, slice):
                    continue
                text = messages.template(node, out_of_bounds(index, axis))
                item = Item(axis + isinstance(array, Rows), index, text)
                size = _outer(array).type.shape[item.axis]
                if size is None or size < item.least:
                    self.missing.setdefault(array, {}).setdefault((axis, index), item)
        for array, items in self.missing.items():
            self.checked[array] = self.with_items(array, CheckedItems(tuple(items.values())))

    def with_items(self, array: Array, op: CheckedItems) -> Variable:
        """Return an array that has some items; another loop may have checked it for them."""
        outer = _outer(array)
        steps = [] if isinstance(array, Rows) else [self.loop.length()]
        for client, _ in self.edit.fgraph.clients.get(outer, ()):
            is_check = isinstance(client.op, CheckedItems) and client.inputs[1:] == steps
            if is_check and client.op.covers(op):
                return client.outputs[0]
        return op(outer, *steps)

    def whole(self, array: Array) -> Variable:
        """Return an array that has all items which steps read and write."""
        return self.checked.get(array, _outer(array))

    def cut(self, array: Array, result: Variable, lead: int) -> Variable:
        """Return a result with the sizes of an array, which lacks its `lead` first axes: without
        steps it may be larger, for what no step writes."""
        if array not in self.missing:
            return result
        index = [slice(None)] * result.type.ndim
        for item in self.missing[array].values():
            index[item.axis + lead] = slice(_outer(array).shape[item.axis])
        return result[tuple(index)]

    # New parts

    def replace(self, reads: Sequence[Access]) -> None:
        """Give the loop an input for each item that is read."""
        loop, replaced = self.loop, dict[Variable, Variable]()
        new: dict[Any, dict[str, Any]] = {}
        for node, place, array in reads:
            own, text = new.setdefault(array, {}), index_text(node)
            is_rows = isinstance(array, Rows)
            if text not in own:
                view = self.whole(array)[(slice(None), *place) if is_rows else place]
                row = row_type(view)() if is_rows else view.type()
                own[text] = type(array)(view, row, array.name)
            replaced[node.outputs[0]] = own[text].row if is_rows else own[text].inner
        loop.substitute(replaced)
        still_read = set(ancestors(loop.body_outputs()))
        for array, parts in new.items():
            if isinstance(array, NonSequence):
                loop.non_sequences += parts.values()
                continue
            if array.row not in still_read:
                first = next(iter(parts))
                loop.sequences[loop.sequences.index(array)] = parts.pop(first)
            loop.sequences += parts.values()

    def split_output(self, output: Output, writes: list[Access]) -> None:
        """Give the loop an output for each item that is written into zeros."""
        (base, _), array, dtype = writes_of(output.value), writes[0].array, output.type.dtype
        parts = [Output(pt.cast(write.value, dtype), output.name) for write in writes]
        lead = int(isinstance(array, Rows))
        sizes = [
            self.whole(array).shape[axis + lead] if size is None and array is not None else size
            for axis, size in enumerate(base.type.shape)
        ]

        def made(lookup: Lookup) -> Variable:
            rows = [lookup(part) for part in parts]
            result = pt.zeros((rows[0].shape[0], *sizes), dtype)
            for each, own in zip(writes, rows, strict=True):
                write = pt.set_subtensor if each.node.op.set_instead_of_inc else pt.inc_subtensor
                result = write(result[(slice(None), *each.place)], own)
            return result if array is None else self.cut(array, result, 1 - lead)

        self.edit.redirect(output, made)
        self.loop.outputs += parts

    def split_carry(self, carry: Carry, writes: list[Access]) -> None:
        """Give the loop an accumulator for each item."""
        whole, parts = self.whole(carry), dict[Place, Carry]()
        for write in writes:
            if write.place not in parts:
                initial = whole[write.place]
                value = pt.tensor(dtype=initial.type.dtype, shape=initial.type.shape)
                if is_zeros(carry.initial) and not value.type.ndim:
                    initial = pt.zeros((), value.type.dtype)
                parts[write.place] = Carry(initial, value, value, carry.name)
            part = parts[write.place]
            part.next = part.next + pt.cast(write.value, part.type.dtype)

        def made(lookup: Lookup) -> Variable:
            result = whole
            for place, part in parts.items():
                result = pt.set_subtensor(result[place], lookup(part))
            return self.cut(carry, result, 0)

        self.edit.redirect(carry, made)
        self.loop.carries += parts.values()


def _outer(array: Array) -> Variable:
    return array.initial if isinstance(array, Carry) else array.outer
