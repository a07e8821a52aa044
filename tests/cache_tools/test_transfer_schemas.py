"""JSON documents of `prewarm` and of the bundle commands against their schemas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mlagen
from cache_tools.output.schemas import DOCUMENT
from cache_tools.output.transfer_schemas import TRANSFER_SCHEMAS
from mlagen import engine
from mlagen.prewarming import PrewarmReport
from tests.kernels import COMBINE

from .conftest import Run
from .documents import require_document

# Arguments of the commands, in a folder with a bundle of the cached kernels.
ARGUMENTS = {
    "prewarm": ("--kernel", str(COMBINE), "--bundle", "new.tar.gz"),
    "cache export": ("new.tar.gz",),
    "cache import": ("kernels.tar.gz",),
    "cache push": ("new.tar.gz",),
    "cache pull": ("kernels.tar.gz",),
}


@pytest.fixture
def bundle(
    run: Run, cached: PrewarmReport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Return a bundle of all cached kernels, in the current folder."""
    monkeypatch.chdir(tmp_path)
    run("cache", "export", "kernels.tar.gz")
    assert len(cached.units) == 2
    return tmp_path / "kernels.tar.gz"


@pytest.mark.usefixtures("bundle")
@pytest.mark.parametrize("command", TRANSFER_SCHEMAS)
def test_a_document_has_the_names_and_types_of_its_schema(command: str, run: Run) -> None:
    """The names are exactly those of the schema, in order."""
    result = run(*command.split(), *ARGUMENTS[command], "--json")

    assert result.exit_code == 0, result.stderr
    require_document(json.loads(result.stdout), TRANSFER_SCHEMAS[command])


@pytest.mark.parametrize("option", [(), ("--dry-run",)], ids=["failed", "missing"])
def test_failed_kernels_fit_the_schema(
    option: tuple[str, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A unit without a kernel has the same names."""

    def fail(*_: object) -> None:
        raise mlagen.CompileError("NVRTC: no", log="", source="")

    monkeypatch.setattr(engine, "build_spec", fail)

    result = run("prewarm", "--kernel", str(COMBINE), *option, "--json")

    assert result.exit_code == 1
    require_document(json.loads(result.stdout), TRANSFER_SCHEMAS["prewarm"])


@pytest.mark.parametrize("command", TRANSFER_SCHEMAS)
def test_every_part_of_a_schema_is_used(command: str) -> None:
    """A part in backquotes is in the same schema, and no part is unused."""
    schema = TRANSFER_SCHEMAS[command]
    types = " ".join(field.type for part in schema.values() for field in part.values())

    assert {f"`{name}`" for name in types.split("`")[1::2]} == set(schema) - {DOCUMENT}
