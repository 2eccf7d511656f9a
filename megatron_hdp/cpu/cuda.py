"""The functions of torch.cuda, answered by the host: device, properties, memory, random state, profiling marks."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from megatron_hdp.cpu import streams


@dataclass(frozen=True)
class DeviceProperties:
    """Stands for the answer of torch.cuda.get_device_properties: the host as an Ampere-class device.

    8.0 is the lowest compute capability that Megatron's checks accept, and opens no path that needs newer hardware.
    """

    total_memory: int
    name: str = "cpu"
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 1
    warp_size: int = 32


def current_device() -> int:
    """The rank's place on its host, read when asked: a rank may be forked after the mode was turned on."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def device_count() -> int:
    """Ranks on this host."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), current_device() + 1)


class _Generators:
    """Stands for torch.cuda.default_generators: the CPU's generator under every index."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return device_count()


def _host_bytes(pages: str) -> int:
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Properties of the host. total_memory in bytes."""
    return DeviceProperties(_host_bytes("SC_PHYS_PAGES"))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """(free, total) host memory in bytes."""
    return _host_bytes("SC_AVPHYS_PAGES"), _host_bytes("SC_PHYS_PAGES")


class Device(contextlib.AbstractContextManager[None]):
    """Stands for torch.cuda.device: there is one device, so nothing is switched."""

    def __init__(self, device: Any) -> None:
        self.idx = 0

    def __exit__(self, *error: Any) -> None:
        return None


@contextlib.contextmanager
def nvtx_range(message: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Stands for torch.cuda.nvtx.range."""
    yield


def manual_seed(seed: int) -> None:
    """Seed the CPU generator: it is the one that operators on these tensors draw from."""
    torch.default_generator.manual_seed(int(seed))


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    """State of the CPU generator."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    """Set the state of the CPU generator."""
    torch.default_generator.set_state(new_state)


def _constant(value: Any) -> Callable[..., Any]:
    """A new function that returns ``value``; one per name, because torch.compile's tables want distinct objects."""

    def answer(*args: Any, **kwargs: Any) -> Any:
        return value

    return answer


def _call(callback: Any, **kwargs: Any) -> None:
    """torch.cuda._lazy_call: run it now, no driver has to come up first."""
    callback()


def _no_stats(*args: Any, **kwargs: Any) -> dict[str, int]:
    return defaultdict(int)


def _answers() -> dict[str, Any]:
    """Name in torch.cuda -> replacement."""
    answers: dict[str, Any] = {
        "is_available": _constant(True),
        "is_initialized": _constant(True),
        "is_bf16_supported": _constant(True),
        "is_current_stream_capturing": _constant(False),
        "device_count": device_count,
        "current_device": current_device,
        "default_generators": _Generators(),
        "device": Device,
        "get_device_capability": _constant((8, 0)),
        "get_device_name": _constant("cpu"),
        "get_device_properties": get_device_properties,
        "mem_get_info": mem_get_info,
        "manual_seed": manual_seed,
        "manual_seed_all": lambda seed: manual_seed(seed),
        "get_rng_state": get_rng_state,
        "get_rng_state_all": lambda: [get_rng_state()],
        "set_rng_state": set_rng_state,
        "set_rng_state_all": lambda states: set_rng_state(next(iter(states))),
        "Stream": streams.Stream,
        "ExternalStream": streams.ExternalStream,
        "Event": streams.Event,
        "StreamContext": streams.StreamContext,
        "stream": streams.stream,
        "set_stream": streams.set_stream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "memory_stats": _no_stats,
        "memory_snapshot": lambda *args, **kwargs: [],
        "cudart": lambda: SimpleNamespace(cudaProfilerStart=_constant(0), cudaProfilerStop=_constant(0)),
        "_lazy_call": _call,
    }
    nothing = (
        "init _lazy_init set_device synchronize empty_cache ipc_collect check_error reset_peak_memory_stats "
        "reset_max_memory_allocated reset_max_memory_cached reset_accumulated_memory_stats "
        "set_per_process_memory_fraction"
    )
    zero = (
        "memory_allocated max_memory_allocated memory_reserved max_memory_reserved device_memory_used memory_usage "
        "utilization temperature power_draw clock_rate"
    )
    answers.update({name: _constant(None) for name in nothing.split()})
    answers.update({name: _constant(0) for name in zero.split()})
    return answers


def apply() -> None:
    """Put the answers in place. Call once."""
    answers = _answers()
    # scripts reach the same functions through these submodules too
    modules = [torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams, torch.cuda.graphs]
    for module in modules:
        for name, value in answers.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    memory: Any = torch.cuda.memory
    memory._record_memory_history = _constant(None)
    memory._snapshot = _constant({})
    memory._dump_snapshot = _constant(None)
    nvtx: Any = torch.cuda.nvtx
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        setattr(nvtx, name, _constant(0))
    nvtx.range = nvtx_range
    profiler: Any = torch.cuda.profiler
    profiler.start, profiler.stop = _constant(None), _constant(None)
