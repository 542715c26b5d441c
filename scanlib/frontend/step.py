"""The step function: calling it, reading what it returns, finding what it captures."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable, collect_new_shareds
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import ancestors, toposort
from pytensor.graph.utils import MissingInputError
from pytensor.scan.utils import until as classic_until

from scanlib.ops.graph import depends_on, is_tensor


class until:  # noqa: N801
    """Mark the condition that ends a loop.

    A step function returns it last. The loop stops after the step in which the condition is
    true; that step's values are part of the result.

    Parameters
    ----------
    condition : Variable or array_like
        A scalar. Anything but zero is true.

    Raises
    ------
    TypeError
        If the condition is not a scalar.

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> limit = pt.scalar("limit")
    >>> powers = scanlib.scan(
    ...     lambda power, limit: (power * 2, scanlib.until(power * 2 > limit)),
    ...     outputs_info=pt.constant(1.0),
    ...     non_sequences=limit,
    ...     n_steps=1024,
    ...     return_updates=False,
    ... )
    >>> print(pytensor.function([limit], powers)(45))
    [ 2.  4.  8. 16. 32. 64.]
    """

    def __init__(self, condition: Any) -> None:
        self.condition = pt.as_tensor_variable(condition)
        if self.condition.type.ndim != 0:
            raise TypeError(f"the condition of `until` must be a scalar, got {self.condition.type}")


@dataclass
class StepResult:
    """What one call of a step function returned."""

    outputs: list[Variable]
    updates: dict[SharedVariable, Any]
    stop: Variable | None
    new_shared: list[SharedVariable]


def call_step(fn: Callable[..., Any], arguments: Sequence[Variable]) -> StepResult:
    """Call a step function and sort what it returns."""
    with collect_new_shareds() as new_shared:
        returned = fn(*arguments)
    outputs, updates, stop = _sort_returned(returned)
    return StepResult(outputs, updates, stop, list(new_shared))


def _is_condition(value: Any) -> bool:
    return isinstance(value, until | classic_until)


def _is_updates(value: Any) -> bool:
    if isinstance(value, dict):
        return True
    return (
        isinstance(value, list | tuple)
        and len(value) > 0
        and all(
            isinstance(pair, list | tuple)
            and len(pair) == 2
            and isinstance(pair[0], SharedVariable)
            for pair in value
        )
    )


def _sort_returned(returned: Any) -> tuple[list[Variable], dict[Any, Any], Variable | None]:
    """Split a step's return value into outputs, updates and condition."""
    if returned is None:
        return [], {}, None
    if _is_updates(returned) or _is_condition(returned) or isinstance(returned, Variable):
        returned = [returned]
    if not isinstance(returned, list | tuple):
        raise TypeError(_not_a_variable(returned))
    items = list(returned)
    stop = None
    if items and _is_condition(items[-1]):
        stop = items.pop().condition
    if any(_is_condition(item) for item in items):
        raise ValueError("`until` must be the last thing that the step function returns")
    updates: dict[Any, Any] = {}
    outputs: list[Any] = []
    structured = len(items) <= 2 and any(isinstance(item, list | tuple | dict) for item in items)
    for item in items:
        if _is_updates(item):
            updates.update(dict(item))
        elif structured and isinstance(item, list | tuple):
            outputs.extend(item)
        else:
            outputs.append(item)
    for output in outputs:
        if _is_condition(output):
            raise ValueError("`until` must be the last thing that the step function returns")
        if not isinstance(output, Variable):
            raise TypeError(_not_a_variable(output))
    return outputs, updates, stop


def _not_a_variable(value: Any) -> str:
    return (
        "a step function returns PyTensor variables, then updates of shared variables, then "
        f"`until`; got {value!r} of type {type(value).__name__}. "
        "Wrap constants with pytensor.tensor.constant"
    )


def read_updates(result: StepResult, values: Iterable[Variable]) -> dict[SharedVariable, Variable]:
    """Return the update of every shared variable that changes from step to step.

    Those are the variables that the step names in its updates, and those it created itself
    (a `RandomStream` does) that carry a default update.
    """
    updates: dict[SharedVariable, Variable] = {}
    for shared, value in result.updates.items():
        if not isinstance(shared, SharedVariable):
            raise TypeError(
                f"the step function returned an update for {shared!r}, which is not a shared "
                "variable; use outputs_info for values that are carried from step to step"
            )
        updates[shared] = _check_update(shared, value)
    used = set(ancestors([*values, *updates.values()]))
    for shared in result.new_shared:
        default = shared.default_update
        if shared in used and shared not in updates and default is not None:
            updates[shared] = _check_update(shared, default)
        if shared in used and default is not None:
            # Otherwise compiling would pick up an update that reads variables of the step.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                shared.default_update = None
    return updates


def _check_update(shared: SharedVariable, value: Any) -> Variable:
    try:
        if not isinstance(value, Variable):
            return shared.type.filter_variable(value)
        if is_tensor(shared) and is_tensor(value):
            if shared.type.dtype == value.type.dtype and shared.type.is_super(value.type):
                return value
            if shared.type.dtype == value.type.dtype and shared.type.ndim == value.type.ndim:
                return pt.specify_shape(value, shared.type.shape)
        elif shared.type.is_super(value.type):
            return value
    except (TypeError, ValueError):
        pass
    came = getattr(value, "type", type(value).__name__)
    raise TypeError(
        f"the update of shared variable {shared} has type {came}, but the variable has type "
        f"{shared.type}; cast the update or change the variable's type"
    )


def captured_variables(
    outputs: Sequence[Variable], placeholders: Sequence[Variable]
) -> list[Variable]:
    """Return the variables that a step reads from outside: the largest expressions that do
    not depend on the step. They become inputs of the loop, so they are computed once."""
    dependent = depends_on(outputs, placeholders)
    found: dict[Variable, None] = {}

    def visit(variable: Variable) -> None:
        if variable not in dependent and not isinstance(variable, Constant):
            found[variable] = None

    for output in outputs:
        visit(output)
    for node in toposort(outputs, blockers=list(placeholders)):
        if any(out in dependent for out in node.outputs):
            for inp in node.inputs:
                visit(inp)
    return list(found)


def check_strict(captured: Sequence[Variable], non_sequences: Sequence[Variable]) -> None:
    """Raise if a step reads outer variables that were not passed as `non_sequences`.

    Raises
    ------
    MissingInputError
        Naming the variables.
    """
    allowed = set(non_sequences)
    leaves = [
        variable
        for variable in ancestors(captured, blockers=non_sequences)
        if variable.owner is None and not isinstance(variable, Constant) and variable not in allowed
    ]
    if leaves:
        names = ", ".join(str(leaf) for leaf in leaves)
        raise MissingInputError(
            f"with strict=True the step function may only use what it is given, but it also "
            f"reads {names}; add this to non_sequences or pass strict=False"
        )
