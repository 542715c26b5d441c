r"""Loops over a time axis that is cut into pieces.

Each device composes the steps of its piece to one function of the state, the *summary*; the
summaries are exchanged; each device applies those before its own to the initial state, which gives
the state that its piece starts from; and runs the loop on its piece. A gradient is a loop that
walks backwards: the same with the order of devices reversed. Sums over time start from zero in all
pieces but the first, and are added up.

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

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
import pytensor.tensor as pt
from jax import lax
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.type import TensorType

from scanlib.backends.jax.body import function_of
from scanlib.backends.jax.bounded import static_int
from scanlib.backends.jax.linear import product
from scanlib.backends.jax.mesh_axes import varying
from scanlib.backends.jax.time_pieces import Grid, Timed, TimeShardingError, together
from scanlib.ops.logaddexp import log_add_exp
from scanlib.ops.loop import Carry, Loop
from scanlib.ops.loop import Sequence as Rows
from scanlib.ops.lowered.elemwise_scan import Axes, ElemwiseScan, Recurrence
from scanlib.ops.lowered.linear_loop import next_state
from scanlib.ops.lowered.linear_scan import LinearScan, Parts
from scanlib.ops.lowered.positions import has_positions
from scanlib.ops.messages import loop_title
from scanlib.ops.scan import Scan
from scanlib.recurrences import CLASSES, squares

Summary = list[Any]


# What formulas of recurrence classes are written with in PyTensor's arrays, as in `jax.numpy`.
ARRAYS = SimpleNamespace(maximum=pt.maximum, minimum=pt.minimum, logaddexp=Elemwise(log_add_exp))
AFFINE = ("affine", squares.FAMILY)


# Loops in general


@dataclass
class Spread:
    """What is reported of one loop: how it is spread over devices."""

    loop: str
    how: str
    pieces: int
    rounds: int
    numbers: int
    itemsize: int

    @property
    def bytes(self) -> int:
        """How much each device receives."""
        return self.numbers * self.itemsize


_built: WeakKeyDictionary[Apply, dict[Any, Any]] = WeakKeyDictionary()


def _once(node: Apply, key: Any, build: Callable[[], Any]) -> Any:
    """Return what is built for a node, once."""
    known = _built.setdefault(node, {})
    if key not in known:
        known[key] = build()
    return known[key]


def title(node: Apply) -> str:
    """Return what messages call a loop."""
    op = getattr(node.op, "scan", node.op)
    return loop_title(op.name, getattr(getattr(op, "labels", None), "function", "scan"))


def run_loop(node: Apply, inputs: Sequence[Any], in_turn: bool, report: list[Spread]) -> list[Any]:
    """Return the results of a loop whose sequences are cut along time.

    Parameters
    ----------
    node : Apply
    inputs : sequence
        Arrays, or `Timed` ones.
    in_turn : bool
        Whether devices may wait for one another where steps do not compose.
    report : list
        To which is added how the loop is spread.
    """
    if any(isinstance(value, Timed) and value.flipped for value in inputs):
        raise TimeShardingError(
            f"{title(node)}: it reads a sequence that has been turned around, and time is cut over "
            f"the axis {_grid(inputs).axis!r}. Walk backwards with go_backwards=True"
        )
    if isinstance(node.op, LinearScan):
        return run_linear(node, inputs, report)
    op = node.op
    scan = op.scan if isinstance(op, ElemwiseScan) else op
    if scan.signature.has_stop:
        raise TimeShardingError(
            f"{title(node)}: its `until` ends the loop at a step that depends on all steps before, "
            f"so time cannot be cut over the axis {_grid(inputs).axis!r}. Cut channels or the batch"
        )
    outer = scan.signature.split_inputs(list(inputs))
    grid = _grid(inputs)
    _check_whole(node, grid, outer)
    rows = together(outer.sequences, [0] * len(outer.sequences), 0)
    steps = rows[0].length
    if outer.n_steps is not None:
        steps = int(static_int(outer.n_steps) or 0)
    for value in rows:
        if value.length != steps or value.behind():
            raise TimeShardingError(
                f"{title(node)}: its sequences have {value.length} rows for {steps} steps, and "
                f"{grid.total} rows are cut over the axis {grid.axis!r}"
            )
    piece = Piece(grid, steps, scan.signature.reverse, [value.local for value in rows])
    outer = outer._replace(
        initials=[plain(value) for value in outer.initials],
        carries=[plain(value) for value in outer.carries],
    )
    dtypes = [np.dtype(out.type.dtype).itemsize for out in node.outputs]
    spread = Spread(title(node), "", grid.pieces, 0, 0, max(dtypes, default=8))
    report.append(spread)
    entries = _Entries(node, scan, piece, outer, spread).find(in_turn)
    return _replay(node, scan, piece, outer, entries, spread)


def _grid(inputs: Sequence[Any]) -> Grid:
    return next(value.grid for value in inputs if isinstance(value, Timed))


def plain(value: Any) -> Any:
    """Return an array of few rows as every device has it."""
    if not isinstance(value, Timed):
        return value
    rows = value.rows(0, value.length)
    return rows[::-1] if value.flipped else rows


def _check_whole(node: Apply, grid: Grid, outer: Any) -> None:
    for kind, values in (("non-sequence", outer.non_sequences), ("carry", outer.carries)):
        for k, value in enumerate(values):
            if isinstance(value, Timed):
                raise TimeShardingError(
                    f"{title(node)}: {kind} number {k} (counted from 0) has {value.length} rows "
                    f"that are cut over the axis {grid.axis!r}, and every step reads all of them"
                )


@dataclass(frozen=True)
class Piece:
    """The rows of a loop's sequences on one device.

    A loop may take fewer steps than the pieces have rows. The steps of a piece that are none stand
    behind the others in the order of walking: rows are rolled there for a loop that walks
    backwards.
    """

    grid: Grid
    steps: int
    reverse: bool
    local: list[Any]

    @property
    def has_gaps(self) -> bool:
        return self.steps != self.grid.pieces * self.grid.rows

    def count(self) -> Any:
        """Return the number of steps in this piece."""
        return jnp.clip(self.steps - self.grid.place() * self.grid.rows, 0, self.grid.rows)

    def rolled(self, value: Any, back: bool = False) -> Any:
        """Return rows with the steps in front, in the order of walking; or as they were."""
        if not (self.has_gaps and self.reverse):
            return value
        by = self.grid.rows - self.count()
        return jnp.roll(value, -by if back else by, axis=0)

    def sequences(self) -> list[Any]:
        return [self.rolled(value) for value in self.local]

    def valid(self) -> Any:
        numbers = jnp.arange(self.grid.rows)
        count = self.count()
        return numbers >= self.grid.rows - count if self.reverse else numbers < count

    def fold(self, summaries: Any, start: Any, apply: Callable[[Any, Any], Any]) -> Any:
        """Return the state before this piece, from the summaries of all pieces and the first."""
        grid = self.grid
        order = jax.tree.map(lambda v: v[::-1], summaries) if self.reverse else summaries
        start = varying(start, [order, start])
        _, before = lax.scan(lambda h, s: (apply(s, h), h), start, order)
        place = grid.pieces - 1 - grid.place() if self.reverse else grid.place()
        return jax.tree.map(lambda v: lax.dynamic_index_in_dim(v, place, keepdims=False), before)

    def is_first(self) -> Any:
        return self.grid.place() == (self.grid.pieces - 1 if self.reverse else 0)

    def holds_last(self) -> Any:
        """Return whether the last step is in this piece."""
        last = 0 if self.reverse else max(self.steps - 1, 0) // self.grid.rows
        return self.grid.place() == last

    def of_last(self, value: Any) -> Any:
        """Return the value of the piece that holds the last step."""
        kind = jnp.int8 if value.dtype == bool else value.dtype
        mine = jnp.where(self.holds_last(), value, jnp.zeros_like(value)).astype(kind)
        return self.grid.sum(mine).astype(value.dtype)


# Elementwise loops: from what each piece starts


def _fresh(scan: Scan) -> Loop:
    """Return the loop for sequences of any length, that give its number of steps."""
    loop = Loop.from_op(scan, [kind() for kind in scan.outer_input_types()])
    loop.n_steps, loop.required_steps = None, 0
    return loop


@dataclass
class _Entries:
    """Finds the state that each piece starts from."""

    node: Apply
    scan: Scan
    piece: Piece
    outer: Any
    spread: Spread

    def __post_init__(self) -> None:
        self.op = self.node.op
        self.n_states = self.scan.signature.n_states
        # Values of all states and carries: those of the whole loop, then those of this piece.
        self.starts = [*self.outer.initials, *self.outer.carries]
        self.entries: dict[int, Any] = {}

    def depth(self, part: int) -> int:
        return self.scan.signature.depths[part] if part < self.n_states else 1

    def axes(self, part: int) -> Axes:
        layout = self.op.layout
        return layout.states[part] if part < self.n_states else layout.carries[part - self.n_states]

    def find(self, in_turn: bool) -> list[Any]:
        """Return the entries of all states and carries."""
        sums = self.sums()
        others = [part for part in range(len(self.starts)) if part not in sums]
        for part in sums:
            start = self.starts[part]
            self.entries[part] = jnp.where(self.piece.is_first(), start, jnp.zeros_like(start))
        recurrences = self.op.recurrences if isinstance(self.op, ElemwiseScan) else ()
        if others and (not recurrences or has_positions(self.op.body.outputs)):
            self.refuse(others, in_turn)
            return self.walk_in_turn(others)
        for number, recurrence in enumerate(recurrences):
            self.exchange(number, recurrence)
        if not self.spread.how:
            self.spread.how = "each device by itself"
        return [self.entries[part] for part in range(len(self.starts))]

    def sums(self) -> list[int]:
        if not isinstance(self.op, ElemwiseScan):
            return []
        return [self.n_states + k for k, one in enumerate(self.op.layout.sums) if one]

    def refuse(self, parts: list[int], in_turn: bool) -> None:
        """Raise unless devices may wait for one another."""
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
            f"over the axis {self.piece.grid.axis!r}. Cut channels or the batch, or pass "
            "in_turn=True: devices then wait for one another"
        )

    # One recurrence

    def exchange(self, number: int, recurrence: Recurrence) -> None:
        """Find the entries of one recurrence; those of the earlier ones are known."""
        piece, parts = self.piece, recurrence.parts
        columns = sum(map(self.depth, parts)) + 1
        affine, formulas = recurrence.family in AFFINE, CLASSES[recurrence.family].formulas
        starts = {part: self.taps_of(part, self.starts[part]) for part in parts}
        if recurrence.family == squares.FAMILY:
            starts = {part: [h**2 for h in taps] for part, taps in starts.items()}
        states = [h for part in parts for h in starts[part]]
        if affine:
            identity = jnp.eye(columns, dtype=states[0].dtype)
            first = [
                jnp.broadcast_to(row, (*h.shape, columns))
                for h, row in zip(states, identity, strict=False)
            ]
        else:
            h = states[0]
            first = [jnp.full_like(h, number) for number in formulas.identity(str(h.dtype))]
        build = _once(self.node, number, lambda: self.summary_loop(number, recurrence))
        earlier = [self.entries[part] for part in build.earlier]
        given = [*piece.sequences(), *([piece.valid()] if piece.has_gaps else [])]
        given += [*earlier, *first, *self.outer.non_sequences]
        found = list(_function(build, piece.has_gaps)(*varying(given, given)))
        summaries = _packed(found, piece.grid.gather)
        if affine:
            after = piece.fold(summaries, states, _apply_affine)
        else:
            apply = partial(formulas.apply, jnp)
            after = [piece.fold(summaries, states[0], apply)]
        if recurrence.family == squares.FAMILY:
            after = [jnp.sqrt(jnp.where(piece.is_first(), 0, h)) for h in after]
        values = iter(after)
        for part in parts:
            taps = [next(values) for _ in starts[part]]
            entry = self.rows_of(part, taps)
            self.entries[part] = jnp.where(piece.is_first(), self.starts[part], entry)
        self.spread.rounds += 1
        self.spread.numbers += piece.grid.pieces * sum(prod(np.shape(v)) for v in found)
        self.spread.how = self.spread.how or "summaries gathered"

    def taps_of(self, part: int, value: Any) -> list[Any]:
        """Return the last values of a state, the latest one first."""
        if part >= self.n_states:
            return [value]
        depth = self.depth(part)
        return [value[k if self.piece.reverse else depth - 1 - k] for k in range(depth)]

    def rows_of(self, part: int, taps: list[Any]) -> Any:
        if part >= self.n_states:
            return taps[0]
        return jnp.stack(taps if self.piece.reverse else taps[::-1])

    def summary_loop(self, number: int, recurrence: Recurrence) -> _Built:
        """Return the loop that composes the steps of a piece."""
        loop = _fresh(self.scan)
        parts = recurrence.parts
        earlier = sorted({p for r in self.op.recurrences[:number] for p in r.parts})
        elements = self.elements(loop, recurrence)
        valid = Rows(pt.vector("valid", dtype="bool"), pt.scalar("valid", dtype="bool"))

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
        loop.conform_body()
        return _Built(loop, valid, earlier, len(added))

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
            own = self.axes(part)
            return value.dimshuffle(*("x" if axis is None else axis for axis in own))

        return element

    # What does not compose

    def walk_in_turn(self, parts: list[int]) -> list[Any]:
        """Return the entries of all parts, found by one device after the other."""
        piece, grid = self.piece, self.piece.grid
        if grid.tiles is not None:
            raise TimeShardingError(
                f"{title(self.node)}: tiles cannot wait for one another; leave out `tile`"
            )
        now = varying([self.starts[part] for part in parts], grid.place())
        sign = -1 if piece.reverse else 1

        def run(values: list[Any]) -> list[Any]:
            entries = self.entries | dict(zip(parts, values, strict=True))
            order = [entries[part] for part in range(len(self.starts))]
            _, finals = _local_results(self.node, self.scan, piece, self.outer, order)
            found = [finals[part] for part in parts]
            return [jnp.where(piece.count() > 0, f, v) for f, v in zip(found, values, strict=True)]

        place = grid.pieces - 1 - grid.place() if piece.reverse else grid.place()
        for turn in range(grid.pieces - 1):
            after = lax.cond(place == turn, run, lambda values: values, now)
            moved = [grid.hop(value, sign) for value in after]
            now = [jnp.where(place == turn + 1, m, v) for m, v in zip(moved, now, strict=True)]
            self.spread.rounds += 1
            self.spread.numbers += sum(prod(np.shape(value)) for value in moved)
        self.spread.how = "devices in turn"
        self.entries |= dict(zip(parts, now, strict=True))
        return [self.entries[part] for part in range(len(self.starts))]


def _packed(values: list[Any], exchange: Callable[[Any], Any]) -> list[Any]:
    """Exchange several arrays as one; those of one shape keep it, and how channels are cut."""
    if len({value.shape for value in values}) == 1:
        stacked = exchange(jnp.stack(values))
        return list(jnp.moveaxis(stacked, stacked.ndim - values[0].ndim - 1, 0))
    flat = exchange(jnp.concatenate([value.ravel() for value in values]))
    ends = np.cumsum([value.size for value in values])[:-1].tolist()
    pieces = jnp.split(flat, ends, axis=-1)
    return [
        piece.reshape(*flat.shape[:-1], *value.shape)
        for piece, value in zip(pieces, values, strict=True)
    ]


def _apply_affine(summary: Summary, states: list[Any]) -> list[Any]:
    results = []
    for row in summary:
        total = row[..., -1]
        for k, state in enumerate(states):
            total = total + row[..., k] * state
        results.append(total)
    return results


@dataclass
class _Built:
    """A loop that composes steps, and which parts of the whole loop it walks as well."""

    loop: Loop
    valid: Rows
    earlier: list[int]
    count: int
    functions: dict[bool, Any] = None  # type: ignore[assignment]


def _function(built: _Built, has_gaps: bool) -> Any:
    """Return the JAX function of a loop that composes steps."""
    built.functions = built.functions or {}
    if has_gaps not in built.functions:
        loop = replace(built.loop)
        if has_gaps:
            loop.sequences = [*loop.sequences, built.valid]
            loop.carries = [
                replace(c, next=pt.switch(built.valid.row, c.next, c.value))
                if k >= len(loop.carries) - built.count
                else c
                for k, c in enumerate(loop.carries)
            ]
            loop.conform_body()
        inputs = loop.outer_inputs()
        outputs = loop.apply().carries[-built.count :]
        built.functions[has_gaps] = function_of(inputs, outputs)
    return built.functions[has_gaps]


# Elementwise loops, and others: the walk through the piece


def _local_results(
    node: Apply, scan: Scan, piece: Piece, outer: Any, entries: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Return what the loop gives on a piece, and its last states (as initial rows) and carries."""
    signature = scan.signature

    def build() -> Any:
        loop = _fresh(scan)
        inputs = loop.outer_inputs()
        if piece.has_gaps:
            valid = Rows(pt.vector("valid", dtype="bool"), pt.scalar("valid", dtype="bool"))
            loop.sequences.append(valid)
            inputs = [*inputs, valid.outer]
            for state in loop.states:
                state.untraced = False
            for carry in loop.carries:
                carry.next = pt.switch(valid.row, carry.next, carry.value)
            loop.conform_body()
        found = loop.apply()
        return function_of(inputs, [*found.histories, *found.carries, *found.outputs])

    run = _once(node, ("replay", piece.has_gaps), build)
    n = signature.n_states
    groups = outer._replace(
        n_steps=None, sequences=piece.sequences(), initials=entries[:n], carries=entries[n:]
    )
    given = [*groups.sequences, *groups.initials, *groups.carries, *groups.non_sequences]
    given += [piece.valid()] if piece.has_gaps else []
    given = [jnp.asarray(value) for value in given]
    results = list(run(*varying(given, [given, piece.grid.place()])))
    finals = []
    for k, depth in enumerate(signature.depths):
        rows = results[k]
        if len(rows) > depth:
            start = piece.count() if piece.has_gaps else piece.grid.rows
            start = piece.grid.rows - start if piece.reverse else start
            rows = lax.dynamic_slice_in_dim(rows, start, depth)
        finals.append(rows)
    return results, [*finals, *results[n : n + signature.n_carries]]


def _replay(
    node: Apply, scan: Scan, piece: Piece, outer: Any, entries: list[Any], spread: Spread
) -> list[Any]:
    """Return the results of the whole loop, from what each piece starts from."""
    signature, grid = scan.signature, piece.grid
    results, finals = _local_results(node, scan, piece, outer, entries)
    sums = getattr(getattr(node.op, "layout", None), "sums", ())
    found: list[Any] = []

    def timed(rows: Any, before: Any = None) -> Timed:
        rows = piece.rolled(rows, back=True)
        depth = 0 if before is None else len(before)
        origin = 0 if piece.reverse else -depth
        new = Timed(grid, rows, origin, piece.steps + depth)
        if depth and not piece.reverse:
            return replace(new, head=before)
        if not depth:
            return new
        if piece.steps < grid.total:  # the initial rows stand behind the last step
            new = new.with_rows(before, piece.steps)
        count = new.behind()
        return replace(new, tail=before[len(before) - count :] if count else None)

    for k, depth in enumerate(signature.depths):
        rows, initial = results[k], jnp.asarray(outer.initials[k])
        if signature.untraced[k]:
            found.append(piece.of_last(finals[k]))
        else:
            found.append(timed(rows[: grid.rows] if piece.reverse else rows[depth:], initial))
    n = signature.n_states
    for k in range(signature.n_carries):
        value = results[n + k]
        found.append(grid.sum(value) if k < len(sums) and sums[k] else piece.of_last(value))
    return found + [timed(rows) for rows in results[n + signature.n_carries :]]


# Matrix recurrences


def run_linear(node: Apply, inputs: Sequence[Any], report: list[Spread]) -> list[Any]:
    """Return the history of a matrix recurrence whose matrices or offsets are cut along time."""
    op: LinearScan = node.op
    grid, parts = _grid(inputs), op.parts(list(inputs))
    by_steps = op.coefficient == "steps"
    cut = ["offset", *["matrix", "right"] * by_steps]
    timed = [n for n in cut if getattr(parts, n) is not None]
    for name in ("matrix", "right", "mask"):
        if isinstance(getattr(parts, name), Timed) and name not in timed:
            raise TimeShardingError(
                f"{title(node)}: its {name} has rows that are cut over the axis {grid.axis!r}"
            )
    values = together([getattr(parts, n) for n in timed], [0] * len(timed), 0)
    steps = values[0].length if parts.n_steps is None else int(static_int(parts.n_steps) or 0)
    for name, value in zip(timed, values, strict=True):
        if value.length < steps or value.behind():
            raise TimeShardingError(
                f"{title(node)}: its {name} has {value.length} rows for {steps} steps, and "
                f"{grid.total} rows are cut over the axis {grid.axis!r}"
            )
    piece = Piece(grid, steps, op.reverse, [])
    parts = parts._replace(initial=plain(parts.initial), n_steps=None)
    parts = parts._replace(**{n: v.local for n, v in zip(timed, values, strict=True)})
    walk = op.with_options(has_n_steps=False, required_steps=0)
    if piece.has_gaps:
        walk, parts = _with_gaps(walk, parts, piece)
    elif not timed:
        raise TimeShardingError(f"{title(node)}: no input gives its steps")
    zero = {"real": 0.0, "log": -jnp.inf, "max": -jnp.inf, "min": jnp.inf}[op.semiring]
    if op.semiring != "real" and op.has_offset and not op.vector:
        raise TimeShardingError(
            f"{title(node)}: states that are matrices, with an offset in the {op.semiring} "
            f"semiring, have no summary; cut channels or the batch, not the axis {grid.axis!r}"
        )
    summary = _linear_summary(walk, parts, zero, grid.rows)
    spread = Spread(title(node), "", grid.pieces, 0, 0, jnp.asarray(parts.initial).dtype.itemsize)
    start = jnp.asarray(parts.initial[0])
    size = sum(prod(value.shape) for value in summary)
    if grid.tiles is None:
        before = _prefix(walk, summary, piece, spread)
        entry = _apply_linear(walk, before, start)
        spread.how = "summaries in rounds"
    else:
        gathered = _packed(summary, grid.gather)
        entry = piece.fold(gathered, start, lambda s, h: _apply_linear(walk, s, h))
        spread.rounds, spread.how = 1, "summaries gathered"
    spread.numbers = size * (spread.rounds if grid.tiles is None else grid.pieces)
    report.append(spread)
    entry = jnp.where(piece.is_first(), start, entry)
    rows = _run_linear(walk.with_options(untraced=False), parts._replace(initial=entry[None]))
    if op.untraced:
        last = rows[:1] if op.reverse else rows[-1:]
        return [piece.of_last(last)]  # behind the last step, nothing changes the state
    initial = jnp.asarray(parts.initial)
    if op.reverse:
        new = Timed(grid, rows[:-1], 0, steps + 1)
        if steps < grid.total:
            return [new.with_rows(initial, steps)]
        return [replace(new, tail=initial)]
    return [Timed(grid, rows[1:], -1, steps + 1, head=initial)]


def _identity(op: LinearScan, size: int, dtype: Any) -> Any:
    eye = jnp.eye(size, dtype=dtype)
    if op.semiring == "real":
        return eye
    return jnp.where(eye == 1, 0, jnp.inf if op.semiring == "min" else -jnp.inf).astype(dtype)


def _with_gaps(op: LinearScan, parts: Parts, piece: Piece) -> tuple[LinearScan, Parts]:
    """Return the recurrence with identities in place of steps that are none."""
    numbers = piece.grid.row_numbers()
    valid = numbers < piece.steps

    def chosen(matrix: Any) -> Any:
        if matrix is None:
            return None
        matrix = jnp.asarray(matrix)
        if op.coefficient == "fixed":
            matrix = jnp.broadcast_to(matrix, (len(valid), *matrix.shape))
        mask = valid.reshape(-1, *[1] * (matrix.ndim - 1))
        return jnp.where(mask, matrix, _identity(op, matrix.shape[-1], matrix.dtype))

    offset = parts.offset
    if offset is not None:
        offset = jnp.where(valid.reshape(-1, *[1] * (offset.ndim - 1)), offset, 0)
    mask = parts.mask
    if mask is not None:
        mask = mask | jnp.eye(mask.shape[-1], dtype=bool)
    new = parts._replace(
        matrix=chosen(parts.matrix), right=chosen(parts.right), offset=offset, mask=mask
    )
    return op.with_options(coefficient="steps"), new


