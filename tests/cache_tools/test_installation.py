"""What this installation looks for, told from entries of another."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from cache_tools.installation import is_of_sources, is_of_toolchain, wanted_or_none
from mlagen.cache.default_store import kernel_store
from mlagen.codegen.sources import template_digests
from mlagen.prewarming import PrewarmReport
from mlagen.settings import current_settings

from .altered import folder_of


def test_what_was_made_here_is_wanted_here(cached: PrewarmReport) -> None:
    """Sources and compiler are those of the keys."""
    stored = next(kernel_store().entries())

    assert len(cached.units) == 2
    assert is_of_sources(stored, template_digests())
    assert is_of_toolchain(stored, wanted_or_none())


def test_other_sources_and_damage_are_not(cached: PrewarmReport, cache_dir: Path) -> None:
    """An entry that cannot be read is of no sources."""
    (folder_of(cached.units[0], cache_dir) / "manifest.json").write_text("{")
    damaged, sound = sorted(kernel_store().entries(), key=lambda entry: entry.manifest is not None)

    assert not is_of_sources(damaged, template_digests())
    assert not is_of_sources(sound, {"0" * 64})


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [("nvrtc-12.8.1", False), (None, False), ("MAJOR", True)],
    ids=["another compiler", "none at all", "any of the same major version"],
)
def test_a_compiler_will_do_or_not(wanted: str | None, fits: bool, cached: PrewarmReport) -> None:
    """Where any compiler of a major version is wanted, one of them will do."""
    unit = cached.units[0]
    major = unit.toolchain.partition(".")[0]
    stored = next(kernel_store().entries())

    assert is_of_toolchain(stored, major if wanted == "MAJOR" else wanted) is fits


def test_without_bindings_nothing_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that could not even say which CUDA it has is no error."""

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("MLAGEN_TOOLCHAIN", "compatible")
    current_settings.cache_clear()
    monkeypatch.setattr(metadata, "version", missing)

    assert wanted_or_none() is None
