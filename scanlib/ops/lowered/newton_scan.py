r"""`NewtonScan`: a nonlinear loop solved for all its steps at once.

The loop ``h_t = f_t(h_{t-1})``, ``t = 0 … T-1``, is a system of equations for the whole
trajectory. Newton's method linearizes every step around a guess `g` and solves the affine
recurrence that comes of it, which a prefix scan can do in parallel over time::

    h_t = f_t(g_{t-1}) + (1 - m) J_t (h_{t-1} - g_{t-1}),    J_t = ∂f_t/∂h at g_{t-1}

with damping `m`, and goes on from there. After `i` iterations, whatever stands in place of
``J_t``, the first `i` steps are those of the loop; where the loop contracts (its greatest Lyapunov
exponent is below zero), a few iterations do for any `T`.

The Op stands for a `Scan`: it has the inputs and the results of one, and two more results, how many
iterations were taken and the residual. Derivatives are those of the loop at the trajectory that was
found, whatever iterations led there: one affine loop in the other direction.

Sources: Y. H. Lim, Q. Zhu, J. Selfridge, M. F. Kasim, "Parallelizing non-linear sequential models
over the sequence length", ICLR 2024 (DEER); X. Gonzalez, A. Warrington, J. T. H. Smith, S. W.
Linderman, "Towards scalable and stable parallelization of nonlinear RNNs", NeurIPS 2024
(quasi-DEER, damping); F. Danieli and others, "ParaRNN", 2025 (structured Jacobians).
"""

from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable

from scanlib.lengths.numbers import Steps
from scanlib.ops.gradient.pullback import pullback
from scanlib.ops.graph import Variables
from scanlib.ops.lowered.solved_loop import SolvedLoop
from scanlib.ops.scan import Scan

JACOBIANS = ("auto", "full", "block", "diagonal")
OTHERWISE = ("error", "sequential")
# By the bits of a real number: near the square root of its precision, at which an iteration that
# converges quadratically has reached the precision itself.
TOLERANCES = {64: 1e-7, 32: 1e-4, 16: 1e-2}


@dataclass(frozen=True)
class Newton:
    """How `scan` solves a loop for all its steps at once, with ``method=Newton(...)``.

    Parameters
    ----------
    tolerance : float, optional
        An iteration that changes no value by more than this is the last: absolutely, or relative
        to values above one. By default 1e-7 in float64, 1e-4 in float32, 1e-2 in float16.
    max_iterations : int, optional
        The greatest number of iterations.
    jacobian : {"auto", "full", "block", "diagonal"}, optional
        What stands for the step's Jacobian. ``"auto"``: the Jacobian, whose structure is found:
        numbers where the step is elementwise, small matrices where an axis of the state holds
        independent members (a batch), one matrix otherwise. ``"full"`` is the same: what is known
        to be zero is never computed with. ``"diagonal"``: its diagonal alone
        (quasi-DEER).
        ``"block"``: also what couples several states of one shape, or several taps, channel by
        channel, as the two states of an LSTM. Approximations take more and cheaper iterations.
    damping : float or "adaptive", optional
        What is taken off the Jacobian: 0, the default, is Newton's method; near 1, errors spread
        step by step and cannot grow. ``"adaptive"`` begins with 0; an iterate that has a greater
        residual than the best one so far is not kept, and the damping is raised.
    otherwise : {"error", "sequential"}, optional
        What becomes of a loop that has not converged, in some member of a batch: an error, or the
        loop run step by step.

    Raises
    ------
    TypeError, ValueError
        If an argument is none of these.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> x = pt.vector("x")
    >>> h, _ = scanlib.scan(
    ...     lambda x, h: pt.tanh(0.5 * h + x),
    ...     x,
    ...     pt.constant(0.0),
    ...     method=scanlib.Newton(max_iterations=20),
    ... )
    >>> print(pytensor.function([x], h)([1.0, 0.0, -1.0]).round(4))
    [ 0.7616  0.3634 -0.6741]
    """

    tolerance: float | None = None
    max_iterations: int = 100
    jacobian: str = "auto"
    damping: float | str = 0.0
    otherwise: str = "error"

    def __post_init__(self) -> None:
        tolerance = self.tolerance
        if tolerance is not None and not (_is_number(tolerance) and 0 < tolerance < np.inf):
            raise ValueError(f"Newton: tolerance must be a positive number, got {tolerance!r}")
        count = self.max_iterations
        if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
            raise ValueError(f"Newton: max_iterations must be an integer above 0, got {count!r}")
        damping = self.damping
        if damping != "adaptive" and not (_is_number(damping) and 0 <= damping < 1):
            raise ValueError(
                f'Newton: damping must be "adaptive" or a number from 0 to below 1, got {damping!r}'
            )
        for option, allowed in (("jacobian", JACOBIANS), ("otherwise", OTHERWISE)):
            value = getattr(self, option)
            if value not in allowed:
                raise ValueError(f"Newton: {option} must be one of {allowed}, got {value!r}")

    def tolerance_for(self, dtype: str) -> float:
        """Return the tolerance for values of a dtype."""
        bits = 8 * np.zeros((), dtype).real.dtype.itemsize
        return self.tolerance if self.tolerance is not None else TOLERANCES.get(bits, 1e-7)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


class NewtonScan(SolvedLoop):
    """A loop that is solved by Newton's method; see the module's text. Its states are real numbers;
    it has no carries, and no `until`."""

    __props__ = ("scan", "options")

    def __init__(self, scan: Scan, options: Newton) -> None:
        self.scan = scan
        self.options = options

    def __str__(self) -> str:
        return f"Newton{self.scan}"

    def steps_of(self, node: Apply) -> Steps:
        """Return what the loop says of lengths."""
        return self.scan.steps_of(node)

    def make_node(self, *inputs: Variable) -> Apply:
        node = self.scan.make_node(*inputs)
        outputs = [out.type() for out in node.outputs]
        return Apply(self, node.inputs, [*outputs, pt.lscalar(), pt.dscalar()])

    def infer_shape(self, *arguments: Any) -> list[Any]:
        node, shapes = arguments[-2:]
        own = Apply(self.scan, node.inputs, [out.type() for out in node.outputs[:-2]])
        return [*self.scan.infer_shape(own, shapes), (), ()]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        """Run the loop step by step: what a mode without rewrites does."""
        self.scan.perform(self.scan.make_node(*node.inputs), inputs, output_storage[:-2])
        output_storage[-2][0] = np.asarray(0, "int64")
        output_storage[-1][0] = np.asarray(0.0)

    def pullback(
        self, inputs: Variables, outputs: Variables, cotangents: Variables
    ) -> list[Variable]:
        """Return the cotangents of the loop's inputs, at the trajectory that was found."""
        return pullback(self.scan, inputs, outputs[:-2], cotangents[:-2])

    def of_batch(self, loop: Apply, others: Variables) -> Apply:
        """Return a batch of loops as one loop, whose members are independent."""
        return NewtonScan(loop.op, self.options).make_node(*loop.inputs)


# What the iterations carry behind the states' histories, for each member: whether no more is to be
# done, or can be; the share of the Jacobian that is kept; the largest residual of the best iterate.
MEMBERS = ("converged", "lost", "share of the Jacobian", "residual", "its step", "iterations")


def is_newton(op: Scan) -> bool:
    """Whether a loop is one over Newton's iterations."""
    is_named = (op.name or "").endswith("_newton")
    return is_named and {"converged", "lost"} <= set(op.labels.carries)  # others may be dropped
