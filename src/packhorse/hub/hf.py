"""Models from the Hugging Face Hub or a server that plays it (HF_ENDPOINT), into the hub's own cache.

Only data formats are fetched: a repository's pickle files never arrive here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packhorse.core.errors import NetworkError, PackhorseError, RefusedError, UsageError
from packhorse.facts.gguf_model import is_later_part, split_parts

if TYPE_CHECKING:
    from huggingface_hub import HfApi

CHECKPOINT_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "*.model", "merges.txt"]
IGNORED_PATTERNS = ["*/*", "consolidated*"]
"""Folders beside the checkpoint (other formats, images) and a second copy of the weights."""
ATTEMPTS = 3
"""Times a transfer is tried. The hub's library goes on where a connection ended early; after other breaks the
file begins anew, and files that arrived whole are kept."""


def fetch_repo(
    repo: str,
    file: str | None,
    revision: str | None,
    *,
    offline: bool = False,
    refresh: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The checkpoint folder of a repository, or one GGUF file of it.

    Without `file`: its safetensors checkpoint, else its only GGUF file. Of a split GGUF file, whichever part
    is named, all parts are fetched and the first is returned. A complete copy in the cache is used
    without a look at the network, unless `refresh`. Raises UsageError for what does not exist, RefusedError
    for a repository that is closed or holds no data format, NetworkError.
    """
    name = f"hf:{repo}" + (f"/{file}" if file else "") + (f"@{revision}" if revision else "")
    cached = None if refresh and not offline else _cached(repo, file, revision, offline)
    if cached is not None:
        return cached
    if offline:
        raise NetworkError(
            f"{name} is not in the cache (not all of it), and --offline forbids the network.",
            hint=f"Run `packhorse pull {name}` once with a network.",
        )
    from huggingface_hub import HfApi

    try:
        if file is None:
            file = _choose(HfApi(), repo, revision)
        return _download(repo, file, revision, progress)
    except PackhorseError:
        raise
    except Exception as error:  # which errors come from below depends on the hub's HTTP library
        if refresh and _is_unreachable(error):
            cached = _cached(repo, file, revision, offline=True)
            if cached is not None:
                return cached
        raise _typed(error, name) from error


def _cached(repo: str, file: str | None, revision: str | None, offline: bool) -> Path | None:
    """A complete copy in the hub's cache. A repository of GGUF files may hold more than the cache shows, so
    that its only cached file is what was meant just where nobody can be asked."""
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        if file is not None:
            paths = []
            for part in split_parts(file):
                found = try_to_load_from_cache(repo, part, revision=revision)
                if not isinstance(found, str):
                    return None
                paths.append(Path(found))
            return paths[0]
        folder = Path(
            snapshot_download(
                repo,
                revision=revision,
                local_files_only=True,
                allow_patterns=CHECKPOINT_PATTERNS,
                ignore_patterns=IGNORED_PATTERNS,
            )
        )
    except LocalEntryNotFoundError:
        return None
    except ValueError as error:
        raise UsageError(f"hf:{repo} names no repository: {error}", hint="Write hf:org/name.") from error
    if _is_checkpoint(folder):
        return folder
    ggufs = [path for path in folder.glob("*.gguf") if not is_later_part(path)]
    if not offline or len(ggufs) != 1:
        return None
    return ggufs[0] if all((folder / part).is_file() for part in split_parts(ggufs[0].name)) else None


