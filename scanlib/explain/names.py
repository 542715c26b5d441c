"""Names for the parts of a loop, also where their owner gave none, and its step in formulas."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import io_toposort
from pytensor.printing import pprint
from pytensor.tensor.subtensor import Subtensor

from scanlib.ops.graph import index_text, is_tensor
from scanlib.ops.loop import Loop
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan

MAX_DEPTH = 6  # how far an unnamed variable is followed to one with a name
MAX_TERMS, MAX_TEXT = 60, 200  # of the formula for a value of a step


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
            if (name is None or labels[name] > 1) and hasattr(part, "outer"):
                name = describe_outer(part.outer) or name
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
    results = step_results(loop)
    terms: Counter[Variable] = Counter()  # a formula writes a value as often as it is read
    for node in io_toposort(loop.body_inputs(), [value for *_, value in results]):
        terms.update(dict.fromkeys(node.outputs, 1 + sum(terms[v] or 1 for v in node.inputs)))
    found = []
    for role, name, value in results:
        is_short = is_tensor(value) and terms[value] <= MAX_TERMS
        text = _bare(pprint(value)) if is_short else ""
        if text and len(text) <= MAX_TEXT:
            found.append(f"{'next ' * (role == 'state')}{name} = {text}")
    return tuple(found)


def _bare(text: str) -> str:
    """Return a formula without LaTeX, signatures, and the parentheses around the whole."""
    text = re.sub(r'{"[^"]*"}', "", text).replace("\\dot", "@").replace("\\", "")
    depth = ends = 0
    for letter in text:
        depth += (letter == "(") - (letter == ")")
        ends += depth == 0
    return text[1:-1] if text.startswith("(") and ends == 1 else text


def titled(role: str, name: str | None) -> str:
    """Return the role and name of a part, the role once: ``state 0`` has it in its name."""
    return name if name and name.startswith(f"{role} ") else f"{role} '{name}'"


def describe_outer(variable: Variable, depth: int = MAX_DEPTH) -> str | None:
    """Return a short text for a variable outside of loops, None if there is none.

    A named variable is its name; a slice of one is ``x[1:]``; a result of a loop is
    ``state 0 of ar1``; the result of an Op with one operand is ``Exp(x)``.
    """
    if variable.name:
        return variable.name
    if isinstance(variable, Constant):
        real = getattr(variable.type, "dtype", "")[:3] in ("flo", "int", "uin", "boo")
        one = getattr(variable.data, "size", 0) == 1
        return f"constant {variable.data.item():.6g}" if one and real else None
    node = variable.owner
    if node is None or not depth:
        return None
    if isinstance(node.op, Scan | ElemwiseScan):
        return _result_of(node.op, node.outputs.index(variable))
    inner = describe_outer(node.inputs[0], depth - 1) if node.inputs else None
    if inner is None:
        return None
    if isinstance(node.op, Subtensor):
        return f"{inner}[{index_text(node)}]"
    if len(node.inputs) > 1:
        return None
    op = str(node.op).split("{")[0]
    return inner if op in ("DimShuffle", "ExpandDims", "Squeeze") else f"{op}({inner})"


def _result_of(op: Scan | ElemwiseScan, position: int) -> str:
    """Return the name of a loop's result."""
    scan = op.scan if isinstance(op, ElemwiseScan) else op
    labels = scan.labels
    states = [*labels.states, *labels.carries]
    names = [label or f"state {i}" for i, label in enumerate(states)]
    names += [label or f"output {i}" for i, label in enumerate(labels.outputs)]
    return f"{names[position]} of {scan.name or 'loop'}"
