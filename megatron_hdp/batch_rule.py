"""How many sequences a step takes, and that a resumed run keeps it. No torch, no Megatron.

A step's batch is a function of (data, seed, step): under another rule the same step number means other sequences, so
that a resumed run would train on some of them twice and never on others.
"""

from dataclasses import dataclass

from megatron_hdp.errors import ConfigError


@dataclass(frozen=True)
class BatchRule:
    """What cuts the data into steps."""

    batch_tokens: int | None
    """--hdp-batch-tokens, or None where a step has a number of sequences."""
    sequences: int
    """Sequences of a step; with a token budget, those that the learning-rate schedule counts."""

    @property
    def flags(self) -> str:
        """The flags that ask for this rule."""
        budget = "" if self.batch_tokens is None else f"--hdp-batch-tokens {self.batch_tokens} "
        return f"{budget}--global-batch-size {self.sequences}"


def first_rule(batch_tokens: int | None, sequences: int | None, *, context: int, pool_size: int) -> BatchRule:
    """The rule of a run that starts: what was asked for, else as many sequences as ranks in the pool.

    ``batch_tokens`` and ``sequences`` are --hdp-batch-tokens and --global-batch-size, None where not given.
    """
    if sequences is None:
        sequences = pool_size if batch_tokens is None else max(1, batch_tokens // context)
    return BatchRule(batch_tokens, sequences)


def resumed_rule(batch_tokens: int | None, sequences: int | None, saved: BatchRule, *, checkpoint: str) -> BatchRule:
    """The rule of a run that goes on: that of the checkpoint, which what was asked for may not contradict.

    ``checkpoint`` names it in the message, as "--load DIR, iteration K". Raises `ConfigError` with both rules.
    """
    if batch_tokens is None and sequences is None:
        return saved
    asked = BatchRule(batch_tokens, saved.sequences if sequences is None else sequences)
    if asked != saved:
        raise ConfigError(
            f"{checkpoint}, was made with {saved.flags}, and this run asks for {asked.flags}: its next step would not "
            f"begin where the checkpoint ends, so that data would be repeated or left out. Set {saved.flags}, or take "
            "the weights alone and start at step 0 with --finetune"
        )
    return saved
