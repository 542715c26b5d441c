"""Files of compiled code that are damaged, cut short or written by two processes at once."""

import os
import pickle
import subprocess
import sys
from hashlib import sha256
from importlib.util import find_spec

import pytest

from scanlib import kept_files
from scanlib.backends.cuda import nvidia
from scanlib.backends.numba.disk import SealedFiles, sealed
from scanlib.kept_files import kept, read_sealed, write_sealed

CONTENT = bytes(range(256)) * 4


def flipped(content):
    return content[:50] + bytes([content[50] ^ 1]) + content[51:]


DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "cut by a byte": lambda content: content[:-1],
    "flipped": flipped,
    "empty": lambda content: b"",
    "short": lambda content: b"x",
    "garbage": lambda content: os.urandom(len(content)),
    "longer": lambda content: content + b"x",
}


@pytest.fixture(params=DAMAGES)
def damage(request):
    def damage(path):
        path.write_bytes(DAMAGES[request.param](path.read_bytes()))

    return damage


class Counted:
    """Makes the content, and counts how often."""

    def __init__(self, content=CONTENT):
        self.content, self.calls = content, 0

    def __call__(self):
        self.calls += 1
        return self.content


def get(folder, make):
    path, content = kept(folder, "name", ".so", make)
    assert content == make.content == path.read_bytes()
    return path


class TestKept:
    def test_made_once(self, tmp_path):
        make = Counted()
        assert get(tmp_path / "new", make) == get(tmp_path / "new", make)
        assert make.calls == 1

    def test_damaged(self, tmp_path, damage):
        make = Counted()
        damage(get(tmp_path, make))
        get(tmp_path, make)
        assert make.calls == 2
        get(tmp_path, make)
        assert make.calls == 2

    def test_another_content_of_another_process(self, tmp_path):
        """Compilers need not give the same bytes twice: both files are right."""
        first, second = Counted(), Counted(CONTENT[::-1])
        get(tmp_path, first)
        (tmp_path / "name-0.so").write_bytes(CONTENT)  # no checksum of this content
        assert kept(tmp_path, "name", ".so", second)[1] == CONTENT
        assert second.calls == 0

    def test_without_checksum(self, tmp_path):
        make = Counted()
        for name in ("name.so", "name-.so", "name-0.so"):
            (tmp_path / name).write_bytes(CONTENT)
        get(tmp_path, make)
        assert make.calls == 1

    def test_nothing_can_be_written(self, tmp_path, monkeypatch):
        def full(*paths):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(kept_files.os, "replace", full)
        path, content = kept(tmp_path, "name", ".so", Counted())
        assert content == CONTENT
        assert not path.exists()
        assert not list(tmp_path.iterdir())


class TestSealed:
    def test_read(self, tmp_path, damage):
        path = tmp_path / "file"
        assert read_sealed(path) is None
        for content in (b"", CONTENT):
            write_sealed(path, content)
            assert read_sealed(path) == content
        damage(path)
        assert read_sealed(path) is None

    def test_without_checksum(self, tmp_path):
        path = tmp_path / "file"
        path.write_bytes(pickle.dumps(CONTENT))
        assert read_sealed(path) is None

    def test_signatures(self, tmp_path, damage):
        files = SealedFiles(tmp_path, "<f>[*]", 0)
        files.save("a", [1])
        files.save("b", [2])
        assert (files.load("a"), files.load("b"), files.load("c")) == ([1], [2], None)
        assert SealedFiles(tmp_path, "<f>[*]", 1).load("a") is None  # of another source
        damage(files._path("a"))
        assert (files.load("a"), files.load("b")) == (None, [2])
        os.replace(files._path("b"), files._path("a"))  # another signature's
        assert files.load("a") is None
        files.flush()
        assert not list(tmp_path.iterdir())


def test_numba_compiles_again(tmp_path, monkeypatch, damage):
    from numba import njit

    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))

    def calls():
        f = sealed(njit(twice, cache=True))
        assert f(3) == 6
        return sum(f.stats.cache_misses.values())

    def files():
        return [path for path in tmp_path.rglob("*") if path.is_file()]

    assert (calls(), calls()) == (1, 0)
    (path,) = files()
    damage(path)
    assert (calls(), calls()) == (1, 0)
    assert files() == [path]


def twice(x):
    return x + x


def test_cuda_compiles_again(tmp_path, monkeypatch, damage):
    class Compiler(Counted):
        version = "of nobody"

        def compile(self, source, architecture):
            return self()

    made = Compiler()
    monkeypatch.setattr(nvidia, "find_compiler", lambda: made)
    monkeypatch.setattr(nvidia, "folder", lambda: tmp_path)
    for calls in (1, 1):
        assert nvidia.compile_kernels("source", "sm_90") == CONTENT
        assert made.calls == calls
    (path,) = tmp_path.iterdir()
    damage(path)
    for calls in (2, 2):
        assert nvidia.compile_kernels("source", "sm_90") == CONTENT
        assert made.calls == calls


SCRIPT = """
import sys
import numpy as np
import pytensor
import pytensor.tensor as pt
import scanlib

x, a = pt.dvector("x"), pt.dscalar("a")
h = scanlib.scan(
    lambda x, h, a: pt.tanh(a * h) + x, x, pt.zeros(()), non_sequences=a, return_updates=False
)
f = pytensor.function([x, a], [h[-1], pytensor.grad(h.sum(), a)], mode=sys.argv[1])
last, slope = (float(value) for value in f(np.arange(4.0), 0.5))
expected, tangent, total = 0.0, 0.0, 0.0
for value in np.arange(4.0):
    now = np.tanh(0.5 * expected)
    tangent = (1 - now**2) * (expected + 0.5 * tangent)
    expected, total = now + value, total + tangent
np.testing.assert_allclose([last, slope], [expected, total], rtol=1e-12)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["JAX", "NUMBA"])
def test_a_process_with_damaged_files(tmp_path, mode):
    """Code from such a file would end the process, so this one is another."""
    if mode == "JAX" and find_spec("jax") is None:
        pytest.skip("jax is not installed")
    environment = os.environ | {"PYTENSOR_FLAGS": f"base_compiledir={tmp_path}"}

    def own_files():
        """Return the kernels and the libraries that call them."""
        return sorted(
            [*tmp_path.rglob("scanlib_kernels/*.o"), *tmp_path.rglob("scanlib_libraries/*.so")]
        )

    def run():
        subprocess.run([sys.executable, "-c", SCRIPT, mode], check=True, env=environment)
        assert {path.suffix for path in own_files()} == {".o", ".so"}
        # A library that is compiled again need not be the same to the byte, and has another name.
        intact = filter(is_intact, own_files())
        assert set(map(name_of, own_files())) == set(map(name_of, intact))

    run()
    kinds = list(DAMAGES.values())
    for k, path in enumerate(own_files()):
        path.write_bytes(kinds[k % len(kinds)](path.read_bytes()))
    assert not any(map(is_intact, own_files()))
    run()


def name_of(path):
    return path.name.rpartition("-")[0] if path.suffix == ".so" else path.name


def is_intact(path):
    if path.suffix == ".o":
        return read_sealed(path) is not None
    return sha256(path.read_bytes()).hexdigest().startswith(path.stem.rsplit("-")[1])
