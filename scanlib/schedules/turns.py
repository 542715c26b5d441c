"""Turns: so many steps at a time that a loop can be interrupted after each, at no cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scanlib.kernels.language import INT64, Local, Value, Writer

STEPS = 4096  # of a turn, at most
WORK = 1 << 20  # numbers that are computed in a turn, or one step


def steps_of_a_turn(w: Writer, work: Value, most: int = STEPS, whole: int = WORK) -> Value:
    """Write how many steps a turn has: `whole` numbers' worth, where a step computes `work`."""
    turn = w.apply("quotient", w.constant(whole, INT64), w.select(work < 1, 1, work))
    return w.select(turn < 1, 1, w.select(turn < most, turn, most))


@contextmanager
def turns(
    w: Writer,
    done: Local,
    end: Value,
    length: Value | int,
    stopped: Callable[[], Value] | None = None,
) -> Iterator[tuple[Value, Value]]:
    """Write a loop over turns; what it yields are the first step of one and the end.

    Parameters
    ----------
    w : Writer
    done : Local
        The first step that is not taken yet; where a loop may stop, each step counts it up.
    end : Value
    length : Value or int
        How many steps a turn has.
    stopped : callable, optional
        Writes whether the loop has stopped.
    """

    def goes_on() -> Value:
        more = w.copy(done) < end
        return more if stopped is None else more & ~stopped()

    with w.loop_while(goes_on):
        first = w.copy(done)
        w.poll(first, end)
        last = w.select(end - first < length, end, first + length)
        yield first, last
        if stopped is None:
            w.assign(done, last)
