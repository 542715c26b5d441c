"""Densities of loops that draw, for PyMC.

A loop draws the rows ``y_t ~ p(y | y_{t-1} … y_{t-K}, x_t, w)``. Where all rows are given, the past
values that a step reads are given as well, and the density of each row is known without those
before it::

    log p(y_0 … y_{T-1}) = Σ_t log p(y_t | y_{t-1} … y_{t-K}, x_t, w)

So the density is a loop whose states are sequences: the initial rows and the values, each tap as it
lies back. It has no states but those which are no draws, such as the variance of GARCH, and the
rewrites compute what has none for all steps at once. PyMC derives ``log p`` of one step from the
graph of the step; the loop is found here, and made.

PyMC finds this module when a loop is made after PyMC was imported (`rewrites.load_densities`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.fg import Output as GraphOutput
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.traversal import ancestors
from pytensor.graph.type import Type
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.type import TensorType

from scanlib._compat.pymc import (
    VALUED,
    MeasurableOp,
    before_support_points,
    conditional_logp,
    logp_rule,
    measurable_ir_rewrites_db,
)
from scanlib.ops.graph import conform
from scanlib.ops.loop import Loop, Output, State, past_rows
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.messages import loop_title
from scanlib.ops.scan import RandomScan, Scan, stacked
from scanlib.rewrites.edit import rewrite_step
from scanlib.rewrites.simplify.last_rows import tap_of_view
from scanlib.rewrites.simplify.redundant import live_parts


class DrawnRows(MeasurableOp, Op):
    """The rows that steps of a loop draw, in a graph from which PyMC derives a density.

    The inputs are those of the loop. `places` says whose rows the outputs are, as the places of
    states and outputs of the loop; `kinds` are their types. Histories are there without their
    initial rows.
    """

    __props__ = ("scan", "places", "kinds")

    def __init__(self, scan: Scan, places: tuple[int, ...], kinds: tuple[Type, ...]) -> None:
        self.scan = scan
        self.places = places
        self.kinds = kinds

    def __str__(self) -> str:
        return f"{type(self).__name__}{{{self.scan}}}"

    def make_node(self, *inputs: Variable) -> Apply:
        return Apply(self, list(inputs), [kind() for kind in self.kinds])

    def infer_shape(self, *arguments: Any) -> list[Any]:
        node, shapes = arguments[-2:]
        depths = self.scan.signature.depths
        whole = self.scan.infer_shape(self.scan.make_node(*node.inputs), shapes)
        found = []
        for place in self.places:
            rows, *sizes = whole[place]
            found.append((rows - depths[place] if place < len(depths) else rows, *sizes))
        return found

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        raise NotImplementedError(f"{self} stands in graphs of densities only")


@node_rewriter([RandomScan])
def find_drawn_rows(fgraph: FunctionGraph, node: Apply) -> dict[Variable, Variable] | None:
    """Put `DrawnRows` in the place of what a loop draws and whose values are given."""
    found, signature = {}, node.op.signature
    for place, result in enumerate(node.outputs):
        rows = [result]
        if place < signature.n_states:
            depth = signature.depths[place]
            clients = [client for client, _ in fgraph.clients[result]]
            traces = [k for k in clients if tap_of_view(k, depth, signature.reverse) == 0]
            rows = [client.outputs[0] for client in traces]
        found.update({v: place for v in rows[:1] if _is_valued(fgraph, v)})
    if not found:
        return None
    op = DrawnRows(node.op, tuple(found.values()), tuple(v.type for v in found))
    return dict(zip(found, op.make_node(*node.inputs).outputs, strict=True))


def _is_valued(fgraph: FunctionGraph, variable: Variable) -> bool:
    """Whether a variable is given a value, or one that only it is made into, as ``exp(y)``."""
    while len(fgraph.clients[variable]) == 1:
        [(client, _)] = fgraph.clients[variable]
        if isinstance(client.op, VALUED):
            return True
        if isinstance(client.op, GraphOutput | MeasurableOp) or len(client.outputs) > 1:
            return False
        [variable] = client.outputs
    return False


@logp_rule.register(DrawnRows)
def log_densities(
    op: DrawnRows, values: Sequence[Variable], *inputs: Variable, **options: Any
) -> Variable | list[Variable]:
    """Return the logarithm of the density of each row, given those before it.

    `NotImplementedError`, naming the loop and what it draws, if PyMC cannot derive them.
    """
    loop = Loop.from_op(op.scan, list(inputs))
    title = loop_title(loop.name, loop.function)
    if loop.stop is not None:
        raise NotImplementedError(
            f"{title}: PyMC cannot derive the density of a loop that ends by a condition; give "
            "n_steps and no condition, or the density to CustomDist, as logp"
        )
    drawn: list[Any] = [loop.parts[place] for place in op.places]
    draws = [part.value if isinstance(part, Output) else part.next for part in drawn]
    if loop.n_steps is not None:  # the values say how many steps there are
        for sequence in loop.sequences:
            sequence.outer = sequence.outer[: loop.n_steps]
        loop.n_steps = None
    names = ", ".join(op.scan.labels.result(place) for place in op.places)
    for draw, value in zip(draws, values, strict=True):
        if value.type.ndim != draw.type.ndim + 1:
            raise TypeError(
                f"{title}: a value of {names} must have {draw.type.ndim + 1} dimensions, the first "
                f"of which is time, got {value.type.ndim}"
            )
    rows = [_read_values(loop, *both) for both in zip(drawn, draws, values, strict=True)]
    try:
        by_row = conditional_logp(dict(zip(draws, rows, strict=True)), warn_rvs=False)
    except (NotImplementedError, RuntimeError) as error:
        raise NotImplementedError(
            f"{title}: PyMC cannot derive the density of {names} at one step ({error}); a step "
            "returns what it draws, or a function of it that PyMC can invert, such as exp(draw)"
        ) from error
    known = [conform(row, draw.type) for row, draw in zip(rows, draws, strict=True)]
    loop.substitute(dict(zip(draws, known, strict=True)))
    loop.outputs = [Output(by_row[row]) for row in rows]
    live = live_parts(loop.recurrent, [output.value for output in loop.outputs])
    loop.states = [part for part in loop.states if part in live]
    loop.carries = [part for part in loop.carries if part in live]
    loop.drop_unread_inputs()
    made = (v for v in ancestors(loop.body_outputs()) if not isinstance(v.type, RandomType))
    read = ((v, v.owner.inputs) for v in made if v.owner)
    draw = (v for v, given in read if any(isinstance(x.type, RandomType) for x in given))
    unknown = next(draw, None)
    if unknown is not None:
        raise NotImplementedError(
            f"{title}: PyMC cannot derive the density of {names}: it depends on another draw of a "
            f"step, {unknown.name or unknown}, which has no value; draw it before the loop, as a "
            "variable of the model, and give it as a sequence"
        )
    loop.associative = False
    densities = loop.apply().outputs
    return densities[0] if len(densities) == 1 else densities


def _read_values(loop: Loop, part: State | Output, draw: Variable, value: Variable) -> Variable:
    """Make a value what steps read, as rows that are drawn and rows before; return the drawn."""
    row = TensorType(value.type.dtype, shape=draw.type.shape)()
    rows = conform(value, stacked(row.type, None))
    loop.sequences.append(SequencePart(rows, row, part.name))
    if isinstance(part, State):
        loop.states = [state for state in loop.states if state is not part]
        ends = [value, part.initial] if loop.reverse else [part.initial, value]
        for tap, before in part.taps.items():
            history = conform(pt.join(0, *ends), stacked(before.type, None))
            rows = past_rows(history, part.depth, -tap, loop.reverse)
            loop.sequences.append(SequencePart(rows, before, part.name))
    return row


def support_points(fgraph: FunctionGraph, rewrite: Callable[[FunctionGraph], Any]) -> None:
    """Replace what the steps of loops draw by its support points, where sampling starts."""
    for node in fgraph.toposort():
        if isinstance(node.op, RandomScan):
            fgraph.replace_all(list(rewrite_step(node, rewrite).items()), import_missing=True)


measurable_ir_rewrites_db.register("scanlib_drawn_rows", find_drawn_rows, "basic", "scan")
before_support_points(support_points)
