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
STEPS_TAKEN = jax.ShapeDtypeStruct((), np.int64)

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


def kept_dtype(dtype: Any) -> str:
    """Return the name of the dtype that JAX gives to values of a dtype."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype)).name


def in_own_dtypes(
    call: Callable[..., Sequence[Any]], node: Apply, arrays: Sequence[Any]
) -> list[Any]:
    """Return what a call makes of a loop's arrays, which it gets in the dtypes of the loop, in the
    dtypes that JAX keeps."""
    dtypes = [variable.type.dtype for variable in node.inputs[node.op.has_n_steps :]]
    with jax.enable_x64(True):
        found = call(*map(lax.convert_element_type, arrays, dtypes))
    return [lax.convert_element_type(result, kept_dtype(result.dtype)) for result in found]


def arrays_of(node: Apply) -> list[Variable]:
    """Return the inputs of a loop without its number of steps, and its results."""
    return [*node.inputs[int(node.op.has_n_steps) :], *node.outputs]


def _has_plain_types(node: Apply) -> bool:
    """Whether all arrays have dtypes that handlers know."""
    for variable in arrays_of(node):
        if not isinstance(variable.type, TensorType):
            return False
        dtype = np.dtype(variable.type.dtype)
        if dtype.kind not in KINDS or dtype == np.float16:
            return False
    return True


def shapes_of_results(
    target: str | None,
    node: Apply,
    arrays: Sequence[Any],
    known: dict[int, int],
    places: np.ndarray,
) -> list[tuple[int, ...]] | None:
    """Return the shapes of a loop's results, None where those of its inputs do not tell them.

    Raises what the loop would raise for these shapes. `known` has the inputs whose values are
    known, the number of steps among them, which the arrays are without; `places` has for each
    sequence the first row that is read and the number of rows.
    """
    if target is None:
        return None
    given = [list(np.shape(array)) for array in arrays]
    for shape, length in zip(given, places[:, 1].tolist(), strict=False):
        shape[0] = length
    values = {k: np.asarray(n, node.inputs[k].type.dtype) for k, n in known.items()}
    return result_shapes(target, [*[[]] * node.op.has_n_steps, *given], values)


def call_target(
    node: Apply,
    target: str,
    shapes: Sequence[Any],
    arrays: Sequence[Any],
    steps: int,
    places: np.ndarray,
) -> list[Any]:
    """Return the results of a compiled loop, and how many steps it took if it may stop.

    The arrays are without the number of steps; `shapes` are those of the results, `places` as for
    `shapes_of_results`.
    """
    made = list(map(jax.ShapeDtypeStruct, shapes, [out.type.dtype for out in node.outputs]))
    if node.op.steps_of(node).may_stop:
        made.append(STEPS_TAKEN)

    def call(*arrays: Any) -> Any:
        run = jax.ffi.ffi_call(TARGET, made, vmap_method="sequential")
        return run(*arrays, program=target, numbers=np.append(steps, places))

    return in_own_dtypes(call, node, arrays)
