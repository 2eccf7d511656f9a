"""The memory estimate of a run against the model and optimizer that Megatron builds, what it ends, what doctor says."""

import dataclasses
import importlib
import json
import re
from types import SimpleNamespace

import pytest
from conftest import ADAM, HERE, MODEL, NO_EVALUATION, train
from forked import run_ranks

from megatron_hdp.config import HdpConfig
from megatron_hdp.cost import load_profile
from megatron_hdp.doctor_request import DoctorRequest
from megatron_hdp.errors import ConfigError
from megatron_hdp.memory import Parallel, layer_bytes_per_token, sized
from megatron_hdp.offload import host_memory

SCRIPT = str(HERE.parents[1] / "scripts" / "pretrain_gpt.py")
FLAGS = [*MODEL, *ADAM, *NO_EVALUATION, "--train-iters", "1", "--global-batch-size", "8"]
HDP = ["--hdp", "--hdp-tokens-per-rank", "64"]
HUGE = "--num-layers 96 --hidden-size 12288 --ffn-hidden-size 49152 --num-attention-heads 96".split()


def without(flags, *names):
    """``flags`` without some that take no value."""
    return [flag for flag in flags if flag not in names]


def built(ranks, corpus, folder, flags):
    """What each rank holds, and what the estimate says, after one step of training."""
    flags = [*flags, "--data-path", corpus, "--hdp", "--hdp-tokens-per-rank", "96"]
    train(ranks, flags, folder, script="train_memory.py").check()
    found = [json.loads((folder / "record" / f"memory{rank}.json").read_text()) for rank in range(ranks)]
    return [(each["held"], each["estimated"]) for each in found]


def test_bf16_with_the_distributed_optimizer(corpus, tmp_path):
    """Gradients are padded to 64 elements a tensor and 128 x ranks a bucket, and the optimizer's parts with them."""
    flags = [*FLAGS, "--bf16", "--use-distributed-optimizer"]
    found = built(2, corpus, tmp_path, flags)
    for held, estimated in found:
        padding = 64 * held["tensors"] + 2 * 128
        assert estimated["reason"] is None
        assert held["parameters"] == estimated["parameters"]
        assert held["weights"] == estimated["weights"] == 2 * held["parameters"]
        assert 0 <= held["gradients"] - estimated["gradients"] <= 4 * padding
        assert abs(held["optimizer"] - estimated["optimizer"]) <= 12 * padding
    both = sum(held["optimizer"] for held, _ in found)
    assert both == 12 * found[0][0]["parameters"]


def test_two_stages_with_tied_embeddings_biases_and_learned_positions(corpus, tmp_path):
    llama = ("--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights")
    flags = [*without(FLAGS, *llama), "--pipeline-model-parallel-size", "2", "--normalization", "LayerNorm"]
    flags += ["--position-embedding-type", "learned_absolute"]
    (first, of_first), (last, of_last) = built(2, corpus, tmp_path, flags)
    assert (of_first["stage"], of_last["stage"]) == ("first", "last")
    assert first["parameters"] == of_first["parameters"]
    assert last["parameters"] == of_last["parameters"]  # with a table of its own
    assert first["parameters"] - last["parameters"] == 96 * 32 - 2 * 32  # positions; the last norm
    assert first["optimizer"] == 8 * first["parameters"]
    assert last["optimizer"] == 8 * last["parameters"] == of_last["optimizer"]  # that needs most, with its logits
    assert "it does not know what layers keep with positions that are not rotary" in of_first["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--add-qkv-bias"], ["--qk-layernorm", "--normalization", "LayerNorm"]])
def test_fewer_key_value_heads_than_tensor_parallel_ranks(corpus, tmp_path, more):
    flags = [*FLAGS, "--tensor-model-parallel-size", "2", "--num-query-groups", "1", *more]
    for held, estimated in built(2, corpus, tmp_path, flags):
        assert held["parameters"] == estimated["parameters"]
        assert held["gradients"] >= estimated["gradients"] == 4 * held["parameters"]


def test_training_ends_where_it_cannot_fit(tmp_path):
    outcome = run_ranks(1, [SCRIPT, *FLAGS, *HUGE, *HDP, "--data-path", "none"], tmp_path)
    assert outcome.codes == (1,)
    assert re.search(r"megatron_hdp: memory of each CPU rank: weights \d+\.\d\d GiB, gradients ", outcome.output)
    assert "ConfigError: --hdp-tokens-per-rank is 64: each CPU rank would need at least" in outcome.output
    assert "no --hdp-tokens-per-rank fits; or use more --tensor-model-parallel-size" in outcome.output
    assert "Traceback" not in outcome.output
    assert "tensor model parallel group" not in outcome.output


