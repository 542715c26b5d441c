r"""`AssociativeScan`: the running combination of rows under the user's own function.

For rows ``x_0 … x_{T-1}`` and a function ∘ that the user promises to be associative,
``(a ∘ b) ∘ c = a ∘ (b ∘ c)``::

    y_0 = x_0,    y_t = y_{t-1} ∘ x_t = x_0 ∘ x_1 ∘ … ∘ x_t        (from the end with `reverse`)

A row may be a tuple of tensors, its parts, and ∘ need not be commutative: its first argument
covers what came earlier in the order of the walk. There is one array of shape (T, …) per part,
both in `x` and in `y`; the body combines single rows::

    (*earlier, *later, *non_sequences) -> combined

The promise is all that this Op adds to a loop. Linkers for many processors may combine the
rows in a tree of logarithmic depth, as JAX does: G. E. Blelloch, "Prefix sums and their
applications", CMU-CS-90-190, 1990. One processor does the least work by walking:
`as_loop` is that walk as a canonical loop. Derivatives are those of the walk, so they hold even
where the promise does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.gradient import DisconnectedType, NullType
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FrozenFunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.type import Type
from pytensor.raise_op import CheckAndRaise

from scanlib._compat import thaw_graph
from scanlib.ops.derivatives import Variables
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.frozen_body import HasFrozenBody
from scanlib.ops.graph import is_differentiable
from scanlib.ops.loop import Loop, NonSequence, Results, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.row_ops.one_row import OneRow
from scanlib.ops.scan import stacked


class CombineInputs(NamedTuple):
    """The inputs of a combine body, by role."""

    earlier: list
    later: list
    non_sequences: list


class AssociativeScan(HasFrozenBody, Op):
    """All running combinations of rows under an associative function.

    Parameters
    ----------
    body : FrozenFunctionGraph
        ``(*earlier, *later, *non_sequences) -> combined``; every part of `combined` has the
        type of the same part of `earlier` and `later`.
    n_elems : int
        Number of parts of a row, that is, of arrays to scan.
    reverse : bool, optional
        Whether to walk from the last row to the first.
    name : str, optional
        For printing and messages.
    labels : tuple of str or None, optional
        Names of the parts, for messages.

    Notes
    -----
    Two scans with the same body and direction are equal; names do not count. Users call
    `scanlib.associative_scan`.
    """

    __props__ = ("body", "n_elems", "reverse")

    def __init__(
        self,
        body: FrozenFunctionGraph,
        n_elems: int,
        reverse: bool = False,
        name: str | None = None,
        labels: tuple[str | None, ...] | None = None,
    ) -> None:
        if n_elems < 1 or len(body.inputs) < 2 * n_elems or len(body.outputs) != n_elems:
            raise ValueError(
                f"a body that combines rows of {n_elems} part(s) has at least {2 * n_elems} inputs "
                f"and {n_elems} output(s), got {len(body.inputs)} and {len(body.outputs)}"
            )
        self.body = body
        self.n_elems = n_elems
        self.reverse = reverse
        self.name = name
        self.labels = labels or (None,) * n_elems
        self._walk: Apply | None = None
        inner = self.split_body_inputs(body.inputs)
        for i, (earlier, later, out) in enumerate(
            zip(inner.earlier, inner.later, body.outputs, strict=True)
        ):
            if earlier.type != later.type or not earlier.type.is_super(out.type):
                raise TypeError(
                    f"part {i} of a row must keep its type: {earlier.type} and {later.type} were "
                    f"combined to {out.type}"
                )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_walk": None}

    def __str__(self) -> str:
        flags = ["reverse"] * self.reverse
        return f"AssociativeScan{{{', '.join([self.name or 'combine', *flags])}}}"

    def split_body_inputs(self, flat: Sequence) -> CombineInputs:
        """Split the flat inputs of the body."""
        n = self.n_elems
        return CombineInputs(list(flat[:n]), list(flat[n : 2 * n]), list(flat[2 * n :]))

    def static_length(self, inputs: Sequence[Variable]) -> int | None:
        """Return the number of rows where it is known when the graph is built."""
        known = (variable.type.shape[0] for variable in inputs[: self.n_elems])
        return next((length for length in known if length is not None), None)

    # Types

    def outer_input_types(self) -> list[Type]:
        """Return the least specific type of each input."""
        inner = self.split_body_inputs(self.body.inputs)
        return [
            *(stacked(variable.type, None) for variable in inner.earlier),
            *(variable.type for variable in inner.non_sequences),
        ]

    def make_node(self, *inputs: Variable) -> Apply:
        expected = self.outer_input_types()
        if len(inputs) != len(expected):
            raise ValueError(f"{self} takes {len(expected)} inputs, got {len(inputs)}")
        checked = []
        for i, (variable, type) in enumerate(zip(inputs, expected, strict=True)):
            try:
                checked.append(type.filter_variable(variable))
            except TypeError as error:
                raise TypeError(
                    f"{self}: input {i} must have type {type}, got {variable.type}"
                ) from error
        lengths = {variable.type.shape[0] for variable in checked[: self.n_elems]} - {None}
        if len(lengths) > 1:
            raise ValueError(f"{self}: the arrays have different lengths, {sorted(lengths)}")
        length = self.static_length(checked)
        inner = self.split_body_inputs(self.body.inputs)
        return Apply(self, checked, [stacked(v.type, length)() for v in inner.earlier])

    # Shapes

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the shapes of the outputs; called with or without an fgraph first."""
        return list(arguments[-1][: self.n_elems])

    # Values

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        elems, rest = inputs[: self.n_elems], inputs[self.n_elems :]
        for i, elem in enumerate(elems):
            if len(elem) != len(elems[0]):
                raise SequenceLengthError(length_message(self, i))
        if not len(elems[0]):
            for storage, elem in zip(output_storage, elems, strict=True):
                storage[0] = elem.copy()
            return
        if self._walk is None:
            loop = as_loop(self, [type() for type in self.outer_input_types()])
            self._walk = loop.apply().node
        later = [elem[:-1] if self.reverse else elem[1:] for elem in elems]
        first = [elem[-1:] if self.reverse else elem[:1] for elem in elems]
        self._walk.op.perform(self._walk, [*later, *first, *rest], output_storage)

    # Derivatives

    def pullback(
        self, inputs: Variables, outputs: Variables, cotangents: Variables
    ) -> list[Variable]:
        loop = as_loop(self, inputs)
        walk = loop.apply().node
        # A history holds the rows of an output and nothing else, except where there are none.
        found = walk.op.signature.split_inputs(
            walk.op.pullback(walk.inputs, walk.outputs, cotangents)
        )
        parts = zip(inputs, found.initials, found.sequences, strict=False)
        return [*(self._join_cotangents(*part) for part in parts), *found.non_sequences]

    def _join_cotangents(self, elem: Variable, first: Variable, later: Variable) -> Variable:
        """Return the cotangent of an array, given those of its first row and of the others."""
        if isinstance(first.type, DisconnectedType) and isinstance(later.type, DisconnectedType):
            return pg.disconnected_type()
        for part in (first, later):
            if isinstance(part.type, NullType):
                return part
        if not is_differentiable(elem):
            return pt.zeros_like(elem, dtype=config.floatX)
        start, others = _split_rows(elem, self.reverse)
        if isinstance(first.type, DisconnectedType):
            first = OneRow(zeros=True)(start)
        if not _has_rows(elem.type.shape[0]):
            first = first[: elem.shape[0]]
        if isinstance(later.type, DisconnectedType):
            later = pt.zeros_like(others)
        joined = pt.join(0, later, first) if self.reverse else pt.join(0, first, later)
        return pt.specify_shape(joined, elem.type.shape)

    def pushforward(
        self, inputs: Variables, outputs: Variables, tangents: Variables
    ) -> list[Variable]:
        walk = as_loop(self, inputs).apply().node
        starts, others = [], []
        for elem, tangent in zip(inputs[: self.n_elems], tangents, strict=False):
            if isinstance(tangent.type, DisconnectedType):
                starts.append(tangent)
                others.append(tangent)
                continue
            start, rest = _split_rows(tangent, self.reverse)
            starts.append(start if _has_rows(elem.type.shape[0]) else OneRow()(start))
            others.append(rest)
        moved = walk.op.pushforward(
            walk.inputs, walk.outputs, [*others, *starts, *tangents[self.n_elems :]]
        )
        return [
            tangent
            if isinstance(tangent.type, DisconnectedType)
            else _rows_of(tangent, inputs[0], self.static_length(inputs))
            for tangent in moved
        ]

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        walk = as_loop(self, [type() for type in self.outer_input_types()]).apply().node
        reach = walk.op.signature.split_inputs(walk.op.connection_pattern(walk))
        elems = [
            [a or b for a, b in zip(*rows, strict=True)]
            for rows in zip(reach.sequences, reach.initials, strict=True)
        ]
        return [*elems, *reach.non_sequences]


