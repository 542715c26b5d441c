"""Newton's iterations as a loop: what `scanlib.ops.lowered.newton_scan.NewtonScan` becomes.

A loop with `until` carries the histories of all states and, for each member (of the batch along the
axes of a `Linearization`),
whether it has converged. A member that has, or that is lost (an item is not finite, and no damping
is left to raise), stays as it is while others go on. No value is replaced by another because it is
not finite: a loop with a member that is lost has not converged.

A loop is linearized around a trajectory. With the trajectory `g` of the states,
``t = 0 … T-1``, the residuals and the correction are::

    r_t = f_t(g_{t-1} …) - g_t
    δ_t = r_t + Σ_k κ J_{t,k} δ_{t-k},      δ = 0 before the first step

with ``J_{t,k}`` the Jacobian of step `t` by the rows `k` steps back, or what stands for it, and `κ`
one minus the damping. Axes of the states that are independent of one another are axes of a batch:
`J` is then a batch of blocks, or of numbers where no axis is left (`elementwise`).

The diagonal of a Jacobian follows from the structure of a step, without the Jacobian. What moves
with a vector `m` is followed through the tangent of a step as

    D(δ) m + Σ D(a) W D(b) m + (what has the diagonal e)

with ``D(·)`` a diagonal matrix. Elementwise operations scale `δ`, `a` and `e`; a product with a
matrix `V` makes ``V D(δ)`` of the first part, and of the second, ``V D(a) W D(b)``, keeps the
diagonal ``((V ∘ Wᵀ) a) ∘ b``. A third product in a row has no such form: then there is no result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import graph_inputs, toposort
from pytensor.scalar import upcast
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.type import TensorType

from scanlib.analysis.independent_axes import independent_axes
from scanlib.ops.gradient.pushforward import step_tangents
from scanlib.ops.graph import conform, row_type, substitute
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.lowered.newton_scan import MEMBERS, Newton, NewtonScan
from scanlib.ops.messages import not_converged
from scanlib.ops.row_ops.checked_convergence import CheckedConvergence
from scanlib.rewrites.simplify import simplify

# A state whose next value depends on another state, and how many steps back.
Coupling = tuple[int, int, int]


def along(loop: Loop, histories: Sequence[Variable], values: Sequence[Variable]) -> list[Variable]:
    """Return what all steps of a loop compute where its states have known histories."""
    taps = [
        SequencePart(history[state.depth + offset : offset], tap)
        for state, history in zip(loop.states, histories, strict=True)
        for offset, tap in state.taps.items()
    ]
    steps = Loop(
        n_steps=loop.n_steps,
        sequences=[*loop.sequences, *taps],
        non_sequences=loop.non_sequences,
        outputs=[Output(value) for value in values],
        name=f"{loop.name or 'loop'}_steps",
    )
    return steps.apply().outputs


@dataclass
class Linearization:
    """How the steps of a loop are linearized.

    Attributes
    ----------
    loop : Loop
    axes : list of int
        The axes of the states that are axes of a batch: its members converge each by itself.
    jacobians : dict of Coupling to Variable
        Expressions in the body. For each member a matrix, its rows items of the next value, or,
        with `elementwise`, what multiplies the state item by item.
    elementwise : bool
        Whether every item of a state is multiplied by a number of its own.
    """

    loop: Loop
    axes: list[int]
    jacobians: dict[Coupling, Variable]
    elementwise: bool

    def at(self, histories: Sequence[Variable]) -> tuple[list[Variable], dict[Coupling, Variable]]:
        """Return the residuals of all steps, and their Jacobians."""
        loop, couplings = self.loop, list(self.jacobians)
        nexts = [state.next for state in loop.states]
        found = along(loop, histories, [*nexts, *self.jacobians.values()])
        residuals = self._minus(found[: len(nexts)], histories)
        return residuals, dict(zip(couplings, found[len(nexts) :], strict=True))

    def residuals(self, histories: Sequence[Variable]) -> list[Variable]:
        """Return the residuals of all steps alone."""
        nexts = along(self.loop, histories, [state.next for state in self.loop.states])
        return self._minus(nexts, histories)

    def _minus(self, nexts: Sequence[Variable], histories: Sequence[Variable]) -> list[Variable]:
        states = zip(self.loop.states, nexts, histories, strict=True)
        return [after - history[state.depth :] for state, after, history in states]

    def correction(
        self,
        residuals: Sequence[Variable],
        jacobians: dict[Coupling, Variable],
        kept: Variable | None,
    ) -> list[Variable]:
        """Return the corrections of all states at all steps: those of an affine loop.

        It is elementwise, or of vectors; the lowering makes one vector of several states and taps.

        Parameters
        ----------
        residuals, jacobians
            As `at` returns them.
        kept : Variable or None
            The share `κ` of the Jacobians that is kept, for each member; None for all of it.
        """
        if kept is not None:
            jacobians = {key: self._share(kept, jac) * jac for key, jac in jacobians.items()}
        moved = residuals if self.elementwise else [self.as_vectors(rows) for rows in residuals]
        dtype = upcast(*(rows.type.dtype for rows in moved))
        loop = Loop(name=f"{self.loop.name or 'loop'}_correction")

        def row_of(rows: Variable) -> Variable:
            rows = rows if self.elementwise else pt.cast(rows, dtype)
            row = row_type(rows)()
            loop.sequences.append(SequencePart(rows, row))
            return row

        for state, rows in zip(self.loop.states, moved, strict=True):
            row = row_of(rows)
            sizes = [state.depth, *list(rows.shape)[1:]]
            initial = (
                pt.zeros_like(state.initial) if self.elementwise else pt.zeros(sizes, dtype=dtype)
            )
            kind = _like(state) if self.elementwise else row.type
            loop.states.append(State(initial, {k: kind() for k in state.taps}, row))
        for (to, source, offset), rows in jacobians.items():
            state, tap = loop.states[to], loop.states[source].tap(offset)
            state.next = state.next + self._times(row_of(rows), tap)
        found = [
            history[state.depth :]
            for history, state in zip(loop.apply().histories, loop.states, strict=True)
        ]
        if self.elementwise:
            return found
        return [self.as_rows(*pair) for pair in zip(found, residuals, strict=True)]

    def _share(self, kept: Variable, jacobian: Variable) -> Variable:
        if self.elementwise:
            return self.over_row(kept, jacobian.type.ndim - 1)
        return pt.expand_dims(kept, (-2, -1))

    def _times(self, jacobian: Variable, moved: Variable) -> Variable:
        if self.elementwise:
            return jacobian * moved
        return pt.matmul(jacobian, moved[..., None])[..., 0] if self.axes else jacobian @ moved

    # Rows as vectors, one for each member

    def rest(self, ndim: int) -> list[int]:
        """Return the axes of a row that are not those of the batch."""
        return [axis for axis in range(ndim) if axis not in self.axes]

    def as_vectors(self, rows: Variable) -> Variable:
        """Return rows over time as vectors, of shape (T, *batch, size)."""
        rest = self.rest(rows.type.ndim - 1)
        moved = rows.dimshuffle(0, *(axis + 1 for axis in [*self.axes, *rest]))
        if len(rest) == 1:
            return moved
        sizes = list(moved.shape)[: 1 + len(self.axes)]
        return moved.reshape((*sizes, product(rows.shape[axis + 1] for axis in rest)))

    def as_rows(self, vectors: Variable, like: Variable) -> Variable:
        """Return vectors as rows over time again."""
        rest = self.rest(like.type.ndim - 1)
        order = [0, *(axis + 1 for axis in [*self.axes, *rest])]
        if len(rest) != 1:
            vectors = vectors.reshape([like.shape[axis] for axis in order], ndim=len(order))
        return pt.cast(vectors.transpose([order.index(k) for k in range(len(order))]), like.dtype)

    def over_row(self, members: Variable, ndim: int) -> Variable:
        """Return one number for each member as what broadcasts against a row."""
        places = [self.axes.index(axis) if axis in self.axes else "x" for axis in range(ndim)]
        return members.dimshuffle(*places)


def product(sizes: Iterable[Variable]) -> Variable:
    """Return a product of sizes."""
    total = pt.constant(1, dtype="int64")
    for size in sizes:
        total = total * size
    return total


def linearize(loop: Loop, jacobian: str) -> Linearization:
    """Return how the steps of a loop are linearized, with the Jacobian that is asked for.

    Parameters
    ----------
    loop : Loop
    jacobian : {"auto", "full", "block", "diagonal"}
        See `scanlib.ops.lowered.newton_scan.Newton`.
    """
    states = loop.states
    taps = [list(state.taps.values()) for state in states]
    found = independent_axes(taps, [state.next for state in states])
    couplings = _couplings(loop)
    ndims = {each[0].type.ndim for each in taps}
    if jacobian == "full" or not _have_equal_sizes(taps, found, couplings):
        found = []
    axes, exact = found, ndims == {len(found)}
    couplings = {key: value for key, value in couplings.items() if _counts(loop, key, jacobian)}
    result = Linearization(loop, axes, {}, elementwise=exact and jacobian != "full")
    if result.elementwise:
        result.jacobians = {
            coupling: conform(
                _for_ones(tangent, moved, _tap(loop, coupling)), _like(states[coupling[0]])
            )
            for coupling, (tangent, moved) in couplings.items()
        }
        return result
    diagonal = jacobian not in ("auto", "full")
    known: dict[Coupling, Variable] = {}
    if diagonal and not axes:
        pairs = ((key, diagonal_of(*pair)) for key, pair in couplings.items())
        known = {key: value for key, value in pairs if value is not None}
    matrices = {
        coupling: matrix
        for coupling, (tangents, moved) in couplings.items()
        if coupling not in known
        and (matrix := _matrix(result, loop, coupling, tangents, moved)) is not None
    }
    if not diagonal:
        result.jacobians = matrices
        return result
    result.elementwise = True
    for coupling, value in known.items():
        own = _for_ones(value, couplings[coupling][1], _tap(loop, coupling))
        result.jacobians[coupling] = conform(own, _like(states[coupling[0]]))
    for (to, source, offset), matrix in matrices.items():
        like = next(iter(states[to].taps.values()))
        items = pt.diagonal(matrix, axis1=-2, axis2=-1)
        rows = result.as_rows(pt.expand_dims(items, 0), pt.expand_dims(like, 0))[0]
        result.jacobians[to, source, offset] = rows
    return result


def _for_ones(tangent: Variable, moved: Variable, tap: Variable) -> Variable:
    """Return the tangent where every item moves by one."""
    return substitute([tangent], {moved: pt.ones_like(tap)})[0]


def _like(state: State) -> TensorType:
    """Return the type of a state's rows."""
    return next(iter(state.taps.values())).type


