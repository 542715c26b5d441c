"""How good what runs is, why it is no better, and what the author of the loop can do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from scanlib.explain.data import FUSED, IN_ORDER, NOTHING, PARALLEL, Obstacle
from scanlib.explain.reasons import DRAWS, listed
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.schedules.selection import MANY_STEPS, few_channels

Verdict = dict[str, Any]


class Elsewhere(NamedTuple):
    """Why no compiled kernel of scanlib's runs a loop, and what to do."""

    because: str
    action: str = NOTHING


def _verdict(grade: str, because: str, action: str = NOTHING) -> Verdict:
    return {"grade": grade, "because": because, "action": action}


def of_elementwise(
    op: ElemwiseScan,
    chosen: str,
    recurrences: Sequence[str | None],
    titles: Sequence[str],
    other: Elsewhere | None,
) -> Verdict:
    """Return the verdict on an elementwise loop; `chosen` is its schedule."""
    if other is not None:
        return _verdict(IN_ORDER, *other)
    known = [name for name in dict.fromkeys(recurrences) if name and name != "no recurrence"]
    known = [name for name in known if name != "sum over time" or len(known) == 1] or ["none"]
    combined = (
        f"steps of this kind (recurrence class: {listed(known)}) can be combined, so several "
    )
    combined += "are computed at once"
    if chosen == "blocks":
        return _verdict(PARALLEL, combined)
    if chosen == "by width":
        few = f"up to {few_channels(op)} columns with at least {MANY_STEPS} steps: {combined}"
        return _verdict(PARALLEL, f"{few}; more columns: each step computes all columns at once")
    if op.layout.ndim:
        return _verdict(
            FUSED, "each step computes all columns of a row at once, without temporaries"
        )
    open_ = [title for title, own in zip(titles, recurrences, strict=True) if own is None]
    if op.signature.has_stop:
        why = "`until` may end the loop after any step, so steps run one at a time"
    elif open_:
        why = f"steps of {listed(open_)} cannot be combined, so they run in order"
    else:
        why = "a row is one number, and what combines over steps is at most a sum"
    return _verdict(FUSED, f"{why}, with all values in registers")


def of_general(
    obstacles: Sequence[Obstacle], nouns: Sequence[str], other: Elsewhere | None
) -> Verdict:
    """Return the verdict on a loop that runs operation by operation."""
    if other is not None:
        return _verdict(IN_ORDER, *other)
    actions = list(dict.fromkeys(own.action for own in obstacles if own.action))
    # Draws leave an elementwise step behind them, unless the step does other things as well.
    if len(nouns) > 1 and DRAWS in nouns:
        actions = [action for action in actions if not action.startswith("draw ")]
    action = "; ".join(actions) or NOTHING
    if not nouns:
        return _verdict(IN_ORDER, str(obstacles[0]), action)
    why = f"each step does {listed(list(nouns), 3)} with the result of the step before"
    return _verdict(IN_ORDER, why, action)


def of_linear(timed: bool, other: Elsewhere | None) -> Verdict:
    """Return the verdict on a matrix recurrence; `timed` says whether each step has a matrix."""
    if other is not None:
        return _verdict(IN_ORDER, *other)
    matrix = "a matrix for each step" if timed else "one matrix for all steps"
    why = f"the next state is linear in the state, with {matrix}: one kernel runs all steps"
    return _verdict(FUSED, why)


def of_legacy(reason: str | None) -> Verdict:
    """Return the verdict on a loop of `pytensor.scan`, with the reason if it was not adopted."""
    if reason is not None:
        action = "build the loop with scanlib.scan, or remove what keeps it from being adopted"
        return _verdict(IN_ORDER, f"PyTensor runs it: it was not adopted: {reason}", action)
    action = "call scanlib.enable() before pytensor.function, or build it with scanlib.scan"
    return _verdict(
        IN_ORDER, "pytensor.scan made the loop, and scanlib does not look into it", action
    )


def of_newton(most: int | None) -> Verdict:
    """Return the verdict on Newton's iterations, of which there are `most` at most."""
    return _verdict(
        PARALLEL,
        f"Newton's method computes all steps of a loop at once, in up to {most} iterations; each "
        "costs what the loop's steps cost with their Jacobians, and one linear recurrence over all "
        "steps",
        "compare with method='sequential', which is less work: on a CPU it is usually faster",
    )
