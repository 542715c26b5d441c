"""Draw the figures of all recipes: ``python -m examples.recipes [FOLDER]``, in a checkout."""

import sys
from importlib import import_module
from pathlib import Path
from time import perf_counter

import matplotlib

HERE = Path(__file__).resolve().parent
NAMES = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))


def main(folder: Path) -> None:
    """Draw one figure for each recipe into a folder."""
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        clock = perf_counter()
        path = folder / f"recipe-{name.replace('_', '-')}.png"
        import_module(f"examples.recipes.{name}").draw(path)
        print(f"{path} ({perf_counter() - clock:.1f} s)")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "docs" / "figures")