def module(name):
    return importlib.import_module(f"megatron_hdp.seams.{name}")


@pytest.fixture
def args():
    """Validated args of a 7B LLaMA on 8 ranks, as far as the estimate looks at them."""
    torch = pytest.importorskip("torch")
    config = dataclasses.asdict(HdpConfig(tokens_per_rank=8192))
    return SimpleNamespace(
        **{f"hdp_{name}": value for name, value in config.items()},
        num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, group_query_attention=False,
        num_query_groups=1, kv_channels=128, padded_vocab_size=32000, swiglu=True, quick_geglu=False, rank=0,
        untie_embeddings_and_output_weights=True, params_dtype=torch.bfloat16, normalization="RMSNorm", local_rank=0,
        add_bias_linear=False, add_qkv_bias=False, qk_layernorm=False, max_position_embeddings=65536, seq_length=65536,
        position_embedding_type="rope", world_size=8, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None, sequence_parallel=False, use_distributed_optimizer=True,
        accumulate_allreduce_grads_in_fp32=True, optimizer="adam", sgd_momentum=0.9, recompute_granularity=None,
        recompute_method=None, recompute_num_layers=None, bias_swiglu_fusion=True, apply_rope_fusion=True,
        window_size=None, window_attn_skip_freq=None, cross_entropy_loss_fusion=False,
        multi_latent_attention=False, expert_model_parallel_size=1, use_tp_pp_dp_mapping=False,
        moe_ffn_hidden_size=None, moe_router_topk=2,
    )  # fmt: skip


def found(args, gib=80.0):
    return module("memory").memory_of_run(args, gpu_bytes=int(gib * 2**30))


def test_layout_of_the_flags(args):
    parallel_from_args = module("model_shape").parallel_from_args

    def layout(**changes):
        changed = SimpleNamespace(**{**vars(args), **changes})
        return parallel_from_args(changed, module("flags").config_from_args(changed), on_gpu=True)

    plain = Parallel(ranks=8, optimizer_bytes=12, exchange="auto", loss_chunk=2048)
    assert layout() == plain
    fp32 = importlib.import_module("torch").float32
    assert layout(params_dtype=fp32, accumulate_allreduce_grads_in_fp32=False).optimizer_bytes == 8
    assert layout(accumulate_allreduce_grads_in_fp32=False).gradient_bytes == 2
    assert layout(optimizer="sgd").optimizer_bytes == 8
    assert layout(optimizer="sgd", sgd_momentum=0.0).optimizer_bytes == 4
    whole = {"recompute_granularity": "full", "recompute_num_layers": 3}
    uniform = dataclasses.replace(plain, recompute="full", recompute_group=3)
    assert layout(**whole, recompute_method="uniform") == uniform
    block = dataclasses.replace(plain, recompute="full", recompute_layers=3)
    assert layout(**whole, recompute_method="block") == block
    attention = dataclasses.replace(plain, recompute_attention=True)
    assert layout(recompute_granularity="selective") == attention
    assert layout(recompute_granularity="selective", recompute_modules=["mlp", "core_attn"]) == attention
    assert layout(recompute_granularity="selective", recompute_modules=["mlp"]) == plain
    spread = layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True)
    assert (spread.ranks, spread.tensor_parallel, spread.stages, spread.sequence_parallel) == (2, 2, 2, True)
    assert layout(window_size=(99, 0)).window == 100
    assert layout(window_size=(99, 0), window_attn_skip_freq=2).window is None
    assert not layout(bias_swiglu_fusion=False).fused_kernels
    assert layout(hdp_loss_chunk=0).loss_chunk == 0


