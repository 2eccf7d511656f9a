"""Lengths from every kind of file against what was written into it; summaries against a dull walk."""

import json
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hdp.data.indexed import write_indexed
from megatron_hdp.errors import ConfigError, DataError
from megatron_hdp.length_files import read_lengths
from megatron_hdp.lengths import (
    QUANTILES,
    TAIL_FROM,
    format_size,
    parse_size,
    render_lengths,
    summarize_lengths,
)

LENGTHS = [5, 0, 7, 1, 3000]


def written(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def read(tmp_path, name, text, field=None):
    found = read_lengths(written(tmp_path, name, text), field)
    assert found.dtype == np.int64
    return found.tolist()


def column(values):
    return "".join(f"{v}\n" for v in values)


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        ("a.txt", column(LENGTHS), None),
        ("a.TXT", column(LENGTHS).rstrip("\n"), None),
        ("a.txt", "\ufeff" + column(LENGTHS).replace("\n", "\r\n") + "\n \n", None),
        ("a.csv", column(LENGTHS), None),
        ("a.csv", "anything\n" + column(LENGTHS) + "\n", None),
        ("a.csv", column(["id,length,n", *(f'"x, {v}", {v} ,9' for v in LENGTHS)]), None),
        ("a.csv", column(["id,length,n", *(f'"x\n",9,{v}' for v in LENGTHS)]), "n"),
        ("a.csv", column(["text,length", *("a" * 200_000 + f",{v}" for v in LENGTHS)]), None),
        ("a.jsonl", column(json.dumps({"length": v, "tokens": [1], "n": 2}) for v in LENGTHS), None),
        ("a.jsonl", column(json.dumps({"tokens": [7] * v, "n": 2}) for v in LENGTHS), None),
        ("a.jsonl", column(json.dumps({"length": 9, "n": v}) for v in LENGTHS), "n"),
        ("a.jsonl", column(json.dumps({"length": 9, "ids": [7] * v}) for v in LENGTHS) + "\n\n", "ids"),
    ],
)
def test_reads_what_was_written(tmp_path, name, text, field):
    assert read(tmp_path, name, text, field) == LENGTHS


def test_twice_is_only_wrong_where_the_length_is_looked_for(tmp_path):
    assert read(tmp_path, "a.csv", "id,length,id\n1,70,2\n") == [70]
    assert read(tmp_path, "a.csv", "3rd try,length\n1,70\n") == [70]
    assert read(tmp_path, "a.csv", "2nd\n70\n", "2nd") == [70]
    assert read(tmp_path, "a.jsonl", '{"meta": {"a": 1, "a": 2}, "length": 70}\n') == [70]
    assert read(tmp_path, "a.txt", f"{2**40}\n") == [2**40]


@pytest.mark.parametrize("name", ["corpus.idx", "corpus"])
def test_reads_an_index_by_file_or_prefix(tmp_path, name):
    write_indexed(tmp_path / "corpus", [np.arange(v) for v in LENGTHS], np.int32)
    assert read_lengths(tmp_path / name).tolist() == LENGTHS


def test_an_index_without_its_tokens_says_so(tmp_path):
    write_indexed(tmp_path / "corpus", [np.arange(3)], np.int32)
    (tmp_path / "corpus.bin").unlink()
    with pytest.raises(DataError, match=r"corpus\.bin is missing"):
        read_lengths(tmp_path / "corpus.idx")


