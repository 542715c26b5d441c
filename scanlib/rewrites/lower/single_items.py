"""Items that a step reads or writes at constant places of arrays become parts of the loop.

A step may take its data from one array, ``row[0]`` and ``row[1]`` of the rows of a matrix, or its
parameters, ``theta[2]`` of a vector. Each item of a row becomes a sequence, a view of the matrix,
and each item of a whole array a non-sequence. The gradient of such a loop writes items into rows of
zeros, or adds them to an accumulator: each item becomes an output, or an accumulator, and is
written into the array behind the loop.

This is done where the loop is elementwise then; others gain nothing by it. Where an array may lack
an item, a `CheckedItems` raises the error of the step that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar.basic import Second
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib.lengths.numbers import constant_index
from scanlib.ops.gradient.cotangents import is_zeros
from scanlib.ops.graph import applies, index_text, is_tensor, readers_of, row_type
from scanlib.ops.loop import Carry, Loop, NonSequence, Output
from scanlib.ops.loop import Sequence as Rows
from scanlib.ops.loop_rewrite import LowersLoops
from scanlib.ops.messages import out_of_bounds
from scanlib.ops.row_ops.checked_rows import CheckedItems, Item
from scanlib.rewrites.edit import Lookup, LoopEdit
from scanlib.rewrites.lower.lower_elementwise import is_elementwise
from scanlib.rewrites.simplify.redundant import drop_unread_inputs
from scanlib.rewrites.simplify.simplify import replace

MOST = 16  # items of one loop

Array = Rows | NonSequence | Carry


class Access(NamedTuple):
    """Where a node reads or writes an array: of an `Array`, if it is not known to have the items.

    `place` are integers and slices, and `value` is what is written there.
    """

    node: Apply
    array: Array | None
    place: tuple[Any, ...]
    value: Variable | None = None


class SplitItems(LowersLoops):
    """Replace loops that are elementwise but for items of arrays."""

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        if not (config.scanlib__lower and config.scanlib__simplify):
            return False
        items = _Items(LoopEdit(fgraph, node))
        if not items.split() or not is_elementwise(Loop.from_node(items.loop.apply().node)):
            return False
        replace(fgraph, items.edit.replacements(), "scanlib_items")
        return True


class _Items:
    """The arrays of one loop, and which items of them its steps read and write."""

    def __init__(self, edit: LoopEdit) -> None:
        self.edit, self.loop = edit, edit.loop
        self.arrays: dict[Variable, Array] = {part.row: part for part in self.loop.sequences}
        self.arrays |= {part.inner: part for part in self.loop.non_sequences}
        self.arrays = {inner: part for inner, part in self.arrays.items() if is_tensor(inner)}
        self.checked: dict[Array, dict[str, Item]] = {}
        self.whole: dict[Array, Variable] = {}

    def split(self) -> bool:
        """Change the loop; return whether there is anything to change."""
        loop = self.loop
        nodes = list(toposort(loop.body_outputs()))
        reads = [found for node in nodes if (found := self.read(node)) is not None]
        outputs = {part: self.written(part) for part in loop.outputs}
        readers = readers_of(loop.body_outputs())
        carries = {part: self.added(part) for part in loop.carries if len(readers[part.value]) == 1}
        writes = [access for found in (outputs, carries) for own in found.values() for access in own]
        if not 0 < len({(a.array, index_text(a.node)) for a in reads}) + len(writes) <= MOST:
            return False
        places = {node: number for number, node in enumerate(nodes)}
        inputs = loop.signature().split_body_inputs(loop.body_inputs())
        messages = loop.messages().at_step(inputs)
        for node, array, place, _ in sorted((*reads, *writes), key=lambda a: places[a.node]):
            if array is not None:
                self.check(array, place, lambda detail, node=node: messages.template(node, detail))
        for array, items in self.checked.items():
            self.whole[array] = self.with_items(array, list(items.values()))
        new = self.replace_reads(reads)
        for output, own in outputs.items():
            if own:
                self.split_output(output, own)
        for carry, own in carries.items():
            if own:
                self.split_carry(carry, own)
        self.replace_parts(new)
        drop_unread_inputs(self.edit)
        return True

    # Which items

    def read(self, node: Apply) -> Access | None:
        if not isinstance(node.op, Subtensor) or node.inputs[0] not in self.arrays:
            return None
        place = _constant_place(node, 1)
        return None if place is None else Access(node, self.arrays[node.inputs[0]], place)

    def written(self, output: Output) -> list[Access]:
        """Return what is written into the zeros that an output is besides, the first one first."""
        base, writes = _writes(output.value)
        if not writes or not is_zeros(base):
            return []
        array = None
        if None in base.type.shape:
            like = base.owner.inputs[0] if applies(base.owner, Second) else None
            array = self.arrays.get(like)
            if array is None:
                return []
        return [access._replace(array=array) for access in writes]

    def added(self, carry: Carry) -> list[Access]:
        """Return what is added to items of an accumulator, the first one first."""
        base, writes = _writes(carry.next)
        if base is not carry.value or any(a.node.op.set_instead_of_inc for a in writes):
            return []
        indices = [index for access in writes for index in access.place]
        same = len({len(access.place) for access in writes}) == 1
        if not same or any(isinstance(index, slice) or index < 0 for index in indices):
            return []  # one item may be in several places
        return [access._replace(array=carry) for access in writes]

    # Arrays that have the items

    def check(self, array: Array, place: tuple[Any, ...], said: Callable[[str], str]) -> None:
        """Note what an array must have, if it is not known to."""
        outer, lead = _outer(array), int(isinstance(array, Rows))
        for axis, index in enumerate(place):
            if isinstance(index, slice):
                continue
            item = Item(axis + lead, index, said(out_of_bounds(index, axis)))
            size = outer.type.shape[item.axis]
            if size is None or size < item.least:
                self.checked.setdefault(array, {}).setdefault(f"{axis}: {index}", item)

    def with_items(self, array: Array, items: list[Item]) -> Variable:
        """Return an array that has some items; another loop may have checked it for them."""
        outer, op = _outer(array), CheckedItems(tuple(items))
        steps = [] if isinstance(array, Rows) else [self.loop.length()]
        for client, _ in self.edit.fgraph.clients.get(outer, ()):
            is_check = isinstance(client.op, CheckedItems) and client.inputs[1:] == steps
            if is_check and client.op.covers(op):
                return client.outputs[0]
        return op(outer, *steps)

    def cut(self, array: Array | None, whole: Variable, lead: int = 0) -> Variable:
        """Return an array with the sizes of another: without steps it may be larger, for the sake
        of what no step writes."""
        index = [slice(None)] * whole.type.ndim
        for item in self.checked.get(array, {}).values() if array is not None else ():
            index[item.axis + lead] = slice(_outer(array).shape[item.axis])
        return whole[tuple(index)] if array in self.checked else whole

    # New parts

    def replace_reads(self, reads: Sequence[Access]) -> dict[Array, list[Array]]:
        """Give the loop an input for each item; return them by the array."""
        new: dict[Array, dict[str, Array]] = {}
        replaced = {}
        for node, array, place, _ in reads:
            whole, own = self.whole.get(array, _outer(array)), new.setdefault(array, {})
            text = index_text(node)
            if text not in own and isinstance(array, Rows):
                view = whole[(slice(None), *place)]
                own[text] = Rows(view, row_type(view)(), array.name)
            elif text not in own:
                view = whole[place]
                own[text] = NonSequence(view, view.type(), array.name)
            part = own[text]
            replaced[node.outputs[0]] = part.row if isinstance(part, Rows) else part.inner
        self.loop.substitute(replaced)
        return {array: list(own.values()) for array, own in new.items()}

    def replace_parts(self, new: dict[Array, list[Array]]) -> None:
        """Put inputs where the arrays were, or behind all others."""
        loop, read = self.loop, set(ancestors(self.loop.body_outputs()))
        for array, parts in new.items():
            if isinstance(array, NonSequence):
                loop.non_sequences += parts
                continue
            if array.row not in read:
                loop.sequences[loop.sequences.index(array)] = parts.pop(0)
            loop.sequences += parts

    def split_output(self, output: Output, writes: list[Access]) -> None:
        """Give the loop an output for each item that is written into zeros."""
        (base, _), array, dtype = _writes(output.value), writes[0].array, output.type.dtype
        parts = [Output(_cast(access.value, dtype), output.name) for access in writes]
        sizes = list(base.type.shape)
        if array is not None:
            whole, lead = self.whole.get(array, _outer(array)), int(isinstance(array, Rows))
            sizes = [whole.shape[k + lead] if n is None else n for k, n in enumerate(sizes)]

        def made(lookup: Lookup) -> Variable:
            rows = [lookup(part) for part in parts]
            result = pt.zeros((rows[0].shape[0], *sizes), dtype)
            for access, own in zip(writes, rows, strict=True):
                write = pt.set_subtensor if access.node.op.set_instead_of_inc else pt.inc_subtensor
                result = write(result[(slice(None), *access.place)], own)
            return self.cut(array, result, int(not isinstance(array, Rows)))

        self.edit.redirect(output, made)
        self.loop.outputs += parts

    def split_carry(self, carry: Carry, writes: list[Access]) -> None:
        """Give the loop an accumulator for each item."""
        whole, parts = self.whole.get(carry, carry.initial), dict[tuple[Any, ...], Carry]()
        for access in writes:
            if access.place not in parts:
                initial = whole[access.place]
                value = pt.tensor(dtype=initial.type.dtype, shape=initial.type.shape)
                if is_zeros(carry.initial) and not value.type.ndim:
                    initial = pt.zeros((), value.type.dtype)
                parts[access.place] = Carry(initial, value, value, carry.name)
            part = parts[access.place]
            part.next = part.next + _cast(access.value, part.type.dtype)

        def made(lookup: Lookup) -> Variable:
            result = whole
            for place, part in parts.items():
                result = pt.set_subtensor(result[place], lookup(part))
            return self.cut(carry, result)

        self.edit.redirect(carry, made)
        self.loop.carries += parts.values()


def _writes(value: Variable) -> tuple[Variable, list[Access]]:
    """Return what is written at constant places of an array, the first one first, and the array
    before."""
    writes: list[Access] = []
    while value.owner is not None and isinstance(value.owner.op, IncSubtensor):
        node, place = value.owner, _constant_place(value.owner, 2)
        if place is None or node.inputs[1].type.ndim != value.type.ndim - _count(place):
            break
        writes.append(Access(node, None, place, node.inputs[1]))
        value = node.inputs[0]
    return value, writes[::-1]


def _count(place: tuple[Any, ...]) -> int:
    return sum(not isinstance(index, slice) for index in place)


def _constant_place(node: Apply, skipped: int) -> tuple[Any, ...] | None:
    """Return the indices of a node, None if not all are constants."""
    place = []
    for index in indices_from_subtensor(node.inputs[skipped:], node.op.idx_list):
        ends = (index.start, index.stop, index.step) if isinstance(index, slice) else (index,)
        known = [None if end is None else constant_index(end) for end in ends]
        if any(k is None and end is not None for k, end in zip(known, ends, strict=True)):
            return None
        place.append(slice(*known) if isinstance(index, slice) else known[0])
    return tuple(place)


def _cast(value: Variable, dtype: str) -> Variable:
    return value if value.type.dtype == dtype else pt.cast(value, dtype)


def _outer(array: Array) -> Variable:
    return array.initial if isinstance(array, Carry) else array.outer
