"""Several recurrent parts of a loop as one vector: the loop of a joined state.

A loop of states that a step maps linearly into one another, with any number of taps, is a loop of
one state ``s = [s_1, s_2, …]`` with ``s' = s W + c`` (`scanlib.analysis.matrix_system`); a tap
`-k` is a part of `s` that takes the value of the tap before it. `join_parts` makes that loop; the
rest of the lowering (`lower_linear`) need not know that there were several, and
`Joined.results` takes the result apart again.

A joined matrix holds zeros that nobody multiplied before. Joining pays where few of its blocks are
missing, and for small systems in any case: a step of a general loop takes as long as a few hundred
multiplications.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors, toposort

from scanlib.analysis.matrix_affine import NotAffineError
from scanlib.analysis.matrix_recurrence import MatrixRecurrence
from scanlib.analysis.matrix_system import Jacobian, SystemForms
from scanlib.analysis.scalar_body import NotElementwiseError, scalar_loop
from scanlib.analysis.system_rules import propagate
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.graph import is_tensor, substitute
from scanlib.ops.loop import Carry, Loop, State
from scanlib.rewrites.lower.body_sizes import BodySizes
from scanlib.rewrites.lower.linear_cost import builds_matrices
from scanlib.rewrites.lower.linear_joined import Joined, initial_of, piece_of, slots_of
from scanlib.rewrites.lower.linear_roles import (
    CANONICAL,
    MatricesCostMoreError,
    NotLinearError,
    Roles,
    added_to,
    added_up,
    canonical_loop,
    check_maps,
    readers_of,
    split_sums,
    value_of,
)
from scanlib.rewrites.lower.linear_sparse import FEW_BLOCKS, SMALL, WASTE, refuse_sparse
from scanlib.rewrites.lower.lower_elementwise import specialize_elementwise
from scanlib.rewrites.pytensor_rewrites import run_query

SMALL_PER_STEP = 16  # the same, with a matrix for each step


def join_parts(node: Apply) -> tuple[Loop, Roles, Joined]:
    """Return a loop with all its recurrent parts joined, and what it is to the loop of `node`.

    Raises
    ------
    NotLinearError
        If the parts are no linear system, or joining would cost more than it gains.
    """
    loop = canonical_loop(node)
    _, carries = split_sums(loop)
    refuse_sparse(slots_of([*loop.states, *carries]))
    shifts = _shift(loop)
    if shifts is not None:
        try:
            return _joined(node, loop, shifts)
        except NotLinearError:
            pass
    return _joined(node, canonical_loop(node), {})


def _joined(node: Apply, loop: Loop, shifts: dict[int, Variable]) -> tuple[Loop, Roles, Joined]:
    try:
        return _Joining(node, loop, shifts).result()
    except NotAffineError as error:  # a size that a step computes
        raise NotLinearError(str(error)) from error


def _shift(loop: Loop) -> dict[int, Variable] | None:
    """Let a loop whose steps read carries `c` only in ``u = c + g`` be one of the `u`.

    See `linear_roles.shifted`; the values of `g` are returned by position of the carry.
    """
    if loop.states:
        return None
    _, recurrent = split_sums(loop)
    outputs = loop.body_outputs()
    values = [part.value for part in recurrent]
    found = {}
    for carry in recurrent:
        shift = added_to(carry.value, outputs)
        if shift is not None and not set(values) & set(ancestors([shift])):
            found[id(carry)] = shift
    if not found:
        return None
    size = len(list(toposort(outputs)))
    changes, places = {}, {}
    for place, carry in enumerate(loop.carries):
        if id(carry) in found:
            new = carry.value.type()
            changes[carry.value] = new - found[id(carry)]
            carry.value = new
            places[place] = found[id(carry)]
    outputs = substitute(outputs, changes)
    body = FunctionGraph(loop.body_inputs(), [*outputs, *places.values()], clone=False)
    run_query(CANONICAL, body)
    made = list(body.outputs)
    outputs, shifts = made[: len(outputs)], made[len(outputs) :]
    loop.set_body_outputs(outputs)
    if len(list(toposort(outputs))) >= size:
        return None
    return dict(zip(places, shifts, strict=True))


class _Joining:
    """Makes the joined loop."""

    def __init__(self, node: Apply, loop: Loop, shifts: dict[int, Variable]) -> None:
        self.node = node
        self.loop = loop
        if loop.stop is not None:
            raise NotLinearError("the loop may stop early")
        if loop.truncate_gradient != -1:
            raise NotLinearError("its gradient is truncated")
        self.shift_of = {id(loop.carries[place]): value for place, value in shifts.items()}
        self.parts = [*loop.states, *loop.carries, *loop.outputs]
        self.sums, carries = split_sums(loop)
        self.slots = slots_of([*loop.states, *carries])
        self.check_types()
        self.sizes = BodySizes(loop)
        shifts_now = self.sizes.cut(loop, list(self.shift_of.values()))
        self.shift_of = dict(zip(self.shift_of, shifts_now, strict=True))
        self.sums, carries = split_sums(loop)
        self.slots = slots_of([*loop.states, *carries])
        self.batch, self.forms = self.find_forms()

    def check_types(self) -> None:
        if not self.slots:
            raise NotLinearError("no state depends on the one before it")
        dtypes = {getattr(slot.value.type, "dtype", "none") for slot in self.slots}
        if any(not is_tensor(slot.value) for slot in self.slots):
            raise NotLinearError("a state is no tensor")
        if len(dtypes) > 1:
            raise NotLinearError(f"its states have different dtypes: {sorted(dtypes)}")
        if not dtypes.pop().startswith(("float", "complex")):
            raise NotLinearError("the states hold no floating-point numbers")

    def find_forms(self) -> tuple[int, SystemForms]:
        """Return the forms of the next values, with as many axes as batches as can be."""
        first: NotAffineError | None = None
        for batch in range(self.most_batches(), -1, -1):
            try:
                forms = self.propagate(batch)
            except NotAffineError as error:
                first = first or error
                continue
            if not forms.multiplies or all(slot.value.type.ndim == 0 for slot in self.slots):
                self.refuse_elementwise()
            return batch, forms
        raise NotLinearError(str(first)) from first

    def most_batches(self) -> int:
        count = max(0, min(slot.value.type.ndim for slot in self.slots) - 1)
        patterns = {slot.value.type.broadcastable[:count] for slot in self.slots}
        return count if len(patterns) == 1 else 0

    def propagate(self, batch: int, structure: bool = False) -> SystemForms:
        sources = [slot.value for slot in self.slots]
        targets = [slot.next for slot in self.slots]
        return propagate(SystemForms(sources, targets, batch, self.sizes, structure))

    def refuse_elementwise(self) -> None:
        """Leave loops to the elementwise lowering that it knows."""
        copy = Loop.from_node(self.node)
        try:
            specialize_elementwise(copy)
            scalar_loop(copy)
        except NotElementwiseError:
            return
        raise NotLinearError("the loop is elementwise")

    # Sizes and costs

    def known_sizes(self) -> list[int | None]:
        return [constant_integer(self.forms.size(k)) for k in range(len(self.slots))]

    def check_cost(self, per_step: bool) -> None:
        """Refuse systems of which too much is missing."""
        sizes = self.known_sizes()
        blocks = self.blocks()
        small = SMALL_PER_STEP if per_step else SMALL
        known = [size for size in sizes if size is not None]
        if len(known) == len(sizes) and sum(known) <= small:
            return
        ranks = [slot.value.type.ndim - self.batch for slot in self.slots]
        if any(rank > 1 for rank in ranks):
            raise NotLinearError("its states are matrices that the matrices do not keep apart")
        largest = max(known, default=0)
        guessed = [largest or 1 if size is None else size for size in sizes]
        if len(known) < len(sizes):
            guessed = [g if rank else 0 for g, rank in zip(guessed, ranks, strict=True)]
        used = sum(
            guessed[i] * guessed[j]
            for i, row in enumerate(blocks)
            for j, block in row.items()
            if block.full
        )
        if sum(guessed) ** 2 > WASTE * used:
            raise NotLinearError(FEW_BLOCKS)

    def blocks(self) -> list[dict[int, Jacobian]]:
        return [self.forms.form(slot.next).blocks for slot in self.slots]

    # The joined recurrence

    def result(self) -> tuple[Loop, Roles, Joined]:
        """Return the joined loop, its parts, and what its results are to those of the old one."""
        loop = self.loop
        readers = readers_of(loop.body_outputs())
        if all(added_up(slot.part, loop, readers) is not None for slot in self.slots):
            raise NotLinearError("its states only add up what the steps compute")
        matrix = self.matrix(self.forms)
        above = set(ancestors([matrix]))
        self.check_cost(any(sequence.row in above for sequence in loop.sequences))
        if builds_matrices(loop, {slot.value: slot.next for slot in self.slots}, matrix):
            raise MatricesCostMoreError
        mask = None if self.is_dense() else self.mask()
        offset = self.offset()
        recurrence = MatrixRecurrence("real", self.batch, matrix.mT, offset)
        sizes = [self.forms.size(k) for k in range(len(self.slots))]
        shapes = [tuple(self.sizes(slot.value))[self.batch :] for slot in self.slots]
        state = self.joined_state(matrix, offset)
        changes = self.changes(state, sizes, shapes)
        joined, sums = self.joined_loop(state, changes)
        self.sizes.add_to(joined)
        parts = Roles(state, recurrence, sums, self.shift(), mask)
        check_maps(joined, parts)
        outside = self.sizes.outer_of
        return (
            joined,
            parts,
            Joined(
                slots=self.slots,
                state=state,
                sizes=substitute(sizes, outside),
                shapes=[tuple(substitute(list(shape), outside)) for shape in shapes],
                batch=self.batch,
                parts=self.parts,
                others=[p for p in self.parts if all(slot.part is not p for slot in self.slots)],
                reverse=loop.reverse,
            ),
        )

    def is_dense(self) -> bool:
        """Whether no item of the joined matrix is missing."""
        count = len(self.slots)
        return all(len(r) == count and all(b.full for b in r.values()) for r in self.blocks())

    def changes(
        self, state: State | Carry, sizes: list[Variable], shapes: list[tuple[Variable, ...]]
    ) -> dict[Variable, Variable]:
        """Return what the old values, before and after a step, are of the joined state."""
        value = value_of(state)
        found = {
            slot.next: piece_of(state.next, sizes, shapes, k, self.batch)
            for k, slot in enumerate(self.slots)
        }
        for k, slot in enumerate(self.slots):
            found[slot.value] = piece_of(value, sizes, shapes, k, self.batch)
        return found

    def joined_loop(
        self, state: State | Carry, changes: dict[Variable, Variable]
    ) -> tuple[Loop, list[tuple[Carry, Variable]]]:
        """Return the loop, and its sums with what a step adds to each."""
        loop = self.loop
        joined = Loop(
            n_steps=loop.n_steps,
            sequences=loop.sequences,
            non_sequences=list(loop.non_sequences),
            reverse=loop.reverse,
            required_steps=loop.required_steps,
            name=loop.name,
            function=loop.function,
        )
        carries = [Carry(c.initial, c.value, c.next, c.name) for c, _ in self.sums]
        joined.states = [state] if isinstance(state, State) else []
        joined.carries = [*([state] if isinstance(state, Carry) else []), *carries]
        values = substitute([output.value for output in loop.outputs], changes)
        joined.outputs = [
            type(output)(value, output.name)
            for output, value in zip(loop.outputs, values, strict=True)
        ]
        added = substitute([value for _, value in self.sums], changes)
        return joined, list(zip(carries, added, strict=True))

    def joined_state(self, matrix: Variable, offset: Variable | None) -> State | Carry:
        initial = self.initial()
        row = initial.type()
        if self.batch:
            product = pt.matmul(row[..., None, :], matrix)[..., 0, :]
        else:
            product = pt.dot(row, matrix)
        following = product if offset is None else product + offset
        if all(isinstance(slot.part, Carry) for slot in self.slots):
            return Carry(initial, row, following)
        untraced = all(isinstance(s.part, Carry) or s.part.untraced for s in self.slots)
        return State(initial[None], {-1: row}, following, untraced)

    def initial(self) -> Variable:
        """Return the joined initial row, an expression outside the loop."""
        rows = [self.flat(initial_of(slot, self.loop.reverse)) for slot in self.slots]
        if self.batch:
            shape = tuple(rows[0].shape)[: self.batch]
            rows = [pt.broadcast_to(row, (*shape, row.shape[-1])) for row in rows]
        return rows[0] if len(rows) == 1 else pt.concatenate(rows, axis=-1)

    def flat(self, value: Variable) -> Variable:
        lead = tuple(value.shape)[: self.batch]
        core = value.type.ndim - self.batch
        if core == 1:
            return value
        size = pt.prod(value.shape[self.batch :]) if core else pt.constant(1, dtype="int64")
        return value.reshape((*lead, size))

    def matrix(self, forms: SystemForms) -> Variable:
        """Return ``W``, with the batch or axes of size one in front."""
        found = [forms.form(slot.next).blocks for slot in self.slots]
        batch = self.batch
        rows = []
        for j in range(len(self.slots)):
            row = []
            for i, slot in enumerate(self.slots):
                whole = forms.whole(j, found[i].get(j), slot.next)
                own = tuple(whole.shape)
                turned = pt.moveaxis(whole, 0, batch) if batch else whole
                target = (*own[1 : 1 + batch], own[0], forms.size(i))
                row.append(turned if turned.type.ndim == batch + 2 else turned.reshape(target))
            rows.append(row)
        if batch:
            flat = self.same_batch([block for row in rows for block in row])
            rows = [flat[k : k + len(self.slots)] for k in range(0, len(flat), len(self.slots))]
        joined = [row[0] if len(row) == 1 else pt.concatenate(row, axis=-1) for row in rows]
        return joined[0] if len(joined) == 1 else pt.concatenate(joined, axis=-2)

    def same_batch(self, blocks: list[Variable]) -> list[Variable]:
        lead = slice(0, self.batch)
        if len({block.type.broadcastable[lead] for block in blocks}) == 1:
            return blocks
        batch = tuple(self.sizes(self.slots[0].value))[lead]
        return [pt.broadcast_to(b, (*batch, *tuple(b.shape)[self.batch :])) for b in blocks]

    def mask(self) -> Variable | None:
        """Return where the joined matrix has items, with the batch left out."""
        made = self.matrix(self.propagate(self.batch, structure=True))
        made = pt.gt(made, 0)
        for _ in range(self.batch):
            made = made.any(axis=0)
        if any(s.row in set(ancestors([made])) for s in self.loop.sequences):
            raise NotLinearError("which states a step reads differs from step to step")
        return None if _all_true(made) else made.T

    def offset(self) -> Variable | None:
        forms = [self.forms.form(slot.next) for slot in self.slots]
        if all(form.offset is None for form in forms):
            return None
        return self.together([form.offset for form in forms])

    def shift(self) -> Variable | None:
        if not self.shift_of:
            return None
        return self.together([self.shift_of.get(id(slot.part)) for slot in self.slots])

    def together(self, values: Sequence[Variable | None]) -> Variable:
        """Return values in the layout of the joined state."""
        flat: list[Variable] = []
        for value, slot in zip(values, self.slots, strict=True):
            whole = self.forms.whole_offset(value, slot.value)
            core = tuple(self.sizes(slot.value))
            if whole.type.ndim != self.batch + 1:
                size = self.forms.size(len(flat))
                whole = whole.reshape((*core[: self.batch], size))
            flat.append(whole)
        return flat[0] if len(flat) == 1 else pt.concatenate(flat, axis=-1)


def _all_true(mask: Variable) -> bool:
    """Whether a mask is known to be true everywhere."""
    if any(v.owner is None and not isinstance(v, Constant) for v in ancestors([mask])):
        return False
    folded = FunctionGraph([], [mask], clone=True)
    run_query(CANONICAL, folded)
    (value,) = folded.outputs
    return isinstance(value, Constant) and bool(np.all(value.data))
