"""Rates of the decode kernels on a card beside the rates of its memory and link, medians in one run.

    PYTHONPATH=src python benchmarks/kernels.py [--as-arch 75] [--rounds 15] [--json FILE] [PART ...]

Parts: gemv, experts. Every figure is bytes of packed weights over the time of one replay of a CUDA graph; weights
are random, lie in memory many times the size of the cache, and are each read once a replay.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from packhorse.bench.card import graph_seconds, read
from packhorse.core.formats import PACKED, PackedFormat
from packhorse.kernels.cuda import launch
from packhorse.kernels.experts import cuda as experts
from packhorse.kernels.linear import cuda as linear
from packhorse.quant.packed import PackedTensor

DENSE_27B = {
    "gate_up (swiglu)": (2 * 17408, 5120),
    "down": (5120, 17408),
    "qkv of delta": (10240, 5120),
    "z of delta": (6144, 5120),
    "out of delta": (5120, 6144),
    "q and gate": (12288, 5120),
    "lm_head": (248320, 5120),
}
SEVERAL = 640 << 20  # bytes read in one replay, at least: ten times the H200's cache


def random_weights(form: PackedFormat, rows: int, cols: int, copies: int) -> list[PackedTensor]:
    """Random codes under plain scales; cols must be whole column blocks."""
    blocks, row_bytes = form.num_row_blocks(rows), form.row_bytes(cols)
    data = torch.randint(
        0,
        255,
        (copies, blocks, row_bytes // form.block_bytes, form.block_bytes),
        dtype=torch.uint8,
        device="cuda",
    )
    data[..., : form.header_bytes].view(torch.float16)[:] = 0.01
    return [PackedTensor(form, one.view(blocks, row_bytes), rows, cols) for one in data]


def memory_rates(rounds: int, host: Tensor) -> dict[str, float]:
    """Bytes a second: copy (read plus write) and read of the card's memory, and reads of pinned memory."""
    a, b = (torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda") for _ in range(2))
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    return {
        "copy": 2 * a.numel() / graph_seconds(lambda: b.copy_(a), rounds),
        "read": max(a.numel() / graph_seconds(lambda n=n: read(a, n * sms, sink), rounds) for n in (2, 4)),
        "pinned read": max(
            host.numel() / graph_seconds(lambda n=n: read(host, n, sink), 5) for n in (80, sms)
        ),
    }


def gemv(
    rates: dict[str, float], rounds: int, formats: list[str], dtype: torch.dtype
) -> list[dict[str, object]]:
    """Each matrix of the 27B alone, then the layer's four in turn."""
    rows: list[dict[str, object]] = []
    for name in formats:
        form = PACKED[name]
        weights = {}
        for label, (n, k) in DENSE_27B.items():
            copies = max(2, -(-SEVERAL // form.num_bytes(n, k)))
            weights[label] = random_weights(form, n, k, copies)
        for tokens in (1, 4, 16):
            x = {k: torch.randn(tokens, k, device="cuda").to(dtype) for _, k in DENSE_27B.values()}

            def one(label: str, weight: PackedTensor, x: dict[int, Tensor] = x) -> None:
                if "swiglu" in label:
                    linear.packed_swiglu(x[weight.num_cols], weight)
                else:
                    linear.packed_linear(x[weight.num_cols], weight)

            def measure(
                label: str, work: list[tuple[str, PackedTensor]], tokens: int = tokens, name: str = name
            ) -> None:
                size = sum(weight.num_bytes for _, weight in work)
                seconds = graph_seconds(lambda: [one(*item) for item in work], rounds)
                rows.append(
                    {
                        "kernel": "gemv",
                        "format": name,
                        "matrix": label,
                        "tokens": tokens,
                        "us": 1e6 * seconds / len(work),
                    }
                    | {"bytes_s": size / seconds, "ratio": size / seconds / rates["read"]}
                )

            for label, copies in weights.items():
                measure(label, [(label, weight) for weight in copies])
            layer = ["qkv of delta", "z of delta", "out of delta", "gate_up (swiglu)", "down"]
            measure("a layer in turn", [(label, weights[label][i]) for i in range(4) for label in layer])
    return rows


def expert_rows(
    rates: dict[str, float], rounds: int, host: Tensor, dtype: torch.dtype
) -> list[dict[str, object]]:
    """40 layers of 35B-A3B back to back, each with 8 of 256 experts a token."""
    form = PACKED["int4-g128"]
    layers, num_experts, top_k, stored = 40, 256, 8, 16
    table = experts.ExpertTable(
        torch.zeros(layers, num_experts, dtype=torch.int64, device="cuda"), form, form, 2048, 512
    )
    size = table.expert_bytes
    local = torch.randint(
        0, 255, (layers * stored * size // 128, 128), dtype=torch.uint8, device="cuda"
    ).flatten()
    headers = local.view(-1, form.block_bytes)[:, :128].view(torch.float16)
    headers[:] = 0.01
    rows = []
    for place, memory, rate in (("VRAM", local, rates["read"]), ("pinned host", host, rates["pinned read"])):
        if memory is host:
            host[: local.numel()].copy_(local)
        for tokens in (1, 4, 16) if memory is local else (1, 4):
            generator = torch.Generator().manual_seed(tokens)
            address = torch.zeros(layers, num_experts, dtype=torch.int64)
            ids = torch.stack(
                [torch.randperm(num_experts, generator=generator)[:stored] for _ in range(layers)]
            )
            address.scatter_(
                1, ids, memory.data_ptr() + size * torch.arange(layers * stored).view(layers, stored)
            )
            table.address.copy_(address)
            pick = torch.stack(
                [
                    torch.stack(
                        [ids[l][torch.randperm(stored, generator=generator)[:top_k]] for _ in range(tokens)]
                    )
                    for l in range(layers)
                ]
            )
            chosen = pick.to("cuda", torch.int32)
            shares = torch.rand(layers, tokens, top_k, device="cuda")
            logits = torch.randn(layers, tokens, num_experts, device="cuda").scatter_(2, chosen.long(), 9.0)
            x, counters = torch.randn(tokens, 2048, device="cuda").to(dtype), experts.new_counters("cuda")

            def run(
                make: Callable[[int], experts.Routes], x: Tensor = x, counters: Tensor = counters
            ) -> None:
                for layer in range(layers):
                    experts.expert_mix(x, make(layer), table, counters)

            def sort(
                layer: int, counters: Tensor = counters, shares: Tensor = shares, chosen: Tensor = chosen
            ) -> experts.Routes:
                return experts.plan_routes(shares[layer], chosen[layer], table, layer, counters)

            def top(layer: int, counters: Tensor = counters, logits: Tensor = logits) -> experts.Routes:
                return experts.route(logits[layer], top_k, True, table, layer, counters)

            plans = [sort(layer) for layer in range(layers)]
            ways = {
                "mix": functools.partial(run, plans.__getitem__),
                "sort, mix": functools.partial(run, sort),
                "top-k, sort, mix": functools.partial(run, top),
            }
            for label, work in ways.items():
                counters.zero_()
                work()
                read_bytes = int(counters[1])
                distinct = sum(len(pick[l].unique()) for l in range(layers))
                assert read_bytes == distinct * size, (read_bytes, distinct * size)
                seconds = graph_seconds(work, rounds if memory is local else 5)
                rows.append(
                    {
                        "kernel": "experts",
                        "place": place,
                        "what": label,
                        "tokens": tokens,
                        "us": 1e6 * seconds / layers,
                    }
                    | {"bytes_s": read_bytes / seconds, "ratio": read_bytes / seconds / rate}
                )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=["gemv", "experts"])
    parser.add_argument("--as-arch", type=int)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--formats", default="int4-g128")
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.as_arch:
        launch.use_arch(args.as_arch)
    dtype = getattr(torch, args.dtype)
    form = PACKED["int4-g128"]
    expert = form.num_bytes(1024, 2048) + form.num_bytes(2048, 512)
    host = torch.empty(40 * 16 * expert, dtype=torch.uint8, pin_memory=True)
    rates = memory_rates(args.rounds, host)
    print(torch.cuda.get_device_name(0), {name: f"{rate / 1e9:.1f} GB/s" for name, rate in rates.items()})
    rows = []
    if "gemv" in args.parts:
        rows += gemv(rates, args.rounds, args.formats.split(","), dtype)
    if "experts" in args.parts:
        rows += expert_rows(rates, args.rounds, host, dtype)
    for row in rows:
        print("  ".join(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    if args.json:
        args.json.write_text(json.dumps({"rates": rates, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
