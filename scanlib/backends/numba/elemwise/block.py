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

import numpy as np
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors

from scanlib._compat import thaw_graph
from scanlib.backends.numba.contiguous import contiguous_rows
from scanlib.backends.numba.elemwise import steps
from scanlib.backends.numba.elemwise.base import ElemwiseWriter
from scanlib.backends.numba.elemwise.lookahead import Lookahead
from scanlib.ops.elemwise_scan import ElemwiseScan, Recurrence

BLOCK = 1024  # steps: a few buffers fit the first-level cache, and a block is worth starting
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
        self.depths = {part: self.signature.depths[part] if part < n else 1 for part in recurrent}
        self.block = max([BLOCK, *self.depths.values()])
        self.elements: dict[tuple[int, int], str] = {}
        self.source.object("contiguous_rows", contiguous_rows)

    def write(self) -> tuple[Callable, str | None]:
        self.write_checks()
        self.write_storage()
        line = self.source.line
        line("i = 0")
        with self.source.block("while i < steps:"):
            line(f"n = min({self.block}, steps - i)")
            line("low = steps - i - n" if self.reverse else "low = i")
            line("safe = True")
            self.write_views()
            for number, recurrence in enumerate(self.lowered.recurrences):
                self.write_recurrence(number, recurrence)
            with self.source.block("if not safe:"):
                self.write_sequential()
            self.write_map()
            if not self.reverse:
                self.move_on()
            line("i += n")
        self.write_return()
        return self.source.compile("scan_loop", self.arguments, self.version)

    def is_direct(self, part: int) -> bool:
        """Whether a part is scanned in its history; others are in a buffer of one block."""
        n = self.signature.n_states
        return part < n and not self.signature.untraced[part] and not self.layout.states[part]

    # Storage

    def write_storage(self) -> None:
        line, n = self.source.line, self.signature.n_states
        line("capacity = steps")
        for i in range(n):
            self.write_state_storage(i)
        for i, carry in enumerate(self.inner.carries):
            outer, axes = self.outer.carries[i], self.layout.carries[i]
            dtype = self.emitter._dtype(carry)
            item = self.item(outer, axes, []) if axes else f"as_scalar({outer})"
            if n + i in self.depths:
                line(f"B{n + i} = np.empty({self.block + 1}, {dtype})")
                line(f"B{n + i}[0] = {item}")
            else:
                line(f"c{i} = {item}")
        for i, (out, axes) in enumerate(zip(self.result.outputs, self.layout.outputs, strict=True)):
            sizes = ", ".join(["steps", *("1" for _ in axes)])
            line(f"z{i} = np.empty(({sizes},), {self.emitter._dtype(out)})")
            line(f"advise(z{i})")
        for variable in self.inner.non_sequences:
            array, axes = self.parts[variable]
            name = self.source.name("w")
            item = self.item(array, axes, []) if axes else f"as_scalar({array})"
            line(f"{name} = {item}")
            self.emitter.bind_scalar(variable, name)
        for i, row in enumerate(self.inner.rows):
            line(f"R{i} = np.empty({self.block}, {self.emitter._dtype(row)})")
        for number, recurrence in enumerate(self.lowered.recurrences):
            self.write_buffers(number, recurrence)

    def write_state_storage(self, i: int) -> None:
        line, initial, depth = self.source.line, self.outer.initials[i], self.signature.depths[i]
        dtype, axes = self.emitter._dtype(self.inner.taps[i][0]), self.layout.states[i]
        item = self.item(initial, axes, [], "j")
        if not self.is_direct(i):
            line(f"B{i} = np.empty({self.block + depth}, {dtype})")
            with self.source.block(f"for j in range({depth}):"):
                line(f"B{i}[j] = {item}")
        if not self.signature.untraced[i]:
            line(f"h{i} = np.empty((steps + {depth},) + {initial}.shape[1:], {dtype})")
            line(f"advise(h{i})")
            row = "steps + j" if self.reverse else "j"
            with self.source.block(f"for j in range({depth}):"):
                line(f"{self.item(f'h{i}', axes, [], row)} = {item}")

    def write_buffers(self, number: int, recurrence: Recurrence) -> None:
        """Compute elements that are the same at every step; make buffers for the others."""
        graph = thaw_graph(recurrence.elements)
        whole = set(graph.inputs[len(graph.inputs) - self.signature.n_non_sequences :])
        with self.scope():
            self.bind_same(graph.inputs)
            for k, out in enumerate(graph.outputs):
                inputs = {v for v in ancestors([out]) if v.owner is None}
                varying = [v for v in inputs if not isinstance(v, Constant) and v not in whole]
                name, dtype = f"E{number}_{k}", self.emitter._dtype(out)
                if not varying:
                    self.emit([out])
                    name = f"e{number}_{k}"
                    self.source.line(f"{name} = {dtype}({self.emitter.scalar(out)})")
                elif out not in graph.inputs:
                    self.source.line(f"{name} = np.empty({self.block}, {dtype})")
                self.elements[number, k] = name

    def bind_same(self, inputs: list[Variable]) -> None:
        """Bind the non-sequences of a copy of the body's inputs."""
        for mine, other in zip(self.graph.inputs, inputs, strict=True):
            if mine in self.inner.non_sequences:
                self.emitter.bind_scalar(other, self.emitter.scalar(mine))

    # One block. `j` counts steps in the order of memory, also where the loop walks backwards.

    def write_views(self) -> None:
        """Write the parts of rows, histories and outputs that belong to the block."""
        line = self.source.line
        for i, axes in enumerate(self.layout.sequences):
            name = self.outer.sequences[i]
            if axes:
                with self.source.block("for j in range(n):"):
                    line(f"R{i}[j] = {self.item(name, axes, [], 'low + j')}")
                line(f"X{i} = R{i}")
            else:
                line(f"X{i} = contiguous_rows({name}[low:low + n], R{i})")
        for part, depth in self.depths.items():
            if self.is_direct(part):
                line(f"H{part} = h{part}[low:low + n + {depth}]")
                continue
            line(f"H{part} = B{part}")
            if self.reverse:
                # The newest rows of the block before come first; they move behind this block.
                with self.source.block(f"for j in range({depth}):"):
                    line(f"B{part}[n + {depth - 1} - j] = B{part}[{depth - 1} - j]")
        for i, axes in enumerate(self.layout.outputs):
            if not axes:
                line(f"Z{i} = z{i}[low:low + n]")

    def move_on(self) -> None:
        """Move the newest rows of the block in front of the next one."""
        for part, depth in self.depths.items():
            if not self.is_direct(part):
                with self.source.block(f"for j in range({depth}):"):
                    self.source.line(f"B{part}[j] = B{part}[n + j]")

    def value(self, part: int, offset: int) -> str:
        """Return where the value of a part is, `offset` steps after step `j`."""
        place = -offset if self.reverse else self.depths[part] + offset
        return f"H{part}[j + {place}]"

    def write_rows(self, variables: list[Variable], copies: dict[Variable, Variable]) -> None:
        """Write the reads of rows and past values at step `j` of the block.

        `copies` maps the inputs of the graph in which they are read to the body's own.
        """
        for variable in variables:
            own = copies[variable]
            if own in self.taps:
                text = self.value(*self.taps[own])
            elif own in self.inner.rows:
                text = f"X{self.inner.rows.index(own)}[j]"
            else:
                continue
            name = self.source.name("s")
            self.source.line(f"{name} = {text}")
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
        inputs, outputs, scanned = self.lowered.elements_of(number)
        copies = dict(zip(inputs, self.graph.inputs, strict=True))
        computed = {}
        for k, out in enumerate(outputs):
            name = self.elements[number, k]
            if name[0] == "e":
                continue
            if out in copies:
                self.source.line(f"{name} = {self.view(copies[out])}")
            else:
                computed[k] = out
        if computed:
            with self.source.block("for j in range(n):"), self.scope():
                self.bind_same(inputs)
                self.bind_scanned(scanned)
                self.write_rows(self.needed(list(computed.values()), set(scanned)), copies)
                self.emit(list(computed.values()))
                for k, out in computed.items():
                    name = self.elements[number, k]
                    self.source.line(f"{name}[j] = {self.emitter.scalar(out)}")
        if recurrence.family == "affine in squares":
            self.write_squares(number, recurrence)
            return
        kernel = self.kernel(number, recurrence)
        if kernel is not None:
            self.source.line(f"safe = safe & {kernel}")
        else:
            self.write_lookahead(number, recurrence)

    def bind_scanned(self, scanned: dict[Variable, int]) -> None:
        """Write the reads of next values that have been scanned."""
        for value, part in scanned.items():
            name = self.source.name("s")
            self.source.line(f"{name} = {self.value(part, 0)}")
            self.emitter.bind_scalar(value, name)

    def write_squares(self, number: int, recurrence: Recurrence) -> None:
        """Write the scan of a state's square, and the roots."""
        line, (part,) = self.source.line, recurrence.parts
        dtype = self.nexts[part].type.dtype
        depth = self.depths[part]
        squares = self.source.name("V")
        line(f"{squares} = np.empty({self.block + depth}, np.{dtype})")
        before, first = ("n", 0) if self.reverse else (f"{depth - 1}", depth)
        line(f"{squares}[{before}] = H{part}[{before}] * H{part}[{before}]")
        kernel = self.kernel(number, recurrence, squares)
        line(f"safe = safe & {kernel}")
        line("negative = 0")
        with self.source.block("for j in range(n):"):
            line(f"negative += not ({squares}[j + {first}] >= 0)")
            line(f"H{part}[j + {first}] = np.sqrt({squares}[j + {first}])")
        line("safe = safe & (negative == 0)")

    def view(self, own: Variable) -> str:
        """Return the values of a row or a past value during the block, as an array."""
        if own in self.inner.rows:
            return f"X{self.inner.rows.index(own)}"
        part, offset = self.taps[own]
        place = -offset if self.reverse else self.depths[part] + offset
        return f"H{part}[{place}:{place} + n]"

    def kernel(self, number: int, recurrence: Recurrence, values: str | None = None) -> str | None:
        """Return the call of a kernel for one state of depth one, None if none fits.

        `values` is the buffer that is scanned, if it is not the part's own.
        """
        (terms, *more), (constant, *_) = recurrence.terms, recurrence.constants
        (part, *_) = recurrence.parts
        n_terms = [term for term in terms if term.tap == -1]
        if more or len(n_terms) != 1 or len(terms) != 1:
            return None
        dtype = self.nexts[part].type.dtype
        place = f"{values or f'H{part}'}, {0 if self.reverse else self.depths[part]}, n"
        if recurrence.family == "clamp":
            return self.clamp(number, recurrence, place)
        bound = None if constant is None else self.elements[number, constant]
        if bound is not None and bound[0] == "e":
            bound = self.filled(bound, dtype)
        factor = terms[0].coefficient
        name = None if factor is None else self.elements[number, factor]
        if recurrence.family in ("maximum", "minimum"):
            return f"{self.function(recurrence.family)}({bound}, {place})"
        if recurrence.family == "log-affine" and dtype in REALS:
            if name is None:
                return f"{self.function('logaddexp')}({bound}, {place})"
            shift = name if name[0] == "E" else self.filled(name, dtype)
            return f"{self.function('logaddexp_shifted')}({shift}, {bound}, {place})"
        if not recurrence.family.startswith("affine") or dtype not in REALS:
            return None
        if bound is None and name is not None and name[0] == "E":
            return f"{self.function('product')}({name}, {place})"
        bound = bound or self.filled(f"{self.emitter._dtype(self.nexts[part])}(0)", dtype)
        if name is not None and name[0] == "E":
            return f"{self.function('affine')}({name}, {bound}, {place})"
        one = f"{self.emitter._dtype(self.nexts[part])}(1)"
        return f"{self.function('affine_fixed')}({name or one}, {bound}, {place})"

    def clamp(self, number: int, recurrence: Recurrence, place: str) -> str:
        """Return the call of the kernel for clamped shifts; what is left out does nothing."""
        (part,) = recurrence.parts
        dtype = self.nexts[part].type.dtype
        elements = (recurrence.terms[0][0].coefficient, *recurrence.constants)
        neutral = (f"np.{dtype}(0)", f"np.{dtype}(-np.inf)", f"np.{dtype}(np.inf)")
        names = []
        for element, otherwise in zip(elements, neutral, strict=True):
            name = otherwise if element is None else self.elements[number, element]
            names.append(name if name[0] == "E" else self.filled(name, dtype))
        return f"{self.function('clamp')}({', '.join(names)}, {place})"

    def filled(self, value: str, dtype: str) -> str:
        """Write a buffer that holds one number for all steps."""
        name = self.source.name("B")
        self.source.line(f"{name} = np.empty({self.block}, np.{dtype})")
        with self.source.block(f"for j in range({self.block}):"):
            self.source.line(f"{name}[j] = {value}")
        return name

    def function(self, name: str) -> str:
        """Register the kernel of that name for the direction of the loop."""
        direction = "backward" if self.reverse else "forward"
        key = f"scanlib steps {name} {direction} {steps.VERSION}"
        return self.source.function(steps.KERNELS[name, self.reverse], key)

    def write_lookahead(self, number: int, recurrence: Recurrence) -> None:
        """Write the scan of a coupled affine recurrence, and the check that it can be trusted."""
        part = recurrence.parts[0]
        real = np.dtype(self.nexts[part].type.dtype).kind in "fc"
        if recurrence.family != "affine":
            self.source.line("safe = False")
            return

        def element(k: int, at: str) -> str:
            name = self.elements[number, k]
            return name if name[0] == "e" else f"{name}[{at}]"

        used = {term.coefficient for terms in recurrence.terms for term in terms}
        if real:
            some = self.source.function(steps.some_extreme, f"scanlib extreme {steps.VERSION}")
            one = self.source.object("is_extreme", steps.is_extreme)
            for k in sorted(k for k in used if k is not None):
                name = self.elements[number, k]
                test = f"{some}({name}, n)" if name[0] == "E" else f"{one}({name})"
                self.source.line(f"safe = safe & (not {test})")
        with self.source.block("if safe:"):
            dtype = self.emitter._dtype(self.nexts[part])
            Lookahead(self.source, recurrence, self.depths, self.reverse).write(element, dtype)
            finite = self.source.function(steps.all_moderate, f"scanlib moderate {steps.VERSION}")
            for part in recurrence.parts if real else ():
                self.source.line(f"safe = safe & {finite}(H{part}, 0, n + {self.depths[part]})")

    def write_sequential(self) -> None:
        """Write the block step by step, with the body as it is."""
        with self.source.block("for k in range(n):"), self.scope():
            self.source.line("j = n - 1 - k" if self.reverse else "j = k")
            nexts = list(self.nexts.values())
            self.write_rows(self.needed(nexts, set()), {v: v for v in self.graph.inputs})
            self.emit(nexts)
            values = [(part, self.emitter.scalar(value)) for part, value in self.nexts.items()]
            for part, name in values:
                self.source.line(f"{self.value(part, 0)} = {name}")

    def write_map(self) -> None:
        """Write what depends on the states, for all steps of the block."""
        line = self.source.line
        sums = [i for i, is_sum in enumerate(self.layout.sums) if is_sum]
        values = [self.result.carries[i] for i in sums] + self.result.outputs
        traced = [
            i
            for i in range(self.signature.n_states)
            if not self.signature.untraced[i] and not self.is_direct(i)
        ]
        if not values and not traced:
            return
        with self.source.block("for j in range(n):"), self.scope():
            known = {v: part for part, v in self.nexts.items() if v.owner is not None}
            used = set(ancestors(values, blockers=set(known)))
            for value, part in known.items():
                if value in used:
                    name = self.source.name("s")
                    line(f"{name} = {self.value(part, 0)}")
                    self.emitter.bind_scalar(value, name)
            self.write_rows(self.needed(values, set(known)), {v: v for v in self.graph.inputs})
            self.emit(values)
            for i in traced:
                row = "low + j" if self.reverse else f"low + j + {self.signature.depths[i]}"
                place = self.item(f"h{i}", self.layout.states[i], [], row)
                line(f"{place} = {self.value(i, 0)}")
            for i in sums:
                dtype = self.emitter._dtype(self.result.carries[i])
                line(f"c{i} = {dtype}(c{i} + {self.emitter.scalar(self.result.carries[i])})")
            for i, value in enumerate(self.result.outputs):
                axes = self.layout.outputs[i]
                place = self.item(f"z{i}", axes, [], "low + j") if axes else f"Z{i}[j]"
                line(f"{place} = {self.emitter.scalar(value)}")

    # After the last step

    def history(self, i: int) -> str:
        if not self.signature.untraced[i]:
            return f"h{i}"
        initial = self.outer.initials[i]
        self.source.line(f"o{i} = np.empty({initial}.shape, {initial}.dtype)")
        with self.source.block(f"for j in range({self.signature.depths[i]}):"):
            item = self.item(f"o{i}", self.layout.states[i], [], "j")
            self.source.line(f"{item} = B{i}[j]")
        return f"o{i}"

    def final_carry(self, i: int) -> str:
        n, axes, outer = self.signature.n_states, self.layout.carries[i], self.outer.carries[i]
        value = f"B{n + i}[0]" if n + i in self.depths else f"c{i}"
        if not axes:
            return f"np.asarray({value})"
        self.source.line(f"o{n + i} = np.empty({outer}.shape, {outer}.dtype)")
        self.source.line(f"{self.item(f'o{n + i}', axes, [])} = {value}")
        return f"o{n + i}"
