"""Fingerprints of the places in Megatron that we wrap or rely on: a signature text and a hash of the parsed source.

One file per Megatron minor version, `fingerprints/core-<minor>.toml`, lists every release seen. To add the installed
release after reading what changed:

    python -m megatron_hdp.seams.fingerprint --write            # the Megatron on the import path
    python -m megatron_hdp.seams.fingerprint --write --root DIR # an unpacked wheel or a clone
    python -m megatron_hdp.seams.fingerprint                    # only compare; exit code 1 if something differs
"""

import argparse
import ast
import hashlib
import json
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from megatron_hdp.errors import SeamError
from megatron_hdp.seams.locate import Definition, Located, find_definition, megatron_version
from megatron_hdp.seams.table import Table, default_table

_IGNORED_FIELDS = {"ctx", "kind", "type_comment", "type_ignores"}
_SPECIAL_METHODS = {"__init__", "__new__", "__call__", "__iter__", "__next__"}


@dataclass(frozen=True)
class Fingerprint:
    """What one place looks like.

    Attributes:
        target: "module:attribute".
        signature: names, kinds and defaults of the parameters, without annotations; for a class its fields and methods.
        sha256: hash of the parsed source, blind to comments, docstrings and formatting.
    """

    target: str
    signature: str
    sha256: str


@dataclass(frozen=True)
class Entry:
    """A fingerprint, the releases it holds for, and the defining file (relative to the import path)."""

    fingerprint: Fingerprint
    releases: tuple[str, ...]
    defined: str


@dataclass(frozen=True)
class Book:
    """All that is known about one Megatron minor version."""

    minor: str
    releases: tuple[str, ...]
    entries: tuple[Entry, ...]

    def expected(self, target: str, version: str) -> list[Fingerprint]:
        """Fingerprints acceptable for `target` in `version`, the nearest release first; empty if never recorded.

        A listed release must match its own entry. A patch release that was never seen may match any listed one.
        """
        entries = [entry for entry in self.entries if entry.fingerprint.target == target]
        if version in self.releases:
            return [entry.fingerprint for entry in entries if version in entry.releases]
        entries.sort(key=lambda entry: max(map(release_order, entry.releases)), reverse=True)
        return [entry.fingerprint for entry in entries]


def minor_of(version: str) -> str:
    """ "0.19.2" -> "0.19"."""
    return ".".join(version.split(".")[:2])


def release_order(version: str) -> tuple[int, ...]:
    """Sort key of a release; a pre-release sorts with its release."""
    return tuple(int("".join(ch for ch in part if ch.isdigit()) or 0) for part in version.split(".")[:3])


@lru_cache(maxsize=256)
def fingerprint(target: str, located: Located) -> Fingerprint:
    """Fingerprint of a located definition; kept, as a run looks twice."""
    text = canonical(located.node)
    return Fingerprint(target, signature(located.node), hashlib.sha256(text.encode()).hexdigest())


def canonical(node: ast.AST) -> str:
    """The tree as text, the same on every Python that parses it (`ast.dump` is not: 3.13 dropped empty fields).

    Left out: positions, comments, formatting, docstrings, and empty fields.
    """
    fields = []
    for name, value in ast.iter_fields(node):
        if name in _IGNORED_FIELDS or value is None or value == []:
            continue
        if name == "body" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            value = _without_docstring(value)
        fields.append(f"{name}={_canonical_value(value)}")
    return f"{type(node).__name__}({', '.join(fields)})"


def _canonical_value(value: object) -> str:
    if isinstance(value, ast.AST):
        return canonical(value)
    if isinstance(value, list):
        return "[" + ", ".join(_canonical_value(item) for item in value) + "]"
    return repr(value)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    """The body without any bare string statement (the docstring, and the field docstrings of dataclasses)."""
    return [
        stmt
        for stmt in body
        if not (
            isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant) and isinstance(stmt.value.value, str)
        )
    ]


def signature(node: Definition) -> str:
    """Parameters of a function; bases, fields with defaults and public methods of a class. Annotations do not count."""
    if not isinstance(node, ast.ClassDef):
        return f"({_parameters(node.args)})"
    parts = [f"class ({', '.join(map(ast.unparse, node.bases))})"]
    for stmt in node.body:
        match stmt:
            case ast.AnnAssign(target=ast.Name(id=name)):
                parts.append(name + (f"={ast.unparse(stmt.value)}" if stmt.value else ""))
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name in _SPECIAL_METHODS or not name.startswith("_"):
                    parts.append(f"{name}({_parameters(stmt.args)})")
    return "; ".join(parts)


