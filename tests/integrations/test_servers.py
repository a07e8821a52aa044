"""Registration with a server of any version, and the versions that ``pyproject.toml`` names."""

from __future__ import annotations

import logging
import re
import sys
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

from mlagen.integrations.servers import TESTED, is_tested, registration, version_of
from tests.fixture_types import Log, Patch

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("server", TESTED)
def test_the_extras_have_the_tested_versions(server: str) -> None:
    """``pip install mlagen[vllm]`` installs a server that the plugin is tested with."""
    project = (ROOT / "pyproject.toml").read_text()
    extra = re.search(rf'^{server} = \["([^"]*)"\]', project, re.MULTILINE)
    assert extra
    assert str(Requirement(extra[1]).specifier) == TESTED[server]
    lowest = TESTED[server].rpartition(">=")[2]
    assert f"release={server}=={lowest}" in (ROOT / ".ci" / "server").read_text()


@pytest.mark.parametrize(
    ("server", "version", "tested"),
    [
        ("vllm", "0.33.0", True),
        ("vllm", "0.33.1+cu130", True),
        ("vllm", "0.34.0", False),
        ("vllm", "0.34.0rc1.dev7+g0123", False),
        ("vllm", "0.32.2", False),
        ("vllm", "dev", False),
        ("sglang", "0.5.23", True),
        ("sglang", "0.5.23.post1", True),
        ("sglang", "0.5.24", False),
        ("sglang", "0.6", False),
        ("sglang", "0.5.22", False),
        ("sglang", "unknown", False),
    ],
)
def test_another_version_is_tried_with_a_warning(
    server: str, version: str, tested: bool, caplog: Log, monkeypatch: Patch
) -> None:
    """A newer or older server gets the backends, and the log says what is tested."""
    module = ModuleType(server)
    vars(module)["__version__"] = version
    monkeypatch.setitem(sys.modules, server, module)
    steps: list[str] = []

    with caplog.at_level(logging.WARNING, logger="mlagen"), registration(server, "names") as undo:
        undo.callback(steps.append, "undone")
        steps.append("registered")

    assert steps == ["registered"]
    assert is_tested(server, version) is tested
    tests = "which the backends of mlagen are tested with"
    assert [each.getMessage() for each in caplog.records] == [
        f"{server}: expected a version {TESTED[server]}, {tests}, got {version}"
    ] * (not tested)


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'x'"), KeyError("x\ny")])
def test_a_failed_registration_is_undone(error: Exception, caplog: Log, monkeypatch: Patch) -> None:
    """Any exception is one warning of one line, and what was registered before is not any more."""
    module = ModuleType("vllm")
    vars(module)["__version__"] = "0.99"
    monkeypatch.setitem(sys.modules, "vllm", module)
    steps: list[str] = []

    def fail(undo: ExitStack) -> None:
        undo.callback(steps.append, "undone")
        raise error

    with registration("vllm", "names in a module") as undo:
        fail(undo)

    assert steps == ["undone"]
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"vllm 0.99: expected names in a module, got {type(error).__name__}")
    assert "\n" not in message
    assert message.endswith(f"tested with vllm {TESTED['vllm']}")


def test_the_version_is_that_of_the_imported_server(monkeypatch: Patch) -> None:
    """A server without ``__version__`` has that of its distribution, or none."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(metadata, "version", {"vllm": "0.33.0"}.__getitem__)
    assert version_of("vllm") == "0.33.0"

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert version_of("vllm") == "unknown"


def test_a_server_without_a_readable_version_is_tried(monkeypatch: Patch) -> None:
    """A module that raises something else for a missing name ends no registration."""
    module = ModuleType("vllm")

    def fail(name: str) -> None:
        raise RuntimeError(name)

    vars(module)["__getattr__"] = fail
    monkeypatch.setitem(sys.modules, "vllm", module)
    assert version_of("vllm") == "unknown"
