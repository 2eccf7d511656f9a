"""Expert routers inside Megatron's model: losses per sequence, whatever the layout; see docs/experts.md.

Our router takes the place of Megatron's in the layer spec. What it must know of its micro-batch comes with each layer's
arguments: a pre-hook of the layer hands it on, also when the layer is recomputed in backward.

T rows of this process, E experts.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu, tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    compute_routing_scores_for_aux_loss,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor

from megatron_hdp.errors import ConfigError, SeamError
from megatron_hdp.pool import Pool
from megatron_hdp.router_loss import Routing, TokenRows, add_balance_loss, ring_sums, token_rows
from megatron_hdp.seams.spec import HdpPackedSeqParams

_BALANCE_LOSSES = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
"""Megatron's types, which are one thing where a micro-batch is one sequence, and their names in its log."""


@dataclass(frozen=True)
class RouterPart:
    """What a router, and the dispatcher behind it, must know of the micro-batch at hand."""

    index: int
    """Of the router among those of the model part."""
    routing: Routing | None
    """None outside training."""
    most_rows: int
    """Most rows that a process of the expert group has in this micro-batch."""


class HdpTopKRouter(TopKRouter):  # type: ignore[misc]
    """Megatron's router with auxiliary losses per sequence. Its parameters, and so checkpoints, are the same."""

    part: RouterPart | None = None
    """Set by the layer before every call."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights [T, E] of the chosen experts and the choice, bool [T, E], of logits [T, 1, E].

        Padding is routed as well, because dispatchers count on k experts for every row; it enters no statistics.
        """
        assert self.part is not None, "the layer was called without pieces"
        logits_TE = logits.view(-1, self.config.num_moe_experts)
        routing = self.part.routing if self.training else None
        if routing is not None and self.config.moe_z_loss_coeff is not None:
            logits_TE = self._with_z_loss(logits_TE, routing)
        probs_TE, chosen_TE = topk_routing_with_score_function(
            logits_TE,
            self.topk,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            num_groups=self.config.moe_router_num_groups,
            group_topk=self.config.moe_router_group_topk,
            scaling_factor=self.config.moe_router_topk_scaling_factor,
            score_function=self.score_function,
            expert_bias=self.expert_bias,
            fused=self.config.moe_router_fusion,
        )
        if routing is not None and self.balance_coefficient > 0:
            probs_TE = self._with_balance_loss(probs_TE, logits_TE, routing)
        if routing is not None:
            self._apply_expert_bias(chosen_TE & routing.rows.real_T[:, None])
        return probs_TE, chosen_TE

    @property
    def balance_coefficient(self) -> float:
        """Of the balance loss; Megatron's types of it add up."""
        return float(sum(self.get_aux_loss_coeff(kind) for kind in _BALANCE_LOSSES))

    def _with_z_loss(self, logits_TE: Tensor, routing: Routing) -> Tensor:
        assert self.part is not None
        squares_T = torch.logsumexp(logits_TE, dim=-1).float().square() * routing.rows.real_T
        routing.note_squares(self.part.index, squares_T)
        if not torch.is_grad_enabled():
            return logits_TE
        loss = squares_T.sum() * self.config.moe_z_loss_coeff
        return MoEAuxLossAutoScaler.apply(logits_TE, loss)  # type: ignore[no-any-return]

    def _with_balance_loss(self, probs_TE: Tensor, logits_TE: Tensor, routing: Routing) -> Tensor:
        assert self.part is not None
        chosen_TE, scores_TE = compute_routing_scores_for_aux_loss(
            logits_TE, self.topk, self.score_function, fused=self.config.moe_router_fusion
        )
        routing.note_choice(self.part.index, chosen_TE, scores_TE)
        if not torch.is_grad_enabled():
            return probs_TE
        return add_balance_loss(
            probs_TE, scores_TE, routing, self.part.index, self.balance_coefficient, _scale_of_main_loss
        )


