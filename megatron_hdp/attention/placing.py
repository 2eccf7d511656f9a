"""Index tensors from the host to where attention is computed."""

import torch
from torch import Tensor


def placed(host: Tensor, device: torch.device) -> Tensor:
    """``host`` on ``device``. To CUDA from pinned memory, so that the host does not wait for the device."""
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
