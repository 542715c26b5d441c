"""Random generators that a step draws from and does not pass on.

A generator is a value like any other: a draw returns the number and the generator that follows.
A step that draws, but does not return what follows, has the same generator at every step, and so
the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.type import RandomType

from scanlib.frontend.step import variable_number
from scanlib.frontend.trace import Trace


def check_generators(
    values: Sequence[Variable],
    trace: Trace,
    updates: Mapping[SharedVariable, Variable],
    non_sequences: Sequence[Variable],
    title: str,
) -> None:
    """Raise if a step draws from a generator that is the same at the next step.

    Numbers that were drawn before the step was called, and which it uses, are left alone.

    Parameters
    ----------
    values : sequence of Variable
        What the step returns, updates included.
    trace, updates, non_sequences
        The call of the step, and what it was given.
    title : str
        Of the loop.

    Raises
    ------
    ValueError
        Naming the generator, with the lines to write.
    """
    assert trace.result is not None
    after = {part.value: part.next for part in trace.carries.values()} | dict(updates)
    places = {value: f"non_sequences[{i}]" for i, value in enumerate(non_sequences)}
    places |= {part.value: f"outputs_info[{i}]" for i, part in trace.carries.items()}
    first = trace.result.first
    for value in ancestors(values):
        if value.owner is None or variable_number(value) < first:
            continue
        for generator in _generators(value, first):
            if after.get(generator, generator) is generator:
                raise ValueError(f"{title}: {_same_numbers(generator, places)}")


def _generators(value: Variable, first: int) -> Iterator[Variable]:
    """Yield the generators outside of a step that a node of the step draws from."""
    assert value.owner is not None
    for inp in value.owner.inputs:
        if isinstance(inp.type, RandomType):
            if inp.owner is None or variable_number(inp) < first:
                yield inp
            else:
                yield from _generators(inp, first)


def _same_numbers(generator: Variable, places: Mapping[Variable, str]) -> str:
    name = (generator.name or "rng").removesuffix("[t-1]")
    place = places.get(generator)
    label = " ".join(filter(None, [generator.name and f"`{name}`", place and f"({place})"]))
    lines = [f"    next_rng, draw = {name}.normal(...)"]
    if isinstance(generator, SharedVariable) and place is None:
        unnamed = "without a name (that of a draw without rng=, or of a loop in the step)"
        what, done = f"the shared generator {label or unnamed}", "does not return its update"
        lines.append(f"    return ..., {{{name}: next_rng}}")
    elif place is not None and place.startswith("outputs_info"):
        what, done = f"the generator {label}", "returns it as it was"
        lines.append("    return ..., next_rng")
    else:
        what, done = f"the generator {label or 'without a name'}", "does not return the next one"
        lines.append(f"    return ..., next_rng  # with {name} in outputs_info")
    return (
        f"the step draws from {what} and {done}, so every step would draw the same numbers; write\n"
        + "\n".join(lines)
        + "\nor, for the same numbers at every step, draw them before the loop"
    )
