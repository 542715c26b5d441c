"""The registered torch operators that run scanlib's Ops.

``scanlib::run(inputs, name)`` runs the Op of that name: on the CPU the compiled kernel that the
other linkers call, on arrays that share the tensors' memory; elsewhere a function of tensors.
`torch.compile` sees one operator, whose results have the shapes that `shapes_of` says.

An operator takes text and numbers beside tensors, so Ops are kept in a table and go by name. A
name is a digest of what the Op computes, the same in every process: compiled graphs that torch
keeps on disk find it again.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from pytensor.graph.basic import Apply
from torch.autograd import forward_ad

from scanlib._compat.torch import differentiated_by_function, without_derivatives

Shapes = Callable[[Sequence[torch.Tensor]], list[tuple[Any, ...]]]
Run = Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's dtype of a name; `NotImplementedError` if it has none."""
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise NotImplementedError(f"PyTorch has no tensors of dtype {dtype}")
    return found


@dataclass
class Entry:
    """One Op in the table, by the name that the operator is given.

    `run` goes from tensors to new tensors, none of which shares memory with an input; `shapes` from
    the inputs, which may have no values, to the shapes of the results. It is None where shapes
    depend on values; then `torch.compile` must not see the operator. `dtypes` are those of the
    results. Entries that compute the same have equal identities.
    """

    name: str
    run: Run
    shapes: Shapes | None
    dtypes: list[torch.dtype]
    identity: object


_table: WeakValueDictionary[str, Entry] = WeakValueDictionary()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return the device on which an Op runs: the first that is not the CPU, if there is one."""
    devices = [tensor.device for tensor in tensors]
    return next((device for device in devices if device.type != "cpu"), devices[0])


# `torch.library.custom_op` does the same with more functions around each call.
_library = torch.library.Library("scanlib", "DEF")
_library.define("run(Tensor[] inputs, str name) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
run_operator = torch.ops.scanlib.run.default


@torch.library.impl(_library, "run", "CompositeExplicitAutograd")
def run_entry(inputs: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    return _table[name].run(inputs)


@torch.library.register_fake("scanlib::run", lib=_library)
def fake_results(inputs: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Return tensors without values, as the Op of this name would return."""
    entry = _table[name]
    if entry.shapes is None:
        raise RuntimeError("the shapes of this operator's results depend on values")
    device = device_of(inputs)
    return [
        torch.empty(shape, dtype=dtype, device=device)
        for shape, dtype in zip(entry.shapes(inputs), entry.dtypes, strict=True)
    ]


@torch.library.register_vmap("scanlib::run", lib=_library)
def _(
    info: Any, in_dims: tuple[Any, ...], inputs: list[torch.Tensor], name: str
) -> tuple[list[torch.Tensor], list[int]]:
    """Run once per row of the batch; a batch that PyTensor builds is one call instead."""
    check_not_differentiated(inputs)
    pairs = list(zip(inputs, in_dims[0], strict=True))
    if info.batch_size == 0:  # no row tells the shapes
        sizes = [[n for k, n in enumerate(x.shape) if k != dim] for x, dim in pairs]
        row = fake_results(
            [x.new_empty(size) for (x, _), size in zip(pairs, sizes, strict=True)], name
        )
        return [result.new_empty((0, *result.shape)) for result in row], [0] * len(row)
    rows = [
        run_operator([x if dim is None else x.select(dim, i) for x, dim in pairs], name)
        for i in range(info.batch_size)
    ]
    parts = list(zip(*rows, strict=True))
    if any(len({row.shape for row in part}) > 1 for part in parts):
        raise ValueError(
            "torch.vmap: the loops of this batch take different numbers of steps, so that their "
            "results do not stack; read last rows, or make a batch of them by vectorize_graph"
        )
    return [torch.stack(part) for part in parts], [0] * len(parts)


def refuse_gradient() -> None:
    """Raise an error: torch sees a loop as one operation of which it knows no derivative."""
    raise NotImplementedError(
        "torch does not differentiate scanlib's loops: take the gradient with pytensor.grad, and "
        "compile it with the function"
    )


def check_not_differentiated(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse what torch differentiates by `torch.func`, or forwards, where it takes the derivatives
    of operators that it does not know as zero."""
    for tensor in tensors:
        by_function = tensor.requires_grad and differentiated_by_function(tensor)
        if by_function or forward_ad.unpack_dual(tensor).tangent is not None:
            refuse_gradient()


class _Refusing(torch.autograd.Function):
    """Runs the operator; its results require gradients that it does not have."""

    @staticmethod
    def forward(context: Any, name: str, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with without_derivatives():
            return tuple(run_operator(inputs, name))

    @staticmethod
    def backward(context: Any, *cotangents: Any) -> Any:
        refuse_gradient()


@torch.library.impl(_library, "run", "Autograd")
def run_with_autograd(inputs: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    """Run the Op of this name, and refuse its derivatives when they are asked for."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return list(_Refusing.apply(name, *inputs))
    with without_derivatives():
        return run_operator(inputs, name)


def operator_of(
    node: Apply, content: str, identity: object, run: Run, shapes: Shapes | None
) -> Callable[..., Any]:
    """Return what PyTensor's linker calls for a node over arrays, whose Op is in the table as long.

    `content` says what is computed, in the same words in every process. Where two Ops are said in
    the same words, the later one has another name. For the rest see `Entry`.
    """
    given, dtypes = (
        [torch_dtype(variable.type.dtype) for variable in variables]
        for variables in (node.inputs, node.outputs)
    )
    name, single, typed = _digest(content), len(dtypes) == 1, list(enumerate(given))
    while (entry := _table.get(name)) is not None and entry.identity != identity:
        name = _digest(name)
    if entry is None:
        entry = _table[name] = Entry(name, run, shapes, dtypes, identity)

    def call(*inputs: Any) -> Any:
        # What torch computes has other dtypes now and then: a root of integers is float32.
        tensors = [torch.as_tensor(inputs[k]).to(dtype) for k, dtype in typed]
        if not torch.compiler.is_compiling():
            check_not_differentiated(tensors)
        results = run_operator(tensors, entry.name)
        return results[0] if single else tuple(results)

    return call if entry.shapes is not None else torch.compiler.disable(call)
