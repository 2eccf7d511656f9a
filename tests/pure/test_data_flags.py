"""--split and --data-path as Megatron reads them."""

import pytest

from megatron_hdp.data.flags import check_blend, split_shares
from megatron_hdp.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        (None, [0.969, 0.03, 0.001]),
        ("1", [1, 0, 0]),
        ("98,2,0", [0.98, 0.02, 0]),
        ("1/1/2", [0.25, 0.25, 0.5]),
        (" .5, .25,.25", [0.5, 0.25, 0.25]),
        ("0,1", [0, 1, 0]),
    ],
)
def test_shares(text, shares):
    assert split_shares(text) == pytest.approx(shares)


@pytest.mark.parametrize("text", ["1,x", "1,,1", "x", "1,1,1,1", "-1,2,0", "0,0,0", "nan,1,1", "inf,1,1", ","])
def test_no_shares(text):
    with pytest.raises(ConfigError, match="give up to three shares"):
        split_shares(text)


@pytest.mark.parametrize("words", [[], ["a"], ["a", "b"], ["a", "b", "c"], ["1", "a"], ["1", "a", "0", "2"]])
def test_blends(words):
    check_blend(words, "--data-path")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["0.3", "a", "x", "b"], "'0.3' .word 1. looks like a weight"),
        (["a", "b", "0.7", "c"], "'0.7' .word 3. looks like a weight"),
        (["1", "a", "2"], "'1' .word 1. looks like a weight"),
        (["a", "2"], "'2' .word 2. looks like a weight"),
        (["0", "a", "0", "b"], "all 2 weights are 0"),
        (["-1", "a", "2", "b"], "weight -1.0"),
    ],
)
def test_no_blends(words, message):
    with pytest.raises(ConfigError, match=f"^--train-data-path.*{message}|^--data-path: .*{message}"):
        check_blend(words, "--train-data-path")


def test_a_file_may_have_a_number_for_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2024.idx").touch()
    check_blend(["a", "2024"], "--data-path")
