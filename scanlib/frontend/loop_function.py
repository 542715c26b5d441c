"""`loop`: from a step over trees to a canonical loop.

    carry[t], y[t] = step(carry[t-1], x[t])

`init`, `xs` and `ys` are trees (`scanlib.frontend.trees`). This module takes them apart into the
sequences, states and outputs that `scanlib.frontend.builder` knows, puts together what the step is
called with, and takes apart what it returns.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, TypeVar, Unpack, overload

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.configdefaults import config
from pytensor.graph.basic import Variable
from pytensor.tensor.type import TensorType, integer_dtypes
from pytensor.tensor.variable import TensorVariable

from scanlib.config import check_flags
from scanlib.frontend.arguments import (
    OutputArgument,
    SequenceArgument,
    check_spans,
    known_to_differ,
    read_axis,
    read_initials,
    read_n_steps,
    read_name,
    without_arrays,
)
from scanlib.frontend.builder import Built, LoopBuilder, function_called, name_result
from scanlib.frontend.lags import Lags, past
from scanlib.frontend.methods import read_checkpoint, read_method
from scanlib.frontend.named import Dims, is_named, lower, named, unnamed
from scanlib.frontend.states import type_text
from scanlib.frontend.step_function import (
    ONE_VECTOR,
    StepResult,
    call_function,
    errors_of,
    is_until,
    read_condition,
    step_name,
)
from scanlib.frontend.trees import Tree, difference, flatten
from scanlib.frontend.values import NUMBER, as_tensor, as_variable, brief, read_flag
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.graph import with_axes
from scanlib.ops.messages import loop_title

_START = "to start from one vector write init=pt.stack([...]): a list is several values"
Carry = TypeVar("Carry")
X = TypeVar("X")
Y = TypeVar("Y")


@dataclass
class _Walk:
    """How a loop walks: along which axis or dimension, and from which end.

    `flips` says that arrays are flipped around the loop, which then walks forward.
    """

    title: str
    axis: int
    dim: str | None
    reverse: bool
    flips: bool
    before: Dims | None = None

    def rows(self, value: Any, path: str) -> tuple[Variable, Dims | None]:
        """Return an array as rows over time, and the names of the dimensions of a row."""
        variable = as_variable(value, path)
        if is_named(variable):
            dims = variable.type.dims
            if self.dim is None or self.dim not in dims:
                asked = "no dim is given" if self.dim is None else f"got dim={self.dim!r}"
                raise ValueError(
                    f"{path} has the dims {dims}; give the one to iterate over, as in "
                    f"dim={(dims or ('time',))[0]!r}; {asked}"
                )
            tensor, rest = unnamed(variable, self.dim)
        else:
            variable = as_tensor(value, path)
            if variable.type.ndim == 0:
                if path == "xs" and variable.type.dtype in integer_dtypes:
                    raise ValueError(
                        f"xs is the integer {value}; if that is the number of steps, write "
                        f"length={value}; the arguments are loop(step, init, xs)"
                    )
                raise ValueError(
                    f"{path} is a scalar; it needs an axis to iterate over. What every step sees "
                    "whole is used in the step without being passed, and an array is given as one, "
                    "such as np.array([1.0, 2.0]): a list is a tree of its items; the "
                    "arguments are loop(step, init, xs)"
                )
            axis = read_axis("loop", self.axis, variable.type.ndim, path)
            tensor, rest = pt.moveaxis(variable, axis, 0) if axis else variable, None
        return (tensor[::-1] if self.flips else tensor), rest

    def place_of(self, ndim: int, dims: Dims | None) -> int:
        """Return where time stands in a result: behind the dims that it follows in `xs`."""
        if dims is not None:
            return max(
                (i + 1 for i, dim in enumerate(dims) if dim in (self.before or ())), default=0
            )
        place = self.axis if self.axis >= 0 else ndim + self.axis
        return min(max(place, 0), ndim - 1)

    def over_time(self, rows: Variable, dims: Dims | None, name: str | None) -> Variable:
        """Return rows as an array with its time where the loop walks."""
        rows = rows[::-1] if self.flips else rows
        place = self.place_of(rows.type.ndim, dims)
        rows = pt.moveaxis(rows, 0, place) if place else rows
        name_result(rows, name)
        if dims is None:
            return rows
        if self.dim is None:
            raise ValueError(
                f"{self.title}: the step returns a variable with the dims {dims}; name the "
                "dimension over the steps, as in dim='time'"
            )
        return named(rows, (*dims[:place], self.dim, *dims[place:]))


@dataclass
class _Leaf:
    """A leaf of `init` or `xs`: what a step gets for it, and returns."""

    path: str
    dims: Dims | None
    lags: int | None

    def given(self, values: Iterator[Variable], first: int) -> Any:
        """Return what the step is called with, from the placeholders of a loop."""
        if self.lags is None:
            return named(next(values), self.dims)
        return past([named(next(values), self.dims) for _ in range(first, self.lags + 1)], first)


def _changes_shared(variables: Sequence[Any]) -> str:
    return (
        f"the step changes the shared variables {variables}, by updates that it returns or by "
        "default ones, such as those of a RandomStream; a loop has none, so carry what changes: "
        "give it in init, return its next value in the carry, and store the last one with "
        "pytensor.function(..., updates={shared: final})"
    )


def _keys(tree: Any) -> Iterator[Any]:
    """Yield the keys of all dictionaries of a tree."""
    if isinstance(tree, dict):
        yield from tree
    for part in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(part, dict | tuple | list):
            yield from _keys(part)


@dataclass
class _Step:
    """A user's step, called with trees."""

    fn: Callable[..., Any]
    title: str
    carry: Tree
    x: Tree
    states: list[_Leaf]
    rows: list[_Leaf]
    outputs: list[OutputArgument]
    until: Callable[..., Any] | None
    ys: Tree = field(default_factory=Tree)
    y_dims: list[Dims | None] = field(default_factory=list)
    labels: list[str | None] = field(default_factory=list)
    stops: bool = False

    def __call__(self, arguments: list[tuple[Variable, str]]) -> StepResult:
        placeholders = [variable for variable, _ in arguments]
        values = iter(placeholders)
        rows = [leaf.given(values, 0) for leaf in self.rows]
        before = [leaf.given(values, 1) for leaf in self.states]
        given = [self.carry.build(iter(before)), self.x.build(iter(rows))]
        texts = ["the carry (init)", "a row (xs)"]
        returned = call_function(self.fn, given, texts, f"{self.title}: the step")
        with errors_of(self.title):
            carry, y, stop = self.read(returned)
            after = self.after(carry)
        if self.until is not None:
            stop = self.condition(self.until, after, before)
        with errors_of(self.title):
            kept = [pair for pair in zip(self.states, after, strict=True) if pair[0].lags != 0]
            states = [
                self.state(*pair, output) for pair, output in zip(kept, self.outputs, strict=True)
            ]
            ys, self.ys = flatten(y)
            if updated := [key for key in _keys([y]) if isinstance(key, SharedVariable)]:
                raise ValueError(_changes_shared(updated))
            paths = self.ys.paths("y")
            parts = [unnamed(_as_result(*pair)) for pair in zip(ys, paths, strict=True)]
            given_by = "that the step returns" if self.until is None else "that `until` returns"
            stops = [] if stop is None else [as_variable(stop, f"the condition {given_by}")]
            stops = [_compared(read_condition(unnamed(value)[0])) for value in stops]
        self.labels = [
            _label(path) or getattr(v, "name", None) for path, v in zip(paths, ys, strict=True)
        ]
        self.y_dims, self.stops = [dims for _, dims in parts], bool(stops)
        tensors = lower([*states, *(tensor for tensor, _ in parts), *stops], placeholders)
        stop = tensors.pop() if stops else None
        return StepResult(tensors, {}, stop)

    def read(self, returned: Any) -> tuple[Any, Any, Any]:
        """Return carry, y and condition of what a step returned."""
        is_tuple = isinstance(returned, tuple)
        no_y = is_tuple and len(returned) == 2 and is_until(returned[1])
        if not is_tuple or len(returned) not in (2, 3) or no_y:
            came = f"{len(returned)} values" if is_tuple else brief(returned)
            came += ", `until` in the place of y" * no_y
            meant = f"; {ONE_VECTOR}" * isinstance(returned, list)
            raise TypeError(
                f"{step_name(self.fn)} must return (carry, y), or (carry, y, stop) to end the "
                f"loop early, got {came}; return None where there is no carry or no y, and a tree, "
                f"as in carry, (y, z), where there are several{meant}"
            )
        if len(returned) == 3 and self.until is not None:
            raise ValueError(
                f"{step_name(self.fn)} returns a condition, and until= gives another; leave one out"
            )
        carry, y, stop = (*returned, None)[:3]
        return carry, y, getattr(stop, "condition", stop)  # of `until`

    def after(self, carry: Any) -> list[Any]:
        """Return the leaves of the carry that a step returned."""
        leaves, given = flatten(carry)
        if given != self.carry:
            meant = ""
            if given.is_leaf and self.carry.kind in (list, tuple):
                meant = f"\n{_START}"
            if not self.carry.is_leaf and self.carry.kind is None:
                meant = "\ninit holds nothing; give what the loop starts from, or return None, y"
            if self.carry.is_leaf and given.kind in (list, tuple):
                meant = f"\n{ONE_VECTOR}"
            raise ValueError(
                f"{step_name(self.fn)} returns a carry of another structure than init:\n"
                f"{difference(self.carry, given)}{meant}"
            )
        return leaves

    def condition(self, until: Callable[..., Any], after: list[Any], before: list[Any]) -> Any:
        """Call `until` with the new carry."""
        seen = [
            new if leaf.lags is None else past([new, *old[:]][: leaf.lags], 1)
            for leaf, new, old in zip(self.states, after, before, strict=True)
        ]
        where = f"{self.title}: until"
        stop = call_function(until, [self.carry.build(iter(seen))], ["the new carry"], where)
        if stop is None:
            raise TypeError(f"{where} {step_name(until)} returns None; return the condition")
        return stop

    def state(self, leaf: _Leaf, value: Any, output: OutputArgument) -> Variable:
        """Return the next value of a state; one that has more dims than `init` gives it these."""
        assert output.initial is not None
        if isinstance(value, Lags):
            raise TypeError(
                f"{leaf.path}: the step returns {value}; return the one new value, as in "
                "0.5 * h[1] + x; those before it stay without being returned"
            )
        if isinstance(value, NUMBER) and not output.is_carry:
            dtype = np.dtype(output.initial.type.dtype)
            value = pt.constant(np.asarray(value, dtype=np.result_type(dtype, value)))
        tensor, dims = unnamed(as_variable(value, f"the carry that the step returns, {leaf.path},"))
        if dims == leaf.dims or output.is_carry:
            return tensor
        ndim = output.initial.type.ndim - 1
        mine = () if leaf.dims is None and ndim == 0 else leaf.dims
        theirs = () if dims is None and tensor.type.ndim == 0 else dims
        if mine is None or theirs is None or not set(mine) <= set(theirs):
            raise TypeError(
                f"{leaf.path} has {_dims_text(leaf.dims)}, the step returns {_dims_text(dims)}; "
                "the dims of what it returns must include those of the initial value"
            )
        added = tuple(dim for dim in theirs if dim not in mine)
        leaf.dims = (*added, *mine)
        output.initial = with_axes(output.initial, 1, len(added))
        if output.tap_type is not None:
            shape = ((1,) * len(added)) + output.tap_type.shape
            output.tap_type = TensorType(output.tap_type.dtype, shape)
        return tensor.transpose(*(theirs.index(dim) for dim in leaf.dims))


