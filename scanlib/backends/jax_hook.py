"""Loads the JAX backend when PyTensor's JAX linker runs, and not before.

Registering a rule with PyTensor's JAX dispatch imports jax. Two rewrites that only the modes of
the JAX linker ask for (by the tag ``jax``) import it when such a mode rewrites a graph: the
linker always asks for them, and so does code that rewrites a graph with ``mode.JAX.optimizer`` and
hands it to `jax_funcify` itself, as PyMC does.
"""

import sys
from typing import Any

from pytensor.compile.mode import optdb
from pytensor.graph.fg import FunctionGraph

from scanlib.ops.execution import register_loader
from scanlib.ops.linker_features import (
    NeedsKnownLengths,
    TakesSteps,
    holds_scanlib_ops,
    needs_known_lengths,
)
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.lowered.associative_scan import AssociativeScan, combines
from scanlib.ops.lowered.found_results import as_batches, computes_all_steps

DISPATCH = "pytensor.link.jax.dispatch.basic"


def jax_backend() -> Any:
    """Return the JAX backend, imported where it has not been."""
    from scanlib.backends import jax

    return jax


class LoadJAX(LoopRewrite):
    """Import the JAX backend if the graph has loops; first of all rewrites."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if holds_scanlib_ops(fgraph):
            jax_backend()


class CombineInTrees(LoopRewrite):
    """Have rows under associative functions combined in a tree, before anything changes loops; what
    is computed at all steps at once (`ops.lowered.found_results`) becomes a batch."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        nodes = fgraph.toposort()
        if not any(combines(node.op) for node in nodes) or not jax_backend().combines_in_trees():
            return
        for node in nodes:
            if combines(node.op):
                made = AssociativeScan(node.op).make_node(*node.inputs).outputs
            elif computes_all_steps(node):
                made = as_batches(node)
            else:
                continue
            pairs = zip(node.outputs, made, strict=True)
            fgraph.replace_all_validate(list(pairs), import_missing=True)


class MarkLoops(LoopRewrite):
    """Mark graphs that have loops, before any is taken apart; adopted ones are there by now."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if holds_scanlib_ops(fgraph):
            fgraph.attach_feature(NeedsKnownLengths())
            if jax_backend().takes_steps():
                fgraph.attach_feature(TakesSteps(in_cache=False))


class PrepareForJAX(LoopRewrite):
    """Make static what JAX must know when it compiles; before fusion mixes it with other work."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if needs_known_lengths(fgraph) or holds_scanlib_ops(fgraph):
            from scanlib.backends.jax.prepare import prepare

            prepare(fgraph)


def load_where_dispatch_is() -> None:
    """Import the JAX backend if PyTensor's JAX dispatch has been imported already."""
    if DISPATCH in sys.modules:
        jax_backend()


optdb.register("scanlib_load_jax", LoadJAX(), "jax", position=-0.5)
optdb.register("scanlib_trees_for_jax", CombineInTrees(), "jax", position=0.055)
optdb.register("scanlib_mark_loops_for_jax", MarkLoops(), "jax", position=0.057)
optdb.register("scanlib_prepare_for_jax", PrepareForJAX(), "jax", position=48.6)
register_loader(load_where_dispatch_is)
