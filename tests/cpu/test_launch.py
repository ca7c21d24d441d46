"""Which code a card gets, and which it is refused, without a card."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver

from packhorse.cli import main as cli
from packhorse.core.config import EngineConfig
from packhorse.core.errors import DoesNotFitError, DriverTooOldError, UnsupportedCardError, UsageError
from packhorse.core.units import GIB
from packhorse.engine import load
from packhorse.engine.card import room_on
from packhorse.kernels.cuda import launch
from packhorse.kernels.cuda.nvrtc import Target, known_archs

DENSE = Path(__file__).parents[2] / "assets" / "recall-dense"


@pytest.fixture
def machine(monkeypatch):
    """A function that puts a card of a capability, and a driver of a CUDA version, into the machine."""

    def forget():
        launch._native_target.cache_clear()
        launch._native_arch.cache_clear()

    def put(capability=(9, 0), version=13000):
        forget()
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some card")
        answer = (driver.CUresult.CUDA_SUCCESS, version)
        monkeypatch.setattr(driver, "cuDriverGetVersion", lambda: answer)

    yield put
    forget()
    launch.use_arch(None)


def test_machine_code_of_the_card(machine):
    for capability in ((7, 5), (8, 6), (12, 0)):
        machine(capability)
        assert launch.target_of(0) == Target(10 * capability[0] + capability[1])
        assert launch.card_arch(0) == 10 * capability[0] + capability[1]


def test_a_card_newer_than_the_compiler_gets_ptx(machine):
    machine((20, 0))
    assert launch.target_of(0) == Target(max(known_archs()), ptx=True)
    machine((20, 0), version=12090)
    with pytest.raises(DriverTooOldError):
        launch.target_of(0)


def test_a_card_too_old_is_refused_by_name(machine):
    machine((7, 0))
    with pytest.raises(
        UnsupportedCardError, match=r"Some card has compute capability 7\.0; kernels need 7\.5"
    ):
        launch.target_of(0)


def test_commands_refuse_a_card_too_old_before_they_load(machine, monkeypatch, capsys):
    machine((7, 0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(load, "CardMemory", lambda *_: pytest.fail("its memory was asked for"))
    assert cli.run(["ask", str(DENSE), "x", "--device", "cuda"]) == 1
    said = capsys.readouterr().err
    assert "compute capability 7.0; kernels need 7.5" in said and "--device cpu" in said


def test_a_driver_too_old_for_torch_names_both(monkeypatch):
    """torch sees no card then."""
    answers = {
        "nvmlInit": None,
        "nvmlSystemGetDriverVersion": b"525.60.13",
        "nvmlSystemGetCudaDriverVersion": 12000,
    }
    nvml = SimpleNamespace(**{name: (lambda answer=answer: answer) for name, answer in answers.items()})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError) as caught:
        load.check_device(EngineConfig(device="cuda"))
    said = f"torch {torch.__version__} sees no CUDA card; the driver 525.60.13 runs CUDA up to 12.0."
    assert said in str(caught.value) and "newer driver" in caught.value.hint


def test_another_program_takes_memory_while_a_model_is_loaded(monkeypatch):
    """What was to be used, what this process has, and what is free are told; what else goes wrong is not hidden."""
    card = SimpleNamespace(device=torch.device("cuda", 0), cap=10 * GIB, used_bytes=lambda: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 * GIB, 11 * GIB))
    with pytest.raises(DoesNotFitError) as caught, room_on(card):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert (caught.value.asked, caught.value.available) == (10 * GIB, 5 * GIB)
    assert "10.00 GiB" in str(caught.value) and "end it or give a --vram" in caught.value.hint
    with pytest.raises(RuntimeError, match="other"), room_on(card):
        raise RuntimeError("other")


def test_a_turing_card_stood_in_for(machine):
    machine()
    flash, tf32 = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.matmul.allow_tf32
    launch.use_arch(75)
    assert launch.target_of(0) == Target(75, ptx=True)
    assert not torch.backends.cuda.flash_sdp_enabled() and not torch.backends.cuda.matmul.allow_tf32
    launch.use_arch(None)
    assert launch.target_of(0) == Target(90) and torch.backends.cuda.flash_sdp_enabled() == flash
    assert torch.backends.cuda.matmul.allow_tf32 == tf32
    with pytest.raises(UnsupportedCardError, match="Only 75"):
        launch.use_arch(80)


def test_ptx_newer_than_the_driver_names_both(machine):
    machine(version=12090)
    with pytest.raises(
        DriverTooOldError, match=r"NVRTC 13\.\d+ writes PTX that the driver, made for CUDA 12\.9,"
    ):
        launch.use_arch(75)
    assert launch.target_of(0) == Target(90)


def test_commands_that_load_refuse_what_the_driver_cannot_read(machine, monkeypatch, capsys):
    """Before anything is loaded, naming both versions; with a driver that is new enough the card stands in."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for command in (["ask", str(DENSE), "x"], ["verify", "ladder", str(DENSE)]):
        machine(version=12090)
        assert cli.run([*command, "--device", "cuda", "--as-arch", "75"]) == 1
        assert "made for CUDA 12.9" in (said := capsys.readouterr().err) and "NVRTC 13." in said
        assert launch.target_of(0) == Target(90)
        machine()
        assert cli.run([*command, "--device", "cuda", "--as-arch", "75", "--dtype", "bf16"]) != 0
        assert "compute capability 7.5; bf16 needs 8.0" in capsys.readouterr().err
        assert launch.target_of(0) == Target(75, ptx=True)
        launch.use_arch(None)


def test_a_card_that_cannot_stand_in_is_refused():
    with pytest.raises(UsageError, match="as_arch is 80"):
        EngineConfig(device="cuda", as_arch=80)
    with pytest.raises(UsageError, match="the device is cpu") as error:
        EngineConfig(as_arch=75)
    assert "--device cuda" in error.value.hint
