"""The state of a random generator as a row of integers, and back.

A generator is no tensor, so it has no history. Its state is a few words, which do: a loop
that must draw the same numbers again keeps them, instead of the numbers.

The first word says which bit generator it is; the others are the arrays and integers of its
state in a fixed order, 128-bit integers as two words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.random.type import RandomType, random_generator_type
from pytensor.tensor.type import lvector

from scanlib.ops.row_ops.linear_op import UnconnectedOp

_KINDS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_HALF = 1 << 64


def generator_words(generator: np.random.Generator) -> np.ndarray:
    """Return the state of a generator as int64 words.

    Raises
    ------
    TypeError
        If its bit generator is none of NumPy's.
    """
    state = generator.bit_generator.state
    if state["bit_generator"] not in _KINDS:
        raise TypeError(
            f"a checkpointed loop draws from one of {', '.join(_KINDS)}, "
            f"got {state['bit_generator']}"
        )
    words = [_KINDS.index(state["bit_generator"])]
    for value in _leaves(state):
        words.extend(_split(value))
    return np.array(words, dtype=np.uint64).view(np.int64)


def generator_from_words(words: np.ndarray) -> np.random.Generator:
    """Return a new generator with the state that `words` hold."""
    remaining = [int(word) for word in np.asarray(words).view(np.uint64)]
    kind = getattr(np.random, _KINDS[remaining.pop(0)])(0)
    remaining.reverse()
    kind.state = _rebuild(kind.state, remaining)
    return np.random.Generator(kind)


def _leaves(state: Any) -> list[Any]:
    if isinstance(state, dict):
        return [leaf for key in sorted(state) for leaf in _leaves(state[key])]
    return [] if isinstance(state, str) else [state]


def _split(value: Any) -> list[int]:
    if isinstance(value, np.ndarray):
        return [int(item) for item in value]
    return [int(value) % _HALF, int(value) // _HALF]


def _rebuild(like: Any, words: list[int]) -> Any:
    """Return a state of the form of `like`, taking words from the end of the list."""
    if isinstance(like, dict):
        return {key: _rebuild(like[key], words) for key in sorted(like)}
    if isinstance(like, str):
        return like
    if isinstance(like, np.ndarray):
        return np.array([words.pop() for _ in range(like.size)], dtype=like.dtype)
    return words.pop() + _HALF * words.pop()


class GeneratorWords(UnconnectedOp):
    """The state of a random generator as a vector of integers."""

    __props__ = ()

    def make_node(self, generator: Variable) -> Apply:
        if not isinstance(generator.type, RandomType):
            raise TypeError(f"expected a random generator, got {generator.type}")
        return Apply(self, [generator], [lvector()])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        output_storage[0][0] = generator_words(inputs[0])


class GeneratorFromWords(UnconnectedOp):
    """A new random generator with a given state."""

    __props__ = ()

    def make_node(self, words: Variable) -> Apply:
        return Apply(self, [words], [random_generator_type()])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        output_storage[0][0] = generator_from_words(inputs[0])
