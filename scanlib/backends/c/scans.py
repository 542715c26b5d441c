"""The scans of one block of steps: which kernel fits a recurrence, and its call."""

from __future__ import annotations

import numpy as np
from pytensor.graph.basic import Variable

from scanlib.backends.c.channels import ChannelsPrinter
from scanlib.backends.c.lookahead import Lookahead
from scanlib.backends.c.source import c_type
from scanlib.ops.elemwise_scan import BLOCK, ElemwiseScan, Recurrence
from scanlib.ops.sums_first import elements_with_addend, sums_first

REALS = {"float32", "float64"}


class BlockScans(ChannelsPrinter):
    """What a block needs, and how its recurrences are scanned.

    In the code, ``H0[j]`` is a value of the first part (states count before carries), ``E1_0`` an
    element of the second recurrence at all steps of the block, ``e1_0`` one that never changes. Of
    a part whose sum comes first (`scanlib.ops.sums_first`), ``T0[j]`` are the sums, in an output or
    in a buffer, and ``kept0`` is the value before the block.
    """

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
        self.sums_first = sums_first(op, self.graph)
        self.bytes = 0  # of buffers

    def elements_of(
        self, number: int
    ) -> tuple[list[Variable], list[Variable], dict[Variable, int]]:
        """Return what the scan of a recurrence needs: see `ElemwiseScan.elements_of`."""
        first = self.op.recurrences[number].parts[0] in self.sums_first
        return elements_with_addend(self.op, number) if first else self.op.elements_of(number)

    def output_of_sums(self, part: int) -> int | None:
        """Return the output that is the sums of a part, if these can be scanned there."""
        total = self.sums_first[part].total
        outputs = [] if self.layout.ndim else self.result.outputs
        return next((k for k, value in enumerate(outputs) if value is total), None)

    def is_direct(self, part: int) -> bool:
        """Whether a part is scanned in its history; others are in a buffer of one block."""
        if part >= self.signature.n_states or self.signature.untraced[part]:
            return False
        return self.layout.ndim == 0

    def dtype_of(self, part: int) -> str:
        return self.nexts[part].type.dtype

    def buffer(self, name: str, dtype: str, items: int) -> None:
        """Write the declaration of a buffer."""
        self.source.line(f"{c_type(dtype)} *{name} = ({c_type(dtype)} *)(memory + {self.bytes});")
        self.bytes += -(-items * np.dtype(dtype).itemsize // 64) * 64

    def place_of(self, part: int, offset: int) -> int:
        """Return how far from ``H[j]`` the value `offset` steps after step `j` is."""
        return -offset if self.reverse else self.depths[part] + offset

    def value(self, part: int, offset: int) -> str:
        if part in self.sums_first:
            return f"kept{part}"
        return f"H{part}[j + {self.place_of(part, offset)}]"

    def kernel(self, number: int, recurrence: Recurrence, values: str | None = None) -> str | None:
        """Return the call of a kernel for one state of depth one, None if none fits.

        `values` is where the new values go, if not where the part's are.
        """
        (terms, *more), (part, *_) = recurrence.terms, recurrence.parts
        dtype, family = self.dtype_of(part), recurrence.family
        if more or len(terms) != 1 or terms[0].tap != -1:
            return None
        item = c_type(dtype)
        back = "true" if self.reverse else "false"
        place = f"{values or f'H{part} + {self.place_of(part, 0)}'}, n"
        ahead = f"{place}, {self.ahead(number)}"
        if family == "clamp":
            names = [terms[0].coefficient, *recurrence.constants]
            neutral = f"{item}(0)", f"{item}(-NPY_INFINITY)", f"{item}(NPY_INFINITY)"
            pairs = zip(names, neutral, strict=True)
            arrays = [self.array(number, k, dtype, otherwise) for k, otherwise in pairs]
            return f"scanlib_clamp<{back}>({', '.join(arrays)}, {place})"
        (constant, *_) = recurrence.constants
        if family in ("maximum", "minimum"):
            bound = self.array(number, constant, dtype, "0")
            return f"scanlib_pick<{back}, scanlib_{family}>({bound}, {ahead})"
        if dtype not in REALS:
            return None
        if family == "log-affine":
            return self.log_affine(number, recurrence, place)
        factor = terms[0].coefficient
        name = f"{item}(1)" if factor is None else self.elements[number, factor]
        if constant is None and name[0] == "E":
            return f"scanlib_product<{back}>({name}, {ahead})"
        bound = self.array(number, constant, dtype, f"{item}(0)")
        return f"scanlib_affine<{back}>({_coefficients(name, item)}, {bound}, {ahead})"

    def sums_kernel(self, number: int, recurrence: Recurrence) -> str:
        """Return the call of the kernel that scans the sums of a state and its addend."""
        (part,), ((term,),), (constant,) = recurrence.parts, recurrence.terms, recurrence.constants
        dtype = self.dtype_of(part)
        assert term.coefficient is not None
        factor = _coefficients(self.elements[number, term.coefficient], c_type(dtype))
        addend = self.array(number, constant, dtype, "0")
        back = "true" if self.reverse else "false"
        place = f"T{part}, n, kept{part}, &late{part}, {self.ahead(number)}"
        return f"scanlib_sums_first<{back}>({factor}, {addend}, {place})"

    def ahead(self, number: int) -> str:
        """Return what the scan of a recurrence asks for: what the next block reads and writes.

        The first scan does it for all; the rows of several channels lie apart.
        """
        if self.layout.ndim or number > 0:
            return "scanlib_ahead<0>()"
        # The scan moves on by so many bytes at every step.
        size = np.dtype(self.dtype_of(self.op.recurrences[0].parts[0])).itemsize
        views = {f"X{i}": row for i, row in enumerate(self.inner.rows)}
        views |= {f"Z{i}": value for i, value in enumerate(self.result.outputs)}
        views |= {f"H{part}": self.nexts[part] for part in self.depths if self.is_direct(part)}
        names = [name for name, v in views.items() if np.dtype(v.type.dtype).itemsize == size]
        back = "true" if self.reverse else "false"
        places = ", ".join(f"scanlib_next<{back}>({name}, n)" for name in names)
        return f"scanlib_ahead<{len(names)}>{{{{{places}}}}}"

    def log_affine(self, number: int, recurrence: Recurrence, place: str) -> str:
        """Return the call of the kernel of logarithms, for which buffers are declared."""
        dtype, shift = self.dtype_of(recurrence.parts[0]), recurrence.terms[0][0].coefficient
        bound = self.array(number, recurrence.constants[0], dtype, "0")
        plus = f"({c_type(dtype)} *)NULL"
        if shift is not None:
            plus = self.array(number, shift, dtype, "0")
        work = self.source.name("W")
        self.buffer(work, dtype, 3 * self.block)
        self.scalars.vectors[dtype] = None
        types = f"{'true' if self.reverse else 'false'}, scanlib_vector_{dtype}"
        return f"scanlib_log_affine<{types}>({plus}, {bound}, {place}, {work})"

    def array(self, number: int, element: int | None, dtype: str, otherwise: str) -> str:
        """Return an element as an array of all steps of the block; `otherwise` if there is none."""
        value = otherwise if element is None else self.elements[number, element]
        if value[0] == "E":
            return f"(const {c_type(dtype)} *){value}"
        name = self.source.name("F")
        self.buffer(name, dtype, self.block)
        self.source.line(f"for (npy_intp j = 0; j < n; j++) {name}[j] = {value};")
        return f"(const {c_type(dtype)} *){name}"

    def write_lookahead(self, number: int, recurrence: Recurrence) -> None:
        """Write the scan of a coupled affine recurrence, and the check that it can be trusted."""
        dtype = self.dtype_of(recurrence.parts[0])
        line, real = self.source.line, np.dtype(dtype).kind == "f"

        def element(k: int, at: str) -> str:
            name = self.elements[number, k]
            return name if name[0] == "e" else f"{name}[{at}]"

        used = {term.coefficient for terms in recurrence.terms for term in terms}
        for k in sorted(k for k in used if k is not None) if real else ():
            name = self.elements[number, k]
            test = f"scanlib_some_extreme({name}, n)"
            line(f"safe &= !{test if name[0] == 'E' else f'scanlib_extreme({name})'};")
        with self.source.block("if (safe)"):
            item = c_type(dtype)
            Lookahead(self.source, recurrence, self.depths, self.reverse, element, item).write()
            for part in recurrence.parts if real else ():
                line(f"safe &= scanlib_all_moderate(H{part}, n + {self.depths[part]});")

    def write_squares(self, number: int, recurrence: Recurrence) -> None:
        """Write the scan of a state's square, and the roots."""
        line, (part,) = self.source.line, recurrence.parts
        squares, first = self.source.name("V"), 0 if self.reverse else 1
        self.buffer(squares, self.dtype_of(part), self.block + 1)
        before = self.value(part, -1).replace("j + ", "n - 1 + " if self.reverse else "")
        line(f"{squares}[{'n' if self.reverse else '0'}] = {before} * {before};")
        line(f"if (safe) safe = {self.kernel(number, recurrence, f'{squares} + {first}')};")
        with self.source.block("if (safe)"):
            line("int negative = 0;")
            line("#pragma omp simd reduction(+ : negative)")
            with self.source.block("for (npy_intp j = 0; j < n; j++)"):
                line(f"const {c_type(self.dtype_of(part))} square = {squares}[j + {first}];")
                line("negative += !(square >= 0);")
                line(f"{self.value(part, 0)} = sqrt(square);")
            line("safe = !negative;")


def _coefficients(name: str, item: str) -> str:
    """Return the coefficients of a recurrence as its kernels take them."""
    kind = "each" if name[0] == "E" else "same"
    return f"scanlib_{kind}<{item}>{{{name}}}"
