r"""Linear forms of a step's variables in its states: one propagation, operation by operation.

If a step is affine, every variable `v` of its body that depends on the states ``s_1 … s_P`` is

    v[o] = Σ_k Σ_u C_k[u, o] s_k[i] + c[o]

where the *blocks* `C_k` and the offset `c`, the block of a state that is always one, depend on no
state. An axis of `v` may be *tied* to an
axis of a state: it runs along it, and `v` reads that state at its own place there, as elementwise
work, the members of a batch and the columns of ``A @ S`` do. The places `i` in the state are those
of the tied axes `o` and, for axes that nothing is tied to, the summation index `u`. So the state
itself has all axes tied and ``C = 1``; ``w * h`` has ``C = w``; ``A @ h`` is tied to nothing and
has ``C[j, i] = A[i, j]``.

Axes stay tied as long as the operations allow. What mixes the items of an axis, such as a join, a
part or a reshape, first *loosens* it, which puts an identity matrix into `C`, and then acts on the
axes of `C` that belong to the variable: a linear operation needs no more thought than that.

Joining states must not change what non-finite numbers do: a value that does not read another one
must not become NaN with it. The *structure* of a form, which items of its blocks are there at all,
is found by the same propagation with ones in the place of all factors. (Jacobians along a graph: A.
Griewank and A. Walther, "Evaluating derivatives", 2008, chapter 3.)

A matrix recurrence is read off the forms. In the real semiring the next value is a matrix times the
state plus something, which its linear form says. In the log and tropical semirings it is ``⊕_j
(A[i, j] + h[j]) + c[i]``: the reduction ``⊕`` over an axis of the state is looked for, and the form
of what it reads must be the state itself plus a matrix. The smallest of numbers may be written as
minus the largest of their opposites.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from operator import mul, truediv
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import Alloc, Join, MakeVector, Split
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot, Max, Min
from pytensor.tensor.math import Sum as TensorSum
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib._compat import LOG_SUM_EXP, join_of, split_of
from scanlib.analysis.scalar_values import describe
from scanlib.lengths.numbers import constant_index, constant_integer, indices_of
from scanlib.ops.graph import applies, core_op, depends_on, with_axes

_LARGEST_CONSTANT = 4096  # items of an array that the graph holds rather than makes

Sizes = Callable[[Variable], Sequence[Variable]]
Ties = tuple[int | None, ...]


class NotAffineError(Exception):
    """A variable is no linear map of the states plus something; the text says why."""


@dataclass(frozen=True)
class Block:
    """What a variable is to one state; see the module's text.

    `ties` has for each axis of the variable the axis of the state that it runs along, or None.
    `value` is `C`: one axis for each axis of the state that nothing is tied to, in order, then
    those of the variable, of size one where `C` does not vary; None stands for one. It is `full` if
    no item of `C` is missing from the structure, and `covers` if every number of the state stands
    somewhere in the variable, so that a product of the variable with a matrix misses none.
    """

    ties: Ties
    value: Variable | None = None
    full: bool = True
    covers: bool = True


OFFSET = -1  # the state that is always one, a number

# What a variable is to all states that it reads: the blocks by the number of the state.
Form = dict[int, Block]


class LinearForms:
    """The forms of the variables from some states, all of one dtype, to some targets.

    `sizes` gives the shape of a body variable without reading a state. `structure` is to put ones
    in the place of all factors and leave the offsets out. `NotAffineError` if a target is of
    another form; the text says which variable is in the way.
    """

    def __init__(
        self,
        sources: Sequence[Variable],
        targets: Sequence[Variable],
        sizes: Sizes,
        structure: bool = False,
    ) -> None:
        self.sources, self.sizes, self.structure = list(sources), sizes, structure
        self.dtype = sources[0].type.dtype
        self.multiplies = False
        self.dependent = depends_on(targets, sources)
        self.forms: dict[Variable, Form] = {}
        for k, source in enumerate(sources):
            self.forms[source] = {k: Block(tuple(range(source.type.ndim)))}
        for node in toposort(targets, blockers=list(sources)):
            if any(out in self.dependent for out in node.outputs):
                for out, form in zip(node.outputs, self._of_node(node), strict=True):
                    self.forms.setdefault(out, form)

    def _of_node(self, node: Apply) -> list[Form]:
        op, out = node.op, node.outputs[0]
        dtypes = {getattr(each.type, "dtype", None) for each in node.outputs}
        if dtypes != {self.dtype}:
            raise NotAffineError(f"{describe(out)} has another dtype than the state")
        if isinstance(op, Blockwise) and isinstance(op.core_op, Dot):
            op = op.core_op
        found = rule(op, self, node)
        return [found] * len(node.outputs) if isinstance(found, dict) else found

    def form(self, variable: Variable) -> Form:
        """Return the form of a variable; one that reads no state is all offset.

        An operation with a state converts it to the state's dtype: small integers would wrap
        around otherwise, and truth values have no sign.
        """
        if variable in self.forms:
            return self.forms[variable]
        if self.structure:
            return {}
        return {OFFSET: Block((None,) * variable.type.ndim, self._converted(variable))}

    def offset(self, variable: Variable) -> Variable | None:
        """Return the offset of a variable, to be broadcast; None for none."""
        found = self.form(variable).get(OFFSET)
        return None if found is None else found.value

    def only_first(self, node: Apply) -> Form:
        """Return the form of a node's first input; no other one may depend on a state."""
        if any(self.forms.get(inp) for inp in node.inputs[1:]):
            raise NotAffineError(f"{describe(node.outputs[0])} is nonlinear in the state")
        return self.form(node.inputs[0])

    # Sizes and factors

    def _converted(self, variable: Variable) -> Variable:
        if isinstance(variable, Constant):
            return pt.constant(np.asarray(variable.data, self.dtype))
        return pt.cast(variable, self.dtype)

    def factor(self, variable: Variable) -> Variable:
        """Return a factor, or ones in its place."""
        if not self.structure:
            return self._converted(variable)
        pairs = zip(variable.type.shape, self.sizes(variable), strict=True)
        return self.filled(1, [size if known is None else _size(known) for known, size in pairs])

    def filled(self, value: int, sizes: Sequence[Variable]) -> Variable:
        """Return an array of one number, a constant where it is small and its shape is known."""
        known = [size for size in map(constant_integer, sizes) if size is not None]
        if len(known) == len(sizes) and math.prod(known) <= _LARGEST_CONSTANT:
            return pt.constant(np.full(known, value, self.dtype))
        return pt.full(tuple(sizes), np.asarray(value, self.dtype))

    def size(self, k: int, lead: int = 0) -> Variable:
        """Return the number of items of one state, but for its first axes."""
        sizes = list(self.sizes(self.sources[k]))[lead:]
        known = [constant_integer(size) for size in sizes]
        if None not in known:
            return _size(math.prod(size for size in known if size is not None))
        return sizes[0] if len(sizes) == 1 else pt.mul(*sizes)

    # Blocks

    def free(self, k: int, block: Block) -> list[int]:
        """Return the axes of a state that nothing is tied to."""
        ndim = 0 if k == OFFSET else self.sources[k].type.ndim
        return [axis for axis in range(ndim) if axis not in block.ties]

    def value(self, block: Block) -> Variable:
        """Return `C` as an array."""
        if block.value is None:
            return pt.constant(np.ones((1,) * len(block.ties), self.dtype))
        return block.value

    def whole(
        self, k: int, block: Block, variable: Variable, places: Sequence[int] | None = None
    ) -> Variable:
        """Return `C` with some axes, or all that are not tied, as long as those of its variable."""
        if places is None:
            places = [o for o, tie in enumerate(block.ties) if tie is None]
        value, n = self.value(block), len(self.free(k, block))
        known, wanted = value.type.shape[n:], variable.type.shape
        if all(known[o] != 1 or wanted[o] == 1 for o in places):
            return value
        shape = list(value.shape)
        for o in places:
            shape[n + o] = self.sizes(variable)[o]
        return pt.broadcast_to(value, shape)

    def zeros(self, k: int, variable: Variable, ties: Ties | None = None) -> Block:
        """Return the block of a variable that does not read a state."""
        ties = (None,) * variable.type.ndim if ties is None else ties
        sizes = [self.sizes(self.sources[k])[axis] for axis in self.free(k, Block(ties))]
        for tie, size in zip(ties, self.sizes(variable), strict=True):
            sizes.append(size if tie is None else _size(1))
        return Block(ties, self.filled(0, sizes), full=False, covers=False)

    def along(self, k: int, block: Block, place: int, matrix: Variable) -> Block:
        """Return the block of a product with a matrix along a tied axis, the variable's axis
        `place`.

        The first axis of the matrix is summed over; then it has the axes of the product, with its
        rows at `place`.
        """
        axis, free = block.ties[place], self.free(k, block)
        assert axis is not None
        at, n = sum(other < axis for other in free), len(free)
        order: list[Any] = ["x"] * n
        value = matrix.dimshuffle(*_inserted(order, at, 0), *range(1, matrix.type.ndim))
        if block.value is not None:
            after = [n + o if o != place else "x" for o in range(len(block.ties))]
            order = _inserted(list(range(n)), at, n + place)
            value = value * block.value.dimshuffle(*order, *after)
        ties = _with(block.ties, place, None)
        return replace(block, ties=ties, value=value)

    def loosened(self, k: int, block: Block, places: Sequence[int]) -> Block:
        """Return a block of which some axes are tied to nothing."""
        if all(block.ties[place] is None for place in places):
            return block
        source = self.sources[k]
        for place in places:
            axis, free = block.ties[place], self.free(k, block)
            if axis is None:
                continue
            at, n, ndim = sum(other < axis for other in free), len(free), len(block.ties)
            one = source.type.shape[axis] == 1
            value = self.value(block).dimshuffle(
                *_inserted(list(range(n)), at, "x"), *range(n, n + ndim)
            )
            if not one:
                order: list[Any] = ["x"] * (n + 1 + ndim)
                order[at], order[n + 1 + place] = 0, 1
                eye = pt.eye(self.sizes(source)[axis], dtype=self.dtype).dimshuffle(*order)
                # A choice, not a product: what is not finite stays where it is.
                zero = pt.zeros((), self.dtype)
                value = eye if block.value is None else pt.switch(eye, value, zero)
            block = replace(
                block, ties=_with(block.ties, place, None), value=value, full=block.full and one
            )
        return block

    def spread(self, k: int, block: Block, source: Variable, out: Variable) -> Block:
        """Return a block with no axis tied along which its variable is broadcast."""
        pairs = zip(source.type.broadcastable, out.type.broadcastable, strict=True)
        return self.loosened(k, block, [o for o, (own, new) in enumerate(pairs) if own and not new])

    def alike(self, k: int, blocks: Sequence[Block]) -> list[Block]:
        """Return blocks tied to the same axes."""
        ties = [block.ties for block in blocks]
        differ = [o for o, own in enumerate(zip(*ties, strict=True)) if len(set(own)) > 1]
        return [self.loosened(k, block, differ) for block in blocks]

    def summed(self, k: int, blocks: Sequence[Block]) -> Block:
        """Return the block of a sum."""
        if len(blocks) == 1:
            return blocks[0]
        blocks = self.alike(k, blocks)
        value = self.value(blocks[0])
        for block in blocks[1:]:
            value = value + self.value(block)
        return replace(
            blocks[0],
            value=value,
            full=any(block.full for block in blocks),
            covers=any(block.covers for block in blocks),
        )

    def scaled(
        self, k: int, block: Block, factor: Variable, apply: Callable[[Any, Any], Variable]
    ) -> Block:
        """Return a block multiplied or divided by a factor of the rank of its variable."""
        if block.value is None:
            one = np.ones((), self.dtype)
            value = factor if apply is mul else apply(one, factor)
            return replace(block, value=value)
        spread = ["x"] * len(self.free(k, block))
        value = apply(block.value, factor.dimshuffle(*spread, *range(factor.type.ndim)))
        return replace(block, value=value)

    def mixed(self, k: int, block: Block, variable: Variable, places: Sequence[int]) -> Block:
        """Return a block that is ready for an operation that mixes the items of some axes."""
        block = self.loosened(k, block, places)
        return replace(block, value=self.whole(k, block, variable, places))

    def linear(
        self, node: Apply, places: Sequence[int], change: Callable[[Variable, int], Any]
    ) -> dict[int, tuple[Block, Any]]:
        """Apply a linear function of a node's first input that mixes the items of some axes.

        Returned is, for each state, the block that is `mixed`, and what the function makes of its
        value, told how many axes come before the input's.
        """
        found = {}
        for k, block in self.only_first(node).items():
            block = self.mixed(k, block, node.inputs[0], places)
            found[k] = block, change(self.value(block), len(self.free(k, block)))
        return found


