"""What kernels compute for PyTensor's scalar Ops is what NumPy computes, for all dtypes."""

import numpy as np
import pytensor.scalar as ps
import pytensor.scalar.math as psm
import pytest
from pytensor.scalar.basic import get_scalar_type

from scanlib.kernels.language import POINTER, Type
from scanlib.kernels.scalars import (
    COMPARISONS,
    FLOAT_RULES,
    FROM_PAIRS,
    PAIR_RULES,
    RULES,
    NoKernelError,
    Pair,
    Scalars,
    parts_of,
)
from scanlib.ops.logaddexp import LogAddExp
from tests.kernel_runs import by_llvm, interpreted, write_kernel
from tests.kernel_verifier import verify

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
REALS = ("bool", *INTEGERS, "float32", "float64")
COMPLEX = ("complex64", "complex128")

# The Ops, by class, of which PyTensor has one object each, and how many operands they are given.
OBJECTS = [
    *(ps.add, ps.mul, ps.sub, ps.neg, ps.sqr, ps.abs, ps.sign, ps.maximum, ps.minimum),
    *(ps.scalar_maximum, ps.scalar_minimum, ps.clip, ps.second, ps.identity, ps.conj, ps.real),
    *(ps.int_div, ps.mod, ps.pow, ps.and_, ps.or_, ps.xor, ps.invert),
    *(ps.true_div, ps.reciprocal, ps.sqrt, ps.ceil, ps.floor, ps.trunc),
    *(ps.round_half_to_even, ps.round_half_away_from_zero),
    *(ps.exp, ps.expm1, ps.log, ps.log1p, ps.tanh, psm.sigmoid, psm.softplus, psm.log1mexp),
    *(ps.exp2, ps.log2, ps.log10, ps.cos, ps.sin, ps.tan, ps.arccos, ps.arcsin, ps.arctan),
    *(ps.arctan2, ps.cosh, ps.sinh, ps.arccosh, ps.arcsinh, ps.arctanh, psm.erf, psm.erfc),
    psm.tri_gamma,
    *(ps.eq, ps.neq, ps.lt, ps.le, ps.gt, ps.ge, ps.isnan, ps.isinf, ps.switch),
    *(ps.imag, ps.complex),
    # Not in all releases of PyTensor.
    *(getattr(ps, name) for name in ("deg2rad", "rad2deg", "angle") if hasattr(ps, name)),
]


def numbers(dtype):
    """Return numbers of a dtype at which something happens."""
    kind = np.dtype(dtype).kind
    if kind == "b":
        return np.array([False, True])
    if kind in "iu":
        info = np.iinfo(dtype)
        near = [info.min, info.min + 1, info.max - 1, info.max]
        return np.array([*near, 0, 1, 2, 3, 7, *([-1, -2, -7] if kind == "i" else [])], dtype)
    with np.errstate(all="ignore"):
        real = np.array(
            [0.0, -0.0, 0.5, -0.5, 1.0, -1.5, 2.5, 7.25, -33.3, 1e-20, np.inf, -np.inf, np.nan],
            "float32" if dtype in ("float32", "complex64") else "float64",
        )
    if kind == "f":
        return real
    finite = real[np.isfinite(real)]
    return (finite[:, None] + 1j * finite[None, ::2]).ravel().astype(dtype)


