"""Block kernels over packed segments against float64, their launches, and which one is picked."""

import math
import random

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_hdp import doctor
from megatron_hdp.attention.kernels import (
    Segments,
    accumulate_dtype,
    available_kernels,
    batching,
    chosen_kernel,
    named_kernel,
    pick_kernel,
    plain,
)
from megatron_hdp.attention.kernels.torch_cuda import TORCH_CUDA_FLASH
from megatron_hdp.errors import ConfigError

CPU = torch.device("cpu")
NAMES = ["reference", "torch_cpu_flash"]
SCALE = 0.17  # not the usual scale of any head size, so that ignoring the argument would show
LENGTHS = (1, 70, 2, 3, 300, 7, 31, 69, 3)


def causal(lengths, window: int | None = None) -> Segments:
    """Causal segments; a window counts the query itself."""
    return Segments(tuple(lengths), tuple(lengths), None if window is None else window - 1, 0)


KINDS = {
    "causal": causal(LENGTHS),
    "causal, one": causal((300,)),
    "causal, equal": causal((31,) * 5),
    "causal, one padded batch": causal((29, 32, 30, 31)),
    **{f"window {w}": causal(LENGTHS, w) for w in (1, 2, 7, 64, 70, 71, 299, 300, 301)},
    "window, tiles": causal((330, 300, 3), 90),
    "full": Segments((1, 1, 31, 70, 300, 3), (1, 7, 70, 31, 2, 300)),
    "full, equal": Segments((31, 7, 31, 31), (70, 3, 70, 70)),
    "edge, window 1": Segments((300, 31, 70, 31), (300, 31, 70, 31), 0, None),
    "edge": Segments((300, 31, 70, 31, 1), (303, 34, 73, 34, 4), 50, None),
    "edge, wider than long": Segments((31, 70), (41, 80), 100, None),
    "none": Segments((), (), None, 0),
}
HEADS = [(1, 1, 8), (6, 3, 20), (2, 1, 64), (16, 4, 96), (4, 4, 128), (8, 1, 256)]
"""Query heads, key/value heads, head size."""


