"""`ElemwiseScan`: a loop whose step works on every channel by itself.

The canonical loop (see `scanlib.ops.scan`) whose body is elementwise: with channels `c`, an index
into the axes of a row,

    y_t[c] = f(x_t[c], y_{t-1}[c] … y_{t-K}[c], w[c])

where inputs may lack axes and are broadcast along them, and where accumulators

    s ← s + Σ_c g(x_t[c], …)

sum over time and over any of the channels' axes. The body is a graph of scalars, the same for all
channels, so that a kernel can keep the states of a step in registers and needs no temporaries.

A `Recurrence` says in addition that some of the states belong to a family of functions that is
closed under composition; a kernel may then work on several steps at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytensor.graph.basic import Variable
from pytensor.graph.fg import FrozenFunctionGraph
from pytensor.graph.traversal import ancestors

from scanlib.ops.c_linker import PrintedOp
from scanlib.ops.execution import LoopOp
from scanlib.ops.frozen_body import FlatGraph, HasFrozenBody
from scanlib.ops.graph import substitute
from scanlib.ops.lowered.channel_plan import ChannelPlan
from scanlib.ops.scan import Scan
from scanlib.ops.signature import OuterInputs, Signature

Axes = tuple[int | None, ...]


@dataclass(frozen=True)
class Layout:
    """Which axis of the channels each axis of a row is, of `ndim` axes; None if it has length one.

    A part that lacks an axis is broadcast along it. Of carries that are `sums` the body gives what
    a step adds, not the next value; they, and outputs, may be sums over axes of the channels.
    """

    ndim: int
    sequences: tuple[Axes, ...]
    states: tuple[Axes, ...]
    carries: tuple[Axes, ...]
    non_sequences: tuple[Axes, ...]
    outputs: tuple[Axes, ...]
    sums: tuple[bool, ...]
    carry_reductions: tuple[tuple[int, ...], ...]
    output_reductions: tuple[tuple[int, ...], ...]

    def of_body_inputs(self, signature: Signature) -> list[Axes]:
        """Return the channels' axes of the inputs of one step."""
        groups = self.sequences, self.states, self.carries, self.non_sequences
        return signature.of_body_inputs(OuterInputs(None, *map(list, groups)))


@dataclass(frozen=True)
class Term:
    """One term of a linear next value: the value of `part` at `tap`, times an element.

    `coefficient` is the position of the element, or None for one.
    """

    part: int
    tap: int
    coefficient: int | None


@dataclass(frozen=True)
class Recurrence:
    """Parts of a loop that depend on one another and belong to one recurrence family.

    Functions of a family are closed under composition. The `elements`, a graph from the body's
    inputs that does not read the recurrent parts, select one at each step. `terms` are those of
    each part's next value in the affine family; in families of one state its one term, with the
    element that acts on the state directly. `constants` are the elements that stand alone in each
    part's next value, None where there is none; in other families the further elements, in the
    order in which the family's module writes them.
    """

    family: str
    parts: tuple[int, ...]
    elements: FrozenFunctionGraph
    terms: tuple[tuple[Term, ...], ...]
    constants: tuple[int | None, ...]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"elements": FlatGraph.of(self.elements)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state | {"elements": state["elements"].frozen()})


class ElemwiseScan(HasFrozenBody, LoopOp, PrintedOp):
    """An elementwise loop, lowered from a `Scan` of the same inputs and outputs.

    The `scan` answers for shapes and lengths; `body` is one step of one channel, a graph of scalars
    in the order of its signature. There are no `recurrences` if some part is of no family; each
    one's elements depend on earlier ones only. `notes` has for each state and carry a family, or
    what stands in its way. The values of an `exact` one are rounded as its operations are, one by
    one.
    """

    __props__ = ("scan", "body", "layout", "recurrences", "exact")

    def __init__(
        self,
        scan: Scan,
        body: FrozenFunctionGraph,
        layout: Layout,
        recurrences: tuple[Recurrence, ...] = (),
        notes: tuple[str, ...] = (),
        exact: bool = False,
    ) -> None:
        scan.signature.split_body_inputs(body.inputs)
        scan.signature.split_body_outputs(body.outputs)
        self.scan = scan
        self.signature = scan.signature
        self.body = body
        self.layout = layout
        self.recurrences = recurrences
        self.notes = notes
        self.exact = exact
        self._runners: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_runners": {}}

    def __str__(self) -> str:
        inside = str(self.scan)[len("Scan{") : -1]
        families = ", ".join(dict.fromkeys(r.family for r in self.recurrences))
        return f"ElemwiseScan{{{inside}{': ' + families if families else ''}}}"

    def elements_of(
        self, number: int, inputs: Sequence[Variable]
    ) -> tuple[list[Variable], dict[Variable, int]]:
        """Return the elements of recurrence `number`, for a kernel, and what of them is `scanned`;
        they are computed from `inputs` in the place of the body's.

        Next values of parts of earlier recurrences are scanned. A kernel has to read them where it
        stored them: computed anew they would differ by rounding, and a running maximum of a state
        would not be equal to any of its values.
        """
        elements = self.recurrences[number].elements
        results = self.signature.split_body_outputs(self.body.outputs)
        nexts = [*results.states, *results.carries]
        above = set(ancestors(elements.outputs))
        known = [
            part
            for recurrence in self.recurrences[:number]
            for part in recurrence.parts
            if nexts[part] in above and nexts[part].owner is not None
        ]
        values = [*elements.outputs, *(nexts[part] for part in known)]
        found = substitute(values, dict(zip(elements.inputs, inputs, strict=True)))
        count = len(elements.outputs)
        return found[:count], dict(zip(found[count:], known, strict=True))

    def plan(self) -> ChannelPlan:
        """Return which results of the body share which loops over channels."""
        inner = self.signature.split_body_inputs(self.body.inputs)
        result = self.signature.split_body_outputs(self.body.outputs)
        return ChannelPlan(self.signature, self.layout, inner, result)

    def outer_input_types(self) -> list[Any]:
        """Return the least specific type of each input, with the dtype that the body reads."""
        types = self.scan.outer_input_types()
        inner = self.signature.split_body_inputs(self.body.inputs)
        states = [taps[0] for taps in inner.taps]
        read = [*inner.rows, *states, *inner.carries, *inner.non_sequences]
        first = len(types) - len(read)

        def typed(type_: Any, dtype: str) -> Any:
            return type_ if getattr(type_, "dtype", dtype) == dtype else type_.clone(dtype=dtype)

        pairs = zip(types[first:], read, strict=True)
        return types[:first] + [typed(type_, value.type.dtype) for type_, value in pairs]
