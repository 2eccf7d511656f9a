"""Whether a profile's activations are those of the model that is asked about: only then they are better than a count.

A layer's name in a profile does not say all that decides what it keeps for backward: sequence parallelism, the kind of
norms, biases, dropout, fused kernels. No torch, no Megatron.
"""

from dataclasses import dataclass

from megatron_hdp.cost import CostModel
from megatron_hdp.memory import ModelShape, Parallel, counted_layer, sized

AGREEMENT_PERCENT = 5
"""Counted and measured bytes of the same model and flags are closer than this."""


@dataclass(frozen=True)
class Choice:
    """Where the activations of an estimate come from."""

    measured: bool
    """For `memory.estimate`: the profile's bytes are used, else counted ones."""
    note: str | None
    """Why a measured profile's bytes are not used, with both numbers; None where nothing was put aside."""


def choose(model: ModelShape, parallel: Parallel, capacity: int, cost: CostModel) -> Choice:
    """The profile's bytes if they were measured and agree with the count for a micro-batch of ``capacity`` tokens."""
    if cost.profile.software is None:
        return Choice(False, None)
    layer = cost.layer_profile
    measured = layer.activation_per_token * capacity + layer.activation_constant
    counted = counted_layer(model, parallel) * capacity
    if abs(measured - counted) * 100 <= AGREEMENT_PERCENT * counted:
        return Choice(True, None)
    return Choice(
        False,
        f"a layer keeps {sized(counted)} of {capacity:,} tokens by the count, which is used, and "
        f"{sized(round(measured))} as the profile {cost.profile.name} measured it: more than {AGREEMENT_PERCENT} % "
        "apart, so of another model or other flags",
    )
