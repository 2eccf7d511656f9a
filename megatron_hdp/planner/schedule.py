"""In which order one column runs its micro-batches on one pipeline stage: Megatron 0.19's schedules as pure data."""

from typing import Literal, NamedTuple

FORWARD, BACKWARD = 0, 1
Messages = Literal["free", "together", "apart"]
"""How a stage waits for its neighbours: never; for all messages of an exchange at once, as 1F1B and interleaved
schedules with --no-overlap-p2p-communication do; each by itself, as interleaved schedules do by default."""


class Op(NamedTuple):
    """One micro-batch through one model part of one stage, in one direction."""

    phase: int
    """`FORWARD` or `BACKWARD`."""
    slot: int
    """Which of the column's micro-batches."""
    part: int
    """Which of the stage's model parts, 0 .. virtual_stages - 1; Megatron's model chunk."""


class Exchange(NamedTuple):
    """A stage passes messages to its neighbours and asks for theirs.

    It goes on when what it sends has been asked for, because NCCL and gloo buffer no large message for a sender.
    """

    sends: tuple[Op, ...]
    """Ops of this stage whose results leave."""
    asks: tuple[Op, ...]
    """Ops of this stage whose inputs may come from now on."""
    waits: bool = True
    """It also goes on only when those inputs came; else the ops wait for them."""


def schedule(count: int, stage: int, stages: int, virtual_stages: int = 1) -> list[Op]:
    """Order of operations of a column with ``count`` micro-batches on one stage.

    With one stage every micro-batch runs forward and backward before the next; with more, 1F1B (Narayanan et al. 2021,
    arXiv:2104.04473) or, with virtual_stages > 1, its interleaved form, where ``stages`` micro-batches go through one
    model part before the next part. In all of them, the order of a column with fewer micro-batches is the order of one
    with more, less the slots that it does not have.

    Args:
        count: micro-batches; a multiple of ``stages`` if virtual_stages > 1.
        stage: 0 .. stages - 1.
        stages: pipeline stages.
        virtual_stages: model parts per stage.
    """
    return [step for step in steps(count, stage, stages, virtual_stages, "free") if isinstance(step, Op)]


def steps(count: int, stage: int, stages: int, virtual_stages: int, messages: Messages) -> list[Op | Exchange]:
    """`schedule` with the exchanges of messages between the ops, in the order in which the stage comes to them."""
    total = count * virtual_stages
    forward = [_op(FORWARD, k, stages, virtual_stages) for k in range(total)]
    backward = [_op(BACKWARD, k, stages, virtual_stages) for k in range(total)]
    if virtual_stages == 1:
        found = _one_forward_one_backward(forward, backward, min(stages - stage - 1, count))
    else:
        ahead = 2 * (stages - stage - 1) + (virtual_stages - 1) * stages
        found = _interleaved(forward, backward, min(ahead, total), messages == "apart")
    if messages == "free":
        return [step for step in found if isinstance(step, Op)]
    return [
        Exchange(
            tuple(op for op in step.sends if next_place(op, stage, stages, virtual_stages)),
            tuple(op for op in step.asks if previous_place(op, stage, stages, virtual_stages)),
            step.waits,
        )
        if isinstance(step, Exchange)
        else step
        for step in found
    ]


def next_place(op: Op, stage: int, stages: int, virtual_stages: int) -> tuple[int, Op] | None:
    """Stage and op that take over the op's result from another stage; None where nothing leaves the stage."""
    return _moved(op, stage, stages, virtual_stages, 1 if op.phase == FORWARD else -1)


def previous_place(op: Op, stage: int, stages: int, virtual_stages: int) -> tuple[int, Op] | None:
    """Stage and op of which the op takes over the result; None where nothing comes from another stage."""
    return _moved(op, stage, stages, virtual_stages, -1 if op.phase == FORWARD else 1)


def _moved(op: Op, stage: int, stages: int, virtual_stages: int, by: int) -> tuple[int, Op] | None:
    """The op's micro-batch ``by`` model parts on; the model's parts lie on stages 0, 1, ... and round again."""
    place = op.part * stages + stage + by
    return (place % stages, op._replace(part=place // stages)) if 0 <= place < stages * virtual_stages else None


def _one_forward_one_backward(forward: list[Op], backward: list[Op], ahead: int) -> list[Op | Exchange]:
    """1F1B: ``ahead`` forward ops, pairs, the remaining backward ops."""
    found: list[Op | Exchange] = []
    for op in forward[:ahead]:
        found += [Exchange((), (op,)), op, Exchange((op,), ())]
    found.append(Exchange((), tuple(forward[ahead : ahead + 1])))
    for k, op in enumerate(forward[ahead:]):
        coming = tuple(forward[ahead + k + 1 : ahead + k + 2])
        found += [op, Exchange((op,), (backward[k],)), backward[k], Exchange((backward[k],), coming)]
    for op in backward[len(backward) - ahead :]:
        found += [Exchange((), (op,)), op, Exchange((op,), ())]
    return found


def _interleaved(forward: list[Op], backward: list[Op], ahead: int, apart: bool) -> list[Op | Exchange]:
    """Interleaved 1F1B: the input of the next op of each phase is asked for when the last one's result leaves."""
    pairs = len(forward) - ahead
    found: list[Op | Exchange] = [Exchange((), tuple(forward[:1]))]
    for k, op in enumerate(forward[:ahead]):
        coming = tuple(forward[k + 1 : k + 2])
        if k + 1 < ahead or not pairs:
            found += [op, Exchange((op,), coming)]
        elif apart:
            found += [op, Exchange((op,), coming), Exchange((), (backward[0],), False)]
        else:
            found += [op, Exchange((op,), (*coming, backward[0]))]
    if not pairs:
        found.append(Exchange((), tuple(backward[:1])))
    for k, (op, back) in enumerate(zip(forward[ahead:], backward[:pairs], strict=True)):
        next_forward, next_back = tuple(forward[ahead + k + 1 : ahead + k + 2]), tuple(backward[k + 1 : k + 2])
        if apart:
            found += [op, Exchange((op,), next_forward, False), back, Exchange((back,), next_back, False)]
        else:
            found += [op, back, Exchange((op, back), (*next_forward, *next_back))]
    for k, op in enumerate(backward[pairs:], start=pairs):
        found += [op, Exchange((op,), tuple(backward[k + 1 : k + 2]))]
    return found


def _op(phase: int, k: int, stages: int, virtual_stages: int) -> Op:
    """The k-th op of its phase on any stage."""
    turn, rest = divmod(k, stages * virtual_stages)
    part, slot = divmod(rest, stages)
    return Op(phase, turn * stages + slot, part if phase == FORWARD else virtual_stages - 1 - part)
