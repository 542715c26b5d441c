"""Newton's iterations as a loop: what `scanlib.ops.lowered.newton_scan.NewtonScan` becomes.

A loop with `until` carries the histories of all states and, for each member (of the batch along the
axes of a `Linearization`), whether it has converged. A member that has, or that is lost (an item is
not finite, and no damping is left to raise), stays as it is while others go on. No value is
replaced by another because it is not finite: a loop with a member that is lost has not converged.

A loop is linearized around a trajectory. With the trajectory `g` of the states,
``t = 0 … T-1``, the residuals and the correction are::

    r_t = f_t(g_{t-1} …) - g_t
    δ_t = r_t + Σ_k κ J_{t,k} δ_{t-k},      δ = 0 before the first step

with ``J_{t,k}`` the Jacobian of step `t` by the rows `k` steps back, or what stands for it, and `κ`
one minus the damping. The sum over `k` is the tangent of the step: an affine loop, whose matrices
and their structure the lowering finds (`scanlib.rewrites.lower`).

The diagonal of a Jacobian follows from the structure of a step, without the Jacobian. What moves
with a vector `m` is followed through the tangent of a step as

    D(δ) m + Σ D(a) W D(b) m + (what has the diagonal e)

with ``D(·)`` a diagonal matrix. Elementwise operations scale `δ`, `a` and `e`; a product with a
matrix `V` makes ``V D(δ)`` of the first part, and of the second, ``V D(a) W D(b)``, keeps the
diagonal ``((V ∘ Wᵀ) a) ∘ b``. A third product in a row has no such form: then there is no result.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add, and_

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors, graph_inputs, toposort
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.type import TensorType

from scanlib.ops.gradient.cotangents import total_of
from scanlib.ops.gradient.pushforward import step_tangents
from scanlib.ops.graph import conform, core_op, row_type, substitute
from scanlib.ops.kept_axes import independent_axes
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.lowered.channel_plan import in_groups
from scanlib.ops.lowered.newton_scan import MEMBERS, Newton, NewtonScan
from scanlib.ops.messages import not_converged
from scanlib.ops.row_ops.checked_rows import CheckedConvergence
from scanlib.rewrites.lower.linear_recurrence import NotLinearError
from scanlib.rewrites.lower.lower_linear import lower_linear
from scanlib.rewrites.simplify import simplify

# A state whose next value depends on another state, and how many steps back.
Coupling = tuple[int, int, int]


def at_all_steps(loop: Loop, histories: Sequence[Variable], name: str) -> Loop:
    """Return a loop whose steps read what those of another read where states have known values."""
    return Loop(
        n_steps=loop.n_steps,
        sequences=[*loop.sequences, *loop.rows_of_taps(histories)],
        non_sequences=list(loop.non_sequences),
        name=f"{loop.name or 'loop'}_{name}",
    )


def along(loop: Loop, histories: Sequence[Variable], values: Sequence[Variable]) -> list[Variable]:
    """Return what all steps of a loop compute where its states have known histories."""
    steps = at_all_steps(loop, histories, "steps")
    steps.outputs = [Output(value) for value in values]
    return steps.apply().outputs


def _rows(loop: Loop, histories: Sequence[Variable]) -> list[Variable]:
    """Return the rows that the steps of a loop wrote."""
    return [h[s.depth :] for s, h in zip(loop.states, histories, strict=True)]


@dataclass
class Linearization:
    """How the steps of a loop are linearized.

    `axes` of the states are axes of a batch: its members converge each by itself. `diagonals` has,
    for each coupling that counts, an expression in the body, a number for each item of a state:
    what stands for the Jacobian. None for the Jacobian itself.
    """

    loop: Loop
    axes: list[int]
    diagonals: dict[Coupling, Variable] | None = None

    def residuals(self, histories: Sequence[Variable]) -> list[Variable]:
        nexts = along(self.loop, histories, [state.next for state in self.loop.states])
        return [a - b for a, b in zip(nexts, _rows(self.loop, histories), strict=True)]

    def correction(
        self, histories: Sequence[Variable], kept: Variable | None
    ) -> tuple[list[Variable], list[Variable]]:
        """Return the corrections of all states at all steps, and the residuals.

        The corrections are the states of an affine loop. Where its steps multiply with matrices, it
        is a matrix recurrence, whatever its matrices of all steps cost. `kept` is the share `κ` of
        the Jacobians that is kept, for each member; None for all of it.
        """
        states = self.loop.states
        steps = at_all_steps(self.loop, histories, "correction")
        share = None if kept is None else kept.type()
        if share is not None:
            steps.non_sequences.append(NonSequence(kept, share))
        moved: dict[tuple[int, int], Variable] = {}
        for source, state in enumerate(states):
            order = self.members_first(state.type.ndim)
            initial = pt.zeros_like(state.initial).dimshuffle(0, *(axis + 1 for axis in order))
            taps = {offset: row_type(initial)() for offset in state.taps}
            steps.states.append(State(initial, taps, taps[max(taps)]))
            for offset, tap in taps.items():
                own = tap.dimshuffle(*map(order.index, range(state.type.ndim)))
                own = own if share is None else own * self.over_row(share, state.type.ndim)
                moved[source, offset] = own
        nexts, given = [state.next for state in states], _rows(self.loop, histories)
        if self.diagonals is None:
            pairs = [(states[i].taps[offset], own) for (i, offset), own in moved.items()]
            changes = step_tangents(nexts, pairs)
            rows = [row_type(each)() for each in given]
            steps.sequences += map(SequencePart, given, rows)
            errors = [after - row for after, row in zip(nexts, rows, strict=True)]
            steps.outputs = [Output(error) for error in errors]
        else:
            found = along(self.loop, histories, [*nexts, *self.diagonals.values()])
            residuals = [after - row for after, row in zip(found, given, strict=False)]
            read = [*residuals, *found[len(states) :]]
            rows = [row_type(each)() for each in read]
            steps.sequences = list(map(SequencePart, read, rows))
            errors, changes = rows[: len(states)], [pt.zeros((), v.dtype) for v in residuals]
            for (to, i, offset), factor in zip(self.diagonals, rows[len(states) :], strict=True):
                changes[to] = changes[to] + factor * moved[i, offset]
        for state, error, change in zip(steps.states, errors, changes, strict=True):
            state.next = (error + change).dimshuffle(*self.members_first(error.type.ndim))
        made = steps.apply()
        results: list[Variable] = made.node.outputs
        if self.diagonals is None:
            with suppress(NotLinearError):
                results = lower_linear(made.node, [True] * len(results), at_any_cost=True)
            residuals = results[len(states) :]
        corrections = []
        for vectors in _rows(self.loop, results[: len(states)]):
            order = self.members_first(vectors.type.ndim - 1)
            back = [order.index(axis) + 1 for axis in range(len(order))]
            corrections.append(vectors.dimshuffle(0, *back))
        return corrections, residuals

    def members_first(self, ndim: int) -> list[int]:
        """Return the axes of a row, those of the batch before the others."""
        return [*self.axes, *self.rest(ndim)]

    def rest(self, ndim: int) -> list[int]:
        """Return the axes of a row that are not those of the batch."""
        return [axis for axis in range(ndim) if axis not in self.axes]

    def over_row(self, members: Variable, ndim: int) -> Variable:
        """Return one number for each member as what broadcasts against a row."""
        places = [self.axes.index(axis) if axis in self.axes else "x" for axis in range(ndim)]
        return members.dimshuffle(*places)


def linearize(loop: Loop, jacobian: str) -> Linearization:
    """Return how the steps of a loop are linearized, with the Jacobian that is asked for; see
    `scanlib.ops.lowered.newton_scan.Newton`."""
    states = loop.states
    taps = [list(state.taps.values()) for state in states]
    nexts = [state.next for state in states]
    axes = independent_axes(taps, nexts)
    result = Linearization(loop, axes if _have_equal_sizes(taps, nexts, axes) else [])
    if jacobian in ("block", "diagonal"):
        result.diagonals = {}
        for source, state in enumerate(states):
            for offset, tap in state.taps.items():
                for to, other in enumerate(states):
                    if jacobian == "block":
                        counts = other.type.shape == state.type.shape
                    else:
                        counts = (to, offset) == (source, -1)
                    value = _diagonal(result, other.next, tap) if counts else None
                    if value is not None:
                        result.diagonals[to, source, offset] = conform(value, other.type)
    return result


def _have_equal_sizes(
    taps: Sequence[Sequence[Variable]], nexts: Sequence[Variable], axes: Sequence[int]
) -> bool:
    """Whether all states are known to have as many members: their steps would differ otherwise."""
    shapes = {tuple(each[0].type.shape[axis] for axis in axes) for each in taps}
    if len(shapes) == 1 and None not in shapes.pop():
        return True
    linked = [{*own, following} for own, following in zip(taps, nexts, strict=True)]
    for own, following in zip(linked, nexts, strict=True):
        own.update(set(ancestors([following])).intersection(*[[t for each in taps for t in each]]))
    return len(in_groups(linked)) == 1


def _diagonal(linear: Linearization, following: Variable, tap: Variable) -> Variable | None:
    """Return the diagonal of the Jacobian of a next value by a past one, None if it is zero."""
    moved = tap.type()
    (tangent,) = step_tangents([following], [(tap, moved)])
    if moved not in graph_inputs([tangent]):
        return None
    known = None if linear.axes else diagonal_of(tangent, moved)
    if known is not None:
        return substitute([known], {moved: pt.ones_like(tap)})[0]
    # Of unit vectors, one for each item of a member, each item's own column has its row.
    shape = [tap.shape[axis] for axis in range(tap.type.ndim)]
    rest = linear.rest(tap.type.ndim)
    size = pt.prod(pt.stack([shape[axis] for axis in rest])) if rest else pt.constant(1)
    one = pt.constant(1, dtype="int64")
    own = [shape[axis] if axis in rest else one for axis in range(tap.type.ndim)]
    units = pt.broadcast_to(pt.eye(size, dtype="bool").reshape([size, *own]), [size, *shape])
    vectors = pt.cast(units, tap.type.dtype)
    kind = TensorType(tap.type.dtype, shape=(None, *moved.type.shape))
    (columns,) = vectorize_graph([tangent], {moved: conform(vectors, kind)})
    if columns.type.ndim == tangent.type.ndim:  # nothing moves it
        return None
    return pt.switch(units, columns, pt.zeros((), columns.type.dtype)).sum(axis=0)


@dataclass
class _Moved:
    """How a vector moves; see the module's text. What is None is zero."""

    diagonal: Variable | None = None
    products: list[tuple[Variable, Variable, Variable]] = field(default_factory=list)
    rest: Variable | None = None

    def scaled(self, factor: Variable) -> "_Moved":
        products = [(factor * a, w, b) for a, w, b in self.products]
        return _Moved(_times(self.diagonal, factor), products, _times(self.rest, factor))

    def plus(self, other: "_Moved") -> "_Moved":
        return _Moved(
            total_of([self.diagonal, other.diagonal]),
            [*self.products, *other.products],
            total_of([self.rest, other.rest]),
        )


