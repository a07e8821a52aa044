"""Kernel selection of a prewarm: by models, kernel texts or spec fields, in files and records."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen import engine
from mlagen.models.config import find_model
from mlagen.models.kernels import ServingOptions, model_specs
from mlagen.prewarming.record_file import read_record
from mlagen.prewarming.selection import selected_specs
from mlagen.prewarming.spec_file import read_spec_file, specs_of_file
from mlagen.settings import current_settings
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.selection import select_specs
from tests.fixture_types import Log, Patch
from tests.kernels import COMBINE, SM_80, SM_90A, gqa_sm80, mla_sm80, mla_sm90

V3, LLAMA = find_model("deepseek-v3"), find_model("llama-3-8b")


def selected(archs: str = "sm_80", **arguments: Any) -> list[Any]:
    """Return the kernels that these arguments select."""
    return selected_specs(archs, **{"wanted": {}, **arguments})


def unique(specs: Iterable[Any]) -> list[Any]:
    """Return specs without duplicates, in order."""
    return list(dict.fromkeys(specs))


def test_models_are_selected_on_every_architecture() -> None:
    """Each model is selected on each architecture, without duplicates, by its serving options."""
    specs = selected("sm_90a,sm_80", models="deepseek-v3,llama-3-8b", tp=[1, 8], q_len=2)
    wanted = {"dtype": "fp16", "kv_dtype": ["e4m3"], "page_size": 48, "lookup": "sparse"}

    pairs = [(arch, model) for arch in (SM_90A, SM_80) for model in (V3, LLAMA)]
    use = ServingOptions(tp=(1, 8), q_lens=(2,))
    assert specs == unique(spec for pair in pairs for spec in model_specs(*pair, use))
    use = ServingOptions(
        dtypes=(DType.FP16,), kv_dtypes=(DType.E4M3,), page_sizes=(48,), lookups=("sparse",)
    )
    v32 = model_specs(SM_80, find_model("deepseek-v3.2"), use)
    assert selected(models=["deepseek-v3.2"], wanted=wanted) == v32


def test_families_filter_the_kernels_of_a_model() -> None:
    """``families`` filters the kernels of a model, for instance to the sm80 kernel."""
    assert selected("sm_90a", models="deepseek-v3", tp=8, families=["mla_sm80"]) == [mla_sm80()]


@pytest.mark.parametrize(
    ("kernels", "specs"),
    [
        (COMBINE, [COMBINE]),
        (str(COMBINE), [COMBINE]),
        ([COMBINE, str(COMBINE)], [COMBINE]),
        ([], []),
    ],
    ids=["a spec", "a text", "several", "none"],
)
def test_a_kernel_is_selected_by_spec_or_by_text(kernels: Any, specs: list[Any]) -> None:
    """Explicit kernels are the whole selection, for any architectures."""
    assert selected("native", kernels=kernels) == specs


def test_kernels_and_models_are_combined() -> None:
    """They have no duplicates; without both, the supported kernels are filtered."""
    wanted: dict[str, Any] = {"kv_lora_rank": 512, "dtype": "bf16"}
    given = [COMBINE, gqa_sm80(arch=SM_80)]
    report = mlagen.prewarm(
        "sm_90a", models="deepseek-v3", tp=8, kernels=str(COMBINE), dry_run=True, page_size=32
    )

    of_model = model_specs(SM_80, LLAMA, ServingOptions())
    assert selected(models="llama-3-8b", kernels=given) == unique([*given, *of_model])
    assert selected(wanted=wanted, heads=16) == select_specs([SM_80], heads=16, wanted=wanted)
    of_model = model_specs(SM_90A, V3, ServingOptions(tp=(8,), page_sizes=(32,)))
    assert [unit.spec for unit in report.units] == [COMBINE, *of_model]


TOML = """
[[kernel]]
model = "deepseek-v3"
tp = [1, 8]
kv_dtype = ["bf16", "e4m3"]

[[kernel]]
arch = ["sm_80", "sm_86"]
family = "combine"
dtype = "bf16"
kv_lora_rank = [256, 512]
"""
KV_DTYPES, COMBINES = ["bf16", "e4m3"], {"dtype": "bf16", "kv_lora_rank": [256, 512]}
TABLES = [
    {"model": "deepseek-v3", "tp": [1, 8], "kv_dtype": KV_DTYPES},
    {"arch": ["sm_80", "sm_86"], "family": "combine", **COMBINES},
]


@pytest.mark.parametrize(
    "text", [TOML, "\n" + json.dumps({"kernel": TABLES})], ids=["TOML", "JSON"]
)
def test_a_table_is_the_product_of_its_lists(text: str, tmp_path: Path) -> None:
    """It applies to its own architectures or those of the command; stdin has no file name."""
    path = tmp_path / ("a.toml" if text == TOML else "a.json")
    path.write_text(text)
    model = selected(models="deepseek-v3", tp=[1, 8], wanted={"kv_dtype": KV_DTYPES})
    table = selected("sm_80,sm_86", families=["combine"], wanted=COMBINES)
    specs = read_spec_file(path, archs="sm_80")
    assert specs == specs_of_file("-", text.encode(), archs="sm_80") == unique([*model, *table])


def line_of(spec: KernelSpec) -> str:
    """Return a line of a record."""
    record = {"kernel": str(spec), "key": "0" * 64, "toolchain": "nvrtc-13.5.37", "found": "hit"}
    return json.dumps(record) + "\n"


LINES = {
    "": [],
    line_of(COMBINE).strip(): [COMBINE],  # a run of one call, or a file edited by hand
    f"{line_of(COMBINE)}{line_of(gqa_sm80())}\n{line_of(COMBINE)}": [COMBINE, gqa_sm80()],
}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Return the path of a record."""
    return tmp_path / "record.jsonl"


@pytest.mark.parametrize("text", LINES, ids=["no call", "no newline", "several processes"])
def test_each_kernel_of_a_record_is_selected_once(text: str, log: Path) -> None:
    """Several processes may write the same file; empty lines are skipped."""
    log.write_text(text)
    assert read_record(log) == LINES[text]
    assert bool(read_record(log, archs="sm_80")) == bool(text)


def test_on_another_architecture_the_same_calls_are_served(log: Path) -> None:
    """With ``archs``, the record selects the kernels that the same calls take there."""
    log.write_text(line_of(mla_sm90()) + line_of(gqa_sm80()))
    specs = read_record(log, archs="sm_80")
    assert {mla_sm80(arch=SM_80), gqa_sm80(arch=SM_80), COMBINE} <= {*specs}
    assert {spec.arch for spec in specs} == {SM_80}


@pytest.mark.parametrize("end", [1, 30, -1])
def test_an_incomplete_last_line_is_skipped(end: int, log: Path, caplog: Log) -> None:
    """The run ended while writing it; the warning has the line number."""
    log.write_text(line_of(COMBINE) + line_of(gqa_sm80()).rstrip("\n")[:end])
    with caplog.at_level(logging.WARNING, "mlagen"):
        assert read_record(log) == [COMBINE]
    assert caplog.messages == [f"{log}:2: skipped a line without its end"]


def test_a_record_of_the_engine_is_read(log: Path, monkeypatch: Patch) -> None:
    """A record written by a run can be prewarmed."""
    monkeypatch.setenv("MLAGEN_RECORD", str(log))
    current_settings.cache_clear()
    engine.find_or_build(COMBINE)
    assert read_record(log) == [COMBINE]
