"""The order of scanlib's rewrites among PyTensor's, and nothing else.

========  ===============================  ====================================================
position  rewrite                          why there
========  ===============================  ====================================================
0.039     ``scanlib_remember``             `scanlib.explain` shows loops as they were written
0.04      ``scanlib_adopt``,               before PyTensor's own rewrites of scans, at 0.05
          ``scanlib_adopt_if_enabled``
0.045     ``scanlib_batched_lengths``      before all that reads how loops' sequences are cut
0.047     ``scanlib_inline``               nodes that hold graphs hide them from all that follows
0.05      ``scanlib_`` and the name of   before canonicalization, which does the same to the
          PyMC's rewrite of checks         rest of the graph
0.054     ``scanlib_found_results``        derivatives are taken: what was found stands for itself
0.055     ``scanlib_associative_to_loop``  before all that knows loops; backends that combine in
                                           a tree leave it out
0.057     ``scanlib_newton``               the loops of its iterations are simplified as others are
0.058     ``scanlib_long_sums``            before rewrites that call themselves for each term
0.06      ``scanlib_simplify``             after the first merge, before canonicalization hides
                                           what reads a history
0.07      ``scanlib_last_rows``            before PyTensor merges two indices into one
0.08      ``scanlib_starts``               starts of segments that no nest of loops gave are slices
0.085     ``scanlib_ran_steps``            masks for batches that no loop read are all true
1.6       ``scanlib_step_products``        before what writes products of all steps
1.605     ``scanlib_sums``                 sums are canonical by then; what they read may need no
                                           history any more
1.61      ``scanlib_simplify_late``        canonicalization and stabilization leave loops with
                                           fewer readers
1.615     ``scanlib_maps``                 before lowering, which would keep a loop of maps or
                                           of outer products alive
1.62      ``scanlib_linear``               before the elementwise lowering, which knows no matrices
1.65      ``scanlib_elementwise``          after all that makes bodies smaller
1.655     ``scanlib_reuse``                on loops that are no kernels, before they are taken apart
1.66      ``scanlib_split``                what is no kernel as a whole; its parts are lowered
1.661     ``scanlib_split_numba``          the same with factorizations, whose batches only numba
                                           compiles (and evaluates for zero steps)
1.665     ``scanlib_choices``              on kernels: what one compared, another one need not
48.4      ``scanlib_padding``              after PyTensor's rewrites of indices, before in-place
                                           ones
========  ===============================  ====================================================
"""

from pytensor.compile.mode import optdb

from scanlib.ops.loop_rewrite import WhereLoopsAre
from scanlib.ops.lowered.found_results import take_found
from scanlib.rewrites.adopt.adopt import AdoptLoops
from scanlib.rewrites.inline import write_out
from scanlib.rewrites.long_sums import FlattenLongSums
from scanlib.rewrites.lower.absorb_sums import SumsIntoLoops
from scanlib.rewrites.lower.lower_elementwise import LowerElementwiseLoops
from scanlib.rewrites.lower.lower_linear import LowerLinearLoops
from scanlib.rewrites.newton.iterate import SolveByNewton
from scanlib.rewrites.padding import pad_rows_of_loops
from scanlib.rewrites.simplify.associative_to_loop import AssociativeToLoop
from scanlib.rewrites.simplify.batched_lengths import slice_whole_batch
from scanlib.rewrites.simplify.checkpointed_loops import slice_starts
from scanlib.rewrites.simplify.parameter_checks import NAMES, ChecksInSteps
from scanlib.rewrites.simplify.simplify import CheckLastRows, SimplifyLoops
from scanlib.rewrites.simplify.unused import fill_mask
from scanlib.rewrites.split.allow_products import AllowStepProducts
from scanlib.rewrites.split.reuse import ReuseForwardValues
from scanlib.rewrites.split.split import SplitLoops
from scanlib.rewrites.split.stored_choices import StoreChoices
from scanlib.rewrites.written_loops import RememberLoops

optdb.register(
    "scanlib_remember", RememberLoops(), "fast_run", "fast_compile", "scanlib", position=0.039
)
# The first is for modes that include it by name, the second for the whole process.
optdb.register("scanlib_adopt", AdoptLoops(when_enabled=False), position=0.04)
optdb.register(
    "scanlib_adopt_if_enabled",
    AdoptLoops(when_enabled=True),
    "fast_run",
    "fast_compile",
    "scanlib",
    position=0.041,
)
optdb.register(
    "scanlib_batched_lengths",
    WhereLoopsAre(slice_whole_batch),
    "fast_run",
    "fast_compile",
    "scanlib",
    position=0.045,
)
optdb.register("scanlib_inline", WhereLoopsAre(write_out), "fast_run", "scanlib", position=0.047)
for name in NAMES:
    # The name of PyMC's rewrite is the only tag: functions that ask for it get this one, too.
    optdb.register(f"scanlib_{name}", ChecksInSteps(name), name, position=0.05)
optdb.register(
    "scanlib_associative_to_loop",
    AssociativeToLoop(),
    "fast_run",
    "fast_compile",
    "scanlib",
    position=0.055,
)
optdb.register(
    "scanlib_found_results",
    WhereLoopsAre(take_found, always=True),
    "fast_run",
    "fast_compile",
    "scanlib",
    position=0.054,
)
optdb.register(
    "scanlib_newton", SolveByNewton(), "fast_run", "fast_compile", "scanlib", position=0.057
)
optdb.register(
    "scanlib_long_sums",
    FlattenLongSums(),
    "fast_run",
    "fast_compile",
    "scanlib",
    position=0.058,
)
optdb.register("scanlib_simplify", SimplifyLoops(), "fast_run", "scanlib", position=0.06)
optdb.register(
    "scanlib_last_rows", CheckLastRows(), "fast_run", "fast_compile", "scanlib", position=0.07
)
optdb.register(
    "scanlib_starts",
    WhereLoopsAre(slice_starts, always=True),
    "fast_run",
    "fast_compile",
    "scanlib",
    position=0.08,
)
optdb.register(
    "scanlib_ran_steps",
    WhereLoopsAre(fill_mask, always=True),
    "fast_run",
    "fast_compile",
    "scanlib",
    position=0.085,
)
optdb.register("scanlib_step_products", AllowStepProducts(), "numba", position=1.6)
optdb.register("scanlib_sums", SumsIntoLoops(), "fast_run", "scanlib", position=1.605)
optdb.register("scanlib_simplify_late", SimplifyLoops(), "fast_run", "scanlib", position=1.61)
optdb.register("scanlib_maps", SplitLoops(maps_only=True), "fast_run", "scanlib", position=1.615)
optdb.register("scanlib_linear", LowerLinearLoops(), "fast_run", "scanlib", position=1.62)
optdb.register("scanlib_elementwise", LowerElementwiseLoops(), "fast_run", "scanlib", position=1.65)
optdb.register("scanlib_reuse", ReuseForwardValues(), "fast_run", "scanlib", position=1.655)
optdb.register("scanlib_split", SplitLoops(), "fast_run", "scanlib", position=1.66)
optdb.register("scanlib_split_numba", SplitLoops(heavy=True), "numba", position=1.661)
optdb.register("scanlib_choices", StoreChoices(), "fast_run", "scanlib", position=1.665)
optdb.register(
    "scanlib_padding",
    WhereLoopsAre(pad_rows_of_loops, always=True),
    "fast_run",
    "numba",
    "jax",
    position=48.4,
)
