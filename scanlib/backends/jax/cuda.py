"""Elementwise loops and matrix recurrences on CUDA devices under JAX: kernels, called by XLA.

All sizes are known when JAX compiles, so that all numbers of the launches are too: they are
attributes of a custom call, ``scanlib_cuda_loop``, whose handler adds the addresses. The handler is
compiled once with the headers that jaxlib ships; it is given the kernels' code for each
architecture of the devices when JAX traces the call, and loads it at the first call in a context.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from jax import lax
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.tensor.type import TensorType

from scanlib.backends.cuda.launch import KernelLoop, Kernels
from scanlib.backends.cuda.linear import LinearKernels, check_linear, linear_kernels
from scanlib.backends.cuda.nvidia import (
    LIBRARY,
    KernelCompileError,
    NoCompilerError,
    compile_kernels,
)
from scanlib.backends.cuda.parameters import contiguous
from scanlib.backends.jax.handlers import load_handler
from scanlib.backends.jax.kernels import arrays_of, in_own_dtypes
from scanlib.backends.jax.mesh_axes import varying
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan

TARGET = "scanlib_cuda_loop"
PROCESSORS = 132  # of a device that is not there when JAX compiles for it


class CudaLoop:
    """Calls the kernels of an elementwise loop or a matrix recurrence.

    Parameters
    ----------
    op : ElemwiseScan or LinearScan

    Raises
    ------
    NoCCodeError
        If it has none.
    """

    def __init__(self, op: ElemwiseScan | LinearScan) -> None:
        self.op = op
        if isinstance(op, ElemwiseScan):
            self.loop = KernelLoop(op)

    def fit(
        self, steps: int, arrays: Sequence[Any], places: np.ndarray
    ) -> tuple[KernelLoop | LinearKernels, Any] | None:
        """Return the kernels for arguments like these, and their sizes.

        None if the arguments do not fit: `lax.scan` says what is wrong. None as well for a matrix
        that is too large, or a loop that may take no step.

        Parameters
        ----------
        steps : int
        arrays : sequence
            The arguments, without the number of steps.
        places : ndarray
            For each sequence, the first row that is read and the number of rows.
        """
        op, given = self.op, [steps] * self.op.has_n_steps
        if steps < 0:
            return None
        try:
            if isinstance(op, LinearScan):
                inputs = [*given, *arrays]
                dtype = np.dtype(op.parts(inputs).initial.dtype).name
                found = linear_kernels(op, inputs, dtype)
                return found if steps and _are_ready(found[0]) else None
            shapes = [tuple(array.shape) for array in arrays]
            for k, (_, length) in enumerate(places.tolist()):
                shapes[k] = (length, *shapes[k][1:])
            sizes = self.loop.sizes(shapes, *given)
        except (NoCCodeError, ValueError, IndexError):
            return None
        is_empty = op.signature.has_stop and not (sizes.channels and sizes.steps)
        return None if is_empty else (self.loop, sizes)

    def __call__(self, steps: int, arrays: Sequence[Any], places: np.ndarray) -> list[Any]:
        """Return the results, and what comes after them, for arguments that `fit`."""
        fit = self.fit(steps, arrays, places)
        assert fit is not None
        dtypes = [array.dtype for array in fit[0].parameters.inputs]
        found = in_own_dtypes(lambda *given: _call(*fit, given, places), arrays, dtypes)
        return varying(found, list(arrays))


def kernels_for(op: Any, node: Apply) -> CudaLoop | None:
    """Return the kernels of a loop, None if it has none or they are not wanted."""
    if not isinstance(op, ElemwiseScan | LinearScan) or not _are_wanted(node):
        return None
    try:
        if isinstance(op, LinearScan):
            check_linear(node.outputs[0].type.dtype)
        kernels = CudaLoop(op)
    except NoCCodeError:
        return None
    is_ready = isinstance(op, LinearScan) or _are_ready(kernels.loop)
    return kernels if is_ready else None


def _are_wanted(node: Apply) -> bool:
    """Whether the flags allow kernels, and everything is an array."""
    if not config.scanlib__cuda or config.scanlib__perform != "auto":
        return False
    return all(isinstance(variable.type, TensorType) for variable in arrays_of(node))


def _are_ready(kernels: KernelLoop | Kernels) -> bool:
    """Whether kernels, and the handler that calls them, compile for the devices; yes if there are
    none."""
    if not cuda_devices():  # a program for a device that is not here can be lowered all the same
        return True
    if load_handler() is None:
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


def _compiled(kernels: KernelLoop | Kernels) -> list[bytes]:
    """Return the code of kernels for each architecture of the devices."""
    capabilities = {str(one.compute_capability).replace(".", "") for one in cuda_devices()}
    return [compile_kernels(kernels.source, f"sm_{one}") for one in sorted(capabilities)]


def processors() -> int:
    """Return how many multiprocessors the first device has."""
    return getattr(next(iter(cuda_devices()), None), "core_count", PROCESSORS)


@cache
def register(driver: str, platform: str, target: str = TARGET) -> None:
    """Make the handler known to XLA.

    Parameters
    ----------
    driver : str
        The library of the driver.
    platform : str
    target : str, optional
        The name of the custom call.
    """
    library = load_handler()
    assert library is not None
    library.scanlib_connect(driver.encode(), int(platform != "CUDA"))
    handler = jax.ffi.pycapsule(library.scanlib_handler)
    jax.ffi.register_ffi_target(target, handler, platform=platform)


def keep(kernels: Kernels) -> str:
    """Give the handler the code of kernels for the devices; return the name that finds them."""
    name = sha256(kernels.source.encode()).hexdigest()[:32]
    library, names = load_handler(), " ".join(kernels.names).encode()
    if library is None:
        return name
    for code in _compiled(kernels):
        library.scanlib_keep(name.encode(), code, ctypes.c_size_t(len(code)), names)
    return name


def _call(kernels: Any, sizes: Any, arrays: Sequence[Any], places: np.ndarray) -> list[Any]:
    """Return what kernels make of arrays of their own dtypes, of which they read some rows."""
    strides = [contiguous(tuple(x.shape), x.dtype.itemsize) for x in arrays]
    call = kernels.call(sizes, strides, processors())
    made = [
        jax.ShapeDtypeStruct(shape, np.dtype(array.dtype))
        for shape, array in zip(call.shapes, kernels.parameters.outputs, strict=True)
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
    return kernels.results(arrays, found[: len(made)], sizes, lax.convert_element_type)
