"""Loops taken out of a graph to be changed: in place, or cut off while others take their place."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import walk

from scanlib.lengths.arrays import Lengths
from scanlib.lengths.forms import LengthForm
from scanlib.ops.graph import substitute
from scanlib.ops.loop import Loop, Part
from scanlib.ops.row_ops.checked_rows import CheckedRows
from scanlib.rewrites.pytensor_rewrites import run_query

Lookup = Callable[[Part], Variable]
Rows = dict[Variable, Variable]  # by the body's variable of a row: the rows of all steps


class LoopEdit:
    """A loop of a graph, taken apart to be changed.

    `loop` is edited freely. Parts that disappear are named with `drop` (nobody reads them) or
    `redirect` (another expression takes their place); `replacements` then applies the loop and
    says what replaces each old output.
    """

    def __init__(self, fgraph: FunctionGraph, node: Apply) -> None:
        self.fgraph = fgraph
        self.node = node
        self.loop = Loop.from_node(node)
        self.old: dict[Part, Variable] = dict(zip(self.loop.parts, node.outputs, strict=True))
        self.changed = False
        self._redirects: dict[Part, Variable | Callable[[Lookup], Variable]] = {}

    def is_read(self, part: Part) -> bool:
        """Whether something outside the loop reads the result of a part."""
        return bool(self.fgraph.clients.get(self.old[part]))

    def drop(self, part: Part) -> None:
        """Remove a part whose result nobody reads."""
        self.changed = True
        loop = self.loop
        loop.states = [state for state in loop.states if state is not part]
        loop.carries = [carry for carry in loop.carries if carry is not part]
        loop.outputs = [output for output in loop.outputs if output is not part]

    def redirect(self, part: Part, instead: Variable | Callable[[Lookup], Variable]) -> None:
        """Remove a part; `instead` replaces its result, or makes that from the new results."""
        self._redirects[part] = instead
        self.drop(part)

    def replacements(self) -> dict[Variable, Variable]:
        """Apply the changed loop and return what replaces each old output that is read."""
        new = self.loop.results() if self.loop.body_outputs() else {}

        def lookup(part: Part) -> Variable:
            instead = self._redirects.get(part)
            if instead is None:
                return new[part]
            return instead if isinstance(instead, Variable) else instead(lookup)

        kept = new.keys() | self._redirects.keys()
        return {old: lookup(part) for part, old in self.old.items() if part in kept}


def rewrite_body(loop: Loop, rewrite: Callable[[FunctionGraph], object]) -> None:
    """Rewrite the graph of a step; `loop` is edited."""
    body = FunctionGraph(loop.body_inputs(), loop.body_outputs(), clone=False)
    rewrite(body)
    loop.set_body_outputs(list(body.outputs))


def rewrite_step(
    node: Apply, rewrite: Callable[[FunctionGraph], object]
) -> dict[Variable, Variable]:
    """Return what replaces the outputs of a loop when the graph of its step is rewritten."""
    loop = Loop.from_node(node)
    rewrite_body(loop, rewrite)
    return dict(zip(node.outputs, loop.apply().node.outputs, strict=True))


def replace(fgraph: FunctionGraph, replacements: dict[Variable, Variable], reason: str) -> None:
    """Replace variables that the graph still holds, keeping their types. What is new remembers the
    lines of the user's program that made the old."""
    pairs = []
    for old, new in replacements.items():
        if old not in fgraph.variables or old is new:
            continue
        if old.type != new.type and not old.type.is_super(new.type):
            new = old.type.filter_variable(new)
        pairs.append((old, new))
        trace = getattr(old.tag, "trace", None)
        for made in walk([new], partial(_made, fgraph)) if trace else ():
            if made not in fgraph.variables and not getattr(made.tag, "trace", None):
                made.tag.trace = trace
    if pairs:
        fgraph.replace_all_validate(pairs, reason=reason)


def _made(fgraph: FunctionGraph, variable: Variable) -> list[Variable]:
    """Return what a variable is computed from, where it is new to a graph."""
    is_new = variable.owner is not None and variable not in fgraph.variables
    return variable.owner.inputs if is_new else []


_STABLE = RewriteDatabaseQuery(include=["canonicalize", "stabilize", "merge"])


@dataclass
class Detached:
    """A loop's inputs, each once, and what `detach` has put in their place; and what is known of
    the lengths of sequences, by their stand-in."""

    outer: list[Variable]
    stand_ins: list[Variable]
    lengths: dict[Variable, LengthForm]

    def same_length(self, one: Variable, two: Variable) -> bool:
        """Whether two sequences are known to have the same number of rows."""
        if one is two or None is not one.type.shape[0] == two.type.shape[0]:
            return True
        return one in self.lengths and self.lengths[one] == self.lengths.get(two)

    def checked(self, loop: Loop, known: Sequence[Variable] | None = None) -> Rows:
        """Return the sequences by their rows, checked where they may have too few or too many.

        Another loop checks the lengths of those that are `known`.
        """
        if known is None:
            known = [part.outer for part in loop.sequences[:1] if loop.n_steps is None]
        messages, found = loop.messages(), {}
        for position, part in enumerate(loop.sequences):
            found[part.row] = part.outer
            if not any(self.same_length(part.outer, other) for other in known):
                check = CheckedRows(messages.sequence_length(position))
                found[part.row] = check(part.outer, loop.length())
        return found

    def attach(self, values: list[Variable | None]) -> list[Variable | None]:
        """Return graphs of the stand-ins as graphs of the inputs.

        What is new has missed the rewrites of its phase: batches hold, for one, the naive forms of
        logarithms of sums.
        """
        chosen = [value for value in values if value is not None]
        graph = FunctionGraph(self.stand_ins, chosen, clone=False)
        run_query(_STABLE, graph)
        inputs = dict(zip(self.stand_ins, self.outer, strict=True))
        made = iter(substitute(graph.outputs, inputs))
        return [None if value is None else next(made) for value in values]


def detach(loop: Loop) -> Detached:
    """Replace the inputs of a loop."""
    outer = list(dict.fromkeys(loop.outer_inputs()))
    stand_ins = [variable.type(name=variable.name) for variable in outer]
    places = dict(zip(outer, stand_ins, strict=True))
    known = Lengths(sure=True)
    lengths = {places[part.outer]: known.of(part.outer) for part in loop.sequences}
    loop.replace_outer(places)
    return Detached(outer, stand_ins, lengths)
