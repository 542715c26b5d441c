"""Loops described once and rendered twice: as a symbolic scan and as a plain NumPy loop.

A `LoopCase` holds the operands of a loop (sequences, states, non-sequences) and one expression
tree per next state, output and stopping condition. An expression is evaluated by a table of
operations: `NumpyOps` computes, `SymbolicOps` builds a graph. Both cast their operands to the
type of the expression, so that no rule of type promotion can make them differ.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

from tests.reference import reference_scan

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Expr:
    """One operation, with the dtype and shape of its value.

    Leaves are ``"const"``, whose `value` is a number, and ``"leaf"``, whose `value` names an
    operand and a tap of it: ``("x0", -1)``.
    """

    op: str
    args: tuple["Expr", ...]
    dtype: str
    shape: Shape
    value: Any = None

    def evaluate(self, operands: dict, ops: Any) -> Any:
        """Compute the value of the tree with the operations of `ops`."""
        if self.op == "leaf":
            return operands[self.value]
        if self.op == "const":
            return ops.constant(self.value, self.dtype)
        values = [arg.evaluate(operands, ops) for arg in self.args]
        return getattr(ops, self.op)(self, *values)

    def leaves(self) -> set:
        """Return the operands and taps that the tree reads."""
        if self.op == "leaf":
            return {self.value}
        return set().union(*(arg.leaves() for arg in self.args))


@dataclass(frozen=True)
class Operand:
    """An input of a loop.

    Attributes
    ----------
    name : str
        Unique name: ``x0`` for sequences, ``y0`` for states, ``w0`` for non-sequences.
    dtype, shape
        Type of one row; of the whole value for a non-sequence.
    taps : tuple of int
        Taps of a sequence or state, in the order in which the step reads them.
    extra : int
        Rows beyond those that are needed, at the end of a sequence or of initial rows.
    static : bool
        Whether the variable's type has the whole shape. Otherwise it knows only `broadcast`.
    broadcast : tuple of bool
        Which axes of a row are of length one for broadcasting, so that the type must say so.
    style : {"input", "captured", "shared", "constant"}
        How it reaches the loop; a captured one is used by the step without being given.
    """

    name: str
    dtype: str
    shape: Shape
    broadcast: tuple[bool, ...]
    taps: tuple[int, ...] = ()
    extra: int = 0
    static: bool = False
    style: str = "input"

    @property
    def plain(self) -> bool:
        """Whether the loop is given the bare value, not a dictionary."""
        return self.taps == (self.default_tap,)

    @property
    def default_tap(self) -> int:
        return 0 if self.name[0] == "x" else -1

    def lead(self, steps: int) -> Shape:
        """Return the length of the time axis of the value, as a shape."""
        if self.name[0] == "x":
            return (steps + max(0, *self.taps) - min(0, *self.taps) + self.extra,)
        if self.name[0] == "w" or self.plain:
            return ()
        return (-min(self.taps) + self.extra,)

    def type_shape(self, lead: Shape) -> tuple[int | None, ...]:
        """Return the static shape of the variable."""
        if self.static:
            return (*lead, *self.shape)
        rows = (1 if fixed else None for fixed in self.broadcast)
        return (*(None for _ in lead), *rows)

    def draw(self, rng: np.random.Generator, lead: Shape) -> np.ndarray:
        """Draw a value: floats of order one, small integers."""
        size = (*lead, *self.shape)
        if self.dtype == "bool":
            return rng.integers(0, 2, size).astype(bool)
        if self.dtype.startswith("int"):
            return rng.integers(-7, 8, size).astype(self.dtype)
        values = rng.uniform(-1.2, 1.2, size)
        if self.dtype.startswith("complex"):
            values = values + 1j * rng.uniform(-1.2, 1.2, size)
        return np.asarray(values).astype(self.dtype)


class CommonOps:
    """Operations that arrays and variables write alike."""

    def add(self, e, x, y):
        return x + y

    def sub(self, e, x, y):
        return x - y

    def mul(self, e, x, y):
        return x * y

    def mask(self, e, x):
        return x & np.asarray(15, e.dtype)

    def both(self, e, x, y):
        return x & y

    def either(self, e, x, y):
        return x | y

    def differ(self, e, x, y):
        return x ^ y

    def negate(self, e, x):
        return ~x


@dataclass
class NumpyOps(CommonOps):
    """Operations on arrays, which also keep what was decided from the data.

    Attributes
    ----------
    margin : float
        How far the closest decision was from falling the other way. Within rounding errors,
        two correct programs may decide differently.
    decisions : list of bytes
        All decisions. Where they differ between two points there is a kink or a jump between.
    """

    margin: float = np.inf
    decisions: list = field(default_factory=list)

    def decide(self, value: Any, distance: Any, continuous: bool = False) -> None:
        self.decisions.append(np.asarray(value).tobytes())
        if not continuous:
            self.margin = min(self.margin, np.min(np.abs(distance), initial=np.inf))

    def constant(self, value, dtype):
        return np.asarray(value, dtype)

    def cast(self, e, x):
        x = np.asarray(x)
        if x.dtype.kind == "c" and e.dtype[0] != "c":
            x = x.real
        if x.dtype.kind == "f" and e.dtype[0] == "i":
            x = 4 * x + np.asarray(0.37, x.dtype)
            self.decide(np.trunc(x), x - np.round(x))
            x = np.trunc(x)
        return x.astype(e.dtype)

    def tanh(self, e, x):
        return np.tanh(x)

    def sin(self, e, x):
        return np.sin(x)

    def bump(self, e, x):
        return np.exp(-(x * x))

    def maximum(self, e, x, y):
        gap = np.subtract(x, y, dtype=e.dtype)
        self.decide(np.sign(gap), gap, continuous=True)
        return np.maximum(x, y)

    def less(self, e, x, y):
        gap = np.subtract(x, y, dtype="float64")
        self.decide(gap < 0, gap if np.asarray(x).dtype.kind == "f" else np.inf)
        return x < y

    def where(self, e, condition, x, y):
        return np.where(condition, x, y)

    def total(self, e, x):
        axes, keep = e.value
        if e.dtype == "bool":
            return np.any(x, axis=axes, keepdims=keep)
        wide = "int64" if e.dtype.startswith("int") else e.dtype
        return np.asarray(np.sum(x, axis=axes, keepdims=keep, dtype=wide)).astype(e.dtype)

    def dot(self, e, x, matrix):
        return np.dot(x, matrix)


class SymbolicOps(CommonOps):
    """The same operations on variables."""

    def constant(self, value, dtype):
        return pt.constant(np.asarray(value, dtype))

    def cast(self, e, x):
        if x.dtype.startswith("complex") and not e.dtype.startswith("complex"):
            x = pt.real(x)
        if x.dtype.startswith("float") and e.dtype.startswith("int"):
            x = pt.trunc(4 * x + np.asarray(0.37, x.dtype))
        return pt.cast(x, e.dtype)

    def tanh(self, e, x):
        return pt.tanh(x)

    def sin(self, e, x):
        return pt.sin(x)

    def bump(self, e, x):
        return pt.exp(-(x * x))

    def maximum(self, e, x, y):
        return pt.maximum(x, y)

    def less(self, e, x, y):
        return pt.lt(x, y)

    def where(self, e, condition, x, y):
        return pt.switch(condition, x, y)

    def total(self, e, x):
        axes, keep = e.value
        if e.dtype == "bool":
            return pt.any(x, axis=axes, keepdims=keep)
        wide = "int64" if e.dtype.startswith("int") else e.dtype
        return pt.cast(pt.sum(x, axis=axes, keepdims=keep, dtype=wide, acc_dtype=wide), e.dtype)

    def dot(self, e, x, matrix):
        return pt.dot(x, matrix)


@dataclass(frozen=True)
class Rendered:
    """A symbolic loop: the variables to feed, what it returns, and every operand's variable."""

    inputs: dict
    traces: list
    updates: dict
    variables: dict


