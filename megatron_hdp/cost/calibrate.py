"""Where the shipped profiles' numbers come from: ByteScale's published figures, and an H100's data sheet.

ByteScale: H. Ge et al., SIGCOMM 2025 (doi 10.1145/3718958.3754352, arXiv 2502.21231). Values of figures are read off
their labels and good to about 10 %. `python benchmarks/profiles.py` writes the JSON files from the functions here.
"""

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_hdp.cost.profile import LayerProfile, LinkProfile, Profile

type Floats = npt.NDArray[np.float64]

DATE = "2026-11-29"
BYTESCALE_DATE = "2026-11-30"

FIGURE_6A = {4: (0.8, 0.9), 8: (1.8, 1.8), 16: (4.8, 3.6), 32: (14.1, 7.5), 64: (48.2, 15.1), 128: (175.5, 28.2)}
"""1024 tokens -> milliseconds of one layer's attention and MLP, forward."""
FIGURE_18A_BLOCK_MS = 2.8
"""One ring step of 8192 tokens per rank, compute (a sequence of 312 x 1024 tokens on 39 ranks)."""
FIGURE_18A_RING_MS, FIGURE_18A_RING_RANKS = 405.0, 256
"""A static ring's attention: it waits for 255 transfers, and computes one last block."""
FIGURE_18A_LAST_MS = 0.35
"""That block: labels say 0.30 to 0.42."""
FIGURE_18A_TRANSFER_MS = (FIGURE_18A_RING_MS - FIGURE_18A_LAST_MS) / (FIGURE_18A_RING_RANKS - 1)
"""1.587; labels of single transfers say 1.4 to 1.6, and 1.9 where a ring of 39 hides them."""
FIGURE_18A_MLP_MS = 10.0
"""One layer's MLP, 8192 tokens per rank. The projections around attention have no label there; see `bytescale`."""
FIGURE_18A_TOKENS = 8192
FIGURE_21_SECONDS = {0.0: 5.08, 0.5: 5.08, 0.6: 5.38, 0.8: 5.93, 1.0: 6.49}
"""Offload fraction -> seconds of one step with one sequence of 65536 tokens, 32 layers."""
FIGURE_21_GB = {0.0: 59.0, 0.5: 40.0, 0.6: 37.0, 0.8: 33.0, 1.0: 27.0}
FIGURE_21_RECOMPUTE_SECONDS = 6.70
FIGURE_21_RECOMPUTE_GB = 27.0
FIGURE_21_TOKENS = 65536
LAYERS_7B = 32
LARGE_RUN_BACKWARD_FACTOR = 2.5
"""Backward of core attention has five matrix products where forward has two."""


def nonnegative_least_squares(matrix: Floats, target: Floats) -> Floats:
    """The x >= 0 that minimises |matrix x - target|, by trying every set of columns; shapes [m, n], [m] -> [n].

    The minimum's positive columns solve their own unconstrained problem, so with few columns trying all sets is exact.
    """
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(np.sum(target**2))
    for size in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), size):
            x = np.zeros(columns)
            x[list(chosen)] = np.linalg.lstsq(matrix[:, chosen], target, rcond=None)[0]
            error = float(np.sum((matrix @ x - target) ** 2))
            if np.all(x >= 0) and error < least:
                best, least = x, error
    return best


def fit_figure_6a() -> tuple[Floats, Floats]:
    """Attention as [s/token^2, s/token, s] and MLP as [s/token, s]; least squares of relative errors."""
    tokens = 1024.0 * np.array(list(FIGURE_6A))
    attention, mlp = 1e-3 * np.array(list(FIGURE_6A.values())).T
    ones = np.ones_like(tokens)
    quadratic = np.stack([tokens**2, tokens, ones], axis=1) / attention[:, None]
    linear = np.stack([tokens, ones], axis=1) / mlp[:, None]
    return nonnegative_least_squares(quadratic, ones), nonnegative_least_squares(linear, ones)


def fit_figure_21_memory() -> tuple[float, float]:
    """Bytes of the rest, and of one layer's activations: bytes(r) = rest + (2 + (1 - r) 30) layer."""
    kept = np.array([2 + (1 - r) * (LAYERS_7B - 2) for r in FIGURE_21_GB])
    matrix = np.stack([np.ones_like(kept), kept], axis=1)
    rest, layer = nonnegative_least_squares(matrix, 1e9 * np.array(list(FIGURE_21_GB.values())))
    return float(rest), float(layer)


