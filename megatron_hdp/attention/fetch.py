"""Attention over fetched keys and values; which rows come from where is in `fetch_layout`.

T real rows of the own piece, H query heads, G key/value heads, D head size. The first round is on its way while the own
chunks are computed on. Backward fetches the rows again, which costs traffic instead of memory, and sends their
gradients back the way they came, in fp32.
"""

import torch
from torch import Tensor

from megatron_hdp.attention.comm import Exchange, Message
from megatron_hdp.attention.fetch_layout import Fetch, Transfer
from megatron_hdp.attention.kernels.interface import accumulate_dtype
from megatron_hdp.attention.merge import Merged
from megatron_hdp.attention.steps import Event, Job, Work


def fetch_forward(job: Job, fetch: Fetch, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Work[tuple[Tensor, Tensor]]:
    """Output [T, H, D] and log-sum-exp [T, H] of the own piece, in `accumulate_dtype`."""
    merged = Merged(q_THD)
    rows = _Rows(job, fetch, torch.stack((k_TGD, v_TGD)))
    coming = rows.post(0, "forward")
    yield Event.STARTED
    if fetch.diagonal is not None:
        result = job.forward(q_THD, k_TGD, v_TGD, segments=fetch.diagonal, what=rows.name("own chunks"))
        merged.add((0, q_THD.shape[0]), *result)
    for number in range(len(fetch.rounds)):
        yield Event.WAIT
        rows.take(number, coming)
        coming = rows.post(number + 1, "forward")
    yield Event.POSTED
    for block in fetch.blocks:
        q = q_THD[block.queries[0] : block.queries[1]]
        keys = rows.store[:, block.keys[0] : block.keys[1]]
        merged.add(block.queries, *job.forward(q, *keys, segments=block.segments, what=rows.name("fetched rows")))
    return merged.out, merged.lse


def fetch_backward(
    job: Job,
    fetch: Fetch,
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
) -> Work[tuple[Tensor, Tensor, Tensor]]:
    """Gradients of the own piece's q, k and v, in `accumulate_dtype`."""
    dtype = accumulate_dtype(q_THD.dtype)
    dq = q_THD.new_zeros(q_THD.shape, dtype=dtype)
    rows = _Rows(job, fetch, torch.stack((k_TGD, v_TGD)))
    gradients = _Rows(job, fetch, rows.own.new_zeros(rows.own.shape, dtype=dtype), zeros=True)
    coming = rows.post(0, "backward")
    yield Event.STARTED
    if fetch.diagonal is not None:
        tensors = (dout_THD, q_THD, k_TGD, v_TGD, out_THD, lse_TH)
        first, dk, dv = job.backward(tensors, segments=fetch.diagonal, what=rows.name("own chunks"))
        dq += first
        gradients.own[0] += dk
        gradients.own[1] += dv
    for number in range(len(fetch.rounds)):
        yield Event.WAIT
        rows.take(number, coming)
        coming = rows.post(number + 1, "backward")
    for block in fetch.blocks:
        part = slice(*block.queries)
        keys = slice(*block.keys)
        k, v = rows.store[:, keys]
        tensors = (dout_THD[part], q_THD[part], k, v, out_THD[part], lse_TH[part])
        dq_block, dk, dv = job.backward(tensors, segments=block.segments, what=rows.name("fetched rows"))
        dq[part] += dq_block
        gradients.store[0, keys] += dk
        gradients.store[1, keys] += dv
    returning: Exchange | None = None
    for number in reversed(range(len(fetch.rounds))):
        returning = gradients.post_back(number)
        if number > 0:
            yield Event.WAIT
            gradients.take_back(number, returning)
    yield Event.POSTED
    if returning is not None:
        gradients.take_back(0, returning)
    for stored, own in fetch.copies:
        gradients.own[:, own[0] : own[1]] += gradients.store[:, stored[0] : stored[1]]
    return dq, gradients.own[0], gradients.own[1]


class _Rows:
    """Rows [2, rows, G, D] of the own piece and of the store: keys and values, or their gradients."""

    def __init__(self, job: Job, fetch: Fetch, own: Tensor, *, zeros: bool = False) -> None:
        self._job, self._fetch = job, fetch
        self.own = own
        shape = (2, fetch.store_rows, *own.shape[2:])
        self.store = own.new_zeros(shape) if zeros else own.new_empty(shape)
        if not zeros:
            for stored, rows in fetch.copies:
                self.store[:, stored[0] : stored[1]] = own[:, rows[0] : rows[1]]

    def post(self, number: int, direction: str) -> Exchange | None:
        """Send and receive the rows of a round; None beyond the last."""
        if number >= len(self._fetch.rounds):
            return None
        this = self._fetch.rounds[number]
        return self._post(this.sends, this.receives, number, f"keys and values, {direction}")

    def take(self, number: int, coming: Exchange | None) -> None:
        """Put the rows of a round into the store."""
        for transfer, rows in self._arrived(self._fetch.rounds[number].receives, coming):
            self._part(transfer).copy_(rows)

    def post_back(self, number: int) -> Exchange | None:
        """Send gradients of the rows of a round to where they came from."""
        this = self._fetch.rounds[number]
        return self._post(this.receives, this.sends, number, "gradients of keys and values, backward")

    def take_back(self, number: int, coming: Exchange | None) -> None:
        """Add the gradients that others have for rows that were sent to them."""
        for transfer, rows in self._arrived(self._fetch.rounds[number].sends, coming):
            self._part(transfer).add_(rows)

    def name(self, what: str) -> str:
        """For the trace."""
        return f"{what}, sequence {self._fetch.view.sequence}"

    def _post(
        self, sends: tuple[Transfer, ...], receives: tuple[Transfer, ...], number: int, task: str
    ) -> Exchange | None:
        out: list[Message] = []
        for peer, transfers in _by_peer(sends).items():
            parts = [self._part(transfer) for transfer in transfers]
            out.append((torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous(), peer))
        into: list[Message] = []
        for peer, transfers in _by_peer(receives).items():
            rows = sum(transfer.rows[1] - transfer.rows[0] for transfer in transfers)
            into.append((self.own.new_empty((2, rows, *self.own.shape[2:])), peer))
        task = f"{task} round {number + 1} of {len(self._fetch.rounds)},"
        return self._job.exchange(out, into, self._fetch.view.sequence, task)

    def _arrived(self, receives: tuple[Transfer, ...], coming: Exchange | None) -> list[tuple[Transfer, Tensor]]:
        assert coming is not None
        result = []
        for message, transfers in zip(coming.wait(), _by_peer(receives).values()):
            parts = message.split([transfer.rows[1] - transfer.rows[0] for transfer in transfers], dim=1)
            result += list(zip(transfers, parts))
        return result

    def _part(self, transfer: Transfer) -> Tensor:
        rows = self.own if transfer.own else self.store
        return rows[:, transfer.rows[0] : transfer.rows[1]]


def _by_peer(transfers: tuple[Transfer, ...]) -> dict[int, list[Transfer]]:
    """Transfers with the same peer are one message; both sides order them by chunk."""
    peers: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        peers.setdefault(transfer.peer, []).append(transfer)
    return peers
