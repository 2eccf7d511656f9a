"""Options: precedence, strictness, and the frozen set of flags."""

import argparse
import re

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
        "--hdp-force-profile",
        "--hdp-kernel",
        "--hdp-exchange",
        "--hdp-loss-chunk",
        "--hdp-offload",
        "--hdp-offload-gib",
        "--hdp-lookahead",
        "--hdp-log",
        "--hdp-timeline",
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
        ("tokens_per_rank: 8\nloss_chunk: -1\n", "--hdp-loss-chunk is -1: it must be a number of tokens, or 0"),
        ("tokens_per_rank: 8\nexchange: best\n", "Input should be 'auto', 'ring', 'gather' or 'heads'"),
        ("tokens_per_rank: 8\nbatch_tokens: 0\n", "--hdp-batch-tokens is 0"),
        ("tokens_per_rank: 8\noffload: true\noffload_gib: 0\n", "--hdp-offload-gib is 0: it must be a positive number"),
        ("tokens_per_rank: 8\noffload: true\noffload_gib: .inf\n", "--hdp-offload-gib is inf"),
        ("tokens_per_rank: 8\noffload: true\noffload_gib: .nan\n", "--hdp-offload-gib is nan"),
        (
            "tokens_per_rank: 8\noffload: true\noffload_gib: 1.0e+300\n",
            "is 1e+300: it must be a positive number",
        ),
        ("tokens_per_rank: 8\noffload: true\noffload_gib: 1048576.5\n", "is 1048576.5: .* at most 1,048,576"),
        (f"tokens_per_rank: 8\noffload: true\noffload_gib: 1{250 * '0'}\n", "--hdp-offload-gib is 10+[.]+0+: it must"),
        (f"tokens_per_rank: 8{5000 * '0'}\n", "not valid YAML"),
        ("tokens_per_rank: 8\noffload_gib: 4\n", "--hdp-offload-gib 4 without --hdp-offload: nothing would use it"),
        ("tokens_per_rank: 8\noffload: 1\n", "option 'offload' is 1"),
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
    assert message in str(caught.value) or re.search(message, str(caught.value))
    assert len(str(caught.value)) < 400


def test_the_most_host_memory():
    assert resolve({"tokens_per_rank": 8, "offload": True, "offload_gib": 1048576.0}).offload_gib == 2**20


@pytest.mark.parametrize("words", [["profile", "--help"], ["profile", "-h"], ["--cpu", "profile", "--help"]])
def test_profile_shows_its_own_help(words, capsys):
    from megatron_hdp.__main__ import main
    from megatron_hdp.profiler.request import USAGE

    main(words)
    assert capsys.readouterr().out.rstrip() == USAGE.rstrip()


def test_doctor_shows_its_own_help(capsys):
    from megatron_hdp.__main__ import main
    from megatron_hdp.doctor_request import USAGE

    main(["doctor", "--help"])
    assert capsys.readouterr().out.rstrip() == USAGE.rstrip()


@pytest.mark.parametrize(
    ("address", "error", "told"),
    [
        (
            {},
            "using env:// rendezvous: MASTER_ADDR",
            "MASTER_ADDR and MASTER_PORT",
        ),
        (
            {"MASTER_ADDR": "localhost"},
            "env:// rendezvous: MASTER_PORT",
            "0: MASTER_PORT not set: start this",
        ),
        ({"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "env:// rendezvous: odd", None),
        ({}, "another error of the script", None),
    ],
)
def test_without_torchrun(address, error, told, monkeypatch, capsys):
    """One line where torch misses what torchrun says; other errors keep their trace."""
    import megatron_hdp.__main__ as launcher

    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in address.items():
        monkeypatch.setenv(name, value)

    def run(launch):
        raise ValueError(error)

    monkeypatch.setattr(launcher, "run", run)
    with pytest.raises(ValueError if told is None else SystemExit) as caught:
        launcher.main([__file__])
    if told is None:
        assert str(caught.value) == error
    else:
        assert caught.value.code == 1
        assert told in capsys.readouterr().err


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


def test_a_flag_without_a_value_is_off_unless_given():
    from megatron_hdp.seams.flag_group import add_group

    parser = add_group(argparse.ArgumentParser())
    assert not hasattr(parser.parse_args([]), "hdp_offload")  # so that YAML can say it
    args = parser.parse_args(["--hdp-offload", "--hdp-offload-gib", "1.5"])
    assert (args.hdp_offload, args.hdp_offload_gib) == (True, 1.5)
    assert HdpConfig().offload is False
