r"""Linear Gaussian state-space models: what users describe.

    y[t]   = Z x[t] + d + ε[t],      ε[t] ~ N(0, H)        p observations
    x[t+1] = F x[t] + c + R η[t],    η[t] ~ N(0, Q)        m states
    x[0]   ~ N(a, P)

Each of ``Z, d, H, F, c, R, Q`` may have a time axis in front: item `t` is the one in the equations
above. The notation is that of J. Durbin and S. J. Koopman, "Time series analysis by state space
methods", 2012.
"""

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Variable
from pytensor.scalar import upcast

from scanlib.frontend.values import as_tensor

# Dimensions without the time axis, by the sizes that must agree.
AXES = {
    "transition": "mm",
    "observation": "pm",
    "state_cov": "rr",
    "observation_cov": "pp",
    "initial_mean": "m",
    "initial_cov": "mm",
    "state_intercept": "m",
    "observation_intercept": "p",
    "selection": "mr",
}
SIZES = {"m": "states", "p": "observations", "r": "disturbances of the state"}
OPTIONAL = ("state_intercept", "observation_intercept", "selection")
FIXED = ("initial_mean", "initial_cov")


@dataclass(frozen=True, eq=False)
class StateSpace:
    """A linear Gaussian state-space model with `m` states and `p` observations.

    ``y[t] = observation @ x[t] + observation_intercept + noise``, of covariance `observation_cov`;
    ``x[t+1] = transition @ x[t] + state_intercept + selection @ disturbance``, of covariance
    `state_cov`; ``x[0]`` has mean `initial_mean` and covariance `initial_cov`. All arguments but
    the two initial ones may have a time axis in front; integers count as floats.

    Parameters
    ----------
    transition : tensor_like, (m, m)
    observation : tensor_like, (p, m)
    state_cov : tensor_like, (r, r)
        May be singular, or zero.
    observation_cov : tensor_like, (p, p)
        May be singular as long as no observation is certain before it is made.
    initial_mean : tensor_like, (m,)
    initial_cov : tensor_like, (m, m)
        May be singular.
    state_intercept : tensor_like, (m,), optional
    observation_intercept : tensor_like, (p,), optional
    selection : tensor_like, (m, r), optional
        The identity if it is left out; then `r` is `m`.

    Raises
    ------
    TypeError
        If an argument is no tensor of real numbers.
    ValueError
        If dimensions, or sizes that are known, do not fit.

    Examples
    --------
    >>> import scanlib
    >>> local_level = scanlib.StateSpace([[1]], [[1]], [[0.5]], [[1.0]], [0.0], [[10.0]])
    >>> round(float(scanlib.kalman_filter([1.0, 1.5, 1.2], local_level).log_likelihood.eval()), 4)
    -4.8814
    """

    transition: Any
    observation: Any
    state_cov: Any
    observation_cov: Any
    initial_mean: Any
    initial_cov: Any
    state_intercept: Any = None
    observation_intercept: Any = None
    selection: Any = None

    def __post_init__(self) -> None:
        known: dict[str, tuple[str, int]] = {}
        for field in fields(self):
            name, given = field.name, getattr(self, field.name)
            if given is None and name in OPTIONAL:
                continue
            value = read_real(f"StateSpace: {name}", given)
            axes = AXES[name]
            timed = value.type.ndim - len(axes)
            if timed not in ((0,) if name in FIXED else (0, 1)):
                shape = ", ".join(axes) + "," * (len(axes) == 1)
                time = "" if name in FIXED else f", or (T, {shape.rstrip(',')}) if it varies"
                raise ValueError(
                    f"StateSpace: {name} must have shape ({shape}){time}, got "
                    f"{value.type.ndim} dimension(s)"
                )
            if name == "state_cov" and self.selection is None:
                axes = "mm"
            for letter, size in zip(axes, value.type.shape[timed:], strict=True):
                first, expected = known.setdefault(letter, (name, size))
                if expected is None:
                    known[letter] = (name, size)
                elif size is not None and size != expected:
                    raise ValueError(
                        f"StateSpace: {name} has size {size} where {first} has {expected}: the "
                        f"number of {SIZES[letter]}"
                    )
            object.__setattr__(self, name, value)

    def process_noise(self) -> Variable:
        """Return the covariance of what is added to the state: ``R Q Rᵀ``."""
        if self.selection is None:
            return self.state_cov
        return self.selection @ self.state_cov @ self.selection.mT

    def varies(self) -> bool:
        """Whether any matrix has a time axis."""
        return any(is_timed(name, getattr(self, name)) for name in AXES)


