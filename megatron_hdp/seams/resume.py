"""The run that made a checkpoint, read from the arguments that Megatron pickles into it before anything is set up."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from megatron.training import checkpointing

from megatron_hdp.batch_rule import BatchRule
from megatron_hdp.errors import ConfigError


@dataclass(frozen=True)
class SavedRun:
    """The run that made the checkpoint."""

    iteration: int
    args: Any
    """Megatron's parsed arguments of that run."""

    @property
    def rule(self) -> BatchRule | None:
        """Its batch rule; None if it ran without --hdp."""
        sequences = getattr(self.args, "hdp_sequences_per_step", None)
        return None if sequences is None else BatchRule(getattr(self.args, "hdp_batch_tokens", None), int(sequences))


def saved_run(args: Any) -> SavedRun | None:
    """The run whose data order ``args`` goes on with: that of the checkpoint in --load. None for a start at step 0.

    Raises `ConfigError` for a kind of checkpoint that cannot be looked into before the ranks are connected.
    """
    if args.non_persistent_ckpt_type == "local":
        raise ConfigError(
            "--hdp cannot run with --non-persistent-ckpt-type local: such a checkpoint cannot be read before the ranks "
            "are connected, and how its steps cut the data must be known by then; use --non-persistent-ckpt-type global"
        )
    if args.load is None or args.finetune:
        return None
    state, release = _common_state(args)
    if not state or release or not state.get("iteration") or state.get("args") is None:
        return None  # a release is weights alone: Megatron starts at step 0
    return SavedRun(int(state["iteration"]), state["args"])


def _common_state(args: Any) -> tuple[Any, bool]:
    """Iteration and arguments in the checkpoint that Megatron will load, None if there is none; whether a release."""
    if args.non_persistent_ckpt_type is None:
        iteration, release = 0, False
        if checkpointing.checkpoint_exists(args.load):
            iteration, release = checkpointing.read_metadata(checkpointing.get_checkpoint_tracker_filename(args.load))
        elif not args.ckpt_step:
            return None, False
        file = checkpointing.find_checkpoint_rank_0(args.load, args.ckpt_step or iteration, release)
        if file is not None and os.path.isfile(file):
            # one file with a whole model in it: mapped, only what is looked at is read
            return torch.load(file, map_location="cpu", mmap=True), release
    state, _, release, _ = checkpointing._load_base_checkpoint(args.load, args, rank0=True)
    return state, release
