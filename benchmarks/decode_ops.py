"""Attention and delta-rule kernels of a decode step of Qwen3.6-35B-A3B, on a card, beside its copy and read rates.

    PYTHONPATH=src python benchmarks/decode_ops.py [--as-arch 75]

Medians of CUDA events around graph replays. Layers have buffers of their own, so that nothing is left in a cache.
"""

from __future__ import annotations

import argparse

import torch

from packhorse.bench.card import graph_seconds
from packhorse.core.formats import kv_token_bytes
from packhorse.kernels.attention.cuda import DecodeBatch, PagedAttention
from packhorse.kernels.cuda.launch import use_arch
from packhorse.kernels.delta.cuda import delta_step
from packhorse.quant.codec import make_codec

CONTEXT = 245_760
ATTENTION_LAYERS, DELTA_LAYERS = 4, 30


def rates() -> tuple[float, float]:
    """Bytes a second of a copy (read and write counted) and of a sum."""
    x = torch.randn(2**29, device="cuda")
    y = torch.empty_like(x)
    copies = [lambda: y.copy_(x), lambda: torch.mul(x, 1.0, out=y)]  # the driver's copy, and a kernel
    copy = 2 * x.nbytes / min(map(graph_seconds, copies))
    total = torch.empty((), device="cuda")
    return copy, x.nbytes / graph_seconds(lambda: torch.sum(x, 0, out=total))


def int32(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def attention_s(codec: str, context: int, tokens: int, dtype: torch.dtype) -> float:
    """Seconds of one layer: `tokens` queries at the end of `context` tokens."""
    kernels = PagedAttention(codec, 16, 2, 256, dtype, 1, tokens, 262_144)
    made = make_codec(codec, torch.float32, 2, 256, 64)
    num_pages = context // 64
    layers = [
        torch.empty(num_pages, made.page_bytes, dtype=torch.uint8, device="cuda")
        for _ in range(ATTENTION_LAYERS)
    ]
    pages = made.bind(layers[0])
    for start in range(0, context, 16384):
        stop = min(start + 16384, context)
        k, v = torch.randn(2, stop - start, 2, 256, device="cuda")
        pages.write(range(num_pages), start, k, v)
    for layer in layers[1:]:
        layer.copy_(layers[0])
    order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(0)).tolist()
    batch = DecodeBatch(
        int32([order]),
        int32([0]),
        int32([tokens]),
        int32([context - tokens]),
        int32([0] * tokens),
        int32([0] * tokens),
    )
    q = torch.randn(tokens, 16, 256, device="cuda").to(kernels.math_dtype)
    out = torch.empty(tokens, 16, 256, dtype=dtype, device="cuda")
    workspace = torch.empty(kernels.workspace_floats, device="cuda")
    gate = torch.randn(tokens, 16, 256, device="cuda").to(dtype)

    def run() -> None:
        for layer in layers:
            kernels.attend(layer, q, batch, out, workspace, gate=gate)

    return graph_seconds(run) / ATTENTION_LAYERS


def delta_s(sequences: int) -> float:
    """Seconds of convolution, delta rule and gated norm of all 30 layers, one token of each sequence."""
    num_k, num_v, dim = 16, 32, 128
    channels = (2 * num_k + num_v) * dim
    qkvz = torch.randn(sequences, channels + num_v * dim, device="cuda").half()
    ba = torch.randn(sequences, 2 * num_v, device="cuda").half()
    weight = torch.randn(DELTA_LAYERS, channels, 4, device="cuda")
    gates = torch.randn(2, num_v, device="cuda")
    norm = torch.ones(dim, device="cuda")
    conv = torch.randn(DELTA_LAYERS, sequences, channels, 3, device="cuda").half()
    state = torch.randn(DELTA_LAYERS, sequences, num_v, dim, dim, device="cuda")
    ids = list(range(sequences))
    where = int32(ids), int32([1] * sequences), int32(ids)
    turns = torch.zeros(sequences, num_k, dtype=torch.int32, device="cuda")
    out = torch.empty(sequences, num_v, dim, dtype=torch.float16, device="cuda")

    def run() -> None:
        for i in range(DELTA_LAYERS):
            weights = weight[i], gates[0], gates[1], norm
            delta_step(qkvz, ba, weights, 1e-6, (conv[i], state[i]), where, turns, out, at_rest=True)

    return graph_seconds(run)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--as-arch", type=int, help="75: kernels as a Turing card runs them")
    options = parser.parse_args()
    use_arch(options.as_arch)
    copy, read = rates()
    print(
        f"{torch.cuda.get_device_name()}, copy {copy / 1e9:.0f} GB/s read and write, sum {read / 1e9:.0f} GB/s"
    )
    for codec in ("fp16", "bf16", "fp8", "k5v4", "k4v4"):
        if codec == "bf16" and options.as_arch:
            continue
        dtype = torch.bfloat16 if codec == "bf16" else torch.float16
        for context, tokens in ((CONTEXT, 1), (CONTEXT, 4), (32_768, 1), (2_048, 1)):
            seconds = attention_s(codec, context, tokens, dtype)
            rate = context * kv_token_bytes(codec, 2, 256) / seconds
            print(
                f"attention {codec:<5} {context:>8,} tokens, {tokens} queries: {seconds * 1e6:8.1f} us, coded bytes at "
                f"{rate / 1e9:6.0f} GB/s = {rate / copy:.2f} of the copy, {rate / read:.2f} of the sum"
            )
    for sequences in (1, 4):
        seconds = delta_s(sequences)
        print(f"conv and delta step, 30 layers, {sequences} sequences: {seconds * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
