"""Megatron-LM's own schedulers of sequences, run as they are, their answers as plans of this package.

* Without a checkout: `BalancedCPScheduler` of the installed megatron-core (--hybrid-context-parallel). Its rounds end
  with barriers, and each sequence is a micro-batch of its own.
* With a checkout of Megatron-LM's dev branch: `DefaultDynamicCPScheduler` (--dynamic-context-parallel). A round is one
  packed micro-batch on every rank. It runs in a process of its own, because one process can import one Megatron.

In their favour: a plan has no barriers, so the waiting between rounds is left out, as is the time of planning; and
their rule that every sequence is padded to a multiple of twice the pool is not applied. In a pack on a ring, sequences
walk the ring one by one in this package; see `megatron_hdp.planner.baselines.packed`.
"""

import contextlib
import inspect
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_hdp.cost import CostModel
from megatron_hdp.errors import ConfigError, PlanError, SeamError
from megatron_hdp.planner.baselines.rounds import plan_rounds
from megatron_hdp.types import IntArray, Plan

HYBRID = "Megatron-LM's BalancedCPScheduler (installed)"
DYNAMIC = "Megatron-LM's DefaultDynamicCPScheduler (checkout)"

type Rounds = list[list[list[int]]]


def plan_megatron(
    lengths: IntArray,
    num_ranks: int,
    capacity: int,
    pad_multiple: int,
    *,
    checkout: Path | None = None,
    any_ring: bool = False,
    cost: CostModel | None = None,
    count_multiple: int = 1,
    equal_counts: bool = False,
    offload: bool = False,
) -> Plan:
    """The plan that Megatron-LM itself makes for this batch, by its own cost s^2 / d.

    Args:
        lengths: tokens of every sequence, int64 [num_sequences], each at least 1.
        num_ranks: ranks of the pool.
        capacity: tokens that one rank holds in one micro-batch.
        pad_multiple: pieces are multiples of this.
        checkout: folder of a Megatron-LM tree with `DefaultDynamicCPScheduler`; None for the installed scheduler.
        any_ring: accept rings for which Megatron has no communicator, see `plan_rounds`.
        cost: unused, Megatron has its own; in the signature of all baselines.
        count_multiple: counts are a multiple of this (with a checkout: its own rule for interleaved schedules).
        equal_counts: the installed scheduler cannot; the checkout's always has them.
        offload: unused, nothing is offloaded.

    Raises:
        ConfigError: equal counts, or count_multiple above 1, with the installed scheduler.
        PlanError: Megatron's scheduler fails on this batch, or its answer could not run.
        SeamError: the scheduler is not there.
    """
    decided = _rounded(lengths, capacity, pad_multiple)
    if checkout is None:
        if equal_counts or count_multiple > 1:
            raise ConfigError(
                "Megatron's hybrid context parallelism works without pipeline stages only and has unequal counts: plan "
                "with one stage and balance dp"
            )
        rounds, system = _hybrid(decided.tolist(), num_ranks, capacity), HYBRID
    else:
        rounds, system = _in_process_of(checkout, decided.tolist(), num_ranks, capacity, count_multiple), DYNAMIC
    return plan_rounds(
        lengths,
        num_ranks,
        capacity,
        pad_multiple,
        rounds,
        system=system,
        packed=checkout is not None,
        any_ring=any_ring,
        equal_counts=checkout is not None,
        count_multiple=count_multiple,
    )


