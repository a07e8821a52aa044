"""Environment variables: their effect, and invalid values."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from mlagen.errors import ArgumentError
from mlagen.settings import (
    DEFAULT_LOCK_TIMEOUT_S,
    current_settings,
    read_settings,
    unread_variables,
)

ROOT = Path(__file__).resolve().parents[1]

TEMPORARY = Path(tempfile.gettempdir()) / f"mlagen-{os.getuid()}"

HOME, CACHE = {"HOME": "/c"}, "MLAGEN_CACHE_DIR"
FLAGS = {
    "MLAGEN_BATCH_INVARIANT": "batch_invariant",
    "MLAGEN_CHECK": "checks_contents",
    "MLAGEN_TRUST_SHARED": "trusts_shared",
    "MLAGEN_HF": "reads_hub_cache",
    "MLAGEN_DUMP_TENSORS": "dumps_tensors",
}
# Variables of words: the field, its default, and the other words.
WORDS = {
    "MLAGEN_MLA_KERNEL": ("mla_kernel", "auto", ("sm80", "sm90")),
    "MLAGEN_GQA_KERNEL": ("gqa_kernel", "auto", ("sm80", "sm90")),
    "MLAGEN_MLA_P_DTYPE": ("mla_p_dtype", "auto", ("fp16",)),
    "MLAGEN_TOOLCHAIN": ("toolchain", "auto", ("exact", "compatible", "nvrtc-13.0.88")),
    "MLAGEN_JIT": ("jit", "on", ("freeze", "warn", "error", "off")),
}
SIZES = {"": 1 << 30, "0": None, "4096": 4096, "500M": 500 << 20, "2GiB": 2 << 30, "1.5 kb": 1536}

# Environment, field of the settings and its value; {cwd} is the current folder, /c is the home.
VALID: list[tuple[dict[str, str], str, object]] = [
    ({CACHE: "/a/kernels", "XDG_CACHE_HOME": "/b", **HOME}, "cache_dir", Path("/a/kernels")),
    ({"XDG_CACHE_HOME": "/b", **HOME}, "cache_dir", Path("/b/mlagen")),
    ({"XDG_CACHE_HOME": "b", **HOME}, "cache_dir", Path("/c/.cache/mlagen")),
    ({CACHE: "", "XDG_CACHE_HOME": "", **HOME}, "cache_dir", Path("/c/.cache/mlagen")),
    ({}, "cache_dir", TEMPORARY),
    ({CACHE: "kernels"}, "cache_dir", Path("{cwd}/kernels")),
    ({"MLAGEN_LOCK_DIR": "~/locks"}, "lock_dir", Path("/c/locks")),
    ({"XDG_RUNTIME_DIR": "{cwd}"}, "lock_dir", Path("{cwd}/mlagen")),
    ({"MLAGEN_CACHE_RO": "/a::~/b:k"}, "cache_layers", (Path("/a"), Path("/c/b"), Path("{cwd}/k"))),
    ({}, "cache_layers", ()),
    ({"MLAGEN_LOCK_TIMEOUT": ""}, "lock_timeout_s", DEFAULT_LOCK_TIMEOUT_S),
    ({"MLAGEN_LOCK_TIMEOUT": "0"}, "lock_timeout_s", 0.0),
    ({"MLAGEN_LOCK_TIMEOUT": "2.5"}, "lock_timeout_s", 2.5),
    *(
        ({name: text}, field, text == "1")
        for name, field in FLAGS.items()
        for text in ("", "0", "1")
    ),
    *(
        ({name: text}, field, text or default)
        for name, (field, default, others) in WORDS.items()
        for text in ("", default, *others)
    ),
    ({"MLAGEN_GQA_KERNEL": "sm80"}, "mla_kernel", "auto"),
    *(({"MLAGEN_LOG": text}, "log", text) for text in ("off", "warn", "info", "debug", "api")),
    *(({"MLAGEN_LOG": ""} if name else {}, "log", None) for name in (0, 1)),
    ({"MLAGEN_DUMP": "dumps"}, "dump", Path("{cwd}/dumps")),
    ({"MLAGEN_RECORD": "run.jsonl"}, "record", Path("{cwd}/run.jsonl")),
    *(({}, field, None) for field in ("dump", "record")),
    *(({"MLAGEN_CACHE_MAX_SIZE": text}, "cache_max_bytes", size) for text, size in SIZES.items()),
]


def shown(value: object) -> str:
    """Return the id of a value of the table."""
    return " ".join(map("=".join, value.items())) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(("environ", "field", "value"), VALID, ids=shown)
def test_a_variable_sets_a_field(
    environ: dict[str, str], field: str, value: object, monkeypatch: Any, tmp_path: Path
) -> None:
    """Each variable has its values, and unset or empty it has its default."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/c")
    settings = read_settings({name: text.format(cwd=tmp_path) for name, text in environ.items()})
    assert repr(getattr(settings, field)) == repr(value).replace("{cwd}", str(tmp_path))


