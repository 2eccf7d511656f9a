"""Auxiliary losses of expert routers, defined per sequence, so that no layout changes them (docs/experts.md).

For one router and one sequence of s tokens, k of E experts chosen for each: c[e] tokens chose expert e, P[e] is the sum
of the router's scores for it. The balance loss is E / (k s^2) * sum over e of c[e] P[e], the z-loss the mean of
logsumexp(logits)^2. Both enter the total times s, as the loss of the tokens does, and the total is divided by the
tokens of the global batch.

The gradient of the balance loss needs c of the whole sequence, which other ranks hold parts of, but only in backward.
So counts are noted layer by layer in forward and summed once at the end of the model part's forward, all layers
together: around each sequence's ring, along the same neighbours as keys and values.

T rows of this process, N pieces of the micro-batch, E experts, L routers of the model part.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_hdp.attention.comm import RingComm
from megatron_hdp.attention.placing import placed
from megatron_hdp.errors import PlanError
from megatron_hdp.types import MicroBatch


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Which piece of the micro-batch each row of this process belongs to."""

    piece_T: Tensor
    """Index of the row's piece, int64; N for padding."""
    real_T: Tensor
    """Whether the row is a token, bool; False for padding."""
    length_N: Tensor
    """Tokens of every piece's whole sequence, fp32, at least 1; with one entry more for padding, [N + 1]."""


def token_rows(micro_batch: MicroBatch, total: int, part: slice, device: torch.device) -> TokenRows:
    """The rows ``part`` of the ``total`` rows of ``micro_batch``'s tensors (sequence parallelism cuts them).

    Rows lie as `attention.layout` says: piece after piece, the real rows of a piece first. Raises PlanError if the
    pieces fill more than ``total`` rows.
    """
    pieces = micro_batch.pieces
    if micro_batch.tokens > total:
        raise PlanError(f"a micro-batch of {micro_batch.tokens} tokens cannot lie in {total} rows")
    piece_T = torch.full((total,), len(pieces), dtype=torch.int64)
    begin = 0
    for index, piece in enumerate(pieces):
        piece_T[begin : begin + piece.real_tokens] = index
        begin += piece.tokens
    piece_T = piece_T[part]
    length_N = torch.tensor([*(max(1, piece.length) for piece in pieces), 1], dtype=torch.float32)
    return TokenRows(placed(piece_T, device), placed(piece_T < len(pieces), device), placed(length_N, device))


class Routing:
    """What the routers of one model part chose for one micro-batch: noted in forward, needed in backward.

    A layer that is recomputed notes nothing a second time, and finds the sums of the first forward.
    """

    def __init__(self, rows: TokenRows, routers: int) -> None:
        self.rows = rows
        self._chosen: list[Tensor | None] = [None] * routers
        self._scores: list[Tensor | None] = [None] * routers
        self._squares: list[Tensor | None] = [None] * routers
        self._weights_LNE: Tensor | None = None

    def note_choice(self, router: int, chosen_TE: Tensor, scores_TE: Tensor) -> None:
        """Note which experts were chosen (bool) and the scores (floating) of the ``router``-th router."""
        if self._chosen[router] is None:
            self._chosen[router] = self._by_piece(chosen_TE.long())
            self._scores[router] = self._by_piece(scores_TE.detach().float())

    def note_squares(self, router: int, squares_T: Tensor) -> None:
        """Note the z-loss of every row of the ``router``-th router."""
        if self._squares[router] is None:
            self._squares[router] = self._by_piece(squares_T.detach().float())

    def add_up(self, sum_up: Callable[[Tensor], Tensor], experts_per_token: int) -> None:
        """Complete the counts of every router: ``sum_up`` is given those of this process, int64 [L, N, E], and returns
        those of the whole sequences. Does nothing unless choices were noted."""
        noted = [chosen for chosen in self._chosen if chosen is not None]
        if not noted:
            return
        assert len(noted) == len(self._chosen), "some routers of the model part did not run"
        counts_LNE = sum_up(torch.stack(noted)[:, :-1].contiguous())
        experts = counts_LNE.shape[2]
        scale_N1 = experts / (experts_per_token * self.rows.length_N[:-1, None])
        # padding belongs to no sequence, and weighs nothing
        self._weights_LNE = torch.nn.functional.pad(counts_LNE * scale_N1, (0, 0, 0, 1))

    def weights_TE(self, router: int) -> Tensor:
        """Gradient of the balance loss times the sequence's tokens by the scores: E / (k s) c[e] of each row's
        sequence, 0 for padding; fp32 [T, E]."""
        assert self._weights_LNE is not None, "add_up() comes before backward"
        return self._weights_LNE[router][self.rows.piece_T]

    def balance_losses(self) -> list[Tensor]:
        """For the log, after `add_up`: per router the sum of the sequences' balance losses, this process's share."""
        if self._weights_LNE is None:
            return []
        scores = [score for score in self._scores if score is not None]
        per_sequence_LN = (self._weights_LNE * torch.stack(scores)).sum(2) / self.rows.length_N
        return list(per_sequence_LN.sum(1))

    def z_losses(self) -> list[Tensor]:
        """For the log: per router the sum of the sequences' z-losses, this process's share."""
        noted = [squares for squares in self._squares if squares is not None]
        return [(squares[:-1] / self.rows.length_N[:-1]).sum() for squares in noted]

    def _by_piece(self, values: Tensor) -> Tensor:
        """Rows added up by piece: [T, ...] to [N + 1, ...], the last one padding."""
        sums = values.new_zeros(self.rows.length_N.shape[0], *values.shape[1:])
        return sums.index_add_(0, self.rows.piece_T, values)


