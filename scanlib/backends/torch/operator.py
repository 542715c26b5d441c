"""The registered torch operators that run scanlib's Ops.

``scanlib::run(inputs, name)`` runs the Op of that name: on the CPU the compiled kernel that the
other linkers call, on arrays that share the tensors' memory; elsewhere a function of tensors.
`torch.compile` sees one operator, whose results have the shapes that `shapes_of` says.

An operator takes text and numbers beside tensors, so Ops are kept in a table and go by name. A
name is a digest of what the Op computes, the same in every process: compiled graphs that torch
keeps on disk find it again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

Shapes = Callable[[Sequence[torch.Tensor]], list[tuple[Any, ...]]]
Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


@dataclass
class Entry:
    """One Op in the table.

    Attributes
    ----------
    name : str
        What the operator is given.
    run : callable
        From tensors to new tensors, none of which shares memory with an input.
    shapes : callable or None
        From the input tensors, which may have no values, to the shapes of the results. None where
        shapes depend on values; then `torch.compile` must not see the operator.
    dtypes : list of torch.dtype
    """

    name: str
    run: Run
    shapes: Shapes | None
    dtypes: list[torch.dtype]


_table: WeakValueDictionary[str, Entry] = WeakValueDictionary()


def add_entry(
    content: str | None, run: Run, shapes: Shapes | None, dtypes: list[torch.dtype]
) -> Entry:
    """Put an Op into the table, for as long as the entry lives.

    Parameters
    ----------
    content : str or None
        Says all about what is computed; None if nothing does, then the name is a new one.
    """
    if content is None:
        content = f"{id(run)} {len(_table)}"
    name = hashlib.sha256(content.encode()).hexdigest()[:24]
    found = _table.get(name)
    if found is None:
        found = _table[name] = Entry(name, run, shapes, dtypes)
    return found


@torch.library.custom_op("scanlib::run", mutates_args=())
def run_operator(inputs: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Run the Op of this name."""
    return _table[name].run(inputs)


@run_operator.register_fake
def _(inputs: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    entry = _table[name]
    if entry.shapes is None:
        raise RuntimeError("the shapes of this operator's results depend on values")
    device = inputs[0].device
    return [
        torch.empty(shape, dtype=dtype, device=device)
        for shape, dtype in zip(entry.shapes(inputs), entry.dtypes, strict=True)
    ]


@run_operator.register_vmap
def _(
    info: Any, in_dims: tuple[Any, ...], inputs: list[torch.Tensor], name: str
) -> tuple[list[torch.Tensor], list[int]]:
    """Run once per row of the batch; a batch that PyTensor builds is one call instead."""
    dims = in_dims[0]
    rows = [
        run_operator(
            [x if dim is None else x.select(dim, i) for x, dim in zip(inputs, dims, strict=True)],
            name,
        )
        for i in range(info.batch_size)
    ]
    stacked = [torch.stack(parts) for parts in zip(*rows, strict=True)]
    return stacked, [0] * len(stacked)


def caller(entry: Entry, single: bool) -> Callable[..., Any]:
    """Return the function of tensors that PyTensor's linker calls."""

    def run(*inputs: Any) -> Any:
        tensors = [torch.as_tensor(value) for value in inputs]
        results = run_operator(tensors, entry.name)
        return results[0] if single else tuple(results)

    if entry.shapes is not None:
        return run

    @torch.compiler.disable
    def run_outside(*inputs: Any) -> Any:
        results = entry.run([torch.as_tensor(value) for value in inputs])
        return results[0] if single else tuple(results)

    return run_outside
