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
  none: then the history has none either (a gradient's first row is one of those that it is given);
* the result is the history of `scanlib.ops.scan.Scan`: ``T + 1`` rows, the initial row first (last
  with `reverse`), so that a `LinearScan` takes the place of a loop's history as it is. With
  `untraced` it is the last row alone.

A `LinearScan` has its loop in canonical form, one for all sizes (`canonical_loop`): that says in
which order the inputs come, how long things are, what is wrong with them, and how a device without
a kernel computes it. The Op adds what a kernel needs to know of the step.

Loops are differentiated and batched before they become such an Op (`scanlib.rewrites.lower`): the
adjoint of a recurrence is a recurrence in the other direction, lowered by the same rule. Matrix
recurrences as prefix scans: G. Blelloch, "Prefix sums and their applications", 1990; the
log and tropical forms: L. Rabiner, "A tutorial on hidden Markov models", 1989.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.type import TensorType

from scanlib._compat import freeze_graph
from scanlib.ops.c_linker import PrintedOp
from scanlib.ops.execution import LoopOp, Runner, load_backends
from scanlib.ops.messages import Messages
from scanlib.ops.python_loop import PythonLoop
from scanlib.ops.scan import Scan
from scanlib.ops.signature import Labels, Signature

Times = Callable[[Any, Any, Any], Any]  # A ⊗ h of a matrix, a state, and a mask of terms or None


class Parts(NamedTuple):
    """The inputs of a `LinearScan`, by role.

    The mask, boolean ``(d, d)``, is false where the matrix has no item: such terms are left out of
    the sums, so that ``0 · ∞`` does not arise from them.
    """

    n_steps: Any
    matrix: Any
    offset: Any
    initial: Any
    mask: Any = None


@dataclass(frozen=True)
class LinearOptions:
    """What kind of matrix recurrence a `LinearScan` is; see the module's text.

    `required_steps` is how many steps there must be for what is read to exist. The names, of the
    loop, of the function that built it and of the matrix, are for people.
    """

    semiring: str = "real"
    coefficient: str = "steps"
    side: str = "left"
    vector: bool = True
    reverse: bool = False
    untraced: bool = False
    required_steps: int = 0
    name: str | None = field(default=None, compare=False)
    function: str = field(default="scan", compare=False)
    matrix: str | None = field(default=None, compare=False)

    def in_order(self, parts: Parts) -> list[Any]:
        """Return the inputs in the order of the loop's signature."""
        timed = self.coefficient == "steps"
        sequences = [parts.matrix if timed else None, parts.offset]
        fixed = [None if timed else parts.matrix, parts.mask]
        given = [parts.n_steps, *sequences, parts.initial, *fixed]
        return [part for part in given if part is not None]


def history_of(options: LinearOptions, parts: Parts) -> Variable:
    """Return the history of a recurrence of variables, which get the dtype of the initial state.

    `ValueError` if nothing gives the number of steps.
    """
    dtype = parts.initial.type.dtype
    matrix = pt.cast(parts.matrix, dtype)
    offset = None if parts.offset is None else pt.cast(parts.offset, dtype)
    parts = parts._replace(matrix=matrix, offset=offset)
    ranks = Parts(*(None if part is None else part.type.ndim for part in parts))
    own = replace(options, matrix=matrix.name)
    title = options.name, options.function
    op = LinearScan(own, canonical_loop(options, title, dtype, ranks))
    return op(*options.in_order(parts))


# The loop


@lru_cache(maxsize=512)
def canonical_loop(
    options: LinearOptions, title: tuple[str | None, str], dtype: str, ranks: Parts
) -> Scan:
    """Return the loop of a recurrence, for any sizes, with states of a dtype and parts of some
    numbers of dimensions, None where there is no such part; `title` is the name of the loop and the
    function that built it."""
    timed = ("offset", *["matrix"] * (options.coefficient == "steps"))
    rows = {
        part: TensorType("bool" if part == "mask" else dtype, shape=(None,) * rank)(part)
        for part, ndim in ranks._asdict().items()
        if ndim is not None and part != "n_steps"
        for rank in [ndim - (part in ("initial", *timed))]
    }
    now = Parts(**{part: rows.get(part) for part in Parts._fields})
    new = next_state(options, now, now.initial, lambda *terms: product(options.semiring, *terms))
    inputs = options.in_order(now)
    first = inputs.index(now.initial)
    signature = Signature(
        n_sequences=first,
        taps=((-1,),),
        untraced=(options.untraced,),
        n_non_sequences=len(inputs) - first - 1,
        has_n_steps=ranks.n_steps is not None,
        reverse=options.reverse,
        required_steps=options.required_steps,
    )
    names = tuple(part.name for part in inputs)
    name, function = title
    labels = Labels(names[:first], ("state",), (), names[first + 1 :], function=function)
    return Scan(signature, freeze_graph(inputs, [new]), name=name, labels=labels)


def next_state(options: LinearOptions, parts: Parts, state: Any, times: Times) -> Any:
    """Return ``A ⊗ h + b`` (``h ⊗ A + b`` on the right side), with the rows of one step.

    The parts are variables, or arrays.
    """
    matrix, mask = parts.matrix, parts.mask
    if options.side == "right":
        matrix = matrix.swapaxes(-1, -2)
        mask = None if mask is None else mask.T
    if options.vector:
        new = times(matrix, state[..., None], mask).squeeze(-1)
    elif options.side == "right":
        new = times(matrix, state.swapaxes(-1, -2), mask).swapaxes(-1, -2)
    else:
        new = times(matrix, state, mask)
    return new if parts.offset is None else new + parts.offset


def product(semiring: str, matrix: Any, state: Any, mask: Any, m: Any = pt) -> Any:
    """Return ``A ⊗ h`` for matrices ``(…, d, d)`` and ``(…, d, m)``, by the functions of `m`."""
    if semiring == "real" and mask is None:
        return matrix @ state
    left, right = matrix[..., :, :, None], state[..., None, :, :]
    if mask is not None:
        return m.where(mask[:, :, None], left * right, 0).sum(axis=-2)
    terms = left + right
    if semiring != "log":
        return (m.max if semiring == "max" else m.min)(terms, axis=-2)
    largest = m.max(terms, axis=-2, keepdims=True)
    shift = m.where(m.isinf(largest), 0, largest)
    return shift.squeeze(-2) + m.log(m.exp(terms - shift).sum(axis=-2))


class LinearScan(LoopOp, PrintedOp):
    """A matrix recurrence; see the module's text, and `history_of`, which makes it.

    Each option is an attribute of the Op as well. The loop in canonical form answers for shapes and
    lengths.
    """

    __props__: tuple[str, ...] = ("options", "scan")
    semiring: str
    coefficient: str
    side: str
    vector: bool
    reverse: bool
    untraced: bool
    required_steps: int
    name: str | None

    def __init__(self, options: LinearOptions, scan: Scan) -> None:
        self.options, self.scan, self.signature = options, scan, scan.signature
        self.__dict__.update(vars(options))
        self._runners: dict[str, Runner] = {}
        load_backends()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_runners": {}}

    def __str__(self) -> str:
        flags = ["reverse"] * self.reverse + ["untraced"] * self.untraced
        texts = [self.name, self.semiring, self.coefficient, self.side, *flags]
        return f"LinearScan{{{', '.join(filter(None, texts))}}}"

    @property
    def has_offset(self) -> bool:
        """Whether there is an input `b`."""
        return self.signature.n_sequences > (self.coefficient == "steps")

    @property
    def has_mask(self) -> bool:
        """Whether there is a last input that says which items the matrix has."""
        return self.signature.n_non_sequences > (self.coefficient == "fixed")

    @property
    def dtype(self) -> str:
        """The dtype of the state."""
        return self.row_types().initial.dtype

    @property
    def batch_rank(self) -> int:
        """The number of batch dimensions of the state."""
        return self.row_types().initial.ndim - (1 if self.vector else 2)

    @property
    def matrix_batch_rank(self) -> int:
        """The number of batch dimensions of the matrix: all or none."""
        return self.row_types().matrix.ndim - 2

    def row_types(self) -> Parts:
        """Return the types of what one step reads."""
        numbers = [None] * self.has_n_steps
        return self.parts([*numbers, *(variable.type for variable in self.scan.body.inputs)])

    def messages(self) -> Messages:
        """Return the texts of the errors that the loop may raise when it runs."""
        return Messages(self.signature, self.scan.labels, self.name)

    def parts(self, inputs: Sequence[Any]) -> Parts:
        """Name the inputs (or their shapes, or values) by role."""
        outer = self.signature.split_inputs(inputs)
        timed, fixed = outer.sequences, outer.non_sequences
        matrix = (timed if self.coefficient == "steps" else fixed).pop(0)
        offset, mask = ([*own, None][0] for own in (timed, fixed))
        return Parts(outer.n_steps, matrix, offset, outer.initials[0], mask)

    def same_sizes(self) -> Iterator[tuple[tuple[str, int], tuple[str, int]]]:
        """Yield pairs of a part and an axis of its rows whose sizes have to be the same."""
        batch = range(self.batch_rank)
        size = "initial", -1 if self.vector or self.side == "right" else -2
        for name in ("matrix", *["mask"] * self.has_mask):
            yield from (((name, axis), size) for axis in (-2, -1))
        if self.matrix_batch_rank:
            yield from ((("matrix", axis), ("initial", axis)) for axis in batch)
        if self.has_offset:
            rank = self.row_types().initial.ndim
            yield from ((("offset", axis), ("initial", axis)) for axis in range(rank))

    def sizes_differ(self, pair: tuple[tuple[str, int], tuple[str, int]]) -> str:
        """Numbers: two sizes that have to be the same, of a part and of the state."""
        named = f" `{self.options.matrix}`" if self.options.matrix else ""
        kinds = {"matrix": f"the matrix{named}", "mask": "the mask", "initial": "the state"}
        texts = []
        for role, axis in pair:
            what = f"size {{}} along axis {axis}"
            if axis < 0:
                is_vector = role == "initial" and self.vector
                what = "{} items" if is_vector else f"{{}} {'rows' if axis == -2 else 'columns'}"
            texts.append(f"{kinds.get(role, 'what is added to the state')} has {what}")
        return f"{self.messages().prefix}{', but '.join(texts)}"

    # What the canonical loop says. Loops are differentiated and batched before they are lowered.

    def make_node(self, *inputs: Any) -> Apply:
        node = self.scan.make_node(*inputs)
        initial = self.parts(node.inputs).initial.type
        rows = node.outputs[0].type.shape[0] if initial.shape[0] == 1 else None
        out = TensorType(initial.dtype, shape=(rows, *initial.shape[1:]))()
        return Apply(self, node.inputs, [out])

    def infer_shape(self, *arguments: Any) -> list[Any]:
        node, shapes = arguments[-2:]
        ((rows, *row),) = self.scan.infer_shape(*arguments)
        if not self.untraced:
            outer, sizes = self.signature.split_inputs(node.inputs), self.parts(shapes)
            steps = shapes[0][0] if outer.n_steps is None else outer.n_steps
            rows = steps + sizes.initial[0]
        return [(rows, *row)]

    def is_empty(self, inputs: Sequence[Any]) -> bool:
        """Whether there are neither steps nor an initial row, and so no history."""
        outer = self.signature.split_inputs(inputs)
        empty = bool(outer.sequences) and not len(outer.sequences[0])
        return empty and not len(outer.initials[0]) and not self.untraced

    def python_loop(self, kind: type[PythonLoop] = PythonLoop) -> Runner:
        loop = kind(self.scan)
        return lambda *inputs: (
            [self.parts(inputs).initial] if self.is_empty(inputs) else loop(*inputs)
        )
