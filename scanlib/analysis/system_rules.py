"""The forms of a system's variables, operation by operation.

See `scanlib.analysis.matrix_system` for the algebra. Joins, parts, reshapes and transpositions act
on the axes of a Jacobian that follow the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import singledispatch
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import Alloc, Join, MakeVector, Split
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.math import Sum as TensorSum
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib._compat import join_of, split_of
from scanlib.analysis.matrix_affine import NotAffineError, is_minus_one, name_of, plus
from scanlib.analysis.matrix_system import Affine, Jacobian, SystemForms
from scanlib.lengths.numbers import constant_index


def propagate(system: SystemForms) -> SystemForms:
    """Find the forms of all variables from the sources to the targets of a system.

    Raises
    ------
    NotAffineError
        If a next value is of another form; the text says which variable is in the way.
    """
    for node in toposort(system.targets, blockers=system.sources):
        if any(out in system.dependent for out in node.outputs):
            for out, form in zip(node.outputs, _of_node(system, node), strict=True):
                system.forms.setdefault(out, form)
    return system


def _of_node(system: SystemForms, node: Apply) -> list[Affine]:
    """Return the forms of a node's outputs."""
    op, out = node.op, node.outputs[0]
    if any(getattr(each.type, "dtype", None) != system.dtype for each in node.outputs):
        raise NotAffineError(f"{name_of(out)} has another dtype than the state")
    if isinstance(op, SpecifyShape) and node.inputs[0] in system.dependent:
        return [system.form(node.inputs[0])]
    core = op.core_op if isinstance(op, Blockwise) and isinstance(op.core_op, Dot) else op
    found = rule(core, system, node)
    return [found] if isinstance(found, Affine) else found


@singledispatch
def rule(op: Op, system: SystemForms, node: Apply) -> Affine | list[Affine]:
    """Return the forms of a node's outputs, by its Op: one form alone, or a list."""
    raise NotAffineError(f"{name_of(node.outputs[0])} reads the state")


@rule.register(DimShuffle)
def _dimshuffle(op: Op, system: SystemForms, node: Apply) -> Affine:
    order, out = node.op.new_order, node.outputs[0]
    _keeps_batch(system, node, order[: system.batch] == tuple(range(system.batch)))
    form = system.form(node.inputs[0])

    def turned(block: Jacobian) -> Jacobian:
        if block.value is None:
            places = tuple(k if k == "x" else block.order[k] for k in order)
            return replace(block, order=places)
        lost = {1 + k for k in range(node.inputs[0].type.ndim) if k not in order}
        value = _with_units(block.value, lost)
        moved = value.dimshuffle(0, *(k if k == "x" else k + 1 for k in order))
        return block.moved(moved)

    offset = form.offset
    if offset is not None:
        lost = {k for k in range(node.inputs[0].type.ndim) if k not in order}
        offset = _with_units(offset, lost).dimshuffle(*order)
    assert out.type.ndim == len(order)
    return Affine({k: turned(block) for k, block in form.blocks.items()}, offset)


# Elementwise operations


@rule.register(Elemwise)
def _elemwise(op: Op, system: SystemForms, node: Apply) -> Affine:
    scalar, inputs, out = node.op.scalar_op, node.inputs, node.outputs[0]
    if isinstance(scalar, ps.Add):
        return _total(system, [(1, inp) for inp in inputs])
    if isinstance(scalar, ps.Sub):
        return _total(system, [(1, inputs[0]), (-1, inputs[1])])
    if isinstance(scalar, ps.Neg):
        return _total(system, [(-1, inputs[0])])
    varying = [inp for inp in inputs if inp in system.dependent]
    if isinstance(scalar, ps.Mul) and len(varying) == 1:
        form = system.form(varying[0])
        for factor in inputs:
            if factor is varying[0] or (system.structure and is_minus_one(factor)):
                continue
            form = _scaled(system, form, factor, lambda part, by: part * by)
        return form
    if isinstance(scalar, ps.TrueDiv) and varying == [inputs[0]]:
        return _scaled(system, system.form(inputs[0]), inputs[1], lambda part, by: part / by)
    raise NotAffineError(f"{name_of(out)} is nonlinear in the state")


