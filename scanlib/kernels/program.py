"""A loop as two kernels that any linker can call.

Whoever runs a loop has arrays, and makes a *table* of words of eight bytes of them:

    for each input     its address, its dimensions, its strides in bytes
    for each output    its address, its dimensions (it is contiguous)
    the rest           `Words`: steps, capacity, how far the loop is, workspace, …

and goes through these steps:

1. Fill in the inputs and call `prepare`. It checks them, and writes the number of steps, the
   dimensions of the outputs and the size of the workspace into the table.
2. Allocate the outputs and the workspace, fill in their addresses, and call `start`, which copies
   what they start with.
3. Call `run`, which takes the steps; for a program in several parts once for each of them
   (`scanlib.kernels.thread_parts`). Where it returns `FULL`, the loop has filled
   ``words.capacity`` rows of the outputs that grow: give it longer ones with the same first rows,
   and call it again. It goes on where it was.
4. `first` and `rows` of each output say which of its rows are the result.

A positive code is a failure, whose message `LoopProgram.failures` has: it ends the call. A negative
one is `FULL` or `INTERRUPTED`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from scanlib.kernels.arrays.sizes import UNFIT, Check, Given, Size
from scanlib.kernels.language import CALLED_WITH, INT64, POINTER, TABLE, Kernel, Type, Value, Writer
from scanlib.kernels.progress import wants_progress

WORD = 8


@dataclass(frozen=True)
class ArrayType:
    """Dtype and number of dimensions of an input or output."""

    dtype: str
    ndim: int


@dataclass(frozen=True)
class Output:
    """An output of a loop: one that `grows` has as many rows as the table's capacity, and more
    later; `extra` come on top."""

    type: ArrayType
    grows: bool = False
    extra: int = 0


@dataclass(frozen=True)
class Failure:
    """What a code of failure means: an exception of `scanlib.ops.errors` or a builtin one, and the
    template of its message, which the values of the frame are put into."""

    error: str
    template: str
    count: int = 0


class Words:
    """Where everything is in the table of a loop. It has the addresses of `functions`, outside of
    kernels; there may be more of them while kernels are written."""

    def __init__(
        self, inputs: Sequence[ArrayType], outputs: Sequence[Output], functions: Sequence[Any]
    ) -> None:
        place = 0
        self.inputs: list[int] = []
        for kind in inputs:
            self.inputs.append(place)
            place += 1 + 2 * kind.ndim
        self.outputs: list[int] = []
        for output in outputs:
            self.outputs.append(place)
            place += 1 + output.type.ndim + 2
        rest = iter(range(place, place + 12))
        self.steps, self.capacity, self.begin, self.taken = islice(rest, 4)
        self.workspace, self.workspace_size, self.steps_per_poll = islice(rest, 3)
        self.part, self.parts, self.choice, self.job, self.chunks = rest
        self.functions = place + 12
        self._outputs, self._functions = outputs, functions

    @property
    def size(self) -> int:
        """How many words there are."""
        return self.functions + len(self._functions)

    def first_row(self, output: int) -> int:
        """Return the word for the first row of the result, after which its number of rows is."""
        return self.outputs[output] + 1 + self._outputs[output].type.ndim


@dataclass(frozen=True)
class Kernels:
    """The kernels of a loop; see the module.

    `run` has one or two, of which ``words.choice`` says which one takes the steps. After the parts
    of a program with a `last_round`, the last one runs once more.
    """

    prepare: Kernel
    start: Kernel
    run: tuple[Kernel, ...]
    last_round: bool = False

    @property
    def all(self) -> tuple[Kernel, ...]:
        return (self.prepare, self.start, *self.run)


@dataclass(eq=False)
class LoopProgram:
    """The kernels of a loop, and what its callers need to know.

    `functions` are scalar nodes that no kernel computes, routines, and kernels of other programs:
    the table has the addresses of functions from the inputs of a node to its output, of the
    routines and of the kernels. `shared` are outputs of a program in parts that are sums over the
    parts. Of one that `may_stop`, outputs may have more rows than the result. `progress`: its polls
    tell how far it is.

    `first_words` are what `prepare` writes into the table, and `checks` what it checks: always, and
    where there is a step. They are made of the inputs' sizes, whose arrays are ``"x0"``, ``"x1"``
    and so on, and of those of the workspace's `parts`.

    Of `free_sizes` of inputs, the small ones may be known numbers in kernels of their own:
    `of_sizes` returns the program for some.
    """

    name: str
    inputs: tuple[ArrayType, ...]
    outputs: tuple[Output, ...]
    words: Words
    kernels: Kernels
    failures: dict[int, Failure]
    first_words: dict[int, Size]
    checks: tuple[list[Check], list[Check]]
    parts: tuple[Size, ...]
    functions: tuple[Any, ...] = ()
    shared: tuple[int, ...] = ()
    may_stop: bool = False
    progress: bool = field(default_factory=wants_progress)
    free_sizes: tuple[Given, ...] = ()
    of_sizes: "Callable[..., LoopProgram] | None" = None

    @property
    def may_be_unfit(self) -> bool:
        """Whether the loop may have to run in another way: where a carry gets another shape."""
        return any(failure.error == UNFIT for failure in self.failures.values())


@dataclass
class TableKernel:
    """Writes a kernel that reads its parameters from the words of a table.

    A parameter is made when it is first asked for.
    """

    name: str
    writer: Writer = field(default_factory=Writer)
    parameters: dict[int, Value] = field(default_factory=dict)

    def word(self, slot: int, type: Type, name: str) -> Value:
        """Return the parameter in a word of the table."""
        if slot not in self.parameters:
            self.parameters[slot] = self.writer.parameter(type, name)
        return self.parameters[slot]

    def number(self, slot: int, name: str) -> Value:
        return self.word(slot, INT64, name)

    @property
    def table(self) -> Value:
        """The address of the table itself."""
        return self.word(TABLE, POINTER, "table")

    @property
    def frame(self) -> Value:
        """The address of the frame that the kernel is called with."""
        return self.word(CALLED_WITH, POINTER, "frame")

    def write_word(self, slot: int, value: Value | int) -> None:
        self.writer.store(self.table, WORD * slot, self.writer.as_value(value, INT64))

    def kernel(self, register: int = Kernel.register, runs_once: bool = False) -> Kernel:
        """Return the kernel that was written; see `Kernel`."""
        values, slots = tuple(self.parameters.values()), tuple(self.parameters)
        return Kernel(self.name, values, self.writer.block, slots, register, runs_once)
