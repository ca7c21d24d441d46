"""benchmarks/recall_card.py without a card: documents, both kinds of work, what its tables count."""

from __future__ import annotations

import argparse
import importlib.util
import json
import queue
import sys
from pathlib import Path
from threading import Lock

import pytest

from packhorse.verify.recall import wilson

FILE = Path(__file__).parents[2] / "benchmarks" / "recall_card.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("recall_card", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["recall_card"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def settings(script, tmp_path, cells: str, pairs: str, features: str) -> argparse.Namespace:
    return argparse.Namespace(
        device="cpu", out=tmp_path, models=["dense"], at_once=2, assets=script.ASSETS,
        cells=script.parse_cells(cells), pairs=script.parse_cells(pairs), features=features.split(";"),
    )  # fmt: skip


def filled(script, cells) -> queue.Queue:
    texts: queue.Queue = queue.Queue()
    counter = argparse.Namespace(value=0, get_lock=Lock)
    script.build_texts(script.ASSETS / "recall-dense", cells, counter, [texts])
    texts.put(None)
    return texts


def gathered(script, args, results: queue.Queue):
    findings = script.Findings(args)
    while not results.empty():
        findings.take(*results.get())
    assert not findings.errors
    return findings


def test_documents_of_several_questions_share_all_but_their_ends(script):
    (cell,) = script.parse_cells("multi_key:400:5:3")
    assert (cell.num_documents, cell.depths(0), cell.depths(1)) == (2, [0, 1 / 9, 2 / 9], [3 / 9, 4 / 9])
    texts = filled(script, [cell])
    first, second = texts.get(), texts.get()
    assert [len(text.samples) for text in (first, second)] == [3, 2]
    ids = [first.token_ids(question) for question in range(3)]
    assert {len(one) for one in ids} == {400} and len(set(ids)) == 3
    assert len(first.prefix) > 300 and not first.samples[0].token_ids


def test_each_question_is_asked_over_the_prefix_that_the_first_stored(script, tmp_path):
    args = settings(script, tmp_path, "multi_key:320:3:3,single:256:2", "", "")
    results: queue.Queue = queue.Queue()
    script.guarded(
        script.run_grid, "dense", results, args, "dense", filled(script, args.cells), results, Lock()
    )
    findings = gathered(script, args, results)
    rows = findings.cell_rows()
    assert [(row["cold"]["n"], row["reused"]["n"], row["asked_for"]) for row in rows] == [
        (1, 3, 3),
        (2, 2, 2),
    ]
    assert [(row["cold"]["right"], row["reused"]["right"], row["differ"]) for row in rows] == [
        (1, 3, 0),
        (2, 2, 0),
    ]
    assert [row["reused_tokens"] for row in rows] == [256, 192]
    assert rows[0]["reused"]["interval"] == wilson(3, 3)
    # What is wrong is shown and not counted as right.
    findings.grid["dense"][0]["right"] = False
    assert sum(row["cold"]["right"] for row in findings.cell_rows()) == 2
    findings.write({"device": "cpu"})
    document = json.loads((tmp_path / "recall.json").read_text())
    assert len(document["records"]["dense"]) == 8 and "0/1" in (tmp_path / "recall.md").read_text()


def test_pairs_follow_the_reference_token_by_token(script, tmp_path):
    args = settings(script, tmp_path, "", "multi_key:256:2", "kv=k4v4;kv=fp16")
    results: queue.Queue = queue.Queue()
    texts = filled(script, args.pairs)
    script.guarded(script.run_pairs, "dense", results, args, "dense", args.features, texts, results, Lock())
    findings = gathered(script, args, results)
    coarse, fine = findings.feature_rows()
    assert (coarse["feature"], coarse["pairs"], coarse["right"], fine["pairs"]) == ("kv=k4v4", 2, 2, 2)
    assert coarse["active"] == fine["active"] > 0
    assert 0 < fine["kl_mean"] < coarse["kl_mean"] < 1
    assert coarse["tokens"] == fine["tokens"] > 20
    table = "\n".join(
        script.tables({"about": {}, "engines": [], "errors": [], "cells": [], "features": [coarse]})
    )
    assert "| dense | multi_key | 256 | kv=k4v4 |" in table


def test_an_error_of_a_process_is_told_and_the_run_fails(script, tmp_path):
    args = settings(script, tmp_path, "single:256:1", "", "")
    results: queue.Queue = queue.Queue()
    script.guarded(script.run_grid, "dense", results, args, "nowhere", queue.Queue(), results, Lock())
    findings = script.Findings(args)
    findings.take(*results.get())
    assert "nowhere" in findings.errors[0]
    assert "1 processes failed" in "\n".join(
        script.tables({"about": {}, "engines": [], "errors": findings.errors, "cells": [], "features": []})
    )
