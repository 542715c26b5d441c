"""What runs a loop: the linker of the function, and scanlib's flags."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph

from scanlib.explain.data import IN_ORDER, verdict
from scanlib.lengths.known import loops_of_unknown_length
from scanlib.ops.c_linker import MayBeUnfitError, NoCCodeError, PrintedOp
from scanlib.ops.execution import LoopOp
from scanlib.ops.lowered.associative_scan import AssociativeScan
from scanlib.ops.python_loop import PythonLoop
from scanlib.ops.scan import Scan
from scanlib.schedules.linear_steps import known_size

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


# Why no kernel of scanlib's runs a loop, and what its author can do.
_SWITCHED_OFF = (
    "scanlib's kernels are switched off: the flag scanlib__perform is python",
    "set the flag scanlib__perform to auto",
)
_UNKNOWN_LENGTH = (
    "JAX does not know the number of steps when it compiles",
    "give a number of steps that does not depend on values, if you can",
)
_KERNEL = "as a kernel, compiled by LLVM"
_STEP_BY_STEP = (
    "Python computes an operation of the step that has no kernel",
    "for many steps take numba mode, or write the step with operations that have kernels",
)


@dataclass(frozen=True)
class Setting:
    """Where loops were found: `inside` which Op, in a graph that some `rewrites` went through;
    `reasons` why loops of `pytensor.scan` were not adopted, by name; of the loops that are
    `unknown` JAX does not know the number of steps when it compiles."""

    linker: str
    rewrites: frozenset[str | None]
    inside: str | None = None
    reasons: dict[str, str] = field(default_factory=dict)
    unknown: frozenset[Apply] = frozenset()

    def of(self, fgraph: FunctionGraph, data: Sequence[Variable] = ()) -> "Setting":
        """Return the setting of the loops of a graph; `data` are inputs that change from step to
        step, where it is the step of a loop."""
        if self.linker != "JAX":
            return self
        from scanlib.backends.jax.known_numbers import KnownNumber

        unknown = loops_of_unknown_length(fgraph, data, (KnownNumber,))
        return replace(self, unknown=frozenset(unknown))

    def other_schedule(self) -> str:
        """Return the schedule of loops that the numba backend does not write."""
        by_tensors = self.linker == "PyTorch" and config.scanlib__perform == "python"
        if self.linker in _PERFORM and not by_tensors:
            return "one Python call per step"
        return f"chosen by the {self.linker} backend"

    def running(self, node: Apply, schedule: str, grade: dict[str, Any]) -> dict[str, Any]:
        """Return schedule and verdict, which are given for compiled code, and what runs a loop."""
        text, obstacle = self.runs(node)
        if obstacle:
            schedule, grade = self.other_schedule(), verdict(IN_ORDER, *obstacle)
        return {"schedule": schedule, **grade, "runs": text}

    def runs(self, node: Apply) -> tuple[str, tuple[str, ...]]:
        """Return what runs a loop and, where it is no code of scanlib's in numba or C, why not, and
        what the author of the loop can do."""
        is_off = config.scanlib__perform == "python"
        in_order = (f"the {self.linker} linker takes the steps of this loop in order",)
        if self.linker == "numba":
            return _kernel_of(node) or "as a plain loop that numba compiles", ()
        if node in self.unknown:
            text = f"by lax.while_loop, because {_UNKNOWN_LENGTH[0]}"
            return text, _SWITCHED_OFF if is_off else _UNKNOWN_LENGTH
        if self.linker == "JAX":
            obstacle: tuple[str, ...] = () if _has_xla_code(node) else in_order
            return _runs_in_jax(node), _SWITCHED_OFF if obstacle and is_off else obstacle
        if self.linker not in _PERFORM:
            return f"through the {self.linker} linker", _SWITCHED_OFF if is_off else in_order
        if self.linker == "C" and (kernel := _kernel_of(node)):
            return kernel, ()
        obstacle = _SWITCHED_OFF if is_off else _STEP_BY_STEP if _takes_steps(node) else ()
        if self.linker == "PyTorch":
            return _runs_in_torch(node), obstacle
        if is_off:
            return "in plain Python, because the flag scanlib__perform is python", obstacle
        if obstacle:
            return "step by step in Python, which calls kernels", obstacle
        return "as a function of its own, compiled by numba at the first call", ()


def _kernel_of(node: Apply) -> str | None:
    """Return what numba mode and the C linker run if they have a kernel for a loop."""
    if not isinstance(node.op, PrintedOp):
        return None
    try:
        node.op.thunk_maker(node)
    except MayBeUnfitError:
        return f"{_KERNEL}, step by step if a carry gets another shape"
    except NoCCodeError:
        return None
    return _KERNEL


def _has_xla_code(node: Apply) -> bool:
    """Whether the JAX backend has XLA call compiled code of scanlib's on the CPU."""
    if not isinstance(node.op, LoopOp):
        return False
    from scanlib.backends.jax.kernels import is_compiled

    return is_compiled(node.op, node)


def _on_cuda(node: Apply) -> str:
    """Return what runs a loop on CUDA devices if it has kernels, and they are wanted."""
    from scanlib.backends.cuda import linear

    kernels, limits = linear.kernels_of(node.op), ""
    if kernels is None:
        return ""
    if isinstance(kernels, linear.LinearLoop):
        size, most = known_size(node.op, node), linear.largest_size(node.op.dtype)
        if size is not None and size > most:
            return ""
        limits = f", if the matrix has {most} rows at most" if size is None else ""
    elif "look_back" in kernels.writer.units():
        limits = ", where few rows of many steps are read once"
    return f"as kernels on CUDA devices{limits}; "


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
    if _takes_steps(node):
        own = "step by step in Python on the CPU, which calls kernels"
    return f"{own}; {_on_cuda(node)}by functions of tensors on other devices"


def _takes_steps(node: Apply) -> bool:
    """Whether Python walks the steps of a loop because something in them has no kernel."""
    choice = config.scanlib__perform
    runner = getattr(node.op, "_runners", {}).get(choice)
    if runner is None and choice == "auto" and isinstance(node.op, Scan):
        runner = node.op.runner(node)
    return isinstance(getattr(runner, "run", runner), PythonLoop)
