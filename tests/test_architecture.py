"""The house keeps its walls: imports point down, siblings stay apart, and some libraries have one home each."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "lightning_par"

LEVELS = {
    "layout": 0,
    "comm": 1,
    "numerics": 2,
    "zero": 3,
    "tensor": 3,
    "pipeline": 3,
    "context": 3,
    "checkpoint": 4,
    "precision": 5,
    "strategy": 6,
    "callbacks": 7,
    "tracking": 7,
    "recipes": 7,
    "cli": 8,
}
"""Every package and its level; packages of one level never import each other."""

HOMES = {
    "wandb": {"tracking"},
    "hydra": {"cli"},
    "omegaconf": {"cli", "checkpoint"},
    "deepspeed": set(),
    "matplotlib": {"pipeline"},
}
"""Libraries that only these packages may import."""


def _files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if (PACKAGE / "conf") not in path.parents)


def _package(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else ""


def _imports(path: Path) -> set[str]:
    """Every module imported anywhere in the file, also inside functions; relative imports do not exist here."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return names


def _inner(path: Path) -> set[str]:
    found = set()
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "lightning_par" and len(parts) > 1 and parts[1] in LEVELS:
            found.add(parts[1])
    return found


def test_every_package_has_a_level() -> None:
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"conf"}
    assert packages == set(LEVELS)


@pytest.mark.parametrize("path", _files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    package = _package(path)
    if not package:  # the package's own __init__ and __main__ may see everything
        return
    level = LEVELS[package]
    wrong = {other for other in _inner(path) if other != package and LEVELS[other] >= level}
    assert not wrong, f"{path.relative_to(ROOT)} (level {level}) imports {sorted(wrong)}"


def test_no_cycles_inside_a_package() -> None:
    graph: dict[str, set[str]] = {}
    for path in _files():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.name != "__init__.py":
            graph[module] = {name for name in _imports(path) if name.startswith("lightning_par.") and name != module}
    state: dict[str, int] = {}

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if state.get(module) == 2 or module not in graph:
            return
        assert state.get(module) != 1, "cycle: " + " -> ".join([*trail, module])
        state[module] = 1
        for other in sorted(graph[module]):
            visit(other, (*trail, module))
        state[module] = 2

    for module in graph:
        visit(module, ())


def test_only_comm_calls_torch_distributed() -> None:
    """``torch.distributed.checkpoint`` is a file format, and ``torch.distributed.launcher`` starts processes: they live elsewhere."""
    elsewhere = ("torch.distributed.checkpoint", "torch.distributed.launcher", "torch.distributed.elastic")
    for path in _files():
        if _package(path) == "comm":
            continue
        wrong = {n for n in _imports(path) if n.startswith("torch.distributed") and not n.startswith(elsewhere)}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"
        used = re.findall(r"torch\.distributed\.\w+", _code(path))
        assert all(name.startswith(elsewhere) for name in used), f"{path.relative_to(ROOT)} uses {used}"


def test_lightning_is_seen_from_level_5_up() -> None:
    for path in _files():
        if LEVELS.get(_package(path), 9) < 5:
            wrong = {name for name in _imports(path) if name.split(".")[0] in ("lightning", "pytorch_lightning")}
            assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_private_lightning_names_live_in_seams() -> None:
    for path in _files():
        if path.name == "seams.py":
            continue
        private = {n for n in _imports(path) if n.startswith("lightning.") and any(part.startswith("_") for part in n.split("."))}
        assert not private, f"{path.relative_to(ROOT)} imports {sorted(private)}"


@pytest.mark.parametrize("library", HOMES)
def test_some_libraries_have_one_home(library: str) -> None:
    for path in _files():
        if any(name.split(".")[0] == library for name in _imports(path)):
            assert _package(path) in HOMES[library], f"{path.relative_to(ROOT)} imports {library}"


def _code(path: Path) -> str:
    """The source without docstrings and comments."""
    return ast.unparse(_without_docstrings(ast.parse(path.read_text())))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree
