"""Imported once by the fork server: what every rank would import anyway, before anything is patched."""

from megatron_hdp import cpu

cpu.enable()  # before Megatron, as the launcher does

import megatron.training.argument_utils  # noqa: E402
import megatron.training.training  # noqa: E402, F401
import torch.utils.tensorboard  # noqa: E402, F401
