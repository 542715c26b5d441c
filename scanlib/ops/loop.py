"""A loop taken apart: the one structure in which loops are built and changed.

`Loop` holds, for every sequence, state, carry, non-sequence and output of a canonical loop,
the outer variable beside the body variable it feeds. The front end, the derivatives, batching
and all rewrites fill in or edit a `Loop` and then call `Loop.apply`, which freezes the body
and makes the `Scan` node. Nobody slices flat lists by hand.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import ancestors, graph_inputs
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.type import TensorType

from scanlib._compat import copy_graph, freeze_graph
from scanlib.ops.checkpoint_schedules import Schedule
from scanlib.ops.expressions import describe
from scanlib.ops.graph import Variables, conform, substitute
from scanlib.ops.messages import Messages
from scanlib.ops.scan import RandomScan, Scan
from scanlib.ops.signature import Labels, OuterInputs, Signature


@dataclass(eq=False)
class Sequence:
    """An input read one row per step: `outer` of shape (T, ...), its `row` in the body."""

    outer: Variable
    row: Variable
    name: str | None = None


@dataclass(eq=False)
class State:
    """A value carried from step to step with its past rows.

    `initial` has shape (K, ...); `taps` maps ``-k`` to the body variable that holds the value
    `k` steps back; `next` is the body's new value.
    """

    initial: Variable
    taps: dict[int, Variable]
    next: Variable
    untraced: bool = False
    name: str | None = None

    @property
    def depth(self) -> int:
        return -min(self.taps)

    @property
    def type(self) -> TensorType:
        """The type of a row as a step reads it."""
        return next(iter(self.taps.values())).type

    def tap(self, offset: int) -> Variable:
        """Return the body variable of a tap, added where the body does not read it yet."""
        if offset not in self.taps:
            if -offset > self.depth:
                raise ValueError(f"tap {offset} lies beyond the state's {self.depth} rows")
            self.taps[offset] = self.type()
        return self.taps[offset]


@dataclass(eq=False)
class Carry:
    """A state of depth 1 that is never stored over time."""

    initial: Variable
    value: Variable
    next: Variable
    name: str | None = None
    depth: ClassVar[int] = 1

    @property
    def type(self) -> Any:
        """The type of the value."""
        return self.value.type

    @property
    def taps(self) -> dict[int, Variable]:
        """What a step reads of it, as of a state."""
        return {-1: self.value}

    def tap(self, offset: int) -> Variable:
        return self.taps[offset]


@dataclass(eq=False)
class NonSequence:
    """An input that every step sees whole."""

    outer: Variable
    inner: Variable
    name: str | None = None


@dataclass(eq=False)
class Output:
    """A value stacked over time that no later step reads."""

    value: Variable
    name: str | None = None

    @property
    def type(self) -> Any:
        """The type of a row."""
        return self.value.type


Part = State | Carry | Output  # what has a result; a part is equal to itself alone


class Results(NamedTuple):
    """The variables a loop computes, in the order of the loop's parts."""

    histories: list[Variable]
    carries: list[Variable]
    outputs: list[Variable]
    node: Apply


