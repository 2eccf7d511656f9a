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
from megatron.core.utils import get_model_config
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron_hdp import liveness
from megatron_hdp.attention.kernels import BlockKernel, try_kernel
from megatron_hdp.errors import EmptySplitError, SeamError
from megatron_hdp.loader import StepBundle, StepLoader
from megatron_hdp.metrics import (
    RingTraffic,
    StepLog,
    StepRecord,
    offload_fields,
    offload_scalars,
    record_step,
)
from megatron_hdp.pool import Pool, Service, make_pool, ranks_per_node, together, warm_up_distance
from megatron_hdp.seams.costs import (
    arena_bytes,
    cost_from_args,
    head_size_from_args,
    heads_from_args,
    recomputed_from_args,
    router_counts_from_args,
    stages_from_args,
    windows_from_args,
)
from megatron_hdp.seams.data import (
    StepIterator,
    check_longest,
    corpus_from_args,
    loader_options,
    planner_from_args,
)
from megatron_hdp.seams.expert_layout import expert_group_from_args
from megatron_hdp.seams.experts import bind_experts, expert_layer_spec
from megatron_hdp.seams.flags import config_from_args, device_from_args, kernel_from_args, log
from megatron_hdp.seams.install import table_text
from megatron_hdp.seams.offload import ModelOffload
from megatron_hdp.seams.p2p import PlannedCommunicator
from megatron_hdp.seams.spec import HdpCoreAttention, bind_model, hdp_layer_spec
from megatron_hdp.seams.timeline import ForwardStep, TimelineRecorder
from megatron_hdp.seams.timeline_setting import connect_timeline

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
        if run.timeline is not None:
            run.timeline.close()


