"""What planner, log and attention are told of the model: windows, heads, layers that run twice, whom to contact."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_hdp.config import HdpConfig
from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.pool import warm_up_distance
from megatron_hdp.seams.costs import (
    arena_bytes,
    cost_from_args,
    heads_from_args,
    layer_of_args,
    recomputed_from_args,
    router_counts_from_args,
    window_tokens,
    windows_from_args,
)
from megatron_hdp.seams.refuse import refuse_heads


def args_of(**changed):
    args = {
        "num_layers": 8,
        "hidden_size": 4096,
        "ffn_hidden_size": 11008,
        "kv_channels": 128,
        "swiglu": True,
        "params_dtype": torch.bfloat16,
        "sequence_parallel": False,
        "num_attention_heads": 32,
        "group_query_attention": True,
        "num_query_groups": 8,
        "multi_latent_attention": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "window_size": None,
        "window_attn_skip_freq": None,
        "seq_length": 4096,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": None,
    }
    return SimpleNamespace(**(args | changed))


@pytest.mark.parametrize(
    ("size", "skip", "layer", "tokens"),
    [
        (None, None, 1, None),
        ((4095, 0), None, 1, 4096),
        ((4095, -1), None, 7, 4096),
        ((0, 0), None, 1, 1),
        ((-1, 0), None, 1, None),
        ((-1, -1), None, 1, None),
        ((4095, 0), 4, 3, 4096),
        ((4095, 0), 4, 4, None),
        ((4095, 0), [1, 0, 1], 2, None),
        ((4095, 0), [1, 0, 1], 3, 4096),
    ],
)
def test_window_of_a_layer(size, skip, layer, tokens):
    assert window_tokens(size, skip, layer) == tokens


@pytest.mark.parametrize("size", [(16, 1), (16, 16), (-1, 5), (16,), (-2, 0)])
def test_windows_that_look_ahead_or_are_none(size):
    with pytest.raises(ConfigError, match="--window-size"):
        window_tokens(size, None, 1)


def test_windows_of_all_layers():
    assert windows_from_args(args_of(window_size=(9, 0), window_attn_skip_freq=3)) == (10, 10, None) * 2 + (10, 10)
    assert set(windows_from_args(args_of(window_size=(4095, 0)))) == {None}  # as long as the context: no window
    assert set(windows_from_args(args_of(window_size=(4094, 0)))) == {4095}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, (32, 8)),
        ({"tensor_model_parallel_size": 4}, (8, 2)),
        ({"tensor_model_parallel_size": 16}, (2, 1)),  # Megatron repeats key/value heads
        ({"group_query_attention": False, "num_query_groups": 1, "tensor_model_parallel_size": 4}, (8, 8)),
        ({"multi_latent_attention": True, "tensor_model_parallel_size": 4}, (8, 8)),
    ],
)
def test_heads_of_a_process(changed, expected):
    assert heads_from_args(args_of(**changed)) == expected


@pytest.mark.parametrize(
    ("changed", "counts"),
    [
        ({"num_experts": None}, 0),
        ({}, 32),
        ({"moe_aux_loss_coeff": 0.0}, 0),
        ({"moe_router_load_balancing_type": "none"}, 0),
        ({"moe_router_load_balancing_type": ["none", "seq_aux_loss"], "moe_aux_loss_coeff": [0.0, 0.1]}, 32),
        ({"moe_layer_freq": 3}, 12),
        ({"moe_layer_freq": [0, 1, 0, 0, 0, 0, 0, 1]}, 8),
    ],
)
def test_choices_that_are_counted(changed, counts):
    experts = {"num_experts": 4, "moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"}
    assert router_counts_from_args(args_of(**(experts | {"moe_layer_freq": 1} | changed))) == counts


@pytest.mark.parametrize(
    ("changed", "layers"),
    [
        ({}, []),
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}, range(8)),
        ({"recompute_granularity": "selective"}, range(8)),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, []),
        ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}, range(3)),
        (
            {
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 1,
                "pipeline_model_parallel_size": 2,
                "virtual_pipeline_model_parallel_size": 2,
            },
            [0, 2, 4, 6],
        ),
    ],
)
def test_layers_that_run_twice(changed, layers):
    assert [layer for layer, again in enumerate(recomputed_from_args(args_of(**changed))) if again] == list(layers)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "pool_size", "words"),
    [
        (32, 8, 2, None),
        (9, 3, 3, None),
        (9, 3, 1, None),
        (9, 3, 2, "the 9 query and 3 key/value heads of a process can only be swapped among 3, 9 ranks"),
        (1, 1, 8, "the 1 query and 1 key/value heads of a process can not be swapped, and the pool has 8"),
        (6, 2, 4, None),
    ],
)
def test_heads_that_no_ring_of_the_pool_can_swap(heads, kv_heads, pool_size, words):
    cost = CostModel(load_profile("bytescale"), layers_per_stage=2, heads=heads, kv_heads=kv_heads)
    if words is None:
        refuse_heads(cost, pool_size)
        return
    with pytest.raises(ConfigError, match=words):
        refuse_heads(cost, pool_size)


@pytest.mark.parametrize(
    ("exchange", "pool", "per_node", "distance"),
    [
        ("ring", range(16), 8, 2),
        ("auto", range(16), 8, 7),
        ("auto", range(0, 64, 4), 8, 2),  # tensor parallelism over 4: two columns a node
        ("auto", range(2), 8, 2),
        ("gather", range(16), 8, 15),
        ("heads", range(512), 8, 64),
    ],
)
def test_whom_a_rank_contacts_before_training(exchange, pool, per_node, distance):
    assert warm_up_distance(exchange, tuple(pool), per_node) == distance


# Profiles

OWN = "h4096-f11008-glu-q32x128-kv8-16bit-tp1"
SHIPPED = load_profile("bytescale")


def test_planned_with_the_layer_of_the_model(tmp_path):
    """Not with the profile's default, where the profile has both; with that, where it has not."""
    args, path = args_of(), str(tmp_path / "two.json")
    assert layer_of_args(args) == OWN
    slow = replace(SHIPPED.layer(), linear_forward=1e-3)
    replace(SHIPPED, layers={**SHIPPED.layers, OWN: slow}).save(path)
    cost = cost_from_args(args, HdpConfig(profile=path))
    assert (cost.layer, cost.layer_profile) == (OWN, slow)
    other = cost_from_args(args_of(hidden_size=5120), HdpConfig(profile=path))
    assert other.layer_profile == SHIPPED.layer()
    assert cost_from_args(args, HdpConfig()).layer_profile == SHIPPED.layer()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"attention_forward": 0.01}, "profile inner with 8 layers per stage is so slow"),
        ({"linear_forward": 1e10}, "linear_forward is 8.00000e.10 s"),
    ],
)
def test_a_profile_that_cannot_be_used_is_named_by_its_file(change, words, tmp_path):
    path = str(tmp_path / "slow.json")
    layer = replace(SHIPPED.layer(), **change)
    replace(SHIPPED, layers={SHIPPED.default_layer: layer}, name="inner").save(path)
    with pytest.raises(ConfigError, match=rf"by --hdp-profile {path}: {words}"):
        cost_from_args(args_of(), HdpConfig(profile=path))