def _scale_of_main_loss() -> Any:
    """What the schedule told Megatron's own losses of this kind to multiply with."""
    scale = MoEAuxLossAutoScaler.main_loss_backward_scale
    return 1.0 if scale is None else scale


def expert_layer_spec(layer_spec: Callable[..., Any]) -> Callable[..., Any]:
    """``layer_spec`` (callable with config and stage, made for us alone) with our router in every layer of experts."""

    @functools.wraps(layer_spec)
    def with_router(config: Any, vp_stage: int | None = None) -> Any:
        spec = layer_spec(config, vp_stage)
        for layer in getattr(spec, "layer_specs", None) or [spec]:
            mlp = layer.submodules.mlp
            if isinstance(mlp, functools.partial) and isinstance(mlp.keywords.get("submodules"), MoESubmodules):
                keywords = {**mlp.keywords, "submodules": _with_our_router(mlp.keywords["submodules"])}
                layer.submodules.mlp = functools.partial(mlp.func, *mlp.args, **keywords)
            elif isinstance(getattr(mlp, "submodules", None), MoESubmodules):
                mlp.submodules = _with_our_router(mlp.submodules)
        return spec

    return with_router


def _with_our_router(submodules: MoESubmodules) -> MoESubmodules:
    """Other routers are left, for `bind_experts` to name."""
    return replace(submodules, router=HdpTopKRouter) if submodules.router is TopKRouter else submodules


def bind_experts(model: Any, pool: Pool, sequences_counted: int) -> None:
    """Have the routers of one model part (a GPTModel) know their micro-batches.

    ``sequences_counted``: sequences that Megatron believes a step to have, by which it divides the losses that it logs.
    Raises `ConfigError` for layers of experts whose router is not Megatron's `TopKRouter`.
    """
    block = getattr(model, "decoder", None)
    layers = [layer for layer in getattr(block, "layers", ()) if isinstance(getattr(layer, "mlp", None), MoELayer)]
    for layer in layers:
        if not isinstance(layer.mlp.router, HdpTopKRouter):
            raise ConfigError(
                f"--hdp knows the losses of Megatron's TopKRouter; the router of layer {layer.layer_number} is a "
                f"{type(layer.mlp.router).__name__}: use Megatron's layer spec, or one with TopKRouter"
            )
    if not layers:
        return
    assert block is not None
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(functools.partial(_hand_on, index), with_kwargs=True)
        layer.mlp.forward = _keeping_part(layer.mlp, layer.mlp.forward)
        if isinstance(layer.mlp.token_dispatcher, MoEAllGatherTokenDispatcher):
            _gather_equal_rows(layer.mlp, layer.mlp.token_dispatcher)
    routers = [layer.mlp.router for layer in layers]
    block.register_forward_pre_hook(functools.partial(_begin, routers), with_kwargs=True)
    block.register_forward_hook(functools.partial(_end, routers, pool, sequences_counted), with_kwargs=True)


