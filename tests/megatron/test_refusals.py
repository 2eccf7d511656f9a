"""Command lines that cannot work with --hdp get one clear error, before anything is set up."""

import json
from types import SimpleNamespace

import pytest
from conftest import ADAM, MODEL, NO_EVALUATION
from forked import run_ranks

from megatron_hdp.errors import ConfigError

HERE = __file__.rpartition("/")[0]

# flags added to a good command line -> parts of the answer
CONFLICTS = {
    "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 64": "--hybrid-context-parallel: it is Megatron's own",
    "--attention-backend local": "--attention-backend local: it would put Megatron's own attention back",
    "--mtp-num-layers 1": "--mtp-num-layers",
    "--recompute-granularity selective --recompute-method uniform": "Megatron refuses these flags: ",
    "--hybrid-layer-pattern M*/*": "--hybrid-layer-pattern: hybrid (Mamba) models are not supported",
    "--hybrid-override-pattern M*": "--hybrid-layer-pattern: hybrid (Mamba) models are not supported",
    "--is-hybrid-model": "--is-hybrid-model: hybrid (Mamba) models are not supported",
    "--mamba-num-heads 4": "and a GPT model ignores the sizes of Mamba layers; drop the flags",
    "--num-experts 4 --moe-router-topk 5": "--moe-router-topk is 5, and --num-experts 4: a token cannot choose more",
    "--num-experts 4 --moe-router-topk 0": "--moe-router-topk is 0",
    "--num-experts 4 --moe-layer-freq [1]*3": "--moe-layer-freq has 3 entries for --num-layers 2: give one per layer",
    "--num-experts 4 --moe-layer-freq 0": "--moe-layer-freq is 0",
    "--num-experts 4 --moe-aux-loss-coeff 0.1 0.2": "has 2 values (0.1 0.2) for 1 of --moe-router-load-balancing-type",
    "--num-experts 4 --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1": (
        "has 1 values (0.1) for 2 of --moe-router-load-balancing-type (aux_loss seq_aux_loss)"
    ),
    "--num-experts 4 --expert-model-parallel-size 0": "--expert-model-parallel-size is 0: ranks that share the experts",
    "--num-experts 4 --expert-model-parallel-size -1": "--expert-model-parallel-size is -1",
    "--num-experts 4 --expert-tensor-parallel-size 0": "--expert-tensor-parallel-size is 0",
    "--num-layers-per-virtual-pipeline-stage 0": "--num-layers-per-virtual-pipeline-stage is 0: layers of a model part",
    "--num-virtual-stages-per-pipeline-rank 0": "--num-virtual-stages-per-pipeline-rank is 0: model parts of a stage",
    "--eval-interval -1": "--eval-interval is -1",
    "--use-torch-fsdp2": "--use-torch-fsdp2",
    "--use-megatron-fsdp": "--use-megatron-fsdp",
    "--num-experts 4 --moe-router-load-balancing-type global_aux_loss": "global_aux_loss: it counts choices over all",
    "--num-experts 4 --moe-router-load-balancing-type aux_loss global_aux_loss --moe-aux-loss-coeff 1 1": "global_aux",
    "--num-experts 4 --moe-router-load-balancing-type sinkhorn": "sinkhorn: the choice for a token would depend",
    "--num-experts 4 --moe-router-load-balancing-type quantile_balancing": "quantile_balancing: quantiles are taken",
    "--num-experts 4 --moe-expert-capacity-factor 1.5": "--moe-expert-capacity-factor: which tokens an expert drops",
    "--num-experts 4 --moe-input-jitter-eps 0.1": "--moe-input-jitter-eps: the noise would depend on the layout",
    "--num-experts 4 --moe-enable-routing-replay": "--moe-enable-routing-replay: it replays choices by micro-batch",
    "--num-experts 4 --overlap-moe-expert-parallel-comm": "--overlap-moe-expert-parallel-comm: its schedule",
    "--num-experts 4 --mlp-chunks-for-training 2": "--mlp-chunks-for-training with --num-experts",
    "--num-experts 4 --tensor-model-parallel-size 2": "add --sequence-parallel",
    "--num-experts 4 --expert-tensor-parallel-num-weight-shards 2": "which ranks share experts",
    "--expert-model-parallel-size 2": "--expert-model-parallel-size 2 without --num-experts",
    "--num-experts 4 --expert-model-parallel-size 3": "--num-experts 4 is not a multiple of",
    "--num-experts 4 --expert-model-parallel-size 4": "are 4 pool ranks, which do not divide the pool of 1",
    "--ddp-average-in-collective": "--ddp-average-in-collective: gradients are summed",
    "--attention-dropout 0.1": "pass --attention-dropout 0",
    "--window-size 16,1": "--window-size 16,1: give LEFT,0",
    "--window-size 16,16": "none after it can be seen",
    "--window-size=-2,0": "--window-size -2,0: give LEFT,0",
    "--window-size 16": "--window-size 16: give LEFT,0",
    "--window-size 16,0 --window-attn-skip-freq [1,0,1]": "--window-attn-skip-freq has 3 entries for --num-layers 2",
    "--window-size 16,0 --window-attn-skip-freq 0": "--window-attn-skip-freq is 0",
    "--position-embedding-type mrope": "--position-embedding-type: positions of pieces are only given to rope, yarn",
    "--position-embedding-type yarn --rotary-interleaved": "Megatron has no such rotary embedding",
    "--num-query-groups 3": "--num-query-groups 3 does not divide --num-attention-heads 4",
    "--hdp-exchange heads --num-attention-heads 1 --num-query-groups 1": "of a process can not be swapped",
    "--hdp-loss-chunk -1": "--hdp-loss-chunk is -1",
    "--cp-comm-type a2a": "--hdp-exchange: ring, gather and heads are p2p, all_gather and a2a",
    "--ddp-reduce-scatter-with-fp32-accumulation --overlap-grad-reduce": "another rank needs it in a ring first",
    "--rampup-batch-size 2 2 8": "--rampup-batch-size",
    "--mock-data": "mock data has no document lengths",
    "--sft": "--sft",
    "--iterations-to-skip 3": "--iterations-to-skip",
    "--hdp-tokens-per-rank 0": "--hdp-tokens-per-rank is 0: it must be a positive number of tokens",
    "--hdp-tokens-per-rank -64": "--hdp-tokens-per-rank is -64",
    "--hdp-tokens-per-rank 63": "use 62 or 64",
    "--hdp-batch-tokens 32": "--hdp-batch-tokens 32 is smaller than the context --seq-length 96",
    "--hdp-batch-tokens 2147483648": "32 bits",
    "--hdp-config /no/such.yaml": "cannot be read",
    "--hdp-lookahead -1": "--hdp-lookahead is -1",
    "--hybrid-context-parallel --mtp-num-layers 1": "--mtp-num-layers",
    "--tokenizer-type GPTSentencePieceTokenizer --tokenizer-model /no/such.model": "/no/such.model: no such file",
    "--tokenizer-type GPTSentencePieceTokenizer": "needs --tokenizer-model",
    "--tokenizer-type GPT2BPETokenizer": "needs --vocab-file and --merge-file",
    "--tensor-model-parallel-size 3": "cannot form columns",
    "--eval-global-batch-size 4": "--eval-global-batch-size",
    "--context-parallel-size 0": "--context-parallel-size is 0: ranks, which are folded into the pool; it must be at",
    "--tensor-model-parallel-size 0": "--tensor-model-parallel-size is 0",
    "--pipeline-model-parallel-size 0": "--pipeline-model-parallel-size is 0",
    "--global-batch-size 0": "--global-batch-size is 0: sequences in a step; it must be at least 1",
    "--max-position-embeddings 95": "--max-position-embeddings 95 is smaller than the context --seq-length 96",
    "--seq-length 0": "--seq-length is 0",
    "--seq-length -96": "--seq-length is -96",
    "--seed -1": "--seed is -1",
    "--seed 4294967294": "from 0 to 4294967293",
    "--train-iters -1": "--train-iters is -1",
    "--split 0,1,0": "--split 0,1,0: its first share, that of training, is 0",
    "--split 1,x,0": "--split 1,x,0: give up to three shares",
    "--split 1,1,1,1": "--split 1,1,1,1: give up to three shares",
    "--data-path 0.3 a x b": "--data-path 0.3 a x b: '0.3' (word 1) looks like a weight",
    "--data-path 0.3 a 0.7": "'0.3' (word 1) looks like a weight",
    "--data-path -1 a 2 b": "weight -1.0: weights must be finite and not negative",
    "--hdp-kernel torch_cuda_flash": "runs on CUDA, not on cpu; here can run: auto, torch_cpu_flash, reference",
    "--hdp-offload --hdp-offload-gib 1": "2 layers on 1 pipeline stages of 1 model parts are 2 in a part",
    "--hdp-offload --num-layers 4": "--hdp-offload needs --hdp-offload-gib, the host memory of each process",
    "--hdp-offload-gib 1": "--hdp-offload-gib 1.0 without --hdp-offload",
    "--hdp-offload --hdp-offload-gib -1": "--hdp-offload-gib is -1.0: it must be a positive number of GiB",
    "--hdp-kernel flash9": "no such kernel; here can run: auto, torch_cpu_flash, reference",
}


