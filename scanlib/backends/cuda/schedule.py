"""How a loop is walked on a GPU: a function of its sizes and of the device.

``serial``
    One thread per channel walks all steps. Best where channels fill the device, and the only way
    for steps that do not compose.
``rows``
    One block per tile of channels, stretch by stretch: for hundreds of channels.
``look-back``
    The steps of a few channels are cut into stretches, one for each block. A block composes its
    stretch, finds the values before it from what the blocks before it have found, and walks it. All
    is read once.

Of matrix recurrences, there is one vector for each item of the batch and each column of the state.
All are walked at once, step by step. Where they are too few to fill the device, the steps are cut
into chunks, and what each chunk does to any state is found first. That takes a walk of every chunk
from each column of the identity matrix, so that it pays for few vectors and many steps only.
"""

from math import isqrt
from typing import NamedTuple

CHANNELS = 64  # per multiprocessor: so many threads keep its memory busy
BUSY = 512  # per multiprocessor: reading few steps ahead is enough
BLOCKS = 4  # per multiprocessor, of those that look back
SECTOR = 8  # channels side by side that memory gives at once
STRETCHES = 8  # fewer are walked by one block
SLOTS = 32  # threads of a block for each of its channels that looks back: groups need some

THREADS = 1024  # per multiprocessor: so many hide the time that memory takes
FEWEST_STEPS = 512  # below, one launch is over before four have started
FEWEST_CHUNKS = 4  # each step of a chunk is taken twice, and more


class Schedule(NamedTuple):
    """How a loop is walked.

    `kind` is ``"serial"``, ``"rows"`` or ``"look-back"``; `lanes` are the channels of a block, one
    for ``serial``; the steps are cut into so many `chunks` of `chunk` steps each, the stretches of
    ``look-back``; a block has so many `threads`, of which each reads so many steps `ahead`.
    """

    kind: str
    lanes: int
    chunk: int
    chunks: int
    threads: int
    ahead: int


def choose(
    steps: int, channels: int, processors: int, composes: bool, threads: int, items: int
) -> Schedule:
    """Return the schedule for a loop on a device with so many multiprocessors.

    If its steps compose, a block that shares them has so many `threads`, and each of these so many
    `items`, steps at a time.

    Examples
    --------
    >>> choose(1000, 100_000, 132, True, 256, 16).kind
    'serial'
    >>> choose(100_000, 1_000, 132, True, 256, 16).kind
    'rows'
    >>> choose(100_000_000, 1, 132, True, 256, 16).kind
    'look-back'
    """
    few = channels < CHANNELS * processors
    if not composes or not few or not channels or steps < 4 * items:
        threads, ahead = (128, 4) if channels >= BUSY * processors else (32, 16)
        return Schedule("serial", 1, max(steps, 1), 1, threads, ahead)
    lanes = _lanes(channels, 2 * processors)
    stretch = threads // lanes * items
    tiles = -(-channels // lanes)
    if BLOCKS * processors < 2 * tiles or steps < STRETCHES * stretch:
        return Schedule("rows", lanes, max(steps, 1), 1, threads, 0)
    lanes = min(lanes, threads // SLOTS)
    stretch = threads // lanes * items
    return Schedule("look-back", lanes, stretch, -(-steps // stretch), threads, 0)


def _lanes(channels: int, tiles: int) -> int:
    """Return how many channels form a tile: as many as still make `tiles` tiles, but at least a
    sector of the memory, if there are as many channels."""
    lanes = 32
    while lanes > 1 and (lanes >= 2 * channels or (lanes > SECTOR and channels < tiles * lanes)):
        lanes //= 2
    return lanes


class LinearSchedule(NamedTuple):
    """How a matrix recurrence is walked: the steps of a chunk, and the number of chunks."""

    chunk: int
    chunks: int


def choose_linear(
    steps: int, vectors: int, processors: int, group: int, columns: int
) -> LinearSchedule:
    """Return the schedule for a matrix recurrence on a device with so many multiprocessors.

    A `group` of threads walks one vector. To know what a chunk does it is walked from as many
    vectors as there are `columns`; 0 if that is not possible.

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