class HdpRun:
    """One run: made before Megatron's initialisation, connected once the model is built."""

    def __init__(self, args: Any, stack: contextlib.ExitStack) -> None:
        self.args = args
        self.config = config_from_args(args)
        self.service = Service()
        self.steps_run = 0
        self.timeline: TimelineRecorder | None = None
        """Notes training steps, with --hdp-timeline."""
        self._stack = stack
        self._pool: Pool | None = None
        self._kernel: BlockKernel | None = None
        self._loaders: dict[str, StepLoader | None] = {}
        self._attentions: list[HdpCoreAttention] = []
        self._offload: ModelOffload | None = None
        self._communicator: PlannedCommunicator | None = None
        self._record: StepRecord | None = None
        self._log: StepLog | None = None
        self._logged_at = time.perf_counter()
        self._sent = self._sent_before = 0

    def prepare_model(self, model_config: Any) -> None:
        """Put ring attention into the model's layer spec and have the model connected when it is built.

        Raises `ConfigError` if no kernel can run this model's attention: no process group exists yet.
        """
        self._kernel = kernel_from_args(self.args)
        model_config.transformer_layer_spec = expert_layer_spec(hdp_layer_spec(model_config.transformer_layer_spec))
        model_config.pre_wrap_hooks = [*model_config.pre_wrap_hooks, self._connect]

    def noted(self, forward_step: ForwardStep) -> ForwardStep:
        """``forward_step``, which also notes when it runs if --hdp-timeline was given."""
        if not self.config.timeline:
            return forward_step
        self.timeline = TimelineRecorder(device_from_args(self.args))
        return self.timeline.timed(forward_step)

    def _connect(self, models: list[Any]) -> list[Any]:
        """Megatron's pre-wrap hook: process groups exist now, the model is not yet wrapped."""
        args = self.args
        self._open_log()
        self._stack.enter_context(
            liveness.watch(
                dist.get_rank(),
                dist.get_world_size(),
                _exchange,
                step=lambda: int(getattr(args, "curr_iteration", -1)),
                goodbye_codes=(0, EXIT_CODE_RESUME_TO_DISAMBIGUATE, EXIT_CODE_FAILED_ON_RESULT_VALIDATION),
            )
        )
        pool_ranks = dist.get_process_group_ranks(mpu.get_data_parallel_group(with_context_parallel=True))
        self._pool = make_pool(pool_ranks, warm_up_distance(self._widest_exchange(), pool_ranks, ranks_per_node()))
        assert self._kernel is not None, "prepare_model() was not called"
        size = head_size_from_args(args)
        try_kernel(self._kernel, device_from_args(args), args.params_dtype, *heads_from_args(args), size)
        for model in models:
            self._attentions += bind_model(model, self._pool, self._kernel)
            bind_experts(model, self._pool, args.global_batch_size)
        if self.config.offload:
            self._bind_offload(models)
        if self.timeline is not None:
            connect_timeline(self.timeline, args, self.config, self._pool, device_from_args(args), self.service)
        what = f"kernel {self._kernel.name}, exchange {self.config.exchange}"
        log(args, f"pool of {self._pool.size} ranks x {self.config.tokens_per_rank} tokens, {what}")
        return models

    def _bind_offload(self, models: list[Any]) -> None:
        """Take the arena, and have the model's activations leave for it. Collective."""
        size = arena_bytes(self.config)
        self._offload = ModelOffload(size, device_from_args(self.args), ranks_per_node())
        self._stack.callback(self._offload.close)
        for model in models:
            self._offload.bind(model)
        log(self.args, f"offload: {size / 2**30:.3f} GiB of host memory in each process")

    def _widest_exchange(self) -> str:
        """--hdp-exchange, or "ring" where "auto" never chooses another: the planner keeps it where all layers have one
        window."""
        windows = set(windows_from_args(self.args))
        is_ring = self.config.exchange == "auto" and len(windows) == 1 and windows != {None}
        return "ring" if is_ring else self.config.exchange

    def _open_log(self) -> None:
        """Open --hdp-log on the last rank, which also prints Megatron's log line. Collective.

        Raises `ConfigError` on every rank if that rank cannot write it: the others would wait for it.
        """
        path, is_last = self.config.log, dist.get_rank() == dist.get_world_size() - 1
        if path:
            self._log = together(lambda: StepLog(path) if is_last else None)

    @property
    def pool(self) -> Pool:
        """The run's pool. Raises `SeamError` before the model was built."""
        if self._pool is None:
            raise SeamError("--hdp: data was asked for before the model was built; call order of pretrain() changed")
        return self._pool

    def communicator(self, model: Any) -> PlannedCommunicator | None:
        """Passes messages between the stages of ``model``, one part of this process's; None without stages."""
        if self.args.pipeline_model_parallel_size == 1:
            return None
        if self._communicator is None:
            group = mpu.get_pipeline_model_parallel_group()
            self._communicator = PlannedCommunicator(group, get_model_config(model))
        return self._communicator

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
            done = evaluations(args.iteration, args.eval_interval, args.start_eval_at_iter)
            args.consumed_valid_samples = done * args.eval_iters * per_step
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
            pool.agreement.on_plan,
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
            expert_group=expert_group_from_args(self.args),
        )

    def begin_step(self, bundle: StepBundle, parts: list[Any]) -> None:
        """Note what the step will do, and tell Megatron's FLOP counter the true lengths, once per sequence.

        ``parts`` are this process's parts of the model.
        """
        if self._record is None or self._record.step != bundle.step:  # a rerun of the step counts once
            self._record = bundle.record
            update_seqlen_stats_from_cu_seqlens(self._own_lengths(bundle))
        self._sent_before = self.pool.comm.bytes_sent
        if self._offload is not None:
            self._offload.begin_step()
        if self.timeline is not None:
            self.timeline.begin_step(bundle, parts)

    def end_step(self) -> None:
        """Count the step, and what it sent; evaluation sends too, which no plan of a step foretells."""
        if self.timeline is not None:
            self.timeline.end_step()
        self.steps_run += 1
        self._sent += self.pool.comm.bytes_sent - self._sent_before
        if self._offload is not None:
            self._offload.end_step()

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
        heads, kv_heads = heads_from_args(self.args)
        return RingTraffic(
            layer_windows=windows_from_args(self.args),
            recomputed=recomputed_from_args(self.args),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_size_from_args(self.args),
            bytes_per_element=self.args.params_dtype.itemsize,
            router_counts=router_counts_from_args(self.args),
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
        moved = None if self._offload is None else self._offload.moved
        return {
            **({} if self._record is None else self._record.scalars()),
            **({} if moved is None else offload_scalars(moved)),
        }

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
            "own_ring_bytes_sent_total": self._sent,
            **({} if self._offload is None or self._offload.moved is None else offload_fields(self._offload.moved)),
        }
        self._log.write(self._record, measured)


def evaluations(iteration: int, interval: int | None, start: int | None) -> int:
    """How often training has evaluated by the end of ``iteration``: every ``interval`` steps, never where that is None
    or 0, and not before step ``start``."""
    if not interval:
        return 0
    before = (start - 1) // interval if start else 0
    return max(0, iteration // interval - before)


def _exchange(address: str) -> list[str]:
    """Every process's address, by global rank."""
    addresses: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(addresses, address)
    return addresses
