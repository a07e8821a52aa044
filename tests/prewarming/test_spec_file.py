"""Spec files: their kernels, and the messages of invalid ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlagen.errors import ArgumentError
from mlagen.prewarming.selection import selected_specs
from mlagen.prewarming.spec_file import KEYS, read_spec_file, specs_of_file
from tests.kernels import COMBINE

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
COMBINES = {"family": "combine", "dtype": "bf16", "kv_lora_rank": [256, 512]}
TABLES = {
    "kernel": [
        {"model": "deepseek-v3", "tp": [1, 8], "kv_dtype": ["bf16", "e4m3"]},
        {"arch": ["sm_80", "sm_86"], **COMBINES},
    ]
}


def expected() -> list[object]:
    """Return the kernels of both files, without duplicates."""
    model = selected_specs(
        "sm_80", models="deepseek-v3", tp=[1, 8], wanted={"kv_dtype": ["bf16", "e4m3"]}
    )
    table = selected_specs(
        "sm_80,sm_86",
        families=["combine"],
        wanted={"dtype": "bf16", "kv_lora_rank": [256, 512]},
    )
    return list(dict.fromkeys([*model, *table]))


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", TOML), ("a.json", "\n" + json.dumps(TABLES))]
)
def test_a_table_is_the_product_of_its_lists(name: str, text: str, tmp_path: Path) -> None:
    """It applies to its own architectures or those of the command; stdin has no file name."""
    path = tmp_path / name
    path.write_text(text)

    specs = read_spec_file(path, archs="sm_80")

    assert specs == specs_of_file("-", text.encode(), archs="sm_80") == expected()
    assert COMBINE in specs


def test_a_table_may_hold_kernels_by_their_text() -> None:
    """Kernel texts are those of misses and records."""
    content = json.dumps({"kernel": [{"kernel": [str(COMBINE)]}]}).encode()

    assert specs_of_file("a", content) == [COMBINE]


TABLES_RULE = "a: expected a list of tables 'kernel', and nothing else, got "
NUMBER = "expected a number or a list of them, got"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[kernel]", "a: expected TOML, got Expected "),
        ('{"kernel": [}', "a: expected JSON, got Expecting value: "),
        ("", f"{TABLES_RULE}nothing"),
        ("[kernel]", f"{TABLES_RULE}'kernel'"),
        ('{"kernel": []}', f"{TABLES_RULE}'kernel'"),
        ("[[kernel]]\n[[kernels]]", f"{TABLES_RULE}'kernel', 'k"),
        ('{"kernel": [1]}', "a: kernel 1: expected a table, got 1"),
        (
            "[[kernel]]\nmodel = 'kimi-k2'\n[[kernel]]\npagesize = 64",
            f"a: kernel 2: expected keys out of {', '.join(KEYS)}, got 'pagesize'",
        ),
        ("[[kernel]]\npage_size = '64'", f"a: kernel 1: page_size: {NUMBER} '64'"),
        ("[[kernel]]\ntp = true", f"a: kernel 1: tp: {NUMBER} True"),
        (
            "[[kernel]]\ndtype = [16]",
            "a: kernel 1: dtype: expected a text or a list of them, got [1",
        ),
        ("[[kernel]]\nmodel = 'gpt-5'", "a: kernel 1: model: expected one of "),
        ("[[kernel]]\nmodel = 'kimi-k2'\ntp = 0", "a: kernel 1: tp: expected an int, 1 or more, g"),
        ("[[kernel]]\narch = 'sm_70'", "a: kernel 1: arch: expected one of sm_80, "),
        ("[[kernel]]\nkernel = 'x'", "a: kernel 1: kernel: expected family(name=value, ...), got"),
    ],
)
def test_a_mistake_is_rejected_with_file_and_table(text: str, message: str) -> None:
    """The message has file, table, key, rule and value."""
    with pytest.raises(ArgumentError) as caught:
        specs_of_file("a", text.encode(), archs="sm_80")

    assert str(caught.value).startswith(message)


def test_text_in_another_encoding_is_rejected() -> None:
    """TOML and JSON are UTF-8."""
    with pytest.raises(ArgumentError, match=r"^a: expected TOML, got 'utf-8' codec can't decode"):
        specs_of_file("a", b"\xff")


def test_a_missing_spec_file_is_rejected(tmp_path: Path) -> None:
    """The message has the path."""
    path = tmp_path / "none.toml"

    with pytest.raises(ArgumentError) as caught:
        read_spec_file(path)

    rule = "expected a readable file, got No such file or directory"
    assert str(caught.value) == f"{path}: {rule}"
