"""Loaders, pinned memory, accelerators: torch takes its plain CPU paths, and draws where a GPU machine would."""

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
    loader.__iter__ = _without_drawing(DataLoader.__iter__)
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


def _without_drawing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Starting a loader draws a seed for its workers from the host's generator. On a GPU machine dropout has another
    one; here they are one, so the state is put back: a resumed run starts its loader later than the run it continues.
    """

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        state = torch.default_generator.get_state()
        try:
            return original(self)
        finally:
            torch.default_generator.set_state(state)

    return iterate


def _no() -> bool:
    return False


def _none(check_available: bool = False) -> None:
    return None
