"""`mlagen cache dir`: prints the cache folder."""

from __future__ import annotations

import json
from pathlib import Path

from .conftest import Run


def test_the_folder_is_all_that_is_printed(run: Run, cache_dir: Path) -> None:
    """The output is the path alone, usable in a shell."""
    result = run("cache", "dir")

    assert (result.exit_code, result.stdout) == (0, f"{cache_dir}\n")


def test_json_reports_whether_it_exists(run: Run, cache_dir: Path) -> None:
    """A missing folder is no error."""
    before = json.loads(run("cache", "dir", "--json").stdout)
    cache_dir.mkdir()
    after = json.loads(run("cache", "dir", "--json").stdout)

    assert before == {"cache_dir": str(cache_dir), "exists": False}
    assert after == {"cache_dir": str(cache_dir), "exists": True}
