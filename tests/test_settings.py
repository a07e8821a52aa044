"""Environment variables: their effect, and invalid values."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from mlagen.errors import ArgumentError
from mlagen.settings import (
    DEFAULT_LOCK_TIMEOUT_S,
    current_settings,
    observes_calls,
    read_settings,
)

CACHE_DIRS = {
    "MLAGEN_CACHE_DIR wins": (
        {"MLAGEN_CACHE_DIR": "/a/kernels", "XDG_CACHE_HOME": "/b", "HOME": "/c"},
        Path("/a/kernels"),
    ),
    "then XDG_CACHE_HOME": ({"XDG_CACHE_HOME": "/b", "HOME": "/c"}, Path("/b/mlagen")),
    "a relative XDG_CACHE_HOME is ignored": (
        {"XDG_CACHE_HOME": "b", "HOME": "/c"},
        Path("/c/.cache/mlagen"),
    ),
    "an empty variable counts as unset": (
        {"MLAGEN_CACHE_DIR": "", "XDG_CACHE_HOME": "", "HOME": "/c"},
        Path("/c/.cache/mlagen"),
    ),
    "without a home it is temporary": (
        {},
        Path(tempfile.gettempdir()) / f"mlagen-{os.getuid()}",
    ),
}


@pytest.mark.parametrize(("environ", "expected"), CACHE_DIRS.values(), ids=CACHE_DIRS)
def test_the_cache_folder(environ: dict[str, str], expected: Path) -> None:
    """The first variable with a usable folder decides."""
    settings = read_settings(environ)

    assert settings.cache_dir == expected


def test_folders_may_be_relative_or_start_at_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A relative folder is resolved at once against the current one, and a tilde is the home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/c")

    settings = read_settings({"MLAGEN_CACHE_DIR": "kernels", "MLAGEN_LOCK_DIR": "~/locks"})

    assert settings.cache_dir == tmp_path / "kernels"
    assert settings.lock_dir == Path("/c/locks")


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

    settings = read_settings({})

    assert settings.cache_dir == Path(f"/tmp/mlagen-{os.getuid()}")  # noqa: S108


def test_locks_are_in_the_runtime_folder_of_the_user(tmp_path: Path) -> None:
    """A writable XDG_RUNTIME_DIR holds the locks."""
    settings = read_settings({"XDG_RUNTIME_DIR": str(tmp_path)})

    assert settings.lock_dir == tmp_path / "mlagen"


@pytest.mark.parametrize("runtime", ["", "/missing", "relative"])
def test_locks_do_not_follow_the_cache_to_a_network(runtime: str) -> None:
    """Without a writable XDG_RUNTIME_DIR the locks are local, wherever the cache is."""
    settings = read_settings({"MLAGEN_CACHE_DIR": "/net/kernels", "XDG_RUNTIME_DIR": runtime})

    assert settings.lock_dir.name == f"mlagen-{os.getuid()}"
    assert settings.lock_dir.parent in {Path("/dev/shm"), Path(tempfile.gettempdir())}  # noqa: S108


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", DEFAULT_LOCK_TIMEOUT_S), ("0", 0.0), ("2.5", 2.5)],
    ids=["unset", "zero", "a fraction"],
)
def test_the_lock_timeout(text: str, seconds: float) -> None:
    """MLAGEN_LOCK_TIMEOUT is a number of seconds, zero included."""
    settings = read_settings({"MLAGEN_LOCK_TIMEOUT": text})

    assert settings.lock_timeout_s == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_an_invalid_lock_timeout_is_rejected(text: str) -> None:
    """The message has the variable, the rule and the value."""
    with pytest.raises(ArgumentError) as caught:
        read_settings({"MLAGEN_LOCK_TIMEOUT": text})

    assert str(caught.value) == (
        f"MLAGEN_LOCK_TIMEOUT: expected a finite number of seconds, 0 or more, got '{text}'"
    )


@pytest.mark.parametrize(
    ("text", "checks"), [("", False), ("0", False), ("1", True)], ids=["unset", "zero", "one"]
)
def test_the_checks_of_contents(text: str, checks: bool) -> None:
    """MLAGEN_CHECK enables the checks that synchronize with the device."""
    settings = read_settings({"MLAGEN_CHECK": text})

    assert settings.checks_contents is checks


@pytest.mark.parametrize("text", ["yes", "2", "true"])
def test_an_invalid_switch_is_rejected(text: str) -> None:
    """The message has the variable, the rule and the value."""
    with pytest.raises(ArgumentError) as caught:
        read_settings({"MLAGEN_CHECK": text})

    assert str(caught.value) == f"MLAGEN_CHECK: expected 0 or 1, got '{text}'"


@pytest.mark.parametrize(
    ("text", "kernel"),
    [("", "auto"), ("auto", "auto"), ("sm80", "sm80"), ("sm90", "sm90")],
    ids=["unset", "auto", "sm80", "sm90"],
)
def test_the_kernel_of_mla_calls(text: str, kernel: str) -> None:
    """MLAGEN_MLA_KERNEL selects the kernel."""
    settings = read_settings({"MLAGEN_MLA_KERNEL": text})

    assert settings.mla_kernel == kernel


@pytest.mark.parametrize(
    ("text", "kernel"),
    [("", "auto"), ("auto", "auto"), ("sm80", "sm80"), ("sm90", "sm90")],
    ids=["unset", "auto", "sm80", "sm90"],
)
def test_the_kernel_of_gqa_calls(text: str, kernel: str) -> None:
    """MLAGEN_GQA_KERNEL selects the kernel of GQA calls only."""
    settings = read_settings({"MLAGEN_GQA_KERNEL": text})

    assert settings.gqa_kernel == kernel
    assert settings.mla_kernel == "auto"


@pytest.mark.parametrize(
    ("text", "p_dtype_choice"), [("", "auto"), ("auto", "auto"), ("fp16", "fp16")]
)
def test_the_dtype_of_p(text: str, p_dtype_choice: str) -> None:
    """MLAGEN_MLA_P_DTYPE selects the dtype that MLA kernels round P to."""
    settings = read_settings({"MLAGEN_MLA_P_DTYPE": text})

    assert settings.mla_p_dtype == p_dtype_choice


def test_an_invalid_dtype_of_p_is_rejected() -> None:
    """The message has the valid values."""
    with pytest.raises(ArgumentError) as caught:
        read_settings({"MLAGEN_MLA_P_DTYPE": "bf16"})

    assert str(caught.value) == "MLAGEN_MLA_P_DTYPE: expected auto or fp16, got 'bf16'"


@pytest.mark.parametrize("name", ["MLAGEN_MLA_KERNEL", "MLAGEN_GQA_KERNEL"])
@pytest.mark.parametrize("text", ["SM90", "fast", "auto "])
def test_an_invalid_kernel_is_rejected(text: str, name: str) -> None:
    """The message has the variable, the valid values and the value."""
    with pytest.raises(ArgumentError) as caught:
        read_settings({name: text})

    assert str(caught.value) == f"{name}: expected auto or sm80 or sm90, got '{text}'"


def test_read_only_layers_are_colon_separated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """MLAGEN_CACHE_RO lists folders in lookup order; empty items are ignored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/c")

    settings = read_settings({"MLAGEN_CACHE_RO": "/a::~/b:kernels"})

    assert settings.cache_layers == (Path("/a"), Path("/c/b"), tmp_path / "kernels")
    assert read_settings({}).cache_layers == ()


