"""Imports as docs/architecture.md draws them: downwards, in no circle, at the top of modules."""

import ast
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from itertools import takewhile
from pathlib import Path

import pytest

import scanlib

ROOT = Path(scanlib.__file__).parents[1]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "scanlib").rglob("*.py"))
}
# Which parts of the package each part may import. All may import what knows releases and files.
EVERYWHERE = {"_compat", "config", "kept_files", "source_keys"}
FLOORS: dict[str, set[str]] = {
    "lengths": set(),
    "ops": {"lengths"},
    "kernels": {"lengths", "ops"},
    "recurrences": {"ops", "kernels"},
    "schedules": {"ops", "kernels", "recurrences"},
    "analysis": {"lengths", "ops", "recurrences"},
    "rewrites": {"lengths", "ops", "analysis"},
    "frontend": {"lengths", "ops"},
    "backends": {"lengths", "ops", "kernels", "recurrences", "schedules"},
    "explain": {
        *("lengths", "ops", "analysis", "rewrites", "frontend", "kernels", "schedules", "backends")
    },
}
# What needs packages that need not be installed, imported where a function asks for it.
OPTIONAL = (
    "scanlib.backends.jax",
    "scanlib.backends.torch",
    "scanlib.backends.cuda",
    "scanlib.rewrites.densities",
)


def imports_of(node, is_inside=False):
    """Yield the modules of scanlib that code imports, and whether a function does."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if isinstance(node, ast.ImportFrom):
        assert not node.level, "imports name the whole module"
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            yield name if name in MODULES else node.module, is_inside
    elif isinstance(node, ast.Import):
        yield from ((alias.name, is_inside) for alias in node.names)
    is_inside |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    for child in ast.iter_child_nodes(node):
        yield from imports_of(child, is_inside)


IMPORTS = [
    (module, name, is_inside)
    for module, path in MODULES.items()
    for name, is_inside in imports_of(ast.parse(path.read_text(encoding="utf-8")))
    if name in MODULES and name != module
]


def test_functions_import_optional_backends_alone():
    inside = {(module, name) for module, name, is_inside in IMPORTS if is_inside}
    assert not {pair for pair in inside if not pair[1].startswith(OPTIONAL)}


@pytest.mark.all_forms
@pytest.mark.parametrize("part", FLOORS)
def test_parts_import_downwards(part):
    names = {name for module, name, _ in IMPORTS if module.split(".")[1:2] == [part]}
    found = {name.split(".")[1] for name in names if name != "scanlib"}
    assert found <= FLOORS[part] | EVERYWHERE | {part}


def test_no_circle_of_modules_or_packages():
    graphs = defaultdict(lambda: defaultdict(set))
    for module, name, _ in IMPORTS:
        graphs["modules"][module].add(name)
        own, other = module.split("."), name.split(".")
        pairs = zip(own, other, strict=False)
        depth = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if depth < min(len(own), len(other)):  # neither is a package that holds the other
            graphs[".".join(own[:depth])][own[depth]].add(other[depth])
    for package, graph in graphs.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            pytest.fail(f"{package}: {' imports '.join(reversed(error.args[1]))}", pytrace=False)


# The signatures of `pytensor.scan` and `scan_checkpoints`, and the options of `loop`.
LONG = {
    "scanlib.frontend.scan_function.scan",
    "scanlib.frontend.wrappers.scan_checkpoints",
    "scanlib.frontend.loop_function.loop",
}


def test_functions_take_at_most_eight_arguments():
    long = set()
    for module, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                names = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = sum(argument.arg not in ("self", "cls") for argument in names)
                long |= {f"{module}.{node.name}"} if count > 8 else set()
    assert long <= LONG


def test_no_chain_of_more_than_three_classes():
    bases = defaultdict(list)
    for path in MODULES.values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] += [ast.unparse(base).split("[")[0] for base in node.bases]

    def depth(name):
        own = [base for base in bases[name] if base in bases and base != name]
        return 1 + max(map(depth, own), default=0)

    assert {name for name in list(bases) if depth(name) > 3} == set()


def test_tests_mirror_the_rooms():
    rooms = {"/".join(name.split(".")[1:]) for name in MODULES} | {"package"}
    found = {
        path.parent.relative_to(ROOT / "tests").as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
    }
    assert found <= rooms


def test_modules_share_a_name_only_where_each_linker_has_one():
    homes = defaultdict(set)
    for module, path in MODULES.items():
        if path.stem != "__init__":
            homes[path.stem].add(module.rpartition(".")[0])
    shared = {stem: rooms for stem, rooms in homes.items() if len(rooms) > 1}
    assert not [
        stem
        for stem, rooms in shared.items()
        if not all(room.startswith("scanlib.backends.") for room in rooms)
    ]
