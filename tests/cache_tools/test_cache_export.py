"""`mlagen cache export`: kernels as one file, and its report."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests.cache.builds import entry_folder, tree
from tests.cache.bundle_cases import FAMILIES, filled_store, key_for, members_of

from .conftest import Run


@pytest.fixture(autouse=True)
def filled(tmp_path: Path) -> None:
    """Cache two kernels."""
    filled_store(tmp_path)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return the path of a bundle that does not exist yet."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder / "kernels.tar.gz"


def test_a_bundle_is_written_and_its_digest_printed(run: Run, target: Path) -> None:
    """The report has the kernels, the path, the size and the digest."""
    result = run("cache", "export", str(target))

    summary, digest = result.stdout.splitlines()
    assert result.exit_code == 0
    assert summary.startswith("exported 2 kernels for sm_90a by nvrtc-13.5.37, ")
    assert f" to {target}, " in summary
    assert digest == f"sha256 {hashlib.sha256(target.read_bytes()).hexdigest()}"
    assert result.stderr == "packing 2 kernels\n"


def test_the_same_kernels_give_the_same_file(run: Run, target: Path) -> None:
    """Exports of equal entries are byte-identical."""
    run("cache", "export", str(target))
    before = target.read_bytes()

    run("cache", "export", str(target))

    assert target.read_bytes() == before


def test_json_lists_its_kernels(run: Run, target: Path) -> None:
    """The document has the digest, the sizes and every kernel; the text is on stderr."""
    result = run("cache", "export", str(target), "--json")

    document = json.loads(result.stdout)
    assert document["bundle"] == str(target)
    assert document["sha256"] == hashlib.sha256(target.read_bytes()).hexdigest()
    assert document["size_bytes"] == target.stat().st_size
    assert document["content_bytes"] == sum(row["size_bytes"] for row in document["entries"])
    assert document["archs"] == ["sm_90a"]
    assert {row["family"]: row["key"] for row in document["entries"]} == {
        family: key_for(family).digest for family in FAMILIES
    }
    assert result.stderr.splitlines()[1].startswith("exported 2 kernels")


@pytest.mark.parametrize(
    "choice",
    [["--family", "mla_sm80"], [key_for("mla_sm80").digest[:8]]],
    ids=["family", "key"],
)
def test_kernels_can_be_selected(choice: list[str], run: Run, target: Path) -> None:
    """Filters and keys select the exported kernels."""
    result = run("cache", "export", str(target), *choice)

    names = [member.info.name for member in members_of(target.read_bytes())[1:]]
    assert result.exit_code == 0
    assert {name.split("/")[1] for name in names} == {key_for("mla_sm80").digest}


def test_an_empty_selection_writes_nothing(run: Run, target: Path) -> None:
    """An empty selection is bad usage."""
    result = run("cache", "export", str(target), "--arch", "sm_80")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == ("mlagen: arch: expected a cached one (sm_90a), got 'sm_80'\n")
    assert not target.exists()


def test_a_damaged_kernel_aborts_the_export(run: Run, target: Path, tmp_path: Path) -> None:
    """The export fails with 1, names the entry, and writes nothing."""
    damaged = entry_folder(tmp_path, key_for("mla_sm80"))
    (damaged / "kernel.cu").write_bytes(b"")

    result = run("cache", "export", str(target))

    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith("mlagen: bundle: expected a valid entry, got ")
    assert result.stderr.endswith(f"{damaged}\n")
    assert tree(target.parent) == []


def test_a_wheel_goes_into_a_folder(run: Run, target: Path) -> None:
    """The name of the wheel comes from the name and the version."""
    result = run(
        "cache", "export", str(target.parent), "--wheel", "acme-kernels", "--wheel-version", "1.5"
    )

    wheel = target.parent / "acme_kernels-1.5-py3-none-any.whl"
    assert result.exit_code == 0
    assert wheel.is_file()
    assert f" to {wheel}, " in result.stdout


def test_the_folder_of_a_wheel_is_created(run: Run, target: Path) -> None:
    """A missing folder is created, one that cannot be is named."""
    folder = target.parent / "new" / "dist"

    made = run("cache", "export", str(folder), "--wheel", "acme", "--wheel-version", "1")
    failed = run("cache", "export", str(folder / "acme-1-py3-none-any.whl"), "--wheel", "acme")

    assert made.exit_code == 0
    assert (folder / "acme-1-py3-none-any.whl").is_file()
    assert failed.exit_code == 1
    assert "mlagen: wheel: expected a folder, got File exists: " in failed.stderr


def test_the_folder_of_a_bundle_has_to_exist(run: Run, target: Path) -> None:
    """The message names the rule, and nothing is created."""
    missing = target.parent / "new" / "kernels.tar.gz"

    result = run("cache", "export", str(missing))

    rule = "expected a file in a folder that exists"
    assert result.exit_code == 1
    assert result.stderr.endswith(f"mlagen: bundle: {rule}, got {missing}\n")
    assert not missing.parent.exists()


def test_a_wheel_of_mlagen_itself_is_rejected(run: Run, target: Path) -> None:
    """An installed wheel of that name would overwrite the package."""
    result = run("cache", "export", str(target.parent), "--wheel", "mlagen")

    assert result.exit_code == 2
    assert "wheel: expected a name of its own such as acme-kernels, got 'mlagen'" in result.stderr
    assert tree(target.parent) == []


def test_a_version_alone_is_bad_usage(run: Run, target: Path) -> None:
    """A bundle has no version."""
    result = run("cache", "export", str(target), "--wheel-version", "1.5")

    assert result.exit_code == 2
    assert not target.exists()