SIZE = "a size such as 500M or 2GiB"
COMPILERS = "auto, exact, compatible or one such as nvrtc-13.0.88"
INVALID: dict[str, tuple[str, list[str]]] = {
    "MLAGEN_LOCK_TIMEOUT": ("a finite number of seconds, 0 or more", ["soon", "-1", "inf", "nan"]),
    "MLAGEN_CHECK": ("0 or 1", ["yes", "2", "true"]),
    "MLAGEN_MLA_P_DTYPE": ("auto or fp16", ["bf16"]),
    "MLAGEN_MLA_KERNEL": ("auto or sm80 or sm90", ["SM90", "fast", "auto "]),
    "MLAGEN_GQA_KERNEL": ("auto or sm80 or sm90", ["SM90", "fast", "auto "]),
    "MLAGEN_LOG": ("off or warn or info or debug or api", ["INFO", "warning", "2", "on"]),
    "MLAGEN_CACHE_MAX_SIZE": (SIZE, ["-1", "much", "1X", "1 G 2", "inf", "9" * 400]),
    "MLAGEN_TOOLCHAIN": (COMPILERS, ["nvrtc", "nvrtc-13.0", "13.0.88", "newest"]),
    "MLAGEN_JIT": ("on or freeze or warn or error or off", ["never"]),
}


@pytest.mark.parametrize(
    ("name", "rule", "text"),
    [(name, rule, text) for name, (rule, texts) in INVALID.items() for text in texts],
    ids=lambda value: value[:24],
)
def test_an_invalid_value_is_rejected(name: str, rule: str, text: str) -> None:
    """The message has the variable, the rule and the value."""
    with pytest.raises(ArgumentError) as caught:
        read_settings({name: text})
    assert str(caught.value) == f"{name}: expected {rule}, got '{text}'"


@pytest.mark.parametrize("name", ["MLAGEN_CACHE_DIR", "MLAGEN_LOCK_DIR", "MLAGEN_CACHE_RO"])
def test_a_tilde_without_a_home_is_rejected(name: str) -> None:
    """A container user may have no name and no home."""
    with pytest.raises(ArgumentError, match=f"^{name}: expected a path, got '~no-such-user/x': "):
        read_settings({name: "~no-such-user/x"})


