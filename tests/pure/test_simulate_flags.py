"""What `megatron-hdp simulate` refuses, and which model its flags mean."""

import dataclasses
import logging
import re
import sys
import types

import numpy as np
import pytest

from megatron_hdp import cli, length_source
from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError, PlanError
from megatron_hdp.plan_step import MEGATRON, PlanOptions
from megatron_hdp.profiler.match import layer_name
from megatron_hdp.simulate.flags import SimulateFlags
from megatron_hdp.simulate.model import ModelFlags
from megatron_hdp.simulate.setting import read_setting
from megatron_hdp.simulate.verdict import ratio
from megatron_hdp.simulator import Cluster, cluster_of_profile
from megatron_hdp.simulator.models import MODELS, Model, model_profile
from megatron_hdp.simulator.strategies import Setting

GOOD = {"--lengths": "byted", "--model": "llama-7b", "--gpus": "1024", "--context": "2M"}


def run(capsys, changes):
    flags = {**GOOD, **changes}
    words = [word for flag, value in flags.items() if value is not None for word in (flag, value) if word]
    code = cli.main(["simulate", *words])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"--model": "gpt-5"},
            "--model 'gpt-5' is not known: choose one of llama-7b, llama-13b, .*mixtral-8x22b; or for another model "
            r"the one most like it, and change its sizes with --layers, .*\(docs/simulate.md, Your own model\)",
        ),
        ({"--model": None}, "--model is missing: choose one of llama-7b, "),
        ({"--gpus": "1001"}, r"--gpus is 1,001, and a rank has 2 x 1 GPUs .*multiple of 2, such as 1000 or 1002"),
        ({"--gpus": "0"}, "--gpus is 0: it must be from 1 to 1,048,576"),
        ({"--gpus": "1"}, "--gpus is 1, and a rank has 2 x 1 GPUs .*such as 2, or other sizes"),
        (
            {"--gpus": "256"},
            r"the longest sequence has 2,097,152 tokens, and 256 GPUs are 128 ranks of 2 x 1 GPUs \(--tp x --stages\) "
            "with 8K tokens each, which hold 1,048,576: set --gpus to at least 512, --tokens-per-rank to at least "
            "16,384, or --context to at most 1,048,576",
        ),
        (
            {"--expert-group": "3"},
            r"--expert-group is 3, .* pool of 512 ranks \(1,024 GPUs / \(2 x 1\)\): use 1, 2, 4,",
        ),
        ({"--expert-group": "0"}, "--expert-group is 0: it must be at least 1"),
        ({"--stages": "3"}, r"--stages is 3, which does not divide the 32 layers of llama-7b: use 1, 2, 4, 8, 16, 32"),
        ({"--stages": "4", "--virtual-stages": "3"}, r"--stages x --virtual-stages is 4 x 3, .* 32 layers"),
        ({"--virtual-stages": "2"}, "--virtual-stages is 2 with one stage: interleaving needs --stages 2 or more"),
        ({"--tp": "3"}, "--tp is 3, which does not divide the 32 heads of llama-7b: use 1, 2, 4, 8, 16, 32"),
        ({"--tp": "16"}, "--tp is 16, and nodes of bytescale have 8 GPUs: use 1, 2, 4, 8"),
        ({"--tp": "-2"}, "--tp is -2: it must be at least 1"),
        ({"--tokens-per-rank": "8191"}, r"--tokens-per-rank is 8191: pieces are multiples of 2 .*use 8190 or 8192"),
        ({"--tokens-per-rank": "8190", "--tp": "8"}, r"multiples of 8 tokens \(lcm\(2, --tp\)\), so use 8184 or 8192"),
        ({"--tokens-per-rank": "many"}, "--tokens-per-rank is 'many': give a positive whole number"),
        ({"--context": "0"}, "--context is '0'"),
        ({"--batch-tokens": "4G"}, "--batch-tokens is 4,294,967,296: Megatron counts them in int32"),
        ({"--steps": "0"}, "--steps is 0: it must be from 1 to 1,000"),
        ({"--seed": "-1"}, "--seed is -1"),
        ({"--strategies": "static,magic"}, "--strategies has 'magic': choose of hdp, .*static"),
        ({"--strategies": ","}, "--strategies has ''"),
        ({"--sweep": "tokens_per_rank"}, "--sweep has 'tokens_per_rank': choose of tokens-per-rank, ranks, context, "),
        ({"--device-gib": "0"}, "--device-gib is 0: it must be positive"),
        ({"--host-gib": "-1"}, "--host-gib is -1: it must be from 0"),
        ({"--host-gib": "1", "--no-search": ""}, "--host-gib 1 without --offload"),
        ({"--profile": "a100"}, r"'a100' is neither a shipped one \(bytescale, h100\) nor a readable file"),
        ({"--cluster": "mine"}, "'mine' is neither a shipped one .* nor a readable file"),
        ({"--layers": "0"}, "--layers is 0: it must be from 1"),
        ({"--layers": "16777216"}, "--layers is 16,777,216: it must be from 1 to 4,096"),
        ({"--ffn": "1"}, "--tp is 2, which does not divide the MLP of custom, 1 wide: change --ffn or --tp"),
        ({"--hidden": "16777216", "--head-dim": "1"}, "no integer cost can hold: check the model's sizes, --profile"),
        (
            {"--context": "1G", "--tokens-per-rank": "1G"},
            "--tokens-per-rank is 1,073,741,824: costs .* 32 layers .* counted up to [0-9,]+ tokens: use less",
        ),
        ({"--gpus": "16", "--stages": "8"}, "16 GPUs are 1 rank of 2 x 8 GPUs"),
        (
            {"--strategies": "static", "--megatron-checkout": "/tmp"},
            "--megatron-checkout does nothing here: --strategies does not have megatron",
        ),
        ({"--kv-heads": "5"}, "--kv-heads is 5, which does not divide --heads 32"),
        ({"--heads": "24"}, "--hidden is 4096, which 24 heads do not divide: give --head-dim"),
        (
            {"--experts": "2", "--experts-per-token": "3"},
            "--experts-per-token is 3, and a layer has 2: raise --experts",
        ),
        ({"--experts-per-token": "3"}, "--experts-per-token is 3, and a layer has 1"),
        ({"--layer": "llama-7b"}, "--layer llama-7b is a layer of a known model: use --model llama-7b"),
        ({"--layer": "other"}, "no layer 'other'"),
        ({"--layer": "figure-6a", "--model": None}, "--layer figure-6a without --layers, --hidden, --ffn, --heads, "),
        (
            {"--offload": "", "--stages": "16", "--gpus": "16384"},
            "--offload with 32 layers in 16 x 1 parts: .* 3 layers",
        ),
        ({"--lengths": "gone.csv"}, "gone.csv: no such file, and no mix of that name"),
        ({"--field": "n"}, "--field n: a mix has no fields"),
        ({"--json": "/nowhere/at/all.json"}, "--json /nowhere/at/all.json: no folder /nowhere/at"),
        ({"--trace": "/"}, "--trace /: cannot be written"),
    ],
)
def test_refused_in_words_of_this_command(capsys, monkeypatch, changes, words):
    """One line, with the flag and what to do, and before anything is simulated."""
    monkeypatch.setattr("megatron_hdp.simulator.strategies.simulate_step", None)
    code, out, err = run(capsys, changes)
    assert (code, out) == (2, "")
    assert err.startswith("megatron-hdp: ")
    assert err.count("\n") == 1
    assert re.search(words, err), err
    assert "hdp-tokens" not in err
    assert "seq-length" not in err


