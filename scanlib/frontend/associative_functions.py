r"""Scans and reductions with the user's own associative function.

For rows ``x_0 … x_{T-1}`` and an associative function ∘,

    associative_scan:     y_t = x_0 ∘ x_1 ∘ … ∘ x_t,   t = 0 … T-1
    associative_reduce:   y_{T-1}

with the rows taken from the end under `reverse`. The function is called once, with symbolic
single rows; see `ops.lowered.associative_scan` for the loop that comes of it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.frontend.arguments import known_to_differ, read_axis
from scanlib.frontend.builder import add_captured
from scanlib.frontend.states import type_text
from scanlib.frontend.step_function import call_function, step_name
from scanlib.frontend.trees import Tree, difference, flatten
from scanlib.frontend.values import as_tensor, is_list_of_numbers, read_flag, shown
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.graph import conform, is_tensor, row_type
from scanlib.ops.loop import Loop, Sequence, State
from scanlib.ops.row_ops.checked_rows import CheckedValue


class _Elems(NamedTuple):
    """The arrays to scan, time first; `axis` is where time stood, `tree` what held them."""

    arrays: list[Variable]
    labels: list[str]
    axis: int
    tree: Tree

    def has_rows(self) -> bool:
        """Whether there are known to be rows."""
        return any(x.type.shape[0] for x in self.arrays)


def associative_scan(
    fn: Callable[..., Any], elems: Any, axis: int = 0, reverse: bool = False
) -> Any:
    """Combine all elements up to each one with an associative function.

    Parameters
    ----------
    fn : callable
        Takes two elements, ``fn(earlier, later)``, and returns their combination, of the same
        structure, shapes and dtypes. An element is `elems` with one slice of each tensor in its
        place, without the scanned axis. `fn` must be associative,
        ``fn(fn(a, b), c) = fn(a, fn(b, c))`` up to rounding; it need not be commutative. This is
        taken on trust. Variables that `fn` uses without being given them become inputs.
    elems : tree of tensor or array_like
        The elements, stacked along `axis`: tensors of the same length along it, otherwise of
        any shapes and dtypes; one, or several in tuples, lists, named tuples, dicts and
        dataclasses, nested as in `loop`. A list is a list of tensors, not one tensor, unless it
        holds numbers.
    axis : int, optional
        The axis to scan along. A negative axis counts from the end of the first tensor.
    reverse : bool, optional
        Scan from the last element to the first: `earlier` is then what stands further towards
        the end, and result ``t`` combines the elements from the last one to element ``t``.

    Returns
    -------
    tree of variable
        What `elems` is, with the same shapes and dtypes. Element ``t`` combines elements
        ``0 … t``.

    Raises
    ------
    TypeError
        If an argument has the wrong type, or `fn` returns another structure, another rank or
        another dtype than it was given.
    ValueError
        If lengths, or the shapes that `fn` is given and returns, are known to differ.
    numpy.exceptions.AxisError
        If a tensor does not have the axis.

    Notes
    -----
    When it runs, `scanlib.ops.errors.SequenceLengthError` is raised if lengths differ and
    `scanlib.ops.errors.StepShapeError` if `fn` changes a shape. No elements give no results.

    In the order of its arguments this is ``jax.lax.associative_scan``. JAX calls `fn` with
    batches of elements, with the scanned axis in its place; here `fn` sees single elements and
    is batched afterwards. docs/associative.md says when a function must be changed.

    G. E. Blelloch, "Prefix sums and their applications", CMU-CS-90-190, 1990.

    Examples
    --------
    A linear recurrence ``h[t] = a[t] h[t-1] + b[t]``, as the composition of affine functions:

    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> a, b = pt.vectors("a", "b")
    >>> _, h = scanlib.associative_scan(
    ...     lambda first, then: (first[0] * then[0], first[1] * then[0] + then[1]), (a, b)
    ... )
    >>> pytensor.function([a, b], h)([1, 2, 3], [1, 1, 1])
    array([ 1.,  3., 10.])
    """
    title = "associative_scan"
    rows = _read_elems(title, elems, axis)
    values = _build(title, fn, rows, read_flag(title, "reverse", reverse))
    if not rows.has_rows():
        values = [y[: rows.arrays[0].shape[0]] for y in values]
    return rows.tree.build(pt.moveaxis(y, 0, rows.axis) if rows.axis else y for y in values)


def associative_reduce(
    fn: Callable[..., Any], elems: Any, axis: int = 0, reverse: bool = False
) -> Any:
    """Combine all elements with an associative function.

    Parameters
    ----------
    fn, elems, axis, reverse
        As in `associative_scan`.

    Returns
    -------
    tree of variable
        The last result of `associative_scan`, without the scanned axis. The results before it
        are not stored.

    Raises
    ------
    TypeError, ValueError, numpy.exceptions.AxisError
        As in `associative_scan`; `ValueError` also if there are known to be no elements.
    IndexError
        When it runs, if there are no elements: without an identity there is no result then.

    Examples
    --------
    >>> import numpy as np
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> matrices = pt.tensor3("matrices")
    >>> product = scanlib.associative_reduce(pt.dot, matrices)
    >>> pytensor.function([matrices], product)(np.full((3, 2, 2), 2.0))
    array([[32., 32.],
           [32., 32.]])
    """
    title = "associative_reduce"
    rows = _read_elems(title, elems, axis)
    if any(x.type.shape[0] == 0 for x in rows.arrays):
        raise ValueError(
            f"{title}: {rows.labels[0]} has length 0 along axis={axis}; there is "
            "nothing to combine, and no identity to return"
        )
    if read_flag(title, "reverse", reverse):
        # Only loops that run forward do without their history.
        rows = rows._replace(arrays=[x[::-1] for x in rows.arrays])
    values = [y[-1] for y in _build(title, fn, rows, False)]
    if not rows.has_rows():
        there = pt.gt(rows.arrays[0].shape[0], 0)
        values = [CheckedValue(IndexError, _NO_ROWS)(value, there) for value in values]
    return rows.tree.build(iter(values))


# Arguments


def _read_elems(title: str, elems: Any, axis: Any) -> _Elems:
    """Read the elements and move the scanned axis to the front."""
    elems = np.array(elems) if is_list_of_numbers(elems) else elems
    given, tree = flatten(elems, of_arrays=True)
    if not given:
        raise ValueError(
            f"{title}: there is nothing to scan, elems is an empty {type(elems).__name__}"
        )
    labels = tree.paths("elems")
    tensors = [
        as_tensor(value, f"{title}: {label}") for value, label in zip(given, labels, strict=True)
    ]
    labels = [x.name or label for x, label in zip(tensors, labels, strict=True)]
    position = read_axis(title, axis, tensors[0].type.ndim, labels[0])
    for tensor, label in zip(tensors[1:], labels[1:], strict=True):
        read_axis(title, position, tensor.type.ndim, label)
    arrays = [pt.moveaxis(x, position, 0) if position else x for x in tensors]
    known = known_to_differ(zip(labels, (x.type.shape[0] for x in arrays), strict=True))
    if known:
        text = ", ".join(f"{label} has {length}" for label, length in known)
        raise ValueError(
            f"{title}: the tensors must have the same length along axis={axis}, but {text}"
        )
    return _Elems(arrays, labels, position, tree)


# The body


def _combined(
    title: str, fn: Callable[..., Any], rows: _Elems, earlier: list, later: list
) -> list[Variable]:
    """Call the function once and return what it makes of two elements, checked."""
    if not callable(fn):
        raise TypeError(f"{title}: the function must be callable, got {type(fn).__name__}")
    elements = [rows.tree.build(iter(earlier)), rows.tree.build(iter(later))]
    texts = ["the earlier element", "the later element"]
    returned = call_function(fn, elements, texts, f"{title}: the function")
    leaves, given = flatten(returned)
    if rows.tree.is_leaf:
        leaves = [returned]
    elif _as_tuple(given) != _as_tuple(rows.tree):
        raise TypeError(
            f"{title}: {step_name(fn)} returns an element of another structure than elems:\n"
            f"{difference(rows.tree, given)}"
        )
    return [
        _check_part(title, label, value, like)
        for label, value, like in zip(rows.labels, leaves, earlier, strict=True)
    ]


def _as_tuple(tree: Tree) -> Tree:
    """Return a structure in which a list is a tuple: a function may return either."""
    return replace(tree, kind=tuple) if tree.kind is list else tree


def _check_part(title: str, label: str, value: Any, like: Variable) -> Variable:
    """Return one part of a combination as a value of the element's type."""
    if not isinstance(value, Variable) or not is_tensor(value):
        came = getattr(value, "type", None) or shown(value)
        raise TypeError(
            f"{title}: for {label} the function must return a tensor of type {like.type}, "
            f"got {came}"
        )
    mine, theirs = like.type, value.type
    if mine.dtype != theirs.dtype:
        advice = f"cast the tensor before, or return pytensor.tensor.cast(value, {mine.dtype!r})"
    elif mine.ndim != theirs.ndim:
        advice = "combining must keep the shape, of which the scanned axis is no part"
    elif any(None not in (n, m) and n != m for n, m in zip(mine.shape, theirs.shape, strict=True)):
        advice = "combining must keep the shape, pad the elements to one that does"
    else:
        return conform(value, mine)
    raise (TypeError if (mine.dtype, mine.ndim) != (theirs.dtype, theirs.ndim) else ValueError)(
        f"{title}: an element of {label} is {type_text(mine)}, but the function returned "
        f"{type_text(theirs)} for it; {advice}"
    )


def _build(title: str, fn: Callable[..., Any], rows: _Elems, reverse: bool) -> list[Variable]:
    """Trace the function and return the histories of its loop.

    The first row is the initial row of a state of depth one and the others are the sequence, so
    that the history is the result, and nothing is copied. Where there may be no rows, the initial
    row is zeros into which the first row is put, if there is one, and no part of the result if not.
    """
    earlier, later = (
        [
            row_type(x)(name=f"{label}[{when}]")
            for x, label in zip(rows.arrays, rows.labels, strict=True)
        ]
        for when in ("earlier", "later")
    )
    outputs = _combined(title, fn, rows, earlier, later)
    loop = Loop(name=title, function="associative_scan", reverse=reverse, associative=True)
    for i, (x, label) in enumerate(zip(rows.arrays, rows.labels, strict=True)):
        first, others = (x[-1:], x[:-1]) if reverse else (x[:1], x[1:])
        if not x.type.shape[0]:
            zeros = pt.zeros((1, *x.shape[1:]), dtype=x.type.dtype)
            first = pt.set_subtensor(zeros[: x.shape[0]], first)
        if i and None in (x.type.shape[0], rows.arrays[0].type.shape[0]):
            text = _LENGTHS.format(label, rows.labels[0])
            equal = pt.eq(x.shape[0], rows.arrays[0].shape[0])
            first = CheckedValue(SequenceLengthError, text)(first, equal)
        loop.sequences.append(Sequence(others, later[i], label))
        loop.states.append(State(first, {-1: earlier[i]}, outputs[i], name=label))
    add_captured(loop)
    return loop.apply().histories


# Equal checks let equal scans become one loop, so there is no name of the scan.
_LENGTHS = (
    "associative scan: all arrays must have the same length along the scanned axis, but `{}` and "
    "`{}` have not"
)
_NO_ROWS = "index -1 is out of bounds: the associative scan has no rows, so it has no last one"
