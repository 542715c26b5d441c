"""Elementwise loops become `ElemwiseScan`s."""

from __future__ import annotations

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import toposort
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.math import Dot

from scanlib.analysis.recognition import analyse
from scanlib.analysis.scalar_body import NotElementwiseError, scalar_loop
from scanlib.ops.graph import is_linear_algebra
from scanlib.ops.loop import Loop, Results
from scanlib.ops.loop_rewrite import LowersLoops
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.rewrites.edit import results_by_part
from scanlib.rewrites.lower.absorb import absorb_producers
from scanlib.rewrites.lower.functions_of_sums import take_sums_apart
from scanlib.rewrites.over_time.logsumexp import stabilize_logs
from scanlib.rewrites.pytensor_rewrites import BodyRewrite, run_query
from scanlib.rewrites.simplify.simplify import replace

_SPECIALIZED = RewriteDatabaseQuery(
    include=["canonicalize", "stabilize", "specialize", "merge"],
    # A sum of products is no product of a sum where numbers are huge or not finite. What is for C
    # alone looks for a library of matrix products, and PyTensor warns where there is none.
    exclude=["inplace", "fusion", "BlasOpt", "cxx_only", "local_sum_prod_of_mul_or_div"],
)


class LowerElementwiseLoops(LowersLoops):
    """Replace every loop whose body is elementwise; see `scanlib.ops.lowered.elemwise_scan`."""

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        if not config.scanlib__lower:
            return False
        try:
            loop = absorb_producers(fgraph, node)
            parts = [*loop.states, *loop.carries, *loop.outputs]
            new = lower_elementwise(loop)
        except NotElementwiseError:
            return False
        pairs = zip(parts, node.outputs, strict=True)
        replace(fgraph, {old: new[id(part)] for part, old in pairs}, "scanlib_elementwise")
        return True


def lower_elementwise(loop: Loop) -> dict[int, Variable]:
    """Return the results of a loop, which is edited on the way, by the `id` of their part.

    Raises
    ------
    NotElementwiseError
        If its body is not elementwise.
    """
    specialize_elementwise(loop)
    apart = take_sums_apart(loop)
    results = _lowered(loop)
    if apart is not None:
        results |= _lowered(apart.loop(results))
    return results


def _lowered(loop: Loop) -> dict[int, Variable]:
    """Return the results of an elementwise loop by their part."""
    scalar = scalar_loop(loop)
    analysis = analyse(scalar)
    made = loop.apply()
    op = ElemwiseScan(
        made.node.op, scalar.freeze(), scalar.layout, analysis.recurrences, analysis.notes
    )
    node = op.make_node(*made.node.inputs)
    parts = op.signature.split_outputs(node.outputs)
    return results_by_part(loop, Results(parts.histories, parts.carries, parts.outputs, node))


def specialize_elementwise(loop: Loop) -> None:
    """Run PyTensor's rewrites on a body that may be elementwise then.

    Raises
    ------
    NotElementwiseError
        If it multiplies matrices, factorizes or solves. Bodies are canonical, and no other rewrite
        takes out what they have of these, but where an axis may have one item.
    """
    if config.scanlib__simplify:
        for node in toposort(loop.body_outputs()):
            if _stays(node):
                raise NotElementwiseError(f"{node.op} is not elementwise", node.outputs[0])
    specialize_body(loop)


def _stays(node: Apply) -> bool:
    op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    if isinstance(op, Dot):
        left, right = node.inputs
        return 1 not in (left.type.shape[-1], right.type.shape[-2:][0])
    return is_linear_algebra(op) and 1 not in node.inputs[0].type.shape[-2:]


def _specialize(body: FunctionGraph) -> None:
    stabilize_logs(body)
    run_query(_SPECIALIZED, body)


_specialized = BodyRewrite(_specialize)


def specialize_body(loop: Loop) -> None:
    """Run PyTensor's rewrites on the body, but for fusion and in-place ones."""
    _specialized(loop)
