"""Digital filters: hum taken out of a signal, and a filter found from what it does.

``lfilter`` runs the difference equation of a filter. A notch takes 50 Hz out of a slow signal; and
from the input and output of a resonator that nobody described, its two coefficients are found by
least squares, with gradients through the filter. Signals are simulated, with a fixed seed.

Source: A. Oppenheim and R. Schafer, "Discrete-time signal processing", 1989.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable
from scipy.optimize import minimize
from scipy.signal import iirnotch

import scanlib

Array = np.ndarray[Any, Any]
RATE = 500.0


def notch(signal: TensorVariable, frequency: float = 50.0, quality: float = 15.0) -> TensorVariable:
    """Take one frequency out of signals along the last axis."""
    numerator, denominator = iirnotch(frequency, quality, fs=RATE)
    return scanlib.lfilter(numerator, denominator, signal)


def resonator(signal: TensorVariable, radius: Any, angle: Any) -> TensorVariable:
    """Ring at an angle per sample, decaying with a radius below one."""
    denominator = pt.stack([pt.ones(()), -2 * radius * pt.cos(angle), radius**2])
    return scanlib.lfilter(np.array([1.0]), denominator, signal)


def simulate(samples: int = 1000, seed: int = 2) -> tuple[Array, Array]:
    """A pulse train with hum and noise, and the same without."""
    rng = np.random.default_rng(seed)
    time = np.arange(samples) / RATE
    clean = np.exp(-(((time % 0.8) - 0.2) ** 2) / 0.002)
    return clean + 0.5 * np.sin(2 * np.pi * 50 * time) + 0.03 * rng.normal(size=samples), clean


def identify(given: Array, heard: Array) -> Array:
    """Find radius and angle of a resonator from an input and an output."""
    free = pt.dvector("free")
    rung = resonator(pt.constant(given), pt.sigmoid(free[0]), free[1])
    cost = pt.mean((rung - heard) ** 2)
    compiled = pytensor.function([free], [cost, pytensor.grad(cost, free)])
    found = minimize(lambda v: tuple(compiled(v)), np.array([1.0, 0.4]), jac=True)
    return np.array([1 / (1 + np.exp(-found.x[0])), found.x[1]])


def draw(path: str | Path) -> None:
    """Filter a signal, identify a resonator, and draw both."""
    from matplotlib import pyplot as plt

    noisy, clean = simulate()
    signal = pt.dvector("signal")
    filtered = pytensor.function([signal], notch(signal))(noisy)
    rng = np.random.default_rng(3)
    given = rng.normal(size=300)
    ring = pytensor.function([signal], resonator(signal, 0.97, 0.3))
    found = identify(given, ring(given) + 0.5 * rng.normal(size=300))

    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8, 3.2), width_ratios=[3, 2], layout="constrained"
    )
    time = np.arange(len(noisy)) / RATE
    left.plot(time, noisy, color="0.8", linewidth=0.6, label="with hum")
    left.plot(time, filtered, color="tab:blue", linewidth=1, label="filtered")
    left.plot(time, clean, color="k", linewidth=0.6, linestyle="--", label="clean")
    left.set(xlabel="seconds", title="a notch at 50 Hz")
    left.legend(frameon=False, fontsize=8)
    pulse = np.zeros(120)
    pulse[0] = 1
    right.plot(ring(pulse), color="0.6", linewidth=3, label="resonator")
    again = pytensor.function([signal], resonator(signal, *found))
    right.plot(again(pulse), color="tab:red", lw=1, label="found: {:.3f}, {:.3f}".format(*found))
    right.set(xlabel="sample", title="response to one pulse")
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "filtering.png")
