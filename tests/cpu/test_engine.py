"""What one engine promises its requests, and what it allocates."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import oracle
from engines import ask, load_folder, make_engine, run_all, tiny_model
from packhorse.core.config import EngineConfig
from packhorse.core.errors import (
    CancelledRequestError,
    ComputeError,
    DoesNotFitError,
    InvalidRequestError,
    PromptTooLongError,
    UsageError,
    WeightsError,
)
from packhorse.core.types import FinishReason, Request, SamplingParams
from packhorse.core.units import GIB
from packhorse.engine import load
from packhorse.facts.hardware import HardwareFacts
from packhorse.facts.read import read_model
from packhorse.plan.size import LEFT_ALONE, check_window, size_engine
from packhorse.store.kv import KVStore
from packhorse.store.tier import StoreGeometry

IDS = tuple(oracle.random_ids(150))
DRAWN = SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, presence_penalty=0.5, seed=7)


def tokens_of(engine, *requests: Request) -> dict[str, list[int]]:
    for request in requests:
        engine.add(request)
    return {name: [t for e in events for t in e.token_ids] for name, events in run_all(engine).items()}


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3"])
def test_a_seed_gives_the_same_answer_whatever_else_runs(family):
    model = tiny_model(family, True)
    want = tokens_of(make_engine(model), Request("x", IDS, DRAWN))["x"]
    assert want != oracle.oracle_greedy(oracle.shared_checkpoint(family)[0], list(IDS), 24)
    others = [
        Request(
            f"o{i}",
            tuple(oracle.random_ids(40 * i + 3, seed=i)),
            SamplingParams(max_tokens=30, temperature=1),
        )
        for i in range(3)
    ]
    assert tokens_of(make_engine(model), *others, Request("x", IDS, DRAWN))["x"] == want
    other_seed = SamplingParams(max_tokens=24, temperature=0.9, seed=8)
    assert tokens_of(make_engine(model), Request("x", IDS, other_seed))["x"] != want


def test_every_eos_id_ends_an_answer_and_is_counted():
    model = tiny_model("qwen3", True)
    free = ask(make_engine(model), IDS, max_tokens=20)[0]
    for eos in (free[4], free[9]):
        engine = make_engine(model, eos_ids=(190, eos))
        tokens, event = ask(engine, IDS, max_tokens=20)
        assert tokens == free[: free.index(eos) + 1]
        assert event.finish is FinishReason.STOP


def test_stop_strings_and_text():
    """The text ends before the stop string, wherever it lies across tokens."""
    model = tiny_model("qwen3", True)
    free = ask(make_engine(model), IDS, max_tokens=12)[0]
    text = "".join(f"<{t}>" for t in free)
    stop = text[text.index(">", len(text) // 2) - 1 :][:5]
    engine = make_engine(model)
    engine.add(Request("r", IDS, SamplingParams(max_tokens=12, stop=(stop,))))
    events = run_all(engine)["r"]
    assert "".join(e.text for e in events) == text[: text.index(stop)]
    assert events[-1].finish is FinishReason.STOP


def test_logprobs_are_those_of_the_raw_logits():
    engine = make_engine(tiny_model("qwen3", True))
    params = SamplingParams(max_tokens=6, temperature=1.3, repetition_penalty=1.5, seed=1, logprobs=4)
    engine.add(Request("r", IDS, params))
    events = run_all(engine)["r"]
    entries = [entry for e in events for entry in e.logprobs]
    assert len(entries) == 6
    for at, entry in enumerate(entries):
        want = engine.runner.logits["r", len(IDS) - 1 + at].double().log_softmax(-1)
        assert entry.logprob == pytest.approx(float(want[entry.token_id]), abs=1e-9)
        best = want.topk(4)
        assert [i for i, _ in entry.top] == best.indices.tolist()
        assert [p for _, p in entry.top] == pytest.approx(best.values.tolist(), abs=1e-9)


def test_cancel_frees_everything_at_once():
    engine = make_engine(tiny_model("qwen3_5", True), num_pages=8, chunk_len=64)
    start = engine.store.stats.pages_free
    engine.add(Request("reading", IDS * 2, SamplingParams(max_tokens=100)))
    engine.add(Request("waiting", IDS * 2, SamplingParams(max_tokens=100)))
    engine.step()
    for name in ("waiting", "reading"):
        event = engine.cancel(name)
        assert event.finish is FinishReason.CANCELLED and isinstance(event.error, CancelledRequestError)
    assert not engine.has_work and engine.store.stats.open_sequences == 0
    engine.store.clear()
    assert engine.store.stats.pages_free == start


def test_non_finite_logits_end_one_request_and_no_other(monkeypatch):
    engine = make_engine(tiny_model("qwen3", True))
    real = type(engine.runner).run

    def run(self, step, views):
        logits = real(self, step, views).clone()
        for row, sequence in enumerate(step.sampled):
            if sequence.id == "bad" and len(sequence.generated) == 2:
                logits[row, 5] = float("nan")
        return logits

    monkeypatch.setattr(type(engine.runner), "run", run)
    want = ask(make_engine(tiny_model("qwen3", True)), IDS, max_tokens=6, name="good")[0]
    engine.add(Request("bad", IDS, SamplingParams(max_tokens=6)))
    alone = run_all(engine)["bad"][-1]
    assert isinstance(alone.error, ComputeError)
    assert engine.store.stats.entries == 0, "pages of a failed request were kept for others"
    for name in ("bad", "good"):
        engine.add(Request(name, IDS, SamplingParams(max_tokens=6)))
    events = run_all(engine)
    assert events["bad"][-1].finish is FinishReason.ERROR
    assert isinstance(events["bad"][-1].error, ComputeError)
    assert [t for e in events["good"] for t in e.token_ids] == want


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_pages_that_went_bad_are_not_offered_again(family):
    """Two requests share a prompt and a page is overwritten: both fail, and the next one does not."""
    sizes = {"page_len": 16, "snapshot_len": 16, "chunk_len": 64}
    engine = make_engine(tiny_model(family, True), **sizes)
    want = ask(make_engine(tiny_model(family, True), **sizes), IDS, max_tokens=4)[0]
    engine.add(Request("first", IDS, SamplingParams(max_tokens=30)))
    while engine.store.stats.pages_cached < 9:
        engine.step()
    handle = engine.scheduler.find("first").handle
    full = engine.store.geometry.full_layers[0]
    engine.store._tier.pages(full)[handle.page_ids[2]] = 0xFF
    engine.add(Request("second", IDS, SamplingParams(max_tokens=30)))
    events = run_all(engine)
    for name in ("first", "second"):
        assert isinstance(events[name][-1].error, ComputeError), name
    assert events["second"][-1].usage.cached_len == 144
    assert engine.store.stats.entries == 0
    assert ask(engine, IDS, max_tokens=4)[0] == want


def test_an_error_of_one_detokenizer_ends_one_request(monkeypatch):
    engine = make_engine(tiny_model("qwen3", True))

    class Broken:
        def add(self, token_id: int) -> str:
            raise RuntimeError("no such token")

        def finish(self) -> str:
            raise RuntimeError("no such token")

    engine.add(Request("good", IDS, SamplingParams(max_tokens=1)))
    monkeypatch.setattr(engine, "_detokenizer", Broken)
    engine.add(Request("bad", IDS, SamplingParams(max_tokens=4)))
    events = run_all(engine)
    assert events["good"][-1].finish is FinishReason.LENGTH
    assert events["bad"][-1].finish is FinishReason.ERROR
    assert "no such token" in str(events["bad"][-1].error)
    assert engine.store.stats.open_sequences == 0


def changed_checkpoint(folder: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    """The qwen3 checkpoint with one down_proj changed."""
    source = oracle.shared_checkpoint("qwen3")[1]
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {name: change(tensors[name])}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_weights_of_no_plain_type_are_refused(dtype, tmp_path):
    folder = changed_checkpoint(tmp_path, lambda w: w.to(dtype))
    with pytest.raises(WeightsError, match=r"mlp\.down_proj\.weight is stored as"):
        load_folder(folder)


def test_weights_beyond_fp16_are_refused_in_fp16_alone(tmp_path):
    folder = changed_checkpoint(tmp_path, lambda w: w.index_fill(0, torch.tensor([3]), 1e6))
    load_folder(folder)
    with pytest.raises(WeightsError, match=r"holds 1e\+06, and float16 ends at 65504"):
        load_folder(folder, dtype=torch.float16)


@pytest.mark.parametrize(
    ("length", "max_tokens", "fits"), [(99, 1, True), (100, 1, False), (101, 1, False), (60, 41, False)]
)
def test_window_edges(length, max_tokens, fits):
    engine = make_engine(tiny_model("qwen3", True), window=100)
    ids = oracle.random_ids(length)
    if length + max_tokens <= 100:
        tokens, event = ask(engine, ids, max_tokens=max_tokens)
        assert len(tokens) == max_tokens and event.finish is FinishReason.LENGTH
        return
    with pytest.raises(PromptTooLongError) as caught:
        ask(engine, ids, max_tokens=max_tokens)
    assert caught.value.available == 100 and caught.value.exit_code == 3


@pytest.mark.parametrize("ids", [(), (5, 193), (-1,)])
def test_prompts_that_mean_nothing(ids):
    with pytest.raises(InvalidRequestError):
        ask(make_engine(tiny_model("qwen3", True)), ids)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": float("nan")},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": float("inf")},
        {"top_k": -1},
        {"max_tokens": 0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"logprobs": 21},
        {"stop": ("",)},
    ],
)
def test_sampling_values_that_mean_nothing(fields):
    with pytest.raises(InvalidRequestError):
        SamplingParams(**fields)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("family", oracle.FAMILIES)
def test_allocations_are_those_that_were_counted(family, exact):
    """Weights and pages to the byte; states up to the alignment of each layer's part."""
    facts = read_model(oracle.shared_checkpoint(family)[1])
    config = EngineConfig(context=1000, sequences=3, snapshots=5, exact=exact)
    sizes = size_engine(facts, config, "fp32", 8 * GIB)
    model = load_folder(facts.path, exact=exact)
    store = KVStore(
        StoreGeometry.of(facts, torch.float32, config.page_len),
        num_pages=sizes.num_pages,
        sequences=3,
        snapshots=5,
        snapshot_len=8192,
        exact=exact,
    )
    assert model.storage_bytes == sizes.weight_bytes
    assert store.storage_bytes["pages"] == sizes.kv_bytes
    taken = store.storage_bytes["states"] + store.storage_bytes["pending"]
    assert sizes.state_bytes <= taken <= sizes.state_bytes + 2 * 64 * facts.num_linear_layers * 11