def _is_checkpoint(folder: Path) -> bool:
    """Whether config and all weights are there."""
    weights = {path.name for path in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weights_needed = set(json.loads(index.read_text())["weight_map"].values())
        except (ValueError, KeyError, AttributeError, TypeError):
            return True  # the reader of the checkpoint says what is wrong with it
        if not weights_needed <= weights:
            return False
    return bool(weights) and (folder / "config.json").is_file()


def _choose(api: HfApi, repo: str, revision: str | None) -> str | None:
    """None for a safetensors checkpoint, else the repository's only GGUF file (the first part, if split)."""
    siblings = api.model_info(repo, revision=revision).siblings or []
    files = [sibling.rfilename for sibling in siblings]
    if any(name.endswith(".safetensors") and "/" not in name for name in files):
        return None
    ggufs = [name for name in files if name.endswith(".gguf") and not name.startswith("mmproj")]
    ggufs = [name for name in ggufs if not is_later_part(Path(name))]
    if len(ggufs) == 1:
        return ggufs[0]
    if ggufs:
        raise UsageError(
            f"hf:{repo} holds {len(ggufs)} GGUF files: {', '.join(ggufs[:8])}{' ...' * (len(ggufs) > 8)}.",
            hint=f"Choose one, such as hf:{repo}/{ggufs[0]}.",
            files=ggufs,
        )
    hint = "Packhorse loads data formats only: look for a converted repository."
    raise RefusedError(f"hf:{repo} holds no safetensors and no GGUF files.", hint=hint, files=files[:50])


def _download(
    repo: str, file: str | None, revision: str | None, progress: Callable[[int, int], None] | None
) -> Path:
    from huggingface_hub import snapshot_download

    parts = [] if file is None else split_parts(file)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            folder = snapshot_download(
                repo,
                revision=revision,
                allow_patterns=parts or CHECKPOINT_PATTERNS,
                ignore_patterns=IGNORED_PATTERNS if file is None else None,
                tqdm_class=_progress_bar(progress),
            )
            break
        except Exception as error:
            if attempt == ATTEMPTS or not _is_unreachable(error):
                raise
    for part in parts:
        if not (Path(folder) / part).is_file():
            raise UsageError(f"hf:{repo} holds no file {part}.", hint="Check its spelling.", file=part)
    return Path(folder, *parts[:1])


def _progress_bar(progress: Callable[[int, int], None] | None) -> Any:
    """A silent bar of the hub's kind that hands its byte counts on."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # The hub counts bytes twice: as they arrive, and as they are written.
            named = str(kwargs.get("name", ""))
            self.reports = kwargs.get("unit") == "B" and not named.endswith(".transfer")
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self.reports and progress is not None:
                progress(int(self.n), int(self.total or 0))
            return None

    return Bar


def _is_unreachable(error: Exception) -> bool:
    """Whether trying again may help: no answer of the hub, and no fault of this machine."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    return not isinstance(error, HFValidationError) and not (
        isinstance(error, OSError) and error.errno is not None
    )


def _typed(error: Exception, name: str) -> PackhorseError:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return RefusedError(
            f"{name} is gated: its owner wants an agreement first.",
            hint="Agree on the repository's page, then log in with `hf auth login` or set HF_TOKEN.",
        )
    if isinstance(error, errors.RevisionNotFoundError | errors.RemoteEntryNotFoundError):
        return UsageError(f"{name} does not exist in this revision.", hint="Check the revision and the file.")
    if isinstance(error, errors.RepositoryNotFoundError):
        return UsageError(
            f"{name} does not exist, or is private.",
            hint="Check its spelling; for a private one log in with `hf auth login` or set HF_TOKEN.",
        )
    if isinstance(error, errors.HFValidationError):
        return UsageError(f"{name} names no repository: {error}", hint="Write hf:org/name.")
    if not _is_unreachable(error) and not isinstance(error, errors.HfHubHTTPError):
        return RefusedError(
            f"{name} cannot be kept in the hub's cache: {error}.",
            hint="Make room, or set HF_HOME to another folder.",
        )
    said = str(error).strip().splitlines()
    return NetworkError(
        f"{name} is not in the cache (not all of it) and cannot be fetched: "
        f"{said[0] if said else type(error).__name__}",
        hint="Check the network and run it again: files that arrived whole are kept.",
        error=type(error).__name__,
    )
