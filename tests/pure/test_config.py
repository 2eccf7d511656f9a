"""Options: precedence, strictness, and the frozen set of flags."""

import argparse

import pytest

from megatron_hdp.config import HdpConfig, flag, option_names, resolve
from megatron_hdp.errors import ConfigError


def test_the_set_of_flags_is_frozen():
    assert [flag(name) for name in option_names()] == [
        "--hdp-tokens-per-rank",
        "--hdp-batch-tokens",
        "--hdp-balance",
        "--hdp-algorithm",
        "--hdp-profile",
        "--hdp-kernel",
        "--hdp-lookahead",
        "--hdp-log",
    ]


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path):
    path = tmp_path / "hdp.yaml"
    path.write_text("tokens_per_rank: 4096\nbalance: dp\nlookahead: 3\n")
    config = resolve({"tokens_per_rank": 8192}, path)
    assert config == HdpConfig(tokens_per_rank=8192, balance="dp", lookahead=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens_per_rank: 8\ntokens_per_step: 4\n", "unknown option 'tokens_per_step'; known: tokens_per_rank"),
        ("tokens_per_rank: '8K'\n", "option 'tokens_per_rank' is '8K'"),
        ("tokens_per_rank: 8.5\n", "option 'tokens_per_rank' is 8.5"),
        ("tokens_per_rank: 8\nbalance: best\n", "Input should be 'auto', 'dp' or 'pp'"),
        ("tokens_per_rank: 0\n", "--hdp-tokens-per-rank is 0: it must be a positive number"),
        ("tokens_per_rank: -8\n", "--hdp-tokens-per-rank is -8"),
        ("balance: dp\n", "--hdp needs --hdp-tokens-per-rank"),
        ("tokens_per_rank: 8\nlookahead: -1\n", "--hdp-lookahead is -1"),
        ("tokens_per_rank: 8\nbatch_tokens: 0\n", "--hdp-batch-tokens is 0"),
        ("- tokens_per_rank\n", "expected `option: value` lines, found list"),
        ("tokens_per_rank: [\n", "not valid YAML"),
        ("", "--hdp needs --hdp-tokens-per-rank"),
    ],
)
def test_bad_yaml_is_explained(tmp_path, text, message):
    path = tmp_path / "hdp.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        resolve({}, path)
    assert message in str(caught.value)


def test_missing_yaml_is_explained(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve({}, tmp_path / "none.yaml")


def test_every_option_has_help():
    from megatron_hdp.seams.flag_group import add_group

    text = add_group(argparse.ArgumentParser()).format_help()
    for name in option_names():
        assert flag(name) in text
    assert "Capacity: tokens that one rank holds in" in " ".join(text.split())


def test_the_launcher_shows_every_option(capsys):
    from megatron_hdp.__main__ import main

    main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for name in ["--hdp ", "--hdp-config FILE", *(flag(name) for name in option_names())]:
        assert name in text
    assert "Capacity: tokens that one rank holds in" in text


def test_help_texts_that_argparse_cannot_print_are_taken_as_they_stand():
    from megatron_hdp.seams.flag_group import mend_help

    parser = argparse.ArgumentParser(prog="train")
    parser.add_argument("--margin", default=1.1, help="1.1 = 10%, default %(default)s")
    parser.add_argument("--rate", type=int, default=3, help="%(default)s of 100%% in %(prog)s, a %(type)s")
    parser.add_argument("--hidden", help=argparse.SUPPRESS)
    with pytest.raises(ValueError, match="unsupported format"):
        parser.format_help()
    mend_help(parser)
    text = parser.format_help()
    assert "1.1 = 10%, default %(default)s" in text
    assert "3 of 100% in train, a int" in text