def tensors(segments: Segments, heads: int, kv: int, dim: int, seed: int = 0, dtype=torch.float64) -> list[Tensor]:
    """dout, q, k and v."""
    generator = torch.Generator().manual_seed(seed)
    rows, keys = sum(segments.queries), sum(segments.keys)
    shapes = (rows, heads), (rows, heads), (keys, kv), (keys, kv)
    return [torch.randn(*shape, dim, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def visible(segments: Segments, queries: int, keys: int) -> Tensor:
    """[queries, keys], word by word as `Segments` says."""
    return torch.tensor(
        [
            [
                (segments.left is None or row - segments.left <= column)
                and (segments.right is None or column <= row + segments.right)
                for column in range(keys)
            ]
            for row in range(queries)
        ]
    )


def expected(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> list[Tensor]:
    """Output, log-sum-exp and gradients by autograd in float64."""
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    if not segments.queries:
        return [wide[0].detach(), wide[0].detach()[..., 0], *(x.detach() for x in wide)]
    group = q.shape[1] // k.shape[1]
    outs, lses = [], []
    parts = [wide[0].split(segments.queries), *(x.split(segments.keys) for x in wide[1:])]
    for q_, k_, v_ in zip(*parts):
        k_, v_ = (x.repeat_interleave(group, 1) for x in (k_, v_))
        scores = torch.einsum("shd,khd->hsk", q_, k_) * SCALE
        scores = scores.masked_fill(~visible(segments, len(q_), len(k_)), -math.inf)
        outs.append(torch.einsum("hsk,khd->shd", scores.softmax(-1), v_))
        lses.append(scores.logsumexp(-1).T)
    out = torch.cat(outs)
    gradients = torch.autograd.grad(out, wide, dout.double())
    return [out.detach(), torch.cat(lses).detach(), *gradients]


def results(kernel, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> list[Tensor]:
    out, lse = kernel.forward(q, k, v, segments, scale=SCALE)
    return [out, lse, *kernel.backward(dout, q, k, v, out, lse, segments, scale=SCALE)]


def errors(got: list[Tensor], want: list[Tensor]) -> Tensor:
    """Largest error of each result, relative to its largest entry, or to 4: what is left of a gradient that is 0 is
    rounding of terms of that size.
    """
    pairs = [(g.double(), w) for g, w in zip(got, want) if w.numel()]
    return torch.stack(
        [torch.zeros(()).double(), *((g - w).abs().max() / max(float(w.abs().max()), 4) for g, w in pairs)]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_kernel_on_every_kind_of_segments(kind, heads):
    segments = KINDS[kind]
    exact = tensors(segments, *heads)
    for dtype, limit in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        inputs = [x.to(dtype) for x in exact]
        want = expected(*inputs, segments)
        for name in NAMES:
            got = results(named_kernel(name), *inputs, segments)
            assert [x.dtype for x in got] == [dtype, accumulate_dtype(dtype), *[dtype] * 3]
            assert [x.shape for x in got] == [x.shape for x in want]
            assert errors(got, want).max() < limit, name


@pytest.mark.parametrize("seed", range(12))
def test_random_segments_and_windows(seed):
    rng = random.Random(seed)
    heads = rng.choice([(h, g, d) for h in range(1, 17) for g in range(1, h + 1) if h % g == 0 for d in (8, 16)])
    lengths = [rng.randint(1, rng.choice([4, 40, 400])) for _ in range(rng.randint(1, 20))]
    difference = rng.randrange(0, 60)
    window = rng.randint(1, max(lengths))
    for segments in (
        causal(lengths),
        causal(lengths, window),
        Segments(tuple(lengths), tuple(n + difference for n in lengths), window - 1, None),
        Segments(tuple(lengths), tuple(rng.sample(lengths, len(lengths)))),
    ):
        inputs = tensors(segments, *heads, seed)
        want = results(named_kernel("reference"), *inputs, segments)
        assert errors(results(named_kernel("torch_cpu_flash"), *inputs, segments), want).max() < 1e-12


def test_the_plain_kernel_cuts_long_segments(monkeypatch):
    """Tiles of a few rows give what one tile gives."""
    for segments in (KINDS["window 64"], KINDS["full"], KINDS["edge"]):
        inputs = tensors(segments, 2, 1, 8)
        whole = results(named_kernel("reference"), *inputs, segments)
        with monkeypatch.context() as patch:
            patch.setattr(plain, "_TILE_SCORES", 500)
            assert len(list(plain._tiles(segments, 2))) > 2 * len(segments.queries)
            assert errors(results(named_kernel("reference"), *inputs, segments), whole).max() < 1e-13


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["causal", "window 64", "window, tiles", "full", "edge"])
def test_half_precision_is_as_good_as_one_flash_call(dtype, kind):
    """Errors against float64 of the same rounded inputs, at most twice those of torch's flash on one sequence."""
    dim, flash = 64, torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    one = causal((300,))
    inputs = tensors(one, 4, 2, dim, dtype=dtype)
    dout, q, k, v = (x.transpose(0, 1)[None] for x in inputs)
    out, lse = flash(q, k, v, 0.0, True, scale=SCALE)
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients = backward(dout, q, k, v, out, lse, 0.0, True, scale=SCALE)
    alone = errors([x[0].transpose(0, 1) for x in (out, lse, *gradients)], expected(*inputs, one))
    segments = KINDS[kind]
    inputs = tensors(segments, 4, 2, dim, dtype=dtype)
    want = expected(*inputs, segments)
    for name in NAMES:
        got = results(named_kernel(name), *inputs, segments)
        assert got[1].dtype == torch.float32
        assert (errors(got, want) <= 2 * alone + 1e-6).all(), name


@pytest.mark.parametrize("name", NAMES)
def test_blocks_of_a_row_add_up(name):
    """Keys in two parts, merged by log-sum-exp; each part's backward gets the final output and log-sum-exp."""
    kernel, rows, keys = named_kernel(name), (40, 9), (50, 30)
    dout, q, k, v = tensors(Segments(rows, keys), 4, 2, 16)
    want = expected(dout, q, k, v, Segments(rows, keys))
    first = torch.cat([torch.arange(0, 20), torch.arange(50, 61)])
    rest = torch.cat([torch.arange(20, 50), torch.arange(61, 80)])
    parts = [(first, Segments(rows, (20, 11))), (rest, Segments(rows, (30, 19)))]
    done = [kernel.forward(q, k[index], v[index], segments, scale=SCALE) for index, segments in parts]
    lse = torch.logaddexp(done[0][1], done[1][1])
    out = sum(out_ * (lse_ - lse).exp()[..., None] for out_, lse_ in done)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for index, segments in parts:
        dq_, dk[index], dv[index] = kernel.backward(dout, q, k[index], v[index], out, lse, segments, scale=SCALE)
        dq += dq_
    assert errors([out, lse, dq, dk, dv], want).max() < 1e-12


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["causal", "window 64", "full", "edge"])
def test_repeats_are_bit_equal_and_strides_do_not_matter(name, kind):
    segments = KINDS[kind]
    inputs = tensors(segments, 4, 2, 16, dtype=torch.float32)
    again = Segments(segments.queries, segments.keys, segments.left, segments.right)
    first = results(named_kernel(name), *inputs, segments)
    assert all(map(torch.equal, first, results(named_kernel(name), *inputs, again)))
    for strided in ([torch.cat([x, x], dim=-1)[..., :16] for x in inputs], [spread(x) for x in inputs]):
        assert errors(results(named_kernel(name), *strided, again), [x.double() for x in first]).max() < 1e-6
    ones = torch.ones(()).expand(inputs[0].shape)  # the gradient of a sum
    dense = results(named_kernel(name), torch.ones_like(inputs[0]), *inputs[1:], segments)
    assert errors(results(named_kernel(name), ones, *inputs[1:], segments), [x.double() for x in dense]).max() < 1e-6


def spread(x: Tensor) -> Tensor:
    """The same numbers, rows last in memory."""
    return x.permute(2, 1, 0).contiguous().permute(2, 1, 0)


def test_padding_hides_nothing_of_other_segments():
    """NaN and huge numbers in one segment stay there, though it shares a batch with its neighbours."""
    segments = causal((29, 30, 31, 32))
    inputs = tensors(segments, 2, 2, 16)
    clean = results(named_kernel("torch_cpu_flash"), *inputs, segments)
    for value in (math.nan, math.inf, 1e300):
        for x in inputs:
            x[29:59] = value
        got = results(named_kernel("torch_cpu_flash"), *inputs, segments)
        for a, b in zip(got, clean):
            assert torch.equal(a[:29], b[:29])
            assert torch.equal(a[59:], b[59:])


class Watch(TorchDispatchMode):
    """Counts operators, the score area of flash calls, and refuses what would make a GPU wait."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        self.area = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        if name == "_scaled_dot_product_flash_attention_for_cpu":
            half = 2 if len(args) > 4 and args[4] else 1
            self.area += args[0].shape[0] * args[0].shape[2] * args[1].shape[2] // half
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "item"), f"{name} waits for the device"
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            assert all(x is None or x.dtype != torch.bool for x in args[1]), "an index of booleans waits for the device"
        return func(*args, **kwargs or {})

    @property
    def launches(self) -> int:
        return self.calls.get("_scaled_dot_product_flash_attention_for_cpu", 0)


def test_the_watch_sees_waits():
    x = torch.arange(3.0)
    for wait in (x.sum().item, x.nonzero, lambda: x[x > 1], lambda: bool(x.sum() > 1), lambda: x.masked_select(x > 1)):
        with pytest.raises(AssertionError, match="waits for the device"), Watch():
            wait()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "none"])
def test_nothing_waits_for_the_device(name, kind):
    """By operator on CPU; and on the meta device, which has no values that anything could look at."""
    kept = KINDS[kind]
    segments = Segments(kept.queries, kept.keys, kept.left, kept.right)  # with nothing derived yet
    inputs = tensors(segments, 4, 2, 16, dtype=torch.float32)
    with Watch() as watch:
        results(named_kernel(name), *inputs, segments)
    assert watch.calls
    got = results(named_kernel(name), *(x.to("meta") for x in inputs), segments)
    assert [x.shape for x in got] == [x.shape for x in results(named_kernel(name), *inputs, segments)]


def watched(segments: Segments) -> Watch:
    with Watch() as watch:
        results(named_kernel("torch_cpu_flash"), *tensors(segments, 1, 1, 8, dtype=torch.float32), segments)
    return watch


def test_ten_thousand_short_segments_are_few_calls():
    rng = random.Random(3)
    lengths = [rng.randint(1, 24) for _ in range(10_000)]
    rows = sum(lengths)
    assert watched(causal(lengths)).launches < 1.2 * rows / batching.BATCH_ROWS + 24
    assert watched(causal(lengths, 5)).launches < 4 * (1.2 * rows / batching.BATCH_ROWS + 24)


def test_every_row_is_in_one_batch_and_batches_are_small():
    rng = random.Random(4)
    lengths = [rng.randint(1, 900) for _ in range(300)]
    found = batching.batches(causal(lengths), CPU)
    rows = [torch.arange(b.query_rows.start, b.query_rows.stop) for b in found if isinstance(b.query_rows, slice)]
    gathered = [b for b in found if not isinstance(b.query_rows, slice)]
    for batch in gathered:
        write, padding = batch.query_rows.write, batch.query_rows.padding
        assert len(write) == batch.count * batch.queries <= batching.BATCH_ROWS
        assert (write == sum(lengths)).sum() == (0 if padding is None else len(padding))
        rows.append(write[write < sum(lengths)])
    assert torch.equal(torch.cat(rows).sort().values, torch.arange(sum(lengths)))
    padded = sum(b.count * b.queries for b in gathered)
    assert padded <= (1 + batching.GROWTH) * sum(n for n in lengths if n <= batching.SHORT_ROWS)


@pytest.mark.parametrize("segments", [causal((500,)), causal((50,) * 90), Segments((9,) * 4, (5,) * 4)], ids=str)
def test_one_segment_and_equal_ones_run_in_place(segments):
    watch = watched(segments)
    assert watch.launches == 1
    assert not {"index_select", "index_copy_", "index_fill_", "copy_", "clone", "cat"} & watch.calls.keys()


def test_a_window_computes_its_own_area():
    for window in (16, 100, 600):
        exact = sum(min(row + 1, window) for row in range(6000))
        assert watched(causal((6000,), window)).area < exact * (5.2 if window == 16 else 1.7)
    edge = Segments((600,), (2000,), 100, None)
    assert watched(edge).area < 1.1 * sum(2000 - max(0, row - 100) for row in range(600))


def test_batches_and_masks_are_made_once():
    segments = causal((5, 9, 12, 31), 4)
    first = batching.batches(segments, CPU)
    assert batching.batches(segments, CPU) is first


@pytest.mark.parametrize("dim", [64, 20])
@pytest.mark.parametrize("kind", ["causal", "window 64", "full", "edge", "none"])
def test_the_cuda_kernel_fits_the_schema_of_its_op(dim, kind):
    """No GPU here: the meta device checks arguments and shapes, not numbers."""
    segments = KINDS[kind]
    inputs = [x.to("meta") for x in tensors(segments, 4, 2, dim, dtype=torch.bfloat16)]
    got = results(TORCH_CUDA_FLASH, *inputs, segments)
    shapes = [inputs[1].shape, inputs[1].shape[:2], *(x.shape for x in inputs[1:])]
    assert [x.shape for x in got] == shapes
    assert got[1].dtype == torch.float32


def test_kernels_are_picked_by_capability_and_reported_with_reasons():
    assert pick_kernel(CPU, torch.bfloat16, 64).name == "torch_cpu_flash"
    assert pick_kernel(torch.device("meta"), torch.float32, 64).name == "reference"
    report = {name: (usable, reason) for name, usable, reason in available_kernels(CPU)}
    order = "flash_attn_3 flash_attn_4 flash_attn_2 transformer_engine torch_cuda_flash torch_cpu_flash reference"
    assert list(report) == order.split()
    assert report["torch_cpu_flash"] == report["reference"] == (True, "")
    for name in order.split()[:5]:
        assert not report[name][0]
        assert "CUDA" in report[name][1]
    with pytest.raises(ConfigError, match=r"choose one of flash_attn_3, .*, torch_cpu_flash, reference"):
        named_kernel("tiny")


def test_a_type_that_no_kernel_takes_is_refused_with_every_reason():
    for dtype in (torch.int32, torch.complex64):
        with pytest.raises(
            ConfigError, match=rf"(?s)no attention kernel takes .*{dtype}.*torch_cpu_flash takes .*refer"
        ):
            chosen_kernel("auto", CPU, dtype, 64)
    for name in (name for name, _, _ in available_kernels(CPU)):
        with pytest.raises(ConfigError, match=name):
            pick_kernel(CPU, torch.int8, 64)


def test_a_kernel_that_cannot_run_is_refused_with_those_that_can():
    assert chosen_kernel("auto", CPU, torch.float32, 64).name == "torch_cpu_flash"
    assert chosen_kernel("reference", CPU, torch.float32, 64).name == "reference"
    with pytest.raises(ConfigError, match=r"torch_cuda_flash: .*CUDA.*can run: auto, torch_cpu_flash, reference"):
        chosen_kernel("torch_cuda_flash", CPU, torch.bfloat16, 64)
    with pytest.raises(ConfigError, match="tiny: there is no such kernel; here can run: auto, torch_cpu_flash, ref"):
        chosen_kernel("tiny", CPU, torch.float32, 64)


def test_the_doctor_lists_every_kernel():
    rows = dict(doctor.kernels().rows)
    assert list(rows) == [name for name, _, _ in available_kernels()]
    assert rows["reference"] == "usable"
    if not torch.cuda.is_available():
        assert rows["flash_attn_2"] == "not usable: no CUDA device"
