"""PyTensor's own nodes without C code of theirs, in most tests of the C linker.

A function of a dozen nodes is a dozen C modules, of which one or two are scanlib's. The others are
PyTensor's to test, and they take half of the C compiler's time; they run as NumPy functions here.
"""

from typing import Any

from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.link.c.op import COp
from pytensor.scalar.basic import Composite
from pytensor.tensor.elemwise import CAReduce, Elemwise

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

    def make_own_c_thunk(self: COp, node: Apply, *arguments: Any) -> Any:
        is_own = type(self).__module__.startswith("scanlib")
        if Switch.is_on and not is_own and is_right_in_python(node):
            raise NotImplementedError("it runs in Python")
        return make_c_thunk(self, node, *arguments)

    COp.make_c_thunk = make_own_c_thunk


def is_right_in_python(node: Apply) -> bool:
    """Whether PyTensor's Python code computes what its C code does.

    It does not for reductions that are fused with what they reduce, nor for sums of small
    integers, and NumPy's functions take no more than 32 arrays.
    """
    op = node.op
    if isinstance(op, Elemwise):
        dtypes = {v.type.dtype for v in [*node.inputs, *node.outputs]}
        is_plain = not isinstance(op.scalar_op, Composite) and len(node.inputs) < 8
        return is_plain and dtypes <= {"float64", "bool"}
    return not isinstance(op, CAReduce) and type(op).perform is not Op.perform
