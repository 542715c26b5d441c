"""What stands in the way of lowering a loop, said in the words of its body, and what to do."""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors, walk
from pytensor.tensor.basic import Alloc, Split
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib.analysis.scalar_body import NotElementwiseError, scalar_loop
from scanlib.analysis.scalar_values import FOLLOWED
from scanlib.explain.data import Obstacle
from scanlib.explain.names import name_parts, step_results, titled
from scanlib.lengths.arrays import width_of
from scanlib.lengths.numbers import indices_of, is_range
from scanlib.ops.expressions import Expressions
from scanlib.ops.graph import readers_of
from scanlib.ops.loop import Loop
from scanlib.rewrites.lower.lower_elementwise import specialize_body
from scanlib.rewrites.lower.lower_linear import explain_linear
from scanlib.rewrites.lower.single_items import MOST_READ, MOST_WRITTEN, items_apart

MAX_OPERANDS = 3
_MANY_ITEMS = (
    f"a step reads more than {MOST_READ} single items of arrays, or writes more than "
    f"{MOST_WRITTEN} of one, which is faster step by step"
)
DRAWS = "random draws"


class Work(NamedTuple):
    """What some Ops do that is no elementwise operation, and what their user can do about it."""

    noun: str
    does: str
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    action: str | None = None


_WORKS = (
    Work(
        *("matrix products", "multiplies matrices"),
        ("Dot", "BatchedDot", "Gemv", "Gemm", "Ger", "Dot22", "Dot22Scalar"),
    ),
    Work(
        *("indexing", "reads items by index"),
        ("Subtensor", "AdvancedSubtensor", "AdvancedSubtensor1"),
    ),
    Work(
        *("assignment by index", "writes items by index"),
        ("IncSubtensor", "AdvancedIncSubtensor", "AdvancedIncSubtensor1"),
    ),
    Work("joining", "joins arrays", ("Join", "MakeVector")),
    Work("splitting", "takes an array apart", ("Split",)),
    Work("reshaping", "reshapes an array", ("Reshape",)),
    Work(
        *("a check", "checks a condition", ("CheckAndRaise", "Assert")),
        action="remove the check from the step once the loop works, and check its results instead",
    ),
    Work(
        *("printing", "prints a value", ("Print",)),
        action="remove Print from the step once the loop works",
    ),
    Work(
        *(DRAWS, "draws random numbers"),
        modules=("pytensor.tensor.random",),
        action="draw the random numbers for all steps before the loop and pass them as sequences, "
        "where their distribution does not depend on the state (a normal draw around the state "
        "is the state plus a scaled standard normal draw): the step may then be fused",
    ),
    Work(
        *("linear algebra", "does linear algebra"),
        modules=tuple(f"pytensor.tensor.{name}linalg" for name in ("", "_", "s", "n")),
    ),
    Work("sparse matrices", "works on a sparse matrix", modules=("pytensor.sparse",)),
)
_STACK = (
    "return what each step writes, as the y of scanlib.loop, in place of writing it into an array "
    "at the step's own place: outputs are stacked over time, and what later steps read of them is "
    "the carry, with scanlib.lags of several steps back; linear and other recurrences are "
    "recognized then"
)
_LENGTH = (
    "say how long the slice is, if no step cuts it off where the array ends, with "
    "pt.specify_shape(h[k:k+3], 3): it is read in place then"
)
_SUM = Work("sums over a row", "reduces along an axis", ("LogSumExp",))
_LOOP = Work("an inner loop", "runs an inner loop")
_ARRAY = Work("array operations", "computes what is no elementwise operation")
_OWN = Work(
    *("an operation of your own", "computes what scanlib does not know"),
    action="write the operation with functions of pytensor.tensor, if you can",
)


def obstacles_of(node: Apply, rewrites: Collection[str | None]) -> tuple[list[Obstacle], list[str]]:
    """Return why a `Scan` was not lowered, and nouns for what its steps consist of. `rewrites` are
    those that went through the function's loops."""
    apart, again = items_apart(node), Loop.from_node(node)
    loop = Loop.from_node(node) if apart is None else apart
    for own in (loop, again):
        name_parts(own)
    nouns, obstacles = _unfollowed(loop)
    specialize_body(loop)
    try:
        scalar_loop(loop)
    except NotElementwiseError as error:
        obstacles = obstacles or [Obstacle(None, str(error))]
    else:
        if apart is not None and items_apart(node, limited=True) is None:
            return [Obstacle(None, _MANY_ITEMS)], nouns
        rewrite = "elementwise" if apart is None else "items"
        return [_not_applied(rewrite, "scanlib__lower", rewrites)], nouns
    linear = explain_linear(again.apply().node)
    if linear is None:
        return [_not_applied("linear", "scanlib__linear", rewrites)], nouns
    return [*obstacles, Obstacle(None, f"no matrix recurrence either: {linear}")], nouns


