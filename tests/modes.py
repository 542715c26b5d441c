"""The compilation modes that loops must agree under."""

from pytensor.compile.mode import Mode, get_mode

MODES = {
    "numba": get_mode("NUMBA"),
    "c": Mode(linker="cvm", optimizer="fast_run"),
    "py": Mode(linker="py", optimizer="fast_compile"),
}
