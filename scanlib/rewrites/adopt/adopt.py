"""Adoption: loops of `pytensor.scan` become canonical loops.

It comes before PyTensor's own rewrites of scans, which know nothing of canonical loops and leave
buffers behind that no longer say what they are. Gradients taken over a loop of `pytensor.scan`
are loops of its own too, so they are adopted in the same way; so are loops inside the steps of
others. A loop that cannot be adopted stays as it is, and the record of the graph says why.

PyTensor's node is applied to the number of steps, sequences in the order in which they are read,
and buffers that hold initial rows and have room for all results; it returns the buffers filled.
A canonical loop takes the rows and returns histories, which have the same rows, so that what
reads a buffer can read the history instead.

=====================  ==========================================================================
PyTensor's             becomes
=====================  ==========================================================================
sequence               a sequence; the loop runs backwards if most of them are reversed
mit-sot, sit-sot       a state; a carry, where only the last row is read
nit-sot                an output
untraced sit-sot       a carry
mit-mot                carries, an output and a sequence; see `adopt_buffers`
while condition        `stop`
=====================  ==========================================================================
"""

from collections.abc import Callable
from functools import partial
from operator import itemgetter
from typing import Any

import pytensor.tensor as pt
from pytensor.compile.mode import get_mode, optdb, predefined_modes, predefined_optimizers
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.features import ReplaceValidate
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors
from pytensor.tensor.basic import join
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib._compat import LegacyScan, thaw_graph
from scanlib.lengths.arrays import Lengths, joined_parts, slice_of
from scanlib.lengths.forms import LengthForm, Symbol, number
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.counted_rows import read_counted_rows
from scanlib.ops.gradient.cotangents import enter, is_zeros
from scanlib.ops.graph import conform, core_op, row_type
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Part, Sequence, State
from scanlib.ops.loop_rewrite import AdoptedLoop, LoopRewrite, RewriteFailure, holds, record_of
from scanlib.ops.row_ops.ran_steps import RanSteps
from scanlib.ops.row_ops.triangular import returns_other_shapes
from scanlib.ops.scan import Scan
from scanlib.rewrites.adopt.adopt_batches import adopt_batches, is_batch
from scanlib.rewrites.adopt.adopt_buffers import (
    BufferWindow,
    initial_rows,
    is_shared,
    last_reads,
    only_row,
    slide,
    whole_buffer,
)
from scanlib.rewrites.edit import replace, rewrite_step
from scanlib.rewrites.inline import write_out_graphs
from scanlib.rewrites.pytensor_rewrites import CANONICAL

# From the results of a loop's parts.
Maker = Callable[[dict[Part, Variable]], Variable]


class NotAdoptableError(Exception):
    """Why a loop stays PyTensor's."""


def loop_name(name: str | None) -> str | None:
    """Return scanlib's name for a loop: PyTensor calls unnamed ones ``scan_fn``."""
    if not name or name == "scan_fn":
        return None
    if name.startswith("grad_of_"):
        source = loop_name(name.removeprefix("grad_of_"))
        return f"{source}_gradient" if source else "gradient"
    return name