def test_sizes_are_cut_with_a_word_or_refused_with_both_numbers():
    facts = read_model(oracle.shared_checkpoint("qwen3")[1])
    plenty = size_engine(facts, EngineConfig(), "fp32", 8 * GIB)
    assert (plenty.context, plenty.notes) == (8192, ())
    assert plenty.num_pages == 4 * 8192 // 64
    room = plenty.total_bytes - plenty.kv_bytes + LEFT_ALONE + 10 * plenty.page_bytes
    cut = size_engine(facts, EngineConfig(), "fp32", room)
    assert (cut.context, cut.num_pages) == (640, 10)
    assert "640 of the model's 8,192" in cut.notes[0]
    with pytest.raises(DoesNotFitError) as caught:
        size_engine(facts, EngineConfig(context=4096), "fp32", room)
    assert caught.value.asked == 64 * plenty.page_bytes and caught.value.available == 10 * plenty.page_bytes
    with pytest.raises(DoesNotFitError) as caught:
        size_engine(facts, EngineConfig(context=8193), "fp32", 8 * GIB)
    assert (caught.value.asked, caught.value.available) == (8193, 8192)
    with pytest.raises(DoesNotFitError):
        size_engine(facts, EngineConfig(), "fp32", LEFT_ALONE)
    with pytest.raises(DoesNotFitError) as caught:
        size_engine(facts, EngineConfig(context=4000, kv_tokens=1000), "fp32", 8 * GIB)
    assert (caught.value.asked, caught.value.available) == (4000, 1000)
    card = size_engine(facts, EngineConfig(device="cuda"), "fp32", 8 * GIB)
    assert card.segment_len is not None and card.segment_len % 64 == 0
    assert card.workspace_bytes - plenty.workspace_bytes >= 16 * 6 * 1024 * card.segment_len


