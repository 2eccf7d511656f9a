"""--hdp-timeline: when each micro-batch ran forward and backward, for how long it computed and for how long it waited.

Nothing of Megatron is wrapped for it. Forward is the forward step that we hand in, and the loss function that it
returns. Backward begins when a hook of the micro-batch's output gets its gradient, and ends when autograd says that all
of that backward pass is done.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from megatron_hdp.attention.comm import RingComm
from megatron_hdp.loader import StepBundle
from megatron_hdp.seams.timeline_clock import Mark, WaitTrace, clock_of
from megatron_hdp.timeline import BACKWARD, FORWARD
from megatron_hdp.timeline_writer import StepLine, TimelineWriter

type ForwardStep = Callable[..., tuple[Any, Any]]
type Submit = Callable[[Callable[[], None]], Any]


@dataclass
class Operation:
    """One micro-batch through one model part, in one direction."""

    phase: int
    slot: int
    part: int
    begin: Mark = None
    end: Mark = None
    waits: list[Any] = field(default_factory=list)
    """What the clock's `end_wait` makes of each wait for a ring's messages."""


@dataclass
class _Step:
    """A step that runs, or whose clock has not been read yet."""

    line: StepLine
    mark: Mark
    operations: list[Operation] = field(default_factory=list)
    slots: Counter[int] = field(default_factory=Counter)
    """Model part -> micro-batches that it has begun."""


class TimelineRecorder:
    """Notes the steps of this process. On a GPU a step is written when the next one begins, so that nobody waits."""

    def __init__(self, device: torch.device) -> None:
        self._clock = clock_of(device)
        self._writer: TimelineWriter | None = None
        self._submit: Submit | None = None
        self._parts: list[Any] = []
        self._asked = 0.0
        self._step: _Step | None = None
        self._running: Operation | None = None
        self._unread: list[_Step] = []

    def connect(self, writer: TimelineWriter, comm: RingComm, submit: Submit | None) -> None:
        """Process groups exist now. ``submit`` runs a job in another thread; None where others write plans."""
        self._writer, self._submit = writer, submit
        comm.trace = WaitTrace(self._clock, self._waited)

    # What the run tells

    def ask(self) -> None:
        """The data of a training step are about to be asked for."""
        self._asked = self._clock.now()

    def begin_step(self, bundle: StepBundle, parts: list[Any]) -> None:
        """A training step begins; ``parts`` are the model parts of this process, as the schedule has them."""
        self._write_what_is_over()
        self._parts = parts
        line = StepLine(bundle.step, bundle.plan.digest().hex(), self._asked)
        self._step = _Step(line, self._clock.begin_step())
        if self._submit is not None and self._writer is not None:
            span = None if bundle.record is None else bundle.record.summary.span_seconds
            self._submit(functools.partial(self._writer.write_plan, bundle.step, bundle.plan, span))

    def end_step(self) -> None:
        """Megatron's schedule has returned."""
        assert self._step is not None, "begin_step() was not called"
        self._step.line.done = self._clock.now()
        self._unread.append(self._step)
        self._step = self._running = None
        if self._clock.is_immediate:
            self._write_what_is_over()

    def close(self) -> None:
        """Write what is left."""
        if self._unread:
            self._clock.finish()
            self._write_what_is_over()

    # What the model's passes tell

    def timed(self, forward_step: ForwardStep) -> ForwardStep:
        """``forward_step``, which in training steps begins the operations of a micro-batch."""

        @functools.wraps(forward_step)
        def timed_forward_step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            if self._step is None:  # evaluation
                return forward_step(data_iterator, model, *args, **kwargs)
            part = next((index for index, each in enumerate(self._parts) if each is model), 0)
            slot = self._step.slots[part]
            self._step.slots[part] += 1
            forward, backward = Operation(FORWARD, slot, part), Operation(BACKWARD, slot, part)
            self._begin(forward)
            output, loss = forward_step(data_iterator, model, *args, **kwargs)
            self._end_forward(forward, backward, output)
            return output, functools.partial(self._timed_loss, forward, backward, loss)

        return timed_forward_step

    def _timed_loss(self, forward: Operation, backward: Operation, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """On the last stage forward goes on, and backward begins with the loss."""
        result = loss(*args, **kwargs)
        self._end_forward(forward, backward, result[0])
        return result

    def _begin(self, operation: Operation) -> None:
        assert self._step is not None, "an operation is one of a step"
        self._step.operations.append(operation)
        self._running = operation
        operation.begin = self._clock.mark()

    def _end(self, operation: Operation) -> None:
        operation.end = self._clock.mark()
        self._running = None

    def _end_forward(self, forward: Operation, backward: Operation, output: Any) -> None:
        self._end(forward)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(functools.partial(self._begin_backward, backward))

    def _begin_backward(self, backward: Operation, gradient: Tensor) -> None:
        """Hook of the output, and of the loss, which comes first where there is one."""
        if self._step is not None and backward.begin is None:
            self._begin(backward)
            Variable._execution_engine.queue_callback(functools.partial(self._end, backward))

    def _waited(self, wait: Any) -> None:
        if self._running is not None:
            self._running.waits.append(wait)

    # Writing

    def _write_what_is_over(self) -> None:
        """Write the steps whose marks can be read by now, in order."""
        while self._unread and all(self._clock.is_over(each.end) for each in self._unread[0].operations):
            step = self._unread.pop(0)
            line = step.line
            for each in step.operations:
                times = self._clock.read(step.mark, each.begin, each.end, each.waits)
                line.add(each.phase, each.slot, each.part, times)
            if self._writer is not None:
                self._writer.write_step(line)