def _total(system: SystemForms, summands: list[tuple[int, Variable]]) -> Affine:
    """Return the form of a sum, each part with its sign."""
    blocks: dict[int, Jacobian] = {}
    offset = None
    for sign, inp in summands:
        form = system.form(inp)
        if len(summands) == 1 and sign > 0:
            return form
        for k, block in form.blocks.items():
            value = system.value(k, block)
            if sign < 0 and not system.structure:
                value = -value
            before = blocks.get(k)
            if before is not None:
                value = before.value + value
            both = block.moved(value)
            if before is not None:
                both.full |= before.full
                both.covers |= before.covers
            blocks[k] = both
        if form.offset is not None:
            offset = plus(offset, form.offset if sign > 0 else -form.offset)
    return Affine(blocks, offset)


def _scaled(
    system: SystemForms, form: Affine, by: Variable, apply: Callable[[Variable, Variable], Variable]
) -> Affine:
    """Return a form multiplied or divided by a factor."""
    factor = system.factor(by)
    spread = factor.dimshuffle("x", *range(factor.type.ndim))
    blocks = {}
    for k, block in form.blocks.items():
        value = system.value(k, block)
        scaled = apply(value, spread)
        if not system.structure and (block.value is None or value is system.bases.get(k)):
            # Of a state by itself, what is not finite must stay where it is.
            scaled = pt.switch(value, apply(pt.ones_like(spread), spread), pt.zeros_like(value))
        blocks[k] = block.moved(scaled)
    return Affine(blocks, None if form.offset is None else apply(form.offset, factor))


# Products of matrices


@rule.register(Dot)
def _dot(op: Op, system: SystemForms, node: Apply) -> Affine:
    system.multiplies = True
    left, right = node.inputs
    out = node.outputs[0]
    if left in system.dependent and right in system.dependent:
        raise NotAffineError(f"{name_of(out)} is nonlinear in the state")
    if left.type.ndim != right.type.ndim or left.type.ndim < 2:
        raise NotAffineError(f"{name_of(out)} is no product of two matrices")
    from_left = left in system.dependent
    state, matrix = (left, right) if from_left else (right, left)
    ndim = state.type.ndim
    contracted = ndim - 1 if from_left else ndim - 2
    _keeps_batch(system, node, contracted >= system.batch)
    form, factor = system.form(state), system.factor(matrix)
    others = [k for k in range(system.batch, ndim) if k != contracted]
    alone = all(state.type.shape[k] == 1 for k in others)
    product = _times(factor, from_left)
    blocks = {}
    for k, block in form.blocks.items():
        if block.value is None and block.order[contracted] == system.batch:
            blocks[k] = Jacobian(_columns(factor, from_left), full=True)
            continue
        value = product(system.whole(k, block, state))
        blocks[k] = Jacobian(value, full=block.full or (alone and block.covers))
    offset = form.offset
    if offset is not None:
        whole = system.whole_offset(offset, state)
        offset = node.op(whole, right) if from_left else node.op(left, whole)
    return Affine(blocks, offset)


def _only_first_varies(system: SystemForms, node: Apply) -> Affine:
    if any(inp in system.dependent for inp in node.inputs[1:]):
        raise NotAffineError(f"{name_of(node.outputs[0])} is nonlinear in the state")
    return system.form(node.inputs[0])


def _keeps_batch(system: SystemForms, node: Apply, kept: bool) -> None:
    if not kept:
        raise NotAffineError(f"{name_of(node.outputs[0])} moves an axis of a batch")


def _linear(
    system: SystemForms,
    node: Apply,
    change: Callable[[Variable, int], Variable],
    covers: bool = False,
) -> Affine:
    """Apply a linear function of the first input, told how many axes come before its own."""
    source = node.inputs[0]
    form = _only_first_varies(system, node)
    blocks = {
        k: Jacobian(
            change(system.whole(k, block, source), 1),
            full=block.full,
            covers=covers and block.covers,
        )
        for k, block in form.blocks.items()
    }
    offset = form.offset
    if offset is not None:
        offset = change(system.whole_offset(offset, source), 0)
    return Affine(blocks, offset)


