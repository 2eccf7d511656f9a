"""Command lines that cannot work with --hdp get one clear error, before anything is set up."""

import json
from types import SimpleNamespace

import pytest
from conftest import ADAM, MODEL, NO_EVALUATION
from forked import run_ranks

HERE = __file__.rpartition("/")[0]

# flags added to a good command line -> parts of the answer
CONFLICTS = {
    "--hybrid-context-parallel --max-seqlen-per-dp-cp-rank 64": "--hybrid-context-parallel: it is Megatron's own",
    "--attention-backend local": "--attention-backend local: it would put Megatron's own attention back",
    "--mtp-num-layers 1": "--mtp-num-layers",
    "--multi-latent-attention": "--multi-latent-attention",
    "--use-torch-fsdp2": "--use-torch-fsdp2",
    "--use-megatron-fsdp": "--use-megatron-fsdp",
    "--num-experts 4 --expert-model-parallel-size 2": "--expert-model-parallel-size",
    "--num-experts 4": "--num-experts",
    "--ddp-average-in-collective": "--ddp-average-in-collective: gradients are summed",
    "--sequence-parallel": "--sequence-parallel",
    "--attention-dropout 0.1": "pass --attention-dropout 0",
    "--window-size 16,0": "--window-size",
    "--position-embedding-type yarn": "--position-embedding-type",
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
    from megatron_hdp.seams.refuse import REFUSALS

    refusal = next(refusal for refusal in REFUSALS if refusal.flag == "--cuda-graph-impl")
    assert refusal.applies(SimpleNamespace(cuda_graph_impl="local"))
    assert refusal.applies(SimpleNamespace(cuda_graph_impl="none", optimizer_cuda_graph=True))
    assert refusal.applies(SimpleNamespace(enable_cuda_graph=True))
    assert not refusal.applies(SimpleNamespace(cuda_graph_impl="none"))


def test_help_of_the_script_lists_megatrons_flags_and_ours(tmp_path):
    """Megatron 0.19 alone ends with a stack trace here: one of its own texts holds a bare %."""
    outcome = run_ranks(1, [f"{HERE}/../../scripts/pretrain_gpt.py", "--help"], tmp_path).check()
    assert "10%" in outcome.output
    assert "--num-layers" in outcome.output
    assert "--hdp-tokens-per-rank" in outcome.output