@dataclass
class Loop:
    """A canonical loop whose parts can be edited; see the module's text."""

    n_steps: Variable | None = None
    sequences: list[Sequence] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    carries: list[Carry] = field(default_factory=list)
    non_sequences: list[NonSequence] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    stop: Variable | None = None
    reverse: bool = False
    truncate_gradient: int = -1
    required_steps: int = 0
    name: str | None = None
    function: str = "scan"
    checkpoint: Schedule | None = None
    recompute: bool = False
    associative: bool = False

    @classmethod
    def from_op(cls, op: Scan, inputs: list[Variable]) -> "Loop":
        """Take a loop apart, with fresh body variables."""
        signature, labels = op.signature, op.labels
        body_inputs, body_outputs = copy_graph(op.body.inputs, op.body.outputs)
        outer = signature.split_inputs(inputs)
        inner = signature.split_body_inputs(body_inputs)
        result = signature.split_body_outputs(body_outputs)
        taps = [
            dict(zip(*own, strict=True)) for own in zip(signature.taps, inner.taps, strict=True)
        ]
        return cls(
            n_steps=outer.n_steps,
            sequences=list(map(Sequence, outer.sequences, inner.rows, labels.sequences)),
            states=list(
                map(State, outer.initials, taps, result.states, signature.untraced, labels.states)
            ),
            carries=list(map(Carry, outer.carries, inner.carries, result.carries, labels.carries)),
            non_sequences=list(
                map(NonSequence, outer.non_sequences, inner.non_sequences, labels.non_sequences)
            ),
            outputs=list(map(Output, result.outputs, labels.outputs)),
            stop=result.stop,
            reverse=signature.reverse,
            truncate_gradient=op.truncate_gradient,
            required_steps=signature.required_steps,
            name=op.name,
            function=labels.function,
            checkpoint=op.checkpoint,
            recompute=op.recompute,
            associative=op.associative,
        )

    @classmethod
    def from_node(cls, node: Apply) -> "Loop":
        """Take the loop of a node apart, one that was lowered as it was before."""
        return cls.from_op(node.op.scan, node.inputs)

    @property
    def recurrent(self) -> list[State | Carry]:
        """What is passed from step to step."""
        return [*self.states, *self.carries]

    @property
    def parts(self) -> list[Part]:
        """The parts that have a result, in the order of the results."""
        return [*self.states, *self.carries, *self.outputs]

    def signature(self) -> Signature:
        """Return the signature of the loop as it stands."""
        return Signature(
            n_sequences=len(self.sequences),
            taps=tuple(tuple(state.taps) for state in self.states),
            untraced=tuple(state.untraced for state in self.states),
            n_carries=len(self.carries),
            n_non_sequences=len(self.non_sequences),
            n_outputs=len(self.outputs),
            has_n_steps=self.n_steps is not None,
            has_stop=self.stop is not None,
            reverse=self.reverse,
            required_steps=self.required_steps,
        )

    def labels(self) -> Labels:
        """Return the names of the loop's parts."""
        return Labels(
            tuple(part.name for part in self.sequences),
            tuple(part.name for part in self.states),
            tuple(part.name for part in self.carries),
            tuple(part.name or describe(part.outer) for part in self.non_sequences),
            tuple(part.name for part in self.outputs),
            self.function,
        )

    def messages(self) -> Messages:
        """Return the texts of the errors that the loop may raise when it runs."""
        return Messages(self.signature(), self.labels(), self.name)

    def varying_inputs(self) -> list[Variable]:
        """Return the inputs of one step that have other values in other steps."""
        return [
            *(sequence.row for sequence in self.sequences),
            *(tap for state in self.states for tap in state.taps.values()),
            *(carry.value for carry in self.carries),
        ]

    def body_inputs(self) -> list[Variable]:
        """Return the inputs of one step in the signature's order."""
        return [*self.varying_inputs(), *(whole.inner for whole in self.non_sequences)]

    def sources(self) -> dict[Variable, tuple[Variable, int]]:
        """Return what the inputs of a step have their axes from, but for so many first ones."""
        return {
            **{part.row: (part.outer, 1) for part in self.sequences},
            **{tap: (part.initial, 1) for part in self.states for tap in part.taps.values()},
            **{part.value: (part.initial, 0) for part in self.carries},
            **{part.inner: (part.outer, 0) for part in self.non_sequences},
        }

    def body_outputs(self) -> list[Variable]:
        """Return the outputs of one step in the signature's order."""
        return [
            *(state.next for state in self.states),
            *(carry.next for carry in self.carries),
            *(output.value for output in self.outputs),
            *([self.stop] if self.stop is not None else []),
        ]

    def set_body_outputs(self, outputs: list[Variable]) -> None:
        """Give one step other results, in the signature's order."""
        parts = self.signature().split_body_outputs(outputs)
        for state, value in zip(self.states, parts.states, strict=True):
            state.next = value
        for carry, value in zip(self.carries, parts.carries, strict=True):
            carry.next = value
        for output, value in zip(self.outputs, parts.outputs, strict=True):
            output.value = value
        self.stop = parts.stop

    def rows_of_taps(self, histories: Iterable[Variable]) -> list[Sequence]:
        """Return what steps read of the states as sequences, where their histories are known."""
        return [
            Sequence(past_rows(history, state.depth, -offset, self.reverse), tap)
            for state, history in zip(self.states, histories, strict=True)
            for offset, tap in state.taps.items()
        ]

    def substitute(self, replacements: Mapping[Variable, Variable]) -> None:
        """Replace variables inside the body."""
        self.set_body_outputs(substitute(self.body_outputs(), replacements))

    def outer_inputs(self) -> list[Variable]:
        """Return the inputs of the loop in the signature's order."""
        groups = OuterInputs(
            self.n_steps,
            [sequence.outer for sequence in self.sequences],
            [state.initial for state in self.states],
            [carry.initial for carry in self.carries],
            [non_sequence.outer for non_sequence in self.non_sequences],
        )
        return self.signature().join_inputs(groups)

    def replace_outer(self, replacements: Mapping[Variable, Variable]) -> None:
        """Give the loop other inputs."""
        self.n_steps = None if self.n_steps is None else replacements[self.n_steps]
        for part in self.recurrent:
            part.initial = replacements[part.initial]
        given: list[Sequence | NonSequence] = [*self.sequences, *self.non_sequences]
        for one in given:
            one.outer = replacements[one.outer]

    def drop_unread_inputs(self) -> None:
        """Drop sequences and non-sequences that no step reads, but for what gives the length."""
        read = set(ancestors(self.body_outputs()))
        self.non_sequences = [part for part in self.non_sequences if part.inner in read]
        kept = [part for part in self.sequences if part.row in read]
        self.sequences = kept if kept or self.n_steps is not None else self.sequences[:1]

    def length(self) -> Variable:
        """Return the greatest number of steps the loop can take, as an int64 scalar."""
        if self.n_steps is not None:
            return pt.cast(self.n_steps, "int64")
        return self.sequences[0].outer.shape[0]

    def apply(self) -> Results:
        """Freeze the body and apply the loop to its outer variables."""
        for part in self.recurrent:
            part.next = conform(part.next, part.type)
        signature, inputs = self.signature(), self.outer_inputs()
        kind = RandomScan if any(isinstance(v.type, RandomType) for v in inputs) else Scan
        op = kind(
            signature,
            freeze_graph(self.body_inputs(), self.body_outputs()),
            truncate_gradient=self.truncate_gradient,
            name=self.name,
            labels=self.labels(),
            checkpoint=self.checkpoint,
            recompute=self.recompute,
            associative=self.associative,
        )
        node = op.make_node(*inputs)
        return Results(*signature.split_outputs(node.outputs), node)

    def results(self) -> dict[Part, Variable]:
        """Apply the loop; return the result of each part."""
        return dict(zip(self.parts, self.apply().node.outputs, strict=True))


def past_rows(history: Variable, depth: int, lag: int, reverse: bool) -> Variable:
    """Return the rows of a history that steps read, or with lag 0 write: one for each step."""
    first, last = (lag, lag - depth) if reverse else (depth - lag, -lag)
    return history[first or None : last or None]


def map_rows(
    rows: Iterable[tuple[Variable, Variable]], values: Variables, **labels: Any
) -> list[Variable]:
    """Return what each step of a loop without states computes: `rows` are arrays, and what stands
    for a row of each in `values`, which may read what is the same at all steps."""
    loop = Loop(sequences=[Sequence(*pair) for pair in rows], **labels)
    own = [part.row for part in loop.sequences]
    read = [v for v in graph_inputs(values, own) if v not in own and not isinstance(v, Constant)]
    inner = {v: v.type() for v in read}
    loop.non_sequences = list(map(NonSequence, inner, inner.values()))
    loop.outputs = [Output(v) for v in substitute(values, inner)]
    return loop.apply().outputs
