"""A recall report as one HTML file that loads nothing: figures, heat maps and wrong answers."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from packhorse.core.errors import RefusedError
from packhorse.facts.fields import reading
from packhorse.verify.recall import Comparison, Record, rates, summarize

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1d2733 }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse; margin: .6rem 0 } th { font-weight: 600; text-align: right }
td, th { padding: .3rem .7rem; font-variant-numeric: tabular-nums } td { white-space: nowrap }
tr > :first-child { text-align: left } .figures td + td { text-align: right } .heat th + th { text-align: center }
.heat td { text-align: center; min-width: 4.2rem; border: 2px solid #fff }
.heat small { display: block; font-size: 11px; opacity: .75 }
.wrong td:last-child, .wrong th:last-child { text-align: left; white-space: normal }
.figures tr { border-bottom: 1px solid #e3e8ee } code { background: #f1f4f8; padding: 0 .25rem }
@media (prefers-color-scheme: dark) {
  body { background: #12171e; color: #dbe3ec } .heat td { border-color: #12171e; color: #10151b }
  .figures tr { border-color: #2b3543 } code { background: #202835 }
}
"""
MAX_WRONG = 40
HEAD = """<!doctype html><html lang=en><meta charset=utf-8>
<meta name=viewport content='width=device-width, initial-scale=1'>
<title>Recall of """
"""What a page begins with."""


def render_html(
    document: dict[str, Any], comparison: Comparison | None = None, features: Sequence[dict[str, Any]] = ()
) -> str:
    """The page of a report's document (`Report.document`). features: rows of `Feature.row`."""
    settings, records = document["settings"], document["records"]
    given = [
        (name.replace("_", " "), escape(str(value))) for name, value in settings.items() if value is not None
    ]
    about = ", ".join(f"{name} <code>{value}</code>" for name, value in given)
    parts = [
        f"{HEAD}{escape(str(settings['model']))}</title><style>{STYLE}</style>",
        f"<h1>Recall of {escape(str(settings['model']))}</h1>",
        f"<p>{len(records):,} question{'s' * (len(records) != 1)}; {about}. An answer is right when it names all "
        "that was asked for and nothing else of that kind. Intervals are Wilson's, 95&nbsp;%.</p>",
        _figures(summarize(records)),
    ]
    parts += [] if comparison is None else [_comparison(comparison)]
    parts += [_features(features)] if features else []
    for task, language in dict.fromkeys((r["task"], r["language"]) for r in records):
        ours = [r for r in records if (r["task"], r["language"]) == (task, language)]
        parts.append(f"<h2>{escape(task)} ({escape(language)})</h2>{_heat_map(ours)}")
    parts.append(_wrong([r for r in records if not r["right"]]))
    return "\n".join(parts)


def check_page(file: Path) -> None:
    """Raises RefusedError where a file is there that is neither empty nor such a page: it is not ours to replace."""
    if file.is_file():
        with reading(file), file.open("rb") as stream:
            head = stream.read(len(HEAD))
        if head and head != HEAD.encode():
            raise RefusedError(f"{file} is there and no page of recall.", hint="Name another, or delete it.")


def _figures(rows: Sequence[dict[str, Any]]) -> str:
    head = "<tr><th>task<th>language<th>tokens<th>right<th>of<th>rate<th>interval<th>unfinished"
    body = "".join(
        f"<tr><td>{escape(r['task'])}<td>{escape(r['language'])}<td>{r['length']:,}<td>{r['right']}<td>{r['n']}"
        f"<td>{r['rate']:.1%}<td>{r['low']:.1%} - {r['high']:.1%}<td>{r['unfinished']}" for r in rows
    )  # fmt: skip
    return f"<table class=figures>{head}{body}</table>"


def _heat_map(records: Sequence[Record]) -> str:
    """Depths down, lengths across."""
    cells = {(r["depth"], r["length"]): r for r in rates(records, ("depth", "length"))}
    depths, lengths = sorted({d for d, _ in cells}), sorted({n for _, n in cells})
    head = "<tr><th>depth" + "".join(f"<th>{n:,}" for n in lengths)
    rows = []
    for depth in depths:
        row = "".join(_cell(cells.get((depth, length))) for length in lengths)
        rows.append(f"<tr><th>{depth:.0%}{row}")
    return f"<table class=heat>{head}{''.join(rows)}</table>"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "<td>"
    # From red through yellow to green, of even lightness.
    colour = f"hsl({round(130 * row['rate'])} 62% 68%)"
    title = f"{row['right']} of {row['n']}, {row['low']:.1%} to {row['high']:.1%}"
    count = f"<small>{row['right']}/{row['n']}</small>"
    return f"<td style='background:{colour}' title='{title}'>{row['rate']:.0%}{count}"


def _comparison(c: Comparison) -> str:
    alone = f"{c.only_first:,} here alone, {c.only_second:,} there alone; McNemar's exact p is {c.p:.3g}"
    return f"<h2>Against the other report</h2><p>{c.pairs:,} pairs: {c.both:,} right in both, {alone}.</p>"


def _features(rows: Sequence[dict[str, Any]]) -> str:
    head = "feature,active,pairs,right without,right with,McNemar p,tokens,same top token,KL mean,KL max"
    body = "".join(
        f"<tr><td>{escape(r['feature'])}<td>{r['active']:,}<td>{r['pairs']}<td>{r['reference_right']}<td>{r['right']}"
        f"<td>{r['p']:.3g}<td>{r['tokens']:,}<td>{r['same_token']:.2%}<td>{r['kl_mean']:.2e}<td>{r['kl_max']:.2e}"
        for r in rows
    )
    table = f"<table class=figures><tr><th>{head.replace(',', '<th>')}{body}</table>"
    return f"<h2>Features, in pairs against this run</h2>{table}"


def _wrong(records: Sequence[Record]) -> str:
    if not records:
        return "<p>No answer was wrong.</p>"
    head = "<tr><th>task<th>tokens<th>depth<th>expected<th>answer"
    body = "".join(
        f"<tr><td>{escape(r['task'])}<td>{r['length']:,}<td>{r['depth']:.0%}"
        f"<td>{escape(', '.join(r['expected']))}<td>{escape(r['answer']) or '(none)'}"
        for r in records[:MAX_WRONG]
    )
    shown = f"the first {MAX_WRONG} of {len(records):,}" if len(records) > MAX_WRONG else f"{len(records):,}"
    return f"<h2>Wrong answers ({shown})</h2><table class='figures wrong'>{head}{body}</table>"
