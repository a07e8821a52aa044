"""`mlagen cache import`: kernels from a bundle, and its report."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.cache.builds import entry_folder, tree
from tests.cache.bundle_cases import FAMILIES, bundle_bytes, filled_store, key_for

from .conftest import Run, Start


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return a bundle of two kernels."""
    path = tmp_path / "kernels.tar.gz"
    path.write_bytes(bundle_bytes(filled_store(tmp_path / "there")))
    return path


def sha256(path: Path) -> str:
    """Return the digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_kernels_are_added_and_counted(run: Run, bundle: Path, cache_dir: Path) -> None:
    """A second import finds the kernels present."""
    first = run("cache", "import", str(bundle))
    second = run("cache", "import", str(bundle))

    summary, digest = first.stdout.splitlines()
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert summary.startswith("imported 2 kernels for sm_90a by nvrtc-13.5.37, ")
    assert summary.endswith(f": 2 added, into {cache_dir}")
    assert digest == f"sha256 {sha256(bundle)}"
    assert f": 2 kept, into {cache_dir}" in second.stdout
    assert first.stderr == f"verifying {bundle}\npublishing\n"


def test_json_has_the_outcome_of_each_kernel(run: Run, bundle: Path, cache_dir: Path) -> None:
    """The document has the digest, the counts and every kernel; the text is on stderr."""
    filled_store(cache_dir.parent, "mla_sm80")

    result = run("cache", "import", str(bundle), "--json")

    document = json.loads(result.stdout)
    assert document["cache_dir"] == str(cache_dir)
    assert (document["bundle"], document["sha256"]) == (str(bundle), sha256(bundle))
    assert document["dry_run"] is False
    assert document["totals"] == {"added": 1, "kept": 1, "replaced": 0}
    assert {row["key"]: row["outcome"] for row in document["entries"]} == {
        key_for("mla_sm80").digest: "kept",
        key_for("combine").digest: "added",
    }
    assert result.stderr.splitlines()[2].startswith("imported 2 kernels")


def test_a_dry_run_adds_nothing(run: Run, bundle: Path, cache_dir: Path) -> None:
    """A dry run verifies the bundle and reports the new kernels."""
    result = run("cache", "import", str(bundle), "--dry-run")

    assert result.exit_code == 0
    assert result.stdout.startswith("would import 2 kernels for sm_90a ")
    assert ": 2 added, into " in result.stdout
    assert not cache_dir.exists()


def test_the_pinned_bundle_is_imported(run: Run, bundle: Path) -> None:
    """--expect-sha256 accepts the digest that `export` printed."""
    result = run("cache", "import", str(bundle), "--expect-sha256", sha256(bundle))

    assert result.exit_code == 0


def test_a_bundle_with_another_digest_is_rejected(run: Run, bundle: Path, cache_dir: Path) -> None:
    """It fails with 1, and does not create the cache."""
    result = run("cache", "import", str(bundle), "--expect-sha256", "0" * 64)

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == (
        f"mlagen: bundle: expected sha256 {'0' * 64}, got {sha256(bundle)}: {bundle}"
    )
    assert not cache_dir.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--expect-sha256", "abc"], "expected 64 hex digits, got 'abc'"),
        (["--max-size", "much"], "max-size: expected a size such as 500M or 2GiB, got 'much'"),
    ],
    ids=["digest", "size"],
)
def test_an_invalid_value_is_bad_usage(
    options: list[str], message: str, run: Run, bundle: Path
) -> None:
    """An invalid option is reported before the bundle is read."""
    result = run("cache", "import", str(bundle), *options)

    assert result.exit_code == 2
    assert message in result.stderr


def test_more_than_the_largest_size_is_rejected(run: Run, bundle: Path, cache_dir: Path) -> None:
    """The limit holds for the unpacked size."""
    result = run("cache", "import", str(bundle), "--max-size", "1K")

    assert result.exit_code == 1
    assert "bundle.json: expected at most 1024 bytes in total, got " in result.stderr
    assert not cache_dir.exists()


def test_a_missing_file_fails_with_1(run: Run, tmp_path: Path) -> None:
    """A missing bundle is one line, as an invalid one."""
    missing = tmp_path / "missing.tar.gz"

    result = run("cache", "import", str(missing))

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"mlagen: bundle: expected a file, got No such file or directory: {missing}\n"
    )


def test_a_cache_that_cannot_be_written_fails_with_4(
    run: Run, bundle: Path, cache_dir: Path
) -> None:
    """A read-only cache is reported as such, not as a bad bundle."""
    cache_dir.write_text("a file")

    result = run("cache", "import", str(bundle))

    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.splitlines()[-1].startswith("mlagen: cache: expected a writable folder")


def test_a_serving_image_needs_neither_torch_nor_a_compiler(
    start: Start, bundle: Path, cache_dir: Path
) -> None:
    """An import only reads and writes files."""
    absent = ("torch", "cuda", "jinja2", "fsspec", "numpy")

    process = start("cache", "import", str(bundle), without=absent)
    out, err = process.communicate(timeout=20)

    assert process.returncode == 0, err
    assert out.startswith("imported 2 kernels")
    assert [len(tree(entry_folder(cache_dir.parent, key_for(name)))) for name in FAMILIES] == [4, 4]
