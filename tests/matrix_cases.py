"""Loops of several linear states, each written once for PyTensor and for NumPy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytensor.tensor as pt

import scanlib
from tests.reference import reference_scan

T = 7


class Case(NamedTuple):
    """A loop in symbols and in NumPy: the same step for both, given their functions."""

    step: Callable
    sequences: dict[str, tuple[int, ...]]
    initial: dict[str, tuple[int, ...]]
    others: dict[str, tuple[int, ...]] = {}  # noqa: RUF012
    taps: dict[str, list[int]] = {}  # noqa: RUF012
    outputs: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012
    static: bool = False
    stays: bool = False  # a loop: matrices act along several axes of its state


class Symbols:
    """PyTensor under the names of NumPy, where they differ."""

    concatenate = staticmethod(pt.concatenate)
    stack = staticmethod(pt.stack)
    tanh = staticmethod(pt.tanh)

    @staticmethod
    def put(array, index, value):
        return pt.set_subtensor(array[index], value)


class Numbers:
    concatenate = staticmethod(np.concatenate)
    stack = staticmethod(np.stack)
    tanh = staticmethod(np.tanh)

    @staticmethod
    def put(array, index, value):
        array = array.copy()
        array[index] = value
        return array


def joined_step(p, u, x, v, A):
    h = A @ p.concatenate([x, v]) + u
    return [h[: x.shape[0]], h[x.shape[0] :]]


def trend(p, u, level, slope, M):
    new = M @ p.stack([level, slope]) + u
    return [new[0], new[1]]


def structural(p, e, level, slope, season, A):
    return [
        level + slope + e[:3],
        0.9 * slope + 0.1 * e[:3],
        A @ season + level[:2] - 0.5 * e[0],
    ]


def reshaped(p, u, H, A):
    h = A @ H.reshape((6,)) + u
    return [h.reshape((3, 2))]


CASES = {
    "two vectors": Case(
        lambda p, u, x, v, A, B, C, D: [A @ x + B @ v + u, C @ x + D @ v],
        {"u": (3,)},
        {"x": (3,), "v": (2,)},
        {"A": (3, 3), "B": (3, 2), "C": (2, 3), "D": (2, 2)},
    ),
    "triangular": Case(
        lambda p, u, x, v, A, B, D: [A @ x + B @ v, D @ v + u],
        {"u": (2,)},
        {"x": (3,), "v": (2,)},
        {"A": (3, 3), "B": (3, 2), "D": (2, 2)},
        static=True,
    ),
    "per step": Case(
        lambda p, a, u, x, v, B: [a @ x + B @ v, v * u[0] + B.T @ x + u],
        {"a": (2, 2), "u": (2,)},
        {"x": (2,), "v": (2,)},
        {"B": (2, 2)},
        static=True,
    ),
    "two taps": Case(
        lambda p, c, h2, h1, A, B: [A @ h1 + B @ h2 + c],
        {"c": (2,)},
        {"h": (2, 2)},
        {"A": (2, 2), "B": (2, 2)},
        {"h": [-2, -1]},
    ),
    "taps apart": Case(
        lambda p, c, h3, h1, A, B: [A @ h1 + B @ h3 + c],
        {"c": (2,)},
        {"h": (3, 2)},
        {"A": (2, 2), "B": (2, 2)},
        {"h": [-3, -1]},
        static=True,
    ),
    "concatenated": Case(joined_step, {"u": (5,)}, {"x": (3,), "v": (2,)}, {"A": (5, 5)}),
    "stacked": Case(trend, {"u": (2,)}, {"level": (), "slope": ()}, {"M": (2, 2)}),
    "structural": Case(
        structural,
        {"e": (3,)},
        {"level": (3,), "slope": (3,), "season": (2,)},
        {"A": (2, 2)},
        static=True,
    ),
    "shift register": Case(
        lambda p, e, h, phi: [p.concatenate([(phi * h).sum(axis=0, keepdims=True) + e, h[:-1]])],
        {"e": (1,)},
        {"h": (4,)},
        {"phi": (4,)},
        static=True,
    ),
    "an item set": Case(
        lambda p, u, h, A: [p.put(A @ h, 1, h[0]) + u],
        {"u": (3,)},
        {"h": (3,)},
        {"A": (3, 3)},
        static=True,
    ),
    "reshaped": Case(reshaped, {"u": (6,)}, {"H": (3, 2)}, {"A": (6, 6)}, static=True, stays=True),
    "transposed": Case(
        lambda p, u, H, A: [A @ H.T + u], {"u": (2, 2)}, {"H": (2, 2)}, {"A": (2, 2)}, static=True
    ),
    "congruence": Case(
        lambda p, c, P, G: [G @ P @ G.T + c],
        {"c": (3, 3)},
        {"P": (3, 3)},
        {"G": (3, 3)},
        static=True,
        stays=True,
    ),
    "congruence of any size": Case(
        lambda p, c, P, G: [G @ P @ G.T + c],
        {"c": (3, 3)},
        {"P": (3, 3)},
        {"G": (3, 3)},
        stays=True,
    ),
    "congruence per step": Case(
        lambda p, g, P, C: [-0.5 * (g @ (P + C) @ g.T) + C],
        {"g": (4, 4)},
        {"P": (4, 4)},
        {"C": (4, 4)},
        stays=True,
    ),
    "from both sides": Case(
        lambda p, c, b, P, A: [A @ (A @ P) @ b + c],
        {"c": (3, 2), "b": (2, 2)},
        {"P": (3, 2)},
        {"A": (3, 3)},
        static=True,
        stays=True,
    ),
    "large from both sides": Case(
        lambda p, c, P, A, B: [A @ P @ B + c],
        {"c": (5, 6)},
        {"P": (5, 6)},
        {"A": (5, 5), "B": (6, 6)},
        stays=True,
    ),
    "small congruence": Case(
        lambda p, c, P, G: [G @ P @ G.T + c],
        {"c": (2, 2)},
        {"P": (2, 2)},
        {"G": (2, 2)},
        static=True,
        stays=True,
    ),
    "sums of both sides": Case(
        lambda p, c, P, A: [0.9 * P + 0.1 * (A @ P + P @ A.T) + c],
        {"c": (3, 3)},
        {"P": (3, 3)},
        {"A": (3, 3)},
        static=True,
        stays=True,
    ),
    "backwards in two orders": Case(
        lambda p, u, h, A: [A @ h[::-1] + u], {"u": (3,)}, {"h": (3,)}, {"A": (3, 3)}
    ),
    "batched": Case(
        lambda p, u, x, v, A, B, D: [x @ A + v @ B + u, v @ D - 0.5 * x[:, :2]],
        {"u": (4, 3)},
        {"x": (4, 3), "v": (4, 2)},
        {"A": (3, 3), "B": (2, 3), "D": (2, 2)},
        static=True,
    ),
    "outputs": Case(
        lambda p, u, x, v, A, B: [A @ x + B @ v + u, B @ x + A @ v, p.tanh(A @ x) * v],
        {"u": (2,)},
        {"x": (2,), "v": (2,)},
        {"A": (2, 2), "B": (2, 2)},
        outputs=1,
    ),
    "no sequence": Case(
        lambda p, x, v, A, B: [A @ x + B @ v, B @ x - v],
        {},
        {"x": (2,), "v": (2,)},
        {"A": (2, 2), "B": (2, 2)},
        options={"n_steps": 5},
    ),
    "flipped": Case(
        lambda p, u, x, v, A, B: [A @ x + B @ v + u, B @ x - A @ v],
        {"u": (2,)},
        {"x": (2,), "v": (2,)},
        {"A": (2, 2), "B": (2, 2)},
        options={"go_backwards": True},
    ),
}


def shapes_of(case, steps=T):
    return {
        **{name: (steps, *shape) for name, shape in case.sequences.items()},
        **case.initial,
        **case.others,
    }


def values_of(case, steps=T, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(0.4 * rng.normal(size=shape), dtype)
        for name, shape in shapes_of(case, steps).items()
    }


def build(case, dtype="float64"):
    inputs = {
        name: pt.tensor(
            name,
            dtype=dtype,
            shape=tuple(
                size if case.static and not (axis == 0 and name in case.sequences) else None
                for axis, size in enumerate(shape)
            ),
        )
        for name, shape in shapes_of(case).items()
    }
    info = outputs_info(case, inputs)
    traces = scanlib.scan(
        lambda *parts: case.step(Symbols, *parts),
        sequences=[inputs[name] for name in case.sequences],
        outputs_info=info,
        non_sequences=[inputs[name] for name in case.others],
        return_updates=False,
        **case.options,
    )
    return inputs, traces if isinstance(traces, list) else [traces]


def outputs_info(case, given):
    states = [
        {"initial": given[name], "taps": case.taps[name]} if name in case.taps else given[name]
        for name in case.initial
    ]
    return [*states, *[None] * case.outputs]


def by_hand(case, values):
    rows = [None] * len(case.initial)
    rows += [(tuple(case.initial["x"]), np.dtype("float64"))] * case.outputs if case.outputs else []
    return reference_scan(
        lambda *parts: case.step(Numbers, *parts),
        [values[name] for name in case.sequences],
        outputs_info(case, values),
        [values[name] for name in case.others],
        rows=rows,
        **case.options,
    )