def figure_21_forward_backward() -> tuple[float, float]:
    """Seconds of the forward and the backward pass: full recompute adds exactly one forward pass to the step."""
    forward = FIGURE_21_RECOMPUTE_SECONDS - FIGURE_21_SECONDS[0.0]
    return forward, FIGURE_21_SECONDS[0.0] - forward


def figure_21_copy_bandwidth() -> float:
    """Bytes per second device to host, from the fractions that do not hide; mean over them.

    A fraction r of one layer takes (stall / 30 + forward of one layer); backward is longer and hides its copy.
    """
    forward, _ = figure_21_forward_backward()
    layer = forward / LAYERS_7B
    stalls = {r: s - FIGURE_21_SECONDS[0.0] for r, s in FIGURE_21_SECONDS.items() if s > FIGURE_21_SECONDS[0.0]}
    copy_s = np.mean([(stall / (LAYERS_7B - 2) + layer) / r for r, stall in stalls.items()])
    return float(fit_figure_21_memory()[1] / copy_s)


def kv_bytes(kv_heads: int, head_size: int, tensor_parallel: int, element: int) -> float:
    """Bytes per token of keys and values (or of their gradients) of one layer on one GPU."""
    return 2.0 * kv_heads * head_size * element / tensor_parallel


def bytescale() -> Profile:
    """The cluster of the ByteScale paper as far as its published figures pin it down.

    Three layers, because the figures come from different set-ups: `llama-7b` is the large run of Figures 17 to 20,
    `figure-6a` and `figure-21` are the single measurements. Tensor-parallel sizes are not published: 2 follows from
    512 pool ranks on 1,024 GPUs, 8 from Figure 21's activation bytes per token.

    What a layer of the large run does besides core attention is its MLP of Figure 18a and the projections, which take
    as much more as Figure 6a says: there attention's part that is linear in tokens is 0.60 of the MLP.
    """
    (quadratic, projections, per_sequence), (mlp, per_microbatch) = fit_figure_6a()
    forward, backward = figure_21_forward_backward()
    tokens = float(FIGURE_21_TOKENS)
    attention = quadratic * tokens**2
    rest = (projections + mlp) * tokens
    constant = per_sequence + per_microbatch
    scale = forward / LAYERS_7B / (attention + rest + constant)
    linear_factor = 2.0
    backward_layer = backward / LAYERS_7B / scale
    attention_factor = (backward_layer - linear_factor * rest - constant) / attention
    figure_6a = LayerProfile(
        tensor_parallel=8,
        attention_forward=_short(quadratic),
        attention_backward_factor=_short(attention_factor),
        linear_forward=_short(projections + mlp),
        linear_backward_factor=linear_factor,
        sequence_constant=_short(per_sequence),
        microbatch_constant=_short(per_microbatch),
        activation_per_token=_short(fit_figure_21_memory()[1] / tokens),
        activation_constant=0.0,
        checkpoint_per_token=2.0 * 4096 / 8,
        kv_per_token=kv_bytes(8, 128, 8, 2),
        kv_gradient_per_token=kv_bytes(8, 128, 8, 4),
    )
    figure_21 = replace(
        figure_6a,
        attention_forward=_short(scale * quadratic),
        linear_forward=_short(scale * (projections + mlp)),
        sequence_constant=_short(scale * per_sequence),
        microbatch_constant=_short(scale * per_microbatch),
    )
    llama_7b = replace(
        figure_6a,
        tensor_parallel=2,
        attention_forward=_short(1e-3 * FIGURE_18A_BLOCK_MS / FIGURE_18A_TOKENS**2),
        attention_backward_factor=LARGE_RUN_BACKWARD_FACTOR,
        linear_forward=_short(1e-3 * FIGURE_18A_MLP_MS / FIGURE_18A_TOKENS * (projections + mlp) / mlp),
        activation_per_token=4 * figure_6a.activation_per_token,
        checkpoint_per_token=2.0 * 4096 / 2,
        kv_per_token=kv_bytes(8, 128, 2, 2),
        kv_gradient_per_token=kv_bytes(8, 128, 2, 4),
    )
    latency = 20e-6
    slice_bytes = llama_7b.kv_per_token * FIGURE_18A_TOKENS
    copy = _short(figure_21_copy_bandwidth())
    return Profile(
        name="bytescale",
        hardware="ByteScale's training cluster of more than 12,000 GPUs; GPU type not published",
        date=BYTESCALE_DATE,
        sources=(
            "ByteScale, SIGCOMM 2025, doi 10.1145/3718958.3754352, arXiv 2502.21231: Figures 6a, 18a, 21, read off "
            "their labels and good to about 10 %",
            "megatron_hdp.cost.calibrate.bytescale computes every number from them",
        ),
        calibrated=_BYTESCALE_CALIBRATED,
        assumed=_BYTESCALE_ASSUMED,
        gpus_per_node=8,
        inside_node=LinkProfile(latency=5e-6, bandwidth=150e9),
        across_nodes=LinkProfile(latency, _short(slice_bytes / (1e-3 * FIGURE_18A_TRANSFER_MS - latency))),
        d2h_bandwidth=copy,
        h2d_bandwidth=copy,
        default_layer="llama-7b",
        layers={"llama-7b": llama_7b, "figure-6a": figure_6a, "figure-21": figure_21},
    )


