"""The state of one run with --hdp: its pool, its loaders, and what the current step is doing."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.rerun_state_machine import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    RerunDataIterator,
)
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_hdp import liveness
from megatron_hdp.errors import ConfigError, EmptySplitError, SeamError
from megatron_hdp.loader import StepBundle, StepLoader
from megatron_hdp.metrics import RingTraffic, StepLog, StepRecord, record_step
from megatron_hdp.pool import Pool, Service, agree_on_plan, make_pool
from megatron_hdp.seams.costs import cost_from_args, stages_from_args
from megatron_hdp.seams.data import (
    StepIterator,
    check_longest,
    corpus_from_args,
    loader_options,
    planner_from_args,
)
from megatron_hdp.seams.flags import config_from_args, kernel_from_args, log
from megatron_hdp.seams.install import table_text
from megatron_hdp.seams.spec import HdpCoreAttention, bind_model, hdp_layer_spec

_active: list["HdpRun"] = []
"""The open run, at most one: Megatron's loop is one per process and hands no context to its callees."""


def active_run() -> "HdpRun | None":
    """The run with --hdp that is open in this process, if any."""
    return _active[-1] if _active else None


@contextlib.contextmanager
def open_run(args: Any) -> Iterator["HdpRun"]:
    """Open the run for the time of Megatron's pretrain()."""
    if _active:
        raise SeamError("pretrain() was called inside pretrain(): one run at a time")
    with contextlib.ExitStack() as stack:
        run = HdpRun(args, stack)
        log(args, table_text().removeprefix("megatron_hdp "))
        _active.append(run)
        stack.callback(_active.pop)
        yield run
        run.service.close()