@pytest.mark.parametrize("text", ["off", "warn", "info", "debug", "api"])
def test_the_level_of_the_log(text: str) -> None:
    """MLAGEN_LOG sets the level; unset or empty, the application configures logging."""
    assert read_settings({"MLAGEN_LOG": text}).log == text
    assert read_settings({"MLAGEN_LOG": ""}).log is read_settings({}).log is None


@pytest.mark.parametrize("text", ["INFO", "warning", "2", "on"])
def test_an_invalid_level_is_rejected(text: str) -> None:
    """The message has the variable, the valid values and the value."""
    with pytest.raises(ArgumentError) as caught:
        read_settings({"MLAGEN_LOG": text})

    expected = f"MLAGEN_LOG: expected off or warn or info or debug or api, got '{text}'"
    assert str(caught.value) == expected


def test_the_dumps_of_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MLAGEN_DUMP is a folder; MLAGEN_DUMP_TENSORS adds contents to it."""
    monkeypatch.chdir(tmp_path)

    settings = read_settings({"MLAGEN_DUMP": "dumps", "MLAGEN_DUMP_TENSORS": "1"})

    assert (settings.dump, settings.dumps_tensors) == (tmp_path / "dumps", True)
    assert (read_settings({}).dump, read_settings({}).dumps_tensors) == (None, False)


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
    """Entry points are wrapped for the log or the dumps of calls, and for nothing else."""
    assert observes_calls(environ) is observes


SIZES = {
    "unset": ("", 1 << 30),
    "no limit": ("0", None),
    "bytes": ("4096", 4096),
    "a letter": ("500M", 500 << 20),
    "a unit": ("2GiB", 2 << 30),
    "a fraction, with a space": ("1.5 kb", 1536),
}


@pytest.mark.parametrize(("text", "size"), SIZES.values(), ids=SIZES)
def test_the_size_limit_of_the_cache(text: str, size: int | None) -> None:
    """MLAGEN_CACHE_MAX_SIZE takes binary units; 0 is no limit, and unset has a default."""
    settings = read_settings({"MLAGEN_CACHE_MAX_SIZE": text})

    assert settings.cache_max_bytes == size


@pytest.mark.parametrize(
    "text", ["-1", "much", "1X", "1 G 2", "inf", "9" * 400], ids="{:.5}".format
)
def test_an_invalid_size_is_rejected(text: str) -> None:
    """The message has the variable, the rule and the value."""
    with pytest.raises(ArgumentError) as caught:
        read_settings({"MLAGEN_CACHE_MAX_SIZE": text})

    assert str(caught.value) == (
        f"MLAGEN_CACHE_MAX_SIZE: expected a size such as 500M or 2GiB, got '{text}'"
    )


@pytest.mark.parametrize("text", ["auto", "exact", "compatible", "nvrtc-13.0.88"])
def test_the_toolchain(text: str) -> None:
    """MLAGEN_TOOLCHAIN is a policy, or one toolchain with its patch level."""
    settings = read_settings({"MLAGEN_TOOLCHAIN": text})

    assert settings.toolchain == text
    assert read_settings({}).toolchain == "auto"


@pytest.mark.parametrize("text", ["nvrtc", "nvrtc-13.0", "13.0.88", "newest"])
def test_an_invalid_toolchain_is_rejected(text: str) -> None:
    """The message has the variable, the rule and the value."""
    with pytest.raises(ArgumentError) as caught:
        read_settings({"MLAGEN_TOOLCHAIN": text})

    assert str(caught.value) == (
        "MLAGEN_TOOLCHAIN: expected auto, exact, compatible or one such as nvrtc-13.0.88, "
        f"got '{text}'"
    )


@pytest.mark.parametrize("mode", ["on", "warn", "error", "off"])
def test_the_jit_mode(mode: str) -> None:
    """MLAGEN_JIT is one of four modes; the default is on."""
    settings = read_settings({"MLAGEN_JIT": mode})

    assert settings.jit == mode
    assert read_settings({}).jit == "on"


def test_an_invalid_jit_mode_is_rejected() -> None:
    """The message has the variable, the valid values and the value."""
    with pytest.raises(ArgumentError) as caught:
        read_settings({"MLAGEN_JIT": "never"})

    expected = "MLAGEN_JIT: expected on or warn or error or off, got 'never'"
    assert str(caught.value) == expected


def test_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """MLAGEN_RECORD is a file, resolved at once against the current folder; default: none."""
    monkeypatch.chdir(tmp_path)

    assert read_settings({"MLAGEN_RECORD": "run.jsonl"}).record == tmp_path / "run.jsonl"
    assert read_settings({}).record is None


@pytest.mark.parametrize(("text", "is_shared"), [("", False), ("0", False), ("1", True)])
def test_trust_of_shared_folders(text: str, is_shared: bool) -> None:
    """MLAGEN_TRUST_SHARED is a switch."""
    assert read_settings({"MLAGEN_TRUST_SHARED": text}).trusts_shared is is_shared


@pytest.mark.parametrize(("text", "reads"), [("", False), ("0", False), ("1", True)])
def test_the_hubs_cache_is_read_on_request(text: str, reads: bool) -> None:
    """MLAGEN_HF is a switch."""
    assert read_settings({"MLAGEN_HF": text}).reads_hub_cache is reads


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    """Later changes of the environment have no effect on a process."""
    first = current_settings()
    monkeypatch.setenv("MLAGEN_CACHE_DIR", "/elsewhere")

    second = current_settings()

    assert first.cache_dir == cache_dir
    assert second is first


def test_reading_the_settings_touches_no_disk(tmp_path: Path) -> None:
    """Reading the settings creates no folder."""
    read_settings(
        {
            "MLAGEN_CACHE_DIR": str(tmp_path / "cache"),
            "MLAGEN_LOCK_DIR": str(tmp_path / "locks"),
            "XDG_RUNTIME_DIR": str(tmp_path),
        }
    )

    assert list(tmp_path.iterdir()) == []
