"""What a piece costs: seconds, bytes and transfers from measured coefficients. numpy only; no torch, no Megatron."""

from megatron_hdp.cost.model import CostModel, Phase
from megatron_hdp.cost.profile import LayerProfile, LinkProfile, Profile, Tier, load_profile, profile_names

__all__ = ["CostModel", "LayerProfile", "LinkProfile", "Phase", "Profile", "Tier", "load_profile", "profile_names"]
