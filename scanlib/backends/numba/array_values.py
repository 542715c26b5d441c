"""How the values of a step are held: as scalars, as places in memory, as arrays of numba.

A value of zero dimensions is a scalar. Every other tensor has a `Place`; it becomes an array of
numba only for Ops that have no rule of their own. Workspaces return to the pool after the node
that reads them last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.type import Type
from pytensor.link.numba.dispatch.basic import numba_typify
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.type import DenseTensorType

from scanlib.backends.numba.body import constant_value
from scanlib.backends.numba.places import Memory, Place, Sizes, Workspace
from scanlib.backends.numba.scalar import ScalarCode
from scanlib.backends.numba.source import Source
from scanlib.lengths.numbers import is_length

NEGATIVE_SIZE = "negative dimensions are not allowed"


@dataclass
class Value:
    """How a variable is held: the name of its `scalar`, its `place`, the name of its `array`.

    What is no tensor has an `array` only, whatever it is.
    """

    scalar: str | None = None
    place: Place | None = None
    array: str | None = None


@dataclass
class Destination:
    """Memory that a result of the step must end in.

    `failure` writes what is raised if the result has another size along an axis: a statement for
    inside the loop and one for before it.
    """

    place: Place
    failure: Callable[[int, str, str], tuple[str, str]]


class ArrayValues(ScalarCode):
    """Knows how each variable of a step is held."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.sizes = Sizes(source)
        self.memory = Memory(source, self.sizes)
        self.values: dict[Variable, Value] = {}
        self.destinations: dict[Variable, Destination] = {}
        self.position = -1
        self.last_use: dict[Variable, float] = {}
        self._users: dict[Workspace, set[Variable]] = {}
        self._claimed: set[Workspace] = set()

    # Binding

    def bind_scalar(self, variable: Variable, name: str) -> None:
        self.values[variable] = Value(scalar=name)

    def bind_place(self, variable: Variable, place: Place) -> None:
        self.values[variable] = Value(place=place)
        self._use(variable, place)

    def bind_opaque(self, variable: Variable, name: str) -> None:
        """Bind what is no tensor."""
        self.values[variable] = Value(array=name)

    def bind_array(self, variable: Variable, name: str, start: str, fixed: bool = False) -> None:
        """Bind a contiguous array of numba's whose pointer has a name already."""
        define = self.sizes.define
        if fixed:
            self.sizes.add_static(name)
        sizes = []
        for axis, known in enumerate(variable.type.shape):
            size = define(f"{name}.shape[{axis}]", name)
            if known is not None:
                failure = "raise ValueError('An array inside a scan has not the shape of its type')"
                size = self.sizes.require_equal(size, str(known), failure)
            sizes.append(self.sizes.same(size))
        place = Place(start, tuple(sizes), self.sizes.contiguous_strides(sizes), fixed=fixed)
        self.values[variable] = Value(place=place, array=name)

    def _use(self, variable: Variable, place: Place) -> None:
        if place.workspace is not None:
            self._users.setdefault(place.workspace, set()).add(variable)

    # Reading

    def find(self, variable: Variable) -> Value:
        """Return how a variable is held."""
        if variable not in self.values:
            assert isinstance(variable, Constant), variable
            self._bind_constant(variable)
        return self.values[variable]

    def _bind_constant(self, variable: Constant) -> None:
        if is_zero_dim(variable.type):
            dtype = np.dtype(variable.type.dtype)
            item = dtype.type(np.asarray(variable.data).item())
            self.bind_scalar(variable, self.source.constant(item))
            return
        name = self.source.constant(numba_typify(constant_value(variable.data), variable=variable))
        if not isinstance(variable.type, DenseTensorType):
            self.bind_opaque(variable, name)
            return
        array, start = self.source.name("k"), self.source.name("p")
        self.source.before_loop(f"{array} = contiguous({name})")
        self.source.before_loop(f"{start} = pointer({array})")
        self.memory.arrays.append(array)
        sizes = [str(size) for size in np.shape(variable.data)]
        strides = self.sizes.contiguous_strides(sizes)
        self.values[variable] = Value(
            place=Place(start, tuple(sizes), strides, fixed=True), array=array
        )

    def scalar(self, variable: Variable) -> str:
        """Return the name of a zero-dimensional variable's scalar."""
        value = self.find(variable)
        if value.scalar is None:
            value.scalar = self.source.name("s")
            start = value.place.start if value.place is not None else None
            text = f"load({start}, 0)" if start is not None else f"as_scalar({value.array})"
            self.source.line(f"{value.scalar} = {text}")
        return value.scalar

    def only_item(self, variable: Variable) -> str | None:
        """Return the scalar of a variable that is known to be one number in all its axes."""
        if variable.type.ndim == 0:
            return self.scalar(variable)
        if isinstance(variable, Constant):
            data = np.asarray(variable.data)
            return self.source.constant(data.reshape(-1)[0]) if data.size == 1 else None
        return self.find(variable).scalar

    def place(self, variable: Variable) -> Place:
        """Return where an array lies; a number gets memory."""
        value = self.find(variable)
        if value.place is None:
            item = value.scalar or self.scalar(variable)
            value.place = self.fresh(self._dtype(variable), ["1"] * variable.type.ndim)
            self.source.line(f"store({value.place.start}, 0, {item})")
            self._use(variable, value.place)
        return value.place

    def array(self, variable: Variable) -> str:
        """Return the name under which a function of PyTensor's finds a variable."""
        value = self.find(variable)
        if value.array is None and variable.type.ndim == 0:
            value.array = self.source.name("a")
            self.source.line(f"{value.array} = np.asarray({value.scalar})")
        elif value.array is None:
            place = self.contiguous_place(variable)
            if place.workspace is not None:
                place.workspace.pinned = True
            value.array = self.source.name("a")
            sizes = ", ".join(f"np.int64({size})" for size in place.sizes)
            self.source.line(f"{value.array} = carray({place.start}, ({sizes},))")
        return value.array

    def contiguous_place(self, variable: Variable) -> Place:
        """Return where an array lies in order of memory, a copy if need be."""
        place = self.place(variable)
        if self.sizes.is_contiguous(place):
            return place
        copy = self.fresh(self._dtype(variable), place.sizes)
        self.write_copy(place, copy)
        self._use(variable, copy)
        return copy

    def write_copy(self, source: Place | str, target: Place, add: bool = False) -> None:
        raise NotImplementedError

    # Writing

    def fresh(self, dtype: str, sizes: Sequence[str]) -> Place:
        """Return memory for a result; nobody's memory once the node is done and nothing bound."""
        sizes = [self.sizes.same(size) for size in sizes]
        workspace = self.memory.take(dtype, self.sizes.product(*sizes))
        self._users.setdefault(workspace, set())
        strides = self.sizes.contiguous_strides(sizes)
        return Place(workspace.start, tuple(sizes), strides, workspace)

    def target(
        self, out: Variable, sizes: Sequence[str], read: Sequence[tuple[Variable, Place]] = ()
    ) -> Place:
        """Return where a result of these sizes goes.

        `read` holds the arguments of an Op that writes an item after it has read the items of the
        arguments at the same index, and none later.
        """
        destination = self.destinations.get(out)
        if destination is not None:
            return self.at_destination(destination, sizes)
        for variable, place in read:
            if self._may_overwrite(out, sizes, variable, place, read):
                assert place.workspace is not None
                self._claimed.add(place.workspace)
                return place
        return self.fresh(self._dtype(out), sizes)

    def at_destination(self, destination: Destination, sizes: Sequence[str]) -> Place:
        """Return a destination, with the check that a result of these sizes fits."""
        fit = getattr(destination, "fit", None)
        if fit is not None:
            return fit(tuple(sizes))
        for axis, (size, own) in enumerate(zip(sizes, destination.place.sizes, strict=True)):
            failures = destination.failure(axis, self.sizes.same(own), self.sizes.same(size))
            self.sizes.require_equal(size, own, *failures)
        return destination.place

    def _may_overwrite(
        self,
        out: Variable,
        sizes: Sequence[str],
        variable: Variable,
        place: Place,
        read: Sequence[tuple[Variable, Place]],
    ) -> bool:
        workspace = place.workspace
        if workspace is None or workspace.pinned or workspace in self._claimed:
            return False
        same = self.sizes.same
        if variable.type.dtype != out.type.dtype or workspace.dtype != self._dtype(out):
            return False
        if [same(size) for size in place.sizes] != [same(size) for size in sizes]:
            return False
        if same(workspace.items) != self.sizes.product(*sizes):
            return False
        if not self.sizes.is_contiguous(place):
            return False
        users = self._users.get(workspace, set())
        if any(self.last_use.get(user, -1) > self.position for user in users):
            return False
        others = [other for _, other in read if other.workspace is workspace]
        return all(other.strides == place.strides for other in others) and all(
            other.start == place.start and other.sizes == place.sizes for other in others
        )

    def refuse_negative(self, sizes: Sequence[Variable], texts: Sequence[str]) -> None:
        """Write that sizes, with their texts, must not be negative."""
        raising = f"raise ValueError({NEGATIVE_SIZE!r})"
        for size, text in zip(sizes, texts, strict=True):
            if is_length(size):
                continue
            if self.sizes.is_static(text):
                self.source.check_before_loop(f"{text} < 0", raising)
            else:
                self.source.line(f"if {text} < 0: {raising}")

    def finish_node(self) -> None:
        """Give back what nobody reads after this node."""
        self._claimed.clear()
        for workspace, users in list(self._users.items()):
            if all(self.last_use.get(user, -1) <= self.position for user in users):
                del self._users[workspace]
                self.memory.give_back(workspace)

    def plan(self, nodes: Sequence[Apply], outputs: Sequence[Variable]) -> None:
        """Note after which node each variable is not read any more."""
        for position, node in enumerate(nodes):
            for inp in node.inputs:
                self.last_use[inp] = position
        for out in outputs:
            self.last_use[out] = float("inf")


def is_zero_dim(type: Type) -> bool:
    """Whether values of this type are held as scalars."""
    return isinstance(type, ScalarType) or (isinstance(type, DenseTensorType) and type.ndim == 0)
