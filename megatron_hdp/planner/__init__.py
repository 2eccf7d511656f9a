"""Who does what: the plan of a global batch. No torch, no Megatron."""

from megatron_hdp.planner.check import check
from megatron_hdp.planner.entry import plan
from megatron_hdp.planner.packing import core_backend
from megatron_hdp.planner.summary import PlanSummary, summarize

__all__ = ["PlanSummary", "check", "core_backend", "plan", "summarize"]
