"""PyTensor's variables with named dimensions; the module is new, and its names may still move."""

from pytensor.xtensor import as_xtensor
from pytensor.xtensor.random.type import XRandomGeneratorType, rng_to_xrng, xrng_to_rng
from pytensor.xtensor.type import XTensorType

# The rewrites of PyTensor's database that leave tensors of what is computed by name.
LOWER_XTENSOR = ("lower_xtensor", "inline_ofg_expansion_xtensor")
