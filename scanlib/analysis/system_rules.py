"""Forms of a system's variables through operations that move, join and cut axes.

See `scanlib.analysis.matrix_system`, whose class these rules are part of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.subtensor import indices_from_subtensor

from scanlib._compat import join_of, split_of
from scanlib.analysis.matrix_affine import NotAffineError, name_of
from scanlib.ops.graph import constant_index

Sizes = Callable[[Variable], Sequence[Variable]]


@dataclass
class Jacobian:
    """The Jacobian of a variable by one state.

    `value` is None for the state itself, a vector, with its axes in the order `order`. `full` says
    that no item is missing from the structure, `covers` that every number of the state stands
    somewhere in the variable, so that its product with a matrix misses none.
    """

    value: Variable | None
    order: tuple[Any, ...] = ()
    full: bool = False
    covers: bool = False

    def moved(self, value: Variable) -> Jacobian:
        """Return the block of a variable with the same items in other places."""
        return Jacobian(value, (), self.full, self.covers)


@dataclass
class Affine:
    """What a variable is to all states: see the module's text."""

    blocks: dict[int, Jacobian] = field(default_factory=dict)
    offset: Variable | None = None


class PartRules:
    """The rules; the class that has them gives Jacobians and sizes."""

    batch: int
    sizes: Sizes
    dependent: set[Variable]
    form: Callable[[Variable], Affine]
    value: Callable[[int, Jacobian], Variable]
    whole: Callable[[int, Jacobian | None, Variable], Variable]
    whole_offset: Callable[[Variable | None, Variable], Variable]

    def only_first_varies(self, node: Apply) -> Affine:
        if any(inp in self.dependent for inp in node.inputs[1:]):
            raise NotAffineError(f"{name_of(node.outputs[0])} is nonlinear in the state")
        return self.form(node.inputs[0])

    def keeps_batch(self, node: Apply, kept: bool) -> None:
        if not kept:
            raise NotAffineError(f"{name_of(node.outputs[0])} moves an axis of a batch")

    def linear(
        self, node: Apply, change: Callable[[Variable, int], Variable], covers: bool = False
    ) -> Affine:
        """Apply a linear function of the first input, told how many axes come before its own."""
        source = node.inputs[0]
        form = self.only_first_varies(node)
        blocks = {
            k: Jacobian(
                change(self.whole(k, block, source), 1),
                full=block.full,
                covers=covers and block.covers,
            )
            for k, block in form.blocks.items()
        }
        offset = form.offset
        if offset is not None:
            offset = change(self.whole_offset(offset, source), 0)
        return Affine(blocks, offset)

    def sum(self, node: Apply) -> list[Affine]:
        axes = node.op.axis
        every = range(node.inputs[0].type.ndim)
        reduced = list(every) if axes is None else list(axes)
        self.keeps_batch(node, min(reduced, default=self.batch) >= self.batch)
        return [
            self.linear(node, lambda part, lead: part.sum(axis=tuple(k + lead for k in reduced)))
        ]

    def join(self, node: Apply) -> list[Affine]:
        place, inputs = join_of(node)
        if place is None:
            raise NotAffineError(f"{name_of(node.outputs[0])} joins along an axis that varies")
        self.keeps_batch(node, place >= self.batch)
        return [self.joined(inputs, lambda parts, lead: pt.join(place + lead, *parts))]

    def stack(self, node: Apply) -> list[Affine]:
        self.keeps_batch(node, self.batch == 0)
        return [self.joined(node.inputs, lambda parts, lead: pt.stack(parts, axis=lead))]

    def joined(
        self, inputs: list[Variable], together: Callable[[list[Variable], int], Variable]
    ) -> Affine:
        forms = [self.form(inp) for inp in inputs]
        blocks = {}
        for k in dict.fromkeys(k for form in forms for k in form.blocks):
            own = [form.blocks.get(k) for form in forms]
            parts = [self.whole(k, block, inp) for block, inp in zip(own, inputs, strict=True)]
            blocks[k] = _of_both(own, together(self.same_batch(parts), 1))
        offset = None
        if any(form.offset is not None for form in forms):
            pairs = zip(forms, inputs, strict=True)
            offset = together([self.whole_offset(form.offset, inp) for form, inp in pairs], 0)
        return Affine(blocks, offset)

    def same_batch(self, parts: list[Variable]) -> list[Variable]:
        """Give Jacobians the same batch axes."""
        lead = slice(1, 1 + self.batch)
        if not self.batch or len({part.type.broadcastable[lead] for part in parts}) == 1:
            return parts
        shapes = [tuple(part.shape)[lead] for part in parts]
        batch = tuple(pt.broadcast_shape(*shapes, arrays_are_shapes=True))
        return [
            pt.broadcast_to(part, (part.shape[0], *batch, *tuple(part.shape)[1 + self.batch :]))
            for part in parts
        ]

    def split(self, node: Apply) -> list[Affine]:
        source, place, splits = split_of(node)
        form = self.only_first_varies(node)
        if place is None:
            raise NotAffineError(f"{name_of(node.outputs[0])} is cut along an axis that varies")
        self.keeps_batch(node, place >= self.batch)
        n_parts = len(node.outputs)

        def parts(whole: Variable, lead: int) -> list[Variable]:
            made = pt.split(whole, splits, n_splits=n_parts, axis=place + lead)
            return made if isinstance(made, list) else [made]

        results = [Affine() for _ in node.outputs]
        for k, block in form.blocks.items():
            for result, part in zip(results, parts(self.whole(k, block, source), 1), strict=True):
                result.blocks[k] = Jacobian(part, full=block.full)
        if form.offset is not None:
            whole = self.whole_offset(form.offset, source)
            for result, part in zip(results, parts(whole, 0), strict=True):
                result.offset = part
        return results

    def alloc(self, node: Apply) -> list[Affine]:
        form = self.only_first_varies(node)
        missing = node.outputs[0].type.ndim - node.inputs[0].type.ndim
        self.keeps_batch(node, not (self.batch and missing))
        blocks = {
            k: block.moved(_with_axes(self.value(k, block), 1, missing))
            for k, block in form.blocks.items()
        }
        offset = form.offset
        return [Affine(blocks, None if offset is None else _with_axes(offset, 0, missing))]

    def reshape(self, node: Apply) -> list[Affine]:
        self.keeps_batch(node, self.batch == 0)
        sizes = tuple(self.sizes(node.outputs[0]))
        return [
            self.linear(node, lambda part, lead: part.reshape((*tuple(part.shape)[:lead], *sizes)))
        ]

    def subtensor(self, node: Apply) -> list[Affine]:
        indices = tuple(indices_from_subtensor(node.inputs[1:], node.op.idx_list))
        self.keeps_batch(node, all(index == slice(None) for index in indices[: self.batch]))
        turned = all(_is_whole(index) for index in indices)
        return [self.linear(node, lambda part, lead: part[(*_all(lead), *indices)], covers=turned)]

    def inc_subtensor(self, node: Apply) -> list[Affine]:
        base, added, *places = node.inputs
        if any(place in self.dependent for place in places):
            raise NotAffineError(f"{name_of(node.outputs[0])} is nonlinear in the state")
        indices = tuple(indices_from_subtensor(places, node.op.idx_list))
        self.keeps_batch(node, all(index == slice(None) for index in indices[: self.batch]))
        missing = base[indices].type.ndim - added.type.ndim
        self.keeps_batch(node, not (self.batch and missing))
        change = pt.set_subtensor if node.op.set_instead_of_inc else pt.inc_subtensor

        def changed(whole: Variable, part: Variable, lead: int) -> Variable:
            target = whole[(*_all(lead), *indices)]
            return change(target, _with_axes(part, lead, missing))

        forms = [self.form(base), self.form(added)]
        blocks = {}
        for k in dict.fromkeys(k for form in forms for k in form.blocks):
            own = [form.blocks.get(k) for form in forms]
            whole, part = (
                self.whole(k, block, variable)
                for block, variable in zip(own, (base, added), strict=True)
            )
            kept = own if not node.op.set_instead_of_inc else [None, own[1]]
            whole, part = self.same_batch([whole, part])
            both = _of_both(own, changed(whole, part, 1))
            both.covers = any(block is not None and block.covers for block in kept)
            blocks[k] = both
        offset = None
        if any(form.offset is not None for form in forms):
            whole = self.whole_offset(forms[0].offset, base)
            offset = changed(whole, self.whole_offset(forms[1].offset, added), 0)
        return [Affine(blocks, offset)]


def _is_whole(index: Any) -> bool:
    """Whether an index takes all of an axis, in its order or in the other."""
    if not isinstance(index, slice) or index.start is not None or index.stop is not None:
        return False
    return index.step is None or constant_index(index.step) == -1


def _all(count: int) -> tuple[slice, ...]:
    return (slice(None),) * count


def _of_both(blocks: Sequence[Jacobian | None], value: Variable) -> Jacobian:
    """Return the block of a variable made of the items of others."""
    found = [block for block in blocks if block is not None]
    full = len(found) == len(blocks) and all(block.full for block in found)
    return Jacobian(value, (), full, any(block.covers for block in found))


def _with_axes(variable: Variable, lead: int, missing: int) -> Variable:
    """Return a variable with some axes of size one after its first ones."""
    if missing <= 0:
        return variable
    return pt.expand_dims(variable, tuple(range(lead, lead + missing)))