def add_balance_loss(
    output: Tensor, scores_TE: Tensor, routing: Routing, router: int, coefficient: float, scale: Callable[[], Any]
) -> Tensor:
    """``output`` unchanged; in backward the scores get the gradient of ``coefficient`` * balance loss * tokens.

    ``scale`` is asked in backward for the factor of the whole loss (loss scaling of fp16).
    """
    return _BalanceLoss.apply(output, scores_TE, routing, router, coefficient, scale)  # type: ignore[no-any-return, no-untyped-call]


class _BalanceLoss(torch.autograd.Function):  # type: ignore[misc]
    """Saves no tensor: what it needs is not known before the end of forward, and then lies in ``routing``."""

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        scores_TE: Tensor,
        routing: Routing,
        router: int,
        coefficient: float,
        scale: Callable[[], Any],
    ) -> Tensor:
        ctx.routing, ctx.router, ctx.coefficient, ctx.scale = routing, router, coefficient, scale
        ctx.dtype = scores_TE.dtype
        return output.view_as(output)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, doutput: Tensor) -> tuple[Tensor | None, ...]:
        dscores_TE = ctx.routing.weights_TE(ctx.router) * (ctx.coefficient * ctx.scale())
        return doutput, dscores_TE.to(ctx.dtype), None, None, None, None


def ring_sums(counts_LNE: Tensor, micro_batch: MicroBatch, rank: int, comm: RingComm | None) -> Tensor:
    """Counts of whole sequences from those of the pieces of ``micro_batch`` on pool rank ``rank``; int64 [L, N, E].

    Each rank's own counts walk once round the ring. Exchanges are posted piece by piece in the order of the
    micro-batch, as those of attention: no two ranks wait for each other in a circle. Raises RankLostError if a rank of
    a ring is gone.
    """
    total_LNE = counts_LNE.clone()
    for index, piece in enumerate(micro_batch.pieces):
        if piece.ring.size == 1:
            continue
        assert comm is not None, "shared pieces need a communicator"
        before, after = piece.ring.neighbours(rank)
        passing_LE = counts_LNE[:, index].contiguous()
        for _ in range(piece.ring.size - 1):
            coming_LE = torch.empty_like(passing_LE)
            task = "counts of expert choices, forward"
            comm.exchange([(passing_LE, after)], [(coming_LE, before)], sequence=piece.sequence, task=task).wait()
            total_LNE[:, index] += coming_LE
            passing_LE = coming_LE
    return total_LNE
