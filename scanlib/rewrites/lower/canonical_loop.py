"""A loop taken apart, in the form in which what it is can be seen, and its sums over time.

What reads a state for its shape alone does not depend on it. `BodySizes` knows the shape of every
variable of a body from those of the loop's inputs; `cut` puts them where the body asks an array for
its shape.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import TypeVar

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
from pytensor.tensor.variable import TensorConstant

from scanlib.analysis.linear_forms import NotAffineError
from scanlib.analysis.scalar_body import summands
from scanlib.analysis.scalar_values import describe
from scanlib.lengths.arrays import slice_of
from scanlib.ops.graph import applies, is_tensor, readers_of, substitute
from scanlib.ops.logaddexp import stable_logs
from scanlib.ops.loop import Carry, Loop, NonSequence, State
from scanlib.ops.scan import Scan
from scanlib.ops.shapes import output_row_shapes
from scanlib.rewrites.edit import rewrite_body
from scanlib.rewrites.pytensor_rewrites import CANONICAL, run_query

RecurrentPart = TypeVar("RecurrentPart", State, Carry, State | Carry)


def canonical_loop(node: Apply, simplified: bool = True) -> Loop:
    """Take apart a loop, which the simplify rewrites have seen unless it is said otherwise."""
    loop = Loop.from_node(node)
    if not (simplified and config.scanlib__simplify):
        canonicalize(loop)
    loop.substitute(stable_logs(loop.body_outputs()))
    additions_as_sums(loop)
    return loop


def canonicalize(loop: Loop) -> None:
    """Run PyTensor's canonicalization on a step."""
    rewrite_body(loop, lambda body: run_query(CANONICAL, body))


def split_sums(
    loop: Loop, parts: Sequence[RecurrentPart]
) -> tuple[list[tuple[RecurrentPart, Variable]], list[RecurrentPart]]:
    """Return the parts of a loop that only add up, each with what a step adds, and the others."""
    readers = readers_of(loop.body_outputs())
    sums: list[tuple[RecurrentPart, Variable]] = []
    others: list[RecurrentPart] = []
    for part in parts:
        terms = [pt.cast(term, part.type.dtype) for term in summands(part, readers) or ()]
        added = reduce(add, terms) if terms else None
        if added is not None and added.type.ndim == part.type.ndim:
            sums.append((part, added))
        else:
            others.append(part)
    return sums, others


def additions_as_sums(loop: Loop) -> None:
    """Write accumulators ``c[z] += v`` as ``c + (0, but v at z)``, in place."""
    for carry in loop.carries:
        value, additions = carry.next, list[Apply]()
        while (node := value.owner) is not None and isinstance(node.op, IncSubtensor):
            if node.op.set_instead_of_inc:
                break
            additions.append(node)
            value = node.inputs[0]
        if additions and value is carry.value:
            whole = carry.type()
            zeros = pt.zeros_like(whole)
            parts = [node.op(zeros, *node.inputs[1:]) for node in additions]
            loop.non_sequences.append(NonSequence(carry.initial, whole))
            carry.next = pt.add(value, *parts)


def reads_shape(node: Apply) -> bool:
    """Whether a node reads its first input for its shape alone."""
    return applies(node, ps.Second) or isinstance(node.op, Shape | Shape_i)


def rows_like(rows: Variable) -> Variable:
    """Return an array with rows of the same shape, for those of a history what it starts from."""
    node = rows.owner
    while node is not None and isinstance(node.op, Subtensor) and slice_of(node) is not None:
        rows = node.inputs[0]
        node = rows.owner
    if node is not None and isinstance(node.op, Scan):
        signature = node.op.signature
        histories = signature.split_outputs(node.outputs).histories
        initials = signature.split_inputs(node.inputs).initials
        return dict(zip(histories, initials, strict=True)).get(rows, rows)
    return rows


