"""From measurements to a profile and a report. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hdp.cost.profile import LayerProfile, LinkProfile, Profile, load_profile
from megatron_hdp.profiler.cases import Case
from megatron_hdp.profiler.fit import Fit, LayerFit, fit_line
from megatron_hdp.profiler.match import MEASURED
from megatron_hdp.profiler.samples import Sample

_UNMEASURED = "h100"
"""Shipped profile whose links stand in where a run has none to measure."""


@dataclass(frozen=True)
class Model:
    """What follows from the model's shape, per tensor-parallel rank."""

    layer: str
    """See `match.layer_name`."""
    tensor_parallel: int
    checkpoint_per_token: float
    kv_per_token: float
    kv_gradient_per_token: float


@dataclass(frozen=True)
class Machine:
    """Texts and sizes of the machine."""

    hardware: str
    software: str
    device_memory: float
    host_memory: float
    gpus_per_node: int


@dataclass(frozen=True)
class Links:
    """Transfer times (constant and slope over bytes) and copies in bytes/s; None where there was none."""

    inside: Fit | None
    across: Fit | None
    d2h: float
    h2d: float
    d2h_shared: float | None
    h2d_shared: float | None


@dataclass(frozen=True)
class Fits:
    """Everything that was fitted."""

    layer: LayerFit
    activations: Fit
    """Bytes of one layer: constant and slope over tokens."""
    loss: Fit | None
    """Seconds: constant and slope over tokens; None without cases."""
    embedding: Fit | None
    ring_steps: tuple[float, float] | None = None
    """Seconds of a ring's steps after the first, beside computing, forward and backward; None without a ring."""


def stage_fit(times: Mapping[Case, Sample], kind: str) -> Fit | None:
    """Seconds of the loss or the embedding stage, forward and backward together, over tokens."""
    found = {case.tokens: sum(sample) for case, sample in times.items() if case.kind == kind}
    return fit_line(f"{kind} stage", list(found), list(found.values()), "tokens") if found else None


def at_capacity(stage: Fit | None, capacity: int) -> float:
    """Seconds per token of a full micro-batch, with its share of the constant: micro-batches are nearly full."""
    if stage is None:
        return 0.0
    constant, slope = stage.coefficients
    return slope + constant / capacity


def build(name: str, date: str, model: Model, machine: Machine, fits: Fits, links: Links, capacity: int) -> Profile:
    """The profile, with what each coefficient was measured from."""
    assumed = {
        "kv_per_token, kv_gradient_per_token, checkpoint_per_token": "not measured: they follow from the model's shape",
        "host_memory": "half of the machine's memory is left to activations",
    }
    if fits.ring_steps is None:
        assumed["ring_step_forward, ring_step_backward"] = "one rank has no ring to run: taken to be 0"
    inside, across = _links(links, assumed)
    return Profile(
        name=name,
        hardware=machine.hardware,
        date=date,
        sources=(MEASURED,),
        calibrated=_calibrated(fits, links, capacity),
        assumed=assumed,
        gpus_per_node=machine.gpus_per_node,
        inside_node=inside,
        across_nodes=across,
        d2h_bandwidth=_short(links.d2h),
        h2d_bandwidth=_short(links.h2d),
        d2h_bandwidth_shared=None if links.d2h_shared is None else _short(links.d2h_shared),
        h2d_bandwidth_shared=None if links.h2d_shared is None else _short(links.h2d_shared),
        device_memory=machine.device_memory,
        host_memory=machine.host_memory,
        software=machine.software,
        default_layer=model.layer,
        layers={model.layer: _layer(model, fits, capacity)},
    )


