# ruff: noqa: B018, E402, F401
"""Imported once by the fork server: what every rank would import and look up anyway, before anything is patched."""

from megatron_hdp import cpu

cpu.enable()  # before Megatron, as the launcher does

import megatron.core.datasets.gpt_dataset
import megatron.core.tokenizers.text
import megatron.training.argument_utils
import megatron.training.training
import torch.utils.tensorboard
import transformers

import megatron_hdp.seams.run
import megatron_hdp.seams.timeline
from megatron_hdp.seams.table import default_table
from megatron_hdp.seams.verify import verify

transformers.AutoTokenizer  # imported where it is first looked at
verify(default_table())  # Megatron's sources are parsed once
