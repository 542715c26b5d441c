"""PyTensor's own nodes without C code of theirs, in most tests of the C linker.

A function of a dozen nodes is a dozen C modules, of which one or two are scanlib's. The others are
PyTensor's to test, and they take half of the C compiler's time; they run as NumPy functions here.
"""

from typing import Any

from pytensor.graph.op import Op
from pytensor.link.c.op import COp
from pytensor.tensor.elemwise import CAReduce

# Modules whose functions are C code throughout, as a user's are.
THROUGHOUT = {
    "test_adoption_linkers",
    "test_c_code",
    "test_c_gradients",
    "test_generated",
    "test_results",
    "test_runtime",
}


class Switch:
    """Whether nodes that are not scanlib's run in Python, which a test's module decides."""

    is_on = False

    @classmethod
    def set_for(cls, module: str) -> None:
        cls.is_on = module.rsplit(".")[-1] not in THROUGHOUT


def leave_c_code_to_scanlib() -> None:
    """Make PyTensor's nodes say that they have no C code, while the switch is on."""
    make_c_thunk = COp.make_c_thunk

    def make_own_c_thunk(self: COp, *arguments: Any) -> Any:
        is_own = type(self).__module__.startswith("scanlib")
        # A reduction that is fused with what it reduces is right in C alone.
        needs_c = isinstance(self, CAReduce) or type(self).perform is Op.perform
        if Switch.is_on and not is_own and not needs_c:
            raise NotImplementedError("it runs in Python")
        return make_c_thunk(self, *arguments)

    COp.make_c_thunk = make_own_c_thunk
