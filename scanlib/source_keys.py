"""Keys of compiled code: the text of what writes it.

Code that is kept on disk is known by a key. What writes it changes from release to release, and
from one commit to the next, so the text of the modules that write it is part of the key: no number
has to be raised. Nearly all of these modules are imported, directly or not, by each that compiles
something, so there is one key for all.
"""

from functools import cache
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parent
WRITERS = (
    "_compat", "backends/handler", "backends/numba", "kernels", "recurrences", "schedules",
)  # fmt: skip


@cache
def source_key(*places: str) -> str:
    """Return the key of what folders or files of the package write, by default of all `WRITERS`."""
    digest = sha256()
    for place in places or WRITERS:
        path = ROOT / place
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:32]