@pytest.fixture(scope="module")
def answers(corpus, tmp_path_factory):
    """Every case's answer, from one process."""
    folder = tmp_path_factory.mktemp("refusals")
    unknown = folder / "unknown.yaml"
    unknown.write_text("tokens_per_rank: 48\ntokens_per_step: 4\n")
    base = [*MODEL, *ADAM, *NO_EVALUATION, "--train-iters", "2", "--global-batch-size", "8", "--hdp"]
    good = [*base, "--data-path", corpus, "--hdp-tokens-per-rank", "48"]
    cases = {flags: [*good, *flags.split()] for flags in CONFLICTS}
    cases["unknown key"] = [*base, "--data-path", corpus, "--hdp-config", str(unknown)]
    cases["no capacity"] = [*base, "--data-path", corpus]
    cases["no data"] = [*base, "--hdp-tokens-per-rank", "48"]
    drop = good.index("--tokenizer-type")
    cases["no tokenizer"] = good[:drop] + good[drop + 2 :]
    cases["good"] = good  # last: it sets Megatron's global variables
    (folder / "cases.json").write_text(json.dumps(list(cases.values())))
    script = [f"{HERE}/refusals.py", str(folder / "cases.json"), str(folder / "answers.json")]
    run_ranks(1, script, folder).check()
    return dict(zip(cases, json.loads((folder / "answers.json").read_text()), strict=True))


