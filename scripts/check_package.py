"""Build the package and use it from the outside, in an environment that knows nothing else.

    python scripts/check_package.py

Builds the sdist, and the wheel from the sdist; looks into both; installs the wheel with what it
needs into a new virtual environment, and there runs a small program and checks its types. Needs
the `build` package, as the `dev` extra installs it.
"""

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = '''\
"""A program that knows scanlib as an installed package."""

from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib

x = pt.dvector("x")
trace = scanlib.scan(
    lambda x, h: 0.5 * h + x, sequences=x, outputs_info=np.float64(0.0), return_updates=False
)
levels: int = scanlib.Levels(2).levels
outputs: Any = [trace, pytensor.grad(trace.sum(), x)]
f = pytensor.function([x], outputs)
explanation = scanlib.explain(f)
classes: list[str | None] = [part.recurrence for loop in explanation.loops for part in loop.parts]
assert "affine" in classes and levels == 2
values, gradient = f([1.0, 1.0, 1.0])
assert values.tolist() == [1.0, 1.5, 1.75] and gradient.tolist() == [1.75, 1.5, 1.0]
print(scanlib.__version__, scanlib.__file__)
'''
# Each is an error if the types of the package are seen, and none if it counts as untyped.
WRONG = """\
import scanlib

levels: str = scanlib.Levels(2).levels
scanlib.enabled(on="yes")
scanlib.explain()
"""


def run(*command: object, folder: Path, fails: bool = False) -> str:
    """Run a command and return what it prints; stop if it does not end as it should."""
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, capture_output=True, text=True, check=False
    )
    if (done.returncode != 0) != fails:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def check_contents(folder: Path) -> Path:
    """Look into sdist and wheel; return the wheel."""
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / "scanlib").rglob("*.py")}
    missing = (expected | {"scanlib/py.typed"}) - names
    foreign = {name for name in names if not name.startswith(("scanlib/", "pytensor_scanlib-"))}
    foreign |= {name for name in names if name.endswith("README.md")}  # those of the rooms
    if missing or foreign or not any(name.endswith("licenses/LICENSE") for name in names):
        sys.exit(f"{wheel.name}: missing {sorted(missing)}, foreign {sorted(foreign)}")
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    for name in (
        "scanlib/py.typed",
        "tests/package/test_docs.py",
        "docs/guide.md",
        "scanlib/ops/README.md",
    ):
        if name not in packed:
            sys.exit(f"{sdist.name}: {name} is missing")
    return wheel


def main() -> None:
    """Build, look inside, install, run, and check types."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT, folder=folder)
        wheel = check_contents(folder / "dist")
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        run(python, "-m", "pip", "install", wheel, "mypy", folder=folder)
        (folder / "program.py").write_text(PROGRAM, encoding="utf-8")
        (folder / "wrong.py").write_text(WRONG, encoding="utf-8")
        printed = run(python, "program.py", folder=folder)
        if str(folder / "venv") not in printed:
            sys.exit(f"another scanlib was imported: {printed}")
        mypy = (python, "-m", "mypy", "--ignore-missing-imports", "--follow-imports=silent")
        run(*mypy, "program.py", folder=folder)
        found = run(*mypy, "wrong.py", folder=folder, fails=True)
        if "Found 3 errors" not in found:
            sys.exit(f"the types of the installed package were not seen:\n{found}")
        print(f"{wheel.name}: {printed.split()[0]}, installs, runs, and its types are seen")


if __name__ == "__main__":
    main()
