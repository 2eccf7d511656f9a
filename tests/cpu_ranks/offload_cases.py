"""What the tests of offloading share: a LLaMA-like stack in plain torch, late copies, and a count of live bytes."""

import ctypes
import random
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from megatron_hdp.offload.arena import HostArena
from megatron_hdp.offload.context import ActivationOffload

torch.set_num_threads(1)  # tiny matrices: threads that wait for each other cost more than they save

CPU = torch.device("cpu")
HEADS = 4


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(hidden) + 0.5)

    def forward(self, x_SD: Tensor) -> Tensor:
        return self.weight * (x_SD * torch.rsqrt(x_SD.pow(2).mean(-1, keepdim=True) + 1e-5))


class LlamaLayer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = hidden * 8 // 3
        self.norm_1, self.norm_2 = Norm(hidden), Norm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up, self.down = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)

    def forward(self, x_SD: Tensor, angles_SE: Tensor) -> Tensor:
        q_HSE, k_HSE, v_HSE = (
            t.unflatten(-1, (HEADS, -1)).transpose(0, 1) for t in self.qkv(self.norm_1(x_SD)).chunk(3, dim=-1)
        )
        q_HSE, k_HSE = rotated(q_HSE, angles_SE), rotated(k_HSE, angles_SE)
        out_HSE = F.scaled_dot_product_attention(q_HSE[None], k_HSE[None], v_HSE[None], is_causal=True)[0]
        x_SD = x_SD + self.proj(out_HSE.transpose(0, 1).flatten(1))
        gate, up = self.up(self.norm_2(x_SD)).chunk(2, dim=-1)
        return x_SD + self.down(F.silu(gate) * up)


def rotated(x_HSE: Tensor, angles_SE: Tensor) -> Tensor:
    low, high = x_HSE.chunk(2, dim=-1)
    return x_HSE * angles_SE.cos() + torch.cat((-high, low), dim=-1) * angles_SE.sin()


class Stack(nn.Module):
    """``recompute``: None, "reentrant", "not reentrant", or "inside" (the layer tells that it begins in there)."""

    def __init__(self, layers: int, hidden: int = 64, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.hidden = hidden
        self.layers = nn.ModuleList([LlamaLayer(hidden) for _ in range(layers)])

    def forward(
        self,
        x_SD: Tensor,
        offload: ActivationOffload | None = None,
        ratio: float = 0.0,
        recompute: str | None = None,
    ) -> Tensor:
        angles_SE = torch.outer(torch.arange(x_SD.shape[0]), torch.arange(1, self.hidden // HEADS + 1) / 7.0)
        if offload is None:
            return self._run(x_SD, angles_SE, None, recompute)
        with offload.micro_batch(ratio, len(self.layers)):
            return self._run(x_SD, angles_SE, offload, recompute)

    def _run(self, x_SD: Tensor, angles_SE: Tensor, offload: ActivationOffload | None, recompute: str | None) -> Tensor:
        for index, layer in enumerate(self.layers):

            def told(x: Tensor, angles: Tensor, index: int = index, layer: nn.Module = layer) -> Tensor:
                if offload is not None:
                    offload.layer(index, x)
                return layer(x, angles)

            if recompute is None:
                x_SD = told(x_SD, angles_SE)
            elif recompute == "inside":
                x_SD = checkpoint(told, x_SD, angles_SE, use_reentrant=True)
            else:
                if offload is not None:
                    offload.layer(index, x_SD)
                x_SD = checkpoint(layer, x_SD, angles_SE, use_reentrant=recompute == "reentrant")
        return x_SD


def batch(tokens: int, hidden: int, seed: int) -> Tensor:
    """Input of a stage, shape [tokens, hidden]: needs a gradient, as what an embedding gives does."""
    values = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_() * 1.0


class LateStreams:
    """Two copy streams whose copies run as late as they may: when compute waits, or now and then (``eager``).

    What a copy reads or writes must be alive when it runs. Compute itself is on the CPU and has run when it is queued.
    """

    def __init__(self, eager: float = 0.0, seed: int = 0) -> None:
        self.host_copy_seconds = 0.0
        self.queues: dict[str, deque[tuple[Any, ...]]] = {"compute": deque()}
        self.over: set[int] = set()
        self.owner: dict[int, str] = {}
        self.eager = eager
        self.random = random.Random(seed)
        self.copies = 0

    def current(self) -> str:
        return "compute"

    def new(self) -> str:
        name = f"copy {len(self.queues)}"
        self.queues[name] = deque()
        return name

    def record(self, stream: str, *, timed: bool = False) -> int:
        event = len(self.owner)
        self.owner[event] = stream
        if stream == "compute":
            self.over.add(event)
        else:
            self.queues[stream].append(("record", event))
        return event

    def wait(self, stream: str, event: int) -> None:
        if stream == "compute":
            self.run_until(event)
        else:
            self.queues[stream].append(("wait", event))

    def done(self, event: int) -> bool:
        if event not in self.over and self.random.random() < self.eager:
            self.run_until(event)
        return event in self.over

    def seconds(self, begin: int, end: int) -> float | None:
        return 0.25 if end in self.over else None

    def copy(self, target: Tensor, source: Tensor, stream: str) -> None:
        assert target.nbytes == source.nbytes
        ends = [(StorageWeakRef(t.untyped_storage()), t.data_ptr(), t.storage_offset()) for t in (target, source)]
        self.queues[stream].append(("copy", *ends, target.nbytes))

    def hold(self, tensor: Tensor, stream: str) -> None:
        raise AssertionError("nothing here is on a stream of its own")

    def synchronize(self, stream: str) -> None:
        while self.queues[stream]:
            self.step(stream)

    def run_until(self, event: int) -> None:
        while event not in self.over:
            self.step(self.owner[event])

    def step(self, stream: str) -> None:
        kind, *what = self.queues[stream].popleft()
        if kind == "wait":
            self.run_until(what[0])
        elif kind == "record":
            self.over.add(what[0])
        else:
            self.run_copy(*what)

    def run_copy(self, target: tuple[Any, ...], source: tuple[Any, ...], size: int) -> None:
        for reference, _, _ in (target, source):
            assert not reference.expired(), "memory was given back before its copy was over"
        storage = torch.UntypedStorage._new_with_weak_ptr(source[0].cdata)
        if storage.nbytes() >= source[2] + size:  # else emptied by its owner: a device would copy anything
            ctypes.memmove(target[1], source[1], size)
            self.copies += 1


def make_offload(bytes: int = 2**24, streams: Any = None, **options: Any) -> ActivationOffload:
    return ActivationOffload(HostArena(bytes, CPU), streams=streams, **options)


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations made inside the context and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
                self.storages[leaf.untyped_storage()._cdata] = StorageWeakRef(leaf.untyped_storage())
        return result

    def bytes(self) -> int:
        self.storages = {key: storage for key, storage in self.storages.items() if not storage.expired()}
        return sum(torch.UntypedStorage._new_with_weak_ptr(s.cdata).nbytes() for s in self.storages.values())
