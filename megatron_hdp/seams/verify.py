"""Compares the Megatron on the import path with the recorded fingerprints. Reads files, imports nothing of Megatron."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_hdp.errors import SeamError
from megatron_hdp.seams.fingerprint import Book, Fingerprint, fingerprint, load_books, minor_of, release_order
from megatron_hdp.seams.locate import find_definition, find_source, megatron_version
from megatron_hdp.seams.table import Contract, Seam, Table

type State = Literal["verified", "body changed", "signature changed", "missing", "not recorded"]

ACCEPT_DRIFT = "megatron_hdp.install(allow_drift=True)"
REGENERATE = "python -m megatron_hdp.seams.fingerprint --write"


@dataclass(frozen=True)
class SeamStatus:
    """What is known about one seam or contract.

    Attributes:
        name: the seam's name, or the bare name of a contract's class or function.
        kind: whether we wrap the place or only rely on it.
        target: "module:attribute".
        place: "file:line" of the definition found, "" if none.
        state: result of the comparison with the recorded fingerprint.
        expected: what was recorded; "" when verified.
        found: what is there instead; "" when verified.
        applied: whether our wrapper is in place now (always False for a contract).
    """

    name: str
    kind: Literal["seam", "contract"]
    target: str
    place: str
    state: State
    expected: str = ""
    found: str = ""
    applied: bool = False

    def acceptable(self, allow_drift: bool) -> bool:
        """Whether training may start with this place as it is."""
        return self.state == "verified" or (allow_drift and self.state == "body changed")

    def complaint(self) -> str:
        """One line: name, place, what was expected and what was found."""
        where = f" in {self.place}" if self.place else ""
        return f"{self.kind} '{self.name}' ({self.target}){where}: expected {self.expected}, found {self.found}"


def supported_version(books: Mapping[str, Book]) -> str:
    """Version of the Megatron on the import path.

    Raises:
        SeamError: there is none, or its minor version has no fingerprints; names installed, supported and nearest.
    """
    known = sorted(books, key=release_order)
    supported = ", ".join(f"{minor} (seen: {', '.join(books[minor].releases)})" for minor in known)
    version = megatron_version()
    if version is None:
        file = find_source("megatron.core.package_info")
        found = f"{file} does not state a version" if file else "no megatron.core on the import path"
        raise SeamError(
            f"{found}; expected megatron-core {supported}. Install it: pip install 'megatron-core=={_newest(books)}'"
        )
    if minor_of(version) not in books:
        nearest = min(known, key=lambda minor: _distance(minor, version))
        file = find_source("megatron.core.package_info")
        raise SeamError(
            f"megatron-core {version} is installed ({file}), supported is {supported}. "
            f"Nearest supported: pip install 'megatron-core=={books[nearest].releases[-1]}'"
        )
    return version


def _newest(books: Mapping[str, Book]) -> str:
    return max((release for book in books.values() for release in book.releases), key=release_order)


def _distance(minor: str, version: str) -> tuple[int, ...]:
    return tuple(abs(a - b) for a, b in zip(release_order(minor), release_order(version)))


def verify(table: Table) -> tuple[str, list[SeamStatus]]:
    """Megatron's version, and the status of every seam and contract that this version should have.

    Raises:
        SeamError: Megatron is absent or of a minor version without fingerprints.
    """
    books = load_books(table.fingerprints)
    version = supported_version(books)
    book = books[minor_of(version)]
    table = table.for_minor(book.minor)
    return version, [_compare(entry, book, version) for entry in table.places]


def _compare(entry: Seam | Contract, book: Book, version: str) -> SeamStatus:
    kind: Literal["seam", "contract"] = "seam" if isinstance(entry, Seam) else "contract"
    status = SeamStatus(entry.name, kind, entry.target, "", "verified")
    located = find_definition(entry.target)
    expected = book.expected(entry.target, version)
    module, _, attribute = entry.target.partition(":")
    if located is None:
        file = find_source(module)
        found = f"no '{attribute}' in {file}" if file else f"no module {module} on the import path"
        shape = expected[0].signature if expected else "a definition"
        return replace(status, state="missing", place=f"{file or ''}", expected=f"'{attribute}' = {shape}", found=found)
    status = replace(status, place=located.place)
    now = fingerprint(entry.target, located)
    if not expected:
        return replace(status, state="not recorded", expected="a recorded fingerprint", found=f"none; run {REGENERATE}")
    if now in expected:
        return status
    return _difference(status, expected, now)


def _difference(status: SeamStatus, expected: Sequence[Fingerprint], now: Fingerprint) -> SeamStatus:
    nearest = next((known for known in expected if known.signature == now.signature), None)
    if nearest is None:
        return replace(status, state="signature changed", expected=expected[0].signature, found=now.signature)
    return replace(
        status, state="body changed", expected=f"source {nearest.sha256[:12]}", found=f"source {now.sha256[:12]}"
    )


def refuse(version: str, statuses: Sequence[SeamStatus], allow_drift: bool) -> None:
    """Stop unless every place is acceptable.

    Raises:
        SeamError: lists every place that is not, with what was expected, what was found and what to do.
    """
    wrong = [status for status in statuses if not status.acceptable(allow_drift)]
    if not wrong:
        return
    lines = [f"megatron-core {version} is not as recorded in {len(wrong)} of {len(statuses)} places:"]
    lines += [f"  {status.complaint()}" for status in wrong]
    advice = "Install a release that was seen (megatron-hdp doctor lists them)"
    if all(status.acceptable(allow_drift=True) for status in wrong):
        advice += f", or, if you know the change is harmless, call {ACCEPT_DRIFT}"
    elif any(status.state == "body changed" for status in wrong):
        advice += f"; {ACCEPT_DRIFT} accepts changed bodies, never missing places or changed signatures"
    raise SeamError("\n".join([*lines, f"Nothing was applied. {advice}."]))
