"""What a loop computes beside its recurrence, for all steps at once.

Once the states of all steps are known, everything else a step computes is a map: it is evaluated
as a batch over time. `OverTime` does that node by node, with time as the first axis of what
varies; matrix products become one product for all steps where one side is the same at every
step. `OverTime.total` gives the sum over time of a variable, what an accumulator adds up: a sum of
outer products is one matrix product, ``Σ_t λ_t h_tᵀ = Λᵀ H``, and factors that do not vary leave
the sum.

PyTensor would evaluate some operations row by row, or not at all:

==========================  =======================================================
in a step                   for all steps
==========================  =======================================================
``E[i_t]``                  ``E[i]``, a gather of rows
``s[z_t] += v``             in an accumulator ``s[z] += v``: equal indices add up
``solve(A, b_t)``           one solve with `T` right sides, ``solve(A, Bᵀ)ᵀ``
``check(x_t, condition_t)`` one check that every step's condition holds
``x_t @ y_t`` in a batch    a product with one more batch axis
``x_t.reshape((-1, 2))``    one reshape; what -1 stands for follows from the sizes of a row
==========================  =======================================================

All of them give a result of zero rows for zero steps.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import toposort, walk
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar import basic as ps
from pytensor.scalar import upcast
from pytensor.tensor.basic import Join, ScalarFromTensor, Split
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import Dot
from pytensor.tensor.math import Sum as TensorSum
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.subtensor import IncSubtensor, indices_from_subtensor

from scanlib._compat import INDEX_READS, LOG_SUM_EXP, join_of, sorted_axis, split_of, vectorize_rule
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.gradient.cotangents import is_zeros
from scanlib.ops.graph import conform, core_op, row_type, substitute, with_axes
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Part, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.row_ops.checked_rows import checked_places
from scanlib.ops.row_ops.step_products import StepProducts
from scanlib.rewrites.over_time.split_cost import (
    is_function,
    multiplies_in_batches,
    outer_factors,
    varying_index,
)
from scanlib.rewrites.pytensor_rewrites import may_overflow, stabilize


class OverTime:
    """Evaluates body variables for all steps at once.

    The loop's non-sequences are the same at every step; `varying` has body variables that differ,
    and all their values, time first. `length` is the number of steps, where it is another than the
    loop's. `in_programs` says that the linker computes batches by programs of kernels.
    """

    def __init__(
        self,
        loop: Loop,
        varying: dict[Variable, Variable],
        length: Variable | None = None,
        in_programs: bool = False,
    ) -> None:
        self.in_programs = in_programs
        self.length = loop.length() if length is None else length
        self.fixed = {whole.inner: whole.outer for whole in loop.non_sequences}
        self.varying = dict(varying)
        self.given = {*self.fixed, *varying}
        self._stable_forms: set[Variable] = set()

    def add(self, variable: Variable, values: Variable) -> None:
        """Give the values of one more body variable."""
        self.varying[variable] = values
        self.given.add(variable)

    def value(self, variable: Variable) -> tuple[Variable, bool]:
        """Return a body variable's value, and whether it has a time axis."""
        if isinstance(variable, Constant):
            return variable, False
        if variable not in self.varying and variable not in self.fixed:
            nodes = list(toposort([variable], blockers=[*self.fixed, *self.varying]))
            stable = self._stable(variable) if any(map(may_overflow, nodes)) else variable
            if stable is variable:
                for node in nodes:
                    self._evaluate(node)
            else:
                value, has_time = self.value(stable)
                (self.varying if has_time else self.fixed)[variable] = value
        has_time = variable in self.varying
        return (self.varying if has_time else self.fixed)[variable], has_time

    def _stable(self, variable: Variable) -> Variable:
        """Return a variable in a form that does not overflow; in batches, kernels would hide parts
        of what PyTensor has such forms for."""
        nodes = list(toposort([variable], blockers=self.given))
        if variable in self._stable_forms or all(isinstance(n.op, Elemwise) for n in nodes):
            return variable
        read = dict.fromkeys(inp for node in nodes for inp in node.inputs)
        inputs = [v for v in read if v in self.given or v.owner is None]
        inputs = [v for v in inputs if not isinstance(v, Constant)]
        graph = FunctionGraph(inputs, [variable], clone=True)
        stabilize(graph)
        (stable,) = substitute(graph.outputs, dict(zip(graph.inputs, inputs, strict=True)))
        self._stable_forms.add(stable)
        return stable

    def rows(self, variable: Variable) -> Variable:
        """Return a body variable's value with a time axis."""
        value, has_time = self.value(variable)
        if has_time:
            return value
        return pt.broadcast_to(value, (self.length, *tuple(value.shape)))

    def _evaluate(self, node: Apply) -> None:
        inputs = [self.value(inp) for inp in node.inputs]
        values = [value for value, _ in inputs]
        if not any(has_time for _, has_time in inputs):
            made = node.clone_with_new_inputs(values, strict=False).outputs
            self.fixed.update(zip(node.outputs, made, strict=True))
        elif isinstance(node.op, Shape | Shape_i):
            sizes = values[0].shape  # the same at every step
            self.fixed[node.outputs[0]] = (
                sizes[1:] if isinstance(node.op, Shape) else sizes[node.op.i + 1]
            )
        else:
            self.varying.update(zip(node.outputs, self._at_all_steps(node, inputs), strict=True))

    def _at_all_steps(self, node: Apply, inputs: list[Value]) -> list[Variable]:
        """Return what a node computes at all steps, given its inputs, of which some differ."""
        values, varies = [value for value, _ in inputs], [has_time for _, has_time in inputs]
        op = core_op(node)
        if isinstance(node.op, Dot) and [inp.type.ndim for inp in node.inputs] == [2, 2]:
            return [_product(*inputs)]
        if isinstance(op, ScalarFromTensor):
            return values[:1]  # read by `_gathered` alone
        if isinstance(op, IncSubtensor):
            return [self._written(node)]
        if varying_index(node, self.varying.__contains__):
            return [self._gathered(node)]
        if isinstance(op, Elemwise):
            kernel = self._kernel(node)
            if kernel is not None:
                return [kernel]
        if isinstance(op, Join):
            axis, parts = join_of(node)
            if axis is not None:
                return [pt.join(axis + 1, *map(self.rows, parts))]
        if isinstance(op, Split):
            whole, axis, sizes = split_of(node)
            splits, sizes_vary = self.value(sizes)
            if axis is not None and not sizes_vary:
                count = len(node.outputs)
                made = pt.split(self.rows(whole), splits, n_splits=count, axis=axis + 1)
                return made if isinstance(made, list) else [made]
        if isinstance(op, CheckAndRaise):
            return [_check(op, inputs)]
        if isinstance(op, INDEX_READS) and varies == [False, True]:
            return [values[0][values[1]]]
        if isinstance(op, SolveBase) and varies == [False, True] and values[0].type.ndim == 2:
            return [_solve(op, *values)]
        if isinstance(op, Reshape) and varies == [True, False]:
            return [_reshape(node, *values)]
        if isinstance(op, SortOp | ArgSortOp) and (axis := sorted_axis(node)) is not None:
            order = pt.sort if isinstance(op, SortOp) else pt.argsort
            return [order(values[0], axis=axis + 1, kind=op.kind)]
        if LOG_SUM_EXP is not None and isinstance(op, LOG_SUM_EXP):
            return [pt.logsumexp(values[0], axis=[axis + 1 for axis in op.axis])]
        made = vectorize_rule(node.op, node, *values)
        return made.outputs if isinstance(made, Apply) else made

    def _gathered(self, node: Apply) -> Variable:
        """Return what a node reads at a place that differs from step to step."""
        (array, varies), (places, _) = self.value(node.inputs[0]), self.value(node.inputs[1])
        if not varies:
            return array[checked_places(places, array)]
        return array[pt.arange(self.length), checked_places(places, array, axis=1)]

    def _written(self, node: Apply) -> Variable:
        """Return arrays of which a part was set or added to, at places that may differ."""
        arrays, found = self.rows(node.inputs[0]), [self.value(place) for place in node.inputs[2:]]
        places = [place for place, _ in found]
        index: tuple[Any, ...] = (slice(None), *indices_from_subtensor(places, node.op.idx_list))
        if any(varies for _, varies in found):
            index = (pt.arange(self.length), checked_places(places[0], arrays, axis=1))
        target = arrays[index]
        change = pt.set_subtensor if node.op.set_instead_of_inc else pt.inc_subtensor
        values = self.rows(node.inputs[1])
        return change(target, with_axes(values, 1, target.type.ndim - values.type.ndim))

    def _kernel(self, node: Apply) -> Variable | None:
        """Return a node's values as a loop of elementwise work; see `split_cost`.

        The loop holds all elementwise work above the node, if there is a function among it.
        """
        if self.in_programs or not config.scanlib__lower:
            return None
        region, ends = elementwise_region(node, self.given)
        if not any(is_function(member) for member in region):
            return None
        rows: dict[Variable, Variable] = {}
        loop = Loop(name="map")
        for end in ends:
            value, has_time = self.value(end)
            inner = row_type(value)() if has_time else value.type()
            if inner.type.broadcastable != end.type.broadcastable:
                return None
            rows[end] = inner
            if has_time:
                loop.sequences.append(SequencePart(value, inner))
            else:
                loop.non_sequences.append(NonSequence(value, inner))
        loop.outputs.append(Output(substitute([node.outputs[0]], rows)[0]))
        return loop.apply().outputs[0]

    def results(
        self,
        loop: Loop,
        read: Sequence[bool],
        known: Mapping[Part, Variable | None],
        sums: Iterable[tuple[State | Carry, Variable]],
    ) -> list[Variable | None]:
        """Return those results of a loop that are read, None for the others.

        `known` are the results of parts that a loop computes, `sums` the parts that are sums over
        time, with what a step adds.
        """
        added = dict(sums)
        found: list[Variable | None] = []
        for part, is_read in zip(loop.parts, read, strict=True):
            if not is_read:
                found.append(None)
            elif part in known:
                found.append(known[part])
            elif isinstance(part, Output):
                found.append(self.rows(part.value))
            else:
                is_state = isinstance(part, State)
                first = part.initial[0] if is_state else part.initial
                last = conform(first + self.total(added[part]), part.type)
                found.append(last[None] if is_state else last)
        return found

    # Sums over time

    def total(self, variable: Variable) -> Variable:
        """Return the sum over time of a body variable."""
        if not self.varies(variable):
            return self.value(variable)[0] * self.length.astype(variable.type.dtype)
        is_known = variable in self.varying or variable.owner is None
        special = None if is_known else self._total_of(variable.owner)
        if special is not None:
            return special
        return self.rows(variable).sum(axis=0, dtype=variable.type.dtype)

    def varies(self, variable: Variable) -> bool:
        """Whether a body variable differs from step to step."""
        if variable in self.varying:
            return True
        above = toposort([variable], blockers=[*self.fixed, *self.varying])
        return any(inp in self.varying for node in above for inp in node.inputs)

    def _total_of(self, node: Apply) -> Variable | None:
        op, out = node.op, node.outputs[0]
        # Of these the other inputs are sizes or places, whose values do not make the result.
        summed = node.inputs[: 1 if isinstance(op, SpecifyShape | IncSubtensor) else None]
        if any(inp.type.dtype != out.type.dtype for inp in summed):
            return None  # small integers would wrap around
        if isinstance(op, IncSubtensor):
            zeros = node.inputs[0]
            adds = not op.set_instead_of_inc and not self.varies(zeros) and is_zeros(zeros)
            return self._scattered(node) if adds and varying_index(node, self.varies) else None
        if isinstance(op, DimShuffle | SpecifyShape):
            return op(self.total(node.inputs[0]), *node.inputs[1:])
        if isinstance(op, TensorSum):
            return op(self.total(node.inputs[0]))
        if isinstance(op, Dot) and [inp.type.ndim for inp in node.inputs] == [2, 2]:
            return self._total_product(*node.inputs)
        if not isinstance(op, Elemwise):
            return None
        scalar = op.scalar_op
        same = all(inp.type.broadcastable == out.type.broadcastable for inp in node.inputs)
        if isinstance(scalar, ps.Add | ps.Sub | ps.Neg) and same:
            return op(*(self.total(inp) for inp in node.inputs))
        if isinstance(scalar, ps.Mul):
            return self._total_scaled(node)
        return None

    def _scattered(self, node: Apply) -> Variable:
        """Return zeros to which a node adds at a place that differs, with the addends of all
        steps."""
        array = self.value(node.inputs[0])[0]
        places = checked_places(self.value(node.inputs[2])[0], array)
        values = self.rows(node.inputs[1])
        values = with_axes(values, 1, array.type.ndim - values.type.ndim)
        # PyTensor takes a single row for one that is to be broadcast, and refuses it.
        missing = pt.eq(places.shape[0], 1).astype("int64")
        zeros = pt.zeros((missing, *tuple(values.shape)[1:]), dtype=values.type.dtype)
        values = pt.concatenate([values, zeros])
        places = pt.concatenate([places, pt.zeros((missing,), dtype=places.type.dtype)])
        return pt.inc_subtensor(array[places], values)

    def _total_scaled(self, node: Apply) -> Variable | None:
        constant = [inp for inp in node.inputs if not self.varies(inp)]
        varying = [inp for inp in node.inputs if self.varies(inp)]
        if constant and len(varying) == 1:
            factors = [self.value(inp)[0] for inp in constant]
            return pt.mul(self.total(varying[0]), *factors)
        outer = outer_factors(node)
        if outer is None:
            return None
        columns, rows = (self._multiplied(factors) for factors in outer)
        if _is_step_product(columns, rows):
            return StepProducts(total=True)(columns, rows)
        return pt.dot(columns[:, :, 0].T, rows[:, 0, :])

    def _multiplied(self, factors: list[Variable]) -> Variable:
        """Return the product, item by item, of the values of all steps of columns or of rows."""
        values = [self.value(factor) for factor in factors]
        if not any(has_time for _, has_time in values):
            values[0] = (self.rows(factors[0]), True)
        return pt.mul(*(value for value, _ in values)) if len(values) > 1 else values[0][0]

    def _total_product(self, left: Variable, right: Variable) -> Variable:
        """Return ``Σ_t X_t Y_t``."""
        if not self.varies(left):
            return pt.dot(self.value(left)[0], self.total(right))
        if not self.varies(right):
            return pt.dot(self.total(left), self.value(right)[0])
        x, y = self.rows(left), self.rows(right)
        if _is_step_product(x, y):
            return StepProducts(total=True)(x, y)
        # All rows below one another, without a copy where x is a transposition: Xᵀ then is one.
        size, columns = x.shape[1], y.shape[2]
        count = x.shape[0] * x.shape[2]  # not -1, which says nothing where another length is zero
        return pt.dot(x.mT.reshape((count, size)).T, y.reshape((count, columns)))


