"""CUDA C++ compiled at first use by torch's own NVRTC, without a toolkit and, for cubins, without a card.

A kernel is an `extern "C"` function of a .cu file that lies beside its plain twin; shared headers are the
.cuh files of this folder. A `Variant` is one form of it, made by -D macros. What was compiled is kept in a
folder, by a key over sources, options, architecture and compiler; a damaged or read-only folder costs time,
never a wrong kernel.
"""

from __future__ import annotations

import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packhorse.core.errors import CompileError, CompilerMissingError, UnsupportedCardError

KERNELS = Path(__file__).parents[1]
MIN_ARCH = 75
_DIGEST_BYTES = 32
_STANDARD = "c++17"


@dataclass(frozen=True)
class Variant:
    """One compiled form of one kernel.

    source: .cu file, relative to packhorse/kernels. kernel: its extern "C" name. defines: macros and values.
    shared_bytes: the most dynamic shared memory that a block of it takes; async_bytes: that, if more, where there are
    asynchronous copies (8.0 on).
    min_arch: the oldest card that can run it, 80 where bf16 is used.
    tensor_cores: its machine code must hold tensor-core instructions (a test looks).
    """

    source: str
    kernel: str
    defines: tuple[tuple[str, int], ...] = ()
    shared_bytes: int = 0
    async_bytes: int = 0
    min_arch: int = MIN_ARCH
    tensor_cores: bool = False

    def __str__(self) -> str:
        return " ".join([self.kernel, *(f"{name}={value}" for name, value in self.defines)])


@dataclass(frozen=True)
class Target:
    """What is compiled for: machine code of an architecture (75, 86, ...), or PTX that the driver finishes."""

    arch: int
    ptx: bool = False

    @property
    def max_shared_bytes(self) -> int:
        """Shared memory that one block can have, dynamic and static together (CUDA programming guide,
        "Compute capabilities")."""
        kib = {75: 64, 80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}.get(self.arch, 99)
        return kib << 10

    @property
    def has_bf16(self) -> bool:
        """Whether there is bf16 arithmetic."""
        return self.arch >= 80

    @property
    def has_async_copies(self) -> bool:
        """Whether memory can be copied to shared memory without registers (cp.async)."""
        return self.arch >= 80

    def shared_bytes(self, variant: Variant) -> int:
        """The most dynamic shared memory that a block of the variant takes here."""
        return max(variant.shared_bytes, variant.async_bytes if self.has_async_copies else 0)

    def check(self, variant: Variant) -> None:
        """Raise UnsupportedCardError where the variant needs a newer card or more shared memory."""
        if self.arch < variant.min_arch:
            have, need = _dotted(self.arch), _dotted(variant.min_arch)
            raise UnsupportedCardError(
                f"{variant} needs compute capability {need}, this is {have}.", hint="Use fp16."
            )
        if self.shared_bytes(variant) > self.max_shared_bytes:
            raise UnsupportedCardError(
                f"{variant} needs {self.shared_bytes(variant)} bytes of shared memory, a block of compute "
                f"capability {_dotted(self.arch)} has {self.max_shared_bytes}.",
                needed=self.shared_bytes(variant),
                available=self.max_shared_bytes,
            )


def _dotted(arch: int) -> str:
    return f"{arch // 10}.{arch % 10}"


@cache
def compiler_version() -> tuple[int, int]:
    """Version of the NVRTC that torch uses. Raises CompilerMissingError."""
    return _nvrtc()[0]


@cache
def known_archs() -> tuple[int, ...]:
    """Architectures that this NVRTC compiles for. Raises CompilerMissingError."""
    return _nvrtc()[1]


def _nvrtc() -> tuple[tuple[int, int], tuple[int, ...]]:
    try:
        from cuda.bindings import nvrtc

        error, major, minor = nvrtc.nvrtcVersion()
        archs = nvrtc.nvrtcGetSupportedArchs()[1]
    except (ImportError, RuntimeError) as cause:
        hint = "Install packhorse[gpu-cu13], or packhorse[gpu-cu12] where torch is built for CUDA 12."
        raise CompilerMissingError(f"The CUDA compiler NVRTC cannot be used: {cause}.", hint=hint) from cause
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompilerMissingError(f"NVRTC does not answer: {error}.")
    return (major, minor), tuple(archs)


