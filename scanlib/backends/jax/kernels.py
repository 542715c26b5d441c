"""Compiled loops that XLA calls on the CPU, through its foreign function interface.

A loop's program (`scanlib.kernels.program`) is called by one handler, which looks it up by its key.
Where there is no compiler for the handler, or a loop has no program, it is `lax.scan`.

Where JAX has no numbers of 64 bits, which it has not with ``floatX=float32``, an array of ``int64``
comes as ``int32``. Kernels read and write the dtypes of the loop: `in_own_dtypes` converts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax import lax
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.type import TensorType

from scanlib.backends.handler.programs import program_of, program_of_node, registered, result_shapes
from scanlib.backends.jax.handlers import TARGET, program_handler, register_program
from scanlib.kernels.program import LoopProgram
from scanlib.ops.execution import LoopOp
from scanlib.ops.lowered.linear_scan import LinearScan

KINDS = "biufc"  # of dtypes that handlers know
STEPS_TAKEN = jax.ShapeDtypeStruct((2,), np.int32)  # one number of 64 bits

_programs: WeakKeyDictionary[Apply, LoopProgram | None] = WeakKeyDictionary()


def is_compiled(op: LoopOp, node: Apply) -> bool:
    """Whether XLA calls compiled code for a loop."""
    return _program(op, node) is not None


def _program(op: LoopOp, node: Apply) -> LoopProgram | None:
    """Return the program that XLA calls for a loop, None if nothing."""
    if node not in _programs:
        _programs[node] = _new_program(op, node)
    return _programs[node]


def _new_program(op: LoopOp, node: Apply) -> LoopProgram | None:
    if config.scanlib__perform != "auto" or not config.cxx or not _has_plain_types(node):
        return None
    if isinstance(op, LinearScan):
        return program_of_node(node)
    if op.signature.has_stop and op.signature.required_steps > 1:
        return None  # JAX raises no errors where there are fewer: it marks what is missing
    return program_of(op)


def target_for(op: LoopOp, node: Apply) -> str | None:
    """Return the key of the program that XLA calls for a loop, None if nothing."""
    program = _program(op, node)
    if program is None or program_handler() is None:
        return None
    key = registered(program)
    register_program(key)
    return key


def words_of(numbers: Any) -> np.ndarray:
    """Return 64-bit integers as pairs of 32 bits, which JAX takes without 64-bit numbers, too."""
    return np.asarray(numbers, np.int64).reshape(-1).view(np.int32)


def kept_dtype(dtype: Any) -> str:
    """Return the name of the dtype that JAX gives to values of a dtype."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype)).name


def in_own_dtypes(
    call: Callable[..., Sequence[Any]], arrays: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """Return what a call makes of arrays converted to dtypes, in the dtypes that JAX keeps."""
    with jax.enable_x64(True):
        pairs = zip(arrays, dtypes, strict=True)
        found = call(*(lax.convert_element_type(array, dtype) for array, dtype in pairs))
    return [lax.convert_element_type(result, kept_dtype(result.dtype)) for result in found]


def arrays_of(node: Apply) -> list[Variable]:
    """Return the inputs of a loop without its number of steps, and its results."""
    return [*node.inputs[int(node.op.has_n_steps) :], *node.outputs]


def _has_plain_types(node: Apply) -> bool:
    """Whether all arrays have dtypes that handlers know; a number of steps is given as `words_of`
    it."""
    for variable in arrays_of(node):
        if not isinstance(variable.type, TensorType):
            return False
        dtype = np.dtype(variable.type.dtype)
        if dtype.kind not in KINDS or dtype == np.float16:
            return False
    return True


def windows_of(op: LoopOp) -> tuple[int, int]:
    """Return of how many inputs a compiled loop reads some rows only, and the first of them.

    Slices of histories enter gradient loops. XLA would copy them.
    """
    return op.signature.n_sequences, int(op.has_n_steps)


def shapes_of_results(
    target: str | None,
    node: Apply,
    arrays: Sequence[Any],
    known: dict[int, int],
    places: np.ndarray,
) -> list[tuple[int, ...]] | None:
    """Return the shapes of a loop's results, None where those of its inputs do not tell them.

    Raises what the loop would raise for these shapes. `known` has the inputs whose values are
    known, and `places` for each sequence the first row that is read and the number of rows.
    """
    if target is None:
        return None
    given = [list(np.shape(array)) for array in arrays]
    for k, (_, length) in enumerate(places.tolist(), windows_of(node.op)[1]):
        given[k][0] = length
    values = {k: np.asarray(n, node.inputs[k].type.dtype) for k, n in known.items()}
    return result_shapes(target, given, values)


def call_target(
    node: Apply, target: str, shapes: Sequence[Any], inputs: Sequence[Any]
) -> list[Any]:
    """Return the results of a compiled loop, and how many steps it took if it may stop.

    The inputs have the number of steps as `words_of` it, and behind them which rows are read;
    `shapes` are those of the results.
    """
    made = list(map(jax.ShapeDtypeStruct, shapes, [out.type.dtype for out in node.outputs]))
    if node.op.steps_of(node).may_stop:
        made.append(STEPS_TAKEN)
    dtypes = [array.dtype for array in inputs]
    first = int(node.op.has_n_steps)
    dtypes[first : len(node.inputs)] = [v.type.dtype for v in node.inputs[first:]]

    def call(*arrays: Any) -> Any:
        run = jax.ffi.ffi_call(TARGET, made, vmap_method="sequential")
        return run(*arrays, program=target, first=np.int64(windows_of(node.op)[1]))

    return in_own_dtypes(call, inputs, dtypes)
