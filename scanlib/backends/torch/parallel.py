"""Elementwise recurrences on many processors: all steps at once, in logarithmic depth.

Used where there is no compiled kernel. Values of all steps and channels are tensors of shape
``(T, *channels)``; the elements of a recurrence, and everything a step computes from known
states, are one elementwise expression of them. In between stands `doubled`, on pairs ``(a, b)``:

==========  =============================  ================================================
family      step                           composition ``(a₂, b₂) ∘ (a₁, b₁)``
==========  =============================  ================================================
affine      ``a h + b``                    ``(a₂ a₁, a₂ b₁ + b₂)``
log-affine  ``logaddexp(h + a, b)``        ``(a₂ + a₁, logaddexp(b₁ + a₂, b₂))``
maximum     ``max(h, b)``                  ``max(b₂, b₁)``
minimum     ``min(h, b)``                  ``min(b₂, b₁)``
==========  =============================  ================================================

Composed coefficients may overflow where the loop itself does not. A result that is not finite is
therefore thrown away, and the loop is walked step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pytensor.graph.basic import Constant, Variable
from pytensor.graph.traversal import toposort

from scanlib._compat import thaw_graph
from scanlib.backends.torch.elementwise import on_items
from scanlib.backends.torch.operator import Run
from scanlib.backends.torch.portable import Rows, TorchLoop, doubled, torch_dtype
from scanlib.ops.elemwise_scan import Axes, ElemwiseScan, Recurrence
from scanlib.ops.positions import has_positions
from scanlib.ops.python_loop import count_steps
from scanlib.ops.scan import Scan

Env = dict[Variable, torch.Tensor]


def _affine(later: Rows, earlier: Rows) -> Rows:
    return [later[0] * earlier[0], later[0] * earlier[1] + later[1]]


def _log_affine(later: Rows, earlier: Rows) -> Rows:
    return [later[0] + earlier[0], torch.logaddexp(earlier[1] + later[0], later[1])]


FAMILIES: dict[str, Callable[[Rows, Rows], Rows]] = {
    "affine": _affine,
    "log-affine": _log_affine,
    "maximum": lambda later, earlier: [torch.maximum(later[0], earlier[0])],
    "minimum": lambda later, earlier: [torch.minimum(later[0], earlier[0])],
}


def elemwise_runner(op: Scan | ElemwiseScan) -> Run:
    """Return the function of tensors that runs a loop where it has no compiled kernel."""
    scan = op.scan if isinstance(op, ElemwiseScan) else op
    loop = TorchLoop(scan)

    def walk(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return loop(*inputs)

    if not isinstance(op, ElemwiseScan) or not composes(op):
        return walk
    parallel = ParallelLoop(op, loop)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        try:
            results = parallel(inputs)
        except NotImplementedError:  # a scalar operation that PyTensor does not translate
            results = None
        return walk(inputs) if results is None else results

    return run


def composes(op: ElemwiseScan) -> bool:
    """Whether all recurrent parts of a loop compose in pairs, and nothing ends it early."""
    signature = op.signature
    found = [recurrence.parts[0] for recurrence in op.recurrences]
    needed = set(range(len(signature.taps)))
    needed |= {len(needed) + i for i, is_sum in enumerate(op.layout.sums) if not is_sum}
    return (
        not signature.has_stop
        and not has_positions(op.body.outputs)
        and all(taps == (-1,) for taps in signature.taps)
        and needed == set(found)
        and all(_is_simple(recurrence) for recurrence in op.recurrences)
    )


def _is_simple(recurrence: Recurrence) -> bool:
    return (
        recurrence.family in FAMILIES
        and len(recurrence.parts) == 1
        and len(recurrence.terms[0]) == 1
        and recurrence.terms[0][0].tap == -1
    )


class ParallelLoop:
    """Runs an elementwise loop whose recurrences compose, all steps at once."""

    def __init__(self, op: ElemwiseScan, walk: TorchLoop) -> None:
        self.op = op
        self.walk = walk
        self.signature = op.signature
        self.layout = op.layout

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the results; None if composing may have gone wrong, or there is no step."""
        outer = self.signature.split_inputs(inputs)
        steps = count_steps(self.walk.messages, outer)
        if steps == 0 or any(len(initial) != 1 for initial in outer.initials):
            return None
        sizes = self._sizes(outer)
        layout = self.layout
        given = [
            *map(_spread, outer.sequences, layout.sequences, [layout.ndim] * len(inputs)),
            *([None] * (len(outer.initials) + len(outer.carries))),
            *[
                _spread(value[None], axes, layout.ndim)
                for value, axes in zip(outer.non_sequences, layout.non_sequences, strict=True)
            ],
        ]
        starts = [
            _spread(initial, axes, layout.ndim)
            for initial, axes in zip(outer.initials, layout.states, strict=True)
        ]
        starts += [
            _spread(value[None], axes, layout.ndim)
            for value, axes in zip(outer.carries, layout.carries, strict=True)
        ]
        count = len(outer.sequences)
        solved: dict[int, torch.Tensor] = {}
        for number, recurrence in enumerate(self.op.recurrences):
            (part,) = recurrence.parts
            elements = self._elements(number, given, solved)
            row = _own_sizes([*layout.states, *layout.carries][part], sizes)
            rows = self._solve(recurrence, elements, starts[part], (steps, *row))
            if rows is None:
                return None
            solved[part] = rows
            given[count + part] = self._before(rows, starts[part].expand(1, *row))
        return self._results(outer, given, solved, steps, sizes)

    def _sizes(self, outer: Any) -> list[int]:
        sizes = [1] * self.layout.ndim
        arrays = [
            *zip((x.shape[1:] for x in outer.sequences), self.layout.sequences, strict=True),
            *zip((x.shape[1:] for x in outer.initials), self.layout.states, strict=True),
            *zip((x.shape for x in outer.non_sequences), self.layout.non_sequences, strict=True),
        ]
        for shape, axes in arrays:
            for size, axis in zip(shape, axes, strict=True):
                if axis is not None:
                    sizes[axis] = size
        return sizes

    def _elements(
        self, number: int, given: list[Any], solved: dict[int, torch.Tensor]
    ) -> list[torch.Tensor]:
        inputs, outputs, scanned = self.op.elements_of(number)
        env: Env = {v: x for v, x in zip(inputs, given, strict=True) if x is not None}
        env |= {variable: solved[part] for variable, part in scanned.items()}
        return evaluate(outputs, env)

    def _solve(
        self,
        recurrence: Recurrence,
        elements: list[torch.Tensor],
        start: torch.Tensor,
        shape: tuple[int, ...],
    ) -> torch.Tensor | None:
        """Return the next values of all steps."""
        (term,) = recurrence.terms[0]
        (constant,) = recurrence.constants
        first = slice(-1, None) if self.signature.reverse else slice(0, 1)
        compose = FAMILIES[recurrence.family]
        dtype = start.dtype
        if recurrence.family in ("maximum", "minimum"):
            assert constant is not None
            rows = [elements[constant].to(dtype).expand(shape).clone()]
            rows[0][first] = compose(rows, [start.expand(1, *shape[1:])])[0][first]
        else:
            neutral = (1, 0) if recurrence.family == "affine" else (0, float("-inf"))
            rows = [
                start.new_full(shape, value)
                if position is None
                else elements[position].to(dtype).expand(shape).clone()
                for position, value in zip((term.coefficient, constant), neutral, strict=True)
            ]
            begin = [start.new_full((1,), neutral[0]), start.expand(1, *shape[1:])]
            rows[1][first] = compose([row[first] for row in rows], begin)[1]
        composed = doubled(compose, rows, shape[0], self.signature.reverse)[-1]
        if not composed.dtype.is_floating_point and not composed.dtype.is_complex:
            return composed
        if recurrence.family != "affine":
            return composed if bool(_is_number(composed).all()) else None
        good = bool(torch.isfinite(composed).all()) and self._follows(composed, rows)
        return composed if good else None

    def _follows(self, values: torch.Tensor, rows: Sequence[torch.Tensor]) -> bool:
        """Whether every value is what a step makes of the one before it.

        Products of coefficients that underflow lose a state from long ago, which may count still.
        """
        before, after = slice(None, -1), slice(1, None)
        if self.signature.reverse:
            before, after = after, before
        factor, constant = (row[after] for row in rows)
        product = factor * values[before]
        numbers = torch.finfo(values.dtype)
        close = numbers.eps ** (1 / 3) * (product.abs() + constant.abs()) + numbers.tiny
        return bool(((values[after] - (product + constant)).abs() <= close).all())

    def _before(self, rows: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        """Return what the steps read: the start, and all rows but the last."""
        return torch.cat([rows[1:], start] if self.signature.reverse else [start, rows[:-1]])

    def _results(
        self, outer: Any, given: list[Any], solved: dict[int, torch.Tensor], steps: int, sizes: Any
    ) -> list[torch.Tensor]:
        body = thaw_graph(self.op.body)
        results = self.signature.split_body_outputs(body.outputs)
        nexts = [*results.states, *results.carries]
        env: Env = {v: x for v, x in zip(body.inputs, given, strict=True) if x is not None}
        for part, rows in solved.items():
            if nexts[part].owner is not None:
                env[nexts[part]] = rows
        wanted = [v for v, total in zip(results.carries, self.layout.sums, strict=True) if total]
        wanted += results.outputs
        values = dict(zip(wanted, evaluate(wanted, env), strict=True))
        n_states = len(outer.initials)
        layout, reverse = self.layout, self.signature.reverse
        found = []
        for i, initial in enumerate(outer.initials):
            rows = _gathered(solved[i], layout.states[i], initial.shape[1:])
            if self.signature.untraced[i]:
                found.append((rows[:1] if reverse else rows[-1:]).clone())
            else:
                found.append(torch.cat([rows, initial] if reverse else [initial, rows]))
        for i, carry in enumerate(outer.carries):
            if not layout.sums[i]:
                last = solved[n_states + i][:1] if reverse else solved[n_states + i][-1:]
                found.append(_gathered(last, layout.carries[i], carry.shape)[0].clone())
                continue
            value = values[results.carries[i]]
            summed = layout.carry_reductions[i]
            row = _own_sizes((*layout.carries[i], *summed), sizes)
            total = value.to(carry.dtype).expand(steps, *row)
            total = total.sum([0, *(axis + 1 for axis in summed)], True, dtype=carry.dtype)
            found.append(carry + _gathered(total, layout.carries[i], carry.shape)[0])
        for i, out in enumerate(results.outputs):
            value = values[out]
            summed = layout.output_reductions[i]
            value = value.expand(steps, *_own_sizes((*layout.outputs[i], *summed), sizes))
            if summed:
                value = value.sum([axis + 1 for axis in summed], True, dtype=value.dtype)
            row = [1 if axis is None else sizes[axis] for axis in layout.outputs[i]]
            found.append(_gathered(value, layout.outputs[i], row).clone())
        return found


def _own_sizes(axes: Axes, sizes: Sequence[int]) -> list[int]:
    """Return the sizes of channels along some axes, one along the others."""
    return [size if axis in axes else 1 for axis, size in enumerate(sizes)]


def _is_number(rows: torch.Tensor) -> torch.Tensor:
    return ~torch.isnan(rows)


def _spread(value: torch.Tensor, axes: Axes, ndim: int) -> torch.Tensor:
    """Return rows with one axis per channel axis, of length one where they have none."""
    found = {axis: i + 1 for i, axis in enumerate(axes) if axis is not None}
    single = [i + 1 for i, axis in enumerate(axes) if axis is None]
    if any(value.shape[i] != 1 for i in single):  # only where nothing reads the value
        return value.new_zeros((value.shape[0], *[1] * ndim))
    order = sorted(found)
    value = value.permute(0, *(found[axis] for axis in order), *single)
    sizes = dict(zip(order, value.shape[1:], strict=False))
    return value.reshape(value.shape[0], *(sizes.get(axis, 1) for axis in range(ndim)))


def _gathered(value: torch.Tensor, axes: Axes, row: Sequence[int]) -> torch.Tensor:
    """Return rows in their own layout: the inverse of `_spread`."""
    kept = [axis for axis in axes if axis is not None]
    rest = [axis for axis in range(value.ndim - 1) if axis not in kept]
    value = value.permute(0, *(axis + 1 for axis in [*kept, *rest]))
    return value.reshape(value.shape[0], *row)


def evaluate(outputs: Sequence[Variable], env: Env) -> list[torch.Tensor]:
    """Return the values of scalar expressions at tensors, elementwise.

    Parameters
    ----------
    outputs : sequence of Variable
        A graph of scalar operations.
    env : dict
        The values of all that the graph reads and that is no constant.
    """
    values = dict(env)
    device = next(iter(env.values())).device if env else None

    def read(variable: Variable) -> torch.Tensor:
        if isinstance(variable, Constant) and variable not in values:
            dtype = torch_dtype(variable.type.dtype)
            values[variable] = torch.as_tensor(variable.data, device=device).to(dtype)
        return values[variable]

    for node in toposort(list(outputs), blockers=list(env)):
        function = on_items(node.op, tuple(inp.type.dtype for inp in node.inputs))
        result = function(*(read(inp) for inp in node.inputs))
        results = result if isinstance(result, tuple | list) else [result]
        for out, value in zip(node.outputs, results, strict=True):
            values[out] = value.to(torch_dtype(out.type.dtype))
    return [read(out) for out in outputs]
