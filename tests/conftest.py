"""Settings of every test: one thread, no network, no telemetry, a private cache folder."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Two workers of two threads each run many times slower than two of one on two cores."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder that the code under test finds as its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "packhorse"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--as-arch", type=int, help="75: treat the card as one of compute capability 7.5")


@pytest.fixture(autouse=True, scope="session")
def _as_arch(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--as-arch"):
        from packhorse.kernels.cuda.launch import use_arch

        use_arch(request.config.getoption("--as-arch"))
