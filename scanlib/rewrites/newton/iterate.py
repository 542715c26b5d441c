"""Newton's iterations as a loop: what `scanlib.ops.lowered.newton_scan.NewtonScan` becomes.

A loop with `until` carries the histories of all states and, for each member (see `linearize`),
whether it has converged. A member that has, or that is lost (an item is not finite, and no damping
is left to raise), stays as it is while others go on. No value is replaced by another because it is
not finite: a loop with a member that is lost has not converged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph

from scanlib.ops.graph import conform
from scanlib.ops.loop import Carry, Loop, NonSequence
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.lowered.newton_scan import MEMBERS, Newton, NewtonScan
from scanlib.ops.messages import not_converged
from scanlib.ops.row_ops.checked_convergence import CheckedConvergence
from scanlib.rewrites.newton.linearize import Linearization, along, linearize
from scanlib.rewrites.simplify import simplify

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
