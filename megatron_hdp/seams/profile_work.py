"""What the profiler times of Megatron's model: its decoder, embedding and loss, as the training step calls them."""

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron_hdp.attention.attend import hdp_attention
from megatron_hdp.attention.kernels import BlockKernel
from megatron_hdp.attention.kernels.interface import accumulate_dtype
from megatron_hdp.errors import ConfigError
from megatron_hdp.pool import Pool, ranks_per_node
from megatron_hdp.profiler.activations import LayerBytes
from megatron_hdp.profiler.assemble import Machine, Model
from megatron_hdp.profiler.cases import Case
from megatron_hdp.profiler.machine import device_memory, hardware, machine_memory, software
from megatron_hdp.profiler.rounds import Runner
from megatron_hdp.profiler.timer import Timer
from megatron_hdp.seams.costs import head_size_from_args, heads_from_args, layer_of_args, windows_from_args
from megatron_hdp.seams.flags import device_from_args
from megatron_hdp.seams.locate import megatron_version
from megatron_hdp.seams.output import output_options
from megatron_hdp.seams.spec import HdpPackedSeqParams
from megatron_hdp.types import MicroBatch, Piece, Ring

# Shapes: T tokens of the micro-batch, D hidden size, H heads, S head size.


def hardware_of_args(args: Any) -> str:
    """This rank's hardware for `match.check_profile`."""
    return hardware(device_from_args(args))


class _Recorder(torch.nn.Module):  # type: ignore[misc]
    """Stands in for a decoder: keeps what it is called with, and hands its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.arguments: dict[str, Any] = {}

    def set_input_tensor(self, tensor: Tensor) -> None:
        """Megatron's way to hand a pipeline stage its input; nothing is kept."""

    def forward(self, **arguments: Any) -> Any:
        """Keep the arguments; returns the hidden states."""
        self.arguments = arguments
        return arguments["hidden_states"]


