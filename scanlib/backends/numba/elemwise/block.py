"""Blocks of steps of one channel: elements, scan, map.

A loop without channels whose parts all belong to recurrence families is run in blocks of steps:

1. the elements of a recurrence are computed for all steps of the block: a loop without
   recurrence, which compilers vectorize;
2. a kernel scans them from the state before the block (`steps`, `lookahead`); where composing
   steps is not safe, the block is run step by step instead;
3. what depends on the states (histories, outputs, sums) is computed for all steps of the block.

Buffers hold one block, so that they stay in the first-level cache; nothing but what the loop
returns is stored for all steps.
"""

from __future__ import annotations

from collections.abc import Callable

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors

from scanlib._compat import thaw_graph
from scanlib.backends.numba.elemwise import logs, steps
from scanlib.backends.numba.elemwise.base import ElemwiseWriter
from scanlib.backends.numba.elemwise.lookahead import Lookahead
from scanlib.ops.elemwise_scan import ElemwiseScan, Recurrence

BLOCK = 256  # steps; the buffers of a few elements fit the first-level cache
REALS = {"float32", "float64"}


class BlockWriter(ElemwiseWriter):
    """Writes an elementwise loop of one channel in blocks of steps."""

    def __init__(self, op: ElemwiseScan) -> None:
        super().__init__(op)
        n = self.signature.n_states
        recurrent = [part for r in op.recurrences for part in r.parts]
        self.nexts: dict[int, Variable] = {
            part: self.result.states[part] if part < n else self.result.carries[part - n]
            for part in recurrent
        }
        self.taps: dict[Variable, tuple[int, int]] = {}
        for i, taps in enumerate(self.inner.taps):
            for offset, tap in zip(self.signature.taps[i], taps, strict=True):
                self.taps[tap] = (i, offset)
        for i, carry in enumerate(self.inner.carries):
            if n + i in self.nexts:
                self.taps[carry] = (n + i, -1)
        self.depths = {
            part: self.signature.depths[part] if part < n else 1 for part in recurrent
        }
        self.block = max([BLOCK, *self.depths.values()])
        self.elements: dict[tuple[int, int], str] = {}

    def write(self) -> tuple[Callable, str | None]:
        self.write_checks()
        self.write_storage()
        line = self.source.line
        line("i = 0")
        with self.source.block("while i < steps:"):
            line(f"n = min({self.block}, steps - i)")
            line("last = steps - 1 - i")
            line("safe = True")
            for number, recurrence in enumerate(self.lowered.recurrences):
                self.write_recurrence(number, recurrence)
            with self.source.block("if not safe:"):
                self.write_sequential()
            self.write_map()
            for part, depth in self.depths.items():
                with self.source.block(f"for j in range({depth}):"):
                    line(f"H{part}[j] = H{part}[n + j]")
            line("i += n")
        self.write_return()
        return self.source.compile("scan_loop", self.arguments, self.version)

    # Storage

    def write_storage(self) -> None:
        line, n = self.source.line, self.signature.n_states
        line("capacity = steps")
        for i in range(n):
            self.write_state_storage(i)
        for i, carry in enumerate(self.inner.carries):
            outer, dtype = self.outer.carries[i], self.emitter._dtype(carry)
            item = self.item(outer, self.layout.carries[i], []) if self.layout.carries[i] else (
                f"as_scalar({outer})"
            )
            if n + i in self.depths:
                line(f"H{n + i} = np.empty({self.block + 1}, {dtype})")
                line(f"H{n + i}[0] = {item}")
            else:
                line(f"c{i} = {item}")
        for i, (out, axes) in enumerate(zip(self.result.outputs, self.layout.outputs, strict=True)):
            sizes = ", ".join(["steps", *("1" for _ in axes)])
            line(f"z{i} = np.empty(({sizes},), {self.emitter._dtype(out)})")
        above = set(ancestors(self.graph.outputs))
        for recurrence in self.lowered.recurrences:
            above |= set(ancestors(recurrence.elements.outputs))
        for variable in self.inner.non_sequences:
            array, axes = self.parts[variable]
            name = self.source.name("w")
            item = self.item(array, axes, []) if axes else f"as_scalar({array})"
            line(f"{name} = {item}")
            self.emitter.bind_scalar(variable, name)
        for number, recurrence in enumerate(self.lowered.recurrences):
            self.write_buffers(number, recurrence)

    def write_state_storage(self, i: int) -> None:
        line, initial, depth = self.source.line, self.outer.initials[i], self.signature.depths[i]
        dtype, axes = self.emitter._dtype(self.inner.taps[i][0]), self.layout.states[i]
        line(f"H{i} = np.empty({self.block + depth}, {dtype})")
        for_row = self.item(initial, axes, [], "j")
        place = f"{depth - 1} - j" if self.reverse else "j"
        with self.source.block(f"for j in range({depth}):"):
            line(f"H{i}[{place}] = {for_row}")
        if not self.signature.untraced[i]:
            line(f"h{i} = np.empty((steps + {depth},) + {initial}.shape[1:], {dtype})")
            row = "steps + j" if self.reverse else "j"
            with self.source.block(f"for j in range({depth}):"):
                line(f"{self.item(f'h{i}', axes, [], row)} = {for_row}")

    def write_buffers(self, number: int, recurrence: Recurrence) -> None:
        """Compute elements that are the same at every step; make buffers for the others."""
        graph = thaw_graph(recurrence.elements)
        whole = set(graph.inputs[len(graph.inputs) - self.signature.n_non_sequences :])
        with self.scope():
            self.bind_same(graph.inputs)
            for k, out in enumerate(graph.outputs):
                inputs = {v for v in ancestors([out]) if v.owner is None}
                varying = [v for v in inputs if not isinstance(v, Constant) and v not in whole]
                name = f"E{number}_{k}"
                dtype = self.emitter._dtype(out)
                if varying:
                    self.source.line(f"{name} = np.empty({self.block}, {dtype})")
                else:
                    self.emit([out])
                    name = f"e{number}_{k}"
                    self.source.line(f"{name} = {dtype}({self.emitter.scalar(out)})")
                self.elements[number, k] = name

    def bind_same(self, inputs: list[Variable]) -> None:
        """Bind the non-sequences of a copy of the body's inputs."""
        for mine, other in zip(self.graph.inputs, inputs, strict=True):
            if mine in self.inner.non_sequences:
                self.emitter.bind_scalar(other, self.emitter.scalar(mine))

    # One block

    def write_rows(self, variables: list[Variable], copies: dict[Variable, Variable]) -> None:
        """Write the reads of rows and past values at step `j` of the block.

        `copies` maps the inputs of the graph in which they are read to the body's own.
        """
        line = self.source.line
        line("t = last - j" if self.reverse else "t = i + j")
        for variable in variables:
            own = copies[variable]
            name = self.source.name("s")
            if own in self.taps:
                part, offset = self.taps[own]
                line(f"{name} = H{part}[j + {self.depths[part] + offset}]")
            elif own in self.parts:
                array, axes = self.parts[own]
                line(f"{name} = {self.item(array, axes, [], 't')}")
            else:
                continue
            self.emitter.bind_scalar(variable, name)

    def needed(self, outputs: list[Variable], blockers: set[Variable]) -> list[Variable]:
        """Return the inputs, other than constants, that `outputs` read."""
        found = ancestors(outputs, blockers=blockers)
        return [
            v
            for v in dict.fromkeys(found)
            if v.owner is None and not isinstance(v, Constant) and v not in self.emitter.values
        ]

    def write_recurrence(self, number: int, recurrence: Recurrence) -> None:
        graph = thaw_graph(recurrence.elements)
        copies = dict(zip(graph.inputs, self.graph.inputs, strict=True))
        varying = {
            k: out
            for k, out in enumerate(graph.outputs)
            if self.elements[number, k].startswith("E")
        }
        if varying:
            with self.source.block("for j in range(n):"), self.scope():
                self.bind_same(graph.inputs)
                self.write_rows(self.needed(list(varying.values()), set()), copies)
                self.emit(list(varying.values()))
                for k, out in varying.items():
                    name = self.elements[number, k]
                    self.source.line(f"{name}[j] = {self.emitter.scalar(out)}")
        kernel = self.kernel(number, recurrence)
        if kernel is not None:
            self.source.line(f"safe = safe & {kernel}")
        else:
            self.write_lookahead(number, recurrence)

    def kernel(self, number: int, recurrence: Recurrence) -> str | None:
        """Return the call of a kernel for one state of depth one, None if none fits."""
        (terms, *more), (constant, *_) = recurrence.terms, recurrence.constants
        (part, *_) = recurrence.parts
        n_terms = [term for term in terms if term.tap == -1]
        if more or len(n_terms) != 1 or len(terms) != 1:
            return None
        dtype = self.nexts[part].type.dtype
        place = f"H{part}, {self.depths[part]}, n"
        bound = None if constant is None else self.elements[number, constant]
        if bound is not None and bound[0] == "e":
            bound = self.filled(bound, dtype)
        factor = terms[0].coefficient
        name = None if factor is None else self.elements[number, factor]
        if recurrence.family in ("maximum", "minimum"):
            function = getattr(steps, recurrence.family)
            return f"{self.function(function, recurrence.family)}({bound}, {place})"
        if recurrence.family == "log-affine" and name is None and dtype in REALS:
            return f"{self.function(logs.logaddexp_steps, 'logs')}({bound}, {place})"
        if recurrence.family != "affine" or dtype not in REALS:
            return None
        if bound is None and name is not None and name[0] == "E":
            return f"{self.function(steps.product, 'product')}({name}, {place})"
        bound = bound or self.filled(f"{self.emitter._dtype(self.nexts[part])}(0)", dtype)
        if name is not None and name[0] == "E":
            return f"{self.function(steps.affine, 'affine')}({name}, {bound}, {place})"
        one = f"{self.emitter._dtype(self.nexts[part])}(1)"
        function = self.function(steps.affine_fixed, "affine_fixed")
        return f"{function}({name or one}, {bound}, {place})"

    def filled(self, value: str, dtype: str) -> str:
        """Write a buffer that holds one number for all steps."""
        name = self.source.name("B")
        self.source.line(f"{name} = np.empty({self.block}, np.{dtype})")
        with self.source.block(f"for j in range({self.block}):"):
            self.source.line(f"{name}[j] = {value}")
        return name

    def function(self, function: Callable, name: str) -> str:
        return self.source.function(function, f"scanlib steps {name} {steps.VERSION}")

    def write_lookahead(self, number: int, recurrence: Recurrence) -> None:
        """Write the scan of a coupled affine recurrence, and the check that it can be trusted."""
        if recurrence.family != "affine":
            self.source.line("safe = False")
            return
        part = recurrence.parts[0]
        dtype = self.emitter._dtype(self.nexts[part])

        def element(k: int, at: str) -> str:
            name = self.elements[number, k]
            return name if name[0] == "e" else f"{name}[{at}]"

        coefficients = {
            term.coefficient
            for terms in recurrence.terms
            for term in terms
            if term.coefficient is not None
        }
        if self.nexts[part].type.dtype in REALS | {"complex64", "complex128"}:
            small = self.function(steps.some_small, "small")
            one = self.source.object("is_small", steps.is_small)
            for k in sorted(coefficients):
                name = self.elements[number, k]
                test = f"{small}({name}, n)" if name[0] == "E" else f"{one}({name})"
                self.source.line(f"safe = safe & (not {test})")
        with self.source.block("if safe:"):
            Lookahead(self.source, recurrence, self.depths).write(element, dtype)
            finite = self.function(steps.all_finite, "finite")
            for part in recurrence.parts:
                self.source.line(f"safe = safe & {finite}(H{part}, {self.depths[part]}, n)")

    def write_sequential(self) -> None:
        """Write the block step by step, with the body as it is."""
        with self.source.block("for j in range(n):"), self.scope():
            nexts = list(self.nexts.values())
            copies = {v: v for v in self.graph.inputs}
            self.write_rows(self.needed(nexts, set()), copies)
            self.emit(nexts)
            for part, value in self.nexts.items():
                place = f"H{part}[j + {self.depths[part]}]"
                self.source.line(f"{place} = {self.emitter.scalar(value)}")

    def write_map(self) -> None:
        """Write what depends on the states, for all steps of the block."""
        n, line = self.signature.n_states, self.source.line
        sums = [i for i, is_sum in enumerate(self.layout.sums) if is_sum]
        values = [self.result.carries[i] for i in sums] + self.result.outputs
        traced = [i for i in range(n) if not self.signature.untraced[i]]
        if not values and not traced:
            return
        with self.source.block("for j in range(n):"), self.scope():
            known = {
                value: part for part, value in self.nexts.items() if value.owner is not None
            }
            used = set(ancestors(values, blockers=set(known)))
            names: dict[int, str] = {}
            for value, part in known.items():
                if value in used or part in traced:
                    names[part] = self.source.name("s")
                    line(f"{names[part]} = H{part}[j + {self.depths[part]}]")
                    self.emitter.bind_scalar(value, names[part])
            copies = {v: v for v in self.graph.inputs}
            self.write_rows(self.needed(values, set(known)), copies)
            self.emit(values)
            for i in traced:
                depth = self.signature.depths[i]
                row = "t" if self.reverse else f"t + {depth}"
                value = names.get(i) or f"H{i}[j + {depth}]"
                line(f"{self.item(f'h{i}', self.layout.states[i], [], row)} = {value}")
            for i in sums:
                dtype = self.emitter._dtype(self.result.carries[i])
                line(f"c{i} = {dtype}(c{i} + {self.emitter.scalar(self.result.carries[i])})")
            for i, value in enumerate(self.result.outputs):
                place = self.item(f"z{i}", self.layout.outputs[i], [], "t")
                line(f"{place} = {self.emitter.scalar(value)}")

    # After the last step

    def history(self, i: int) -> str:
        if not self.signature.untraced[i]:
            return f"h{i}"
        initial, depth = self.outer.initials[i], self.signature.depths[i]
        self.source.line(f"o{i} = np.empty({initial}.shape, {initial}.dtype)")
        place = f"{depth - 1} - j" if self.reverse else "j"
        with self.source.block(f"for j in range({depth}):"):
            item = self.item(f"o{i}", self.layout.states[i], [], "j")
            self.source.line(f"{item} = H{i}[{place}]")
        return f"o{i}"

    def final_carry(self, i: int) -> str:
        n, axes = self.signature.n_states, self.layout.carries[i]
        value = f"H{n + i}[0]" if n + i in self.depths else f"c{i}"
        if not axes:
            return f"np.asarray({value})"
        name = f"o{n + i}"
        self.source.line(f"{name} = np.empty({self.outer.carries[i]}.shape, "
                         f"{self.outer.carries[i]}.dtype)")
        self.source.line(f"{self.item(name, axes, [])} = {value}")
        return name
