"""What all ranks of a run must know together while they measure."""

from typing import Any

import torch
import torch.distributed as dist


class Everyone:
    """All processes of the run; every call is collective."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def most(self, *values: float) -> tuple[float, ...]:
        """The largest of every value over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tuple(tensor.tolist())

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank; on every rank."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values
