"""Compile control: JIT modes, the hook, the metrics and the log lines."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Iterator

import pytest

import mlagen
from mlagen import engine, jit
from mlagen.artifacts import Build
from mlagen.cache.store import kernel_store
from mlagen.compiler.toolchain import Nvrtc, find_nvrtc
from mlagen.engine import find_or_build
from mlagen.errors import ArgumentError, CompileError, MissError
from mlagen.jit import CompileEvent, freeze, jit_mode, on_compile, report_compilation
from mlagen.monitoring import metrics
from mlagen.settings import current_settings
from mlagen.spec.kernel import KernelSpec
from tests.kernels import COMBINE


@pytest.fixture(autouse=True)
def unfrozen() -> Iterator[None]:
    """Restore the JIT mode after each test."""
    yield
    freeze("on")


def set_mode(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Set MLAGEN_JIT for this test."""
    monkeypatch.setenv("MLAGEN_JIT", mode)
    current_settings.cache_clear()


def changes(before: dict[str, int]) -> dict[str, int]:
    """Return the metrics that changed, without times."""
    now = metrics()
    names = [name for name in now if not name.endswith("_ms")]
    return {name: now[name] - before[name] for name in names if now[name] != before[name]}


@pytest.mark.parametrize(
    ("environment", "frozen", "mode"),
    [
        ("on", "on", "on"),
        ("on", "warn", "warn"),
        ("on", "error", "error"),
        ("error", "on", "error"),
        ("warn", "error", "error"),
        ("off", "error", "off"),
    ],
)
def test_the_stricter_mode_counts(
    environment: str, frozen: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the environment nor freezing loosens the mode of the other."""
    set_mode(monkeypatch, environment)
    mlagen.freeze(frozen)
    assert jit_mode() == mode


def test_an_unknown_freeze_mode_is_rejected() -> None:
    """The message has the argument, the valid modes and the value."""
    with pytest.raises(ArgumentError) as caught:
        freeze("off")
    assert str(caught.value) == "mode: expected one of on, warn, error, got 'off'"
    assert jit_mode() == "on"


@pytest.mark.parametrize(
    ("mode", "setting"), [("frozen", "mlagen.freeze()"), ("error", "MLAGEN_JIT=error")]
)
def test_a_call_may_not_compile_and_prewarming_may(
    mode: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A miss names the kernel, the reason, the setting and the command; a hit still works."""
    freeze() if mode == "frozen" else set_mode(monkeypatch, mode)
    before = metrics()

    with pytest.raises(MissError) as caught:
        find_or_build(COMBINE)
    built = find_or_build(COMBINE, created_by="prewarm")
    hit = find_or_build(COMBINE)

    assert str(caught.value) == (
        f"{COMBINE}: absent in the cache, and {setting} forbids to compile; "
        f"run: mlagen prewarm --kernel '{COMBINE}'"
    )
    assert (built.built, hit.built) == (True, False)
    assert changes(before) == {
        "hits": 1,
        "hits.cache": 1,
        "misses": 2,
        "misses.absent": 2,
        "rejections": 1,
        "compiles": 1,
    }


def test_off_forbids_prewarming_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MLAGEN_JIT=off this process compiles and publishes nothing."""
    set_mode(monkeypatch, "off")
    for created_by in ("jit", "prewarm"):
        with pytest.raises(MissError, match="MLAGEN_JIT=off forbids") as caught:
            find_or_build(COMBINE, created_by=created_by)
        # Without the variable the command would be rejected in the same environment.
        assert str(caught.value).endswith(f"run: MLAGEN_JIT=on mlagen prewarm --kernel '{COMBINE}'")
    assert list(kernel_store().entries()) == []


def test_a_compiler_that_is_not_wanted_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiler of MLAGEN_TOOLCHAIN, a missing kernel is an error that names both."""
    monkeypatch.setenv("MLAGEN_TOOLCHAIN", "nvrtc-12.8.1")
    current_settings.cache_clear()
    with pytest.raises(MissError) as caught:
        find_or_build(COMBINE)
    wanted = f"MLAGEN_TOOLCHAIN wants nvrtc-12.8.1, but {find_nvrtc()} is installed"
    assert wanted in str(caught.value)
    assert list(kernel_store().entries()) == []


def test_warn_compiles_with_warnings(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unexpected compilation logs two warnings."""
    set_mode(monkeypatch, "warn")
    assert find_or_build(COMBINE).built
    warnings = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in warnings] == ["WARNING", "WARNING"]
    assert warnings[0][1].startswith(f"compiling {COMBINE} with nvrtc-")
    assert warnings[0][1].endswith(f": absent in {kernel_store().root}")


def test_the_hook_is_called_at_start_and_end() -> None:
    """The hook receives kernel, reason and duration, in the compiling thread, until it ends.

    Each subscription ends on its own, also of a hook that has several.
    """
    received: list[tuple[CompileEvent, int]] = []
    shared: list[CompileEvent] = []
    end = mlagen.on_compile(lambda event: received.append((event, threading.get_ident())))
    end_first, end_second = (on_compile(shared.append) for _ in range(2))
    end_first()
    end_first()  # a second call is a no-op

    find_or_build(COMBINE)
    find_or_build(COMBINE)
    end()
    end_second()

    assert len(shared) == 2
    events = [event for event, _ in received]
    assert [(event.phase, event.kernel, event.reason) for event in events] == [
        ("started", str(COMBINE), "absent"),
        ("finished", str(COMBINE), "absent"),
    ]
    assert events[0].ms == 0 < events[1].ms
    assert {thread for _, thread in received} == {threading.get_ident()}


def test_a_failing_hook_does_not_stop_a_compilation(caplog: pytest.LogCaptureFixture) -> None:
    """Its exception is logged with its traceback, and the call proceeds."""

    def fail(_: CompileEvent) -> None:
        raise LookupError("no monitor")

    end = on_compile(fail)
    outcome = find_or_build(COMBINE)
    end()
    assert outcome.built
    assert caplog.text.count("LookupError: no monitor") == 2


def test_a_failed_compilation_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook and the metrics have the failure, and the caller gets the error."""
    received: list[str] = []
    end = on_compile(lambda event: received.append(event.phase))
    before = metrics()

    def reject(*_: object) -> None:
        raise CompileError("NVRTC: no", log="", source="")

    monkeypatch.setattr(engine, "build_spec", reject)
    with pytest.raises(CompileError, match="NVRTC: no"):
        find_or_build(COMBINE)
    end()

    assert received == ["started", "failed"]
    assert changes(before) == {"misses": 1, "misses.absent": 1, "compiles.failed": 1}


def test_a_process_with_too_many_threads_compiles(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A compilation without a watchdog thread still finishes and logs its end."""
    caplog.set_level(logging.INFO, logger="mlagen")

    def reject(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", reject)

    with report_compilation("a kernel", "absent", "nvrtc-13.5.37", "/cache"):
        pass

    assert [r.getMessage().split()[0] for r in caplog.records] == ["compiling", "compiled"]


def test_a_long_compilation_logs_its_progress(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs its start, a slowness warning, every interval and its end, and nothing after."""
    caplog.set_level(logging.INFO, logger="mlagen")
    monkeypatch.setattr(jit, "_PROGRESS_S", 0.01)
    monkeypatch.setattr(jit, "_SLOW_S", 0.01)
    second = threading.Event()

    class Listener(logging.Handler):
        def emit(self, _: logging.LogRecord) -> None:
            if caplog.text.count("still compiling") >= 2:
                second.set()

    listener = Listener()
    logging.getLogger("mlagen").addHandler(listener)
    with report_compilation("a kernel", "absent", "nvrtc-13.5.37", "/cache"):
        assert second.wait(10)
    logging.getLogger("mlagen").removeHandler(listener)

    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "compiling a kernel with nvrtc-13.5.37: absent in /cache"
    assert messages[1].startswith("compiling a kernel: 0 s so far; ")
    assert all(re.fullmatch(r"still compiling a kernel, \d+ s", line) for line in messages[2:-1])
    assert len(messages) >= 5
    assert re.fullmatch(r"compiled a kernel in \d\.\d s", messages[-1])


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every compilation slower than the warning threshold."""
    monkeypatch.setattr(jit, "_SLOW_S", 0.05)
    real = engine.build_spec

    def build(spec: KernelSpec, nvrtc: Nvrtc, *_: object) -> Build:
        time.sleep(0.5)
        return real(spec, nvrtc)

    monkeypatch.setattr(engine, "build_spec", build)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("created_by", ["jit", "prewarm"])
def test_a_call_that_waits_long_is_warned_of_once(
    created_by: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning has the prewarm command; neither a second call nor prewarming logs one."""
    for _ in range(2):
        find_or_build(COMBINE, created_by=created_by)
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    command = f"compile ahead of time with: mlagen prewarm --kernel '{COMBINE}'"
    expected = [f"compiling {COMBINE}: 0 s so far; {command}"] if created_by == "jit" else []
    assert warnings == expected
