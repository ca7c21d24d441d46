"""packhorse version: versions to put into a report."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from packhorse import __version__
from packhorse.cli.common import JsonOption, print_json

LIBRARIES = ("torch", "transformers", "tokenizers", "huggingface_hub")


def command(json: JsonOption = False) -> None:
    """Reads the versions from package metadata; imports none of the libraries."""
    found = {"packhorse": __version__, "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    if json:
        print_json(found)
        return
    for name, text in found.items():
        print(name, text)
