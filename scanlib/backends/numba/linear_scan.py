"""Numba code of `LinearScan`: one function per node, written for its ranks and options.

How one step is computed:

* a real recurrence of vectors with a fixed matrix and at most `linear_vectors.WIDEST` items, when
  there is no batch: by vectors, several steps at once (`linear_vectors`). Where the size is not
  known when the function is compiled, sizes 2 to 4 are compiled beside the general code;
* other real products run over the contiguous last axis of the result, four terms at a time: a
  fixed matrix is laid out once so that this is possible. Where that axis is summed over instead
  (a vector with a matrix per step at its left), rows are;
* the log semiring with a fixed matrix works with ``exp(A - its row's maximum)``, computed once:
  a step takes `d` exponentials and logarithms, and a real product. A row whose sum comes near
  the smallest numbers is computed again term by term, so nothing underflows;
* all other products go term by term.

Nothing is allocated while the steps run. Compilers may regroup sums, so results agree with those
of the plain loop up to rounding; they are the same at every run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numba
import numpy as np
from numba.extending import overload
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import (
    get_numba_type,
    numba_njit,
    register_funcify_and_cache_key,
)

from scanlib.backends.numba import linear_vectors
from scanlib.backends.numba.scalar import as_scalar
from scanlib.backends.numba.source import Source
from scanlib.ops import errors, linear_loop
from scanlib.ops.execution import NotCompilableError
from scanlib.ops.linear_scan import LinearScan, register_linear_compiler

VERSION = "scanlib-linear-1"
GUESSED_SIZES = (2, 3, 4)  # compiled for by vectors where the size is not known


def contiguous(array: Any) -> Any:
    """Return an array whose items are next to one another: itself or a copy."""
    return np.ascontiguousarray(array)


@overload(contiguous)
def _contiguous(array):  # type: ignore[no-untyped-def]
    if array.layout == "C":
        return lambda array: array

    def copied(array):  # type: ignore[no-untyped-def]
        result = np.empty(array.shape, array.dtype)
        for index in np.ndindex(array.shape):
            result[index] = array[index]
        return result

    return copied


class LinearWriter:
    """Writes the function of one `LinearScan` node."""

    def __init__(self, op: LinearScan, node: Apply) -> None:
        self.op = op
        self.source = Source()
        self.line, self.block = self.source.line, self.source.block
        parts = op.parts(node.inputs)
        names = op.parts([f"x{i}" for i in range(len(node.inputs))])
        self.arguments = [f"x{i}" for i in range(len(node.inputs))]
        self.steps_name, self.matrix, self.offset, self.initial = names
        ndim = parts.initial.type.ndim
        self.batch = op.batch_rank(ndim)
        self.row_ndim = ndim - 1
        self.matrix_batched = op.matrix_batch_rank(parts.matrix.type.ndim) > 0
        self.matrix_ndim = parts.matrix.type.ndim
        self.fixed = op.coefficient == "fixed"
        self.dtype = np.dtype(parts.initial.type.dtype)
        sizes = [*parts.matrix.type.shape[-2:], *self._state_size(parts.initial.type.shape)]
        self.size = next((size for size in sizes if size is not None), None)
        self.ks = [f"k{axis}" for axis in range(self.batch)]
        self.source.object("as_scalar", as_scalar)
        self.source.object("contiguous", contiguous)
        for name in ("StepCountError", "SequenceLengthError", "InitialRowsError", "LoopError"):
            self.source.object(name, getattr(errors, name))
        self.source.object("number", self.dtype.type)

    def _state_size(self, shape: Any) -> list[Any]:
        return [shape[-1] if self.op.vector or self.op.side == "right" else shape[-2]]

    def write(self) -> tuple[Callable[..., Any], str | None]:
        """Return the function and its cache key."""
        self.write_checks()
        self.write_storage()
        if self.by_vectors():
            self.write_by_vectors()
        if not self.by_vectors() or self.size is None:
            with self.block("for n in range(done, steps):"):
                self.write_step()
        self.write_return()
        version = f"{VERSION} {linear_vectors.VERSION} {self.dtype}"
        return self.source.compile("linear_scan", self.arguments, version)

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
        pairs = [(f"{self.matrix}.shape[{last - 2}]", "d"), (f"{self.matrix}.shape[{last - 1}]", "d")]
        if self.matrix_batched:
            first = 0 if self.fixed else 1
            pairs += [
                (f"{self.matrix}.shape[{first + axis}]", f"{self.initial}.shape[{1 + axis}]")
                for axis in range(self.batch)
            ]
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
            if not self.fixed:
                line(f"matrices = contiguous({self.matrix})")
                self.matrix = "matrices"
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

    # Fixed matrices, laid out once

    def uses_columns(self) -> bool:
        """Whether the columns of a fixed matrix are laid out as rows."""
        return self.op.semiring == "real" and self.fixed and self.op.vector

    def uses_exponentials(self) -> bool:
        return self.op.semiring == "log" and self.fixed and self.op.vector

    def matrix_item(self, i: str, j: str) -> str:
        """Return ``A[i, j]`` of the matrix as it stands at the left of the state."""
        lead = [] if self.fixed else ["t"]
        lead += self.ks if self.matrix_batched else []
        order = [i, j] if self.op.side == "left" else [j, i]
        return f"{self.matrix}[{', '.join([*lead, *order])}]"

    def over_matrices(self, stack: ExitStack) -> None:
        """Open loops over the batch of a fixed matrix, if it has one."""
        if self.matrix_batched:
            for axis, name in enumerate(self.ks):
                stack.enter_context(
                    self.block(f"for {name} in range({self.initial}.shape[{1 + axis}]):")
                )

    def laid_out(self, *index: str) -> str:
        return ", ".join([*(self.ks if self.matrix_batched else []), *index])

    def laid_out_shape(self, *sizes: str) -> str:
        batch = [f"{self.initial}.shape[{1 + axis}]" for axis in range(self.batch)]
        return ", ".join([*(batch if self.matrix_batched else []), *sizes])

    def write_columns(self) -> None:
        self.line(f"columns = np.empty(({self.laid_out_shape('d', 'd')},), number)")
        with ExitStack() as stack:
            self.over_matrices(stack)
            with self.block("for i in range(d):"), self.block("for j in range(d):"):
                self.line(f"columns[{self.laid_out('j', 'i')}] = {self.matrix_item('i', 'j')}")

    def write_exponentials(self) -> None:
        line = self.line
        line(f"columns = np.empty(({self.laid_out_shape('d', 'd')},), number)")
        line(f"largest = np.empty(({self.laid_out_shape('d')},), number)")
        line("weights = np.empty(d, number)")
        with ExitStack() as stack:
            self.over_matrices(stack)
            with self.block("for i in range(d):"):
                line("top = number(-np.inf)")
                with self.block("for j in range(d):"):
                    line(f"item = {self.matrix_item('i', 'j')}")
                    with self.block("if item > top or item != item:"):
                        line("top = item")
                with self.block("if not np.isfinite(top):"):
                    line("top = number(0)")
                line(f"largest[{self.laid_out('i')}] = top")
                with self.block("for j in range(d):"):
                    item = self.matrix_item("i", "j")
                    line(f"columns[{self.laid_out('j', 'i')}] = np.exp({item} - top)")

    # By vectors

    def by_vectors(self) -> bool:
        return (
            self.uses_columns()
            and not self.op.untraced
            and not self.batch
            and self.dtype.kind == "f"
            and (self.size is None or 2 <= self.size <= linear_vectors.WIDEST)
        )

    def write_by_vectors(self) -> None:
        """Write all steps by vectors, for one size or for each of some."""
        self.write_offset_place()
        row = "steps * d" if self.op.reverse else "0"
        self.line(f"row, row_step = {row}, {'-d' if self.op.reverse else 'd'}")
        for size in GUESSED_SIZES if self.size is None else (self.size,):
            with self.block(f"if d == {size}:"):
                self.write_blocks(size)

    def write_offset_place(self) -> None:
        """Write where the offset's rows are, counted in items."""
        line = self.line
        if self.offset is None:
            line("offset_row, offset_step = 0, 0")
            return
        line(f"offset_row, offset_step = {'(steps - 1) * d, -d' if self.op.reverse else '0, d'}")

    def write_blocks(self, size: int) -> None:
        line = self.line
        ahead = linear_vectors.look_ahead(size)
        line(f"powers = np.empty(({ahead}, {size}, {size}), number)")
        with self.block(f"for i in range({size}):"), self.block(f"for j in range({size}):"):
            line("powers[0, j, i] = columns[j, i]")
        with (
            self.block(f"for q in range(1, {ahead}):"),
            self.block(f"for i in range({size}):"),
            self.block(f"for j in range({size}):"),
        ):
            line("total = number(0)")
            with self.block(f"for k in range({size}):"):
                line("total += powers[q - 1, k, i] * columns[j, k]")
            line("powers[q, j, i] = total")
        functions = {}
        for count in (ahead, 1):
            steps = linear_vectors.vector_steps(size, count, self.op.has_offset)
            identity = f"{linear_vectors.VERSION} {size} {count} {self.op.has_offset}"
            functions[count] = self.source.function(steps, identity, "steps_by")
        offset = self.offset or "powers"
        places = "row, row_step, offset_row, offset_step"
        call = f"(h, powers, {offset}, {places}, {{}})"
        block = linear_vectors.BLOCK
        with self.block("while done < steps:"):
            line(f"count = min({block}, steps - done)")
            line(f"whole = count // {ahead} if count == {block} else 0")
            with self.block(f"if whole == 0 or not {functions[ahead]}{call.format('whole')}:"):
                line(f"{functions[1]}{call.format('count')}")
            line("done += count")
            line("row += count * row_step")
            line("offset_row += count * offset_step")

    # One step

    def write_step(self) -> None:
        op, line = self.op, self.line
        line("t = steps - 1 - n" if op.reverse else "t = n")
        if op.untraced:
            line("before, after = n % 2, (n + 1) % 2")
        else:
            line("before, after = t + 1, t" if op.reverse else "before, after = t, t + 1")
        with ExitStack() as stack:
            for axis, name in enumerate(self.ks):
                stack.enter_context(self.block(f"for {name} in range(h.shape[{1 + axis}]):"))
            line(f"old = h[{', '.join(['before', *self.ks])}]")
            line(f"new = h[{', '.join(['after', *self.ks])}]")
            if self.offset is not None:
                line(f"add = {self.offset}[{', '.join(['t', *self.ks])}]")
            if op.semiring == "real":
                self.write_real()
            elif self.uses_exponentials():
                self.write_log_vector()
            else:
                self.write_term_by_term()

    def bound(self) -> str:
        return "d" if self.size is None else str(self.size)

    def added(self, index: str) -> str:
        return f"add[{index}]" if self.offset is not None else "number(0)"

    def write_real(self) -> None:
        if not self.op.vector:
            self.write_real_matrix()
        elif self.fixed:
            self.write_combination(f"columns[{self.laid_out('{}')}]")
        elif self.op.side == "right":
            lead = ["t", *(self.ks if self.matrix_batched else [])]
            self.write_combination(f"{self.matrix}[{', '.join([*lead, '{}'])}]")
        else:
            d = self.bound()
            with self.block(f"for i in range({d}):"):
                self.line("total = number(0)")
                with self.block(f"for j in range({d}):"):
                    self.line(f"total += {self.matrix_item('i', 'j')} * old[j]")
                self.line(f"new[i] = total + {self.added('i')}")

    def write_combination(self, row: str, add: bool = True) -> None:
        """Write ``new = Σ_j old[j] row_j``, four terms at a time."""
        line, d = self.line, self.bound()
        with self.block(f"for i in range({d}):"):
            line(f"new[i] = {self.added('i') if add else 'number(0)'}")
        with self.block(f"for j in range(0, {d} // 4 * 4, 4):"):
            for q in range(4):
                line(f"s{q} = old[j + {q}]")
                line(f"r{q} = {row.format(f'j + {q}')}")
            with self.block(f"for i in range({d}):"):
                line("new[i] += (s0 * r0[i] + s1 * r1[i]) + (s2 * r2[i] + s3 * r3[i])")
        with self.block(f"for j in range({d} // 4 * 4, {d}):"):
            line("s0 = old[j]")
            line(f"r0 = {row.format('j')}")
            with self.block(f"for i in range({d}):"):
                line("new[i] += s0 * r0[i]")

    def write_real_matrix(self) -> None:
        """Write the product of two matrices by rows of the result."""
        line, d = self.line, self.bound()
        left = self.op.side == "left"
        lead = ([] if self.fixed else ["t"]) + (self.ks if self.matrix_batched else [])
        rows, width = (d, "m") if left else ("m", d)

        def item(j: str) -> str:
            return f"{self.matrix}[{', '.join([*lead, 'i', j])}]" if left else f"old[i, {j}]"

        def row(j: str) -> str:
            return f"old[{j}]" if left else f"{self.matrix}[{', '.join([*lead, j])}]"

        with self.block(f"for i in range({rows}):"):
            line("out = new[i]")
            with self.block(f"for c in range({width}):"):
                line(f"out[c] = {self.added('i, c')}")
            with self.block(f"for j in range(0, {d} // 4 * 4, 4):"):
                for q in range(4):
                    line(f"s{q} = {item(f'j + {q}')}")
                    line(f"r{q} = {row(f'j + {q}')}")
                with self.block(f"for c in range({width}):"):
                    line("out[c] += (s0 * r0[c] + s1 * r1[c]) + (s2 * r2[c] + s3 * r3[c])")
            with self.block(f"for j in range({d} // 4 * 4, {d}):"):
                line(f"s0 = {item('j')}")
                line(f"r0 = {row('j')}")
                with self.block(f"for c in range({width}):"):
                    line("out[c] += s0 * r0[c]")

    def write_log_vector(self) -> None:
        """Write ``new = log(E exp(old - max) ) + max``, with rows that underflow done again."""
        line, d = self.line, self.bound()
        line("top = number(-np.inf)")
        with self.block(f"for j in range({d}):"), self.block("if old[j] > top or old[j] != old[j]:"):
            line("top = old[j]")
        line("regular = np.isfinite(top)")
        with self.block("if regular:"):
            with self.block(f"for j in range({d}):"):
                line("weights[j] = np.exp(old[j] - top)")
            with self.block(f"for i in range({d}):"):
                line("new[i] = number(0)")
            with self.block(f"for j in range({d}):"):
                line("s0 = weights[j]")
                line(f"r0 = columns[{self.laid_out('j')}]")
                with self.block(f"for i in range({d}):"):
                    line("new[i] += s0 * r0[i]")
        smallest = self.source.constant(self.dtype.type(np.finfo(self.dtype).tiny / self.dtype.type(
            np.finfo(self.dtype).eps) ** 2))
        with self.block(f"for i in range({d}):"):
            with self.block(f"if regular and {smallest} < new[i] < np.inf:"):
                line(
                    f"new[i] = np.log(new[i]) + (top + largest[{self.laid_out('i')}])"
                    f" + {self.added('i')}"
                )
            with self.block("else:"):
                self.write_terms("i", "old[j]", f"new[i] = {{}} + {self.added('i')}")

    def write_term_by_term(self) -> None:
        d = self.bound()
        if self.op.vector:
            with self.block(f"for i in range({d}):"):
                self.write_terms("i", "old[j]", f"new[i] = {{}} + {self.added('i')}")
            return
        left = self.op.side == "left"
        item, place = ("old[j, c]", "i, c") if left else ("old[c, j]", "c, i")
        with self.block(f"for i in range({d}):"), self.block("for c in range(m):"):
            self.write_terms("i", item, f"new[{place}] = {{}} + {self.added(place)}")

    def write_terms(self, i: str, item: str, assign: str) -> None:
        """Write the extreme or the log of the sum of ``A[i, j] + item``."""
        line, d = self.line, self.bound()
        sign, start = ("<", "np.inf") if self.op.semiring == "min" else (">", "-np.inf")
        line(f"best = number({start})")
        with self.block(f"for j in range({d}):"):
            line(f"term = {self.matrix_item(i, 'j')} + {item}")
            with self.block(f"if term {sign} best or term != term:"):
                line("best = term")
        if self.op.semiring != "log":
            line(assign.format("best"))
            return
        with self.block("if np.isfinite(best):"):
            line("total = number(0)")
            with self.block(f"for j in range({d}):"):
                line(f"total += np.exp({self.matrix_item(i, 'j')} + {item} - best)")
            line("best = best + np.log(total)")
        line(assign.format("best"))

    # After the last step

    def write_return(self) -> None:
        if not self.op.untraced:
            self.line("return h")
            return
        self.line(f"result = np.empty((1,) + {self.initial}.shape[1:], number)")
        self.copy("result", "0", "h", "steps % 2")
        self.line("return result")


@register_funcify_and_cache_key(LinearScan)
def funcify_linear_scan(
    op: LinearScan, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a matrix recurrence for use inside numba mode."""
    function, key = LinearWriter(op, node).write()
    return numba_njit(function), key


@register_linear_compiler
def compile_for_perform(op: LinearScan, node: Apply) -> Callable[..., np.ndarray]:
    """Return a function from values to the value that runs the recurrence compiled."""
    try:
        for variable in [*node.inputs, *node.outputs]:
            get_numba_type(variable.type)
    except NotImplementedError as error:
        raise NotCompilableError(str(error)) from error
    function, key = LinearWriter(op, node).write()
    compiled = numba_njit(function, final_function=True, cache=key is not None)

    def run(*inputs: Any) -> np.ndarray:
        try:
            return compiled(*inputs)
        except numba.core.errors.NumbaError as error:
            raise NotCompilableError(str(error)) from error

    return run