def _layer(model: Model, fits: Fits, capacity: int) -> LayerProfile:
    a_forward, a_backward = fits.layer.quadratic
    b_forward, b_backward, per_sequence, per_microbatch = fits.layer.layer.coefficients
    constant, per_token = fits.activations.coefficients
    return LayerProfile(
        tensor_parallel=model.tensor_parallel,
        attention_forward=_short(a_forward),
        attention_backward_factor=_short(_ratio(a_backward, a_forward)),
        linear_forward=_short(b_forward),
        linear_backward_factor=_short(_ratio(b_backward, b_forward)),
        sequence_constant=_short(per_sequence),
        microbatch_constant=_short(per_microbatch),
        activation_per_token=_short(max(per_token, 1.0)),
        activation_constant=_short(constant),
        checkpoint_per_token=model.checkpoint_per_token,
        kv_per_token=model.kv_per_token,
        kv_gradient_per_token=model.kv_gradient_per_token,
        loss_per_token=_short(at_capacity(fits.loss, capacity)),
        embedding_per_token=_short(at_capacity(fits.embedding, capacity)),
        ring_step_forward=_short(fits.ring_steps[0]) if fits.ring_steps else 0.0,
        ring_step_backward=_short(fits.ring_steps[1]) if fits.ring_steps else 0.0,
    )


def _ratio(backward: float, forward: float) -> float:
    """1 where there is nothing to divide: the fit found no such term in forward, and it is warned about."""
    return backward / forward if forward > 0 else 1.0


def link_of(found: Fit) -> LinkProfile:
    """The link of a fit of transfers."""
    latency, per_byte = found.coefficients
    return LinkProfile(_short(latency), _short(1 / per_byte if per_byte > 0 else 1e15))


def _links(links: Links, assumed: dict[str, str]) -> tuple[LinkProfile, LinkProfile]:
    """Inside and across nodes; what could not be measured stands in ``assumed``."""
    inside, across = (None if found is None else link_of(found) for found in (links.inside, links.across))
    if inside is None and across is None:
        stand_in = load_profile(_UNMEASURED)
        assumed["inside_node, across_nodes"] = f"one rank has no neighbour: links of the shipped profile {_UNMEASURED}"
        return stand_in.inside_node, stand_in.across_nodes
    if across is None:
        assert inside is not None
        assumed["across_nodes"] = "the run had one node: as inside_node. Measure again on two nodes before using more"
        return inside, inside
    if inside is None:
        assumed["inside_node"] = "no two pool ranks shared a node: as across_nodes"
        return across, across
    return inside, across


def _calibrated(fits: Fits, links: Links, capacity: int) -> dict[str, str]:
    forward, backward = fits.layer.attention
    said = {
        "attention_forward": f"core attention of one local sequence alone: {forward.quality}",
        "attention_backward_factor": f"core attention alone, backward: {backward.quality}",
        "linear, sequence_constant, microbatch_constant": "the model's own layers, single sequences and full "
        f"micro-batches of short ones, attention's a known: {fits.layer.layer.quality}",
        "activation_per_token, activation_constant": f"storages that autograd keeps, each once: "
        f"{fits.activations.quality}",
        "d2h_bandwidth, h2d_bandwidth": "copies of 64 MiB, median",
        "device_memory": "as the device says; of CPU ranks a share of the machine's",
    }
    for name, stage in (("loss_per_token", fits.loss), ("embedding_per_token", fits.embedding)):
        if stage is not None:
            said[name] = f"stage alone, at {capacity} tokens: {stage.quality}"
    if fits.ring_steps is not None:
        said["ring_step_forward, ring_step_backward"] = (
            "core attention of short pieces on a ring, less what the other coefficients say of it: median"
        )
    for name, link in (("inside_node", links.inside), ("across_nodes", links.across)):
        if link is not None:
            said[name] = f"exchanges with both neighbours of a ring at once: {link.quality}"
    if links.d2h_shared is not None:
        said["d2h_bandwidth_shared, h2d_bandwidth_shared"] = "the same copies while a ring exchange runs"
    return said


def _short(value: float) -> float:
    """Six digits: more would pretend to a precision that no measurement has."""
    return float(f"{value:.6g}")
