"""Axes of the states along which a step computes every item from its own past alone.

An axis `a` of the states is independent if the rows ``h[…, i, …]`` at place `i` of it are computed
from the rows of all states at place `i`, for all `i`: the members of a batch, or the channels of an
elementwise step. The step's Jacobian is then block diagonal, one block for each `i`.

Which axes of a value run along which of the states, `linear_forms` knows of all that is linear and
of elementwise functions. Here are the rules for other Ops. What is not known mixes.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.special import LogSoftmax, Softmax

from scanlib.analysis.linear_forms import Form, LinearForms, NotAffineError, Ties, name_of, rule
from scanlib.ops.graph import sizes_of


def independent_axes(states: Sequence[Sequence[Variable]], nexts: Sequence[Variable]) -> list[int]:
    """Return the axes along which a step's states are independent of one another, given the body's
    variables of each state's past values, and its next values."""
    taps = [tap for each in states for tap in each]
    try:
        forms = LinearForms(taps, nexts, sizes_of, functions=True)
    except NotAffineError:
        return []
    blocks = [block for value in nexts for block in forms.form(value).values()]
    return [
        axis
        for axis in range(min((tap.type.ndim for tap in taps), default=0))
        if len({tap.type.broadcastable[axis] for tap in taps}) == 1
        and all(block.ties[axis] == axis for block in blocks)
    ]


@rule.register(Shape)
@rule.register(Shape_i)
def _shape(op: Op, forms: LinearForms, node: Apply) -> Form:
    if not forms.functions:
        raise NotAffineError(f"{name_of(node.outputs[0])} reads the state")
    return {}


@rule.register(Softmax)
@rule.register(LogSoftmax)
@rule.register(CumOp)
def _along_an_axis(op: Softmax | LogSoftmax | CumOp, forms: LinearForms, node: Apply) -> list[Form]:
    ndim = node.inputs[0].type.ndim
    axes = op.axis if isinstance(op.axis, tuple) else (op.axis,)
    mixed = range(ndim) if None in axes else {axis % ndim for axis in axes}
    return _tied(forms, node, node.outputs[0].type.ndim, mixed)


@rule.register(Blockwise)
def _blockwise(op: Blockwise, forms: LinearForms, node: Apply) -> list[Form]:
    return _tied(forms, node, op.batch_ndim(node))


def _tied(
    forms: LinearForms, node: Apply, count: int, mixed: Sequence[int] | set[int] = ()
) -> list[Form]:
    """Return forms of results of which the first axes run along those of the inputs."""
    if not forms.functions:
        raise NotAffineError(f"{name_of(node.outputs[0])} reads the state")
    found: dict[int, Ties] = {}
    for inp in node.inputs:
        for k, block in forms.form(inp).items():
            ties = tuple(
                None if o in mixed or inp.type.shape[o] == 1 else tie
                for o, tie in enumerate(block.ties[:count])
            )
            pairs = zip(ties, found.get(k, ties), strict=True)
            found[k] = tuple(one if one == two else None for one, two in pairs)
    return [
        {
            k: forms.zeros(k, out, (*ties, *[None] * (out.type.ndim - count)))
            for k, ties in found.items()
        }
        for out in node.outputs
    ]