class Adoption:
    """A loop of PyTensor's, taken apart into the parts of a canonical one.

    `prepare_body` may rewrite the graph of one step; `known` is what is known of lengths in the
    graph. `NotAdoptableError` says why the loop must stay what it is.
    """

    def __init__(
        self,
        fgraph: FunctionGraph,
        node: Apply,
        prepare_body: Callable[[FunctionGraph], None],
        known: dict[Symbol, int],
    ) -> None:
        self.fgraph, self.node, self.op = fgraph, node, node.op
        self.info = node.op.info
        if self.op.destroy_map:
            raise NotAdoptableError("it overwrites its inputs: its function is compiled already")
        if self.op.profile:
            raise NotAdoptableError("it was built with profile=True")
        if self.info.as_while and self.info.n_mit_mot:
            raise NotAdoptableError("it is a gradient (with mit-mot) that ends early")
        body = thaw_graph(self.op.fgraph)
        undo_in_place(body)
        rewrite_as_asked(body, self.op.mode)
        write_out_graphs.rewrite(body)
        if any(returns_other_shapes(each) for each in body.apply_nodes):
            raise NotAdoptableError("a step calls QR in the mode 'raw', whose shapes are not known")
        prepare_body(body)
        self.inner, self.results = list(body.inputs), list(body.outputs)
        self.plain = Lengths(known=known)
        self.steps = self.plain.integer(node.inputs[0])
        self.rows = Lengths(self.steps, known)
        self.reverse = not self.info.as_while and self.is_reversed()
        self.loop = Loop(
            reverse=self.reverse,
            truncate_gradient=self.op.truncate_gradient,
            name=loop_name(self.op.name),
        )
        # For each output of the node, what makes it from the results of the loop's parts; None
        # where only its last row is read.
        self.outputs: list[Maker | None] = []
        # Reads of last rows that are no rows of the results, and what makes them.
        self.last_rows: dict[Variable, Maker] = {}
        self.replaced: dict[Variable, Variable] = {}
        # Of a gradient of a loop with `until`: which steps that one ran.
        self.ran = self.mask()

    # Direction

    def is_reversed(self) -> bool:
        """Whether fewer reversals are left if the loop walks from the last row to the first."""
        read = set(ancestors(self.results))
        score = 0
        sequences = zip(
            self.op.outer_seqs(self.node.inputs), self.op.inner_seqs(self.inner), strict=True
        )
        for outer, row in sequences:
            if row in read:
                score += 1 if self.rows.view(outer).flipped else -1
        for outer in self.op.outer_mitmot(self.node.inputs):
            if not is_zeros(outer):
                score += 1 if self.rows.view(outer).flipped else -1
        return score > 0

    def orient(self, variable: Variable) -> Variable:
        """Return rows in the order of the steps as the loop reads them, one for each step."""
        view = self.rows.view(variable)
        more = self.rows.of_view(view) - self.steps
        if self.rows.agrees(variable, self.steps):
            more = number(0)
        view = view.cut(number(0), more)
        if self.reverse:
            view = view.flip()
        elif more.is_zero and not view.flipped and not self.rows.is_simple(view):
            return variable
        return self.rows.read(view)

    def mask(self) -> Variable | None:
        """Return which steps ran of a loop with `until` that this one walks back, None if there is
        no such loop. In a batch, the steps that a member did not run are passed over."""
        for (kind, what), _ in self.steps.terms:
            node = what[0].owner if kind == "axis" else None
            if node is None or not isinstance(node.op, Scan) or not node.op.signature.has_stop:
                continue
            rows, depth = what[0], -self.steps.number
            own = node.op.steps_of(node).rows[node.outputs.index(rows)]
            if (own.others, self.steps) == (depth, LengthForm.of_axis(rows) - depth):
                return RanSteps(depth)(rows) if self.reverse > node.op.signature.reverse else None
        return None

    # Parts

    def replacements(self) -> dict[Variable, Variable]:
        self.add_inputs()
        self.add_windows()
        self.add_states()
        self.add_outputs()
        self.add_carries()
        if self.ran is not None:
            self.loop.sequences.append(Sequence(self.ran, row_type(self.ran)()))
        if self.info.as_while:
            stop = self.results[-1]
            self.loop.stop = stop if stop.type.dtype == "bool" else pt.neq(stop, 0)
        self.set_length()
        self.loop.substitute(self.replaced)
        read_counted_rows(self.loop)
        try:
            results = self.loop.results()
        except (TypeError, ValueError) as error:
            raise NotAdoptableError(f"its types do not fit: {error}") from error
        found = {
            old: make(results)
            for old, make in zip(self.node.outputs, self.outputs, strict=True)
            if self.fgraph.clients.get(old) and make is not None
        }
        return found | {old: make(results) for old, make in self.last_rows.items()}

    def add_inputs(self) -> None:
        op, inputs = self.op, self.node.inputs
        read = set(ancestors(self.results))
        for outer, row in zip(op.outer_seqs(inputs), op.inner_seqs(self.inner), strict=True):
            if row in read:
                name = _name(self.rows.view(outer).base)
                rows = self.orient(outer)
                if self.ran is None:
                    self.loop.sequences.append(Sequence(rows, row, name))
                else:
                    self.replaced[row] = conform(enter(self.loop, rows, row.type, name), row.type)
        for outer, inner in zip(
            op.outer_non_seqs(inputs), op.inner_non_seqs(self.inner), strict=True
        ):
            self.loop.non_sequences.append(NonSequence(outer, inner, _name(outer)))

    def add_windows(self) -> None:
        op, info = self.op, self.info
        read = op.inner_mitmot_grouped(self.inner)
        written = op.inner_mitmot_outs_grouped(self.results)
        buffers = op.outer_mitmot(self.node.inputs)
        for i, buffer in enumerate(buffers):
            taps, out_taps = info.mit_mot_in_slices[i], info.mit_mot_out_slices[i]
            first = min(taps)
            if first > 0 or min(out_taps, default=first) < first:
                raise NotAdoptableError(f"its mit-mot has taps {taps} and writes {out_taps}")
            window = BufferWindow(
                buffer,
                {tap - first: inner for tap, inner in zip(taps, read[i], strict=True)},
                {tap - first: value for tap, value in zip(out_taps, written[i], strict=True)},
            )
            end = self.steps + window.depth
            if not (self.rows.agrees(buffer, end) or end.at_most(self.rows.of(buffer))):
                raise NotAdoptableError(_misfit("a mit-mot"))
            slid, replaced = slide(
                self.loop, window, self.results, self.steps, self.rows, self.orient
            )
            self.replaced |= replaced
            self.outputs.append(
                partial(whole_buffer, window, slid, self.steps, self.rows, self.reverse)
            )

    def add_states(self) -> None:
        op, info = self.op, self.info
        taps = [*info.mit_sot_in_slices, *info.sit_sot_in_slices]
        inner = [
            *op.inner_mitsot_grouped(self.inner),
            *([variable] for variable in op.inner_sitsot(self.inner)),
        ]
        buffers = [*op.outer_mitsot(self.node.inputs), *op.outer_sitsot(self.node.inputs)]
        results = [*op.inner_mitsot_outs(self.results), *op.inner_sitsot_outs(self.results)]
        outs = [*op.outer_mitsot_outs(self.node.outputs), *op.outer_sitsot_outs(self.node.outputs)]
        for own, variables, buffer, result, out in zip(
            taps, inner, buffers, results, outs, strict=True
        ):
            depth = -min(own)
            initial = initial_rows(buffer, depth, self.steps, self.rows)
            if initial is None:
                raise NotAdoptableError(_misfit("a state"))
            name = _name(initial)
            reads, only = last_reads(self.fgraph, out, depth == 1 and is_shared(initial))
            if depth == 1 and reads and only:
                start = only_row(initial, buffer)
                carry = Carry(start, variables[0], result, name)
                self.loop.carries.append(carry)
                self.outputs.append(None)
                self.add_last_rows(reads, itemgetter(carry))
                continue
            rows = initial[::-1] if self.reverse and depth > 1 else initial
            state = State(rows, dict(zip(own, variables, strict=True)), result, name=name)
            self.loop.states.append(state)
            make = self.in_order(state)
            self.outputs.append(make)
            self.add_last_rows(reads, make, -1)

    def add_last_rows(self, reads: dict[Variable, tuple], make: Maker, *row: int) -> None:
        """Say what becomes of reads of a last row, given what makes it, or what it is a row of."""
        for old, rest in reads.items():
            self.last_rows[old] = _part_of(make, (*row, *rest))

    def add_outputs(self) -> None:
        sizes = self.op.outer_nitsot(self.node.inputs)
        for size, value in zip(sizes, self.op.inner_nitsot_outs(self.results), strict=True):
            output = Output(value)
            self.loop.outputs.append(output)
            length = self.rows.integer(size)
            if length == self.steps:
                self.outputs.append(self.in_order(output))
            elif self.steps.at_most(length) and not self.info.as_while:
                self.outputs.append(self.padded(output, length))
            else:
                raise NotAdoptableError(_misfit("an output"))

    def add_carries(self) -> None:
        op = self.op
        for outer, inner, result in zip(
            op.outer_untraced_sit_sot(self.node.inputs),
            op.inner_untraced_sit_sot(self.inner),
            op.inner_untraced_sit_sot_outs(self.results),
            strict=True,
        ):
            carry = Carry(outer, inner, result, _name(outer))
            self.loop.carries.append(carry)
            self.outputs.append(itemgetter(carry))

    def in_order(self, part: State | Output) -> Maker:
        """Return a stacked result in the order of the steps."""
        return _part_of(itemgetter(part), (slice(None, None, -1),) if self.reverse else ())

    def padded(self, part: Output, length: LengthForm) -> Maker:
        """Return an output with zeros behind its rows: a truncated gradient's."""
        missing = length - self.steps

        def make(results: dict[Part, Variable]) -> Variable:
            rows = results[part]
            sizes = [rows.shape[axis] for axis in range(1, rows.type.ndim)]
            zeros = pt.zeros((missing.variable(), *sizes), dtype=rows.type.dtype)
            if self.reverse:
                return pt.join(0, zeros, rows)[::-1]
            return pt.join(0, rows, zeros)

        return make

    def set_length(self) -> None:
        """Say how many steps there are, where the sequences do not."""
        sequences = [part.outer for part in self.loop.sequences]
        if self.ran in sequences or any(self.plain.agrees(each, self.steps) for each in sequences):
            return
        known = constant_integer(self.node.inputs[0])
        given = self.node.inputs[0] if known is None else pt.constant(known, dtype="int64")
        self.loop.n_steps = pt.cast(given, "int64")


