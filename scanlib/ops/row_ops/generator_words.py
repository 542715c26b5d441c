"""The state of a random generator as a row of integers, and back.

A generator is no tensor, so it has no history. Its state is a few words, which do: a loop
that must draw the same numbers again keeps them, instead of the numbers.
"""

import pickle
from functools import cache
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.random.type import RandomType, random_generator_type
from pytensor.tensor.type import lvector

from scanlib.ops.row_ops.linear_op import UnconnectedOp


def generator_words(generator: np.random.Generator) -> np.ndarray:
    """Return the state of a generator as int64 words, as many for each state of its kind;
    `TypeError` if its bit generator is none of NumPy's."""
    kind = type(generator.bit_generator)
    if getattr(np.random, kind.__name__, None) is not kind:
        raise TypeError(
            f"a checkpointed loop draws from a bit generator of NumPy's, got {kind.__name__}"
        )
    content = pickle.dumps(generator.bit_generator.state)
    return np.frombuffer(content.ljust(_size(kind), b"\0"), np.int64)


@cache
def _size(kind: type[np.random.BitGenerator]) -> int:
    """Return how many bytes hold any state: integers have more or less of them."""
    return (len(pickle.dumps(kind(0).state)) + 64) // 8 * 8


def generator_from_words(words: np.ndarray) -> np.random.Generator:
    """Return a new generator with the state that `words` hold."""
    state = pickle.loads(words.tobytes())
    bits = getattr(np.random, state["bit_generator"])(0)
    bits.state = state
    return np.random.Generator(bits)


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
