"""The compilation modes that loops must agree under."""

from pytensor.compile.mode import Mode, get_mode

MODES = {
    "numba": get_mode("NUMBA"),
    "c": Mode(linker="cvm", optimizer="fast_run"),
    "py": Mode(linker="py", optimizer="fast_compile"),
}

# The same with what linkers do that take all steps of a matrix recurrence at once.
AT_ONCE = {
    name: mode.excluding("scanlib_mark_steps", "scanlib_mark_steps_in_c")
    for name, mode in MODES.items()
}
