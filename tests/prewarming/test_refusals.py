"""Arguments, spec files and records that a prewarm rejects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mlagen
from mlagen.errors import ArgumentError
from mlagen.prewarming.record_file import read_record
from mlagen.prewarming.selection import selected_specs
from mlagen.prewarming.spec_file import KEYS, read_spec_file, specs_of_file
from tests.kernels import COMBINE

V3: dict[str, Any] = {"models": "deepseek-v3"}
ALONE = "expected none beside kernels, without models, got"
FAMILIES = (
    "mla_sm80, mla_sm90, mla_sm90_fp8, mla_sm90_fp8kv, gqa_sm80, gqa_sm90, combine, combine_states"
)
KV_DTYPES = "bf16, fp16, e4m3, int8, nvfp4, fp8_ds_mla, fp8_per_token"
INT = "expected an int, 1 or more, got"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (V3 | {"tp": 0}, f"tp: {INT} 0"),
        (V3 | {"tp": True}, f"tp: {INT} True"),
        (V3 | {"q_len": [0]}, f"q_len: {INT} 0"),
        (V3 | {"tp": []}, "tp: expected one or more beside models, got none"),
        (V3 | {"heads": 16}, "heads: expected none beside models, which define it, got "),
        (V3 | {"kv_heads": 16}, "kv_heads: expected none beside models, which define it"),
        (V3 | {"wanted": {"mask": "bias"}}, "mask: expected none beside models, got 'bi"),
        (V3 | {"wanted": {"page_size": "64"}}, f"page_size: {INT} "),
        (V3 | {"wanted": {"kv_dtype": "fp8"}}, f"kv_dtype: expected one of {KV_DTYPES}, got 'fp8'"),
        (V3 | {"wanted": {"lookup": "dense"}}, "lookup: expected one of paged, sparse, got "),
        (V3 | {"families": ["mla"]}, f"family: expected one of {FAMILIES}, got 'mla'"),
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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout_s": 1.0}, "expected isolate beside it, got 1.0 alone"),
        ({"timeout_s": 0.0, "isolate": True}, "expected more than 0 seconds, got 0.0"),
        ({"timeout_s": float("nan"), "isolate": True}, "expected more than 0 seconds, got nan"),
    ],
)
def test_a_timeout_needs_isolation_and_must_be_positive(
    options: dict[str, Any], message: str
) -> None:
    """A compiling thread cannot be killed, so a timeout needs isolation."""
    with pytest.raises(ArgumentError, match=f"^timeout_s: {message}$"):
        mlagen.prewarm(kernels=[COMBINE], **options)


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
        ("[[kernel]]\nmodel = 'gpt-5'", "kernel 1: model: expected one of "),
        ("[[kernel]]\nmodel = 'kimi-k2'\ntp = 0", f"kernel 1: tp: {INT}"),
        ("[[kernel]]\narch = 'sm_70'", "kernel 1: arch: expected one of sm_80, "),
        ("[[kernel]]\nkernel = 'x'", "kernel 1: kernel: expected family(name=value, ...), got"),
    ],
)
def test_a_mistake_in_a_spec_file_is_rejected(text: str, message: str) -> None:
    """The message has file, table, key, rule and value."""
    with pytest.raises(ArgumentError) as caught:
        specs_of_file("a", text.encode("latin-1"), archs="sm_80")
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
        ('{"kernel": "comb\n', f'{RECORD}\'{{"kernel": "comb\''),
        ("ÿ" * 61 + "\n", f"{RECORD}'{'ÿ' * 60}...'"),
    ],
)
def test_an_invalid_line_of_a_record_is_rejected(line: str, message: str, tmp_path: Path) -> None:
    """The message has file, line, rule and content."""
    log = tmp_path / "record.jsonl"
    log.write_text(f'{{"kernel": "{COMBINE}"}}\n{line}', encoding="utf-8")
    with pytest.raises(ArgumentError) as caught:
        read_record(log)
    assert str(caught.value) == f"{log}:2: {message}"


@pytest.mark.parametrize("read", [read_spec_file, read_record])
def test_a_missing_file_is_rejected(read: Callable[[Path], object], tmp_path: Path) -> None:
    """The message has the path."""
    path = tmp_path / "none.toml"
    with pytest.raises(ArgumentError, match=f"^{path}: expected a readable file, got No "):
        read(path)