def _parameters(arguments: ast.arguments) -> str:
    """The parameter list without annotations, e.g. "a, /, b=1, *, c"."""

    def bare(argument: ast.arg | None) -> ast.arg | None:
        return ast.arg(argument.arg) if argument else None

    def bare_all(some: list[ast.arg]) -> list[ast.arg]:
        return [ast.arg(argument.arg) for argument in some]

    stripped = ast.arguments(
        posonlyargs=bare_all(arguments.posonlyargs),
        args=bare_all(arguments.args),
        vararg=bare(arguments.vararg),
        kwonlyargs=bare_all(arguments.kwonlyargs),
        kw_defaults=arguments.kw_defaults,
        kwarg=bare(arguments.kwarg),
        defaults=arguments.defaults,
    )
    return ast.unparse(stripped)


def load_books(folder: Path) -> dict[str, Book]:
    """Minor version -> what is recorded about it.

    Raises:
        SeamError: the folder holds no fingerprint file, so this package is not completely installed.
    """
    books = [_read(file) for file in sorted(folder.glob("core-*.toml"))]
    if not books:
        raise SeamError(f"no core-*.toml in {folder}: reinstall megatron-hdp, its fingerprint files are missing")
    return {book.minor: book for book in books}


def _read(file: Path) -> Book:
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    entries = tuple(
        Entry(Fingerprint(row["target"], row["signature"], row["sha256"]), tuple(row["releases"]), row["defined"])
        for row in data["place"]
    )
    return Book(data["minor"], tuple(data["releases"]), entries)


def record(table: Table, version: str, book: Book | None) -> Book:
    """`book` with `version` added, or recorded anew; places that left the table are dropped.

    Raises:
        SeamError: a place of the table does not exist in the Megatron on the import path.
    """
    table = table.for_minor(minor_of(version))
    old = book or Book(minor_of(version), (), ())
    entries: list[Entry] = []
    for target in targets(table):
        located = find_definition(target)
        if located is None:
            raise SeamError(f"{target} does not exist in megatron-core {version}: change the table first")
        kept = [
            replace(entry, releases=tuple(release for release in entry.releases if release != version))
            for entry in old.entries
            if entry.fingerprint.target == target
        ]
        found = fingerprint(target, located)
        same = [entry for entry in kept if entry.fingerprint == found]
        new = same[0] if same else Entry(found, (), _relative(located.file))
        kept = [entry for entry in kept if entry is not new and entry.releases]
        entries += [*kept, replace(new, releases=_sorted([*new.releases, version]))]
    return Book(old.minor, _sorted([*(r for r in old.releases if r != version), version]), tuple(entries))


def targets(table: Table) -> list[str]:
    """Every fingerprinted place of the table, seams first."""
    return [entry.target for entry in table.places]


def _sorted(releases: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(releases, key=release_order))


def _relative(file: Path) -> str:
    parts = file.parts
    return "/".join(parts[len(parts) - 1 - parts[::-1].index("megatron") :]) if "megatron" in parts else file.name


def render(book: Book) -> str:
    """The TOML text of a book. JSON strings and lists are valid TOML."""
    lines = [
        "# Generated: python -m megatron_hdp.seams.fingerprint --write. Do not edit by hand.",
        "",
        f"minor = {json.dumps(book.minor)}",
        f"releases = {json.dumps(book.releases)}",
    ]
    for entry in book.entries:
        lines += [
            "",
            "[[place]]",
            f"target = {json.dumps(entry.fingerprint.target)}",
            f"defined = {json.dumps(entry.defined)}",
            f"releases = {json.dumps(entry.releases)}",
            f"signature = {json.dumps(entry.fingerprint.signature)}",
            f"sha256 = {json.dumps(entry.fingerprint.sha256)}",
        ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Compare, or with --write record, the Megatron on the import path. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megatron_hdp.seams.fingerprint", description=main.__doc__)
    parser.add_argument("--write", action="store_true", help="record this release in its fingerprint file")
    parser.add_argument("--root", type=Path, help="folder that contains megatron/, instead of the import path")
    parser.add_argument("--folder", type=Path, help="folder of the fingerprint files, instead of the package's own")
    options = parser.parse_args(argv)
    table = default_table()
    if options.folder:
        table = replace(table, fingerprints=options.folder)
    if options.root:
        sys.path.insert(0, str(options.root.resolve()))
    version = megatron_version()
    if version is None:
        print("no megatron.core on the import path", file=sys.stderr)
        return 1
    file = table.fingerprints / f"core-{minor_of(version)}.toml"
    old = _read(file) if file.exists() else None
    new = record(table, version, old)
    if options.write:
        file.write_text(render(new), encoding="utf-8")
        print(f"megatron-core {version}: {len(targets(table))} places recorded in {file}")
        return 0
    seen = set() if old is None else {found for target in targets(table) for found in old.expected(target, version)}
    now = {entry.fingerprint for entry in new.entries if version in entry.releases}
    differing = sorted(found.target for found in now - seen)
    print(f"megatron-core {version}: " + ("as recorded" if not differing else "differs from what is recorded in:"))
    for target in differing:
        print(f"  {target}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
