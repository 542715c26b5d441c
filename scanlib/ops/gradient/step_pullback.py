"""The transposed Jacobian of one step."""

from dataclasses import dataclass, field
from functools import reduce
from operator import or_
from typing import Any

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.gradient import DisconnectedType, NullType
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.elemwise import DimShuffle

from scanlib._compat import IfElse
from scanlib.ops.graph import (
    conform,
    equality_tests,
    is_differentiable,
    is_tensor,
    merge_equal,
    reached_by,
    room_for_calls,
    substitute,
)
from scanlib.ops.loop import Loop, Output, Part, State


def is_connected(variable: Variable) -> bool:
    """Whether a cotangent or tangent is connected to anything."""
    return not isinstance(variable.type, DisconnectedType)


def is_null(cotangent: Variable) -> bool:
    """Whether a cotangent is undefined."""
    return isinstance(cotangent.type, NullType)


def is_usable(cotangent: Variable) -> bool:
    """Whether a cotangent is connected and defined."""
    return is_connected(cotangent) and not is_null(cotangent)


def as_dtype(cotangent: Variable, like: Variable) -> Variable:
    """Return a cotangent or tangent in the dtype of `like`; one of an integer is a real number."""
    if is_differentiable(like):
        dtype = like.type.dtype
    else:
        dtype = cotangent.type.dtype if is_differentiable(cotangent) else config.floatX
    return cotangent if cotangent.type.dtype == dtype else pt.cast(cotangent, dtype)


def cotangent_type(value: Variable, cotangent: Variable) -> Any:
    """Return the type of what adds up to the cotangent of a value, of which one is given."""
    if is_differentiable(value):
        return value.type
    return pt.TensorType(cotangent.type.dtype, shape=value.type.shape)


@dataclass
class StepPullback:
    """The transposed Jacobian of one step, as expressions over body variables."""

    loop: Loop
    cotangents: dict[Part, Variable] = field(default_factory=dict)
    results: dict[Variable, Variable] = field(default_factory=dict)
    stored: dict[Variable, Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.computed = dict(zip(self.loop.parts, self.loop.body_outputs(), strict=False))

    def activate(self, active: set[Part]) -> None:
        """Give cotangents to parts where these are not zero, and to all that follow from them."""
        loop = self.loop
        wrt = [inp for inp in loop.body_inputs() if is_differentiable(inp)]
        found: set[Part] = set()
        while found != active:
            found = set(active)
            targets = [value for part, value in self.computed.items() if part in active]
            reached_from = reduce(or_, reached_by(wrt, targets), 0)
            live = {inp for i, inp in enumerate(wrt) if reached_from >> i & 1}
            active |= {
                part
                for part in loop.recurrent
                if is_differentiable(part.next) and live.intersection(part.taps.values())
            }
        self.cotangents = {part: part.type() for part in loop.parts if part in active}

    def differentiate(self) -> None:
        """Fill `results`: the cotangent of every body input that has one."""
        loop = self.loop
        wrt = [inp for inp in loop.body_inputs() if is_differentiable(inp)]
        if not self.cotangents or not wrt:
            return
        values, choices = with_single_choices([self.computed[part] for part in self.cotangents])
        # A result may be computed from another one, or be an input: copies keep them apart.
        known = {
            pt.tensor_copy(value): conform(g, loose_type(value))
            for value, g in zip(values, self.cotangents.values(), strict=True)
        }
        wrt += self.integers()
        with room_for_calls(len(list(toposort(list(known))))):
            gradients = pg.grad(
                cost=None,
                known_grads=known,
                wrt=wrt,
                disconnected_inputs="ignore",
                return_disconnected="disconnected",
                null_gradients="return",
            )
        for inp, gradient in zip(wrt, substitute(gradients, choices), strict=True):
            if is_connected(gradient):
                self.results[inp] = gradient

    def integers(self) -> list[Variable]:
        """Return the integers among the non-sequences.

        As everywhere in PyTensor, an integer that a step makes a real number of has a gradient, and
        an integer that is a result has none: the next value of a state, or a row of a sequence.
        """
        return [
            part.inner
            for part in self.loop.non_sequences
            if is_tensor(part.inner)
            and not is_differentiable(part.inner)
            and not isinstance(part.outer, Constant)
        ]

    def values(self) -> list[Variable]:
        """Return the cotangents that are defined."""
        return [value for value in self.results.values() if not is_null(value)]

    def read_stored_results(self) -> None:
        """Read next states and outputs where the forward loop stored them.

        `stored` then maps each placeholder to the state or output it stands for. Values of
        another type than what was stored (a more specific shape) are computed again. So is what
        is tested for equality: derivatives of maxima and minima, elementwise and along an axis,
        ask which operand they are equal to, and a loop stores what equals its step up to rounding.
        """
        candidates = [
            (value, part)
            for part, value in self.computed.items()
            if value.owner is not None and self.is_stored(part)
        ]
        keys = [key for key, value in self.results.items() if not is_null(value)]
        values = [self.results[key] for key in keys]
        # A derivative often builds an expression of the step anew (that of tanh holds a tanh).
        merged = merge_equal([*values, *(value for value, _ in candidates)])
        replacements: dict[Variable, Variable] = {}
        exact = tested_for_equality(merged[: len(values)])
        for value, (_, part) in zip(merged[len(values) :], candidates, strict=True):
            if value not in replacements and value not in exact and value.owner is not None:
                replacements[value] = placeholder = value.type()
                self.stored[placeholder] = part
        values = substitute(merged[: len(values)], replacements)
        self.results.update(zip(keys, values, strict=True))

    @staticmethod
    def is_stored(part: Part) -> bool:
        """Whether the forward loop stores what its steps compute for a part, as it is."""
        if isinstance(part, State):
            return part.next.type == part.type and not part.untraced
        return isinstance(part, Output)

    def of_the_loop(self, values: list[Variable]) -> list[Variable]:
        """Return values that read stored results as the steps of the loop compute them."""
        return substitute(values, {v: self.computed[part] for v, part in self.stored.items()})


def tested_for_equality(values: list[Variable]) -> set[Variable]:
    """Return what stands in tests for equality above some values, and what these are views of."""
    found: set[Variable] = set()
    waiting = [inp for node in equality_tests(toposort(values)) for inp in node.inputs]
    while waiting:
        value = waiting.pop()
        found.add(value)
        if value.owner is not None and isinstance(value.owner.op, DimShuffle):
            waiting += value.owner.inputs
    return found


def with_single_choices(values: list[Variable]) -> tuple[list[Variable], dict[Variable, Variable]]:
    """Return values with an `IfElse` for each result of an `IfElse`, and what these stand for.

    PyTensor's `IfElse` has no gradient where one of its results has none: an integer, or one
    that nothing reads.
    """
    singles: dict[Variable, Variable] = {}
    for node in toposort(values):
        count = len(node.outputs)
        if not isinstance(node.op, IfElse) or count == 1:
            continue
        condition, *branches = substitute(node.inputs, singles)
        choose = IfElse(1, as_view=node.op.as_view, name=node.op.name)
        for i, out in enumerate(node.outputs):
            singles[out] = choose(condition, branches[i], branches[count + i])
    return substitute(values, singles), {single: out for out, single in singles.items()}


def loose_type(value: Variable) -> Any:
    """Return the type of a value without the static shape a cotangent need not have."""
    return pt.TensorType(value.type.dtype, shape=(None,) * value.type.ndim)
