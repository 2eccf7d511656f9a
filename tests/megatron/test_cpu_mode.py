"""The CPU mode and the launcher, in real processes: Megatron's features train, agree with each other, and resume."""

import json
import math
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from launch import ROOT, launch, run

from megatron_hdp import __main__ as launcher
from megatron_hdp.errors import DataError

pytest.importorskip("megatron.core")

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "cpu_train.py"

# A GPU user's flags: nothing in them is there for CPU ranks.
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 127 --make-vocab-size-divisible-by 64 --tokenizer-type NullTokenizer "
    "--untie-embeddings-and-output-weights --use-flash-attn --attention-dropout 0 --hidden-dropout 0"
)
TRAINING = (
    "--mock-data --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-2 --lr-decay-style constant "
    "--eval-interval 100 --eval-iters 0 --log-interval 1 --seed 7 --num-workers 0"
)
DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


@dataclass(frozen=True)
class Step:
    iteration: int
    loss: float
    grad_norm: float


def train(folder: Path, ranks: int, extra: str) -> tuple[list[Step], str]:
    """Steps of one run, and its output."""
    record = folder / "steps.jsonl"
    record.unlink(missing_ok=True)
    flags = f"{MODEL} {TRAINING} {extra}".split()
    output = launch(ranks, SCRIPT, flags, environment={"RECORD": str(record)}).output
    return [Step(**json.loads(line)) for line in record.read_text().splitlines()], output


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """One rank, no parallelism: its four steps, and a folder with its checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("reference")
    steps, output = train(
        folder, 1, f"--save {folder / 'checkpoint'} --save-interval 2 --eval-iters 1 --eval-interval 3"
    )
    (folder / "checkpoint" / "latest_checkpointed_iteration.txt").write_text("2")
    assert [step.iteration for step in steps] == [1, 2, 3, 4]
    assert steps[0].loss == pytest.approx(math.log(128), abs=0.2)
    assert steps[3].loss < steps[0].loss
    assert "validation loss at iteration 3" in output
    assert "transformer_impl transformer_engine becomes local" in output
    return steps, folder / "checkpoint"


def close(steps: list[Step], expected: list[Step]) -> None:
    """Same iterations, losses and gradient norms to fp32 rounding."""
    assert [step.iteration for step in steps] == [step.iteration for step in expected]
    for step, other in zip(steps, expected):
        assert step.loss == pytest.approx(other.loss, rel=2e-6)
        assert step.grad_norm == pytest.approx(other.grad_norm, rel=2e-5)


def test_the_mode_itself(tmp_path):
    finished = launch(2, HERE / "cpu_checks.py", environment={"RECORD": str(tmp_path / "x")})
    checks = re.findall(r"^def (check_\w+)", (HERE / "cpu_checks.py").read_text(), re.M)
    for name in checks:
        assert finished.output.count(f"PASSED {name}") == 2, finished.output


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap",
        pytest.param(f"--pipeline-model-parallel-size 2 {RECOMPUTE}", marks=pytest.mark.slow),
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --recompute-activations",
    ],
    ids=["tensor and sequence parallel", "pipeline, full recompute", "interleaved pipeline, selective recompute"],
)
def test_layouts_continue_one_checkpoint_alike(reference, tmp_path, flags):
    """The checkpoint of one rank goes on under another layout with the same losses, so loading reshards as well."""
    steps, checkpoint = reference
    close(train(tmp_path, 2, f"{flags} --load {checkpoint} --no-load-rng")[0], steps[2:])


def test_distributed_optimizer_equals_plain(reference, tmp_path):
    steps, _ = reference
    close(train(tmp_path, 2, SHARDED)[0], steps)


def test_resume_is_bit_equal(tmp_path):
    """With dropout, so that random states count. The second half comes from a checkpoint of the sharded optimizer, and
    recomputes its activations, for which it has to draw the same numbers twice.
    """
    checkpoint = tmp_path / "checkpoint"
    whole, output = train(tmp_path, 2, f"{SHARDED} {DROPOUT} --save {checkpoint} --save-interval 2")
    assert len(whole) == 4
    assert output.count("successfully saved checkpoint") == 2
    shutil.rmtree(checkpoint / "iter_0000004")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("2")
    again, _ = train(tmp_path, 2, f"{SHARDED} {DROPOUT} {RECOMPUTE} --load {checkpoint}")
    assert again == whole[2:]


def test_bf16_follows_fp32(reference, tmp_path):
    steps, _ = reference
    rounded, _ = train(tmp_path, 2, f"--bf16 --tensor-model-parallel-size 2 {SHARDED}")
    assert [step.loss for step in rounded] == pytest.approx([step.loss for step in steps], rel=5e-3)
    assert [step.loss for step in rounded] != [step.loss for step in steps]


def test_experts_on_one_rank_and_on_two(tmp_path):
    experts = "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-permute-fusion --moe-aux-loss-coeff 1e-2"
    checkpoint = tmp_path / "checkpoint"
    steps, _ = train(tmp_path, 1, f"{experts} --save {checkpoint} --save-interval 1 --exit-interval 2")
    (checkpoint / "latest_checkpointed_iteration.txt").write_text("1")
    shared, _ = train(
        tmp_path, 2, f"{experts} --load {checkpoint} --no-load-rng --no-load-optim --expert-model-parallel-size 2"
    )
    close(shared[:1], steps[1:])


def test_exit_codes_and_messages(tmp_path):
    command = [sys.executable, "-m", "megatron_hdp"]
    for words, message in (
        ([], "no script was given"),
        (["--cpu"], "no script was given"),
        ([tmp_path / "absent.py"], "no script at"),
        (["--cpu", tmp_path], "is a folder"),
        (["--hdp", SCRIPT], "unknown option --hdp before the script"),
    ):
        finished = run([*command, *words], expect=2)
        assert message in finished.output
        assert "Traceback" not in finished.output
    assert "usage: torchrun" in run([*command, "--help"]).output
    assert re.fullmatch(r"\d+\.\d+\.\d+", run([*command, "--version"]).output.strip())


def test_an_error_that_all_ranks_have_is_printed_once(tmp_path):
    script = tmp_path / "shared.py"
    script.write_text("from megatron_hdp.errors import ConfigError\nraise ConfigError('bad flag')\n")
    output = launch(2, script, expect=1).output
    assert output.count("megatron_hdp: rank 0: ConfigError: bad flag") == 1
    # no traceback into the script; rank 1 keeps silent unless the machine is so busy that it outlives its head start
    assert "raise ConfigError" not in output
    assert output.count("bad flag") <= 2


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_is_printed_by_it(monkeypatch, capsys, tmp_path, rank):
    waits = []
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(launcher.time, "sleep", waits.append)
    monkeypatch.setattr(launcher, "run", lambda launch: raise_error(DataError("the file is empty")))
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(SystemExit, match="1"):
        launcher.main([str(script)])
    assert capsys.readouterr().err == f"megatron_hdp: rank {rank}: DataError: the file is empty\n"
    assert len(waits) == rank  # rank 0 does not wait


def test_other_errors_keep_their_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr(launcher, "run", lambda launch: raise_error(KeyError("not ours")))
    script = tmp_path / "script.py"
    script.touch()
    with pytest.raises(KeyError):
        launcher.main([str(script)])


def raise_error(error: Exception) -> None:
    raise error


def test_script_is_main_once_and_its_folder_wins(tmp_path):
    """The script has no guard, yet a spawned child does not run it again."""
    (tmp_path / "beside.py").write_text("WORD = 'beside the script'\n")
    script = tmp_path / "unguarded.py"
    script.write_text(
        "import multiprocessing, sys\n"
        "import beside\n"
        "print(beside.WORD, sys.argv[1:], __name__, __file__, flush=True)\n"
        "with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "    assert pool.apply(abs, (-3,)) == 3\n"
    )
    output = run([sys.executable, "-m", "megatron_hdp", "--cpu", script, "--flag", "x"]).output
    assert output.count(f"beside the script ['--flag', 'x'] __main__ {script}") == 1
    assert output.count("beside the script") == 1


def test_pretraining_script_needs_no_plugin():
    text = (ROOT / "scripts" / "pretrain_gpt.py").read_text()
    assert not re.search(r"^\s*(from|import) megatron_hdp", text, re.M)
    assert len(text.splitlines()) < 150