@pytest.mark.parametrize("flags", CONFLICTS)
def test_conflicting_flags(flags, answers):
    assert answers[flags].startswith("ConfigError: "), answers[flags]
    assert CONFLICTS[flags] in answers[flags]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("unknown key", "unknown option 'tokens_per_step'"),
        ("no capacity", "--hdp needs --hdp-tokens-per-rank"),
        ("no data", "--hdp needs documents"),
        ("no tokenizer", "no tokenizer: give --tokenizer-type"),
    ],
)
def test_missing_pieces(case, message, answers):
    assert answers[case].startswith("ConfigError: ")
    assert message in answers[case]


def test_all_conflicts_are_named_at_once(answers):
    answer = answers["--hybrid-context-parallel --mtp-num-layers 1"]
    assert "--hybrid-context-parallel" in answer
    assert "--mtp-num-layers" in answer


def test_the_good_command_line_is_accepted(answers):
    assert answers["good"] == "accepted"


def test_cuda_graphs_are_refused():
    """Not through the launcher: the CPU mode turns CUDA graphs off before the refusals are asked."""
    from megatron_hdp.seams.conflicts import REFUSALS

    refusal = next(refusal for refusal in REFUSALS if refusal.flag == "--cuda-graph-impl")
    assert refusal.applies(SimpleNamespace(cuda_graph_impl="local"))
    assert refusal.applies(SimpleNamespace(cuda_graph_impl="none", optimizer_cuda_graph=True))
    assert refusal.applies(SimpleNamespace(enable_cuda_graph=True))
    assert not refusal.applies(SimpleNamespace(cuda_graph_impl="none"))


@pytest.mark.parametrize("option", ["cpu_offloading_num_layers", "fine_grained_activation_offloading"])
def test_megatrons_own_offloading_is_refused(option):
    """Not through the launcher either: there is no device memory to save, so the CPU mode turns it off."""
    from megatron_hdp.seams.conflicts import REFUSALS

    refusal = next(refusal for refusal in REFUSALS if refusal.flag == f"--{option.replace('_', '-')}")
    assert refusal.applies(SimpleNamespace(**{option: 1}))
    assert not refusal.applies(SimpleNamespace(**{option: 0}))
    assert "use --hdp-offload" in refusal.why


