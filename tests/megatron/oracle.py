"""Stock Megatron on one rank, no plugin: its own unfused attention, one sequence per micro-batch, per-token loss.

Sequences come from the same corpus in the same steps; $RECORD names the folder.
"""

import os
from functools import partial

import numpy as np
import torch
from megatron.core.enums import ModelType
from megatron.core.models import backends
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args

from megatron_hdp.data.corpus import SequenceCount, open_corpus


class Sequences:
    """Every sequence of step 0, then of step 1, ... as stock micro-batches."""

    def __init__(self, corpus, steps):
        self.corpus, self.steps, self.queue = corpus, steps, []
        self.next_step = next(steps)

    def __next__(self):
        if not self.queue:
            self.queue = list(self.of_step(self.next_step))
            self.next_step = next(self.steps)
        return self.queue.pop(0)

    def of_step(self, step):
        batch = self.corpus.batch(step)
        for i, length in enumerate(batch.lengths):
            extra = 0 if batch.ends_document[i] else 1
            begin = int(batch.begin[i])
            text = self.corpus.read(int(batch.dataset[i]), int(batch.document[i]), begin, begin + int(length) + extra)
            labels = np.append(text[1:], 0) if not extra else text[1:]
            mask = np.ones(length, np.float32)
            if not extra:
                mask[-1] = 0.0
            yield {
                "tokens": torch.from_numpy(text[:length])[None],
                "labels": torch.from_numpy(labels)[None],
                "loss_mask": torch.from_numpy(mask)[None],
                "position_ids": torch.arange(int(length))[None],
            }


def provider(num_samples, vp_stage=None):
    args = get_args()
    parts = [float(part) for part in args.split.split(",")]
    shares = [part / sum(parts) for part in parts]

    def corpus(index):
        return open_corpus(
            args.data_path,
            None,
            context=args.seq_length,
            seed=args.seed + index,
            size=SequenceCount(args.global_batch_size),
            shares=shares,
            split_index=index,
        )

    import itertools

    start = args.iteration
    train = Sequences(corpus(0), itertools.count(start))
    valid = Sequences(corpus(1), itertools.count()) if shares[1] else None
    return train, valid, None


provider.is_distributed = True


def forward_step(data_iterator, model):
    batch = next(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def loss_func(mask, losses):
    total = (losses.view(-1).float() * mask.view(-1)).sum()
    count = mask.sum().to(torch.int)
    return total, count, {"lm loss": torch.cat([total.detach().view(1), count.view(1)])}


class LatentCore(DotProductAttention):
    """Megatron's plain attention as latent attention wants to build it: sizes of keys and values follow the tensors."""

    def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
        super().__init__(*args, **kwargs)


if __name__ == "__main__":
    from record import record

    record(os.environ["RECORD"])
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "NullTokenizer"})
    if args.multi_latent_attention:
        backends.DotProductAttention = LatentCore
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    # through the module: the recorder wraps names there
    pretrain(config, provider, ModelType.encoder_or_decoder, forward_step)
