"""Hypothesis strategies for random loops, see `tests.loops`."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from tests.loops import Expr, LoopCase, Operand

FLOATS = ("float64", "float32")
INTEGERS = ("int64", "int32", "int8")
DTYPES = (*FLOATS, *INTEGERS, "bool", "complex128")
# Gradients are compared in double precision, and integers and truth values have none.
DIFFERENTIABLE = ("float64", "int64", "int32", "bool")

SEQUENCE_TAPS = ((0,), (0,), (1,), (-1,), (0, -2), (-1, 0), (2, -1), (-3, -1), (1, 0, -1))
STATE_TAPS = ((-1,), (-1,), (-1,), (-2,), (-1, -2), (-3, -1), (-1, -4), (-2, -3), (-3, -1, -2))
STEPS = (0, 1, 2, 3, 3, 4, 7, 12)

UNARY = {"float": ("tanh", "sin", "bump"), "int": ("mask",), "bool": ("negate",), "complex": ()}
BINARY = {
    "float": ("add", "sub", "mul", "maximum"),
    "int": ("add", "sub", "maximum"),
    "bool": ("both", "either", "differ"),
    "complex": ("add", "sub"),
}


def kind(dtype: str) -> str:
    """Return the dtype without its size."""
    return dtype.rstrip("0123456789")


def node(op: str, *args: Expr, dtype: str | None = None, value=None) -> Expr:
    """Apply an elementwise operation; the shapes broadcast."""
    shape = np.broadcast_shapes(*(arg.shape for arg in args))
    return Expr(op, args, dtype or args[-1].dtype, shape, value)


def constant(value, dtype: str) -> Expr:
    return Expr("const", (), dtype, (), value)


def cast(e: Expr, dtype: str) -> Expr:
    """Cast, scaled so that integers become floats of order one."""
    if e.dtype == dtype:
        return e
    if dtype == "bool":
        bound = constant(0, e.dtype) if kind(e.dtype) == "int" else constant(0.213, "float64")
        return node("less", bound, real(e), dtype="bool")
    result = node("cast", e, dtype=dtype)
    if kind(e.dtype) == "int" and kind(dtype) in ("float", "complex"):
        return node("mul", result, constant(0.0625, dtype))
    return result


def real(e: Expr) -> Expr:
    """Return the real part of a complex expression, and anything else as it is."""
    return node("cast", e, dtype="float64") if kind(e.dtype) == "complex" else e


def total(e: Expr, axes: tuple[int, ...], keep: bool) -> Expr:
    """Sum over axes, halved for floats so that sums stay of order one."""
    shape = tuple(1 if d in axes else n for d, n in enumerate(e.shape) if keep or d not in axes)
    result = Expr("total", (e,), e.dtype, shape, (axes, keep))
    if kind(e.dtype) in ("float", "complex"):
        return node("mul", result, constant(0.5, e.dtype))
    return result


def reduced(e: Expr, shape: tuple[int, ...]) -> Expr:
    """Sum an expression until it can broadcast to `shape`."""
    surplus = len(e.shape) - len(shape)
    if surplus > 0:
        e = total(e, tuple(range(surplus)), keep=False)
    lead = len(shape) - len(e.shape)
    axes = tuple(d for d, n in enumerate(e.shape) if shape[lead + d] == 1 and n != 1)
    return total(e, axes, keep=True) if axes else e


class Trees:
    """Draws expressions over a pool of leaves."""

    def __init__(self, draw, pool: list[Expr], matrices: list[Expr]):
        self.draw, self.pool, self.matrices = draw, pool, matrices

    def leaf(self, dtype: str) -> Expr:
        if self.pool and self.draw(st.integers(0, 5)):
            return cast(self.draw(st.sampled_from(self.pool)), dtype)
        return self.constant(dtype)

    def constant(self, dtype: str) -> Expr:
        value = self.draw(st.integers(-3, 3))
        scaled = {"float": value * 0.31, "complex": value * (0.2 + 0.3j), "bool": value > 0}
        return constant(scaled.get(kind(dtype), value), dtype)

    def expression(self, dtype: str, depth: int) -> Expr:
        """Draw a tree of at most `depth` levels."""
        draw = self.draw
        if depth == 0:
            return self.leaf(dtype)
        choices = ["leaf", "binary", "binary", "unary", "where", "total"]
        if kind(dtype) == "bool":
            choices += ["less", "less"]
        if self.matrices and kind(dtype) == "float":
            choices += ["dot"]
        choice = draw(st.sampled_from(choices))
        if choice == "leaf":
            return self.leaf(dtype)
        if choice == "less":
            return self.comparison(depth - 1)
        first = self.expression(dtype, depth - 1)
        if choice == "unary" and UNARY[kind(dtype)]:
            return node(draw(st.sampled_from(UNARY[kind(dtype)])), first)
        if choice == "total" and first.shape:
            axes = draw(st.sets(st.integers(0, len(first.shape) - 1), min_size=1))
            return total(first, tuple(sorted(axes)), keep=draw(st.booleans()) or len(axes) < 2)
        if choice == "dot":
            matrix = cast(draw(st.sampled_from(self.matrices)), dtype)
            if first.shape and first.shape[-1] == matrix.shape[0]:
                product = Expr("dot", (first, matrix), dtype, first.shape)
                return node("mul", product, constant(0.4, dtype))
        second = self.expression(dtype, depth - 1)
        if choice == "where":
            return node("where", self.comparison(0), first, second)
        return node(draw(st.sampled_from(BINARY[kind(dtype)])), first, second)

    def comparison(self, depth: int) -> Expr:
        """Draw a comparison of integers, or of floats with an offset that makes ties unlikely."""
        dtype = self.draw(st.sampled_from(("int64", "float64")))
        first, second = self.expression(dtype, depth), self.expression(dtype, depth)
        if dtype == "float64":
            second = node("add", second, constant(0.137, dtype))
        return node("less", first, second, dtype="bool")


def axis_sizes(draw) -> tuple[int, ...]:
    """Draw the largest row shape of a loop."""
    size = st.sampled_from((3, 2, 1, 4, 0))
    return tuple(draw(st.lists(size, max_size=2)))


def row_types(draw, base: tuple[int, ...], dtypes: tuple[str, ...]) -> list:
    """Draw a few row types that broadcast against `base`, as (dtype, shape, broadcast)."""
    types = []
    for _ in range(draw(st.integers(1, 3))):
        axes = base[draw(st.integers(0, len(base))) :]
        fixed = [draw(st.integers(0, 3)) == 0 for _ in axes]
        shape = tuple(1 if f else n for f, n in zip(fixed, axes, strict=True))
        broadcast = tuple(f and n != 1 for f, n in zip(fixed, axes, strict=True))
        types.append((draw(st.sampled_from(dtypes)), shape, broadcast))
    return types


def next_state(draw, trees: Trees, driven: Trees, state: Operand) -> Expr:
    """Draw what a state becomes: an echo of an operand, an affine map or a bounded function."""
    own = [Expr("leaf", (), state.dtype, state.shape, (state.name, tap)) for tap in state.taps]
    recurrence = draw(st.sampled_from(("echo", "affine", "bounded", "bounded")))
    echoes = [e for e in trees.pool if (e.dtype, e.shape) == (state.dtype, state.shape)]
    if recurrence == "echo":
        return draw(st.sampled_from(echoes))
    dtype = state.dtype
    if kind(dtype) == "complex" or (recurrence == "affine" and kind(dtype) == "float"):
        result = reduced(driven.expression(dtype, 2), state.shape)
        for e in own:
            factor = constant(draw(st.sampled_from((0.9, -0.7, 0.5))) / len(own), dtype)
            if kind(dtype) == "float" and draw(st.booleans()):
                coefficient = reduced(driven.expression(dtype, 1), state.shape)
                factor = node("mul", factor, node("sin", coefficient))
            result = node("add", node("mul", e, factor), result)
        return result
    result = reduced(trees.expression(dtype, 3), state.shape)
    if result.shape != state.shape:
        join = {"float": "add", "int": "sub", "bool": "differ"}[kind(dtype)]
        result = node(join, result, draw(st.sampled_from(own)))
    return {"float": lambda: node("tanh", result), "int": lambda: node("mask", result)}.get(
        kind(dtype), lambda: result
    )()


@st.composite
def loops(draw, dtypes: tuple[str, ...] = DTYPES, steps: tuple[int, ...] = STEPS) -> LoopCase:
    """Draw a loop; all its values stay of order one."""
    base = axis_sizes(draw)
    palette = row_types(draw, base, dtypes)
    if any(dtype in FLOATS for dtype in dtypes) and not any(t[0] in FLOATS for t in palette):
        dtype = draw(st.sampled_from([d for d in dtypes if d in FLOATS]))
        palette.append((dtype, base, (False,) * len(base)))

    def operand(name: str, taps: tuple[int, ...] = (), extra: int = 0, style: str = "input"):
        dtype, shape, broadcast = draw(st.sampled_from(palette))
        static = draw(st.integers(0, 3)) == 0
        return Operand(name, dtype, shape, broadcast, taps, extra, static, style)

    n_steps = draw(st.sampled_from(("int", "symbolic", "absent")))
    sequences = tuple(
        operand(
            f"x{k}",
            draw(st.sampled_from(SEQUENCE_TAPS)),
            draw(st.sampled_from((0, 0, 1, 3))) if k or n_steps != "absent" else 0,
            draw(st.sampled_from(("input", "input", "input", "constant"))),
        )
        for k in range(draw(st.integers(1 if n_steps == "absent" else 0, 3)))
    )
    states = []
    for k in range(draw(st.integers(0, 3))):
        taps = draw(st.sampled_from(STATE_TAPS))
        extra = draw(st.sampled_from((0, 0, 0, 1))) if taps != (-1,) else 0
        style = draw(st.sampled_from(("input", "input", "constant")))
        state = operand(f"y{k}", taps, extra, style)
        # The dtype of a constant that is no float says little: such states become int64.
        if np.dtype(state.dtype).kind in "biu":
            state = replace(state, style="input")
        states.append(state)
    styles = st.sampled_from(("input", "input", "captured", "shared", "constant"))
    non_sequences = [operand(f"w{k}", style=draw(styles)) for k in range(draw(st.integers(0, 2)))]
    matrices = []
    if base and draw(st.booleans()):
        dtype = draw(st.sampled_from([d for d in dtypes if d in FLOATS]))
        shape = (base[-1], base[-1])
        matrices.append(Operand("w9", dtype, shape, (False, False), style=draw(styles)))

    def leaves(operands) -> list[Expr]:
        return [
            Expr("leaf", (), o.dtype, o.shape, (o.name, tap))
            for o in operands
            for tap in (o.taps or (0,))
        ]

    driving = leaves([*sequences, *non_sequences])
    trees = Trees(draw, driving + leaves(states), leaves(matrices))
    driven = Trees(draw, driving, leaves(matrices))

    counter = draw(st.integers(0, 3)) == 0
    if counter:
        states.append(Operand("y9", "int64", (), (), (-1,), style="input"))
    bodies = [next_state(draw, trees, driven, state) for state in states[: len(states) - counter]]
    if counter:
        count = leaves(states[-1:])[0]
        trees.pool.append(count)
        bodies.append(node("add", count, constant(1, "int64")))
    for _ in range(draw(st.integers(0 if states else 1, 2))):
        if bodies and draw(st.integers(0, 4)) == 0:
            bodies.append(draw(st.sampled_from(bodies)))
        else:
            bodies.append(trees.expression(draw(st.sampled_from(dtypes)), 2))
    until = None
    if counter and draw(st.booleans()):
        until = node("less", constant(draw(st.integers(-4, 8)), "int64"), count, dtype="bool")
    elif draw(st.integers(0, 4)) == 0:
        until = reduced(trees.comparison(1), ())
    return LoopCase(
        sequences=sequences,
        states=tuple(states),
        non_sequences=(*non_sequences, *matrices),
        bodies=tuple(bodies),
        order=tuple(draw(st.permutations(range(len(bodies))))),
        steps=draw(st.sampled_from(steps)),
        n_steps=n_steps,
        go_backwards=draw(st.booleans()),
        until=until,
        seed=draw(st.integers(0, 2**16)),
    )


def with_inputs_only(case: LoopCase) -> LoopCase:
    """Return the same loop with every operand an input, so that all can be differentiated."""

    def plain(operands):
        return tuple(replace(o, style="input") for o in operands)

    return replace(
        case,
        sequences=plain(case.sequences),
        states=plain(case.states),
        non_sequences=plain(case.non_sequences),
    )