class Observations(NamedTuple):
    """What is observed, of one series.

    `values` has shape (T, p), with zeros where nothing is observed; `seen` has that shape and is
    one where something is, or None if all is. `batch` is what the two stand for in a batch.
    """

    values: Variable
    seen: Variable | None
    batch: dict[Variable, Variable]

    def rows(self) -> dict[str, Variable | None]:
        """Return what a step reads of them, by name."""
        return {"y": self.values, "seen": self.seen}


def is_timed(name: str, value: Any) -> bool:
    """Whether an argument of a model has a time axis."""
    return value is not None and value.type.ndim > len(AXES[name])


def read_real(title: str, given: Any) -> Variable:
    """Return a tensor of real numbers; integers become floats."""
    value = as_tensor(given, title)
    if value.type.dtype == "bool" or value.type.dtype.startswith("complex"):
        raise TypeError(f"{title} must hold real numbers, got dtype {value.type.dtype}")
    return value if value.type.dtype.startswith("float") else pt.cast(value, config.floatX)


def read_observations(function: str, y: Any, model: StateSpace, observed: Any) -> Observations:
    """Return the observations; NaN is missing unless `observed` says what is.

    `TypeError` or `ValueError` if they are no real numbers, or dimensions do not fit.
    """
    if not isinstance(model, StateSpace):
        raise TypeError(
            f"{function}: model must be a scanlib.StateSpace, got {type(model).__name__}; the "
            f"arguments are {function}(y, model)"
        )
    values = read_real(f"{function}: y", y)
    if values.type.ndim == 0:
        raise ValueError(f"{function}: y must have shape (T,), (T, p) or (…, T, p), got a scalar")
    is_flat = values.type.ndim == 1
    values = values[:, None] if is_flat else values
    size, expected = values.type.shape[-1], model.observation.type.shape[-2]
    if None not in (size, expected) and size != expected:
        raise ValueError(
            f"{function}: y has {size} observations at each step, the model has {expected}"
        )
    values = pt.cast(values, dtype_of(values, model))
    if observed is True:
        seen = None
    elif observed is None:
        seen = pt.invert(pt.isnan(values))
    else:
        seen = as_tensor(observed, f"{function}: observed")
        seen = seen[:, None] if is_flat and seen.type.ndim == 1 else seen
        if seen.type.dtype != "bool" or seen.type.ndim != values.type.ndim:
            raise ValueError(
                f"{function}: observed must be True, or booleans of the shape of y, got {seen.type}"
            )
    if seen is not None:
        values, seen = pt.switch(seen, values, 0), pt.cast(seen, values.type.dtype)
    if values.type.ndim == 2:
        return Observations(values, seen, {})
    rows = [
        None if v is None else pt.TensorType(v.dtype, v.type.shape[-2:])() for v in (values, seen)
    ]
    pairs = zip(rows, (values, seen), strict=True)
    return Observations(rows[0], rows[1], {row: v for row, v in pairs if row is not None})


def dtype_of(values: Variable, model: StateSpace) -> str:
    """Return the dtype that holds all that is given."""
    given = [getattr(model, name) for name in AXES]
    return upcast(values.type.dtype, *(v.type.dtype for v in given if v is not None))
