"""Timing of several callables against each other, in one process, taking turns.

On a machine that others use, two absolute times taken minutes apart cannot be compared. Here every
round times each callable once, one right after the other and in an order that rotates, so that a
slow spell hits all of them; what is reported is the median over the rounds of a ratio.
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


def calls_per_sample(call: Callable[[], object], sample_seconds: float) -> int:
    """Find how many calls fill `sample_seconds`; this also warms the callable up."""
    call()
    number = 1
    while True:
        elapsed = seconds_per_call(call, number) * number
        if elapsed >= sample_seconds:
            return number
        growth = 1.2 * sample_seconds / max(elapsed, 1e-9)
        number = max(number + 1, int(number * min(growth, 10.0)))


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    sample_seconds: float = 0.02,
) -> dict[str, list[float]]:
    """Time callables in turns.

    Parameters
    ----------
    calls
        The callables by name; each is called without arguments.
    rounds
        How many samples to take of each.
    sample_seconds
        How long one sample lasts at least; quick callables are called more than once.

    Returns
    -------
    dict
        Seconds per call of each callable, one entry per round; the entries of a round are a pair.
    """
    numbers = {name: calls_per_sample(call, sample_seconds) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name in order:
                samples[name].append(seconds_per_call(calls[name], numbers[name]))
            order = [*order[1:], order[0]]
    finally:
        if collecting:
            gc.enable()
    return samples


def paired_ratio(samples: Sequence[float], base: Sequence[float]) -> Ratio:
    """Median and quartiles of ``samples[i] / base[i]``."""
    ratios = [sample / other for sample, other in zip(samples, base, strict=True)]
    if len(ratios) == 1:
        return Ratio(ratios[0], ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)
