"""The doctor: what it measures and looks up, with and without a card, and the profile that plans use."""

import contextlib
import functools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from packhorse.bench import card as measuring
from packhorse.bench import doctor
from packhorse.bench.findings import cost, decode_rate, findings
from packhorse.bench.nvml import throttle_reasons
from packhorse.cli import main as cli
from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import GIB, KIB, MIB
from packhorse.facts import machine
from packhorse.facts.machine import known_card, read_profile

PROFILES = Path(machine.__file__).parent / "profiles"


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
        "DeviceGetUUID": "GPU-1",
        "DeviceGetClockInfo": 300,
        "DeviceGetPowerUsage": 20_000,
        "DeviceGetPowerManagementDefaultLimit": 170_000,
        "DeviceGetTemperature": 90,
        "DeviceGetCurrentClocksThrottleReasons": 0,
        "DeviceGetEnforcedPowerLimit": NvmlError("not supported"),
        "DeviceGetDisplayActive": 1,
        "DeviceGetComputeRunningProcesses": [SimpleNamespace(pid=-1, usedGpuMemory=1)],
        "DeviceGetGraphicsRunningProcesses": [SimpleNamespace(pid=n, usedGpuMemory=1) for n in (-1, -2)],
    } | changes

    def tell(value):
        if isinstance(value, Exception):
            raise value
        return value

    calls = {f"nvml{name}": lambda *_, value=value: tell(value) for name, value in answers.items()}
    return SimpleNamespace(NVMLError=NvmlError, NVML_TEMPERATURE_GPU=0, NVML_CLOCK_SM=0, **calls)


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


@pytest.mark.parametrize("more", [[], ["--save-profile"]])
def test_a_cache_that_cannot_be_made(more, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda *_: pytest.fail("work began"))
    code, out, err = run(capsys, "/proc/nope", *more)
    assert code == 2 and out == "" and "/proc/nope cannot be written" in err


def test_why_there_is_no_card_and_one_thread(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "measured_cards", lambda *_: ([], "there is no NVIDIA driver"))
    monkeypatch.setattr(doctor, "memory_rates", lambda _: {1: 1e9, 2: 2e9})
    _, out, _ = run(capsys, tmp_path)
    assert "No card was found: there is no NVIDIA driver; nvidia-ml-py is not installed." in out
    assert "1 thread reads 1.0 GB/s" in out and "2 threads read 2.0 GB/s" in out


def test_without_a_card_torch_is_not_imported(tmp_path):
    code = "import sys; from pathlib import Path; from packhorse.bench import doctor\n"
    code += "doctor.MEMORY_BYTES = 1 << 20; doctor.disk_rates = lambda folder: {'read_4096k': 1e9}\n"
    code += "doctor.examine(Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def test_with_a_card(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    monkeypatch.setattr(doctor, "version", lambda package: "2.13.0+cu130")
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


def test_a_torch_without_cuda_is_told_which_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml())
    monkeypatch.setattr(doctor, "version", lambda package: "2.13.0+cpu")
    code, out, _ = run(capsys, tmp_path)
    assert code == 1 and "driver 570.10 for CUDA 12.8" in out
    assert "torch is 2.13.0+cpu. Install a torch that was built for CUDA 12.8 or older." in out


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
    wear = {"device": "sda", "rotational": True, "passed": True, "wear_percent": 93}
    seen["disk"] |= {"free_bytes": GIB, "bytes_s": {"read_512k": 0.1e9, "write": 1e6}, "wear": wear}
    found = list(findings(seen))
    assert [finding.severity for finding in found].count("error") == 1
    texts = " ".join(finding.text for finding in found)
    for text in (
        "no AVX2",
        "control group",
        "2 memory nodes",
        "1.00 GiB are free",
        "0.10 GB/s",
        "WSL2",
        "turning",
        "93 %",
    ):
        assert text in texts
    assert all(finding.advice for finding in found)


MEASURED = {
    "graph": "",
    "rates": {"vram": 300e9, "host": 10e9, "copy_in": 11e9, "copy_out": 11e9},
    "host": {"asked": 4 * GIB, "pinned": GIB},
    "load": {
        "seconds": 20.0, "products": 20e12, "clock_mhz_first": 1900, "clock_mhz": 1500, "temperature_c": 85,
        "power_w": 168.0, "throttle": ["its temperature"], "pcie_generation": 3, "pcie_lanes": 16,
    },
}  # fmt: skip


def measured(card, load=None, **changes):
    """`measured_cards` as on a machine with that card."""
    values = {**MEASURED, "load": {**MEASURED["load"], **(load or {})}, **changes}
    return lambda found, load_s: ([{**found[0], "compute_capability": 86, "measured": values, **card}], "")


@pytest.mark.parametrize(("card", "load", "changes", "texts", "code"), [
    ({}, {}, {}, ["PCIe 3 of 4 under load. It costs", "90 degrees", "1900 to 1500 MHz", "by its temperature",
                  "2 other processes", "capped at 100 of its usual 170 W", "of 4.00 GiB of host memory 1.00 GiB"], 0),
    ({}, {"pcie_lanes": 4}, {}, ["4 of 16 PCIe lanes. It costs"], 0),
    ({}, {"pcie_generation": 4}, {}, ["host memory at 10.0 GB/s; its link carries 24. It costs"], 0),
    ({}, {}, {"graph": "the driver is too old"}, ["captured graph: the driver is too old"], 1),
], ids=["generation", "lanes", "chipset", "graph"])  # fmt: skip
def test_a_card_under_load(card, load, changes, texts, code, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(DeviceGetEnforcedPowerLimit=100_000))
    monkeypatch.setattr(doctor, "version", lambda package: "2.13.0+cu128")
    monkeypatch.setattr(doctor, "measured_cards", measured(card, load, **changes))
    # What a thing costs is judged beside the rest of the machine, which may be busy.
    monkeypatch.setattr(doctor, "memory_rates", lambda num_cores: {num_cores: 20e9})
    monkeypatch.setattr(
        doctor, "disk_rates", lambda folder: {f"read_{size // KIB}k": 2e9 for size in doctor.BLOCKS}
    )
    assert run(capsys, tmp_path)[0] == code
    _, out, _ = run(capsys, tmp_path, "--json", "--load", "20")
    found = " ".join(finding["text"] for finding in json.loads(out)["findings"])
    assert all(text in found for text in texts), found