def _not_applied(rewrite: str, flag: str, rewrites: Collection[str | None]) -> Obstacle:
    """Return why a rewrite that fits a loop was not applied to it."""
    if not getattr(config, flag):
        reason = f"lowering is switched off: the flag {flag} is False"
        return Obstacle(None, reason, f"set the flag {flag} to True")
    name = f"scanlib_{rewrite}"
    if name not in rewrites:
        reason = f"the mode leaves out the rewrite {name} (FAST_COMPILE does)"
        return Obstacle(None, reason, "compile in the default mode")
    return Obstacle(
        None,
        f"the loop was of another form when the rewrite {name} ran (its step held a loop, for "
        f"example), or the flag {flag} was False when the function was compiled",
    )


def work_of(op: Op) -> Work:
    """Return what an Op does that is no elementwise operation."""
    op = op.core_op if isinstance(op, Blockwise) else op
    name, module = type(op).__name__, type(op).__module__
    for work in _WORKS:
        if name in work.names or module.startswith(work.modules or ("-",)):
            return work
    if name.endswith("Scan") and module.startswith(("scanlib.", "pytensor.scan")):
        return _LOOP
    if isinstance(op, CAReduce) or name in _SUM.names:
        return _SUM
    return _ARRAY if module.startswith(("pytensor.", "scanlib.")) else _OWN


def _unfollowed(loop: Loop) -> tuple[list[str], list[Obstacle]]:
    """Return nouns for what a step does that is not elementwise, and an obstacle for each kind.

    Only what values depend on counts, not what gives shapes alone.
    """
    written = Expressions(depth=6)
    found: dict[Work, dict[Variable, list[str]]] = {}
    for role, name, result in step_results(loop):
        title = f"next value of {titled(role, name)}" if role == "state" else titled(role, name)
        for variable in _reached(result):
            if not isinstance(variable.owner.op, FOLLOWED):
                users = found.setdefault(work_of(variable.owner.op), {})
                users.setdefault(variable, []).append(title)
    obstacles = []
    for work, users in found.items():
        variable = next(iter(users))
        titles = list(dict.fromkeys(title for own in users.values() for title in own))
        action = work.action
        if any(_is_row_of_step(loop, own) for own in users):
            action = _STACK
        elif any(_may_end_early(loop, own) for own in users):
            action = _LENGTH
        text = f"{work.does} ({written.value(variable)})"
        obstacles.append(Obstacle(listed(titles, MAX_OPERANDS), text, action))
    return [work.noun for work in found], obstacles


def _is_row_of_step(loop: Loop, variable: Variable) -> bool:
    """Whether a step puts a value into an array at the place that the number of the step says."""
    node = variable.owner
    if not isinstance(node.op, IncSubtensor) or not node.op.set_instead_of_inc:
        return False
    read = set(ancestors(node.inputs[2:])).intersection(loop.varying_inputs())
    rows = {sequence.row for sequence in loop.sequences}
    return read <= rows and any(
        sequence.row in read and is_range(sequence.outer) for sequence in loop.sequences
    )


def _may_end_early(loop: Loop, variable: Variable) -> bool:
    """Whether a step reads as many items at a place that it computes as there are until the array
    ends, a constant number at most."""
    node = variable.owner
    if not isinstance(node.op, Subtensor):
        return False
    slices = [index for index in indices_of(node) if isinstance(index, slice)]
    is_computed = not set(ancestors(node.inputs[1:])).isdisjoint(loop.varying_inputs())
    if not is_computed or all(width_of(index) is None for index in slices):
        return False
    readers = readers_of(loop.body_outputs())[variable]
    return not all(reader and isinstance(reader.op, SpecifyShape) for reader in readers)


def _reached(result: Variable) -> Iterable[Variable]:
    """Return the computed values that a result depends on, but for shapes, the nearest first."""
    others, passed = (Shape, Shape_i), (Alloc, SpecifyShape)
    sized = (*passed, Reshape, Split)

    def inputs_of(value: Variable) -> list[Variable]:
        if value.owner is None or isinstance(value.owner.op, others):
            return []
        inputs = value.owner.inputs
        return inputs[:1] if isinstance(value.owner.op, sized) else inputs

    found = (value for value in walk([result], inputs_of) if value.owner is not None)
    return (value for value in found if not isinstance(value.owner.op, others + passed))


def listed(words: list[str], most: int = 99) -> str:
    """Return words as an enumeration."""
    words = words[:most] + ["others"] * (len(words) > most)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
