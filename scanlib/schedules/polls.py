"""Loops that poll, so that they can be interrupted: now and then, which costs nothing."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from scanlib.kernels.language import Local, Value, Writer

STEPS = 4096  # between two polls, at most
WORK = 1 << 20  # numbers that are computed between two polls, or one step


@contextmanager
def between_polls(
    w: Writer,
    done: Local,
    end: Value,
    length: Value | int,
    stopped: Callable[[], Value] | None = None,
) -> Iterator[tuple[Value, Value]]:
    """Write a loop that polls after `length` steps; what it yields are the first step after a poll
    and the end.

    `done` is the first step that is not taken yet; where a loop may stop, each step counts it up,
    and `stopped` writes whether it has.
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