class HdpRun:
    """One run: made before Megatron's initialisation, connected once the model is built."""

    def __init__(self, args: Any, stack: contextlib.ExitStack) -> None:
        self.args = args
        self.config = config_from_args(args)
        self.service = Service()
        self.steps_run = 0
        self._stack = stack
        self._pool: Pool | None = None
        self._loaders: dict[str, StepLoader | None] = {}
        self._attentions: list[HdpCoreAttention] = []
        self._record: StepRecord | None = None
        self._log: StepLog | None = None
        self._logged_at = time.perf_counter()

    def prepare_model(self, model_config: Any) -> None:
        """Put ring attention into the model's layer spec and have the model connected when it is built."""
        model_config.transformer_layer_spec = hdp_layer_spec(model_config.transformer_layer_spec)
        model_config.pre_wrap_hooks = [*model_config.pre_wrap_hooks, self._connect]
        if self.args.pipeline_model_parallel_size > 1:
            model_config.transformer.variable_seq_lengths = True

    def _connect(self, models: list[Any]) -> list[Any]:
        """Megatron's pre-wrap hook: process groups exist now, the model is not yet wrapped."""
        args = self.args
        self._open_log()
        self._stack.enter_context(
            liveness.watch(
                dist.get_rank(),
                dist.get_world_size(),
                _exchange,
                step=lambda: self.current_step,
                goodbye_codes=(0, EXIT_CODE_RESUME_TO_DISAMBIGUATE, EXIT_CODE_FAILED_ON_RESULT_VALIDATION),
            )
        )
        pool_ranks = dist.get_process_group_ranks(mpu.get_data_parallel_group(with_context_parallel=True))
        self._pool = make_pool(pool_ranks)
        kernel = kernel_from_args(args)
        for model in models:
            self._attentions += bind_model(model, self._pool, kernel)
        log(args, f"pool of {self._pool.size} ranks x {self.config.tokens_per_rank} tokens, kernel {kernel.name}")
        return models

    def _open_log(self) -> None:
        """Open --hdp-log on the last rank, which also prints Megatron's log line. Collective.

        Raises `ConfigError` on every rank if that rank cannot write it: the others would wait for it.
        """
        if not self.config.log:
            return
        error = None
        if dist.get_rank() == dist.get_world_size() - 1:
            try:
                self._log = StepLog(self.config.log)
            except ConfigError as caught:
                error = str(caught)
        errors: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(errors, error)
        if errors[-1] is not None:
            raise ConfigError(errors[-1])

    @property
    def pool(self) -> Pool:
        """The run's pool. Raises `SeamError` before the model was built."""
        if self._pool is None:
            raise SeamError("--hdp: data was asked for before the model was built; call order of pretrain() changed")
        return self._pool

    @property
    def current_step(self) -> int:
        """Iteration that is running, counted from 0."""
        return int(getattr(self.args, "curr_iteration", 0))

    def data_iterators(self) -> tuple[Any, Any, Any]:
        """Train, validation and test iterators; called once per model chunk. Sets args.do_train and its sisters."""
        args = self.args
        per_step = args.global_batch_size
        if args.iteration > 0:
            # counters of a checkpoint may come from another pool size: derive them from the iteration again
            args.consumed_train_samples = args.iteration * per_step
            args.consumed_valid_samples = args.iteration // args.eval_interval * args.eval_iters * per_step
        train = self._iterator("train", lambda: self.current_step)
        valid = self._iterator("valid", lambda: args.consumed_valid_samples // per_step) if args.eval_iters else None
        test = self._iterator("test", None) if args.eval_iters else None
        args.do_train = train is not None and not args.skip_train and bool(args.train_iters)
        args.do_valid = valid is not None
        args.do_test = test is not None
        return train, valid, test

    def _iterator(self, split: str, step: Callable[[], int] | None) -> Any:
        if split not in self._loaders:
            self._loaders[split] = self._loader(split)
        loader = self._loaders[split]
        return None if loader is None else RerunDataIterator(StepIterator(loader, step))

    def _loader(self, split: str) -> StepLoader | None:
        try:
            corpus = corpus_from_args(self.args, self.config, split)
        except EmptySplitError:
            if split == "train":
                raise
            corpus = None  # small corpora often have no document for 1 % of the documents
        if corpus is None:
            log(self.args, f"no documents in the {split} split: skipped")
            return None
        pool = self.pool
        check_longest(corpus, pool.size, self.config.tokens_per_rank or 0)
        return StepLoader(
            corpus,
            planner_from_args(self.args, self.config, pool.size),
            lambda digest, step: agree_on_plan(digest, step, pool.control),
            self.service,
            loader_options(self.args, self.config, pool.rank),
            self._recorder(pool) if split == "train" else None,
        )

    def _recorder(self, pool: Pool) -> Callable[..., StepRecord]:
        """The function that notes what this rank knows of a planned step."""
        stages, virtual_stages = stages_from_args(self.args)
        return functools.partial(
            record_step,
            pool.rank,
            self._traffic(),
            cost=cost_from_args(self.args, self.config),
            stages=stages,
            virtual_stages=virtual_stages,
        )

    def begin_step(self, bundle: StepBundle) -> None:
        """Note what the step will do, and tell Megatron's FLOP counter the true lengths, once per sequence."""
        if self._record is None or self._record.step != bundle.step:  # a rerun of the step counts once
            self._record = bundle.record
            update_seqlen_stats_from_cu_seqlens(self._own_lengths(bundle))

    def end_step(self) -> None:
        """Count the step."""
        self.steps_run += 1

    def _own_lengths(self, bundle: StepBundle) -> torch.Tensor:
        """Cumulative lengths of the sequences whose first piece this rank holds; never fewer than two entries,
        because Megatron sums them with a collective in which every rank must take part."""
        lengths = [
            piece.length
            for micro_batch in bundle.micro_batches
            for piece in micro_batch.micro_batch.pieces
            if piece.position == 0
        ]
        return torch.tensor([0, *(lengths or [0])], dtype=torch.int64).cumsum(0)

    def _traffic(self) -> RingTraffic:
        args = self.args
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        recompute = args.recompute_granularity
        if recompute == "full" and args.recompute_method == "block":
            recomputed = args.recompute_num_layers * args.pipeline_model_parallel_size
        elif recompute == "full" or (
            recompute == "selective" and "core_attn" in (args.recompute_modules or ["core_attn"])
        ):
            recomputed = args.num_layers
        else:
            recomputed = 0
        return RingTraffic(
            layers=args.num_layers,
            kv_heads=groups // args.tensor_model_parallel_size,
            head_dim=args.kv_channels,
            bytes_per_element=args.params_dtype.itemsize,
            recomputed_layers=recomputed,
        )

    def assert_ran(self) -> None:
        """Raise `SeamError` unless HDP's schedule and attention ran by now."""
        if not self.args.do_train or not self.args.train_iters or self.args.iteration >= self.args.train_iters:
            return
        if self.steps_run == 0 or (self._attentions and not any(module.calls for module in self._attentions)):
            raise SeamError(
                "--hdp was on but did not run: the training step reached neither its schedule nor its attention; "
                "run `megatron-hdp doctor`"
            )

    def scalars(self) -> dict[str, float]:
        """The hdp/* values of the current step."""
        return {} if self._record is None else self._record.scalars()

    def log_step(self, iteration: int, losses: Any, grad_norm: Any, learning_rate: Any) -> None:
        """One line of --hdp-log, by the last rank (which also prints Megatron's log line)."""
        now = time.perf_counter()
        seconds, self._logged_at = now - self._logged_at, now
        if self._log is None or self._record is None:
            return
        measured = {
            "iteration": iteration,
            "loss": float(losses["lm loss"]),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "learning_rate": learning_rate,
            "seconds": seconds,
            "own_ring_bytes_sent_total": self.pool.comm.bytes_sent,
        }
        self._log.write(self._record, measured)


def _exchange(address: str) -> list[str]:
    """Every process's address, by global rank."""
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, address)
    return addresses
