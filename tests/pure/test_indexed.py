import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.data.indexed import DTYPES, MAGIC, IndexedFile, write_indexed
from megatron_hdp.errors import DataError


@pytest.fixture
def prefix(tmp_path):
    return str(tmp_path / "corpus")


def write_raw(
    prefix, lengths, bounds, *, itemsize=2, pointers=None, code=8, version=1, magic=MAGIC, extra=b"", data=None
):
    """An .idx written field by field, so that each field can be wrong."""
    pointers = np.cumsum([0, *lengths])[:-1] * itemsize if pointers is None else pointers
    with open(prefix + ".idx", "wb") as file:
        file.write(magic + struct.pack("<QBQQ", version, code, len(lengths), len(bounds)))
        for values, kind in ((lengths, "<i4"), (pointers, "<i8"), (bounds, "<i8")):
            file.write(np.asarray(values, kind).tobytes())
        file.write(extra)
    with open(prefix + ".bin", "wb") as file:
        file.write(np.arange(max(sum(lengths), 1), dtype=f"<u{itemsize}").tobytes() if data is None else data)


@pytest.mark.parametrize("dtype", [name for name in DTYPES.values() if not name.startswith("float")])
def test_round_trip(prefix, dtype):
    top = min(np.iinfo(dtype).max, 2**40)
    documents = [np.array([0, 1, top]), np.array([], int), np.array([5]), np.arange(100)]
    write_indexed(prefix, documents, dtype)
    file = IndexedFile.open(prefix)
    assert file.dtype == np.dtype(dtype)
    assert file.lengths.tolist() == [3, 0, 1, 100]
    for number, document in enumerate(documents):
        read = file.read(number, 0, document.size)
        assert read.dtype == np.int64
        assert read.tolist() == document.tolist()


def test_reads_a_range_and_counts_its_bytes(prefix):
    write_indexed(prefix, [np.arange(10), np.arange(100, 200)], np.int32)
    file = IndexedFile.open(prefix)
    assert file.read_bytes == 0
    assert file.read(1, 20, 25).tolist() == [120, 121, 122, 123, 124]
    assert file.read_bytes == 5 * 4
    assert file.read(0, 10, 10).size == 0
    assert file.read_bytes == 5 * 4


@pytest.mark.parametrize("ask", [(0, 0, 4), (0, -1, 2), (0, 2, 1), (1, 0, 1), (-1, 0, 1)])
def test_range_outside_of_a_document(prefix, ask):
    write_indexed(prefix, [np.arange(3)], np.int32)
    with pytest.raises(DataError, match=f"tokens {ask[1]} to {ask[2]} of document {ask[0]} were asked for"):
        IndexedFile.open(prefix).read(*ask)


def test_unaligned_offsets(prefix):
    data = b"x" + np.array([7, 8, 9], "<i4").tobytes()
    write_raw(prefix, [3], [0, 1], pointers=[1], code=4, data=data)
    assert IndexedFile.open(prefix).read(0, 0, 3).tolist() == [7, 8, 9]


def test_documents_of_several_entries_are_joined(prefix):
    write_raw(prefix, [2, 3, 4, 1], [0, 2, 2, 4])
    file = IndexedFile.open(prefix)
    assert file.lengths.tolist() == [5, 0, 5]
    assert file.read(0, 0, 5).tolist() == [0, 1, 2, 3, 4]
    assert file.read(2, 1, 5).tolist() == [6, 7, 8, 9]


def test_same_number_of_documents_and_entries_but_not_one_each(prefix):
    write_raw(prefix, [2, 3], [0, 0, 2])
    file = IndexedFile.open(prefix)
    assert file.lengths.tolist() == [0, 5]
    assert file.read(1, 0, 5).tolist() == [0, 1, 2, 3, 4]


def test_last_document_without_entries(prefix):
    write_raw(prefix, [2, 3], [0, 2, 2])
    assert IndexedFile.open(prefix).lengths.tolist() == [5, 0]


def test_entries_of_different_documents_may_lie_anywhere(prefix):
    write_raw(prefix, [2, 3], [0, 1, 2], pointers=[6, 0])
    file = IndexedFile.open(prefix)
    assert file.read(0, 0, 2).tolist() == [3, 4]
    assert file.read(1, 0, 3).tolist() == [0, 1, 2]


def test_modes_at_the_end_are_ignored(prefix):
    write_raw(prefix, [2, 3], [0, 1, 2], extra=b"\x00\x01")
    assert IndexedFile.open(prefix).lengths.tolist() == [2, 3]


def test_bin_cut_short_after_opening(prefix):
    """A memory map would end the process by a signal here."""
    write_indexed(prefix, [np.arange(10), np.arange(100, 200)], np.int32)
    file = IndexedFile.open(prefix)
    os.truncate(prefix + ".bin", 10 * 4 + 50 * 4)
    assert file.read(1, 0, 50).tolist() == list(range(100, 150))
    with pytest.raises(DataError, match=r"corpus\.bin: cut short during the run: bytes 40 to 440 .* has 240 now"):
        file.read(1, 0, 100)
    Path(prefix + ".bin").write_bytes(b"")
    with pytest.raises(DataError, match="has 0 now"):
        file.read(0, 0, 1)


def test_a_new_file_under_the_same_name_is_read_anew(prefix):
    write_indexed(prefix, [np.arange(10)], np.int32)
    old = IndexedFile.open(prefix)
    assert old.read(0, 0, 3).tolist() == [0, 1, 2]
    write_indexed(prefix, [np.arange(50, 60)], np.int32)
    assert IndexedFile.open(prefix).read(0, 0, 3).tolist() == [50, 51, 52]
    assert old.read(0, 3, 6).tolist() == [3, 4, 5]


