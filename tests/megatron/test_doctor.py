"""The diagnosis on this machine, and on machines where something is missing, mixed up or broken."""

import os
import subprocess
import sys

import pytest
from conftest import ADAM, HERE, MODEL, NO_EVALUATION
from forked import run_ranks
from launch import run

from megatron_hdp import cli, doctor
from megatron_hdp.__main__ import parse
from megatron_hdp.doctor import Section
from megatron_hdp.doctor_request import DoctorRequest
from megatron_hdp.errors import ConfigError
from megatron_hdp.seams.locate import megatron_version
from megatron_hdp.seams.table import default_table

SCRIPT = str(HERE.parents[1] / "scripts" / "pretrain_gpt.py")
LLAMA_7B = "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --num-query-groups 32"
RUN = [*MODEL, *ADAM, *NO_EVALUATION, *LLAMA_7B.split(), "--vocab-size", "32000", "--seq-length", "65536", "--bf16"]
RUN += [
    "--max-position-embeddings",
    "65536",
    "--train-iters",
    "1",
    "--global-batch-size",
    "8",
    "--data-path",
    "nowhere",
]
RUN += ["--use-distributed-optimizer", "--hdp", "--hdp-tokens-per-rank", "8192", "--hdp-exchange", "ring"]

needs_megatron = pytest.mark.skipif(megatron_version() is None, reason="no megatron-core")


NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NoTorch())
"""


def run_doctor(code="", *flags, pythonpath=None):
    """`megatron-hdp doctor` in a fresh process, after `code`: exit code and output."""
    script = code + "\nimport sys\nfrom megatron_hdp.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"PYTHONPATH": str(pythonpath)} if pythonpath else {})}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, "doctor", *flags],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


@needs_megatron
def test_training_could_start_here():
    code, out = run_doctor()
    assert code == 0, out
    for name in ("python", "numpy", "torch", "cuda", "nccl", "gloo", "transformer-engine", "flash-attn", "apex"):
        assert any(line.split()[:1] == [name] for line in out.splitlines()), name
    for place in default_table().places:
        line = next(line for line in out.splitlines() if line.split()[1:2] == [place.name])
        assert "verified" in line
        assert ".py:" in line
        assert place.target.partition(":")[0] in out
    assert "every wrapper was put in place and taken back" in out
    assert "torch_cpu_flash" in out
    *_, verdict, last = out.splitlines()
    assert verdict == "training could start"
    assert last == "what memory a run needs: python -m megatron_hdp [--cpu] doctor --gpus N SCRIPT ARGS..."


def test_without_torch():
    code, out = run_doctor(NO_TORCH)
    assert code == 1
    assert "versions: torch cannot be imported: pip install" in out
    assert "core  " in out.partition("planner")[2], "later sections must still be made"


def test_without_megatron():
    code, out = run_doctor(
        NO_TORCH
        + """
import sys
class Hiding:
    def __init__(self, inner):
        self.inner = inner
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] == "megatron" else self.inner.find_spec(name, path, target)
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""
    )
    assert code == 1
    assert "seams: no megatron.core on the import path" in out
    assert "missing" in out


@needs_megatron
def test_clone_that_shadows_half_of_the_wheel(tmp_path):
    core = tmp_path / "clone" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ''\n")
    code, out = run_doctor(NO_TORCH, pythonpath=tmp_path / "clone")
    assert code == 1
    assert str(core / "package_info.py") in out
    assert "megatron: Megatron would be imported from 2 places at once" in out
    assert "contract 'PackedSeqParams' (megatron.core.packed_seq_params:PackedSeqParams): expected" in out