@pytest.mark.parametrize(
    ("name", "text", "field", "message"),
    [
        ("a.txt", "1\n2.5\n3\n", None, r"line 2: '2\.5' is no length"),
        ("a.txt", "1\n3.0\n", None, "line 2"),
        ("a.txt", "1\n2\n-3\n", None, "line 3: '?-3'? is no length"),
        ("a.txt", "1\nmany\n", None, "line 2: 'many'"),
        ("a.txt", "1_000\n", None, "line 1: '1_000'"),
        ("a.txt", "1\n\n2\n", None, "line 2: blank line"),
        ("a.txt", f"1\n{2**63}\n", None, "line 2"),
        ("a.txt", "9" * 5000, None, "line 1"),
        ("a.txt", f"{2**40}\n{2**40 + 1}\n", None, "line 2: '1099511627777' is no length.* from 0 to 2.40"),
        ("a.txt", f"7\n{2**62}\n", None, "line 2: '4611686018427387904' is no length"),
        ("a.csv", f"length\n{2**62}\n", None, "line 2: '4611686018427387904' is no length"),
        ("a.csv", "12 000\n7\n", None, "line 1: '12 000' is neither a length nor the name of a column"),
        ("a.csv", "0x10\n7\n", None, "line 1: '0x10' is neither"),
        ("a.csv", "-7e\n7\n", None, "line 1: '-7e' is neither"),
        ("a.csv", "length,id,length\n3,4,5\n", None, "line 1: 2 columns 'length' .columns: length, id, length"),
        ("a.csv", "\nn,length,n\n3,4,5\n", "n", "line 2: 2 columns 'n'"),
        (
            "a.jsonl",
            '{"length": 1}\n{"length": 1, "a": 2, "length": 3}\n',
            None,
            "line 2: field 'length' appears twice",
        ),
        ("a.txt", "1 2\n", None, "line 1"),
        ("a.txt", "", None, "empty file"),
        ("a.txt", "\n \n", None, "no lengths"),
        ("a.csv", "length\n", None, "no lengths"),
        ("a.csv", "12.5\n3\n", None, r"line 1: '12\.5'"),
        ("a.csv", "length\n3\n\n4\n", None, "line 3: blank line"),
        ("a.csv", "length\n3\n-4\n", None, "line 3"),
        ("a.csv", "id,length\na,3\nb\n", None, "line 3: 1 columns, the length is in column 2"),
        ("a.csv", "id,n\na,3\n", None, "which column holds the lengths.*columns: id, n"),
        ("a.csv", "1,2\n3,4\n", None, "which column.*no header, 2 columns"),
        ("a.csv", "id,n\na,3\n", "size", "no column 'size'.*id, n"),
        ("a.jsonl", '{"length": 3}\n{"length": 2.0}\n', None, "line 2, field 'length': '2.0' is no length"),
        ("a.jsonl", '{"length": true}\n', None, "line 1"),
        ("a.jsonl", '{"length": null}\n', None, "line 1"),
        ("a.jsonl", '{"length": -1}\n', None, "line 1"),
        ("a.jsonl", '{"length": 1}\n{"length": \n', None, "line 2: not valid JSON"),
        ("a.jsonl", '{"length": 1}\n7\n', None, "line 2: expected an object"),
        ("a.jsonl", '{"text": "abc"}\n', None, "line 1: neither a field 'length' nor 'tokens' .fields: text"),
        ("a.jsonl", '{"text": "abc"}\n', "text", "line 1, field 'text': 'abc' is no length"),
        ("a.jsonl", '{"length": 1}\n', "n", "line 1: no field 'n'"),
        ("a.dat", "1\n", None, "not from '.dat'"),
        ("a", "1\n", None, "not from 'no ending'"),
    ],
)
def test_refuses_with_the_line(tmp_path, name, text, field, message):
    with pytest.raises(DataError, match=message):
        read(tmp_path, name, text, field)


def test_refuses_missing_binary_and_pointless(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read_lengths(tmp_path / "gone.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(DataError, match=r"folder\.txt: is a folder"):
        read_lengths(tmp_path / "folder.txt")
    (tmp_path / "b.txt").write_bytes(b"1\n\xff\xfe\n")
    with pytest.raises(DataError, match="not UTF-8"):
        read_lengths(tmp_path / "b.txt")
    with pytest.raises(ConfigError, match=r"\.txt files have no fields"):
        read(tmp_path, "a.txt", "1\n", "length")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"a\.parquet: reading \.parquet needs pyarrow: pip install pyarrow"):
        read(tmp_path, "a.parquet", "PAR1")


def parquet(tmp_path, columns, **options):
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path, **options)
    return path


def test_parquet_reads_numbers_and_lists(tmp_path):
    lists = [[1] * v for v in LENGTHS]
    path = parquet(tmp_path, {"id": list("abcde"), "tokens": lists, "n": LENGTHS}, row_group_size=2)
    assert read_lengths(path).tolist() == LENGTHS
    assert read_lengths(path, "n").tolist() == LENGTHS
    assert read_lengths(parquet(tmp_path, {"length": LENGTHS, "tokens": [[1]] * 5})).tolist() == LENGTHS
    assert read_lengths(parquet(tmp_path, {"whatever": LENGTHS})).tolist() == LENGTHS


@pytest.mark.parametrize(
    ("columns", "field", "message"),
    [
        ({"length": [1, 2, -3]}, None, "row 3: length -3"),
        ({"length": [1] * 140_000 + [-3]}, None, "row 140001: length -3"),
        ({"length": [1, 2**40 + 1]}, None, "row 2: length 1099511627777: must be from 0 to 2.40"),
        ({"length": np.full(2**23, 2**40)}, None, r"the lengths add up to 9.2e\+18"),
        ({"length": [1] * 140_000 + [None]}, None, "row 140001: column 'length' has no value"),
        ({"length": [1, None, 3]}, None, "row 2: column 'length' has no value"),
        ({"tokens": [[1], None]}, None, "row 2: column 'tokens' has no value"),
        ({"length": [1.0, 2.0]}, None, "column 'length' holds double"),
        ({"a": [1], "b": [2]}, None, "no column 'length' or 'tokens' .columns: a, b.; name one with --field"),
        ({"a": [1], "b": [2]}, "c", "no column 'c'"),
        ({"length": np.array([], np.int64)}, None, "no lengths"),
    ],
)
def test_parquet_refuses(tmp_path, columns, field, message):
    with pytest.raises(DataError, match=message):
        read_lengths(parquet(tmp_path, columns), field)