def test_surely_too_large_or_only_perhaps(args):
    memory = module("memory")
    fits = found(args, 160)
    assert memory.refusal(fits) is memory.warning(fits) is None
    assert fits.likely.device == fits.least + 4 * 2**30 + fits.likely.attention - walk(args)
    tight = found(args, fits.least / 2**30 + 1)
    assert memory.refusal(tight) is None
    told = memory.warning(tight)
    assert "memory of a GPU may not be enough" in told
    most = int(re.search(r"--hdp-tokens-per-rank that fits is ([\d,]+)", told)[1].replace(",", ""))
    args.hdp_tokens_per_rank = most
    small = found(args, fits.least / 2**30 + 1)
    assert memory.warning(small) is None
    assert f"needs {65536 // 8:,} on this pool" in told  # 8 smaller ranks cannot hold --seq-length
    args.hdp_tokens_per_rank = most + 2
    assert memory.warning(found(args, fits.least / 2**30 + 1)) is not None
    args.hdp_tokens_per_rank = 8192
    over = memory.refusal(found(args, fits.least / 2**30 - 0.01))
    assert over.startswith("--hdp-tokens-per-rank is 8,192: each GPU would need at least")
    assert "weights 12.55 GiB, gradients 25.10 GiB, optimizer 9.41 GiB, activations" in over
    assert memory.refusal(dataclasses.replace(fits, device_bytes=None)) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_end_alike_and_the_first_says_more(args, rank, monkeypatch, capsys):
    memory = module("memory")
    args.rank = rank
    monkeypatch.setattr(memory, "device_memory", lambda device, processes: 20 * 2**30)
    with pytest.raises(ConfigError, match=r"each GPU would need at least .* and has 20\.00 GiB: no --hdp-tokens"):
        memory.check_memory(args, None)
    assert ("memory of each GPU: weights 12.55 GiB" in capsys.readouterr().out) == (rank == 0)

    def no_gpu(device, processes):
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(memory, "device_memory", no_gpu)
    memory.check_memory(args, None)
    assert ("; peak" in capsys.readouterr().out) == (rank == 0)


def walk(args):
    """Attention's buffers with the exchange that needs least, which is the ring here."""
    ring = SimpleNamespace(**{**vars(args), "hdp_exchange": "ring"})
    return found(ring).likely.attention


def test_what_is_only_an_upper_bound_ends_nothing(args):
    args.recompute_granularity = "selective"
    memory, bound = module("memory"), found(args)
    assert "the estimate is an upper bound: what --recompute-granularity selective drops is not counted" in bound.notes
    likely = bound.likely
    assert bound.least == likely.weights + likely.gradients + likely.optimizer
    assert memory.refusal(found(args, bound.least / 2**30)) is None
    assert memory.refusal(found(args, bound.least / 2**30 - 0.01)) is not None


def test_host_memory_of_processes_and_nodes(args, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    args.hdp_offload, args.hdp_offload_gib = True, 20.0
    leaving = found(args)
    assert (leaving.arena, leaving.processes) == (20 * 2**30, 4)
    assert "host memory for activations 20.00 GiB a process, 80.00 GiB a node" in module("memory").summary(leaving)
    args.hdp_offload = False
    assert leaving.likely.working > found(args).likely.working
    assert leaving.least == found(args).least


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_experts": 8}, "it does not know --num-experts"),
        ({"decoder_first_pipeline_num_layers": 3}, "it does not know --decoder-first-pipeline-num-layers"),
        ({"optimizer": "muon"}, "an --optimizer other than adam and sgd"),
        ({"spec": ["mine", "layer"]}, "a layer spec of your own (--spec)"),
        ({"padded_vocab_size": None}, "a vocabulary without --padded-vocab-size"),
        ({"hidden_dropout": 0.1}, "it does not know what layers keep with --hidden-dropout"),
        ({"position_embedding_type": "none"}, "positions that are not rotary"),
        ({"qk_layernorm": True, "normalization": "LayerNorm"}, "--qk-layernorm with LayerNorm"),
    ],
)
def test_models_that_are_not_counted(args, change, reason):
    line = found(SimpleNamespace(**{**vars(args), **change}))
    assert line.startswith("no memory estimate: ")
    assert reason in line


def counted_layer(args):
    """Bytes of a token that the estimate counts for a layer of ``args`` on GPUs."""
    shape = module("model_shape")
    parallel = shape.parallel_from_args(args, module("flags").config_from_args(args), on_gpu=True)
    return layer_bytes_per_token(shape.shape_from_args(args), parallel)


def profile_of(args, folder, per_token, constant=0.0):
    """Have ``args`` take a profile that says it measured a layer of their name to keep that."""
    made, name = load_profile("bytescale"), module("costs").layer_of_args(args)
    layer = dataclasses.replace(
        made.layer(), activation_per_token=float(per_token), activation_constant=float(constant)
    )
    path = folder / "own.json"
    dataclasses.replace(made, software="some", default_layer=name, layers={name: layer}).save(path)
    args.hdp_profile = str(path)