@pytest.mark.parametrize(
    ("config", "max_tokens", "asked", "hint"),
    [
        (EngineConfig(context=100), 100, 101, "at most 99, or raise the context to at most 8,192."),
        (EngineConfig(), 8192, 8193, "at most 8,191."),
        (EngineConfig(), 9000, 9001, "at most 8,191."),
    ],
)
def test_answers_longer_than_the_window_need_no_weights(config, max_tokens, asked, hint):
    facts = read_model(oracle.shared_checkpoint("qwen3")[1])
    with pytest.raises(PromptTooLongError) as caught:
        check_window(facts, config, max_tokens)
    assert (caught.value.asked, caught.value.available) == (asked, config.context or 8192)
    assert caught.value.hint.endswith(hint)
    check_window(facts, config, (config.context or 8192) - 1)


def machine(**fields) -> HardwareFacts:
    return HardwareFacts(
        **({"num_cores": 2, "num_physical_cores": 2, "ram_bytes": GIB, "ram_available": GIB} | fields)
    )


def test_dtype_threads_and_device_are_chosen_or_refused(monkeypatch):
    assert load.choose_dtype(EngineConfig(), machine(cpu_features=("avx2", "avx512_bf16")))[0] == "bf16"
    dtype, why = load.choose_dtype(EngineConfig(), machine(cpu_features=("avx2",)))
    assert dtype == "fp32" and "no bf16" in why
    assert load.choose_dtype(EngineConfig(exact=True), machine(cpu_features=("amx_bf16",)))[0] == "fp32"
    with pytest.raises(UsageError, match="3 threads"):
        load.set_threads(EngineConfig(threads=3), machine())
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    for wished, threads, words in (
        ("1", None, "1 thread, OMP_NUM_THREADS is 1"),
        ("2,1", None, "2 threads, OMP_NUM_THREADS is 2"),
        ("64", None, "2 threads, OMP_NUM_THREADS is 64"),
        ("many", None, "2 threads"),
        ("2", 1, "1 thread"),
    ):
        monkeypatch.setenv("OMP_NUM_THREADS", wished)
        assert load.set_threads(EngineConfig(threads=threads), machine()) == words
        assert taken[-1] == int(words[0])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="no CUDA card"):
        load.check_device(EngineConfig(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    load.check_device(EngineConfig(device="cuda:1"))
    with pytest.raises(UsageError, match="there are 2"):
        load.check_device(EngineConfig(device="cuda:2"))


@pytest.mark.parametrize(
    "fields",
    [
        {"page_len": 0},
        {"chunk_len": 100},
        {"snapshot_len": 65},
        {"snapshots": -1},
        {"dtype": "fp8"},
        {"exact": True, "dtype": "bf16"},
        {"device": "tpu"},
        {"device": "cuda:x"},
        {"device": "cuda", "exact": True},
        {"threads": 0},
        {"context": -5},
    ],
)
def test_settings_that_contradict_themselves(fields):
    with pytest.raises(UsageError):
        EngineConfig(**fields)
