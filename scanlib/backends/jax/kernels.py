"""Compiled loops that XLA calls on the CPU, through its foreign function interface.

A loop's program (`scanlib.kernels.program`) is called by one handler, which looks it up by its key.
Where there is no compiler for the handler, or a loop has no program, it is `lax.scan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import lax
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.type import TensorType

from scanlib.backends.handler.programs import program_of, program_of_node, registered
from scanlib.backends.jax.handlers import TARGET, program_handler, register_program
from scanlib.backends.jax.mesh_axes import varying
from scanlib.backends.jax.narrow import narrowed, narrowed_linear
from scanlib.kernels.program import LoopProgram
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.linear_scan import LinearScan

KINDS = "biufc"  # of dtypes that handlers know


@dataclass(frozen=True)
class CallTarget:
    """What XLA calls for a loop.

    Attributes
    ----------
    name : str
        The name of a handler.
    attributes : dict
        What the call says besides its arrays.
    """

    name: str
    attributes: dict[str, Any] = field(default_factory=dict)


def is_compiled(op: ElemwiseScan | LinearScan, node: Apply) -> bool:
    """Whether XLA calls compiled code for a loop."""
    return _program(op, node) is not None


def _program(op: ElemwiseScan | LinearScan, node: Apply) -> LoopProgram | None:
    """Return the program that XLA calls for a loop, None if nothing."""
    if config.scanlib__perform != "auto" or not config.cxx or not _has_plain_types(node):
        return None
    if isinstance(op, LinearScan):
        return program_of_node(narrowed_linear(node))
    if op.signature.has_stop and op.signature.required_steps > 1:
        return None  # JAX raises no errors where there are fewer: it marks what is missing
    return program_of(narrowed(op))


def target_for(op: ElemwiseScan | LinearScan, node: Apply) -> CallTarget | None:
    """Return what XLA calls for a loop, None if nothing."""
    program = _program(op, node)
    if program is None or program_handler() is None:
        return None
    key = registered(program)
    register_program(key)
    return CallTarget(TARGET, {"program": key, "first": np.int64(windows_of(op)[1])})


def words_of(numbers: Any) -> np.ndarray:
    """Return 64-bit integers as pairs of 32 bits, which JAX takes without 64-bit numbers, too."""
    return np.asarray(numbers, np.int64).reshape(-1).view(np.int32)


def arrays_of(node: Apply) -> list[Variable]:
    """Return the inputs of a loop without its number of steps, and its results."""
    op = node.op
    has_steps = op.has_n_steps if isinstance(op, LinearScan) else op.signature.has_n_steps
    return [*node.inputs[int(has_steps) :], *node.outputs]


def _has_plain_types(node: Apply) -> bool:
    """Whether all arrays have dtypes that handlers know.

    Loops are `narrowed` to those that JAX keeps. A number of steps is given as `words_of` it.
    """
    for variable in arrays_of(node):
        if not isinstance(variable.type, TensorType):
            return False
        dtype = np.dtype(variable.type.dtype)
        if dtype.kind not in KINDS or dtype == np.float16:
            return False
    return True


def windows_of(op: ElemwiseScan | LinearScan) -> tuple[int, int]:
    """Return of how many inputs a compiled loop reads some rows only, and the first of them.

    Slices of histories enter gradient loops. XLA would copy them.
    """
    if isinstance(op, LinearScan):
        return 0, 0
    return op.signature.n_sequences, int(op.signature.has_n_steps)


def compiled(target: CallTarget | None, portable: Callable[..., list[Any]]) -> Any:
    """Return the function that calls a compiled loop, whose results are like those of `portable`;
    None if there is none."""

    def run(*inputs: Any) -> list[Any]:
        assert target is not None
        return call_target(target, jax.eval_shape(portable, *inputs), inputs)

    return None if target is None else run


def call_target(target: CallTarget, results: Any, inputs: Sequence[Any]) -> list[Any]:
    """Return the results of a compiled loop, given their shapes and dtypes."""
    call = jax.ffi.ffi_call(target.name, results, vmap_method="sequential")
    return list(call(*inputs, **target.attributes))


def with_kernel(
    portable: Callable[..., list[Any]],
    on_cpu: Callable[..., list[Any]] | None = None,
    on_cuda: Callable[..., list[Any]] | None = None,
) -> Callable[..., list[Any]]:
    """Return a function that calls one of these, by the device that it runs on.

    On other devices, and where there is no special function, it is `portable`. Derivatives that
    JAX takes by itself, with `jax.grad` around the function that PyTensor compiled, are those of
    `portable`.
    """

    @jax.custom_jvp
    def run(*inputs: Any) -> list[Any]:
        inputs = varying(inputs, inputs)
        special = {} if on_cpu is None else {"cpu": on_cpu}
        special |= {} if on_cuda is None else {"cuda": on_cuda}
        return lax.platform_dependent(*inputs, default=portable, **special)

    @run.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        return jax.jvp(portable, primals, tangents)

    return run
