"""The type of a state: promoting and widening initial values until it is stable.

A loop needs the value a step returns to be of the type that the next step reads. Users write
``outputs_info=0`` for a float state, or an initial row of length one for a state that grows
by broadcasting; both are what they mean, so the initial value is cast or broadcast and the
step is traced again.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.type import Type
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.type import TensorType

from scanlib._compat import INDEX_WRITES
from scanlib.frontend.arguments import OutputArgument
from scanlib.frontend.values import advice, warn
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Carry, Loop, Output, State
from scanlib.ops.scan import Scan


def wanted_type(
    state: TensorType, value: Variable, where: str, weak_float: str | None, weak_integers: bool
) -> TensorType:
    """Return the smallest type that holds both a state and the value a step returns for it.

    A weak state, a Python integer or a constant made of one, is int64 if the value is an integer.
    Else it starts as a Python float would, in `weak_float`: the value may be as wide as it is for
    the integer's sake alone. While other states may yet make a float of it, without
    `weak_integers`, it is left as it is.

    `TypeError` if there is none: another rank, sizes that differ, dtypes without a safe cast.
    `where` begins the message: ``scan: state `h` starts as``.
    """
    dtypes = [state.dtype, getattr(value.type, "dtype", "object")]
    if weak_float and all(np.dtype(dtype).kind in "biu" for dtype in dtypes):
        if not weak_integers:
            return state
        state = TensorType("int64", state.shape)
    came = f"{where} {type_text(state)}, the step returns {type_text(value.type)}"
    other_shape = "give an initial value of the shape that the step returns"
    if not is_tensor(value):
        raise TypeError(f"{came}{advice(value) or '; return a tensor'}")
    if value.type.ndim != state.ndim:
        raise TypeError(f"{came}; {other_shape}")
    mine, theirs = np.dtype(state.dtype), np.dtype(value.type.dtype)
    if weak_float and theirs.kind in "fc":
        starts = mine.kind in "iu" and np.can_cast(weak_float, theirs, "safe")
        mine = theirs = np.dtype(weak_float) if starts else theirs
    if not np.can_cast(theirs, mine, "safe"):
        if not np.can_cast(mine, theirs, "safe"):
            raise TypeError(
                f"{came}, and neither dtype holds all values of the other; cast the initial value "
                f"or return pytensor.tensor.cast(value, {state.dtype!r})"
            )
        mine = theirs
    shape = []
    for size, new in zip(state.shape, value.type.shape, strict=True):
        if size not in (None, 1, new) and new is not None:
            fix = "broadcast the returned value" if new == 1 else other_shape
            if size == 0:
                fix = "a state keeps its shape; return what is to be collected as an output"
            raise TypeError(f"{came}; {fix}")
        shape.append(size if size in (None, new) else new)
    return TensorType(mine.name, shape)


def type_text(type: Type) -> str:
    """Return a type as messages show it: ``(4, ?) float64``, ``scalar int64``."""
    if not isinstance(type, TensorType):
        return str(type)
    sizes = ["?" if size is None else str(size) for size in type.shape]
    shape = f"({', '.join(sizes)}{',' * (len(sizes) == 1)})" if sizes else "scalar"
    return f"{shape} {type.dtype}"


def adapt_initial(
    argument: OutputArgument, wanted: TensorType, sizes: Sequence[Variable | None], where: str
) -> None:
    """Cast and broadcast the initial rows of a state so that they fit the wanted type."""
    initial = argument.initial
    assert initial is not None
    if initial.type.dtype != wanted.dtype:
        initial = _cast(initial, wanted.dtype)
    known = initial.type.shape
    grown = [i for i, new in enumerate(wanted.shape) if known[i + 1] == 1 and new != 1]
    if grown:
        shape = [initial.shape[i] if size is None else size for i, size in enumerate(known)]
        for axis in grown:
            new = wanted.shape[axis]
            shape[axis + 1] = sizes[axis] if new is None else new
            if shape[axis + 1] is None:
                raise TypeError(
                    f"{where}: axis {axis} of its initial value has size 1, the step returns a "
                    "size that it computes; give an initial value of the shape that the step "
                    "returns"
                )
        initial = pt.broadcast_to(initial, shape)
    argument.initial = initial
    argument.tap_type = wanted


def warn_of_rounding(where: str, state: State | Carry) -> None:
    """Warn of an array that PyTensor has filled with a number in the smallest float type that holds
    it, where a step writes wider numbers into it."""
    filled = state.initial.owner
    while filled is not None and isinstance(filled.op, (DimShuffle, *INDEX_WRITES)):
        filled = filled.inputs[0].owner
    is_full = filled is not None and isinstance(filled.op, Alloc)
    if not is_full or not isinstance(filled.inputs[0], Constant):
        return
    mine = state.type.dtype
    for theirs in (written.type.dtype for written in _writes(state.next)):
        if not np.can_cast(theirs, mine, "safe"):
            warn(
                f"{where} is {mine}, since PyTensor fills arrays in the smallest dtype that holds "
                f"the number, and what the step writes into it, {theirs}, is rounded; give the "
                f"initial value with dtype={theirs!r}"
            )
            return


def _writes(array: Variable) -> Iterator[Variable]:
    """Yield what a step writes into an array, also by loops of its own."""
    while (node := array.owner) is not None:
        if isinstance(node.op, INDEX_WRITES):
            yield node.inputs[1]
        elif isinstance(node.op, Scan):
            part = Loop.from_node(node).parts[node.outputs.index(array)]
            if isinstance(part, Output):
                return
            yield from _writes(part.next)
            array = part.initial
            continue
        elif not isinstance(node.op, DimShuffle | Subtensor):
            return
        array = node.inputs[0]


def _cast(rows: Variable, dtype: str) -> Variable:
    """Cast initial rows; a value before it is made a row: an integer row has no gradient."""
    node = rows.owner
    if node is not None and isinstance(node.op, DimShuffle):
        return node.op(pt.cast(node.inputs[0], dtype))
    return pt.cast(rows, dtype)