def test_damaged_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        read(tmp_path, "a.parquet", "PAR1 and no more")


@pytest.mark.parametrize(("text", "tokens"), [("8192", 8192), ("8K", 8192), (" 2m", 2 << 20), ("3G", 3 << 30)])
def test_sizes(text, tokens):
    assert parse_size(text, "--x") == tokens


@pytest.mark.parametrize("text", ["", "0", "0K", "-1", "1.5M", "8KB", "K", "1e6", "8 K", "٣", "9" * 30])
def test_wrong_sizes_name_the_flag(text):
    with pytest.raises(ConfigError, match=r"--capacity is .*\(K = 1024\)"):
        parse_size(text, "--capacity")


def test_sizes_above_a_limit_name_the_flag_and_the_limit():
    assert parse_size("2G", "--x", 2 << 30) == 2 << 30
    with pytest.raises(ConfigError, match="--x is 2,147,483,649: it can be at most 2,147,483,648"):
        parse_size(str((2 << 30) + 1), "--x", 2 << 30)


@given(st.integers(1, 2**50))
def test_a_formatted_size_reads_back(tokens):
    assert parse_size(format_size(tokens).replace(",", ""), "--x") == tokens


def dull_share(lengths, low, high):
    """(documents, token share, share of squares) of lengths in (low, high], with exact fractions."""
    inside = [v for v in lengths if low < v <= high]
    tokens = Fraction(sum(inside), sum(lengths))
    return len(inside), tokens, Fraction(sum(v * v for v in inside), sum(v * v for v in lengths))


def assert_share(share, lengths):
    documents, tokens, squares = dull_share(lengths, share.low, share.high)
    assert share.documents == documents
    assert share.document_share == pytest.approx(documents / len(lengths))
    assert share.token_share == pytest.approx(float(tokens), abs=1e-12)
    assert share.attention_share == pytest.approx(float(squares), abs=1e-9)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**31), st.sampled_from([64, 65, 8192, 8193, 2**40]))))
def test_summary_equals_a_dull_walk(values):
    present = sorted(v for v in values if v)
    if not present:
        with pytest.raises(DataError, match="not a single token"):
            summarize_lengths(np.array(values, np.int64))
        return
    summary = summarize_lengths(np.array(values, np.int64))
    assert (summary.documents, summary.empty) == (len(present), len(values) - len(present))
    assert (summary.shortest, summary.longest, summary.tokens) == (present[0], present[-1], sum(present))
    assert summary.mean == pytest.approx(sum(present) / len(present))
    assert summary.quantiles == {
        q: next(v for i, v in enumerate(present, 1) if i >= Fraction(str(q)) * len(present)) for q in QUANTILES
    }
    for share in (*summary.buckets, *summary.tail):
        assert_share(share, present)
    assert summary.buckets[0].documents
    assert summary.buckets[-1].documents
    assert sum(share.documents for share in summary.buckets) == len(present)
    assert all(share.high == max(64, 2 * share.low) for share in summary.buckets)
    assert [share.low for share in summary.tail] == [low for low in TAIL_FROM if low < present[-1]]


def test_rendered_table():
    lengths = np.array([0, 100, 100, 200, 40000], np.int64)
    lines = render_lengths(summarize_lengths(lengths), "my data").splitlines()
    assert lines[0] == "my data: 4 documents (and 1 empty ones), 40,400 tokens, mean 10,100.0"
    assert lines[2].split() == "shortest 1 % 10 % 25 % 50 % 75 % 90 % 99 % 99.9 % longest".split()
    assert lines[3].split() == "100 100 100 100 100 200 40,000 40,000 40,000 40,000".split()
    rows = {line.split()[0]: line.split() for line in lines[6:] if line}
    assert rows["128"][1:4] == ["2", "50.00", "0.50"]
    assert rows["64K"][1:] == ["1", "25.00", "99.01", "100.00", "#" * 24, "=" * 24]
    assert rows["32K"][1:5] == ["1", "25.00", "99.01", "100.00"]  # of the tail, which comes last
    assert max(map(len, lines)) <= 120
