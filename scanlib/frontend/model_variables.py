"""Variables of a PyMC model that a step makes.

A step is called to build a loop, not at each step of it. What it adds to the model that is open is
there once, made of the symbols of a step, and the error of that comes late and from elsewhere.
Data that a step makes (`pm.Data`) are the same at every step, and fine.
"""

from __future__ import annotations

import sys

_ADVICE = {
    "free_RVs": "make it before the loop, with a row for each step, and pass it as a sequence, or "
    "draw by `.dist` in a step that a pm.CustomDist has in its `dist`",
    "observed_RVs": "return from the step what its density needs, and make it after the loop, of "
    "the rows of all steps",
    "deterministics": "return it from the step, and pass the loop's result to pm.Deterministic",
    "potentials": "return it from the step, and pass the loop's result to pm.Potential",
}


def count_model_variables() -> dict[str, int]:
    """Return how many variables of each kind the open model has."""
    model = _open_model()
    return {kind: len(getattr(model, kind, ())) for kind in _ADVICE}


def check_model_variables(before: dict[str, int], where: str) -> None:
    """Raise if the open model has got variables since they were counted: the `ValueError` names the
    first of them, and where to make it."""
    model = _open_model()
    for kind, advice in _ADVICE.items():
        for variable in getattr(model, kind, ())[before[kind] :]:
            raise ValueError(
                f"{where} makes `{variable.name}`, a variable of the PyMC model, which then has it "
                f"once, not once for each step; {advice}"
            )


def _open_model() -> object:
    """Return the model of PyMC whose `with` block the program is in; None without one."""
    model_class = getattr(sys.modules.get("pymc"), "Model", None)
    if model_class is None:
        return None
    return model_class.get_context(error_if_none=False, allow_block_model_access=True)