@singledispatch
def rule(op: Op, forms: LinearForms, node: Apply) -> Form | list[Form]:
    """Return the forms of a node's outputs, by its Op: one for all of them, or a list."""
    raise NotAffineError(f"{describe(node.outputs[0])} reads the state")


# What is affine, and the logarithms of sums and extremes that `in_other_semiring` looks for.
_MAYBE_AFFINE = (ps.Add, ps.Sub, ps.Neg, ps.Mul, ps.TrueDiv, ps.Second, ps.Exp, ps.Log)


def check_operations(
    sources: Sequence[Variable], targets: Sequence[Variable], reads_shape: Callable[[Apply], bool]
) -> None:
    """Refuse, by `NotAffineError` and before any form is made, steps that do to a state what is in
    no form."""
    dependent = set(sources)
    for node in toposort(targets, blockers=list(sources)):
        own = [inp for inp in node.inputs[reads_shape(node) :] if inp in dependent]
        if not own:
            continue
        op = core_op(node)
        if LOG_SUM_EXP is not None and isinstance(op, LOG_SUM_EXP):
            pass
        elif rule.dispatch(type(op)) is rule.dispatch(object):
            raise NotAffineError(f"{describe(node.outputs[0])} reads the state")
        elif (isinstance(op, Dot) and len(own) > 1) or (
            isinstance(op, Elemwise) and not isinstance(op.scalar_op, _MAYBE_AFFINE)
        ):
            raise NotAffineError(f"{describe(node.outputs[0])} is nonlinear in the state")
        dependent.update(node.outputs)