def _tap(loop: Loop, coupling: Coupling) -> Variable:
    """Return the body variable that a coupling is the derivative by."""
    _, source, offset = coupling
    return loop.states[source].taps[offset]


def _have_equal_sizes(
    taps: Sequence[Sequence[Variable]], axes: Sequence[int], couplings: Iterable[Coupling]
) -> bool:
    """Whether all states are known to have as many members: their steps would differ otherwise."""
    shapes = {tuple(each[0].type.shape[axis] for axis in axes) for each in taps}
    if len(shapes) == 1 and None not in shapes.pop():
        return True
    groups = [{i} for i in range(len(taps))]
    for to, source, _ in couplings:
        joined = [group for group in groups if group & {to, source}]
        groups = [group for group in groups if group not in joined] + [set().union(*joined)]
    return len(groups) == 1


def _counts(loop: Loop, coupling: Coupling, jacobian: str) -> bool:
    """Whether the Jacobian that is asked for has a coupling."""
    to, source, offset = coupling
    if jacobian == "block":
        return _like(loop.states[to]).shape == _like(loop.states[source]).shape
    return jacobian != "diagonal" or (to == source and offset == -1)


def _couplings(loop: Loop) -> dict[Coupling, tuple[Variable, Variable]]:
    """Return, for each coupling, the tangent of the next value, and the tangent that moves it."""
    found: dict[Coupling, tuple[Variable, Variable]] = {}
    nexts = [state.next for state in loop.states]
    for source, state in enumerate(loop.states):
        for offset, tap in state.taps.items():
            moved = tap.type()
            for to, tangent in enumerate(step_tangents(nexts, [(tap, moved)])):
                if moved in graph_inputs([tangent]):
                    found[to, source, offset] = tangent, moved
    return found


