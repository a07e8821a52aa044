"""Kernel selection of a prewarm: arguments, spec files and records, and what each rejects."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen import engine
from mlagen.errors import ArgumentError
from mlagen.models.config import find_model
from mlagen.models.kernels import ServingOptions, model_specs
from mlagen.prewarming.files import KEYS, read_record, read_spec_file
from mlagen.prewarming.selection import selected_specs
from mlagen.settings import current_settings
from mlagen.spec.dtype import DType
from mlagen.spec.families import select_specs
from mlagen.spec.kernel import KernelSpec
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
    """Each is selected without duplicates, by its serving options; ``families`` filters kernels."""
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
    assert selected("sm_90a", models="deepseek-v3", tp=8, families=["mla_sm80"]) == [mla_sm80()]


@pytest.mark.parametrize(
    ("name", "own"),
    [("fp8", "e4m3"), ("fp8_e4m3", "e4m3"), ("bfloat16", "bf16"), ("float16", "fp16")],
)
def test_dtypes_are_read_as_servers_spell_them(name: str, own: str) -> None:
    """With and without a model, alone and in a list."""
    for arguments in ({"models": "llama-3-8b"}, {"families": ["gqa_sm80"]}):
        found = selected(**arguments, wanted={"kv_dtype": [name, "int8"]})
        assert found == selected(**arguments, wanted={"kv_dtype": [own, "int8"]})
    assert selected(families=["gqa_sm80"], wanted={"kv_dtype": name})


def test_kernels_and_models_are_combined() -> None:
    """Specs and texts alone are the whole selection; without both, kernels are filtered."""
    for kernels in (COMBINE, str(COMBINE), [COMBINE, str(COMBINE)]):
        assert selected("native", kernels=kernels) == [COMBINE]
    assert selected("native", kernels=[]) == []
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
    specs = read_spec_file(str(path), archs="sm_80")
    assert specs == read_spec_file("-", text.encode(), archs="sm_80") == unique([*model, *table])


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


def test_each_kernel_of_a_record_is_selected_once(log: Path) -> None:
    """Empty lines are skipped; with ``archs``, the same calls select their kernels there."""
    for text, specs in LINES.items():
        log.write_text(text)
        assert read_record(log) == specs
        assert bool(read_record(log, archs="sm_80")) == bool(text)
    log.write_text(line_of(mla_sm90()) + line_of(gqa_sm80()))
    specs = read_record(log, archs="sm_80")
    assert {mla_sm80(arch=SM_80), gqa_sm80(arch=SM_80), COMBINE} <= {*specs}
    assert {spec.arch for spec in specs} == {SM_80}


@pytest.mark.parametrize("rest", ["", "\n", f"\n{line_of(mla_sm90())}", line_of(mla_sm90())])
@pytest.mark.parametrize("end", [1, 30, -1])
def test_an_incomplete_line_is_skipped(end: int, rest: str, log: Path, caplog: Log) -> None:
    """A run ended while writing it; the warning has its number, and later lines are read."""
    log.write_text(line_of(COMBINE) + line_of(gqa_sm80()).rstrip("\n")[:end] + rest)
    with caplog.at_level(logging.WARNING, "mlagen"):
        assert read_record(log) == ([COMBINE, mla_sm90()] if rest.strip() else [COMBINE])
    assert caplog.messages == [f"{log}:2: skipped a line without its end"]


def test_a_record_of_the_engine_is_read(log: Path, monkeypatch: Patch) -> None:
    """A record written by a run can be prewarmed, behind the half line of a run that was killed."""
    monkeypatch.setenv("MLAGEN_RECORD", str(log))
    current_settings.cache_clear()
    log.write_text(line_of(gqa_sm80())[:40])
    engine.find_or_build(COMBINE)
    assert read_record(log) == [COMBINE]


SERVED: dict[str, Any] = {"models": "deepseek-v3"}
ALONE = "expected none beside kernels, without models, got"
FAMILIES = (
    "mla_sm80, mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv, gqa_sm80, gqa_sm90, combine, "
    "combine_states, write_rows"
)
DTYPES = ", ".join(map(str, DType))
INT = "expected an int, 1 or more, got"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SERVED | {"tp": 0}, f"tp: {INT} 0"),
        (SERVED | {"tp": True}, f"tp: {INT} True"),
        (SERVED | {"q_len": [0]}, f"q_len: {INT} 0"),
        (SERVED | {"tp": []}, "tp: expected one or more beside models, got none"),
        (SERVED | {"heads": 16}, "heads: expected none beside models, which define it, got "),
        (SERVED | {"kv_heads": 16}, "kv_heads: expected none beside models, which define it"),
        (SERVED | {"wanted": {"mask": "bias"}}, "mask: expected none beside models, got 'bi"),
        (SERVED | {"wanted": {"page_size": "64"}}, f"page_size: {INT} "),
        (
            SERVED | {"wanted": {"kv_dtype": "fp9"}},
            f"kv_dtype: expected one of {DTYPES}, got 'fp9'",
        ),
        (
            SERVED | {"wanted": {"lookup": "dense"}},
            "lookup: expected one of paged, sparse, two_pools, got ",
        ),
        (SERVED | {"families": ["mla"]}, f"family: expected one of {FAMILIES}, got 'mla'"),
        ({"kernels": COMBINE, "families": ["mla_sm80"]}, f"families: {ALONE} ['mla_sm80']"),
        ({"kernels": COMBINE, "wanted": {"dtype": "bf16"}}, f"dtype: {ALONE} 'bf16'"),
    ],
    ids=str,
)
def test_conflicting_arguments_are_rejected(arguments: dict[str, Any], message: str) -> None:
    """A conflicting argument is rejected instead of ignored; `mlagen prewarm` has more cases."""
    with pytest.raises(ArgumentError) as caught:
        selected_specs("sm_80", **{"wanted": {}, **arguments})
    assert str(caught.value).startswith(message)


def test_a_timeout_needs_isolation_and_must_be_positive() -> None:
    """A compiling thread cannot be killed, so a timeout needs isolation."""
    seconds = "expected more than 0 seconds, got"
    for timeout_s, isolate, message in (
        (1.0, False, "expected isolate beside it, got 1.0 alone"),
        (0.0, True, f"{seconds} 0.0"),
        (float("nan"), True, f"{seconds} nan"),
    ):
        with pytest.raises(ArgumentError, match=f"^timeout_s: {message}$"):
            mlagen.prewarm(kernels=[COMBINE], timeout_s=timeout_s, isolate=isolate)


RULE = "expected a list of tables 'kernel', and nothing else, got "
NUMBER = "expected a number or a list of them, got"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[kernel]", "expected TOML, got Expected "),
        ('{"kernel": [}', "expected JSON, got Expecting value: "),
        ("\xff", "expected TOML, got 'utf-8' codec can't decode"),
        ("", f"{RULE}nothing"),
        ("[kernel]", f"{RULE}'kernel'"),
        ('{"kernel": []}', f"{RULE}'kernel'"),
        ("[[kernel]]\n[[kernels]]", f"{RULE}'kernel', 'k"),
        ('{"kernel": [1]}', "kernel 1: expected a table, got 1"),
        (
            "[[kernel]]\nmodel = 'kimi-k2'\n[[kernel]]\npagesize = 64",
            f"kernel 2: expected keys out of {', '.join(KEYS)}, got 'pagesize'",
        ),
        ("[[kernel]]\npage_size = '64'", f"kernel 1: page_size: {NUMBER} '64'"),
        ("[[kernel]]\ntp = true", f"kernel 1: tp: {NUMBER} True"),
        ("[[kernel]]\ndtype = [16]", "kernel 1: dtype: expected a text or a list of them, got [1"),
        ("[[kernel]]\nmodel = 'gpt-5'", "kernel 1: model: expected the path of a config.json "),
        ("[[kernel]]\nmodel = 'kimi-k2'\ntp = 0", f"kernel 1: tp: {INT}"),
        ("[[kernel]]\narch = 'sm_70'", "kernel 1: arch: expected one of sm_80, "),
        ("[[kernel]]\nkernel = 'x'", "kernel 1: kernel: expected family(name=value, ...), got"),
    ],
)
def test_a_mistake_in_a_spec_file_is_rejected(text: str, message: str) -> None:
    """The message has file, table, key, rule and value."""
    with pytest.raises(ArgumentError) as caught:
        read_spec_file("a", text.encode("latin-1"), archs="sm_80")
    assert str(caught.value).startswith(f"a: {message}")


RECORD = 'expected a record such as {"kernel": "..."}, got '
TEXT = "kernel: expected family(name=value, ...), got 'x'"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("compiling x\n", f"{RECORD}'compiling x'"),
        ("{}\n", f"{RECORD}'{{}}'"),
        ("[1]\n", f"{RECORD}'[1]'"),
        ('{"kernel": 1}\n', f"{RECORD}'{{\"kernel\": 1}}'"),
        ('{"kernel": "x"}\n', TEXT),
        ('{"kernel": "x"}', TEXT),
        ('{"kernel":' * 100_000 + "\n", f"{RECORD}'" + '{"kernel":' * 6 + "...'"),
        ('{"kernel": ' + "9" * 5000 + "}\n", f"{RECORD}'{{\"kernel\": {'9' * 49}...'"),
        ("ÿ" * 61 + "\n", f"{RECORD}'{'ÿ' * 60}...'"),
    ],
)
def test_an_invalid_line_of_a_record_is_rejected(line: str, message: str, log: Path) -> None:
    """The message has file, line, rule and content."""
    log.write_text(f'{{"kernel": "{COMBINE}"}}\n{line}', encoding="utf-8")
    with pytest.raises(ArgumentError) as caught:
        read_record(log)
    assert str(caught.value) == f"{log}:2: {message}"


def test_the_setting_selects_batch_invariant_kernels(monkeypatch: Patch) -> None:
    """Of models and of filters, without those that no such call takes; named kernels stay."""
    monkeypatch.setenv("MLAGEN_BATCH_INVARIANT", "1")
    for arguments in ({"models": "llama-3-8b"}, {"families": ["mla_sm80", "combine"]}):
        fields = [spec.key_fields() for spec in selected("sm_90a", **arguments)]
        assert {named["batch_invariant"] for named in fields} == {"True"}
        assert len({*map(str, fields)}) == len(fields)
    tokens = selected("sm_90a", models="qwen3.8-flash-next", wanted={"page_size": 16})
    assert [spec.family for spec in tokens] == ["gqa_sm80", "combine"]
    assert selected(kernels=[mla_sm80(), COMBINE]) == [mla_sm80(), COMBINE]
