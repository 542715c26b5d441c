"""The simplify rewrites, put together: every loop of a graph until nothing changes."""

import dataclasses
from itertools import combinations
from operator import attrgetter

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import MergeOptimizer
from pytensor.graph.traversal import ancestors

from scanlib.ops.loop import Loop
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.rewrites.edit import LoopEdit, replace, rewrite_body
from scanlib.rewrites.simplify.checkpointed_loops import settle_checkpoints
from scanlib.rewrites.simplify.last_rows import check_last_rows, is_loop, untrace_loops
from scanlib.rewrites.simplify.redundant import (
    canonicalize_body,
    drop_unread_inputs,
    drop_unread_results,
    forward_constants,
    forward_inputs,
    forward_outputs,
    hoist_invariants,
    merge_equal_states,
)
from scanlib.rewrites.simplify.unroll import unroll_inner_loops


def mergeable(first: Apply, second: Apply) -> bool:
    """Whether two loops run for the same number of steps and read some of the same data."""
    a, b = first.op.signature, second.op.signature
    if a.reverse != b.reverse or a.has_stop or b.has_stop:
        return False
    options = attrgetter("truncate_gradient", "checkpoint", "recompute")
    if options(first.op) != options(second.op):
        return False
    if _data(first).isdisjoint(_data(second)):
        return False
    mine, theirs = first.op.steps_of(first), second.op.steps_of(second)
    if mine.n_steps is theirs.n_steps and (
        mine.n_steps is not None or set(mine.sequences) & set(theirs.sequences)
    ):
        return True
    return mine.known() is not None and mine.known() == theirs.known()


def _data(node: Apply) -> set[Variable]:
    groups = node.op.signature.split_inputs(node.inputs)
    data = [*groups.sequences, *groups.initials, *groups.carries, *groups.non_sequences]
    return {variable for variable in data if not isinstance(variable, Constant)}


def independent(first: Apply, second: Apply) -> bool:
    """Whether neither loop reads what the other computes."""
    return all(
        set(ancestors(one.inputs)).isdisjoint(other.outputs)
        for one, other in ((first, second), (second, first))
    )


def merge(first: Apply, second: Apply) -> dict[Variable, Variable]:
    """Return what replaces the outputs of two loops by those of one."""
    a, b = Loop.from_node(first), Loop.from_node(second)
    named = b if b.name and not a.name else a
    merged = dataclasses.replace(
        a,
        n_steps=a.n_steps if a.n_steps is not None else b.n_steps,
        sequences=[*a.sequences, *b.sequences],
        states=[*a.states, *b.states],
        carries=[*a.carries, *b.carries],
        non_sequences=[*a.non_sequences, *b.non_sequences],
        outputs=[*a.outputs, *b.outputs],
        required_steps=max(a.required_steps, b.required_steps),
        name=named.name,
        function=named.function,
        associative=a.associative and b.associative,
    )
    new = merged.results()
    old = zip([*a.parts, *b.parts], [*first.outputs, *second.outputs], strict=True)
    return {out: new[part] for part, out in old}


def merge_loops(fgraph: FunctionGraph) -> None:
    """Merge loops that can be merged, and states and carries of these that are equal; in their
    steps as well."""
    MergeOptimizer().rewrite(fgraph)
    while SimplifyLoops().merge_one(fgraph):
        pass
    for node in SimplifyLoops.loops(fgraph):
        edit = LoopEdit(fgraph, node)
        forward_inputs(edit)
        merge_equal_states(edit)
        drop_unread_inputs(edit)
        if edit.changed:
            rewrite_body(edit.loop, merge_loops)
            replace(fgraph, edit.replacements(), "scanlib_merge")


MAX_ROUNDS = 20


class SimplifyLoops(LoopRewrite):
    """Make every loop of a graph as small as its readers allow.

    In each round: equal outer expressions are merged; unread results, duplicate parts and
    unread inputs are dropped; constants are forwarded; invariant work is hoisted; loops over
    the same data are merged. Before, it is decided what checkpointed loops store; when nothing
    changes any more, histories of which only the last rows are read stop being stored.
    """

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if not config.scanlib__simplify or not any(is_loop(node) for node in fgraph.apply_nodes):
            return
        self.settle_each(fgraph)
        merge_equal = MergeOptimizer()
        done: set[object] = set()
        left: set[Apply] = set()
        for _ in range(MAX_ROUNDS):
            merge_equal.rewrite(fgraph)
            if not self.simplify_each(fgraph, done, left) and not self.merge_one(fgraph):
                break
        untrace_loops(self, fgraph)

    @staticmethod
    def loops(fgraph: FunctionGraph) -> list[Apply]:
        return [node for node in fgraph.toposort() if is_loop(node)]

    def simplify_each(self, fgraph: FunctionGraph, done: set[object], left: set[Apply]) -> bool:
        """Simplify loops, the last one first: what it no longer reads, others need not make.

        Loops that cannot be simplified for an error are added to those that are `left`.
        """
        changed = False
        for node in reversed(self.loops(fgraph)):
            if node not in fgraph.apply_nodes or node in left:
                continue
            with self.attempt(fgraph, node):
                changed |= self.simplify_one(fgraph, node, done)
                continue
            left.add(node)
        return changed

    @staticmethod
    def simplify_one(fgraph: FunctionGraph, node: Apply, done: set[object]) -> bool:
        """Simplify one loop and return whether it changed.

        `done` are steps known as canonical, and loops that did not change, with what they read and
        which of their results are read.
        """
        as_it_stands = (node, *node.inputs, *(bool(fgraph.clients[out]) for out in node.outputs))
        if as_it_stands in done:
            return False
        edit = LoopEdit(fgraph, node)
        drop_unread_results(edit)
        forward_inputs(edit)
        if node.op not in done:
            edit.changed |= canonicalize_body(edit.loop)
        forward_constants(edit)
        hoist_invariants(edit)
        unroll_inner_loops(edit)
        merge_equal_states(edit)
        forward_outputs(edit)
        drop_unread_inputs(edit)
        if not edit.changed:
            done.update((node.op, as_it_stands))
            return False
        replacements = edit.replacements()
        owners = [new.owner for new in replacements.values() if new.owner is not None]
        done.update(owner.op for owner in owners if is_loop(owner))
        replace(fgraph, replacements, "scanlib_simplify")
        return True

    def merge_one(self, fgraph: FunctionGraph) -> bool:
        """Merge the first pair of loops that can be merged; return whether there was one."""
        with self.attempt(fgraph):
            for first, second in combinations(self.loops(fgraph), 2):
                if mergeable(first, second) and independent(first, second):
                    replace(fgraph, merge(first, second), "scanlib_merge")
                    return True
        return False

    def settle_each(self, fgraph: FunctionGraph) -> None:
        """Decide what checkpointed loops store, while they are as their gradients know them."""
        left: set[Apply] = set()
        while True:
            MergeOptimizer().rewrite(fgraph)
            pending = [n for n in self.loops(fgraph) if n.op.checkpoint is not None]
            node = next((node for node in pending if node not in left), None)
            if node is None:
                return
            left.add(node)
            with self.attempt(fgraph, node):
                replace(fgraph, settle_checkpoints(fgraph, node), "scanlib_segments")


class CheckLastRows(LoopRewrite):
    """Guard reads of the last rows of loops that may take no step; see `last_rows`."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        for node in SimplifyLoops.loops(fgraph):
            with self.attempt(fgraph, node):
                replace(fgraph, check_last_rows(fgraph, node), "scanlib_check_last_rows")
