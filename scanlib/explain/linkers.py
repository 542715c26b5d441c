"""What runs a loop: the linker of the function, and scanlib's flags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph

from scanlib.explain.data import IN_ORDER, verdict
from scanlib.lengths.known import loops_of_unknown_length
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.lowered.associative_scan import AssociativeScan
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
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
    """Where loops were found: `inside` which Op, `reasons` why loops of `pytensor.scan` were not
    adopted, by name; of the loops that are `unknown` JAX does not know the number of steps when it
    compiles."""

    linker: str
    inside: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    unknown: frozenset[Apply] = frozenset()

    def of(self, fgraph: FunctionGraph, data: Sequence[Variable] = ()) -> Setting:
        """Return the setting of the loops of a graph; `data` are inputs that change from step to
        step, where it is the step of a loop."""
        if self.linker != "JAX":
            return self
        from scanlib.backends.jax.known_numbers import KnownNumber

        unknown = loops_of_unknown_length(fgraph, data, (KnownNumber,))
        return replace(self, unknown=frozenset(unknown))

    def has_unknown_length(self, node: Apply) -> bool:
        """Whether the linker does not know a loop's greatest number of steps when it compiles."""
        return node in self.unknown

    def is_compiled_here(self, node: Apply) -> bool:
        """Whether scanlib writes the loop's code, in numba or C."""
        if self.linker == "numba":
            return True
        if self.linker == "JAX":
            return not self.has_unknown_length(node) and _has_xla_code(node)
        return self.linker in _PERFORM and not _runs_in_python(node)

    def other_schedule(self) -> str:
        """Return the schedule of loops that the numba backend does not write."""
        by_tensors = self.linker == "PyTorch" and config.scanlib__perform == "python"
        if self.linker in _PERFORM and not by_tensors:
            return "one Python call per step"
        return f"chosen by the {self.linker} backend"

    def running(self, node: Apply, schedule: str, grade: dict[str, Any]) -> dict[str, Any]:
        """Return schedule and verdict, which are given for compiled code, and what runs a loop."""
        if not self.is_compiled_here(node):
            schedule, grade = self.other_schedule(), verdict(IN_ORDER, *self.obstacle(node))
        return {"schedule": schedule, **grade, "runs": self.runs(node)}

    def obstacle(self, node: Apply) -> tuple[str, ...]:
        """Return why no kernel of scanlib's runs a loop, and what its author can do."""
        if config.scanlib__perform == "python":
            why = "scanlib's kernels are switched off: the flag scanlib__perform is python"
            return why, "set the flag scanlib__perform to auto"
        if self.has_unknown_length(node):
            why = "JAX does not know the number of steps when it compiles"
            return why, "give a number of steps that does not depend on values, if you can"
        if self.linker in _PERFORM:
            why = "numba could not compile the step; a warning of the first call says why"
            return why, "write the step with functions of pytensor.tensor alone"
        return (f"the {self.linker} linker takes the steps of this loop in order",)

    def runs(self, node: Apply) -> str:
        """Return what runs a loop."""
        if self.linker == "numba":
            return "as a part of the function that numba compiles"
        if self.linker == "JAX":
            if self.has_unknown_length(node):
                return (
                    "by lax.while_loop, because JAX does not know the number of steps when it "
                    "compiles"
                )
            return _runs_in_jax(node)
        if self.linker == "PyTorch":
            return _runs_in_torch(node)
        if self.linker not in _PERFORM:
            return f"through the {self.linker} linker"
        if config.scanlib__perform == "python":
            return "in plain Python, because the flag scanlib__perform is python"
        if self.linker == "C" and getattr(node.op, "has_code", lambda _: False)(node):
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
    wanted = config.scanlib__cuda and config.scanlib__perform == "auto"
    if not wanted or not isinstance(node.op, LinearScan | ElemwiseScan):
        return ""
    try:
        return f"as kernels on CUDA devices{_cuda_limits(node)}; "
    except NoCCodeError:
        return ""


def _cuda_limits(node: Apply) -> str:
    """Return what limits or sets apart the kernels of a loop; `NoCCodeError` if it has none."""
    op = node.op
    if isinstance(op, ElemwiseScan):
        from scanlib.backends.cuda.printer import LoopWriter

        if "look_back" not in LoopWriter(op).units():
            return ""
        return ", where few rows of many steps are read once"
    from scanlib.backends.cuda import linear

    shape = op.parts(node.inputs).matrix.type.shape
    size = next((n for n in shape[-2:] if n is not None), None)
    linear.check_linear(op.dtype, 1 if size is None else size)
    most = linear.largest_size(op.dtype)
    return f", if the matrix has {most} rows at most" if size is None else ""


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


def _runs_in_torch(node: Apply) -> str:
    """Return what the PyTorch backend makes of a loop."""
    if config.scanlib__perform == "python":
        return "by functions of tensors, because the flag scanlib__perform is python"
    own = "as a function of its own on the CPU, compiled by numba at the first call"
    if _runs_in_python(node):
        own = "in plain Python on the CPU, because numba could not compile it"
    return f"{own}; {_on_cuda(node)}by functions of tensors on other devices"


def _runs_in_python(node: Apply) -> bool:
    """Whether the flag says so, or numba has given up on the loop in an earlier call."""
    if config.scanlib__perform == "python":
        return True
    runner = getattr(node.op, "_runners", {}).get(config.scanlib__perform)
    return isinstance(getattr(runner, "run", runner), PythonLoop)
