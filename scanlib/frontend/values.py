"""What users pass as flags, numbers and arrays, of whatever package, and how they are warned.

Anything that says how to make a NumPy array of itself is one: arrays of JAX, tensors of PyTorch
on the CPU, series and frames of pandas, arrays of xarray, lists, ranges. No package is imported
to find out.
"""

import operator
import sys
import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable

from scanlib.ops.graph import is_tensor

EXPECTED = "a PyTensor variable or something NumPy can turn into an array of numbers"
NUMBER = int | float | complex | np.number


def as_variable(value: Any, argument: str) -> Variable:
    """Return what the user gave as a variable; a `TypeError` names the argument if it cannot be
    one, and says why.

    Variables are returned as they are. Arrays keep their name, where they have one.
    """
    if isinstance(value, Variable):
        return value
    if isinstance(value, bool):
        # PyTensor takes none: it may come from comparing two variables.
        raise TypeError(
            f"{argument} is the Python value {value}; give np.array({value}) for a constant, and "
            "compare variables with pt.eq, not =="
        )
    try:
        if isinstance(value, NUMBER):
            return pt.as_tensor_variable(value)
        if _holds_variables(value):
            return pt.as_tensor_variable(_with_variables(value))
        array = _as_array(value)
        if array.dtype.kind not in "biufc":
            unknown = f"its dtype is {array.dtype}, which PyTensor has not"
            raise TypeError(_REASONS.get(array.dtype.kind, unknown) if array.ndim else "")
        name = getattr(value, "name", None)
        return pt.as_tensor_variable(array, name=name if isinstance(name, str) else None)
    except Exception as error:
        reason = str(error).strip().split("\n")[0].removesuffix(".")
        raise TypeError(
            f"{argument} must be {EXPECTED}, got {shown(value)}"
            f"{advice(value) or (reason and f': {reason}')}"
        ) from error


def as_tensor(value: Any, argument: str) -> Variable:
    """Return what the user gave as a tensor; a `TypeError` names the argument if it is none."""
    variable = as_variable(value, argument)
    if is_tensor(variable):
        return variable
    raise TypeError(f"{argument} must be a PyTensor tensor, got {variable.type}{advice(variable)}")


def brief(value: Any) -> str:
    """Return how a value prints, on one line of a message."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def shown(value: Any) -> str:
    """Return how a value prints, and its type, for messages."""
    return f"{brief(value)} of type {type(value).__name__}"


def read_flag(function: str, name: str, value: Any) -> bool:
    """Return a Python or NumPy truth value; symbolic ones are a `TypeError`."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{function}: {name} must be True or False, got {shown(value)}")
    return bool(value)


def read_integer(label: str, value: Any) -> int:
    """Return an integer of Python's or NumPy's; what else there is, is a `TypeError`."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{label} must be an integer, got {shown(value)}") from None


def warn(message: str) -> None:
    """Warn of a line of the user's, the last one outside of this package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("scanlib."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, UserWarning, stacklevel=level)


def is_list_of_numbers(value: Any) -> bool:
    """Whether a list or tuple holds numbers alone, so that it is an array and not several."""
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(isinstance(item, NUMBER) and not isinstance(item, bool) for item in value)
    )


def is_plain_integer(value: Any) -> bool:
    """Whether a value is a Python integer, or may be the constant that PyTensor made of one.

    PyTensor gives an integer the smallest dtype that holds it, so the dtype of such a constant
    says nothing about what is to be computed with it.
    """
    if isinstance(value, int):
        return not isinstance(value, bool)
    if not isinstance(value, Constant) or getattr(value.type, "ndim", None) != 0:
        return False
    return value.type.dtype[:3] == "int" and value.type == pt.constant(int(value.data)).type


_REASONS = {
    "M": "it holds dates; give numbers, such as days since the first one",
    "m": "it holds differences of time; divide them by one, such as np.timedelta64(1, 'D')",
    "O": "it holds other things than numbers",
    "S": "it holds text",
    "T": "it holds text",
    "U": "it holds text",
}


def _as_array(value: Any) -> np.ndarray:
    """Return the array that a value stands for; one that belongs to another package is copied."""
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.getmaskarray(value).any():
            raise TypeError("its mask would be lost")
        return value.data
    if isinstance(value, np.ndarray):
        array = value
    elif hasattr(value, "__array__"):
        whole = value.resolve_conj().resolve_neg() if hasattr(value, "resolve_conj") else value
        array = np.asarray(whole).copy()
    elif hasattr(value, "to_numpy"):
        array = np.asarray(value.to_numpy()).copy()
    elif hasattr(value, "__dlpack__"):
        array = np.from_dlpack(value).copy()
    elif isinstance(value, list | tuple):
        array = np.array([_as_array(x) if hasattr(x, "__array__") else x for x in value])
    else:
        array = np.asarray(value)
    # Columns of several dtypes make an array of objects, which may be numbers all the same.
    return np.array(array.tolist()) if array.dtype.kind == "O" and array.ndim else array


def _holds_variables(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        return False
    return any(isinstance(item, Variable) or _holds_variables(item) for item in value)


def _with_variables(value: Any) -> Any:
    """Return a list that holds variables with its arrays as variables, too."""
    if isinstance(value, list | tuple):
        return [_with_variables(item) for item in value]
    if isinstance(value, Variable | int | float | complex | np.ndarray | np.generic):
        return value
    return as_variable(value, "an item of the list")


def advice(value: Any) -> str:
    """Return what to write instead of a value that is no array, where that is known."""
    if isinstance(value, np.random.Generator):
        return "; give pytensor.shared(generator), or a generator of pytensor.tensor.random.rng"
    if str(getattr(value, "dtype", "")).startswith("key<"):
        return "; for a key of JAX give pytensor.shared(np.random.default_rng(seed))"
    if isinstance(value, np.ma.MaskedArray):
        return (
            ": its mask would be lost; give x.filled(0.0), and np.ma.getmaskarray(x) as an "
            "array of its own"
        )
    if getattr(value, "requires_grad", False) is True:
        return (
            ", which requires a gradient: PyTensor cannot follow PyTorch's; give x.detach(), or "
            "a PyTensor variable to differentiate by"
        )
    if isinstance(value, np.ndarray) and any(isinstance(x, Variable) for x in value.flat):
        return ": it holds variables; write pt.stack in place of np.array and np.stack"
    if hasattr(value, "toarray"):
        whole = (
            ""
            if isinstance(value, Variable)
            else (", or, for every step to see whole, pytensor.sparse.as_sparse_variable(x)")
        )
        return f"; give x.toarray(){whole}"
    if isinstance(value, Variable) and hasattr(value, "values"):
        return "; give x.values, a tensor, or use scanlib.loop, which takes named dims"
    if isinstance(value, list | tuple):
        return next(filter(None, map(advice, value)), "")
    is_array = isinstance(value, str | bytes) or hasattr(value, "__array__")
    if isinstance(value, Iterable) and not is_array and not isinstance(value, dict):
        return "; give list(...) of it"
    return ""