class ModelWork:
    """What `profiler.run` times: this rank's part of the model, on random data."""

    def __init__(self, args: Any, models: list[Any], pool: Pool, kernel: BlockKernel) -> None:
        """``models``: this rank's GPTModels, without Megatron's wrappers."""
        self.args = args
        self.pool = pool
        self.models = models
        self.layers = [layer for model in self.models for layer in model.decoder.layers]
        self._kernel = kernel
        self.device = device_from_args(args)
        self.capacity = int(args.hdp_tokens_per_rank)
        self.windows = windows_from_args(args)
        self.attention_window = None if None in self.windows else max(w or 0 for w in self.windows)
        waits = args.tensor_model_parallel_size > 1 or args.expert_model_parallel_size > 1
        self.timer = Timer(self.device, waits=waits)
        self.ring_timer = Timer(self.device)
        config = self.models[0].config
        dtype = torch.float32 if config.fp32_residual_connection else config.params_dtype
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            shape = self.capacity, 1, config.hidden_size
            # inputs of every case are slices of these
            self._hidden_T1D = torch.randn(shape).to(self.device, dtype)
            self._gradient_T1D = (1e-3 * torch.randn(shape)).to(self.device, dtype)
            self._tokens_1T = torch.randint(0, int(args.padded_vocab_size), (1, self.capacity)).to(self.device)
        for model in self.models:
            model.train()

    @property
    def model(self) -> Model:
        """What follows from the model's shape."""
        _, kv_heads = heads_from_args(self.args)
        row = 2.0 * kv_heads * head_size_from_args(self.args)
        dtype = self.args.params_dtype
        return Model(
            layer=layer_of_args(self.args),
            tensor_parallel=self.args.tensor_model_parallel_size,
            checkpoint_per_token=float(self._hidden_T1D[0].nbytes),
            kv_per_token=row * dtype.itemsize,
            kv_gradient_per_token=row * accumulate_dtype(dtype).itemsize,
        )

    @property
    def machine(self) -> Machine:
        """This rank's machine."""
        ranks = ranks_per_node()
        return Machine(
            hardware=hardware_of_args(self.args),
            software=software(str(megatron_version()), self._kernel.name),
            device_memory=device_memory(self.device, ranks),
            host_memory=machine_memory() / 2,
            gpus_per_node=ranks,
        )

    def has(self, case: Case) -> bool:
        """Can this rank run the case? First and last stages only have an embedding and a loss."""
        if case.kind == "loss":
            return self._stage("post_process") is not None
        if case.kind == "embedding":
            return self._stage("pre_process") is not None
        return bool(self.layers)

    def prepare(self, case: Case) -> Runner:
        """The function that runs ``case`` once; seconds are per layer for layers. Raises MemoryError."""
        make = {
            "layers": self._layers_runner,
            "attention": self._attention_runner,
            "loss": self._loss_runner,
            "embedding": self._embedding_runner,
        }[case.kind]
        try:
            run = make(case)
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from error

        def guarded() -> tuple[float, ...]:
            try:
                return run()
            except torch.OutOfMemoryError as error:
                self.timer.seconds()
                raise MemoryError(str(error)) from error

        return guarded

    def activation_bytes(self, lengths: tuple[int, ...]) -> float:
        """Bytes that one layer keeps for backward of a micro-batch, mean over this rank's layers."""
        forward = self._forward(lengths)
        # with memory of its own: a view would count as all of what it is a view of
        hidden = self._hidden_T1D[: sum(lengths)].clone().requires_grad_()
        shared = [t for model in self.models for t in (*model.parameters(), *model.buffers())]
        counter = LayerBytes(self.layers, [*shared, *_tensors(forward.keywords)])
        return counter.of(lambda: forward(hidden)) / len(self.layers)

    def _layers_runner(self, case: Case) -> Runner:
        forward, count, timer = self._forward(case.lengths), len(self.layers), self.timer
        hidden_T1D, gradient_T1D = self._hidden_T1D[: case.tokens], self._gradient_T1D[: case.tokens]

        def run() -> tuple[float, ...]:
            leaf = hidden_T1D.detach().requires_grad_()
            timer.mark()
            output = forward(leaf)
            timer.mark()
            torch.autograd.backward(output, gradient_T1D.to(output.dtype))
            timer.mark()
            return tuple(seconds / count for seconds in timer.seconds())

        return run

    def ring_runner(self, ring: Ring, tokens: int) -> Runner:
        """The function that runs core attention of its piece of so many tokens once; all ranks of ``ring`` call it."""
        chunk = tokens // 2
        piece = Piece(0, ring.size * tokens, ring, ring.position(self.pool.rank), chunk)
        return self._attention(tokens, MicroBatch((piece,)), self.ring_timer)

    def _attention_runner(self, case: Case) -> Runner:
        return self._attention(case.tokens, self._micro_batch(case.lengths), self.timer)

    def _attention(self, tokens: int, micro_batch: MicroBatch, timer: Timer) -> Runner:
        heads, kv_heads = heads_from_args(self.args)
        size, dtype = head_size_from_args(self.args), self.args.params_dtype

        def random(count: int) -> Tensor:
            return torch.randn(tokens, count, size, device=self.device, dtype=dtype)

        inputs = tuple(random(count).requires_grad_() for count in (heads, kv_heads, kv_heads))
        gradient_THS = random(heads)
        attend = functools.partial(
            hdp_attention,
            micro_batch=micro_batch,
            rank=self.pool.rank,
            comm=self.pool.comm,
            softmax_scale=size**-0.5,
            kernel=self._kernel,
            window=self.attention_window,
        )

        def run() -> tuple[float, ...]:
            timer.mark()
            output = attend(*inputs)
            timer.mark()
            torch.autograd.grad(output, inputs, gradient_THS)
            timer.mark()
            return timer.seconds()

        return run

    def _loss_runner(self, case: Case) -> Runner:
        model, timer, tokens = self._stage("post_process"), self.timer, case.tokens
        assert model is not None
        call = self._call(model, case.lengths)
        options = output_options(self.args, tokens)
        ones_1T = torch.ones(1, tokens, device=self.device)

        def run() -> tuple[float, ...]:
            leaf = self._hidden_T1D[:tokens].detach().requires_grad_()
            with _replaced_decoder(model):
                timer.mark()
                losses_1T = call(decoder_input=leaf, labels=self._tokens_1T[:, :tokens], **options)
                timer.mark()
                torch.autograd.backward(losses_1T, ones_1T.to(losses_1T.dtype))
                timer.mark()
            return timer.seconds()

        return run

    def _embedding_runner(self, case: Case) -> Runner:
        model, timer, tokens = self._stage("pre_process"), self.timer, case.tokens
        assert model is not None
        positions_1T = self._position_ids(self._positions(case.lengths))

        def run() -> tuple[float, ...]:
            timer.mark()
            hidden = model.embedding(input_ids=self._tokens_1T[:, :tokens], position_ids=positions_1T)
            timer.mark()
            torch.autograd.backward(hidden, self._gradient_T1D[:tokens].to(hidden.dtype))
            timer.mark()
            return timer.seconds()

        return run

    def _stage(self, name: str) -> Any:
        """The model chunk that has the first or the last stage's part, if this rank does."""
        return next((model for model in self.models if getattr(model, name)), None)

    def _forward(self, lengths: tuple[int, ...]) -> Any:
        """Hidden states through this rank's decoders, as the model calls them."""
        arguments = []
        for model in self.models:
            with _replaced_decoder(model) as recorder, torch.no_grad():
                self._call(model, lengths)(
                    decoder_input=self._hidden_T1D[: sum(lengths)], output_processor=_nothing_more
                )
            kept = {name: value for name, value in recorder.arguments.items() if name != "hidden_states"}
            arguments.append(kept)
        return functools.partial(_through, [model.decoder for model in self.models], arguments=arguments)

    def _call(self, model: Any, lengths: tuple[int, ...]) -> Any:
        """``model`` as the training step calls it, with everything but what the caller gives."""
        positions_T = self._positions(lengths)
        params = HdpPackedSeqParams(qkv_format="sbhd", micro_batch=self._micro_batch(lengths), positions_T=positions_T)
        tokens_1T = self._tokens_1T[:, : sum(lengths)]
        return functools.partial(model, tokens_1T, self._position_ids(positions_T), None, packed_seq_params=params)

    def _position_ids(self, positions_T: Tensor) -> Tensor:
        """[1, T]; a learned position embedding has no rows beyond the context."""
        return positions_T[None].clamp(max=self.args.max_position_embeddings - 1)

    def _positions(self, lengths: tuple[int, ...]) -> Tensor:
        return torch.cat([torch.arange(length) for length in lengths]).to(self.device)

    def _micro_batch(self, lengths: tuple[int, ...]) -> MicroBatch:
        ring = Ring(self.pool.rank, 1)
        return MicroBatch(tuple(Piece(i, length, ring, 0, length // 2) for i, length in enumerate(lengths)))


def _through(decoders: list[Any], hidden: Any, arguments: list[dict[str, Any]]) -> Any:
    """Hidden states through one decoder after the other."""
    for decoder, given in zip(decoders, arguments, strict=True):
        decoder.set_input_tensor(hidden)
        hidden = decoder(hidden_states=hidden, **given)
    return hidden


@contextlib.contextmanager
def _replaced_decoder(model: Any) -> Iterator[_Recorder]:
    """Put a `_Recorder` in the decoder's place for a moment."""
    decoder, recorder = model.decoder, _Recorder()
    model.decoder = recorder
    try:
        yield recorder
    finally:
        model.decoder = decoder


def _nothing_more(*, hidden_states: Tensor, **unused: Any) -> Tensor:
    """Output processor that leaves the output layer out."""
    return hidden_states


def bare_model(chunk: Any) -> Any:
    """The GPTModel inside Megatron's wrappers. Raises ConfigError for another model."""
    model = chunk
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    if not hasattr(model, "decoder"):
        raise ConfigError(f"profile: {type(chunk).__name__} has no decoder; only GPTModel can be measured")
    return model


def _tensors(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