def layout(**flags):
    """Megatron's args as far as model parts depend on them."""
    return SimpleNamespace(
        **{"num_layers": 12, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None, **flags}
    )


@pytest.mark.parametrize(
    ("flags", "layers"),
    [
        ({}, ((6,), (6,))),
        ({"virtual_pipeline_model_parallel_size": 3}, ((2, 2, 2), (2, 2, 2))),
        ({"decoder_first_pipeline_num_layers": 4}, ((4,), (8,))),
        (
            {"decoder_last_pipeline_num_layers": 4, "virtual_pipeline_model_parallel_size": 2},
            ((4, 4), (2, 2)),
        ),
        (
            {
                "decoder_first_pipeline_num_layers": 2,
                "decoder_last_pipeline_num_layers": 4,
                "pipeline_model_parallel_size": 4,
            },
            ((2,), (3,), (3,), (4,)),
        ),
        ({"account_for_embedding_in_pipeline_split": True, "num_layers": 11}, ((5,), (6,))),
        (
            {
                "account_for_embedding_in_pipeline_split": True,
                "account_for_loss_in_pipeline_split": True,
                "num_layers": 10,
                "virtual_pipeline_model_parallel_size": 3,
            },
            ((1, 2, 2), (2, 2, 1)),
        ),
        (
            {"pipeline_model_parallel_layout": "E|t*4|t*8|L", "virtual_pipeline_model_parallel_size": 2},
            ((0, 8), (4, 0)),
        ),
    ],
)
def test_layers_of_parts(flags, layers):
    """Held against Megatron's own function, which asks of one part at a time."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    from megatron_hdp.seams.parts import layers_of_parts

    args = layout(**flags)
    assert layers_of_parts(args) == layers
    asked = getattr(args, "pipeline_model_parallel_layout", None)
    config = SimpleNamespace(
        num_layers=args.num_layers,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        pipeline_model_parallel_layout=None,
        num_layers_in_first_pipeline_stage=getattr(args, "decoder_first_pipeline_num_layers", None),
        num_layers_in_last_pipeline_stage=getattr(args, "decoder_last_pipeline_num_layers", None),
        account_for_embedding_in_pipeline_split=getattr(args, "account_for_embedding_in_pipeline_split", False),
        account_for_loss_in_pipeline_split=getattr(args, "account_for_loss_in_pipeline_split", False),
    )
    if asked is not None:  # Megatron's function would ask the process groups, which are none here
        cut = PipelineParallelLayerLayout(asked, args.pipeline_model_parallel_size)
        assert [[sum(kind.name == "decoder" for kind in part) for part in stage] for stage in cut.layout] == [
            list(stage) for stage in layers
        ]
        return
    parts = args.virtual_pipeline_model_parallel_size
    for rank, stage in enumerate(layers):
        built = [get_num_layers_to_build(config, part if parts else None, rank) for part in range(len(stage))]
        assert built == list(stage)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"virtual_pipeline_model_parallel_size": 5},
            "--num-layers 12 cannot be cut into 2 pipeline stages of 5 model parts .* use a multiple of 10",
        ),
        ({"account_for_loss_in_pipeline_split": True}, r"--num-layers 12 \(13 with embedding and loss"),
        (
            {"decoder_first_pipeline_num_layers": 4, "virtual_pipeline_model_parallel_size": 3},
            "a pipeline stage of 4 layers .* cannot be cut into 3 model parts",
        ),
        (
            {"decoder_first_pipeline_num_layers": 3, "pipeline_model_parallel_size": 3},
            "without the 3 .* leaves 9 layers for 2 stages: give numbers that leave a multiple of 2",
        ),
        ({"decoder_first_pipeline_num_layers": 12}, "leaves 0 layers for 1 stages"),
        (
            {"decoder_first_pipeline_num_layers": 3, "decoder_last_pipeline_num_layers": 3},
            "have 6 layers together, --num-layers is 12",
        ),
        ({"pipeline_model_parallel_layout": "Et*6|t*5L"}, "have 11 layers together, --num-layers is 12"),
    ],
)
def test_layers_that_make_no_parts_are_refused(flags, message):
    from megatron_hdp.seams.parts import layers_of_parts

    with pytest.raises(ConfigError, match=message):
        layers_of_parts(layout(**flags))


@pytest.mark.parametrize(
    ("flags", "smallest"),
    [
        ({"decoder_first_pipeline_num_layers": 2}, 2),
        ({"decoder_last_pipeline_num_layers": 1}, 1),
        ({"decoder_first_pipeline_num_layers": 3}, None),
        ({"pipeline_model_parallel_layout": "Et*10|t*2L"}, 2),
        ({"pipeline_model_parallel_layout": "E|t*4|t*8|L", "virtual_pipeline_model_parallel_size": 2}, None),
        ({"account_for_loss_in_pipeline_split": True, "num_layers": 5}, 2),
    ],
)
def test_offloading_needs_three_layers_in_the_smallest_part(flags, smallest):
    """Parts without layers have nothing to send away."""
    from megatron_hdp.seams.refuse import refuse_offload

    if smallest is None:
        refuse_offload(layout(**flags))
        return
    with pytest.raises(ConfigError, match=f"are {smallest} in the smallest part"):
        refuse_offload(layout(**flags))


def pretrain(monkeypatch, args, container):
    """What our wrapper of pretrain() does with them; the original must not be reached."""
    from megatron_hdp.seams import run

    def original(cfg_container, forward_step_func=None, p2p_communicator=None, pg_collection=None):
        raise AssertionError("pretrain() was called")

    monkeypatch.setattr(run, "get_args", lambda: args)
    run.wrap_pretrain(original)(container)


def checked(**flags):
    """Args and model of a run as they come to pretrain()."""
    args = SimpleNamespace(
        **{
            "hdp": True,
            "hdp_validated": True,
            "num_experts": None,
            "tensor_model_parallel_size": 1,
            "sequence_parallel": False,
            **vars(layout(**flags)),
        }
    )
    transformer = SimpleNamespace(
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        use_ring_exchange_p2p=False,
        mtp_standalone=False,
        microbatch_group_size_per_vp_stage=flags.get("microbatch_group_size_per_vp_stage", 2),
    )
    return args, SimpleNamespace(model=SimpleNamespace(transformer_layer_spec=None, transformer=transformer))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mtp_num_layers": 1}, "--mtp-num-layers: multi-token prediction"),  # as Megatron's checks may set it
        ({"virtual_pipeline_model_parallel_size": 5}, "cannot be cut into 2 pipeline stages of 5 model parts"),
        (
            {"virtual_pipeline_model_parallel_size": 3, "microbatch_group_size_per_vp_stage": 4},
            "--microbatch-group-size-per-virtual-pipeline-stage is 4",
        ),
    ],
)
def test_what_shows_after_megatrons_checks_is_refused_before_it_starts(flags, message, monkeypatch):
    with pytest.raises(ConfigError, match=message):
        pretrain(monkeypatch, *checked(**flags))


class HybridModelConfig:
    """Stands for Megatron's: no layer spec of a GPT model."""


