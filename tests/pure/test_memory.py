"""The memory estimate against numbers counted by hand, against torch's saved tensors, and against plans."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_hdp.cost import CostModel, load_profile
from megatron_hdp.errors import ConfigError
from megatron_hdp.measured_layer import choose
from megatron_hdp.memory import (
    CHUNK_BYTES,
    GIB,
    ModelShape,
    Parallel,
    chunk_rows,
    estimate,
    largest_capacity,
    layer_bytes_per_token,
    parameters,
    sized,
)
from megatron_hdp.plan_flags import PlanFlags
from megatron_hdp.plan_memory import MemoryFlags, render_memory, require_memory
from megatron_hdp.planner import plan
from megatron_hdp.planner.host import host_peaks, most_in_flight

LLAMA_7B = ModelShape(layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocabulary=32000)
LLAMA_70B = ModelShape(layers=80, hidden=8192, ffn=28672, heads=64, kv_heads=8, head_dim=128, vocabulary=32000)
ALONE = Parallel(ranks=1, reserve_bytes=0)


def test_parameters_are_those_of_the_published_models():
    assert parameters(LLAMA_7B, ALONE, "only") == 6_738_415_616
    assert parameters(LLAMA_70B, ALONE, "only") == 68_976_648_192
    tied = replace(LLAMA_7B, tied=True)
    assert parameters(tied, ALONE, "only") == 6_738_415_616 - 4096 * 32000


def test_stages_and_tensor_parallel_ranks_share_the_parameters():
    parallel = Parallel(ranks=8, tensor_parallel=8, stages=4)
    layer = (8192 * (8 + 2) * 128 + 8 * 128 * 8192 + 3 * 8192 * 3584) + 2 * 8192
    table = 8192 * 4096  # 32000 entries padded to 8 x 128: 32768, an eighth each
    assert parameters(LLAMA_70B, parallel, "first") == 20 * layer + table
    assert parameters(LLAMA_70B, parallel, "last") == 20 * layer + table + 8192
    few = replace(LLAMA_70B, kv_heads=4)  # half a head's keys and values for each GPU, which exchange activations
    assert parameters(few, parallel, "first") == 20 * (layer - 8192 * 128) + table


def test_parameters_of_other_models():
    """GPT-2 of 124 million: LayerNorm, biases, learned positions, tied embeddings, no gate."""
    gpt = ModelShape(
        layers=12, hidden=768, ffn=3072, heads=12, kv_heads=12, head_dim=64, vocabulary=50257, vocabulary_multiple=1,
        gated=False, tied=True, layer_norm=True, bias=True, positions=1024,
    )  # fmt: skip
    assert parameters(gpt, ALONE, "only") == 124_439_808
    qwen = ModelShape(  # 2.5 of 7B: biases of q, k and v only
        layers=28, hidden=3584, ffn=18944, heads=28, kv_heads=4, head_dim=128, vocabulary=152064, qkv_bias=True
    )
    assert parameters(qwen, ALONE, "only") == 7_615_616_512
    normed = replace(LLAMA_7B, qk_norm=True)
    assert parameters(normed, ALONE, "only") == 6_738_415_616 + 32 * 2 * 128


def test_layer_norm_keeps_what_torch_saves():
    torch = pytest.importorskip("torch")
    hidden, saved = 64, {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    norm = torch.nn.LayerNorm(hidden)
    weight = torch.nn.Parameter(torch.randn(8, hidden))
    constants = {t.untyped_storage().data_ptr() for t in (*norm.parameters(), weight)}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = torch.nn.functional.linear(norm(torch.randn(16, hidden, requires_grad=True)), weight)
    assert y.requires_grad
    one = sum(size for place, (size, _) in saved.items() if place not in constants) / 16
    rms = replace(LLAMA_7B, hidden=hidden, element_bytes=4)
    for fused in (False, True):
        layout = replace(ALONE, fused_kernels=fused)
        bytes_ = [estimate(replace(rms, layer_norm=other), layout, 2).activations // 64 for other in (False, True)]
        counted = (2 * hidden * 4 + 4) if fused else (8 * hidden + 4 * hidden + 4)
        assert bytes_[1] - bytes_[0] == 2 * (one - counted)


def test_weights_gradients_and_optimizer():
    """18 bytes a parameter in all for bf16, of which 12 are shared out by the distributed optimizer; 16 for fp32."""
    number = parameters(LLAMA_7B, ALONE, "only")
    found = estimate(LLAMA_7B, ALONE, 2)
    assert (found.weights, found.gradients, found.optimizer) == (2 * number, 4 * number, 12 * number)
    pool = estimate(LLAMA_7B, replace(ALONE, ranks=64), 2)
    assert (pool.weights, pool.gradients, pool.optimizer) == (2 * number, 4 * number, 12 * number // 64)
    plain = estimate(LLAMA_7B, replace(ALONE, ranks=64, distributed_optimizer=False), 2)
    assert plain.optimizer == 12 * number
    single = estimate(replace(LLAMA_7B, element_bytes=4), ALONE, 2)
    assert (single.weights, single.gradients, single.optimizer) == (4 * number, 4 * number, 8 * number)


@pytest.mark.parametrize(
    ("change", "layout", "expected"),
    [
        # 2 norms x (2 x 4096 x 2 + 4), attention (2 + 2) x 4096 x 2 + 32 x 4, MLP 3 x 11008 x 2
        ({}, {}, 32776 + 32896 + 66048),
        ({"element_bytes": 4}, {}, 65544 + 65664 + 132096),
        ({"kv_heads": 8}, {}, 32776 + (2 * 4096 + 2 * 1024) * 2 + 128 + 66048),
        ({}, {"tensor_parallel": 4}, 32776 + 32896 // 4 + 66048 // 4),
        ({}, {"tensor_parallel": 4, "sequence_parallel": True}, 8 + 32768 // 4 + 32896 // 4 + 66048 // 4),
        ({}, {"fused_kernels": False}, 2 * (10 * 4096 + 4) + 32896 + 4 * 128 * 2 + 110080),
        ({"gated": False}, {}, 32776 + 32896 + 44032),
        ({"qk_norm": True, "kv_heads": 8}, {}, 32776 + (2 * 40 + 40) * 128 * 2 + 128 + 4 * 40 + 66048),
        ({"positions": 8}, {"fused_kernels": False}, 2 * (10 * 4096 + 4) + 32896 + 110080),
    ],
)
def test_a_layer_keeps(change, layout, expected):
    assert layer_bytes_per_token(replace(LLAMA_7B, **change), replace(ALONE, **layout)) == expected


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_layer_of_torch_saves_what_is_counted(kind):
    """Storages that a layer of plain torch saves for backward on CPU, each counted once, without parameters."""
    torch = pytest.importorskip("torch")
    functional, dtype = torch.nn.functional, getattr(torch, kind)
    hidden, heads, kv, size, ffn, tokens = 64, 4, 2, 16, 96, 32

    def weight(*shape):
        return torch.randn(shape, dtype=dtype, requires_grad=True)

    norms = weight(hidden), weight(hidden)
    qkv, proj = weight((heads + 2 * kv) * size, hidden), weight(hidden, heads * size)
    up, down = weight(2 * ffn, hidden), weight(hidden, ffn)
    angles = torch.randn(tokens, 1, size)
    constants = {t.untyped_storage().data_ptr() for t in (*norms, qkv, proj, up, down)}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constants:
            saved[storage.data_ptr()] = (storage.nbytes(), tensor)  # kept alive, so that no address comes twice
        return tensor

    def rotated(x):
        low, high = x.chunk(2, -1)
        return x * angles.cos().to(dtype) + torch.cat([-high, low], -1) * angles.sin().to(dtype)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        x = weight(tokens, hidden)
        mixed = functional.linear(functional.rms_norm(x, (hidden,), norms[0]), qkv).unflatten(1, (-1, size))
        q, k, v = mixed.split([heads, kv, kv], dim=1)
        q, k, v = (t.transpose(0, 1)[None] for t in (rotated(q), rotated(k), v.clone()))
        out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]
        y = x + functional.linear(out[0].transpose(0, 1).flatten(1), proj)
        gate, other = functional.linear(functional.rms_norm(y, (hidden,), norms[1]), up).chunk(2, -1)
        z = y + functional.linear(functional.silu(gate) * (other + 0.0), down)  # as Megatron has it
    assert z.requires_grad
    model = ModelShape(
        layers=1, hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv, head_dim=size, vocabulary=8,
        element_bytes=4 if kind == "float32" else 2,
    )  # fmt: skip
    counted = layer_bytes_per_token(model, replace(ALONE, fused_kernels=False))
    assert sum(size for size, _ in saved.values()) == counted * tokens


def test_activations_of_micro_batches_in_flight():
    token = layer_bytes_per_token(LLAMA_7B, ALONE)
    assert estimate(LLAMA_7B, ALONE, 8192).activations == 32 * 8192 * token
    piped = replace(ALONE, stages=4)
    first = estimate(LLAMA_7B, piped, 8192)
    assert (first.stage, first.activations, first.logits) == ("first", 4 * 8 * 8192 * token, 0)
    interleaved = estimate(LLAMA_7B, replace(piped, virtual_stages=2), 8192)
    assert interleaved.activations == 6 * 8 * 8192 * token  # 2 x 3 + 4 + 1 = 11 halves in flight
    full = estimate(LLAMA_7B, replace(piped, recompute="full"), 8192)
    assert full.activations == 4 * 8 * 8192 * 4096 * 2
    assert full.working - first.working == 8192 * token
    assert first.working == 8192 * (3 * 11008 + 2 * 4096) * 2  # gradients inside the MLP
    large = replace(LLAMA_7B, vocabulary=2_000_000)
    assert estimate(large, piped, 64).stage == "last"


def test_recompute_of_some_layers():
    token, checkpoint = layer_bytes_per_token(LLAMA_7B, ALONE), 4096 * 2
    full = replace(ALONE, recompute="full", stages=2, virtual_stages=2)  # 8 layers a model part, 4 in flight

    def found(**how):
        return estimate(LLAMA_7B, replace(full, **how), 64)

    flight = most_in_flight(2, 2)
    assert found().activations == flight * 64 * 16 * checkpoint
    assert found(recompute_layers=3).activations == flight * 64 * (6 * checkpoint + 10 * token)
    assert found(recompute_layers=99).activations == found().activations
    none = replace(full, recompute="none")
    assert found(recompute_layers=0).activations == estimate(LLAMA_7B, none, 64).activations
    assert found(recompute_layers=0).working == estimate(LLAMA_7B, none, 64).working
    assert found(recompute_group=3).activations == flight * 64 * 6 * checkpoint  # 3, 3 and 2 layers, twice
    assert found(recompute_group=3).working - found().working == 2 * 64 * token


def test_recompute_of_attention_keeps_q_and_k_twice():
    few = replace(LLAMA_7B, kv_heads=8)
    plain, again = (estimate(few, replace(ALONE, recompute_attention=what), 64).activations for what in (False, True))
    assert again - plain == 32 * 64 * (4096 + 1024) * 2


def test_host_memory_makes_pieces_longer():
    parallel = replace(ALONE, ranks=8)
    token = layer_bytes_per_token(LLAMA_7B, parallel)
    plain = estimate(LLAMA_7B, parallel, 8192, longest=60_000)
    arena = 32 * token * 1000
    leaving = estimate(LLAMA_7B, parallel, 8192, longest=60_000, arena=arena)
    assert (leaving.host, leaving.activations) == (arena, plain.activations)
    row, copies = (3 * 11008 + 2 * 4096) * 2, np.ceil(9192 * token * (1 - 8192 / 9192) * 32 / 30)
    assert leaving.working == 9192 * row + int(copies)
    endless = estimate(LLAMA_7B, parallel, 8192, longest=60_000, arena=1 << 60)
    assert endless.working == 60_000 * row + int(np.ceil(60_000 * token * (1 - 8192 / 60_000) * 32 / 30))
    assert estimate(LLAMA_7B, parallel, 8192, longest=500, arena=1 << 60).working == plain.working


def test_other_optimizers_and_gradients():
    number = parameters(LLAMA_7B, ALONE, "only")
    found = estimate(LLAMA_7B, replace(ALONE, optimizer_bytes=4, gradient_bytes=2), 2)
    assert (found.gradients, found.optimizer) == (2 * number, 4 * number)


def test_activations_that_a_profile_measured():
    cost = CostModel(load_profile("bytescale"), 32)
    found = estimate(LLAMA_7B, ALONE, 8192, cost=cost, measured=True)
    assert found.activations == 32 * 8192 * 64761
    assert 64760 < cost.layer_profile.activation_per_token < 64761
    full = estimate(LLAMA_7B, replace(ALONE, recompute="full"), 8192, cost=cost, measured=True)
    assert full.activations == 32 * 8192 * 4096 * 2  # a layer's input follows from the shape


def measured_profile(per_token, constant=0.0):
    """A profile that says it was measured, with a layer that keeps that."""
    made = load_profile("bytescale")
    layer = replace(made.layer(), activation_per_token=float(per_token), activation_constant=float(constant))
    return replace(made, software="some", default_layer="own", layers={"own": layer})


def test_constant_bytes_of_a_measured_layer():
    """Once for each layer and micro-batch in flight; of layers that run again, for those of one group at a time."""
    token, piped = layer_bytes_per_token(LLAMA_7B, ALONE), replace(ALONE, stages=4)
    without, with_ = (CostModel(measured_profile(token, bytes_), 8) for bytes_ in (0, 999))

    def more(layout):
        found = [estimate(LLAMA_7B, layout, 64, cost=cost, measured=True) for cost in (without, with_)]
        return found[1].activations - found[0].activations, found[1].working - found[0].working

    assert more(piped) == (4 * 8 * 999, 0)
    assert more(replace(piped, recompute="full", recompute_group=3)) == (0, 3 * 999)
    assert more(replace(piped, recompute="full", recompute_layers=3)) == (4 * 5 * 999, 999)


def test_measured_bytes_that_are_of_this_model():
    token = layer_bytes_per_token(LLAMA_7B, ALONE)

    def used(per_token, constant=0.0):
        return choose(LLAMA_7B, ALONE, 100, CostModel(measured_profile(per_token, constant), 32))

    assert used(1.0499 * token).measured
    assert used(0.9501 * token).measured
    assert not used(1.0501 * token).measured
    assert not used(0.9499 * token).measured
    assert used(0.945 * token, token).measured  # 1 % of 100 tokens
    assert not used(token, 6 * token).measured
    assert used(token).note is None
    assert used(2 * token).note.startswith(
        f"a layer keeps {token * 100 / 2**20:.2f} MiB of 100 tokens by the count, which is used, and "
        f"{token * 200 / 2**20:.2f} MiB as the profile"
    )
    assert not choose(LLAMA_7B, ALONE, 100, CostModel(load_profile("bytescale"), 32)).measured


def plan_flags(folder, per_token, **shape):
    """Flags of `plan --memory` for a 7B model, and a profile that measured a layer to keep ``per_token``."""
    measured_profile(per_token).save(folder / "own.json")
    asked = {"memory": True, "hidden": 4096, "ffn": 11008, "vocab": 32000, **shape}
    heads = {"heads": 32, "kv_heads": 32} if asked["hidden"] == 4096 else {"heads": 2, "kv_heads": 2}
    return PlanFlags(
        lengths="byted",
        ranks=8,
        tokens_per_rank="8K",
        context="32K",
        batch_tokens="1M",
        profile=str(folder / "own.json"),
        estimate=MemoryFlags(**asked),
        **heads,
    )


def test_plan_compares_its_shape_with_the_measured_layer(tmp_path):
    token = layer_bytes_per_token(LLAMA_7B, ALONE)
    flags = plan_flags(tmp_path, 1.02 * token)
    text = render_memory(flags, flags.options(), [])
    assert f"  {'activations':<14}{32 * 8192 * np.ceil(1.02 * token) / 2**30:>10.2f}\n" in text
    assert "Activations: measured by the profile." in text
    flags = plan_flags(tmp_path, token / 64)
    text = render_memory(flags, flags.options(), [])
    assert f"  {'activations':<14}{32 * 8192 * token / 2**30:>10.2f}\n" in text
    assert "The profile's activations are not used: a layer keeps 1.00 GiB of 8,192 tokens by the count" in text
    assert "Activations: counted from the model's shape." in text


def test_small_sizes_are_said(tmp_path):
    assert [sized(number) for number in (0, 1, 2**20 - 1, 2**20, 2**30 - 1, 2**30)] == [
        "0 bytes", "1 byte", "1,048,575 bytes", "1.00 MiB", "1024.00 MiB", "1.00 GiB",
    ]  # fmt: skip
    small = {"hidden": 64, "ffn": 64, "vocab": 8, "reserve_gib": 0.0}
    flags = replace(plan_flags(tmp_path, 1, **small, device_gib=0.001), tokens_per_rank="64", layers_per_stage=1)
    with pytest.raises(ConfigError, match=r"would need [\d,]+ bytes \(weights [\d,]+ bytes, .* and has 10,737 bytes:"):
        require_memory(replace(flags, estimate=replace(flags.estimate, device_gib=1e-5)), flags.options())
    require_memory(flags, flags.options())
    text = render_memory(flags, flags.options(), [])
    assert text.startswith("memory of a GPU, MiB\n")
    assert " of 1.02\n" in text
    with pytest.raises(ConfigError, match="--host-gib is 1e-12, less than a byte: give more, or 0 for none"):
        replace(flags, offload=True, host_gib=1e-12).options()
    assert replace(flags, offload=True, host_gib=2.0**-30).options().host_bytes == 1


def test_buffers_of_attention():
    """7B: a row of keys and values has 2 x 32 x 128 = 8192 elements, of queries 4096."""
    pool = replace(ALONE, ranks=8)
    walk = estimate(LLAMA_7B, pool, 8192, longest=65536).attention
    assert walk == 2 * 8192 * 8192 * (2 + 4) + 8192 * 4096 * 4
    gather = estimate(LLAMA_7B, replace(pool, exchange="gather"), 8192, longest=65536).attention
    assert gather == (65536 - 4096) * 8192 * 6
    window = estimate(LLAMA_7B, replace(pool, window=4096), 8192, longest=65536).attention
    assert window == 2 * 4095 * 8192 * 6
    wide = estimate(LLAMA_7B, replace(pool, window=60_000), 8192, longest=65536).attention
    assert wide == gather
    heads = estimate(LLAMA_7B, replace(pool, exchange="heads"), 8192, longest=65536).attention
    assert heads == 8192 * (2 * 4096 + 8192) * (2 * 32 + 4)
    assert estimate(LLAMA_7B, pool, 8192, longest=8192).attention == 0
    assert estimate(LLAMA_7B, ALONE, 8192).attention == 0
    few = estimate(replace(LLAMA_7B, kv_heads=8), pool, 8192, longest=65536).attention
    assert few == 2 * 8192 * 2048 * 6 + 8192 * 4096 * 4


def test_logits_of_a_chunk():
    assert chunk_rows(32000) == 2048  # 2097 fit, multiples of 64 are used
    found = estimate(LLAMA_7B, ALONE, 8192).logits
    assert found == 2048 * 32000 * 8 + 32000 * 4096 * 6 + 8192 * 4096 * 2
    assert estimate(LLAMA_7B, ALONE, 1024).logits == 1024 * 32000 * 8 + 1024 * 4096 * 2  # one chunk
    whole = estimate(LLAMA_7B, replace(ALONE, loss_chunk=0), 8192).logits
    assert whole == 8192 * 32000 * 8 + 8192 * 4096 * 2
    asked = estimate(LLAMA_7B, replace(ALONE, loss_chunk=100), 8192).logits
    assert asked == 100 * 32000 * 8 + 32000 * 4096 * 6 + 8192 * 4096 * 2


def test_chunks_are_those_of_the_loss():
    loss = pytest.importorskip("megatron_hdp.loss", reason="needs torch")
    assert loss.CHUNK_BYTES == CHUNK_BYTES
    for vocabulary in (1, 999, 32000, 128256, 1 << 20, 1 << 30):
        assert loss.chunk_rows(vocabulary) == chunk_rows(vocabulary)


def test_what_is_needed_at_a_time_is_the_peak():
    found = estimate(LLAMA_7B, replace(ALONE, ranks=8, reserve_bytes=7), 8192, longest=65536)
    kept = found.weights + found.gradients + found.optimizer + found.activations + 7
    assert found.device == kept + max(found.working + found.attention, found.logits)
    assert found.host == 0


def test_offload_needs_room_for_one_layer_and_host_memory():
    cost = CostModel(load_profile("bytescale"), 32, layer="figure-21")
    lengths = np.array([60_000, 30_000, 9000, 500])
    made = plan(lengths, 8, 8192, cost=cost, offload=True)
    assert made.offload.max() > 0
    parallel = replace(ALONE, ranks=8)
    plain, leaving = (estimate(LLAMA_7B, parallel, 8192, longest=60_000, cost=cost, plan=p) for p in (None, made))
    assert leaving.host == host_peaks(made, cost).max() > 0
    assert leaving.activations == plain.activations  # what stays is never more than the capacity
    piece = int((2 * made.chunk_tokens).max())
    assert piece > 8192
    row = (3 * 11008 + 2 * 4096) * 2
    share = made.offload.max() * 32 / 30  # of the layers that give
    assert leaving.working == piece * row + int(np.ceil(piece * layer_bytes_per_token(LLAMA_7B, parallel) * share))


def test_the_largest_capacity_that_fits():
    parallel = replace(ALONE, ranks=64, reserve_bytes=4 * GIB)
    for pad in (2, 16):
        most = largest_capacity(LLAMA_7B, parallel, 80 * GIB, pad_multiple=pad)
        assert most % pad == 0
        assert estimate(LLAMA_7B, parallel, most).device <= 80 * GIB < estimate(LLAMA_7B, parallel, most + pad).device
    assert largest_capacity(LLAMA_7B, parallel, 20 * GIB) == 0


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ({"hidden": 0}, {}, "hidden is 0"),
        ({"element_bytes": 8}, {}, "element_bytes is 8"),
        ({}, {"tensor_parallel": 3}, "tensor_parallel is 3, which does not divide 32 heads"),
        ({}, {"stages": 40}, "40 stages of 1 parts, and 32 layers"),
        ({}, {"ranks": 0}, "must all be at least 1"),
    ],
)
def test_shapes_that_cannot_be(model, layout, message):
    with pytest.raises(ConfigError, match=message):
        estimate(replace(LLAMA_7B, **model), replace(ALONE, **layout), 8192)


def test_needs_no_torch():
    code = "import sys\nsys.modules['torch'] = sys.modules['megatron'] = None\nimport megatron_hdp.memory"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
