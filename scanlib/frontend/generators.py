"""Random generators that a step draws from and does not pass on.

A generator is a value like any other: a draw returns the number and the generator that follows.
A step that draws, but does not return what follows, has the same generator at every step, and so
the same numbers.
"""

from collections.abc import Mapping

from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.random.type import RandomType

from scanlib._compat import variable_number
from scanlib.ops.loop import Loop
from scanlib.ops.scan import Scan


def check_generators(
    loop: Loop,
    first: int,
    updates: Mapping[SharedVariable, Variable],
    places: Mapping[Variable, str],
    title: str,
) -> None:
    """Raise if a step draws from a generator that is the same at the next step.

    Numbers that were drawn before the step was called, and which it uses, are left alone: what the
    step made has a `variable_number` of `first` at least. `updates` are the next values of the
    shared variables that the step changes, which the loop does not have yet; `places` is what the
    user calls the variables that the step is given. The `ValueError` names the generator, with the
    lines to write.
    """
    after = {part.value: part.next for part in loop.carries} | dict(updates)
    values = ancestors([*loop.body_outputs(), *updates.values()])
    for node in dict.fromkeys(value.owner for value in values):
        if node is None or not _draws(node, first):
            continue
        for given in node.inputs:
            is_outside = given.owner is None or variable_number(given) < first
            stays = isinstance(given.type, RandomType) and after.get(given, given) is given
            if is_outside and stays:
                place, is_carried = places.get(given), given in after
                raise ValueError(f"{title}: {_same_numbers(given, place, is_carried, title)}")


def _draws(node: Apply, first: int) -> bool:
    """Whether a node was made in a step, and a generator comes out of it."""
    if not any(isinstance(x.type, RandomType) for x in node.outputs):
        return False
    is_written = not isinstance(node.op, Scan) or getattr(node.tag, "is_written", False)
    return is_written and variable_number(node.outputs[0]) >= first


def _same_numbers(generator: Variable, place: str | None, is_carried: bool, title: str) -> str:
    name = (generator.name or "rng").removesuffix("[t-1]")
    label = " ".join(filter(None, [generator.name and f"`{name}`", place and f"({place})"]))
    what, done = f"the generator {label or 'without a name'}", "does not return the next one"
    function = title.partition(" ")[0]
    draw = f"next_rng, draw = {name}.normal(...)"
    after, where = "return ..., next_rng", "outputs_info"
    if function == "loop":
        after, where = "return (..., next_rng), y", "init"
    elif function in ("map", "filter"):  # they have none
        where = "outputs_info of scanlib.scan"
    if is_carried:
        done = "returns it as it was"
    elif isinstance(generator, SharedVariable) and place is None:
        unnamed = "without a name (that of a draw without rng=, or of a loop in the step)"
        what = f"the shared generator {label or unnamed}"
        if function not in ("loop", "filter"):
            done, after = "does not return its update", f"return ..., {{{name}: next_rng}}"
            if not label:  # as distributions of PyMC have
                after += "  # with PyMC: ..., pymc.pytensorf.collect_default_updates([draw])"
        elif not label:
            draw += "  # with PyMC: pymc.Normal.dist(..., rng=rng, return_next_rng=True)"
    if not is_carried and "{" not in after:
        after += f"  # with {name} in {where}"
    lines = [f"    {draw}", f"    {after}"]
    return (
        f"the step draws from {what} and {done}, so every step would draw the same numbers; write\n"
        + "\n".join(lines)
        + "\nor, for the same numbers at every step, draw them before the loop"
    )
