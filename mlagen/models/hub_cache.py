"""Look-up of configurations in the local Hugging Face Hub cache, without downloads."""

from __future__ import annotations

import re
from pathlib import Path

from mlagen.errors import ArgumentError

_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether a name is a syntactically valid Hub id, such as ``deepseek-ai/DeepSeek-V3``."""
    return _ID.fullmatch(name) is not None


def cached_config(name: str) -> Path | None:
    """Return the ``config.json`` of a Hub id in the local cache, or None if it is missing.

    Raises
    ------
    ArgumentError
        If huggingface_hub is not installed.
    """
    if not is_hub_id(name):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise ArgumentError(
            "MLAGEN_HF: expected huggingface_hub to be installed, got none; "
            "run: pip install huggingface-hub, or give the path of a config.json"
        ) from error
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # not a valid id
        return None
    return Path(found) if isinstance(found, str) else None