def _matrix(
    structure: Linearization, loop: Loop, coupling: Coupling, tangent: Variable, moved: Variable
) -> Variable | None:
    """Return the Jacobian of one coupling: for each member, one matrix."""
    tap = _tap(loop, coupling)
    to, *_ = coupling
    like = next(iter(loop.states[to].taps.values()))
    rest = structure.rest(tap.type.ndim)
    size = product(tap.shape[axis] for axis in rest)
    units = pt.eye(size, dtype=tap.type.dtype)
    if len(rest) != tap.type.ndim or len(rest) != 1:
        one = pt.constant(1, dtype="int64")
        shape = [tap.shape[k] if k in rest else one for k in range(tap.type.ndim)]
        units = pt.broadcast_to(units.reshape((size, *shape)), [size, *list(tap.shape)])
    kind = TensorType(units.type.dtype, shape=(None, *moved.type.shape))
    (columns,) = vectorize_graph([tangent], {moved: conform(units, kind)})
    if columns.type.ndim == tangent.type.ndim:  # nothing moves it
        return None
    own = structure.rest(like.type.ndim)
    matrix = columns.dimshuffle(*(axis + 1 for axis in [*structure.axes, *own]), 0)
    if len(own) != 1:
        sizes = [like.shape[axis] for axis in structure.axes]
        matrix = matrix.reshape((*sizes, product(like.shape[axis] for axis in own), size))
    return matrix


