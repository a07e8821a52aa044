"""`mlagen prewarm --bundle`: the requested kernels as one file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mlagen
from cache_tools.options.exit_codes import USAGE
from mlagen import engine
from mlagen.cache.bundle_reading import open_bundle, verify_bundle
from mlagen.prewarming import PrewarmReport
from mlagen.settings import current_settings
from tests.kernels import COMBINE

from .conftest import Run


def keys_in(bundle: Path) -> list[str]:
    """Return the keys of a valid bundle."""
    with open_bundle(bundle) as file:
        return [entry.key for entry in verify_bundle(file, "it").entries]


def test_it_holds_the_requested_kernels(run: Run, cached: PrewarmReport, tmp_path: Path) -> None:
    """The bundle has no other cached kernel."""
    bundle, (unit, _) = tmp_path / "kernels.tar.gz", cached.units

    result = run("prewarm", "--kernel", str(unit.spec), "--bundle", str(bundle))

    _, line, digest = result.stdout.splitlines()
    assert result.exit_code == 0
    assert keys_in(bundle) == [unit.key]
    assert line.startswith(f"bundled to {bundle}, ")
    assert digest.startswith("sha256 ")


def test_json_describes_it(run: Run, cached: PrewarmReport, tmp_path: Path) -> None:
    """The document of prewarm has the bundle's fields."""
    bundle, (unit, _) = tmp_path / "kernels.tar.gz", cached.units

    result = run("prewarm", "--kernel", str(unit.spec), "--bundle", str(bundle), "--json")

    described = json.loads(result.stdout)["bundle"]
    assert described["bundle"] == str(bundle)
    assert described["size_bytes"] == bundle.stat().st_size
    assert described["archs"] == ["sm_80"]


def test_kernels_of_a_layer_are_in_it(
    run: Run,
    cached: PrewarmReport,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bundle is complete, whichever layer has a kernel."""
    monkeypatch.setenv("MLAGEN_CACHE_RO", str(cache_dir))
    monkeypatch.setenv("MLAGEN_CACHE_DIR", str(tmp_path / "own"))
    current_settings.cache_clear()
    texts = [option for unit in cached.units for option in ("--kernel", str(unit.spec))]

    result = run("prewarm", *texts, "--bundle", str(tmp_path / "kernels.tar.gz"))

    assert result.exit_code == 0
    assert keys_in(tmp_path / "kernels.tar.gz") == sorted(unit.key for unit in cached.units)


def test_a_failure_writes_none(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An incomplete bundle is not written."""

    def fail(*_: object) -> None:
        raise mlagen.CompileError("NVRTC: no", log="", source="")

    monkeypatch.setattr(engine, "build_spec", fail)

    result = run("prewarm", "--kernel", str(COMBINE), "--bundle", str(tmp_path / "x"), "--json")

    assert result.exit_code == 1
    assert json.loads(result.stdout)["bundle"] is None
    assert not (tmp_path / "x").exists()


def test_a_path_that_cannot_be_written_fails_with_1(
    run: Run, cached: PrewarmReport, tmp_path: Path
) -> None:
    """The compiled kernels stay in the cache."""
    bundle, text = tmp_path / "kernels.tar.gz", str(cached.units[0].spec)
    bundle.mkdir()

    result = run("prewarm", "--kernel", text, "--bundle", str(bundle))

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == (
        f"mlagen: bundle: expected a file, got another kind: {bundle}"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kernel", str(COMBINE), "--dry-run"), "bundle: expected none with --dry-run"),
        (("--from-log", "empty.jsonl"), "bundle: expected kernels, got none for x"),
    ],
    ids=["a dry run", "no kernels"],
)
def test_an_empty_selection_makes_no_bundle(
    arguments: tuple[str, ...],
    message: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An empty bundle is bad usage, and no file is written."""
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()

    result = run("prewarm", *arguments, "--bundle", "x")

    assert result.exit_code == 2
    assert message in result.stderr
    assert not Path("x").exists()


def test_a_bundle_without_a_folder_is_rejected_before_anything_is_compiled(
    run: Run, tmp_path: Path, cache_dir: Path
) -> None:
    """A model compiles for minutes, so the path is checked first."""
    nowhere = tmp_path / "no such folder"

    result = run("prewarm", "--kernel", str(COMBINE), "--bundle", str(nowhere / "x"))

    assert result.exit_code == USAGE
    assert f"bundle: expected a writable folder, got {nowhere}" in result.stderr
    assert not cache_dir.exists()
