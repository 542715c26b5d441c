"""What type checkers infer of plain uses of `loop`: mypy checks this file with the package."""

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar, assert_type

import scanlib

T = TypeVar("T")


class Tensor(Generic[T]):
    """Stands for a tensor variable, which is generic; PyTensor itself is not followed here."""

    def __getitem__(self, index: int) -> "Tensor[T]": ...  # type: ignore[empty-body]

    def __add__(self, other: object) -> "Tensor[T]": ...  # type: ignore[empty-body]

    def __gt__(self, other: object) -> "Tensor[T]": ...  # type: ignore[empty-body]


@dataclass
class State:
    level: Tensor
    slope: Tensor


class Errors(NamedTuple):
    value: Tensor


def step(state: State, y: Tensor) -> tuple[State, Errors]:
    return state, Errors(y)


def ending(state: State, y: Tensor) -> tuple[State, Errors, Tensor]:
    return state, Errors(y), y


def total(total: Tensor, rows: tuple[Tensor, int]) -> tuple[Tensor, None]:
    return total, None


Pair = tuple[Tensor, Tensor]


def pair(carry: Pair, rows: dict[str, Tensor]) -> tuple[Pair, dict[str, Tensor]]:
    return carry, rows


def means(carry: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return carry, carry["total"] + x


x: Tensor = Tensor()
state = State(x[0], x[1])
final, errors = scanlib.loop(step, state, x)
assert_type(final, State)
assert_type(errors, Errors)
final, errors, done = scanlib.loop(step, state, x, until=lambda state: state.level > 1)
assert_type(final, State)
assert_type(errors, Errors)
stopped = scanlib.loop(ending, state, x, name="ending")
assert_type(stopped[0], State)
assert_type(stopped[1], Errors)
# Tuples and dictionaries.
assert_type(scanlib.loop(pair, (x, x), {"x": x}), tuple[Pair, dict[str, Tensor]])
totals, mean = scanlib.loop(means, {"total": 0.0}, x, length=3)
assert_type(totals, dict[str, Tensor])
assert_type(mean, Tensor)
reveal = scanlib.loop(pair, (x, x), {"x": x}, until=lambda carry: carry[0] > 1)
assert_type(reveal[:2], tuple[Pair, dict[str, Tensor]])
# An array or a number where a step sees a variable.
assert_type(scanlib.loop(step, 0.0, [1.0], reverse=True), tuple[State, Errors])
assert_type(scanlib.loop(total, 0.0, (x, 1))[1], None)
scanlib.loop(lambda carry, row: (carry + row, row), 0.0, x)
scanlib.loop(step, state, x, revrse=True)  # type: ignore[call-overload]
