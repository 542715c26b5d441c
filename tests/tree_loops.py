"""Random loops over trees, written once for arrays and for symbols, and the plain loop over them.

A step computes with ``+``, ``*``, ``/`` and ``sum`` alone, so a function runs on arrays and on
tensors. The plain loop has its own functions of trees, and its own lags.
"""

from collections import namedtuple
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from hypothesis import strategies as st


@dataclass(frozen=True)
class Pair:
    left: Any
    right: Any = None


Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Leaf:
    """The shape of a leaf's row, and how many steps back it is read; None where it has no lags."""

    shape: tuple = ()
    lags: int | None = None


class Past(dict):
    """Values by lag: a leaf."""


def parts(tree):
    """Return what a container holds, and a function that makes one of other parts."""
    if isinstance(tree, Pair):
        return [getattr(tree, f.name) for f in fields(tree)], lambda new: Pair(*new)
    if isinstance(tree, Point):
        return list(tree), lambda new: Point(*new)
    if type(tree) is dict:
        return list(tree.values()), lambda new: dict(zip(tree, new, strict=True))
    if type(tree) in (list, tuple):
        return list(tree), type(tree)
    return None


def leaves(tree):
    """Return the leaves of a tree in order."""
    found = None if tree is None else parts(tree)
    if found is None:
        return [] if tree is None else [tree]
    return [leaf for part in found[0] for leaf in leaves(part)]


def mapped(function, tree, *others):
    """Return a tree with a function of its leaves, and of those of others."""
    if tree is None:
        return None
    found = parts(tree)
    if found is None:
        return function(tree, *others)
    inner = zip(found[0], *(parts(other)[0] for other in others), strict=True)
    return found[1]([mapped(function, *group) for group in inner])


def trees(leaf, depth=2):
    """Draw trees of at most `depth` levels; a dict comes in any order."""
    if depth == 0:
        return leaf
    inner = trees(leaf, depth - 1) | st.none()
    return st.one_of(
        leaf,
        st.tuples(inner, inner),
        st.lists(inner, max_size=2),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.sampled_from(["level", "slope", 3]), inner, max_size=2),
    )


SHAPES = st.sampled_from([(), (2,), (1, 2)])
CARRIES = trees(st.builds(Leaf, SHAPES, st.sampled_from([None, None, 0, 1, 2, 3])))
ROWS = trees(st.builds(Leaf, SHAPES, st.sampled_from([None, None, 0, 1, 2])))


@dataclass
class TreeLoop:
    """A loop: the trees of its carry and of a row, the number of steps, how it walks, a seed."""

    carry: Any
    xs: Any
    steps: int
    reverse: bool
    seed: int

    def arrays(self):
        """Return arrays for `init` and `xs`, in their trees."""
        rng = np.random.default_rng(self.seed)

        def rows(leaf):
            return rng.normal(size=(self.steps + (leaf.lags or 0), *leaf.shape))

        def first(leaf):
            return rng.normal(size=leaf.shape if leaf.lags is None else (leaf.lags, *leaf.shape))

        return mapped(first, self.carry), mapped(rows, self.xs)

    def step(self, carry, x):
        """One step, of whatever has ``+``, ``*``, ``/`` and ``sum``."""
        rng = np.random.default_rng(self.seed + 1)
        total = 0.3

        def values(leaf, given, first):
            return [given] if leaf.lags is None else [given[k] for k in range(first, leaf.lags + 1)]

        for leaf, given in zip(leaves(self.xs), leaves(x), strict=True):
            total = total + sum(
                rng.uniform(-0.5, 0.5) * value.sum() for value in values(leaf, given, 0)
            )

        def new(leaf, given):
            past = sum(
                (rng.uniform(-1, 1) * v for v in values(leaf, given, 1)), np.zeros(leaf.shape)
            )
            return past / (1.0 + past * past) + 0.1 * total + np.zeros(leaf.shape)

        after = mapped(new, self.carry, carry)
        drawn = rng.integers(0, 2, size=2)
        old = [
            v
            for leaf, v in zip(leaves(self.carry), leaves(carry), strict=True)
            if leaf.lags is None
        ]
        y = {"new": after, "old": old if drawn[0] else None, "total": [total * 1.0, None]}
        return after, y

    def run(self, init, xs):
        """The plain loop. Histories are lists of rows; a walk from the end sees flipped arrays."""
        flip = -1 if self.reverse else 1
        rows = [
            (leaf, value[::flip]) for leaf, value in zip(leaves(self.xs), leaves(xs), strict=True)
        ]
        past = [
            (leaf, [value] if leaf.lags is None else list(value[::flip]))
            for leaf, value in zip(leaves(self.carry), leaves(init), strict=True)
        ]
        stacked = []
        for t in range(self.steps):
            row = iter([seen(leaf, values, (leaf.lags or 0) + t, 0) for leaf, values in rows])
            before = iter([seen(leaf, values, len(values), 1) for leaf, values in past])
            x = mapped(lambda _, row=row: next(row), self.xs)
            carry = mapped(lambda _, before=before: next(before), self.carry)
            after, y = self.step(carry, x)
            for (_, values), value in zip(past, leaves(after), strict=True):
                values.append(np.asarray(value))
            stacked.append([np.asarray(value) for value in leaves(y)])
        final = [
            values[-1] if leaf.lags is None else np.array(values[-leaf.lags :])[::flip]
            for leaf, values in past
            if leaf.lags != 0
        ]
        return final, [np.stack(column)[::flip] for column in zip(*stacked, strict=True)]


def seen(leaf, values, t, first):
    """Return what a step sees at the place `t`: a value, or those of the lags from `first` on."""
    if leaf.lags is None:
        return values[t - first]
    return Past({lag: values[t - lag] for lag in range(first, leaf.lags + 1)})


LOOPS = st.builds(
    TreeLoop, CARRIES, ROWS, st.sampled_from([1, 2, 3, 5]), st.booleans(), st.integers(0, 99)
)
