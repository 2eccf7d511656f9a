"""'cuda' as a device name means the CPU: factory functions, Tensor methods, tensor types, torch.load."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._device

_CPU = torch.device("cpu")

_FACTORIES = (
    "arange as_tensor asarray bartlett_window blackman_window empty empty_like empty_permuted empty_quantized "
    "empty_strided eye from_file full full_like hamming_window hann_window kaiser_window linspace logspace normal ones "
    "ones_like rand rand_like randint randint_like randn randn_like randperm range scalar_tensor "
    "sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor sparse_coo_tensor sparse_csc_tensor "
    "sparse_csr_tensor tensor tril_indices triu_indices zeros zeros_like"
).split()

_NEW_METHODS = "new_empty new_empty_strided new_full new_ones new_tensor new_zeros".split()

_TENSOR_TYPES = (
    "BFloat16Tensor BoolTensor ByteTensor CharTensor DoubleTensor FloatTensor HalfTensor IntTensor LongTensor "
    "ShortTensor"
).split()


def cpu_device(device: Any) -> Any:
    """The CPU for any way of writing a CUDA device ('cuda:1', 1, torch.device); everything else unchanged."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return _CPU
    if isinstance(device, str):
        return _CPU if device.startswith("cuda") else device
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    return device


def apply() -> None:
    """Replace the functions. Call once."""
    # `with torch.device("meta")` knows functions from a list made on first use: make it while they are torch's own
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        _wrap(torch, name)
    _wrap(torch.fft, "fftfreq")
    _wrap(torch.fft, "rfftfreq")
    for name in _NEW_METHODS:
        _wrap(torch.Tensor, name)
    tensor: Any = torch.Tensor
    tensor.to = _to(torch.Tensor.to)
    tensor.cuda = _cuda
    tensor.type = _type(torch.Tensor.type)
    for name in _TENSOR_TYPES:
        setattr(torch.cuda, name, getattr(torch, name))
    # Before torch's own readers: storages that a GPU run saved come back as they are stored, in host memory.
    torch.serialization.register_package(1, _no_tag, _restore_on_cpu)


def _wrap(owner: Any, name: str) -> None:
    original = getattr(owner, name, None)
    if original is not None:
        setattr(owner, name, _factory(original))


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    """``original`` with its device and pinning keywords answered on the CPU."""

    @functools.wraps(original)
    def factory(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = cpu_device(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return factory


def _to(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = cpu_device(kwargs["device"])
        elif args:
            args = (cpu_device(args[0]), *args[1:])
        return original(self, *args, **kwargs)

    return to


def _cuda(
    self: torch.Tensor, device: Any = None, non_blocking: bool = False, memory_format: Any = torch.preserve_format
) -> torch.Tensor:
    """Tensor.cuda: the tensor is there already."""
    return self


def _type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Tensor.type speaks of CUDA types, because scripts compare the answer with 'torch.cuda.FloatTensor'."""

    @functools.wraps(original)
    def type_of(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            return original(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_of


def _no_tag(storage: Any) -> None:
    """Never tag a storage on saving; torch's own rule tags it 'cpu'."""


def _restore_on_cpu(storage: Any, location: str) -> Any:
    return storage if location.startswith("cuda") else None
