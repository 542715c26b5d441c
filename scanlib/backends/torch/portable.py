"""Loops as functions of tensors, for devices without a compiled kernel.

`TorchLoop` walks the steps of any loop; its body is PyTensor's own translation. Recurrences that
compose are not walked: `doubled` combines rows that are 1, 2, 4 … steps apart, so that a scan of
``T`` rows takes ``log2 T`` passes, each over all rows and channels at once (W. D. Hillis and
G. L. Steele, "Data parallel algorithms", Communications of the ACM 29, 1986).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pytensor.compile.mode import get_mode
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify

from scanlib._compat import thaw_graph
from scanlib.ops.errors import (
    InitialRowsError,
    SequenceLengthError,
    StepCountError,
    StepShapeError,
)
from scanlib.ops.messages import Messages
from scanlib.ops.python_loop import empty_row_shapes
from scanlib.ops.scan import Scan

Rows = list[torch.Tensor]


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's name of a dtype.

    Raises
    ------
    NotImplementedError
        If torch has no such dtype.
    """
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise NotImplementedError(f"PyTorch has no tensors of dtype {dtype}")
    return found


class TorchLoop:
    """Runs a `Scan` on tensors, step by step."""

    def __init__(self, op: Scan) -> None:
        self.op = op
        self.signature = op.signature
        self.messages = Messages(op.signature, op.labels, op.name)
        self._step: Callable[..., Any] | None = None

    @property
    def step(self) -> Callable[..., Any]:
        """The body; translated at the first call, since a compiled kernel may do without."""
        if self._step is None:
            fgraph = thaw_graph(self.op.body)
            get_mode("PYTORCH").optimizer.rewrite(fgraph)
            self._step = pytorch_funcify(fgraph)
        return self._step

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Rows:
        outer = self.signature.split_inputs(inputs)
        steps = self._count_steps(outer)
        device = inputs[0].device
        histories = [self._history(i, initial, steps) for i, initial in enumerate(outer.initials)]
        carries = [value.clone() for value in outer.carries]
        stacks: list[torch.Tensor | None] = [None] * self.signature.n_outputs
        done = 0
        while done < steps:
            t = steps - 1 - done if self.signature.reverse else done
            result = self._run_step(t, outer, histories, carries)
            for i, value in enumerate(result.states):
                self._write_state(i, histories[i], t, done, value)
            carries = result.carries
            for i, value in enumerate(result.outputs):
                stacks[i] = self._write_output(i, stacks[i], t, done, steps, value)
            done += 1
            if result.stop is not None and bool(result.stop):
                break
        if done < self.signature.required_steps:
            raise IndexError(self.messages.missing_steps())
        filled = stacks if done else self._empty_outputs(inputs, device)
        return self._finish(histories, carries, filled, done, steps)

    def _count_steps(self, outer: Any) -> int:
        if outer.n_steps is not None:
            steps = int(outer.n_steps)
            if steps < 0:
                raise StepCountError(self.messages.negative_steps(), steps)
        else:
            steps = min(len(sequence) for sequence in outer.sequences)
        for i, sequence in enumerate(outer.sequences):
            if len(sequence) != steps:
                raise SequenceLengthError(self.messages.sequence_length(i), len(sequence), steps)
        return steps

    def _history(self, i: int, initial: torch.Tensor, steps: int) -> torch.Tensor:
        depth = self.signature.depths[i]
        if len(initial) != depth:
            raise InitialRowsError(self.messages.initial_rows(i), len(initial))
        if self.signature.untraced[i]:
            return initial.clone()
        history = initial.new_empty((steps + depth, *initial.shape[1:]))
        start = steps if self.signature.reverse else 0
        history[start : start + depth] = initial
        return history

    def _run_step(self, t: int, outer: Any, histories: Rows, carries: Rows) -> Any:
        arguments = [sequence[t] for sequence in outer.sequences]
        for i, history in enumerate(histories):
            start = 0 if self.signature.untraced[i] else t
            for tap in self.signature.taps[i]:
                if self.signature.reverse:
                    row = start - tap - self.signature.untraced[i]
                else:
                    row = start + self.signature.depths[i] + tap
                # A row that the step may hand on must not change when the next one is written.
                arguments.append(history[row].clone())
        results = self.step(*arguments, *carries, *outer.non_sequences)
        # Torch's rules for dtypes are not PyTensor's: a sum of int8 is int64.
        return self.signature.split_body_outputs(
            [
                torch.as_tensor(value).to(torch_dtype(out.type.dtype))
                for value, out in zip(results, self.op.body.outputs, strict=True)
            ]
        )

    def _write_state(
        self, i: int, history: torch.Tensor, t: int, done: int, value: torch.Tensor
    ) -> None:
        for axis, (expected, size) in enumerate(zip(history.shape[1:], value.shape, strict=True)):
            if expected != size:
                raise StepShapeError(self.messages.state_shape(i, axis), done, expected, size)
        depth = self.signature.depths[i]
        if not self.signature.untraced[i]:
            history[t if self.signature.reverse else t + depth] = value
        elif self.signature.reverse:
            history[1:] = history[: depth - 1].clone()
            history[0] = value
        else:
            history[: depth - 1] = history[1:].clone()
            history[-1] = value

    def _write_output(
        self, i: int, stack: torch.Tensor | None, t: int, done: int, steps: int, value: torch.Tensor
    ) -> torch.Tensor:
        if stack is None:
            stack = value.new_empty((steps, *value.shape))
        for axis, (expected, size) in enumerate(zip(stack.shape[1:], value.shape, strict=True)):
            if expected != size:
                raise StepShapeError(self.messages.output_shape(i, axis), done, expected, size)
        stack[t] = value
        return stack

    def _empty_outputs(self, inputs: Sequence[torch.Tensor], device: torch.device) -> Rows:
        values = [value.cpu().numpy() for value in inputs]
        shapes = empty_row_shapes(self.op)(*values) if self.signature.n_outputs else []
        types = self.signature.split_body_outputs(self.op.body.outputs).outputs
        remaining = iter(shapes)
        return [
            torch.empty(
                (0, *(int(next(remaining)) for _ in range(out.type.ndim))),
                dtype=torch_dtype(out.type.dtype),
                device=device,
            )
            for out in types
        ]

    def _finish(self, histories: Rows, carries: Rows, stacks: Any, done: int, steps: int) -> Rows:
        skipped = steps - done
        if skipped:
            first = skipped if self.signature.reverse else 0
            histories = [
                history if untraced else history[first : first + len(history) - skipped].clone()
                for history, untraced in zip(histories, self.signature.untraced, strict=True)
            ]
            stacks = [stack[first : first + done].clone() for stack in stacks]
        return [*histories, *[value.clone() for value in carries], *stacks]


def doubled(
    compose: Callable[[Rows, Rows], Rows], elements: Rows, length: int, reverse: bool = False
) -> Rows:
    """Return all running compositions of rows of elements.

    Parameters
    ----------
    compose : callable
        From later and earlier elements to what does first the earlier and then the later ones.
    elements : list of Tensor
        Rows along the first axis.
    length : int
        How many rows there are.
    reverse : bool, optional
        Whether the last row comes first.
    """
    distance = 1
    while distance < length:
        if reverse:
            made = compose([x[:-distance] for x in elements], [x[distance:] for x in elements])
            elements = [
                torch.cat([new, x[length - distance :]])
                for new, x in zip(made, elements, strict=True)
            ]
        else:
            made = compose([x[distance:] for x in elements], [x[:-distance] for x in elements])
            elements = [
                torch.cat([x[:distance], new]) for new, x in zip(made, elements, strict=True)
            ]
        distance *= 2
    return elements
