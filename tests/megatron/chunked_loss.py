"""Compares Megatron's GPTModel with and without our output processor, on all ranks as tensor-parallel ranks."""

import os

import torch
from live_bytes import LiveBytes
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hdp.loss import token_loss
from megatron_hdp.seams.output import _chunked_output

TOKENS, VOCABULARY = 50, 64

CASES = {
    "plain": {},
    "tied": {"tied": True},
    "muP": {"use_mup": True, "mup_base_hidden_size": 8},
    "fused loss": {"cross_entropy_loss_fusion": True},
    "bf16": {"bf16": True, "params_dtype": torch.bfloat16},
    "frozen output": {"frozen": True},
}


def model_of(tied=False, frozen=False, **options):
    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=int(os.environ["WORLD_SIZE"]),
        **options,
    )
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        TOKENS,
        share_embeddings_and_output_weights=tied,
        parallel_output=True,
    )
    if config.bf16:
        model.bfloat16()
    if frozen:
        model.output_layer.weight.requires_grad_(False)
    return model


def run(model, rows):
    """Losses and all gradients; ``rows`` None: Megatron's own path."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(2)
    tokens, labels = torch.randint(0, VOCABULARY, (2, 1, TOKENS), generator=generator)
    mask = (torch.rand(1, TOKENS, generator=generator) < 0.8).float()
    options = {} if rows is None else {"output_processor": _chunked_output, "output_processor_context": rows}
    call = (tokens, torch.arange(TOKENS)[None], None)
    losses = model(*call, labels=labels, **options)
    token_loss(losses, mask)[0].backward()
    with torch.no_grad():
        assert torch.equal(model(*call, labels=labels, **options), losses)
    return {"losses": losses.detach(), **{n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}}


def check_memory():
    """Megatron's own loss: 64 MiB of fp32 logits at once, or chunks of 4 MiB and what a few of them need."""
    tokens, vocabulary, rows, mib = 4096, 4096, 256, 2**20
    model = model_of()
    model.output_layer = tensor_parallel.ColumnParallelLinear(
        16, vocabulary, config=model.config, init_method=model.config.init_method, bias=False, skip_bias_add=False
    )
    here = vocabulary // int(os.environ["WORLD_SIZE"])
    hidden = torch.randn(tokens, 1, 16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (1, tokens))
    peaks = {}
    for chunk in (rows, tokens):
        with LiveBytes() as memory:
            losses = _chunked_output(
                hidden_states=hidden,
                output_layer=model.output_layer,
                output_weight=None,
                labels=labels,
                context=chunk,
                compute_language_model_loss=model.compute_language_model_loss,
                scale_logits=model._scale_logits,
            )
            losses.sum().backward()
        peaks[chunk] = memory.peak
        assert memory.largest == 4 * chunk * here, (chunk, memory.largest)
    assert peaks[rows] < 2 * 4 * rows * here + 3 * hidden.nbytes, peaks
    assert peaks[tokens] > 4 * tokens * here, peaks
    print(f"peak with chunks {peaks[rows] / mib:.1f} MiB, without {peaks[tokens] / mib:.1f} MiB")


def main():
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=int(os.environ["WORLD_SIZE"]))
    for name, options in CASES.items():
        model = model_of(**options)
        whole = run(model, None)
        # the fused loss rounds its gradient to bf16 whatever the model's precision
        bound = 1e-2 if name == "bf16" else 1e-5
        for rows in (7, 25, 49):
            ours = run(model, rows)
            assert ours.keys() == whole.keys()
            for key, value in whole.items():
                error = float((ours[key] - value).norm() / value.norm())
                assert error < bound, (name, rows, key, error)
    check_memory()
    print("all equal", flush=True)


if __name__ == "__main__":
    main()
