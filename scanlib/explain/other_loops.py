"""Loops that are no canonical loop: direct functions' Ops, and those of `pytensor.scan`."""

from __future__ import annotations

from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op

from scanlib.explain.data import LoopExplanation, Obstacle, Part, Size
from scanlib.explain.linkers import Setting
from scanlib.explain.loop_parts import RowOf, SizeNames, make_part, memory_of
from scanlib.explain.names import describe_outer
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.associative_scan import AssociativeScan
from scanlib.ops.linear_scan import LinearScan
from scanlib.rewrites.adopt.adopt import legacy_name

_SEMIRINGS = {
    "real": "matrix affine",
    "log": "matrix affine over (logaddexp, +)",
    "max": "matrix affine over (max, +)",
    "min": "matrix affine over (min, +)",
}


def is_legacy(op: Op) -> bool:
    """Whether an Op is a loop of `pytensor.scan`."""
    return type(op).__module__.startswith("pytensor.scan") and type(op).__name__ == "Scan"


def is_other_scan(op: Op) -> bool:
    """Whether an Op is a loop of scanlib's (the canonical and the elementwise one aside)."""
    return type(op).__module__.startswith("scanlib.") and "Scan" in type(op).__name__


def other_scan(node: Apply, setting: Setting) -> LoopExplanation:
    """Return the explanation of a loop of scanlib's."""
    if isinstance(node.op, LinearScan):
        return _linear(node, setting)
    if isinstance(node.op, AssociativeScan):
        return _associative(node, setting)
    parts = tuple(
        make_part(
            "non-sequence", describe_outer(inp) or f"input {i}", inp, SizeNames().shape(inp.type)
        )
        for i, inp in enumerate(node.inputs)
    )
    return LoopExplanation(
        name=getattr(node.op, "name", None) or "loop",
        op=type(node.op).__name__,
        steps=None,
        reverse=bool(getattr(node.op, "reverse", False)),
        schedule="a kernel of its own",
        why=f"the graph holds {node.op}",
        parts=parts,
        **_unset(node, setting),
    )


def _unset(node: Apply, setting: Setting) -> dict[str, Any]:
    """Return what these Ops have in common."""
    return {
        "until": False,
        "gradient": False,
        "runs": setting.runs(node),
        "inside": setting.inside,
    }


def _linear(node: Apply, setting: Setting) -> LoopExplanation:
    op: LinearScan = node.op
    inputs = op.parts(node.inputs)
    row, matrix_shape = _linear_shapes(op, inputs)
    timed = op.coefficient == "steps"
    name = describe_outer(inputs.matrix) or "the matrix"
    role = "sequence" if timed else "non-sequence"
    parts = [make_part(role, name, inputs.matrix, matrix_shape)]
    if inputs.right is not None:
        name = describe_outer(inputs.right) or "the matrix at the right"
        parts.append(make_part(role, name, inputs.right, (row[-1], row[-1])))
    if inputs.offset is not None:
        name = describe_outer(inputs.offset) or "the offset"
        parts.append(make_part("sequence", name, inputs.offset, row))
    stored = "last rows" if op.untraced else "history"
    family = _SEMIRINGS[op.semiring]
    parts.append(make_part("state", "state 0", inputs.initial, row, (-1,), stored, family))
    steps = None if inputs.n_steps is None else constant_integer(inputs.n_steps)
    for variable in (inputs.offset, inputs.matrix if timed else None):
        if steps is None and variable is not None:
            steps = variable.type.shape[0]
    kind = "vector" if op.vector else "matrix"
    matrix = "one matrix for all steps" if op.coefficient == "fixed" else "a matrix for each step"
    compiled = setting.is_compiled_here(node)
    return LoopExplanation(
        name=op.name or "linear recurrence",
        op="LinearScan",
        steps=steps,
        reverse=op.reverse,
        schedule="a kernel for matrix recurrences" if compiled else setting.other_schedule(),
        why=f"the next value is linear in the state, a {kind}, with {matrix} {_where(op)}",
        parts=tuple(parts),
        memory=memory_of(parts),
        **_unset(node, setting),
    )


def _where(op: LinearScan) -> str:
    """Return where the matrix stands, and whether items of it are missing."""
    where = "and another one, on both its sides" if op.side == "both" else f"on its {op.side}"
    joined = "; several states are joined into this one, which do not all read one another"
    return where + (joined if op.has_mask else "")