def _run_linear(op: LinearScan, parts: Parts) -> Any:
    arrays = [
        jnp.asarray(v) if k or not op.has_n_steps else v for k, v in enumerate(op.join(parts))
    ]

    def build() -> Any:
        kinds = [
            pt.lscalar()
            if op.has_n_steps and k == 0
            else TensorType(str(a.dtype), shape=(None,) * a.ndim)()
            for k, a in enumerate(arrays)
        ]
        if op.has_n_steps:
            kinds[0] = pt.constant(int(parts.n_steps), dtype="int64")
        return function_of(kinds[op.has_n_steps :], [op(*kinds)])

    key = (op, tuple((a.ndim, str(a.dtype)) for a in arrays[op.has_n_steps :]), str(parts.n_steps))
    if key not in _linear:
        _linear[key] = build()
    given = arrays[op.has_n_steps :]
    (rows,) = _linear[key](*varying(given, given))
    return rows


_linear: dict[Any, Any] = {}


def _linear_summary(op: LinearScan, parts: Parts, zero: float, rows: int) -> Summary:
    """Return the matrices of a piece's steps, composed, and what it makes of the state zero."""
    state = jnp.asarray(parts.initial)
    matrix = jnp.asarray(parts.matrix)
    if op.semiring != "real" and op.has_offset:  # adding is multiplying
        left = op.side == "left"
        offset = parts.offset[..., :, None] if left else parts.offset[..., None, :]
        if op.coefficient == "fixed":
            matrix = matrix[None]
        if matrix.ndim < offset.ndim:
            matrix = matrix.reshape(
                len(matrix), *[1] * (offset.ndim - matrix.ndim), *matrix.shape[1:]
            )
        matrix = matrix + offset
    timed = op.coefficient == "steps" or (op.semiring != "real" and op.has_offset)

    def composed(matrix: Any, side: str) -> Any:
        size = matrix.shape[-1]
        batch = matrix.shape[1:-2] if timed else matrix.shape[:-2]
        first = jnp.broadcast_to(_identity(op, size, matrix.dtype), (1, *batch, size, size))
        walk = op.with_options(
            coefficient="steps" if timed else "fixed",
            side=side,
            vector=False,
            has_offset=False,
            has_n_steps=not timed,
            untraced=True,
            has_mask=op.has_mask,
        )
        return _run_linear(walk, Parts(rows, matrix, None, first, parts.mask))[0]

    found = [composed(matrix, "left" if op.side != "right" else "right")]
    if op.side == "both":
        found.append(composed(jnp.asarray(parts.right), "right"))
    if op.semiring == "real" and op.has_offset:
        empty = jnp.full_like(state, zero)
        found.append(_run_linear(op.with_options(untraced=True), parts._replace(initial=empty))[0])
    return found


