"""Compiled loops that XLA calls on the CPU, through its foreign function interface.

The C code is that of `scanlib.backends.c`, between the `shim` and a handler. It is compiled once by
the compiler that PyTensor uses, with the headers that jaxlib ships, and kept in PyTensor's
compilation directory (`libraries`). Where there is no compiler, or the code of a loop cannot be
compiled without Python, loops are `lax.scan`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.link.c.cmodule import GCC_compiler
from pytensor.tensor.type import TensorType

from scanlib._compat import thaw_graph
from scanlib.backends.c.linear_scan import print_linear
from scanlib.backends.c.printer import print_loop
from scanlib.backends.c.scalars import can_fail
from scanlib.backends.cuda.printer import template
from scanlib.backends.jax.libraries import identity, load_library
from scanlib.backends.jax.mesh_axes import varying
from scanlib.backends.jax.narrow import kept_dtype, narrowed, narrowed_linear
from scanlib.backends.jax.shim import COMPLEX, SHIM, handler
from scanlib.ops.c_code import NODE_NAME, UNWANTED_FLAGS, CCode, NoCCodeError
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.linear_scan import LinearScan

KINDS = "biufc"  # of dtypes that the shim knows
_targets: dict[str, str | None] = {}
_libraries: list[ctypes.CDLL] = []


def code_for(op: ElemwiseScan | LinearScan, node: Apply) -> CCode | None:
    """Return the C code of a loop that XLA can call, None if there is none."""
    if config.scanlib__perform != "auto" or not config.cxx or not _has_plain_types(node):
        return None
    if isinstance(op, ElemwiseScan) and op.signature.has_stop:
        return None  # XLA's results have a length that is known beforehand
    try:
        if isinstance(op, LinearScan):
            return print_linear(op, narrowed_linear(node))
        if can_fail(thaw_graph(op.body)):
            return None  # what raises needs Python; positions, which the shim knows, do not count
        return print_loop(narrowed(op))
    except NoCCodeError:
        return None


def kernel_for(op: ElemwiseScan | LinearScan, node: Apply) -> str | None:
    """Return the name by which XLA knows the compiled loop, None if there is none."""
    code = code_for(op, node)
    return None if code is None else register(code, node)


def words_of(numbers: Any) -> np.ndarray:
    """Return 64-bit integers as pairs of 32 bits, which JAX takes without 64-bit numbers, too."""
    return np.asarray(numbers, np.int64).reshape(-1).view(np.int32)


def arrays_of(node: Apply) -> list[Variable]:
    """Return the inputs of a loop without its number of steps, and its results."""
    op = node.op
    has_steps = op.has_n_steps if isinstance(op, LinearScan) else op.signature.has_n_steps
    return [*node.inputs[int(has_steps) :], *node.outputs]


def _has_plain_types(node: Apply) -> bool:
    """Whether all arrays have dtypes that the shim knows.

    Loops are `narrowed` to those that JAX keeps. A number of steps is given as `words_of` it.
    """
    for variable in arrays_of(node):
        if not isinstance(variable.type, TensorType):
            return False
        dtype = np.dtype(variable.type.dtype)
        if dtype.kind not in KINDS or dtype == np.float16:
            return False
    return True


def register(code: CCode, node: Apply) -> str | None:
    """Compile the code of a loop and make it known to XLA."""

    def sizes(variables: Sequence[Any]) -> list[int]:
        return [np.dtype(kept_dtype(variable.type.dtype)).itemsize for variable in variables]

    function = "scanlib_loop"
    text = "\n".join(
        [
            SHIM,
            *(f"#include {header}" for header in _headers(code)),
            *_complex_numbers(node),
            code.helpers,
            code.functions.replace(NODE_NAME, function),
            handler(
                "scanlib_handler",
                f"{function}_call",
                sizes(node.inputs),
                sizes(node.outputs),
                *windows_of(node.op),
            ),
        ]
    )
    arguments = compile_arguments(code)
    name = f"scanlib_{identity(text, arguments)}"
    if name not in _targets:
        _targets[name] = _load(name, text, arguments)
    return _targets[name]


def _complex_numbers(node: Apply) -> list[str]:
    """Return C++ classes for the complex numbers of a loop; matrix code has its own."""
    dtypes = [variable.type.dtype for variable in [*node.inputs, *node.outputs]]
    if isinstance(node.op, LinearScan) or not any(d.startswith("complex") for d in dtypes):
        return []
    return [COMPLEX, template("complex")]


def windows_of(op: ElemwiseScan | LinearScan) -> tuple[int, int]:
    """Return of how many inputs a compiled loop reads some rows only, and the first of them.

    Slices of histories enter gradient loops. XLA would copy them.
    """
    if isinstance(op, LinearScan):
        return 0, 0
    return op.signature.n_sequences, int(op.signature.has_n_steps)


def _headers(code: CCode) -> list[str]:
    found = [header for op in code.scalar_ops for header in op.c_headers()]
    return [h for h in dict.fromkeys(found) if "numpy" not in h and "Python" not in h]


def compile_arguments(code: CCode) -> list[str]:
    """Return the flags to compile a loop with: PyTensor's own, and those of its operations."""
    own = [flag for op in code.scalar_ops for flag in op.c_compile_args()]
    flags = [flag for flag in GCC_compiler.compile_args() if flag not in UNWANTED_FLAGS]
    flags = [flag for flag in flags if not flag.startswith(("-I", "-L", "-D NPY", "-DNPY"))]
    return [
        *flags,
        "-O3",
        "-std=c++17",
        "-fno-math-errno",
        "-fno-fast-math",
        "-ffp-contract=fast",
        *own,
        *code.compile_args,
        "-w",
    ]


def _load(name: str, text: str, arguments: list[str]) -> str | None:
    """Return the name of the registered handler, None if it cannot be compiled."""
    loaded = load_library(name, text, arguments)
    if loaded is None:
        return None
    _libraries.append(loaded)  # XLA keeps an address in it
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(loaded.scanlib_handler), platform="cpu")
    return name


def with_kernel(
    target: str | None,
    portable: Callable[..., list[Any]],
    on_cuda: Callable[..., list[Any]] | None = None,
) -> Callable[..., list[Any]]:
    """Return a function that calls a compiled loop on the CPU, and `portable` elsewhere.

    On CUDA devices it calls `on_cuda`, if there is such a function. Derivatives that JAX takes by
    itself, with `jax.grad` around the function that PyTensor compiled, are those of `portable`.
    """

    def compiled(target: str, *inputs: Any) -> list[Any]:
        results = jax.eval_shape(portable, *inputs)
        call = jax.ffi.ffi_call(target, results, vmap_method="sequential")
        return list(call(*inputs))

    @jax.custom_jvp
    def run(*inputs: Any) -> list[Any]:
        inputs = varying(inputs, inputs)
        special: dict[str, Any] = {} if target is None else {"cpu": partial(compiled, target)}
        special |= {} if on_cuda is None else {"cuda": on_cuda}
        return lax.platform_dependent(*inputs, default=portable, **special)

    @run.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        return jax.jvp(portable, primals, tangents)

    return run