@rule.register(TensorSum)
def _sum(op: Op, system: SystemForms, node: Apply) -> Affine:
    axes = node.op.axis
    every = range(node.inputs[0].type.ndim)
    reduced = list(every) if axes is None else list(axes)
    _keeps_batch(system, node, min(reduced, default=system.batch) >= system.batch)
    return _linear(system, node, lambda part, lead: part.sum(axis=tuple(k + lead for k in reduced)))


@rule.register(Join)
def _join(op: Op, system: SystemForms, node: Apply) -> Affine:
    place, inputs = join_of(node)
    if place is None:
        raise NotAffineError(f"{name_of(node.outputs[0])} joins along an axis that varies")
    _keeps_batch(system, node, place >= system.batch)
    return _joined(system, inputs, lambda parts, lead: pt.join(place + lead, *parts))


@rule.register(MakeVector)
def _stack(op: Op, system: SystemForms, node: Apply) -> Affine:
    _keeps_batch(system, node, system.batch == 0)
    return _joined(system, node.inputs, lambda parts, lead: pt.stack(parts, axis=lead))


def _joined(
    system: SystemForms, inputs: list[Variable], together: Callable[[list[Variable], int], Variable]
) -> Affine:
    forms = [system.form(inp) for inp in inputs]
    blocks = {}
    for k in dict.fromkeys(k for form in forms for k in form.blocks):
        own = [form.blocks.get(k) for form in forms]
        parts = [system.whole(k, block, inp) for block, inp in zip(own, inputs, strict=True)]
        blocks[k] = _of_both(own, together(_same_batch(system, parts), 1))
    offset = None
    if any(form.offset is not None for form in forms):
        pairs = zip(forms, inputs, strict=True)
        offset = together([system.whole_offset(form.offset, inp) for form, inp in pairs], 0)
    return Affine(blocks, offset)


def _same_batch(system: SystemForms, parts: list[Variable]) -> list[Variable]:
    """Give Jacobians the same batch axes."""
    lead = slice(1, 1 + system.batch)
    if not system.batch or len({part.type.broadcastable[lead] for part in parts}) == 1:
        return parts
    shapes = [tuple(part.shape)[lead] for part in parts]
    batch = tuple(pt.broadcast_shape(*shapes, arrays_are_shapes=True))
    return [
        pt.broadcast_to(part, (part.shape[0], *batch, *tuple(part.shape)[1 + system.batch :]))
        for part in parts
    ]


@rule.register(Split)
def _split(op: Op, system: SystemForms, node: Apply) -> list[Affine]:
    source, place, splits = split_of(node)
    form = _only_first_varies(system, node)
    if place is None:
        raise NotAffineError(f"{name_of(node.outputs[0])} is cut along an axis that varies")
    _keeps_batch(system, node, place >= system.batch)
    n_parts = len(node.outputs)

    def parts(whole: Variable, lead: int) -> list[Variable]:
        made = pt.split(whole, splits, n_splits=n_parts, axis=place + lead)
        return made if isinstance(made, list) else [made]

    results = [Affine() for _ in node.outputs]
    for k, block in form.blocks.items():
        for result, part in zip(results, parts(system.whole(k, block, source), 1), strict=True):
            result.blocks[k] = Jacobian(part, full=block.full)
    if form.offset is not None:
        whole = system.whole_offset(form.offset, source)
        for result, part in zip(results, parts(whole, 0), strict=True):
            result.offset = part
    return results


@rule.register(Alloc)
def _alloc(op: Op, system: SystemForms, node: Apply) -> Affine:
    form = _only_first_varies(system, node)
    missing = node.outputs[0].type.ndim - node.inputs[0].type.ndim
    _keeps_batch(system, node, not (system.batch and missing))
    blocks = {
        k: block.moved(_with_axes(system.value(k, block), 1, missing))
        for k, block in form.blocks.items()
    }
    offset = form.offset
    return Affine(blocks, None if offset is None else _with_axes(offset, 0, missing))


