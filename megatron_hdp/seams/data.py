"""From Megatron's data flags to corpora, planners and step iterators."""

import functools
from collections.abc import Callable
from typing import Any

from megatron.training import get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_hdp.config import HdpConfig
from megatron_hdp.data.corpus import SPLITS, Corpus, SequenceCount, TokenBudget, open_corpus
from megatron_hdp.data.flags import check_blend, split_shares
from megatron_hdp.errors import ConfigError, DataError
from megatron_hdp.loader import LoaderOptions, StepBundle, StepLoader
from megatron_hdp.planner import plan
from megatron_hdp.seams.costs import cost_from_args, pad_multiple_from_args, planned_host_bytes, stages_from_args
from megatron_hdp.seams.expert_layout import expert_group_from_args
from megatron_hdp.seams.frame import framed
from megatron_hdp.types import IntArray, Plan


class StepIterator:
    """Endless iterator of step bundles; Megatron wraps it to be able to replay a step."""

    def __init__(self, loader: StepLoader, step: Callable[[], int] | None = None) -> None:
        """``step`` tells which step runs now; without it steps are counted from 0."""
        self._loader = loader
        self._step = step
        self._count = 0

    def __iter__(self) -> "StepIterator":
        return self

    def __next__(self) -> StepBundle:
        step = self._count if self._step is None else self._step()
        self._count += 1
        return self._loader.bundle(step)


def corpus_from_args(args: Any, config: HdpConfig, split: str) -> Corpus | None:
    """The corpus of one split, or None where the flags give it no documents.

    Raises `DataError` for damaged files, `EmptySplitError` for a share that is less than one document.
    """
    index = SPLITS.index(split)
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    if blend_per_split is not None:
        blend, shares = blend_per_split[index], None
    else:
        shares = split_shares(args.split)
    if blend is None or (shares is not None and shares[index] == 0):
        return None
    prefixes, weights = blend
    size = (
        SequenceCount(args.hdp_sequences_per_step) if config.batch_tokens is None else TokenBudget(config.batch_tokens)
    )
    return open_corpus(
        prefixes,
        weights,
        context=args.seq_length,
        # each split has its own stream
        seed=args.seed + index,
        size=size,
        shares=shares,
        split_index=index,
    )


def check_data_flags(args: Any) -> None:
    """Raise `ConfigError` for shares or weights that are no such, and where no training data is asked for."""
    trains = not args.skip_train and args.train_iters != 0
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        check_blend(getattr(args, name) or [], f"--{name.replace('_', '-')}")
    if args.data_path or args.data_args_path:
        if trains and split_shares(args.split)[0] == 0:
            raise ConfigError(
                f"--split {args.split}: its first share, that of training, is 0: give it one, or --skip-train"
            )
    elif trains and not (args.train_data_path or args.per_split_data_args_path):
        raise ConfigError("there is no training data: give --train-data-path, or --skip-train")


def planner_from_args(args: Any, config: HdpConfig, pool_size: int) -> Callable[[IntArray], Plan]:
    """The function from lengths to a plan for this run."""
    assert config.tokens_per_rank is not None  # checked by resolve()
    stages, virtual_stages = stages_from_args(args)
    return functools.partial(
        plan,
        num_ranks=pool_size,
        tokens_per_rank=config.tokens_per_rank,
        algorithm=config.algorithm,
        balance=args.hdp_balance,
        cost=framed(cost_from_args(args, config), args, pool_size),
        pad_multiple=pad_multiple_from_args(args),
        stages=stages,
        virtual_stages=virtual_stages,
        expert_group=expert_group_from_args(args),
        offload=config.offload,
        host_bytes=planned_host_bytes(config) if config.offload else None,
        exchange=config.exchange,
    )


def loader_options(args: Any, config: HdpConfig, rank: int) -> LoaderOptions:
    """How this rank turns documents into model input."""
    return LoaderOptions(
        rank=rank,
        vocab_size=_vocab_size(args),
        eod=get_tokenizer().eod if args.eod_mask_loss else None,
        lookahead=config.lookahead,
        expert_group=expert_group_from_args(args),
    )


def _vocab_size(args: Any) -> int:
    """Entries of the tokenizer; of the padded embedding where a tokenizer does not say."""
    try:
        known = int(get_tokenizer().vocab_size)
    except (AttributeError, NotImplementedError, TypeError):
        return int(args.padded_vocab_size)
    return min(known, int(args.padded_vocab_size))


def check_longest(corpus: Corpus, pool_size: int, tokens_per_rank: int) -> None:
    """Raise `DataError` at the start of a run if its longest sequence does not fit into the pool."""
    if corpus.longest_sequence > pool_size * tokens_per_rank:
        needed = -(-corpus.longest_sequence // pool_size)
        raise DataError(
            f"the longest sequence has {corpus.longest_sequence} tokens, but the pool holds {pool_size} ranks x "
            f"{tokens_per_rank} = {pool_size * tokens_per_rank}: set --hdp-tokens-per-rank to at least "
            f"{needed + needed % 2}, or --seq-length to at most {pool_size * tokens_per_rank}, or use "
            f"{-(-corpus.longest_sequence // tokens_per_rank)} ranks"
        )
