"""A batch of loops is one loop whose body works on batches.

`pytensor.graph.vectorize_graph` puts batch dimensions in front. A loop keeps its time axis in
front, so the batch goes between time and row: sequences become ``(T, *batch, …)``, histories
``(K + T, *batch, …)``, and the body is vectorized itself. A state becomes batched if its
initial rows or its next value are; only what depends on the batch does.

All loops of a batch take as many steps (`scanlib.lengths.batches`). Where a step slices by numbers
that each row has of its own, or has loops of its own number of steps, arrays inside a step have
other sizes in other rows: no batch of them is an array, and steps take the rows one by one.

With `until`, every row of the batch stops by itself. The loop runs until all rows have
stopped; a row that has stopped keeps the values of its last step, so the last row over time is
each loop's own last value. The gradient of such a loop passes over the steps that a row did not
run, which the mask among its sequences tells it (`scanlib.ops.row_ops.ran_steps`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import toposort
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import shape_tuple
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
from pytensor.tensor.type import integer_dtypes

from scanlib._compat import vectorize_rule
from scanlib.lengths.batches import SIZED, common, whole_batch, with_batch
from scanlib.lengths.numbers import indices_of
from scanlib.ops.graph import depends_on, is_tensor, substitute, with_axes
from scanlib.ops.loop import Carry, Loop, State, map_rows
from scanlib.ops.row_ops.ran_steps import RanSteps, is_mask
from scanlib.ops.scan import Scan
from scanlib.ops.shapes import stacked_row_shapes


@vectorize_rule.register(Scan)
def vectorize_scan(op: Scan, node: Apply, *batched_inputs: Variable) -> list[Variable]:
    """Return the outputs of a loop over a batch; see the module's text."""
    return _Batcher(op, node, list(batched_inputs)).outputs()


def _rank(core: Variable, batched: Variable) -> int:
    """Return how many batch dimensions a variable has; of scalars, as indices, it is a tensor."""
    return batched.type.ndim - core.type.ndim if is_tensor(batched) else 0


def _batch_of(like: Variable, rank: int) -> Variable:
    """Return a new body variable for a batch of such values."""
    return pt.TensorType(like.type.dtype, shape=(*(None,) * rank, *like.type.shape))(name=like.name)


def with_whole_batches(outputs: list[Variable]) -> list[Variable]:
    """Return a batch of steps whose slices, and arrays by shape, are those of all members."""
    for node in toposort(outputs):
        new = whole_batch(node)
        if new is not None:
            whole = dict(zip(node.outputs, new, strict=True))
            return with_whole_batches(substitute(outputs, whole))
    return outputs


def batch_of(node: Apply, write: Callable[[Apply], list[Variable] | None]) -> list[Variable] | None:
    """Return a batch of nodes as the batch of the graphs that `write` gives for one of them."""
    core = node.op._create_dummy_core_node(node.inputs)
    made = write(core)
    if made is None:
        return None
    given = dict(zip(core.inputs, node.inputs, strict=True))
    return with_batch(node, with_whole_batches(vectorize_graph(made, given)))


def _with_batches(
    outputs: list[Variable], replacements: dict[Variable, Variable], rank: int
) -> list[Variable]:
    """Return what a step computes of batches in the place of some of its inputs."""
    try:
        found = with_whole_batches(vectorize_graph(outputs, replacements))
    except NotImplementedError:  # of loops in the step
        if not all(map(is_tensor, outputs)):
            raise
        return by_rows(outputs, replacements, rank)
    sized = any(map(_sizes_differ, toposort(found))) and all(map(is_tensor, outputs))
    return by_rows(outputs, replacements, rank) if sized else found


def _sizes_differ(node: Apply) -> bool:
    """Whether a batch may have results of other sizes for other rows."""
    op: Any = node.op
    rank = op.batch_ndim(node) if isinstance(op, Blockwise) else 0
    if not rank or not isinstance(op.core_op, SIZED) or isinstance(op.core_op, IncSubtensor):
        return False
    if not isinstance(op.core_op, Subtensor):
        return True
    slices = [index for index in indices_of(node) if isinstance(index, slice)]
    ends = [end for cut in slices for end in (cut.start, cut.stop, cut.step) if end is not None]
    return any(common(end, rank) is None for end in ends)