@dataclass(frozen=True)
class LoopCase:
    """A loop.

    Attributes
    ----------
    sequences, states, non_sequences : tuple of Operand
    bodies : tuple of Expr
        The next states, then the outputs.
    order : tuple of int
        Positions in `bodies`, in the order in which the step returns them.
    steps : int
        The number of steps that the shortest sequence allows.
    n_steps : {"int", "symbolic", "absent"}
        How the loop is told.
    go_backwards : bool
    until : Expr or None
    seed : int
        Of the values.
    """

    sequences: tuple[Operand, ...]
    states: tuple[Operand, ...]
    non_sequences: tuple[Operand, ...]
    bodies: tuple[Expr, ...]
    order: tuple[int, ...]
    steps: int
    n_steps: str
    go_backwards: bool
    until: Expr | None
    seed: int

    @property
    def operands(self) -> tuple[Operand, ...]:
        return (*self.sequences, *self.states, *self.non_sequences)

    def values(self) -> dict[str, np.ndarray]:
        """Draw the values of all operands; the same at every call."""
        rng = np.random.default_rng(self.seed)
        return {o.name: o.draw(rng, o.lead(self.steps)) for o in self.operands}

    def step(self, ops: Any, finish: Callable, captured: dict | None = None) -> Callable:
        """Return the step as a function of its arguments, evaluated with the table `ops`."""
        states = [self.states[k] for k in self.order if k < len(self.states)]
        names = [(o.name, tap) for o in (*self.sequences, *states) for tap in o.taps]
        captured = captured or {}
        names += [(o.name, 0) for o in self.non_sequences if (o.name, 0) not in captured]

        def step(*arguments: Any) -> Any:
            operands = dict(zip(names, arguments, strict=True)) | captured
            values = [self.bodies[k].evaluate(operands, ops) for k in self.order]
            stop = None if self.until is None else self.until.evaluate(operands, ops)
            return finish(values, stop)

        return step

    def arguments(self, given: dict) -> dict:
        """Return the sequences and initial values, as arguments of a scan."""

        def wrap(operand: Operand, key: str) -> Any:
            if operand.plain:
                return given[operand.name]
            return {key: given[operand.name], "taps": list(operand.taps)}

        info = [
            wrap(self.states[k], "initial") if k < len(self.states) else None for k in self.order
        ]
        return {
            "sequences": [wrap(o, "input") for o in self.sequences],
            "outputs_info": info,
            "go_backwards": self.go_backwards,
        }

    def reference(self, values: dict) -> tuple[list[np.ndarray], NumpyOps]:
        """Run the plain loop; return its results and the record of its decisions."""
        ops = NumpyOps()
        with np.errstate(all="ignore"):
            results = reference_scan(
                self.step(ops, lambda values, stop: values if stop is None else [*values, stop]),
                non_sequences=[values[o.name] for o in self.non_sequences],
                n_steps=None if self.n_steps == "absent" else self.steps,
                until=self.until is not None,
                rows=[(self.bodies[k].shape, self.bodies[k].dtype) for k in self.order],
                **self.arguments(values),
            )
        return results, ops

    def render(self, scan: Callable, until: Callable, values: dict) -> Rendered:
        """Build the symbolic loop."""
        inputs, variables = {}, {}
        for o in self.operands:
            value, shape = values[o.name], o.type_shape(o.lead(self.steps))
            if o.style == "shared":
                variables[o.name] = pytensor.shared(value, name=o.name, shape=shape)
            elif o.style == "constant":
                variables[o.name] = pt.constant(value, name=o.name)
            else:
                variables[o.name] = pt.tensor(o.name, dtype=o.dtype, shape=shape)
                inputs[variables[o.name]] = value
        n_steps: Any = None if self.n_steps == "absent" else self.steps
        if self.n_steps == "symbolic":
            n_steps = pt.lscalar("n_steps")
            inputs[n_steps] = np.asarray(self.steps)
        captured = {
            (o.name, 0): variables[o.name]
            for o in self.non_sequences
            if o.style in ("captured", "shared")
        }
        traces, updates = scan(
            self.step(
                SymbolicOps(),
                lambda values, stop: values if stop is None else (values, until(stop)),
                captured,
            ),
            non_sequences=[
                variables[o.name] for o in self.non_sequences if (o.name, 0) not in captured
            ],
            n_steps=n_steps,
            return_list=True,
            **self.arguments(variables),
        )
        return Rendered(inputs, traces, updates, variables)
