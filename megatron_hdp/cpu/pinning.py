"""Pinned memory and accelerators: torch is told that there is neither, so that it takes its plain CPU paths."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader


def apply() -> None:
    """Replace the functions. Call once."""
    tensor: Any = torch.Tensor
    tensor.pin_memory = _pin_memory
    tensor.record_stream = _record_stream
    loader: Any = DataLoader
    loader.__init__ = _without_pinning(DataLoader.__init__)
    accelerator: Any = getattr(torch, "accelerator", None)
    if accelerator is not None:
        # optimizers ask it whether a GPU graph is being captured, loaders whether to pin
        accelerator.is_available = _no
        accelerator.current_accelerator = _none


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Tensor.pin_memory: a copy, as on a GPU machine, so that later writes to the source do not show in it."""
    return self.clone()


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    """Tensor.record_stream: host memory is not handed on while a stream may still read it."""


def _without_pinning(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("pin_memory", None)
        kwargs.pop("pin_memory_device", None)
        original(self, *args, **kwargs)

    return init


def _no() -> bool:
    return False


def _none(check_available: bool = False) -> None:
    return None