def _times(value: Variable | None, factor: Variable) -> Variable | None:
    return None if value is None else value * factor


def diagonal_of(tangent: Variable, moved: Variable) -> Variable | None:
    """Return the diagonal of the Jacobian of vectors whose tangent is linear in `moved`.

    None where the structure of the step does not tell it.
    """
    if tangent.type.ndim != 1 or moved.type.ndim != 1:
        return None
    found = {moved: _Moved(pt.ones_like(moved))}
    live = {moved}
    for node in toposort([tangent]):
        if not live.intersection(node.inputs):
            continue
        if len(node.outputs) > 1:
            return None
        live.update(node.outputs)
        value = _step(node, found, live)
        if value is None:
            return None
        found[node.outputs[0]] = value
    last = found[tangent]
    products = [a * pt.diagonal(w) * b for a, w, b in last.products]
    return total_of([last.diagonal, last.rest, *products])


def _step(node: Apply, found: dict[Variable, _Moved], live: set[Variable]) -> _Moved | None:
    """Return how the result of a node moves, None if that has no such form."""
    own = [v for v in node.inputs if v in live]
    if any(v not in found for v in own):
        return None
    if isinstance(node.op, DimShuffle | SpecifyShape) and own == [node.inputs[0]]:
        # A vector as a column, and back, or of a size that is stated: what moves is the same.
        return found[own[0]] if node.outputs[0].type.ndim in (1, 2) else None
    if isinstance(node.op, Elemwise) and node.outputs[0].type.ndim == 1:
        total: _Moved | None = None
        for each in own:
            fill = {v: pt.ones_like(v) if v is each else pt.zeros_like(v) for v in own}
            units = [fill.get(v, v) for v in node.inputs]
            part = found[each].scaled(node.op(*units))
            total = part if total is None else total.plus(part)
        return total
    op = core_op(node)
    if isinstance(op, Dot) and len(node.inputs) == 2 and node.inputs[0] not in live:
        matrix, column = node.inputs
        before = found[column]
        if matrix.type.ndim != 2 or column.type.ndim != 2 or before.rest is not None:
            return None
        if column.type.shape[1] != 1:
            return None
        one = pt.ones_like(matrix[:, 0])
        products = [] if before.diagonal is None else [(one, matrix, before.diagonal)]
        rest = total_of([((matrix * w.T) @ a) * b for a, w, b in before.products])
        return _Moved(None, products, rest)
    return None


