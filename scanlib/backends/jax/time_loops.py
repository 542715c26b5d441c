r"""Loops over a time axis that is cut into pieces.

The steps of a piece are composed to one function of the state, its *summary*; the summaries are
exchanged; those of the pieces before are applied to the initial state, which gives the state that
a piece starts from; and the loop runs on each piece. Both runs are mapped over the pieces, which
are an axis like that of any batch. A gradient is a loop that walks backwards: the same with the
order of pieces reversed. Sums over time start from zero in all pieces, and are added up.

Elementwise loops exchange all summaries at once, a few numbers for each channel:

    affine        h ↦ A h + b, all states and taps as one vector     A, b by columns
    log-affine    h ↦ logaddexp(h + a, b)                            a, b
    clamp         h ↦ min(max(h + a, lo), hi)                        a, lo, hi
    maximum, minimum                                                 b

An affine summary is found by running the loop's linear part from the columns of the identity, and
from zero with the constants. If some states need others to be known first, they follow with an
exchange of their own. Matrix recurrences exchange matrices, in ``log2(devices)`` rounds
with a neighbour at distance 1, 2, 4 …, so that no device holds those of all.

G. Blelloch, "Prefix sums and their applications", 1990; W. Hillis, G. Steele, "Data parallel
algorithms", 1986. For layers of networks: A. Katharopoulos et al., "Transformers are RNNs", 2020
(the state as a summary); W. Sun et al., "LASP-2", 2025 (one gathering of the summaries).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from math import prod
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytensor.tensor as pt
from jax import lax
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.type import TensorType

from scanlib.backends.jax.bounded import static_int
from scanlib.backends.jax.kernels import once
from scanlib.backends.jax.loops import function_of
from scanlib.backends.jax.time_pieces import Cut, Pieces, Timed, TimeShardingError, plain
from scanlib.ops.logaddexp import log_add_exp
from scanlib.ops.loop import Carry, Loop
from scanlib.ops.loop import Sequence as Rows
from scanlib.ops.lowered import linear_scan
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan, Recurrence
from scanlib.ops.lowered.linear_scan import LinearOptions, LinearScan, Parts, history_of, next_state
from scanlib.ops.messages import loop_title
from scanlib.ops.scan import Scan
from scanlib.recurrences import CLASSES, squares

Summary = list[Any]
FEW = 4  # rows of an array that every step may read whole

# What formulas of recurrence classes are written with in PyTensor's arrays, as in `jax.numpy`.
ARRAYS = SimpleNamespace(maximum=pt.maximum, minimum=pt.minimum, logaddexp=Elemwise(log_add_exp))
AFFINE = ("affine", squares.FAMILY)


# Loops in general


@dataclass
class Spread:
    """What is reported of one loop: how it is spread over devices."""

    loop: str
    pieces: int
    itemsize: int
    how: str = ""
    rounds: int = 0
    numbers: int = 0

    @property
    def bytes(self) -> int:
        """How much each device receives."""
        return self.numbers * self.itemsize

    def add(self, how: str, rounds: int, numbers: int) -> None:
        """Count an exchange."""
        self.how = self.how or how
        self.rounds += rounds
        self.numbers += numbers


def title(node: Apply) -> str:
    """Return what messages call a loop."""
    op = getattr(node.op, "scan", node.op)
    return loop_title(op.name, getattr(getattr(op, "labels", None), "function", "scan"))


def run_loop(
    node: Apply, inputs: Sequence[Any], cut: Cut, in_turn: bool, report: list[Spread]
) -> list[Any]:
    """Return the results of a loop whose sequences are cut along time; inputs are arrays, or
    `Timed`.

    `in_turn` is whether devices may wait for one another where steps do not compose. How the loop
    is spread is added to the report.
    """
    scan = node.op.scan
    if scan.signature.has_stop:
        raise TimeShardingError(
            f"{title(node)}: its `until` ends the loop at a step that depends on all steps before, "
            f"so time cannot be cut over the axis {cut.axis!r}. Cut channels or the batch"
        )
    outer = scan.signature.split_inputs(list(inputs))
    for kind, values in (("non-sequence", outer.non_sequences), ("carry", outer.carries)):
        for k, value in enumerate(values):
            check_few(node, f"{kind} number {k} (counted from 0)", value, cut)
    outer = type(outer)(outer.n_steps, *map(plain, outer[1:]))
    steps = min(map(len, outer.sequences))
    if outer.n_steps is not None:
        steps = int(static_int(outer.n_steps) or 0)
    for k, value in enumerate(outer.sequences):
        if len(value) < steps:
            raise TimeShardingError(
                f"{title(node)}: its sequence number {k} (counted from 0) has {len(value)} rows "
                f"for {steps} steps, and time is cut over the axis {cut.axis!r}"
            )
    pieces = Pieces(cut, steps, scan.signature.reverse)
    outer = outer._replace(sequences=[pieces.split(value) for value in outer.sequences])
    itemsize = max((np.dtype(out.type.dtype).itemsize for out in node.outputs), default=8)
    report.append(Spread(title(node), pieces.count, itemsize))
    return _Walk(node, scan, pieces, outer, report[-1]).results(in_turn)


def check_few(node: Apply, name: str, value: Any, cut: Cut) -> None:
    """Raise if an array that every step reads is cut along time."""
    if isinstance(value, Timed) and value.length > FEW:
        raise TimeShardingError(
            f"{title(node)}: {name} has {value.length} rows that are cut over the axis "
            f"{cut.axis!r}, and every step reads all of them"
        )


def _packed(values: list[Any], exchange: Callable[[Any], Any]) -> list[Any]:
    """Exchange several arrays as one; those of one shape keep it, and how channels are cut."""
    if len({value.shape for value in values}) == 1:
        return list(jnp.moveaxis(exchange(jnp.stack(values, axis=1)), 1, 0))
    count = len(values[0])
    flat = exchange(jnp.concatenate([value.reshape(count, -1) for value in values], axis=1))
    ends = np.cumsum([value[0].size for value in values])[:-1].tolist()
    found = jnp.split(flat, ends, axis=1)
    return [piece.reshape(value.shape) for piece, value in zip(found, values, strict=True)]


def _numbers(values: Sequence[Any]) -> int:
    """Return how many numbers one piece has of some arrays."""
    return sum(prod(value.shape[1:]) for value in values)


# Elementwise loops, and others


def _fresh(scan: Scan) -> Loop:
    """Return the loop for sequences of any length, that give its number of steps."""
    loop = Loop.from_op(scan, [kind() for kind in scan.outer_input_types()])
    loop.n_steps, loop.required_steps = None, 0
    return loop


@dataclass
class _Walk:
    """Runs one loop on all pieces; `outer` has its sequences in pieces."""

    node: Apply
    scan: Scan
    pieces: Pieces
    outer: Any
    spread: Spread
    entries: dict[int, Any] = field(default_factory=dict)  # of states and carries, for each piece

    def __post_init__(self) -> None:
        self.op = self.node.op
        self.n_states = self.scan.signature.n_states
        self.starts = [jnp.asarray(v) for v in (*self.outer.initials, *self.outer.carries)]

    def depth(self, part: int) -> int:
        return self.scan.signature.depths[part] if part < self.n_states else 1

    def results(self, in_turn: bool) -> list[Any]:
        """Return the results of the whole loop."""
        sums = getattr(getattr(self.op, "layout", None), "sums", ())
        summed = [self.n_states + k for k, one in enumerate(sums) if one]
        others = [part for part in range(len(self.starts)) if part not in summed]
        for part in summed:
            start = self.starts[part]
            self.entries[part] = jnp.zeros((self.pieces.count, *start.shape), start.dtype)
        recurrences = self.op.recurrences if isinstance(self.op, ElemwiseScan) else ()
        if isinstance(self.op, LinearScan):
            self.exchange_linear()
        elif others and not recurrences:
            self.refuse(others, in_turn)
            self.walk_in_turn(others)
        else:
            for number, recurrence in enumerate(recurrences):
                self.exchange(number, recurrence)
        self.spread.how = self.spread.how or "each device by itself"
        found, signature = self.replay(), self.scan.signature
        values = []
        for k, depth in enumerate(signature.depths):
            if signature.untraced[k]:
                behind = self.pieces.gap_in_last
                rows = found[k][self.pieces.last]
                first = behind if signature.reverse else len(rows) - depth - behind
                values.append(rows[first : first + depth])
                continue
            rows = found[k][:, : self.pieces.rows] if signature.reverse else found[k][:, depth:]
            values.append(Timed(self.pieces.join(rows), 0, self.starts[k], signature.reverse))
        for part in range(self.n_states, len(self.starts)):
            total = part in summed
            value = self.pieces.sum(found[part]) if total else found[part][self.pieces.last]
            values.append(self.starts[part] + value if total else value)
        return values + [Timed(self.pieces.join(rows)) for rows in found[len(self.starts) :]]

    def replay(self) -> list[Any]:
        """Return what the loop gives on the pieces."""
        scan, gap = self.scan, self.pieces.gap > 0

        def build() -> Any:
            loop = _fresh(scan)
            inputs = loop.outer_inputs()
            if gap:
                valid = Rows(pt.vector("valid", dtype="bool"), pt.scalar("valid", dtype="bool"))
                loop.sequences.append(valid)
                inputs = [*inputs, valid.outer]
                for state in loop.states:
                    state.untraced = False
                for carry in loop.carries:
                    carry.next = pt.switch(valid.row, carry.next, carry.value)
            found = loop.apply()
            return function_of(inputs, [*found.histories, *found.carries, *found.outputs])

        run = once(self.node, ("replay", gap), build)
        entries = [self.entries[part] for part in range(len(self.starts))]
        valid = [self.pieces.valid()] if gap else []
        return _mapped(run, [*self.outer.sequences, *entries], self.outer.non_sequences, valid)

    # Steps that compose

    def exchange(self, number: int, recurrence: Recurrence) -> None:
        """Find the entries of one recurrence; those of the earlier ones are known."""
        pieces, parts = self.pieces, recurrence.parts
        columns = sum(map(self.depth, parts)) + 1
        formulas = CLASSES[recurrence.family].formulas
        order = slice(None, None, None if pieces.reverse else -1)  # the latest value first
        starts = {
            part: list(self.starts[part][order]) if part < self.n_states else [self.starts[part]]
            for part in parts
        }
        if recurrence.family == squares.FAMILY:
            starts = {part: [h**2 for h in taps] for part, taps in starts.items()}
        states = [h for part in parts for h in starts[part]]
        if recurrence.family in AFFINE:
            identity = jnp.eye(columns, dtype=states[0].dtype)
            first = [
                jnp.broadcast_to(row, (*h.shape, columns))
                for h, row in zip(states, identity, strict=False)
            ]
            apply: Any = _apply_affine
        else:
            neutral = formulas.identity(str(states[0].dtype))
            first = [jnp.full_like(states[0], value) for value in neutral]

            def apply(summary: Summary, state: list[Any]) -> list[Any]:
                return [formulas.apply(jnp, tuple(summary), state[0])]

        run, earlier = once(self.node, number, lambda: self.summary_function(number, recurrence))
        given = [*self.outer.sequences, *(self.entries[part] for part in earlier)]
        found = _mapped(run, given, [*first, *self.outer.non_sequences])
        after = pieces.fold(_packed(found, pieces.cut.gathered), states, apply)
        if recurrence.family == squares.FAMILY:
            after = [jnp.sqrt(jnp.where(pieces.is_first(h), 0, h)) for h in after]
        values = iter(after)
        for part in parts:
            taps = [next(values) for _ in starts[part]]
            entry = jnp.stack(taps[order], axis=1) if part < self.n_states else taps[0]
            self.entries[part] = jnp.where(pieces.is_first(entry), self.starts[part], entry)
        self.spread.add("summaries gathered", 1, pieces.count * _numbers(found))

    def summary_function(self, number: int, recurrence: Recurrence) -> tuple[Any, list[int]]:
        """Return the function that composes the steps of a piece, and which parts it is given."""
        loop = _fresh(self.scan)
        parts = recurrence.parts
        earlier = sorted({p for r in self.op.recurrences[:number] for p in r.parts})
        elements = self.elements(loop, recurrence)

        def tensor(part: int, *more: int) -> TensorType:
            if part < self.n_states:
                kind = next(iter(loop.states[part].taps.values())).type
            else:
                kind = loop.carries[part - self.n_states].value.type
            shape = tuple(1 if one else None for one in kind.broadcastable)
            return TensorType(kind.dtype, shape=(*shape, *more))

        if recurrence.family in AFFINE:
            width = sum(map(self.depth, parts)) + 1
            keys = [(part, -k) for part in parts for k in range(1, self.depth(part) + 1)]
            old = {key: tensor(key[0], width)() for key in keys}
            new = {}
            alone = pt.constant(np.arange(width) == width - 1)
            for part, terms, constant in zip(
                parts, recurrence.terms, recurrence.constants, strict=True
            ):
                total: Any = 0
                for term in terms:
                    value = old[term.part, term.tap]
                    if term.coefficient is not None:
                        value = elements(term.coefficient, part)[..., None] * value
                    total = value if isinstance(total, int) else total + value
                if constant is not None:
                    added = pt.switch(alone, elements(constant, part)[..., None], 0)
                    total = added if isinstance(total, int) else total + added
                new[part, -1] = total if not isinstance(total, int) else old[part, -1] * 0
                for tap in range(2, self.depth(part) + 1):
                    new[part, -tap] = old[part, 1 - tap]
            summary, nexts = [old[key] for key in keys], [new[key] for key in keys]
        else:
            (part,), ((term,),) = parts, recurrence.terms
            places = [term.coefficient, *recurrence.constants]
            formulas, dtype = CLASSES[recurrence.family].formulas, tensor(part).dtype
            neutral = formulas.identity(dtype)
            step = tuple(
                pt.constant(number, dtype=dtype) if place is None else elements(place, part)
                for place, number in zip(places[-len(neutral) :], neutral, strict=True)
            )
            summary = [tensor(part)() for _ in neutral]
            nexts = list(formulas.compose(ARRAYS, tuple(summary), step))
        states = [loop.states[p] for p in earlier if p < self.n_states]
        carries = [loop.carries[p - self.n_states] for p in earlier if p >= self.n_states]
        for state in states:
            state.untraced = True
        loop.states, loop.outputs = states, []
        added = [
            Carry(value.type(), value, conform, None)
            for value, conform in zip(summary, nexts, strict=True)
        ]
        loop.carries = [*carries, *added]
        return function_of(loop.outer_inputs(), loop.apply().carries[-len(added) :]), earlier

    def elements(self, loop: Loop, recurrence: Recurrence) -> Callable[[int, int], Variable]:
        """Return a function from an element and a part to the element as a row of that part."""
        layout, graph = self.op.layout, recurrence.elements
        taps = [axes for axes, s in zip(layout.states, loop.states, strict=True) for _ in s.taps]
        axes = [*layout.sequences, *taps, *layout.carries, *layout.non_sequences]
        known: dict[Variable, Variable] = {}
        for scalar, value, own in zip(graph.inputs, loop.body_inputs(), axes, strict=True):
            order = [own.index(c) if c in own else "x" for c in range(layout.ndim)]
            known[scalar] = value.dimshuffle(*order) if layout.ndim else value
        for step in graph.toposort():
            given = [
                pt.constant(v.data, dtype=v.type.dtype) if isinstance(v, Constant) else known[v]
                for v in step.inputs
            ]
            made = Elemwise(step.op)(*given, return_list=True)
            known.update(zip(step.outputs, made, strict=True))

        def element(place: int, part: int) -> Variable:
            scalar = graph.outputs[place]
            if isinstance(scalar, Constant):
                return pt.constant(scalar.data, dtype=scalar.type.dtype)
            value = known[scalar]
            if value.type.ndim == 0:
                return value
            states = layout.states
            own = states[part] if part < len(states) else layout.carries[part - len(states)]
            return value.dimshuffle(*("x" if axis is None else axis for axis in own))

        return element

    def exchange_linear(self) -> None:
        """Find the entries of a matrix recurrence."""
        op, pieces, cut = self.op, self.pieces, self.pieces.cut
        steps = [None] * op.has_n_steps
        _, sequences, _, _, fixed = self.outer
        parts = op.parts([*steps, *sequences, *self.starts, *fixed])
        if op.semiring != "real" and op.has_offset and not op.vector:
            raise TimeShardingError(
                f"{title(self.node)}: states that are matrices, with an offset in the "
                f"{op.semiring} semiring, have no summary; cut channels or the batch, not the axis "
                f"{cut.axis!r}"
            )
        options = replace(op.options, required_steps=0, untraced=False)
        timed = [parts.offset is not None and "offset", op.coefficient == "steps" and "matrix"]
        names = list(filter(None, timed))

        def summarized(*values: Any) -> Summary:
            rows = parts._replace(**dict(zip(names, values, strict=True)))
            return _linear_summary(options, rows, pieces)

        summary = _mapped(summarized, [getattr(parts, name) for name in names], [])
        apply, start = partial(_apply_linear, options), parts.initial[0]
        if cut.tile is None:
            before, rounds = _prefix(options, summary, pieces)
            entry = jax.vmap(lambda *s: apply(s, start))(*before)
            self.spread.add("summaries in rounds", rounds, rounds * _numbers(summary))
        else:
            entry = pieces.fold(_packed(summary, cut.gathered), start, apply)
            self.spread.add("summaries gathered", 1, pieces.count * _numbers(summary))
        self.entries[0] = jnp.where(pieces.is_first(entry), start, entry)[:, None]

    # What does not compose

    def refuse(self, parts: list[int], in_turn: bool) -> None:
        """Raise unless devices may wait for one another."""
        if in_turn and self.pieces.cut.tile is not None:
            raise TimeShardingError(
                f"{title(self.node)}: tiles cannot wait for one another; leave out `tile`"
            )
        if in_turn:
            return
        labels, notes = self.scan.labels, getattr(self.op, "notes", ())
        names = [*labels.states, *labels.carries]
        known = [p for p in parts if p < len(notes) and notes[p] not in CLASSES]
        part = (known or parts)[0]
        if part >= self.n_states:
            kind = f"carry number {part - self.n_states} (counted from 0)"
        else:
            kind = f"state number {part} (counted from 0)"
        name = f"state `{names[part]}`" if names[part] else kind
        reason = notes[part] if part < len(notes) else "its step is not elementwise"
        raise TimeShardingError(
            f"{title(self.node)}: {name} has to be walked in order ({reason}), but time is cut "
            f"over the axis {self.pieces.cut.axis!r}. Cut channels or the batch, or pass "
            "in_turn=True: devices then wait for one another"
        )

    def walk_in_turn(self, parts: list[int]) -> None:
        """Find the entries of all parts: after each turn, those of one piece more are right."""
        pieces = self.pieces
        starts = [self.starts[part] for part in parts]

        def turn(entries: list[Any], _: Any) -> tuple[list[Any], None]:
            self.entries |= dict(zip(parts, entries, strict=True))
            finals = self.replay()[: len(self.starts)]
            for k, depth in enumerate(self.scan.signature.depths):
                finals[k] = finals[k][:, :depth] if pieces.reverse else finals[k][:, -depth:]
            moved = [pieces.moved(finals[part]) for part in parts]
            pairs = zip(moved, starts, strict=True)
            return [jnp.where(pieces.is_first(value), start, value) for value, start in pairs], None

        entries = [pieces.cut.spread(jnp.broadcast_to(v, (pieces.count, *v.shape))) for v in starts]
        turns = pieces.count - 1
        entries, _ = lax.scan(turn, entries, length=turns)
        self.entries |= dict(zip(parts, entries, strict=True))
        self.spread.add("devices in turn", turns, turns * _numbers(entries))


def _mapped(
    function: Callable[..., Any],
    pieces: Sequence[Any],
    whole: Sequence[Any],
    more: Sequence[Any] = (),
) -> list[Any]:
    """Return what a function makes of each piece; of `whole` it gets all."""
    axes = (*[0] * len(pieces), *[None] * len(whole), *[0] * len(more))
    given = [jnp.asarray(value) for value in (*pieces, *whole, *more)]
    return list(jax.vmap(function, axes)(*given))


def _apply_affine(summary: Summary, states: list[Any]) -> list[Any]:
    results = []
    for row in summary:
        total = row[..., -1]
        for k, state in enumerate(states):
            total = total + row[..., k] * state
        results.append(total)
    return results


# Matrix recurrences


@cache
def _linear_function(options: LinearOptions, kinds: Parts) -> Callable[..., tuple]:
    parts = Parts(*(kind and kind() for kind in kinds))
    return function_of(options.in_order(parts), [history_of(options, parts)])


def _run_linear(options: LinearOptions, parts: Parts) -> Any:
    """Return the history of a recurrence."""
    given = Parts(*(None if value is None else jnp.asarray(value) for value in parts))
    kinds = (v if v is None else TensorType(str(v.dtype), (None,) * v.ndim) for v in given)
    return _linear_function(options, Parts(*kinds))(*options.in_order(given))[0]


def _linear_summary(options: LinearOptions, parts: Parts, pieces: Pieces) -> Summary:
    """Return the matrices of a piece's steps, composed, and what it makes of the state zero."""
    matrix, timed = jnp.asarray(parts.matrix), options.coefficient == "steps"
    if options.semiring != "real" and parts.offset is not None:  # adding is multiplying
        offset = (
            parts.offset[..., :, None] if options.side == "left" else parts.offset[..., None, :]
        )
        matrix = matrix if timed else matrix[None]
        lost = offset.ndim - matrix.ndim
        matrix = matrix.reshape(len(matrix), *[1] * lost, *matrix.shape[1:]) + offset
        timed = True

    def composed(matrix: Any, side: str) -> Any:
        if not timed:
            return _power(options.semiring, matrix, pieces.rows)
        size, is_real = matrix.shape[-1], options.semiring == "real"
        zero = 0 if is_real else np.inf if options.semiring == "min" else -np.inf
        identity = jnp.where(jnp.eye(size, dtype=bool), is_real, zero).astype(matrix.dtype)
        first = jnp.broadcast_to(identity, (1, *matrix.shape[1:-2], size, size))
        walk = replace(options, coefficient="steps", side=side, vector=False, untraced=True)
        return _run_linear(walk, Parts(None, matrix, None, first, parts.mask))[0]

    found = [composed(matrix, options.side)]
    if options.semiring == "real" and parts.offset is not None:
        empty = parts._replace(initial=jnp.zeros_like(parts.initial))
        found.append(_run_linear(replace(options, untraced=True), empty)[0])
    return found


def product(semiring: str, matrix: Any, state: Any) -> Any:
    """Return ``A ⊗ h``."""
    with jax.default_matmul_precision("highest"):
        return linear_scan.product(semiring, matrix, state, None, jnp)


def _power(semiring: str, matrix: Any, count: int) -> Any:
    """Return a product of `count` times the same matrix, by squaring."""
    found = None
    while count:
        if count & 1:
            found = matrix if found is None else product(semiring, found, matrix)
        matrix, count = product(semiring, matrix, matrix), count >> 1
    return found


def _apply_linear(options: LinearOptions, summary: Sequence[Any], h: Any) -> Any:
    """Return the state after a summary."""
    matrix, offset = (*summary, None)[:2]
    step = Parts(None, matrix, offset, None)
    return next_state(options, step, h, lambda matrix, h, _: product(options.semiring, matrix, h))


def _compose_linear(options: LinearOptions, later: Summary, earlier: Summary) -> Summary:
    pair = (earlier[0], later[0]) if options.side == "right" else (later[0], earlier[0])
    matrix = product(options.semiring, *pair)
    if len(later) == 1:
        return [matrix]
    return [matrix, _apply_linear(options, later, earlier[-1])]


def _prefix(options: LinearOptions, summary: Summary, pieces: Pieces) -> tuple[Summary, int]:
    """Return the summary of all pieces before each, in rounds of doubling distance, and how many
    rounds that took."""
    place = jnp.arange(pieces.count)[:: -1 if pieces.reverse else 1]
    now, distance, rounds = summary, 1, 0
    while distance < pieces.count:
        other = _packed(now, partial(pieces.moved, by=distance))
        both = jax.vmap(partial(_compose_linear, options))(now, other)
        now = [
            jnp.where((place >= distance).reshape(-1, *[1] * (n.ndim - 1)), b, n)
            for b, n in zip(both, now, strict=True)
        ]
        distance, rounds = 2 * distance, rounds + 1
    if pieces.count == 1:
        return now, rounds
    return _packed(now, pieces.moved), rounds + 1
