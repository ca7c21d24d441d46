"""Compiled kernels on a card: which target a card is, loading, and launches on torch's current stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from ctypes import c_float
from functools import cache
from typing import Any

import torch
from torch import Tensor

from packhorse.core.errors import CompileError, DriverTooOldError, UnsupportedCardError
from packhorse.kernels.cuda.nvrtc import (
    MIN_ARCH,
    CodeCache,
    Target,
    Variant,
    build,
    compiler_version,
    known_archs,
)

Arg = Tensor | int | float | None

_as_arch: int | None = None
_code_cache = CodeCache()
_kernels: dict[tuple[int, Target, Variant], Any] = {}


def use_arch(arch: int | None) -> None:
    """Treat every card as one of compute capability `arch`, which must be 75: kernels become PTX of that
    architecture, finished by the driver, and what such a card lacks is refused or switched off: bf16
    variants, TF32, flash attention. None ends it. Raises CompilerMissingError, and DriverTooOldError where the
    driver cannot read what this NVRTC writes."""
    global _as_arch
    if arch not in (None, MIN_ARCH):
        raise UnsupportedCardError(f"Only {MIN_ARCH} can be stood in for, not {arch}.")
    if arch is not None:
        _check_ptx()
    _as_arch = arch
    torch.backends.cuda.enable_flash_sdp(arch is None)
    torch.backends.cuda.enable_cudnn_sdp(arch is None)
    if arch is not None:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False


def _check_ptx() -> None:
    """The driver reads PTX of its own CUDA version and older."""
    compiler = compiler_version()  # first: it says what is missing where the bindings are
    from cuda.bindings import driver

    error, number = driver.cuDriverGetVersion()
    known = (number // 1000, number % 1000 // 10)
    if error == driver.CUresult.CUDA_SUCCESS and compiler <= known:
        return
    raise DriverTooOldError(
        f"NVRTC {_dotted(compiler)} writes PTX that the driver, made for CUDA {_dotted(known)}, cannot read.",
        hint="Update the NVIDIA driver, or install a torch built for an older CUDA.",
        compiler=_dotted(compiler),
        driver=_dotted(known),
    )


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def target_of(device: torch.device | int) -> Target:
    """What kernels for this card are compiled for. Raises UnsupportedCardError below 7.5."""
    if _as_arch is not None:
        return Target(_as_arch, ptx=True)
    return _native_target(device if isinstance(device, int) else device.index or 0)


def card_arch(device: torch.device | int) -> int:
    """Compute capability of the card, 86 for 8.6, or what it stands in for: what library kernels are chosen by."""
    return (
        _as_arch
        if _as_arch is not None
        else _native_arch(device if isinstance(device, int) else device.index or 0)
    )


def min_arch(dtype: torch.dtype) -> int:
    """The oldest cards that work with values of `dtype`, 16 bits."""
    return 80 if dtype == torch.bfloat16 else MIN_ARCH


def has_type(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels of our own work with values of `dtype` there: 16 bits on a card, bf16 from 8.0 on."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return dtype == torch.float16 or card_arch(device) >= min_arch(dtype)


@cache
def _native_arch(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a card."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _native_target(index: int) -> Target:
    arch = _native_arch(index)
    if arch < MIN_ARCH:
        raise UnsupportedCardError(
            f"{torch.cuda.get_device_name(index)} has compute capability {arch / 10}; kernels need 7.5.",
            hint="Use a card from 2018 or later, or --device cpu.",
            arch=arch,
            needed=MIN_ARCH,
        )
    if arch in known_archs():
        return Target(arch)
    # A card newer than this NVRTC: its driver finishes PTX of the newest architecture that is older.
    _check_ptx()
    return Target(max(known for known in known_archs() if known < arch), ptx=True)


def prepare(
    variants: Iterable[Variant],
    device: torch.device | int,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Compile what is not in the cache and load all, so that no launch has to: call it before capturing.

    progress: of `nvrtc.build`. Raises what `nvrtc.compile_code` raises, and CompileError where the driver
    refuses the code.
    """
    from cuda.bindings import driver
    from cuda.core import ObjectCode

    index = device if isinstance(device, int) else device.index or 0
    target = target_of(index)
    wanted = [variant for variant in variants if (index, target, variant) not in _kernels]
    if not wanted:
        return
    torch.cuda.init()
    with torch.cuda.device(index):
        saturated(torch.device("cuda", index))  # also makes the card's context current in this thread
        for variant, code in build(wanted, target, _code_cache, progress).items():
            load = ObjectCode.from_ptx if target.ptx else ObjectCode.from_cubin
            try:
                kernel = load(code).get_kernel(variant.kernel)
            except Exception as cause:  # cuda.core raises its own
                raise CompileError(f"The driver refuses {variant}: {cause}.") from cause
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            handle = driver.CUkernel(int(kernel.handle))
            (error,) = driver.cuKernelSetAttribute(attribute, target.shared_bytes(variant), handle, index)
            if error != driver.CUresult.CUDA_SUCCESS:
                raise CompileError(
                    f"The driver grants {variant} no {target.shared_bytes(variant)} bytes: {error}."
                )
            _kernels[index, target, variant] = kernel


def launch(
    variant: Variant,
    grid: tuple[int, ...],
    threads: int,
    *args: Arg,
    device: torch.device,
    shared_bytes: int | None = None,
    overlap: bool = False,
) -> None:
    """Enqueue one launch on torch's current stream of `device`; under capture it becomes a graph's node.

    args: a tensor is its address, None a null pointer, an int any integer parameter, a float a float.
    shared_bytes: dynamic shared memory of a block, at most and by default the variant's. overlap: the kernel
    waits for its predecessor itself (griddepcontrol.wait), so it may start early; cards before 9.0 ignore it.
    A variant that is not loaded is prepared now, which no capture allows. The tensors must outlive the work.
    """
    from cuda.core import LaunchConfig, Stream
    from cuda.core import launch as enqueue

    index = device.index or 0
    target = target_of(index)
    kernel = _kernels.get((index, target, variant))
    if kernel is None:
        prepare([variant], index)
        kernel = _kernels[index, target, variant]
    config = LaunchConfig(
        grid=grid,
        block=threads,
        shmem_size=target.shared_bytes(variant) if shared_bytes is None else shared_bytes,
        programmatic_stream_serialization=overlap and target.arch >= 90,
    )
    stream = Stream.from_handle(torch.cuda.current_stream(index).cuda_stream)
    enqueue(stream, config, kernel, *map(_argument, args))


def _argument(value: Arg) -> object:
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return c_float(value)
    return 0 if value is None else value


@cache
def saturated(device: torch.device) -> Tensor:
    """int64 [1] of a card: values that became the largest of their 16-bit type, since the start."""
    return torch.zeros(1, dtype=torch.int64, device=device)
