"""What runs a loop: the linker of the function, and scanlib's flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph

from scanlib.ops.associative_scan import AssociativeScan
from scanlib.ops.c_code import NoCCodeError
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.python_loop import PythonLoop
from scanlib.ops.scan import Scan

# Linkers by the name of their class, so that none of their libraries is imported.
_NAMES = {
    "NumbaLinker": "numba",
    "JAXLinker": "JAX",
    "PytorchLinker": "PyTorch",
    "MLXLinker": "MLX",
    "VMLinker": "C",
    "OpWiseCLinker": "C",
    "CLinker": "C",
    "PerformLinker": "Python",
}

# Linkers that run what `perform` runs, where they have no code of their own.
_PERFORM = ("C", "Python", "PyTorch")


def linker_name(linker: Any) -> str:
    """Return the name of a linker for users."""
    name = type(linker).__name__
    return _NAMES.get(name, name)


@dataclass(frozen=True)
class Setting:
    """Where loops were found.

    Attributes
    ----------
    linker : str
        The name of the function's linker.
    inside : str or None
        The Op whose inner graph is looked at.
    reasons : dict
        Why loops of `pytensor.scan` were not adopted, by name.
    lengths : KnownLengths or None
        For JAX: which lengths it knows when it compiles the graph.
    """

    linker: str
    inside: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    lengths: Any = None

    def within(self, op: str) -> Setting:
        """Return the setting inside an Op."""
        return replace(self, inside=op if self.inside is None else f"{self.inside} > {op}")

    def of(self, fgraph: FunctionGraph, data: Sequence[Variable] = ()) -> Setting:
        """Return the setting of the loops of a graph; `data` are inputs that change from step to
        step, where it is the step of a loop."""
        if self.linker != "JAX":
            return self
        from scanlib.backends.jax.unknown_lengths import lengths_in

        return replace(self, lengths=lengths_in(fgraph, data))

    def has_unknown_length(self, node: Apply) -> bool:
        """Whether the linker does not know a loop's greatest number of steps when it compiles."""
        return self.lengths is not None and node in self.lengths.loops

    def is_compiled_here(self, node: Apply) -> bool:
        """Whether scanlib writes the loop's code, in numba or C."""
        if self.linker == "numba":
            return True
        if self.linker == "JAX":
            return not self.has_unknown_length(node) and _has_xla_code(node)
        return self.linker in _PERFORM and not _runs_in_python(node)

    def has_c_code(self, node: Apply) -> bool:
        """Whether the C linker runs code that scanlib writes for the loop."""
        has_code = getattr(node.op, "has_code", None)
        return self.linker == "C" and has_code is not None and has_code(node)

    def other_schedule(self) -> str:
        """Return the schedule of loops that the numba backend does not write."""
        by_tensors = self.linker == "PyTorch" and config.scanlib__perform == "python"
        if self.linker in _PERFORM and not by_tensors:
            return "one Python call per step"
        return f"chosen by the {self.linker} backend"

    def runs(self, node: Apply) -> str:
        """Return what runs a loop."""
        if self.linker == "numba":
            return "as a part of the function that numba compiles"
        if self.linker == "JAX":
            if self.has_unknown_length(node):
                return _with_unknown_length(node)
            return _runs_in_jax(node)
        if self.linker == "PyTorch":
            return _runs_in_torch(node)
        if self.linker not in _PERFORM:
            return f"through the {self.linker} linker"
        if config.scanlib__perform == "python":
            return "in plain Python, because the flag scanlib__perform is python"
        if self.has_c_code(node):
            return "as C code of its own"
        if _runs_in_python(node):
            return "in plain Python, because numba could not compile it"
        return "as a function of its own, compiled by numba at the first call"


def _has_xla_code(node: Apply) -> bool:
    """Whether the JAX backend has XLA call compiled code of scanlib's on the CPU."""
    if not isinstance(node.op, Scan | ElemwiseScan | LinearScan):
        return False
    from scanlib.backends.jax.kernels import is_compiled

    return is_compiled(node.op, node)


def _on_cuda(node: Apply) -> str:
    """Return what runs a loop on CUDA devices if it has kernels, and they are wanted."""
    if not config.scanlib__cuda or config.scanlib__perform != "auto":
        return ""
    try:
        if isinstance(node.op, LinearScan):
            return _linear_on_cuda(node)
        if isinstance(node.op, ElemwiseScan):
            return _elementwise_on_cuda(node.op)
    except NoCCodeError:
        pass
    return ""


def _elementwise_on_cuda(op: ElemwiseScan) -> str:
    """Return the same for an elementwise loop.

    Raises
    ------
    NoCCodeError
        If it has no kernel.
    """
    from scanlib.backends.cuda.printer import LoopWriter

    if "look_back" not in LoopWriter(op).units():
        return "as kernels on CUDA devices; "
    times = "once" if config.scanlib__cuda_look_back else "twice"
    return f"as kernels on CUDA devices, where few rows of many steps are read {times}; "


def _linear_on_cuda(node: Apply) -> str:
    """Return the same for a matrix recurrence.

    Raises
    ------
    NoCCodeError
        If it has no kernel.
    """
    from scanlib.backends.cuda import linear_writer

    parts = node.op.parts(node.inputs)
    dtype = parts.initial.type.dtype
    matrix = parts.matrix.type.shape
    sizes = [matrix[-2:]] if parts.right is None else [matrix[-2:], parts.right.type.shape[-2:]]
    known = [next((size for size in own if size is not None), None) for own in sizes]
    linear_writer.check_linear(node.op, dtype, *(1 if size is None else size for size in known))
    if None not in known:
        return "as kernels on CUDA devices; "
    most = linear_writer.largest_size(dtype)
    return f"as kernels on CUDA devices, if the matrix has {most} rows at most; "


def _runs_in_jax(node: Apply) -> str:
    """Return what the JAX backend makes of a loop."""
    if isinstance(node.op, AssociativeScan):
        return "by lax.associative_scan, in a tree"
    kernels = _on_cuda(node)
    stops = getattr(getattr(node.op, "signature", None), "has_stop", False)
    portable = "by lax.while_loop" if stops else "by lax.scan"
    if _has_xla_code(node):
        return f"as compiled code that XLA calls on the CPU; {kernels}{portable} on other devices"
    return f"{kernels}{portable}{' on other devices' * bool(kernels)}"


def _with_unknown_length(node: Apply) -> str:
    """Return what the JAX backend makes of a loop whose number of steps is computed from data."""
    why = "because JAX does not know the number of steps when it compiles"
    op = node.op
    if isinstance(op, LinearScan):
        is_bounded = op.coefficient == "steps" or op.parts(node.inputs).offset is not None
        if is_bounded:
            return f"by lax.scan over as many steps as there can be, {why}"
    return f"by lax.while_loop, {why}"


def _runs_in_torch(node: Apply) -> str:
    """Return what the PyTorch backend makes of a loop."""
    if config.scanlib__perform == "python":
        return "by functions of tensors, because the flag scanlib__perform is python"
    elsewhere = f"{_on_cuda(node)}by functions of tensors on other devices"
    if _runs_in_python(node):
        return f"in plain Python on the CPU, because numba could not compile it; {elsewhere}"
    return f"as a function of its own on the CPU, compiled by numba at the first call; {elsewhere}"


def _runs_in_python(node: Apply) -> bool:
    """Whether the flag says so, or numba has given up on the loop in an earlier call."""
    if config.scanlib__perform == "python":
        return True
    runner = getattr(node.op, "_runners", {}).get(config.scanlib__perform)
    return isinstance(getattr(runner, "run", runner), PythonLoop)
