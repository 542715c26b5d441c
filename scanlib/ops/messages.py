"""The texts of run-time errors: one home, shared by the Python loop and the compiled one."""

from collections.abc import Iterable, Mapping

from pytensor.graph.basic import Apply, Variable
from pytensor.raise_op import CheckAndRaise

from scanlib.ops.errors import InitialRowsError, SequenceLengthError, StepCountError
from scanlib.ops.expressions import UNKNOWN, Expressions
from scanlib.ops.signature import BodyInputs, Labels, Signature

SPECIFIED_SHAPE = "SpecifyShape: axis {} has size {}, expected {}"


def loop_title(name: str | None, function: str = "scan") -> str:
    """Return what messages call a loop: the function that builds it, and its name if it has one."""
    return f"{function} `{name}`" if name and name != function else function


def not_converged(name: str | None, function: str) -> str:
    """Numbers: iterations, step with the largest residual, residual."""
    return (
        f"{_escaped(loop_title(name, function))}: Newton's method has not converged after {{}} "
        "iterations; the residual is largest at step {}, {:.3g}. Damp it (damping='adaptive'), "
        "allow for more max_iterations, or run the loop step by step then "
        "(otherwise='sequential'): where small differences grow from step to step, no method of "
        "this kind converges"
    )


def title(kind: str, position: int, name: str | None) -> str:
    return f"{kind} `{_escaped(name)}`" if name else f"{kind} number {position} (counted from 0)"


def _escaped(name: str) -> str:
    """Return a name as a template holds it: its braces are no places for numbers."""
    return name.replace("{", "{{").replace("}", "}}")


class Messages:
    """Templates for the errors of one loop; see `scanlib.ops.errors.LoopError`."""

    def __init__(self, signature: Signature, labels: Labels, name: str | None) -> None:
        self.signature = signature
        self.labels = labels
        self.title = f"{loop_title(name, labels.function)}: "
        self.prefix = _escaped(self.title)
        self.steps_argument = "length" if labels.function == "loop" else "n_steps"

    def count_steps(
        self,
        n_steps: int | None,
        lengths: Iterable[int | None],
        initial_rows: Iterable[int] | None = None,
    ) -> int:
        """Return the number of steps, where it is not given that of the sequences' rows, and check
        that all has as many rows as it takes: the states' `initial_rows`, too. None stands for a
        sequence that is not checked."""
        lengths = list(lengths)
        steps = min(n for n in lengths if n is not None) if n_steps is None else n_steps
        if steps < 0:
            raise StepCountError(self.negative_steps(), steps)
        for i, length in enumerate(lengths):
            if length is not None and length != steps:
                raise SequenceLengthError(self.sequence_length(i), length, steps)
        self.check_initial_rows(initial_rows or ())
        return steps

    def check_initial_rows(self, given: Iterable[int]) -> None:
        """Check that states have their initial rows."""
        for i, (rows, depth) in enumerate(zip(given, self.signature.depths, strict=False)):
            if rows != depth:
                raise InitialRowsError(self.initial_rows(i), rows)

    def negative_steps(self) -> str:
        """Numbers: n_steps."""
        return f"{self.prefix}{self.steps_argument} must not be negative, got {{}}"

    def sequence_length(self, position: int) -> str:
        """Numbers: rows of this sequence, steps."""
        text = title("sequence", position, self.labels.sequences[position])
        needed, fix = "another sequence of the loop has {} rows", "cut what is longer, as in x[:n]"
        if self.signature.has_n_steps:
            needed = f"the loop takes {self.steps_argument}={{}} steps"
            fix = "give as many rows as steps"
            if self.labels.function != "loop":  # longer ones have been cut
                fix = "pass a longer sequence or fewer steps"
        return f"{self.prefix}{text} gives {{}} rows, but {needed}; {fix}"

    def initial_rows(self, position: int) -> str:
        """Numbers: initial rows of this state."""
        text = title("state", position, self.labels.states[position])
        taps = list(self.signature.taps[position])
        depth = self.signature.depths[position]
        return f"{self.prefix}{text} needs {depth} initial rows for its taps {taps}, got {{}}"

    def state_shape(self, position: int, axis: int) -> str:
        """Numbers: step, expected size, size that came."""
        text = title("state", position, self.labels.states[position])
        return (
            f"{self.prefix}{text} changed its shape at step {{}}: axis {axis} of its initial "
            "value has size {}, the value returned by the step has size {}; "
            "give an initial value of the full shape"
        )

    def output_shape(self, position: int, axis: int) -> str:
        """Numbers: step, expected size, size that came."""
        text = title("output", position, self.labels.outputs[position])
        return (
            f"{self.prefix}{text} changed its shape at step {{}}: axis {axis} had size {{}} "
            "in the steps before, now it has size {}; outputs are stacked and must keep their shape"
        )

    def channel_sizes(self, first: str, second: str) -> str:
        """Numbers: the sizes of two arrays along axes that should agree."""
        return (
            f"{self.prefix}Incompatible Elemwise input shapes: "
            f"{first} has size {{}} and {second} has size {{}}"
        )

    def at_step(self, inner: BodyInputs) -> "NodeMessages":
        """Return the templates for the nodes of a step with some inputs."""
        labels, names = self.labels, dict[Variable, str | None]()
        names.update(zip(inner.rows, labels.sequences, strict=False))
        states = zip(inner.taps, self.signature.taps, labels.states, strict=False)
        for taps, offsets, name in states:
            for offset, tap in zip(offsets, taps, strict=True):
                names[tap] = name and (name if offset == -1 else f"{name}[{offset}]")
        names.update(zip(inner.carries, labels.carries, strict=False))
        names.update(zip(inner.non_sequences, labels.non_sequences, strict=False))
        known = {variable: name for variable, name in names.items() if name}
        return NodeMessages(self.prefix, " at step {}", known)

    def missing_steps(self, steps: int | None = None) -> str:
        """A constant text, for `IndexError`; the loop as a whole needs `required_steps`."""
        steps = self.signature.required_steps if steps is None else steps
        return (
            f"{self.title}a row was read that the loop did not write: "
            f"it took fewer than {steps} step(s)"
        )


class NodeMessages:
    """Templates for the errors of nodes: of a step, whose number comes first, or outside of loops.

    They begin with `prefix`, the loop; `place` is what is said of the step. Variables may have
    other names than their own.
    """

    def __init__(
        self, prefix: str = "", place: str = "", names: Mapping[Variable, str] | None = None
    ) -> None:
        self.prefix, self.place, self.expressions = prefix, place, Expressions(names)

    def template(self, what: Apply | Variable, detail: str) -> str:
        """Return the template for an error of a node or of an input."""
        if isinstance(what, Apply):
            # Outside of loops, checks say what they say without scanlib.
            is_own = getattr(what.op, "is_check", False)
            says_all = isinstance(what.op, CheckAndRaise) and (is_own or not self.place)
            text = UNKNOWN if says_all else self.expressions.node(what)
        else:
            text = self.expressions.value(what)
        text = "" if text == UNKNOWN else _escaped(text)
        middle = f"{text}{self.place}".strip()
        return f"{self.prefix}{middle}: {detail}" if middle else f"{self.prefix}{detail}"


def out_of_bounds(index: object, axis: int) -> str:
    """Return the template of what is wrong with an index; it gets the length of the axis."""
    return f"index {index} is out of bounds for axis {axis} with size {{}}"


def shape_text(ndim: int) -> str:
    """Return the template of a shape, as Python writes it."""
    return f"({', '.join(['{}'] * ndim)}{',' if ndim == 1 else ''})"