def _is_step_product(left: Variable, right: Variable) -> bool:
    """Whether a product of all steps is one `StepProducts`."""
    dtypes = {left.type.dtype, right.type.dtype}
    return len(dtypes) == 1 and dtypes <= {"float32", "float64"}


def _product(one: Value, two: Value) -> Variable:
    """Return the products of all steps of two matrices, of which one or both have a time axis."""
    (left, left_varies), (right, right_varies) = one, two
    dtype = upcast(left.type.dtype, right.type.dtype)
    if left_varies != right_varies and _is_step_product(left, right):
        return StepProducts()(left, right)
    if not right_varies:
        joined = left.reshape((left.shape[0] * left.shape[1], left.shape[2]))
        return pt.dot(joined, right).reshape((left.shape[0], left.shape[1], right.shape[1]))
    if not left_varies:
        return _product((right.mT, True), (left.T, False)).mT
    if left.type.shape[2] == 1 or right.type.shape[1] == 1:
        return left * right
    if right.type.shape[2] == 1:
        return (left * right.mT).sum(axis=2, dtype=dtype)[:, :, None]
    if left.type.shape[1] == 1:
        return (left.mT * right).sum(axis=1, dtype=dtype)[:, None, :]
    if not multiplies_in_batches(dtype):
        raise NotImplementedError(f"products of matrices of {dtype} that differ")
    return pt.matmul(left, right)