def _dims_text(dims: Dims | None) -> str:
    return "no named dims" if dims is None else f"the dims {dims}"


def _compared(condition: Variable) -> Variable:
    """Return a condition, which is no number that was to be compared with one."""
    if np.dtype(condition.type.dtype).kind in "fc":
        raise TypeError(
            f"the condition must be a boolean, got {type_text(condition.type)}; compare, as in "
            "abs(change) < 1e-6; several values to keep are one tree, as in carry, (y, z)"
        )
    return condition


def _label(path: str) -> str | None:
    """Return the name that a leaf has in its tree: the last key or field of its path."""
    found = re.search(r"""(?:\.|\[")(\w+)(?:"\])?$""", path)
    return found and found[1]


def _as_result(value: Any, path: str) -> Variable:
    """Return what a step returned as a variable; a Python number has the dtype of its kind."""
    if isinstance(value, int | float) and not isinstance(value, bool | np.generic):
        return pt.constant(value, dtype="int64" if isinstance(value, int) else config.floatX)
    return as_variable(value, f"{path} that the step returns")


def _read_xs(walk: _Walk, leaf: Any, path: str) -> tuple[SequenceArgument, _Leaf]:
    n = leaf.n if isinstance(leaf, Lags) else None
    given = leaf.rows if isinstance(leaf, Lags) else leaf
    rows, dims = walk.rows(given, path)
    if walk.before is None and dims is not None:
        named_dims = as_variable(given, path).type.dims
        walk.before = named_dims[: named_dims.index(walk.dim)]
    back = 1 if walk.reverse and not walk.flips else -1
    taps = [0] if n is None else [back * lag for lag in range(n + 1)]
    name = _label(path) or getattr(given, "name", None)
    return SequenceArgument(rows, taps, name, path), _Leaf(path, dims, n)