_BYTESCALE_CALIBRATED = {
    "llama-7b.attention_forward": "Figure 18a: a ring step of 8192 tokens per rank computes for 2.8 ms",
    "llama-7b.linear_forward": "Figure 18a: 10 ms for the MLP of one layer and 8192 tokens; times 1.60 for the "
    "projections, the ratio of Figure 6a",
    "across_nodes.bandwidth": "Figure 18a: 255 transfers of slices of 8192 tokens and a last block take 405 ms, "
    "1.59 ms each (labels of single ones: 1.4 to 1.6); 86 Gb/s, 22 % below the 110 Gb/s peak of Figure 19",
    "figure-6a": "attention = a s^2 + b s + c and MLP = d s + e, non-negative least squares of relative errors; linear "
    "is b + d, the constant per sequence c, per micro-batch e",
    "figure-21": "figure-6a times the ratio of Figure 21's own forward pass (what full recompute adds, 1.62 s) to it",
    "figure-6a and figure-21.attention_backward_factor": "Figure 21: backward is 3.46 s where forward is 1.62 s",
    "activation_per_token": "Figure 21: memory over offload fraction, rest + (2 + (1 - r) 30) layers",
    "d2h_bandwidth": "Figure 21: stalls at r = 0.6, 0.8 and 1.0 beyond the forward pass of a layer",
}
_BYTESCALE_ASSUMED = {
    "tensor_parallel": "2 for llama-7b (1,024 GPUs, 2M context on a ring of 256), 8 for Figures 6a and 21 (16 KB of "
    "activations per token and layer); neither is published",
    "linear_backward_factor": "two matrix products for each one of forward",
    "llama-7b.attention_backward_factor": "2.5, five matrix products where forward has two; Figure 21 would say 2.2. "
    "Labels of single micro-batches in Figure 18b agree with 2.5 and no recompute: 63 s backward after 25 s forward, "
    "56 after 22, 54 after 21, 47 after 18, 34 after 14, 30 after 12",
    "llama-7b.sequence_constant": "as in Figure 6a; constants count in forward and again in backward",
    "llama-7b.activation_per_token": "Figure 21's, times 8 / 2 for the smaller tensor-parallel group",
    "activation_constant": "none published",
    "checkpoint_per_token": "the layer's bf16 input, 4096 wide, split by sequence parallelism",
    "kv_per_token": "bf16, 8 groups of 128",
    "kv_gradient_per_token": "fp32, as this package's ring sends them",
    "latency": "20 us across nodes, 5 us inside one",
    "inside_node.bandwidth": "150 GB/s one way, in the range of NVLink 3 and 4; the paper gives no number",
    "h2d_bandwidth": "equal to d2h_bandwidth",
    "gpus_per_node": "8",
    "loss_per_token, embedding_per_token": "0: no figure names them",
}

H100_PEAK_FLOPS = 989e12
LINEAR_EFFICIENCY = 0.60
ATTENTION_EFFICIENCY = 0.50
SHAPES = {  # hidden, FFN width, KV heads, experts per token, tensor-parallel size
    "llama-7b": (4096, 11008, 8, 1, 1),
    "llama-13b": (5120, 13824, 8, 1, 2),
    "llama-30b": (6656, 17920, 8, 1, 4),
    "llama-70b": (8192, 28672, 8, 1, 8),
    "mixtral-8x7b": (4096, 14336, 8, 2, 4),
    "mixtral-8x22b": (6144, 16384, 8, 2, 8),
}


