"""What scanlib takes from numba beyond its public names, and from PyTensor's numba linker.

Numba's public way to write code is `numba.extending.intrinsic`, whose code generation gets numba's
own objects: what one writes with them is in `numba.core`. So most of this is what numba's own
documentation of `intrinsic` uses without calling it public.
"""

from collections.abc import Callable
from typing import Any

from numba.core import cgutils, serialize
from numba.core.caching import Cache  # its files get checksums (`backends.numba.disk`)
from numba.core.callconv import RETCODE_EXC  # what a kernel that failed returns
from numba.core.errors import NumbaError
from numba.core.imputils import impl_ret_borrowed, impl_ret_new_ref  # who counts references
from numba.core.runtime import _nrt_python  # memory whose users are counted
from numba.np.arrayobj import _empty_nd_impl as new_array_of  # what is inside `np.empty`
from numba.np.arrayobj import populate_array  # arrays over given memory

# PyTensor's way from source to a function that numba may keep on disk; its copy of a value of any
# type; what a linker makes a function of, and its errors.
from pytensor.graph.fg import FunctionGraph
from pytensor.link.basic import Container
from pytensor.link.numba.cache import compile_numba_function_src
from pytensor.link.numba.dispatch.compile_ops import numba_deepcopy
from pytensor.link.numba.linker import NumbaLinker
from pytensor.link.utils import map_storage, raise_with_op

NRT_FUNCTIONS: dict[str, int] = _nrt_python.c_helpers


def route_graphs(wanted: Callable[[FunctionGraph], bool]) -> Callable[[Any], Any]:
    """Return a decorator of what takes the place of PyTensor's numba linker for some graphs.

    A linker has no dispatch for whole functions: that of graphs gives code for numba to compile.
    """
    own = NumbaLinker.make_all

    def decorate(make_all: Callable[..., Any]) -> Callable[..., Any]:
        def routed(linker: NumbaLinker, *arguments: Any, **named: Any) -> Any:
            make = make_all if wanted(linker.fgraph) else own
            return make(linker, *arguments, **named)

        NumbaLinker.make_all = routed
        return make_all

    return decorate
