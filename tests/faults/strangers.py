"""Cache folders that another user or mode makes untrusted."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cache.builds import entry_path
from tests.faults.steps import KEY
from tests.fixture_types import Patch

STRANGER = 65534

# Every folder between the root and an entry, by its name in `folder_of`.
FOLDERS = ["cache", "cache/v2", "shard"]


def give_away(path: Path, patch: Patch) -> None:
    """Change the owner of a folder to another user."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:  # without root, change the effective user instead of the owner
        patch.setattr(os, "geteuid", lambda: STRANGER)


def folder_of(folder: Path, name: str) -> Path:
    """Return a folder of the cache in ``folder`` by its name."""
    return entry_path(folder, KEY).parent if name == "shard" else folder / name
