"""Names for the parts of a loop, also where their owner gave none, and its step in formulas."""

from collections import Counter
from typing import Any

from pytensor.graph.basic import Constant, Variable

from scanlib.ops.expressions import UNKNOWN, Expressions, describe
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Loop

MAX_DEPTH, MAX_TEXT = 60, 200  # of the formula for a value of a step


def name_parts(loop: Loop) -> None:
    """Give every part of a loop a name of its own, and the body's variables the same.

    In order of preference: the label it was built with, what its outer variable is computed
    from, its role and number. States that are stored and those that are not are counted together.
    """
    groups: list[tuple[str, list[Any]]] = [
        ("sequence", loop.sequences),
        ("state", [*loop.states, *loop.carries]),
        ("non-sequence", loop.non_sequences),
        ("output", loop.outputs),
    ]
    labels = Counter(part.name for _, group in groups for part in group)
    taken: Counter[str] = Counter()
    for role, group in groups:
        for i, part in enumerate(group):
            name = part.name
            told = describe(part.outer) if hasattr(part, "outer") else None
            if told and (name in (None, told) or labels[name] > 1):
                is_constant = isinstance(part.outer, Constant) and not part.outer.name
                name = f"constant {told}" if is_constant else told
            name = name or f"{role} {i}"
            taken[name] += 1
            part.name = name if taken[name] == 1 else f"{name} ({taken[name]})"
    for sequence in loop.sequences:
        sequence.row.name = sequence.name
    for state in loop.states:
        for offset, tap in state.taps.items():
            tap.name = state.name if len(state.taps) == 1 else f"{state.name}[t{offset}]"
    for carry in loop.carries:
        carry.value.name = carry.name
    for item in loop.non_sequences:
        item.inner.name = item.name


def step_results(loop: Loop) -> list[tuple[str, str, Variable]]:
    """Return role, name and value of what a step computes, of a loop with names (`name_parts`)."""
    found = [("state", part.name or "", part.next) for part in loop.states]
    found += [("state", part.name or "", part.next) for part in loop.carries]
    found += [("output", part.name or "", part.value) for part in loop.outputs]
    return found + ([("condition", "until", loop.stop)] if loop.stop is not None else [])


def step_formulas(loop: Loop) -> tuple[str, ...]:
    """Return what a step computes, of a loop with names (`name_parts`), where that is short."""
    written = Expressions(depth=MAX_DEPTH, operands=MAX_DEPTH, length=MAX_TEXT)
    found = []
    for role, name, value in step_results(loop):
        text = written.value(value) if is_tensor(value) else UNKNOWN
        if UNKNOWN not in text and len(text) <= MAX_TEXT:
            found.append(f"{'next ' * (role == 'state')}{name} = {text}")
    return tuple(found)


def titled(role: str, name: str | None) -> str:
    """Return the role and name of a part, the role once: ``state 0`` has it in its name."""
    return name if name and name.startswith(f"{role} ") else f"{role} '{name}'"