# Axes


@rule.register(SpecifyShape)
def _specify_shape(op: Op, forms: LinearForms, node: Apply) -> Form:
    return forms.only_first(node)


@rule.register(DimShuffle)
def _dimshuffle(op: Op, forms: LinearForms, node: Apply) -> Form:
    order = node.op.new_order
    lost = [k for k in range(node.inputs[0].type.ndim) if k not in order]
    blocks = {}
    for k, block in forms.form(node.inputs[0]).items():
        block = forms.loosened(k, block, lost)
        value, n = block.value, len(forms.free(k, block))
        if value is not None:
            value = _with_units(value, [n + o for o in lost])
            value = value.dimshuffle(*range(n), *(o if o == "x" else n + o for o in order))
        ties = tuple(None if o == "x" else block.ties[o] for o in order)
        blocks[k] = replace(block, ties=ties, value=value)
    return blocks


@rule.register(Alloc)
def _alloc(op: Op, forms: LinearForms, node: Apply) -> Form:
    source, out = node.inputs[0], node.outputs[0]
    missing = out.type.ndim - source.type.ndim
    blocks = {}
    for k, block in forms.only_first(node).items():
        pairs = zip(source.type.broadcastable, out.type.broadcastable[missing:], strict=True)
        grown = [o for o, (own, new) in enumerate(pairs) if own and not new]
        block = forms.loosened(k, block, grown)
        value = forms.value(block)
        value = with_axes(value, len(forms.free(k, block)), missing)
        blocks[k] = replace(block, ties=(None,) * missing + block.ties, value=value)
    return blocks


