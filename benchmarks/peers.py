"""Whom scanlib is timed against, each as a call without arguments.

* ``hand``: the loop of :mod:`benchmarks.hand`, into memory allocated before;
* ``pytensor.scan`` in PyTensor's default mode;
* ``lax.scan`` and ``lax.associative_scan`` under ``jit`` on the CPU, where JAX is installed;
* ``lfilter``: SciPy's filter, where it computes the same;
* ``copy``: the time to move the bytes, a ``np.copyto`` that reads and writes together as many
  bytes as the loop must (every input once, every result once);
* ``fresh memory``: allocating the results and touching each page once. The hand-written loop need
  not do it, everybody else does. The allocator mostly gives back what was freed before;
* ``new pages``: the same with pages that the operating system has to map, the worst case;
* ``one call`` of a PyTensor function of the same inputs that does nothing.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from mmap import mmap
from typing import Any

import numpy as np
import pytensor

from benchmarks.model import (
    OURS,
    PASSES,
    THEIRS,
    AbsentError,
    Array,
    Loop,
    as_list,
    compiled,
    compiled_direct,
    load_library,
)

HAND = "hand"
DIRECT = "direct"
LAX = "lax.scan"
ASSOCIATIVE = "lax.associative_scan"
LFILTER = "lfilter"
COPY = "copy"
FRESH = "fresh memory"
NEW_PAGES = "new pages"
CALL = "one call"

OPTIONAL = (DIRECT, THEIRS, LAX, ASSOCIATIVE, LFILTER)

PAGE = 4096

Call = Callable[[], Any]


def bind_library(library: str, loop: Loop, gradient: bool, data: Sequence[Array]) -> Call:
    """The loop by a step function."""
    if library == THEIRS and not loop.theirs:
        raise AbsentError("")  # left out for time, for loops that stand beside one it runs
    function = compiled(loop.build, library, gradient)
    return lambda: function(*data)


def bind_direct(loop: Loop, gradient: bool, data: Sequence[Array]) -> Call:
    """The loop by a function of scanlib."""
    if loop.direct is None:
        raise AbsentError("")
    function = compiled_direct(loop.direct[1], gradient)
    return lambda: function(*data)


def bind_jax(parallel: bool, loop: Loop, gradient: bool, data: Sequence[Array]) -> Call:
    """The loop in JAX."""
    if find_spec("jax") is None:
        raise AbsentError("jax not installed")
    from benchmarks import jax_loops

    call = None if loop.jax is None else jax_loops.bind(loop.jax, parallel, gradient, data)
    if call is None:
        raise AbsentError("")
    return call


def bind_lfilter(loop: Loop, gradient: bool, data: Sequence[Array]) -> Call:
    """The loop by SciPy's filter, forward only."""
    function = loop.lfilter
    if function is None or gradient:
        raise AbsentError("")
    return lambda: function(*data)


BINDERS: dict[str, Callable[[Loop, bool, Sequence[Array]], Call]] = {
    OURS: lambda *arguments: bind_library(OURS, *arguments),
    DIRECT: bind_direct,
    THEIRS: lambda *arguments: bind_library(THEIRS, *arguments),
    LAX: lambda *arguments: bind_jax(False, *arguments),
    ASSOCIATIVE: lambda *arguments: bind_jax(True, *arguments),
    LFILTER: bind_lfilter,
}


def byte_counts(data: Sequence[Array], results: Sequence[Any]) -> tuple[int, int]:
    """Bytes of all inputs, and bytes of all results."""
    return (
        sum(np.asarray(value).nbytes for value in data),
        sum(np.asarray(value).nbytes for value in results),
    )


def bind_copy(data: Sequence[Array], results: Sequence[Any]) -> Call:
    """Move as many bytes as the loop must."""
    size = max(sum(byte_counts(data, results)) // 2, 1)
    source, target = np.ones(size, dtype="uint8"), np.ones(size, dtype="uint8")
    return lambda: np.copyto(target, source)


def bind_fresh(results: Sequence[Any]) -> Call:
    """Allocate the results and write into every page of them."""
    sizes = [np.asarray(value).nbytes for value in results]

    def call() -> list[Array]:
        arrays = [np.empty(size, dtype="uint8") for size in sizes]
        for array in arrays:
            array[::PAGE] = 0
        return arrays

    return call


def bind_new_pages(results: Sequence[Any]) -> Call:
    """Map pages for the results and write into every one of them."""
    sizes = [np.asarray(value).nbytes for value in results]

    def call() -> None:
        for size in sizes:
            with mmap(-1, size) as pages:
                array = np.frombuffer(pages, dtype="uint8")
                array[::PAGE] = 0
                del array  # a mapping that is still seen cannot be closed

    return call


@cache
def idle_function(build: Callable[..., Any]) -> Any:
    """Compile a function that takes a loop's inputs and returns the first one."""
    inputs = list(build(load_library(OURS)).inputs)
    small = min(inputs, key=lambda variable: variable.type.ndim)
    function: Any = pytensor.function(inputs, small, on_unused_input="ignore")
    function.trust_input = True
    return function


def bind_idle(loop: Loop) -> Call:
    """One call of a function that does nothing; it copies the smallest of its inputs."""
    function, data = idle_function(loop.build), loop.pass_data(False)
    # An array without dimensions stays one: numbers take another way into compiled functions.
    tiny = [np.asarray(array[tuple(slice(1) for _ in array.shape)]) for array in data]
    return lambda: function(*tiny)


def largest_difference(results: Any, expected: Any) -> float:
    """Largest difference over all results, each relative to its own largest expected entry."""
    differences = []
    for result, value in zip(as_list(results), as_list(expected), strict=True):
        if np.shape(result) != np.shape(value):
            raise ValueError(f"shape {np.shape(result)} where {np.shape(value)} was expected")
        scale = max(float(np.max(np.abs(value))), 1e-300)
        differences.append(float(np.max(np.abs(np.asarray(result) - value))) / scale)
    return max(differences)


def check(loop: Loop, gradient: bool, name: str, results: Any, expected: Any) -> None:
    """Raise when the results of a peer are not those of the hand-written loop."""
    if gradient and name == THEIRS and not loop.reference_gradient:
        return
    difference = largest_difference(results, expected)
    if not difference <= loop.tolerance:
        raise ValueError(
            f"{name} disagrees with the hand-written loop on {loop.name}, {PASSES[gradient]}: "
            f"relative difference {difference:.1e}, allowed {loop.tolerance:.0e}"
        )
