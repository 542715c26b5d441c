"""Where numba keeps what scanlib compiles: files that are read only if they are intact.

Numba's own files have no checksums, and an index of signatures beside them that two processes may
write at once. Here each signature of a function has a file of its own.
"""

import glob
import pickle
from hashlib import sha256
from pathlib import Path
from typing import Any

import numba

from scanlib._compat.numba import Cache, serialize
from scanlib.kept_files import read_sealed, write_sealed


class SealedFiles:
    """The files of one function, in place of numba's `IndexDataCacheFile`; the name has what tells
    it from others of that name, and the stamp is that of its source."""

    def __init__(self, folder: Path, name: str, stamp: Any) -> None:
        self.folder = folder
        self.name = name
        self.identity = numba.__version__, stamp

    def load(self, key: Any) -> Any:
        """Return what was saved for a signature, None if there is nothing intact."""
        content = read_sealed(self._path(key))
        if content is None:
            return None
        try:
            own, data = pickle.loads(content)
        except (AttributeError, ImportError):
            return None  # of classes that a newer release of something does not have
        return data if own == (self.identity, key) else None

    def save(self, key: Any, data: Any) -> None:
        """Keep what was compiled for a signature."""
        write_sealed(self._path(key), serialize.dumps(((self.identity, key), data)))

    def flush(self) -> None:
        """Remove the files of all signatures."""
        for path in self.folder.glob(f"{glob.escape(self.name)}.*.nbc"):
            path.unlink(missing_ok=True)

    def _path(self, key: Any) -> Path:
        words = repr((self.identity, key)).encode()
        return self.folder / f"{self.name}.{sha256(words).hexdigest()[:16]}.nbc"


def sealed(function: Any) -> Any:
    """Return a jitted function whose files, if it is kept on disk, are sealed."""
    cache = getattr(function, "_cache", None)  # none where numba is told not to compile
    if isinstance(cache, Cache) and not isinstance(cache._cache_file, SealedFiles):
        name, locator = cache._impl.filename_base, cache._impl.locator
        folder = Path(locator.get_cache_path())
        cache._cache_file = SealedFiles(folder, name, locator.get_source_stamp())
    return function
