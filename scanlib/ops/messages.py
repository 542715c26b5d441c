"""The texts of run-time errors: one home, shared by the Python loop and the compiled one."""

from collections.abc import Iterable

from scanlib.ops.errors import InitialRowsError, SequenceLengthError, StepCountError
from scanlib.ops.signature import Labels, Signature


def loop_title(name: str | None, function: str = "scan") -> str:
    """Return what messages call a loop: the function that builds it, and its name if it has one."""
    return f"{function} `{name}`" if name else function


def _title(kind: str, position: int, name: str | None) -> str:
    return f"{kind} `{_escaped(name)}`" if name else f"{kind} number {position} (counted from 0)"


def _escaped(name: str) -> str:
    """Return a name as a template holds it: its braces are no places for numbers."""
    return name.replace("{", "{{").replace("}", "}}")


class Messages:
    """Templates for the errors of one loop; see `scanlib.ops.errors.LoopError`."""

    def __init__(self, signature: Signature, labels: Labels, name: str | None) -> None:
        self.signature = signature
        self.labels = labels
        self.title = f"{loop_title(name)}: "
        self.prefix = _escaped(self.title)

    def count_steps(
        self,
        n_steps: int | None,
        lengths: Iterable[int | None],
        initial_rows: Iterable[int] | None = None,
    ) -> int:
        """Return the number of steps, and check that all has as many rows as it takes.

        Parameters
        ----------
        n_steps : int or None
            The number of steps, where it is given.
        lengths : iterable of int or None
            Of the sequences; None for one that is not checked.
        initial_rows : iterable of int, optional
            How many each state is given.
        """
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
        return self.prefix + "n_steps must not be negative, got {}"

    def sequence_length(self, position: int) -> str:
        """Numbers: rows of this sequence, steps."""
        title = _title("sequence", position, self.labels.sequences[position])
        needed = (
            "the loop takes n_steps={} steps"
            if self.signature.has_n_steps
            else "another sequence of the loop has {} rows"
        )
        return (
            f"{self.prefix}{title} gives {{}} rows, but {needed}; "
            "pass a longer sequence or fewer steps"
        )

    def initial_rows(self, position: int) -> str:
        """Numbers: initial rows of this state."""
        title = _title("state", position, self.labels.states[position])
        taps = list(self.signature.taps[position])
        depth = self.signature.depths[position]
        return f"{self.prefix}{title} needs {depth} initial rows for its taps {taps}, got {{}}"

    def state_shape(self, position: int, axis: int) -> str:
        """Numbers: step, expected size, size that came."""
        title = _title("state", position, self.labels.states[position])
        return (
            f"{self.prefix}{title} changed its shape at step {{}}: axis {axis} of its initial "
            "value has size {}, the value returned by the step has size {}; "
            "give an initial value of the full shape"
        )

    def output_shape(self, position: int, axis: int) -> str:
        """Numbers: step, expected size, size that came."""
        title = _title("output", position, self.labels.outputs[position])
        return (
            f"{self.prefix}{title} changed its shape at step {{}}: axis {axis} had size {{}} "
            "in the steps before, now it has size {}; outputs are stacked and must keep their shape"
        )

    def index_range(self) -> str:
        """Numbers: step, index."""
        return f"{self.prefix}step {{}} uses the index {{}}, which lies outside the indexed array"

    def missing_steps(self) -> str:
        """A constant text, for `IndexError`."""
        steps = self.signature.required_steps
        return (
            f"{self.title}a row was read that the loop did not write: "
            f"it took fewer than {steps} step(s)"
        )
