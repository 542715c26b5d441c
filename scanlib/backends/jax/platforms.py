"""Functions that are another one on each platform, and traced only for the one that they run on.

`jax.lax.platform_dependent` traces all of them. What a loop is on other devices takes longer to
trace than the call of its kernels, and some steps that kernels can take JAX cannot.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from scanlib._compat.jax import Primitive, batching, mlir, prim_requires_devices_during_lowering
from scanlib.backends.jax.partitioned import Factors, explicitly, partitioned, varying

Function = Callable[..., list[Any]]

_either = Primitive("scanlib_loop")
_either.multiple_results = True


def on_platforms(
    portable: Function,
    results: Function | None = None,
    on_cpu: Function | None = None,
    on_cuda: Function | None = None,
    factors: Factors | None = None,
) -> Function:
    """Return a function that is one of these, by the device that it runs on.

    On other devices, and where there is no special function, it is `portable`. Derivatives that JAX
    takes by itself, with `jax.grad` around the function that PyTensor compiled, are those of
    `portable`. Results are trees of arrays; `results` returns anything in their structure, shapes
    and dtypes. The special functions may be cut over devices along the axes of `factors`.
    """
    structure: Any = None

    @cache
    def flat(function: Function) -> Function:
        def leaves(*inputs: Any) -> list[Any]:
            nonlocal structure
            found, structure = jax.tree.flatten(function(*inputs))
            return list(map(jnp.asarray, found))

        return leaves

    given = {"portable": portable, "results": results, "cpu": on_cpu, "cuda": on_cuda}
    functions = {name: flat(function or portable) for name, function in given.items()}

    @jax.custom_jvp
    def run(*inputs: Any) -> list[Any]:
        return _bind(varying(inputs, inputs), functions, factors)

    @run.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        return jax.tree.map(_batch_first, jax.jvp(flat(portable), primals, tangents))

    def whole(*inputs: Any) -> list[Any]:
        found = run(*inputs)
        return jax.tree.unflatten(structure, found)

    return whole


def _batch_first(value: Any) -> Any:
    """Return a value as it is, under `jax.vmap` with the batch first, as `_batch` has it; results
    of a `jax.custom_jvp`, and those that come with tangents, must have it at the same place."""
    if value.dtype == jax.dtypes.float0:
        return value
    return lax.reshape(lax.reshape(value, (1, *value.shape)), value.shape)


def _bind(
    inputs: Sequence[Any], functions: dict[str, Function], factors: Factors | None
) -> list[Any]:
    def run(*values: Any) -> list[Any]:
        types = tuple(jax.make_jaxpr(functions["results"])(*values).out_avals)
        return _either.bind(*values, types=types, factors=factors, **functions)

    return explicitly(run, factors, inputs)(*inputs)


def _evaluate(*inputs: Any, **parameters: Any) -> list[Any]:
    return jax.jit(partial(_either.bind, **parameters))(*inputs)


def _batch(
    inputs: Sequence[Any],
    axes: Sequence[Any],
    *,
    types: Any,
    factors: Factors | None,
    **functions: Function,
) -> tuple[list[Any], list[int]]:
    first = [
        value if axis is None else jnp.moveaxis(value, axis, 0)
        for value, axis in zip(inputs, axes, strict=True)
    ]
    which = tuple(None if axis is None else 0 for axis in axes)
    batched = {name: jax.vmap(function, in_axes=which) for name, function in functions.items()}
    if factors is not None:
        factors = factors.batched([axis is not None for axis in axes])
    return _bind(first, batched, factors), [0] * len(types)


def _lowering(name: str) -> Callable[..., Any]:
    def run(*inputs: Any, factors: Factors | None, **parameters: Any) -> list[Any]:
        special = parameters[name] is not parameters["portable"]
        return partitioned(parameters[name], factors if special else None)(*inputs)

    rule = mlir.lower_fun(run, multiple_results=True)

    def lower(context: Any, *inputs: Any, factors: Factors | None, **parameters: Any) -> Any:
        # In a part of a `jax.shard_map` that leaves some axes to XLA, it cuts no calls of ours.
        manual = getattr(context.module_context.axis_context, "manual_axes", None)
        return rule(context, *inputs, factors=None if manual else factors, **parameters)

    return lower


_either.def_impl(_evaluate)
_either.def_abstract_eval(lambda *inputs, types, **parameters: list(types))
batching.primitive_batchers[_either] = _batch
prim_requires_devices_during_lowering.add(_either)
mlir.register_lowering(_either, _lowering("portable"))
for _platform in ("cpu", "cuda"):
    mlir.register_lowering(_either, _lowering(_platform), platform=_platform)
