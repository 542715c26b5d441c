"""The type of a state: promoting and widening initial values until it is stable.

A loop needs the value a step returns to be of the type that the next step reads. Users write
``outputs_info=0`` for a float state, or an initial row of length one for a state that grows
by broadcasting; both are what they mean, so the initial value is cast or broadcast and the
step is traced again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.type import Type
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.type import TensorType

from scanlib.frontend.arguments import OutputArgument
from scanlib.ops.graph import is_tensor


def joint_type(state: TensorType, value: Variable, where: str, is_weak: bool = False) -> TensorType:
    """Return the smallest type that holds both a state and the value a step returns for it.

    A weak state, a Python integer or a constant made of one, takes the dtype of the value if that
    is no integer.

    Raises
    ------
    TypeError
        If there is none: another rank, sizes that differ, dtypes without a safe cast.
    """
    came = f"{where} starts as {type_text(state)}, the step returns {type_text(value.type)}"
    if not is_tensor(value) or value.type.ndim != state.ndim:
        raise TypeError(f"{came}; give an initial value of the shape that the step returns")
    return TensorType(
        value.type.dtype
        if is_weak and np.dtype(value.type.dtype).kind in "fc"
        else _joint_dtype(state, value, came),
        shape=[
            _joint_size(mine, theirs, came)
            for mine, theirs in zip(state.shape, value.type.shape, strict=True)
        ],
    )


def wanted_type(
    state: TensorType, value: Variable, where: str, is_weak: bool, weak_integers: bool
) -> TensorType:
    """Return the `joint_type` of a state; that of a weak integer is int64 if it stays one.

    While other states may yet make a float of it, without `weak_integers`, it is left as it is.
    """
    dtypes = [state.dtype, getattr(value.type, "dtype", "object")]
    if is_weak and all(np.dtype(dtype).kind in "biu" for dtype in dtypes):
        if not weak_integers:
            return state
        state = TensorType("int64", state.shape)
    return joint_type(state, value, where, is_weak)


def type_text(type: Type) -> str:
    """Return a type as messages show it: ``(4, ?) float64``, ``scalar int64``."""
    if not isinstance(type, TensorType):
        return str(type)
    sizes = ["?" if size is None else str(size) for size in type.shape]
    shape = f"({', '.join(sizes)}{',' * (len(sizes) == 1)})" if sizes else "scalar"
    return f"{shape} {type.dtype}"


def _joint_dtype(state: TensorType, value: Variable, came: str) -> str:
    mine, theirs = np.dtype(state.dtype), np.dtype(value.type.dtype)
    if np.can_cast(theirs, mine, "safe"):
        return state.dtype
    if np.can_cast(mine, theirs, "safe"):
        return value.type.dtype
    raise TypeError(
        f"{came}, and neither dtype holds all values of the other; cast the initial value or "
        f"return pytensor.tensor.cast(value, {state.dtype!r})"
    )


def _joint_size(mine: int | None, theirs: int | None, came: str) -> int | None:
    if mine is None or mine == theirs:
        return mine
    if mine == 1 or theirs is None:
        return theirs
    if theirs == 1:
        raise TypeError(f"{came}; broadcast the returned value")
    raise TypeError(f"{came}; give an initial value of the shape that the step returns")


def adapt_initial(
    argument: OutputArgument, wanted: TensorType, sizes: Sequence[Variable | None], where: str
) -> None:
    """Cast and broadcast the initial rows of a state so that they fit the wanted type."""
    initial = argument.initial
    assert initial is not None
    if initial.type.dtype != wanted.dtype:
        initial = _cast(initial, wanted.dtype)
    grown = [
        axis
        for axis, (old, new) in enumerate(zip(initial.type.shape[1:], wanted.shape, strict=True))
        if old == 1 and new != 1
    ]
    if grown:
        depth = initial.type.shape[0]
        shape: list[Any] = [initial.shape[0] if depth is None else depth]
        for axis in range(wanted.ndim):
            if axis not in grown:
                shape.append(initial.shape[axis + 1])
                continue
            size = wanted.shape[axis] if wanted.shape[axis] is not None else sizes[axis]
            if size is None:
                raise TypeError(
                    f"{where}: axis {axis} of its initial value has size 1, the step returns a "
                    "size that it computes; give an initial value of the shape that the step "
                    "returns"
                )
            shape.append(size)
        initial = pt.broadcast_to(initial, shape)
    initial.name = argument.name
    argument.initial = initial
    argument.tap_type = wanted


def _cast(rows: Variable, dtype: str) -> Variable:
    """Cast initial rows; a value before it is made a row: an integer row has no gradient."""
    node = rows.owner
    if node is not None and isinstance(node.op, DimShuffle):
        return node.op(pt.cast(node.inputs[0], dtype))
    return pt.cast(rows, dtype)
