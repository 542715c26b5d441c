"""Elementwise loops and matrix recurrences on CUDA devices under JAX: kernels, called by XLA.

All sizes are known when JAX compiles, so that all numbers of the launches are too: they are
attributes of a custom call, ``scanlib_cuda_loop``, whose handler adds the addresses. The handler is
compiled once with the headers that jaxlib ships; it is given the kernels' code for each
architecture of the devices when JAX traces the call, and loads it at the first call in a context.
"""

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache, partial
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from jax import lax
from pytensor.graph.basic import Apply
from pytensor.tensor.type import TensorType

from scanlib.backends.cuda.launch import KernelLoop, Kernels
from scanlib.backends.cuda.linear import LinearLoop, kernels_of
from scanlib.backends.cuda.nvidia import (
    LIBRARY,
    KernelCompileError,
    NoCompilerError,
    compile_kernels,
)
from scanlib.backends.cuda.parameters import contiguous
from scanlib.backends.jax.kernels import arrays_of, load_handler
from scanlib.backends.jax.partitioned import varying
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.execution import LoopOp

TARGET = "scanlib_cuda_loop"
cuda_handler: Any = partial(load_handler, "cuda", "-ldl")
PROCESSORS = 132  # of a device that is not there when JAX compiles for it


def kernels_for(op: LoopOp, node: Apply) -> KernelLoop | LinearLoop | None:
    """Return the kernels of a loop, None if it has none or they are not wanted."""
    are_arrays = all(isinstance(variable.type, TensorType) for variable in arrays_of(node))
    kernels = kernels_of(op) if are_arrays else None
    # Every elementwise loop has this unit, with all of its operations.
    is_out = isinstance(kernels, KernelLoop) and not _are_ready(kernels.unit("serial"))
    return None if is_out else kernels


def _are_ready(kernels: Kernels) -> bool:
    """Whether kernels, and the handler that calls them, compile for the devices; yes if there are
    none."""
    if not cuda_devices():  # a program for a device that is not here can be lowered all the same
        return True
    if cuda_handler() is None:
        return False
    try:
        _compiled(kernels)
    except (NoCompilerError, KernelCompileError) as error:
        warnings.warn(f"a loop runs without its CUDA kernel: {error}", stacklevel=2)
        return False
    register(LIBRARY, "CUDA")
    return True


@cache
def cuda_devices() -> tuple[Any, ...]:
    """Return the CUDA devices, none where there are none."""
    try:
        return (*jax.devices("cuda"),)
    except RuntimeError:
        return ()


def _compiled(kernels: Kernels) -> list[bytes]:
    """Return the code of kernels for each architecture of the devices."""
    capabilities = {str(one.compute_capability).replace(".", "") for one in cuda_devices()}
    return [compile_kernels(kernels.source, f"sm_{one}") for one in sorted(capabilities)]


def processors() -> int:
    """Return how many multiprocessors the first device has."""
    return getattr(next(iter(cuda_devices()), None), "core_count", PROCESSORS)


@cache
def register(driver: str, platform: str, target: str = TARGET) -> None:
    """Make the handler known to XLA; `driver` is the driver's library, `target` the name of the
    custom call."""
    library = cuda_handler()
    library.scanlib_connect(driver.encode(), int(platform != "CUDA"))
    handler = jax.ffi.pycapsule(library.scanlib_handler)
    jax.ffi.register_ffi_target(target, handler, platform=platform)


def keep(kernels: Kernels) -> str:
    """Give the handler the code of kernels for the devices; return the name that finds them."""
    name = sha256(kernels.source.encode()).hexdigest()[:32]
    for code in _compiled(kernels):  # none where there are no devices
        names, size = " ".join(kernels.names).encode(), ctypes.c_size_t(len(code))
        cuda_handler().scanlib_keep(name.encode(), code, size, names)
    return name


def sizes_of(kernels: Any, arrays: Sequence[Any], places: np.ndarray, steps: int | None) -> Any:
    """Return the sizes of a loop; None if its arguments do not fit: `lax.scan` says what is wrong.

    `arrays` and `places` are as for `kernels.shapes_of_results`; `steps` is None if no argument.
    """
    if steps is not None and steps < 0:
        return None
    shapes = [tuple(array.shape) for array in arrays]
    for k, (_, length) in enumerate(places.tolist()):
        shapes[k] = (length, *shapes[k][1:])
    try:
        sizes = kernels.sizes(shapes, steps)
    except (NoCCodeError, ValueError, IndexError):
        return None
    is_linear = isinstance(kernels, LinearLoop)
    return sizes if not is_linear or _are_ready(kernels.kernels(sizes)) else None


def call_kernels(kernels: Any, sizes: Any, places: np.ndarray, *arrays: Any) -> list[Any]:
    """Return what kernels compute of arrays in the dtypes of the loop; see `sizes_of`."""
    strides = [contiguous(tuple(x.shape), x.dtype.itemsize) for x in arrays]
    call = kernels.call(sizes, strides, processors())
    made = [
        jax.ShapeDtypeStruct(shape, np.dtype(array.dtype))
        for shape, array in zip(call.shapes, call.kernels.parameters.outputs, strict=True)
    ]
    words = list(call.words)
    for k, (first, _) in enumerate(places.tolist()):
        words[call.slots[k]] += first * strides[k][0]
    works = [jax.ShapeDtypeStruct((size,), np.uint8) for size in call.works]
    run = jax.ffi.ffi_call(TARGET, [*made, *works], vmap_method="sequential")
    launches = [n for one in call.launches for n in (one.kernel, one.blocks, one.threads)]
    found = run(
        *arrays,
        loop=keep(call.kernels),
        words=np.array(words, np.int64),
        slots=np.array(call.slots, np.int64),
        launches=np.array(launches or [0], np.int64),
    )
    results = kernels.results(arrays, found[: len(made)], sizes, lax.convert_element_type)
    return varying(results, list(arrays))
