"""The adapters of optional packages: stand-ins with the real signatures of several versions, computed in float64.

The stand-ins know nothing of `Segments`: they take cumulative lengths and windows that end at the last row and key, as
the packages' own documentation has them, and check what a real kernel would refuse.
"""

import inspect
import math
import sys
import types

import pytest
import torch
from kernel_signatures import ENGINE, FLASH_2, FLASH_2_OLD, FLASH_3, FLASH_4
from test_kernels import KINDS, errors, expected, results, tensors
from torch import Tensor

from megatron_hdp.attention.kernels import Segments, binding, flash_attn, pick_kernel, transformer_engine
from megatron_hdp.attention.kernels.varlen import packing
from megatron_hdp.errors import ConfigError


def with_signature(arguments: str, body):
    """A function with these arguments, those that end in = optional, that calls ``body`` with what was given."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(name.rstrip("="), kind, default="default" if name.endswith("=") else inspect.Parameter.empty)
        for name in arguments.split()
    ]
    signature = inspect.Signature(parameters)

    def function(*args, **kwargs):
        return body(signature.bind(*args, **kwargs).arguments)

    function.__signature__ = signature
    return function


def blocks(q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, left: int, right: int, scale: float):
    """Rows, keys and scores [H, S, K] of every segment; a negative window is no limit."""
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert cu_q[-1] == len(q)
    assert cu_k[-1] == len(k)
    assert q.shape[-1] % 8 == 0
    for i in range(len(cu_q) - 1):
        rows, keys = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        size_q, size_k = rows.stop - rows.start, keys.stop - keys.start
        wide = k[keys].double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = torch.einsum("shd,khd->hsk", q[rows].double(), wide) * scale
        column = torch.arange(size_k)
        last = torch.arange(size_q)[:, None] + size_k - size_q
        hidden = ((column < last - left) & (left >= 0)) | ((column > last + right) & (right >= 0))
        yield rows, keys, scores.masked_fill(hidden, -math.inf)


def flash_forward(q, k, v, *window_and_lengths):
    out, lse_HT = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[1], len(q), dtype=torch.float32)
    for rows, keys, scores in blocks(q, k, *window_and_lengths):
        wide = v[keys].double().repeat_interleave(q.shape[1] // k.shape[1], 1)
        out[rows] = torch.einsum("hsk,khd->shd", scores.softmax(-1), wide).to(q.dtype)
        lse_HT[:, rows] = scores.logsumexp(-1).float()
    return out, lse_HT


def flash_backward(dout, q, k, v, out, lse_HT, *window_and_lengths):
    assert lse_HT.shape == (q.shape[1], len(q))
    assert lse_HT.dtype == torch.float32
    assert lse_HT.is_contiguous()
    scale, group = window_and_lengths[-1], q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v))
    for rows, keys, scores in blocks(q, k, *window_and_lengths):
        weights = (scores - lse_HT[:, rows, None].double()).exp()
        dout_, out_ = dout[rows].double(), out[rows].double()
        wide_k, wide_v = (x[keys].double().repeat_interleave(group, 1) for x in (k, v))
        delta = (dout_ * out_).sum(-1).T[..., None]
        dscores = weights * (torch.einsum("shd,khd->hsk", dout_, wide_v) - delta) * scale
        dq[rows] = torch.einsum("hsk,khd->shd", dscores, wide_k)
        dk[keys] = torch.einsum("hsk,shd->khd", dscores, q[rows].double()).unflatten(1, (-1, group)).sum(2)
        dv[keys] = torch.einsum("hsk,shd->khd", weights, dout_).unflatten(1, (-1, group)).sum(2)
    return tuple(gradient.to(x.dtype) for gradient, x in zip((dq, dk, dv), (q, k, v)))


def window_of(given: dict) -> tuple[int, int]:
    """The window as flash-attn 2 and 3 understand it; 4 says None for no limit."""
    left, right = given.get("window_size") or (given["window_size_left"], given["window_size_right"])
    left, right = (-1 if side is None else side for side in (left, right))
    return left, 0 if given.get("causal", given.get("is_causal")) else right


def lengths_of(given: dict) -> tuple:
    cu_q, cu_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
    assert given["max_seqlen_q"] >= cu_q.diff().max()
    assert given["max_seqlen_k"] >= cu_k.diff().max()
    return (cu_q, cu_k, *window_of(given), given["softmax_scale"])


def fake_2_forward(given):
    assert (given["dropout_p"], given["softcap"], given["return_softmax"]) == (0.0, 0.0, False)
    out, lse_HT = flash_forward(given["q"], given["k"], given["v"], *lengths_of(given))
    return out, lse_HT, torch.empty(0), torch.zeros(2)


def fake_backward(given):
    """Of versions 2 and 3: into the buffers."""
    assert given.get("alibi_slopes") is None
    assert given["deterministic"] is torch.are_deterministic_algorithms_enabled()
    rows = (given[name] for name in ("dout", "q", "k", "v", "out", "softmax_lse"))
    for name, gradient in zip(("dq", "dk", "dv"), flash_backward(*rows, *lengths_of(given))):
        assert given[name].is_contiguous()
        given[name].copy_(gradient)
    return torch.empty(0)


def fake_3_forward(given):
    assert all(given.get(name) is None for name in ("k_new", "qv", "page_table", "q_descale", "out"))
    out, lse_HT = flash_forward(given["q"], given["k"], given["v"], *lengths_of(given))
    return out, lse_HT, torch.empty(0), torch.empty(0)


def fake_4_forward(given):
    assert given["return_lse"] is True
    assert {given["window_size_left"], given["window_size_right"]} <= {None, *range(1000)}, "-1 is a limit here"
    return (*flash_forward(given["q"], given["k"], given["v"], *lengths_of(given)), None, None)


def fake_4_backward(given):
    assert given["deterministic"] is torch.are_deterministic_algorithms_enabled()
    rows = (given[name] for name in ("dout", "q", "k", "v", "out", "lse"))
    return flash_backward(*rows, *lengths_of(given))


def engine_lengths(given) -> tuple:
    causal = given["attn_mask_type"] == "padding_causal"
    assert causal or given["attn_mask_type"] == "padding"
    assert given["window_size"] == ((-1, 0) if causal else (-1, -1))
    assert given["qkv_layout"] == "thd_thd_thd"
    assert (given["fused_attention_backend"], given["dropout"], given["attn_bias_type"]) == (
        "arbitrary",
        0.0,
        "no_bias",
    )
    assert given["fake_dtype"] == given["q"].dtype
    for side, padded in (("cu_seqlens_q", "max_seqlen_q"), ("cu_seqlens_kv", "max_seqlen_kv")):
        assert torch.equal(given[side], given[f"{side}_padded"])
        assert given[padded] >= given[side].diff().max()
    return given["cu_seqlens_q"], given["cu_seqlens_kv"], *given["window_size"], given["attn_scale"]


def engine_forward(given):
    assert given["is_training"] is True
    out, lse_HT = flash_forward(given["q"], given["k"], given["v"], *engine_lengths(given))
    return out, [lse_HT.T.contiguous()[..., None], torch.zeros(2, dtype=torch.int64)]


def engine_backward(version: str):
    def backward(given):
        assert (given.get("dqkv_dtype") == "engine float32") == (version == "2.0")
        assert version == "2.0" or (given["o_format"], given["do_format"], given["dqkv_layout"]) == (
            *("thd", "thd"),
            "thd_thd_thd",
        )
        assert given["deterministic"] is torch.are_deterministic_algorithms_enabled()
        stats, state = given["aux_ctx_tensors"]
        assert stats.shape == (*given["q"].shape[:2], 1)
        assert stats.is_contiguous()
        assert state.shape == (2,)
        rows = (given[name] for name in ("d_o", "q", "k", "v", "o"))
        return (*flash_backward(*rows, stats[..., 0].T.contiguous(), *engine_lengths(given)), None, None)

    return backward


def put(monkeypatch, name: str, **contents) -> None:
    module = types.ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def install(monkeypatch, package: str, version: str):
    """Put a stand-in in place; the kernel that uses it."""
    if package == "2":
        forward, backward = FLASH_2[version]
        entries = "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"
        functions = with_signature(forward, fake_2_forward), with_signature(backward, fake_backward)
        put(monkeypatch, "flash_attn.flash_attn_interface", **dict(zip(entries, functions)))
        return flash_attn.FLASH_ATTN_2
    if package == "3":
        forward, backward = FLASH_3[version]
        entries = "_flash_attn_forward", "_flash_attn_backward"
        functions = with_signature(forward, fake_3_forward), with_signature(backward, fake_backward)
        put(monkeypatch, "flash_attn_interface", **dict(zip(entries, functions)))
        return flash_attn.FLASH_ATTN_3
    if package == "4":
        forward, backward = FLASH_4[version]
        entries = "_flash_attn_fwd", "_flash_attn_bwd"
        functions = with_signature(forward, fake_4_forward), with_signature(backward, fake_4_backward)
        put(monkeypatch, "flash_attn.cute.interface", **dict(zip(entries, functions)))
        return flash_attn.FLASH_ATTN_4
    forward, backward = ENGINE[version]
    put(
        monkeypatch,
        "transformer_engine.pytorch.cpp_extensions.fused_attn",
        fused_attn_fwd=with_signature(forward, engine_forward),
        fused_attn_bwd=with_signature(backward, engine_backward(version)),
        FusedAttnBackend={"F16_arbitrary_seqlen": "arbitrary"},
    )
    put(monkeypatch, "transformer_engine.pytorch.constants", TE_DType={torch.float32: "engine float32"})
    return transformer_engine.TRANSFORMER_ENGINE


VERSIONS = [(package, v) for package, known in zip("234", (FLASH_2, FLASH_3, FLASH_4)) for v in known]
VERSIONS += [("engine", v) for v in ENGINE]


CASES = [
    (package, version, kind)
    for package, version in VERSIONS
    for kind, segments in KINDS.items()
    if kind not in ("window 2", "window 7", "window 70", "window 71")
    and (package != "engine" or segments.left is None)  # its windows go to torch's kernel
]


@pytest.mark.parametrize(("package", "version", "kind"), CASES)
def test_adapters_against_float64(monkeypatch, package, version, kind):
    segments = KINDS[kind]
    kernel = install(monkeypatch, package, version)
    for heads in ((4, 2, 16), (3, 1, 20)):
        inputs = tensors(segments, *heads, dtype=torch.float32)
        got = results(kernel, *inputs, segments)
        want = expected(*inputs, segments)
        assert [x.shape for x in got] == [x.shape for x in want]
        assert errors(got, want).max() < 1e-5


@pytest.mark.parametrize(("package", "version"), VERSIONS)
def test_adapters_take_final_results_and_the_deterministic_switch(monkeypatch, package, version):
    """Two blocks of keys with the final output and log-sum-exp, as in a ring; the stand-ins check the switch."""
    kernel = install(monkeypatch, package, version)
    rows = (40, 9)
    dout, q, k, v = tensors(Segments(rows, (50, 30)), 4, 2, 16, dtype=torch.float32)
    out, lse, *want = expected(dout, q, k, v, Segments(rows, (50, 30)))
    first = torch.cat([torch.arange(0, 20), torch.arange(50, 61)])
    rest = torch.cat([torch.arange(20, 50), torch.arange(61, 80)])
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    torch.use_deterministic_algorithms(True)
    try:
        for index, segments in ((first, Segments(rows, (20, 11))), (rest, Segments(rows, (30, 19)))):
            final = out.float(), lse.float()
            dq_, dk[index], dv[index] = kernel.backward(dout, q, k[index], v[index], *final, segments, scale=0.17)
            dq += dq_
    finally:
        torch.use_deterministic_algorithms(False)
    assert errors([dq, dk, dv], want).max() < 1e-5


def test_windows_are_never_negative():
    """A flash kernel reads a negative window as none at all."""
    assert packing(Segments((9,), (12,), 2, None), torch.device("cpu")).left == 5
    with pytest.raises(AssertionError, match="a window of 2"):
        packing(Segments((9,), (6,), 2, None), torch.device("cpu"))


def test_another_signature_makes_a_package_unusable(monkeypatch):
    kernel = install(monkeypatch, "2", "2.7.0")
    assert flash_attn.unbound(kernel) == ""
    module = sys.modules["flash_attn.flash_attn_interface"]
    flash_attn._bound_2.cache_clear()
    monkeypatch.setattr(module, "_flash_attn_varlen_forward", with_signature(FLASH_2_OLD[0], None))
    assert "_flash_attn_varlen_forward has no argument window_size_left" in flash_attn.unbound(kernel)
    monkeypatch.setattr(module, "_flash_attn_varlen_forward", with_signature("sinks " + FLASH_2["2.7.0"][0], None))
    assert "wants sinks, which this version does not know" in flash_attn.unbound(kernel)
    monkeypatch.delattr(module, "_flash_attn_varlen_forward")
    assert "there is no flash_attn.flash_attn_interface._flash_attn_varlen_forward" in flash_attn.unbound(kernel)
    put(monkeypatch, "flash_attn_interface", _flash_attn_forward=with_signature("q k v softmax_scale causal", None))
    assert "has no argument cu_seqlens_q" in flash_attn.unbound(flash_attn.FLASH_ATTN_3)
    install(monkeypatch, "engine", "2.0")
    source = sys.modules["transformer_engine.pytorch.cpp_extensions.fused_attn"]
    old = ENGINE["2.0"][0].replace("fake_dtype", "qkv_dtype")
    monkeypatch.setattr(source, "fused_attn_fwd", with_signature(old, None))
    assert "has no argument fake_dtype" in transformer_engine.unbound()


def test_absent_and_broken_packages_are_told_apart(monkeypatch, tmp_path):
    for name in ("flash_attn_interface", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    missing = tmp_path / "flash_attn_interface.py"
    with pytest.raises(binding.UnusableError, match=r"^nothing_like_it is not installed$"):
        binding.module("nothing_like_it.inside", "nothing_like_it")
    missing.write_text("import a_module_that_is_absent\n")
    assert "cannot be imported: No module named 'a_module_that_is_absent'" in flash_attn.unbound(
        flash_attn.FLASH_ATTN_3
    )
    missing.write_text("raise OSError('libcudart.so.11: cannot open shared object file')\n" + "#" * 40)
    assert "OSError: libcudart.so.11" in flash_attn.unbound(flash_attn.FLASH_ATTN_3)


def test_operators_of_torch_are_bound_by_their_schema():
    """flash-attn registers its entries with torch: their signature is in the schema, and gradients are mutated."""

    @torch.library.custom_op("hdp_test::backward_like", mutates_args=("dq",))
    def backward_like(dout: Tensor, scale: float, dq: Tensor | None = None, flag: bool = False) -> Tensor:
        dq.copy_(dout * scale)
        return torch.empty(0)

    module = types.ModuleType("holder")
    needs = binding.own_names("dout", "scale", "dq")
    for function in (backward_like, torch.ops.hdp_test.backward_like, torch.ops.hdp_test.backward_like.default):
        module.entry = function
        bound = binding.bind(module, "entry", needs, ("flag", "other"))
        dq = torch.zeros(3)
        bound(dout=torch.ones(3), scale=2.0, dq=dq, flag=True, other=1)
        assert dq.tolist() == [2.0] * 3
        with pytest.raises(binding.UnusableError, match="no argument window"):
            binding.bind(module, "entry", needs | binding.own_names("window"))


def pretend_gpu(monkeypatch, capability: tuple[int, int]) -> torch.device:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr(torch.version, "hip", None)
    return torch.device("cuda")


def test_the_best_installed_kernel_is_picked(monkeypatch):
    for name in ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, None)  # as if absent
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    bf16 = torch.bfloat16

    def picked(capability, dtype=bf16, head_dim=128):
        return pick_kernel(pretend_gpu(monkeypatch, capability), dtype, head_dim).name

    assert picked((9, 0)) == picked((8, 0)) == "torch_cuda_flash"
    install(monkeypatch, "engine", "2.18")
    assert (picked((9, 0)), picked((8, 0))) == ("transformer_engine", "torch_cuda_flash")
    assert picked((9, 0), head_dim=192) == "torch_cuda_flash"
    install(monkeypatch, "2", "2.8.4")
    assert picked((9, 0)) == picked((8, 0)) == picked((12, 0)) == "flash_attn_2"
    install(monkeypatch, "4", "4.0.0b27")
    assert (picked((10, 0)), picked((8, 0)), picked((12, 0))) == ("flash_attn_4", "flash_attn_2", "flash_attn_2")
    assert picked((10, 0), head_dim=256) == "flash_attn_2"
    install(monkeypatch, "3", "2.8.4")
    assert (picked((9, 0)), picked((10, 0))) == ("flash_attn_3", "flash_attn_4")
    assert picked((9, 0), torch.float32) == picked((9, 0), head_dim=320) == picked((7, 5)) == "reference"
    with pytest.raises(ConfigError, match=r"(?s)flash_attn_2 takes fp16 and bf16.*reference takes floating"):
        picked((9, 0), torch.int64)
