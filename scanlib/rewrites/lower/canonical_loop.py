"""A loop taken apart, in the form in which what it is can be seen, and its sums over time.

A part is a sum over time if its next value is the value before it plus something, and nothing else
of a step reads it.

What reads a state for its shape alone does not depend on it. `BodySizes` knows the shape of every
variable of a body from those of the loop's inputs; `cut` puts them where the body asks an array for
its shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.subtensor import IncSubtensor
from pytensor.tensor.variable import TensorConstant

from scanlib.analysis.linear_forms import NotAffineError, name_of
from scanlib.ops.graph import Readers, is_tensor, readers_of, substitute
from scanlib.ops.logaddexp import stable_logs
from scanlib.ops.loop import Carry, Loop, NonSequence, State
from scanlib.ops.shapes import output_row_shapes
from scanlib.rewrites.pytensor_rewrites import run_query

CANONICAL = RewriteDatabaseQuery(include=["canonicalize", "merge"])


def canonical_loop(node: Apply, simplified: bool = True) -> Loop:
    """Take apart a loop, which the simplify rewrites have seen unless it is said otherwise."""
    loop = Loop.from_node(node)
    if not (simplified and config.scanlib__simplify):
        body = FunctionGraph(loop.body_inputs(), loop.body_outputs(), clone=False)
        run_query(CANONICAL, body)
        loop.set_body_outputs(list(body.outputs))
    loop.substitute(stable_logs(loop.body_outputs()))
    additions_as_sums(loop)
    return loop


def added_up(part: State | Carry, readers: Readers) -> Variable | None:
    """Return what a step adds to a part that only adds up and is not stored, else None.

    Parameters
    ----------
    part : State or Carry
    readers : dict
        What `readers_of` returns for the body.
    """
    if isinstance(part, Carry):
        return _addend(part.value, part.next, readers)
    if not part.untraced or set(part.taps) != {-1}:
        return None
    return _addend(part.taps[-1], part.next, readers)


def split_sums(loop: Loop) -> tuple[list[tuple[Carry, Variable]], list[Carry]]:
    """Return the carries that only add up, each with what a step adds, and the other carries."""
    readers = readers_of(loop.body_outputs())
    found = [(carry, added_up(carry, readers)) for carry in loop.carries]
    sums = [(carry, added) for carry, added in found if added is not None]
    return sums, [carry for carry, added in found if added is None]


def _addend(value: Variable, following: Variable, readers: Readers) -> Variable | None:
    """Return what is added to a value on its way to the next one, None if it goes elsewhere.

    Sums in another dtype are none: small integers wrap around.
    """
    if not is_tensor(value) or any(reader is not None for reader in readers[following]):
        return None
    total, added = value, None
    while total is not following:
        node = readers[total][0] if len(readers[total]) == 1 else None
        if node is None:
            return None
        op = node.op.scalar_op if isinstance(node.op, Elemwise) else None
        minus = isinstance(op, ps.Sub) and node.inputs[0] is total
        if not (minus or isinstance(op, ps.Add)):
            return None
        for inp in node.inputs:
            if inp is total:
                continue
            term = pt.cast(inp, value.type.dtype)
            term = -term if minus else term
            added = term if added is None else added + term
        total = node.outputs[0]
        if total.type.dtype != value.type.dtype:
            return None
    return added if added is not None and added.type.ndim == value.type.ndim else None


def additions_as_sums(loop: Loop) -> None:
    """Write accumulators ``c[z] += v`` as ``c + (0, but v at z)``, in place."""
    for carry in loop.carries:
        if not is_tensor(carry.value):
            continue
        base, additions = _additions(carry.next, carry.value)
        if base is not carry.value or not additions:
            continue
        whole = carry.value.type()
        zeros = pt.zeros_like(whole)
        parts = [node.op(zeros, *node.inputs[1:]) for node in additions]
        loop.non_sequences.append(NonSequence(carry.initial, whole))
        carry.next = pt.add(carry.value, *parts)


def _additions(variable: Variable, value: Variable) -> tuple[Variable, list[Apply]]:
    """Take apart what is added to parts of a value, one addition after the other."""
    found: list[Apply] = []
    while variable is not value:
        node = variable.owner
        if node is None or not isinstance(node.op, IncSubtensor) or node.op.set_instead_of_inc:
            break
        found.append(node)
        variable = node.inputs[0]
    return variable, found


def reads_shape(node: Apply) -> bool:
    """Whether a node reads its first input for its shape alone."""
    return is_filled(node) or isinstance(node.op, Shape | Shape_i)


def is_filled(node: Apply) -> bool:
    """Whether a node is its second input, in the shape that both inputs broadcast to."""
    return isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ps.Second)


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
        for sequence in loop.sequences:
            self.add_input(sequence.row, sequence.outer, 1)
        for state in loop.states:
            for tap in range(-1, -state.depth - 1, -1):
                self.add_input(state.tap(tap), state.initial, 1)
        for carry in loop.carries:
            self.add_input(carry.value, carry.initial, 0)
        for whole in loop.non_sequences:
            self.add_input(whole.inner, whole.outer, 0)
            self.values[-1] = whole.inner

    def add_input(self, inner: Variable, outer: Variable, lead: int) -> None:
        self.inputs.append(inner)
        self.values.append(None)
        if not is_tensor(inner):
            self.shapes.append(None)
            return
        shape = []
        for axis, size in enumerate(inner.type.shape):
            if size is not None:
                shape.append(pt.constant(size, dtype="int64"))
                continue
            made = pt.scalar(dtype="int64")
            self.outer_of[made] = outer.shape[lead + axis]
            shape.append(made)
        self.shapes.append(shape)
        self.known[inner] = shape

    def __call__(self, variable: Variable) -> Sequence[Variable]:
        """Return the shape of a variable.

        Raises
        ------
        NotAffineError
            If it depends on what a step computes.
        """
        self.learn([variable])
        shape = [size for size in self.known[variable] if size is not None]
        if len(shape) < variable.type.ndim:
            raise NotAffineError(f"{name_of(variable)} has a shape that a step computes")
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
        self.learn([node.outputs[0] if is_filled(node) else node.inputs[0] for node in nodes])
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
        read = set(ancestors(loop.body_outputs()))
        loop.non_sequences = [part for part in loop.non_sequences if part.inner in read]
        body = FunctionGraph(loop.body_inputs(), loop.body_outputs(), clone=False)
        run_query(CANONICAL, body)  # what is left of shapes, such as their lengths
        loop.set_body_outputs(list(body.outputs))
