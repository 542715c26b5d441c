"""What stands in the way of lowering a loop, said in the words of its body.

The analysis that lowers loops stops at the first thing it does not know. Here it is run again; the
value that stopped it is cut out of the body, as if it came from outside, and it goes on. What that
value itself is computed from is searched for more Ops that the analysis does not follow.
"""

from __future__ import annotations

from pytensor.graph.basic import Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import Subtensor

from scanlib.analysis.scalar_body import NotElementwiseError, scalar_loop
from scanlib.analysis.scalar_values import ScalarValues
from scanlib.explain.data import Obstacle
from scanlib.explain.names import titled
from scanlib.ops.loop import Loop, Sequence
from scanlib.rewrites.lower.lower_elementwise import specialize_body
from scanlib.rewrites.lower.lower_linear import explain_linear

MAX_OBSTACLES = 8
MAX_OPERANDS = 3

# What an Op does, by the name of its class.
_ACTIONS = {
    "multiplies matrices": ("Dot", "BatchedDot", "Gemv", "Gemm", "Ger", "Dot22", "Dot22Scalar"),
    "reads items by index": ("Subtensor", "AdvancedSubtensor", "AdvancedSubtensor1"),
    "writes items by index": ("IncSubtensor", "AdvancedIncSubtensor", "AdvancedIncSubtensor1"),
    "joins arrays": ("Join", "MakeVector"),
    "takes an array apart": ("Split",),
    "reshapes an array": ("Reshape",),
    "checks a condition": ("CheckAndRaise", "Assert"),
}
_DRAWS = "draws random numbers"
_MODULES = (
    ("pytensor.tensor.random", _DRAWS),
    ("pytensor.tensor._linalg", "does linear algebra"),
    ("pytensor.tensor.slinalg", "does linear algebra"),
    ("pytensor.tensor.nlinalg", "does linear algebra"),
    ("pytensor.tensor.linalg", "does linear algebra"),
    ("pytensor.sparse", "works on a sparse matrix"),
)


def why_not_elementwise(loop: Loop) -> list[Obstacle]:
    """Return why a loop with named parts is not elementwise; empty if it is. `loop` is edited."""
    specialize_body(loop)
    obstacles: list[Obstacle] = []
    for _ in range(MAX_OBSTACLES):
        try:
            scalar_loop(loop)
        except NotElementwiseError as error:
            if not _is_unknown(error.variable):
                # After a cut, the shapes of a body may mislead: only the first word counts.
                return obstacles or [Obstacle(None, str(error)), *_draws(loop)]
            beneath = _unfollowed(_source(error.variable).owner.inputs)
            obstacles += [_obstacle(loop, _source(v)) for v in [error.variable, *beneath]]
            _cut(loop, error.variable)
        else:
            break
    return list(dict.fromkeys(obstacles))[:MAX_OBSTACLES]


def why_not_linear(loop: Loop) -> list[Obstacle]:
    """Return why a loop with named parts is no matrix recurrence; empty if it is."""
    reason = explain_linear(loop)
    return [] if reason is None else [Obstacle(None, f"no matrix recurrence either: {reason}")]


def _is_unknown(variable: Variable | None) -> bool:
    """Whether a value that stopped the analysis is the result of an Op without a rule."""
    node = None if variable is None else variable.owner
    return node is not None and not is_followed(node.op)


def is_followed(op: Op) -> bool:
    """Whether the analysis has a rule for the values of an Op."""
    rules = ScalarValues.__dict__["convert_node"].dispatcher
    return rules.dispatch(type(op)) is not rules.dispatch(object) and not isinstance(
        op, CheckAndRaise
    )


def _draws(loop: Loop) -> list[Obstacle]:
    """Return the random draws of a step: with them come carries that are no tensors."""
    found = _unfollowed([value for _, value in _results(loop)])
    drawn = [v for v in found if _action(v.owner.op) == _DRAWS]
    return list(dict.fromkeys(_obstacle(loop, v) for v in drawn))


