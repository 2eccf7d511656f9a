"""Puts every wrapper of the table in place, or none.

The order is what keeps a run from being half patched: compare files with the fingerprints, import our wrappers, import
Megatron, check the live objects, build all wrappers, and only then assign. Any failure undoes what was assigned.
"""

import functools
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from megatron_hdp.errors import SeamError
from megatron_hdp.seams.fingerprint import minor_of
from megatron_hdp.seams.locate import find_definition
from megatron_hdp.seams.table import Seam, Table, default_table
from megatron_hdp.seams.verify import SeamStatus, refuse, verify

MARKER = "__megatron_hdp_seam__"

type _Function = Callable[..., Any]


@dataclass(frozen=True)
class _Applied:
    """One assignment into Megatron and how to take it back."""

    seam: str
    module: ModuleType
    attribute: str
    original: _Function
    ours: _Function

    @property
    def place(self) -> str:
        return f"{self.module.__name__}:{self.attribute}"

    def holds(self) -> bool:
        """Whether the place leads to our wrapper, possibly through a wrapper that somebody put on top."""
        current = getattr(self.module, self.attribute, None)
        while current is not None and current is not self.ours:
            current = getattr(current, "__wrapped__", None)
        return current is self.ours


@dataclass
class _Installed:
    """What is in place now; one per process, because the patched modules are one per process."""

    applied: tuple[_Applied, ...] = ()
    statuses: tuple[SeamStatus, ...] = ()
    version: str = ""


_installed = _Installed()


def install(allow_drift: bool = False, *, table: Table | None = None) -> None:
    """Verify every place, then wrap every seam. A second call does nothing. Imports Megatron and torch.

    Args:
        allow_drift: accept places whose body changed while the signature is as recorded.
        table: another table than the package's own (for tests).

    Raises:
        SeamError: Megatron is absent, of an unknown version or not as recorded, or a module outside Megatron already
            holds an original by name. Nothing is applied then.
    """
    if _installed.applied:
        _assert_in_place(_installed.applied)
        return
    table = table or default_table()
    version, statuses = verify(table)
    refuse(version, statuses, allow_drift)
    seams = table.for_minor(minor_of(version)).seams
    makers = [_resolve_wrapper(seam) for seam in seams]
    originals = [_live_original(seam) for seam in seams]
    version, statuses = verify(table)  # again: importing could have led to other files than looking did
    refuse(version, statuses, allow_drift)
    _refuse_bound_by_name(seams, originals)
    planned = [
        assignment
        for seam, maker, original in zip(seams, makers, originals)
        for assignment in _assignments(seam, original, _make_wrapper(seam, maker, original))
    ]
    _apply(planned)
    _installed.applied, _installed.statuses, _installed.version = tuple(planned), tuple(statuses), version


def install_for_run(allow_drift: bool = False) -> None:
    """`install`, and what the PyPI wheel needs for any run; the second part stays after `uninstall`.

    Raises:
        SeamError: as `install`.
    """
    install(allow_drift)
    importlib.import_module("megatron_hdp.seams.wheel").apply()  # imports Megatron: only after it was verified


def uninstall() -> None:
    """Put every original back. Does nothing when nothing is installed.

    Raises:
        SeamError: another package has replaced one of our wrappers, so the original must not be restored over it.
    """
    for done in _installed.applied:
        if getattr(done.module, done.attribute, None) is not done.ours:
            raise SeamError(
                f"seam '{done.seam}': {done.place} no longer holds our wrapper, another package replaced it after "
                "install(). Undo that first; nothing was restored"
            )
    for done in reversed(_installed.applied):
        setattr(done.module, done.attribute, done.original)
    _installed.applied, _installed.statuses, _installed.version = (), (), ""


def status(table: Table | None = None) -> list[SeamStatus]:
    """Every seam and contract: as found at install() if installed, else as found on the import path now.

    Raises:
        SeamError: not installed, and Megatron is absent or of a minor version without fingerprints.
    """
    if not _installed.applied:
        return verify(table or default_table())[1]
    live = {done.seam for done in _installed.applied if done.holds()}
    return [replace(s, applied=s.kind == "seam" and s.name in live) for s in _installed.statuses]


def table_text(table: Table | None = None) -> str:
    """The start-up table: one line per seam (name, status, file:line), then one line for the contracts."""
    statuses = status(table)
    rows = [
        (
            s.name,
            ("applied" if s.applied else "not applied") + ("" if s.state == "verified" else f", {s.state}"),
            s.place,
        )
        for s in statuses
        if s.kind == "seam"
    ]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"  {name:<{widths[0]}}  {state:<{widths[1]}}  {place}" for name, state, place in rows]
    contracts = [s for s in statuses if s.kind == "contract"]
    drifted = [s.name for s in contracts if s.state != "verified"]
    lines.append(
        f"  {len(contracts) - len(drifted)} of {len(contracts)} further places verified"
        + (f"; changed: {', '.join(drifted)}" if drifted else "")
    )
    head = f"megatron_hdp seams, megatron-core {_installed.version}:" if _installed.version else "megatron_hdp seams:"
    return "\n".join([head, *lines])


