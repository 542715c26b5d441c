"""Functions whose arrays are cut over a mesh of devices, along time as well.

The graph of a function, after the rewrites of PyTensor's JAX mode, is walked with arrays of which
JAX is told how they are cut: loops by `time_loops`, what stands around them by `time_ops`. XLA
partitions what comes of it; `partitioned` says how loops are cut along their channels, and along
pieces of time.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pytensor.compile.executor import Function
from pytensor.graph.basic import Apply, Constant, Variable

from scanlib.backends.jax.time_loops import Spread, check_few, run_loop
from scanlib.backends.jax.time_ops import plain_function, run_op
from scanlib.backends.jax.time_pieces import Cut, Timed
from scanlib.ops.execution import LoopOp


@dataclass(eq=False)
class ShardedFunction:
    """A function of JAX arrays; see `scanlib.shard`, which makes it of one that was compiled in
    PyTensor's JAX mode."""

    function: Function
    in_specs: Sequence[PartitionSpec]
    time: str
    mesh: Any = None
    tile: int | None = None
    in_turn: bool = False
    loops: list[Spread] = field(default_factory=list)

    def __post_init__(self) -> None:
        maker = self.function.maker
        self.graph = maker.fgraph
        if getattr(self.graph, "update_mapping", None):
            raise TypeError("scanlib.shard: a function with updates is not cut over devices")
        self.order = self.graph.toposort()
        self.stored = [c.storage[0] for c in self.function.input_storage]
        self.count = sum(not i.implicit for i in maker.expanded_inputs)
        self.in_specs = tuple(self.in_specs)
        if len(self.in_specs) != self.count:
            raise ValueError(
                f"scanlib.shard: the function has {self.count} inputs, got {len(self.in_specs)} "
                "in_specs: one jax.sharding.PartitionSpec for each"
            )
        self.functions: dict[Apply, Any] = {}
        self.made: dict[Any, Any] = {}

    def __call__(self, *values: Any) -> Any:
        """Return the outputs; those that have a time axis keep it cut where lengths divide."""
        if len(values) != self.count:
            raise TypeError(f"expected {self.count} arguments, got {len(values)}")
        mesh = self._mesh()
        arrays = [
            jnp.asarray(value, jax.dtypes.canonicalize_dtype(variable.type.dtype))
            for value, variable in zip(values, self.graph.inputs, strict=False)
        ]
        shardings = None
        if AxisType.Explicit in mesh.axis_types:
            shardings = []
            for array, axis in zip(arrays, map(self._time_axis, self.in_specs), strict=True):
                spec = PartitionSpec()
                if axis is not None and not array.shape[axis] % mesh.shape[self.time]:
                    spec = _at(self.time, axis)
                shardings.append(NamedSharding(mesh, spec))
            arrays = list(map(jax.sharding.reshard, arrays, shardings))
        key = (mesh, tuple((a.shape, str(a.dtype)) for a in arrays))
        if key not in self.made:
            self.made[key] = jax.jit(self._cut(mesh, arrays), in_shardings=shardings)
        results = self.made[key](*arrays)
        unpacked = self.function.unpack_single
        return results[0] if unpacked and len(results) == 1 else tuple(results)

    def describe(self) -> str:
        """Return how each loop was spread at the last call, one line for each."""
        lines = [
            f"{one.loop}: {one.pieces} pieces over {self.time!r}, {one.how}, "
            f"{one.rounds} rounds, {one.bytes} bytes to each device"
            for one in self.loops
        ]
        return "\n".join(lines) or "no loop has been cut along time"

    # What the caller says

    def _mesh(self) -> Any:
        mesh = self.mesh
        if mesh is None:
            try:
                mesh = jax.sharding.get_mesh()
            except ValueError:  # under `jax.jit`, devices are not known
                mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError("scanlib.shard: pass mesh=, or call it under jax.set_mesh")
        named = [(self.time, "time")]
        for k, spec in enumerate(self.in_specs):
            named += [(name, f"in_specs[{k}]") for name in jax.tree.leaves(tuple(spec))]
        for name, where in named:
            if name not in mesh.axis_names:
                raise ValueError(
                    f"scanlib.shard: {where} names the axis {name!r}, but the mesh has the axes "
                    f"{', '.join(map(repr, mesh.axis_names))}"
                )
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        explicit = [n for n, k in kinds.items() if n != self.time and k != AxisType.Auto]
        if explicit:
            raise ValueError(
                f"scanlib.shard: the axis {explicit[0]!r} of the mesh is "
                f"{kinds[explicit[0]].name}; XLA cuts those beside time: make it AxisType.Auto"
            )
        return mesh

    def _time_axis(self, spec: PartitionSpec) -> int | None:
        for axis, entry in enumerate(spec):
            if entry == self.time:
                return axis
            if isinstance(entry, tuple) and self.time in entry:
                raise ValueError(
                    f"scanlib.shard: {spec} cuts an axis along {self.time!r} and others at once"
                )
        return None

    # What JAX traces

    def _cut(self, mesh: Any, arrays: list[Any]) -> Any:
        """Return the function for a mesh and arrays of these shapes."""
        auto = mesh
        if AxisType.Explicit in mesh.axis_types:
            abstract = getattr(mesh, "abstract_mesh", mesh)
            auto = abstract.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))
        cut = Cut(auto, self.time, self.tile)
        axes = [self._time_axis(spec) for spec in self.in_specs]
        if all(axis is None for axis in axes):
            raise ValueError(f"scanlib.shard: no entry of in_specs has the axis {self.time!r}")

        specs: list[PartitionSpec] = []

        def run(*values: Any) -> list[Any]:
            placed = map(partial(self._placed, cut), values, axes, self.in_specs)
            results = self._walk(cut, list(placed))
            found = []
            specs.clear()
            for value in results:
                spec = PartitionSpec()
                if isinstance(value, Timed) and value.length % cut.devices == 0:
                    spec = _at(self.time, value.axis)
                    value = cut.spread(value.whole(), value.axis)
                specs.append(spec)
                found.append(value.whole() if isinstance(value, Timed) else jnp.asarray(value))
            return found

        if AxisType.Explicit not in mesh.axis_types:
            return run

        def explicit(function: Any, out: Any) -> Any:
            wanted = jax.tree.map(partial(NamedSharding, mesh), out)
            return jax.sharding.auto_axes(function, axes=self.time, out_sharding=wanted)

        # How outputs are cut is known when the function has been traced.
        jax.eval_shape(explicit(lambda *v: run(*v) and jnp.zeros(()), PartitionSpec()), *arrays)
        return explicit(run, list(specs))

    def _placed(self, cut: Cut, value: Any, axis: int | None, spec: PartitionSpec) -> Any:
        """Return an argument, cut as it should be."""
        if axis is not None and value.shape[axis] % cut.devices:  # XLA alone cuts unevenly
            length, pad = value.shape[axis], [(0, 0)] * value.ndim
            pad[axis] = (0, -length % cut.devices)
            wide = lax.with_sharding_constraint(jnp.pad(value, pad), NamedSharding(cut.mesh, spec))
            return Timed(lax.slice_in_dim(wide, 0, length, axis=axis), axis)
        if any(entry is not None for entry in spec):
            value = lax.with_sharding_constraint(value, NamedSharding(cut.mesh, spec))
        return value if axis is None else Timed(value, axis)

    def _walk(self, cut: Cut, inputs: list[Any]) -> list[Any]:
        """Return the outputs of the graph, `Timed` ones and others."""
        self.loops = []
        values = dict(zip(self.graph.inputs, [*inputs, *self.stored[len(inputs) :]], strict=True))

        def value_of(variable: Variable) -> Any:
            return variable.data if isinstance(variable, Constant) else values[variable]

        for node in self.order:
            results = self._results(node, [value_of(v) for v in node.inputs], cut)
            values.update(zip(node.outputs, results, strict=True))
        return [value_of(variable) for variable in self.graph.outputs]

    def _results(self, node: Apply, given: list[Any], cut: Cut) -> list[Any]:
        if any(isinstance(value, Timed) for value in given):
            if not isinstance(node.op, LoopOp):
                return run_op(node, given, cut)
            sequences = node.op.signature.split_inputs(given).sequences
            if any(isinstance(value, Timed) for value in sequences):
                return run_loop(node, given, cut, self.in_turn, self.loops)
            for k, value in enumerate(given):
                check_few(node, f"input number {k} (counted from 0)", value, cut)
        if node not in self.functions:
            self.functions[node] = plain_function(node)
        known = not any(isinstance(value, jax.core.Tracer | Timed) for value in given)
        small = all(getattr(out.type, "ndim", 0) <= 1 for out in node.outputs)
        # Sizes and bounds of slices that are computed from numbers stay numbers.
        with jax.ensure_compile_time_eval() if known and small else nullcontext():
            return self.functions[node](*given)


def _at(name: str, axis: int) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, name)
