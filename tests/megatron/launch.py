"""Runs a script on N real processes through torchrun and the launcher, with a time limit."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Finished:
    """Exit code of torchrun and the output of all ranks, stderr included."""

    code: int
    output: str


def launch(
    ranks: int,
    script: str | Path,
    args: Sequence[object] = (),
    *,
    options: Sequence[str] = ("--cpu",),
    environment: dict[str, str] | None = None,
    timeout: float = 120.0,
    expect: int = 0,
) -> Finished:
    """Run ``torchrun --nproc-per-node ranks -m megatron_hdp options script args``.

    Raises:
        AssertionError: another exit code than ``expect``, or still running after ``timeout`` seconds; shows the end of
            the output.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    # torchrun holds the port that it finds; one given to it could be taken before it listens
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    return run([*torchrun, "-m", "megatron_hdp", *options, script, *args], environment, timeout, expect)


def run(
    command: Sequence[object], environment: dict[str, str] | None = None, timeout: float = 120.0, expect: int | None = 0
) -> Finished:
    """Run any command in the repository with one thread a process; see `launch`. ``expect`` None accepts every code."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(environment or {})}
    words = [str(word) for word in command]
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still ran after {timeout} s: {' '.join(words)}\n{output[-4000:]}") from None
    if expect is not None and process.returncode != expect:
        raise AssertionError(f"exit code {process.returncode}, not {expect}: {' '.join(words)}\n{output[-4000:]}")
    return Finished(process.returncode, output)