def test_outputs_are_refused_before_lengths_are_read(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(length_source, "read_lengths", None)
    code, _, err = run(capsys, {"--lengths": "any.csv", "--json": str(tmp_path)})
    assert code == 2
    assert "it is a folder" in err
    same = str(tmp_path / "a.json")
    code, _, err = run(capsys, {"--lengths": "any.csv", "--json": same, "--trace": same})
    assert code == 2
    assert "one would overwrite the other" in err


@pytest.mark.parametrize("flag", ["--lengths", "--profile", "--cluster"])
@pytest.mark.parametrize("out", ["--json", "--trace"])
def test_no_input_is_overwritten(capsys, tmp_path, flag, out):
    (tmp_path / "in").write_text("1\n")
    code, _, err = run(capsys, {flag: str(tmp_path / "in"), out: str(tmp_path / "." / "in")})
    assert code == 2
    assert f"{out} is the file of {flag}, which it would overwrite" in err
    assert (tmp_path / "in").read_text() == "1\n"


def test_lines_without_a_length_name_the_flag_that_says_the_field(capsys, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"n": 7, "text": "x"}\n')
    code, out, err = run(capsys, {"--lengths": str(tmp_path / "in.jsonl")})
    assert (code, out) == (2, "")
    assert err.endswith(
        "in.jsonl, line 1: neither a field 'length' nor 'tokens' (fields: n, text); name one with --field\n"
    )


@pytest.mark.parametrize("command", ["simulate", "report"])
def test_help_says_what_flags_are_that_nobody_gives(capsys, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    words = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "None" not in words
    assert "(default: )" not in words
    expected = {
        "simulate": [
            "--tp INT Tensor-parallel size. (default: what is assumed for the model in",
            "hdp. (default: all)",
        ],
        "report": ["--title TEXT Its title. (default: that of the input)"],
    }
    assert all(text in words for text in expected[command])


def test_only_torch_s_line_about_a_missing_gpu_is_silent(monkeypatch, caplog):
    """Megatron's scheduler imports torch, which says that there is no GPU; here there need be none."""
    logger = logging.getLogger("torch.utils.cpp_extension")
    scheduler = types.ModuleType("megatron_hdp.seams.scheduler")

    def plan_megatron(*arguments, **options):
        logger.warning("No CUDA runtime is found, using CUDA_HOME='%s'", "/usr/local")
        logger.warning("something else")
        raise PlanError("far enough")

    scheduler.plan_megatron = plan_megatron
    monkeypatch.setitem(sys.modules, scheduler.__name__, scheduler)
    options = PlanOptions(num_ranks=2, tokens_per_rank=8, cost=CostModel(load_profile("h100"), 32), algorithm=MEGATRON)
    with pytest.raises(PlanError, match="far enough"):
        cli._megatron_planner(options, None)(np.array([8]))
    logger.warning("No CUDA runtime is found, but later")
    assert [record.getMessage() for record in caplog.records] == [
        "something else",
        "No CUDA runtime is found, but later",
    ]


CLUSTER = """
name: small
nodes: 16
gpus_per_node: 8
inside_node: {gigabyte_per_second: 360, latency_microseconds: 5}
nics: {per_node: 8, gigabyte_per_second: 45, latency_microseconds: 15}
pcie: {gigabyte_per_second: 51.2, shared_with_nic: false}
"""


def test_cluster_files(capsys, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(CLUSTER)
    code, _, err = run(capsys, {"--cluster": str(path)})
    assert code == 2
    assert (
        "--gpus is 1,024, and cluster small has 16 nodes of 8, 128 GPUs: use at most 128, or raise `nodes` in the "
        "cluster's file to 128" in err
    )
    path.write_text(CLUSTER.replace("gpus_per_node: 8\n", ""))
    code, _, err = run(capsys, {"--cluster": str(path)})
    assert code == 2
    assert re.search(r"small.yaml: field gpus_per_node is missing", err)


def test_damaged_profiles_name_the_field(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(load_profile("h100").to_json().replace('"gpus_per_node": 8,', ""))
    code, _, err = run(capsys, {"--profile": str(path)})
    assert code == 2
    assert re.search(r"mine.json: field gpus_per_node is missing", err)


def flags(**changes):
    model = changes.pop("model", ModelFlags(model="llama-7b"))
    return SimulateFlags(lengths="byted", gpus=changes.pop("gpus", 64), context="32K", model=model, **changes)


def test_the_model_of_a_name_is_the_known_one():
    assert ModelFlags(model="llama-13b").model_of(load_profile("h100")) is MODELS["llama-13b"]


def test_sizes_change_a_known_model():
    changed = ModelFlags(model="llama-7b", layers=48, hidden=5120, heads=40, ffn=13824, vocab=64000)
    model = changed.model_of(load_profile("h100"))
    assert (model.shape.layers, model.shape.hidden, model.shape.head_dim, model.shape.vocabulary) == (
        48,
        5120,
        128,
        64000,
    )
    assert model.shape.kv_heads == MODELS["llama-7b"].shape.kv_heads
    setting = read_setting(flags(model=changed, profile="h100"))
    assert setting.cost.layers_per_stage == 48
    # a layer of llama-13b's sizes costs what a layer of llama-13b is derived to cost from llama-7b's
    alone = dataclasses.replace(
        load_profile("h100"), layers={"llama-7b": load_profile("h100").layers["llama-7b"]}, default_layer="llama-7b"
    )
    twin = model_profile("llama-13b", alone, 2).layer()
    mine = setting.cost.layer_profile
    assert mine.attention_forward == pytest.approx(twin.attention_forward, rel=1e-5)
    assert mine.linear_forward == pytest.approx(twin.linear_forward, rel=1e-5)


def test_experts_can_be_added():
    model = ModelFlags(model="llama-7b", experts=64, experts_per_token=8, ffn=2048).model_of(load_profile("h100"))
    assert (model.experts, model.experts_per_token, model.shape.ffn) == (64, 8, 2048)


MEASURED = layer_name(
    hidden=2048,
    ffn=5632,
    heads=16,
    kv_heads=4,
    head_size=96,
    gated=True,
    experts=None,
    element_bytes=2,
    tensor_parallel=4,
)


def _with_layer(name, tensor_parallel=4):
    profile = load_profile("h100")
    layer = dataclasses.replace(profile.layer("llama-7b"), tensor_parallel=tensor_parallel)
    return dataclasses.replace(profile, layers={name: layer}, default_layer=name)


def test_a_measured_layer_says_its_sizes_by_its_name():
    """And its coefficients are taken as they are."""
    profile = _with_layer(MEASURED)
    model = ModelFlags(layer=MEASURED, layers=24, vocab=50_000).model_of(profile)
    shape = model.shape
    assert (shape.layers, shape.hidden, shape.ffn, shape.vocabulary) == (24, 2048, 5632, 50_000)
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.gated, shape.element_bytes) == (16, 4, 96, True, 2)
    assert (model.tensor_parallel, model.experts) == (4, 1)
    setting = Setting(model=model, gpus=16, context=8192, hardware=profile)
    assert setting.cost.layer_profile == profile.layer()


def test_measured_experts_and_fp32():
    name = layer_name(
        hidden=512,
        ffn=1024,
        heads=8,
        kv_heads=8,
        head_size=64,
        gated=False,
        experts=(16, 2),
        element_bytes=4,
        tensor_parallel=1,
    )
    model = ModelFlags(layer=name, layers=2, vocab=1000).model_of(_with_layer(name, 1))
    assert (model.experts, model.experts_per_token) == (16, 2)
    assert (model.shape.gated, model.shape.element_bytes) == (False, 4)


def test_a_layer_of_another_name_takes_the_rest_from_a_model():
    profile = _with_layer("mine", 2)
    model = ModelFlags(layer="mine", model="llama-7b", layers=40).model_of(profile)
    assert model.name == "mine"
    assert model.shape == dataclasses.replace(MODELS["llama-7b"].shape, layers=40)
    with pytest.raises(ConfigError, match=r"--layer mine without --layers, --hidden, --ffn, "):
        ModelFlags(layer="mine").model_of(profile)


def test_cluster_that_ships_under_the_profile_s_name():
    assert read_setting(flags(profile="h100")).machines.peak_flops is not None
    assert read_setting(flags(profile="h100", cluster="bytescale")).machines.name == "bytescale"


def test_a_profile_s_own_machines(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(dataclasses.replace(load_profile("h100"), name="mine").to_json())
    setting = read_setting(flags(profile=str(path)))
    assert setting.cluster is None
    assert isinstance(setting.machines, Cluster)
    assert setting.machines == cluster_of_profile(model_profile(MODELS["llama-7b"], load_profile("h100")), name="mine")


def test_host_memory_of_the_profile(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(dataclasses.replace(load_profile("h100"), name="mine", host_memory=8e11).to_json())
    assert read_setting(flags(profile=str(path))).host_bytes == 10**11
    assert read_setting(flags(profile=str(path), offload=True, host_gib=2.0)).host_bytes == 2 << 30
    assert read_setting(flags()).host_bytes is None


def test_every_known_model_can_be_asked_for():
    for name, model in MODELS.items():
        setting = read_setting(flags(model=ModelFlags(model=name), gpus=model.gpus))
        assert isinstance(setting.spec, Model)
        assert setting.ranks * setting.tensor_parallel * setting.stages == model.gpus


def test_ratio_is_of_whole_runs():
    found = ratio([10.0, 2.0], [2.0, 1.0])
    assert found.whole == 4.0
    assert str(found) == "4.00 times as fast (2.00 to 5.00 in 2 steps)"
    assert str(ratio([3.0], [2.0])) == "1.50 times as fast"
