"""`shard`: a function of loops over the devices of a mesh, time included."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytensor
from pytensor.compile.executor import Function

if TYPE_CHECKING:
    from scanlib.backends.jax.time_function import ShardedFunction


def shard(
    function: Any,
    in_specs: Sequence[Any],
    *,
    time: str = "time",
    mesh: Any = None,
    tile: int | None = None,
    in_turn: bool = False,
) -> "ShardedFunction":
    """Cut a function over the devices of a JAX mesh, along time as well as along channels.

    Every device runs its piece of each loop. Loops whose steps compose, which are affine,
    log-affine, max-affine and clamped ones, running extremes and matrix recurrences, exchange one
    summary for each device, a few numbers for each channel; so do their gradients. What stands
    around them works on the pieces: maps, sums, products, slices.

    Parameters
    ----------
    function : Function or tuple of (inputs, outputs)
        A function compiled with ``mode="JAX"``, without updates, or the lists of variables that
        one would be compiled of.
    in_specs : sequence of jax.sharding.PartitionSpec
        For each input, the axis of the mesh along which each of its axes is cut. Arrays that have
        the axis `time` in theirs are cut along time.
    time : str, optional
        The axis of the mesh that carries time.
    mesh : jax.sharding.Mesh, optional
        Else that of `jax.set_mesh`. Axes other than `time` must be `AxisType.Auto`.
    tile : int, optional
        Cut time into tiles of so many rows, whatever the number of devices: loops then give the
        same bits on any number of them. Summaries of all tiles are exchanged.
    in_turn : bool, optional
        Let devices wait for one another in loops whose steps do not compose, instead of an error.
        Each walks its piece again until the state that it starts from has come through.

    Returns
    -------
    ShardedFunction
        Called with JAX or NumPy arrays, under `jax.jit` or not; `jax.grad` of it works. Outputs
        with a time axis stay cut along it if their length divides by the number of devices. Its
        method `describe` says how each loop was cut at the last call, and so does
        `scanlib.explain`.

    Raises
    ------
    ValueError
        If the mesh has no such axis, or `in_specs` do not fit.
    TimeShardingError
        A `ValueError`, when it is traced: a loop must be walked in order, or an operation does not
        work on pieces of the time axis.
    ImportError
        Without JAX.

    Examples
    --------
    >>> import jax, numpy as np, pytensor.tensor as pt, scanlib
    >>> from jax.sharding import PartitionSpec as P
    >>> x = pt.matrix("x")
    >>> h = scanlib.scan(lambda x, h: 0.5 * h + x, x, pt.zeros(2), return_updates=False)
    >>> mesh = jax.make_mesh((jax.device_count(),), ("time",))
    >>> f = scanlib.shard(([x], [h]), [P("time")], mesh=mesh)
    >>> print(np.asarray(jax.jit(f)(np.ones((3, 2)))[0])[:, 0])
    [1.   1.5  1.75]
    """
    from scanlib.backends.jax.time_function import ShardedFunction

    if not isinstance(function, Function):
        inputs, outputs = function
        function = pytensor.function(inputs, outputs, mode="JAX", on_unused_input="ignore")
    return ShardedFunction(function, in_specs, time, mesh, tile, in_turn)
