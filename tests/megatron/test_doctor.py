"""The diagnosis on this machine, and on machines where something is missing, mixed up or broken."""

import os
import subprocess
import sys

import pytest

from megatron_hdp import cli, doctor
from megatron_hdp.doctor import Section
from megatron_hdp.errors import ConfigError
from megatron_hdp.seams.locate import megatron_version
from megatron_hdp.seams.table import default_table

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
    assert out.rstrip().endswith("training could start")


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
