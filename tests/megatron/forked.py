"""Runs a script on N CPU ranks, forked from one process that has imported torch and Megatron already.

Starting a rank this way takes a fraction of a second instead of many; everything after the imports is the launcher's
own path. Tests of the launcher itself start real processes instead (see launch.py).
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Outcome:
    """Exit codes and output of every rank."""

    codes: tuple[int | None, ...]
    outputs: tuple[str, ...]

    @property
    def output(self) -> str:
        """All ranks' output, one after the other."""
        return "\n".join(self.outputs)

    def check(self) -> "Outcome":
        """Fail with the end of each failed rank's output unless all ranks ended with 0."""
        if any(code != 0 for code in self.codes):
            parts = [
                f"--- rank {r}: exit code {c}\n{o[-3000:]}" for r, (c, o) in enumerate(zip(self.codes, self.outputs))
            ]
            raise AssertionError("\n".join(parts))
        return self


def _context():
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["megatron_hdp_test_preload"])
    return context


def run_ranks(
    count: int,
    argv: Sequence[str],
    folder: Path,
    *,
    environment: dict[str, str] | None = None,
    timeout: float = 200.0,
    launcher: bool = True,
) -> Outcome:
    """Run ``argv`` (a script and its arguments) on ``count`` ranks; output is kept in ``folder``.

    With ``launcher`` the script goes through `megatron_hdp.__main__` with --cpu; without, only through the CPU mode.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # the fork server inherits sys.path through PYTHONPATH when it starts
    here = str(Path(__file__).resolve().parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    context = _context()
    # Held open by this process, as torchrun's agent does: nobody can take the port between choosing and using it.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ranks = []
    for rank in range(count):
        env = {
            **ENVIRONMENT,
            **(environment or {}),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }
        process = context.Process(target=_rank_main, args=(env, list(argv), str(folder / f"rank{rank}.out"), launcher))
        process.start()
        ranks.append(process)
    deadline = time.monotonic() + timeout
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [process for process in ranks if process.is_alive()]
    for process in late:
        process.kill()
        process.join()
    outputs = tuple((folder / f"rank{rank}.out").read_text(errors="replace") for rank in range(count))
    outcome = Outcome(tuple(process.exitcode for process in ranks), outputs)
    if late:
        raise AssertionError(f"ranks still ran after {timeout} s\n" + "\n".join(text[-3000:] for text in outputs))
    return outcome


def _rank_main(environment: dict[str, str], argv: list[str], output: str, launcher: bool) -> None:
    """Body of one rank, in the forked process."""
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115 (lives as long as the process)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    import faulthandler

    faulthandler.enable()
    if launcher:
        from megatron_hdp.__main__ import main

        sys.argv = ["megatron_hdp", "--cpu", *argv]
        main()
        return
    import runpy

    from megatron_hdp import cpu
    from megatron_hdp.seams import cpu as megatron_cpu

    cpu.enable()
    megatron_cpu.apply()
    sys.argv = list(argv)
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")
