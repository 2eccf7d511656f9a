"""Runs the user's script as __main__, and keeps spawned children from running it again. No torch, no Megatron."""

import importlib.machinery
import os
import runpy
import sys
import types
from typing import Any

from megatron_hdp.errors import ConfigError

SCRIPT_VARIABLE = "MEGATRON_HDP_SCRIPT"
"""Absolute path of the running script, for spawned children."""

_CHILD_MAIN = "megatron_hdp.spawned"


def find_script(path: str) -> str:
    """Absolute path of the script to run.

    Raises:
        ConfigError: there is no such file, or it is a folder.
    """
    if os.path.isdir(path):
        raise ConfigError(f"{path} is a folder: name the training script inside it")
    if not os.path.isfile(path):
        raise ConfigError(f"no script at {path} (looked from {os.getcwd()})")
    return os.path.abspath(path)


def run_as_main(path: str, argv: list[str]) -> None:
    """Run ``path`` as `python path argv...` would.

    The module gets a spec that names `megatron_hdp.spawned`: multiprocessing makes a spawned child (Megatron's
    checkpoint writer starts one) import the module of that name as its main module, and so not the training script.
    """
    os.environ[SCRIPT_VARIABLE] = path
    sys.argv = [path, *argv]
    module: Any = types.ModuleType("__main__")
    module.__file__ = path
    module.__spec__ = importlib.machinery.ModuleSpec(_CHILD_MAIN, None)
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


_loading = False


def attribute_in_child(name: str) -> Any:
    """A name that a spawned child misses in its main module: import the script now, as multiprocessing would have.

    The script runs under the name `__mp_main__`, so a guarded training does not start.

    Raises:
        AttributeError: the script does not define it either.
    """
    global _loading
    path = os.environ.get(SCRIPT_VARIABLE)
    if path is None or _loading or (name.startswith("__") and name.endswith("__")):
        raise AttributeError(name)
    _loading = True
    namespace = runpy.run_path(path, run_name="__mp_main__")
    vars(sys.modules["__main__"]).update(namespace)
    if name not in namespace:
        raise AttributeError(f"{name} is not defined in {path}")
    return namespace[name]
