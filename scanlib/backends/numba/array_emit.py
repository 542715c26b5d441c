"""From the nodes of a body to statements of a numba function.

Elementwise Ops and sums become loops (`array_loops`), matrix products and small linear algebra
calls of kernels (`array_linalg`). What only looks at an array in another way (dimshuffles, slices,
diagonals) is arithmetic with pointers and strides, done before the loop where it can be. Every
other Op is a call of the function that PyTensor's numba dispatch makes for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import singledispatchmethod

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import (
    Alloc,
    ExtractDiag,
    MakeVector,
    ScalarFromTensor,
    TensorFromScalar,
)
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.linalg.decomposition.cholesky import Cholesky
from pytensor.tensor.linalg.inverse import MatrixInverse
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.psd import CholeskySolve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Shape_i, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor
from pytensor.tensor.type import DenseTensorType

from scanlib.backends.numba import pointers
from scanlib.backends.numba.array_indices import is_simple
from scanlib.backends.numba.array_linalg import ArrayLinalg
from scanlib.backends.numba.contiguous import contiguous
from scanlib.backends.numba.places import Place
from scanlib.backends.numba.scalar import as_scalar
from scanlib.backends.numba.source import Source


class Emitter(ArrayLinalg):
    """Writes the statements that compute nodes, and knows how each variable is held."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        from numba import carray

        source.object("as_scalar", as_scalar)
        source.object("contiguous", contiguous)
        source.object("carray", carray)
        for name in ("pointer", "opaque", "shift", "load", "store", "keep"):
            source.object(name, getattr(pointers, name))
        self.joined = {}
        self.parts = {}
        self.called: list[str] = []  # arrays of a step that it must not lose before its end

    def emit(self, node: Apply) -> None:
        """Write the statements that compute a node."""
        self._emit(node.op, node)
        self.finish_node()

    @singledispatchmethod
    def _emit(self, op: Op, node: Apply) -> None:
        self.call(op, node)

    def call(self, op: Op, node: Apply) -> None:
        """Call the function that PyTensor's numba dispatch makes for a node."""
        name = self._function(op, node)
        arguments = ", ".join(self.argument(inp) for inp in node.inputs)
        results = [self.source.name("v") for _ in node.outputs]
        self.source.line(f"{', '.join(results)} = {name}({arguments})")
        for out, result in zip(node.outputs, results, strict=True):
            self.bind_result(out, result)

    def argument(self, variable: Variable) -> str:
        """Return a variable as PyTensor's numba functions take it."""
        if isinstance(variable.type, ScalarType):
            return self.scalar(variable)
        if not isinstance(variable.type, DenseTensorType):
            value = self.find(variable)
            assert value.array is not None
            return value.array
        return self.array(variable)

    def bind_result(self, out: Variable, result: str) -> None:
        """Bind what a function returned."""
        if isinstance(out.type, ScalarType):
            self.bind_scalar(out, result)
        elif not isinstance(out.type, DenseTensorType):
            self.bind_opaque(out, result)
        elif out.type.ndim == 0:
            name = self.source.name("s")
            self.source.line(f"{name} = as_scalar({result})")
            self.bind_scalar(out, name)
        else:
            array, start = self.source.name("a"), self.source.name("p")
            self.source.line(f"{array} = contiguous({result})")
            self.source.line(f"{start} = pointer({array})")
            self.called += [result, array]
            self.bind_array(out, array, start)

    # Scalars

    @_emit.register(TensorFromScalar)
    @_emit.register(ScalarFromTensor)
    def _scalar_type(self, op: Op, node: Apply) -> None:
        self.bind_scalar(node.outputs[0], self.scalar(node.inputs[0]))

    @_emit.register
    def _shape_i(self, op: Shape_i, node: Apply) -> None:
        inp = node.inputs[0]
        if isinstance(inp.type, DenseTensorType):
            size = self.sizes.same(self.place(inp).sizes[op.i])
        else:  # a sparse matrix has no place
            name = self.array(inp)
            size = self.sizes.define(f"{name}.shape[{op.i}]", name)
        self.bind_scalar(node.outputs[0], self.sizes.define(f"np.int64({size})", size, prefix="s"))

    @_emit.register
    def _make_vector(self, op: MakeVector, node: Apply) -> None:
        items = [self.scalar(inp) for inp in node.inputs]
        place = self.target(node.outputs[0], [str(len(items))])
        for i, item in enumerate(items):
            self.source.line(f"store({place.start}, {i}, {item})")
        self.bind_place(node.outputs[0], place)

    @_emit.register
    def _check(self, op: CheckAndRaise, node: Apply) -> None:
        plain = op.exc_type in (AssertionError, ValueError, IndexError)
        if not plain or any(inp.type.ndim for inp in node.inputs[1:]):
            self.call(op, node)
            return
        conditions = " and ".join(self.scalar(inp) for inp in node.inputs[1:])
        self.source.object(op.exc_type.__name__, op.exc_type)
        with self.source.block(f"if not ({conditions}):"):
            self.source.line(f"raise {op.exc_type.__name__}({op.msg!r})")
        self.alias(node.outputs[0], node.inputs[0])

    def alias(self, out: Variable, inp: Variable) -> None:
        """Bind a variable to what another one is."""
        value = self.find(inp)
        self.values[out] = value
        if value.place is not None:
            self._use(out, value.place)

    # Views

    @_emit.register
    def _dimshuffle(self, op: DimShuffle, node: Apply) -> None:
        inp, out = node.inputs[0], node.outputs[0]
        value = self.find(inp)
        if value.place is None and value.scalar is not None:
            self.bind_scalar(out, value.scalar)
            return
        place = self.place(inp)
        for axis in op.drop:
            failure = "raise ValueError('Cannot drop an axis of a size other than one')"
            self.sizes.require_equal(place.sizes[axis], "1", failure)
        if out.type.ndim == 0:
            name = self.source.name("s")
            self.source.line(f"{name} = load({place.start}, 0)")
            self.bind_scalar(out, name)
            return
        order = [None if axis == "x" else axis for axis in op.new_order]
        sizes = ["1" if axis is None else place.sizes[axis] for axis in order]
        strides = ["0" if axis is None else place.strides[axis] for axis in order]
        self.bind_view(out, place, place.start, sizes, strides)

    def bind_view(
        self, out: Variable, place: Place, start: str, sizes: list[str], strides: list[str]
    ) -> None:
        view = replace(place, start=start, sizes=tuple(sizes), strides=tuple(strides))
        self.bind_place(out, view)

    @_emit.register
    def _specify_shape(self, op: SpecifyShape, node: Apply) -> None:
        inp, wanted = node.inputs[0], node.inputs[1:]
        if inp.type.ndim == 0:
            self.alias(node.outputs[0], inp)
            return
        place = self.place(inp)
        known = []
        for axis, size in enumerate(wanted):
            if not isinstance(size.type, DenseTensorType | ScalarType):
                known.append(place.sizes[axis])
                continue
            text = self.size_of(size)
            failure = "raise AssertionError('SpecifyShape: an array has another shape')"
            known.append(self.sizes.require_equal(place.sizes[axis], text, failure))
        self.bind_view(node.outputs[0], place, place.start, known, list(place.strides))

    def size_of(self, variable: Variable) -> str:
        """Return an integer variable as a size."""
        if isinstance(variable, Constant):
            return str(int(np.asarray(variable.data)))
        text = self.scalar(variable)
        return self.sizes.define(f"np.int64({text})", text)

    @_emit.register
    def _extract_diag(self, op: ExtractDiag, node: Apply) -> None:
        if node.inputs[0].type.ndim != 2 or op.offset != 0:
            self.call(op, node)
            return
        place = self.place(node.inputs[0])
        rows, columns = map(self.sizes.same, place.sizes)
        size = rows
        if rows != columns:
            size = self.sizes.define(f"min({rows}, {columns})", rows, columns)
        row, column = place.strides
        stride = self.sizes.define(f"{row} + {column}", row, column)
        self.bind_view(node.outputs[0], place, place.start, [size], [stride])

    # Indices

    @_emit.register
    def _subtensor(self, op: Subtensor, node: Apply) -> None:
        indices = indices_from_subtensor(node.inputs[1:], op.idx_list)
        if not all(is_simple(index) for index in indices):
            self.call(op, node)
            return
        place = self.place(node.inputs[0])
        out = node.outputs[0]
        view = self.indexed(place, indices)
        if out.type.ndim == 0:
            name = self.source.name("s")
            self.source.line(f"{name} = load({view.start}, 0)")
            self.bind_scalar(out, name)
        else:
            self.bind_place(out, view)

    @_emit.register
    def _inc_subtensor(self, op: IncSubtensor, node: Apply) -> None:
        base, value, *rest = node.inputs
        out = node.outputs[0]
        indices = indices_from_subtensor(rest, op.idx_list)
        kinds = {inp.type.dtype for inp in (base, value)}
        if not all(is_simple(index) for index in indices) or len(kinds) > 1:
            self.call(op, node)
            return
        joined = out in self.joined
        place = self.place(base)
        if joined:
            target = place
        else:
            written = self.find(value).place
            apart = written is None or written.workspace is not place.workspace
            target = self.target(out, place.sizes, [(base, place)] if apart else [])
            if target.start != place.start:
                self.write_copy(place, target)
        part = self.indexed(target, indices)
        if not (joined and self.find(value).place == self.parts.get(value)):
            item = self.only_item(value)
            source = item if item is not None else self._broadcast(value, part)
            self.write_copy(source, part, add=not op.set_instead_of_inc and not joined)
        self.bind_place(out, target)

    def _broadcast(self, value: Variable, part: Place) -> Place:
        """Return an array as one of the sizes of the part it goes to."""
        place = self.place(value)
        lead = part.ndim - place.ndim
        strides = ["0"] * lead
        for axis, (size, stride) in enumerate(zip(place.sizes, place.strides, strict=True)):
            if value.type.shape[axis] == 1:
                strides.append("0")
                continue
            failure = "raise ValueError('cannot assign an array of another shape to a slice')"
            self.sizes.require_equal(size, part.sizes[lead + axis], failure)
            strides.append(stride)
        return replace(place, sizes=part.sizes, strides=tuple(strides), fixed=False)

    @_emit.register
    def _alloc(self, op: Alloc, node: Apply) -> None:
        value, *sizes = node.inputs
        out = node.outputs[0]
        texts = [self.size_of(size) for size in sizes]
        self.refuse_negative(sizes, texts)
        if out in self.joined and self.sizes.is_static(*texts):
            workspace = self.memory.take(self._dtype(out), self.sizes.product(*texts), zeros=True)
            workspace.pinned = True
            strides = self.sizes.contiguous_strides(texts)
            whole = Place(workspace.start, tuple(texts), strides, workspace)
            self.bind_place(out, whole)
            self.give_parts_destinations(out, whole)
            return
        self.forget_joined(out)
        target = self.target(out, texts)
        item = self.only_item(value)
        self.write_copy(item if item is not None else self._broadcast(value, target), target)
        self.bind_place(out, target)

    # Arithmetic

    @_emit.register
    def _dot(self, op: Dot, node: Apply) -> None:
        self.write_dot(op, node)

    @_emit.register
    def _cholesky(self, op: Cholesky, node: Apply) -> None:
        self.write_cholesky(op, node) if self.are_real(node) else self.call(op, node)

    @_emit.register
    def _inverse(self, op: MatrixInverse, node: Apply) -> None:
        self.write_inverse(op, node) if self.are_real(node) else self.call(op, node)

    @_emit.register(SolveTriangular)
    @_emit.register(CholeskySolve)
    @_emit.register(Solve)
    def _solve(self, op: Solve | SolveTriangular | CholeskySolve, node: Apply) -> None:
        known = getattr(op, "assume_a", "gen") in ("gen", "pos")
        self.write_solve(op, node) if known and self.are_real(node) else self.call(op, node)

    @_emit.register
    def _elemwise(self, op: Elemwise, node: Apply) -> None:
        self.write_elemwise(op, node)

    @_emit.register
    def _reduction(self, op: CAReduce, node: Apply) -> None:
        if self.can_reduce(op, node):
            self.write_reduction(op, node)
        else:
            self.call(op, node)