def _resolve_wrapper(seam: Seam) -> _Function:
    module, _, name = seam.wrapper.partition(":")
    try:
        maker = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise SeamError(
            f"seam '{seam.name}': expected our wrapper {seam.wrapper}, found {type(error).__name__}: {error}. "
            "Reinstall megatron-hdp with its train extra: pip install 'megatron-hdp[train]'"
        ) from error
    if not callable(maker):
        raise SeamError(f"seam '{seam.name}': {seam.wrapper} is not a function but {maker!r}")
    return maker  # type: ignore[no-any-return]


def _import_place(seam: Seam, place: str) -> tuple[ModuleType, str, _Function]:
    name, _, attribute = place.partition(":")
    try:
        module = importlib.import_module(name)
        return module, attribute, getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise SeamError(
            f"seam '{seam.name}': expected {place}, found {type(error).__name__}: {error}. Nothing was applied; "
            "megatron-hdp doctor shows which Megatron is imported"
        ) from error


def _live_original(seam: Seam) -> _Function:
    """The imported object of the target, after checking that it is the verified one and that consumers hold it too."""
    _, _, original = _import_place(seam, seam.target)
    located = find_definition(seam.target)
    code = getattr(original, "__code__", None)
    decorated = located is not None and bool(located.node.decorator_list)
    if located is not None and not decorated and (code is None or code.co_filename != str(located.file)):
        found = f"{original!r} from {code.co_filename}" if code is not None else repr(original)
        raise SeamError(
            f"seam '{seam.name}' ({seam.target}): expected the function of {located.place}, found {found}. Another "
            "package replaced it first: call megatron_hdp.install() before that package is imported, or do without it"
        )
    for consumer in seam.consumers:
        _, _, held = _import_place(seam, consumer)
        if held is not original:
            raise SeamError(
                f"seam '{seam.name}': expected {consumer} to hold the same function as {seam.target}, found {held!r}. "
                "Another package replaced one of them: call megatron_hdp.install() before that package is imported"
            )
    return original


def _refuse_bound_by_name(seams: tuple[Seam, ...], originals: list[_Function]) -> None:
    """A module that did `from megatron... import f` before install() would go on calling the unwrapped f: stop."""
    names = {id(original): seam for seam, original in zip(seams, originals)}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] in ("megatron", "megatron_hdp"):
            continue
        for variable, value in list(getattr(module, "__dict__", {}).items()):
            seam = names.get(id(value))
            if seam is not None:
                where = getattr(module, "__file__", None) or "no file"
                raise SeamError(
                    f"seam '{seam.name}': module {module_name} ({where}) already holds {seam.target} by name, as "
                    f"'{variable}', and would go on calling it without HDP. Call megatron_hdp.install() before "
                    f"{module_name} imports it, or start the run with: python -m megatron_hdp SCRIPT"
                )


def _make_wrapper(seam: Seam, maker: _Function, original: _Function) -> _Function:
    wrapper = maker(original)
    if wrapper is original or not callable(wrapper):
        raise SeamError(f"seam '{seam.name}': {seam.wrapper} returned {wrapper!r}, expected a new function")
    if getattr(wrapper, "__wrapped__", None) is not original:
        functools.update_wrapper(wrapper, original)
    setattr(wrapper, MARKER, seam.name)
    return wrapper  # type: ignore[no-any-return]


def _assignments(seam: Seam, original: _Function, ours: _Function) -> list[_Applied]:
    places = [_import_place(seam, place) for place in (seam.target, *seam.consumers)]
    return [_Applied(seam.name, module, attribute, original, ours) for module, attribute, _ in places]


def _apply(planned: list[_Applied]) -> None:
    try:
        for step in planned:
            setattr(step.module, step.attribute, step.ours)
        _assert_in_place(tuple(planned))
    except BaseException:
        for step in reversed(planned):
            setattr(step.module, step.attribute, step.original)
        raise


def _assert_in_place(applied: tuple[_Applied, ...]) -> None:
    for done in applied:
        if not done.holds():
            raise SeamError(
                f"seam '{done.seam}': expected our wrapper in {done.place}, found "
                f"{getattr(done.module, done.attribute, None)!r}. Another package replaced it: import that "
                "package before megatron_hdp.install() is called, or do without it"
            )