# The walk


def length_message(op: AssociativeScan, position: int) -> str:
    """Return the text for an array that does not have the length of the first one."""
    own, first = (op.labels[i] or f"elems[{i}]" for i in (position, 0))
    # No name of the scan: equal checks let equal scans become one loop.
    return (
        "associative scan: all arrays must have the same length along the scanned axis, but "
        f"`{own}` and `{first}` have not"
    )


def _has_rows(length: int | None) -> bool:
    """Whether a static length says that there is a first row."""
    return length is not None and length > 0


def _split_rows(elem: Variable, reverse: bool) -> tuple[Variable, Variable]:
    """Return the row at which the walk starts, as an array of one row, and the others."""
    return (elem[-1:], elem[:-1]) if reverse else (elem[:1], elem[1:])


def _rows_of(history: Variable, elem: Variable, length: int | None) -> Variable:
    """Return the rows of a history; that of a scan of no rows still holds one."""
    return history if _has_rows(length) else history[: elem.shape[0]]


def as_loop(op: AssociativeScan, inputs: Sequence[Variable]) -> Loop:
    """Return the walk from row to row as a canonical loop.

    The first row is the initial row of a state of depth 1 and the others are the sequence, so
    the history is the result, and nothing is copied. Where there may be no rows, the initial
    row is zero and no part of the result (`walked` leaves it out).

    Parameters
    ----------
    op : AssociativeScan
    inputs : sequence of Variable
        The arrays to scan, then the non-sequences.
    """
    elems, rest = list(inputs[: op.n_elems]), inputs[op.n_elems :]
    body = thaw_graph(op.body)
    inner = op.split_body_inputs(body.inputs)
    loop = Loop(name=op.name, function="associative_scan", reverse=op.reverse)
    for i, elem in enumerate(elems):
        start, others = _split_rows(elem, op.reverse)
        if not _has_rows(elem.type.shape[0]):
            start = OneRow()(start)
        if i and None in (elem.type.shape[0], elems[0].type.shape[0]):
            equal = pt.eq(elem.shape[0], elems[0].shape[0])
            start = CheckAndRaise(SequenceLengthError, length_message(op, i))(start, equal)
        label = op.labels[i]
        loop.sequences.append(SequencePart(others, inner.later[i], label))
        loop.states.append(State(start, {-1: inner.earlier[i]}, body.outputs[i], name=label))
    for outer, variable in zip(rest, inner.non_sequences, strict=True):
        loop.non_sequences.append(NonSequence(outer, variable, outer.name))
    return loop


def walked(node: Apply) -> tuple[list[Variable], Results]:
    """Return what takes the place of a node's outputs if it is walked, and the loop's results."""
    results = as_loop(node.op, node.inputs).apply()
    length = node.op.static_length(node.inputs)
    return [_rows_of(h, node.inputs[0], length) for h in results.histories], results