@dataclass
class _Moved:
    """How a vector moves; see the module's text. What is None is zero."""

    diagonal: Variable | None = None
    products: list[tuple[Variable, Variable, Variable]] = field(default_factory=list)
    rest: Variable | None = None

    def scaled(self, factor: Variable) -> _Moved:
        products = [(factor * a, w, b) for a, w, b in self.products]
        return _Moved(_times(self.diagonal, factor), products, _times(self.rest, factor))

    def plus(self, other: _Moved) -> _Moved:
        return _Moved(
            _sum(self.diagonal, other.diagonal),
            [*self.products, *other.products],
            _sum(self.rest, other.rest),
        )


def _times(value: Variable | None, factor: Variable) -> Variable | None:
    return None if value is None else value * factor


def _sum(one: Variable | None, other: Variable | None) -> Variable | None:
    return other if one is None else one if other is None else one + other


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
    total = _sum(last.diagonal, last.rest)
    for a, w, b in last.products:
        total = _sum(total, a * pt.diagonal(w) * b)
    return total


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
            units = [_unit(v, v is each) if v in live else v for v in node.inputs]
            part = found[each].scaled(node.op(*units))
            total = part if total is None else total.plus(part)
        return total
    op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    if isinstance(op, Dot) and len(node.inputs) == 2 and node.inputs[0] not in live:
        matrix, column = node.inputs
        before = found[column]
        if matrix.type.ndim != 2 or column.type.ndim != 2 or before.rest is not None:
            return None
        if column.type.shape[1] != 1:
            return None
        one = pt.ones_like(matrix[:, 0])
        products = [] if before.diagonal is None else [(one, matrix, before.diagonal)]
        rest: Variable | None = None
        for a, w, b in before.products:
            rest = _sum(rest, ((matrix * w.T) @ a) * b)
        return _Moved(None, products, rest)
    return None


def _unit(value: Variable, is_one: bool) -> Variable:
    return pt.ones_like(value) if is_one else pt.zeros_like(value)


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
    loop = Loop.from_op(op.scan, node.inputs)
    kinds = [history.type for history in op.results(node.outputs).histories]
    solved = _iterations(op, loop)
    histories = [conform(rows, kind) for rows, kind in zip(solved.histories, kinds, strict=True)]
    failed = pt.invert(pt.all(solved.converged))
    waiting = pt.switch(solved.converged, -1.0, solved.residual)
    worst = pt.argmax(_flat(waiting, -1.0))
    if op.options.otherwise == "sequential":
        histories = _run_if(failed, loop, histories)
    else:
        check = CheckedConvergence(not_converged(op.scan.name, op.scan.labels.function))
        numbers = [solved.count, _flat(solved.step, 0)[worst], _flat(solved.residual, 0.0)[worst]]
        histories = [check(rows, failed, *numbers) for rows in histories]
    outputs = along(loop, histories, [out.value for out in loop.outputs]) if loop.outputs else []
    results = [*histories, *outputs, solved.count, pt.max(_flat(solved.residual, 0.0))]
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


@dataclass
class _Members:
    """What the iterations carry for each member.

    Attributes
    ----------
    converged, lost : Carry
        Whether no more is to be done, or can be.
    kept : Carry
        The share of the Jacobian that is kept.
    residual, step : Carry
        The largest residual of the best iterate, and its step.
    """

    converged: Carry
    lost: Carry
    kept: Carry
    residual: Carry
    step: Carry

    def waits(self) -> Variable:
        return pt.invert(self.converged.value | self.lost.value)


@dataclass
class _Solved:
    """What the iterations end with."""

    histories: list[Variable]
    converged: Variable
    residual: Variable
    step: Variable
    count: Variable


