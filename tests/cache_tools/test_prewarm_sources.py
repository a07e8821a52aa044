"""Kernel sources of `mlagen prewarm`, and the bundle of the kernels that they select."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from cache_tools.options.selection_options import selection_options
from mlagen.cache.bundle import open_bundle, verify_bundle
from mlagen.paths import MAX_NAMED_BYTES
from mlagen.prewarming.files import KEYS
from tests.cache.builds import failing
from tests.fixture_types import Patch
from tests.kernels import COMBINE

from .conftest import Cached, Setting, run

LINE = json.dumps({"kernel": str(COMBINE)}) + "\n"
TABLE = '[[kernel]]\nfamily = "combine"\ndtype = "bf16"\nkv_lora_rank = 512\n'


def kernels(*arguments: str, answer: str | None = None) -> list[str]:
    """Return the kernels of a dry run, in which nothing is cached."""
    found = run.json("prewarm --dry-run", *arguments, answer=answer, code=1)
    specs = [(unit["family"], unit["spec"].items()) for unit in found["units"]]
    return [f"{name}({', '.join(f'{key}={value}' for key, value in of)})" for name, of in specs]


def test_sources_are_prewarmed_for_their_own_architecture_or_for_others(tmp_path: Path) -> None:
    """Texts, records, files and stdin are merged, for their own targets or those of --arch."""
    log, toml, table = (tmp_path / name for name in ("a.jsonl", "a.toml", "a.json"))
    log.write_text(LINE * 2)
    toml.write_text(TABLE)
    table.write_text(json.dumps({"kernel": [{"kernel": str(COMBINE)}]}))
    kernel, record, arch = ("--kernel", str(COMBINE)), ("--from-log", str(log)), ("--arch", "sm_80")
    model = ("--model", "deepseek-v3", "--tp", "8")

    for source in (kernel * 2, record * 2, (str(toml), *arch)):
        assert kernels(*source) == [str(COMBINE)]
    assert kernels("-", *arch, answer=TABLE) == [str(COMBINE)]
    elsewhere = kernels(*record, "--arch", "sm_90a,sm_86")
    assert elsewhere == [str(COMBINE).replace("sm_80", other) for other in ("sm_90a", "sm_86")]
    together = kernels(str(table), *kernel, *record, *model, *arch)
    assert [name.partition("(")[0] for name in together] == ["combine", "mla_sm80"]


def test_given_models_are_described_alone(tmp_path: Path) -> None:
    """Names, Hub ids and paths, as --model takes them; an unknown one is rejected."""
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}')
    names = ("step5", "deepseek-ai/DeepSeek-V3-0324", str(path))
    found = run.json("models", *names)["models"]
    assert [model["name"] for model in found] == ["step5", "deepseek-v3", str(path)]
    assert found[0]["reason"].endswith(
        "; servers decode it with a backend of their own: leave out --attention-backend"
    )
    assert run("models gpt-5").exit_code == 2


V3 = "deepseek-v3, tp 8: 16 heads, page size 64, q_len 1, query/cache bf16/bf16, paged"
SPARSE = "deepseek-v3.2, tp 1: 128 heads, page size 64, q_len 1 and 4"
SERVED = {
    "deepseek-v3 --tp 8": [V3],
    "deepseek-v3.2 --kv-dtype fp8_ds_mla --q-len 1,4": [
        f"{SPARSE}, query/cache bf16/fp8_ds_mla, paged and sparse, bf16/bf16 for sparse prefill"
    ],
    "deepseek-v3 --tp 8 --dcp 8": [V3.replace("tp 8: 16", "tp 8, dcp 8: 128")],
    "llama-3-8b,qwen3-32b --tp 1,2": [
        f"{name}, tp 1 and 2: {heads} heads, page size 16 and 64, q_len 1, query/cache bf16/bf16"
        for name, heads in (("llama-3-8b", "32 and 16"), ("qwen3-32b", "64 and 32"))
    ],
}


@pytest.mark.parametrize(("options", "assumed"), SERVED.items(), ids=list(SERVED))
def test_a_dry_run_says_how_models_are_served(options: str, assumed: list[str]) -> None:
    """Defaults are named as well, before the table, and on stderr with --json."""
    command = ("prewarm", "--dry-run", "--arch", "sm_90a", "--model", *options.split())
    table, document, quiet = (run(*command, *o) for o in ((), ("--json",), ("-q",)))
    assert table.stdout.splitlines()[: len(assumed)] == assumed
    assert document.stderr.splitlines()[: len(assumed)] == assumed
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (1, "", "")


def test_tables_have_the_names_of_the_options() -> None:
    """A table accepts every selection option; a record is a file of its own."""
    command: Any = selection_options(lambda: None)
    options = [option.opts[0] for option in command.__click_params__]
    names = {option.removeprefix("--").replace("-", "_") for option in options}
    assert names == {*KEYS, "from_log"}


def test_stdin_has_a_limit() -> None:
    """A source without an end takes no memory; the exit code is 2."""
    result = run("prewarm - --arch sm_80", answer="#" * (MAX_NAMED_BYTES + 1))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "at most 64 MiB" in result.stderr


@pytest.mark.parametrize("is_layer", [False, True], ids=["the cache", "a layer"])
def test_a_bundle_has_the_requested_kernels(
    is_layer: bool, cached: Cached, tmp_path: Path, setting: Setting
) -> None:
    """It has no other cached kernel, wherever they are; text and document describe it."""
    if is_layer:
        setting("MLAGEN_CACHE_RO", cached.root)
        setting("MLAGEN_CACHE_DIR", tmp_path / "own")
    bundle = tmp_path / "kernels.tar.gz"
    command = ("prewarm", "--kernel", str(cached.units[0].spec), "--bundle", str(bundle))

    described = run.json(*command)["bundle"]
    _, line, digest = run(*command).stdout.splitlines()

    assert (described["bundle"], described["archs"]) == (str(bundle), ["sm_80"])
    assert described["size_bytes"] == bundle.stat().st_size
    assert line.startswith(f"bundled to {bundle}, ")
    assert digest.startswith("sha256 ")
    with open_bundle(bundle) as file:
        assert [entry.key for entry in verify_bundle(file, "it").entries] == cached.keys[:1]


def test_a_failure_writes_no_bundle(cached: Cached, tmp_path: Path, setting: Setting) -> None:
    """An incomplete bundle is not written; a path that cannot be written fails with 1."""
    path = tmp_path / "kernels.tar.gz"
    path.mkdir()
    result = run("prewarm --kernel", str(cached.units[0].spec), "--bundle", str(path))
    path.rmdir()
    setting("MLAGEN_JIT", "off")
    other = str(COMBINE).replace("sm_80", "sm_86")
    failed = run.json("prewarm --isolate --kernel", other, "--bundle", str(path), code=1)

    message = f"mlagen: bundle: expected a file, got another kind: {path}"
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == message
    assert failed["bundle"] is None
    assert not path.exists()


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "JSON"])
def test_a_bundle_that_fails_last_costs_no_report(
    as_json: bool, cached: Cached, tmp_path: Path, monkeypatch: Patch
) -> None:
    """If the disk fills up after the work, the report is printed and the error follows it."""
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC))
    bundle = tmp_path / "kernels.tar.gz"
    options = ("--json",) if as_json else ()
    result = run("prewarm --kernel", str(cached.units[0].spec), "--bundle", str(bundle), *options)
    error = f"mlagen: bundle: expected a writable file, got {os.strerror(errno.ENOSPC)}: {bundle}"
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, error)
    if as_json:
        document = json.loads(result.stdout)
        assert (document["totals"]["hit"], document["bundle"]) == (1, None)
    else:
        assert result.stdout.startswith("1 kernel: 0 built, 1 hit, ")
    assert not bundle.exists()