def _begin(routers: Sequence[HdpTopKRouter], block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a model part runs a micro-batch in training: make room for its routers' notes."""
    params = _params(kwargs)
    if block.training:
        params.routing = Routing(_own_rows(params, block.config, routers[0].weight.device), len(routers))


def _own_rows(params: HdpPackedSeqParams, config: Any, device: torch.device) -> TokenRows:
    """Rows of the micro-batch on this process, which sequence parallelism may have cut."""
    assert params.micro_batch is not None
    assert params.positions_T is not None
    total, part = params.positions_T.shape[0], slice(None)
    if config.sequence_parallel:
        rows, rank = total // config.tensor_model_parallel_size, mpu.get_tensor_model_parallel_rank()
        part = slice(rows * rank, rows * (rank + 1))
    return token_rows(params.micro_batch, total, part, device)


def _hand_on(index: int, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of a layer, also when it is recomputed: its router learns which micro-batch comes."""
    params = _params(kwargs)
    assert params.positions_T is not None
    most = params.most_tokens or params.positions_T.shape[0]
    rows = most // layer.config.tensor_model_parallel_size if layer.config.sequence_parallel else most
    layer.mlp.router.part = RouterPart(index, params.routing, rows)


def _params(kwargs: dict[str, Any]) -> HdpPackedSeqParams:
    params = kwargs.get("packed_seq_params")
    if not isinstance(params, HdpPackedSeqParams) or params.micro_batch is None:
        raise SeamError("--hdp: a layer of experts was called without pieces: Megatron's model has changed")
    return params


def _keeping_part(moe: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward`` of a layer of experts, recomputed by us where Megatron would (--recompute-modules moe).

    Its second forward has no layer around it that tells the router the micro-batch.
    """
    recomputed = moe.moe_layer_recompute
    moe.moe_layer_recompute = False

    @functools.wraps(forward)
    def forward_with_part(hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None) -> Any:
        assert intermediate_tensors is None, "CUDA graphs are refused"
        part = moe.router.part

        def run(hidden: Tensor) -> Any:
            moe.router.part = part
            return forward(hidden)

        if recomputed and moe.training:
            return tensor_parallel.checkpoint(run, False, hidden_states)
        return run(hidden_states)

    return forward_with_part


def _gather_equal_rows(moe: Any, dispatcher: Any) -> None:
    """All-gather needs equally many rows on all processes: shorter micro-batches are filled up, and cut off again.

    The plan says how many rows the longest has, so nobody asks. Rows that fill up choose no expert.
    """
    if dispatcher.tp_size == 1 and dispatcher.ep_size == 1:
        return
    preprocess, postprocess = dispatcher.dispatch_preprocess, dispatcher.combine_postprocess

    def dispatch_preprocess(hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        hidden_TD, probs_TE = preprocess(hidden_states, routing_map, probs)
        lacking = moe.router.part.most_rows - hidden_TD.shape[0]
        if lacking > 0:
            hidden_TD, probs_TE, dispatcher.routing_map = (
                torch.cat((x, x.new_zeros(lacking, x.shape[1]))) for x in (hidden_TD, probs_TE, dispatcher.routing_map)
            )
        return hidden_TD, probs_TE

    def combine_postprocess(hidden_states: Tensor) -> Tensor:
        rows = dispatcher.hidden_shape[:-1].numel()
        output: Tensor = postprocess(hidden_states[:rows])
        return output

    dispatcher.dispatch_preprocess, dispatcher.combine_postprocess = dispatch_preprocess, combine_postprocess


def _end(
    routers: Sequence[HdpTopKRouter],
    pool: Pool,
    sequences_counted: int,
    block: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """After a model part ran a micro-batch in training: the counts of whole sequences, and what Megatron logs."""
    params = _params(kwargs)
    if not block.training or params.routing is None:
        return
    group, micro_batch = routers[0].tp_cp_group, params.micro_batch
    assert micro_batch is not None

    def sum_up(counts_LNE: Tensor) -> Tensor:
        if group.size() > 1:  # sequence parallelism spread the rows
            dist.all_reduce(counts_LNE, group=group)
        return ring_sums(counts_LNE, micro_batch, pool.rank, pool.comm)

    params.routing.add_up(sum_up, routers[0].topk)
    # Megatron divides by the sequences that it counts
    share = sequences_counted / params.sequences
    losses = {name: params.routing.balance_losses() for kind, name in _BALANCE_LOSSES.items() if _has(routers[0], kind)}
    losses["z_loss"] = params.routing.z_losses()
    for name, values in losses.items():
        for router, value in zip(routers, values):
            get_moe_metrics_tracker().record(
                name, value * share, router.layer_number, block.config.num_layers, reduce_group=group
            )


def _has(router: HdpTopKRouter, kind: str) -> bool:
    return bool(router.get_aux_loss_coeff(kind) > 0)