def operands(count, dtypes):
    """Return all combinations of the numbers of some dtypes."""
    grids = np.meshgrid(*(numbers(dtypes[k % len(dtypes)]) for k in range(count)), indexing="ij")
    found = [grid.ravel() for grid in grids]
    keep = np.arange(len(found[0])) % max(1, len(found[0]) // 300) == 0
    return [array[keep] for array in found]


def kernel_of(node, count):
    """Return a kernel that computes a node for each of some items, one after the other."""

    def write(w, *pointers):
        scalars = Scalars(w)
        with w.loop(0, count) as i:
            for variable, pointer in zip(node.inputs, pointers, strict=False):
                scalars.bind(variable, load(w, variable.type.dtype, pointer, i))
            scalars.emit(node.outputs)
            store(w, scalars.number(node.outputs[0]), pointers[-1], i)

    names = {f"p{k}": POINTER for k in range(len(node.inputs) + 1)}
    kernel = write_kernel("scalar", names, write)
    verify(kernel)
    return kernel


def load(w, dtype, pointer, i):
    half = parts_of(dtype)
    if half is None:
        kind = Type(dtype)
        return w.load(kind, pointer, i * kind.itemsize)
    kind = Type(half)
    place = i * (2 * kind.itemsize)
    return Pair(w.load(kind, pointer, place), w.load(kind, pointer, place + kind.itemsize))


def store(w, value, pointer, i):
    if not isinstance(value, Pair):
        w.store(pointer, i * value.type.itemsize, value)
        return
    size = value.real.type.itemsize
    w.store(pointer, i * (2 * size), value.real)
    w.store(pointer, i * (2 * size) + size, value.imag)


def cases(op):
    """Yield the dtypes that an Op is tried with, and its node."""
    count = {ps.switch: 3, ps.clip: 3}.get(op) or getattr(op, "nin", -1)
    count = 2 if count < 1 else count
    mixed = [("int64", "uint64"), ("int8", "float64"), ("float32", "int16"), ("bool", "int32")]
    mixed += [("float64", "complex128"), ("uint8", "int8")]
    for dtypes in [*((d,) for d in (*REALS, *COMPLEX)), *(mixed if count > 1 else [])]:
        own = [get_scalar_type(dtypes[k % len(dtypes)])() for k in range(count)]
        try:
            node = op.make_node(*own)
        except (TypeError, NotImplementedError, ps.ComplexError):
            continue
        yield dtypes, node, count


def known(op, node, arrays):
    """Return what NumPy, or PyTensor's own Python function, computes."""
    out = node.outputs[0].type.dtype
    if type(op) in (ps.IntDiv, ps.Mod) and out != "bool":
        arrays = [array.astype(out) for array in arrays]
    if op is ps.identity:
        return arrays[0]
    if op is ps.second:
        return arrays[1].astype(out)
    if op is ps.round_half_away_from_zero:
        x = arrays[0].astype(out)
        return np.copysign(np.floor(np.abs(x) + x.dtype.type(0.5)), x)
    if op is ps.clip:
        x, low, high = arrays
        return np.where(x < low, low, np.where(x > high, high, x)).astype(out)
    if op is ps.switch:
        return np.where(arrays[0] != 0, arrays[1], arrays[2]).astype(out)
    if op is ps.sqr:
        return arrays[0] * arrays[0]
    if op is psm.sigmoid:
        return 1 / (1 + np.exp(-arrays[0].astype(out)))
    if op is psm.softplus:
        return np.logaddexp(0, arrays[0].astype(out)).astype(out)
    if op is ps.complex:
        return (arrays[0] + 1j * arrays[1].astype("float64")).astype(out)
    if op is ps.reciprocal:
        return 1 / arrays[0].astype(out)
    if op is psm.log1mexp:
        x = arrays[0].astype(out)
        near = np.log(-np.expm1(x))
        return np.where(x < np.log(0.5), np.log1p(-np.exp(x)), near)
    if op is psm.tri_gamma:
        x = arrays[0].astype(out)
        return np.where(np.isneginf(x), np.nan, op.impl(x)).astype(out)
    if op in (psm.erf, psm.erfc):
        from scipy import special

        return getattr(special, op.name)(arrays[0].astype(out)).astype(out)
    if op.nfunc_spec is None:
        return np.array([op.impl(*items) for items in zip(*arrays, strict=True)]).astype(out)
    function = np
    for name in op.nfunc_spec[0].split("."):
        function = getattr(function, name)
    if out in ("float32", "float64") and all(a.dtype.kind in "biu" for a in arrays):
        arrays = [array.astype(out) for array in arrays]
    return np.asarray(function(*arrays)).astype(out)


# Powers and quotients of extreme complex numbers differ in what is infinite and what NaN.
@pytest.mark.parametrize("op", OBJECTS, ids=str)
def test_values_are_those_of_numpy(op):
    tried = 0
    for dtypes, node, count in cases(op):
        arrays = operands(count, dtypes)
        out = node.outputs[0].type.dtype
        if type(op) is ps.Pow and out not in ("float32", "float64"):
            keep = (arrays[1] >= 0) & (arrays[1] < 60) if out not in COMPLEX else slice(None)
            arrays = [array[keep] for array in arrays]
        try:
            kernel = kernel_of(node, len(arrays[0]))
        except NoKernelError:
            assert out in (*COMPLEX, "bool", "float64") or type(op) not in RULES
            continue
        tried += 1
        result = np.empty(len(arrays[0]), out)
        assert by_llvm(kernel, [*arrays, result])[0] == 0
        with np.errstate(all="ignore"):
            right = known(op, node, arrays)
        keep = np.ones(len(right), bool)
        if np.dtype(out).kind == "c":
            keep = np.isfinite(right) & np.isfinite(result)
        exact = np.dtype(out).kind in "biu"
        single = {"float32", "complex64"} & {out, *dtypes}
        rtol = 0 if exact else 2e-6 if single else 5e-15
        np.testing.assert_allclose(
            result[keep], right[keep], rtol=rtol, atol=0, err_msg=str(dtypes)
        )
        if exact:
            np.testing.assert_array_equal(result, right, err_msg=str(dtypes))
    assert tried


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("base", [1, 2, 8, 3])
def test_integer_powers_of_a_constant(dtype, base):
    """Those of powers of two are shifts; what a dtype does not hold is cut as products are."""
    exponent = get_scalar_type(dtype)()
    small = "uint8" if dtype.startswith("u") else "int8"
    node = ps.pow.make_node(ps.constant(base, dtype=small), exponent)
    assert node.outputs[0].type.dtype == dtype
    most = min(np.iinfo(dtype).max, 130)
    powers = np.array([*range(most), np.iinfo(dtype).max], dtype)
    result = np.empty(len(powers), dtype)

    def write(w, given, out):
        scalars = Scalars(w)
        with w.loop(0, len(powers)) as i:
            scalars.bind(exponent, load(w, dtype, given, i))
            scalars.emit(node.outputs)
            store(w, scalars.number(node.outputs[0]), out, i)

    kernel = write_kernel("powers", {"given": POINTER, "out": POINTER}, write)
    verify(kernel)
    assert by_llvm(kernel, [powers, result])[0] == 0
    bits = 8 * np.dtype(dtype).itemsize
    right = [pow(base, int(k), 2**bits) for k in powers]
    np.testing.assert_array_equal(result, np.array(right, "uint64").astype(dtype))


def test_the_table_is_tried_as_a_whole():
    kinds = {type(op) for op in OBJECTS} | {ps.Cast, LogAddExp}
    assert {*RULES, *FLOAT_RULES, *COMPARISONS, *PAIR_RULES, *FROM_PAIRS} <= kinds


@pytest.mark.parametrize("target", REALS)
def test_conversions(target):
    for dtype in REALS:
        node = ps.Cast(get_scalar_type(target), name=target).make_node(get_scalar_type(dtype)())
        x = numbers(dtype)
        if np.dtype(dtype).kind == "f" and target in INTEGERS:
            x = np.array(
                [0.0, -0.5, 1.5, 100.75, 2.0] + [-3.25, -100.5] * (target[0] == "i"), dtype
            )
        result = np.empty(len(x), target)
        by_llvm(kernel_of(node, len(x)), [x, result])
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(result, x.astype(target), err_msg=dtype)


def test_numbers_too_large_for_an_integer_are_some_integer():
    node = ps.Cast(ps.int32, name="int32").make_node(ps.float64())
    x = np.array([np.nan, np.inf, -1e300, 3e9, 5.0])
    result = np.empty(5, "int32")
    by_llvm(kernel_of(node, 5), [x, result])
    assert result[-1] == 5


def test_composites_are_written_node_by_node():
    x, y = ps.float64("x"), ps.float64("y")
    op = ps.Composite([x, y], [ps.exp(x) * y + 1.0])
    node = op.make_node(x, y)
    values = [np.linspace(-2, 2, 9), np.linspace(1, 2, 9)]
    result, again = np.empty(9), np.empty(9)
    kernel = kernel_of(node, 9)
    by_llvm(kernel, [*values, result])
    interpreted(kernel, [*values, again])
    np.testing.assert_array_equal(result, again)
    np.testing.assert_allclose(result, np.exp(values[0]) * values[1] + 1.0, rtol=1e-15)


def test_composites_inside_of_composites_have_variables_of_their_own():
    """Equal graphs that are frozen share them: the square of `x` is none of what `inner` takes."""
    x = ps.float64("x")
    inner = ps.Composite([x], [ps.sqr(ps.sqr(x))])
    square = ps.sqr(x)
    node = ps.Composite([x], [square + inner(0.25 * square)]).make_node(x)
    values, result = np.linspace(1, 2, 9), np.empty(9)
    by_llvm(kernel_of(node, 9), [values, result])
    np.testing.assert_allclose(result, values**2 + values**8 / 256, rtol=1e-14)
