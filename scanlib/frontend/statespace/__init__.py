"""Linear Gaussian state-space models: the Kalman filter, the smoother, draws of states."""

from scanlib.frontend.statespace.kalman import kalman_filter, kalman_sample, kalman_smoother
from scanlib.frontend.statespace.model import StateSpace

__all__ = ["StateSpace", "kalman_filter", "kalman_sample", "kalman_smoother"]