def test_measured_rates_go_into_the_profile(tmp_path, capsys, monkeypatch):
    """Of a card that a profile knows, and of one that none does."""
    for name, tflops in (("NVIDIA GeForce RTX 3060", 25.5e12), ("Voodoo 6", 20e12)):
        monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(DeviceGetName=name))
        monkeypatch.setattr(doctor, "measured_cards", measured({}))
        run(capsys, tmp_path, "--save-profile")
        machine = read_profile(str(tmp_path / "machine.json"))
        assert (machine.card.read_rate, machine.link_rate, machine.card.flops) == (300e9, 11e9, tflops)
        assert machine.card.usable_bytes == 11 * GIB and machine.card.count == 1


def test_how_much_is_pinned(monkeypatch):
    """All, or what the system grants; as much as is asked for is given back."""
    held = []

    class Arena:
        def __init__(self, size):
            if size > 3 * GIB:
                raise DoesNotFitError("x", asked=size, available=GIB, unit="bytes", hint="x")
            held.append(size)

        def close(self):
            held.pop()

    free = SimpleNamespace(ram_available=64 * GIB)
    monkeypatch.setattr(measuring, "PinnedArena", Arena)
    monkeypatch.setattr(measuring, "probe", lambda: free)
    monkeypatch.setattr(measuring.torch.cuda, "device", contextlib.nullcontext)
    assert measuring.pinned_bytes("cuda:0", 4 * GIB) == {"asked": 4 * GIB, "pinned": GIB}
    assert measuring.pinned_bytes("cuda:0", 2 * GIB) == {"asked": 2 * GIB, "pinned": 2 * GIB}
    free.ram_available = 4 * GIB + 5
    assert measuring.pinned_bytes("cuda:0", 4 * GIB) == {"asked": GIB, "pinned": GIB} and held == []


def test_what_decides_where_downloads_go(tmp_path, capsys, monkeypatch):
    for name in doctor.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert "downloads" not in run(capsys, tmp_path)[1].lower()
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    monkeypatch.setenv("https_proxy", "http://me:secret@proxy.example:3128")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
    code, out, _ = run(capsys, tmp_path)
    assert code == 0 and "secret" not in out
    for text in ("Models come from https://mirror.example", "through http://proxy.example:3128 (https_proxy)",
                 "gone.pem, which is not there: downloads fail"):  # fmt: skip
        assert text in out
    (tmp_path / "gone.pem").write_text("")
    assert "not there" not in run(capsys, tmp_path)[1]


def test_a_card_that_torch_does_not_see(monkeypatch):
    found, why = doctor.measured_cards([{"name": "a card"}], 0.0)
    assert found == [{"name": "a card"}] and "sees no card" in why


def test_costs_are_those_of_the_plan():
    values = json.loads((PROFILES / "rtx-3060-12g.json").read_text())
    slow = {**values, "link": "pcie3-x4"}
    assert decode_rate(slow) < decode_rate(values)
    rates = decode_rate(slow), decode_rate(values)
    assert f"{rates[1] - rates[0]:.0f} of {rates[1]:.0f} tok/s" in cost(slow, {"link": values["link"]})
    assert cost(values, {"link": values["link"]}) == "" and decode_rate({"name": "nothing"}) is None


@pytest.mark.parametrize(("told", "figures"), [
    ({"smart_status": {"passed": True}, "temperature": {"current": 40},
      "nvme_smart_health_information_log": {"percentage_used": 7, "data_units_written": 2}},
     {"passed": True, "temperature_c": 40, "wear_percent": 7, "written_bytes": 1_024_000}),
    ({"smart_status": {"passed": False}}, {"passed": False, "temperature_c": None}),
    ({"smartctl": {"messages": [{"string": "Permission denied"}]}},
     {"unknown": "smartctl says nothing of its health: Permission denied"}),
])  # fmt: skip
def test_what_smartctl_tells(told, figures):
    assert doctor.smart_figures(told) == figures


def test_wear_of_the_disk_here(tmp_path, monkeypatch):
    """Whatever this machine has: a drive, or the reason why nothing is known."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "unknown" in doctor.disk_wear(tmp_path)


@pytest.mark.parametrize(("bits", "reasons"), [
    (0x4, ["the power cap"]), (0x24, ["the power cap", "its temperature"]), (0x1, []),
])  # fmt: skip
def test_throttle_reasons(bits, reasons):
    assert throttle_reasons(bits) == reasons


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("http://me:secret@proxy.example:3128", "http://proxy.example:3128"),
        ("http://proxy.example:3128/a@b", "http://proxy.example:3128/a@b"),
        ("/etc/ssl/cert.pem", "/etc/ssl/cert.pem"),
    ],
)
def test_passwords_of_proxies_are_not_shown(setting, shown):
    assert doctor._shown(setting) == shown