def test_measured_bytes_are_used_where_they_agree_with_the_count(args, tmp_path):
    counted, of_count = counted_layer(args), found(args)
    for share in (1.04, 0.96):
        per_token, constant = int((share - 0.005) * counted), int(0.005 * counted * 8192)
        profile_of(args, tmp_path, per_token, constant)
        used = found(args)
        assert used.notes[0] == "activations of a layer: measured by the profile"
        assert used.likely.activations == 32 * (
            8192 * per_token + constant
        )  # the constant once a micro-batch and layer
        assert used.least == of_count.least - max(0, of_count.likely.activations - used.likely.activations)
    for share in (1.06, 0.94):
        profile_of(args, tmp_path, int(share * counted))
        put_aside = found(args)
        assert put_aside.likely == of_count.likely
        assert put_aside.least == of_count.least
        assert put_aside.notes[0] == "activations of a layer: counted from the flags"
        both = f"{counted * 8192 / 2**30:.2f} GiB of 8,192 tokens by the count, which is used, and "
        assert f"{both}{sized(int(share * counted) * 8192)} as the profile" in put_aside.notes[1]
    profile_of(args, tmp_path, counted, int(0.06 * counted * 8192))
    assert found(args).likely == of_count.likely  # a constant is part of what must agree


def test_measured_with_other_flags_under_the_same_name(args, tmp_path):
    """Sequence parallelism and recompute do not show in a layer's name; dropout does not either, and is not counted."""
    args.tensor_model_parallel_size = 4
    profile_of(args, tmp_path, counted_layer(args))
    assert "measured by the profile" in found(args).notes[0]
    args.sequence_parallel = True
    assert "counted from the flags" in found(args).notes[0]
    args.sequence_parallel, args.recompute_granularity = False, "selective"
    bound = found(args)
    assert bound.least == bound.likely.weights + bound.likely.gradients + bound.likely.optimizer
    args.hidden_dropout = 0.1
    assert found(args).startswith("no memory estimate: it does not know what layers keep with --hidden-dropout")


