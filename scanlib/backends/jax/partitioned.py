"""How compiled loops are cut over the devices of a mesh, under `jax.jit`.

XLA does not see into a compiled call. Left alone it gathers what the call reads, and every device
runs the whole loop. Here each call says which of its axes it may be cut along: channels and
batches, which no step mixes. Time is not among them. A sum over channels is added up afterwards.
Under meshes whose axes are explicit (`jax.sharding.AxisType.Explicit`), the same facts say how
results are cut.

A *factor* names an axis of the loop; arrays that have an axis of the same factor are cut alike.
The rule is written in the notation of Shardy, XLA's partitioner: https://openxla.org/shardy.

Inside of `jax.shard_map`, JAX keeps track of which values differ between devices: each is *varying*
along some axes of a mesh. What a loop carries must vary along the same axes before and after a
step, and so must what the kernels for different platforms return: before the first step everything
is made to vary along all axes along which one of the arguments does. A loop there sees the rows
that its device has, and starts from its initial state, so that time must not be cut.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.replace import clone_replace

from scanlib._compat import freeze_graph, thaw_graph
from scanlib.backends.jax.kernels import once
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.execution import LoopOp
from scanlib.ops.kept_axes import AxisClasses, axes_kept
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan

Axes = tuple[str | None, ...]
Function = Callable[..., list[Any]]


@dataclass(frozen=True)
class Sum:
    """Result number `output` is a sum over the channels' axes `factors`; `start` is the number of
    the input that it starts from, if there is one."""

    output: int
    factors: tuple[str, ...]
    start: int | None


@dataclass(frozen=True)
class Factors:
    """Along which axes a call may be cut: for every axis of every array its factor, None where it
    must be whole; and the outputs that are sums over channels. A number of steps is no array."""

    inputs: tuple[Axes, ...]
    outputs: tuple[Axes, ...]
    sums: tuple[Sum, ...]

    def batched(self, which: Sequence[bool]) -> "Factors":
        """Return those of the call for a batch, which the inputs that `which` says have first."""
        name = f"v{max(map(len, self.outputs))}"
        inputs = (
            (name, *axes) if has else axes for axes, has in zip(self.inputs, which, strict=True)
        )
        return replace(
            self, inputs=tuple(inputs), outputs=tuple((name, *axes) for axes in self.outputs)
        )

    def rule(self) -> tuple[str, dict[str, Any]]:
        """Return the rule as Shardy reads it, and its options."""
        whole: list[str] = []

        def text(axes: Axes) -> str:
            names = []
            for axis in axes:
                if axis is None:
                    whole.append(f"w{len(whole)}")
                names.append(whole[-1] if axis is None else axis)
            return " ".join(names)

        left, right = (", ".join(map(text, arrays)) for arrays in (self.inputs, self.outputs))
        sums = {name for one in self.sums for name in one.factors}
        given = {name for axes in self.outputs for name in axes}
        options = {
            "need_replication_factors": tuple(whole),
            "reduction_factors": tuple(sorted(sums - given)),
        }
        return f"{left} -> {right}", {name: value for name, value in options.items() if value}

    def places(
        self, shapes: Sequence[Sequence[int]], specs: Sequence[Any], sizes: dict[str, int]
    ) -> dict[str, tuple[str, ...]]:
        """Return along which axes of the mesh, whose numbers of devices are `sizes`, each factor is
        cut.

        `shapes` and `specs` are those of all arrays, inputs first: how each is cut so far.
        """
        found: dict[str, tuple[str, ...]] = {}
        taken: set[str] = set()
        for axes, shape, spec in zip([*self.inputs, *self.outputs], shapes, specs, strict=False):
            for name, size, entry in zip(axes, shape, spec, strict=False):
                names = (entry,) if isinstance(entry, str) else tuple(entry or ())
                if name is None or name in found or not names or taken.intersection(names):
                    continue
                if size % prod(sizes[n] for n in names):
                    continue
                found[name] = names
                taken.update(names)
        return found

    def specs(self, found: dict[str, tuple[str, ...]], arrays: Sequence[Axes]) -> list[Any]:
        """Return how arrays are cut."""
        return [PartitionSpec(*(found.get(a) if a else None for a in axes)) for axes in arrays]

    def local(self, call: Function, found: dict[str, tuple[str, ...]]) -> Function:
        """Return what each device runs on its part."""

        summed = [
            (one, tuple(n for factor in one.factors for n in found.get(factor, ())))
            for one in self.sums
        ]

        def run(*inputs: Any) -> list[Any]:
            values = list(inputs)
            for one, names in summed:
                if names and one.start is not None:  # it counts once
                    first = sum(lax.axis_index(name) for name in names) == 0
                    values[one.start] = jnp.where(first, values[one.start], 0)
            results = list(call(*values))
            for one, names in summed:
                if names:
                    results[one.output] = lax.psum(results[one.output], names)
            return results

        return run


def partitioned(call: Function, factors: Factors | None) -> Function:
    """Return a call, which is traced for whole arrays and for parts, that says along which axes it
    may be cut: none without factors."""
    if factors is None or not any(map(any, factors.inputs)):
        return call
    return lambda *inputs: _partitioned(call, factors, inputs)


def _partitioned(call: Function, factors: Factors, inputs: Sequence[Any]) -> list[Any]:
    """Write such a call; constants of it are more inputs, for what JAX cuts may have none."""
    whole = jax.make_jaxpr(lambda *inputs: call(*inputs))(*inputs)
    count, constants = len(inputs), [jnp.asarray(value) for value in whole.consts]
    axes = *factors.inputs, *((None,) * value.ndim for value in constants)
    known = replace(factors, inputs=axes)

    def evaluate(*values: Any) -> list[Any]:
        return jax.core.eval_jaxpr(whole.jaxpr, values[count:], *values[:count])

    def partition(mesh: Any, inputs: Any, results: Any) -> Any:
        arrays = [*inputs, *results]
        if not all(isinstance(a.sharding, NamedSharding) for a in arrays):
            devices = sorted(inputs[0].sharding.device_set, key=lambda device: device.id)
            mesh, found = jax.sharding.Mesh(np.array(devices), ("devices",)), {}
        else:
            mesh = arrays[0].sharding.mesh
            shapes, specs = [a.shape for a in arrays], [a.sharding.spec for a in arrays]
            found = known.places(shapes, specs, dict(mesh.shape))
        cut = (
            [NamedSharding(mesh, spec) for spec in known.specs(found, arrays)]
            for arrays in (known.inputs, known.outputs)
        )
        given, wanted = cut
        own = known.local(lambda *values: call(*values[:count]), found)
        return mesh, own, wanted, tuple(given)

    cut = custom_partitioning(evaluate)
    cut.def_partition(partition, sharding_rule=lambda *types: known.rule())
    return list(cut(*inputs, *constants))


def explicitly(function: Function, factors: Factors | None, inputs: Sequence[Any]) -> Function:
    """Return a function whose results are cut as its inputs are, where axes of the mesh are
    explicit: how it is cut itself is left to XLA."""
    types = [jax.typeof(value) for value in inputs]
    mesh = next((t.sharding.mesh for t in types if _explicit(t)), None)
    if factors is None or mesh is None:
        return function
    shapes, specs = [t.shape for t in types], [t.sharding.spec for t in types]
    found = factors.places(shapes, specs, dict(mesh.shape))
    wanted = [NamedSharding(mesh, spec) for spec in factors.specs(found, factors.outputs)]
    return jax.sharding.auto_axes(lambda *v: list(function(*v)), out_sharding=wanted)


def _explicit(kind: Any) -> bool:
    """Whether a value is cut along an axis of a mesh whose axes are all explicit."""
    sharding: Any = getattr(kind, "sharding", None)
    mesh = getattr(sharding, "mesh", None)
    if mesh is None or mesh.empty or set(mesh.axis_types) != {AxisType.Explicit}:
        return False
    return any(entry is not None for entry in sharding.spec)


def part_of(node: Apply, factors: Factors) -> Apply | None:
    """Return a loop for any sizes along the axes that are cut: the node if its types do not tell
    them, None where there is no such loop."""
    found = once(node, "part", partial(_new_part, node, factors))
    return node if found is None else found or None


def _new_part(node: Apply, factors: Factors) -> Apply | bool | None:
    """Return such a loop, None where it is the node, False where there is none."""
    steps = node.inputs[: int(node.op.has_n_steps)]

    def any_size(variable: Variable, axes: Axes) -> Variable:
        shape = getattr(variable.type, "shape", ())
        free = tuple(n if axis is None else None for n, axis in zip(shape, axes, strict=False))
        return variable if free == shape else variable.type.clone(shape=free)()

    inputs = [*steps, *map(any_size, node.inputs[len(steps) :], factors.inputs)]
    if inputs == node.inputs:
        return None
    if not isinstance(node.op, Scan):
        return node.op.make_node(*inputs)
    signature, graph = node.op.signature, thaw_graph(node.op.body)
    outer = signature.split_inputs([*steps, *factors.inputs])
    inner = signature.split_body_inputs(graph.inputs)
    rows = [axes[1:] for axes in outer.sequences]
    taps = [axes[1:] for axes, tap in zip(outer.initials, inner.taps, strict=True) for _ in tap]
    axes = [*rows, *taps, *outer.carries, *outer.non_sequences]
    free = list(map(any_size, graph.inputs, axes))
    changed = dict(zip(graph.inputs, free, strict=True))
    try:
        results = clone_replace(graph.outputs, changed, rebuild_strict=False)
        body = freeze_graph(free, results)
        return Scan(signature, body, name=node.op.name, labels=node.op.labels).make_node(*inputs)
    except Exception:  # an operation that knows its sizes: the loop stays whole
        return False


# What may be cut


def loop_factors(op: LoopOp) -> Factors:
    """Return along which axes a loop that does not end by a condition may be cut."""
    return _channel_factors(op) if isinstance(op, ElemwiseScan) else _step_factors(op.scan)


def _step_factors(op: Scan) -> Factors:
    """Return along which axes any loop may be cut: those that no step mixes with themselves.

    Axes that run alike have to be cut alike: by operations, and by a state's being the next one.
    """
    signature = op.signature
    inner = signature.split_body_inputs(op.body.inputs)
    result = signature.split_body_outputs(op.body.outputs)
    classes = AxisClasses()
    for node in op.body.toposort():
        classes.join(axes_kept(node))
    for taps, value in zip(inner.taps, result.states, strict=True):
        for tap in taps:
            classes.join_all(tap, value)
    for old, new in zip(inner.carries, result.carries, strict=True):
        classes.join_all(old, new)
    classes.keep_apart([*op.body.inputs, *op.body.outputs])
    names: dict[Any, str] = {}

    def axes(variable: Variable) -> Axes:
        roots = [classes.of(variable, k) for k in range(getattr(variable.type, "ndim", 0))]
        ones = getattr(variable.type, "broadcastable", ())
        return tuple(
            None if root is None or one else names.setdefault(root, f"c{len(names)}")
            for root, one in zip(roots, ones, strict=True)
        )

    def rows(parts: Sequence[Variable]) -> list[Axes]:
        return [(None, *axes(variable)) for variable in parts]

    states = rows([taps[0] for taps in inner.taps])
    inputs = [*rows(inner.rows), *states]
    inputs += [axes(variable) for variable in (*inner.carries, *inner.non_sequences)]
    outputs = [*states, *(axes(variable) for variable in inner.carries), *rows(result.outputs)]
    return Factors(tuple(inputs), tuple(outputs), ())


def _channel_factors(op: ElemwiseScan) -> Factors:
    """Return along which axes an elementwise loop may be cut: its channels'."""
    layout = op.layout

    def names(axes: Sequence[int | None]) -> Axes:
        return tuple(None if axis is None else f"c{axis}" for axis in axes)

    def summed(axes: Sequence[int]) -> tuple[str, ...]:
        return tuple(f"c{axis}" for axis in axes)

    def rows(parts: Sequence[Any]) -> list[Axes]:
        return [(None, *names(axes)) for axes in parts]

    carries, states = list(map(names, layout.carries)), rows(layout.states)
    varying = [*rows(layout.sequences), *states]
    inputs = [*varying, *carries, *map(names, layout.non_sequences)]
    outputs = [*states, *carries, *rows(layout.outputs)]
    sums = [
        Sum(len(states) + k, summed(axes), len(varying) + k)
        for k, axes in enumerate(layout.carry_reductions)
        if layout.sums[k] and axes
    ]
    sums += [
        Sum(len(states) + len(carries) + k, summed(axes), None)
        for k, axes in enumerate(layout.output_reductions)
        if axes
    ]
    return Factors(tuple(inputs), tuple(outputs), tuple(sums))


