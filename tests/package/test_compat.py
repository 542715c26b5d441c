"""What is taken from outside beyond public names stands in `scanlib._compat`, and nowhere else."""

import ast
from pathlib import Path

import scanlib

ROOT = Path(scanlib.__file__).parent
# Packages from which names may be taken anywhere. They stand where they stood in PyTensor 3.0.7 in
# 3.3.8 as well, and are what the projects document: of PyTensor its graphs, types and Ops, and the
# functions with which a linker is told of an Op.
PUBLIC = {
    "jax": {"jax", "jax.numpy", "jax.sharding", "jax.experimental.custom_partitioning"},
    "jaxlib": {"jaxlib"},
    "llvmlite": {"llvmlite", "llvmlite.binding"},
    "numba": {"numba", "numba.extending"},
    "pymc": {"pymc"},
    "torch": {"torch", "torch.autograd"},
    "pytensor": {
        "pytensor",
        "pytensor.compile.",
        "pytensor.configdefaults",
        "pytensor.configparser",
        "pytensor.gradient",
        "pytensor.graph.",
        "pytensor.link.c.op",
        "pytensor.link.jax.dispatch.basic",
        "pytensor.link.numba.dispatch.basic",
        "pytensor.link.pytorch.dispatch.basic",
        "pytensor.printing",
        "pytensor.raise_op",
        "pytensor.scalar",
        "pytensor.scalar.",
        "pytensor.scan.utils",
        "pytensor.tensor",
        "pytensor.tensor.",
    },
}
# What moved, and how PyTensor's own rewrites are named.
CLOSED = ("pytensor.ifelse", "pytensor.conditional", "pytensor.tensor.rewriting")


def taken(tree):
    """Yield the modules from which code takes names, with the names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def is_public(module, name):
    allowed = PUBLIC.get(module.split(".")[0])
    if allowed is None:
        return True  # Python's, NumPy's, scanlib's
    inside = any(
        module == other or (other[-1] == "." and module.startswith(other)) for other in allowed
    )
    closed = module.startswith(CLOSED) or f"{module}.{name}".startswith(CLOSED)
    return inside and not closed and not name.startswith("_")


def test_names_that_are_not_public_are_taken_in_one_place():
    found = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path in ROOT.rglob("*.py")
        if path.parent.name != "_compat"
        for module, name in taken(ast.parse(path.read_text(encoding="utf-8")))
        if not is_public(module, name)
    ]
    assert not found


def test_internals_are_no_attributes_of_what_is_imported():
    """``torch._C``, ``jax._src`` and the like, also by way of a public package."""
    found = []
    for path in ROOT.rglob("*.py"):
        if path.parent.name == "_compat":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                text = f"{node.value.id}.{node.attr}"
                if text.startswith(("torch._", "jax._", "numba.core", "numba.np", "fgraph._f")):
                    found.append(f"{path.relative_to(ROOT)}: {text}")
    assert not found
