"""Which code a card gets, and which it is refused, without a card."""

import pytest
import torch
from cuda.bindings import driver

from packhorse.core.errors import DriverTooOldError, UnsupportedCardError
from packhorse.kernels.cuda import launch
from packhorse.kernels.cuda.nvrtc import Target, known_archs


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
