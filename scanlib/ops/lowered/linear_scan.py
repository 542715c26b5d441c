r"""`LinearScan`: matrix recurrences in three semirings.

The recurrence, for ``t = 0 … T-1`` (or ``T-1 … 0`` with `reverse`), is

    h_t = A_t ⊗ h_{t-1} + b_t        side "left"
    h_t = h_{t-1} ⊗ A_t + b_t        side "right"

where ``+`` is ordinary addition, element by element, and ``⊗`` is the matrix product of a semiring:

========  ================================  =============================================
semiring  (A ⊗ h)[i]                        what it is
========  ================================  =============================================
real      Σ_j A[i, j] h[j]                  linear state spaces, VAR; also complex
log       log Σ_j exp(A[i, j] + h[j])       the forward pass of a hidden Markov model,
                                            with `b` the emission's log-likelihood
max       max_j (A[i, j] + h[j])            Viterbi scores
min       min_j (A[i, j] + h[j])            shortest paths
========  ================================  =============================================

Shapes, with any number of batch dimensions ``*batch``:

* `h` is a vector ``(d,)`` or, where `vector` is false, a matrix: ``(d, m)`` on the left side's
  right, ``(m, d)`` on the right side's left. A vector with side "right" is ``h A``: the product
  with the transpose of `A`, which is what the adjoint of side "left" needs;
* `A` is ``(T, *batch, d, d)`` (coefficient "steps") or ``(*batch, d, d)`` ("fixed"), in both
  cases with or without the batch;
* `b` is ``(T, *batch, …)``; `initial` has one row ``(1, *batch, …)``, or, if there are no steps,
  none: then the history has none either;
* the result is the history of `scanlib.ops.scan.Scan`: ``T + 1`` rows, the initial row first (last
  with `reverse`), so that a `LinearScan` takes the place of a loop's history as it is. With
  `untraced` it is the last row alone.

Loops are differentiated and batched before they become such an Op (`scanlib.rewrites.lower`): the
adjoint of a recurrence is a recurrence in the other direction, lowered by the same rule. Matrix
recurrences as prefix scans: G. Blelloch, "Prefix sums and their applications", 1990; the
log and tropical forms: L. Rabiner, "A tutorial on hidden Markov models", 1989.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.type import TensorType, integer_dtypes

from scanlib.lengths.steps import Rows, Steps
from scanlib.ops.c_linker import PrintedOp
from scanlib.ops.execution import PerformsLoop, Runner, load_backends
from scanlib.ops.lowered.linear_loop import run_in_python

SEMIRINGS = ("real", "log", "max", "min")


class Parts(NamedTuple):
    """The inputs of a `LinearScan`, by role."""

    n_steps: Any
    matrix: Any
    offset: Any
    initial: Any
    mask: Any = None


@dataclass(frozen=True)
class LinearOptions:
    """What kind of matrix recurrence a `LinearScan` is; see the module's text.

    Parameters
    ----------
    semiring : {"real", "log", "max", "min"}
    coefficient : {"steps", "fixed"}
        Whether the matrix has a time axis.
    side : {"left", "right"}
        The side of the state on which the matrix stands.
    vector : bool
        Whether the state is a vector.
    reverse : bool
        Whether time runs from the last row to the first.
    has_offset : bool
        Whether there is an input `b`.
    has_n_steps : bool
        Whether the number of steps is an input, the first one. Without it, `b` or `A` gives it.
    untraced : bool
        Whether only the last row is returned.
    required_steps : int
        How many steps there must be for what is read to exist; fewer are an `IndexError`.
    has_mask : bool
        Whether there is a last input, boolean ``(d, d)``, false where the matrix has no item: such
        terms are left out of the sums, so that ``0 · ∞`` does not arise from them.
    name : str, optional
        That of the loop, for printing. It does not take part in equality.

    Raises
    ------
    ValueError
        If an option is none of the above, or nothing gives the number of steps.
    """

    semiring: str = "real"
    coefficient: str = "steps"
    side: str = "left"
    vector: bool = True
    reverse: bool = False
    has_offset: bool = True
    has_n_steps: bool = False
    untraced: bool = False
    required_steps: int = 0
    has_mask: bool = False
    name: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.has_mask and self.semiring != "real":
            raise ValueError(
                f"LinearScan: a mask is for real products, got semiring {self.semiring!r}"
            )
        for option, allowed in (
            ("semiring", SEMIRINGS),
            ("coefficient", ("steps", "fixed")),
            ("side", ("left", "right")),
        ):
            value = getattr(self, option)
            if value not in allowed:
                raise ValueError(f"LinearScan: {option} must be one of {allowed}, got {value!r}")
        if self.coefficient == "fixed" and not self.has_offset and not self.has_n_steps:
            raise ValueError("LinearScan: a fixed matrix without offset needs has_n_steps=True")


class LinearScan(PerformsLoop, PrintedOp):
    """A matrix recurrence; see the module's text.

    Parameters
    ----------
    options : LinearOptions
        Each is an attribute of the Op as well.

    Examples
    --------
    >>> import numpy as np, pytensor, pytensor.tensor as pt
    >>> from scanlib.ops.lowered.linear_scan import LinearScan
    >>> A, b, h = pt.dmatrix("A"), pt.dmatrix("b"), pt.dmatrix("h")
    >>> f = pytensor.function([A, b, h], LinearScan.of(coefficient="fixed")(A, b, h))
    >>> print(f([[0.0, 1.0], [1.0, 1.0]], np.zeros((4, 2)), [[0.0, 1.0]])[:, 0])
    [0. 1. 1. 2. 3.]
    """

    __props__: tuple[str, ...] = ("options",)
    semiring: str
    coefficient: str
    side: str
    vector: bool
    reverse: bool
    has_offset: bool
    has_n_steps: bool
    untraced: bool
    required_steps: int
    has_mask: bool
    name: str | None

    def __init__(self, options: LinearOptions) -> None:
        self.options = options
        self.__dict__.update(asdict(options))
        self._runners: dict[str, Runner] = {}
        load_backends()

    @staticmethod
    def of(*options: Any, **named: Any) -> LinearScan:
        """Return the recurrence with these options, as `LinearOptions` takes them."""
        return LinearScan(LinearOptions(*options, **named))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_runners": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        load_backends()

    def __str__(self) -> str:
        flags = ["reverse"] * self.reverse + ["untraced"] * self.untraced
        texts = [self.name, self.semiring, self.coefficient, self.side, *flags]
        return f"LinearScan{{{', '.join(filter(None, texts))}}}"

    def with_options(self, **changes: Any) -> LinearScan:
        """Return the same recurrence with some options changed."""
        return LinearScan(replace(self.options, **changes))

    def parts(self, inputs: Sequence[Any]) -> Parts:
        """Name the inputs (or their shapes, or values) by role."""
        rest = list(inputs)
        n_steps = rest.pop(0) if self.has_n_steps else None
        matrix = rest.pop(0)
        offset = rest.pop(0) if self.has_offset else None
        mask = rest.pop() if self.has_mask else None
        (initial,) = rest
        return Parts(n_steps, matrix, offset, initial, mask)

    def join(self, parts: Parts) -> list[Any]:
        """Return the inputs in order."""
        return [
            *([parts.n_steps] if self.has_n_steps else []),
            parts.matrix,
            *([parts.offset] if self.has_offset else []),
            parts.initial,
            *([parts.mask] if self.has_mask else []),
        ]

    def batch_rank(self, initial_ndim: int) -> int:
        """Return the number of batch dimensions of the state."""
        return initial_ndim - (2 if self.vector else 3)

    def matrix_batch_rank(self, matrix_ndim: int) -> int:
        """Return the number of batch dimensions of the matrix: all or none."""
        return matrix_ndim - (3 if self.coefficient == "steps" else 2)

    # Types

    def make_node(self, *inputs: Any) -> Apply:
        expected = 2 + self.has_offset + self.has_n_steps + self.has_mask
        if len(inputs) != expected:
            raise ValueError(f"{self} takes {expected} inputs, got {len(inputs)}")
        given = (None if x is None else pt.as_tensor_variable(x) for x in self.parts(inputs))
        parts = Parts(*given)
        parts = self._check_types(parts)
        self._check_ranks(parts)
        length = self.steps(parts).known()
        initial = parts.initial.type
        known = initial.shape[0] == 1 and not self.untraced
        rows = length + 1 if known and length is not None else None
        out = TensorType(initial.dtype, shape=(rows, *initial.shape[1:]))()
        return Apply(self, self.join(parts), [out])

    def _check_types(self, parts: Parts) -> Parts:
        dtype = parts.initial.type.dtype
        kinds = "fc" if self.semiring == "real" else "f"
        if np.dtype(dtype).kind not in kinds:
            raise TypeError(
                f"{self}: the initial state must hold floating-point numbers"
                f"{' or complex ones' if 'c' in kinds else ''}, got {dtype}"
            )
        n_steps = parts.n_steps
        if n_steps is not None:
            if n_steps.type.ndim or n_steps.type.dtype not in integer_dtypes:
                raise TypeError(f"{self}: n_steps must be an integer scalar, got {n_steps.type}")
            n_steps = pt.cast(n_steps, "int64")

        def cast(name: str, variable: Variable | None) -> Variable | None:
            if variable is None or variable.type.dtype == dtype:
                return variable
            if not np.can_cast(variable.type.dtype, dtype):
                raise TypeError(
                    f"{self}: the {name} has dtype {variable.type.dtype}, which the state's "
                    f"{dtype} cannot hold; cast the initial state"
                )
            return pt.cast(variable, dtype)

        mask = parts.mask
        if mask is not None and (mask.type.ndim != 2 or mask.type.dtype != "bool"):
            raise TypeError(f"{self}: the mask must be a boolean matrix, got {mask.type}")
        return Parts(
            n_steps,
            cast("matrix", parts.matrix),
            cast("offset", parts.offset),
            parts.initial,
            mask,
        )

    def _check_ranks(self, parts: Parts) -> None:
        ndim = parts.initial.type.ndim
        batch = self.batch_rank(ndim)
        if batch < 0:
            raise TypeError(f"{self}: the initial state needs a time axis, got {ndim} dimensions")
        found = self.matrix_batch_rank(parts.matrix.type.ndim)
        if found not in (0, batch):
            raise TypeError(
                f"{self}: the matrix has {found} batch dimensions, the initial state has {batch}"
            )
        if parts.offset is not None and parts.offset.type.ndim != ndim:
            raise TypeError(
                f"{self}: the offset has {parts.offset.type.ndim} dimensions, the initial state "
                f"has {ndim}"
            )

    def steps_of(self, node: Apply) -> Steps:
        """Return what the recurrence says of lengths."""
        return self.steps(self.parts(node.inputs))

    def steps(self, parts: Parts) -> Steps:
        """Return what a recurrence of these parts says of lengths."""
        timed = [parts.offset, *[parts.matrix] * (self.coefficient == "steps")]
        sequences = [part for part in timed if part is not None]
        return Steps(parts.n_steps, sequences, [Rows(1, not self.untraced)], [parts.initial])

    # Shapes

    def infer_shape(self, *arguments: Any) -> list[Any]:
        """Return the shape of the history; called with or without an fgraph first."""
        node, shapes = arguments[-2:]
        sizes, n_steps = self.parts(shapes), self.parts(node.inputs).n_steps
        initial = sizes.initial
        if self.untraced:
            return [(pt.constant(1, dtype="int64"), *initial[1:])]
        timed = sizes.matrix if sizes.offset is None else sizes.offset
        return [((timed[0] if n_steps is None else n_steps) + initial[0], *initial[1:])]

    # Values

    def do_constant_folding(self, fgraph: Any, node: Apply) -> bool:
        """Recurrences are compiled with the function they are part of."""
        return False

    def python_loop(self) -> Runner:
        return lambda *inputs: [run_in_python(self, self.parts(inputs))]
