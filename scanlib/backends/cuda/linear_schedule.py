"""How a matrix recurrence is walked on a GPU: a function of its sizes and of the device.

There is one vector for each item of the batch and each column of the state. All are walked at
once, step by step. Where they are too few to fill the device, the steps are cut into chunks, and
what each chunk does to any state is found first. That takes a walk of every chunk from each column
of the identity matrix, so that it pays for few vectors and many steps only.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isqrt

THREADS = 1024  # per multiprocessor: so many hide the time that memory takes
FEWEST_STEPS = 512  # below, one launch is over before three have started
FEWEST_CHUNKS = 4  # each step of a chunk is taken twice, and more


@dataclass(frozen=True)
class LinearSchedule:
    """How a matrix recurrence is walked.

    Attributes
    ----------
    chunk, chunks : int
        Steps of a chunk, and the number of chunks.
    """

    chunk: int
    chunks: int


def choose_linear(
    steps: int, vectors: int, processors: int, group: int, columns: int
) -> LinearSchedule:
    """Return the schedule for a matrix recurrence.

    Parameters
    ----------
    steps, vectors : int
    processors : int
        How many multiprocessors the device has.
    group : int
        How many threads walk one vector.
    columns : int
        From how many vectors each chunk is walked to know what it does; 0 if that is not possible.

    Examples
    --------
    >>> choose_linear(1000, 100_000, 132, 1, 5).chunks
    1
    >>> choose_linear(1_000_000, 1, 132, 1, 5).chunks
    707
    """
    whole = LinearSchedule(max(steps, 1), 1)
    if not columns or not vectors or steps < FEWEST_STEPS:
        return whole
    # States before chunks are found one after the other, so that many chunks cost time as well.
    wanted = min(THREADS * processors // (vectors * columns * group), isqrt(steps // 2))
    if wanted < FEWEST_CHUNKS:
        return whole
    chunk = -(-steps // wanted)
    return LinearSchedule(chunk, -(-steps // chunk))