def h100_layer(hidden: int, ffn: int, kv_heads: int, experts: int, tensor_parallel: int) -> LayerProfile:
    """A SwiGLU layer with grouped-query attention (heads of 128), counted in floating-point operations and bytes.

    Forward core attention does 2 h s^2 of them for a causal sequence (two products over s^2 / 2 pairs), the rest
    2 per weight and token. Kept for backward, bf16: two norms' inputs and outputs, Q, the attention's output (6 h), K
    and V, and 3 f per chosen expert (gate, up, their product).
    """
    kv = 128 * kv_heads
    weights = hidden * (hidden + 2 * kv) + hidden * hidden + 3 * hidden * ffn * experts
    return LayerProfile(
        tensor_parallel=tensor_parallel,
        attention_forward=_short(2 * hidden / (tensor_parallel * ATTENTION_EFFICIENCY * H100_PEAK_FLOPS)),
        attention_backward_factor=2.5,
        linear_forward=_short(2 * weights / (tensor_parallel * LINEAR_EFFICIENCY * H100_PEAK_FLOPS)),
        linear_backward_factor=2.0,
        sequence_constant=5e-6,
        microbatch_constant=50e-6,
        activation_per_token=2.0 * (6 * hidden + 2 * kv + 3 * ffn * experts) / tensor_parallel,
        activation_constant=0.0,
        checkpoint_per_token=2.0 * hidden / tensor_parallel,
        kv_per_token=kv_bytes(kv_heads, 128, tensor_parallel, 2),
        kv_gradient_per_token=kv_bytes(kv_heads, 128, tensor_parallel, 4),
    )


def h100() -> Profile:
    """Nodes of 8 H100 SXM with one 400 Gb/s NIC per GPU, from public data sheets and stated efficiencies."""
    return Profile(
        name="h100",
        hardware="NVIDIA H100 SXM5 80 GB, 8 per node, NVLink 4, one 400 Gb/s NIC per GPU, PCIe Gen5 x16",
        date=DATE,
        sources=(
            "NVIDIA H100 Tensor Core GPU data sheet: 989 TFLOP/s bf16 dense (SXM), NVLink 900 GB/s both ways, PCIe "
            "Gen5 128 GB/s both ways",
            "400 Gb/s per GPU: ConnectX-7, as in DGX H100",
            "megatron_hdp.cost.calibrate.h100 computes every number from them; nothing was measured",
        ),
        calibrated={
            "attention_forward": "2 h s^2 / (TP x 0.50 x 989 TFLOP/s)",
            "linear_forward": "2 x weights per token / (TP x 0.60 x 989 TFLOP/s)",
            "inside_node.bandwidth": "0.8 x 450 GB/s one way",
            "across_nodes.bandwidth": "0.9 x 50 GB/s",
            "d2h_bandwidth, h2d_bandwidth": "0.8 x 64 GB/s one way",
            "device_memory": "80 GB",
            "kv_per_token, kv_gradient_per_token": "2 x KV heads x 128 / TP, in bf16 and in fp32",
            "activation_per_token": "2 (6 h + 2 kv + 3 f experts) / TP bytes",
        },
        assumed={
            "efficiencies": "0.60 of peak for matrix products with tensor-parallel traffic, 0.50 for core attention, "
            "0.8 of NVLink and PCIe, 0.9 of the NIC; offload shares neither PCIe nor host memory with the NIC",
            "attention_backward_factor": "five matrix products where forward has two, at equal efficiency",
            "linear_backward_factor": "two matrix products for each one of forward",
            "constants": "5 us per sequence and 50 us per micro-batch and layer for launches; latency 5 us and 15 us",
            "tensor_parallel": "1, 2, 4, 8 for 7B, 13B, 30B, 70B; 4 and 8 for 8x7B and 8x22B",
            "experts": "two per token, perfectly balanced; their all-to-all is not counted",
            "loss_per_token, embedding_per_token": "0: they depend on the vocabulary, which the layers do not name",
        },
        gpus_per_node=8,
        inside_node=LinkProfile(latency=5e-6, bandwidth=0.8 * 450e9),
        across_nodes=LinkProfile(latency=15e-6, bandwidth=0.9 * 50e9),
        d2h_bandwidth=0.8 * 64e9,
        h2d_bandwidth=0.8 * 64e9,
        device_memory=80e9,
        default_layer="llama-7b",
        layers={name: h100_layer(*shape) for name, shape in SHAPES.items()},
    )


def _short(value: float) -> float:
    """Six digits: more would pretend to a precision that no figure has, and differ between linear-algebra libraries."""
    return float(f"{value:.6g}")