# Adaptive damping: the share of the Jacobian that is kept shrinks where an iterate is not, grows
# where it is, and is not made smaller than this: steps are then solved one by one, nearly.
SHRINK, GROW, LEAST = 0.5, 1.5, 1e-3


class SolveByNewton(LoopRewrite):
    """Replace what is solved by Newton's method by the loop of its iterations."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        for node in fgraph.toposort():
            if isinstance(node.op, NewtonScan):
                with self.attempt(fgraph, node):
                    found = dict(zip(node.outputs, solution(node), strict=True))
                    simplify.replace(fgraph, found, "scanlib_newton")


def solution(node: Apply) -> list[Variable]:
    """Return what takes the place of the results of a loop that is solved by Newton's method."""
    op: NewtonScan = node.op
    loop = Loop.from_node(node)
    kinds = [history.type for history in op.results(node.outputs).histories]
    made, found = _iterations(op, loop)
    histories = [conform(rows, kind) for rows, kind in zip(made, kinds, strict=True)]
    residual, count = found["residual"], found["iterations"]
    failed = pt.invert(pt.all(found["converged"]))
    worst = pt.argmax(_flat(pt.switch(found["converged"], -1.0, residual), -1.0))
    if op.options.otherwise == "sequential":
        histories = _run_if(failed, loop, histories)
    else:
        check = CheckedConvergence(not_converged(op.scan.name, op.scan.labels.function))
        numbers = [count, _flat(found["its step"], 0)[worst], _flat(residual, 0.0)[worst]]
        histories = [check(rows, failed, *numbers) for rows in histories]
    outputs = along(loop, histories, [out.value for out in loop.outputs]) if loop.outputs else []
    results = [*histories, *outputs, count, pt.max(_flat(residual, 0.0))]
    return [conform(new, old.type) for new, old in zip(results, node.outputs, strict=True)]