def _part_of(make: Maker, index: tuple) -> Maker:
    return lambda results: make(results)[index] if index else make(results)


def _misfit(what: str) -> str:
    return (
        f"the buffer of {what} is not known to have one row for each step behind its initial rows; "
        "PyTensor's own rewrites make such buffers, so adoption must come before them"
    )


def _name(variable: Variable) -> str | None:
    """Return the name of an argument, with PyTensor's brackets for slices left out."""
    while variable.name is None and variable.owner is not None and len(variable.owner.inputs) == 1:
        variable = variable.owner.inputs[0]
    return variable.name.split("[")[0] if variable.name else None


def undo_in_place(body: FunctionGraph) -> None:
    """Let no Op of a step overwrite its inputs, as they do where PyTensor compiled the loop before.

    It compiles the very graph that the loop holds, which other functions may share.
    """
    for node in body.toposort():
        if not node.op.destroy_map:
            continue
        properties = node.op._props_dict()
        if isinstance(node.op, Elemwise):
            op: Op = Elemwise(node.op.scalar_op)
        elif "inplace" in properties:
            op = type(node.op)(**properties | {"inplace": False})
        else:
            continue
        body.replace_all(zip(node.outputs, op.make_node(*node.inputs).outputs, strict=True))


def rewrite_as_asked(body: FunctionGraph, mode: Any) -> None:
    """Run the rewrites on a step that the mode of its loop names, beside those of each mode."""
    asked = getattr(get_mode(mode)._optimizer, "include", ()) if mode is not None else ()
    named = set(asked) - _TAGS_OF_MODES
    if named:
        optdb.query(CANONICAL.including(*sorted(named))).rewrite(body)