def _read_init(walk: _Walk, leaf: Any, path: str) -> tuple[Any, _Leaf]:
    """Return what is known of a state before the step is traced, and how a step sees it."""
    name = _label(path) or getattr(leaf, "name", None)
    if not isinstance(leaf, Lags):
        dims = None
        if isinstance(leaf, bool) or not isinstance(leaf, NUMBER):
            leaf, dims = unnamed(as_variable(leaf, path))
        return {"initial": leaf, "name": name}, _Leaf(path, dims, None)
    if leaf.n == 0:
        return None, _Leaf(path, None, 0)
    is_scalar = getattr(as_variable(leaf.rows, path).type, "ndim", None) == 0
    rows, dims = (None, None) if is_scalar else walk.rows(leaf.rows, path)
    known = 0 if rows is None else rows.type.shape[0]
    if rows is None or (known is not None and known < leaf.n):
        has = "is a scalar" if rows is None else f"has {known} row{'s' * (known != 1)}"
        raise ValueError(
            f"{path} {has}, lags(..., {leaf.n}) needs {leaf.n} row{'s' * (leaf.n != 1)}: the "
            "values of the steps before the first, in the order of time"
        )
    if known != leaf.n:
        rows = rows[: leaf.n] if walk.reverse and not walk.flips else rows[-leaf.n :]
    taps = [-lag for lag in range(1, leaf.n + 1)]
    return OutputArgument(rows, taps, name, path), _Leaf(path, dims, leaf.n)


