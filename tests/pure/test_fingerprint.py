"""What counts as a change of Megatron's source, and how the record of it is kept. No torch, no Megatron."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_hdp.errors import SeamError
from megatron_hdp.seams.fingerprint import (
    Book,
    Entry,
    Fingerprint,
    canonical,
    load_books,
    main,
    record,
    release_order,
    render,
    signature,
)
from megatron_hdp.seams.locate import find_definition, find_source
from megatron_hdp.seams.table import SEAMS, Contract, Seam, Table, default_table


def parse(source):
    return ast.parse(source).body[0]


SAME = [
    ("def f(a):\n    return a + 1\n", "def f(a):  # comment\n\n    '''Doc.'''\n    return (a  +  1)\n"),
    ("class A:\n    x: int = 1\n", "class A:\n    '''Doc.'''\n    x: int = 1\n    '''Doc of x.'''\n"),
    ("def f():\n    x = 'a'\n", 'def f():\n    """Doc."""\n    x = "a"\n'),
]
DIFFERENT = [
    ("def f(a):\n    return a + 1\n", "def f(a):\n    return a + 2\n"),
    ("def f(a):\n    return a\n", "@cache\ndef f(a):\n    return a\n"),
    ("def f(a):\n    return 1\n", "def f(a):\n    return 1.0\n"),
    ("def f(a):\n    return 1\n", "def f(a: int):\n    return 1\n"),
    ("def f(a):\n    if a:\n        x()\n    y()\n", "def f(a):\n    if a:\n        x()\n        y()\n"),
    ("def f(a):\n    return a < b\n", "def f(a):\n    return b < a\n"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_comments_docstrings_and_formatting_do_not_count(one, other):
    assert canonical(parse(one)) == canonical(parse(other))


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_code_counts(one, other):
    assert canonical(parse(one)) != canonical(parse(other))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(a, /, b: int=1, *c: str, d, e=None, **g) -> int: pass", "(a, /, b=1, *c, d, e=None, **g)"),
        ("def f(): pass", "()"),
        ("async def f(a): pass", "(a)"),
        (
            "class A(B):\n x: int\n y: str = 'a'\n _z = 3\n def __init__(self, q: int): pass\n"
            " def run(self): pass\n def _own(self): pass",
            "class (B); x; y='a'; __init__(self, q); run(self)",
        ),
    ],
)
def test_signature(source, expected):
    assert signature(parse(source)) == expected


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write files of a package `toyhouse` that is on the import path; nothing of it may be imported."""

    def write(**files):
        for name, source in files.items():
            file = tmp_path / "toyhouse" / (name.replace("__", "/") + ".py")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(source)
        return tmp_path / "toyhouse"

    monkeypatch.syspath_prepend(str(tmp_path))
    yield write
    assert not any(name.partition(".")[0] == "toyhouse" for name in sys.modules)


BOOM = "raise RuntimeError('imported')\n"


def test_definitions_are_found_without_importing(package):
    root = package(one=BOOM + "\n\ndef f(a): pass\n")
    located = find_definition("toyhouse.one:f")
    assert located.place == f"{root / 'one.py'}:4"
    assert find_definition("toyhouse.one:g") is None
    assert find_definition("toyhouse.two:f") is None


def test_re_exports_are_followed(package):
    root = package(
        deep__inner=BOOM + "def f(a): pass\n",
        deep__facade=BOOM + "from .inner import f as g\n",
        top=BOOM + "try:\n    from toyhouse.deep.facade import g as h\nexcept ImportError:\n    pass\n",
    )
    (root / "deep" / "__init__.py").write_text(BOOM + "from .facade import g\n")
    for target in ("toyhouse.top:h", "toyhouse.deep:g", "toyhouse.deep.facade:g"):
        assert find_definition(target).file == root / "deep" / "inner.py"


def test_endless_re_exports_are_missing_not_a_hang(package):
    package(a="from toyhouse.b import f\n", b="from toyhouse.a import f\n")
    assert find_definition("toyhouse.a:f") is None


def test_last_definition_wins_as_it_does_at_run_time(package):
    package(one="def f(a): pass\nif x:\n    def f(a, b): pass\n")
    assert signature(find_definition("toyhouse.one:f").node) == "(a, b)"


def test_first_folder_of_the_import_path_wins(package, tmp_path, monkeypatch):
    package(one="def f(): pass\n")
    clone = tmp_path / "clone"
    (clone / "toyhouse").mkdir(parents=True)
    (clone / "toyhouse" / "one.py").write_text("def f(changed): pass\n")
    monkeypatch.syspath_prepend(str(clone))
    assert find_source("toyhouse.one") == clone / "toyhouse" / "one.py"
    assert find_source("toyhouse") is None  # a namespace package has no file