# Tags that stand for a mode, or for a level of rewriting, and not for a rewrite.
_TAGS_OF_MODES = {
    tag
    for each in (*predefined_modes.values(), *predefined_optimizers.values())
    for tag in getattr(getattr(each, "_optimizer", each), "include", ())
} - {"unsafe"}


def legacy_name(op: object) -> str:
    """Return the name by which explanations call a loop of `pytensor.scan`."""
    return loop_name(getattr(op, "name", None)) or "loop"


class AdoptLoops(LoopRewrite):
    """Replace loops of `pytensor.scan` by canonical loops.

    With `when_enabled`, unless adoption is switched on for the whole process, those alone that
    stand in steps of canonical loops, or run such loops in theirs, as PyTensor's Jacobians do.
    """

    def __init__(self, when_enabled: bool) -> None:
        self.when_enabled = when_enabled

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        is_on = config.scanlib__adopt or not self.when_enabled
        is_wanted = _is_legacy if is_on else _is_mixed
        if holds(fgraph, is_wanted):
            self.adopt_all(fgraph, record_of(fgraph).adopted, is_wanted)

    def adopt_all(
        self, fgraph: FunctionGraph, record: list[AdoptedLoop], is_wanted: Callable[[Apply], bool]
    ) -> None:
        """Adopt the loops of a graph that are wanted, in the order in which they are computed, and
        all inside of these; what becomes of each is added to a record."""

        def failed(graph: FunctionGraph, failure: RewriteFailure) -> None:
            reason = f"of an error in scanlib, which is worth a report: {failure.error}"
            record.append(AdoptedLoop(loop_name(failure.loop) or "loop", reason))

        def inside(body: FunctionGraph) -> None:
            if holds(body, _is_legacy):
                body.attach_feature(ReplaceValidate())
                self.adopt_all(body, record, _is_legacy)

        with self.attempt(fgraph):
            for found in adopt_batches(fgraph, inside, is_wanted):
                replace(fgraph, found, "scanlib_adopt")
        known: dict[Symbol, int] = {}
        visited: set[Apply] = set()
        for node in fgraph.toposort():
            if node not in fgraph.apply_nodes:
                continue
            if isinstance(node.op, LegacyScan) and is_wanted(node):
                with self.attempt(fgraph, node, failed):
                    Lengths(known=known).learn_from(node.inputs, visited)
                    try:
                        replacements = Adoption(fgraph, node, inside, known).replacements()
                    except NotAdoptableError as error:
                        left = AdoptedLoop(legacy_name(node.op), str(error))
                        record += [left] if left not in record else []
                        continue
                    replace(fgraph, replacements, "scanlib_adopt")
                    record.append(AdoptedLoop(legacy_name(node.op)))
            elif isinstance(node.op, Scan) and holds(node.op.body, _is_legacy):
                with self.attempt(fgraph, node):
                    replace(fgraph, rewrite_step(node, inside), "scanlib_adopt")
        tidy(fgraph)