def _iterations(op: NewtonScan, loop: Loop) -> _Solved:
    """Return the results of the loop over iterations, which starts from the last initial rows."""
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
    result = Loop(
        n_steps=pt.constant(int(op.options.max_iterations), dtype="int64"),
        non_sequences=[NonSequence(v, inner[v], v.name) for v in outer],
        name=f"{loop.name or 'loop'}_newton",
    )

    names = iter([*(state.name for state in loop.states), *MEMBERS])

    def carry(initial: Variable) -> Carry:
        value = pt.TensorType(initial.type.dtype, shape=initial.type.shape)()
        result.carries.append(Carry(initial, value, value, next(names)))
        return result.carries[-1]

    histories = [carry(guess) for guess in guesses]
    members = _Members(
        converged=carry(pt.zeros(sizes, dtype="bool")),
        lost=carry(pt.zeros(sizes, dtype="bool")),
        kept=carry(pt.ones(sizes, dtype="float64")),
        residual=carry(pt.full(sizes, np.inf, dtype="float64")),
        step=carry(pt.zeros(sizes, dtype="int64")),
    )
    count = carry(pt.constant(0, dtype="int64"))
    count.next = count.value + 1
    _iterate(linear, op.options, histories, members)
    result.stop = pt.all(members.converged.next | members.lost.next)
    carries = result.apply().carries
    converged, _, _, residual, at_step, counted = carries[len(histories) :]
    return _Solved(carries[: len(histories)], converged, residual, at_step, counted)


def _iterate(
    linear: Linearization, options: Newton, histories: list[Carry], members: _Members
) -> None:
    """Write one iteration into the next values of the carries."""
    old = [part.value for part in histories]
    states = linear.loop.states
    residuals, jacobians = linear.at(old)
    share: Variable | None = None
    if options.damping == "adaptive":
        share = members.kept.value
    elif not isinstance(options.damping, str) and options.damping:
        share = pt.full_like(members.kept.value, 1 - options.damping)
    moved = linear.correction(residuals, jacobians, share)
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
    waits = members.waits()
    lengths = _norms(linear, residuals)
    if options.damping == "adaptive":
        least = pt.le(members.kept.value, LEAST)
        after = _norms(linear, linear.residuals(new))
        better = pt.lt(pt.sum(after**2, axis=0), pt.sum(lengths**2, axis=0))
        good = finite & (small | least | better)
        grown = pt.minimum(1.0, GROW * members.kept.value)
        members.kept.next = pt.maximum(pt.switch(good, grown, SHRINK * members.kept.value), LEAST)
        lost = least & pt.invert(finite)
    else:
        good, lost = pt.ones_like(finite), pt.invert(finite)
    members.lost.next = members.lost.value | (waits & lost)
    members.converged.next = members.converged.value | (waits & finite & small)
    for part, rows in zip(histories, new, strict=True):
        taken = linear.over_row(waits & good, rows.type.ndim - 1)
        part.next = pt.switch(pt.expand_dims(taken, 0), rows, part.value)
    # A first row of zeros: there may be no steps.
    rows = pt.concatenate([pt.zeros_like(members.residual.value)[None], lengths])
    largest = pt.max(rows, axis=0)
    improved = waits & pt.le(largest, members.residual.value)
    members.residual.next = pt.switch(improved, largest, members.residual.value)
    members.step.next = pt.switch(improved, pt.argmax(rows, axis=0) - 1, members.step.value)


def _typed(number: float, like: Variable) -> Variable:
    return pt.constant(number, dtype=like.type.dtype)


def _all(linear: Linearization, conditions: Sequence[Variable]) -> Variable:
    """Return, for each member, whether conditions hold at all steps."""
    result: Variable | None = None
    for rows in conditions:
        rest = [axis + 1 for axis in linear.rest(rows.type.ndim - 1)]
        holds = pt.all(rows, axis=[0, *rest])
        result = holds if result is None else result & holds
    return result


def _norms(linear: Linearization, residuals: Sequence[Variable]) -> Variable:
    """Return the norm of the residuals at each step, for each member; infinity for NaN."""
    squares: Variable | None = None
    for rows in residuals:
        rest = [axis + 1 for axis in linear.rest(rows.type.ndim - 1)]
        own = pt.cast(rows, "float64") ** 2
        own = pt.sum(own, axis=rest) if rest else own
        squares = own if squares is None else squares + own
    return pt.switch(pt.isnan(squares), float("inf"), pt.sqrt(squares))