@rule.register(Reshape)
@rule.register(JoinDims)
@rule.register(SplitDims)
def _reshape(op: Op, forms: LinearForms, node: Apply) -> Form:
    source, out = node.inputs[0], node.outputs[0]
    sizes = tuple(forms.sizes(out))

    def change(whole: Variable, lead: int) -> Variable:
        return whole.reshape((*tuple(whole.shape)[:lead], *sizes))

    made = forms.linear(node, range(source.type.ndim), change)
    ties = (None,) * out.type.ndim
    return {
        k: replace(block, ties=ties, value=value, covers=False)
        for k, (block, value) in made.items()
    }


# Elementwise operations


@rule.register(Elemwise)
def _elemwise(op: Op, forms: LinearForms, node: Apply) -> Form:
    scalar, inputs, out = node.op.scalar_op, node.inputs, node.outputs[0]
    if isinstance(scalar, ps.Add):
        return _total(forms, [(1, inp) for inp in inputs], out)
    if isinstance(scalar, ps.Sub):
        return _total(forms, [(1, inputs[0]), (-1, inputs[1])], out)
    if isinstance(scalar, ps.Neg):
        return _total(forms, [(-1, inputs[0])], out)
    varying = [inp for inp in inputs if inp in forms.dependent]
    if isinstance(scalar, ps.Mul) and len(varying) == 1:
        factors = [forms.factor(inp) for inp in inputs if inp is not varying[0]]
        factor = factors[0] if len(factors) == 1 else pt.mul(*factors)
        return _scaled(forms, varying[0], factor, out, mul)
    if isinstance(scalar, ps.TrueDiv) and varying == [inputs[0]]:
        return _scaled(forms, inputs[0], forms.factor(inputs[1]), out, truediv)
    raise NotAffineError(f"{describe(out)} is nonlinear in the state")


