"""What scanlib takes from JAX, and from PyTensor's JAX linker, beyond public names."""

# An operation of its own, one for each platform: `lax.platform_dependent` compiles all of them.
# The public `jax.extend` imports all of Pallas, which takes longer than compiling a small loop.
from jax._src.core import Primitive

# Operations whose lowering asks for the devices, as ours does: it holds calls that XLA cuts.
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax.interpreters import batching, mlir

# A shape as a node of the graph: sizes that JAX must know are read through it.
from pytensor.link.jax.dispatch.shape import JAXShapeTuple

# Converts a graph node by node: graphs with loops have functions of nodes that PyTensor has not.
from pytensor.link.utils import fgraph_to_python
