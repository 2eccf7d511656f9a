"""How many layers each model part of a pipeline has, from Megatron's flags."""

from typing import Any

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_hdp.errors import ConfigError
from megatron_hdp.seams.costs import stages_from_args

Layers = tuple[tuple[int, ...], ...]
"""[stages][model parts of a stage]"""


def layers_of_parts(args: Any) -> Layers:
    """Layers of every model part, after Megatron's checks, which complete the flags.

    Raises `ConfigError`, with the numbers, where Megatron would not cut the model so: it says it late, or not at all.
    """
    stages, parts = stages_from_args(args)
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is not None:
        cut = PipelineParallelLayerLayout(layout, stages).layout
        found = tuple(tuple(part.count(LayerType.decoder) for part in stage) for stage in cut)
        _require_all(args, found, "--pipeline-model-parallel-layout")
    elif _ends(args) != (None, None):
        found = tuple(_cut(args, layers, parts) for layers in _uneven_stages(args, stages))
        _require_all(args, found, "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers")
    else:
        found = _even(args, stages, parts)
    return found


def _ends(args: Any) -> tuple[int | None, int | None]:
    """Layers of the first and of the last stage, where they were given."""
    first = getattr(args, "decoder_first_pipeline_num_layers", None)
    return first, getattr(args, "decoder_last_pipeline_num_layers", None)


def _uneven_stages(args: Any, stages: int) -> list[int]:
    """Layers of each stage where the first or the last has a number of its own."""
    first, last = _ends(args)
    between = stages - (first is not None) - (last is not None)
    left = args.num_layers - (first or 0) - (last or 0)
    if between > 0 and (left <= 0 or left % between):
        raise ConfigError(
            f"--num-layers {args.num_layers} without the {args.num_layers - left} of the first and the last pipeline "
            f"stage leaves {left} layers for {between} stages: give numbers that leave a multiple of {between}"
        )
    head, tail = [] if first is None else [first], [] if last is None else [last]
    return [*head, *[left // between] * between, *tail] if between > 0 else [*head, *tail]


def _cut(args: Any, layers: int, parts: int) -> tuple[int, ...]:
    """Layers of the parts of a stage with ``layers``."""
    if layers % parts:
        raise ConfigError(
            f"--num-virtual-stages-per-pipeline-rank {parts}: a pipeline stage of {layers} layers (of --num-layers "
            f"{args.num_layers}) cannot be cut into {parts} model parts of equally many; change one of the numbers"
        )
    return (layers // parts,) * parts


def _even(args: Any, stages: int, parts: int) -> Layers:
    """Equal parts. Embedding and loss may count as a layer each, and leave room for one less beside them."""
    embedding = bool(getattr(args, "account_for_embedding_in_pipeline_split", False))
    loss = bool(getattr(args, "account_for_loss_in_pipeline_split", False))
    total = args.num_layers + embedding + loss
    if total % (stages * parts):
        counted = f" ({total} with embedding and loss, as asked for)" if embedding or loss else ""
        raise ConfigError(
            f"--num-layers {args.num_layers}{counted} cannot be cut into {stages} pipeline stages of {parts} model "
            f"parts of equally many layers: use a multiple of {stages * parts}, or change the number of stages "
            "(--pipeline-model-parallel-size) or of parts (--num-virtual-stages-per-pipeline-rank)"
        )
    found = [[total // (stages * parts)] * parts for _ in range(stages)]
    found[0][0] -= embedding
    found[-1][-1] -= loss
    if min(found[0][0], found[-1][-1]) < 0:
        raise ConfigError(
            f"--num-layers {args.num_layers}: embedding and loss count as a layer each, and the only model part has "
            "room for one; drop --account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split"
        )
    return tuple(map(tuple, found))


def _require_all(args: Any, found: Layers, flags: str) -> None:
    total = sum(map(sum, found))
    if total != args.num_layers:
        raise ConfigError(
            f"{flags}: the pipeline stages have {total} layers together, --num-layers is {args.num_layers}: give "
            "numbers that add up to it"
        )