def _scaled(
    forms: LinearForms,
    variable: Variable,
    factor: Variable,
    out: Variable,
    apply: Callable[[Any, Any], Variable],
) -> Form:
    return {
        k: forms.scaled(k, forms.spread(k, block, variable, out), factor, apply)
        for k, block in forms.form(variable).items()
    }


def _total(forms: LinearForms, summands: list[tuple[int, Variable]], out: Variable) -> Form:
    """Return the form of a sum, each part with its sign."""
    found: dict[int, list[Block]] = {}
    minus = pt.constant(np.full((1,) * out.type.ndim, -1, forms.dtype))
    for sign, inp in summands:
        for k, block in forms.form(inp).items():
            block = forms.spread(k, block, inp, out)
            if sign < 0 and not forms.structure:
                block = forms.scaled(k, block, minus, mul)
            found.setdefault(k, []).append(block)
    return {k: forms.summed(k, parts) for k, parts in found.items()}


# Products and sums


@rule.register(Dot)
def _dot(op: Op, forms: LinearForms, node: Apply) -> Form:
    forms.multiplies = True
    left, right = node.inputs
    out = node.outputs[0]
    if left in forms.dependent and right in forms.dependent:
        raise NotAffineError(f"{describe(out)} is nonlinear in the state")
    from_left = left in forms.dependent
    source, matrix = (left, right) if from_left else (right, left)
    factor, ndim = forms.factor(matrix), out.type.ndim
    place, other = (ndim - 1, ndim - 2) if from_left else (ndim - 2, ndim - 1)
    # The axes that are summed over, of the batch, and of the rows; all as axes of the product.
    rows = ["x", ndim - 1] if from_left else [ndim - 2, "x"]
    columns = factor.dimshuffle(ndim - (2 if from_left else 1), *range(ndim - 2), *rows)
    blocks = {}
    for k, block in forms.form(source).items():
        grown = [
            o
            for o in range(ndim - 2)
            if source.type.broadcastable[o] and not out.type.broadcastable[o]
        ]
        block = forms.loosened(k, block, grown)
        if block.ties[place] is not None:
            blocks[k] = forms.along(k, block, place, columns)
            continue
        alone = block.ties[other] is not None or source.type.shape[other] == 1
        whole = forms.whole(k, block, source, [place])
        if forms.free(k, block):
            value = _product(whole, factor, from_left)
        else:
            value = node.op(whole, factor) if from_left else node.op(factor, whole)
        blocks[k] = replace(block, value=value, full=block.full or (alone and block.covers))
    return blocks


def _product(value: Variable, matrix: Variable, from_left: bool) -> Variable:
    """Return the product of the last axes of an array with a matrix."""
    if matrix.type.ndim == 2 and from_left and value.type.shape[-2] == 1:
        return pt.expand_dims(pt.matmul(value[..., 0, :], matrix), -2)
    if matrix.type.ndim == 2 and not from_left and value.type.shape[-1] == 1:
        return pt.expand_dims(pt.matmul(value[..., 0], matrix.T), -1)
    return pt.matmul(value, matrix) if from_left else pt.matmul(matrix, value)


@rule.register(CAReduce)
def _sum(op: Op, forms: LinearForms, node: Apply) -> Form:
    if not isinstance(op, TensorSum):
        raise NotAffineError(f"{describe(node.outputs[0])} is nonlinear in the state")
    source = node.inputs[0]
    ndim = source.type.ndim
    reduced = list(range(ndim)) if node.op.axis is None else list(node.op.axis)
    blocks = {}
    for k, block in forms.only_first(node).items():
        value, ties = forms.whole(k, block, source, reduced), list(block.ties)
        free = forms.free(k, block)
        for o in sorted(reduced, reverse=True):
            axis, n = ties.pop(o), len(free)
            if axis is None:
                value = value.sum(axis=n + o)
                continue
            at = sum(other < axis for other in free)
            rest = [place for place in range(n, value.type.ndim) if place != n + o]
            value = value.dimshuffle(*_inserted(list(range(n)), at, n + o), *rest)
            free.insert(at, axis)
        blocks[k] = replace(block, ties=tuple(ties), value=value, covers=False)
    return blocks


# Parts and joins


@rule.register(Subtensor)
def _subtensor(op: Op, forms: LinearForms, node: Apply) -> Form:
    ndim = node.inputs[0].type.ndim
    indices = _all_indices(node, ndim)
    places = [o for o, index in enumerate(indices) if index != slice(None)]
    kept = [o for o, index in enumerate(indices) if isinstance(index, slice)]
    turned = all(_is_whole(index) for index in indices)

    def change(whole: Variable, lead: int) -> Variable:
        return whole[(*_all(lead), *indices)]

    return {
        k: replace(
            block,
            ties=tuple(block.ties[o] for o in kept),
            value=value,
            covers=block.covers and turned,
        )
        for k, (block, value) in forms.linear(node, places, change).items()
    }


@rule.register(IncSubtensor)
def _inc_subtensor(op: Op, forms: LinearForms, node: Apply) -> Form:
    """The base, without the items that are set, plus what is written, in an array of zeros."""
    base, added, *places = node.inputs
    if any(place in forms.dependent for place in places):
        raise NotAffineError(f"{describe(node.outputs[0])} is nonlinear in the state")
    indices = _all_indices(node, base.type.ndim)
    kept = [o for o, index in enumerate(indices) if isinstance(index, slice)]
    missing = len(kept) - added.type.ndim
    # The axes of the base that are written from end to end, with those of what is added.
    same = {o: p - missing for p, o in enumerate(kept) if indices[o] == slice(None)}
    same = {o: p for o, p in same.items() if p >= 0 and not added.type.broadcastable[p]}
    mixed = [o for o in range(base.type.ndim) if o not in same]

    def place_of(lead: int) -> tuple[Any, ...]:
        return (*_all(lead), *indices)

    def without(whole: Variable, lead: int) -> Variable:
        return pt.set_subtensor(whole[place_of(lead)], 0) if node.op.set_instead_of_inc else whole

    def alone(k: int, block: Block) -> Variable:
        part, free = forms.value(block), forms.free(k, block)
        lead = len(free)
        # Sizes of what the loop is given: those of the part would be read off all that it is
        # computed from, at each write anew.
        sizes = [*(forms.sizes(forms.sources[k])[axis] for axis in free), *forms.sizes(base)]
        for axis in (*range(lead), *(lead + o for o in same)):
            own = axis if axis < lead else lead + same[axis - lead]
            if part.type.shape[own] == 1:
                sizes[axis] = _size(1)
        zeros = forms.filled(0, sizes)
        return pt.set_subtensor(zeros[place_of(lead)], with_axes(part, lead, missing))

    found: dict[int, list[Block]] = {}
    for k, block in forms.form(base).items():
        block = forms.mixed(k, block, base, mixed)
        value = without(forms.value(block), len(forms.free(k, block)))
        kept_all = not node.op.set_instead_of_inc
        full, covers = block.full and kept_all, block.covers and kept_all
        found[k] = [replace(block, value=value, full=full, covers=covers)]
    rest = [p for p in range(added.type.ndim) if p not in same.values()]
    for k, block in forms.form(added).items():
        block = forms.mixed(k, block, added, rest)
        value = alone(k, block)
        ties = [None if o in mixed else block.ties[same[o]] for o in range(base.type.ndim)]
        found.setdefault(k, []).append(replace(block, ties=tuple(ties), value=value, full=False))
    return {k: forms.summed(k, parts) for k, parts in found.items()}