@rule.register(Reshape)
@rule.register(JoinDims)
@rule.register(SplitDims)
def _reshape(op: Op, system: SystemForms, node: Apply) -> Affine:
    _keeps_batch(system, node, system.batch == 0)
    sizes = tuple(system.sizes(node.outputs[0]))
    return _linear(
        system, node, lambda part, lead: part.reshape((*tuple(part.shape)[:lead], *sizes))
    )


@rule.register(Subtensor)
def _subtensor(op: Op, system: SystemForms, node: Apply) -> Affine:
    indices = tuple(indices_from_subtensor(node.inputs[1:], node.op.idx_list))
    _keeps_batch(system, node, all(index == slice(None) for index in indices[: system.batch]))
    turned = all(_is_whole(index) for index in indices)
    return _linear(system, node, lambda part, lead: part[(*_all(lead), *indices)], covers=turned)


@rule.register(IncSubtensor)
def _inc_subtensor(op: Op, system: SystemForms, node: Apply) -> Affine:
    base, added, *places = node.inputs
    if any(place in system.dependent for place in places):
        raise NotAffineError(f"{name_of(node.outputs[0])} is nonlinear in the state")
    indices = tuple(indices_from_subtensor(places, node.op.idx_list))
    _keeps_batch(system, node, all(index == slice(None) for index in indices[: system.batch]))
    missing = base[indices].type.ndim - added.type.ndim
    _keeps_batch(system, node, not (system.batch and missing))
    change = pt.set_subtensor if node.op.set_instead_of_inc else pt.inc_subtensor

    def changed(whole: Variable, part: Variable, lead: int) -> Variable:
        target = whole[(*_all(lead), *indices)]
        return change(target, _with_axes(part, lead, missing))

    forms = [system.form(base), system.form(added)]
    blocks = {}
    for k in dict.fromkeys(k for form in forms for k in form.blocks):
        own = [form.blocks.get(k) for form in forms]
        whole, part = (
            system.whole(k, block, variable)
            for block, variable in zip(own, (base, added), strict=True)
        )
        kept = own if not node.op.set_instead_of_inc else [None, own[1]]
        whole, part = _same_batch(system, [whole, part])
        both = _of_both(own, changed(whole, part, 1))
        both.covers = any(block is not None and block.covers for block in kept)
        blocks[k] = both
    offset = None
    if any(form.offset is not None for form in forms):
        whole = system.whole_offset(forms[0].offset, base)
        offset = changed(whole, system.whole_offset(forms[1].offset, added), 0)
    return Affine(blocks, offset)


def _with_units(variable: Variable, axes: set[int]) -> Variable:
    """Return a variable with axes of size one where the types do not say so."""
    unknown = [axis for axis in axes if variable.type.shape[axis] != 1]
    return pt.specify_broadcastable(variable, *unknown) if unknown else variable


def _times(matrix: Variable, from_left: bool) -> Callable[[Variable], Variable]:
    """Return what multiplies the last axes of an array by a matrix."""

    def product(value: Variable) -> Variable:
        if matrix.type.ndim == 2 and value.type.ndim == 3:
            if from_left and value.type.shape[1] == 1:
                return pt.dot(value[:, 0, :], matrix)[:, None, :]
            if not from_left and value.type.shape[2] == 1:
                return pt.dot(value[:, :, 0], matrix.T)[:, :, None]
        return pt.matmul(value, matrix) if from_left else pt.matmul(matrix, value)

    return product


def _columns(matrix: Variable, from_left: bool) -> Variable:
    """Return the Jacobian of the product of a matrix and the state itself, a vector."""
    ndim = matrix.type.ndim
    lead = range(ndim - 2)
    if from_left:
        return matrix.dimshuffle(ndim - 2, *lead, "x", ndim - 1)
    return matrix.dimshuffle(ndim - 1, *lead, ndim - 2, "x")


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