def test_many_files_do_not_stay_open(tmp_path):
    for n in range(300):
        write_indexed(tmp_path / str(n), [[n]], np.int32)
    files = [IndexedFile.open(tmp_path / str(n)) for n in range(300)]
    assert [int(file.read(0, 0, 1)[0]) for file in files * 2] == [*range(300)] * 2
    held = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert 0 < len([path for path in held if path.startswith(str(tmp_path)) and path.endswith(".bin")]) <= 256


def test_removed_bin(prefix):
    write_indexed(prefix, [np.arange(10)], np.int32)
    file = IndexedFile.open(prefix)
    Path(prefix + ".bin").unlink()
    with pytest.raises(DataError, match=r"corpus\.bin: cannot be read any more \(No such file"):
        file.read(0, 0, 1)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_missing_and_empty_files(prefix, suffix):
    write_raw(prefix, [2, 3], [0, 1, 2])
    Path(prefix + suffix).write_bytes(b"")
    with pytest.raises(DataError, match=rf"corpus{suffix}: empty file \(0 bytes\): make the files again"):
        IndexedFile.open(prefix)
    Path(prefix + suffix).unlink()
    with pytest.raises(DataError, match=rf"corpus{suffix}: cannot be read \(No such file.*without the ending"):
        IndexedFile.open(prefix)


def test_a_folder_is_no_file(tmp_path):
    (tmp_path / "corpus.idx").mkdir()
    with pytest.raises(DataError, match=r"corpus\.idx: cannot be read"):
        IndexedFile.open(tmp_path / "corpus")


DAMAGED = [
    ({"lengths": [2, 3], "bounds": [0, 1, 2], "magic": b"PK\x03\x04\x00\x00\x00\x00\x00"}, "not a Megatron index"),
    ({"lengths": [2, 3], "bounds": [0, 1, 2], "version": 2}, "index version 2, this reader knows version 1"),
    ({"lengths": [2, 3], "bounds": [0, 1, 2], "code": 9}, "unknown token type code 9"),
    ({"lengths": [2, 3], "bounds": [0, 1, 2], "code": 7}, "holds float32 numbers, not token ids"),
    ({"lengths": [], "bounds": [0]}, r"no documents \(0 entries, 0 documents\)"),
    ({"lengths": [2], "bounds": [0]}, r"no documents \(1 entries, 0 documents\)"),
    ({"lengths": [2, 3], "bounds": [0, 1, 3]}, "document bounds go from 0 to 3; they must rise from 0 .* entries, 2"),
    ({"lengths": [2, 3], "bounds": [1, 1, 2]}, "document bounds go from 1 to 2"),
    ({"lengths": [2, 3], "bounds": [0, 2, 1, 2]}, "document bounds go from 0 to 2"),
    ({"lengths": [2, -3], "bounds": [0, 1, 2], "data": b"1234"}, "entry 1 has -3 tokens at byte 4"),
    ({"lengths": [2, 3], "bounds": [0, 1, 2], "pointers": [-2, 0]}, "entry 0 has 2 tokens at byte -2"),
    (
        {"lengths": [2, 3], "bounds": [0, 2], "pointers": [0, 6], "data": bytes(12)},
        "entries 0 and 1 belong to one document but do not lie",
    ),
    (
        {"lengths": [2, 3], "bounds": [0, 1, 2], "data": b"123456789"},
        r"corpus\.bin: shorter than its index says: 10 bytes are needed, the file has 9",
    ),
]


@pytest.mark.parametrize(("fields", "message"), DAMAGED, ids=[message[:30] for _, message in DAMAGED])
def test_damaged_files(prefix, fields, message):
    write_raw(prefix, **fields)
    with pytest.raises(DataError, match=message) as caught:
        IndexedFile.open(prefix)
    assert prefix in str(caught.value)


def test_every_truncation_of_an_index_is_found(prefix):
    write_raw(prefix, [2, 3, 1], [0, 1, 2, 3])
    whole = Path(prefix + ".idx").read_bytes()
    assert len(whole) == 34 + 12 * 3 + 8 * 4
    for size in range(1, len(whole)):
        Path(prefix + ".idx").write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"corpus\.idx: truncated") as caught:
            IndexedFile.open(prefix)
        assert f"{size}" in str(caught.value)
        assert ("102 bytes" if size >= 34 else "34 bytes") in str(caught.value)


@pytest.mark.parametrize(
    ("documents", "dtype", "message"),
    [
        ([], np.uint16, "no documents to write"),
        ([[1, 2]], np.float32, "tokens cannot be written as float32"),
        ([[1], [65536]], np.uint16, r"tokens 65536 to 65536 do not fit into uint16 \(0 to 65535\)"),
        ([[1], [-1]], np.uint16, "do not fit into uint16"),
        ([[1], [[2]]], np.uint16, "must be a 1-D array of integers"),
        ([[1], [0.5]], np.uint16, "must be a 1-D array of integers"),
    ],
)
def test_writing_what_cannot_be_written_leaves_nothing(tmp_path, documents, dtype, message):
    with pytest.raises(DataError, match=message):
        write_indexed(tmp_path / "corpus", documents, dtype)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_middle_leaves_the_old_files(tmp_path):
    write_indexed(tmp_path / "corpus", [[1, 2, 3]], np.uint16)

    def documents():
        yield [4, 5]
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_indexed(tmp_path / "corpus", documents(), np.uint16)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]
    assert IndexedFile.open(tmp_path / "corpus").read(0, 0, 3).tolist() == [1, 2, 3]


def test_needs_neither_torch_nor_megatron():
    code = (
        "import sys; import megatron_hdp.data.batches, megatron_hdp.data.stdlib_corpus; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'megatron')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
