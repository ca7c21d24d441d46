"""The doctor: what it measures and looks up, with and without a card, and the profile that plans use."""

import functools
import json
import sys
from types import SimpleNamespace

import pytest

from packhorse.bench import doctor
from packhorse.cli import main as cli
from packhorse.core.units import GIB, MIB
from packhorse.facts.machine import known_card, read_profile


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(doctor, "MEMORY_BYTES", MIB)
    monkeypatch.setattr(doctor, "disk_rates", functools.partial(doctor.disk_rates, num_bytes=8 * MIB))
    monkeypatch.setitem(sys.modules, "pynvml", None)


class NvmlError(Exception):
    """As pynvml's."""


def fake_nvml(**changes):
    """As much of pynvml as the doctor asks; its card does not tell its power limit."""
    answers = {
        "Init": None,
        "DeviceGetCount": 1,
        "DeviceGetHandleByIndex": 0,
        "SystemGetCudaDriverVersion": 12080,
        "SystemGetDriverVersion": b"570.10",
        "DeviceGetMemoryInfo": SimpleNamespace(total=12288 * MIB, free=11 * GIB),
        "DeviceGetName": "NVIDIA GeForce RTX 3060",
        "DeviceGetCurrPcieLinkGeneration": 1,
        "DeviceGetMaxPcieLinkGeneration": 4,
        "DeviceGetCurrPcieLinkWidth": 4,
        "DeviceGetMaxPcieLinkWidth": 16,
        "DeviceGetTemperature": 90,
        "DeviceGetCurrentClocksThrottleReasons": 0,
        "DeviceGetEnforcedPowerLimit": NvmlError("not supported"),
        "DeviceGetDisplayActive": 1,
        "DeviceGetComputeRunningProcesses": [1, 2],
    } | changes

    def tell(value):
        if isinstance(value, Exception):
            raise value
        return value

    calls = {f"nvml{name}": lambda *_, value=value: tell(value) for name, value in answers.items()}
    return SimpleNamespace(NVMLError=NvmlError, NVML_TEMPERATURE_GPU=0, **calls)


def run(capsys, tmp_path, *args):
    code = cli.run(["doctor", "--cache", str(tmp_path), *args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_without_a_card(tmp_path, capsys):
    code, out, _ = run(capsys, tmp_path, "--json")
    seen = json.loads(out)
    assert code == 0 and seen["cards"] == [] and "nvidia-ml-py" in seen["no_cards"]
    assert max(seen["memory_bytes_s"].values()) > 1e8
    assert {"write", "read_512k", "read_4096k"} <= set(seen["disk"]["bytes_s"])
    assert not list(tmp_path.glob("doctor-*"))
    code, out, err = run(capsys, tmp_path, "--save-profile")
    assert code == 0 and "threads read" in out and "machine.json" in err
    machine = read_profile(str(tmp_path / "machine.json"))
    assert machine.card is None and not machine.free and machine.ram_bytes == seen["hardware"]["ram_bytes"]
    model = "qwen3.5-0.8b"
    assert cli.run(["plan", model, "--context", "1024", "--json", "--cache", str(tmp_path)]) == 0
    assert "doctor" in json.loads(capsys.readouterr().out)["sources"][0]


def test_with_a_card(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    monkeypatch.setattr(doctor, "_version", lambda package: "2.13.0+cu130")
    code, out, _ = run(capsys, tmp_path, "--json", "--save-profile")
    seen = json.loads(out)
    assert code == 1  # torch is newer than the driver
    [card] = seen["cards"]
    assert card["driver"] == "570.10" and card["driver_cuda"] == "12.8" and card["power_limit_w"] is None
    texts = " ".join(finding["text"] for finding in seen["findings"])
    for text in (
        "4 of 16 PCIe lanes",
        "2 other processes",
        "90 degrees",
        "CUDA 12.8, and torch is 2.13.0+cu130",
    ):
        assert text in texts
    machine = read_profile(str(tmp_path / "machine.json"))
    listed = read_profile("rtx-3060-12g")
    assert machine.card.usable_bytes == 11 * GIB and machine.card.read_rate == listed.card.read_rate
    assert machine.link_rate == read_profile("t4", {"link": "pcie4-x4"}).link_rate


def test_a_card_that_no_profile_knows():
    found = [
        {
            "name": "Voodoo 2",
            "vram_bytes": 12 * MIB,
            "free_bytes": 1,
            "pcie_lanes": 1,
            "pcie_max_generation": 1,
        }
    ]
    assert known_card(found) == known_card([]) == {}


def test_a_driver_that_does_not_answer(monkeypatch):
    fake = fake_nvml(Init=NvmlError("driver not loaded"))
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert doctor.cards() == ([], "no NVIDIA driver: driver not loaded")


def test_what_will_hurt(tmp_path, monkeypatch):
    seen = doctor.examine(tmp_path)
    seen["hardware"] |= {"cpu_features": (), "ram_bytes": 1}
    seen |= {"wsl": True, "numa_nodes": 2}
    seen["disk"] |= {"free_bytes": GIB, "bytes_s": {"read_512k": 0.1e9, "write": 1e6}}
    found = list(doctor._findings(seen))
    assert [finding.severity for finding in found].count("error") == 1
    texts = " ".join(finding.text for finding in found)
    for text in ("no AVX2", "control group", "2 memory nodes", "1.00 GiB are free", "0.10 GB/s", "WSL2"):
        assert text in texts
    assert all(finding.advice for finding in found)
