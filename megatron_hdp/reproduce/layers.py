"""Figures 6a, 18a and 21: single layers and rings, by the cost model alone. The profile was fitted to them."""

from megatron_hdp.cost import CostModel, Profile
from megatron_hdp.cost import calibrate as c
from megatron_hdp.reproduce import paper
from megatron_hdp.reproduce.result import Figure, Row

_LABELS = "read off labels; several values were fitted by few coefficients, so that errors are those of the fit"


def figure_6a(profile: Profile) -> Figure:
    """Attention and MLP of one layer, forward, by length."""
    model, (projections, mlp) = CostModel(profile, 1, layer="figure-6a"), _linear_parts()
    attention_s = profile.layer("figure-6a").attention_forward
    constant = profile.layer("figure-6a").sequence_constant
    rows = []
    for kilo, (attention, feed_forward) in c.FIGURE_6A.items():
        tokens = 1024 * kilo
        parts = (attention_s * tokens**2 + projections * tokens + constant, mlp * tokens)
        whole = 1e3 * float(model.seconds(tokens, phase="forward"))
        found = (("attention", attention, 1e3 * parts[0]), ("MLP", feed_forward, 1e3 * parts[1]))
        rows += [_fitted(f"{kilo}K, {name}", "ms", value, simulated) for name, value, simulated in found]
        rows.append(_fitted(f"{kilo}K, both", "ms", attention + feed_forward, whole))
    words = (f"attention is a s^2 + b s + c and MLP d s; {_LABELS}",)
    return Figure(key="figure-6a", title="one layer, forward", rows=tuple(rows), words=words)


def _linear_parts() -> tuple[float, float]:
    """Seconds per token of attention's linear part and of the MLP, in Figure 6a."""
    (_, projections, _), (mlp, _) = c.fit_figure_6a()
    return float(projections), float(mlp)


def figure_18a(profile: Profile) -> Figure:
    """A static ring of short sequences, and HDP's ring of one long sequence."""
    model = CostModel(profile, 1)
    ranks, each = c.FIGURE_18A_RING_RANKS, 256 * 1024
    static = model.packed_attention_picoseconds([each] * 8, ranks, phase="forward") * 1e-9
    ring = float(model.attention_picoseconds(paper.RING_39_TOKENS, paper.RING_39_RANKS, phase="forward")) * 1e-9
    last = float(8 * (each / ranks) ** 2 * model.layer_profile.attention_forward * 1e3)
    link = profile.across_nodes
    moved = 1e3 * (link.latency + c.FIGURE_18A_TOKENS * model.layer_profile.kv_per_token / link.bandwidth)
    share = static / (static + c.FIGURE_18A_MLP_MS)
    rows = (
        _fitted("static ring of 256 ranks, a pack of 8 x 256K", "ms", c.FIGURE_18A_RING_MS, static, tag="text"),
        _fitted("HDP ring of 39 ranks, one sequence of 312K", "ms", paper.RING_39_MS, ring, tag="text"),
        _fitted("static: share of the ring in ring and MLP", "%", 100 * paper.RING_SHARE, 100 * share, tag="text"),
        _fitted("static: a transfer", "ms", (1.4, 1.6), moved),
        _fitted("static: a block", "ms", (0.30, 0.42), last),
        _fitted("HDP: a block", "ms", c.FIGURE_18A_BLOCK_MS, 1e3 * _block(model), tag="text"),
    )
    hidden = "HDP's ring hides its transfers"
    return Figure(
        key="figure-18a",
        title="attention of one layer, forward, LLaMA-7B, 8K tokens a rank",
        rows=rows,
        words=(
            "the label of an HDP transfer, 1.9 ms, is that of one beside compute; the profile has one bandwidth, that "
            "of the static ring",
        ),
        orders={hidden: bool(model.hides(paper.RING_39_TOKENS, paper.RING_39_RANKS, phase="forward"))},
    )


def _block(model: CostModel) -> float:
    """Seconds of a ring step of 8192 tokens."""
    return model.layer_profile.attention_forward * float(c.FIGURE_18A_TOKENS**2)


def figure_21(profile: Profile) -> Figure:
    """Offload of one sequence of 64K: time and memory by fraction."""
    rest, _ = c.fit_figure_21_memory()
    rows, seconds = [], []
    for fraction, published in c.FIGURE_21_SECONDS.items():
        model = CostModel(profile, c.LAYERS_7B, layer="figure-21")
        stall = float(model.offload_stall_picoseconds(c.FIGURE_21_TOKENS, offload=fraction)) * 1e-12
        seconds.append(_step_seconds(model) + stall)
        held = (rest + float(model.bytes(c.FIGURE_21_TOKENS, 1, fraction))) / 1e9
        rows.append(_fitted(f"offload {fraction}: step", "s", published, seconds[-1]))
        rows.append(_fitted(f"offload {fraction}: memory", "GB", c.FIGURE_21_GB[fraction], held))
    again = CostModel(profile, c.LAYERS_7B, layer="figure-21", recompute="full")
    held = (rest + float(again.bytes(c.FIGURE_21_TOKENS))) / 1e9
    rows.append(_fitted("full recompute: step", "s", c.FIGURE_21_RECOMPUTE_SECONDS, _step_seconds(again)))
    rows.append(
        Row(
            name="full recompute: memory",
            unit="GB",
            paper=c.FIGURE_21_RECOMPUTE_GB,
            tag="label",
            simulated=held,
            limit=0.10,
        )
    )
    order = "time rises with what is offloaded, and recompute takes longest"
    rising = all(a <= b for a, b in zip(seconds, [*seconds[1:], _step_seconds(again)], strict=True))
    return Figure(
        key="figure-21",
        title="offload of one sequence of 64K tokens, 32 layers",
        rows=tuple(rows),
        words=(_LABELS, "memory with recompute was not fitted: it keeps layer inputs, and one layer at work"),
        orders={order: rising},
    )


def _step_seconds(model: CostModel) -> float:
    return float(model.seconds(c.FIGURE_21_TOKENS)) + model.microbatch_picoseconds() * 1e-12


def _fitted(name: str, unit: str, published: float | paper.Range, simulated: float, tag: paper.Tag = "label") -> Row:
    return Row(name=name, unit=unit, paper=published, tag=tag, simulated=simulated, basis="calibrated")
