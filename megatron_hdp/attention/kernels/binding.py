"""Functions of optional packages, bound by the names of their arguments.

Their low-level entries change between versions without notice. An argument that is missing, or one that is wanted and
unknown, makes the package unusable with that as the reason; nothing is passed by position.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

type Needs = dict[str, tuple[str, ...]]
"""Our name of every argument that must be there, with the names it may go by."""


class UnusableError(Exception):
    """Why a package cannot serve, in words for the doctor."""


@dataclass(frozen=True)
class Bound:
    """A function that is called by our names for its arguments."""

    function: Callable[..., Any]
    names: Mapping[str, str]
    """Its name for each of ours."""
    blanks: tuple[str, ...]
    """Arguments without a default that we leave empty."""

    def takes(self, name: str) -> bool:
        """Whether the function has an argument for our ``name``."""
        return name in self.names

    def __call__(self, **values: Any) -> Any:
        """Call with every value that the function has an argument for."""
        given = {self.names[name]: value for name, value in values.items() if name in self.names}
        return self.function(**given, **dict.fromkeys(self.blanks))


def own_names(*names: str) -> Needs:
    """Arguments that go by our own names."""
    return {name: (name,) for name in names}


def bind(
    module: ModuleType,
    entry: str,
    needs: Needs,
    extras: tuple[str, ...] = (),
    blanks: tuple[str, ...] = (),
) -> Bound:
    """Bind ``module.entry``.

    Args:
        module: where the function is.
        entry: its name.
        needs: arguments that must be there.
        extras: arguments to pass where the function has them.
        blanks: arguments that may be without a default, and are then None.

    Raises UnusableError if the function is absent, lacks an argument, or wants one that we do not know.
    """
    function = getattr(module, entry, None)
    label = f"{module.__name__}.{entry}"
    if function is None:
        raise UnusableError(f"there is no {label}")
    wanted = _arguments(function)
    names: dict[str, str] = {}
    for name, aliases in needs.items():
        found = next((alias for alias in aliases if alias in wanted), None)
        if found is None:
            raise UnusableError(f"{label} has no argument {' or '.join(aliases)}")
        names[name] = found
    names |= {name: name for name in extras if name in wanted}
    open_ = [name for name, has_default in wanted.items() if not has_default and name not in names.values()]
    unknown = [name for name in open_ if name not in blanks]
    if unknown:
        raise UnusableError(f"{label} wants {', '.join(unknown)}, which this version does not know")
    return Bound(function, names, tuple(open_))


def _arguments(function: Any) -> dict[str, bool]:
    """Names of the arguments, and whether each has a default; operators of torch carry them in their schema."""
    for operator in (getattr(function, "_opoverload", None), getattr(function, "default", None), function):
        arguments = getattr(getattr(operator, "_schema", None), "arguments", None)
        if arguments is not None:
            return {argument.name: bool(argument.has_default_value()) for argument in arguments}
    parameters = inspect.signature(function).parameters.values()
    return {parameter.name: parameter.default is not parameter.empty for parameter in parameters}


def module(name: str, package: str) -> ModuleType:
    """Import a module of an optional package. Raises UnusableError if that fails, whichever way."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = name.partition(".")[0] if error.name is None else error.name
        if name == missing or name.startswith(f"{missing}."):
            raise UnusableError(f"{package} is not installed") from error
        raise UnusableError(f"{package} cannot be imported: {error}") from error
    except Exception as error:  # a build for another torch or CUDA fails in its own ways
        raise UnusableError(f"{package} cannot be imported: {type(error).__name__}: {error}") from error


def unusable(bind_all: Callable[[], object], *distributions: str) -> str:
    """Why ``bind_all`` raises UnusableError, with the version of what is installed; "" if it does not."""
    try:
        bind_all()
    except UnusableError as error:
        text = str(error)
        return text if "not installed" in text else f"{text} ({_version(*distributions)} is installed)"
    return ""


def _version(*distributions: str) -> str:
    """Version of the first installed one, for messages."""
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return distributions[0]
