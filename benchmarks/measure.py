"""Time one pass over one loop: everybody in turns, after their values were checked."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.model import (
    OURS,
    PASSES,
    AbsentError,
    Loop,
    bind_hand,
    compiled,
    compiled_direct,
)
from benchmarks.peers import (
    BINDERS,
    CALL,
    COPY,
    DIRECT,
    FRESH,
    HAND,
    LFILTER,
    NEW_PAGES,
    Call,
    bind_copy,
    bind_fresh,
    bind_idle,
    bind_new_pages,
    byte_counts,
    check,
)
from benchmarks.timing import Ratio, Samples, fastest, median, paired_ratio, take_turns


@dataclass
class Measurement:
    """The times of everybody for one pass over one loop.

    `hand` names the hand-written loop that is the scale, `operations` the Ops of scanlib in the
    compiled functions, and `absent` says why somebody was not timed.
    """

    loop: Loop
    gradient: bool
    hand: str
    samples: Samples
    bytes_read: int = 0
    bytes_written: int = 0
    operations: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def goal(self) -> float | None:
        return self.loop.goals.get(self.gradient)

    def ratio(self, name: str, base: str) -> Ratio | None:
        """Paired ratio of two peers, where both were timed."""
        if name not in self.samples or base not in self.samples:
            return None
        return paired_ratio(self.samples[name], self.samples[base])

    def goal_ratio(self, name: str) -> Ratio | None:
        """Ratio to the hand-written loop, less one empty call where the goal is meant so."""
        if name not in self.samples:
            return None
        less = self.samples[CALL] if self.loop.plus_call else None
        return paired_ratio(self.samples[name], self.samples[HAND], less)

    def misses(self, name: str) -> list[str] | None:
        """Which goals are missed, by what they compare with; None if there are none."""
        ratio = self.goal_ratio(name)
        if self.goal is None or ratio is None:
            return None
        missed = [HAND] if ratio.median > self.goal else []
        to_filter = self.ratio(name, LFILTER)
        limit = self.loop.lfilter_goal
        if to_filter is not None and limit is not None and to_filter.median > limit:
            missed.append(LFILTER)
        return missed

    def record(self) -> dict[str, Any]:
        """The measurement as the JSON file holds it."""
        to_hand = {name: self.ratio(name, HAND) for name in self.samples}
        return {
            "loop": self.loop.name,
            "title": self.loop.title,
            "pass": PASSES[self.gradient],
            "goal": self.goal,
            "goal_is_plus_one_call": self.loop.plus_call,
            "missed": {name: self.misses(name) for name in (OURS, DIRECT) if name in self.samples},
            "hand": self.hand,
            "operations": self.operations,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "ratio_to_hand": {name: asdict(ratio) for name, ratio in to_hand.items() if ratio},
            "median_seconds": {name: median(times) for name, times in self.samples.items()},
            "samples": self.samples,
            "absent": self.absent,
            "notes": self.notes,
        }


def loop_operations(function: Any) -> str:
    """Name the Ops of scanlib in a compiled function, with their numbers."""
    names = Counter(
        type(node.op).__name__
        for node in function.maker.fgraph.toposort()
        if type(node.op).__module__.startswith("scanlib")
    )
    return ", ".join(f"{count} {name}" if count > 1 else name for name, count in names.items())


def first_line(error: Exception) -> str:
    """The first line of a message; numba's go on for pages."""
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def measure(
    loop: Loop,
    gradient: bool,
    peers: Sequence[str],
    rounds: int,
    seconds: float = 0.5,
) -> Measurement:
    """Time one pass.

    Parameters
    ----------
    loop, gradient
        The loop and whether its gradient is computed too.
    peers
        Names from :data:`benchmarks.peers.OPTIONAL`.
    rounds, seconds
        See :func:`benchmarks.timing.take_turns`.

    Raises
    ------
    ValueError
        If scanlib disagrees with the hand-written loop. A peer that disagrees or cannot be built
        is left out, with a note.
    """
    data = loop.pass_data(gradient)
    by_hand = {name: bind_hand(loop, name, gradient, data) for name in loop.hand}
    hand = fastest(by_hand)
    calls: dict[str, Call] = {HAND: by_hand[hand]}
    expected = calls[HAND]()
    for name, call in by_hand.items():
        check(loop, gradient, name, call(), expected)
    absent: dict[str, str] = {}
    notes = list(loop.notes)
    for name in (OURS, *peers):
        try:
            call = BINDERS[name](loop, gradient, data)
            check(loop, gradient, name, call(), expected)
            calls[name] = call
        except AbsentError as reason:
            absent[name] = str(reason)
        except Exception as error:
            if name == OURS:
                raise
            absent[name] = "failed"
            notes.append(f"{name} left out, {PASSES[gradient]}: {first_line(error)}")
    calls[COPY] = bind_copy(data, expected)
    calls[FRESH] = bind_fresh(expected)
    calls[NEW_PAGES] = bind_new_pages(expected)
    calls[CALL] = bind_idle(loop)
    bytes_read, bytes_written = byte_counts(data, expected)
    operations = {OURS: loop_operations(compiled(loop.build, OURS, gradient))}
    if DIRECT in calls and loop.direct is not None:
        operations[DIRECT] = loop_operations(compiled_direct(loop.direct[1], gradient))
    samples = take_turns(calls, rounds, seconds=seconds)
    return Measurement(
        loop, gradient, hand, samples, bytes_read, bytes_written, operations, absent, notes
    )
