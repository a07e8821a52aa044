"""Cache folders that another user or mode makes untrusted."""

from __future__ import annotations

import os
from pathlib import Path

from tests.cache.builds import entry_folder
from tests.faults.steps import KEY
from tests.fixture_types import Patch

STRANGER = 65534

# Every folder between the root and the files of an entry, by its name in `folder_of`.
FOLDERS = ["cache", "cache/v1", "cache/v1/e", "shard", "key", "entry"]
FOLDERS += ["cache/v1/staging", "cache/v1/quarantine"]


def give_away(path: Path, patch: Patch) -> None:
    """Change the owner of a folder to another user."""
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
    else:  # without root, change the effective user instead of the owner
        patch.setattr(os, "geteuid", lambda: STRANGER)


def folder_of(folder: Path, name: str) -> Path:
    """Return a folder of the cache in ``folder`` by its name."""
    entry = entry_folder(folder, KEY)
    named = {"shard": entry.parents[1], "key": entry.parent, "entry": entry}
    found = named.get(name, folder / name)
    found.mkdir(mode=0o700, exist_ok=True)  # a quarantine is made on demand
    return found
