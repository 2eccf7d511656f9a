"""What HDP is compared with: other ways to plan the same batch, as plans that one evaluator scores."""

from megatron_hdp.planner.baselines.static import plan_static, plan_static_smallest

__all__ = ["plan_static", "plan_static_smallest"]
