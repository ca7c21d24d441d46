"""What the compiler's log and the disassembly say of a compiled kernel."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from packhorse.kernels.cuda.nvrtc import Target, Variant, compile_code

_HMMA = 0x23C
"""HMMA's number in the low 12 bits of an instruction of 16 bytes, from 7.5 to 12.0 (a test asks nvdisasm)."""


class Report(NamedTuple):
    """registers of a thread; bytes of spills; static shared memory of a block; tensor-core instructions (HMMA)."""

    registers: int
    spill_bytes: int
    static_shared_bytes: int
    tensor_ops: int


@cache
def _disassembler() -> str:
    import nvidia

    for folder in nvidia.__path__:
        for found in Path(folder).glob("*/bin/nvdisasm"):
            return str(found)
    raise AssertionError("nvdisasm is not installed; it is part of packhorse[test]")


def disassemble(cubin: bytes, kernel: str) -> str:
    """The instructions of a kernel, by nvdisasm, which takes longer than compiling."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        run = [_disassembler(), "-c", os.fspath(path)]
        text = subprocess.run(run, check=True, capture_output=True, text=True).stdout
    functions = re.split(r"\.section\s+\.text\.", text)[1:]
    (body,) = [function for function in functions if re.match(rf"{kernel}\b", function)]
    return body


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the sections of an ELF file of 64 bits."""
    (start,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, start + size * index) for index in range(count)]
    for head in heads:
        name = heads[names][4] + head[0]
        yield elf[name : elf.index(b"\0", name)].decode(), elf[head[4] : head[4] + head[5]]


def count_tensor_ops(cubin: bytes, kernel: str) -> int:
    """HMMA instructions of a kernel."""
    code = dict(_sections(cubin))[f".text.{kernel}"]
    return sum(int.from_bytes(code[at : at + 2], "little") & 0xFFF == _HMMA for at in range(0, len(code), 16))


@lru_cache(maxsize=1)
def _compiled(source: str, defines: tuple[tuple[str, int], ...], arch: int) -> tuple[bytes, str]:
    """Code and log of all kernels of a source, of which `part_of` keeps pairs side by side."""
    return compile_code(Variant(source, "all", defines), Target(arch))


def part_of(pairs: Iterable[tuple[Variant, int]], part: int, parts: int) -> list[tuple[Variant, int]]:
    """Slice `part` of `parts` of a list, in which kernels that one compilation makes follow on one another."""
    groups: dict[object, list[tuple[Variant, int]]] = {}
    for variant, arch in pairs:
        groups.setdefault((variant.source, variant.defines, arch), []).append((variant, arch))
    return [pair for group in list(groups.values())[part::parts] for pair in group]


def examine(variant: Variant, arch: int) -> Report:
    """Compile for sm_`arch` and look."""
    Target(arch).check(variant)
    code, log = _compiled(variant.source, variant.defines, arch)
    # The log has a part for each kernel of the source.
    parts = re.split(r"Compiling entry function '", log)
    (part,) = [p for p in parts if p.startswith(f"{variant.kernel}'")]
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
    registers = re.search(r"Used (\d+) registers", part)
    assert spills and registers, log
    shared = re.search(r"(\d+) bytes smem", part)
    return Report(
        int(registers[1]),
        sum(int(spills[i]) for i in (1, 2, 3)),
        int(shared[1]) if shared else 0,
        count_tensor_ops(code, variant.kernel),
    )


def faults(pairs: Iterable[tuple[Variant, int]]) -> list[str]:
    """What `check` says of each pair of a variant and a card that fails it."""
    found = []
    for variant, arch in pairs:
        try:
            check(variant, arch)
        except AssertionError as error:
            found.append(str(error))
    return found


def check(variant: Variant, arch: int) -> Report:
    """Fails on spills, too much shared memory, and a tensor-core kernel without its instruction."""
    report = examine(variant, arch)
    name = f"{variant} for sm_{arch}"
    assert report.spill_bytes == 0, f"{name}: {report.spill_bytes} bytes of stack or spills"
    shared = Target(arch).shared_bytes(variant) + report.static_shared_bytes
    most = Target(arch).max_shared_bytes
    assert shared <= most, f"{name}: {shared} bytes of shared memory, there are {most}"
    if variant.tensor_cores:
        assert report.tensor_ops, f"{name}: no tensor-core instruction"
    return report
