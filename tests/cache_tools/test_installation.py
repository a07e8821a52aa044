"""Entries of this installation against those of another."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from cache_tools.tools.installation import matches_sources, matches_toolchain, required_toolchain
from mlagen.cache.default_store import kernel_store
from mlagen.codegen.sources import template_digests
from mlagen.prewarming import PrewarmReport
from mlagen.settings import current_settings

from .altered import folder_of


def test_entries_of_this_installation_match(cached: PrewarmReport) -> None:
    """Sources and compiler equal those of the keys."""
    stored = next(kernel_store().entries())

    assert len(cached.units) == 2
    assert matches_sources(stored, template_digests())
    assert matches_toolchain(stored, required_toolchain())


def test_other_sources_and_damage_do_not_match(cached: PrewarmReport, cache_dir: Path) -> None:
    """A damaged entry matches no sources."""
    (folder_of(cached.units[0], cache_dir) / "manifest.json").write_text("{")
    damaged, valid = sorted(kernel_store().entries(), key=lambda entry: entry.manifest is not None)

    assert not matches_sources(damaged, template_digests())
    assert not matches_sources(valid, {"0" * 64})


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [("nvrtc-12.8.1", False), (None, False), ("MAJOR", True)],
    ids=["another compiler", "none at all", "any of the same major version"],
)
def test_a_major_version_accepts_its_compilers(
    wanted: str | None, fits: bool, cached: PrewarmReport
) -> None:
    """nvrtc-MAJOR accepts any compiler of that version."""
    unit = cached.units[0]
    major = unit.toolchain.partition(".")[0]
    stored = next(kernel_store().entries())

    assert matches_toolchain(stored, major if wanted == "MAJOR" else wanted) is fits


def test_without_bindings_there_is_no_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an unknown CUDA version is no error."""

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("MLAGEN_TOOLCHAIN", "compatible")
    current_settings.cache_clear()
    monkeypatch.setattr(metadata, "version", missing)

    assert required_toolchain() is None
