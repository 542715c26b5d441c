"""A PyMC model with a loop, sampled before and after `scanlib.enable()`.

The level of weekly carbon dioxide at Mauna Loa, without its seasons, follows exponential smoothing
with a drift, written with `pytensor.scan` as PyMC's users write it::

    level[t] = level[t-1] + drift + alpha * (y[t] - level[t-1] - drift)
    y[t+1] ~ Normal(level[t] + drift, sigma)

The model is compiled and sampled twice in one process, with the same seed: as it is, and with
scanlib's loops. Nothing in the model changes, and the posteriors agree.

Data: weekly CO2, 1958 to 2001, which statsmodels ships (``co2``).
"""

import argparse
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt
import statsmodels.api as sm

import scanlib

Array = np.ndarray[Any, Any]
NAMES = ("alpha", "drift", "sigma")


def load_co2() -> Array:
    """Return weekly CO2 in parts per million, gaps filled, the mean of each week of the year left
    out."""
    data = sm.datasets.co2.load_pandas().data["co2"].interpolate()
    trend = data.rolling(52, center=True).mean()
    seasons = (data - trend).groupby(data.index.isocalendar().week).transform("mean")
    return (data - seasons).dropna().to_numpy()


def build(y: Array) -> pm.Model:
    """Return the model."""
    with pm.Model() as model:
        alpha = pm.Beta("alpha", 2, 2)
        drift = pm.Normal("drift", 0, 0.1)
        sigma = pm.HalfNormal("sigma", 1)
        level = pytensor.scan(
            lambda y, level, alpha, drift: level + drift + alpha * (y - level - drift),
            sequences=pt.as_tensor(y[:-1]),
            outputs_info=pt.constant(y[0]),
            non_sequences=[alpha, drift],
            name="smoothing",
            return_updates=False,
        )
        pm.Normal("y", level + drift, sigma, observed=y[1:])
    return model


def study(y: Array, draws: int, adopt: bool) -> tuple[dict[str, Array], dict[str, float]]:
    """Compile and sample; return the draws, and seconds of the processor for compiling, for one
    evaluation of the density with its gradient, and for sampling."""
    with scanlib.enabled(adopt), build(y) as model:
        begun = process_time()
        function = model.logp_dlogp_function(ravel_inputs=True)
        function.set_extra_values({})
        point = pm.blocking.DictToArrayBijection.map(model.initial_point())
        function(point)
        compiled = process_time()
        for _ in range(20):
            function(point)
        called = process_time()
        step = pm.NUTS(model.value_vars, logp_dlogp_func=function)
        posterior = pm.sample(
            draws=draws,
            tune=draws,
            chains=1,
            cores=1,
            step=step,
            random_seed=1,
            progressbar=False,
            compute_convergence_checks=False,
        ).posterior
        sampled = process_time()
    found = {name: posterior[name].to_numpy().ravel() for name in NAMES}
    times = {"compiling": compiled - begun, "evaluation": (called - compiled) / 20}
    return found, {**times, "sampling": sampled - called}


def draw(before: dict[str, Array], after: dict[str, Array], path: Path) -> None:
    """Draw both posteriors of each parameter over each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ink = "#808890"  # readable on white and on black
    with plt.rc_context(dict.fromkeys(("text.color", "xtick.color", "ytick.color"), ink)):
        figure, axes = plt.subplots(1, len(NAMES), figsize=(9, 2.6), layout="constrained")
        for axis, name in zip(axes, NAMES, strict=True):
            for label, found, color in (
                ("pytensor.scan", before, "#c98a2b"),
                ("with scanlib.enable()", after, "#2f7ad1"),
            ):
                axis.hist(found[name], bins=30, histtype="step", color=color, label=label)
            axis.set_title(name, fontsize=11)
            axis.set_yticks([])
            axis.patch.set_alpha(0)
            for edge in axis.spines.values():
                edge.set_color(ink)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(
            handles, labels, loc="outside lower center", ncols=2, frameon=False, labelcolor=ink
        )
        figure.savefig(path, dpi=110, transparent=True)
        plt.close(figure)


def main() -> None:
    """Sample twice, print and draw."""
    parser = argparse.ArgumentParser(description="Sample a PyMC model before and after scanlib.")
    parser.add_argument("--figure", type=Path, default=Path("pymc_smoothing.png"))
    parser.add_argument("--draws", type=int, default=500)
    options = parser.parse_args()
    y = load_co2()
    (before, slow), (after, fast) = (study(y, options.draws, adopt) for adopt in (False, True))
    print(f"{len(y)} weeks; {options.draws} draws after as many to tune")
    for name in NAMES:
        print(f"{name}: {before[name].mean():.4f} before, {after[name].mean():.4f} after")
        np.testing.assert_allclose(before[name].mean(), after[name].mean(), rtol=0.05)
    for what in slow:
        print(f"{what}: {slow[what]:.4g} s before, {fast[what]:.4g} s after")
    draw(before, after, options.figure)


if __name__ == "__main__":
    main()
