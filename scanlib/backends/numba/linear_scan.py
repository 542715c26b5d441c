"""Numba code of `LinearScan`: one function per node, written for its ranks and options.

How one step is computed:

* a real recurrence of vectors of at most `linear_vectors.WIDEST` items, when there is no batch: by
  vectors, with a fixed matrix several steps at once (`linear_vectors`). Where the size is not
  known when the function is compiled, sizes 2 to 4 are compiled beside the general code;
* other real products are combinations of rows that are contiguous in memory, by vectors
  (`linear_combine`); a fixed matrix that multiplies vectors is laid out once so that this
  is so. Where a matrix per step has its other axis contiguous (a vector at its right), and for
  complex numbers, items are summed one by one;
* the log semiring with a fixed matrix works with ``exp(A - its row's maximum)``, computed once:
  a step takes `d` exponentials and logarithms, and a real product. A row whose sum comes near
  the smallest numbers is computed again term by term, so nothing underflows;
* products from both sides of a small state keep its rows in vectors, other ones are two products
  of matrices (`linear_both`);
* all other products go term by term.

Where a mask leaves items of the matrix out, steps (or blocks of them) whose results are not finite
are computed again without these items.

Nothing is allocated while the steps run. Compilers may regroup sums, so results agree with those
of the plain loop up to rounding; they are the same at every run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import overload
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import (
    get_numba_type,
    numba_njit,
    register_funcify_and_cache_key,
)

from scanlib.backends.numba import linear_combine, linear_vectors
from scanlib.backends.numba.disk import sealed
from scanlib.backends.numba.linear_both import BothSidesWriter
from scanlib.backends.numba.linear_terms import TermsWriter
from scanlib.backends.numba.source import may_cache
from scanlib.ops import linear_loop
from scanlib.ops.checked_linear import CheckedLinearScan, limits
from scanlib.ops.execution import NotCompilableError
from scanlib.ops.linear_scan import LinearScan, register_linear_compiler

VERSION = "scanlib-linear-11"


class LinearWriter(BothSidesWriter, TermsWriter):
    """Writes the function of one `LinearScan` node."""

    def write(self, caller: str = "compiled code") -> tuple[Callable[..., Any], str | None]:
        """Return the function and its cache key.

        What Python calls is kept on disk for itself: numba finds code there by the function and the
        types of its arguments alone, and code for compiled code has no entry for Python.
        """
        self.write_checks()
        self.write_storage()
        if self.by_vectors():
            self.write_by_vectors()
        if self.op.side == "both":
            self.write_small_products()
        if not self.by_vectors() or self.size is None:
            with self.block("for n in range(done, steps):"):
                self.write_step()
        self.write_return()
        return self.source.compile("linear_scan", self.arguments, self.versions(caller))

    def versions(self, caller: str) -> str:
        """Return what identifies the code beside its text."""
        kernels = linear_vectors.VERSION, linear_combine.VERSION
        return " ".join([VERSION, *kernels, str(self.dtype), caller])

    # Before the first step

    def refuse(self, condition: str, error: str, text: str, *numbers: str) -> None:
        with self.block(f"if {condition}:"):
            self.line(f"raise {error}({', '.join([repr(text), *numbers])})")

    def write_checks(self) -> None:
        op, line = self.op, self.line
        if self.steps_name is not None:
            line(f"steps = as_scalar({self.steps_name})")
            self.refuse("steps < 0", "StepCountError", linear_loop.NEGATIVE_STEPS, "steps")
        else:
            line(f"steps = {self.offset or self.matrix}.shape[0]")
        timed = [(self.offset, linear_loop.OFFSET_ROWS)] if op.has_offset else []
        if not self.fixed:
            timed.append((self.matrix, linear_loop.MATRIX_ROWS))
        if not self.fixed and self.right is not None:
            timed.append((self.right, linear_loop.MATRIX_ROWS))
        for name, text in timed:
            rows = f"{name}.shape[0]"
            self.refuse(f"{rows} != steps", "SequenceLengthError", text, rows, "steps")
        rows = f"{self.initial}.shape[0]"
        wrong = f"{rows} != 1"
        if not op.untraced:
            wrong += f" and (steps > 0 or {rows} != 0)"
        self.refuse(wrong, "InitialRowsError", linear_loop.INITIAL_ROWS, rows)
        if op.required_steps:
            text = linear_loop.missing_steps(op.required_steps)
            self.refuse(f"steps < {op.required_steps}", "IndexError", text)
        axis = self.row_ndim if op.vector or op.side == "right" else self.row_ndim - 1
        line(f"d = {self.initial}.shape[{axis}]")
        if not op.vector:
            other = self.row_ndim - 1 if op.side == "right" else self.row_ndim
            line(f"m = {self.initial}.shape[{other}]")
        for left, right in self.equal_sizes():
            self.refuse(f"{left} != {right}", "LoopError", linear_loop.SHAPES, left, right)

    def equal_sizes(self) -> list[tuple[str, str]]:
        last = self.matrix_ndim
        pairs = [(f"{self.matrix}.shape[{axis}]", "d") for axis in (last - 2, last - 1)]
        if self.matrix_batched:
            first = 0 if self.fixed else 1
            pairs += [
                (f"{self.matrix}.shape[{first + axis}]", f"{self.initial}.shape[{1 + axis}]")
                for axis in range(self.batch)
            ]
        if self.right is not None:
            pairs += [(f"{self.right}.shape[{axis}]", "m") for axis in (last - 2, last - 1)]
        if self.mask is not None:
            pairs += [(f"{self.mask}.shape[{axis}]", "d") for axis in range(2)]
        if self.offset is not None:
            pairs += [
                (f"{self.offset}.shape[{axis}]", f"{self.initial}.shape[{axis}]")
                for axis in range(1, 1 + self.row_ndim)
            ]
        return pairs

    def write_storage(self) -> None:
        line = self.line
        rows = "2" if self.op.untraced else f"steps + {self.initial}.shape[0]"
        line(f"h = np.empty(({rows},) + {self.initial}.shape[1:], number)")
        first = "steps" if self.op.reverse and not self.op.untraced else "0"
        with self.block(f"if {self.initial}.shape[0] > 0:"):
            self.copy("h", first, self.initial, "0")
        line("done = 0")
        if self.op.semiring == "real":
            if self.offset is not None:
                line(f"add_rows = contiguous({self.offset})")
                self.offset = "add_rows"
            line(f"matrices = contiguous({self.matrix})")
            self.matrix = "matrices"
            if self.right is not None:
                line(f"rights = contiguous({self.right})")
                line("half = np.empty(d * m, number)")
                self.right = "rights"
            batch = " * ".join(f"h.shape[{1 + axis}]" for axis in range(self.batch))
            line(f"batches, cells = {batch or '1'}, {'d' if self.op.vector else 'd * m'}")
        if self.uses_columns():
            self.write_columns()
        if self.uses_exponentials():
            self.write_exponentials()

    def copy(self, target: str, target_row: str, source: str, source_row: str) -> None:
        """Write loops that copy one row; numba compiles them faster than an assignment."""
        names = [f"j{axis}" for axis in range(self.row_ndim)]
        with ExitStack() as stack:
            for axis, name in enumerate(names):
                stack.enter_context(self.block(f"for {name} in range(h.shape[{axis + 1}]):"))
            index = ", ".join(names)
            self.line(f"{target}[{target_row}, {index}] = {source}[{source_row}, {index}]")

    # One step

    def write_step(self) -> None:
        self.write_places()
        if self.op.semiring == "real":
            self.write_product_step()
            if self.mask is not None:
                self.write_check()
        else:
            self.write_terms_step()

    # After the last step

    def write_exact(self, op: CheckedLinearScan, result: str) -> None:
        """Write the run of the loop itself where the recurrence may not be the same.

        Without a history, the last state tells whether any has overflowed: infinity and NaN stay.
        """
        from scanlib.backends.numba.dispatch import loop_call

        factors, states = limits(self.dtype)
        self.source.object("all_between", all_between)
        tests = [
            f"all_between({name}, {1 / factors!r}, {factors!r})"
            for name in op.factors(self.arguments)
        ]
        self.source.object("all_below", all_below)
        tests.append(f"all_below({result}, {states!r})")
        found = loop_call(op.exact.make_node(*op.of_loop(self.node.inputs)))
        assert found is not None
        name = self.source.function(*found)
        with self.block(f"if steps > 0 and not ({' and '.join(tests)}):"):
            self.line(f"return {name}(({', '.join(op.of_loop(self.arguments))},))")

    def write_return(self) -> None:
        result = "h"
        if self.op.untraced:
            result = "result"
            self.line(f"result = np.empty((1,) + {self.initial}.shape[1:], number)")
            self.copy("result", "0", "h", "steps % 2")
        if isinstance(self.op, CheckedLinearScan):
            self.write_exact(self.op, result)
        self.line(f"return {result}")


def all_between(values: Any, low: float, high: float) -> bool:
    """Whether all numbers are zero or of a size between two (compiled code only)."""
    raise NotImplementedError("compiled code only")


@overload(all_between)
def _all_between(values, low, high):
    if not isinstance(values, types.Array):
        return lambda values, low, high: values == 0 or low <= abs(values) <= high

    def item_by_item(values, low, high):
        outside = 0
        for value in values.flat:
            size = abs(value)
            outside += not ((size == 0) | ((size >= low) & (size <= high)))
        return outside == 0

    def of_row(values, low, high):
        row, outside = values.reshape(values.size), 0
        for j in range(row.size):
            size = abs(row[j])
            outside += not ((size == 0) | ((size >= low) & (size <= high)))
        return outside == 0

    return of_row if values.layout == "C" and values.ndim else item_by_item


def all_below(values: Any, most: float) -> bool:
    """Whether the sizes of all numbers are at most that, and none is NaN (compiled code only)."""
    raise NotImplementedError("compiled code only")


@overload(all_below)
def _all_below(values, most):
    def below(values, most):
        row, outside = values.reshape(values.size), 0
        for j in range(row.size):
            outside += not abs(row[j]) <= most
        return outside == 0

    return below


def fastmath_of(op: LinearScan) -> set[str] | None:
    """Return the liberties that compilers may take; None for those PyTensor chooses.

    ``a + h - m``, with `m` the largest of these sums, must not be regrouped: it is zero.
    """
    return None if op.semiring == "real" else {"contract"}


@register_funcify_and_cache_key(LinearScan)
def funcify_linear_scan(
    op: LinearScan, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a matrix recurrence for use inside numba mode."""
    function, key = LinearWriter(op, node).write()
    return numba_njit(function, fastmath=fastmath_of(op)), key


@register_linear_compiler
def compile_for_perform(op: LinearScan, node: Apply) -> Callable[..., np.ndarray]:
    """Return a function from values to the value that runs the recurrence compiled."""
    try:
        for variable in [*node.inputs, *node.outputs]:
            get_numba_type(variable.type)
    except NotImplementedError as error:
        raise NotCompilableError(str(error)) from error
    function, key = LinearWriter(op, node).write("Python")
    fastmath = fastmath_of(op)
    compiled = sealed(
        numba_njit(function, fastmath=fastmath, final_function=True, cache=may_cache(key))
    )

    def run(*inputs: Any) -> np.ndarray:
        try:
            return compiled(*inputs)
        except numba.core.errors.NumbaError as error:
            raise NotCompilableError(str(error)) from error

    return run
