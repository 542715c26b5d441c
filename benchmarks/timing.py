"""Timing of several callables against each other, in one process, taking turns.

On a machine that others use, two absolute times taken minutes apart cannot be compared. Here every
round times each callable once, one right after the other and in an order that rotates, so that a
slow spell hits all of them; what is reported is the median over the rounds of a ratio. A callable
that is much slower than the others takes part in some of the rounds only, and is compared with the
others' times in the same rounds.
"""

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter


@dataclass(frozen=True)
class Ratio:
    """Median of paired ratios with their quartiles."""

    median: float
    low: float
    high: float


def seconds_per_call(call: Callable[[], object], number: int) -> float:
    """Mean time of `number` calls in a row."""
    start = perf_counter()
    for _ in range(number):
        call()
    return (perf_counter() - start) / number


def calls_per_sample(call: Callable[[], object], sample_seconds: float) -> tuple[int, float]:
    """Find how many calls fill `sample_seconds`, and how long they take; this also warms up."""
    call()
    number = 1
    while True:
        elapsed = seconds_per_call(call, number) * number
        if elapsed >= sample_seconds:
            return number, elapsed
        growth = 1.2 * sample_seconds / max(elapsed, 1e-9)
        number = max(number + 1, int(number * min(growth, 10.0)))


Samples = dict[str, list[float | None]]


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    sample_seconds: float = 0.02,
    seconds: float = 0.5,
    least: int = 3,
) -> Samples:
    """Time callables in turns.

    Parameters
    ----------
    calls
        The callables by name; each is called without arguments.
    rounds
        How many samples to take of each.
    sample_seconds
        How long one sample lasts at least; quick callables are called more than once.
    seconds
        How long all samples of one callable may take. A slow one sits out some rounds, evenly
        spread.
    least
        How many rounds it takes part in anyway.

    Returns
    -------
    dict
        Seconds per call of each callable, one entry per round, None where it sat out; the entries
        of a round are a pair.
    """
    numbers: dict[str, int] = {}
    turns: dict[str, set[int]] = {}
    for name, call in calls.items():
        numbers[name], sample = calls_per_sample(call, sample_seconds)
        count = min(rounds, max(least, int(seconds / sample)))
        turns[name] = {i * rounds // count for i in range(count)}
    samples: Samples = {name: [] for name in calls}
    order = list(calls)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            for name in order:
                taken = turn in turns[name]
                samples[name].append(
                    seconds_per_call(calls[name], numbers[name]) if taken else None
                )
            order = [*order[1:], order[0]]
    finally:
        if collecting:
            gc.enable()
    return samples


def fastest(calls: Mapping[str, Callable[[], object]]) -> str:
    """Name the callable with the smallest median time."""
    if len(calls) == 1:
        return next(iter(calls))
    samples = take_turns(calls, rounds=5, seconds=0.2)
    return min(samples, key=lambda name: median(samples[name]))


def median(samples: Sequence[float | None]) -> float:
    """Median of the samples that were taken."""
    return statistics.median(sample for sample in samples if sample is not None)


def paired_ratio(
    samples: Sequence[float | None],
    base: Sequence[float | None],
    less: Sequence[float | None] | None = None,
) -> Ratio:
    """Median and quartiles of ``(samples[i] - less[i]) / base[i]`` over the rounds of all."""
    columns = zip(samples, base, less or [0.0] * len(samples), strict=True)
    ratios = [
        (sample - away) / other
        for sample, other, away in columns
        if sample is not None and other is not None and away is not None
    ]
    if len(ratios) == 1:
        return Ratio(ratios[0], ratios[0], ratios[0])
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(middle, low, high)