def _is_legacy(node: Apply) -> bool:
    """Whether a node is a loop of `pytensor.scan`, or a batch of such loops."""
    return isinstance(node.op, LegacyScan) or is_batch(node.op)


def _is_mixed(node: Apply) -> bool:
    """Whether a node is a loop of one library, or a batch, whose steps run loops of the other."""
    if isinstance(node.op, Scan):
        return holds(node.op.body, _is_legacy)
    body = core_op(node).fgraph.apply_nodes if _is_legacy(node) else ()
    return any(isinstance(inner.op, Scan) or _is_mixed(inner) for inner in body)


def tidy(fgraph: FunctionGraph) -> None:
    """Take slices of slices together, and leave out those that cut nothing.

    What reads a buffer of PyTensor's cuts and reverses it step by step. The rewrites that look
    for reads of a history, or of its last row, know one slice of it.
    """
    rows = Lengths()
    for node in fgraph.toposort():
        if node not in fgraph.apply_nodes:
            continue
        new = None
        if isinstance(node.op, Subtensor):
            new = _end_of_joined(node, rows)
            if new is None:
                new = _one_slice(node, rows)
        elif isinstance(node.op, IncSubtensor):
            new = _all_rows_set(node, rows)
        if new is not None:
            replace(fgraph, {node.outputs[0]: new}, "scanlib_adopt_tidy")


def _end_of_joined(node: Apply, rows: Lengths) -> Variable | None:
    """Return what a slice reads of joined parts at either end, if numbers tell that.

    So the derivatives of initial rows are read, which stand in front of all others. The lengths
    of all parts together may be unknown: of a slice that may be empty, for example.
    """
    index = slice_of(node)
    view = rows.view(node.inputs[0])
    parts = joined_parts(view.base.owner)
    if index is None or index.step is not None or not parts or not view.is_whole:
        return None
    if (index.start is None) == (index.stop is None):
        return None
    at_front = index.start is None
    end = rows.integer(index.stop if at_front else index.start).constant
    if end is None or (end > 0) != at_front or end == 0:
        return None
    at_front = at_front != view.flipped
    left = abs(end)
    taken: list[Variable] = []
    for part in parts if at_front else reversed(parts):
        length = rows.of(part).constant
        if length is None or left == 0:
            break
        used = min(left, length)
        left -= used
        if used < length:
            part = part[:used] if at_front else part[-used:]
        taken.append(part)
    if left:
        return None
    read = taken[0] if len(taken) == 1 else join(0, *(taken if at_front else reversed(taken)))
    return read[::-1] if view.flipped else read


def _one_slice(node: Apply, rows: Lengths) -> Variable | None:
    """Return what a slice of a slice, of a reversal or of joined parts reads, if that is known."""
    out = node.outputs[0]
    if slice_of(node) is None:
        return None
    view = rows.view(out)
    if view.base is out or not rows.is_simple(view):
        return None
    source = node.inputs[0]
    if view.base is source and view.is_whole == view.flipped:
        return None
    return rows.read(view)


def _all_rows_set(node: Apply, rows: Lengths) -> Variable | None:
    """Return the value of an array of zeros all rows of which are set."""
    base, value = node.inputs[:2]
    index = slice_of(node)
    if index is None or value.type.broadcastable != base.type.broadcastable:
        return None
    if not (node.op.set_instead_of_inc or is_zeros(base)):
        return None
    cut = rows.cut(rows.of(base), index)
    if cut is None or not (cut[0].is_zero and cut[1].is_zero):
        return None
    if rows.of(value) != rows.of(base) or value.type.dtype != base.type.dtype:
        return None
    return value[::-1] if cut[2] else value
