"""Kernels of the log and tropical semirings."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from scanlib.backends.numba.linear_base import LinearBase
from scanlib.backends.numba.scalar import vector_function


class TermsWriter(LinearBase):
    """Writes products in which the terms are sums."""

    def write_terms_step(self) -> None:
        with ExitStack() as stack:
            self.write_views(stack)
            if self.uses_exponentials():
                self.write_log_vector()
            else:
                self.write_term_by_term()

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

    def write_log_vector(self) -> None:
        """Write ``new = log(E exp(old - max) ) + max``, with rows that underflow done again."""
        line, d = self.line, self.bound()
        exp, log = (vector_function(self.source, name, self.dtype.name) for name in ("exp", "log"))
        line("top = number(-np.inf)")
        greater = "if old[j] > top or old[j] != old[j]:"
        with self.block(f"for j in range({d}):"), self.block(greater):
            line("top = old[j]")
        limits = np.finfo(self.dtype)
        smallest = self.source.constant(self.dtype.type(limits.tiny / limits.eps**2))
        line("regular, outside = np.isfinite(top), 0")
        with self.block("if regular:"):
            with self.block(f"for j in range({d}):"):
                line(f"weights[j] = {exp}(old[j] - top)")
            with self.block(f"for i in range({d}):"):
                line("new[i] = number(0)")
            with self.block(f"for j in range({d}):"):
                line("s0 = weights[j]")
                line(f"r0 = columns[{self.laid_out('j')}]")
                with self.block(f"for i in range({d}):"):
                    line("new[i] += s0 * r0[i]")
            with self.block(f"for i in range({d}):"):
                line(f"outside += not ({smallest} < new[i] < np.inf)")
        rescaled = f"(top + largest[{self.laid_out('i')}]) + {self.added('i')}"
        with self.block("if regular and not outside:"), self.block(f"for i in range({d}):"):
            line(f"new[i] = {log}(new[i]) + {rescaled}")
        with self.block("else:"), self.block(f"for i in range({d}):"):
            with self.block(f"if regular and {smallest} < new[i] < np.inf:"):
                line(f"new[i] = {log}(new[i]) + {rescaled}")
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
