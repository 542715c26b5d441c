"""Inner loops of few steps, written out: one step after the other in the step around them.

A step that holds a loop is no kernel: it calls one for each inner loop, which takes longer than a
few steps on numbers do, and what these compute goes through memory. Once the steps of the inner
loop are written out, the step around them is a step like others: it may be elementwise, or work on
small arrays in registers.

What is stored over time of an inner loop is a list of rows. What reads one of them, as the gradient
of the loop does, reads the value itself.
"""

from collections.abc import Callable, Sequence
from math import prod

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import toposort
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.subtensor import Subtensor

from scanlib.lengths.numbers import constant_place
from scanlib.ops.execution import LoopOp
from scanlib.ops.graph import conform, is_cheap, is_tensor, lifted_row, substitute
from scanlib.ops.loop import Loop, State
from scanlib.ops.loop_rewrite import record_of
from scanlib.ops.scan import Scan
from scanlib.rewrites.edit import LoopEdit
from scanlib.rewrites.pytensor_rewrites import BodyRewrite
from scanlib.rewrites.simplify.redundant import canonicalize_body

# Of a loop, and of the operations of all loops of a step: longer code takes longer to compile.
MOST_STEPS, MOST_OPERATIONS = 16, 400
# Of matrix products, and of all else but arithmetic. A chain of functions such as `tanh` waits for
# each, where a loop computes those of many items meanwhile; others take as long as in a loop.
MOST_PRODUCTS, MOST_ITEMS = 256, 16


def unroll_inner_loops(edit: LoopEdit) -> None:
    """Write out the loops of a step, if that leaves none.

    The steps of a checkpointed loop hold the loops that its gradient runs again.
    """
    found = _loops(edit.loop.body_outputs())
    if not found or edit.loop.recompute or not _unroll(edit.loop):
        return
    canonicalize_body(edit.loop)
    edit.changed = True
    outer, known = edit.loop.name or "loop", record_of(edit.fgraph).unrolled
    for node in found:
        steps = node.op.steps_of(node).known()
        known.append((outer, node.op.name or "inner loop", steps))


def _loops(outputs: Sequence[Variable]) -> list[Apply]:
    return [node for node in toposort(outputs) if isinstance(node.op, LoopOp)]


def _write_out(body: FunctionGraph) -> None:
    short: dict[Apply, Loop] = {}
    operations = 0
    for node in _loops(body.outputs):
        loop = _short_loop(node)
        if loop is None:
            return
        short[node] = loop
        nodes = list(toposort(loop.body_outputs()))
        if not all(map(_gains, nodes)):
            return
        own = sum(not isinstance(each.op, DimShuffle) for each in nodes)
        operations += own * node.op.steps_of(node).known()
        if operations > MOST_OPERATIONS:
            return
    step = _Step()
    for node in body.toposort():
        if node in short:
            step.write(node, short[node])
        else:
            step.add(node)
    pairs = [(out, step.value(out)) for out in dict.fromkeys(body.outputs)]
    body.replace_all([(old, new) for old, new in pairs if new is not old], import_missing=True)


_unroll = BodyRewrite(_write_out)


def _short_loop(node: Apply) -> Loop | None:
    """Return a loop that can be written out, with a short step; None for others.

    Its errors are known not to occur, but for those of operations of its steps.
    """
    if not isinstance(node.op, Scan) or node.op.checkpoint is not None:
        return None
    loop, steps = Loop.from_node(node), node.op.steps_of(node).known()
    if steps is None or not max(1, loop.required_steps) <= steps <= MOST_STEPS:
        return None
    if not all(_is_alike(*each) for each in loop.sources().items()):
        return None
    if any((part.outer.type.shape[0] or 0) < steps for part in loop.sequences):
        return None
    if any(part.initial.type.shape[0] != part.depth for part in loop.states):
        return None
    _unroll(loop)
    canonicalize_body(loop)
    is_fit = not _loops(loop.body_outputs()) and all(map(_keeps_shape, loop.states))
    return loop if is_fit else None


def _gains(node: Apply) -> bool:
    """Whether an operation of an inner loop is no slower where it is written out."""
    if isinstance(node.op, DimShuffle | Subtensor):
        return True
    if isinstance(node.op, Elemwise) and is_cheap(node.op.scalar_op):
        return True
    most = MOST_PRODUCTS if isinstance(node.op, Dot) else MOST_ITEMS
    return all(
        is_tensor(out) and None not in out.type.shape and prod(out.type.shape) <= most
        for out in node.outputs
    )