def _apply_linear(op: LinearScan, summary: Summary, h: Any) -> Any:
    """Return the state after a summary."""
    right = summary[1] if op.side == "both" else None
    offset = summary[-1] if op.semiring == "real" and op.has_offset else None
    step = Parts(None, summary[0], offset, None, right=right)
    return next_state(op, step, h, lambda matrix, h, _: product(op.semiring, matrix, h))


def _compose_linear(op: LinearScan, later: Summary, earlier: Summary) -> Summary:
    pairs = zip(later, earlier, strict=True)
    matrices = [
        product(op.semiring, b, a) if op.side == "right" or k else product(op.semiring, a, b)
        for k, (a, b) in enumerate(pairs)
        if k < 1 + (op.side == "both")
    ]
    if op.semiring != "real" or not op.has_offset:
        return matrices
    return [*matrices, _apply_linear(op, later, earlier[-1])]


def _prefix(op: LinearScan, summary: Summary, piece: Piece, spread: Spread) -> Summary:
    """Return the summary of all pieces before this one, in rounds of doubling distance."""
    grid, sign = piece.grid, -1 if piece.reverse else 1
    place = grid.pieces - 1 - grid.place() if piece.reverse else grid.place()
    now, distance = summary, 1
    while distance < grid.pieces:
        other = _packed(now, partial(grid.hop, count=sign * distance))
        both = _compose_linear(op, now, other)
        now = [jnp.where(place >= distance, b, n) for b, n in zip(both, now, strict=True)]
        distance *= 2
        spread.rounds += 1
    if grid.pieces > 1:
        now = _packed(now, partial(grid.hop, count=sign))
        spread.rounds += 1
    return now
