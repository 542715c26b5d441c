"""Compiled loops that XLA calls on the CPU, through its foreign function interface.

A loop's program (`scanlib.kernels.program`) is called by one handler, which looks it up by its key.
Where there is no compiler for the handler, or a loop has no program, it is `lax.scan`.

Where JAX has no numbers of 64 bits, which it has not with ``floatX=float32``, an array of ``int64``
comes as ``int32``. Kernels read and write the dtypes of the loop: `in_own_dtypes` converts.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jaxlib
import numpy as np
from jax import lax
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.type import TensorType

from scanlib.backends.handler.library import load_library, python_options, source
from scanlib.backends.handler.programs import address, program_of, registered, result_shapes
from scanlib.kernels.program import LoopProgram
from scanlib.ops.execution import LoopOp

OPTIONS = ("-O1", "-std=c++11", "-w")  # with newer standards, headers of C take long
TARGET = "scanlib_program"  # the handler of all programs, for XLA
KINDS = "biufc"  # of dtypes that handlers know
STEPS_TAKEN = jax.ShapeDtypeStruct((), np.int64)

_made: WeakKeyDictionary[Apply, dict[Any, Any]] = WeakKeyDictionary()


def once(node: Apply, key: Any, make: Callable[[], Any]) -> Any:
    """Return what is made for a node, once for each key."""
    made = _made.setdefault(node, {})
    if key not in made:
        made[key] = make()
    return made[key]


def is_compiled(op: LoopOp, node: Apply) -> bool:
    """Whether XLA calls compiled code for a loop."""
    return _program(op, node) is not None


def _program(op: LoopOp, node: Apply) -> LoopProgram | None:
    """Return the program that XLA calls for a loop, None if nothing."""
    return once(node, "program", partial(_new_program, op, node))


def _new_program(op: LoopOp, node: Apply) -> LoopProgram | None:
    if config.scanlib__perform != "auto" or not config.cxx:
        return None
    for variable in arrays_of(node):  # all must have dtypes that handlers know
        dtype = np.dtype(variable.type.dtype if isinstance(variable.type, TensorType) else object)
        if dtype.kind not in KINDS or dtype == np.float16:
            return None
    if op.signature.has_stop and op.signature.required_steps > 1:
        return None  # JAX raises no errors where there are fewer: it marks what is missing
    return program_of(op, node)


def load_handler(name: str, *options: str) -> ctypes.CDLL | None:
    """Return the library of a handler that XLA calls, compiled with the headers that jaxlib ships,
    None if it cannot be compiled."""
    options = (f"-I{jax.ffi.include_dir()}", *OPTIONS, *options)
    kept_as = f"scanlib_{name}_{jaxlib.__version__}"
    return load_library(str(config.cxx), kept_as, source(f"{name}.cpp"), options)


@cache
def program_handler() -> ctypes.CDLL | None:
    """Return the library with the handler of loop programs, which XLA knows from then on."""
    found = load_handler("xla", *python_options())
    if found is None:
        return None
    found.scanlib_set_main_thread(ctypes.c_ulong(threading.main_thread().ident or 0))
    found.scanlib_register.argtypes = (ctypes.c_char_p, ctypes.c_void_p)
    capsule = jax.ffi.pycapsule(found.scanlib_program_handler)
    jax.ffi.register_ffi_target(TARGET, capsule, platform="cpu")
    return found


@cache
def _finds(key: str) -> bool:
    """Whether there is a handler; it finds the program of this key from then on."""
    handler = program_handler()
    if handler is not None:
        handler.scanlib_register(key.encode(), address(key))
    return handler is not None


def target_for(op: LoopOp, node: Apply) -> str | None:
    """Return the key of the program that XLA calls for a loop, None if nothing."""
    program = _program(op, node)
    key = None if program is None else registered(program)
    return key if key is not None and _finds(key) else None


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
    """Return the results of a compiled loop, of such `shapes`, and how many steps it took if it may
    stop; for `arrays` and `places` see `shapes_of_results`."""
    made = list(map(jax.ShapeDtypeStruct, shapes, [out.type.dtype for out in node.outputs]))
    if node.op.steps_of(node).may_stop:
        made.append(STEPS_TAKEN)

    def call(*arrays: Any) -> Any:
        run = jax.ffi.ffi_call(TARGET, made, vmap_method="sequential")
        return run(*arrays, program=target, numbers=np.append(steps, places))

    return in_own_dtypes(call, node, arrays)