@cache
def include_dir() -> str:
    """Folder of cuda_fp16.h and its like, from the CUDA runtime's wheel. Raises CompilerMissingError."""
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError as cause:
        hint = "Install packhorse[gpu-cu13]."
        raise CompilerMissingError(f"CUDA's headers cannot be looked for: {cause}.", hint=hint) from cause
    found = find_nvidia_header_directory("cudart")
    if not found or not Path(found, "cuda_fp16.h").exists():
        hint = "Install nvidia-cuda-runtime of torch's CUDA version."
        raise CompilerMissingError("CUDA's headers (cuda_fp16.h) are not installed.", hint=hint)
    return str(found)


def cache_key(variant: Variant, target: Target) -> str:
    """Name of the compiled code: a hash over all that it is made of."""
    seed = repr((compiler_version(), include_dir(), _STANDARD, target, variant.defines)).encode()
    state = hashlib.blake2b(seed, digest_size=20)
    for path in (KERNELS / variant.source, *sorted(KERNELS.glob("cuda/*.cuh"))):
        state.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return state.hexdigest()


def compile_code(variant: Variant, target: Target) -> tuple[bytes, str]:
    """Machine code or PTX, and the compiler's log with registers, spills and static shared memory.

    Raises CompilerMissingError, UnsupportedCardError, CompileError.
    """
    target.check(variant)
    if target.arch not in known_archs():
        raise CompileError(
            f"NVRTC {'.'.join(map(str, compiler_version()))} does not know compute capability "
            f"{_dotted(target.arch)}; it knows {', '.join(map(_dotted, known_archs()))}.",
            hint="Install a newer torch.",
        )
    from cuda.core import Program, ProgramOptions

    path = KERNELS / variant.source
    log = io.StringIO()
    try:
        # NOTE: the program has no name, so that no frame of an error keeps it: one that the garbage collector takes
        # apart complains of a None, wherever the interpreter is then.
        code = Program(
            path.read_text(),
            "c++",
            ProgramOptions(
                name=str(path),
                arch=f"{'compute' if target.ptx else 'sm'}_{target.arch}",
                std=_STANDARD,
                define_macro=[(name, str(value)) for name, value in variant.defines] or None,
                include_path=[str(KERNELS / "cuda"), include_dir()],
                ptxas_options=None if target.ptx else "-v",
            ),
        ).compile("ptx" if target.ptx else "cubin", logs=log)
    except Exception as cause:  # cuda.core raises its own and RuntimeError
        raise CompileError(
            f"{variant} does not compile for {_dotted(target.arch)}: {cause}\n{log.getvalue()}",
            hint="This is a fault of Packhorse or of the installed CUDA packages; please report it.",
        ) from cause
    return bytes(code.code), log.getvalue()


class CodeCache:
    """Compiled code in files named by key: a checksum, then the code. Written beside and renamed, so that a
    reader sees a whole file or none; a file that is damaged counts as missing."""

    def __init__(self, folder: Path | None = None) -> None:
        # Where the desktop specification puts caches; platformdirs is not on every machine with a card.
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self.folder = folder or home / "packhorse" / "kernels"

    def get(self, key: str) -> bytes | None:
        """The code, or None where there is none, or none that is whole."""
        try:
            data = (self.folder / key).read_bytes()
        except OSError:
            return None
        code = data[_DIGEST_BYTES:]
        return code if code and data[:_DIGEST_BYTES] == _digest(code) else None

    def put(self, key: str, code: bytes) -> bool:
        """Keep the code; False where the folder cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=".new-")
        except OSError:
            return False
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_digest(code) + code)
            os.replace(name, self.folder / key)
        except OSError:
            with suppress(OSError):
                os.unlink(name)
            return False
        return True


def _digest(code: bytes) -> bytes:
    return hashlib.blake2b(code, digest_size=_DIGEST_BYTES).digest()


def build(
    variants: Iterable[Variant],
    target: Target,
    cache: CodeCache,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Variant, bytes]:
    """Code of each variant, from the cache or compiled by all cores and kept there.

    progress(done, total) is called as variants to compile are done, first with 0; not where all are cached.
    Raises what `compile_code` raises.
    """
    found: dict[Variant, bytes] = {}
    missing: dict[Variant, str] = {}
    for variant in dict.fromkeys(variants):
        key = cache_key(variant, target)
        code = cache.get(key)
        if code is None:
            missing[variant] = key
        else:
            found[variant] = code
    if not missing:
        return found
    report = progress or (lambda done, total: None)
    report(0, len(missing))
    with ThreadPoolExecutor(min(len(missing), os.cpu_count() or 1)) as pool:
        jobs = {pool.submit(compile_code, variant, target): variant for variant in missing}
        try:
            for done, job in enumerate(as_completed(jobs), start=1):
                variant = jobs[job]
                found[variant] = job.result()[0]
                cache.put(missing[variant], found[variant])
                report(done, len(missing))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return found
