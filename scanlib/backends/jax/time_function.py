"""Functions whose arrays are cut over a mesh of devices, along time as well.

The graph of a function, after the rewrites of PyTensor's JAX mode, is walked inside of a
`jax.shard_map` over the axis of the mesh that carries time: loops by `time_loops`, what stands
around them by `time_ops`. The other axes of the mesh are XLA's; `partitioned` says how loops are
cut along them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import pytensor
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from pytensor.compile.executor import Function
from pytensor.graph.basic import Apply, Constant, Variable

from scanlib.backends.jax.mesh_axes import cut_channels
from scanlib.backends.jax.time_loops import Spread, plain, run_loop, title
from scanlib.backends.jax.time_ops import plain_function, run_op
from scanlib.backends.jax.time_pieces import FEW, TILES, Grid, Timed, TimeShardingError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan

EXPLICIT = AxisType.Explicit
LOOPS = (Scan, ElemwiseScan, LinearScan)


@dataclass(eq=False)
class ShardedFunction:
    """A function of JAX arrays; see `scanlib.shard`, which makes it.

    Parameters
    ----------
    function : Function
        Compiled in PyTensor's JAX mode.
    in_specs : sequence of PartitionSpec
    time : str
    mesh : Mesh, optional
    tile : int, optional
    in_turn : bool
    """

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
        self.made: dict[Any, tuple[list[Any], Any]] = {}
        self.kinds: list[Any] = []  # for each output its axis and length, None without time

    def __call__(self, *values: Any) -> Any:
        """Return the outputs; those that have a time axis keep it cut where lengths divide."""
        if len(values) != self.count:
            raise TypeError(f"expected {self.count} arguments, got {len(values)}")
        mesh = self._mesh()
        arrays = [
            jnp.asarray(value, jax.dtypes.canonicalize_dtype(variable.type.dtype))
            for value, variable in zip(values, self.graph.inputs, strict=False)
        ]
        axes = [self._time_axis(spec) for spec in self.in_specs]
        grid = self._grid(mesh, arrays, axes)
        capacity = grid.rows * grid.pieces
        names = dict(mesh.shape)
        channels: dict[int, tuple[str, ...]] = {}
        given, lengths = [], []
        for array, axis, spec in zip(arrays, axes, self.in_specs, strict=True):
            lengths.append(None if axis is None else array.shape[axis])
            if axis is not None and array.shape[axis] != capacity:
                pad = [(0, 0)] * array.ndim
                pad[axis] = (0, capacity - array.shape[axis])
                array = jnp.pad(array, pad, mode="edge")
            for size, entry in zip(array.shape, spec, strict=False):
                if entry not in (None, self.time):
                    channels[size] = (entry,) if isinstance(entry, str) else tuple(entry)
            given.append(self._placed(array, axis, spec, mesh))
        key = (grid, tuple((a.shape, str(a.dtype)) for a in arrays), tuple(names.items()))

        def pieces(*local: Any, kinds: list[Any] | None = None) -> Any:
            with cut_channels(channels):
                return self._on_pieces(grid, axes, lengths, local, kinds)

        def cut(out_specs: Any, **options: Any) -> Any:
            return jax.shard_map(
                lambda *local: pieces(*local, **options),
                mesh=mesh,
                in_specs=tuple(PartitionSpec() if a is None else _at(self.time, a) for a in axes),
                out_specs=out_specs,
                axis_names={self.time},
                check_vma=False,
            )

        if key not in self.made:
            kinds: list[Any] = []
            jax.eval_shape(cut(PartitionSpec(), kinds=kinds), *given)
            self.kinds = kinds
            specs = [PartitionSpec() if k is None else _at(self.time, k[0]) for k in kinds]
            self.made[key] = kinds, jax.jit(cut(specs))
        kinds, run = self.made[key]
        self.kinds = kinds
        results = run(*given)
        found = []
        for value, kind in zip(results, kinds, strict=True):
            if kind is not None and kind[1] != value.shape[kind[0]]:
                # JAX has no arrays of uneven pieces: every device gets the rows.
                if dict(zip(mesh.axis_names, mesh.axis_types, strict=True))[self.time] == EXPLICIT:
                    value = jax.sharding.reshard(value, NamedSharding(mesh, PartitionSpec()))
                value = lax.slice_in_dim(value, 0, kind[1], axis=kind[0])
            found.append(value)
        unpacked = self.function.unpack_single
        return found[0] if unpacked and len(found) == 1 else tuple(found)

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
            for entry in spec:
                entries = (entry,) if isinstance(entry, str) else tuple(entry or ())
                named += [(name, f"in_specs[{k}]") for name in entries]
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

    def _placed(self, array: Any, axis: int | None, spec: PartitionSpec, mesh: Any) -> Any:
        """Return an argument, cut as it should be."""
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        if kinds[self.time] == EXPLICIT:
            own = PartitionSpec() if axis is None else _at(self.time, axis)
            array = jax.sharding.reshard(array, NamedSharding(mesh, own))
            spec = PartitionSpec(*(None if entry == self.time else entry for entry in spec))
        if all(entry is None for entry in spec):
            return array
        return lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

    def _time_axis(self, spec: PartitionSpec) -> int | None:
        for axis, entry in enumerate(spec):
            if entry == self.time:
                return axis
            if isinstance(entry, tuple) and self.time in entry:
                raise ValueError(
                    f"scanlib.shard: {spec} cuts an axis along {self.time!r} and others at once"
                )
        return None

    def _grid(self, mesh: Any, arrays: list[Any], axes: list[int | None]) -> Grid:
        lengths = [a.shape[k] for a, k in zip(arrays, axes, strict=True) if k is not None]
        if not lengths:
            raise ValueError(f"scanlib.shard: no entry of in_specs has the axis {self.time!r}")
        total, devices = max(lengths), mesh.shape[self.time]
        if self.tile is None:
            return Grid(self.time, devices, None, max(-(-total // devices), 1), total)
        tiles = max(-(-total // (self.tile * devices)), 1)
        return Grid(self.time, devices, tiles, self.tile, total)

    # On each device

    def _on_pieces(
        self, grid: Grid, axes: Any, lengths: Any, local: Any, kinds: list[Any] | None
    ) -> Any:
        rows = [
            value if axis is None else jnp.moveaxis(value, axis, 0)
            for value, axis in zip(local, axes, strict=True)
        ]

        def run(*values: Any) -> list[Any]:
            inputs = [
                value if axis is None else Timed(grid, value, 0, length, axis=axis)
                for value, axis, length in zip(values, axes, lengths, strict=True)
            ]
            results = [self._finished(value) for value in self._walk(inputs)]
            if kinds is not None:
                kinds[:] = [(v.axis, v.length) if isinstance(v, Timed) else None for v in results]
            return [v.local if isinstance(v, Timed) else v for v in results]

        if grid.tiles is None:
            found = run(*rows)
        else:
            cut = [
                value if axis is None else value.reshape(grid.tiles, grid.rows, *value.shape[1:])
                for value, axis in zip(rows, axes, strict=True)
            ]
            which = [None if axis is None else 0 for axis in axes]
            out = 0 if kinds is not None else [None if k is None else 0 for k in self.kinds]
            found = jax.vmap(run, tuple(which), out, axis_name=TILES)(*cut)
        if kinds is not None:
            return jnp.zeros(())
        return [
            value
            if kind is None
            else jnp.moveaxis(
                value if grid.tiles is None else value.reshape(-1, *value.shape[2:]), 0, kind[0]
            )
            for value, kind in zip(found, self.kinds, strict=True)
        ]

    def _finished(self, value: Any) -> Any:
        """Return an output as it leaves a device."""
        if not isinstance(value, Timed):
            return jnp.asarray(value)
        if value.flipped:
            raise TimeShardingError(
                "an output has its last row first, and its rows are cut over the axis "
                f"{self.time!r}: turn it around afterwards"
            )
        if value.length > value.grid.total:
            raise TimeShardingError(
                f"an output has {value.length} rows, and {value.grid.total} rows are cut over the "
                f"axis {self.time!r}: return its last {value.grid.total} rows"
            )
        return value.at(0)

    def _walk(self, inputs: list[Any]) -> list[Any]:
        """Return the outputs of the graph, `Timed` ones and others."""
        self.loops = []
        values = dict(zip(self.graph.inputs, [*inputs, *self.stored[len(inputs) :]], strict=True))

        def value_of(variable: Variable) -> Any:
            return variable.data if isinstance(variable, Constant) else values[variable]

        for node in self.order:
            results = self._results(node, [value_of(v) for v in node.inputs])
            values.update(zip(node.outputs, results, strict=True))
        return [value_of(variable) for variable in self.graph.outputs]

    def _results(self, node: Apply, given: list[Any]) -> list[Any]:
        if not any(isinstance(value, Timed) for value in given):
            if node not in self.functions:
                self.functions[node] = plain_function(node)
            known = not any(isinstance(value, jax.core.Tracer) for value in given)
            small = all(getattr(out.type, "ndim", 0) <= 1 for out in node.outputs)
            # Sizes and bounds of slices that are computed from numbers stay numbers.
            with jax.ensure_compile_time_eval() if known and small else nullcontext():
                return self.functions[node](*given)
        if not isinstance(node.op, LOOPS):
            return run_op(node, given)
        if isinstance(node.op, LinearScan):
            sequences = node.op.steps(node.op.parts(given)).sequences
        else:
            sequences = node.op.signature.split_inputs(given).sequences
        if any(isinstance(value, Timed) for value in sequences):
            return run_loop(node, given, self.in_turn, self.loops)
        for value in given:
            if isinstance(value, Timed) and value.length > FEW:
                raise TimeShardingError(
                    f"{title(node)}: an array of {value.length} rows is cut over the axis "
                    f"{self.time!r}, and the loop reads it whole"
                )
        return plain_function(node)(*map(plain, given))


def _at(name: str, axis: int) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, name)


def sharded(
    function: Any,
    in_specs: Sequence[PartitionSpec],
    options: dict[str, Any],
) -> ShardedFunction:
    """Return a function that is cut over devices; see `scanlib.shard`."""
    if not isinstance(function, Function):
        inputs, outputs = function
        function = pytensor.function(inputs, outputs, mode="JAX", on_unused_input="ignore")
    return ShardedFunction(function, in_specs, **options)
