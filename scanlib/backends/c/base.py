"""What all schedules share: checks, memory, results.

The C code of a loop is three parts:

* ``struct NODE_data``: the number of steps, sizes, and for every array its memory and strides;
* ``NODE_run``: the steps, written by a schedule (`nest`, `block`);
* ``NODE_call``: takes PyTensor's arrays, checks them, allocates the results, calls ``NODE_run``.

Arrays have short names: ``x3`` for the fourth input of the loop, ``h0`` for the rows of the first
state (its history or a ring of its last rows), ``c0`` for the first carry, ``z0`` for the first
stacked output. Results are contiguous; inputs have any strides and are never copied as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from pytensor.graph.basic import Variable
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.type import TensorType

from scanlib._compat import thaw_graph
from scanlib.backends.c.scalars import Scalars
from scanlib.backends.c.source import Source, c_string, c_type, type_number
from scanlib.ops.c_code import NODE_NAME as NODE
from scanlib.ops.c_code import NoCCodeError
from scanlib.ops.elemwise_scan import Axes, ElemwiseScan
from scanlib.ops.messages import Messages
from scanlib.ops.positions import has_positions

REGISTER_DEPTH = 8  # states deeper than this are read from memory
FIRST_CAPACITY = 64  # rows allocated at first by a loop with `until`


class LoopPrinter:
    """Writes the C code of one elementwise loop."""

    def __init__(self, op: ElemwiseScan) -> None:
        self.op = op
        self.signature = op.signature
        self.layout = op.layout
        self.reverse = op.signature.reverse
        self.grows = op.signature.has_stop and not op.signature.reverse
        self.graph = thaw_graph(op.body)
        self.inner = self.signature.split_body_inputs(self.graph.inputs)
        self.result = self.signature.split_body_outputs(self.graph.outputs)
        self.messages = Messages(op.signature, op.scan.labels, op.scan.name)
        self.source = Source()
        self.scalars = Scalars(self.source)
        self.types = op.outer_input_types()
        for type in self.types:
            if not isinstance(type, TensorType | ScalarType):
                raise NoCCodeError(f"an input of type {type} has no C code")
        self.inputs = [f"x{k}" for k in range(len(self.types))]
        self.outer = self.signature.split_inputs(self.inputs)
        # Where rows and non-sequences are read: the array, and its axes.
        self.parts: dict[Variable, tuple[str, Axes]] = {}
        rows = zip(self.inner.rows, self.outer.sequences, self.layout.sequences, strict=True)
        whole = zip(
            self.inner.non_sequences,
            self.outer.non_sequences,
            self.layout.non_sequences,
            strict=True,
        )
        for variable, array, axes in [*rows, *whole]:
            self.parts[variable] = (array, axes)
        self.scalars.real = self.real_dtype()
        n = self.signature.n_states
        m = n + self.signature.n_carries
        self.outputs = [f"y{k}" for k in range(m + self.signature.n_outputs)]
        self.histories, self.finals, self.stacks = (
            self.outputs[:n],
            self.outputs[n:m],
            self.outputs[m:],
        )
        self.n_loops = 0  # over channels, for which there are sizes
        self.in_ring = [self.needs_ring(i) for i in range(n)]

    # What a schedule says

    def needs_ring(self, i: int) -> bool:
        """Whether the last rows of a state that is not traced are kept in a ring."""
        raise NotImplementedError

    def write_run(self) -> None:
        """Write ``NODE_run``, which fills in the results."""
        raise NotImplementedError

    def write_sizes(self) -> None:
        """Write the sizes of the loops over channels, and the checks that all inputs agree."""

    def row_sizes(self, i: int) -> list[str]:
        """Return the sizes of a stacked output's row."""
        return ["1"] * len(self.layout.outputs[i])

    def write_start(self) -> None:
        """Write the call of ``NODE_run``."""
        self.source.line(f"if ({NODE}_run(data)) return -1;")

    # The whole

    def write(self) -> str:
        """Return the C code of the loop."""
        self.write_run()
        steps, self.source.lines = self.source.lines, []
        self.write_struct()
        struct, self.source.lines = self.source.lines, []
        self.write_call()
        self.source.lines = struct + self.scalars.functions + steps + self.source.lines
        return self.source.text()

    def real_dtype(self) -> str | None:
        """Return the widest dtype of real numbers in a body that reads truth values, if any."""
        if not any(variable.type.dtype == "bool" for variable in self.parts):
            return None
        found = {variable.type.dtype for variable in self.graph.variables}
        return next((dtype for dtype in ("float64", "float32") if dtype in found), None)

    def write_numbers(self) -> None:
        """Write what the code of all steps reads: their number, and one half (`Scalars`)."""
        self.source.line("const npy_intp steps = data.steps;")
        if self.scalars.real is not None:
            real = c_type(self.scalars.real)
            self.source.line(f"const {real} half = scanlib_half<{real}>();")

    def state_dtype(self, i: int) -> str:
        return self.inner.taps[i][0].type.dtype

    def arrays(self) -> Iterator[tuple[str, str, Axes, int]]:
        """Yield the arrays of ``NODE_data``: name, dtype, channels' axes, number of axes before."""
        layout = self.layout
        for i, (name, axes) in enumerate(zip(self.outer.initials, layout.states, strict=True)):
            yield name, self.state_dtype(i), axes, 1
        for variable, (name, axes) in self.parts.items():
            yield name, variable.type.dtype, axes, int(variable in self.inner.rows)
        for i, axes in enumerate(layout.states):
            yield f"h{i}", self.state_dtype(i), axes, 1
        for i, axes in enumerate(layout.carries):
            yield f"c{i}", self.inner.carries[i].type.dtype, axes, 0
        for i, axes in enumerate(layout.outputs):
            yield f"z{i}", self.result.outputs[i].type.dtype, axes, 1

    def write_struct(self) -> None:
        line = self.source.line
        with self.source.block(f"struct {NODE}_data"):
            line(f"npy_intp {', '.join(['steps', 'taken', 'capacity', *self.fields()])};")
            if self.n_loops:
                line(f"npy_intp size[{self.n_loops}], low[{self.n_loops}], high[{self.n_loops}];")
            for name, *_ in self.arrays():
                line(f"char *{name}; const npy_intp *{name}_s;")
            for name in self.measured():
                line(f"const npy_intp *{name}_d;")
            for i, ring in enumerate(self.in_ring):
                if ring:
                    line(f"npy_intp h{i}_row;")
            for name in self.grown():
                line(f"PyArrayObject **{name};")
        self.source.lines[-1] += ";"

    def fields(self) -> list[str]:
        """Return the numbers that steps of this schedule need besides."""
        return []

    def measured(self) -> list[str]:
        """Return the inputs whose lengths the steps need: they index them."""
        if not has_positions(self.graph.outputs):
            return []
        rows = [name for name, _ in self.parts.values()]
        return [
            name
            for name in [*self.outer.initials, *self.outer.carries, *rows]
            if isinstance(self.types[self.inputs.index(name)], TensorType)
        ]

    def grown(self) -> list[str]:
        """Return the results that a loop with `until` allocates anew when they are full."""
        if not self.grows:
            return []
        histories = [
            name
            for name, untraced in zip(self.histories, self.signature.untraced, strict=True)
            if not untraced
        ]
        return [*histories, *self.stacks]

    # Before the steps

    def write_call(self) -> None:
        line = self.source.line
        declared = [
            f"{c_type(type.dtype)} {name}"
            if isinstance(type, ScalarType)
            else f"PyArrayObject *{name}"
            for name, type in zip(self.inputs, self.types, strict=True)
        ]
        declared += [f"PyArrayObject **{name}" for name in self.outputs]
        with self.source.block(f"static int {NODE}_call({', '.join(declared)})"):
            line(f"{NODE}_data data;")
            self.write_checks()
            self.write_inputs()
            self.write_sizes()
            line(f"data.capacity = {self.capacity()};")
            for i in range(self.signature.n_states):
                self.write_history(i)
            for i in range(self.signature.n_carries):
                self.write_carry(i)
            for i in range(self.signature.n_outputs):
                self.write_stack(i)
            for name in self.grown():
                line(f"data.{name} = {name};")
            self.write_start()
            self.write_results()
            line("return 0;")

    def capacity(self) -> str:
        if not self.grows:
            return "steps"
        return f"steps < {FIRST_CAPACITY} ? steps : {FIRST_CAPACITY}"

    def raise_error(self, error: str, message: str, *numbers: str) -> str:
        values = [*numbers, "0", "0"][:2]
        text = ", ".join([c_string(error), c_string(message), str(len(numbers)), *values])
        return f"return scanlib_raise({text});"

    def write_checks(self) -> None:
        """Write the number of steps, and the checks that keep every read inside its array."""
        line = self.source.line
        sequences = self.outer.sequences
        rows = [f"PyArray_DIM({name}, 0)" for name in sequences]
        if self.outer.n_steps is not None:
            line(f"const npy_intp steps = *(npy_int64 *)PyArray_DATA({self.outer.n_steps});")
            error = self.raise_error("StepCountError", self.messages.negative_steps(), "steps")
            line(f"if (steps < 0) {error}")
        else:
            line(f"npy_intp steps = {rows[0]};")
            for size in rows[1:]:
                line(f"if ({size} < steps) steps = {size};")
        for i, size in enumerate(rows):
            message = self.messages.sequence_length(i)
            error = self.raise_error("SequenceLengthError", message, size, "steps")
            line(f"if ({size} != steps) {error}")
        for i, (name, depth) in enumerate(
            zip(self.outer.initials, self.signature.depths, strict=True)
        ):
            size, message = f"PyArray_DIM({name}, 0)", self.messages.initial_rows(i)
            line(f"if ({size} != {depth}) {self.raise_error('InitialRowsError', message, size)}")
        line("data.steps = steps;")
        line("data.taken = 0;")

    def write_inputs(self) -> None:
        line = self.source.line
        for name in [*self.outer.initials, *(name for name, _ in self.parts.values())]:
            if isinstance(self.types[self.inputs.index(name)], ScalarType):
                line(f"data.{name} = (char *)&{name};")
                continue
            line(f"data.{name} = (char *)PyArray_DATA({name});")
            line(f"data.{name}_s = PyArray_STRIDES({name});")
        for name in self.measured():
            line(f"data.{name}_d = PyArray_DIMS({name});")

    def allocate(self, name: str, dims: str, ndim: int, dtype: str) -> None:
        self.source.line(
            f"if (scanlib_output({name}, {ndim}, {dims}, {type_number(dtype)})) return -1;"
        )

    def use(self, array: str, output: str) -> None:
        """Write that an array of the steps is the memory of an output."""
        self.source.line(f"data.{array} = (char *)PyArray_DATA(*{output});")
        self.source.line(f"data.{array}_s = PyArray_STRIDES(*{output});")

    def write_history(self, i: int) -> None:
        line = self.source.line
        name, initial = self.histories[i], self.outer.initials[i]
        depth, untraced = self.signature.depths[i], self.signature.untraced[i]
        ndim, dtype = len(self.layout.states[i]) + 1, self.state_dtype(i)
        size = np.dtype(dtype).itemsize
        dims = f"{name}_d"
        line(f"npy_intp {dims}[{ndim}];")
        line(f"memcpy({dims}, PyArray_DIMS({initial}), sizeof({dims}));")
        if not untraced:
            line(f"{dims}[0] += data.capacity;")
        self.allocate(name, dims, ndim, dtype)
        self.use(f"h{i}", name)
        target, where = f"data.h{i}", f"PyArray_DIMS({initial}), PyArray_STRIDES({initial})"
        if self.in_ring[i]:
            line(f"const npy_intp {name}_row = data.h{i}_row = PyArray_NBYTES(*{name}) / {depth};")
            line(f"scanlib_memory {name}_ring;")
            line(f"if ({name}_ring.get({name}_row * {depth + 1})) return -1;")
            line(f"data.h{i} = {name}_ring.data;")
            if self.reverse:
                self.write_flipped(i, where, ndim, size)
                return
        elif untraced:
            return  # the steps read the initial rows and write the last ones
        elif self.reverse:
            target += f" + steps * (PyArray_NBYTES(*{name}) / (steps + {depth}))"
        line(f"scanlib_copy({target}, data.{initial}, {ndim}, {where}, {size});")

    def write_flipped(self, i: int, where: str, ndim: int, size: int) -> None:
        """Write the initial rows of a reversed loop into a ring, the latest one last."""
        name, initial, depth = self.histories[i], self.outer.initials[i], self.signature.depths[i]
        dims, strides = (f"{text} + 1" for text in where.split(", "))
        with self.source.block(f"for (npy_intp j = 0; j < {depth}; j++)"):
            self.source.line(
                f"scanlib_copy(data.h{i} + ({depth - 1} - j) * {name}_row, "
                f"data.{initial} + j * PyArray_STRIDE({initial}, 0), "
                f"{ndim - 1}, {dims}, {strides}, {size});"
            )

    def write_carry(self, i: int) -> None:
        name, outer = self.finals[i], self.outer.carries[i]
        if isinstance(self.types[self.inputs.index(outer)], ScalarType):
            raise NoCCodeError("a carry that is no tensor has no C code")
        ndim, dtype = len(self.layout.carries[i]), self.inner.carries[i].type.dtype
        self.allocate(name, f"PyArray_DIMS({outer})", ndim, dtype)
        self.use(f"c{i}", name)
        self.source.line(
            f"scanlib_copy(data.c{i}, (char *)PyArray_DATA({outer}), {ndim}, "
            f"PyArray_DIMS({outer}), PyArray_STRIDES({outer}), {np.dtype(dtype).itemsize});"
        )

    def write_stack(self, i: int) -> None:
        name, axes = self.stacks[i], self.layout.outputs[i]
        sizes = ", ".join(["data.capacity", *self.row_sizes(i)])
        self.source.line(f"npy_intp {name}_d[] = {{{sizes}}};")
        self.allocate(name, f"{name}_d", len(axes) + 1, self.result.outputs[i].type.dtype)
        self.use(f"z{i}", name)

    # After the steps

    def write_results(self) -> None:
        line = self.source.line
        if self.signature.required_steps:
            message = c_string(self.messages.missing_steps())
            with self.source.block(f"if (data.taken < {self.signature.required_steps})"):
                line(f"PyErr_SetString(PyExc_IndexError, {message});")
                line("return -1;")
        for i, ring in enumerate(self.in_ring):
            if ring:
                self.write_last_rows(i)
        if not self.signature.has_stop:
            return
        for i, (name, depth) in enumerate(zip(self.histories, self.signature.depths, strict=True)):
            if not self.signature.untraced[i]:
                self.write_cut(name, depth)
        for name in self.stacks:
            self.write_cut(name, 0)

    def write_cut(self, name: str, depth: int) -> None:
        rows = (
            f"steps - data.taken, steps + {depth}" if self.reverse else f"0, data.taken + {depth}"
        )
        self.source.line(f"if (scanlib_rows({name}, {rows})) return -1;")

    def write_last_rows(self, i: int) -> None:
        name, depth = self.histories[i], self.signature.depths[i]
        row = f"{depth} - k" if not self.reverse else "k - 1"
        with self.source.block(f"for (npy_intp k = 1; k <= {depth}; k++)"):
            self.source.line(
                f"memcpy((char *)PyArray_DATA(*{name}) + ({row}) * {name}_row, "
                f"data.h{i} + (data.taken + {depth} - k) % {depth + 1} * {name}_row, {name}_row);"
            )
