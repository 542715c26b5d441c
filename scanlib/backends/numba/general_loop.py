"""One numba function for a whole loop: what there is where an Op of its body has no kernel.

Random draws, decompositions of LAPACK's, loops inside loops, carries that change their shapes: each
step calls PyTensor's numba functions for those, and kernels for all else
(`scanlib.backends.numba.step_graph`).

* A scalar state of small depth lives in local variables, one per row; its history is written
  once and never read. Other states are read from their history, as rows that are views.
* An untraced state has a ring of ``K + 1`` rows, so that a step never writes what it reads.
* Carries start as copies, so that a step may overwrite the memory of those it owns (see
  `body.prepare_body`); nothing returned shares memory with an input or another result.
* A stacked output is allocated before the first step if its row shape is known by then, at
  the first step otherwise. With `until` (and forward in time) storage grows by doubling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytensor.graph.basic import Variable

from scanlib._compat.numba import numba_deepcopy
from scanlib.backends.numba.body import prepare_body
from scanlib.backends.numba.dispatch import register_writer
from scanlib.backends.numba.polls import poll
from scanlib.backends.numba.row_shapes import row_shapes
from scanlib.backends.numba.step_graph import GraphWriter, is_zero_dim
from scanlib.backends.numba.vectors import as_array
from scanlib.backends.numba.whole_arrays import WholeArrays
from scanlib.ops import errors
from scanlib.ops.messages import Messages
from scanlib.ops.scan import Scan
from scanlib.source_keys import source_key

VERSION = source_key(__name__)
REGISTER_DEPTH = 8  # states deeper than this are read from memory
FEW_CHECKS = 8  # written one by one
FIRST_CAPACITY = 64  # rows allocated at first by a loop with `until`


class LoopWriter(WholeArrays):
    """Writes the function of one loop."""

    def __init__(self, op: Scan) -> None:
        self.op, self.signature = op, op.signature
        self.reverse = op.signature.reverse
        self.grows = op.signature.has_stop and not op.signature.reverse
        self.messages = Messages(op.signature, op.labels, op.name)
        self.body = prepare_body(op)
        self.step = GraphWriter(self.body.fgraph)
        self.source = self.step.source
        self.arguments = [f"x{i}" for i in range(len(op.outer_input_types()))]
        self.outer = self.signature.split_inputs(self.arguments)
        self.inner = self.signature.split_body_inputs(self.body.fgraph.inputs)
        self.result = self.signature.split_body_outputs(self.body.fgraph.outputs)
        self.scalar_state = [is_zero_dim(taps[0].type) for taps in self.inner.taps]
        self.in_registers = [
            scalar and depth <= REGISTER_DEPTH
            for scalar, depth in zip(self.scalar_state, self.signature.depths, strict=True)
        ]
        self.known_rows: list[bool] = []
        self.source.reserve("rxhczow", len(self.arguments) + len(self.body.fgraph.outputs) + 1)
        for helper in (
            errors.StepCountError,
            errors.SequenceLengthError,
            errors.InitialRowsError,
            errors.StepShapeError,
            numba_deepcopy,
            as_array,
        ):
            self.source.object(helper.__name__, helper)

    def write(self) -> tuple[Callable[..., Any], str | None]:
        """Return the loop's function and its cache key."""
        line = self.source.line
        self.write_checks()
        self.write_storage()
        line("i = 0")
        line("stopped = False")
        with self.source.block("while i < steps and not stopped:"):
            self.write_poll()
            self.write_step()
            line("i += 1")
        self.write_return()
        return self.source.compile("scan_loop", self.arguments, VERSION)

    # Before the first step

    def raise_error(self, error: str, message: str, *numbers: str) -> None:
        text = ", ".join([repr(message), *numbers])
        self.source.line(f"raise {error}({text})")

    def write_checks(self) -> None:
        """Write the number of steps, and the checks that keep every read inside its array."""
        line, block = self.source.line, self.source.block
        first = 0
        if self.outer.n_steps is not None:
            line(f"steps = as_scalar({self.outer.n_steps})")
            with block("if steps < 0:"):
                self.raise_error("StepCountError", self.messages.negative_steps(), "steps")
        else:
            names = [f"{name}.shape[0]" for name in self.outer.sequences]
            line(f"steps = least({', '.join(names)})" if len(names) > 1 else f"steps = {names[0]}")
            first = 0 if len(names) > 1 else 1
        for i, name in enumerate(self.outer.sequences[first:], start=first):
            with block(f"if {name}.shape[0] != steps:"):
                message = self.messages.sequence_length(i)
                self.raise_error("SequenceLengthError", message, f"{name}.shape[0]", "steps")
        self.write_initial_checks()

    def write_initial_checks(self) -> None:
        """Write the checks of the initial rows; many of them raise in one place.

        Each place that raises releases all arrays of the function.
        """
        line, depths = self.source.line, self.signature.depths
        messages = [self.messages.initial_rows(i) for i in range(len(depths))]
        if len(depths) <= FEW_CHECKS:
            for name, depth, message in zip(self.outer.initials, depths, messages, strict=True):
                with self.source.block(f"if {name}.shape[0] != {depth}:"):
                    self.raise_error("InitialRowsError", message, f"{name}.shape[0]")
            return
        line("wrong = -1")
        line("given = 0")
        for i, name in reversed(list(enumerate(self.outer.initials))):
            line(f"rows{i} = {name}.shape[0]")
            line(f"given = rows{i} if rows{i} != {depths[i]} else given")
            line(f"wrong = {i} if rows{i} != {depths[i]} else wrong")
        with self.source.block("if wrong >= 0:"):
            self.raise_error("InitialRowsError", errors.BETWEEN.join(messages), "wrong", "given")

    def write_storage(self) -> None:
        first = f"min(steps, {FIRST_CAPACITY})" if self.grows else "steps"
        self.source.line(f"capacity = {first}")
        for variable, name in zip(self.inner.non_sequences, self.outer.non_sequences, strict=True):
            self.bind(variable, name)
        for i, name in enumerate(self.outer.carries):
            start = "as_scalar" if is_zero_dim(self.inner.carries[i].type) else "numba_deepcopy"
            self.source.line(f"c{i} = {start}({name})")
        for i in range(self.signature.n_states):
            self.write_state_storage(i)
        self.write_output_storage()

    def bind(self, variable: Variable, name: str) -> None:
        """Let the step find an input of the loop."""
        if is_zero_dim(variable.type):
            scalar = self.source.name("s")
            self.source.line(f"{scalar} = as_scalar({name})")
            self.step.bind_scalar(variable, scalar)
        else:
            self.step.bind_array(variable, name)

    def write_state_storage(self, i: int) -> None:
        line = self.source.line
        initial, depth = self.outer.initials[i], self.signature.depths[i]
        if self.in_registers[i]:
            # r{i}_{k} holds the value k steps back.
            for k in range(1, depth + 1):
                row = k - 1 if self.reverse else depth - k
                line(f"r{i}_{k} = {initial}[{row}]")
            if self.signature.untraced[i]:
                return
        rows = f"{depth + 1}" if self.signature.untraced[i] else f"capacity + {depth}"
        ndim = self.inner.taps[i][0].type.ndim
        self.new_like(f"h{i}", initial, range(1, ndim + 1), rows)
        for row in range(depth):
            # A ring holds rows in the order of iteration, the latest one last.
            flipped = self.reverse and self.signature.untraced[i]
            target = (
                str(depth - 1 - row) if flipped else f"steps + {row}" if self.reverse else str(row)
            )
            self.copy_array(f"h{i}", (target,), initial, (str(row),), ndim)

    def write_output_storage(self) -> None:
        shapes = row_shapes(self.op, self.arguments, self.inner.non_sequences, self.step)
        for i, out in enumerate(self.result.outputs):
            row = shapes[i]
            self.known_rows.append(row is not None)
            dtype = self.step._dtype(out)
            sizes = ["capacity", *row] if row is not None else ["0"] * (out.type.ndim + 1)
            self.source.line(f"z{i} = new_array({', '.join([dtype, *sizes])})")

    # One step

    def write_step(self) -> None:
        line, step, results = self.source.line, self.step, self.result
        line("t = steps - 1 - i" if self.reverse else "t = i")
        if self.grows:
            self.write_growth()
        self.bind_rows()
        step.write_nodes()
        held = [
            step.scalar(value) if is_zero_dim(value.type) else step.array(value)
            for value in self.body.fgraph.outputs
        ]
        names = self.signature.split_body_outputs(held)
        if results.stop is not None:
            line(f"stopped = {names.stop} != 0")
        for i, name in enumerate(names.states):
            if self.scalar_state[i]:
                self.write_state(i, name)
                continue
            ndim = self.inner.taps[i][0].type.ndim
            texts = [self.messages.state_shape(i, axis) for axis in range(ndim)]
            self.store_row(f"h{i}", self.written_row(i), name, texts, "i")
        for i, name in enumerate(names.outputs):
            self.store_output(i, name)
        self.advance(list(names.states), list(names.carries))

    def bind_rows(self) -> None:
        """Let the step find the rows of this step, and the carries."""
        line, step = self.source.line, self.step
        for variable, name in zip(self.inner.rows, self.outer.sequences, strict=True):
            row = self.source.name("y")
            line(f"{row} = {name}[t]")
            self.bind_row(variable, row)
        for i, taps in enumerate(self.inner.taps):
            for offset, variable in zip(self.signature.taps[i], taps, strict=True):
                if self.in_registers[i]:
                    step.bind_scalar(variable, f"r{i}_{-offset}")
                    continue
                row = self.source.name("y")
                line(f"{row} = h{i}[{self.tap_row(i, offset)}]")
                self.bind_row(variable, row)
        for i, variable in enumerate(self.inner.carries):
            self.bind_row(variable, f"c{i}")

    def bind_row(self, variable: Variable, name: str) -> None:
        if is_zero_dim(variable.type):
            self.step.bind_scalar(variable, name)
        else:
            self.step.bind_array(variable, name)

    def store_row(self, array: str, row: str, value: str, texts: list[str], step: str) -> None:
        """Write a result into a row, after the check that it fits."""
        for axis, text in enumerate(texts):
            size, own = f"{value}.shape[{axis}]", f"{array}.shape[{axis + 1}]"
            with self.source.block(f"if {size} != {own}:"):
                numbers = [f"np.int64({number})" for number in (step, own, size)]
                self.raise_error("StepShapeError", text, *numbers)
        self.copy_array(array, (row,), value, (), len(texts))

    def store_output(self, i: int, name: str) -> None:
        variable = self.result.outputs[i]
        ndim = variable.type.ndim
        if ndim == 0:
            self.source.line(f"z{i}[t] = {name}")
            return
        if not self.known_rows[i]:
            with self.source.block("if i == 0:"):
                sizes = ", ".join(f"{name}.shape[{axis}]" for axis in range(ndim))
                dtype = self.step._dtype(variable)
                self.source.line(f"z{i} = new_array({dtype}, capacity, {sizes})")
        texts = [self.messages.output_shape(i, axis) for axis in range(ndim)]
        self.store_row(f"z{i}", "t", name, texts, "i")

    def advance(self, states: list[str], carries: list[str]) -> None:
        """Move registers and carries on to the next step, all at once."""
        targets, values = [], []
        for i, (name, depth) in enumerate(zip(states, self.signature.depths, strict=True)):
            if self.in_registers[i]:
                targets += [f"r{i}_{k}" for k in range(depth, 0, -1)]
                values += [*(f"r{i}_{k - 1}" for k in range(depth, 1, -1)), name]
        for i, name in enumerate(carries):
            if name != f"c{i}":
                targets.append(f"c{i}")
                values.append(name)
        if targets:
            self.source.line(f"{', '.join(targets)} = {', '.join(values)}")

    def tap_row(self, i: int, offset: int) -> str:
        depth = self.signature.depths[i]
        if self.signature.untraced[i]:
            return f"(i + {depth + offset}) % {depth + 1}"
        return f"t + {-offset}" if self.reverse else f"t + {depth + offset}"

    def written_row(self, i: int) -> str:
        depth = self.signature.depths[i]
        if self.signature.untraced[i]:
            return f"(i + {depth}) % {depth + 1}"
        return "t" if self.reverse else f"t + {depth}"

    def write_state(self, i: int, name: str) -> None:
        """Write a state without dimensions to its row, if it has one."""
        if not (self.in_registers[i] and self.signature.untraced[i]):
            self.source.line(f"h{i}[{self.written_row(i)}] = {name}")

    def write_poll(self) -> None:
        """Write a chance to interrupt the loop, less often where its steps are short."""
        scalar = not any(getattr(v.type, "ndim", 0) for v in self.body.fgraph.variables)
        with self.source.block(f"if i & {63 if scalar else 3} == 0:"):
            self.source.line(f"{self.source.object('poll', poll)}()")

    def write_growth(self) -> None:
        with self.source.block("if i == capacity:"):
            self.source.line("capacity = least(steps, 2 * capacity)")
            for i, depth in enumerate(self.signature.depths):
                if not self.signature.untraced[i]:
                    ndim = self.inner.taps[i][0].type.ndim
                    self._grow(f"h{i}", f"capacity + {depth}", f"i + {depth}", ndim)
            for i, value in enumerate(self.result.outputs):
                self._grow(f"z{i}", "capacity", "i", value.type.ndim)

    def _grow(self, name: str, rows: str, used: str, ndim: int) -> None:
        larger = self.source.name("g")
        self.new_like(larger, name, range(1, ndim + 1), rows)
        self.copy_array(larger, (), name, (), ndim + 1, first_size=used)
        self.source.line(f"{name} = {larger}")

    # After the last step

    def write_return(self) -> None:
        if self.signature.required_steps:
            with self.source.block(f"if i < {self.signature.required_steps}:"):
                self.raise_error("IndexError", self.messages.missing_steps())
        results = [self.history(i) for i in range(self.signature.n_states)]
        results += [self.final_carry(i) for i in range(self.signature.n_carries)]
        results += [self.stack(i) for i in range(self.signature.n_outputs)]
        self.source.line(f"return {', '.join(results)}")

    def history(self, i: int) -> str:
        line, depth = self.source.line, self.signature.depths[i]
        if self.signature.untraced[i]:
            initial = self.outer.initials[i]
            ndim = self.inner.taps[i][0].type.ndim
            self.new_like(f"o{i}", initial, range(ndim + 1))
            for k in range(1, depth + 1):
                row = k - 1 if self.reverse else depth - k
                if self.in_registers[i]:
                    line(f"o{i}[{row}] = r{i}_{k}")
                else:
                    ring = f"(i + {depth - k}) % {depth + 1}"
                    self.copy_array(f"o{i}", (str(row),), f"h{i}", (ring,), ndim)
            return f"o{i}"
        if not self.signature.has_stop:
            return f"h{i}"
        return f"h{i}[steps - i:]" if self.reverse else f"h{i}[:i + {depth}]"

    def final_carry(self, i: int) -> str:
        variable = self.inner.carries[i]
        if is_zero_dim(variable.type):
            return f"as_array(c{i})"
        return f"c{i}" if i in self.body.destroyed else f"numba_deepcopy(c{i})"

    def stack(self, i: int) -> str:
        if not self.signature.has_stop:
            return f"z{i}"
        return f"z{i}[steps - i:]" if self.reverse else f"z{i}[:i]"


@register_writer
def write_loop(op: Scan) -> tuple[Callable[..., Any], str | None]:
    """Return the Python source function of a loop, to be compiled by numba, and its key."""
    return LoopWriter(op).write()
