"""What all families share: the component they look at, and how its graph is walked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort

from scanlib._compat import freeze_graph
from scanlib.ops.lowered.elemwise_scan import Recurrence, Term


class NotInFamilyError(Exception):
    """A next value is not in a family; the message names what stands in the way."""


Step = Callable[[Apply, list[Any]], list[Any]]  # from the forms of a node's inputs to its outputs'


@dataclass
class Component:
    """Parts that depend on one another, in the body of one channel.

    `inputs` are all of the body's; `nexts` has the next value of each part, `taps` its past values,
    of which messages have the `names`.
    """

    inputs: list[Variable]
    nexts: dict[int, Variable]
    taps: dict[int, dict[int, Variable]]
    names: dict[Variable, str]

    def leaves(self) -> dict[Variable, tuple[int, int]]:
        """Return which part and tap each past value is."""
        return {v: (part, tap) for part, taps in self.taps.items() for tap, v in taps.items()}

    def propagate(self, start: Callable[[int, int], Any], step: Step) -> dict[int, Any]:
        """Return the form of each next value.

        `start` gives the form of a past value; `step` the forms of a node's outputs from those
        of its inputs, where None stands for an input that does not depend on the component.
        """
        forms: dict[Variable, Any] = {leaf: start(*where) for leaf, where in self.leaves().items()}
        for node in toposort(list(self.nexts.values())):
            given = [forms.get(inp) for inp in node.inputs]
            if any(form is not None for form in given):
                forms.update(zip(node.outputs, step(node, given), strict=True))
        return {part: forms.get(value) for part, value in self.nexts.items()}


@dataclass
class Elements:
    """Collects the elements of a recurrence, each once, in the dtype of the parts."""

    dtype: str
    values: list[Variable] = field(default_factory=list)

    def add(self, value: Variable | None) -> int | None:
        """Return the position of an element; None stays None."""
        if value is None:
            return None
        value = cast(value, self.dtype)
        for i, known in enumerate(self.values):
            if known is value or _equal_constants(known, value):
                return i
        self.values.append(value)
        return len(self.values) - 1

    def recurrence(
        self,
        family: str,
        component: Component,
        terms: tuple[tuple[Term, ...], ...],
        constants: tuple[int | None, ...],
    ) -> Recurrence:
        """Freeze the elements into a recurrence."""
        parts = tuple(component.nexts)
        elements = freeze_graph(component.inputs, self.values)
        return Recurrence(family, parts, elements, terms, constants)


def _equal_constants(a: Variable, b: Variable) -> bool:
    return isinstance(a, Constant) and isinstance(b, Constant) and a.data == b.data


def only_part(component: Component) -> int:
    """Return the part of a component of one state that reads one value back;
    `NotInFamilyError` if there are several, or more taps."""
    if len(component.nexts) > 1:
        raise NotInFamilyError("several states depend on one another")
    (part,) = component.nexts
    if set(component.taps[part]) != {-1}:
        raise NotInFamilyError("more than the value one step before is read")
    return part


def form_of_one(component: Component, start: Any, step: Step) -> tuple[int, str, Any]:
    """Return the only part of a component, its dtype, and the form of its next value.

    `start` is the form of its past value. `NotInFamilyError` if there are several states, taps or
    dtypes, or `step` finds no form.
    """
    part, dtype = only_part(component), common_dtype(component)
    return part, dtype, component.propagate(lambda *_: start, step)[part]


def common_dtype(component: Component) -> str:
    """Return the dtype of a component's parts; `NotInFamilyError` if they have several."""
    dtypes = {v.type.dtype for taps in component.taps.values() for v in taps.values()}
    if len(dtypes) != 1:
        raise NotInFamilyError(f"states of dtypes {sorted(dtypes)} depend on one another")
    return dtypes.pop()


def free_inputs(node: Apply, given: list[Any]) -> list[Variable]:
    """Return the inputs of a node that have no form, in the dtype of its result.

    The node converts them first: composed in their own dtype, small integers would wrap around,
    and truth values have no sign.
    """
    dtype = node.outputs[0].type.dtype
    free = [inp for inp, form in zip(node.inputs, given, strict=True) if form is None]
    return [_converted(inp, dtype) for inp in free]


def shifted(node: Apply, given: list[Any]) -> Any:
    """Return the form of a sum of its only input that has one; None if a node is anything else."""
    free, forms = free_inputs(node, given), [form for form in given if form is not None]
    if isinstance(node.op, ps.Sub) and given[0] is not None:
        free = [ps.neg(value) for value in free]
    elif not isinstance(node.op, ps.Add | ps.Identity):
        return None
    return reduce(lambda form, by: form.shifted(by), free, forms[0]) if len(forms) == 1 else None


def _converted(value: Variable, dtype: str) -> Variable:
    """Return a value in a dtype that holds it; in its own, if the dtype does not."""
    if value.type.dtype == dtype or not np.can_cast(value.type.dtype, dtype):
        return value
    return constant(value.data, dtype) if isinstance(value, Constant) else ps.cast(value, dtype)


def constant(value: Any, dtype: str) -> Variable:
    """Return a number in a dtype; minus one of an unsigned dtype is its largest number."""
    return ps.ScalarConstant(ps.get_scalar_type(dtype), np.asarray(value).astype(dtype)[()])


def cast(value: Variable, dtype: str) -> Variable:
    return value if value.type.dtype == dtype else ps.cast(value, dtype)


def kind(variable: Variable) -> str:
    """Return the kind of a variable's dtype, as NumPy's letter."""
    return np.dtype(variable.type.dtype).kind