Value = tuple[Variable, bool]


def _check(op: CheckAndRaise, inputs: list[Value]) -> Variable:
    """Return the checked value, one check for all steps; the value may be the same at each."""
    (value, has_time), *conditions = inputs
    if not has_time:
        steps = next(condition for condition, varies in conditions if varies).shape[0]
        value = pt.broadcast_to(value, (steps, *tuple(value.shape)))
    return op(value, *(pt.all(condition) for condition, _ in conditions))


def _solve(op: SolveBase, matrix: Variable, right: Variable) -> Variable:
    """Return the solutions for the right sides of all steps, of shape (T, n) or (T, n, m)."""
    properties = {name: getattr(op, name) for name in op.__props__}
    many = type(op)(**(properties | {"b_ndim": 2}))
    if right.type.ndim == 2:
        return many(matrix, right.T).T
    steps, size, columns = right.shape
    joined = right.dimshuffle(1, 0, 2).reshape((size, steps * columns))
    return many(matrix, joined).reshape((size, steps, columns)).dimshuffle(1, 0, 2)


def _reshape(node: Apply, rows: Variable, shape: Variable) -> Variable:
    """Return rows in another shape, no rows as well: nothing could tell then what -1 is."""
    known = node.outputs[0].type.shape
    given = [shape[i] if size is None else size for i, size in enumerate(known)]
    sizes = [rows.shape[axis] for axis in range(1, rows.type.ndim)]
    rest = prod(sizes) // pt.maximum(pt.abs(prod(given)), 1)
    full = []
    for size, static in zip(given, known, strict=True):
        if static is None:
            is_open = constant_integer(size) == -1
            size = rest if is_open else pt.switch(pt.lt(size, 0), rest, size)
        full.append(size)
    return rows.reshape((rows.shape[0], *full))


def elementwise_region(
    node: Apply, known: Collection[Variable]
) -> tuple[list[Apply], list[Variable]]:
    """Return the elementwise nodes above a node, itself included, and what they read."""

    def above(member: Apply) -> list[Apply]:
        owners = [inp.owner for inp in member.inputs if inp not in known]
        return [own for own in owners if own is not None and isinstance(own.op, Elemwise)]

    region = dict.fromkeys(walk([node], above, bfs=False))
    read = dict.fromkeys(inp for member in region for inp in member.inputs)
    ends = [v for v in read if v.owner not in region and not isinstance(v, Constant)]
    return list(region), ends