# Inside of `jax.shard_map`


def varying_axes(values: Any) -> frozenset[str]:
    """Return the axes of the mesh along which one of some values varies."""
    found: frozenset[str] = frozenset()
    if not hasattr(lax, "pcast"):  # JAX does not keep track of it
        return found
    for leaf in jax.tree.leaves(values):
        kind = jax.typeof(leaf)
        manual = getattr(kind, "manual_axis_type", None)
        found |= getattr(kind, "vma", frozenset()) if manual is None else manual.varying
    return found


def varying(values: Any, like: Any) -> Any:
    """Return values that vary along all axes along which they or others do."""
    axes = varying_axes([values, like])
    if not axes:
        return values

    def cast(leaf: Any) -> Any:
        missing = axes - varying_axes(leaf)
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, values)


def check_whole(title: str, sequences: Iterable[tuple[Variable, Any]]) -> None:
    """Raise where a device would run a loop from its start on a part of the time, which cannot be
    told from other axes, but where types say how long an array is.

    `sequences` are what it reads row by row, each with its value here.
    """
    axes = getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())
    if not axes:
        return
    for k, (variable, value) in enumerate(sequences):
        wanted, given = variable.type.shape[0], len(value)
        if wanted is not None and wanted != given:
            name = f"`{variable.name}`" if variable.name else f"number {k} (counted from 0)"
            raise SequenceLengthError(
                f"{title}: sequence {name} has {wanted} rows, but {given} in jax.shard_map over "
                f"{', '.join(map(repr, axes))}: every device would start from the initial state. "
                "Cut channels or the batch there, not time"
            )