def _flat(members: Variable, more: float) -> Variable:
    """Return the numbers of all members, and one more: there may be none."""
    return pt.concatenate([pt.flatten(members), pt.constant([more], dtype=members.type.dtype)])


def _run_if(failed: Variable, loop: Loop, histories: Sequence[Variable]) -> list[Variable]:
    """Return the histories of a loop that is run step by step where `failed` is true.

    It takes all steps or none, and its rows come in the place of as many of those that are there.
    """
    steps = pt.switch(failed, loop.length(), 0)
    again = replace(
        loop,
        n_steps=None if loop.n_steps is None else steps,
        sequences=[
            SequencePart(part.outer[:steps], part.row, part.name) for part in loop.sequences
        ],
        outputs=[],
        name=f"{loop.name or 'loop'}_sequential",
    )
    found = zip(again.apply().histories, histories, loop.states, strict=True)
    return [
        conform(pt.concatenate([rows, history[state.depth + steps :]]), history.type)
        for rows, history, state in found
    ]


def _iterations(op: NewtonScan, loop: Loop) -> tuple[list[Variable], dict[str, Variable]]:
    """Return the histories that iterations end with, and what they say of members, by `MEMBERS`.

    The loop over iterations starts from the last initial rows.
    """
    inputs = loop.outer_inputs()
    outer = [v for v in dict.fromkeys(inputs) if not isinstance(v, Constant)]
    inner = {variable: variable.type(name=variable.name) for variable in outer}
    step = Loop.from_op(op.scan, [inner.get(variable, variable) for variable in inputs])
    linear = linearize(step, op.options.jacobian)
    guesses = []
    for state in loop.states:
        rows = [loop.length(), *list(state.initial.shape)[1:]]
        guesses.append(pt.concatenate([state.initial, pt.broadcast_to(state.initial[-1], rows)]))
    sizes = [guesses[0].shape[axis + 1] for axis in linear.axes]
    none = pt.zeros(sizes, dtype="bool")
    initials = [*guesses, none, none, pt.ones(sizes, dtype="float64")]
    initials += [pt.full(sizes, np.inf, dtype="float64"), pt.zeros(sizes, dtype="int64")]
    initials.append(pt.constant(0, dtype="int64"))
    values = [pt.TensorType(v.type.dtype, shape=v.type.shape)() for v in initials]
    count = len(guesses)
    nexts = _iterate(linear, op.options, values[:count], values[count:])
    names = [*(state.name for state in loop.states), *MEMBERS]
    result = Loop(
        n_steps=pt.constant(int(op.options.max_iterations), dtype="int64"),
        carries=[Carry(*parts) for parts in zip(initials, values, nexts, names, strict=True)],
        non_sequences=[NonSequence(v, inner[v], v.name) for v in outer],
        stop=pt.all(nexts[count] | nexts[count + 1]),
        name=f"{loop.name or 'loop'}_newton",
    )
    carries = result.apply().carries
    return carries[:count], dict(zip(MEMBERS, carries[count:], strict=True))


