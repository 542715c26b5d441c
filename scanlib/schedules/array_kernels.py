"""What kernels over arrays share, those of loops and of graphs: inputs, sizes and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.replace import clone_replace
from pytensor.tensor.blas import BatchedDot, Dot22, Dot22Scalar, Gemm, Gemv
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.special import Softmax

from scanlib._compat import GER, thaw_graph
from scanlib.kernels.arrays import (  # noqa: F401  (their rules)
    algebra,
    blockwise,
    gathers,
    orders,
    views,
)
from scanlib.kernels.arrays.array_step import RULES, Step, core_op
from scanlib.kernels.arrays.nests import write_copy
from scanlib.kernels.arrays.places import Place, Workspace
from scanlib.kernels.arrays.sizes import Check, Given, Size, SizeValues, combined, product, total
from scanlib.kernels.language import Block, Type, Value
from scanlib.ops.row_ops.step_products import StepProducts
from scanlib.schedules.elementwise import Array, TableReader


def _softmax(op: Softmax, x: Variable) -> Variable:
    e = pt.exp(x - pt.max(x, axis=op.axis, keepdims=True))
    return e / pt.sum(e, axis=op.axis, keepdims=True)


def _sum(a: Variable, product: Variable, b: Variable, z: Variable) -> Variable:
    """Return ``a product + b z``; if `b` is zero, nothing may have been written to `z`."""
    scaled = product if _is_constant(a, 1) else a * product
    return scaled if _is_constant(b, 0) else scaled + (z if _is_constant(b, 1) else b * z)


def _same_dtype(x: Variable, y: Variable) -> bool:
    return x.type.dtype == y.type.dtype


def _is_constant(variable: Variable, number: int) -> bool:
    return isinstance(variable, Constant) and bool(np.all(variable.data == number))


# Ops that stand for others where PyTensor's compile slowly, and products of the C linker's.
_MEANINGS: dict[Any, Callable[..., Variable]] = {
    GER: lambda op, z, a, x, y: z + a * pt.outer(x, y),
    Dot22: lambda op, x, y: pt.dot(x, y),
    Dot22Scalar: lambda op, x, y, a: a * pt.dot(x, y),
    Gemm: lambda op, z, a, x, y, b: _sum(a, pt.dot(x, y), b, z),
    Gemv: lambda op, z, a, x, y, b: _sum(a, pt.dot(x, y), b, z),
    BatchedDot: lambda op, x, y: StepProducts()(x, y) if _same_dtype(x, y) else pt.matmul(x, y),
    Softmax: _softmax,
}


def inline(graph: FunctionGraph) -> None:
    """Put nodes that have rules in the place of Ops that are graphs, and of some others."""
    while True:
        found = [node for node in graph.toposort() if stands_for_others(node.op)]
        if not found:
            return
        for node in found:
            if type(node.op) in _MEANINGS:
                outputs = [_MEANINGS[type(node.op)](node.op, *node.inputs)]
            else:
                inside = thaw_graph(node.op.fgraph)
                given = dict(zip(inside.inputs, node.inputs, strict=True))
                outputs = clone_replace(inside.outputs, given)
            graph.replace_all(list(zip(node.outputs, outputs, strict=True)), import_missing=True)


def stands_for_others(op: Op) -> bool:
    """Whether `inline` puts other nodes in the place of those of an Op."""
    return isinstance(op, OpFromGraph) or type(op) in _MEANINGS


def has_rule(op: Op) -> bool:
    """Whether an Op has a rule, or stands for others that may have."""
    if stands_for_others(op):
        return True
    core = op.core_op if isinstance(op, Blockwise) else op
    return any(kind in RULES for kind in type(core).__mro__)


def items_of(array: Array) -> tuple[Size, ...]:
    """Return the sizes of an input, or of its rows."""
    return tuple(Given("dim", array.name, array.lead + axis) for axis in range(len(array.axes)))


def copied_bytes(array: Array) -> Size:
    """Return how many bytes the copy of an input has: none where it is in order of memory.

    Of an input that has rows, the rows must be.
    """
    size: Size = array.itemsize
    misplaced: Size = 0
    for axis in reversed(range(array.lead, array.lead + len(array.axes))):
        dim, stride = Given("dim", array.name, axis), Given("stride", array.name, axis)
        wrong = combined("equal", stride, size, 0, combined("equal", dim, 1, 0, 1))
        misplaced = combined("max", misplaced, wrong)
        size = product(size, dim)
    if array.lead:
        size = product(size, Given("dim", array.name, 0))
    return product(misplaced, size)


def size_values(
    kernel: TableReader, before: Block, workspace: Callable[[], Workspace]
) -> SizeValues:
    """Return what writes sizes into a kernel, in a block before all others."""

    def given(size: Given) -> Value:
        if size.kind == "dim":
            return kernel.dim(size.array, size.axis)
        if size.kind == "stride":
            return kernel.given_stride(size.array, size.axis)
        if size.kind == "part":
            return workspace().value(size.axis, values)
        array = kernel.loop.arrays[size.array]
        return kernel.w.cast(kernel.w.load(Type(array.dtype), kernel.data(size.array)), "int64")

    values = SizeValues(kernel.w, given, lambda: kernel.w.inside(before))
    return values


def place_input(kernel: TableReader, step: Step, array: Array, in_order: bool = True) -> Place:
    """Write where an input is, and its copy if its items have to be in order of memory."""
    w, name = step.writer, array.name
    axes = range(array.lead + len(array.axes))
    sizes: list[Size] = [Given("dim", name, axis) for axis in axes]
    strides: list[Size] = [Given("stride", name, axis) for axis in axes]
    place = Place(kernel.data(name), array.dtype, tuple(sizes), tuple(strides))
    if not array.axes or not in_order:
        return place
    size = copied_bytes(array)
    part = step.workspace.take(size, pinned=True)
    copy = w.offset(step.space, step.value(part.start))
    own = step.sizes.contiguous_strides(place.itemsize, tuple(sizes))
    is_copied = step.value(size) > 0
    with w.when(is_copied):
        write_copy(step, place, Place(copy, place.dtype, place.sizes, own))
    pointer = w.select(is_copied, copy, place.pointer)
    if array.lead:
        own = (combined("equal", size, 0, strides[0], own[0]), *own[1:])
    return Place(pointer, place.dtype, place.sizes, own)


def bind_input(step: Step, variable: Variable, name: str, place: Place) -> None:
    """Bind an input that is the same for all steps; an integer is known before the first one."""
    step.bind_place(variable, place)
    if variable.type.ndim == 0 and np.dtype(variable.type.dtype).kind in "iub":
        step.bind_known(variable, Given("value", name))


def step_work(step: Step, graph: FunctionGraph) -> Size:
    """Return how many numbers a step computes, about; `step` has written the nodes."""
    terms: list[Size] = [1]
    for node in graph.toposort():
        given = [step.places[v] for v in node.inputs if v in step.places]
        found = [step.places[v] for v in node.outputs if v in step.places]
        rule = RULES.get(type(core_op(node)))
        if rule is not None and rule.__module__ == algebra.__name__:
            terms += [product(*p.sizes, *p.sizes[-1:]) for p in given]
        elif isinstance(node.op, Elemwise | CAReduce):
            terms += [product(*p.sizes) for p in (*given, *found)]
        else:
            known = [None, *(place.part for place in given)]  # those of views
            terms += [product(*place.sizes) for place in found if place.part not in known]
    return step.sizes.same(total(*terms))


def write_checks(
    kernel: TableReader, values: SizeValues, checks: Iterable[Check], holds: Value
) -> None:
    """Write the checks of sizes, which are made where a condition holds."""
    w = kernel.w
    for check in checks:
        one, other = map(values.value, check.sizes)
        wrong = one.differs(other) if check.operation == "ne" else one < other
        with w.when(holds & wrong):
            code = kernel.loop.failure(check.error, check.template, len(check.values))
            w.fail(code, *map(values.value, check.values))
