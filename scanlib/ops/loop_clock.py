"""How long each loop of a profiled function took in its last call.

PyTensor's profile has times of nodes where a linker runs them one by one. Where a whole graph is
one compiled function, that function calls a clock around each loop.
"""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int64
from time import perf_counter
from typing import Any

from pytensor.graph.basic import Apply

WHOLE = -1  # stands for the whole call


class LoopClock:
    """Times of one function; `mark` is what compiled code calls, with the number of a loop.

    The first call with a number starts its time, the second one ends it.
    """

    def __init__(self) -> None:
        self.nodes: list[Apply] = []
        self.started: dict[int, float] = {}
        self.seconds: dict[int, float] = {}
        self.mark = CFUNCTYPE(None, c_int64)(self._mark)

    def number(self, node: Apply) -> int:
        """Return the number of a loop."""
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _mark(self, number: int) -> None:
        now = perf_counter()
        if number in self.started:
            self.seconds[number] = now - self.started.pop(number)
        else:
            if number == WHOLE:
                self.started.clear()  # of a call that an error ended
            self.started[number] = perf_counter()


def clock_of(profile: Any) -> LoopClock | None:
    """Return the clock that belongs to a profile, a new one if it has none; None without one."""
    if not profile:
        return None
    if not hasattr(profile, "loop_clock"):
        profile.loop_clock = LoopClock()
    clock: LoopClock = profile.loop_clock
    return clock


def loop_times(f: Any, node: Apply) -> tuple[float, float] | None:
    """Return the seconds a loop took in a call and those of the whole call, None if not known.

    They are of the last call, or means over all calls, where PyTensor's profile has the times.
    """
    profile = getattr(f, "profile", None)
    if not profile or not profile.fct_callcount:
        return None
    clock: LoopClock | None = getattr(profile, "loop_clock", None)
    if clock is not None and node in clock.nodes:
        seconds = clock.seconds.get(clock.nodes.index(node))
        whole = clock.seconds.get(WHOLE)
        return None if seconds is None or whole is None else (seconds, whole)
    times = [own for (_, timed), own in profile.apply_time.items() if timed is node]
    calls = profile.fct_callcount
    return (sum(times) / calls, profile.vm_call_time / calls) if times else None