def _rounded(lengths: IntArray, capacity: int, pad_multiple: int) -> IntArray:
    """Lengths that cut evenly, pad_multiple tokens a piece, on rings up to 8 times the smallest power of two; [n].

    So that packs which are full by these lengths are not too full by this package's padding. It adds less than 1 % to
    sequences of 1,600 tokens or more; Megatron's own rule, multiples of twice the pool, adds far more. No sequence
    needs a larger ring for it.
    """
    wider = next(f for f in (8, 4, 2, 1) if capacity % (pad_multiple * f) == 0)
    needed = -(-lengths // capacity)
    unit = pad_multiple * wider << np.array([int(d - 1).bit_length() for d in needed], dtype=np.int64)
    rounded: IntArray = -(-lengths // unit) * unit
    return rounded


@dataclass(frozen=True)
class _Pool:
    """What the installed scheduler asks of a process group."""

    ranks: int

    def size(self) -> int:
        """Ranks of the pool."""
        return self.ranks


def _hybrid(lengths: list[int], num_ranks: int, capacity: int) -> Rounds:
    try:
        with _quiet():
            from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    except ImportError as error:
        raise SeamError(
            f"no BalancedCPScheduler to compare with ({error}): install megatron-core 0.19, or give a checkout of "
            "Megatron-LM's dev branch"
        ) from error
    scheduler: Any = BalancedCPScheduler(capacity, _Pool(num_ranks))
    with _failures_are_its_own(HYBRID):
        _, rounds = scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)
    return [[list(rank) for rank in round_] for round_ in rounds]


def _dynamic(lengths: list[int], num_ranks: int, capacity: int, count_multiple: int, checkout: Path) -> Rounds:
    """The checkout's scheduler; runs in a process whose import path begins with the checkout."""
    try:
        with _quiet():
            from megatron.core.datasets.data_schedule import DefaultDynamicCPScheduler
    except ImportError as error:
        raise SeamError(
            f"{checkout}: no DefaultDynamicCPScheduler ({error}); check out Megatron-LM's dev branch there"
        ) from error
    found = Path(inspect.getfile(DefaultDynamicCPScheduler))
    if not found.resolve().is_relative_to(checkout.resolve()):
        raise SeamError(f"{checkout}: its megatron.core was not imported, but {found}: is it a Megatron-LM checkout?")
    scheduler: Any = DefaultDynamicCPScheduler(capacity, 1, num_ranks, count_multiple if count_multiple > 1 else None)
    with _failures_are_its_own(DYNAMIC):
        rounds = scheduler.get_groups_and_subsamples(list(enumerate(lengths)))
    return [[list(rank) for rank in round_] for round_ in rounds]


def _in_process_of(checkout: Path, lengths: list[int], num_ranks: int, capacity: int, count_multiple: int) -> Rounds:
    if not (checkout / "megatron" / "core").is_dir():
        raise SeamError(f"{checkout}: no Megatron-LM checkout, it has no folder megatron/core")
    request = {
        "lengths": lengths,
        "num_ranks": num_ranks,
        "capacity": capacity,
        "count_multiple": count_multiple,
        "checkout": str(checkout),
    }
    path = os.pathsep.join(filter(None, [str(checkout.resolve()), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import serve; serve()"],
        input=json.dumps(request),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SeamError(
            f"{checkout}: the process of its scheduler ended with {done.returncode}:\n{done.stderr[-2000:]}"
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    if "rounds" not in answer:
        raise (SeamError if answer["kind"] == "seam" else PlanError)(answer["error"])
    rounds: Rounds = answer["rounds"]
    return rounds


def serve() -> None:
    """Answer one request of `plan_megatron` from standard input on the last line of standard output (JSON)."""
    request = json.load(sys.stdin)
    request["checkout"] = Path(request["checkout"])
    try:
        answer: dict[str, Any] = {"rounds": _dynamic(**request)}
    except SeamError as error:
        answer = {"kind": "seam", "error": str(error)}
    except PlanError as error:
        answer = {"kind": "plan", "error": str(error)}
    print(f"\n{json.dumps(answer)}")


@contextlib.contextmanager
def _failures_are_its_own(system: str) -> Iterator[None]:
    """Whatever the scheduler raises is a `PlanError` that names it."""
    try:
        yield
    except Exception as error:  # it has no errors of its own: assertions, KeyErrors, TypeErrors
        raise PlanError(
            f"{system} fails on this batch with {type(error).__name__}: {error or 'no message'}. That is a limit of "
            "this rival, not of the batch"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Importing Megatron warns of everything that is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
