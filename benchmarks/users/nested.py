"""Loops with a loop in their step."""

from typing import Any

import numpy as np

from benchmarks.users.declared import UserLoop, user_loop


@user_loop
def nested_sum(rng: np.random.Generator) -> UserLoop:
    """A weighted sum of 20 numbers inside a step."""

    def step(m: Any, row: Any, h: Any) -> Any:
        return 0.5 * h + 0.01 * m.fold(lambda x, s: 0.9 * s + x * h, [row], 0.0 * h)

    return UserLoop(step, rows=[rng.normal(size=(200, 20))], states=[1.0])


@user_loop
def nested_fixed_point(rng: np.random.Generator) -> UserLoop:
    """A fixed point of two equations inside a step, 5 iterations."""

    def step(m: Any, b: Any, x: Any) -> Any:
        def better(z: Any) -> Any:
            first, second = m.sin(z[1]) + b[0], m.cos(z[0]) + b[1]
            return m.stack([x[0] + 0.1 * first, x[1] + 0.1 * second])

        return m.fold(better, [], x, n_steps=5)

    return UserLoop(step, rows=[rng.random((200, 2))], states=[np.zeros(2)])


@user_loop
def written_table(rng: np.random.Generator) -> UserLoop:
    """Soft dynamic time warping, 100 × 100, as a table that two loops fill."""

    def step(m: Any, i: Any, costs: Any, table: Any) -> Any:
        def cell(j: Any, cost: Any, table: Any) -> Any:
            near = m.logaddexp(-table[i - 1, j], -table[i, j - 1])
            return m.assign(table, (i, j), cost - m.logaddexp(near, -table[i - 1, j - 1]))

        return m.fold(cell, [np.arange(1, 101), costs], table)

    table = np.full((101, 101), 1e3)
    table[0, 0] = 0.0
    return UserLoop(
        step, rows=[np.arange(1, 101), rng.random((100, 100))], states=[table], last=True
    )
