"""Random generators that a step draws from and does not pass on.

A generator is a value like any other: a draw returns the number and the generator that follows.
A step that draws, but does not return what follows, has the same generator at every step, and so
the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.type import RandomType

from scanlib.frontend.step import variable_number
from scanlib.frontend.trace import Trace
from scanlib.ops.scan import Scan


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
    for node in dict.fromkeys(value.owner for value in ancestors(values)):
        if node is None or not _draws(node, first):
            continue
        for given in node.inputs:
            is_outside = given.owner is None or variable_number(given) < first
            stays = isinstance(given.type, RandomType) and after.get(given, given) is given
            if is_outside and stays:
                raise ValueError(f"{title}: {_same_numbers(given, places)}")


def mark_written(node: Apply) -> None:
    """Note that a loop is one that a user wrote. A gradient is none: it draws the same again."""
    node.tag.is_written = True


def _draws(node: Apply, first: int) -> bool:
    """Whether a node was made in a step, and a generator comes out of it."""
    if not any(isinstance(x.type, RandomType) for x in node.outputs):
        return False
    is_written = not isinstance(node.op, Scan) or getattr(node.tag, "is_written", False)
    return is_written and variable_number(node.outputs[0]) >= first


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
