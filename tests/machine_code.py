"""What the compiler's log and the disassembly say of a compiled kernel."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

from packhorse.kernels.cuda.nvrtc import Target, Variant, compile_code

TENSOR_CORE = re.compile(r"\b(HMMA|IMMA)\.\w+")


class Report(NamedTuple):
    """registers of a thread; bytes of spills; static shared memory of a block; the tensor-core instructions."""

    registers: int
    spill_bytes: int
    static_shared_bytes: int
    tensor_ops: tuple[str, ...]


@cache
def _disassembler() -> str:
    import nvidia

    for folder in nvidia.__path__:
        for found in Path(folder).glob("*/bin/nvdisasm"):
            return str(found)
    raise AssertionError("nvdisasm is not installed; it is part of packhorse[test]")


def disassemble(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        return subprocess.run(
            [_disassembler(), "-c", os.fspath(path)], check=True, capture_output=True, text=True
        ).stdout


def examine(variant: Variant, arch: int) -> Report:
    """Compile for sm_`arch` and look."""
    code, log = compile_code(variant, Target(arch))
    # The log has a part for each kernel of the source.
    parts = re.split(r"Compiling entry function '", log)
    (part,) = [p for p in parts if p.startswith(f"{variant.kernel}'")]
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
    registers = re.search(r"Used (\d+) registers", part)
    assert spills and registers, log
    shared = re.search(r"(\d+) bytes smem", part)
    text = disassemble(code)
    function = re.split(r"\.section\s+\.text\.", text)
    (body,) = [f for f in function[1:] if re.match(rf"{variant.kernel}\b", f)]
    return Report(
        int(registers[1]),
        sum(int(spills[i]) for i in (1, 2, 3)),
        int(shared[1]) if shared else 0,
        tuple(sorted({m[0] for m in TENSOR_CORE.finditer(body)})),
    )


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
