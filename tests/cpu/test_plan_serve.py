"""A saved plan run by the server, and what the server tells of plan and use."""

import json
import subprocess
import sys

import pytest

import servers
from packhorse.cli import main as cli
from packhorse.core.errors import CorruptFileError, DoesNotFitError, UsageError
from packhorse.facts.known import known_model
from packhorse.facts.read import read_model
from packhorse.plan.report import check_planned, read_saved


@pytest.fixture
def save(tmp_path, capsys):
    """Writes what `packhorse plan` prints into a file."""

    def to_file(*args: str):
        cli.run(["plan", *args, "--json", "--cache", str(tmp_path)])
        file = tmp_path / "plan.json"
        file.write_text(capsys.readouterr().out)
        return file

    return to_file


def test_the_server_runs_a_plan_and_shows_it_beside_what_it_takes(save):
    file = save(
        str(servers.folder()), "--context", "1000", "--sequences", "2", "--recipe", "fp32", "--kv", "fp8"
    )
    planned = json.loads(file.read_text())
    items = planned["tiers"]["host"]["items"]
    with servers.process("--plan", str(file)) as live:
        told = live.get("/plan").json()
        assert told["context"] == 1000 and told["sequences"] == 2 and told["device"] == "cpu"
        assert told["process_resident_bytes"] > 0
        for consumer, mine in (("pages", "kv"), ("states", "states")):
            assert told["bytes"][consumer]["planned"] == told["bytes"][consumer]["allocated"] == items[mine]
        assert told["bytes"]["weights"]["planned"] == told["bytes"]["weights"]["allocated"]
        others = {"process", "kv", "states", "workspace", "logits_and_sampler"}
        assert told["bytes"]["weights"]["planned"] == sum(items[name] for name in items.keys() - others)
        assert told["bytes"]["workspace"] == {"planned": items["workspace"] + items["logits_and_sampler"]}
        assert told["bytes"]["pages"]["used"] == 0
        assert live.chat("hi " * 100, max_tokens=3).status_code == 200
        live.wait(lambda: live.get("/plan").json()["bytes"]["pages"]["used"] > 0)
        metrics = live.get("/metrics").text
        for kind, size in told["bytes"]["weights"].items():
            label = f'packhorse_bytes{{consumer="weights",kind="{kind}",tier="device"}} '
            assert [float(line[len(label) :]) for line in metrics.splitlines() if line.startswith(label)] == [
                size
            ]


def serve(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "packhorse.cli.main", "serve", *args, "--port", "0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_plan_that_cannot_be_run_is_refused_by_name(save):
    file = save("qwen3.6-35b-a3b", "--profile", "rtx-2080ti-11g", "--context", "245760")
    done = serve(str(servers.folder()), "--plan", str(file))
    assert done.returncode == 2 and "the KV codec fp8; experts outside the card" in done.stderr
    with pytest.raises(UsageError, match="the recipe int4"):
        read_saved(file)
    with pytest.raises(DoesNotFitError, match=r"3\.\d+ GiB are missing"):
        read_saved(save("qwen3.6-27b", "--profile", "rtx-3060-12g", "--context", "131072", "--kv", "fp16"))


def test_a_plan_for_another_model_and_options_beside_it(save):
    file = save(str(servers.folder()), "--context", "1000")
    check_planned(read_saved(file), read_model(servers.folder()))
    with pytest.raises(UsageError, match="Plan for this model"):
        check_planned(read_saved(file), known_model("qwen3-32b"))
    done = serve(str(servers.folder()), "--plan", str(file), "--sequences", "2", "--kv-tokens", "512")
    assert done.returncode == 2 and "--kv-tokens, --sequences" in done.stderr


@pytest.mark.parametrize("text", ["{}", '{"version": 99}', "[]", "no"])
def test_files_that_are_no_plans(text, tmp_path):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(CorruptFileError):
        read_saved(tmp_path / "plan.json")
