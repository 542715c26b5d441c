"""Time outside, channels inside, in slices of the channels, each in a thread of its own.

Every slice walks all steps of its channels, so that none waits for another before the end. Slices
are cut along the first axis, in all loops over it. That takes results which all have this axis, or
are sums over it: the first slice adds to the result itself, others have sums of their own, which
are added in the order of the slices. How many slices there are depends on the flags and the sizes
alone, and so does, bit by bit, what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pytensor.configdefaults import config

from scanlib.backends.numba import threads
from scanlib.backends.numba.elemwise.nest import NestWriter
from scanlib.ops.channels import Target
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.parts import can_slice, least_row


def channels_writer(op: ElemwiseScan) -> NestWriter:
    """Return what writes a loop with channels, in slices where that is asked for and possible."""
    sliced = threads.wanted_threads() > 1 and can_slice(op)
    return SliceWriter(op) if sliced else NestWriter(op)


class SliceWriter(NestWriter):
    """Writes an elementwise loop with channels in slices."""

    def write(self) -> tuple[Callable, str | None]:
        self.write_checks()
        self.write_storage()
        with self.lines_of_slice() as inside:
            self.write_slice()
        if not self.source.cacheable:
            # It calls what may be Python, which a thread must not.
            return NestWriter(self.lowered).write()
        self.write_number_of_slices()
        self.write_own_sums()
        arguments = threads.shared_names(self.source.lines, self.arguments, inside)
        outside, self.source.lines = self.source.lines, inside
        function, key = self.source.compile("scan_slice", ["k", "parts", *arguments], self.version)
        self.source.lines = outside
        assert key is not None
        most = config.scanlib__threads
        call = threads.in_threads(function, key, most)
        name = self.source.function(call, f"{threads.VERSION} {most} {key}", "threads")
        self.source.line(f"{name}(slices, ({', '.join(arguments)},))")
        self.write_combination()
        self.source.line("i = steps")
        self.write_return()
        return self.source.compile("scan_loop", self.arguments, self.version)

    @contextmanager
    def lines_of_slice(self) -> Iterator[list[str]]:
        """Collect the lines of another function, which shares names with this one."""
        kept, self.source.lines = self.source.lines, []
        yield self.source.lines
        self.source.lines = kept

    # One slice

    def write_slice(self) -> None:
        """Write the function of slice `k`."""
        line = self.source.line
        for size in self.first_sizes():
            # Unsigned: numba need not ask whether an index counts from the end.
            line(f"low_{size} = np.uint64({size} * k // parts)")
            line(f"high_{size} = np.uint64({size} * (k + 1) // parts)")
        for target in self.sums():
            name = target.array
            if self.is_scalar(target):
                with self.source.block("if k > 0:"):
                    line(f"{name} = {self.emitter._dtype(target.value)}(0)")
            else:
                with self.source.block("if k > 0:"):
                    line(f"{name} = {name}_own[k - 1]")
        self.source.object("unshared", threads.unshared)
        for target in self.plan.targets:
            if not self.is_scalar(target):
                line(f"{target.array} = unshared({target.array})")
        for i in range(self.signature.n_states):
            if self.has_latest_row(i):
                super().write_latest_row(i)
        with self.source.block("for i in range(steps):"):
            self.write_step()
        for target in self.sums():
            if self.is_scalar(target):
                line(f"{target.array}_own[k] = {target.array}")

    def write_latest_row(self, i: int) -> None:
        """Each slice has a row of its own: threads that write to one cache line wait."""

    def write_fetches(self, part: str = "k", parts: str = "parts") -> None:
        super().write_fetches(part, parts)

    def extent(self, target: Target, axis: int) -> str:
        size = super().extent(target, axis)
        return size if axis else f"low_{size}, high_{size}"

    def first_sizes(self) -> list[str]:
        """Return the lengths of the loops over the first axis."""
        return list(dict.fromkeys(name for (_, axis), name in self.sizes.items() if axis == 0))

    def sums(self) -> list[Target]:
        """Return the results that are sums over the first axis."""
        return [target for target in self.plan.targets if 0 in target.reduced]

    def is_scalar(self, target: Target) -> bool:
        return target.kind != "output" and not target.axes

    # All slices

    def write_number_of_slices(self) -> None:
        line, products = self.source.line, []
        for group in self.plan.groups(self.plan.targets, 0):
            deepest = max(group, key=lambda target: target.inner)
            sizes = [self.sizes[id(deepest), axis] for axis in range(deepest.inner)]
            products.append(" * ".join(sizes))
        line(f"channels = {' + '.join(products)}")
        sizes = [
            str(config.scanlib__threads),
            f"channels * steps // {config.scanlib__parallel_channels}",
            f"channels // {least_row(self.lowered)}",
            *self.first_sizes(),
        ]
        line(f"slices = max(1, min({', '.join(sizes)}))")

    def write_own_sums(self) -> None:
        """Make the arrays of the sums of all slices but the first; of all, for numbers."""
        for target in self.sums():
            name, dtype = target.array, self.emitter._dtype(target.value)
            if self.is_scalar(target):
                self.source.line(f"{name}_own = np.empty(slices, {dtype})")
                continue
            self.source.line(f"{name}_own = np.empty((slices - 1,) + {name}.shape, {dtype})")
            if target.kind != "output":  # those of outputs are cleared or written in every step
                self.nest_over(target, f"{name}_own[k, %s] = {dtype}(0)")

    def write_combination(self) -> None:
        """Write the sums of the slices' sums, in their order."""
        for target in self.sums():
            name, dtype = target.array, self.emitter._dtype(target.value)
            if self.is_scalar(target):
                self.source.line(f"{name} = {name}_own[0]")
                with self.source.block("for k in range(1, slices):"):
                    self.source.line(f"{name} = {dtype}({name} + {name}_own[k])")
            else:
                self.nest_over(target, f"{name}[%s] = {dtype}({name}[%s] + {name}_own[k, %s])")

    def nest_over(self, target: Target, statement: str) -> None:
        """Write a statement for all slices but the first and all items of a result."""
        ndim = len(target.axes) + (target.kind == "output")
        indices = [self.source.name("j") for _ in range(ndim)]
        sizes = [f"{target.array}.shape[{axis}]" for axis in range(ndim)]
        text = statement.replace("%s", ", ".join(indices))
        self.emitter._nest(["k", *indices], ["slices - 1", *sizes], text)
