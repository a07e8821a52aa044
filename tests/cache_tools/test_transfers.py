"""`mlagen cache export`, `import`, `push` and `pull`, and the transfers that they make."""

from __future__ import annotations

import hashlib
import io
import re
import socket
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import pytest

from cache_tools.tools.remote import RemoteError, download, redacted, upload
from mlagen.errors import ArgumentError, MlagenError, UnsupportedError
from tests.cache.builds import entry_path, tree
from tests.cache.bundle_cases import FAMILIES, bundle_bytes, filled_store, key_for, members_of
from tests.fixture_types import Patch

from .conftest import Serve, raising, run, start, without

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


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("export", ""),
        ("export", "--wheel acme-kernels --wheel-version 1.5"),
        *product(("export", "push"), ("--family mla_sm80", MLA[:8])),
    ],
)
def test_a_bundle_is_described(command: str, options: str, filled: Path) -> None:
    """The document has digest, sizes and kernels; equal entries have equal bundles and wheels."""
    is_wheel, url = "--wheel" in options, "file://" if command == "push" else ""
    given = filled / ("new/dist" if is_wheel else "kernels.tar.gz")
    target = given / "acme_kernels-1.5-py3-none-any.whl" if is_wheel else given

    found = run.json("cache", command, f"{url}{given}", *options.split())

    content, keys = target.read_bytes(), {row["family"]: row["key"] for row in found["entries"]}
    assert (found["bundle"], found["sha256"]) == (f"{url}{target}", sha256(target))
    assert (found["size_bytes"], found["archs"]) == (len(content), ["sm_90a"])
    assert found["content_bytes"] == sum(row["size_bytes"] for row in found["entries"])
    assert keys == (KEYS if is_wheel or not options else {"mla_sm80": MLA})
    if not is_wheel:
        names = [Path(member.info.name).name[:64] for member in members_of(content)]
        assert {*names} == {*keys.values()}
    run("cache export", str(given), *options.split())
    assert target.read_bytes() == content


def test_a_damaged_kernel_aborts_the_export(filled: Path, tmp_path: Path) -> None:
    """The export fails with 1, names the entry, and writes nothing."""
    damaged = entry_path(tmp_path, key_for("mla_sm80"))
    damaged.write_bytes(b"")
    result = run("cache export", str(filled / "kernels.tar.gz"))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1].startswith("mlagen: bundle: expected a valid entry, got ")
    assert result.stderr.endswith(f"{damaged}\n")
    assert tree(filled) == []


def test_kernels_are_added_and_kept(bundle: Path, cache_dir: Path) -> None:
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
    outcomes = {row["key"]: row["outcome"] for row in found["entries"]}
    assert outcomes == {MLA: "kept", KEYS["combine"]: "added"}
    assert again["totals"] == {"added": 0, "kept": 2, "replaced": 0}