def _check_steps(
    title: str, xs: Any, walked: Sequence[SequenceArgument], length: Variable | None
) -> None:
    """Raise if known numbers of steps differ."""
    given = [(x.name or x.argument, x.static_length()) for x in walked]
    if length is not None:
        given.append(("length", constant_integer(length)))
    elif not walked:
        raise ValueError(
            f"{title}: nothing says how many steps to take; give length, which with a condition is "
            f"the greatest number, or xs{without_arrays('xs', xs)}"
        )
    check_spans(title, walked)
    known = known_to_differ(given)
    if known:
        text = ", ".join(f"{label} gives {steps}" for label, steps in known)
        raise ValueError(
            f"{title}: all must give one number of steps, but {text}; cut what is longer, as in "
            f"x[:{min(steps for _, steps in known)}]"
        )


class _Options(TypedDict, total=False):
    length: Any
    reverse: bool
    axis: int
    dim: str | None
    checkpoint: Any
    method: Any
    name: str | None


# What is given for `init` and `xs` may be numbers and arrays, which a step sees as variables: the
# types of the step say what comes out.
@overload
def loop(
    step: Callable[[Carry, X], tuple[Carry, Y]],
    init: Any,
    xs: Any = ...,
    **options: Unpack[_Options],
) -> tuple[Carry, Y]: ...


