"""C code of `LinearScan`: checks and memory of a node; `linear_kernels` has the steps."""

from __future__ import annotations

from pytensor.graph.basic import Apply

from scanlib.backends.c.helpers import HELPERS
from scanlib.backends.c.linear_kernels import LINEAR_KERNELS
from scanlib.backends.c.source import Source, c_string, c_type, type_number
from scanlib.backends.c.vector_functions import vector_functions, vector_version
from scanlib.ops import linear_loop
from scanlib.ops.c_code import NODE_NAME as NODE
from scanlib.ops.c_code import CCode, NoCCodeError, register_node_printer
from scanlib.ops.checked_linear import CheckedLinearScan
from scanlib.ops.linear_scan import LinearScan

VERSION = 6  # of this module and of `linear_kernels`


def _number(dtype: str) -> str:
    """Return the C++ type that the kernels compute with."""
    if dtype.startswith("complex"):
        return f"scanlib_complex<npy_float{int(dtype.removeprefix('complex')) // 2}>"
    return c_type(dtype)


class LinearPrinter:
    """Writes the C code of one node."""

    def __init__(self, op: LinearScan, node: Apply) -> None:
        self.op = op
        self.source = Source()
        self.parts = op.parts(node.inputs)
        self.dtype = self.parts.initial.type.dtype
        self.type = _number(self.dtype)
        self.inputs = [f"x{i}" for i in range(len(node.inputs))]
        names = op.parts(self.inputs)
        self.steps, self.matrix, self.offset, self.initial, self.mask, self.right = names
        self.ndim = self.parts.initial.type.ndim
        self.batch = op.batch_rank(self.ndim)

    def write(self) -> str:
        arguments = ", ".join(f"PyArrayObject *{name}" for name in self.inputs)
        with self.source.block(f"static int {NODE}_call({arguments}, PyArrayObject **y0)"):
            self.write_checks()
            self.write_memory()
            self.write_run()
            self.source.line("return 0;")
        return self.source.text()

    def refuse(self, condition: str, error: str, text: str, *numbers: str) -> None:
        values = ", ".join([*numbers, "0", "0"][:2])
        self.source.line(
            f"if ({condition}) return scanlib_raise({c_string(error)}, {c_string(text)}, "
            f"{len(numbers)}, {values});"
        )

    def size(self, array: str, axis: int) -> str:
        return f"PyArray_DIM({array}, {axis})"

    def write_checks(self) -> None:
        op, line = self.op, self.source.line
        if self.steps is not None:
            line(f"const npy_intp steps = *(npy_int64 *)PyArray_DATA({self.steps});")
            self.refuse("steps < 0", "StepCountError", linear_loop.NEGATIVE_STEPS, "steps")
        else:
            line(f"const npy_intp steps = {self.size(self.offset or self.matrix, 0)};")
        fixed = op.coefficient == "fixed"
        timed = [] if self.offset is None else [(self.offset, linear_loop.OFFSET_ROWS)]
        timed += [] if fixed else [(self.matrix, linear_loop.MATRIX_ROWS)]
        if self.right is not None and not fixed:
            timed.append((self.right, linear_loop.MATRIX_ROWS))
        for name, text in timed:
            rows = self.size(name, 0)
            self.refuse(f"{rows} != steps", "SequenceLengthError", text, rows, "steps")
        line(f"const npy_intp rows = {self.size(self.initial, 0)};")
        wrong = "rows != 1" if op.untraced else "rows != 1 && (steps || rows)"
        self.refuse(wrong, "InitialRowsError", linear_loop.INITIAL_ROWS, "rows")
        if op.required_steps:
            text = c_string(linear_loop.missing_steps(op.required_steps))
            with self.source.block(f"if (steps < {op.required_steps})"):
                line(f"PyErr_SetString(PyExc_IndexError, {text});")
                line("return -1;")
        axis = self.ndim - 2 if not op.vector and op.side != "right" else self.ndim - 1
        line(f"const npy_intp d = {self.size(self.initial, axis)};")
        other = 2 * self.ndim - 3 - axis
        line(f"const npy_intp m = {'1' if op.vector else self.size(self.initial, other)};")
        for left, right in self.equal_sizes():
            self.refuse(f"{left} != {right}", "LoopError", linear_loop.SHAPES, left, right)

    def equal_sizes(self) -> list[tuple[str, str]]:
        ndim = self.parts.matrix.type.ndim
        pairs = [(self.size(self.matrix, axis), "d") for axis in (ndim - 2, ndim - 1)]
        if self.op.matrix_batch_rank(ndim):
            first = 0 if self.op.coefficient == "fixed" else 1
            pairs += [
                (self.size(self.matrix, first + axis), self.size(self.initial, 1 + axis))
                for axis in range(self.batch)
            ]
        if self.right is not None:
            pairs += [(self.size(self.right, axis), "m") for axis in (ndim - 2, ndim - 1)]
        if self.mask is not None:
            pairs += [(self.size(self.mask, axis), "d") for axis in range(2)]
        if self.offset is not None:
            pairs += [
                (self.size(self.offset, axis), self.size(self.initial, axis))
                for axis in range(1, self.ndim)
            ]
        return pairs

    def write_memory(self) -> None:
        line, ndim, untraced = self.source.line, self.ndim, self.op.untraced
        arrays = [(self.matrix, self.type)]
        arrays += [] if self.offset is None else [(self.offset, self.type)]
        arrays += [] if self.right is None else [(self.right, self.type)]
        arrays += [] if self.mask is None else [(self.mask, "npy_bool")]
        for name, kind in arrays:
            line(f"scanlib_memory {name}_copy;")
            line(f"const {kind} *{name}_data = ({kind} *)PyArray_DATA({name});")
            with self.source.block(f"if (!PyArray_IS_C_CONTIGUOUS({name}))"):
                line(f"if ({name}_copy.get(PyArray_NBYTES({name}))) return -1;")
                line(
                    f"scanlib_copy({name}_copy.data, (char *)PyArray_DATA({name}), "
                    f"PyArray_NDIM({name}), PyArray_DIMS({name}), PyArray_STRIDES({name}), "
                    f"sizeof({kind}));"
                )
                line(f"{name}_data = ({kind} *){name}_copy.data;")
        line(f"npy_intp dims[{ndim}];")
        line(f"memcpy(dims, PyArray_DIMS({self.initial}), sizeof(dims));")
        line("dims[0] = 1;" if untraced else "dims[0] = steps + rows;")
        line(f"if (scanlib_output(y0, {ndim}, dims, {type_number(self.dtype)})) return -1;")
        batches = " * ".join(f"dims[{1 + axis}]" for axis in range(self.batch)) or "1"
        line(f"const npy_intp batches = {batches}, cells = batches * d * m;")
        line(f"{self.type} *history = ({self.type} *)PyArray_DATA(*y0);")
        if untraced:
            line("scanlib_memory ring;")
            line(f"if (ring.get(2 * cells * sizeof({self.type}))) return -1;")
            line(f"history = ({self.type} *)ring.data;")
        first = "history + steps * cells" if self.op.reverse and not untraced else "history"
        line(
            f"scanlib_copy((char *)({first}), (char *)PyArray_DATA({self.initial}), {ndim}, "
            f"PyArray_DIMS({self.initial}), PyArray_STRIDES({self.initial}), sizeof({self.type}));"
        )

    def write_run(self) -> None:
        op, line = self.op, self.source.line
        options = (
            op.coefficient == "fixed",
            op.side != "right",
            op.vector,
            op.reverse,
            op.untraced,
            op.has_offset,
            op.matrix_batch_rank(self.parts.matrix.type.ndim) == 0,
        )
        flags = ", ".join(str(option).lower() for option in options)
        functions = f"scanlib_vector_{self.dtype}" if op.semiring == "log" else "void"
        semiring = f"SCANLIB_{op.semiring.upper()}"
        line(f"scanlib_linear<{self.type}, {semiring}, {flags}, {functions}> run;")
        offset = "NULL" if self.offset is None else f"{self.offset}_data"
        line(f"run.history = history, run.matrix = {self.matrix}_data, run.offset = {offset};")
        line(f"run.mask = {'NULL' if self.mask is None else f'{self.mask}_data'};")
        line(f"run.right = {'NULL' if self.right is None else f'{self.right}_data'};")
        line("run.steps = steps, run.batches = batches, run.d = d, run.m = m;")
        with self.source.block("try"):
            line("run.run();")
        with self.source.block("catch (const std::bad_alloc &)"):
            line("PyErr_NoMemory();")
            line("return -1;")
        if op.untraced:
            line("history += steps % 2 * cells;")
            line("memcpy(PyArray_DATA(*y0), history, PyArray_NBYTES(*y0));")


@register_node_printer
def print_linear(op: LinearScan, node: Apply) -> CCode:
    """Return the C code of a matrix recurrence.

    Raises
    ------
    NoCCodeError
        For half precision, which C cannot compute with, and where the loop itself may have to run.
    """
    if isinstance(op, CheckedLinearScan):
        raise NoCCodeError(f"{op} runs through perform")
    printer = LinearPrinter(op, node)
    functions = printer.write()
    logs = vector_functions(printer.dtype) if op.semiring == "log" else ""
    return CCode(
        helpers="#include <new>\n#include <cmath>\n" + HELPERS + logs + LINEAR_KERNELS,
        functions=functions,
        scalar_ops=(),
        compile_args=(),
        version=("scanlib-linear", VERSION, vector_version(printer.dtype) if logs else ""),
    )
