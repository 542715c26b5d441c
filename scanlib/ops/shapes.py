"""Shapes of a loop's results, known before it runs.

A stacked output has ``T`` rows of the shape that the body's output has. That shape is needed
without running a step in two places: shape inference, and a loop of zero steps.
"""

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.compile.builders import infer_shape
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FrozenFunctionGraph
from pytensor.graph.traversal import toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.shape import Shape, Shape_i

from scanlib._compat import copy_graph
from scanlib.ops.graph import depends_on, is_tensor, substitute
from scanlib.ops.signature import Signature


def stacked_row_shapes(
    signature: Signature,
    body: FrozenFunctionGraph,
    inputs: Sequence[Variable | None],
    shapes: Sequence[Sequence | None],
) -> list[list[Variable | None]]:
    """Return the shapes of the rows of a loop's stacked outputs; see `output_row_shapes`.

    `inputs` are what the loop is applied to, None for what differs from step to step, and `shapes`
    their shapes.
    """
    fixed, outer = signature.split_inputs(inputs).non_sequences, signature.split_inputs(shapes)
    values = [*[None] * (len(body.inputs) - len(fixed)), *fixed]
    rows, starts = ([shape[1:] for shape in own] for own in (outer.sequences, outer.initials))
    own = signature.of_body_inputs(outer._replace(sequences=rows, initials=starts))
    outputs = signature.split_body_outputs(body.outputs).outputs
    return output_row_shapes(body.inputs, outputs, own, values)


def output_row_shapes(
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    shapes: Sequence[Sequence | None],
    values: Sequence[Variable | None],
) -> list[list[Variable | None]]:
    """Return the shape of body outputs as expressions over the shapes of the body's inputs: one
    scalar for each dimension, or None where the shape depends on what a step computes.

    An input without a shape has None. `values` are those of inputs that are the same at every step,
    else None: a shape may depend on such values, but not on a row or a state.
    """
    known: list[list[Variable | None]] = [
        [None if size is None else pt.constant(size, dtype="int64") for size in out.type.shape]
        if is_tensor(out)
        else []
        for out in outputs
    ]
    if all(dim is not None for shape in known for dim in shape):
        return known
    inputs, outputs = copy_graph(inputs, outputs)
    inferred = infer_shape(outputs, inputs, shapes)
    constant = {inp: value for inp, value in zip(inputs, values, strict=True) if value is not None}
    varying = [inp for inp in inputs if inp not in constant]
    results: list[list[Variable | None]] = []
    for out, static, symbolic in zip(outputs, known, inferred, strict=True):
        row: list[Variable | None] = []
        for axis in range(out.type.ndim):
            if static[axis] is not None:
                row.append(static[axis])
                continue
            dim = _without_checks(pt.as_tensor_variable(symbolic[axis]))
            if dim in depends_on([dim], varying):
                dim = _without_checks(_with_known_shapes(dim, inputs, shapes, varying))
            row.append(None if dim in depends_on([dim], varying) else dim)
        results.append(row)
    flat = substitute([dim for row in results for dim in row if dim is not None], constant)
    remaining = iter(flat)
    return [[None if dim is None else next(remaining) for dim in row] for row in results]


def _with_known_shapes(
    size: Variable,
    inputs: Sequence[Variable],
    shapes: Sequence[Sequence[Variable] | None],
    varying: Sequence[Variable],
) -> Variable:
    """Return a size that reads no array which differs from step to step for its shape alone, where
    that can be told. What tells a shape may read other shapes."""
    dependent = depends_on([size], varying)
    asked: set[Variable] = set()
    while True:
        nodes = [node for node in toposort([size]) if isinstance(node.op, Shape | Shape_i)]
        reads = [node for node in nodes if node.inputs[0] in dependent]
        arrays = [node.inputs[0] for node in reads]
        if asked == set(arrays):  # none, or what cannot be told
            return size
        asked = set(arrays)
        replacements: dict[Variable, Variable] = {}
        for node, shape in zip(reads, infer_shape(arrays, inputs, shapes), strict=True):
            if isinstance(node.op, Shape_i):
                replacements[node.outputs[0]] = pt.as_tensor_variable(shape[node.op.i])
            elif shape:
                replacements[node.outputs[0]] = pt.stack([pt.cast(dim, "int64") for dim in shape])
        size = substitute([size], replacements)[0]


def _without_checks(size: Variable) -> Variable:
    """Return the size without assertions that others equal it: a step makes those itself."""
    checks = {
        node.outputs[0]: node.inputs[0]
        for node in toposort([size])
        if isinstance(node.op, CheckAndRaise)
    }

    def skip(variable: Variable) -> Variable:
        while variable in checks:
            variable = checks[variable]
        return variable

    return substitute([skip(size)], {check: skip(check) for check in checks})[0]
