"""How long each loop of a profiled function takes.

PyTensor's profile has the times of nodes, where a linker runs them one by one; in numba mode,
`scanlib.backends.numba.linker` puts them there.
"""

from __future__ import annotations

from typing import Any

from pytensor.graph.basic import Apply


def loop_times(f: Any, node: Apply) -> tuple[float, float] | None:
    """Return the seconds a loop took in a call and those of the whole call, None if not known.

    They are means over all calls.
    """
    profile = getattr(f, "profile", None)
    if not profile or not profile.fct_callcount:
        return None
    times = [own for (_, timed), own in profile.apply_time.items() if timed is node]
    calls = profile.fct_callcount
    return (sum(times) / calls, profile.vm_call_time / calls) if times else None
