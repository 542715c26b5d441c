"""The loop language: its interpreter, LLVM and C agree bit for bit; its verifier finds mistakes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scanlib.kernels import compiled, elementary, language
from scanlib.kernels.language import (
    BOOL,
    FLOAT32,
    FLOAT64,
    INT64,
    OPERATIONS,
    POINTER,
    Apply,
    Block,
    Kernel,
    Type,
    Value,
    write_function,
)
from scanlib.kernels.printers.llvm import print_kernels
from tests.kernel_interpreter import run
from tests.kernel_runs import COMPILER, by_c, by_llvm, interpreted, write_kernel
from tests.kernel_verifier import FITS, KernelError, verify

needs_compiler = pytest.mark.skipif(not COMPILER[0], reason="there is no C++ compiler")
ITEMS = 16


def assert_same_bits(kernel, arrays, in_c=True):
    """Run a kernel in all ways; return what the interpreter wrote.

    C has functions of plain numbers alone, which do not fail.
    """
    results = []
    for how in (interpreted, by_llvm, by_c)[: 3 if in_c else 2]:
        own = [array.copy() if isinstance(array, np.ndarray) else array for array in arrays]
        code, values = how(kernel, own)
        results.append((code, [np.asarray(v).astype("i8") for v in values], own))
    first = results[0]
    for code, values, own in results[1:]:
        assert code == first[0]
        for known, value in zip(first[1], values, strict=False):
            assert known == value
        for known, array in zip(first[2], own, strict=True):
            if isinstance(array, np.ndarray):
                np.testing.assert_array_equal(array, known)
                if array.dtype.kind == "f":  # the sign of zero as well
                    numbers = ~np.isnan(known)
                    np.testing.assert_array_equal(
                        np.signbit(array[numbers]), np.signbit(known[numbers])
                    )
    return first[2]


# Kernels made at random: a loop over items, operations of all kinds, stores of all values.

NUMBERS = {
    "float": [0.0, -0.0, 1.5, -2.25, 3e30, 1e-40, np.inf, -np.inf, np.nan, 7.0, -1e-3, 0.1],
    "integer": [0, 1, 2, 3, 5, 7, 11, 100, 127],
}
SAFE = [
    name
    for name, rule in OPERATIONS.items()
    if rule.result != "given" and name not in ("quotient", "remainder", "shl", "shr", "copy")
]


@st.composite
def steps(draw):
    """Return the operations of a body: a name and which of the values before it takes."""
    count = draw(st.integers(1, 12))
    chosen = st.sampled_from([*SAFE, "cast", "shift", "divide", "bits", "shuffle"])
    return [
        (draw(chosen), [draw(st.integers(0, 50)) for _ in range(3)], draw(st.integers(0, 8)))
        for _ in range(count)
    ]


def pick(values, fits, number):
    found = [value for value in values if fits(value.type)]
    return found[number % len(found)] if found else None


def write_step(w, values, name, places, dtype):
    """Write one operation on values that fit, if there are any; return its result."""
    if name == "cast":
        value = values[places[0] % len(values)]
        target = language.DTYPES[dtype % len(language.DTYPES)]
        if value.type.is_float and target in language.INTEGERS:
            return None  # may have no meaning
        return w.cast(value, target)
    if name == "bits":
        value = pick(values, lambda k: k.is_float or k.dtype in ("int32", "int64"), places[0])
        if value is None:
            return None
        other = {"float32": "int32", "float64": "int64", "int32": "float32", "int64": "float64"}
        return w.bitcast(value, other[value.type.dtype])
    if name in ("shift", "divide"):
        value = pick(values, FITS["integer"], places[0])
        if value is None:
            return None
        operations = ("shl", "shr") if name == "shift" else ("quotient", "remainder")
        return w.apply(operations[places[1] % 2], value, w.constant(1 + places[2] % 6, value.type))
    if name == "shuffle":
        value = values[places[0] % len(values)]
        lanes = value.type.lanes
        same = [other for other in values if other.type == value.type]
        chosen = [place % (2 * lanes) for place in (*places, dtype)]
        return w.shuffle(value, same[places[1] % len(same)], chosen) if lanes == 4 else None
    rule = OPERATIONS[name]
    first = pick(values, FITS[rule.operands], places[0])
    if first is None:
        return None
    same = [value for value in values if value.type == first.type]
    if name == "opaque" and first.type.lanes > 1:
        return None
    operands = [first, *(same[place % len(same)] for place in places[1:])]
    if name == "select":
        condition = pick(values, lambda kind: kind == first.type.of("bool"), places[2])
        if condition is None:
            return None
        return w.select(condition, operands[0], operands[1])
    return w.apply(name, *operands[: rule.arity])


@needs_compiler
@pytest.mark.slow
@settings(max_examples=40)
@given(steps(), st.sampled_from([1, 4]), st.integers(0, 10**6))
def test_generated_kernels(body, lanes, seed):
    rng = np.random.default_rng(seed)
    dtypes = ("float64", "float32", "int64", "int8", "uint16", "bool")
    inputs = []
    for dtype in dtypes:
        kind = "float" if np.dtype(dtype).kind == "f" else "integer"
        with np.errstate(over="ignore"):
            inputs.append(rng.choice(NUMBERS[kind], ITEMS).astype(dtype))
    outputs = []

    def write(w, *pointers):
        with w.loop(0, ITEMS, lanes) as i:
            values = []
            for dtype, pointer in zip(dtypes, pointers, strict=False):
                kind = Type(dtype, lanes)
                values.append(w.load(kind, pointer, i * kind.itemsize))
            results = []
            for name, places, dtype in body:
                value = write_step(w, values, name, places, dtype)
                if value is not None:
                    values.append(value)
                    results.append(value)
            outputs[:] = [value.type.dtype for value in results]
            for value, pointer in zip(results, pointers[len(dtypes) :], strict=False):
                w.store(pointer, i * value.type.itemsize, value)

    names = {f"p{k}": POINTER for k in range(len(dtypes) + len(body))}
    kernel = write_kernel("generated", names, write)
    verify(kernel)
    spare = ["float64"] * (len(body) - len(outputs))
    arrays = [*inputs, *(np.zeros(ITEMS, dtype) for dtype in [*outputs, *spare])]
    assert_same_bits(kernel, arrays, lanes == 1)


# Control


def sums(w, x, out, n):
    """Running sums up to a limit, in two ways."""
    memory = w.scratch("float64", 4)
    total = w.local(0.0, FLOAT64)
    with w.loop(0, n) as i:
        value = w.load(FLOAT64, x, i * 8)
        with w.when(value < 0.0) as choice:
            w.assign(total, w.copy(total) - value)
        with w.otherwise(choice):
            w.assign(total, w.copy(total) + value)
        w.store(memory, (i & 3) * 8, w.copy(total))
        w.store(out, i * 8, w.load(FLOAT64, memory, (i & 3) * 8))
    count = w.local(0, INT64)
    with w.loop_while(lambda: w.copy(total) > 1.0):
        w.assign(total, w.copy(total) * 0.5)
        w.assign(count, w.copy(count) + 1)
    w.store(out, n * 8, w.cast(w.copy(count), "float64"))
    return w.copy(count)


def control(w, x, out, n):
    """Running sums, a failure, and an end that is none."""
    count = sums(w, x, out, n)
    w.poll()
    with w.when(count > 3):
        w.fail(7, count, n)
    w.fail(-5)


@needs_compiler
@pytest.mark.parametrize("scale,code", [(1.0, -5), (100.0, 7)])
def test_control(scale, code):
    x = scale * np.array([0.5, -0.25, 1.0, 0.125, -2.0, 0.75])
    out = np.zeros(7)
    for write in (sums, control):
        kernel = write_kernel(write.__name__, {"x": POINTER, "out": POINTER, "n": INT64}, write)
        verify(kernel)
        (_, written, _) = assert_same_bits(kernel, [x, out, 6], write is sums)
        np.testing.assert_array_equal(written[:6], np.cumsum(np.abs(x)))
    assert run(kernel, [x, out, 6])[0] == code


def test_what_loops_do_not_change_is_computed_before_them():
    """... once, but for quotients, which would stop the process where no step asks for them."""

    def write(w, x, out, n, m):
        with w.loop(0, n) as i, w.loop(0, m) as j:
            with w.when(i >= j) as choice:
                place = w.offset(out, (m + n) * 8)
                w.store(place, i * 8, w.load(FLOAT64, x, i * 8) * w.cast(m * n, "float64"))
            with w.otherwise(choice):
                ratio = w.apply("quotient", n, m - 1)
                w.store(out, j * 8, w.cast(ratio + m * n, "float64"))

    types = {"x": POINTER, "out": POINTER, "n": INT64, "m": INT64}
    kernel = write_kernel("invariants", types, write)
    verify(kernel)
    lines = print_kernels(kernel).splitlines()
    (product,) = (k for k, line in enumerate(lines) if "= mul i64 %x_m, %x_n" in line)
    (quotient,) = (k for k, line in enumerate(lines) if "= sdiv" in line)
    first, second = (k for k, line in enumerate(lines) if line.startswith("body"))
    eights = [k for k, line in enumerate(lines) if "= mul i64 %i" in line]
    assert product < first
    assert quotient > second
    assert len(eights) == 2  # of each index, whichever branch asks for it
    assert first < eights[0] < second < eights[1]
    x = np.arange(1.0, 5)
    for n, m in ((4, 3), (2, 4), (4, 1), (0, 3), (3, 0)):
        assert_same_bits(kernel, [x, np.zeros(16), n, m], in_c=False)


@pytest.mark.parametrize("start,count", [(0, 24), (16, 40), (8, 0)])
def test_moves_may_overlap(start, count):
    def write(w, x, n):
        w.move(w.offset(x, 16), w.offset(x, start), n)

    kernel = write_kernel("move", {"x": POINTER, "n": INT64}, write)
    verify(kernel)
    (moved, _) = assert_same_bits(kernel, [np.arange(8.0), count], in_c=False)
    expected = np.arange(8.0)
    expected[2 : 2 + count // 8] = np.arange(8.0)[start // 8 : (start + count) // 8]
    np.testing.assert_array_equal(moved, expected)


def test_polls_interrupt():
    def forever(w, out):
        with w.loop_while(lambda: w.load(FLOAT64, out) < 10.0):
            w.store(out, 0, w.load(FLOAT64, out) + 1.0)
            w.poll()

    out, answers = np.zeros(1), iter([False, False, True])
    kernel = write_kernel("forever", {"out": POINTER}, forever)
    assert run(kernel, [out], lambda: next(answers)) == (-1, ())
    assert out == 3


# Elementary functions


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("name", sorted(elementary.NAMES))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_elementary_functions_have_the_same_bits(name, dtype, lanes):
    function = elementary.vector_function(name, dtype, lanes)
    verify(function)
    kind = Type(dtype, lanes)

    def write(w, *pointers):
        *ins, out = pointers
        with w.loop(0, 32, lanes) as i:
            (result,) = w.call(function, *(w.load(kind, p, i * kind.itemsize) for p in ins))
            w.store(out, i * kind.itemsize, result)

    count = len(function.parameters)
    kernel = write_kernel("functions", {f"p{k}": POINTER for k in range(count + 1)}, write)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-310, 1e308, 1e-20]
    numbers = np.concatenate([special, 20 * np.random.default_rng(1).normal(size=24)])
    with np.errstate(over="ignore"):
        x = numbers.astype(dtype)
    assert_same_bits(kernel, [x, x[::-1].copy(), np.zeros_like(x)][-count - 1 :], lanes == 1)


# Mistakes


def test_text_of_a_function():
    function = write_function("axpy", [FLOAT64] * 3, lambda w, a, x, y: w.fma(a, x, y) * 2.0)
    assert str(function).splitlines() == [
        "axpy(x0: float64, x1: float64, x2: float64):",
        "  v0 = fma(x0, x1, x2)",
        "  v1 = mul(v0, 2.0)",
        "  return v1",
    ]


def wrong_types(w, x, out):
    w.apply("add", w.load(FLOAT64, x), w.load(FLOAT32, x))


def truth_of_a_number(w, x, out):
    with w.when(w.load(FLOAT64, x)):
        pass


def unknown_operation(w, x, out):
    w.block.statements.append(Apply(Value(FLOAT64, "v9"), "frobnicate", (w.load(FLOAT64, x),)))


def out_of_scope(w, x, out):
    with w.loop(0, 3) as i:
        value = i + 1
    w.store(out, 0, value)


def two_values(w, x, out):
    value = w.load(FLOAT64, x)
    w.block.statements.append(Apply(value, "neg", (value,)))


def no_bits(w, x, out):
    w.apply("and", w.load(FLOAT64, x), w.load(FLOAT64, x))


@pytest.mark.parametrize(
    "write,message",
    [
        (wrong_types, "operands of float64, float32 in `v2 = add"),
        (truth_of_a_number, "must be bool in `if v0:`"),
        (unknown_operation, "no operation 'frobnicate'"),
        (out_of_scope, "v1 has no value here in `store"),
        (two_values, "v0 has a value already"),
        (no_bits, "and takes no float64"),
    ],
)
def test_the_verifier_names_the_first_mistake(write, message):
    kernel = write_kernel("wrong", {"x": POINTER, "out": POINTER}, write)
    with pytest.raises(KernelError) as error:
        verify(kernel)
    assert message in str(error.value)
    assert "of wrong" in str(error.value)


def test_functions_do_not_fail():
    function = write_function("f", [BOOL], lambda w, x: (w.fail(1), x)[1])
    with pytest.raises(KernelError, match="kernels fail"):
        verify(function)


def test_names_of_parameters_differ():
    twice = (Value(INT64, "x"), Value(INT64, "x"))
    with pytest.raises(KernelError, match="one name"):
        verify(Kernel("k", twice, Block(), (0, 1)))


@pytest.mark.all_forms
@pytest.mark.parametrize(
    "types,write,message",
    [
        ([POINTER, Type("float32", 8)], lambda w, p, x: (), "x1: float32 x 8"),
        ([FLOAT64], lambda w, x: (x, w.splat(x, 4)), "v0: float64 x 4"),
    ],
)
def test_vectors_do_not_pass_to_shared_functions(types, write, message):
    def calls(function):
        def caller(w, *given):
            w.call(function, *given)
            return ()

        return write_function("caller", types, caller)

    verify(calls(write_function("apart", types, write)))
    with pytest.raises(KernelError) as error:
        verify(calls(write_function("apart", types, write, is_shared=True)))
    assert f"apart is shared and passes {message}" in str(error.value)


def test_vectors_stay_inside_shared_functions():
    def negate(w, x, out):
        w.store(out, 0, -w.load(Type("float64", 4), x))
        return ()

    verify(write_function("apart", [POINTER, POINTER], negate, is_shared=True))


INTEGERS = [-3, -1, 0, 1, 2, 3, 8, 24, 2**40, 2**62 + 1]
SMALL = st.integers(-3, 3)


@settings(deadline=None)
@given(
    st.lists(st.tuples(SMALL, st.integers(-4, 6), st.integers(1, 3)), min_size=1, max_size=3),
    st.lists(st.tuples(st.sampled_from(["add", "sub", "mul"]), *[st.integers(0, 99)] * 2)),
    st.lists(st.tuples(SMALL, SMALL), min_size=3, max_size=3),
    st.booleans(),
)
def test_what_grows_with_loops(loops, operations, strides, in_turn):
    """Sums and multiples of indices, and addresses made of them, in nested loops."""

    def write(w, out, n, *given):
        """Store numbers made of the indices where strides, known and not, lead."""
        indices = []

        def level(depth):
            if depth == len(loops):
                numbers = [*indices, n, *given, *(w.constant(i, INT64) for i in INTEGERS)]
                for operation, one, other in operations:
                    chosen = (numbers[i % len(numbers)] for i in (one, other))
                    numbers.append(w.apply(operation, *chosen))
                place = w.constant(512, INT64)
                for index, (known, _), stride in zip(indices, strides, given, strict=False):
                    place = place + (index * stride + index * known if in_turn else index * stride)
                for ahead, number in enumerate(numbers[-3:]):
                    w.store(out, (place + ahead) * 8, number)
                w.store(out, 8192 - place * 8, place)
                return
            first, count, step = loops[depth]
            start = n + first
            with w.loop(start, start + count, step) as i:
                indices.append(i)
                with w.when(i.differs(2)):
                    level(depth + 1)
                indices.pop()

        level(0)

    types = {"out": POINTER, "n": INT64, "a": INT64, "b": INT64, "c": INT64}
    kernel = write_kernel("growing", types, write)
    given = [own for _, own in strides]
    assert_same_bits(kernel, [np.zeros(1024, "i8"), np.int64(1), *map(np.int64, given)], False)


def test_long_blocks_are_ordered_otherwise(monkeypatch):
    """LLVM's own order takes the square of their length; it is back for what comes after."""

    def adding(count):
        def write(w, x):
            total = w.load(FLOAT64, x)
            for k in range(count):
                total = total * (k % 3 - 0.5) + 0.25
            w.store(x, 0, total)

        return write_kernel(f"adding{count}", {0: POINTER}, write)

    orders, own = [], compiled.llvm.set_option

    def set_option(name, option):
        orders.extend([option.split("=")[1]] if "sched" in option else [])
        own(name, option)

    monkeypatch.setattr(compiled.llvm, "set_option", set_option)
    short = print_kernels(adding(8))
    before = compiled._compile(short)
    compiled._compile(print_kernels(adding(compiled.LONG)))
    assert compiled._compile(short) == before
    assert orders == ["default", "default", "list-burr", "default", "default", "default"]
    assert_same_bits(adding(compiled.LONG), [np.ones(1)])
