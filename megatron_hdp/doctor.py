"""What a bug report needs first: versions, the Megatron that would be imported, seams, kernels, planner.

torch, Megatron and the seams are imported inside the functions: a missing or broken one is a finding, not a crash.
"""

import importlib
import importlib.metadata
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_hdp.errors import SeamError

if TYPE_CHECKING:
    from megatron_hdp.seams.table import Table

_OPTIONAL_PACKAGES = ("megatron-core", "transformer-engine", "flash-attn", "flash-attn-3", "flash-attn-4", "apex")


@dataclass(frozen=True)
class Section:
    """One part of the diagnosis.

    Attributes:
        title: its heading.
        rows: (name, finding) pairs.
        problems: why training could not start; empty when nothing here stands in the way.
    """

    title: str
    rows: tuple[tuple[str, str], ...]
    problems: tuple[str, ...] = ()


def diagnose(table: "Table | None" = None, try_install: bool = True) -> list[Section]:
    """All sections, each made even if another one failed.

    Args:
        table: another table of seams than the package's own (for tests).
        try_install: import Megatron and put every wrapper in place for a moment.
    """
    parts: list[tuple[str, Callable[[], Section]]] = [
        ("versions", versions),
        ("megatron", lambda: megatron_files(table)),
        ("seams", lambda: seams(table, try_install)),
        ("attention kernels", kernels),
        ("planner", planner),
    ]
    return [_guarded(title, part) for title, part in parts]


def _guarded(title: str, part: Callable[[], Section]) -> Section:
    """A part that raises (a half-installed package can raise anything on import) is itself the finding."""
    try:
        return part()
    except Exception as error:
        return Section(title, (), (f"{type(error).__name__}: {error}",))


def exit_code(sections: list[Section]) -> int:
    """0 when training could start, else 1."""
    return 1 if any(section.problems for section in sections) else 0


def render(sections: list[Section]) -> str:
    """The report as text; problems are repeated at its end."""
    lines: list[str] = []
    for section in sections:
        lines.append(section.title)
        width = max((len(name) for name, _ in section.rows), default=0)
        lines += [f"  {name:<{width}}  {finding}".rstrip() for name, finding in section.rows]
    problems = [f"  {section.title}: {problem}" for section in sections for problem in section.problems]
    verdict = "training could start" if not problems else "training could not start:"
    return "\n".join([*lines, verdict, *problems])


def versions() -> Section:
    """Python, numpy, torch with its backends, and the packages that Megatron and we use where present."""
    rows = [("python", f"{platform.python_version()} ({sys.executable})"), ("platform", platform.platform())]
    rows += [(name, _installed(name)) for name in ("megatron-hdp", "numpy")]
    torch_rows, problems = _torch()
    rows += torch_rows
    rows += [(name, _installed(name)) for name in _OPTIONAL_PACKAGES]
    return Section("versions", tuple(rows), tuple(problems))


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _torch() -> tuple[list[tuple[str, str]], list[str]]:
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        return [("torch", f"absent ({error})")], ["torch cannot be imported: pip install 'megatron-hdp[train]'"]
    distributed = torch.distributed
    gloo = distributed.is_available() and distributed.is_gloo_available()
    nccl = distributed.is_available() and distributed.is_nccl_available()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = sorted({torch.cuda.get_device_name(index) for index in range(gpus)})
    rows = [
        ("torch", str(torch.__version__)),
        ("cuda", f"{torch.version.cuda or 'absent'}"),
        ("gpus", f"{gpus} ({', '.join(names)})" if gpus else "none: only runs with --cpu can start on this machine"),
        ("nccl", ".".join(map(str, torch.cuda.nccl.version())) if nccl and torch.version.cuda else "absent"),
        ("gloo", "available" if gloo else "absent"),
    ]
    needed = "NCCL" if gpus else "gloo"
    if not (nccl if gpus else gloo):
        return rows, [f"this torch has no {needed}, which ranks on {'GPUs' if gpus else 'CPUs'} need"]
    return rows, []


def megatron_files(table: "Table | None" = None) -> Section:
    """Every file of Megatron behind a seam or contract, where an import would find it, and copies that are shadowed."""
    from megatron_hdp.seams.locate import find_definition, find_source, megatron_version
    from megatron_hdp.seams.table import default_table

    table = table or default_table()
    modules = {place.target.partition(":")[0] for place in table.places} | {
        "megatron.core",
        "megatron.core.package_info",
    }
    files = {module: find_source(module) for module in sorted(modules)}
    for place in table.places:  # a re-exported function is defined in a further file
        located = find_definition(place.target)
        if located is not None and located.file not in files.values():
            files[f"{place.target.partition(':')[2]} is defined in"] = located.file
    rows = [("version", megatron_version() or "absent")]
    rows += [(module, str(file or "missing")) for module, file in files.items()]
    roots = {root for file in files.values() if file is not None and (root := _root(file)) is not None}
    rows += [("shadowed copy", str(copy)) for copy in _copies() if copy not in roots]
    problems = []
    if len(roots) > 1:
        problems.append(
            f"Megatron would be imported from {len(roots)} places at once ({', '.join(sorted(map(str, roots)))}): keep "
            "one on PYTHONPATH, or uninstall the wheel"
        )
    return Section("megatron", tuple(rows), tuple(problems))


def _root(file: Path) -> Path | None:
    """The `megatron` folder that a file belongs to."""
    return next((parent for parent in reversed(file.parents) if parent.name == "megatron"), None)


def _copies() -> list[Path]:
    """Every `megatron` folder with a `core` on the import path, whether or not an import would reach it."""
    folders = [Path(entry or ".").resolve() / "megatron" for entry in sys.path]
    return [folder for folder in dict.fromkeys(folders) if (folder / "core" / "__init__.py").is_file()]


def seams(table: "Table | None" = None, try_install: bool = True) -> Section:
    """Every seam and contract against the fingerprints, and whether all wrappers can be put in place."""
    from megatron_hdp.seams.install import install, uninstall
    from megatron_hdp.seams.table import default_table
    from megatron_hdp.seams.verify import verify

    table = table or default_table()
    try:
        _, statuses = verify(table)
    except SeamError as error:
        return Section("seams", (), (str(error),))
    rows = [(f"{status.kind} {status.name}", f"{status.state}  {status.place}") for status in statuses]
    problems = [status.complaint() for status in statuses if not status.acceptable(allow_drift=False)]
    if try_install and not problems:
        try:
            install(table=table)
            uninstall()
            rows.append(("install", "every wrapper was put in place and taken back"))
        except Exception as error:  # importing Megatron can fail in any way
            problems.append(
                f"install() failed: {error}" if isinstance(error, SeamError) else f"importing Megatron: {error!r}"
            )
    return Section("seams", tuple(rows), tuple(problems))


def kernels() -> Section:
    """Attention kernels in order of preference, and why those that cannot run here cannot."""
    found = importlib.import_module("megatron_hdp.attention.kernels").available_kernels()
    rows = tuple((name, "usable" if usable else f"not usable: {reason}") for name, usable, reason in found)
    problems = () if any(usable for _, usable, _ in found) else ("no attention kernel can run on this machine",)
    return Section("attention kernels", rows, problems)


def planner() -> Section:
    """Which planner core runs; plans are the same, only the time to make them differs."""
    from megatron_hdp.planner import core_backend

    note = "" if core_backend() == "c++" else " (the compiled core is absent: plans are the same, made more slowly)"
    return Section("planner", (("core", core_backend() + note),))
