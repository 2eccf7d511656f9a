"""Pretrain a GPT model with the Megatron that PyPI ships, whose wheel has no training script of its own.

Stock Megatron:  torchrun --nproc-per-node 8 scripts/pretrain_gpt.py <Megatron flags>
With HDP:        torchrun --nproc-per-node 8 -m megatron_hdp scripts/pretrain_gpt.py <Megatron flags> --hdp
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

Batch = dict[str, torch.Tensor]


def dataset_config(args: Any) -> GPTDatasetConfig:
    """Megatron's description of the data, from its usual flags."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # attention is causal by itself; a mask of length x length is needed only when documents are kept apart
        create_attention_mask=args.reset_attention_mask,
    )


def datasets(num_sequences: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test datasets with at least ``num_sequences`` each, on the stages that read data."""
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTDataset
    reads_data = partial(is_first_or_last_pipeline_stage, vp_stage)
    train, valid, test = BlendedMegatronDatasetBuilder(kind, num_sequences, reads_data, dataset_config(args)).build()
    return train, valid, test


# Every tensor-parallel rank reads for itself instead of waiting for a broadcast; the page cache is shared.
datasets.is_distributed = True  # type: ignore[attr-defined]


def next_batch(data_iterator: Iterator[Batch] | None, vp_stage: int | None) -> Batch:
    """The rank's next micro-batch on its device: tokens, labels, loss_mask, position_ids, each [sequences, length].

    Empty on the stages in the middle of a pipeline, which get activations instead.
    """
    if data_iterator is None or not is_first_or_last_pipeline_stage(vp_stage):
        return {}
    batch = {name: value.cuda(non_blocking=True) for name, value in next(data_iterator).items()}
    if mpu.get_context_parallel_world_size() > 1:
        batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return batch


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """Sum of the token losses, number of tokens that count, and both for the log, summed over ranks by Megatron."""
    mask = loss_mask.reshape(-1).float()
    total = (losses.reshape(-1).float() * mask).sum()
    tokens = mask.sum().to(torch.int)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def forward_step(data_iterator: Iterator[Batch] | None, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    """One micro-batch forward: token losses on the last stage, activations elsewhere."""
    timer = get_timers()("batch-generator", log_level=2)
    timer.start()
    batch = next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timer.stop()
    output = model(
        batch.get("tokens"), batch.get("position_ids"), batch.get("attention_mask"), labels=batch.get("labels")
    )
    return output, partial(loss_func, batch.get("loss_mask"))


def main() -> None:
    """Parse Megatron's flags and train."""
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