def _linear_shapes(op: LinearScan, inputs: Any) -> tuple[tuple[Size, ...], tuple[Size, ...]]:
    """Return the shapes of the state and of the matrix: `d` is the size of the recurrence, `m`
    the other axis of a state that is a matrix, ``b0, b1, …`` are batches."""
    batch = op.batch_rank(inputs.initial.type.ndim)
    row: list[Size] = [f"b{axis}" for axis in range(batch)]
    row += ["d"] if op.vector else ["d", "m"] if op.side == "left" else ["m", "d"]
    square: list[Size] = [*row[: op.matrix_batch_rank(inputs.matrix.type.ndim)], "d", "d"]
    timed = inputs.matrix.type.shape[int(op.coefficient == "steps") :]
    known: dict[Size, Size] = {}
    places = [(row, inputs.initial.type.shape[1:]), (square, timed)]
    if inputs.offset is not None:
        places.append((row, inputs.offset.type.shape[1:]))
    for names, sizes in places:
        for name, size in zip(names, sizes, strict=True):
            if size is not None:
                known[name] = size
    return tuple(known.get(n, n) for n in row), tuple(known.get(n, n) for n in square)


def _associative(node: Apply, setting: Setting) -> LoopExplanation:
    op: AssociativeScan = node.op
    sizes = SizeNames()
    parts = []
    for i, outer in enumerate(node.inputs[: op.n_elems]):
        name = op.labels[i] or describe_outer(outer) or f"sequence {i}"
        parts.append(make_part("sequence", name, outer, sizes.shape(RowOf(outer))))
    scanned = list(parts)
    for i, outer in enumerate(node.inputs[op.n_elems :]):
        name = describe_outer(outer) or f"non-sequence {i}"
        parts.append(make_part("non-sequence", name, outer, sizes.shape(outer.type)))
    for i, part in enumerate(scanned):
        parts.append(Part("output", f"output {i}", part.dtype, part.shape, stored="rows"))
    tree = setting.linker not in ("numba", "C", "Python")
    return LoopExplanation(
        name=op.name or "associative scan",
        op="AssociativeScan",
        steps=op.static_length(node.inputs),
        reverse=op.reverse,
        schedule=setting.other_schedule() if tree else "from row to row",
        why="the function is promised to be associative",
        parts=tuple(parts),
        memory=memory_of(parts),
        **_unset(node, setting),
    )


# pytensor.scan


def legacy(node: Apply, setting: Setting, inner: tuple[LoopExplanation, ...]) -> LoopExplanation:
    """Return the explanation of a loop of `pytensor.scan`: what it is, and no more."""
    op = node.op
    info, sizes = op.info, SizeNames()
    parts = [
        _legacy_part("sequence", i, outer, row, sizes)
        for i, (outer, row) in enumerate(
            zip(op.outer_seqs(node.inputs), op.inner_seqs(op.inner_inputs), strict=True)
        )
    ]
    buffers = [*op.outer_mitmot(node.inputs), *op.outer_mitsot(node.inputs)]
    buffers += op.outer_sitsot(node.inputs)
    taps = [*info.mit_mot_in_slices, *info.mit_sot_in_slices, *info.sit_sot_in_slices]
    for i, (outer, own) in enumerate(zip(buffers, taps, strict=True)):
        name, shape = describe_outer(outer) or f"state {i}", sizes.shape(RowOf(outer))
        parts.append(make_part("state", name, outer, shape, tuple(sorted(own)), "history"))
    for i, outer in enumerate(op.outer_untraced_sit_sot(node.inputs)):
        name = describe_outer(outer) or f"carry {i}"
        parts.append(make_part("carry", name, outer, sizes.shape(outer.type), (), "last value"))
    for i, outer in enumerate(op.outer_non_seqs(node.inputs)):
        name = describe_outer(outer) or f"non-sequence {i}"
        parts.append(make_part("non-sequence", name, outer, sizes.shape(outer.type)))
    for i, value in enumerate(op.inner_nitsot_outs(op.inner_outputs)):
        parts.append(make_part("output", f"output {i}", value, sizes.shape(value.type), (), "rows"))
    name = op.name or "loop"
    return LoopExplanation(
        name=name,
        op="pytensor.scan",
        steps=constant_integer(node.inputs[0]),
        reverse=False,
        until=info.as_while,
        gradient=name.startswith("grad_of"),
        schedule="chosen by PyTensor",
        why="the loop was made by pytensor.scan: it is not scanlib's",
        runs=f"by PyTensor's own code for the {setting.linker} linker",
        parts=tuple(parts),
        obstacles=(Obstacle(None, _why_legacy(op, setting)),),
        memory=None,
        inner=inner,
        inside=setting.inside,
    )


def _why_legacy(op: Op, setting: Setting) -> str:
    reason = setting.reasons.get(legacy_name(op))
    if reason is not None:
        return f"it was not adopted: {reason}"
    return (
        "scanlib does not look into it; switch adoption on with scanlib.enable(), or build it with "
        "scanlib.scan"
    )


def _legacy_part(role: str, i: int, outer: Variable, row: Variable, sizes: SizeNames) -> Part:
    name = describe_outer(outer) or f"{role} {i}"
    return make_part(role, name, row, sizes.shape(RowOf(outer), row.type))
