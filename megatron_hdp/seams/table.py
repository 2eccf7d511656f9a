"""Every place where this package touches Megatron, why, and since when.

Outside this table only two files assign into `megatron.*`: `wheel`, which fills what the PyPI wheel lacks, and `cpu`,
which is used by CPU ranks only. What they replace is listed here as contracts, so that a change is noticed.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path


@dataclass(frozen=True)
class Seam:
    """One function of Megatron that is wrapped.

    Attributes:
        name: short name, used in messages and in the start-up table.
        target: "module:attribute" where Megatron looks the function up; it may be defined elsewhere.
        wrapper: "module:function" of ours, called once with the original and returning the replacement.
        reason: what the wrapper is for.
        consumers: further "module:attribute" places that hold the same object by name and are replaced with it.
        since: first Megatron minor version (included) that has this place.
        until: first Megatron minor version that no longer has it; "" while there is none.
    """

    name: str
    target: str
    wrapper: str
    reason: str
    consumers: tuple[str, ...] = ()
    since: str = "0.19"
    until: str = ""


@dataclass(frozen=True)
class Contract:
    """One place of Megatron that is relied on but left alone; fingerprinted like a seam."""

    target: str
    reason: str
    since: str = "0.19"
    until: str = ""

    @property
    def name(self) -> str:
        """The bare name of the class or function, used in messages."""
        return self.target.rpartition(":")[2]


@dataclass(frozen=True)
class Table:
    """Seams, contracts, and the folder that holds one fingerprint file per Megatron minor version."""

    seams: tuple[Seam, ...]
    contracts: tuple[Contract, ...]
    fingerprints: Path

    @property
    def places(self) -> tuple[Seam | Contract, ...]:
        """Seams, then contracts."""
        return (*self.seams, *self.contracts)

    def for_minor(self, minor: str) -> "Table":
        """The part of the table that exists in Megatron `minor` ("0.19")."""
        return Table(
            tuple(seam for seam in self.seams if _covers(seam, minor)),
            tuple(contract for contract in self.contracts if _covers(contract, minor)),
            self.fingerprints,
        )


def _covers(entry: Seam | Contract, minor: str) -> bool:
    version = _ordinal(minor)
    return _ordinal(entry.since) <= version and (not entry.until or version < _ordinal(entry.until))


def _ordinal(minor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in minor.split("."))


_TRAINING = "megatron.training.training"

SEAMS = (
    Seam(
        "flags",
        "megatron.training.arguments:add_megatron_arguments",
        "megatron_hdp.seams.flags:wrap_add_arguments",
        "adds the --hdp flag group whatever parser the script builds",
    ),
    Seam(
        "validate",
        "megatron.training.arguments:validate_args",
        "megatron_hdp.seams.flags:wrap_validate_args",
        "folds context parallelism into the pool and refuses what cannot work, before and after Megatron's checks",
    ),
    Seam(
        "pretrain",
        f"{_TRAINING}:pretrain",
        "megatron_hdp.seams.run:wrap_pretrain",
        "sets up pool, attention and positions around the user's own model and loss",
        consumers=("megatron.training:pretrain",),
    ),
    Seam(
        "data",
        f"{_TRAINING}:build_train_valid_test_data_iterators",
        "megatron_hdp.seams.run:wrap_data_iterators",
        "hands out planned micro-batches instead of fixed ones",
    ),
    Seam(
        "schedule",
        f"{_TRAINING}:get_forward_backward_func",
        "megatron_hdp.seams.run:wrap_schedule",
        "gives every rank its own number of micro-batches; replaced where it is looked up, not where it is defined",
    ),
    Seam(
        "log",
        f"{_TRAINING}:training_log",
        "megatron_hdp.seams.run:wrap_training_log",
        "adds imbalance, ring bytes and planning time to Megatron's log line and writers",
    ),
    Seam(
        "scheduler",
        f"{_TRAINING}:get_optimizer_param_scheduler",
        "megatron_hdp.seams.run:wrap_param_scheduler",
        "keeps learning-rate steps in global batches although their number of sequences varies",
    ),
)

CONTRACTS = (
    Contract(
        "megatron.core.packed_seq_params:PackedSeqParams", "subclassed to carry a micro-batch's pieces to attention"
    ),
    Contract(
        "megatron.training.models.gpt:default_layer_spec", "called for the layer spec whose core attention is swapped"
    ),
    Contract(
        "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel",
        "its gathers of parameters are started before a step's first micro-batch",
    ),
    Contract(
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup",
        "start_param_sync is called, param_gather_dispatched read",
    ),
    Contract("megatron.training.models.gpt:GPTModelConfig", "its transformer_layer_spec and pre-wrap hooks are set"),
    Contract(
        "megatron.core.models.gpt.gpt_model:GPTModel",
        "its forward takes output_processor, and calls it with the output layer, the labels and its loss function",
    ),
    Contract(
        "megatron.core.models.common.language_module.language_module:LanguageModule",
        "its compute_language_model_loss is called for a part of a micro-batch's rows",
    ),
    Contract(
        "megatron.core.tensor_parallel.layers:ColumnParallelLinear",
        "the output layer: called once per part of the rows, forward and again backward",
    ),
    Contract(
        "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding",
        "replaced on the model by positions per token; its two methods are called with packed_seq_params",
    ),
    Contract(
        "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding",
        "replaced like RotaryEmbedding; its frequencies and factor are read from get_emb",
    ),
    Contract(
        "megatron.core.transformer.transformer_block:TransformerBlock",
        "its forward, called with packed_seq_params by name, is wrapped on the instance with --hdp-offload",
    ),
    Contract(
        "megatron.core.recompute:checkpointed_forward", "calls each of layers, whose forward pre-hooks tell it begins"
    ),
    Contract(
        "megatron.core.transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout",
        "asked for the layers of each part of --pipeline-model-parallel-layout",
    ),
    Contract(
        "megatron.core.transformer.transformer_block:get_num_layers_to_build", "its rules for layers are told before"
    ),
    Contract("megatron.core.transformer.utils:is_layer_window_attention", "asked which layers have a window"),
    Contract(
        "megatron.core.transformer.dot_product_attention:DotProductAttention",
        "our core attention takes the same constructor and forward arguments",
    ),
    Contract(
        "megatron.core.transformer.moe.router:TopKRouter",
        "subclassed: its choice of experts is made as there, its losses per sequence; parameters and bias are its own",
    ),
    Contract(
        "megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function", "called to choose experts of tokens"
    ),
    Contract(
        "megatron.core.transformer.moe.moe_utils:compute_routing_scores_for_aux_loss",
        "called for the choices and scores that the balance loss is about",
    ),
    Contract(
        "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler",
        "used for the z-loss; the schedule tells it the scale of the loss, which is read",
    ),
    Contract(
        "megatron.core.transformer.moe.moe_layer:MoELayer",
        "its forward is wrapped on the instance, and recomputed by us where it would be",
    ),
    Contract(
        "megatron.core.transformer.moe.moe_layer:MoESubmodules", "its router is replaced in the layer spec by ours"
    ),
    Contract(
        "megatron.core.transformer.moe.token_dispatcher:MoEAllGatherTokenDispatcher",
        "its first and last step are wrapped on the instance, so that rows are equally many when they are gathered",
    ),
    Contract(
        "megatron.core.transformer.moe.moe_logging:MoEMetricsTracker", "told the losses of routers, which it averages"
    ),
    Contract(
        "megatron.core.parallel_state:RankGenerator",
        "says which processes share experts: consecutive ones of a stage",
    ),
    Contract(
        "megatron.core.rerun_state_machine:RerunDataIterator", "wraps our iterator and may replay what it yielded"
    ),
    Contract(
        "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss",
        "sums (loss, tokens) over micro-batches without dividing by their number",
    ),
    Contract(
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator",
        "subclassed: its exchange of shapes, which variable_seq_lengths turns on, is answered from the plan",
    ),
    Contract(
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
        "takes our communicator; its messages have the order of the planner's schedule",
    ),
    Contract(
        "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
        "takes our communicator; its messages have the order of the planner's schedule",
    ),
    Contract("megatron.core.pipeline_parallel.schedules:get_schedule_table", "the order of micro-batches and parts"),
    Contract(
        "megatron.core.pipeline_parallel.schedules:_build_default_pg_collection",
        "called for the groups that a schedule takes with a communicator",
    ),
    Contract(
        "megatron.core.distributed.finalize_model_grads:finalize_model_grads",
        "divides gradients by the token count of the whole pool",
    ),
    Contract(f"{_TRAINING}:update_seqlen_stats_from_cu_seqlens", "fed with real lengths so that FLOPs are right"),
    Contract(f"{_TRAINING}:train_step", "calls the schedule once per step and reduces losses over the pool"),
    Contract(f"{_TRAINING}:evaluate", "looks up the schedule seam for evaluation"),
    Contract(f"{_TRAINING}:train", "looks up the schedule and log seams"),
    Contract(f"{_TRAINING}:setup_model_and_optimizer", "looks up the scheduler seam"),
    Contract("megatron.training.arguments:parse_and_validate_args", "looks up the validate seam"),
    Contract("megatron.training.arguments:parse_args", "looks up the flags seam"),
    Contract("megatron.training.checkpointing:load_checkpoint", "takes the iteration, and so the data, from --load"),
    Contract("megatron.training.checkpointing:checkpoint_exists", "called to find the checkpoint before it is loaded"),
    Contract("megatron.training.checkpointing:get_checkpoint_tracker_filename", "called with read_metadata"),
    Contract("megatron.training.checkpointing:read_metadata", "called to find the checkpoint before it is loaded"),
    Contract("megatron.training.checkpointing:find_checkpoint_rank_0", "called to find a checkpoint of one file"),
    Contract("megatron.training.checkpointing:_load_base_checkpoint", "called for the arguments in a checkpoint"),
    Contract(
        "megatron.core.datasets.utils:compile_helpers", "skipped where the wheel already carries the compiled helpers"
    ),
    Contract(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        "its state is completed so that a checkpoint loads with torch's own AdamW",
    ),
    Contract("megatron.training.initialize:set_jit_fusion_options", "replaced on CPU ranks: it warms up GPU kernels"),
    Contract(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm", "made to accept sequence parallelism on CPU ranks"
    ),
)


def default_table() -> Table:
    """The table of the installed package."""
    folder = resources.files("megatron_hdp.seams") / "fingerprints"
    return Table(SEAMS, CONTRACTS, Path(str(folder)))