@needs_megatron
def test_whole_clone_of_another_version_names_both(tmp_path):
    for name in ("core", "training"):
        (tmp_path / "megatron" / name).mkdir(parents=True)
        (tmp_path / "megatron" / name / "__init__.py").touch()
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\nPRE_RELEASE = 'rc0'\n")
    code, out = run_doctor(NO_TORCH, pythonpath=tmp_path)
    assert code == 1
    assert f"seams: megatron-core 0.16.1rc0 is installed ({info}), supported is 0.19" in out
    shadowed = [line for line in out.splitlines() if line.split()[:2] == ["shadowed", "copy"]]
    assert len(shadowed) == 1
    assert "site-packages" in shadowed[0]


def test_part_that_raises_is_a_finding(monkeypatch):
    def broken():
        raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.setattr(doctor, "kernels", broken)
    sections = doctor.diagnose(try_install=False)
    assert sections[3].problems == ("OSError: libcudnn.so.9: cannot open shared object file",)
    assert sections[4].rows
    assert doctor.exit_code(sections) == 1


def test_report():
    fine, wrong = Section("one", (("a", "1"), ("long", ""))), Section("two", (), ("no disk", "no network"))
    assert doctor.render([fine]) == "one\n  a     1\n  long\ntraining could start"
    assert doctor.exit_code([fine]) == 0
    assert doctor.render([fine, wrong]).endswith("training could not start:\n  two: no disk\n  two: no network")
    assert doctor.exit_code([fine, wrong]) == 1


def test_exit_codes_of_the_command(monkeypatch, capsys):
    def asked_wrongly():
        """Refuse."""
        raise ConfigError("capacity 0 tokens: give at least 1")

    def nothing():
        """Return nothing."""

    monkeypatch.setattr(cli, "COMMANDS", {"wrong": asked_wrongly, "nothing": nothing, "three": lambda: 3})
    assert cli.main(["wrong"]) == 2
    assert capsys.readouterr().err == "megatron-hdp: capacity 0 tokens: give at least 1\n"
    assert cli.main(["nothing"]) == 0
    assert cli.main(["three"]) == 3
    with pytest.raises(SystemExit) as stop:
        cli.main(["unknown"])
    assert stop.value.code == 2


def rows(output, title):
    """Rows of one section, name -> finding; of a name that comes twice the last."""
    lines = output.splitlines()
    found = {}
    for line in lines[lines.index(title) + 1 :]:
        if not line.startswith("  "):
            break
        name, _, finding = line.strip().partition("  ")
        found[name] = finding.strip()
    return found


def ask(folder, options, flags=(), script=SCRIPT):
    return run_ranks(1, ["doctor", *options, script, *(flags or RUN)], folder)


