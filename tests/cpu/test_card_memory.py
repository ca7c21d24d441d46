"""What of a card a process may take, on a card that tests make up: torch's and the driver's figures are theirs."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from packhorse.core.errors import DoesNotFitError
from packhorse.core.units import GIB, MIB
from packhorse.engine.card import MODULE_BYTES, SLACK_BYTES, CardMemory
from packhorse.facts.machine import DISPLAY_BYTES

CONTEXT, FREE, TOTAL = 300 * MIB, 10 * GIB, 11 * GIB


@pytest.fixture
def card(monkeypatch):
    """Puts a card into the machine: display, whether one is attached; told, whether the driver says what each process
    takes. Returns the parts of the card that torch's allocator was left."""
    left: list[float] = []

    def put(*, display: bool = False, told: bool = True) -> list[float]:
        process = SimpleNamespace(pid=os.getpid(), usedGpuMemory=CONTEXT)
        other = SimpleNamespace(pid=-1, usedGpuMemory=TOTAL - FREE - CONTEXT)
        nvml = SimpleNamespace(
            NVMLError=RuntimeError,
            nvmlInit=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetDisplayActive=lambda handle: int(display),
            nvmlDeviceGetComputeRunningProcesses=lambda handle: [process, other],
            nvmlDeviceGetGraphicsRunningProcesses=lambda handle: [other],
        )
        monkeypatch.setitem(sys.modules, "pynvml", nvml if told else None)
        return left

    properties = SimpleNamespace(uuid="1", multi_processor_count=68)
    answers = {
        "set_device": None, "mem_get_info": (FREE, TOTAL), "get_device_properties": properties, "memory_reserved": 0,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, _: left.append(part))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda _: None, raising=False)
    return put


def test_all_that_is_free_but_what_a_desktop_needs(card):
    left = card()
    memory = CardMemory("cuda", None)
    assert memory.cap == FREE + CONTEXT and memory.used_bytes() == CONTEXT and memory.num_sms == 68
    assert memory.runtime_bytes == CONTEXT + MODULE_BYTES + SLACK_BYTES
    assert left[-1] * TOTAL == pytest.approx(memory.cap - CONTEXT - MODULE_BYTES)
    card(display=True)
    assert CardMemory("cuda:0", None).cap == FREE + CONTEXT - DISPLAY_BYTES


def test_a_cap_is_kept_and_more_than_there_is_refused(card):
    card(display=True)
    assert CardMemory("cuda", 6 * GIB).cap == 6 * GIB
    with pytest.raises(
        DoesNotFitError, match=r"--vram 10\.30 GiB was asked .* can have 10\.29 GiB"
    ) as caught:
        CardMemory("cuda", FREE + CONTEXT + 8 * MIB)
    assert (caught.value.asked, caught.value.available) == (FREE + CONTEXT + 8 * MIB, FREE + CONTEXT)


def test_where_the_driver_tells_no_process_apart_all_users_count(card):
    """As ours, beside what is planned: so what is left for pools is what is free."""
    card(told=False)
    memory = CardMemory("cuda", None)
    assert memory.used_bytes() == TOTAL - FREE and memory.cap == TOTAL
    assert memory.cap - memory.runtime_bytes == FREE - MODULE_BYTES - SLACK_BYTES