@overload
def loop(
    step: Callable[[Carry, X], tuple[Carry, Y]],
    init: Any,
    xs: Any = ...,
    *,
    until: Callable[[Carry], Any],
    **options: Unpack[_Options],
) -> tuple[Carry, Y, TensorVariable]: ...


@overload
def loop(
    step: Callable[[Carry, X], tuple[Carry, Y, Any]],
    init: Any,
    xs: Any = ...,
    **options: Unpack[_Options],
) -> tuple[Carry, Y, TensorVariable]: ...


def loop(
    step: Callable[..., Any],
    init: Any,
    xs: Any = None,
    *,
    length: Any = None,
    until: Callable[..., Any] | None = None,
    reverse: bool = False,
    axis: int = 0,
    dim: str | None = None,
    checkpoint: Any = None,
    method: Any = "sequential",
    name: str | None = None,
) -> Any:
    """Run a step from a first carry over the rows of arrays.

    Parameters
    ----------
    step : callable
        ``step(carry, x) -> carry, y``. It is called once or a few times, with symbolic variables
        in the structures of `init` and `xs`. It returns the next carry, in the structure of `init`,
        and `y`, a tree of what to keep of this step. It may return ``carry, y, stop``: the loop
        ends after the step in which `stop`, a scalar, is true. What a step uses without being given
        it becomes an input of the loop.
    init : tree of variables, array_like or generators
        The carry before the first step: a variable, or variables in tuples, lists, named tuples,
        dicts and dataclasses, nested as you like; None holds nothing. Where a step returns a wider
        dtype, sizes in the place of 1, or more named dimensions, the initial value is promoted,
        and broadcast. A random generator is carried like any other value. A shared variable gives
        its value. With `lags`, a step reads several steps back.
    xs : tree of variables or array_like, optional
        What the loop iterates over, all of one length. A step gets one row of each; with `lags`
        those before it, too. Without `xs` it gets None.
    length : int or integer scalar variable, optional
        The number of steps, the greatest one where a condition may end the loop. May be 0.
    until : callable, optional
        Takes the new carry and returns a scalar; the loop ends after the step for which it is true.
    reverse : bool, optional
        Iterate from the last row to the first. ``ys[t]`` still belongs to ``xs[t]``.
    axis : int, optional
        The axis of each array of `xs` that is time, and of each array of `ys`; of one with fewer
        dimensions the last.
    dim : str, optional
        For xtensor variables, the dimension to iterate over. A step gets variables without it, and
        those that come out have it behind the dimensions that it follows in the first of `xs`.
    checkpoint : int, sequence of int, "sqrt", Levels or Memory, optional
        How a gradient saves memory by computing steps again, as in `scan`.
    method : {"sequential", "newton"} or Newton, optional
        How the states are computed, as in `scan`.
    name : str, optional
        Name of the loop, for printing and messages.

    Returns
    -------
    final : tree
        The carry after the last step, in the structure of `init`; without steps, `init`.
    ys : tree
        What the steps returned, in the structure of their `y`, each stacked: ``(steps, …)``.
    done : bool scalar variable
        Whether the condition ended the loop. Returned where there is one.

    Raises
    ------
    TypeError
        If an argument or a value that a step returns has a type that cannot be used.
    ValueError
        If `step` returns a carry of another structure than `init` (the message has both, as a
        diff), numbers of steps are missing or differ, or `step` draws from a random generator and
        does not return the one that follows.

    Notes
    -----
    There are no updates: the last value of a shared variable that was carried is a part of
    `final`, and ``pytensor.function(..., updates={shared: final})`` stores it.

    Type checkers infer the types of `final` and `ys` from what `step` is annotated to return; the
    carry of a step with lags is best annotated as Any.

    The interface is that of `jax.lax.scan`. A loop of `loop` and one of `scan` are the same.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> def step(carry, x):
    ...     total = carry["total"] + x
    ...     return {"total": total, "count": carry["count"] + 1}, total / (carry["count"] + 1)
    >>> final, means = scanlib.loop(step, {"total": 0.0, "count": 0}, x)
    >>> pytensor.function([x], [means, final["count"]])([1.0, 2.0, 6.0])
    [array([1. , 1.5, 3. ]), array(3)]
    """
    check_flags()
    function = function_called("loop")
    title = loop_title(read_name(name), function)
    with errors_of(title):
        reverse = read_flag(title, "reverse", reverse)
        schedule, newton = read_checkpoint(checkpoint), read_method(method)
        for label, given in {"step": step, "until": until}.items():
            if not callable(given) and (label == "step" or given is not None):
                raise TypeError(f"{label} must be callable, got {brief(given)}")
        if not isinstance(dim, str | None):
            raise TypeError(f"dim must be a string, got {brief(dim)}")
        walk = _Walk(title, axis, dim, reverse, flips=reverse and (schedule or newton) is not None)
        arrays, x_tree = flatten(xs)
        pairs = [_read_xs(walk, *pair) for pair in zip(arrays, x_tree.paths("xs"), strict=True)]
        walked, x_leaves = [x for x, _ in pairs], [leaf for _, leaf in pairs]
        steps = read_n_steps(length, "length")
        _check_steps(title, xs, walked, steps)
        initial, tree = flatten(init)
        started = [
            _read_init(walk, *pair) for pair in zip(initial, tree.paths("init"), strict=True)
        ]
        states = [pair for pair in started if pair[1].lags != 0]
        paths = [leaf.path for _, leaf in states]
        outputs = read_initials([value for value, _ in states], paths, [x.variable for x in walked])
    leaves = [leaf for _, leaf in started]
    call = _Step(step, title, tree, x_tree, leaves, x_leaves, outputs, until)
    rows = [(x, tap, x.tap(tap)) for x in walked for tap in x.taps]
    builder = LoopBuilder(function, call, rows, outputs, name, steps)
    built = builder.build(newton, True, reverse=reverse and not walk.flips, checkpoint=schedule)
    if built.shared:
        raise ValueError(f"{title}: {_changes_shared(list(built.shared))}")
    all_dims = [*(leaf.dims for leaf in (*x_leaves, *leaves)), *call.y_dims]
    if dim is not None and all(dims is None for dims in all_dims):
        raise ValueError(
            f"{title}: got dim={dim!r}, but nothing has named dims; give xs with them, as in "
            "pytensor.xtensor.as_xtensor(x, dims=(...)), or a number, as in axis=0"
        )
    final = tree.build(iter(_final(built, walk, call, initial)))
    ys = []
    values = built.values[len(outputs) :]
    for value, dims, written in zip(values, call.y_dims, call.labels, strict=True):
        name = built.free_name(written) or value.name
        ys.append(walk.over_time(value, dims, name))
    stacked = call.ys.build(iter(ys))
    return (final, stacked, built.results.carries[-1]) if call.stops else (final, stacked)


def _final(built: Built, walk: _Walk, call: _Step, initial: list[Any]) -> list[Any]:
    """Return the leaves of the carry after the last step."""
    histories, carries = iter(built.results.histories), iter(built.results.carries)
    outputs, is_reverse = iter(call.outputs), walk.reverse and not walk.flips
    result: list[Any] = []
    for leaf, given in zip(call.states, initial, strict=True):
        if leaf.lags == 0:
            result.append(given)
            continue
        output = next(outputs)
        if output.is_carry:
            result.append(named(next(carries), leaf.dims))
            continue
        history = next(histories)
        if leaf.lags is None:
            value = history[0 if is_reverse else -1]
            name_result(value, built.free_name(output.name, "[-1]"))
            result.append(named(value, leaf.dims))
            continue
        rows = history[: leaf.lags] if is_reverse else history[-leaf.lags :]

        def last(lag: int, rows: Variable = rows, dims: Dims | None = leaf.dims) -> Variable:
            return named(rows[lag - 1 if is_reverse else -lag], dims)

        name = built.free_name(output.name)
        result.append(Lags(leaf.lags, 1, last, walk.over_time(rows, leaf.dims, name)))
    return result
