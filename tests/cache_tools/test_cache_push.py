"""`mlagen cache push`: a bundle of kernels at a URL."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import fsspec
import pytest

from tests.cache.bundle_cases import filled_store, key_for, members_of

from .conftest import Run


@pytest.fixture(autouse=True)
def filled(tmp_path: Path) -> None:
    """Cache two kernels."""
    filled_store(tmp_path)


def content_of(url: str) -> bytes:
    """Return the bytes at a URL."""
    with fsspec.open(url, "rb") as file:
        return bytes(file.read())


def test_a_pushed_bundle_equals_an_exported_one(run: Run, tmp_path: Path) -> None:
    """Bytes and printed digest are those of an export."""
    target = tmp_path / "kernels.tar.gz"
    urls = [f"memory://{tmp_path}/x.tar.gz", f"file://{tmp_path}/pushed.tar.gz"]

    run("cache", "export", str(target))
    results = [run("cache", "push", url) for url in urls]

    for url, result in zip(urls, results, strict=True):
        summary, digest = result.stdout.splitlines()
        assert result.exit_code == 0
        assert summary.startswith("pushed 2 kernels for sm_90a by nvrtc-13.5.37, ")
        assert f" to {url}, " in summary
        assert digest == f"sha256 {hashlib.sha256(target.read_bytes()).hexdigest()}"
        assert result.stderr == f"packing 2 kernels\nuploading to {url}\n"
        assert content_of(url) == target.read_bytes()


def test_kernels_can_be_selected(run: Run, tmp_path: Path) -> None:
    """The options of export select the kernels."""
    url = f"memory://{tmp_path}/kernels.tar.gz"

    result = run("cache", "push", url, "--family", "mla_sm80", "--json")

    document = json.loads(result.stdout)
    names = [member.info.name for member in members_of(content_of(url))[1:]]
    assert document["bundle"] == url
    assert [row["key"] for row in document["entries"]] == [key_for("mla_sm80").digest]
    assert {name.split("/")[1] for name in names} == {key_for("mla_sm80").digest}


def test_a_url_that_cannot_be_written_is_bad_usage(run: Run) -> None:
    """Web servers are read-only."""
    result = run("cache", "push", "https://me:secret@127.0.0.1:9/kernels.tar.gz?sign=secret")

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1] == (
        "mlagen: url: expected one that can be written, got https://127.0.0.1:9/kernels.tar.gz"
    )
    assert "secret" not in result.stderr


def test_a_missing_package_fails_with_3(run: Run) -> None:
    """One line names the package to install."""
    fsspec.register_implementation("mlagentest2", "mlagen_absent.Files", errtxt="Install it")

    result = run("cache", "push", "mlagentest2://bucket/kernels.tar.gz")

    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.splitlines()[-1].endswith("; run: pip install mlagen_absent")


def test_a_failed_upload_fails_with_1(run: Run, tmp_path: Path) -> None:
    """A failure is one line with the URL."""
    url = f"file://{tmp_path}/nowhere/kernels.tar.gz"

    result = run("cache", "push", url)

    assert (result.exit_code, result.stdout) == (1, "")
    assert "expected a file in a folder that exists" in result.stderr.splitlines()[-1]
