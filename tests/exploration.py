"""Random loops in tests: which of them a run takes, and which are too close to call."""

import sys
from collections.abc import Callable

from hypothesis import HealthCheck, given, reject, seed, settings
from hypothesis.strategies import SearchStrategy

from tests.loops import LoopCase

# How close to the other branch a comparison may come before rounding could decide it.
MARGIN = 1e-4


def half(first: int, stop: int) -> range:
    """Return every other seed: those that one end of the supported Pythons takes.

    The other end takes the rest, so that a run over both sees each loop once.
    """
    return range(first + sys.version_info.minor // 2 % 2, stop, 2)


def explore(
    strategy: SearchStrategy,
    check: Callable[[LoopCase], None],
    shard: int,
    examples: int,
    *suppressed: HealthCheck,
) -> None:
    """Run `check` on the examples of one shard, so many in the thorough tier, else fewer."""
    profile = settings()
    count = max(1, examples * profile.max_examples // 100)

    @settings(max_examples=count, suppress_health_check=suppressed)
    @given(strategy)
    def run(case):
        try:
            check(case)
        except ValueError as error:
            # A rewrite of PyTensor's (`selection_dot_to_indexing`) fails on constants without
            # items. Users get a line in the log; in the tests a failing rewrite is an error.
            if "argmax of an empty sequence" not in str(error):
                raise
            reject()

    (seed(shard)(run) if profile.derandomize else run)()
