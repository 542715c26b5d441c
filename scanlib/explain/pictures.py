"""The graph of one step as a picture: small enough to be read, elementwise operations together."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import io_toposort
from pytensor.scalar.basic import ScalarOp
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape

from scanlib._compat import is_legacy_scan
from scanlib.explain.data import Picture
from scanlib.explain.names import name_parts
from scanlib.ops.loop import Loop
from scanlib.ops.scan import Scan

MAX_NODES, FEW_NODES = 40, 12
MAX_LABEL = 18
COLUMN, ROW, BOX, HEIGHT = 132, 34, 112, 24


def step_picture(node: Apply, fused: str | None = None, apart: bool = False) -> Picture | None:
    """Return the picture of the step of a loop.

    `fused` is a label for all it computes; with `apart`, elementwise operations stay apart, if few.
    """
    if is_legacy_scan(node.op):
        graph = node.op.fgraph
        results = [("result", "output", variable) for variable in graph.outputs]
        return picture(
            {v: (v.name or "input", "input") for v in graph.inputs}, results, fused, apart
        )
    loop = Loop.from_node(node) if isinstance(node.op, Scan) else None
    loop = loop or Loop.from_op(node.op.scan, node.inputs)
    name_parts(loop)
    inputs = {part.row: (part.name or "", "input") for part in loop.sequences}
    inputs |= {tap: (tap.name or "", "state") for s in loop.states for tap in s.taps.values()}
    inputs |= {part.value: (part.name or "", "state") for part in loop.carries}
    inputs |= {part.inner: (part.name or "", "input") for part in loop.non_sequences}
    results = [(part.name or "", "next", part.next) for part in loop.states]
    results += [(part.name or "", "next", part.next) for part in loop.carries]
    results += [(part.name or "", "output", part.value) for part in loop.outputs]
    results += [("until", "output", loop.stop)] if loop.stop is not None else []
    return picture(inputs, results, fused, apart)


def picture(
    inputs: dict[Variable, tuple[str, str]],
    results: Sequence[tuple[str, str, Variable]],
    fused: str | None = None,
    apart: bool = False,
) -> Picture | None:
    """Return the picture of a graph, None if it has too many nodes to be read."""
    nodes = [
        node
        for node in io_toposort(list(inputs), [result for _, _, result in results])
        if not isinstance(node.op, DimShuffle | Shape | Shape_i | SpecifyShape)
    ]
    few = len(nodes) <= FEW_NODES and apart
    groups = {node: number for number, node in enumerate(nodes)} if few else None
    groups = groups or _groups(nodes, [v for _, _, v in results])
    groups = dict.fromkeys(nodes, 0) if fused else groups
    members: dict[int, list[Apply]] = {}
    for node in nodes:
        members.setdefault(groups[node], []).append(node)
    places: dict[Variable | int, int] = {}
    shown: list[tuple[str, str]] = []
    pending: set[tuple[int, int]] = set()

    def place(variable: Variable) -> int | None:
        variable = _source(variable)
        if variable in inputs and variable not in places:
            places[variable] = len(shown)
            shown.append(inputs[variable])
        return places.get(groups.get(variable.owner, variable))

    for group, own in members.items():
        sources = {
            place(v) for node in own for v in node.inputs if groups.get(_source(v).owner) != group
        }
        places[group] = len(shown)
        pending |= {(source, len(shown)) for source in sources if source is not None}
        shown.append((fused or _label(own), "operation"))
    for label, kind, result in results:
        source = place(result)
        if source is not None:
            pending.add((source, len(shown)))
            shown.append((label, kind))
    if not shown or len(shown) > MAX_NODES:
        return None
    columns = [0] * len(shown)
    for source, target in sorted(pending, key=lambda edge: edge[1]):
        columns[target] = max(columns[target], columns[source] + 1)
    last = max(columns)
    for number, (_, kind) in enumerate(shown):
        if kind in ("next", "output"):
            columns[number] = last
        elif kind == "input":  # next to what reads it first
            columns[number] = min(columns[v] for u, v in pending if u == number) - 1
    placed = tuple((*node, column) for node, column in zip(shown, columns, strict=True))
    return Picture(placed, tuple(sorted(pending)))


def _source(variable: Variable) -> Variable:
    """Return what a value is, without changes of its axes."""
    while variable.owner is not None and isinstance(variable.owner.op, DimShuffle | SpecifyShape):
        variable = variable.owner.inputs[0]
    return variable


def _groups(nodes: list[Apply], results: list[Variable]) -> dict[Apply, int]:
    """Return a number for each node: elementwise operations have that of the one that reads them,
    where all readers have the same."""
    readers: dict[Apply, set[Apply | None]] = {}
    for node in nodes:
        for variable in map(_source, node.inputs):
            readers.setdefault(variable.owner, set()).add(node)
    for variable in map(_source, results):
        readers.setdefault(variable.owner, set()).add(None)
    groups = {node: number for number, node in enumerate(nodes)}
    for node in reversed(nodes):
        own = readers.get(node, {None})
        numbers = {None if reader is None else groups[reader] for reader in own}
        arithmetic = [node, *(reader for reader in own if reader is not None)]
        if len(numbers) == 1 and None not in numbers and all(map(_is_elementwise, arithmetic)):
            (groups[node],) = numbers  # type: ignore[assignment]
    return groups


def _is_elementwise(node: Apply) -> bool:
    return isinstance(node.op, Elemwise | ScalarOp)


def _label(nodes: list[Apply]) -> str:
    """Return what a group of nodes computes."""
    if not _is_elementwise(nodes[0]):
        op = nodes[0].op
        return str(getattr(op, "core_op", op)).split("{")[0]
    names = [str(getattr(node.op, "scalar_op", node.op)).split("{")[0].lower() for node in nodes]
    text = ", ".join(dict.fromkeys(names))
    return text if len(text) <= MAX_LABEL else f"{len(nodes)} operations"


def svg(drawn: Picture, title: str) -> str:
    """Return a picture as SVG; colours are classes, for a style sheet."""
    rows: dict[int, int] = {}
    corners = []
    for _, _, column in drawn.nodes:
        corners.append((8 + column * COLUMN, 8 + rows.get(column, 0) * ROW))
        rows[column] = rows.get(column, 0) + 1
    width, height = 8 + (max(rows) + 1) * COLUMN, 8 + max(rows.values()) * ROW
    parts = []
    for source, target in drawn.edges:
        x, y = corners[source][0] + BOX, corners[source][1] + HEIGHT // 2
        u, v = corners[target][0], corners[target][1] + HEIGHT // 2
        bend = (x + u) // 2
        parts.append(f'<path class="edge" d="M{x} {y}C{bend} {y} {bend} {v} {u} {v}"/>')
    for (label, kind, _), (x, y) in zip(drawn.nodes, corners, strict=True):
        text = label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"
        text = f"next {text}" if kind == "next" else text
        parts.append(
            f'<g class="{kind}"><title>{escape(label)}</title>'
            f'<rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="5"/>'
            f'<text x="{x + BOX // 2}" y="{y + 16}">{escape(text)}</text></g>'
        )
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )
