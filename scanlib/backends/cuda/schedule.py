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
``chunks``
    The same in three passes: the steps are cut into as many chunks as fill the device; they are
    composed, the values before each are found, then all chunks are walked at once. The inputs are
    read twice. For steps with so many numbers that a block has room for a short stretch only, and
    wherever the flag ``scanlib__cuda_look_back`` is off.
"""

from __future__ import annotations

from dataclasses import dataclass

CHANNELS = 64  # per multiprocessor: so many threads keep its memory busy
BUSY = 512  # per multiprocessor: reading few steps ahead is enough
BLOCKS = 4  # per multiprocessor, of those that walk chunks
SECTOR = 8  # channels side by side that memory gives at once
STRETCHES = 4  # a chunk is worth its own block if it is so many stretches long
SLOTS = 32  # threads of a block for each of its channels that looks back: groups need some
LEAST_STRETCH = 64  # steps: looking back takes a block as long as walking some


@dataclass(frozen=True)
class Schedule:
    """How a loop is walked.

    Attributes
    ----------
    kind : {"serial", "rows", "chunks", "look-back"}
    lanes : int
        Channels of a block, except for ``serial``.
    chunk, chunks : int
        Steps of a chunk, and the number of chunks; for ``look-back``, a chunk is one stretch.
    threads : int
        Of a block that does not share steps.
    ahead : int
        How many steps a thread reads ahead.
    """

    kind: str
    lanes: int
    chunk: int
    chunks: int
    threads: int
    ahead: int


def choose(
    steps: int,
    channels: int,
    processors: int,
    composes: bool,
    threads: int,
    items: int,
    look_back: bool = True,
) -> Schedule:
    """Return the schedule for a loop.

    Parameters
    ----------
    steps, channels : int
    processors : int
        How many multiprocessors the device has.
    composes : bool
        Whether the steps of the loop compose.
    threads, items : int
        Threads of a block that shares steps, and the steps of each at a time.
    look_back : bool, optional
        Whether blocks may look back.

    Examples
    --------
    >>> choose(1000, 100_000, 132, True, 256, 16).kind
    'serial'
    >>> choose(100_000, 1_000, 132, True, 256, 16).kind
    'rows'
    >>> choose(100_000_000, 1, 132, True, 256, 16).kind
    'look-back'
    >>> choose(100_000_000, 1, 132, True, 256, 16, look_back=False).kind
    'chunks'
    """
    few = channels < CHANNELS * processors
    if not composes or not few or not channels or steps < 4 * items:
        return _serial(steps, channels, processors)
    lanes = _lanes(channels, 2 * processors)
    stretch = threads // lanes * items
    tiles = -(-channels // lanes)
    wanted = max(1, BLOCKS * processors // tiles)
    chunks = min(wanted, steps // (STRETCHES * stretch))
    if chunks < 2:
        return Schedule("rows", lanes, max(steps, 1), 1, threads, 0)
    if look_back:
        lanes = min(lanes, threads // SLOTS)
        stretch = threads // lanes * items
        if stretch >= LEAST_STRETCH:
            return Schedule("look-back", lanes, stretch, -(-steps // stretch), threads, 0)
        return choose(steps, channels, processors, composes, threads, items, look_back=False)
    stretches = -(-steps // (chunks * stretch))
    chunk = stretches * stretch
    return Schedule("chunks", lanes, chunk, -(-steps // chunk), threads, 0)


def _serial(steps: int, channels: int, processors: int) -> Schedule:
    busy = channels >= BUSY * processors
    threads = 128 if busy else 32
    return Schedule("serial", 1, max(steps, 1), 1, threads, 4 if busy else 16)


def _lanes(channels: int, tiles: int) -> int:
    """Return how many channels form a tile: as many as still make `tiles` tiles.

    But at least a sector of the memory, if there are as many channels.
    """
    lanes = 32
    while lanes > 1 and (lanes >= 2 * channels or (lanes > SECTOR and channels < tiles * lanes)):
        lanes //= 2
    return lanes
