"""The compilation modes that loops must agree under."""

from unittest.mock import patch

from pytensor.compile.mode import Mode, get_mode
from pytensor.link.c.op import COp
from pytensor.link.vm import VMLinker


class OwnCode(VMLinker):
    """The C linker, for tests: it compiles scanlib's Ops, and runs PyTensor's as Python.

    A function of a few nodes takes PyTensor's C linker a second or two for each kind of node that
    is new to its cache. What is to be tested is the code of loops.
    """

    def make_all(self, *args, **kwargs):
        make_thunk = COp.make_thunk

        def choose(op, node, storage_map, compute_map, no_recycling, impl=None):
            own = type(op).__module__.startswith("scanlib.")
            return make_thunk(
                op, node, storage_map, compute_map, no_recycling, impl if own else "py"
            )

        with patch.object(COp, "make_thunk", choose):
            return super().make_all(*args, **kwargs)


# All of PyTensor's C code, as users have it.
C_LINKER = Mode(linker="cvm", optimizer="fast_run")

MODES = {
    "numba": get_mode("NUMBA"),
    "c": Mode(linker=OwnCode(use_cloop=True), optimizer="fast_run"),
    "py": Mode(linker="py", optimizer="fast_compile"),
}
