"""The scalar code of CUDA kernels, compiled by g++, and the interpreter agree bit for bit."""

import ctypes

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.scalar.math as psm
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pytensor.scalar.basic import get_scalar_type

from scanlib.backends.cuda.nvidia import find_nvrtc
from scanlib.backends.cuda.printer import template
from scanlib.backends.cuda.scalar_code import OUTSIDE, Code, ScalarUnit, item_type
from scanlib.kernels.language import Function, Type, Writer
from scanlib.kernels.printers.c import Source, item_text
from scanlib.kernels.scalars import NoKernelError
from tests.cuda_device import host_library
from tests.kernel_interpreter import call
from tests.kernels.test_kernel_language import ITEMS, NUMBERS, steps, write_step
from tests.kernels.test_kernel_scalars import OBJECTS, cases, operands

needs_compiler = pytest.mark.skipif(not pytensor.config.cxx, reason="no C++ compiler")
# Fused multiply-adds of the processor are used where written, and where written alone.
FLAGS = ("-O2", "-march=native", "-ffp-contract=off", "-fno-wrapv")
DTYPES = ("float64", "float32", "int64", "int8", "uint16", "bool")


def unit_text(unit):
    heads = ["#define SCANLIB_THREADS 1", template("device"), template("complex")]
    return "\n".join([*heads, unit.text(), ""])


def all_items(name, function):
    """Return C++ that calls a function for items of arrays."""
    given = [
        f"(({item_text(value.type.dtype)} *)x[{k}])[i]"
        for k, value in enumerate(function.parameters)
    ]
    kinds = [item_text(value.type.dtype) for value in function.results]
    names = [f"found.r{k}" for k in range(len(kinds))] if kinds[1:] else ["found"]
    stores = " ".join(
        f"(({kind} *)y[{k}])[i] = {text};"
        for k, (kind, text) in enumerate(zip(kinds, names, strict=True))
    )
    return f"""extern "C" void {name}_items(char **x, char **y, int n) {{
      for (int i = 0; i < n; i++) {{
        const auto found = {name}({", ".join(given)}); {stores}
      }}
    }}
    """


def by_cuda_code(library, name, function, inputs):
    outputs = [np.zeros(len(inputs[0]), value.type.dtype) for value in function.results]
    places = [
        (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
        for arrays in (inputs, outputs)
    ]
    getattr(library, f"{name}_items")(*places, len(inputs[0]))
    return outputs


def check_items(library, name, function, inputs):
    """Compare the items of all arrays, NaN's bits aside."""
    outputs = by_cuda_code(library, name, function, inputs)
    with np.errstate(all="ignore"):
        rows = [call(function, *items) for items in zip(*inputs, strict=True)]
    for output, column in zip(outputs, zip(*rows, strict=True), strict=True):
        wanted = np.array(column, output.dtype)
        real = np.ones(len(wanted), bool) if output.dtype.kind != "f" else ~np.isnan(wanted)
        np.testing.assert_array_equal(output[~real], wanted[~real], err_msg=name)
        bits = f"u{output.itemsize}"
        np.testing.assert_array_equal(
            output[real].view(bits), wanted[real].view(bits), err_msg=f"{name}: {function}"
        )


def loaded(unit, *functions):
    text = unit_text(unit) + "".join(all_items(f.name, f) for f in functions)
    return ctypes.CDLL(str(host_library(text, *FLAGS)))


@needs_compiler
@pytest.mark.slow
@settings(max_examples=30)
@given(steps(), st.integers(0, 10**6))
def test_generated_functions(body, seed):
    rng = np.random.default_rng(seed)
    w = Writer()
    parameters = tuple(w.parameter(Type(dtype), f"x{k}") for k, dtype in enumerate(DTYPES))
    values, results = list(parameters), []
    for name, places, dtype in body:
        value = None if name == "opaque" else write_step(w, values, name, places, dtype)
        if value is not None:
            values.append(value)
            results.append(value)
    assume(results)
    function, unit = Function("generated", parameters, w.block, tuple(results)), ScalarUnit()
    unit.add(function)
    kinds = ["float" if np.dtype(dtype).kind == "f" else "integer" for dtype in DTYPES]
    with np.errstate(over="ignore"):
        inputs = [
            rng.choice(NUMBERS[kind], ITEMS).astype(dtype)
            for kind, dtype in zip(kinds, DTYPES, strict=True)
        ]
    check_items(loaded(unit, function), "generated", function, inputs)


def written(unit, name, node):
    """Return the function of a node."""
    code = Code(unit, name)
    for k, variable in enumerate(node.inputs):
        code.bind(variable, f"x{k}")
    code.scalars.emit(node.outputs)
    results = code.numbers(node.outputs)
    code.write(Source(), results, ["y ="] * len(results))
    return unit.functions[name]


@needs_compiler
@pytest.mark.slow
def test_every_operation():
    unit, found = ScalarUnit(), {}
    for op in OBJECTS:
        for dtypes, node, count in cases(op):
            name = f"f{len(found)}"
            try:
                found[name] = written(unit, name, node), operands(count, dtypes)
            except NoKernelError:
                continue
    assert len(found) > 400
    library = loaded(unit, *(function for function, _ in found.values()))
    for name, (function, inputs) in found.items():
        parts = []
        for array in inputs:
            parts += [array.real, array.imag] if array.dtype.kind == "c" else [array]
        some = [np.ascontiguousarray(part[:: max(1, len(part) // 40)]) for part in parts]
        check_items(library, name, function, some)


def test_half_precision_is_computed_in_single():
    x = get_scalar_type("float16")("x")
    function = written(ScalarUnit(), "f", ps.mul(x, x).owner)
    assert {value.type.dtype for value in (*function.parameters, *function.results)} == {"float32"}
    assert item_type("float16") == "float"


@needs_compiler
def test_functions_outside():
    special = pytest.importorskip("scipy.special")
    known = {psm.gamma: special.gamma, psm.gammaln: special.gammaln, psm.j0: special.j0,
             psm.j1: special.j1, psm.psi: special.psi}  # fmt: skip
    assert {type(op) for op in known} == set(OUTSIDE)
    unit, x = ScalarUnit(), np.linspace(0.5, 4.0, 8)
    functions = {op: written(unit, f"f_{op.name}", op(ps.float64()).owner) for op in known}
    library = loaded(unit, *functions.values())
    for op, function in functions.items():
        (output,) = by_cuda_code(library, function.name, function, [x])
        np.testing.assert_allclose(output, known[op](x), rtol=1e-7, err_msg=op.name)
    compiler = find_nvrtc()
    if compiler is not None:
        text = f"{unit_text(unit)}\n__global__ void kernel(double *x) {{ "
        text += " ".join(f"*x += {function.name}(*x);" for function in functions.values()) + " }"
        assert compiler.compile(text, "sm_90")[:4] == b"\x7fELF"


@pytest.mark.parametrize("op", [psm.gammainc, psm.erfinv, psm.betainc], ids=str)
def test_functions_that_devices_do_not_have(op):
    node = op.make_node(*[ps.float64()] * op.nin)
    with pytest.raises(NoKernelError, match="has no CUDA code"):
        written(ScalarUnit(), "f", node)


def test_single_precision_of_functions_outside():
    function = written(ScalarUnit(), "f", psm.gamma(ps.float32()).owner)
    assert function.results[0].type.dtype == "float32"
    assert "cast float64(x0)" in str(function)