@needs_megatron
def test_memory_of_a_run_of_many_gpus(tmp_path):
    """One process answers for 32 ranks; no data is read, no group is made."""
    flags = [*RUN, "--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    outcome = ask(tmp_path, ["--gpus", "32", "--gpus-per-node=8", "--device-gib", "80"], flags)
    assert outcome.codes == (0,), outcome.output
    assert rows(outcome.output, "run") == {
        "ranks": "32 on 4 nodes of 8",
        "column": "2 tensor-parallel x 2 pipeline stages",
        "pool": "8 ranks x 8,192 tokens",
        "context": "65,536 tokens, a ring of 8 ranks",
    }
    layout = rows(outcome.output, "layout")
    assert layout["column 7"] == "stage 0: processes 14-15; stage 1: processes 30-31"
    assert layout["node 3"] == "stage 1: pool ranks 4-7"
    memory = rows(outcome.output, "memory")
    number = (16 * (4 * 4096**2 + 3 * 4096 * 11008) // 2 + 16 * 2 * 4096) + 4096 * 32000 // 2
    assert memory["of each"] == "GPU of the first stage, which needs most"
    assert memory["weights"] == f"{2 * number / 2**30:.2f} GiB"
    assert memory["gradients"] == f"{4 * number / 2**30:.2f} GiB"
    assert memory["optimizer"] == f"{12 * number / 8 / 2**30:.2f} GiB"
    assert memory["logits"] == "0 bytes"
    assert memory["reserve"] == "4.00 GiB"
    assert " of 80.00 GiB" in memory["peak"]
    assert "problem" not in memory
    assert outcome.output.rstrip().endswith("training could start")


@needs_megatron
def test_run_that_cannot_fit(tmp_path):
    outcome = ask(tmp_path, ["--gpus", "8", "--device-gib", "40"])
    assert outcome.codes == (1,)
    verdict = outcome.output.partition("training could not start:\n  memory: ")[2]
    assert verdict.startswith("--hdp-tokens-per-rank is 8,192: each GPU would need at least ")
    assert " and has 40.00 GiB: no --hdp-tokens-per-rank fits; or use more --tensor-model-parallel-size" in verdict
    assert rows(outcome.output, "memory")["weights"] == "12.55 GiB"


@needs_megatron
def test_script_that_does_not_train(tmp_path):
    script = tmp_path / "other.py"
    script.write_text("import megatron.training\n")
    outcome = ask(tmp_path, [], script=str(script))
    assert outcome.codes == (1,)
    assert "other.py ended without calling Megatron's pretrain(): nothing was looked at" in outcome.output


@needs_megatron
@pytest.mark.slow
def test_run_without_torchrun():
    """A process of its own, with nothing in its environment that torchrun sets."""
    command = [sys.executable, "-m", "megatron_hdp", "--cpu", "doctor", "--gpus", "4"]
    model = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --num-query-groups 2"
    finished = run([*command, SCRIPT, *RUN, *model.split()])
    assert rows(finished.output, "run")["ranks"] == "4 on 1 node of 4"
    assert rows(finished.output, "memory")["of each"] == "CPU rank"
    without_hdp = [flag for flag in RUN if flag != "--hdp"]
    refused = run([*command, SCRIPT, *without_hdp, "--micro-batch-size", "1"], expect=1)
    assert "doctor looks at a run with --hdp: add --hdp and --hdp-tokens-per-rank" in refused.output
    missing = run([sys.executable, "-m", "megatron_hdp", "doctor", SCRIPT, *RUN], expect=None)
    assert missing.code in (0, 1)
    if missing.code:
        assert "this machine has no GPU" in missing.output or "could not start" in missing.output


def test_launcher_knows_the_word():
    found = parse(["--cpu", "doctor", "--gpus=16", "--gpus-per-node", "8", SCRIPT, "--hdp", "--gpus", "9"])
    assert found.doctor == DoctorRequest(16, 8)
    assert (found.script, found.argv, found.cpu) == (SCRIPT, ["--hdp", "--gpus", "9"], True)
    assert parse(["doctor", "--device-gib", "79.5", SCRIPT]).doctor == DoctorRequest(device_gib=79.5)
    assert parse([SCRIPT, "doctor"]).doctor is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["doctor"], "doctor: no script was given, whose flags .* `megatron-hdp doctor` looks at what is installed"),
        (["doctor", "--gpu", "8", SCRIPT], "doctor: unknown option --gpu: it takes"),
        (["doctor", "--gpus"], "doctor: --gpus needs a value"),
        (["doctor", "--gpus", "0", SCRIPT], "--gpus is '0', must be a number of GPUs, at least 1"),
        (["doctor", "--gpus-per-node", "x", SCRIPT], "--gpus-per-node is 'x'"),
        (["doctor", "--device-gib", "nan", SCRIPT], "--device-gib is 'nan', must be the memory of a GPU in GiB"),
        (["doctor", "/no/such.py"], "no script at /no/such.py"),
    ],
)
def test_wrong_command_lines(words, message):
    with pytest.raises(ConfigError, match=message):
        parse(words)


def test_under_torchrun_only_rank_0_answers(monkeypatch, capsys):
    from megatron_hdp.__main__ import main

    monkeypatch.setenv("RANK", "1")
    main(["doctor", SCRIPT])
    assert capsys.readouterr().out == ""
