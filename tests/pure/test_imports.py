"""Who may import what: by really importing with torch and Megatron out of reach, by reading, and by import-linter."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "megatron_hdp"

BLOCK = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "megatron"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Blocked())
"""

TORCH_FREE = ["types", "errors", "config", "liveness", "cli", "doctor", "planner", "data"]
TORCH_FREE += ["cost", "lengths", "length_files", "length_source", "mixes", "plan_command", "plan_flags", "plan_json"]
TORCH_FREE += ["plan_report", "plan_step", "simulator", "timeline", "timeline_setting", "timeline_writer"]


def modules_of(name):
    """Dotted names of a module, or of every module of a package."""
    folder = PACKAGE / name
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{name}.py"]
    assert all(file.exists() for file in files)
    dotted = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    return [module.removesuffix(".__init__") for module in dotted]


@pytest.mark.parametrize("name", TORCH_FREE)
def test_imports_without_torch_and_megatron(name):
    code = BLOCK + f"import importlib\nfor name in {modules_of(name)}:\n    importlib.import_module(name)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_command_shows_its_help_without_torch_and_megatron():
    code = BLOCK + "from megatron_hdp.cli import main\nmain(['--help'])\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout


def test_blocking_blocks():
    """Without this, a mistake in BLOCK would let the tests above pass for nothing."""
    for name in ("torch", "megatron.core"):
        done = subprocess.run([sys.executable, "-c", BLOCK + f"import {name}"], capture_output=True, text=True)
        assert f"No module named '{name.partition('.')[0]}" in done.stderr


def imported(file):
    """Absolute names of everything that a file imports anywhere, also inside functions and by literal name."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom(level=0, module=module):
                yield module
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="__import__" | "import_module")):
                if node.args and isinstance(node.args[0], ast.Constant):
                    yield node.args[0].value


def files_importing(package, *, outside):
    return [
        f"{file.relative_to(PACKAGE)} imports {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if outside not in file.parents
        for name in imported(file)
        if name == package or name.startswith(f"{package}.")
    ]


def test_only_seams_import_megatron():
    assert files_importing("megatron", outside=PACKAGE / "seams") == []


def test_only_the_doors_open_the_seams():
    found = files_importing("megatron_hdp.seams", outside=PACKAGE / "seams")
    assert {line.partition(" ")[0] for line in found} <= {"__init__.py", "__main__.py", "cli.py", "doctor.py"}


def test_only_the_table_the_cpu_mode_and_the_gaps_of_the_wheel_change_megatron():
    """An assignment to an attribute of something imported from Megatron anywhere else would escape `doctor`."""
    changing = set()
    for file in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(file.read_text())
        modules = {
            alias.asname or alias.name.partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).partition(".")[0] == "megatron"
        }
        assigned = {
            ast.unparse(target)
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Attribute) and ast.unparse(target).partition(".")[0] in modules
        }
        if assigned:
            changing.add(file.relative_to(PACKAGE).as_posix())
    assert changing <= {"seams/cpu.py", "seams/wheel.py"}  # install.py does it by name, from the table


def test_import_contracts():
    pytest.importorskip("importlinter")
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"],
        cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Contracts: 5 kept, 0 broken." in done.stdout