@rule.register(Join)
def _join(op: Op, forms: LinearForms, node: Apply) -> Form:
    place, inputs = join_of(node)
    if place is None:
        raise NotAffineError(f"{describe(node.outputs[0])} joins along an axis that varies")
    return _joined(forms, inputs, place, lambda parts, place: pt.join(place, *parts))


@rule.register(MakeVector)
def _stack(op: Op, forms: LinearForms, node: Apply) -> Form:
    return _joined(forms, node.inputs, None, lambda parts, place: pt.stack(parts, axis=place))


def _joined(
    forms: LinearForms,
    inputs: Sequence[Variable],
    place: int | None,
    together: Callable[[Sequence[Variable], int], Variable],
) -> Form:
    """Return the form of inputs joined along one of their axes, or numbers along a new one."""
    own = [forms.form(inp) for inp in inputs]
    blocks = {}
    for k in dict.fromkeys(k for form in own for k in form):
        places = [] if place is None else [place]
        found = [forms.loosened(k, form[k], places) for form in own if k in form]
        found = forms.alike(k, found)
        ties, n = found[0].ties, len(forms.free(k, found[0]))
        given = iter(found)
        every = [
            next(given) if k in form else forms.zeros(k, inp, ties)
            for form, inp in zip(own, inputs, strict=True)
        ]
        short = zip(*(forms.value(b).type.broadcastable[n:] for b in every), strict=True)
        differ = [o for o, each in enumerate(short) if o == place or len(set(each)) > 1]
        pairs = zip(every, inputs, strict=True)
        wholes = [forms.whole(k, block, inp, differ) for block, inp in pairs]
        blocks[k] = Block(
            ties if place is not None else (None,),
            together(wholes, n + (place or 0)),
            full=all(block.full for block in every),
            covers=any(block.covers for block in every),
        )
    return blocks


@rule.register(Split)
def _split(op: Op, forms: LinearForms, node: Apply) -> list[Form]:
    _, place, splits = split_of(node)
    if place is None:
        raise NotAffineError(f"{describe(node.outputs[0])} is cut along an axis that varies")
    n_parts = len(node.outputs)

    def parts(whole: Variable, lead: int) -> list[Variable]:
        made = pt.split(whole, splits, n_splits=n_parts, axis=place + lead)
        return made if isinstance(made, list) else [made]

    results: list[Form] = [{} for _ in node.outputs]
    for k, (block, made) in forms.linear(node, [place], parts).items():
        for result, part in zip(results, made, strict=True):
            result[k] = replace(block, value=part, covers=False)
    return results


# Small things


def is_minus_one(variable: Variable) -> bool:
    """Whether a factor is the constant -1, which is how canonical bodies write a sign."""
    return isinstance(variable, Constant) and bool(np.all(variable.data == -1))


def _size(number: int) -> Variable:
    return pt.constant(number, dtype="int64")


def _with(ties: Ties, place: int, tie: int | None) -> Ties:
    return (*ties[:place], tie, *ties[place + 1 :])


def _inserted(values: list[Any], at: int, value: Any) -> list[Any]:
    return [*values[:at], value, *values[at:]]


def _with_units(variable: Variable, axes: Sequence[int]) -> Variable:
    """Return a variable with axes of size one where the types do not say so."""
    unknown = [axis for axis in axes if variable.type.shape[axis] != 1]
    return pt.specify_broadcastable(variable, *unknown) if unknown else variable


def _all(count: int) -> tuple[slice, ...]:
    return (slice(None),) * count


def _all_indices(node: Apply, ndim: int) -> tuple[Any, ...]:
    """Return one index for every axis."""
    indices = indices_of(node)
    return (*indices, *_all(ndim - len(indices)))


def _is_whole(index: Any) -> bool:
    """Whether an index takes all of an axis, in its order or in the other."""
    if not isinstance(index, slice) or index.start is not None or index.stop is not None:
        return False
    return index.step is None or constant_index(index.step) == -1


@dataclass
class MatrixRecurrence:
    """A recognized recurrence of body variables, along one axis of the state.

    The matrix has one axis for each other axis of the state, then `i` and `j`. The offset, if there
    is one, is added in the layout of the state, to be broadcast.
    """

    semiring: str
    axis: int
    matrix: Variable
    offset: Variable | None


