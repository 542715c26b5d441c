"""Files of compiled code that are kept from one process to the next, and never trusted.

A file may be cut short by a full disk or a process that was killed, and damaged afterwards; code
loaded from such a file ends the process, or computes something else. So every file that scanlib
keeps is written under another name first and then renamed, holds the SHA-256 of its content, and is
read only if that is right; otherwise it is made again. The checksum also tells files that were
renamed before their content reached the disk, so nothing waits for the disk.

Libraries have to be files that hold nothing else, so `kept` writes the checksum into the name.
"""

import os
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

_SIZE = sha256().digest_size


def kept(folder: Path, name: str, suffix: str, make: Callable[[], bytes]) -> tuple[Path, bytes]:
    """Return the file of a name and its content, which is made where there is no intact file.

    Parameters
    ----------
    folder : Path
    name : str
        What identifies the content, without characters that patterns of file names use.
    suffix : str
    make : callable
        Returns the content.

    Returns
    -------
    path : Path
        There is no such file where none can be written.
    content : bytes
    """
    for path in sorted(folder.glob(f"{name}-*{suffix}")):
        content = _read(path)
        if content is not None and path.name == _name(name, content, suffix):
            return path, content
    content = make()
    path = folder / _name(name, content, suffix)
    write(path, content)
    return path, content


def _name(name: str, content: bytes, suffix: str) -> str:
    return f"{name}-{sha256(content).hexdigest()[:32]}{suffix}"


def write_sealed(path: Path, content: bytes) -> None:
    """Write a file that `read_sealed` reads."""
    write(path, content + sha256(content).digest())


def read_sealed(path: Path) -> bytes | None:
    """Return what `write_sealed` wrote, None if there is no file or another content."""
    data = _read(path)
    if data is None:
        return None
    content, seal = data[:-_SIZE], data[-_SIZE:]
    return content if sha256(content).digest() == seal else None


def write(path: Path, content: bytes) -> None:
    """Write a file as a whole or not at all; where it cannot be written, nothing is kept."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="writing_") as folder:
            written = Path(folder) / path.name
            written.write_bytes(content)
            os.replace(written, path)
    except OSError:
        return  # a full disk, or a folder that others may write: the next process makes it again


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
