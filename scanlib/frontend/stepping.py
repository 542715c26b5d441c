"""Stepping through a loop in plain Python, one step at a time, on given data.

The step is evaluated operation by operation, without rewrites and without compiled code, so that
every value that it computes on its way can be looked at.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
from pytensor.compile.mode import Mode
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors, graph_inputs, io_toposort
from pytensor.graph.utils import MissingInputError

from scanlib.frontend.trees import variables_of
from scanlib.ops.expressions import Expressions, describe
from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Loop
from scanlib.ops.python_loop import PythonLoop
from scanlib.ops.scan import Scan

# In the order in which they are written, and nothing else.
_PLAIN = Mode(linker="py", optimizer=None)


@dataclass(frozen=True)
class Step:
    """One step of a loop.

    Attributes
    ----------
    number : int
        Which row of the sequences is read: 0 for the first step, unless the loop runs backwards.
    inputs : dict of str to value
        What the step was given, by name: rows of sequences, past values of states (``y[t-1]``),
        non-sequences. What has no name is called by its role and number.
    results : dict of str to value
        What the step returned, by name: the next values of states, and outputs.
    operations : tuple of (str, value)
        Every operation of the step as an expression of its inputs, with its value, in the order of
        computation.
    stops : bool
        Whether `until` ends the loop after this step.
    """

    number: int
    inputs: dict[str, Any]
    results: dict[str, Any]
    operations: tuple[tuple[str, Any], ...]
    stops: bool = False

    def first_not_finite(self) -> str | None:
        """Return the first input or operation that holds NaN or infinity, None if there is none."""
        for text, value in (*self.inputs.items(), *self.operations):
            array = np.asarray(value)
            if array.dtype.kind in "fc" and not np.isfinite(array).all():
                return text
        return None

    def __str__(self) -> str:
        lines = [f"step {self.number}{', the last (until)' * self.stops}"]
        for title, values in (
            ("given", self.inputs.items()),
            ("computed", self.operations),
            ("returned", self.results.items()),
        ):
            shown = [(name, str(value).replace("\n", " ")) for name, value in values]
            lines += [f"  {title:8}  {name} = {value}" for name, value in shown]
        return "\n".join(lines)


def step_through(result: Any, values: Mapping[Variable, Any] | None = None) -> Iterator[Step]:
    """Run a loop in plain Python and give every step with all values that it computes.

    For debugging: printing what a step does, setting breakpoints between steps, finding where NaN
    begins. Steps run when they are asked for, so a long loop may be left early.

    Parameters
    ----------
    result : tree of variable
        What `scanlib.scan`, `scanlib.loop` or a function like them returned, a part of it, or what
        is computed from one, such as ``y[-1]``. If several loops lead to it, the nearest is run.
    values : dict of variable to value, optional
        Values of the variables that the loop's arguments are computed from. Shared variables have
        their own.

    Yields
    ------
    Step
        Its `number`, `inputs`, `results`, `operations`; printed, it shows all of them.

    Raises
    ------
    TypeError
        If `result` holds what is no variable, or `values` is no dictionary.
    ValueError
        If no loop of scanlib leads to `result`, or a sequence is shorter than the loop.
    MissingInputError
        If `values` lacks a variable.

    Examples
    --------
    >>> import numpy as np, pytensor.tensor as pt, scanlib
    >>> x = pt.vector("x")
    >>> y = scanlib.scan(
    ...     lambda x, y: pt.sqrt(y) - x, sequences=x, outputs_info=np.float64(4.0),
    ...     return_updates=False,
    ... )
    >>> for step in scanlib.step_through(y, {x: np.array([1.0, 2.0, 0.5])}):
    ...     print(step.number, float(step.results["state 0"]), step.first_not_finite())
    0 1.0 None
    1 -1.0 None
    2 nan sqrt(state 0[t-1])
    """
    results = variables_of(
        result,
        "step_through: result must be what a loop returned",
        "; pass what scanlib.scan or scanlib.loop gave",
    )
    if values is not None and not isinstance(values, Mapping):
        raise TypeError(
            "step_through: values must be a dictionary from variables to their values, got "
            f"{type(values).__name__}"
        )
    for key in values or {}:
        if not isinstance(key, Variable):
            raise TypeError(
                f"step_through: values must be a dictionary from variables to their values, got "
                f"the key {key!r}; write {{x: value}} with the variable x, not its name"
            )
    return _steps(_nearest_loop(results), dict(values or {}))


def _nearest_loop(results: list[Variable]) -> Apply:
    """Return the loop that variables are computed by."""
    for variable in ancestors(results):
        if variable.owner is not None and isinstance(variable.owner.op, Scan):
            return variable.owner
    raise ValueError(
        "step_through: result is not computed by a loop of scanlib; pass what scanlib.scan "
        "returned (direct functions such as linear_scan have no step)"
    )


def _steps(node: Apply, values: dict[Variable, Any]) -> Iterator[Step]:
    loop = Loop.from_node(node)
    roots = [v for v in graph_inputs(node.inputs, blockers=list(values)) if v not in values]
    missing = [v for v in roots if not isinstance(v, Constant | SharedVariable)]
    if missing:
        lacking = ", ".join(map(str, missing))
        raise MissingInputError(
            f"step_through: the loop is computed from {lacking}, of which values has none; give "
            f"{{{', '.join(f'{variable}: ...' for variable in missing)}}}"
        )
    given = pytensor.function(
        list(values), node.inputs, mode=_PLAIN, on_unused_input="ignore", name=loop.name
    )(*values.values())
    names, body, results = _name_inputs(loop), loop.body_inputs(), loop.body_outputs()
    computed = [
        out
        for node in io_toposort(body, results)
        for out in node.outputs
        if len(node.outputs) == 1 or is_tensor(out)
    ]
    walked = PythonLoop(node.op)
    walked.step = pytensor.function(
        body, [*results, *computed], mode=_PLAIN, on_unused_input="ignore"
    )
    written = Expressions(depth=len(computed), operands=len(computed) + 1)
    texts = [written.value(variable) for variable in computed]
    result_names = [node.op.labels.result(i) for i in range(len(node.outputs))]
    for number, inputs, found in walked.walk(*given):
        yield Step(
            number,
            dict(zip(names, inputs, strict=True)),
            dict(zip(result_names, found, strict=False)),
            tuple(zip(texts, found[len(results) :], strict=True)),
            loop.stop is not None and bool(found[len(results) - 1]),
        )


def _name_inputs(loop: Loop) -> list[str]:
    """Name the variables of a step as it is shown, and return the names in their order.

    What has no name, as the sequences of a gradient, is called by what it is computed from.
    """
    taken: set[str] = set()

    def told(part: Any, role: str) -> str:
        computed = None if isinstance(part.outer, Constant) else describe(part.outer)
        text = part.name or computed or role
        text = role if text in taken else text
        taken.add(text)
        return text

    for i, sequence in enumerate(loop.sequences):
        sequence.row.name = told(sequence, f"sequence {i}")
    for i, state in enumerate(loop.states):
        for offset, tap in state.taps.items():
            tap.name = f"{state.name or f'state {i}'}[t{offset}]"
    for i, carry in enumerate(loop.carries, len(loop.states)):
        carry.value.name = f"{carry.name or f'state {i}'}[t-1]"
    for i, item in enumerate(loop.non_sequences):
        item.inner.name = told(item, f"non-sequence {i}")
    return [variable.name or "" for variable in loop.body_inputs()]
