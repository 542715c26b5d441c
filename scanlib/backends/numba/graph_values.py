"""What the function of a graph has around its loops and clusters: numbers, checks, views.

A tensor of no axes, or of one item, is a scalar of the function until something wants it in memory.
What only looks at an array in another way (axes in another order, slices, parts) is a view made
with a few instructions. Indices are checked like PyTensor's own code does; an index that is
negative counts from the end. Scalar Ops are functions of kernels; any other node is a call of the
function that PyTensor's numba dispatch makes for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.type import Type
from pytensor.link.numba.dispatch.basic import numba_funcify_ensure_cache, numba_typify
from pytensor.scalar.basic import Add, Mul, ScalarType
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor
from pytensor.tensor.type import TensorType

from scanlib.backends.numba.body import constant_value
from scanlib.backends.numba.bundles import VERSION as BUNDLES
from scanlib.backends.numba.bundles import Rows, reading, taking
from scanlib.backends.numba.kernel_functions import numba_intrinsic, scalar_function
from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import VERSION, as_array, as_scalar, failing, shuffling
from scanlib.kernels.scalars import NoKernelError

MOST_TERMS = 16  # of one call


@dataclass(frozen=True)
class Part:
    """Rows of an array in a bundle that has a name."""

    bundle: str
    rows: Rows


@dataclass
class Value:
    """How a variable is held: as a `scalar`, an `array`, or both, by name; as part of a bundle."""

    scalar: str | None = None
    array: str | None = None
    part: Part | None = None


def is_zero_dim(type: Type) -> bool:
    """Whether values of this type are held as scalars."""
    return isinstance(type, ScalarType) or (isinstance(type, TensorType) and type.ndim == 0)


class GraphValues:
    """Writes numbers, checks and views, and knows how each variable is held.

    Parameters
    ----------
    source : Source
        What is written into.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.values: dict[Variable, Value] = {}
        source.object("as_array", as_array)
        source.object("as_scalar", as_scalar)

    # How variables are held

    def bind_scalar(self, variable: Variable, name: str) -> None:
        self.values[variable] = Value(scalar=name)

    def bind_array(self, variable: Variable, name: str) -> None:
        self.values[variable] = Value(array=name)

    def find(self, variable: Variable) -> Value:
        """Return how a variable is held."""
        if variable not in self.values:
            if isinstance(variable, Constant):
                self.values[variable] = self._constant(variable)
            else:
                assert variable.owner is not None, variable
                self._write_shuffle(variable.owner)
        return self.values[variable]

    def _constant(self, variable: Constant) -> Value:
        data = variable.data
        if is_zero_dim(variable.type):
            dtype = np.dtype(variable.type.dtype)
            return Value(scalar=self.source.constant(dtype.type(np.asarray(data).item())))
        return Value(
            array=self.source.constant(numba_typify(constant_value(data), variable=variable))
        )

    def scalar(self, variable: Variable) -> str:
        """Return the name of a zero-dimensional variable's scalar."""
        value = self.find(variable)
        if value.scalar is None:
            value.scalar = self.source.name("s")
            if value.array is None and value.part is not None:
                place = value.part.rows[0]
                name = self.source.function(reading(place), f"{BUNDLES} {place}", "number_in")
                self.source.line(f"{value.scalar} = {name}({value.part.bundle})")
            else:
                self.source.line(f"{value.scalar} = as_scalar({value.array})")
        return value.scalar

    def array(self, variable: Variable) -> str:
        """Return the name under which an Op that wants arrays finds a variable."""
        value = self.find(variable)
        if value.array is None and value.scalar is None and value.part is not None:
            rows = value.part.rows
            name = self.source.function(taking(rows), f"{BUNDLES} taken {rows}", "taken")
            value.array = self.source.name("a")
            self.source.line(f"{value.array} = {name}({value.part.bundle})")
        if value.array is None:
            value.array = name = self.source.name("a")
            ndim = variable.type.ndim
            if ndim:  # one item
                self.source.line(f"{name} = new_array({self._dtype(variable)}{', 1' * ndim})")
                self.source.line(f"{name}[{', '.join(['0'] * ndim)}] = {value.scalar}")
            else:
                self.source.line(f"{name} = as_array({value.scalar})")
        return value.array

    def _item(self, variable: Variable) -> str:
        """Return the only item of a tensor that has one."""
        value = self.find(variable)
        if isinstance(variable, Constant) and value.scalar is None:
            value.scalar = self.source.constant(np.asarray(variable.data).reshape(-1)[0])
        elif value.scalar is None and variable.type.ndim:
            array = self.array(variable)
            value.scalar = self.source.name("s")
            place = ", ".join(["0"] * variable.type.ndim)
            self.source.line(f"{value.scalar} = {array}[{place}]")
        return self.scalar(variable)

    def argument(self, variable: Variable) -> str:
        """Return a variable as PyTensor's numba functions take it."""
        if isinstance(variable.type, ScalarType):
            return self.scalar(variable)
        return self.array(variable)

    def _dtype(self, variable: Variable) -> str:
        dtype = np.dtype(variable.type.dtype)
        return self.source.object(f"np_{dtype.name}", dtype.type)

    # Checks

    def _fail_if(self, error: type[Exception], message: str, condition: str) -> None:
        """Write a check that raises where a condition holds."""
        kind = f"{VERSION} {error.__module__}.{error.__qualname__}"
        name = self.source.function(failing(error, message), f"{kind} {message}", "fail_if")
        self.source.line(f"{name}({condition})")

    def _check_sizes(self, node: Apply) -> None:
        """Raise where arrays of an elementwise operation differ in size along an axis."""
        for axis in range(node.outputs[0].type.ndim):
            size = None
            for k, inp in enumerate(node.inputs):
                if inp.type.shape[axis] == 1:
                    continue
                own = f"{self.array(inp)}.shape[{axis}]"
                if size is not None:  # else it is where the size was read
                    self._fail_if(ValueError, _mismatch(k, axis), f"{own} != {size}")
                size = own

    # Nodes

    def emit(self, node: Apply) -> None:
        """Write the statements that compute a node; axes are reordered where they are read."""
        if not isinstance(node.op, DimShuffle):
            self._emit(node.op, node)

    @singledispatchmethod
    def _emit(self, op: Op, node: Apply) -> None:
        self._call(op, node)

    def _call(self, op: Op, node: Apply) -> None:
        """Call the function that PyTensor's numba dispatch makes for a node."""
        name = self._function(op, node)
        arguments = ", ".join(self.argument(inp) for inp in node.inputs)
        results = [self.source.name("v") for _ in node.outputs]
        self.source.line(f"{', '.join(results)} = {name}({arguments})")
        for out, result in zip(node.outputs, results, strict=True):
            if isinstance(out.type, ScalarType):
                self.bind_scalar(out, result)
            else:
                self.bind_array(out, result)

    def _function(self, op: Op, node: Apply) -> str:
        """Register the function of a node and return its name.

        It is that of PyTensor's numba dispatch, which may use the number and the static types of
        inputs; its own keys leave those out.
        """
        function, key = numba_funcify_ensure_cache(op, node=node)
        if key is not None:
            key = f"{key}{[variable.type for variable in [*node.inputs, *node.outputs]]}"
        return self.source.function(function, key)

    # Numbers

    def _scalar_op(self, node: Apply, items: list[str]) -> list[str]:
        """Write a scalar node and return the names of the results."""
        while isinstance(node.op, Add | Mul) and len(items) > MOST_TERMS:
            # From the left: a call of hundreds of arguments takes numba long.
            first = node.op.make_node(*(inp.type() for inp in node.inputs[:MOST_TERMS]))
            if first.outputs[0].type != node.outputs[0].type:
                break
            items = [*self._scalar_op(first, items[:MOST_TERMS]), *items[MOST_TERMS:]]
            rest = [node.outputs[0], *node.inputs[MOST_TERMS:]]
            node = node.op.make_node(*(variable.type() for variable in rest))
        results = [self.source.name("s") for _ in node.outputs]
        try:
            name = self.source.function(*numba_intrinsic(scalar_function(node)), "scalar")
        except NoKernelError:
            name = self._function(node.op, node)
        given = ", ".join(items)
        if len(results) == 1:
            kind = self._dtype(node.outputs[0])
            self.source.line(f"{results[0]} = {kind}({name}({given}))")
        else:
            self.source.line(f"{', '.join(results)} = {name}({given})")
        return results

    def write_items(self, op: Elemwise, node: Apply) -> None:
        """Write an elementwise operation on tensors of one item."""
        inner = op.make_scalar_node(*node.inputs)
        items = [self._item(inp) for inp in node.inputs]
        for out, result in zip(node.outputs, self._scalar_op(inner, items), strict=True):
            self.bind_scalar(out, result)

    @_emit.register
    def _elemwise(self, op: Elemwise, node: Apply) -> None:
        if all(map(is_item, node.outputs)):
            self.write_items(op, node)
        else:
            self._call(op, node)

    @_emit.register(TensorFromScalar)
    @_emit.register(ScalarFromTensor)
    def _same_number(self, op: Op, node: Apply) -> None:
        self.bind_scalar(node.outputs[0], self.scalar(node.inputs[0]))

    @_emit.register
    def _shape_i(self, op: Shape_i, node: Apply) -> None:
        name = self.source.name("s")
        self.source.line(f"{name} = np.int64({self.array(node.inputs[0])}.shape[{op.i}])")
        self.bind_scalar(node.outputs[0], name)

    # Views

    def _write_shuffle(self, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
        if out.type.ndim == 0 and x.type.ndim == 0:
            self.values[out] = self.find(x)
            return
        if is_item(x) and is_item(out):
            self.bind_scalar(out, self._item(x))
            return
        op = node.op
        if not isinstance(op, DimShuffle) or any(x.type.shape[axis] != 1 for axis in op.drop):
            self._call(op, node)
            return
        order = tuple(None if axis == "x" else int(axis) for axis in op.new_order)
        shuffled = self.source.function(
            shuffling(order, x.type.shape), f"{VERSION} {order} {x.type.shape}", "shuffled"
        )
        self._view(out, f"{shuffled}({self.array(x)})")

    def _view(self, out: Variable, text: str) -> str:
        name = self.source.name("a")
        self.source.line(f"{name} = {text}")
        self.bind_array(out, name)
        return name

    # Indices

    @_emit.register
    def _index(self, op: Subtensor, node: Apply) -> None:
        indices = indices_from_subtensor(node.inputs[1:], op.idx_list)
        x, out = node.inputs[0], node.outputs[0]
        if not all(isinstance(index, slice | int | Variable) for index in indices):
            self._call(op, node)
            return
        part, ends = self.find(x).part, _fixed_ends(indices)
        if part is not None and part.rows[1:] == (None, None) and ends is not None:
            self.values[out] = Value(part=Part(part.bundle, (part.rows[0], *ends)))
            return
        text = self._indexed(self.array(x), indices)
        if out.type.ndim:
            self._view(out, text)
        else:
            name = self.source.name("s")
            self.source.line(f"{name} = {text}")
            self.bind_scalar(out, name)

    def _indexed(self, array: str, indices: Sequence[Any]) -> str:
        """Return the text of an array with basic indices, which are checked."""
        inside = []
        for axis, index in enumerate(indices):
            if isinstance(index, slice):
                texts = [self._end(end) for end in (index.start, index.stop, index.step)]
                inside.append(":".join(texts if texts[2] else texts[:2]))
            else:
                inside.append(self._checked(self._end(index), f"{array}.shape[{axis}]"))
        return f"{array}[{', '.join(inside)}]"

    def _checked(self, text: str, size: str) -> str:
        """Write the check of an index, and return the place that it means."""
        place = self.source.name("i")
        if text[0] == "-":  # no choice, which numba would write as blocks of code
            self.source.line(f"{place} = {size} + {text}")
        else:
            self.source.line(f"{place} = {text}")
            if not text.isdigit():
                self.source.line(f"{place} += {size} if {place} < 0 else 0")
        self._fail_if(IndexError, "index out of bounds", f"({place} < 0) | ({place} >= {size})")
        return place

    def _end(self, end: Any) -> str:
        """Return the text of an index, or of an end of a slice: nothing where it has none."""
        if isinstance(end, Variable) and not isinstance(end, Constant):
            return f"np.int64({self.scalar(end)})"
        number = end.data if isinstance(end, Constant) else end
        return "" if number is None else str(int(number))


def _mismatch(k: int, axis: int) -> str:
    return (
        f"Vectorized input {k} has an incompatible shape in axis {axis} "
        "(an input of length 1 is broadcast only if its type says that it has length 1)."
    )


def is_item(variable: Variable) -> bool:
    """Whether a tensor is a number, or surely an array of one."""
    return all(variable.type.broadcastable)


def _fixed_ends(indices: Sequence[Any]) -> tuple[int | None, int | None] | None:
    """Return the ends of the only slice among indices; None if there is more, or they may vary."""
    if len(indices) != 1 or not isinstance(indices[0], slice) or indices[0].step is not None:
        return None
    ends = [
        int(end.data) if isinstance(end, Constant) else end
        for end in (indices[0].start, indices[0].stop)
    ]
    return None if any(isinstance(end, Variable) for end in ends) else (ends[0], ends[1])
