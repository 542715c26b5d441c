r"""Several values that a step makes from one another by linear maps, as one vector.

With the recurrent values of a loop laid out as vectors ``s_1 … s_P`` (a matrix row by row, a number
as one item), every variable `v` of the body that depends on them has, if the step is affine, a
form

    v[…] = Σ_j Σ_a s_j[a] J_j[a, …] + c[…]

where the Jacobians `J_j` and `c` do not depend on the `s_j`. Every linear operation leads from
forms to forms by acting on the axes of `J_j` that follow the first: joins, parts, reshapes and
transpositions need no thought of what they do to a matrix. The next values together are then one
vector ``s' = s W + c`` with the blocks of `W` read off the forms.

Batch axes, if there are any, lead the axes of every variable that depends on a state; the basis
runs over what follows them. A Jacobian has size one along axes where it does not vary.

Joining must not change what non-finite numbers do: a value that does not read another one must not
become NaN with it. So the *structure* of `W`, which of its items are there at all, is found
by the same propagation with ones in the place of all factors. (Jacobians along a graph: A.
Griewank and A. Walther, "Evaluating derivatives", 2008, chapter 3.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.lengths.numbers import constant_integer
from scanlib.ops.graph import depends_on

_LARGEST_CONSTANT = 4096  # items of an array that the graph holds rather than makes

Sizes = Callable[[Variable], Sequence[Variable]]


@dataclass
class Jacobian:
    """The Jacobian of a variable by one state.

    `value` is None for the state itself, a vector, with its axes in the order `order`. `full` says
    that no item is missing from the structure, `covers` that every number of the state stands
    somewhere in the variable, so that its product with a matrix misses none.
    """

    value: Variable | None
    order: tuple[Any, ...] = ()
    full: bool = False
    covers: bool = False

    def moved(self, value: Variable) -> Jacobian:
        """Return the block of a variable with the same items in other places."""
        return Jacobian(value, (), self.full, self.covers)


@dataclass
class Affine:
    """What a variable is to all states: see the module's text."""

    blocks: dict[int, Jacobian] = field(default_factory=dict)
    offset: Variable | None = None


class SystemForms:
    """The forms of the variables of a body; `system_rules.propagate` finds them.

    Parameters
    ----------
    sources : sequence of Variable
        The body's variables of the recurrent values, all of one dtype.
    targets : sequence of Variable
        Their next values.
    batch : int
        How many leading axes are batches.
    sizes : callable
        Gives the shape of a body variable without reading a state.
    structure : bool
        Whether to put ones in the place of all factors and leave the offsets out.
    """

    def __init__(
        self,
        sources: Sequence[Variable],
        targets: Sequence[Variable],
        batch: int,
        sizes: Sizes,
        structure: bool = False,
    ) -> None:
        self.sources, self.targets = list(sources), list(targets)
        self.batch, self.sizes, self.structure = batch, sizes, structure
        self.dtype = sources[0].type.dtype
        self.multiplies = False
        self.dependent = depends_on(self.targets, sources)
        self.forms: dict[Variable, Affine] = {}
        self.bases: dict[int, Variable] = {}
        for k, source in enumerate(sources):
            core = source.type.ndim - batch
            order = tuple(range(source.type.ndim))
            if core != 1:
                self.bases[k] = self.basis(k)
            start = Jacobian(None, order) if core == 1 else Jacobian(self.bases[k], full=core == 0)
            start.covers = True
            self.forms[source] = Affine({k: start})

    def form(self, variable: Variable) -> Affine:
        """Return the form of a variable; one that reads no state is all offset.

        An operation with a state converts it to the state's dtype: small integers would wrap
        around otherwise, and truth values have no sign.
        """
        if variable in self.forms:
            return self.forms[variable]
        return Affine({}, None if self.structure else pt.cast(variable, self.dtype))

    def size(self, k: int) -> Variable:
        """Return the number of items of one state, without its batch."""
        sizes = list(self.sizes(self.sources[k]))[self.batch :]
        known = [constant_integer(size) for size in sizes]
        if None not in known:
            return pt.constant(math.prod(size for size in known if size is not None), dtype="int64")
        return sizes[0] if len(sizes) == 1 else pt.mul(*sizes)

    def basis(self, k: int) -> Variable:
        """Return the Jacobian of a state by itself."""
        source = self.sources[k]
        sizes = list(self.sizes(source))[self.batch :]
        ones = (1,) * self.batch
        if not sizes:
            return pt.constant(np.ones((1, *ones), self.dtype))
        eye = pt.eye(self.size(k), dtype=self.dtype)
        if len(sizes) == 1:
            return eye.dimshuffle(0, *["x"] * self.batch, 1)
        return eye.reshape((self.size(k), *ones, *sizes))

    def value(self, k: int, block: Jacobian) -> Variable:
        """Return a Jacobian as an array."""
        if block.value is not None:
            return block.value
        return self.basis(k).dimshuffle(0, *(p if p == "x" else p + 1 for p in block.order))

    def whole(self, k: int, block: Jacobian | None, variable: Variable) -> Variable:
        """Return a Jacobian with all axes but batches as long as those of its variable."""
        sizes = list(self.sizes(variable))
        if block is None:
            lead = [_one()] * self.batch
            return _filled(0, (self.size(k), *lead, *sizes[self.batch :]), self.dtype)
        value = self.value(k, block)
        pairs = list(zip(value.type.shape[1:], variable.type.shape, strict=True))[self.batch :]
        if all(own != 1 or other == 1 for own, other in pairs):
            return value
        lead = list(value.shape)[1 : 1 + self.batch]
        return pt.broadcast_to(value, (self.size(k), *lead, *sizes[self.batch :]))

    def whole_offset(self, offset: Variable | None, variable: Variable) -> Variable:
        """Return an offset in the shape of its variable."""
        sizes = self.sizes(variable)
        if offset is None:
            return _filled(0, tuple(sizes), self.dtype)
        pairs = zip(offset.type.shape, variable.type.shape, strict=True)
        if all(own != 1 or other == 1 for own, other in pairs):
            return offset
        return pt.broadcast_to(offset, tuple(sizes))

    def factor(self, variable: Variable) -> Variable:
        """Return a factor, or ones in its place."""
        if not self.structure:
            return pt.cast(variable, self.dtype)
        shape = [
            size if known is None else pt.constant(known, dtype="int64")
            for known, size in zip(variable.type.shape, self.sizes(variable), strict=True)
        ]
        return _filled(1, shape, self.dtype)


def _filled(value: int, sizes: Sequence[Variable], dtype: str) -> Variable:
    """Return an array of one number, a constant where it is small and its shape is known."""
    known = [size for size in map(constant_integer, sizes) if size is not None]
    if len(known) == len(sizes) and math.prod(known) <= _LARGEST_CONSTANT:
        return pt.constant(np.full(known, value, dtype))
    return pt.full(tuple(sizes), np.asarray(value, dtype))


def _one() -> Variable:
    return pt.constant(1, dtype="int64")