def by_rows(
    outputs: list[Variable], replacements: dict[Variable, Variable], rank: int
) -> list[Variable]:
    """Return what a step computes of batches, by a loop over their rows."""
    if not rank:
        return substitute(outputs, replacements)
    rows = {core: _batch_of(core, rank - 1) for core in replacements}
    varying = depends_on(outputs, list(rows))
    chosen = [out for out in outputs if out in varying]
    pairs = [(replacements[core], row) for core, row in rows.items()]
    values = map_rows(pairs, by_rows(chosen, rows, rank - 1), function="map")
    found = dict(zip(chosen, values, strict=True))
    return [found.get(out, out) for out in outputs]


@dataclass
class _Batcher:
    op: Scan
    node: Apply
    given: list[Variable]
    loop: Loop = field(init=False)
    rank: int = field(init=False)
    shape: list[Variable] = field(init=False)
    replacements: dict[Variable, Variable] = field(default_factory=dict)
    # In the body, of gradients of loops with `until`: which loops of the batch run a step.
    masks: list[Variable] = field(default_factory=list)
    # Of integers, by their places among the inputs: those that all loops of the batch have.
    common_integers: dict[int, Variable] = field(default_factory=dict)
    # Whether results may depend on the batch through these, or the number of steps, alone.
    reads_sizes: bool = False

    def __post_init__(self) -> None:
        self.loop = Loop.from_node(self.node)
        self.rank = max(self.ranks(), default=0)
        self._agree_on_sizes()
        self._equalize()

    def ranks(self) -> list[int]:
        """Return how many batch dimensions each input has."""
        return [_rank(core, new) for core, new in zip(self.node.inputs, self.given, strict=True)]

    def _agree_on_sizes(self) -> None:
        """Give all loops of the batch one number of steps, sizes, and slices of one length."""
        ranks = self.ranks()
        if self.op.signature.has_n_steps:
            steps = common(self.given[0], ranks[0])
            if steps is None:
                raise NotImplementedError(
                    f"{self.op}: n_steps has to be known to be the same number for every loop of a "
                    "batch; take one number for all, and `until` for loops that end before"
                )
            self.loop.n_steps, self.reads_sizes = steps, ranks[0] > 0
        for k, (variable, rank) in enumerate(zip(self.given, ranks, strict=True)):
            if not rank:
                continue
            if variable.owner is not None:
                whole = whole_batch(variable.owner) or variable.owner.outputs
                self.given[k] = whole[variable.owner.outputs.index(variable)]
            if variable.type.dtype in integer_dtypes:
                one = common(self.given[k], rank)
                if one is not None:
                    is_scalar = not is_tensor(self.node.inputs[k])
                    self.common_integers[k] = pt.scalar_from_tensor(one) if is_scalar else one
                    self.reads_sizes = True

    def _equalize(self) -> None:
        """Give all batched inputs the whole batch shape."""
        ranks = self.ranks()
        batched = {i: rank for i, rank in enumerate(ranks) if rank}
        shapes = {tuple(self.given[i].type.shape[:rank]) for i, rank in batched.items()}
        is_uneven = len(shapes) > 1 and any(1 in shape for shape in shapes)
        if not is_uneven and len(set(map(len, shapes))) <= 1:
            self.shape = [s for i in [*batched][:1] for s in list(self.given[i].shape)[: self.rank]]
            return
        sizes = [shape_tuple(self.given[i])[:rank] for i, rank in batched.items()]
        self.shape = list(pt.broadcast_shape(*sizes, arrays_are_shapes=True))
        for i, rank in batched.items():
            rest = list(self.given[i].shape)[rank:]
            self.given[i] = pt.broadcast_to(self.given[i], [*self.shape, *rest])

    # Inputs

    def outputs(self) -> list[Variable]:
        if self.rank == 0:
            return self.op.make_node(*self.given).outputs
        given = self.op.signature.split_inputs(
            [self.common_integers.get(k, new) for k, new in enumerate(self.given)]
        )
        loop = self.loop
        for part, outer in zip(loop.sequences, given.sequences, strict=True):
            if _rank(part.outer, outer):
                self.replacements[part.row] = row = _batch_of(part.row, self.rank)
                if is_mask(part.outer):
                    self.masks.append(row)
                part.row = row
                outer = pt.moveaxis(outer, self.rank, 0)
            part.outer = outer
        for whole, outer in zip(loop.non_sequences, given.non_sequences, strict=True):
            if _rank(whole.outer, outer):
                self.replacements[whole.inner] = inner = _batch_of(whole.inner, self.rank)
                whole.inner = inner
            whole.outer = outer
        starts = dict(zip(loop.recurrent, [*given.initials, *given.carries], strict=True))
        batched = {part for part, new in starts.items() if _rank(part.initial, new)}
        vectorized = self.spread(batched)
        for own, initial in starts.items():
            if own in batched:
                self.batch(own, initial)
            else:
                own.initial = initial
        loop.set_body_outputs(vectorized)
        for own in self.numbers():  # next values get the batch that their state has
            model = own.tap(-own.depth)
            if own.next.type.ndim < model.type.ndim:
                own.next = pt.second(model, own.next)
        if loop.stop is not None and loop.stop.type.ndim:
            self.stop_per_row()
        for mask in self.masks:
            self.pass_over(mask)
        return self.finish()

    def spread(self, batched: set[State | Carry]) -> list[Variable]:
        """Vectorize the body until no further state becomes batched; return its results."""
        loop = self.loop
        cores = loop.body_outputs()
        while True:
            for part in loop.recurrent:
                if part in batched:
                    new = {v: _batch_of(v, self.rank) for v in part.taps.values()}
                    self.replacements = new | self.replacements
            vectorized = _with_batches(cores, self.replacements, self.rank)
            results = self.op.signature.split_body_outputs(vectorized)
            if self.masks or (results.stop is not None and results.stop.type.ndim):
                # Each row stops by itself, so every value must be able to.
                grown = set(self.numbers())
            else:
                pairs = zip(loop.recurrent, vectorized, strict=False)
                grown = {part for part, new in pairs if _rank(part.next, new)}
            if grown <= batched:
                return vectorized
            batched |= grown

    def numbers(self) -> list[State | Carry]:
        """Return the states and the carries that are tensors."""
        return [part for part in self.loop.recurrent if is_tensor(part.next)]

    def batch(self, part: State | Carry, initial: Variable) -> None:
        """Give a state or carry the batch, and what it starts from."""
        lead = int(isinstance(part, State))  # time
        if not _rank(part.initial, initial):
            sizes = list(initial.shape)
            spread = with_axes(initial, 1, self.rank) if lead else initial
            initial = pt.broadcast_to(spread, [*sizes[:lead], *self.shape, *sizes[lead:]])
        elif lead:
            initial = pt.moveaxis(initial, self.rank, 0)
        part.initial = initial
        if isinstance(part, Carry):
            part.value = self.replacements[part.value]
        else:
            part.taps = {tap: self.replacements[var] for tap, var in part.taps.items()}

    # Results

    def stop_per_row(self) -> None:
        """Freeze rows that have stopped; stop when all have."""
        loop = self.loop
        assert loop.stop is not None
        before = pt.TensorType("bool", shape=(None,) * self.rank)(name="stopped")
        none = pt.zeros(self.shape, dtype="bool")

        def keep(old: Variable, new: Variable) -> Variable:
            return pt.switch(with_axes(before, self.rank, new.type.ndim - self.rank), old, new)

        for part in self.numbers():
            part.next = keep(part.tap(-1), part.next)
        for output, row in zip(loop.outputs, self.output_rows(), strict=True):
            value = output.value
            if value.type.ndim < self.rank + len(row):
                spread = with_axes(value, 0, self.rank)
                value = pt.broadcast_to(spread, [*before.shape, *list(value.shape)])
            initial = pt.zeros([*self.shape, *row], dtype=value.type.dtype)
            last = pt.TensorType(value.type.dtype, shape=(None,) * value.type.ndim)()
            output.value = keep(last, value)
            loop.carries.append(Carry(initial, last, output.value))
        after = pt.or_(before, loop.stop)
        loop.carries.append(Carry(none, before, after))
        loop.stop = pt.all(after)
        # Where the gradient of a row begins; see `vectorize_ran_steps`.
        count = pt.TensorType("int64", shape=(None,) * self.rank)(name="steps")
        steps = pt.zeros(self.shape, dtype="int64")
        loop.carries.append(Carry(steps, count, count + pt.invert(before)))

    def pass_over(self, mask: Variable) -> None:
        """Have rows that do not run a step keep their values, and give zeros as outputs."""
        loop = self.loop
        for part in self.numbers():
            run = with_axes(mask, self.rank, part.next.type.ndim - self.rank)
            part.next = pt.switch(run, part.next, part.tap(-1))
        cores = self.op.signature.split_body_outputs(self.op.body.outputs).outputs
        for output, core in zip(loop.outputs, cores, strict=True):
            zero = pt.zeros((), dtype=output.value.type.dtype)
            run = with_axes(mask, self.rank, core.type.ndim)
            output.value = pt.switch(run, output.value, zero)

    def output_rows(self) -> list[list[Variable]]:
        """Return the row shapes of the outputs of one loop of the batch."""
        ranks = self.ranks()
        shapes = [
            list(new.shape)[rank:] if is_tensor(new) else None
            for new, rank in zip(self.given, ranks, strict=True)
        ]
        shared = [None if rank else new for new, rank in zip(self.given, ranks, strict=True)]
        rows = stacked_row_shapes(self.op.signature, self.op.body, shared, shapes)
        result: list[list[Variable]] = []
        for i, row in enumerate(rows):
            known = [size for size in row if size is not None]
            if len(known) < len(row):
                raise NotImplementedError(
                    f"{self.op}: output {i} of a batch of loops with `until` has a shape that "
                    "depends on what a step computes"
                )
            result.append(known)
        return result

    def finish(self) -> list[Variable]:
        n_carries = self.op.signature.n_carries  # others say who has stopped
        results = self.loop.apply()
        cores = self.op.signature.split_outputs(self.node.outputs)

        def timed(cores: list[Variable], made: list[Variable]) -> list[Variable]:
            pairs = zip(cores, made, strict=True)
            return [
                pt.moveaxis(new, 0, self.rank) if _rank(old, new) else new for old, new in pairs
            ]

        found = [
            *timed(cores.histories, results.histories),
            *results.carries[:n_carries],
            *timed(cores.outputs, results.outputs),
        ]
        return list(map(self.with_batch, self.node.outputs, found)) if self.reads_sizes else found

    def with_batch(self, core: Variable, variable: Variable) -> Variable:
        """Return a result with the axes of the batch, whose sizes it may have read."""
        if not is_tensor(core) or _rank(core, variable):
            return variable
        return pt.broadcast_to(variable, [*self.shape, *variable.shape])


@vectorize_rule.register(RanSteps)
def vectorize_ran_steps(op: RanSteps, node: Apply, batched: Variable) -> list[Variable]:
    """Return which steps every loop of a batch ran."""
    rank = _rank(node.inputs[0], batched)
    if not rank:
        return op.make_node(batched).outputs
    timed = pt.moveaxis(batched, rank, 0)
    core, moved = node.inputs[0].owner, batched.owner
    is_moved = moved is not None and isinstance(moved.op, DimShuffle)
    loop = moved.inputs[0].owner if is_moved else None
    if core is None or loop is None or not all(isinstance(n.op, Scan) for n in (core, loop)):
        raise NotImplementedError(
            "a batch of gradients of a loop with `until` must hold the loop itself: it was replaced"
        )
    if loop.op.signature.n_carries == core.op.signature.n_carries:
        return op.make_node(timed).outputs  # no loop stops before others
    if not op.from_first:
        raise NotImplementedError(
            "a batch of truncated gradients of a loop with `until`; take the gradient of the batch"
        )
    counts = loop.op.signature.split_outputs(loop.outputs).carries[-1]
    steps = pt.arange(timed.shape[0] - op.depth)
    return [pt.lt(steps, pt.expand_dims(counts, -1))]
