"""Blocks of steps of one channel: elements, scan, map.

A loop of one channel, or of a few, whose parts all belong to recurrence families is run in blocks
of steps. The channels of a block take turns:

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
from contextlib import ExitStack
from typing import Any

import numpy as np
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors

from scanlib.backends.numba.elemwise import lanes, steps, sums
from scanlib.backends.numba.elemwise.lookahead import Lookahead
from scanlib.backends.numba.elemwise.storage import REALS, BlockStorage
from scanlib.ops.elemwise_scan import Recurrence

KERNELS: dict[tuple[str, bool], Callable[..., Any]] = {**steps.KERNELS, **sums.KERNELS}


class BlockWriter(BlockStorage):
    """Writes an elementwise loop of one channel, or of a few, in blocks of steps."""

    def write(self) -> tuple[Callable, str | None]:
        self.write_checks()
        self.write_storage()
        if not self.indices:
            self.write_constants()
        self.write_blocks()
        self.write_return()
        return self.source.compile("scan_loop", self.arguments, self.version)

    def write_blocks(self, first: str = "0", last: str = "steps") -> None:
        """Write the loop over all blocks, or over those of some steps."""
        line = self.source.line
        line(f"i = {first}")
        with self.source.block(f"while i < {last}:"):
            line(f"n = least({self.block}, {last} - i)")
            line("low = steps - i - n" if self.reverse else "low = i")
            with ExitStack() as stack:
                target = self.plan.targets[0]
                for axis, index in enumerate(self.indices):
                    size = self.sizes[id(target), axis]
                    stack.enter_context(self.source.block(f"for {index} in range({size}):"))
                if self.indices:
                    self.write_constants()
                self.write_block()
            line("i += n")

    def write_block(self) -> None:
        """Write one block of one channel."""
        self.source.line("safe = True")
        self.write_views()
        for number, recurrence in enumerate(self.lowered.recurrences):
            self.write_recurrence(number, recurrence)
        if self.sums_first:
            with self.source.block("if safe:"):
                for part in self.sums_first:
                    self.source.line(f"kept{part} = late{part}")
        with self.source.block("if not safe:"):
            self.write_sequential()
        self.write_map()
        self.move_on()

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
        self.write_elements(number)
        if recurrence.family == "affine in squares":
            self.write_squares(number, recurrence)
            return
        if recurrence.parts[0] in self.sums_first:
            self.write_sums_first(number, recurrence)
            return
        kernel = self.kernel(number, recurrence)
        if kernel is not None:
            self.source.line(f"safe = safe & {kernel}")
        else:
            self.write_lookahead(number, recurrence)

    def write_elements(self, number: int) -> None:
        """Write the elements of a recurrence for all steps of the block."""
        inputs, outputs, scanned = self.elements_of(number)
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

    def bind_scanned(self, scanned: dict[Variable, int]) -> None:
        """Write the reads of next values that have been scanned."""
        for value, part in scanned.items():
            name = self.source.name("s")
            self.source.line(f"{name} = {self.value(part, 0)}")
            self.emitter.bind_scalar(value, name)

    def write_sums_first(self, number: int, recurrence: Recurrence) -> None:
        """Write the scan of the sums of a state and its addend."""
        (part,), ((term,),) = recurrence.parts, recurrence.terms
        assert term.coefficient is not None
        assert recurrence.constants[0] is not None
        factor = self.elements[number, term.coefficient]
        addend = self.elements[number, recurrence.constants[0]]
        if addend[0] == "e":
            addend = self.filled(addend, self.nexts[part].type.dtype)
        name = self.function("sums_first" if factor[0] == "E" else "sums_first_fixed")
        call = f"{name}({factor}, {addend}, T{part}, n, kept{part}, {self.ahead(number)})"
        self.source.line(f"late{part}, trusted = {call}")
        self.source.line("safe = safe & trusted")

    def write_squares(self, number: int, recurrence: Recurrence) -> None:
        """Write the scan of a state's square, and the roots."""
        line, (part,) = self.source.line, recurrence.parts
        dtype = self.nexts[part].type.dtype
        depth = self.depths[part]
        squares = self.source.name("V")
        line(f"{squares} = new_array(np.{dtype}, {self.block + depth})")
        before, first = ("n", 0) if self.reverse else (f"{depth - 1}", depth)
        line(f"{squares}[{before}] = H{part}[{before}] * H{part}[{before}]")
        kernel = self.kernel(number, recurrence, squares)
        line(f"safe = safe & {kernel}")
        line("negative = 0")
        with self.source.block("for j in range(n):"):
            line(f"negative += not ({squares}[j + {first}] >= 0)")
            line(f"H{part}[j + {first}] = np.sqrt({squares}[j + {first}])")
        line("safe = safe & (negative == 0)")

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
        ahead = self.ahead(number)
        if recurrence.family == "clamp":
            return self.clamp(number, recurrence, place)
        bound = None if constant is None else self.elements[number, constant]
        if bound is not None and bound[0] == "e":
            bound = self.filled(bound, dtype)
        factor = terms[0].coefficient
        name = None if factor is None else self.elements[number, factor]
        if recurrence.family in ("maximum", "minimum"):
            return f"{self.function(recurrence.family)}({bound}, {place}, {ahead})"
        if recurrence.family == "log-affine" and dtype in REALS:
            if name is None:
                return f"{self.function('logaddexp')}({bound}, {place})"
            shift = name if name[0] == "E" else self.filled(name, dtype)
            return f"{self.function('logaddexp_shifted')}({shift}, {bound}, {place})"
        if not recurrence.family.startswith("affine") or dtype not in REALS:
            return None
        if bound is None and name is not None and name[0] == "E":
            return f"{self.function('product')}({name}, {place}, {ahead})"
        bound = bound or self.filled(f"{self.emitter._dtype(self.nexts[part])}(0)", dtype)
        if name is not None and name[0] == "E":
            return f"{self.function('affine')}({name}, {bound}, {place}, {ahead})"
        one = f"{self.emitter._dtype(self.nexts[part])}(1)"
        return f"{self.function('affine_fixed')}({name or one}, {bound}, {place}, {ahead})"

    def ahead(self, number: int) -> str:
        """Return what the scan of a recurrence asks for: what the next block reads and writes.

        The first scan does it for all; the rows of several channels lie apart.
        """
        if self.indices or number > 0:
            return "()"
        dtype = self.nexts[self.lowered.recurrences[0].parts[0]].type.dtype
        size = np.dtype(dtype).itemsize  # the scan moves on by so many bytes at every step
        views = {f"X{i}": row for i, row in enumerate(self.inner.rows)}
        views |= {f"Z{i}": value for i, value in enumerate(self.result.outputs)}
        views |= {f"H{part}": self.nexts[part] for part in self.depths if self.is_direct(part)}
        names = [name for name, v in views.items() if np.dtype(v.type.dtype).itemsize == size]
        place = self.source.object("place_ahead", lanes.place_ahead[self.reverse])
        return f"({', '.join(f'{place}({name}, n)' for name in names)},)" if names else "()"

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
        name = self.source.name("filled")
        self.source.line(f"{name} = new_array(np.{dtype}, {self.block})")
        with self.source.block(f"for j in range({self.block}):"):
            self.source.line(f"{name}[j] = {value}")
        return name

    def function(self, name: str) -> str:
        """Register the kernel of that name for the direction of the loop."""
        direction = "backward" if self.reverse else "forward"
        key = f"scanlib steps {name} {direction} {steps.VERSION}"
        return self.source.function(KERNELS[name, self.reverse], key)

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
            sums = {part: found.total for part, found in self.sums_first.items()}
            nexts = [*self.nexts.values(), *sums.values()]
            self.write_rows(self.needed(nexts, set()), {v: v for v in self.graph.inputs})
            self.emit(nexts)
            for part, total in sums.items():
                self.source.line(f"T{part}[j] = {self.emitter.scalar(total)}")
            values = [(part, self.emitter.scalar(value)) for part, value in self.nexts.items()]
            for part, name in values:
                self.source.line(f"{self.value(part, 0)} = {name}")

    def write_map(self) -> None:
        """Write what depends on the states, for all steps of the block."""
        line = self.source.line
        sums = [i for i, is_sum in enumerate(self.layout.sums) if is_sum]
        scanned = {self.output_of_sums(part) for part in self.sums_first}
        outputs = {k: v for k, v in enumerate(self.result.outputs) if k not in scanned}
        values = [*(self.result.carries[i] for i in sums), *outputs.values()]
        traced = [
            i
            for i in range(self.signature.n_states)
            if not self.signature.untraced[i] and not self.is_direct(i)
        ]
        if not values and not traced:
            return
        with self.source.block("for j in range(n):"), self.scope():
            known = self.scanned_values()
            used = set(ancestors(values, blockers=set(known)))
            for value, text in known.items():
                if value in used:
                    name = self.source.name("s")
                    line(f"{name} = {text}")
                    self.emitter.bind_scalar(value, name)
            self.write_rows(self.needed(values, set(known)), {v: v for v in self.graph.inputs})
            self.emit(values)
            for i in traced:
                line(f"S{i}[j] = {self.value(i, 0)}")
            for i in sums:
                dtype = self.emitter._dtype(self.result.carries[i])
                total = f"t{i}" if self.layout.carries[i] else f"c{i}"
                line(f"{total} = {dtype}({total} + {self.emitter.scalar(self.result.carries[i])})")
            for i, value in outputs.items():
                line(f"Z{i}[j] = {self.emitter.scalar(value)}")

    def scanned_values(self) -> dict[Variable, str]:
        """Return where the values of step `j` are that have been scanned."""
        values = {found.total: f"T{part}[j]" for part, found in self.sums_first.items()}
        for part, value in self.nexts.items():
            if value.owner is not None and part not in self.sums_first:
                values[value] = self.value(part, 0)
        return values
