"""Which matrix recurrence a loop is: of one state as it stands, or of all its parts joined.

A state with matrices along its axes is taken as it stands. Otherwise, a loop of states that a step
maps linearly into one another, with any number of taps, is a loop of one vector ``s = [s_1, s_2,
…]`` with ``s' = s W + c``, whose blocks are read off the linear forms of the next values
(`scanlib.analysis.linear_forms`); a tap `-k` is a part of `s` that takes the value of the tap
before it. The lowering (`lower_linear`) reads the parts' rows in those of the vector (`Pieces`).

Some are left to the loop for what their matrices would cost. A lowered recurrence reads a matrix
for each step. Where the loop itself multiplies with a fixed matrix and with a row, as the adjoint
of ``h_t = tanh(x_t + U h_{t-1})`` does with ``U`` and ``1 - h_t²``, the matrices ``diag(1 - h_t²)
U`` of all steps would have to be made: `d` times as many numbers as the loop moves, and as many
more for each item of a batch. Where `d` is not known it may be large: for 2 to 8 numbers the loop
is 1.2 to 2.5 times slower, but matrices for 32 numbers take twice the loop's time, for 128 ten
times, and `d` times the memory.

Small matrices cost little memory, but what makes them is compiled, node by node. Elementwise work
becomes one function. Products and sums do not: with those of a Kalman filter of two states,
``F (I - k_t hᵀ)`` and its adjoints, a gradient of 1,000 steps takes two thirds of the time that the
loop takes, and five times as long to compile.

A joined matrix holds zeros that nobody multiplied before. Joining pays where few of its blocks are
missing, and for small systems in any case.

Linkers that take recurrences step by step, as numba's and C's do, and not all steps at once as GPUs
do, gain less by a recurrence (`by_steps`). Steps of vectors of known sizes are faster apart where a
sixth of the blocks is missing: two taps in 0.4 to 0.8 of the time, gradients as well. So are rows
of a batch that one matrix multiplies: in 0.5 to 0.9, two taps of 50 rows in 0.05 to 0.3. And steps
that compute a matrix by functions, as gradients of hidden Markov chains do, have it in the cache:
16 states take the same time, 32 take 0.6, 64 a sixth, without the memory of all steps' matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors, toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import Alloc, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.linalg.solvers.core import SolveBase
from pytensor.tensor.math import Dot
from pytensor.tensor.special import Softmax
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib.analysis.linear_forms import (
    OFFSET,
    Block,
    LinearForms,
    MatrixRecurrence,
    NotAffineError,
    check_operations,
    in_other_semiring,
    of_one_state,
)
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.errors import InitialRowsError
from scanlib.ops.graph import (
    applies,
    core_op,
    depends_on,
    is_cheap,
    is_tensor,
    reached_by,
    substitute,
)
from scanlib.ops.linker_features import TakesSteps
from scanlib.ops.loop import Carry, Loop, Part, State
from scanlib.ops.small_arrays import works_on_numbers
from scanlib.rewrites.lower.canonical_loop import BodySizes, canonical_loop, reads_shape, split_sums
from scanlib.rewrites.lower.lower_elementwise import is_elementwise
from scanlib.rewrites.over_time.peel import elementwise_region
from scanlib.rewrites.over_time.split_cost import BOUND, HEAVY, kind
from scanlib.rewrites.pytensor_rewrites import CANONICAL, run_query

# Matrices up to this size are made for every step at no cost to speak of. (A filter of two states
# and their covariance, six numbers, takes 1.3 to 2.9 times as long with matrices.)
SMALL_MATRIX = 4
ELEMENTWISE = (Elemwise, DimShuffle, ScalarFromTensor, TensorFromScalar, Alloc)
SMALL = 32  # systems of so many numbers are joined whatever blocks are missing
SMALL_PER_STEP = 16  # the same, with a matrix for each step
WASTE = 2.0  # larger ones if the joined matrix has at most so many times their items
WASTE_BY_STEPS = 1.2  # of numbers, and vectors of known sizes, where kernels take the steps
FEW_BLOCKS = (
    "its states are coupled by few or sparse matrices: joined, most of the matrix would be zeros"
)


class NotLinearError(Exception):
    """A loop is not a matrix recurrence with maps around it; the text says why."""


def check_sparsity(
    values: Sequence[Variable], nexts: Sequence[Variable], by_steps: TakesSteps | None
) -> None:
    """Refuse numbers few of which depend on one another, as many taps, before anything is computed;
    kernels take steps of few numbers in registers."""
    small, waste = (1, WASTE_BY_STEPS) if by_steps else (SMALL, WASTE)
    if len(values) <= small or any(value.type.ndim for value in values):
        return
    used = sum(mask.bit_count() for mask in reached_by(values, nexts))
    if len(values) ** 2 > waste * used:
        raise NotLinearError(FEW_BLOCKS)


def check_joined_cost(
    sizes: Sequence[int | None],
    ranks: Sequence[int],
    full: Sequence[Sequence[int]],
    per_step: bool,
    by_steps: TakesSteps | None,
) -> None:
    """Refuse systems of which too much is missing.

    `sizes` and `ranks` are those of the states without their batch; `full` has for each next value
    the states that all its items read. The joined matrix may differ from step to step (`per_step`).
    """
    known = [size for size in sizes if size is not None]
    small, waste = SMALL_PER_STEP if per_step else SMALL, WASTE
    if by_steps and any(ranks) and len(known) == len(sizes) > 1 and not per_step:
        small, waste = 0, WASTE_BY_STEPS
    if len(known) == len(sizes) and sum(known) <= small:
        return
    if any(rank > 1 for rank in ranks):
        raise NotLinearError("its states are matrices that the matrices do not keep apart")
    largest = max(known, default=0)
    guessed = [largest or 1 if size is None else size for size in sizes]
    if len(known) < len(sizes):
        guessed = [size if rank else 0 for size, rank in zip(guessed, ranks, strict=True)]
    used = sum(guessed[i] * guessed[j] for i, row in enumerate(full) for j in row)
    if sum(guessed) ** 2 > waste * used:
        raise NotLinearError(FEW_BLOCKS)


def _factors(node: Apply) -> list[Variable]:
    """Return what a node multiplies, a product, a solve, or a reduction of elementwise work.

    ``Σ_j A_ij h_j``, ``max_j (A_ij + h_j)`` and the like are products, written as broadcasts.
    """
    if isinstance(core_op(node), Dot | SolveBase):
        return node.inputs
    above = node.inputs[0].owner if isinstance(core_op(node), CAReduce) else None
    if above is None or not isinstance(above.op, Elemwise):
        return []
    return elementwise_region(above, ())[1]


def _is_vector(node: Apply, factor: Variable) -> bool:
    """Whether a product has a result along axes that a factor lacks: ``Σ_j A_ij h_j`` has `i`, and
    ``Σ_j s_j h_j`` of each row of a batch multiplies no matrix."""
    op, ndim = core_op(node), factor.type.ndim
    if not isinstance(op, CAReduce):
        return True
    reduced = range(ndim) if op.axis is None else op.axis
    return any(factor.type.broadcastable[axis] for axis in {*range(ndim)}.difference(reduced))


def _makes_matrix(variable: Variable) -> bool:
    """Whether functions such as `exp` make a matrix."""
    node = variable.owner
    if node is None or variable.type.ndim < 2 or True in variable.type.broadcastable[-2:]:
        return False
    is_costly = isinstance(node.op, Elemwise) and not is_cheap(node.op.scalar_op)
    return is_costly or isinstance(node.op, Softmax)


@dataclass
class Roles:
    """The roles of the parts of a loop around one matrix recurrence.

    The state of the recurrence is joined of `slots`. `sums` are the carries that add up, with what
    a step adds; `shift` is that of `shift_carries`. `mask` says which items of the matrix are there
    (None: all), `pieces` where the slots stand in a row of the state: None if it is the one slot as
    it stands.
    """

    slots: list[Slot]
    recurrence: MatrixRecurrence
    sums: list[tuple[Carry, Variable]]
    shift: Variable | None = None
    mask: Variable | None = None
    pieces: Pieces | None = None


def find_recurrence(
    node: Apply, at_any_cost: bool = False, by_steps: TakesSteps | None = None
) -> tuple[Loop, Roles]:
    """Return a loop around one matrix recurrence: the one of a node, or that of all its parts.

    See `lower_linear.lower_linear`. `NotLinearError` if the loop is of another form.
    """
    if node.op.recompute:
        raise NotLinearError("its steps are segments of a checkpointed loop")
    loop = canonical_loop(node, not at_any_cost)
    if loop.stop is not None:
        raise NotLinearError("the loop may stop early")
    if loop.truncate_gradient != -1:
        raise NotLinearError("its gradient is truncated")
    slots = slots_of([*loop.states, *split_sums(loop, loop.carries)[1]])
    check_types(slots)
    values, nexts = [slot.value for slot in slots], [slot.next for slot in slots]
    if not at_any_cost:
        check_sparsity(values, nexts, by_steps)
    try:
        check_operations(values, nexts, reads_shape)
        found = _Search(node, loop, {}, at_any_cost, by_steps).result()
    except NotAffineError as error:
        raise NotLinearError(str(error)) from error
    if not loop.states:
        loop = canonical_loop(node)
        shifts = shift_carries(loop)
        if shifts:
            with suppress(NotLinearError, NotAffineError):
                return _Search(node, loop, shifts, by_steps=by_steps).result()
    return found


def check_types(slots: Sequence[Slot]) -> None:
    if not slots:
        raise NotLinearError("no state depends on the one before it")
    if any(not is_tensor(slot.value) for slot in slots):
        raise NotLinearError("a state is no tensor")
    dtypes = {slot.value.type.dtype for slot in slots}
    if len(dtypes) > 1:
        raise NotLinearError(f"its states have different dtypes: {sorted(dtypes)}")
    if not dtypes.pop().startswith(("float", "complex")):
        raise NotLinearError("the states hold no floating-point numbers")


# Carries that are read in a sum alone


def shift_carries(loop: Loop) -> dict[Part, Variable]:
    """Let a loop of carries whose steps read some `c` only in ``u = c + g`` be one of the `u`.

    Cotangents are such carries: a step adds what its own result is owed to what later steps owe.
    With ``c' = M u``, the recurrence is ``u' = M u + g'`` with the `g` of the step that follows:
    all values of `u`, which outputs and sums read, come from the recurrence, and ``M g`` is not
    computed. The loop is changed to have the `u` in the place of the `c`; the `g` of each carry is
    returned, none where it was not changed.
    """
    _, recurrent = split_sums(loop, loop.carries)
    outputs = loop.body_outputs()
    values = {carry.value for carry in loop.carries}  # sums are no part of the recurrence
    found: dict[Part, Variable] = {}
    for carry in recurrent:
        shift = _added_to(carry.value, outputs)
        if shift is not None and values.isdisjoint(ancestors([shift])):
            found[carry] = shift
    if not found:
        return {}
    new = {part.value: part.type() for part in recurrent if part in found}
    changes = {p.value: new[p.value] - found[p] for p in recurrent if p in found}
    inputs = [new.get(inp, inp) for inp in loop.body_inputs()]
    made = [*substitute(outputs, changes), *found.values()]
    body = FunctionGraph(inputs, made, clone=False)
    run_query(CANONICAL, body)
    made = list(body.outputs)
    if len(list(toposort(made[: len(outputs)]))) >= len(list(toposort(outputs))):
        return {}  # the subtraction did not cancel
    for part in recurrent:
        part.value = new.get(part.value, part.value)
    loop.set_body_outputs(made[: len(outputs)])
    return dict(zip(found, made[len(outputs) :], strict=True))


def _added_to(value: Variable, outputs: list[Variable]) -> Variable | None:
    """Return what is added to a variable where it is read first, in its own layout."""
    own = range(value.type.ndim)
    for node in toposort(outputs):
        if not applies(node, ps.Add):
            continue
        for place, inp in enumerate(node.inputs):
            order: tuple[Any, ...] = tuple(own)
            if inp is not value:
                above = inp.owner
                if above is None or not isinstance(above.op, DimShuffle):
                    continue
                order = above.op.new_order
                # An axis of one item may have been dropped.
                if above.inputs[0] is not value or not set(own) <= set(order):
                    continue
            others = [other for k, other in enumerate(node.inputs) if k != place]
            shift = others[0] if len(others) == 1 else pt.add(*others)
            added = [k for k, axis in enumerate(order) if axis == "x"]
            if len(order) != shift.type.ndim or any(shift.type.shape[k] != 1 for k in added):
                continue
            if value not in ancestors([shift]):
                return shift.dimshuffle(*(order.index(k) for k in own))
    return None


# The parts of a joined state


@dataclass
class Slot:
    """A part of the joined state: one tap of a state, or a carry."""

    part: State | Carry
    tap: int
    value: Variable
    next: Variable

    def initial(self, reverse: bool) -> Variable:
        """Return the row that it starts from."""
        part, initial = self.part, self.part.initial
        if isinstance(part, Carry):
            return initial
        if initial.type.shape[0] != part.depth:
            message = f"linear scan: a state needs {part.depth} initial rows for its taps"
            check = CheckAndRaise(InitialRowsError, message)
            initial = check(initial, pt.eq(initial.shape[0], part.depth))
        return initial[-self.tap - 1] if reverse else initial[part.depth + self.tap]


def slots_of(parts: Sequence[State | Carry]) -> list[Slot]:
    slots = []
    for part in parts:
        following = part.next
        for tap in range(-1, -part.depth - 1, -1):
            value = part.tap(tap)
            slots.append(Slot(part, tap, value, following))
            following = value
    return slots


@dataclass
class Pieces:
    """Where the slots stand in a joined row: their sizes and shapes behind the axes of a batch."""

    sizes: list[Variable]
    shapes: list[tuple[Variable, ...]]
    batch: int

    def of(self, rows: Variable, k: int) -> Variable:
        """Return the values of one slot in rows over time."""
        start, shape, lead = _total(self.sizes[:k]), self.shapes[k], 1 + self.batch
        index: Any = slice(start, _total(self.sizes[: k + 1])) if shape else start
        part = rows[(*(slice(None),) * lead, index)]
        return part.reshape((*tuple(part.shape)[:lead], *shape)) if len(shape) > 1 else part

    def joined(self, rows: Sequence[Variable]) -> Variable:
        """Return the row of all slots, given one of each."""
        flat = [self._flat(row) for row in rows]
        if self.batch:
            lead = tuple(flat[0].shape)[: self.batch]
            flat = [pt.broadcast_to(row, (*lead, row.shape[-1])) for row in flat]
        return pt.concatenate(flat, axis=-1)

    def _flat(self, row: Variable) -> Variable:
        core = row.type.ndim - self.batch
        if core == 1:
            return row
        size = pt.prod(row.shape[self.batch :]) if core else pt.constant(1, dtype="int64")
        return row.reshape((*tuple(row.shape)[: self.batch], size))

    def changed(self, change: Callable[[Variable], Variable]) -> Pieces:
        """Return the same with other variables for the sizes."""
        shapes = [tuple(map(change, shape)) for shape in self.shapes]
        return Pieces(list(map(change, self.sizes)), shapes, self.batch)


def _total(sizes: Sequence[Variable]) -> Any:
    known = [constant_integer(size) for size in sizes]
    fixed = sum(size for size in known if size is not None)
    unknown = [size for size, value in zip(sizes, known, strict=True) if value is None]
    return pt.add(fixed, *unknown) if unknown else fixed


# The recurrence


class _Search:
    """Finds the recurrence of a loop of which nothing is known but the types of its states."""

    def __init__(
        self,
        node: Apply,
        loop: Loop,
        shifts: dict[Part, Variable],
        at_any_cost: bool = False,
        by_steps: TakesSteps | None = None,
    ) -> None:
        self.node, self.loop = node, loop
        self.at_any_cost, self.by_steps = at_any_cost, by_steps
        self.sizes = BodySizes(loop)
        made = self.sizes.cut(loop, list(shifts.values()))
        self.shift_of = dict(zip(shifts, made, strict=True))
        self.sums, carries = split_sums(loop, loop.carries)
        self.slots = slots_of([*loop.states, *carries])
        self.rows = {sequence.row for sequence in loop.sequences}

    def result(self) -> tuple[Loop, Roles]:
        """Return the loop and the roles of its parts."""
        alone = self.one_state() if len(self.slots) == 1 else None
        roles = self.joined() if alone is None else alone
        self.sizes.add_to(self.loop)
        check_maps(self.loop, roles)
        return self.loop, roles

    @cached_property
    def forms(self) -> LinearForms:
        return self.propagate(False)

    def propagate(self, structure: bool) -> LinearForms:
        sources = [slot.value for slot in self.slots]
        return LinearForms(sources, [slot.next for slot in self.slots], self.sizes, structure)

    def one_state(self) -> Roles | None:
        """Return the roles around a single state as it stands, None if it has to be joined."""
        (slot,) = self.slots
        if slot.next not in depends_on([slot.next], [slot.value]):
            raise NotLinearError("no state depends on the one before it")
        if slot.value.type.ndim == 0:
            return None
        found = in_other_semiring(slot.value, slot.next, self.sizes)
        is_row = slot.value.type.broadcastable.count(False) == 1 < slot.value.type.ndim
        if found is None and not is_row:  # nor a column
            found = of_one_state(self.forms, slot.next, self.at_any_cost)
        if found is None:
            return None
        if not self.at_any_cost:
            if found.semiring == "real" and not all(_without(slot.value, found.axis)):
                self.check_batch(found.matrix)
            self.check_step_matrices(found.matrix)
        return Roles([slot], found, self.sums, self.shift_of.get(slot.part))

    def joined(self) -> Roles:
        loop = self.loop
        numbers = all(not slot.value.type.ndim for slot in self.slots)
        may_be = numbers or not self.forms.multiplies
        if may_be and is_elementwise(Loop.from_node(self.node)):
            raise NotLinearError("the loop is elementwise")
        blocks_of = ((self.forms.form(slot.next), slot.next.type.ndim) for slot in self.slots)
        if not numbers and all(  # each item reads one item of each state, at its own place
            block.ties == tuple(range(ndim))
            for form, ndim in blocks_of
            for k, block in form.items()
            if k != OFFSET
        ):
            raise NotLinearError("its states are multiplied number by number")
        others = [n for n in toposort(loop.body_outputs()) if not isinstance(n.op, ELEMENTWISE)]
        read_items = all(isinstance(n.op, Subtensor | IncSubtensor) for n in others)
        if numbers and others and read_items:  # which are best read where they are
            raise NotLinearError("its numbers read single items, at places that the steps compute")
        if not split_sums(loop, [slot.part for slot in self.slots])[1]:
            raise NotLinearError("its states only add up what the steps compute")
        batch = self.batch()
        blocks = self.blocks(self.forms, batch)
        matrix = self.matrix(self.forms, blocks, batch)
        sizes = [self.forms.size(k, batch) for k in range(len(self.slots))]
        if not self.at_any_cost:
            self.check_numbers(batch, matrix)
            if batch:
                self.check_batch(matrix)
            check_joined_cost(
                [constant_integer(size) for size in sizes],
                [slot.value.type.broadcastable[batch:].count(False) for slot in self.slots],
                [[j for j, block in enumerate(row) if block and block.full] for row in blocks],
                self.differs(matrix),
                self.by_steps,
            )
            self.check_step_matrices(matrix)
        mask = None
        if not all(block and block.full for row in blocks for block in row):
            mask = self.mask(batch)
        offset = self.together([self.forms.offset(slot.next) for slot in self.slots], batch)
        shapes = [tuple(self.sizes(slot.value))[batch:] for slot in self.slots]
        shift = self.together([self.shift_of.get(slot.part) for slot in self.slots], batch)
        recurrence = MatrixRecurrence("real", batch, matrix.mT, offset)
        pieces = Pieces(sizes, shapes, batch)
        return Roles(self.slots, recurrence, self.sums, shift, mask, pieces)

    # What matrices of all steps cost

    def differs(self, variable: Variable) -> bool:
        """Whether a variable differs from step to step."""
        return not self.rows.isdisjoint(ancestors([variable]))

    def check_batch(self, matrix: Variable) -> None:
        """Refuse rows of a batch that steps multiply with one matrix, all rows together."""
        if self.by_steps and all(matrix.type.broadcastable[:-2]):
            raise NotLinearError("one matrix multiplies several rows, which steps do at once")

    def check_step_matrices(self, matrix: Variable) -> None:
        """Refuse recurrences whose matrices of all steps cost more than what they are made of.

        `matrix` is that of one step, with the state's other axes in front of its own two.
        """
        if not self.differs(matrix):
            return
        largest = max(length or SMALL_MATRIX + 1 for length in matrix.type.shape[-2:])
        varying = depends_on([matrix], self.rows)
        products = [  # and sums and solves that differ from step to step
            node
            for node in toposort([matrix])
            if node.outputs[0] in varying and isinstance(core_op(node), Dot | CAReduce | SolveBase)
        ]
        if self.has_matrices:
            own = set(toposort([slot.next for slot in self.slots]))
            by_steps = self.by_steps is not None and self.by_steps.in_cache
            is_made = by_steps and any(map(_makes_matrix, varying))
            costs_more = largest > SMALL_MATRIX and (is_made or not own.issuperset(products))
        else:
            costs_more = largest > SMALL_MATRIX or bool(products)
        if costs_more:
            raise NotLinearError("making a matrix for each step would cost more than the steps do")

    @cached_property
    def has_matrices(self) -> bool:
        """Whether a step multiplies a state with a matrix that differs from step to step."""
        targets = [slot.next for slot in self.slots]
        dependent = depends_on(targets, [slot.value for slot in self.slots])
        varying = depends_on(targets, self.rows)
        for node in toposort(targets):
            factors = _factors(node)
            if not any(factor in dependent and _is_vector(node, factor) for factor in factors):
                continue
            for factor in factors:
                is_row = factor in varying and factor not in dependent
                if is_row and factor.type.ndim >= 2 and True not in factor.type.broadcastable[-2:]:
                    return True
        return False

    def check_numbers(self, batch: int, matrix: Variable) -> None:
        """Refuse few numbers that steps put together, or rows of a batch of such.

        They stay in registers there, and work on rows costs less than to make matrices for them;
        the more so, the more numbers a step computes.
        """
        if not self.differs(matrix) or self.has_matrices:
            return
        if batch or works_on_numbers(self.node.op, most=inf):
            raise NotLinearError("its states are few numbers, which steps put together")

    # The joined matrix

    def batch(self) -> int:
        """Return how many leading axes all states have in common and no step mixes.

        They are none where the batch is of one.
        """
        most = max(0, min(slot.value.type.ndim for slot in self.slots) - 1)
        if len({slot.value.type.broadcastable[:most] for slot in self.slots}) > 1:
            return 0
        for slot in self.slots:
            for k, block in self.forms.form(slot.next).items():
                if k == OFFSET:
                    continue
                ties = enumerate(block.ties[:most])
                mixed = [k for k, tie in ties if tie != k]
                most = min([most, *mixed])
        return 0 if all(self.slots[0].value.type.broadcastable[:most]) else most

    def blocks(self, forms: LinearForms, batch: int) -> list[list[Block | None]]:
        """Return the blocks of every next value, tied along the batch alone."""
        rows = []
        for slot in self.slots:
            found = forms.form(slot.next)
            loose = range(batch, slot.next.type.ndim)
            rows.append(
                [
                    forms.loosened(j, found[j], loose) if j in found else None
                    for j in range(len(self.slots))
                ]
            )
        return rows

    def matrix(self, forms: LinearForms, blocks: list[list[Block | None]], batch: int) -> Variable:
        """Return ``W``, with the batch or axes of size one in front."""
        count = len(self.slots)
        made = []
        for j in range(count):
            for i, slot in enumerate(self.slots):
                block = blocks[i][j]
                if block is None:
                    ties = [k if k < batch else None for k in range(slot.next.type.ndim)]
                    block = forms.zeros(j, slot.next, tuple(ties))
                whole, n = forms.whole(j, block, slot.next), len(forms.free(j, block))
                free: list[Any] = list(range(n)) or ["x"]
                rest: list[Any] = list(range(n + batch, whole.type.ndim)) or ["x"]
                whole = whole.dimshuffle(*range(n, n + batch), *free, *rest)
                if n > 1 or len(rest) > 1:
                    lead = tuple(whole.shape)[:batch]
                    whole = whole.reshape((*lead, forms.size(j, batch), forms.size(i, batch)))
                made.append(whole)
        if len({block.type.broadcastable[:batch] for block in made}) > 1:
            lead = tuple(self.sizes(self.slots[0].value))[:batch]
            made = [pt.broadcast_to(b, (*lead, *tuple(b.shape)[batch:])) for b in made]
        rows = [made[j * count : (j + 1) * count] for j in range(count)]
        return pt.concatenate([pt.concatenate(row, axis=-1) for row in rows], axis=-2)

    def mask(self, batch: int) -> Variable | None:
        """Return where the joined matrix has items, with the batch left out."""
        forms = self.propagate(True)
        made = pt.gt(self.matrix(forms, self.blocks(forms, batch), batch), 0)
        for _ in range(batch):
            made = made.any(axis=0)
        if self.differs(made):
            raise NotLinearError("which states a step reads differs from step to step")
        return None if _all_true(made) else made.T

    def together(self, values: Sequence[Variable | None], batch: int) -> Variable | None:
        """Return values of the slots in the layout of the joined state, None if there are none."""
        if all(value is None for value in values):
            return None
        flat = []
        for k, (value, slot) in enumerate(zip(values, self.slots, strict=True)):
            sizes, own = tuple(self.sizes(slot.value)), slot.value.type.broadcastable
            if value is None:
                value = self.forms.filled(0, sizes)
            elif any(a and not b for a, b in zip(value.type.broadcastable, own, strict=True)):
                value = pt.broadcast_to(value, sizes)
            if value.type.ndim != batch + 1:
                value = value.reshape((*sizes[:batch], self.forms.size(k, batch)))
            flat.append(value)
        return pt.concatenate(flat, axis=-1)


def _without(value: Variable, axis: int) -> tuple[bool, ...]:
    """Return whether the axes of a value but one are of one item."""
    return value.type.broadcastable[:axis] + value.type.broadcastable[axis + 1 :]


def check_maps(loop: Loop, parts: Roles) -> None:
    """Refuse loops that compute something beside the recurrence that is not for a batch."""
    recurrence, whole = parts.recurrence, [part.inner for part in loop.non_sequences]
    differ = {v for slot in parts.slots for v in (slot.value, slot.next)}
    differ.update(sequence.row for sequence in loop.sequences)
    needed = [recurrence.matrix, *(added for _, added in parts.sums)]
    needed += [output.value for output in loop.outputs]
    optional = (recurrence.offset, parts.shift, parts.mask)
    needed += [v for v in optional if v is not None]
    for node in toposort(needed, blockers=[*whole, *differ]):
        if differ.isdisjoint(node.inputs):
            continue  # computed once
        differ.update(node.outputs)
        if kind(node, differ.__contains__) in (HEAVY, BOUND):
            raise NotLinearError(f"a step computes {node.op}, which stays in the loop")


def _all_true(mask: Variable) -> bool:
    """Whether a mask is known to be true everywhere."""
    if any(v.owner is None and not isinstance(v, Constant) for v in ancestors([mask])):
        return False
    folded = FunctionGraph([], [mask], clone=True)
    run_query(CANONICAL, folded)
    (value,) = folded.outputs
    return isinstance(value, Constant) and bool(np.all(value.data))