def test_a_serving_image_needs_neither_torch_nor_a_compiler(bundle: Path, cache_dir: Path) -> None:
    """An import only reads and writes files."""
    absent = without("torch", "cuda", "jinja2", "fsspec", "numpy")
    process = start("cache", "import", str(bundle), before=absent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.startswith("imported 2 kernels")
    assert all(entry_path(cache_dir.parent, key_for(name)).is_file() for name in FAMILIES)


@pytest.mark.parametrize("protocol", ["http", "file", "memory"])
def test_a_bundle_is_pulled(
    protocol: str, bundle: Path, serve: Serve, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A server or file system has it; nothing temporary is left, also of one that is too large."""
    url, cache_dir, temporary = f"{protocol}://{bundle}", tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    if protocol == "memory":
        with fsspec.open(url, "wb") as file:
            file.write(bundle.read_bytes())

    with serve(bundle.parent) as server:
        url = f"{server}/kernels.tar.gz" if protocol == "http" else url
        dry = run.json("cache pull", url, "--dry-run")
        is_created = cache_dir.exists()
        found = run.json("cache pull", url, "--expect-sha256", sha256(bundle))
        large = run("cache pull --max-size 100", url)

    assert (dry["dry_run"], is_created) == (True, False)
    assert (found["bundle"], found["sha256"]) == (url, sha256(bundle))
    assert found["totals"] == dry["totals"] == {"added": 2, "kept": 0, "replaced": 0}
    assert tree(cache_dir / "v2") == tree(tmp_path / "there/cache/v2")
    assert (large.exit_code, tree(temporary)) == (1, [])


CONTENT = bytes(range(256)) * 10_000  # 2.5 MB, three chunks


@pytest.fixture(params=["file://", "", "memory://"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a URL without a file."""
    return f"{request.param}{tmp_path}/kernels.tar.gz"


def quiet(_done: int, _total: int) -> None:
    """Ignore progress."""


def fetched(url: str) -> bytes:
    """Return the bytes at a URL."""
    file = io.BytesIO()
    download(url, file, 1 << 30, quiet)
    return file.getvalue()


def require_error(url: str, message: str, max_bytes: int = 1 << 30) -> None:
    """Require that a download fails with one line, after at most the first chunks."""
    file = io.BytesIO()
    with pytest.raises(RemoteError, match=rf"^url: .*{message}") as caught:
        download(url, file, max_bytes, quiet)
    assert "\n" not in str(caught.value)
    assert len(file.getvalue()) <= max_bytes


def test_an_upload_is_downloaded_whole_or_not_at_all(url: str) -> None:
    """The name appears after the last byte, and an old file is replaced; errors are one line."""
    seen: list[tuple[int, int]] = []
    fs, path = fsspec.core.url_to_fs(url)
    file, received = io.BytesIO(CONTENT), io.BytesIO()
    file.seek(100)

    def stop(done: int, total: int) -> None:
        assert (done, total, fs.exists(path)) == (1 << 20, len(CONTENT), False)
        raise RuntimeError("the wire was cut")

    with pytest.raises(RemoteError, match=r"^url: the wire was cut: "):
        upload(io.BytesIO(CONTENT), len(CONTENT), url, stop)
    assert not fs.exists(path)
    require_error(url, ".+")
    upload(io.BytesIO(b"old"), 3, url, quiet)
    upload(file, len(CONTENT), url, lambda *done: seen.append(done))
    download(url, received, 1 << 30, lambda *done: seen.append(done))

    assert received.getvalue() == CONTENT
    assert seen == [(done, len(CONTENT)) for done in (1 << 20, 2 << 20, len(CONTENT))] * 2
    require_error(url, "expected at most 1000 bytes, got more", 1000)


def test_a_local_upload_is_written_beside_its_target(tmp_path: Path, monkeypatch: Patch) -> None:
    """It is renamed into place, without a copy elsewhere; a caching file system is remote."""
    names, url = [], f"memory://{tmp_path}/kernels.tar.gz"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    upload(io.BytesIO(CONTENT), len(CONTENT), f"simplecache::{url}", quiet)
    assert fetched(url) == CONTENT
    assert not (tmp_path / "kernels.tar.gz").exists()
    folder = tmp_path / "local"
    folder.mkdir()
    local = f"file://{folder}/kernels.tar.gz"
    upload(io.BytesIO(CONTENT), len(CONTENT), local, lambda *_: names.append([*folder.iterdir()]))
    assert [len(each) for each in names] == [1, 1, 1]
    assert [path.name for path in folder.iterdir()] == ["kernels.tar.gz"]


def test_http_is_read_without_a_package(tmp_path: Path, serve: Serve) -> None:
    """Python's own client reads http up to the limit; an error or a cut connection is one line."""
    (tmp_path / "kernels.tar.gz").write_bytes(CONTENT)
    file, seen = io.BytesIO(), list[tuple[int, int]]()

    with serve(tmp_path) as server:
        download(f"{server}/kernels.tar.gz", file, 1 << 30, lambda *done: seen.append(done))
        require_error(f"{server}/missing.tar.gz", "HTTP Error 404: File not found: http://127")
        require_error(f"{server}/kernels.tar.gz", "expected at most 2000000 ", 2_000_000)
    require_error(f"{server}/k", f"Connection refused.*: {server}/k$")
    with serve(tmp_path, cuts_short=True) as server:
        cut = f"expected {len(CONTENT) + 100} bytes, got {len(CONTENT)}"
        require_error(f"{server}/kernels.tar.gz", cut)

    assert file.getvalue() == CONTENT
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_a_protocol_that_cannot_be_used_is_named(monkeypatch: Patch, tmp_path: Path) -> None:
    """Http is not written, and an unknown one is bad usage; without fsspec only http is read."""
    for scheme in ("http", "https", "HTTP"):
        with pytest.raises(ArgumentError, match=r"^url: expected one that can be written, got "):
            upload(io.BytesIO(CONTENT), len(CONTENT), f"{scheme}://127.0.0.1:9/x", quiet)
    fsspec.register_implementation("mlagentest", "mlagen_absent.Files", errtxt="Install it")
    rule = "^url: expected a package for mlagentest://, got none; run: pip install mlagen_absent$"

    with pytest.raises(ArgumentError, match="expected a protocol that fsspec knows, got 's4'"):
        fetched("s4://bucket/kernels.tar.gz")
    for scheme in ("oci", "oras", "docker"):
        to_registry = f"such as s3, gs, hf or sftp, got {scheme}://; for a registry, run: mlagen "
        with pytest.raises(ArgumentError, match=to_registry):
            fetched(f"{scheme}://registry/kernels:v1")
        with pytest.raises(ArgumentError, match=to_registry):
            upload(io.BytesIO(CONTENT), len(CONTENT), f"{scheme}://registry/kernels:v1", quiet)
    with pytest.raises(UnsupportedError, match=rule):
        fetched("mlagentest://bucket/kernels.tar.gz")
    for name in ("fsspec", "fsspec.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r"; run: pip install fsspec$"):
        fetched(f"file://{tmp_path}/kernels.tar.gz")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/kernels.tar.gz", "s3://bucket/kernels.tar.gz"),
        ("sftp://me:secret@host/kernels.tar.gz", "sftp://host/kernels.tar.gz"),
        ("sftp://secret@host/kernels.tar.gz", "sftp://host/kernels.tar.gz"),
        ("sftp://me:a/secret@host/kernels.tar.gz", "sftp://..."),
        ("sftp://me:a@secret@host/kernels.tar.gz", "sftp://..."),
        ("sftp://me:a?b#secret@host/kernels.tar.gz", "sftp://..."),
        ("zip://a/b::sftp://me:secret@host/k.zip", "zip://a/b::sftp://host/k.zip"),
        ("https://host/kernels.tar.gz?X-Amz-Signature=secret", "https://host/kernels.tar.gz"),
        ("https://host:80/kernels.tar.gz?Signature=a@secret", "https://..."),
        ("https://host/kernels.tar.gz#token=secret", "https://host/kernels.tar.gz"),
        ("s3://bucket/kernels@v1.tar.gz", "s3://bucket/kernels@v1.tar.gz"),
        ("hf://datasets/a/b@main/k?v=1@secret", "hf://datasets/a/b@main/k"),
        ("s3://key:secret@bucket/kernels.tar.gz", "s3://bucket/kernels.tar.gz"),
        ("s3://key:se/secret@bucket/kernels.tar.gz", "s3://..."),
        ("ftp://us/er:secret@host/k", "ftp://..."),
        ("ftp://secret/token@host/k", "ftp://..."),
        ("ftp://secret?token@host/k", "ftp://..."),
        ("ftp://me:se::secret@host/k", "ftp://host/k"),
        ("HTTPS://me:secret@host/k", "HTTPS://host/k"),
        ("https:/me:secret@host/k", "https:/host/k"),
        ("ftp:me:secret@host/k", "host/k"),
        ("me:secret@host:/k", "host:/k"),
        ("//me:secret@host/k", "//host/k"),
        ("sftp://me:secret/k", "sftp://..."),
        ("https://[::1]:secret/k", "https://..."),
        ("https://[::1]:80/k", "https://[::1]:80/k"),
        ("https://host:80/k?t=secret", "https://host:80/k"),
        ("https://host\\@secret/k", "https://..."),
        ("https://host/k&sig=secret", "https://host/k"),
        ("https://host/k;sig=secret", "https://host/k"),
        ("https://host/k%3fsig=secret", "https://host/k"),
        ("s3://bucket/a&b;c/k.tar.gz", "s3://bucket/a&b;c/k.tar.gz"),
    ],
)
def test_secrets_are_not_shown(url: str, expected: str, monkeypatch: Patch) -> None:
    """Neither printed URLs nor a file system's messages have a password or a signed query."""

    def fail(given: str) -> Any:
        raise RuntimeError(f"cannot reach\n{given}")

    monkeypatch.setattr("cache_tools.tools.remote._resolve", fail)
    writable = re.sub("https:", "sftp:", url, flags=re.IGNORECASE)
    shown = re.sub("https:", "sftp:", expected, flags=re.IGNORECASE)

    assert redacted(url) == expected
    assert "secret" not in expected
    for transfer in (lambda: upload(io.BytesIO(), 0, writable, quiet), lambda: fetched(writable)):
        with pytest.raises(MlagenError) as caught:
            transfer()
        assert str(caught.value) == f"url: cannot reach {shown}: {shown}"


@pytest.mark.parametrize(
    ("url", "quoted", "shown"),
    [
        ("sftp://me:secret/x@host/k", "no port 'secret'", "no port '...'"),
        ("sftp://me:secret@more@host/k", "no port 'secret@more@host'", "no port '...@...@host'"),
        ("sftp://me:%73ecret@host/k", "no port 'secret'", "no port '...'"),
        ("sftp://secret@host/k", "no user secret, some other", "no user ..., some other"),
        ("https://host/k?s=secret 1", "no blanks in '/k?s=secret 1'", "no blanks in '/k?... ...'"),
        ("https://host/k#secret", "no host 'host#secret'", "no host 'host#...'"),
        ("ftp://us/er:secret@host/k", "no host 'us', no path '/er:SECRET@host'", "no host '"),
        ("sftp://me:sec%2Fret@host/k", "no user me%3Asec%2Fret", "no user ...%3A..."),
    ],
)
def test_a_secret_that_a_message_quotes_is_hidden(
    url: str, quoted: str, shown: str, monkeypatch: Patch
) -> None:
    """A parser splits a URL, and its message has only a part of it."""
    monkeypatch.setattr("cache_tools.tools.remote._resolve", raising(ValueError(quoted)))
    with pytest.raises(RemoteError) as caught:
        fetched(url.replace("https:", "memory:"))
    assert str(caught.value).startswith(f"url: {shown}")
    assert re.search("secret|ret", str(caught.value), re.IGNORECASE) is None


@pytest.mark.parametrize("header", ["Location", "URI"])
@pytest.mark.parametrize(
    "location",
    [
        "gopher://x?sig=secret",
        "ftp://me:secret@127.0.0.1/k",
        "file:///secret",
        "http://127.0.0.1:secret/",
        "http://me:secret@127.0.0.1/",
        "https://me:se/secret@127.0.0.1:9/",
        "http://secret host/k",
        "http://secret]/k",
        "http://secret\u2100/k",
        "http://[secret/k",
        "//127.0.0.1:secret/k",
        f"http://{'secret' * 20}/k",
        "http://.secret./k",
        "http://127.0.0.1:9/k?sig=secret",
        "http://127.0.0.1:99999/secret",
        "http:secret",
        "/again?sig=secret",
        "secret",
        "http://127.0.0.1:9/\x01secret",
    ],
)
def test_the_target_of_a_redirect_is_not_shown(
    location: str, header: str, tmp_path: Path, serve: Serve, monkeypatch: Patch
) -> None:
    """A signed URL may redirect to another one; the message has the first one only."""
    look_up = socket.getaddrinfo

    def look_up_here(host: str, *rest: Any, **options: Any) -> Any:
        if host != "127.0.0.1":  # a name server may take long
            raise socket.gaierror(socket.EAI_NONAME, f"no {host}")
        return look_up(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up_here)
    with serve(tmp_path, location=location, header=header) as server:
        result = run("cache pull", f"{server}/k?sig=first")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 2
    assert result.stderr.endswith(f": {server}/k\n")
    assert re.search("secret|first", result.stderr) is None


def test_a_redirect_is_followed(tmp_path: Path, serve: Serve) -> None:
    """So is one to a relative URL; a missing file is that of the first one."""
    with serve(tmp_path, location="/there") as server:
        require_error(f"{server}/k", f"HTTP Error 404: File not found: {server}/k$")
        (tmp_path / "there").write_bytes(b"content")
        assert fetched(f"{server}/k") == b"content"


@pytest.mark.parametrize("command", ["cache import", "cache export", "prewarm --bundle"])
def test_a_url_in_the_place_of_a_file_is_not_shown(command: str) -> None:
    """The message says which commands take a URL."""
    result = run(command, "https://me:secret@host/k?sig=secret")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "expected a path, got a URL, which cache push and pull take" in result.stderr
    assert "secret" not in result.stderr


@pytest.mark.parametrize("url", ["file://me:secret@none/k", "me:secret@x://k", "a:secret@b/k"])
def test_a_local_path_is_redacted_too(url: str) -> None:
    """A failure of a local file has its path without what may be a password."""
    for command in ("pull", "push"):
        result = run(f"cache {command}", url)
        assert result.exit_code in {1, 2}
        assert "secret" not in result.stdout + result.stderr