def of_one_state(
    forms: LinearForms, following: Variable, at_any_cost: bool = False
) -> MatrixRecurrence | None:
    """Return the recurrence of one state, None if no full matrix acts along one of its axes.

    `at_any_cost`, one matrix of all numbers of the state may take the place of several that act
    along its axes, which are less work; `NotAffineError` if it may not.
    """
    block, offset = forms.form(following)[0], forms.offset(following)
    order = list(range(following.type.ndim))
    free = forms.free(0, block)
    mixed = [axis for axis in free if following.type.shape[axis] != 1]
    if len(mixed) > 1 and not at_any_cost:
        raise NotAffineError("matrices act along several axes of the state")
    if len(free) != 1 or not block.full:
        return None
    (axis,) = free
    if any(tie not in (own, None) for own, tie in zip(order, block.ties, strict=True)):
        return None
    others = [1 + k for k in order if k != axis]
    matrix = forms.value(block).dimshuffle(*others, 1 + axis, 0)
    return MatrixRecurrence("real", axis, matrix, offset)


def in_other_semiring(state: Variable, following: Variable, sizes: Sizes) -> Any:
    """Return ``⊕_j (A[i, j] + h[j]) + c[i]`` if the next value is that, else None."""
    dependent = depends_on([following], [state])
    reductions = [node for node in toposort([following]) if node.outputs[0] in dependent]
    found = [(node.outputs[0], own) for node in reductions if (own := _reduction(node)) is not None]
    if not found:
        return None
    reduced, (semiring, terms, axis) = found[-1]
    if axis is None or state in ancestors([following], blockers=[reduced]):
        return None
    try:
        forms = LinearForms([reduced], [following], sizes)
    except NotAffineError:
        return None
    block, offset = forms.form(following)[0], forms.offset(following)
    sign = 1 if block.value is None else -1
    if block.ties != tuple(range(state.type.ndim)):
        return None
    if sign < 0 and (semiring == "log" or not is_minus_one(forms.value(block))):
        return None
    if sign < 0:
        semiring = {"max": "min", "min": "max"}[semiring]
    matrix = _added_matrix(state, terms, axis, sign, sizes)
    if matrix is None:
        return None
    return MatrixRecurrence(semiring, state.type.ndim - 1, matrix, offset)


def _added_matrix(
    state: Variable, terms: Variable, axis: int, sign: int, sizes: Sizes
) -> Variable | None:
    """Return the matrix `A` of terms ``A[i, j] + h[j]`` that run along `j` on an axis.

    With a negative sign the terms are ``-(A[i, j] + h[j])``.
    """
    try:
        forms = LinearForms([state], [terms], sizes)
    except NotAffineError:
        return None
    last = state.type.ndim - 1
    block, added = forms.form(terms).get(0), forms.offset(terms)
    if block is None or added is None or block.ties[axis] != last:
        return None
    if sign > 0 and block.value is not None:
        return None
    if sign < 0 and (block.value is None or not is_minus_one(block.value)):
        return None
    rest = [tie for k, tie in enumerate(block.ties) if k != axis]
    if rest != [*range(last), None] or added.type.dtype != state.type.dtype:
        return None
    row = next(k for k, tie in enumerate(block.ties) if tie is None)
    if added.type.broadcastable[row] or added.type.broadcastable[axis]:
        return None
    matrix = added.dimshuffle(*(block.ties.index(k) for k in range(last)), row, axis)
    return matrix if sign > 0 else -matrix


def _reduction(node: Apply) -> tuple[str, Variable, int | None] | None:
    """Return the semiring, terms and axis of a reduction; None for anything else."""
    op = node.op
    if LOG_SUM_EXP is not None and isinstance(op, LOG_SUM_EXP):
        return "log", node.inputs[0], op.axis[0] if len(op.axis) == 1 else None
    if isinstance(op, Max | Min):
        semiring, terms = "max" if isinstance(op, Max) else "min", node.inputs[0]
    else:
        above = node.inputs[0].owner if applies(node, ps.Log) else None
        if above is None or not isinstance(above.op, TensorSum):
            return None
        exponential = above.inputs[0].owner
        if not applies(exponential, ps.Exp):
            return None
        semiring, op, terms = "log", above.op, exponential.inputs[0]
    axes = op.axis if isinstance(op, CAReduce) else None
    axes = tuple(range(terms.type.ndim)) if axes is None else tuple(axes)
    return semiring, terms, axes[0] if len(axes) == 1 else None
