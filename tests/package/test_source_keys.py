"""Keys of compiled code are made of the text that writes it (`scanlib.source_keys`)."""

import ast
import shutil
from pathlib import Path

import scanlib
from scanlib import source_keys

ROOT = Path(scanlib.__file__).parent


def test_the_key_changes_with_the_text_of_what_writes(tmp_path, monkeypatch):
    copy = tmp_path / "scanlib"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("__pycache__"))
    made = source_keys.source_key.__wrapped__
    key, own = made(), made("ops/logaddexp.py")
    monkeypatch.setattr(source_keys, "ROOT", copy)
    assert (made(), made("ops/logaddexp.py")) == (key, own)
    for module in ("frontend/scan_function", "ops/scan", "backends/jax/kernels"):
        (copy / f"{module}.py").write_text("changed", encoding="utf-8")
        assert made() == key
    for module in ("backends/numba/general_loop", "schedules/blocks", "kernels/language"):
        (copy / f"{module}.py").write_text("changed", encoding="utf-8")
        assert made() != key
        key = made()
    (copy / "ops/logaddexp.py").write_text("changed", encoding="utf-8")
    assert (made(), made("ops/logaddexp.py") == own) == (key, False)


def test_no_version_is_kept_by_hand():
    numbered = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = [ast.unparse(target) for target in node.targets]
                numbered += [f"{path.name}: {n}" for n in names if n.endswith("VERSION")]
    assert not numbered
