"""Values of graphs of scalars, and what these do not exceed.

An operation has its least and its greatest value where what it is given has: true of sums,
differences, products, extremes, and quotients of lengths by positive numbers. What decides between
two values tells more of them, as in the length of ``x[:k]`` for ``k >= 0``::

    switch(k < n, k, n)  <=  n
"""

from __future__ import annotations

from itertools import product
from math import ceil
from typing import Any

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FrozenFunctionGraph
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarType, discrete_dtypes

Range = tuple[Any, Any]  # the least and the greatest value
Ranges = dict[Variable, Range]
# Two sizes of numbers of which nothing is known; what depends on them has no bound.
UNBOUNDED = (2**31, 2**31 + 2**20)
# For u < v, u > v and so on: whether the two change places, and whether they may be equal.
ORDERS = {ps.LT: (False, False), ps.LE: (False, True), ps.GT: (True, False), ps.GE: (True, True)}


def evaluate(body: FrozenFunctionGraph, values: list[Any]) -> Any:
    """Return the value of a graph of scalars, by the `perform` of its Ops."""
    known: dict[Variable, Any] = {}

    def read(variable: Variable) -> Any:
        return variable.data if isinstance(variable, Constant) else known[variable]

    for variable, value in zip(body.inputs, values, strict=True):
        known[variable] = _typed(variable, value)
    for node in body.toposort():
        known.update(zip(node.outputs, _computed(node, list(map(read, node.inputs))), strict=True))
    return read(body.outputs[0])


def greatest(body: FrozenFunctionGraph, ranges: list[Range | None]) -> int | None:
    """Return a number that the value of a graph of scalars does not exceed, None if none is known.

    Parameters
    ----------
    body : FrozenFunctionGraph
    ranges : list of tuple or None
        The least and the greatest value of each input, None if they are not known.
    """
    found = set()
    for size in UNBOUNDED:
        known: Ranges = {}
        for variable, ends in zip(body.inputs, ranges, strict=True):
            low, high = _all_values(variable.type.dtype, size) if ends is None else ends
            kind = np.int64 if variable.type.dtype in discrete_dtypes else np.float64
            known[variable] = (kind(low), kind(high))
        found.add(ceil(_range(body.outputs[0], known, {})[1]))
        if None not in ranges:
            break
    return found.pop() if len(found) == 1 else None


def _all_values(dtype: str, size: int) -> Range:
    """Return the least and the greatest number of a dtype, or some that stand for them."""
    if dtype == "bool":
        return 0, 1
    if np.dtype(dtype).kind in "iu" and np.dtype(dtype).itemsize < 4:
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return -size, size


def _range(variable: Variable, known: Ranges, memo: Ranges) -> Range:
    """Return the least and the greatest value of a scalar."""
    if isinstance(variable, Constant):
        return variable.data, variable.data
    if variable in known:
        return known[variable]
    if variable not in memo:
        node = variable.owner
        assert node is not None
        memo[variable] = _range_of_result(node, variable, known, memo)
    return memo[variable]


def _range_of_result(node: Apply, out: Variable, known: Ranges, memo: Ranges) -> Range:
    op = getattr(node.op, "scalar_op", node.op)
    if isinstance(op, CheckAndRaise):  # the ends of a range need not meet
        return _range(node.inputs[0], known, memo)
    if isinstance(op, ps.Switch):
        return _range_of_choice(node, known, memo)
    given = [_range(value, known, memo) for value in node.inputs]
    position = node.outputs.index(out)
    corners = product(*((low,) if low == high else (low, high) for low, high in given))
    values = [_computed(node, list(corner))[position] for corner in corners]
    low, high = min(values), max(values)
    if all(one == other for one, other in given):
        return low, high
    if out.type.dtype == "bool" and type(op) not in ORDERS:
        return _typed(out, False), _typed(out, True)
    if isinstance(op, ps.Mod):
        low, high = min(0, *given[1]), max(0, *given[1])
    elif isinstance(op, ps.IntDiv | ps.TrueDiv) and given[1][0] != given[1][1]:
        high = max(abs(value) for value in given[0])  # by one, where it is not zero
        low = -high
    elif isinstance(op, ps.Abs | ps.Sqr) and given[0][0] < 0 < given[0][1]:
        low = 0
    return _typed(out, low), _typed(out, high)


def _range_of_choice(node: Apply, known: Ranges, memo: Ranges) -> Range:
    """Return the range of what a condition decides, from those for each of its values."""
    condition, *values = node.inputs
    least, greatest = _range(condition, known, memo)
    found = [
        _range(value, _decided(condition, truth, known, memo), {})
        for value, truth in zip(values, (True, False), strict=True)
        if (greatest if truth else not least)
    ]
    return min(low for low, _ in found), max(high for _, high in found)


def _decided(condition: Variable, truth: bool, known: Ranges, memo: Ranges) -> Ranges:
    """Return what is known of numbers where a comparison of two of them holds, or does not."""
    node = condition.owner
    order = None if node is None else ORDERS.get(type(getattr(node.op, "scalar_op", node.op)))
    if node is None or order is None:
        return known
    swapped, equal = order
    if swapped != (not truth):  # not (u < v) is v <= u
        second, first = node.inputs
    else:
        first, second = node.inputs
    whole = all(value.type.dtype in discrete_dtypes for value in node.inputs)
    gap = int(whole and ((not equal) if truth else equal))  # now first + gap <= second
    (low, high), (least, most) = (_range(value, known, memo) for value in (first, second))
    decided = dict(known)
    decided[first] = low, max(min(high, most - gap), low)
    decided[second] = min(max(least, low + gap), most), most
    return decided


def _typed(variable: Variable, value: Any) -> Any:
    value = np.asarray(value, dtype=variable.type.dtype)
    return value[()] if isinstance(variable.type, ScalarType) else value


def _computed(node: Apply, values: list[Any]) -> list[Any]:
    """Return what an operation makes of values."""
    storage: list[list[Any]] = [[None] for _ in node.outputs]
    node.op.perform(node, values, storage)
    return [_typed(out, value) for out, (value,) in zip(node.outputs, storage, strict=True)]
