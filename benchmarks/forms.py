"""One loop in several forms: does it matter how a user writes it?

``python -m benchmarks.forms`` times forms of the same loop against the first of their group, which
is the one that a kernel runs best, in one process and taking turns. All forms of a group must give
what the first one gives. A ratio far above one is a form that the compiler does not see through.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import graph_inputs

import scanlib
from benchmarks.timing import median, paired_ratio, take_turns

STEPS = 20_000
rng = np.random.default_rng(0)

x, w, d = pt.vectors("x", "w", "d")
X, pairs, rows, W = pt.matrices("X", "pairs", "rows", "W")
a = pt.scalar("a")
DATA: dict[Variable, np.ndarray] = {
    x: rng.normal(size=STEPS),
    w: rng.uniform(-0.9, 0.9, STEPS),
    X: np.empty((STEPS, 1)),
    pairs: np.empty((STEPS, 2)),
    rows: rng.normal(size=(STEPS // 10, 16)),
    W: rng.normal(size=(16, 16)) / 16,
    d: rng.uniform(size=16),
    a: np.array(0.9),
}
DATA[X][:, 0] = DATA[x]
DATA[pairs][:] = np.stack([DATA[x], DATA[w]], axis=1)
n = x.shape[0]


def scan(step: Callable, rows: object, start: object, **options: Any) -> Variable:
    return scanlib.scan(step, rows, start, return_updates=False, **options)


def lorenz(u: Variable, v: Variable, w: Variable) -> list[Variable]:
    return [
        u + 0.001 * 10.0 * (v - u),
        v + 0.001 * (u * (28.0 - w) - v),
        w + 0.001 * (u * v - 2.6 * w),
    ]


Form = Callable[[], Variable]
GROUPS: dict[str, Mapping[str, Form]] = {
    "a h + x": {
        "a sequence": lambda: scan(lambda x, h: a * h + x, x, 0.0),
        "an index over arange": lambda: scan(lambda t, h: a * h + x[t], pt.arange(n), 0.0),
        "an index that a state counts": lambda: scan(
            lambda t, h: [t + 1, a * h + x[t]], None, [pt.constant(0), 0.0], n_steps=n
        )[1],
        "an index, steps as a number": lambda: scan(
            lambda t, h: a * h + x[t], pt.arange(STEPS), 0.0
        ),
        "a column of a matrix": lambda: scan(lambda x, h: a * h + x, pairs[:, 0], 0.0),
        "a matrix of one column": lambda: scan(lambda x, h: a * h + x, X, pt.zeros(1))[:, 0],
        "a reversed array, reversed again": lambda: scan(
            lambda x, h: a * h + x, x[::-1][::-1], 0.0
        ),
        "scanlib.loop": lambda: scanlib.loop(lambda h, x: (v := a * h + x, v), 0.0, x)[1],
    },
    "(h + x) w": {
        "sequences": lambda: scan(lambda x, w, h: (h + x) * w, [x, w], 0.0),
        "an index over arange": lambda: scan(
            lambda t, h: (h + x[t]) * w[t], pt.arange(pt.minimum(n, w.shape[0])), 0.0
        ),
        "from the last row": lambda: scan(
            lambda x, w, h: (h + x) * w, [x[::-1], w[::-1]], 0.0, go_backwards=True
        ),
        "rows of a matrix": lambda: scan(lambda r, h: (h + r[0]) * r[1], pairs, 0.0),
    },
    "e^(-w²) h + log(1 + x²)": {
        "sequences": lambda: scan(
            lambda x, w, h: pt.exp(-(w**2)) * h + pt.log1p(x**2), [x, w], 0.0
        ),
        "rows of a matrix": lambda: scan(
            lambda r, h: pt.exp(-(r[1] ** 2)) * h + pt.log1p(r[0] ** 2), pairs, 0.0
        ),
    },
    "Lorenz": {
        "three states": lambda: pt.stack(
            scan(lorenz, None, [1.0, 1.0, 1.0], n_steps=STEPS), axis=1
        ),
        "a stacked vector": lambda: scan(
            lambda s: pt.stack(lorenz(s[0], s[1], s[2])), None, pt.ones(3), n_steps=STEPS
        ),
    },
    "0.9 P + x x'": {
        "broadcast": lambda: scan(
            lambda x, P: 0.9 * P + x[:, None] * x[None, :], rows, pt.zeros((16, 16))
        ),
        "pt.outer": lambda: scan(lambda x, P: 0.9 * P + pt.outer(x, x), rows, pt.zeros((16, 16))),
    },
    "d h + W x": {
        "products before the loop": lambda: scan(lambda x, h: d * h + x, rows @ W.T, pt.zeros(16)),
        "in the step": lambda: scan(lambda x, h: d * h + W @ x, rows, pt.zeros(16)),
        "in the step, a matrix of d": lambda: scan(
            lambda x, h: pt.diag(d) @ h + W @ x, rows, pt.zeros(16)
        ),
    },
}


@dataclass
class Timed:
    """What a form takes for a step, in nanoseconds, and beside the first form of its group."""

    name: str
    nanoseconds: float
    ratio: float


def prepared(trace: Variable, gradient: bool) -> Callable[[], list[np.ndarray]]:
    """Compile a loop, with the gradient of a cost by all that it reads, and give it its data."""
    inputs = [variable for variable in DATA if variable in set(graph_inputs([trace]))]
    outputs = [trace]
    if gradient:
        outputs += pytensor.grad((trace**2).sum(), inputs)
    function = pytensor.function(inputs, outputs, trust_input=True)
    values = [DATA[variable] for variable in inputs]
    return lambda: function(*values)


def time_group(forms: Mapping[str, Form], gradient: bool, rounds: int) -> list[Timed]:
    """Time the forms of one loop; an `AssertionError` if they do not agree."""
    traces = {name: build() for name, build in forms.items()}
    if gradient and not any(v in DATA for v in graph_inputs(list(traces.values()))):
        return []
    calls = {name: prepared(trace, gradient) for name, trace in traces.items()}
    wanted, *_ = next(iter(calls.values()))()
    for call in calls.values():
        np.testing.assert_allclose(call()[0], wanted, rtol=1e-9, atol=1e-9)
    samples = take_turns(calls, rounds)
    base = next(iter(samples.values()))
    return [
        Timed(name, 1e9 * median(own) / len(wanted), paired_ratio(own, base).median)
        for name, own in samples.items()
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forms", description=__doc__)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, help="which loops (default: all)")
    parser.add_argument("--rounds", type=int, default=15, help="samples of each form")
    options = parser.parse_args(arguments)
    print("Nanoseconds a step, and beside the first form; the same with gradients.\n")
    for group in options.groups or GROUPS:
        print(group, flush=True)
        passes = [time_group(GROUPS[group], gradient, options.rounds) for gradient in (False, True)]
        for k, form in enumerate(GROUPS[group]):
            cells = [f"{p[k].nanoseconds:9.2f} {p[k].ratio:7.2f}" if p else "" for p in passes]
            print(f"  {form:<36} {'   '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
