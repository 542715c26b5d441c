"""Numba code that cuts rows into segments and puts them together again.

Cutting is a view also where rows are not contiguous: a sequence that is walked backwards is a
flipped array.

Numba's front end does not know how to unpack a tuple inside another; hence the sums of tuples.
"""
# ruff: noqa: RUF005

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload
from numpy.lib.stride_tricks import as_strided
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import (
    get_numba_type,
    numba_njit,
    register_funcify_default_op_cache_key,
)

from scanlib.backends.numba.contiguous import assumed_contiguous, contiguous
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.generator_words import (
    GeneratorFromWords,
    GeneratorWords,
    generator_from_words,
    generator_words,
)
from scanlib.ops.segments import JoinRows, MergeRows, SplitRows
from scanlib.source_keys import source_number

VERSION = source_number(__name__)


def _split(value: Any, count: Any, length: Any) -> Any:
    raise NotImplementedError("compiled code only")


@overload(_split)
def _split_rows(value, count, length):
    if value.layout == "C":

        def split(value, count, length):
            sizes = (count, length) + value.shape[1:]
            strides = (length * value.strides[0],) + value.strides
            return assumed_contiguous(as_strided(value, sizes, strides))

        return split

    def split_view(value, count, length):
        sizes = (count, length) + value.shape[1:]
        return as_strided(value, sizes, (length * value.strides[0],) + value.strides)

    return split_view


@register_funcify_default_op_cache_key(SplitRows)
def funcify_split_rows(op: SplitRows, node: Apply, **kwargs: Any) -> tuple[Callable[..., Any], int]:
    """Return the compiled function of a `SplitRows`."""

    @numba_njit
    def split_rows(value, count, length):
        n, s = count.item(), length.item()
        if n * s > value.shape[0]:
            raise SequenceLengthError(
                "a sequence has {} rows, but the loop takes {} steps or more",
                np.int64(value.shape[0]),
                np.int64(n * s),
            )
        return _split(value, n, s)

    return split_rows, VERSION


@register_funcify_default_op_cache_key(MergeRows)
def funcify_merge_rows(op: MergeRows, node: Apply, **kwargs: Any) -> tuple[Callable[..., Any], int]:
    """Return the compiled function of a `MergeRows`."""

    @numba_njit
    def merge_rows(value):
        rows = value.shape[0] * value.shape[1]
        return contiguous(value).reshape((rows,) + value.shape[2:])

    return merge_rows, VERSION


@register_funcify_default_op_cache_key(JoinRows)
def funcify_join_rows(op: JoinRows, node: Apply, **kwargs: Any) -> tuple[Callable[..., Any], int]:
    """Return the compiled function of a `JoinRows`."""

    @numba_njit
    def join_rows(segments, tail):
        rows = segments.shape[0] * segments.shape[1]
        first = contiguous(segments).reshape(-1)
        last = contiguous(tail).reshape(-1)
        sizes = (rows + tail.shape[0],) + segments.shape[2:] if rows else tail.shape
        out = np.empty(sizes, tail.dtype)
        flat = out.reshape(-1)
        whole = first.size if rows else 0
        for i in range(whole):
            flat[i] = first[i]
        for i in range(flat.size - whole):
            flat[whole + i] = last[i]
        return out

    return join_rows, VERSION


@register_funcify_default_op_cache_key(GeneratorWords)
def funcify_generator_words(
    op: GeneratorWords, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], int]:
    """Return a function that asks NumPy for the state of a generator."""
    vector = types.int64[::1]

    @numba_njit
    def words(generator):
        with numba.objmode(result=vector):
            result = generator_words(generator)
        return result

    return words, VERSION


@register_funcify_default_op_cache_key(GeneratorFromWords)
def funcify_generator_from_words(
    op: GeneratorFromWords, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], int]:
    """Return a function that has NumPy make a generator."""
    generator_type = get_numba_type(node.outputs[0].type)

    @numba_njit
    def generator(words):
        with numba.objmode(result=generator_type):
            result = generator_from_words(words)
        return result

    return generator, VERSION
