"""All loops built with `pytensor.scan`, by name; see `tests.legacy_cases`."""

# Importing a module of loops registers them.
from tests import legacy_models, legacy_sequences, legacy_states  # noqa: F401
from tests.legacy_cases import LOOPS, LegacyLoop, scan

__all__ = ["LOOPS", "LegacyLoop", "scan"]