def test_without_any_temporary_folder_there_are_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a writable folder kernels stay in memory, and the path query is no error."""

    def reject() -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", reject)
    assert read_settings({}).cache_dir == Path(f"/tmp/mlagen-{os.getuid()}")  # noqa: S108


@pytest.mark.parametrize("runtime", ["", "/missing", "relative"])
def test_locks_do_not_follow_the_cache_to_a_network(runtime: str) -> None:
    """Without a writable XDG_RUNTIME_DIR the locks are local, wherever the cache is."""
    settings = read_settings({"MLAGEN_CACHE_DIR": "/net/kernels", "XDG_RUNTIME_DIR": runtime})
    assert settings.lock_dir.name == f"mlagen-{os.getuid()}"
    assert settings.lock_dir.parent in {Path("/dev/shm"), TEMPORARY.parent}  # noqa: S108


@pytest.mark.parametrize(
    ("environ", "observes"),
    [
        ({}, False),
        ({"MLAGEN_LOG": "debug", "MLAGEN_DUMP": ""}, False),
        ({"MLAGEN_LOG": "api"}, True),
        ({"MLAGEN_DUMP": "dumps"}, True),
    ],
    ids=str,
)
def test_calls_are_observed_on_request_only(environ: dict[str, str], observes: bool) -> None:
    """Entry points observe calls for the log or the dumps of calls, and for nothing else."""
    assert read_settings(environ).observes_calls is observes


NO_SUCH = "expected a variable that mlagen reads, got another"


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("MLAGEN_LOGS", "MLAGEN_LOG"),
        ("MLAGEN_LOG_LEVEL", "MLAGEN_LOG"),
        ("MLAGEN_CACHEDIR", "MLAGEN_CACHE_DIR"),
        ("MLAGEN_DUMPS", "MLAGEN_DUMP"),
        ("MLAGEN_CACHE_SIZE", "MLAGEN_CACHE_MAX_SIZE"),
        ("MLAGEN_JIT_MODE", "MLAGEN_JIT"),
        ("MLAGEN_GQA", "MLAGEN_GQA_KERNEL"),
        ("MLAGEN_MLA", "MLAGEN_MLA_KERNEL"),
        ("MLAGEN_X\ny", None),
        ("MLAGEN_X", None),
    ],
)
def test_a_variable_that_is_not_read_is_one_warning(
    name: str,
    nearest: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It has the most similar name, and no value; names of Kubernetes and of tests are skipped."""
    for other in ("MLAGEN_ACCEPT", "MLAGEN_SERVICE_HOST", "MLAGEN_PORT", "MLAGEN_KV_PORT_80_TCP"):
        monkeypatch.setenv(other, "secret")
    monkeypatch.setenv(name, "secret")
    assert current_settings() is current_settings()
    hint = f"; did you mean {nearest}?" if nearest else ""
    assert caplog.messages == [name.replace("\n", "\\n") + f": {NO_SUCH}{hint}"]


def test_the_page_has_every_variable() -> None:
    """The table of the page, and what the settings read, have the same names."""
    page = (ROOT / "docs/reference/environment.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(MLAGEN_\w+)` \|", page, re.MULTILINE)
    table = dict.fromkeys(documented[: documented.index("MLAGEN_GQA_KERNEL") + 1], "")
    assert unread_variables(table) == {}
    assert set(unread_variables({f"{name}S": "" for name in table}).values()) == {*table}


@pytest.mark.parametrize("name", ["MLAGEN_CACHE_DIR", "MLAGEN_CACHE_RO", "MLAGEN_DUMP"])
def test_a_url_is_no_folder(name: str) -> None:
    """A message does not show it, as it may hold a password."""
    urls = ("s3://key:secret@bucket/k", "/a:https://me:secret@host")
    for url in (*urls, "me:secret@host:/k", "https:/me:secret@host/k"):
        with pytest.raises(ArgumentError, match=f"^{name}: expected a path, got a URL$"):
            read_settings({name: url})
    assert read_settings({"MLAGEN_CACHE_RO": "/a://b"}).cache_layers == (Path("/a"), Path("//b"))
    layers = read_settings({"MLAGEN_CACHE_RO": "/a/b:/c@v1/d"}).cache_layers
    assert layers == (Path("/a/b"), Path("/c@v1/d"))


@pytest.mark.parametrize("name", INVALID)
def test_a_url_is_no_other_value(name: str) -> None:
    """A message does not show it."""
    with pytest.raises(ArgumentError, match=f"^{name}: expected .*, got a URL$"):
        read_settings({name: "s3://key:secret@bucket"})


def test_the_environment_is_read_once(
    monkeypatch: pytest.MonkeyPatch, cache_dir: Path, tmp_path: Path
) -> None:
    """Later changes of the environment have no effect on a process; reading creates no folder."""
    first = current_settings()
    monkeypatch.setenv("MLAGEN_CACHE_DIR", "/elsewhere")
    assert first.cache_dir == cache_dir
    assert current_settings() is first
    folders = {"MLAGEN_CACHE_DIR": "cache", "MLAGEN_LOCK_DIR": "locks", "XDG_RUNTIME_DIR": "."}
    read_settings({name: str(tmp_path / folder) for name, folder in folders.items()})
    assert list(tmp_path.iterdir()) == []
