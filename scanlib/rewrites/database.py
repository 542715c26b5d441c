"""The order of scanlib's rewrites among PyTensor's, and nothing else."""

from typing import Any

from pytensor.compile.mode import optdb

from scanlib.ops.linker_features import MarkSteps, RememberLoops
from scanlib.ops.loop_rewrite import WhereLoopsAre
from scanlib.ops.lowered.found_results import take_found
from scanlib.rewrites.adopt.adopt import AdoptLoops
from scanlib.rewrites.inline import slice_whole_batch, write_out, write_out_batch
from scanlib.rewrites.lower.lower_bodies import INNER_POSITION, POSITION, LowerBodies
from scanlib.rewrites.lower.lower_elementwise import (
    LowerElementwiseLoops,
    StackTraces,
    SumsIntoLoops,
)
from scanlib.rewrites.lower.lower_linear import LowerLinearLoops
from scanlib.rewrites.lower.single_items import SplitItems
from scanlib.rewrites.lower.stable_bodies import StabilizeBodies
from scanlib.rewrites.newton.iterate import SolveByNewton
from scanlib.rewrites.over_time.written_rows import join_written_rows, pad_rows_of_loops
from scanlib.rewrites.pytensor_rewrites import FlattenLongSums
from scanlib.rewrites.simplify.parameter_checks import NAMES, ChecksInSteps
from scanlib.rewrites.simplify.redundant import fill_mask
from scanlib.rewrites.simplify.simplify import CheckLastRows, SimplifyLoops
from scanlib.rewrites.split.reuse import ReuseForwardValues, ReuseInnerLoops, StoreChoices
from scanlib.rewrites.split.split import SplitLoops
from scanlib.rewrites.split.undo_writes import UndoWrites

# Which modes run a rewrite: those of PyTensor that have one of these tags, or its name.
ALWAYS = ("fast_run", "fast_compile", "scanlib")
FAST = ("fast_run", "scanlib")
NUMBA = ("numba",)

# Position, name, rewrite, tags.
ORDER: tuple[tuple[float, str, Any, tuple[str, ...]], ...] = (
    # Before PyTensor's own rewrites of scans, at 0.05; the first is for modes that include it by
    # name, the second for the whole process.
    (0.04, "adopt", AdoptLoops(when_enabled=False), ()),
    (0.041, "adopt_if_enabled", AdoptLoops(when_enabled=True), ALWAYS),
    # Before all that reads how loops' sequences are cut.
    (0.045, "batched_lengths", WhereLoopsAre(slice_whole_batch), ALWAYS),
    # Nodes that hold graphs hide them from all that follows.
    (0.047, "inline", WhereLoopsAre(write_out, write_out_batch), FAST),
    # Before canonicalization, which does the same to the rest of the graph. The name of PyMC's
    # rewrite is the only tag: functions that ask for it get this one, too.
    *((0.05, name, ChecksInSteps(name), (name,)) for name in NAMES),
    # Derivatives are taken: what was found stands for itself.
    (0.054, "found_results", WhereLoopsAre(take_found, always=True), ALWAYS),
    # The loops of its iterations are simplified as others are.
    (0.057, "newton", SolveByNewton(), ALWAYS),
    # Before rewrites that call themselves for each term.
    (0.058, "long_sums", FlattenLongSums(), ALWAYS),
    # After the first merge, before canonicalization hides what reads a history.
    (0.06, "simplify", SimplifyLoops(), FAST),
    # Before canonicalization, which reads the items of arrays that are put together.
    (0.062, "items", SplitItems(), FAST),
    # Before PyTensor merges two indices into one.
    (0.07, "last_rows", CheckLastRows(), ALWAYS),
    # Masks for batches that no loop read are all true.
    (0.085, "ran_steps", WhereLoopsAre(fill_mask, always=True), ALWAYS),
    # Before loops are taken apart.
    (1.6, "remember_loops", RememberLoops(), NUMBA),
    (1.6, "remember_loops_in_c", RememberLoops(), ("fast_run", "cxx_only")),
    (1.601, "mark_steps", MarkSteps(), NUMBA),
    (1.601, "mark_steps_in_c", MarkSteps(), ("fast_run", "cxx_only")),
    # Canonicalization puts what is written into the same zeros into one chain.
    (1.602, "joined_rows", WhereLoopsAre(join_written_rows), FAST),
    # Sums are canonical by then; what they read may need no history any more.
    (1.605, "sums", SumsIntoLoops(), FAST),
    # Canonicalization and stabilization leave loops with fewer readers.
    (1.61, "simplify_late", SimplifyLoops(), FAST),
    # Before lowering, which would keep a loop of maps or of outer products alive.
    (1.615, "maps", SplitLoops(maps_only=True), FAST),
    # Before the elementwise lowering, which knows no matrices.
    (1.62, "linear", LowerLinearLoops(), FAST),
    # After all that makes bodies smaller.
    (1.65, "elementwise", LowerElementwiseLoops(), FAST),
    # On loops that are no kernels, before they are taken apart.
    (1.655, "reuse", ReuseForwardValues(), FAST),
    # Of arrays that more is read of than items.
    (1.657, "undo_writes", UndoWrites(), FAST),
    # What is no kernel as a whole; its parts are lowered.
    (1.66, "split", SplitLoops(), FAST),
    # On kernels: what one compared, another one need not.
    (1.665, "choices", StoreChoices(), FAST),
    # On loops that stay; others are recognized by the naive forms.
    (1.666, "stable_bodies", StabilizeBodies(), ALWAYS),
    # When bodies are what is compiled.
    (POSITION, "lower_bodies", LowerBodies(), FAST),
    # When inner loops say what they read of the arrays that they write into.
    (INNER_POSITION, "reuse_inner", ReuseInnerLoops(), FAST),
    # When no loop reads anything else of a history.
    (1.667, "stacked_traces", StackTraces(), ("jax",)),
    # After PyTensor's rewrites of indices, before in-place ones.
    (48.4, "padding", WhereLoopsAre(pad_rows_of_loops, always=True), ("fast_run", "numba", "jax")),
)

for position, name, rewrite, tags in ORDER:
    optdb.register(f"scanlib_{name}", rewrite, *tags, position=position)