def test_the_arena_of_a_cpu_rank_is_memory_of_the_device(args, monkeypatch):
    memory = module("memory")
    monkeypatch.setattr(memory.cpu, "is_enabled", lambda: True)
    monkeypatch.setattr(memory, "device_memory", lambda device, processes: 160 * 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    plain, arena = memory.memory_of_run(args), 20 * 2**30
    args.hdp_offload, args.hdp_offload_gib = True, 20.0
    leaving = memory.memory_of_run(args)
    assert leaving.least == plain.least + arena
    assert leaving.most == leaving.likely.device + arena
    assert memory.parts(leaving)[-1] == ("arena", arena)
    assert "reserve 1.00 GiB, arena 20.00 GiB; peak" in memory.summary(leaving)
    assert memory.refusal(dataclasses.replace(leaving, device_bytes=leaving.least)) is None
    told = memory.refusal(dataclasses.replace(leaving, device_bytes=leaving.least - 1))
    assert "arena 20.00 GiB) and has" in told
    assert "or lower --hdp-offload-gib, which takes the same memory" in told
    assert memory.warning(dataclasses.replace(leaving, device_bytes=leaving.most)) is None
    assert memory.warning(dataclasses.replace(leaving, device_bytes=leaving.most - 1)) is not None
    args.hdp_tokens_per_rank = leaving.largest
    assert memory.memory_of_run(args).most <= 160 * 2**30
    args.hdp_tokens_per_rank = leaving.largest + 2
    assert memory.memory_of_run(args).most > 160 * 2**30
    on_gpu = found(args)
    assert (on_gpu.beside, on_gpu.most) == (0, on_gpu.likely.device)


@pytest.fixture
def answer(args, monkeypatch, capsys):
    """Exit code and output of the launcher's doctor for ``args``, with so many GiB a GPU, or on this machine."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    doctor = module("doctor")

    def ask(gib=160.0, **changes):
        with pytest.raises(SystemExit) as end:
            doctor.answer(DoctorRequest(device_gib=gib), SimpleNamespace(**{**vars(args), **changes}), None)
        return end.value.code, capsys.readouterr().out.rstrip()

    return ask


def test_doctor_knows_that_documents_may_be_too_long(answer):
    code, out = answer()
    assert code == 0
    assert out.endswith("\ntraining could start")
    assert "warning" not in out
    code, out = answer(hdp_tokens_per_rank=6000)
    assert code == 0
    stops = "stops if a document is longer than 48,000 tokens (pool x capacity)"
    assert out.endswith(f"\ntraining could start, but {stops}")
    assert "the pool holds 8 x 6,000 = 48,000 tokens, and --seq-length is 65,536: training stops at the start" in out
    assert "Set --hdp-tokens-per-rank to 8,192, use 11 ranks, or lower --seq-length to 48,000" in out
    spread = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True}
    out = answer(hdp_tokens_per_rank=6000, seq_length=65_537, **spread)[1]
    assert "2 x 6,000 = 12,000 tokens" in out
    assert "Set --hdp-tokens-per-rank to 32,770, use 44 ranks" in out
    experts = {"num_experts": 8, "expert_model_parallel_size": 4}
    grouped = answer(hdp_tokens_per_rank=6000, seq_length=65_537, expert_tensor_parallel_size=1, **experts, **spread)[1]
    assert "use 48 ranks" in grouped  # groups of 2 columns
    assert grouped.endswith(
        "training could start, but stops if a document is longer than 12,000 tokens (pool x capacity)"
    )
    tight = answer(found_gib(out), hdp_tokens_per_rank=6000, seq_length=65_537, **spread)[1]
    assert tight.splitlines()[-1] == (
        "training could start, but may run out of memory, and stops if a document is longer than 12,000 tokens (pool x "
        "capacity)"
    )


def found_gib(out):
    """A little less than the peak that doctor told."""
    return float(re.search(r"  peak +([\d.]+) GiB", out)[1]) - 1


def test_doctor_doubts_what_only_the_reserve_tips_over(answer):
    peak = found_gib(answer()[1])
    code, out = answer(peak)
    assert code == 0
    assert "  warning " in out
    assert out.endswith("\ntraining could start, but may run out of memory")
    code, out = answer(peak - 30, hdp_tokens_per_rank=6000)
    assert code == 1
    assert "training could not start:\n  memory: --hdp-tokens-per-rank is 6,000" in out
    assert ", but " not in out.rpartition("training could not start")[2]


def test_doctor_asks_for_host_memory_as_training_does(answer, monkeypatch):
    room = host_memory.Room(159 * 2**30, "MemAvailable of /proc/meminfo")
    monkeypatch.setattr(host_memory, "available_memory", lambda root: room)
    monkeypatch.setattr(module("memory"), "device_memory", lambda device, processes: 160 * 2**30)
    offload = {"hdp_offload": True, "hdp_offload_gib": 20.0}
    code, out = answer(None, **offload)
    assert code == 1
    assert "  host         20.00 GiB a process, 160.00 GiB a node" in out
    with pytest.raises(ConfigError) as refused:
        host_memory.require_host_memory(20 * 2**30, 8)
    assert out.endswith(f"training could not start:\n  memory: {refused.value}")
    assert answer(160.0, **offload)[0] == 0  # GPUs of another machine
    room = room._replace(bytes=160 * 2**30)
    assert answer(None, **offload)[0] == 0
    code, out = answer(None, num_experts=8, **offload)  # nothing is counted
    assert "20.00 GiB a process" in out


def test_doctor_refuses_a_profile_without_host_memory_to_speak_of(answer, tmp_path):
    path = tmp_path / "tiny.json"
    dataclasses.replace(load_profile("bytescale"), host_memory=1.0).save(path)
    code, out = answer(hdp_offload=True, hdp_profile=str(path))
    assert code == 1
    with pytest.raises(ConfigError) as refused:
        module("costs").arena_bytes(HdpConfig(offload=True, profile=str(path)))
    assert out.endswith(f"training could not start:\n  memory: {refused.value}")


def test_nodes_that_the_ranks_do_not_fill():
    nodes = module("doctor")._nodes
    assert nodes(7, 3) == "3 nodes of 3, the last of 1"
    assert nodes(32, 8) == "4 nodes of 8"
    assert nodes(4, 4) == "1 node of 4"


def test_a_script_that_builds_another_model(args):
    transformer = SimpleNamespace(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=32,
        kv_channels=128, gated_linear_unit=True, add_bias_linear=False,
    )  # fmt: skip
    config = SimpleNamespace(
        transformer=transformer,
        vocab_size=32000,
        share_embeddings_and_output_weights=False,
        transformer_layer_spec=None,
    )
    unknown = module("model_shape").unknown
    assert "ffn_hidden_size is 14336, not 11008" in unknown(args, config)
    transformer.ffn_hidden_size = 11008
    assert unknown(args, config) is None
