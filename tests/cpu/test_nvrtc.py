"""The compiler of the kernels and its cache, without a card."""

import gc
import sys

import pytest

import machine_code
from packhorse.core.errors import CompileError, CompilerMissingError, UnsupportedCardError
from packhorse.kernels.cuda import nvrtc
from packhorse.kernels.cuda.nvrtc import CodeCache, Target, Variant, build, cache_key, compile_code

TOY = """
#include <cuda_fp16.h>
extern "C" __global__ void toy(float* x) {
    __shared__ float part[SIZE];
    part[threadIdx.x] = __half2float(__float2half(x[threadIdx.x]));
    __syncthreads();
    x[threadIdx.x] = part[SIZE - 1 - threadIdx.x];
}
extern "C" __global__ void product(float* d, const unsigned* a) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]));
}
extern "C" __global__ void spilling(float* x, int n) {
    float values[64];
    for (int i = 0; i < 64; i++) values[i] = x[i];
    for (int i = 0; i < n; i++) values[(i * 7) & 63] += values[(i * 5 + n) & 63];
    for (int i = 0; i < 64; i++) x[i] = values[i];
}
"""


@pytest.fixture
def toy(tmp_path):
    path = tmp_path / "toy.cu"
    path.write_text(TOY)
    return Variant(str(path), "toy", (("SIZE", 32),))


def other(toy, **changes):
    return Variant(**{**vars(toy), **changes})


@pytest.mark.parametrize("arch", [75, 120])
def test_machine_code_and_what_is_read_of_it(toy, arch):
    report = machine_code.examine(toy, arch)
    assert 0 < report.registers < 64
    # From 9.0 on the system keeps 1,024 bytes of each block's shared memory, and says so.
    assert report.static_shared_bytes in (128, 128 + 1024)
    assert (report.spill_bytes, report.tensor_ops) == (0, 0)
    machine_code.check(toy, arch)
    product = other(toy, kernel="product", tensor_cores=True)
    assert machine_code.check(product, arch).tensor_ops == 1
    assert "HMMA.1688" in machine_code.disassemble(compile_code(product, Target(arch))[0], "product")


def test_checks_fail_where_they_should(toy):
    with pytest.raises(AssertionError, match="spills"):
        machine_code.check(other(toy, kernel="spilling"), 75)
    with pytest.raises(AssertionError, match="no tensor-core instruction"):
        machine_code.check(other(toy, tensor_cores=True), 75)
    with pytest.raises(AssertionError, match="65664 bytes of shared memory, there are 65536"):
        machine_code.check(other(toy, shared_bytes=64 << 10), 75)
    with pytest.raises(UnsupportedCardError, match=r"needs 65537 bytes .* 7.5 has 65536"):
        compile_code(other(toy, shared_bytes=(64 << 10) + 1), Target(75))
    with pytest.raises(UnsupportedCardError, match=r"needs compute capability 8.0, this is 7.5"):
        compile_code(other(toy, min_arch=80), Target(75))


def test_a_fault_in_the_source_names_kernel_and_card(toy):
    with pytest.raises(CompileError, match=r"toy SIZE=none .* 8\.6[\s\S]*undefined"):
        compile_code(other(toy, defines=(("SIZE", "none"),)), Target(86))
    with pytest.raises(CompileError, match=r"does not know compute capability 8\.2"):
        compile_code(toy, Target(82))


def test_compiler_missing(toy, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for function in (nvrtc.compiler_version, nvrtc.known_archs):
        function.cache_clear()
    with pytest.raises(CompilerMissingError, match="gpu-cu13"):
        compile_code(toy, Target(75))


@pytest.fixture
def counted(monkeypatch):
    """Variants that were compiled; the compiler stands in for itself."""
    calls = []

    def fake(variant, target):
        calls.append(str(variant))
        return f"code of {variant} for {target}".encode(), ""

    monkeypatch.setattr(nvrtc, "compile_code", fake)
    return calls


def test_cached_by_all_that_it_is_made_of(toy, tmp_path, counted):
    cache, target = CodeCache(tmp_path / "kernels"), Target(75)
    seen = []
    two = [toy, other(toy, defines=(("SIZE", 64),)), toy]
    first = build(two, target, cache, lambda *done: seen.append(done))
    assert len(counted) == 2 and seen == [(0, 2), (1, 2), (2, 2)]
    assert build(two, target, cache, lambda *done: seen.append(done)) == first
    assert len(counted) == 2 and len(seen) == 3
    keys = {cache_key(toy, t) for t in (target, Target(80), Target(75, ptx=True))}
    keys.add(cache_key(two[1], target))
    with open(toy.source, "a") as file:
        file.write("// changed")
    keys.add(cache_key(toy, target))
    assert len(keys) == 5
    build(two, target, cache)
    assert len(counted) == 4


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "folder"])
def test_damaged_files_are_compiled_anew(toy, tmp_path, counted, damage):
    cache = CodeCache(tmp_path / "kernels")
    want = build([toy], Target(75), cache)
    (path,) = cache.folder.iterdir()
    data = path.read_bytes()
    if damage == "folder":
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes({"flip": data[:-1] + b"?", "cut": data[:-1], "empty": b""}[damage])
    assert build([toy], Target(75), cache) == want
    assert len(counted) == 2
    if damage != "folder":
        assert path.read_bytes() == data
    assert len(list(cache.folder.iterdir())) == 1, "nothing is left beside the files"


def test_a_folder_that_cannot_be_written_costs_only_time(toy, tmp_path, counted):
    (tmp_path / "file").write_text("in the way")
    cache = CodeCache(tmp_path / "file" / "kernels")
    assert build([toy], Target(75), cache) == build([toy], Target(75), cache)
    assert len(counted) == 2


def test_one_fault_stops_the_rest(toy, tmp_path):
    bad = other(toy, kernel="bad", defines=(("SIZE", "none"),))
    with pytest.raises(CompileError, match="bad SIZE=none"):
        build([bad], Target(75), CodeCache(tmp_path / "kernels"))
    assert not (tmp_path / "kernels").exists()


def test_an_error_that_the_garbage_collector_takes_apart_is_silent(monkeypatch):
    complaints = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: complaints.append(args.exc_value))
    broken = Variant("linear/dense.cu", "dense_gemv", (("WEIGHT", 0), ("X", "no type"), ("TOKENS", 1)))
    try:
        compile_code(broken, Target(90))
    except CompileError as error:
        error.itself = error  # part of a cycle that is younger than what it holds
    gc.collect()
    assert not complaints
