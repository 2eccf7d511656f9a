"""In which order one column runs its micro-batches on one pipeline stage: Megatron 0.19's schedules as pure data."""

from typing import NamedTuple

FORWARD, BACKWARD = 0, 1


class Op(NamedTuple):
    """One micro-batch through one model part of one stage, in one direction."""

    phase: int
    """`FORWARD` or `BACKWARD`."""
    slot: int
    """Which of the column's micro-batches."""
    part: int
    """Which of the stage's model parts, 0 .. virtual_stages - 1; Megatron's model chunk."""


def warmup(count: int, stage: int, stages: int, virtual_stages: int) -> int:
    """Forward ops that the stage runs ahead of its first backward op's partner."""
    if virtual_stages == 1:
        return min(stages - stage - 1, count)
    return min(2 * (stages - stage - 1) + (virtual_stages - 1) * stages, count * virtual_stages)


def schedule(count: int, stage: int, stages: int, virtual_stages: int = 1) -> list[Op]:
    """Order of operations of a column with ``count`` micro-batches on one stage.

    With one stage every micro-batch runs forward and backward before the next; with more, 1F1B (Narayanan et al. 2021,
    arXiv:2104.04473) or, with virtual_stages > 1, its interleaved form, where ``stages`` micro-batches go through one
    model part before the next part. Without a pipeline and in both others, the order of a column with fewer
    micro-batches is the order of one with more, less the slots that it does not have.

    Args:
        count: micro-batches; a multiple of ``stages`` if virtual_stages > 1.
        stage: 0 .. stages - 1.
        stages: pipeline stages.
        virtual_stages: model parts per stage.
    """
    total = count * virtual_stages
    ahead = warmup(count, stage, stages, virtual_stages)
    ops = [op_at(FORWARD, k, stages, virtual_stages) for k in range(ahead)]
    for k in range(ahead, total):
        ops.append(op_at(FORWARD, k, stages, virtual_stages))
        ops.append(op_at(BACKWARD, k - ahead, stages, virtual_stages))
    return ops + [op_at(BACKWARD, k, stages, virtual_stages) for k in range(total - ahead, total)]


def op_at(phase: int, k: int, stages: int, virtual_stages: int) -> Op:
    """The k-th op of its phase on any stage."""
    round_, rest = divmod(k, stages * virtual_stages)
    part, slot = divmod(rest, stages)
    return Op(phase, round_ * stages + slot, part if phase == FORWARD else virtual_stages - 1 - part)