def _iterate(
    linear: Linearization, options: Newton, old: list[Variable], members: list[Variable]
) -> list[Variable]:
    """Return what one iteration makes of the histories, and of what it carries (`MEMBERS`)."""
    converged, lost, kept, residual, step, count = members
    states = linear.loop.states
    share: Variable | None = None
    if options.damping == "adaptive":
        share = kept
    elif not isinstance(options.damping, str) and options.damping:
        share = pt.full_like(kept, 1 - options.damping)
    moved, residuals = linear.correction(old, share)
    new = [
        pt.concatenate([rows[: state.depth], rows[state.depth :] + delta])
        for rows, delta, state in zip(old, moved, states, strict=True)
    ]
    finite = _all(
        linear, [pt.isfinite(rows[s.depth :]) for rows, s in zip(new, states, strict=True)]
    )
    small = _all(
        linear,
        [
            pt.le(
                abs(delta),
                _typed(options.tolerance_for(delta.dtype), delta)
                * pt.maximum(_typed(1, delta), abs(rows[state.depth :])),
            )
            for delta, rows, state in zip(moved, new, states, strict=True)
        ],
    )
    waits, lengths = pt.invert(converged | lost), _norms(linear, residuals)
    if options.damping == "adaptive":
        least = pt.le(kept, LEAST)
        after = _norms(linear, linear.residuals(new))
        better = pt.lt(pt.sum(after**2, axis=0), pt.sum(lengths**2, axis=0))
        good = finite & (small | least | better)
        grown = pt.minimum(1.0, GROW * kept)
        kept = pt.maximum(pt.switch(good, grown, SHRINK * kept), LEAST)
        fails = least & pt.invert(finite)
    else:
        good, fails = pt.ones_like(finite), pt.invert(finite)
    histories = [
        pt.switch(pt.expand_dims(linear.over_row(waits & good, s.type.ndim), 0), rows, before)
        for rows, before, s in zip(new, old, states, strict=True)
    ]
    # A first row of zeros: there may be no steps.
    rows = pt.concatenate([pt.zeros_like(residual)[None], lengths])
    largest = pt.max(rows, axis=0)
    improved = waits & pt.le(largest, residual)
    return [
        *histories,
        converged | (waits & finite & small),
        lost | (waits & fails),
        kept,
        pt.switch(improved, largest, residual),
        pt.switch(improved, pt.argmax(rows, axis=0) - 1, step),
        count + 1,
    ]


def _typed(number: float, like: Variable) -> Variable:
    return pt.constant(number, dtype=like.type.dtype)


def _all(linear: Linearization, conditions: Sequence[Variable]) -> Variable:
    """Return, for each member, whether conditions hold at all steps."""

    def of_state(rows: Variable) -> Variable:
        return pt.all(rows, axis=[0, *(axis + 1 for axis in linear.rest(rows.type.ndim - 1))])

    return reduce(and_, map(of_state, conditions))


def _norms(linear: Linearization, residuals: Sequence[Variable]) -> Variable:
    """Return the norm of the residuals at each step, for each member; infinity for NaN."""

    def of_state(rows: Variable) -> Variable:
        rest = [axis + 1 for axis in linear.rest(rows.type.ndim - 1)]
        own = pt.cast(rows, "float64") ** 2
        return pt.sum(own, axis=rest) if rest else own

    squares = reduce(add, map(of_state, residuals))
    return pt.switch(pt.isnan(squares), float("inf"), pt.sqrt(squares))
