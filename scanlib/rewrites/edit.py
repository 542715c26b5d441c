"""Changing loops inside a graph: one place that knows what becomes of their old outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph

from scanlib.ops.loop import Carry, Loop, Output, Results, State

Part = State | Carry | Output
Lookup = Callable[[Part], Variable]


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
        self.parts: list[Part] = [*self.loop.states, *self.loop.carries, *self.loop.outputs]
        self.changed = False
        self._redirects: dict[int, Variable | Callable[[Lookup], Variable]] = {}

    def is_read(self, part: Part) -> bool:
        """Whether something outside the loop reads the result of a part."""
        for old, out in zip(self.parts, self.node.outputs, strict=True):
            if old is part:
                return bool(self.fgraph.clients.get(out))
        return False

    def result(self, part: Part) -> Variable:
        """Return the old output of a part."""
        for old, out in zip(self.parts, self.node.outputs, strict=True):
            if old is part:
                return out
        raise KeyError(part)

    def drop(self, part: Part) -> None:
        """Remove a part whose result nobody reads."""
        self.changed = True
        self._remove(part)

    def redirect(self, part: Part, instead: Variable | Callable[[Lookup], Variable]) -> None:
        """Remove a part; `instead` replaces its result, or makes that from the new results."""
        self._redirects[id(part)] = instead
        self.drop(part)

    def _remove(self, part: Part) -> None:
        loop = self.loop
        loop.states = [state for state in loop.states if state is not part]
        loop.carries = [carry for carry in loop.carries if carry is not part]
        loop.outputs = [output for output in loop.outputs if output is not part]

    def replacements(self) -> dict[Variable, Variable]:
        """Apply the changed loop and return what replaces each old output that is read."""
        new = results_by_part(self.loop, self.loop.apply()) if self.loop.body_outputs() else {}

        def lookup(part: Part) -> Variable:
            instead = self._redirects.get(id(part))
            if instead is None:
                return new[id(part)]
            return instead if isinstance(instead, Variable) else instead(lookup)

        return {
            old: lookup(part)
            for part, old in zip(self.parts, self.node.outputs, strict=True)
            if id(part) in new or id(part) in self._redirects
        }


def results_by_part(loop: Loop, results: Results) -> dict[int, Variable]:
    """Return the result of each part of a loop, keyed by the part's identity."""
    parts: list[Any] = [*loop.states, *loop.carries, *loop.outputs]
    values = [*results.histories, *results.carries, *results.outputs]
    return {id(part): value for part, value in zip(parts, values, strict=True)}


def rewrite_step(
    node: Apply, rewrite: Callable[[FunctionGraph], object]
) -> dict[Variable, Variable]:
    """Return what replaces the outputs of a loop when the graph of its step is rewritten."""
    loop = Loop.from_node(node)
    parts = [*loop.states, *loop.carries, *loop.outputs]
    body = FunctionGraph(loop.body_inputs(), loop.body_outputs(), clone=False)
    rewrite(body)
    loop.set_body_outputs(list(body.outputs))
    results = results_by_part(loop, loop.apply())
    return {old: results[id(part)] for old, part in zip(node.outputs, parts, strict=True)}
