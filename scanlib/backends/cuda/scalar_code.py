"""The scalar code of loops: functions of the kernel language, printed as C++.

What an operation means is said in `scanlib.kernels.scalars`, once for all targets; what that
leaves to functions outside is in `OUTSIDE`. Half precision is kept in memory only, and computed in
single precision.
"""

from collections.abc import Iterable

import pytensor.scalar.math as psm
from pytensor.graph.basic import Apply, Variable

from scanlib.kernels.language import FLOAT64, FLOATS, POINTER, Function, Type, Value, Writer
from scanlib.kernels.printers.c import Source, item_text, print_functions
from scanlib.kernels.scalars import NoKernelError, Number, Pair, Scalars, parts, parts_of

HALF = "float16"
IN_SINGLE = {HALF: "float32"}
# The functions of Ops, of numbers in double precision: CUDA's own, or those that the Op brings.
OUTSIDE = {
    psm.Gamma: "tgamma",
    psm.GammaLn: "lgamma",
    psm.J0: "j0",
    psm.J1: "j1",
    psm.Psi: "_psi",
}


def computed(dtype: str) -> str:
    """Return the dtype in which numbers of a dtype are computed."""
    return IN_SINGLE.get(dtype, dtype)


def item_type(dtype: str) -> str:
    """Return the type in which a kernel computes."""
    if dtype.startswith("complex"):
        return f"scanlib_complex<{'float' if dtype == 'complex64' else 'double'}>"
    return item_text(computed(dtype))


def memory_type(dtype: str) -> str:
    """Return the type of an item in memory."""
    return "scanlib_half" if dtype == HALF else item_type(dtype)


class Code:
    """Writes one function of scalars, a part of `unit`, and its call; `given` has the parameters,
    by the expressions that a call gives for them."""

    def __init__(self, unit: "ScalarUnit", name: str) -> None:
        self.unit, self.name = unit, name
        self.writer = Writer()
        self.scalars = Scalars(self.writer, self._outside, IN_SINGLE)
        self.given: dict[str, Value] = {}

    def parameter(self, text: str, kind: Type) -> Value:
        """Return the parameter for which a call gives an expression."""
        if text not in self.given:
            self.given[text] = self.writer.parameter(kind, f"x{len(self.given)}")
        return self.given[text]

    def pointer(self, text: str) -> Value:
        return self.parameter(text, POINTER)

    def read(self, text: str, dtype: str) -> Number:
        """Return the number that an expression of a dtype holds."""
        half = parts_of(computed(dtype))
        if half is None:
            return self.parameter(text, Type(computed(dtype)))
        real, imag = (self.parameter(f"{text}.{part}", Type(half)) for part in ("real", "imag"))
        return Pair(real, imag)

    def bind(self, variable: Variable, text: str) -> None:
        """Say which expression holds a variable."""
        self.scalars.bind(variable, self.read(text, variable.type.dtype))

    def numbers(self, variables: Iterable[Variable]) -> list[Number]:
        """Return the numbers of variables that are written or constant."""
        return [self.scalars.number(variable) for variable in variables]

    def write(self, source: Source, results: list[Number], targets: list[str]) -> None:
        """End the function; write its call, and each result after a target such as ``s.h =``."""
        values = [part for number in results for part in parts(number)]
        self.unit.add(
            Function(self.name, tuple(self.given.values()), self.writer.block, tuple(values))
        )
        if values:
            source.line(f"const auto found = {self.name}({', '.join(self.given)});")
        names = iter([f"found.r{k}" for k in range(len(values))] if values[1:] else ["found"])
        for target, number in zip(targets, results, strict=True):
            text = next(names)
            if isinstance(number, Pair):
                kind = item_text(number.real.type.dtype)
                text = f"scanlib_complex<{kind}>({text}, {next(names)})"
            source.line(f"{target} {text};")

    def _outside(self, node: Apply, values: list[Value]) -> list[Value]:
        symbol, made = OUTSIDE.get(type(node.op)), self.scalars.dtype(node.outputs[0])
        if symbol is None or made not in FLOATS:
            raise NoKernelError(f"{node.op} has no CUDA code")
        self.unit.support[node.op.c_support_code()] = None
        wide = [self.scalars.convert(value, "float64") for value in values]
        (found,) = self.writer.call(symbol, *wide, result=FLOAT64)
        return [self.writer.cast(found, made)]


class ScalarUnit:
    """The functions of a translation unit."""

    def __init__(self) -> None:
        self.functions: dict[str, Function] = {}
        self.support: dict[str, None] = {}

    def add(self, function: Function) -> None:
        self.functions[function.name] = function

    def text(self) -> str:
        """Return the functions, and what they need, as C++."""
        printed = print_functions(list(self.functions.values()), "SCANLIB_DEVICE")
        return "\n".join(["#define WITHIN_KERNEL SCANLIB_DEVICE", *self.support, printed])