@pytest.mark.parametrize(
    ("processes", "parts"),
    [(None, 4), ("1", 4), ("4", 4), ("8", 8)],
)
def test_part_of_a_process_of_the_host_memory(processes, parts, tmp_path, monkeypatch):
    """Never more than the node has: as many parts as there are processes on it."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    replace(SHIPPED, host_memory=float(2**33), gpus_per_node=4).save(tmp_path / "p.json")
    assert arena_bytes(HdpConfig(profile=str(tmp_path / "p.json"))) == 2**33 // parts


@pytest.mark.parametrize(
    ("memory", "processes", "words"),
    [
        (2.0**22, 4, None),
        (2.0**22 - 4, 4, r"is 4.1943e\+06 bytes, for 4 processes"),
        (2.0**52, 4, None),
        (2.0**52, 3, r"is 4.5036e\+15 bytes, for 3 processes"),
    ],
)
def test_host_memory_that_cannot_be(memory, processes, words, tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    path = str(tmp_path / "p.json")
    replace(SHIPPED, host_memory=memory, gpus_per_node=processes).save(path)
    config = HdpConfig(profile=path)
    if words is None:
        assert arena_bytes(config) == memory / processes
        return
    with pytest.raises(ConfigError, match=rf"field host_memory of --hdp-profile {path} {words}.*it must be 1 MiB to"):
        arena_bytes(config)


def test_refused_by_megatron(monkeypatch, capsys):
    """One line, for `doctor` with code 2; errors of this package stay what they are."""
    from megatron_hdp.doctor_request import DoctorRequest
    from megatron_hdp.profiler.request import ProfileRequest
    from megatron_hdp.seams import doctor, flags, profile

    def refuse(error):
        def original(args, defaults):
            raise error

        return lambda: flags._megatron_checks(original, None, {})

    layers = refuse(AssertionError("Number of layers\nshould be divisible"))
    with pytest.raises(ConfigError, match=r"^Megatron refuses these flags: Number of layers should be divisible$"):
        layers()
    flags.refuse_without_hdp()
    monkeypatch.setattr(doctor, "_request", [DoctorRequest()])
    with pytest.raises(SystemExit) as stopped:
        layers()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == (
        "megatron_hdp: Megatron refuses these flags: Number of layers should be divisible\n"
    )
    with pytest.raises(SystemExit):
        refuse(AssertionError())()
    assert capsys.readouterr().err == "megatron_hdp: Megatron refuses these flags: raise error\n"
    with pytest.raises(ConfigError, match="ours"):
        refuse(ConfigError("ours"))()
    with pytest.raises(ConfigError, match="doctor looks at a run with --hdp"):
        flags.wrap_validate_args(lambda *_: pytest.fail("Megatron was asked first"))(SimpleNamespace(hdp=False))
    monkeypatch.setattr(doctor, "_request", [])
    monkeypatch.setattr(profile, "_request", [ProfileRequest()])
    with pytest.raises(ConfigError, match="profile measures a run with --hdp"):
        flags.wrap_validate_args(lambda *_: pytest.fail("Megatron was asked first"))(SimpleNamespace(hdp=False))


@pytest.mark.parametrize("mask", ["padding", "no_mask", "arbitrary"])
def test_masks_that_are_not_causal(mask):
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_hdp.seams.spec import HdpCoreAttention

    config = SimpleNamespace(kv_channels=8, window_size=(3, 0), window_attn_skip_freq=2)
    config.qk_layernorm, config.qk_l2_norm, config.transformer_impl = False, False, "local"
    with pytest.raises(ConfigError, match=f"causal attention only; the mask of layer 3 is {mask}"):
        HdpCoreAttention(config, 3, AttnMaskType[mask], "self")
    with pytest.raises(ConfigError, match=r"no attention dropout; layer 3 wants 0\.1"):
        HdpCoreAttention(config, 3, AttnMaskType.causal, "self", attention_dropout=0.1)
    windows = [HdpCoreAttention(config, layer, AttnMaskType.padding_causal, "self").window for layer in (1, 2)]
    assert windows == [4, None]