def _is_alike(inner: Variable, source: tuple[Variable, int]) -> bool:
    """Whether a step's arrays are repeated along the same axes if it reads an outer one itself."""
    outer, lead = source
    if not is_tensor(outer) or not is_tensor(inner):
        return False
    return outer.type.broadcastable[lead:] == inner.type.broadcastable


def _keeps_shape(state: State) -> bool:
    """Whether a state is known to keep its shape."""

    def is_like(variable: Variable) -> bool:
        if variable in state.taps.values():
            return True
        node, ones = variable.owner, variable.type.broadcastable
        if node is None or not isinstance(node.op, Elemwise):
            return False
        return any(inp.type.broadcastable == ones and is_like(inp) for inp in node.inputs)

    return None not in state.type.shape or is_like(state.next)


Rows = list[Variable]


class _Step:
    """A step whose loops are written out: the new values of variables, or their rows."""

    def __init__(self) -> None:
        self.values: dict[Variable, Variable] = {}
        self.rows: dict[Variable, Rows] = {}

    def value(self, variable: Variable) -> Variable:
        if variable in self.rows and variable not in self.values:
            rows = self.rows[variable]
            self.values[variable] = conform(pt.stack(rows), variable.type)
        return self.values.get(variable, variable)

    def row(self, variable: Variable, place: int) -> Variable:
        if variable in self.rows:
            return self.rows[variable][place]
        only = lifted_row(variable)
        return self.value(variable)[place] if only is None else self.value(only)

    def add(self, node: Apply) -> None:
        """Compute a node, or the rows of what it returns."""
        way = WAYS.get(type(node.op))
        found = None if way is None else way(self, node)
        if isinstance(found, list):
            self.rows[node.outputs[0]] = found
        elif found is not None:
            self.values[node.outputs[0]] = conform(found, node.outputs[0].type)
        else:
            given = [self.value(inp) for inp in node.inputs]
            if any(new is not old for new, old in zip(given, node.inputs, strict=True)):
                new = node.clone_with_new_inputs(given, strict=False)
                self.values.update(zip(node.outputs, new.outputs, strict=True))

    def write(self, node: Apply, loop: Loop) -> None:
        """Take the steps of a loop."""
        given = {part.inner: self.value(part.outer) for part in loop.non_sequences}
        given |= {part.value: self.value(part.initial) for part in loop.carries}
        order = slice(None, None, -1) if loop.reverse else slice(None)
        past = [[self.row(s.initial, k) for k in range(s.depth)][order] for s in loop.states]
        outputs: list[Rows] = [[] for _ in loop.outputs]
        for t in range(node.op.steps_of(node).known())[order]:
            given |= {part.row: self.row(part.outer, t) for part in loop.sequences}
            for state, values in zip(loop.states, past, strict=True):
                given |= {tap: values[offset] for offset, tap in state.taps.items()}
            found = iter(substitute(loop.body_outputs(), given))
            for rows in past:
                rows.append(next(found))
            given |= {part.value: next(found) for part in loop.carries}
            for rows in outputs:
                rows.append(next(found))
        for state, values in zip(loop.states, past, strict=True):
            del values[: -state.depth if state.untraced else 0]
        parts = node.op.signature.split_outputs(node.outputs)
        for part, out in zip(loop.carries, parts.carries, strict=True):
            self.values[out] = given[part.value]
        for out, rows in zip(parts.histories + parts.outputs, past + outputs, strict=True):
            self.rows[out] = rows[order]


def _subtensor(step: _Step, node: Apply) -> Rows | Variable | None:
    rows, place = step.rows.get(node.inputs[0]), constant_place(node)
    if rows is None or place is None:
        return None
    first, rest = place[0], place[1:]
    if isinstance(first, slice):
        return [row[rest] if rest else row for row in rows[first]] or None
    if not -len(rows) <= first < len(rows):
        return None
    return rows[first][rest] if rest else rows[first]


def _elemwise(step: _Step, node: Apply) -> Rows | None:
    if len(node.outputs) > 1 or step.rows.keys().isdisjoint(node.inputs):
        return None
    whole = [inp for inp in node.inputs if not inp.type.broadcastable[0]]
    sizes = {len(step.rows[inp]) if inp in step.rows else inp.type.shape[0] for inp in whole}
    if len(sizes) > 1 or None in sizes or step.rows.keys().isdisjoint(whole or node.inputs):
        return None
    return [
        node.op.make_node(
            *(step.row(inp, place if inp in whole else 0) for inp in node.inputs)
        ).outputs[0]
        for place in range(next(iter(sizes), 1))
    ]


# Canonicalization does the same for other operations.
WAYS: dict[type, Callable[[_Step, Apply], Rows | Variable | None]] = {
    Subtensor: _subtensor,
    Elemwise: _elemwise,
}
