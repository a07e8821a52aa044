"""`mlagen cache export`, `import`, `push` and `pull`: kernels as one file, here or at a URL."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import fsspec
import pytest

from tests.cache.builds import entry_folder, tree
from tests.cache.bundle_cases import FAMILIES, bundle_bytes, filled_store, key_for, members_of
from tests.fixture_types import Patch

from .conftest import Run, Serve, Setting, Start

KEYS = {family: key_for(family).digest for family in FAMILIES}
MLA = KEYS["mla_sm80"]


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return a bundle of two kernels, alone in a folder."""
    path = tmp_path / "served" / "kernels.tar.gz"
    path.parent.mkdir()
    path.write_bytes(bundle_bytes(filled_store(tmp_path / "there")))
    return path


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Cache two kernels, and return an empty folder for bundles."""
    filled_store(tmp_path)
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("options", ["", "--wheel acme-kernels --wheel-version 1.5"])
def test_a_bundle_is_described(options: str, run: Run, filled: Path) -> None:
    """The document has digest, sizes and kernels; equal entries have equal bundles.

    A wheel goes into a folder, which is made, and has name and version in its name.
    """
    given = filled / ("new/dist" if options else "kernels.tar.gz")
    target = given / "acme_kernels-1.5-py3-none-any.whl" if options else given

    found = run.json("cache export", str(given), *options.split())

    content = target.read_bytes()
    assert (found["bundle"], found["sha256"]) == (str(target), sha256(target))
    assert (found["size_bytes"], found["archs"]) == (len(content), ["sm_90a"])
    assert found["content_bytes"] == sum(row["size_bytes"] for row in found["entries"])
    assert {row["family"]: row["key"] for row in found["entries"]} == KEYS
    run.json("cache export", str(given), *options.split())
    assert target.read_bytes() == content


@pytest.mark.parametrize("choice", [["--family", "mla_sm80"], [MLA[:8]]], ids=["family", "key"])
@pytest.mark.parametrize("command", ["export", "push"])
def test_kernels_can_be_selected(command: str, choice: list[str], run: Run, filled: Path) -> None:
    """Filters and keys select the bundled kernels."""
    target = filled / "kernels.tar.gz"
    found = run.json("cache", command, f"{'file://' * (command == 'push')}{target}", *choice)
    names = [member.info.name for member in members_of(target.read_bytes())[1:]]
    assert {row["key"] for row in found["entries"]} == {MLA}
    assert {name.split("/")[1] for name in names} == {MLA}


def test_a_damaged_kernel_aborts_the_export(run: Run, filled: Path, tmp_path: Path) -> None:
    """The export fails with 1, names the entry, and writes nothing."""
    damaged = entry_folder(tmp_path, key_for("mla_sm80"))
    (damaged / "kernel.cu").write_bytes(b"")
    result = run("cache export", str(filled / "kernels.tar.gz"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith("mlagen: bundle: expected a valid entry, got ")
    assert result.stderr.endswith(f"{damaged}\n")
    assert tree(filled) == []


def test_kernels_are_added_and_kept(run: Run, bundle: Path, cache_dir: Path) -> None:
    """A dry run adds nothing, and kernels that are present are kept; the digest may be pinned."""
    command = ("cache", "import", str(bundle), "--expect-sha256", sha256(bundle))

    dry = run.json(*command, "--dry-run")
    is_created = cache_dir.exists()
    filled_store(cache_dir.parent, "mla_sm80")
    found, again = run.json(*command), run.json(*command)

    assert (dry["dry_run"], is_created) == (True, False)
    assert dry["totals"] == {"added": 2, "kept": 0, "replaced": 0}
    assert (found["cache_dir"], found["bundle"]) == (str(cache_dir), str(bundle))
    assert (found["sha256"], found["dry_run"]) == (sha256(bundle), False)
    assert {row["key"]: row["outcome"] for row in found["entries"]} == {
        MLA: "kept",
        KEYS["combine"]: "added",
    }
    assert again["totals"] == {"added": 0, "kept": 2, "replaced": 0}


def test_a_serving_image_needs_neither_torch_nor_a_compiler(
    start: Start, bundle: Path, cache_dir: Path
) -> None:
    """An import only reads and writes files."""
    absent = ("torch", "cuda", "jinja2", "fsspec", "numpy")
    process = start("cache", "import", str(bundle), without=absent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.startswith("imported 2 kernels")
    assert [len(tree(entry_folder(cache_dir.parent, key_for(name)))) for name in FAMILIES] == [4, 4]


@pytest.mark.parametrize("protocol", ["http", "file", "memory"])
def test_a_bundle_is_pulled(
    protocol: str, run: Run, bundle: Path, cache_dir: Path, serve: Serve
) -> None:
    """It is downloaded from a web server or any file system of fsspec, verified and published."""
    url = f"{protocol}://{bundle}"
    if protocol == "memory":
        with fsspec.open(url, "wb") as file:
            file.write(bundle.read_bytes())

    with serve(bundle.parent) as server:
        url = f"{server}/kernels.tar.gz" if protocol == "http" else url
        dry = run.json("cache pull", url, "--dry-run")
        is_created = cache_dir.exists()
        found = run.json("cache pull", url)

    assert (dry["dry_run"], is_created) == (True, False)
    assert (found["bundle"], found["sha256"]) == (url, sha256(bundle))
    assert found["totals"] == dry["totals"] == {"added": 2, "kept": 0, "replaced": 0}
    assert {path.parent.name for path in cache_dir.glob("v1/e/*/*/*")} == {*KEYS.values()}


def test_a_pushed_bundle_is_an_exported_one_and_is_pulled(
    run: Run, filled: Path, tmp_path: Path, setting: Setting
) -> None:
    """A bundle moves from one cache to another by a URL, pinned by its digest."""
    target, url = filled / "kernels.tar.gz", f"memory://{tmp_path}/kernels.tar.gz"
    run("cache export", str(target))
    pushed = run.json("cache push", url)
    setting("MLAGEN_CACHE_DIR", tmp_path / "other")
    run.json("cache pull", url, "--expect-sha256", pushed["sha256"])
    assert (pushed["bundle"], pushed["sha256"]) == (url, sha256(target))
    assert tree(tmp_path / "other/v1/e") == tree(tmp_path / "cache/v1/e")


def test_nothing_is_left_in_the_temporary_folder(
    run: Run, bundle: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """The temporary folder is empty after success and after failure."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    command = ("cache", "pull", f"file://{bundle}")
    codes = [run(*command).exit_code, run(*command, "--max-size", "100").exit_code]
    assert codes == [0, 1]
    assert tree(folder) == []
