"""Side-by-side timings of scanlib and ``pytensor.scan``: ``python -m benchmarks``."""
