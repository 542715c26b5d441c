"""What scanlib takes from PyTensor's JAX linker beyond its dispatch; nothing of JAX's own."""

# A shape as a node of the graph: sizes that JAX must know are read through it.
from pytensor.link.jax.dispatch.shape import JAXShapeTuple
