"""From Megatron's model flags to what the planner needs to know of the model."""

from typing import Any

from megatron_hdp.config import HdpConfig
from megatron_hdp.cost import CostModel, load_profile


def cost_from_args(args: Any, config: HdpConfig) -> CostModel:
    """What pieces cost on one stage of this run.

    Raises `ConfigError` for a profile that cannot be read or used.
    """
    return CostModel(
        load_profile(config.profile),
        layers_per_stage=max(1, args.num_layers // args.pipeline_model_parallel_size),
        recompute="full" if args.recompute_granularity == "full" else "none",
    )


def stages_from_args(args: Any) -> tuple[int, int]:
    """Pipeline stages, and model parts per stage."""
    return args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
