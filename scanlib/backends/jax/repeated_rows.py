"""`repeat` by numbers that are known, or of which a greatest one is.

``repeat(x, n)`` has ``sum(n)`` rows. Where the numbers are computed from data, it is a buffer of as
many rows as there would be if all of them were the greatest one. Expressions tell that: truth
values are no more than one, ``clip(n, 0, 3)`` and ``minimum(n, 3)`` no more than three.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.basic import Alloc, Join
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.subtensor import Subtensor

from scanlib._compat import INDEX_READS, join_of
from scanlib.backends.jax.across import UNKNOWN, Plain, like, with_time
from scanlib.backends.jax.bounded import Bounded, UnknownLengthError, has_value

Known = dict[Variable, int | None]
SELECTING = (Alloc, DimShuffle, SpecifyShape, Subtensor, *INDEX_READS)


def repeat(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Return rows, each as many times as a number says."""
    value, numbers = inputs
    axis = node.op.axis
    if _is_known(numbers) and not (isinstance(value, UNKNOWN) and value.time == axis):
        if not isinstance(value, UNKNOWN):
            return plain(value, np.asarray(numbers))
        return like(value, plain(value.whole(), np.asarray(numbers)))
    if isinstance(value, UNKNOWN) and value.time != axis:
        value.__jax_array__()
    first = value.first if isinstance(value, UNKNOWN) else jnp.moveaxis(jnp.asarray(value), axis, 0)
    return _repeated(first, numbers, axis, greatest_item(node.inputs[1]))


def _repeated(value: Any, numbers: Any, axis: int, most: int | None) -> Any:
    """Return rows of what may have an unknown length, a number of times each."""
    rows = value.rows if isinstance(value, Bounded) else value
    times = numbers.filled(0) if isinstance(numbers, Bounded) else jnp.asarray(numbers)
    count = min(len(rows), len(times))
    rows, times = rows[:count], jnp.maximum(times[:count], 0)
    if _is_known(numbers):
        room = int(np.asarray(numbers)[:count].sum())
    elif most is None:
        raise UnknownLengthError(
            "JAX needs to know when it compiles how many rows `repeat` can give, but the function "
            "itself computes how often each is repeated. Say how often that can be at most, as "
            "`clip(repeats, 0, 3)` does"
        )
    else:
        room = count * max(most, 0)
    if not isinstance(numbers, Bounded) and isinstance(value, Bounded):
        times = jnp.where(value.valid().reshape(-1)[:count], times, 0)
    found = jnp.repeat(rows, times, axis=0, total_repeat_length=room)
    if _is_known(numbers) and not isinstance(value, Bounded):
        return jnp.moveaxis(found, 0, axis)
    return with_time(Bounded(found, times.sum(), "an array of repeated rows"), axis)


def _is_known(numbers: Any) -> bool:
    return isinstance(numbers, np.ndarray) or has_value(numbers)


def greatest_item(variable: Variable, known: Known | None = None) -> int | None:
    """Return a number that no item of an array of integers exceeds, None if none is known.

    Parameters
    ----------
    variable : Variable
    known : dict, optional
        Such numbers of the inputs of the graph it is in.
    """
    if isinstance(variable, Constant):
        data = np.asarray(variable.data)
        return int(data.max()) if data.size else 0
    if variable.type.dtype == "bool":
        return 1
    node = variable.owner
    if node is None:
        return (known or {}).get(variable)
    op = getattr(node.op, "core", node.op)
    if isinstance(op, SELECTING):
        return greatest_item(node.inputs[0], known)
    if isinstance(op, Join):
        return _greatest([greatest_item(part, known) for part in join_of(node)[1]])
    op = op.scalar_op if isinstance(op, Elemwise) else op
    return _of_operation(op, node.inputs, [greatest_item(value, known) for value in node.inputs])


def _of_operation(op: Any, inputs: list[Variable], found: list[int | None]) -> int | None:
    """Return a number that no result of an operation exceeds, from such numbers of its inputs."""
    if isinstance(op, ps.Composite):
        (result,) = op.fgraph.outputs
        return greatest_item(result, dict(zip(op.fgraph.inputs, found, strict=True)))
    if isinstance(op, ps.Cast | ps.Identity):
        return found[0] if inputs[0].type.dtype in ps.discrete_dtypes else None
    if isinstance(op, ps.Clip):
        return found[2]
    if isinstance(op, ps.ScalarMinimum):
        return min((n for n in found if n is not None), default=None)
    if isinstance(op, ps.ScalarMaximum):
        return _greatest(found)
    if isinstance(op, ps.Switch):
        return _greatest(found[1:])
    if isinstance(op, ps.Add):
        return None if None in found else sum(n for n in found if n is not None)
    if isinstance(op, ps.Mod):
        return None if found[1] is None else max(found[1] - 1, 0)
    return None


def _greatest(found: list[int | None]) -> int | None:
    """Return the greatest of some numbers, None if one of them is not known."""
    return None if None in found else max((n for n in found if n is not None), default=0)