@pytest.mark.parametrize(
    ("container", "came"),
    [
        (SimpleNamespace(model=HybridModelConfig()), "given a SimpleNamespace with a HybridModelConfig: pass it"),
        (SimpleNamespace(model=None), "given a SimpleNamespace: pass it pretrain_cfg_container_from_args"),
        (lambda: None, "given a function: pass it"),
    ],
)
def test_other_models_are_refused_by_what_they_are(container, came, monkeypatch):
    with pytest.raises(ConfigError, match=came):
        pretrain(monkeypatch, checked()[0], container)


def test_one_list_of_layers_is_not_compared_with_layers_that_are_not_known_yet():
    from megatron_hdp.seams.refuse import refuse_attention

    args = SimpleNamespace(
        window_size=(16, 0),
        window_attn_skip_freq=[1, 0],
        num_layers=None,
        num_attention_heads=4,
        num_query_groups=None,
        group_query_attention=False,
    )
    refuse_attention(args)
    args.num_layers = 3
    with pytest.raises(ConfigError, match="has 2 entries for --num-layers 3"):
        refuse_attention(args)


def test_help_of_the_script_lists_megatrons_flags_and_ours(tmp_path):
    """Megatron 0.19 alone ends with a stack trace here: one of its own texts holds a bare %."""
    outcome = run_ranks(1, [f"{HERE}/../../scripts/pretrain_gpt.py", "--help"], tmp_path).check()
    assert "10%" in outcome.output
    assert "--num-layers" in outcome.output
    assert "--hdp-tokens-per-rank" in outcome.output
