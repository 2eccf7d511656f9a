"""Finds Megatron's source on the import path and reads it as text, without importing Megatron or torch.

Verification must work before anything is imported (importing binds names by value) and in a process without torch.
"""

import ast
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import ModuleSpec
from pathlib import Path

type Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef

_MAX_RE_EXPORTS = 10


@dataclass(frozen=True)
class Located:
    """A function or class, and the file that defines it."""

    file: Path
    node: Definition

    @property
    def place(self) -> str:
        """ "file:line" of the definition."""
        return f"{self.file}:{self.node.lineno}"


def find_source(module: str) -> Path | None:
    """Path of the .py file that `import module` would run, or None if there is none.

    Parents are never imported: every finder of `sys.meta_path` is asked with the parent's search path, so wheels,
    clones on PYTHONPATH, editable installs and namespace packages are all seen as an import would see them.
    """
    loaded = sys.modules.get(module)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
        return Path(file) if file else None
    found = _find_spec(module)
    if found is None or found[0].origin is None or not found[0].has_location:
        return None
    return Path(found[0].origin)


def _find_spec(module: str) -> tuple[ModuleSpec, list[str]] | None:
    """The module's spec and the folders in which its submodules are searched."""
    parent, _, leaf = module.rpartition(".")
    path: list[str] | None = None
    if parent:
        if parent in sys.modules and hasattr(sys.modules[parent], "__path__"):
            path = list(sys.modules[parent].__path__)
        else:
            above = _find_spec(parent)
            if above is None:
                return None
            path = above[1]
    for finder in sys.meta_path:
        find = getattr(finder, "find_spec", None)
        spec = find(module, path) if find is not None else None
        if spec is not None:
            return spec, _search_path(spec, path, leaf)
    return None


def _search_path(spec: ModuleSpec, parent_path: Sequence[str] | None, leaf: str) -> list[str]:
    if spec.submodule_search_locations is None:
        return []
    try:
        return list(spec.submodule_search_locations)
    except KeyError:  # a namespace package inside a package that is not imported cannot list its own folders
        return [str(Path(base) / leaf) for base in parent_path or () if (Path(base) / leaf).is_dir()]


def find_definition(target: str) -> Located | None:
    """The definition behind "module:attribute", followed through `from ... import` re-exports; None if missing."""
    module, _, attribute = target.partition(":")
    for _ in range(_MAX_RE_EXPORTS):
        file = find_source(module)
        if file is None or file.suffix != ".py":
            return None
        bound = _bindings(file).get(attribute)
        if not isinstance(bound, ast.ImportFrom):
            return Located(file, bound) if bound is not None else None
        module = _imported_from(bound, module, is_package=file.name == "__init__.py")
        attribute = next(alias.name for alias in bound.names if (alias.asname or alias.name) == attribute)
    return None


def _imported_from(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """Absolute name of the module that a (relative) `from ... import` reads."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    drop = node.level - (1 if is_package else 0)
    base = parts[: len(parts) - drop]
    return ".".join([*base, *([node.module] if node.module else [])])


def _bindings(file: Path) -> dict[str, Definition | ast.ImportFrom]:
    return _parse_bindings(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _parse_bindings(file: Path, _mtime_ns: int) -> dict[str, Definition | ast.ImportFrom]:
    """Module-level name -> its last definition or import, looking into if, try and with blocks."""
    found: dict[str, Definition | ast.ImportFrom] = {}

    def visit(statements: Sequence[ast.stmt]) -> None:
        for node in statements:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    found[node.name] = node
                case ast.ImportFrom():
                    found.update({alias.asname or alias.name: node for alias in node.names})
                case ast.If() | ast.For() | ast.While():
                    visit(node.body)
                    visit(node.orelse)
                case ast.With():
                    visit(node.body)
                case ast.Try():
                    visit(node.body)
                    for handler in node.handlers:
                        visit(handler.body)
                    visit(node.orelse)
                    visit(node.finalbody)

    visit(ast.parse(file.read_text(encoding="utf-8")).body)
    return found


def megatron_version() -> str | None:
    """Version of the Megatron that would be imported ("0.19.2"), read from package_info.py as text; None if absent."""
    file = find_source("megatron.core.package_info")
    if file is None:
        return None
    values: dict[str, object] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values.update({name.id: node.value.value for name in node.targets if isinstance(name, ast.Name)})
    if not {"MAJOR", "MINOR", "PATCH"} <= values.keys():
        return None
    return f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}{values.get('PRE_RELEASE', '')}"
