"""The document of bench offline as a table for people. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from packhorse.core.units import format_bytes


def table(document: dict[str, Any]) -> str:
    """The figures for people."""
    ceilings = document["ceilings"]
    listed = [f"{name} {rate / 1e9:.2f} GB/s" for name, rate in ceilings.items() if name != "products"]
    lines = [
        f"{document['model']['name']}, {', '.join(card['name'] for card in document['hardware']['cards']) or 'CPU'}",
        f"measured ceilings: {', '.join(listed)}, products {ceilings['products'] / 1e12:.3g} TFLOP/s",
    ]
    for load in document["loads"]:
        lines += _load_lines(load)
    return "\n".join(lines)


def _load_lines(load: dict[str, Any]) -> list[str]:
    cap = "no cap" if load["vram"] is None else f"cap {format_bytes(load['vram'])}"
    sizes = {name.removesuffix("_bytes"): size for name, size in load["memory"].items()}
    told = [f"{name} {'not told' if size is None else format_bytes(size)}" for name, size in sizes.items()]
    lines = ["", f"{cap}: loaded in {load['load_s']:.1f} s; {', '.join(told)}"]
    for row in load["prefill"]:
        lines.append(
            f"{row['context']:>9,} tokens read in {min(row['seconds']):.2f} s, {row['tok_s']:.0f} tok/s, "
            f"{row['flops_s'] / 1e12:.3g} TFLOP/s = {row['ratio']:.2f} of products, "
            f"{row['link_bytes_token'] / 1e6:.3f} MB over the link a token"
        )
    for row in load["tails"]:
        lines.append(
            f"{row['context']:>9,} tokens held and {row['tail']:,} more: first token in {min(row['seconds']):.3f} s "
            f"(of {len(row['seconds'])}, the slowest {max(row['seconds']):.3f} s), {row['link_bytes'] / 1e9:.2f} GB "
            "over the link"
        )
    if load["beside"] is not None:
        row, gap = load["beside"], load["beside"]["gap_s"]
        lines.append(
            f"{row['context']:>9,} tokens read in {row['seconds']:.2f} s beside an answer: its tokens came every "
            f"{gap['p50']:.3f} s, the longest gap {gap['max']:.3f} s (asked {row['asked_gap_s']:g})"
        )
    if any(row["filled"] for row in load["decode"]):
        lines.append("nothing was read: K and V are random, states are zero")
    head = ("context", "at once", "tok/s", "p50 ms", "p99 ms", "ceiling", "ratio", "hits")
    lines.append("".join(f"{name:>10}" for name in head) + "  bytes a second by link, of its ceiling")
    return lines + [_decode_line(row) for row in load["decode"]]


def _decode_line(row: dict[str, Any]) -> str:
    hits = "" if row["experts"] is None else f"{row['experts']['hit_rate']:.3f}"
    cells: Sequence[str] = (
        f"{row['context']:,}",
        str(row["sequences"]),
        f"{row['tok_s']:.2f}",
        f"{1e3 * row['step_s']['p50']:.3f}",
        f"{1e3 * row['step_s']['p99']:.3f}",
        f"{row['ceiling_tok_s']:.1f}",
        f"{row['ratio']:.2f}",
        hits,
    )
    links = [
        f"{name} {link['bytes_s'] / 1e9:.2f} GB/s ({link['ratio']:.2f})"
        for name, link in row["links"].items()
        if link["bytes_step"]
    ]
    return "".join(f"{cell:>10}" for cell in cells) + "  " + ", ".join(links)