def test_finding_agrees_with_importing(tmp_path):
    """The dull twin: really import some modules of the standard library and compare the files."""
    names = ["json", "json.decoder", "email.mime.text", "concurrent.futures.thread", "xml.etree.ElementTree"]
    code = (
        "import importlib, sys\nfrom megatron_hdp.seams.locate import find_source\n"
        f"names = {names}\n"
        "for name in list(sys.modules):\n    if name.partition('.')[0] in {n.partition('.')[0] for n in names}:\n"
        "        del sys.modules[name]\n"
        "found = [str(find_source(name)) for name in names]\n"
        "assert not any(name in sys.modules for name in names)\n"
        "assert found == [importlib.import_module(name).__file__ for name in names], found\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def table(folder: Path, *targets):
    return Table(tuple(Seam(t.partition(":")[2], t, "x:y", "") for t in targets), (), folder)


def test_record_merges_releases_and_survives_a_round_trip(package, tmp_path):
    places = table(tmp_path, "toyhouse.one:f", "toyhouse.one:g")
    package(one="def f(a): pass\ndef g(): return 1\n")
    book = record(places, "0.19.0", None)
    book = record(places, "0.19.1", book)
    assert [entry.releases for entry in book.entries] == [("0.19.0", "0.19.1")] * 2
    package(one="def f(a): pass\ndef g(): return 22\n")
    book = record(places, "0.19.10", book)
    assert [entry.releases for entry in book.entries] == [
        ("0.19.0", "0.19.1", "0.19.10"),
        ("0.19.0", "0.19.1"),
        ("0.19.10",),
    ]
    (tmp_path / "core-0.19.toml").write_text(render(book))
    assert load_books(tmp_path) == {"0.19": book}
    assert record(places, "0.19.10", book) == book
    assert record(table(tmp_path, "toyhouse.one:f"), "0.19.10", book).entries == book.entries[:1]
    with pytest.raises(SeamError, match=r"toyhouse\.one:gone does not exist"):
        record(table(tmp_path, "toyhouse.one:gone"), "0.19.2", None)


def test_listed_release_must_match_its_own_entry_and_a_new_one_any():
    old, new = Fingerprint("m:f", "(a)", "1" * 64), Fingerprint("m:f", "(a)", "2" * 64)
    book = Book("0.19", ("0.19.1", "0.19.2"), (Entry(old, ("0.19.1",), "m.py"), Entry(new, ("0.19.2",), "m.py")))
    assert book.expected("m:f", "0.19.1") == [old]
    assert book.expected("m:f", "0.19.2") == [new]
    assert book.expected("m:f", "0.19.3") == [new, old]
    assert book.expected("m:g", "0.19.2") == []


def test_releases_sort_by_number():
    assert sorted(["0.19.10", "0.19.2", "0.9.0"], key=release_order) == ["0.9.0", "0.19.2", "0.19.10"]
    assert release_order("0.19.0rc1")[:2] == (0, 19)


def test_folder_without_fingerprints_is_an_error(tmp_path):
    with pytest.raises(SeamError, match="reinstall megatron-hdp"):
        load_books(tmp_path)


def test_every_place_of_the_table_is_recorded_for_every_release():
    places = default_table()
    books = load_books(places.fingerprints)
    for minor, book in books.items():
        for place in places.for_minor(minor).places:
            for release in book.releases:
                assert len(book.expected(place.target, release)) == 1, (place.target, release)


def test_names_and_targets_of_the_table_are_unique():
    places = default_table().places
    assert len({place.name for place in places}) == len(places)
    held = [place.target for place in places] + [consumer for seam in SEAMS for consumer in seam.consumers]
    assert len(set(held)) == len(held)


def test_entries_apply_to_their_versions_only(tmp_path):
    some = Table((Seam("a", "m:a", "x:y", "", since="0.9"),), (Contract("m:b", "", "0.18", "0.19"),), tmp_path)
    assert [place.name for place in some.for_minor("0.18").places] == ["a", "b"]
    assert [place.name for place in some.for_minor("0.19").places] == ["a"]
    assert [place.name for place in some.for_minor("0.8").places] == []


def test_command_needs_a_megatron(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megatron_hdp.seams.fingerprint.megatron_version", lambda: None)
    assert main(["--folder", str(tmp_path)]) == 1
    assert "no megatron.core" in capsys.readouterr().err