class BodySizes:
    """The shapes of body variables.

    A size that is not known when the graph is built is a variable of the body, which `add_to`
    makes a non-sequence of a loop.
    """

    def __init__(self, loop: Loop) -> None:
        self.outer_of: dict[Variable, Variable] = {}
        self.inputs: list[Variable] = []
        self.shapes: list[Sequence[Variable] | None] = []
        self.values: list[Variable | None] = []
        self.known: dict[Variable, Sequence[Variable | None]] = {}
        whole = {part.inner for part in loop.non_sequences}
        for inner, (outer, lead) in loop.sources().items():
            self.inputs.append(inner)
            self.values.append(inner if inner in whole else None)
            self.shapes.append(self.of_input(inner, outer, lead) if is_tensor(inner) else None)

    def of_input(self, inner: Variable, outer: Variable, lead: int) -> Sequence[Variable]:
        """Return the shape of an input: that of another variable, but for its first axes."""
        outer = rows_like(outer) if lead else outer
        shape = []
        for axis, size in enumerate(inner.type.shape):
            if size is not None:
                shape.append(pt.constant(size, dtype="int64"))
            else:
                shape.append(pt.scalar(dtype="int64"))
                self.outer_of[shape[-1]] = outer.shape[lead + axis]
        self.known[inner] = shape
        return shape

    def __call__(self, variable: Variable) -> Sequence[Variable]:
        """Return the shape of a variable; `NotAffineError` where a step computes it."""
        self.learn([variable])
        shape = [size for size in self.known[variable] if size is not None]
        if len(shape) < variable.type.ndim:
            raise NotAffineError(f"{describe(variable)} has a shape that a step computes")
        return shape

    def learn(self, variables: Sequence[Variable]) -> None:
        """Find out the shapes of several variables: it takes as long as for one."""
        missing = [v for v in dict.fromkeys(variables) if v not in self.known]
        if not missing:
            return
        inputs = [*self.inputs, *self.outer_of]
        shapes = [*self.shapes, *([] for _ in self.outer_of)]
        values = [*self.values, *self.outer_of]
        for variable, shape in zip(
            missing, output_row_shapes(inputs, missing, shapes, values), strict=True
        ):
            self.known[variable] = [None if d is None else pt.cast(d, "int64") for d in shape]

    def cut(self, loop: Loop, others: list[Variable]) -> list[Variable]:
        """Replace, in a loop's body and in other body variables, what is read for its shape."""
        roots = [*loop.body_outputs(), *others]
        found: dict[Variable, Variable] = {}
        nodes = [node for node in toposort(roots) if reads_shape(node)]
        # What is filled has the shape of both inputs, which may be larger than that of the first.
        filled = [node.outputs[0] if applies(node, ps.Second) else node.inputs[0] for node in nodes]
        self.learn(filled)
        for node in nodes:
            out = node.outputs[0]
            try:
                if isinstance(node.op, Shape):
                    sizes = self(node.inputs[0])
                    found[out] = pt.stack(sizes) if sizes else out
                elif isinstance(node.op, Shape_i):
                    found[out] = self(node.inputs[0])[node.op.i]
                else:
                    found[out] = self.filled(substitute([node.inputs[1]], found)[0], out)
            except NotAffineError:
                continue
        loop.substitute(found)
        return substitute(others, found)

    def filled(self, value: Variable, out: Variable) -> Variable:
        """Return a value in the shape of `out`, which is that of what it fills or a larger one."""
        sizes = self(out)
        if isinstance(value, TensorConstant) or value.type.broadcastable != out.type.broadcastable:
            return pt.broadcast_to(value, tuple(sizes))
        return value

    def add_to(self, loop: Loop) -> None:
        """Make non-sequences of the sizes."""
        loop.non_sequences += [NonSequence(outer, inner) for inner, outer in self.outer_of.items()]


def sizes_from_outside(loop: Loop) -> None:
    """Let a step read sizes from outside; `loop` is edited.

    ``zeros_like(h)``, ``h.shape[1]`` and what gradients leave behind, such as a sum over as many
    rows as `h` has, depend on the shape of a value alone. As long as they stand in the body,
    whatever has that shape seems to be needed.
    """
    before = loop.body_outputs()
    sizes = BodySizes(loop)
    sizes.cut(loop, [])
    if loop.body_outputs() != before:
        sizes.add_to(loop)
        loop.drop_unread_inputs()
        canonicalize(loop)  # what is left of shapes, such as their lengths