def _unfollowed(values: list[Variable]) -> list[Variable]:
    """Return what `values` depend on, more than by shapes, whose Ops the analysis does not
    follow, the nearest first."""
    found: list[Variable] = []
    pending = list(values)
    visited: set[Variable] = set()
    while pending:
        value = pending.pop(0)
        if value in visited or value.owner is None:
            continue
        visited.add(value)
        if isinstance(value.owner.op, Shape | Shape_i):
            continue
        if isinstance(value.owner.op, Alloc | SpecifyShape):
            pending.append(value.owner.inputs[0])
            continue
        if not is_followed(value.owner.op):
            found.append(value)
            value = _source(value)
        pending += value.owner.inputs
    return found


def _source(variable: Variable) -> Variable:
    """Return a value, or the result of the inner loop that it is a row or an item of."""
    source = variable
    while isinstance(source.owner.op, Subtensor) and source.owner.inputs[0].owner is not None:
        source = source.owner.inputs[0]
        if _is_loop(source.owner.op):
            return source
    return variable


def _is_loop(op: object) -> bool:
    name, module = type(op).__name__, type(op).__module__
    return name.endswith("Scan") and module.startswith(("scanlib.", "pytensor.scan"))


def _cut(loop: Loop, variable: Variable) -> None:
    """Let a value of the body come from outside."""
    row = variable.type(name=f"the result of {variable.owner.op}")
    loop.sequences.append(Sequence(variable, row))
    loop.substitute({variable: row})


def _obstacle(loop: Loop, variable: Variable) -> Obstacle:
    node = variable.owner
    op = getattr(node.op, "core_op", node.op) if isinstance(node.op, Blockwise) else node.op
    users = [name for name, value in _results(loop) if variable in ancestors([value])]
    who = _listed(users[:MAX_OPERANDS]) if users else None
    operands = [text for inp in node.inputs if (text := _operand(inp)) is not None]
    shown = operands[:MAX_OPERANDS] + ["…"] * (len(operands) > MAX_OPERANDS)
    action = _action(op)
    label = str(op) if _is_loop(op) else str(op).split("{")[0]
    reason = f"{action} ({label} of {_listed(shown)})" if shown else f"{action} ({label})"
    return Obstacle(who, reason)


def _action(op: object) -> str:
    """Return what an Op does that is no elementwise operation."""
    name, module = type(op).__name__, type(op).__module__
    for action, names in _ACTIONS.items():
        if name in names:
            return action
    for start, action in _MODULES:
        if module.startswith(start):
            return action
    if isinstance(op, CAReduce):
        return "reduces along an axis"
    if _is_loop(op):
        return "runs an inner loop"
    return "computes what is no elementwise operation"


def _results(loop: Loop) -> list[tuple[str, Variable]]:
    """Return what a step computes, each with its title."""
    found = [(f"the next value of {titled('state', p.name)}", p.next) for p in loop.states]
    found += [(f"the next value of {titled('carry', p.name)}", p.next) for p in loop.carries]
    found += [(titled("output", part.name), part.value) for part in loop.outputs]
    if loop.stop is not None:
        found.append(("the condition of `until`", loop.stop))
    return found


def _operand(variable: Variable) -> str | None:
    """Return how a message names an operand; None for a constant."""
    while variable.owner is not None and isinstance(variable.owner.op, DimShuffle):
        variable = variable.owner.inputs[0]
    if isinstance(variable, Constant):
        return None
    if variable.owner is None:
        return f"'{variable.name}'" if variable.name else "an array"
    leaves = [
        f"'{leaf.name}'"
        for leaf in dict.fromkeys(ancestors([variable]))
        if leaf.owner is None and not isinstance(leaf, Constant) and leaf.name
    ]
    if not leaves:
        return None
    shown = leaves[:MAX_OPERANDS] + ["…"] * (len(leaves) > MAX_OPERANDS)
    return f"f({', '.join(shown)})"


def _listed(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
