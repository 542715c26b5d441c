r"""Several values that a step makes from one another by linear maps, as one vector.

With the recurrent values of a loop laid out as vectors ``s_1 … s_P`` (a matrix row by row, a number
as one item), every variable `v` of the body that depends on them has, if the step is affine, a
form

    v[…] = Σ_j Σ_a s_j[a] J_j[a, …] + c[…]

where the Jacobians `J_j` and `c` do not depend on the `s_j`. Every linear operation leads from
forms to forms by acting on the axes of `J_j` that follow the first: joins, parts, reshapes and
transpositions need no thought of what they do to a matrix. The next values together are then one
vector ``s' = s W + c`` with the blocks of `W` read off the forms.

Batch axes, if there are any, lead the axes of every variable that depends on a state; the basis
runs over what follows them. A Jacobian has size one along axes where it does not vary.

Joining must not change what non-finite numbers do: a value that does not read another one must not
become NaN with it. So the *structure* of `W`, which of its items are there at all, is found
by the same propagation with ones in the place of all factors. (Jacobians along a graph: A.
Griewank and A. Walther, "Evaluating derivatives", 2008, chapter 3.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import Alloc, Join, MakeVector, Split
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.math import Sum as TensorSum
from pytensor.tensor.reshape import JoinDims, SplitDims
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib.analysis.matrix_affine import NotAffineError, is_minus_one, name_of, plus
from scanlib.analysis.system_rules import Affine, Jacobian, PartRules, Sizes
from scanlib.ops.graph import constant_integer, depends_on

_LARGEST_CONSTANT = 4096  # items of an array that the graph holds rather than makes


class SystemForms(PartRules):
    """Computes forms of the variables of a body.

    Parameters
    ----------
    sources : sequence of Variable
        The body's variables of the recurrent values, all of one dtype.
    targets : sequence of Variable
        Their next values.
    batch : int
        How many leading axes are batches.
    sizes : callable
        Gives the shape of a body variable without reading a state.
    structure : bool
        Whether to put ones in the place of all factors and leave the offsets out.

    Raises
    ------
    NotAffineError
        If a next value is of another form; the text says which variable is in the way.
    """

    def __init__(
        self,
        sources: Sequence[Variable],
        targets: Sequence[Variable],
        batch: int,
        sizes: Sizes,
        structure: bool = False,
    ) -> None:
        self.sources, self.batch, self.sizes, self.structure = sources, batch, sizes, structure
        self.dtype = sources[0].type.dtype
        self.multiplies = False
        self.dependent = depends_on(list(targets), sources)
        self.forms: dict[Variable, Affine] = {}
        self.bases: dict[int, Variable] = {}
        for k, source in enumerate(sources):
            core = source.type.ndim - batch
            order = tuple(range(source.type.ndim))
            if core != 1:
                self.bases[k] = self.basis(k)
            start = Jacobian(None, order) if core == 1 else Jacobian(self.bases[k], full=core == 0)
            start.covers = True
            self.forms[source] = Affine({k: start})
        for node in toposort(list(targets), blockers=list(sources)):
            if any(out in self.dependent for out in node.outputs):
                for out, form in zip(node.outputs, self.of_node(node), strict=True):
                    self.forms.setdefault(out, form)

    def form(self, variable: Variable) -> Affine:
        """Return the form of a variable; one that reads no state is all offset.

        An operation with a state converts it to the state's dtype: small integers would wrap
        around otherwise, and truth values have no sign.
        """
        if variable in self.forms:
            return self.forms[variable]
        return Affine({}, None if self.structure else pt.cast(variable, self.dtype))

    def size(self, k: int) -> Variable:
        """Return the number of items of one state, without its batch."""
        sizes = list(self.sizes(self.sources[k]))[self.batch :]
        known = [constant_integer(size) for size in sizes]
        if None not in known:
            return pt.constant(math.prod(size for size in known if size is not None), dtype="int64")
        return sizes[0] if len(sizes) == 1 else pt.mul(*sizes)

    def basis(self, k: int) -> Variable:
        """Return the Jacobian of a state by itself."""
        source = self.sources[k]
        sizes = list(self.sizes(source))[self.batch :]
        ones = (1,) * self.batch
        if not sizes:
            return pt.constant(np.ones((1, *ones), self.dtype))
        eye = pt.eye(self.size(k), dtype=self.dtype)
        if len(sizes) == 1:
            return eye.dimshuffle(0, *["x"] * self.batch, 1)
        return eye.reshape((self.size(k), *ones, *sizes))

    def value(self, k: int, block: Jacobian) -> Variable:
        """Return a Jacobian as an array."""
        if block.value is not None:
            return block.value
        return self.basis(k).dimshuffle(0, *(p if p == "x" else p + 1 for p in block.order))

    def whole(self, k: int, block: Jacobian | None, variable: Variable) -> Variable:
        """Return a Jacobian with all axes but batches as long as those of its variable."""
        sizes = list(self.sizes(variable))
        if block is None:
            lead = [_one()] * self.batch
            return _filled(0, (self.size(k), *lead, *sizes[self.batch :]), self.dtype)
        value = self.value(k, block)
        pairs = list(zip(value.type.shape[1:], variable.type.shape, strict=True))[self.batch :]
        if all(own != 1 or other == 1 for own, other in pairs):
            return value
        lead = list(value.shape)[1 : 1 + self.batch]
        return pt.broadcast_to(value, (self.size(k), *lead, *sizes[self.batch :]))

    def whole_offset(self, offset: Variable | None, variable: Variable) -> Variable:
        """Return an offset in the shape of its variable."""
        sizes = self.sizes(variable)
        if offset is None:
            return _filled(0, tuple(sizes), self.dtype)
        pairs = zip(offset.type.shape, variable.type.shape, strict=True)
        if all(own != 1 or other == 1 for own, other in pairs):
            return offset
        return pt.broadcast_to(offset, tuple(sizes))

    def factor(self, variable: Variable) -> Variable:
        """Return a factor, or ones in its place."""
        if not self.structure:
            return pt.cast(variable, self.dtype)
        shape = [
            size if known is None else pt.constant(known, dtype="int64")
            for known, size in zip(variable.type.shape, self.sizes(variable), strict=True)
        ]
        return _filled(1, shape, self.dtype)

    # Operations

    def of_node(self, node: Apply) -> list[Affine]:
        """Return the forms of a node's outputs."""
        op, out = node.op, node.outputs[0]
        if any(getattr(each.type, "dtype", None) != self.dtype for each in node.outputs):
            raise NotAffineError(f"{name_of(out)} has another dtype than the state")
        if isinstance(op, SpecifyShape) and node.inputs[0] in self.dependent:
            return [self.form(node.inputs[0])]
        if isinstance(op, DimShuffle):
            return [self.dimshuffle(node)]
        if isinstance(op, Elemwise):
            return [self.elemwise(node)]
        core = op.core_op if isinstance(op, Blockwise) else op
        if isinstance(core, Dot):
            self.multiplies = True
            return [self.dot(node)]
        for kinds, rule in self.rules():
            if isinstance(op, kinds):
                return rule(node)
        raise NotAffineError(f"{name_of(out)} reads the state")

    def rules(self) -> list[tuple[Any, Callable[[Apply], list[Affine]]]]:
        return [
            (TensorSum, self.sum),
            (Join, self.join),
            (MakeVector, self.stack),
            (Split, self.split),
            (Alloc, self.alloc),
            ((Reshape, JoinDims, SplitDims), self.reshape),
            (Subtensor, self.subtensor),
            (IncSubtensor, self.inc_subtensor),
        ]

    def dimshuffle(self, node: Apply) -> Affine:
        order, out = node.op.new_order, node.outputs[0]
        self.keeps_batch(node, order[: self.batch] == tuple(range(self.batch)))
        form = self.form(node.inputs[0])

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

    def elemwise(self, node: Apply) -> Affine:
        scalar, inputs, out = node.op.scalar_op, node.inputs, node.outputs[0]
        if isinstance(scalar, ps.Add):
            return self.total([(1, inp) for inp in inputs])
        if isinstance(scalar, ps.Sub):
            return self.total([(1, inputs[0]), (-1, inputs[1])])
        if isinstance(scalar, ps.Neg):
            return self.total([(-1, inputs[0])])
        varying = [inp for inp in inputs if inp in self.dependent]
        if isinstance(scalar, ps.Mul) and len(varying) == 1:
            form = self.form(varying[0])
            for factor in inputs:
                if factor is varying[0] or (self.structure and is_minus_one(factor)):
                    continue
                form = self.scaled(form, factor, lambda part, by: part * by)
            return form
        if isinstance(scalar, ps.TrueDiv) and varying == [inputs[0]]:
            return self.scaled(self.form(inputs[0]), inputs[1], lambda part, by: part / by)
        raise NotAffineError(f"{name_of(out)} is nonlinear in the state")

    def total(self, summands: list[tuple[int, Variable]]) -> Affine:
        """Return the form of a sum, each part with its sign."""
        blocks: dict[int, Jacobian] = {}
        offset = None
        for sign, inp in summands:
            form = self.form(inp)
            if len(summands) == 1 and sign > 0:
                return form
            for k, block in form.blocks.items():
                value = self.value(k, block)
                if sign < 0 and not self.structure:
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

    def scaled(
        self, form: Affine, by: Variable, apply: Callable[[Variable, Variable], Variable]
    ) -> Affine:
        """Return a form multiplied or divided by a factor."""
        factor = self.factor(by)
        spread = factor.dimshuffle("x", *range(factor.type.ndim))
        blocks = {}
        for k, block in form.blocks.items():
            value = self.value(k, block)
            scaled = apply(value, spread)
            if not self.structure and (block.value is None or value is self.bases.get(k)):
                # Of a state by itself, what is not finite must stay where it is.
                scaled = pt.switch(value, apply(pt.ones_like(spread), spread), pt.zeros_like(value))
            blocks[k] = block.moved(scaled)
        return Affine(blocks, None if form.offset is None else apply(form.offset, factor))

    # Products of matrices

    def dot(self, node: Apply) -> Affine:
        left, right = node.inputs
        out = node.outputs[0]
        if left in self.dependent and right in self.dependent:
            raise NotAffineError(f"{name_of(out)} is nonlinear in the state")
        if left.type.ndim != right.type.ndim or left.type.ndim < 2:
            raise NotAffineError(f"{name_of(out)} is no product of two matrices")
        from_left = left in self.dependent
        state, matrix = (left, right) if from_left else (right, left)
        ndim = state.type.ndim
        contracted = ndim - 1 if from_left else ndim - 2
        self.keeps_batch(node, contracted >= self.batch)
        form, factor = self.form(state), self.factor(matrix)
        others = [k for k in range(self.batch, ndim) if k != contracted]
        alone = all(state.type.shape[k] == 1 for k in others)
        product = _times(factor, from_left)
        blocks = {}
        for k, block in form.blocks.items():
            if block.value is None and block.order[contracted] == self.batch:
                blocks[k] = Jacobian(_columns(factor, from_left), full=True)
                continue
            value = product(self.whole(k, block, state))
            blocks[k] = Jacobian(value, full=block.full or (alone and block.covers))
        offset = form.offset
        if offset is not None:
            whole = self.whole_offset(offset, state)
            offset = node.op(whole, right) if from_left else node.op(left, whole)
        return Affine(blocks, offset)


def _filled(value: int, sizes: Sequence[Variable], dtype: str) -> Variable:
    """Return an array of one number, a constant where it is small and its shape is known."""
    known = [size for size in map(constant_integer, sizes) if size is not None]
    if len(known) == len(sizes) and math.prod(known) <= _LARGEST_CONSTANT:
        return pt.constant(np.full(known, value, dtype))
    return pt.full(tuple(sizes), np.asarray(value, dtype))


def _one() -> Variable:
    return pt.constant(1, dtype="int64")


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
