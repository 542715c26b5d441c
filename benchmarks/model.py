"""What a timed loop consists of: its graph, its data, its hand-written twin and its goals.

A pass is "forward", which computes the loop's value, or "forward + gradient". A loop whose graph
has a `cost` is differentiated as a model is: the second pass returns the cost and its derivatives.
A loop whose graph has a `cotangent` is differentiated alone, with nothing around it: the second
pass takes an array g in the shape of the value and returns the value and the derivatives of
``sum(g * value)``, without computing that sum.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

Array = np.ndarray[Any, Any]

OURS = "scanlib"
THEIRS = "pytensor.scan"
PASSES = {False: "forward", True: "forward + gradient"}


class AbsentError(Exception):
    """Raised where something cannot be timed; the message says why, for the notes."""


@dataclass(frozen=True)
class Library:
    """The two names that a loop needs from a library."""

    name: str
    scan: Callable[..., Any]
    until: Callable[..., Any]


@cache
def load_library(name: str) -> Library:
    """Import a library by the name it has in the table, and nothing of the other one."""
    if name == OURS:
        module = import_module("scanlib")
        return Library(name, module.scan, module.until)
    if name == THEIRS:
        return Library(name, pytensor.scan, import_module("pytensor.scan.utils").until)
    raise ValueError(f"unknown library {name!r}: expected {OURS!r} or {THEIRS!r}")


def direct_function(name: str) -> Callable[..., Any]:
    """Return a function of scanlib that computes a recurrence without a step function."""
    function = getattr(import_module("scanlib"), name, None)
    if function is None:
        raise AbsentError(f"scanlib.{name} does not exist")
    return function


@dataclass(frozen=True)
class Graph:
    """One loop as a graph: its value, and a `cost` or a `cotangent` to differentiate it with."""

    inputs: Sequence[Variable]
    value: Variable
    wrt: Sequence[Variable]
    cost: Variable | None = None
    cotangent: Variable | None = None

    def compile(self, gradient: bool) -> Any:
        """Compile one pass in PyTensor's default mode."""
        inputs, outputs = list(self.inputs), [self.value]
        if gradient and self.cost is not None:
            outputs = [self.cost, *as_list(pytensor.grad(self.cost, list(self.wrt)))]
        elif gradient:
            seeds: Any = {self.value: self.cotangent}
            derivatives: Any = pytensor.grad(None, list(self.wrt), known_grads=seeds)
            inputs.append(self.cotangent)
            outputs += as_list(derivatives)
        function: Any = pytensor.function(inputs, outputs)
        function.trust_input = True
        return function


def as_list(values: Any) -> list[Any]:
    """The results of a peer as a list, however many there are."""
    return list(values) if isinstance(values, (list, tuple)) else [values]


def of_value(inputs: Sequence[Variable], value: Any, wrt: Sequence[Variable]) -> Graph:
    """A graph that is differentiated alone, with a cotangent in the type of its value."""
    static = pt.tensor("cotangent", dtype=value.type.dtype, shape=(None,) * value.type.ndim)
    return Graph(inputs, value, wrt, cotangent=static)


def with_cotangent(data: Sequence[Array], like: int) -> list[Array]:
    """Add random numbers in the shape of one of the arrays, as the cotangent of the value."""
    shape, dtype = data[like].shape, data[like].dtype
    return [*data, np.asarray(np.random.default_rng(9).standard_normal(shape), dtype=dtype)]


Workspace = Callable[[Sequence[Array], bool], list[Array]]


def like(forward: Sequence[int], gradient: Sequence[int]) -> Workspace:
    """Arrays that the hand-written loop writes into, in the shapes of some of its inputs."""

    def allocate(data: Sequence[Array], is_gradient: bool) -> list[Array]:
        return [np.zeros_like(data[index]) for index in (gradient if is_gradient else forward)]

    return allocate


@dataclass(frozen=True)
class Loop:
    """A loop to time.

    Attributes
    ----------
    name
        What ``--loops`` calls it.
    title
        What the table calls it.
    build
        The graph of the loop, written with the given library.
    data
        One array for each input of the graph, and the cotangent where the graph has one.
    hand
        The hand-written loop, ``module.function`` of :mod:`benchmarks.hand`; with several, the
        fastest is the scale.
    workspace
        The arrays that the hand-written loop writes into, allocated once.
    direct
        The graph by a function of scanlib that needs no step function, and the function's name.
    jax
        Name of the loop in :mod:`benchmarks.jax_loops`, if it is there.
    lfilter
        SciPy's filter with the loop's value.
    goals
        Largest ratio to the hand-written loop for the forward pass and the one with the gradient.
    has_cost
        Whether the graph has a cost and not a cotangent.
    plus_call
        Whether the goal is for what is left after the time of one empty call.
    lfilter_goal
        Largest ratio of the forward pass to SciPy's filter.
    tolerance
        Largest relative difference from the hand-written loop.
    reference_gradient
        Whether ``pytensor.scan`` computes its gradient as defined here.
    theirs, quick
        Whether to time ``pytensor.scan`` too, and whether ``--quick`` includes the loop.
    """

    name: str
    title: str
    build: Callable[[Library], Graph]
    data: Callable[[], list[Array]]
    hand: Sequence[str]
    workspace: Workspace
    direct: tuple[str, Callable[[], Graph]] | None = None
    jax: str | None = None
    lfilter: Callable[..., Array] | None = None
    goals: Mapping[bool, float] = field(default_factory=dict)
    has_cost: bool = False
    plus_call: bool = False
    lfilter_goal: float | None = None
    tolerance: float = 1e-9
    reference_gradient: bool = True
    theirs: bool = True
    quick: bool = False
    notes: Sequence[str] = ()

    def pass_data(self, gradient: bool) -> list[Array]:
        """The arrays that one pass takes, made anew."""
        data = self.data()
        return data if gradient or self.has_cost else data[:-1]


@cache
def compiled(build: Callable[[Library], Graph], library: str, gradient: bool) -> Any:
    """Compile a pass once for all loops that differ in their data alone."""
    return build(load_library(library)).compile(gradient)


@cache
def compiled_direct(build: Callable[[], Graph], gradient: bool) -> Any:
    """Compile a pass of a direct function, once like :func:`compiled`."""
    return build().compile(gradient)


def hand_function(name: str, gradient: bool) -> Any:
    """Import a hand-written loop; numba loads no earlier than here."""
    module, function = name.split(".")
    suffix = "_gradient" if gradient else ""
    return getattr(import_module(f"benchmarks.hand.{module}"), function + suffix)


def bind_hand(loop: Loop, name: str, gradient: bool, data: Sequence[Array]) -> Callable[[], Any]:
    """Return a call of a hand-written loop that returns its results as a list.

    Scalars are passed as NumPy numbers, not as Python's: those would make a loop over float32
    compute in float64.
    """
    function = hand_function(name, gradient)
    arguments = [array[()] if array.ndim == 0 else array for array in data]
    workspace = loop.workspace(data, gradient)

    def call() -> list[Any]:
        returned = function(*arguments, *workspace)
        return workspace if returned is None else as_list(returned)

    return call
