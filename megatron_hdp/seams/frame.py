"""How long a run gathers parameters and sums gradients beside its micro-batches, from Megatron's args."""

from typing import Any

from megatron_hdp.cost import CostModel
from megatron_hdp.seams.expert_layout import expert_group_from_args
from megatron_hdp.seams.timeline_setting import model_from_args
from megatron_hdp.simulator.cluster_files import cluster_of_profile
from megatron_hdp.simulator.job import Job, Sync
from megatron_hdp.simulator.sync import with_frame


def framed(cost: CostModel, args: Any, pool_size: int) -> CostModel:
    """``cost`` with these times, which the planner looks at where there are no pipeline stages (`planner.frame`).

    Without them for a model whose parameters are not counted. The links are those of the profile.
    """
    model = model_from_args(args)
    if model is None or args.pipeline_model_parallel_size > 1:
        return cost
    sync = Sync(
        overlap_grad_reduce=bool(args.overlap_grad_reduce),
        overlap_param_gather=bool(args.overlap_param_gather),
        gradient_bytes=4 if args.accumulate_allreduce_grads_in_fp32 else args.params_dtype.itemsize,
        parameter_bytes=args.params_dtype.itemsize,
    )
    job = Job(
        cost=cost,
        cluster=cluster_of_profile(cost.profile),
        model=model,
        experts=args.num_experts or 1,
        experts_per_token=args.moe_router_topk if args.num_experts else 1,
        expert_group=expert_group_from_args(args) if args.num_experts else 1,
        sync=sync,
    )
    return with_frame(cost, job, pool_size)
