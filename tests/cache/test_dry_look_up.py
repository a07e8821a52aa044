"""A dry look-up has the result of a normal one, and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlagen.cache.entry import Manifest
from mlagen.cache.key import CacheKey
from mlagen.cache.store import KernelStore
from tests.cache.builds import entry_folder, make_build, make_key, make_store
from tests.cache_tools.altered import snapshot
from tests.faults.steps import warnings_in
from tests.fixture_types import Log

NEWEST, OLD = "nvrtc-13.5.37", "nvrtc-13.0.88"
ANY = make_key(toolchain="nvrtc-13")


def put(folder: Path, toolchain: str) -> Path:
    """Publish a kernel of a toolchain, last used long ago, in a cache folder; return its entry."""
    key = make_key(toolchain=toolchain)
    path = make_store(folder).find_or_build(key, lambda: make_build(toolchain=toolchain)).path
    assert path is not None
    os.utime(path / "manifest.json", (1, 1))
    return path


def store_over(folder: Path) -> KernelStore:
    """Return a store of ``folder/own`` above ``folder/layer``."""
    return KernelStore(
        folder / "own/cache",
        lock_dir=folder / "locks",
        lock_timeout_s=60,
        layers=[folder / "layer/cache"],
    )


def cut_off(entry: Path) -> None:
    """Damage a kernel."""
    os.truncate(entry / "kernel.cubin", 100)


def let_others_write(entry: Path) -> None:
    """Make the folder of a kernel untrusted."""
    entry.chmod(0o777)


def replace_by_a_file(entry: Path) -> None:
    """Replace the folder of a kernel by a file."""
    entry.rename(entry.parent / "aside")
    entry.touch()


def renew_schema(entry: Path) -> None:
    """Replace the manifest by one of another version of mlagen."""
    manifest = Manifest.from_json((entry / "manifest.json").read_bytes())
    object.__setattr__(manifest, "schema", 99)
    (entry / "manifest.json").write_bytes(manifest.to_json())


# Setup of an entry, requested toolchain, and expected problem.
STATES: dict[str, tuple[str, Callable[[Path], None], CacheKey, str | None]] = {
    "valid": (NEWEST, lambda _: None, make_key(), None),
    "valid, any of a major version": (OLD, lambda _: None, ANY, None),
    "another compiler": (OLD, lambda _: None, make_key(), None),
    "another key": (NEWEST, lambda _: None, make_key("combine"), None),
    "cut off": (NEWEST, cut_off, make_key(), "kernel.cubin: expected 1028 bytes, got 100"),
    "others may write": (NEWEST, let_others_write, make_key(), "mode 0777, which lets others"),
    "a file": (NEWEST, replace_by_a_file, make_key(), "expected a folder, got another kind"),
    "another schema": (NEWEST, renew_schema, make_key(), "expected schema 1, got 99"),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("place", ["own", "layer"])
def test_its_result_equals_that_of_a_look_up(
    state: str, place: str, tmp_path: Path, caplog: Log
) -> None:
    """Nothing is moved, marked or logged, and the result equals that of a normal look-up."""
    toolchain, change, key, problem = STATES[state]
    change(put(tmp_path / place, toolchain))
    before = snapshot(tmp_path)

    dry = store_over(tmp_path).look_up(key, is_dry=True)
    after, warnings = snapshot(tmp_path), warnings_in(caplog)
    called = store_over(tmp_path).look_up(key)

    assert after == before
    assert warnings == []
    assert dry == called
    assert (problem or "") in (dry.problem or "")
    assert (dry.problem is None) == (problem is None)


def test_the_problem_belongs_to_the_reason(tmp_path: Path) -> None:
    """With one damaged and one untrusted entry, the damage is the reason."""
    cut_off(put(tmp_path / "own", NEWEST))
    let_others_write(put(tmp_path / "layer", NEWEST))
    found = store_over(tmp_path).look_up(make_key(), is_dry=True)
    assert found.reason == "damaged"
    assert found.problem == "kernel.cubin: expected 1028 bytes, got 100"
    assert entry_folder(tmp_path / "own", make_key()).is_dir()
