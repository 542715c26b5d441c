"""Shapes of a body's variables as numbers that no step computes.

What reads a state for its shape alone does not depend on it. `BodySizes` knows the shape of every
variable of a body from those of the loop's inputs; `cut` puts them where the body asks an array for
its shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.scalar import basic as ps
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.shape import Shape, Shape_i
from pytensor.tensor.variable import TensorConstant

from scanlib.analysis.linear_forms import NotAffineError, name_of
from scanlib.ops.graph import is_tensor, substitute
from scanlib.ops.loop import Loop, NonSequence
from scanlib.ops.shapes import output_row_shapes


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
        self.known: dict[Variable, Sequence[Variable]] = {}
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
        if isinstance(variable, Constant):
            return [pt.constant(size, dtype="int64") for size in variable.data.shape]
        if variable not in self.known:
            inputs = [*self.inputs, *self.outer_of]
            shapes = [*self.shapes, *([] for _ in self.outer_of)]
            values = [*self.values, *self.outer_of]
            (shape,) = output_row_shapes(inputs, [variable], shapes, values)
            if any(size is None for size in shape):
                raise NotAffineError(f"{name_of(variable)} has a shape that a step computes")
            self.known[variable] = [pt.cast(size, "int64") for size in shape]
        return self.known[variable]

    def cut(self, loop: Loop, others: list[Variable]) -> list[Variable]:
        """Replace, in a loop's body and in other body variables, what is read for its shape."""
        roots = [*loop.body_outputs(), *others]
        found: dict[Variable, Variable] = {}
        for node in toposort(roots):
            out = node.outputs[0]
            try:
                if isinstance(node.op, Shape):
                    sizes = self(node.inputs[0])
                    found[out] = pt.stack(sizes) if sizes else out
                elif isinstance(node.op, Shape_i):
                    found[out] = self(node.inputs[0])[node.op.i]
                elif isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ps.Second):
                    found[out] = self.filled(
                        substitute([node.inputs[1]], found)[0], node.inputs[0], out
                    )
            except NotAffineError:
                continue
        loop.substitute(found)
        return substitute(others, found)

    def filled(self, value: Variable, like: Variable, out: Variable) -> Variable:
        sizes = self(like)
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
