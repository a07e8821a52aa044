"""The comparison of transcripts finds what is stale, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.doc_text import blocks_of
from tests.doc_transcript import Transcript, renewed_mark, steps_of, toolchain_of

KEY, OTHER = "24a1213b", "fcfcf4c8"
FIRST = "built    182 ms  combine sm_80 dims 512: 38 registers"
SECOND = "built     1.3 s  combine sm_80 dims 256: 40 registers"

PAGE = f"""\
# A page

<!-- Outputs by nvrtc-13.5.37. -->

```console
$ mlagen prewarm
{FIRST}
{SECOND}
2 kernels: 2 built, in 1.5 s, cache ~/.cache/mlagen
```

```python
print(1)
```

```console
$ mlagen cache ls
key       kernel   dims  registers  spill_bytes  size     used
{KEY}  combine  512          38            0  133 KiB  9 s ago
1 kernel by nvrtc-13.5.37, 133 KiB
$ mlagen cache show {KEY}
folder  ~/v1/e/24/{KEY}{"0" * 56}
compiled by nvrtc-13.5.37, 2026-11-21T09:14:57+00:00, on node, by prewarm
sha256 {"ab12" * 16}
```
"""

# What a command prints, by the command.
OUTPUTS = {
    command: "\n".join(shown)
    for block in blocks_of(PAGE)
    if block.language == "console"
    for _, command, shown in steps_of(block.text)
}


def replayed(
    changes: Mapping[str, str], *, is_same_compiler: bool = True, has_equal_keys: bool = True
) -> tuple[list[str], str]:
    """Return the differences of the page and the renewed page, where outputs have changes."""
    transcript = Transcript(is_same_compiler=is_same_compiler, has_equal_keys=has_equal_keys)

    def changed(text: str) -> str:
        for old, new in changes.items():
            text = text.replace(old, new)
        return text

    outputs = {changed(command): changed(output) for command, output in OUTPUTS.items()}
    renewed = transcript.replay(PAGE, lambda _, command: outputs[command].splitlines())
    return transcript.differences, renewed


FREE = {
    "times": {"182 ms": "5.1 ms", "  1.3 s": " 990 ms", "in 1.5 s": "in 12 ms"},
    "ages": {"  9 s ago": "  2 min ago"},
    "dates": {"2026-11-21T09": "2027-01-01T10"},
    "sizes by one": {"133 KiB": "134 KiB"},
    "digests of bundles": {"ab12" * 16: "cd34" * 16},
    "order of compiling": {f"{FIRST}\n{SECOND}": f"{SECOND}\n{FIRST}"},
}

OF_COMPILER = {
    "registers": {"38 registers": "72 registers"},
    "columns": {"38            0  133 KiB": "40            8  150 KiB"},
    "versions": {"nvrtc-13.5.37": "nvrtc-12.9.86"},
}

STALE = {
    "words": {"2 built": "1 built, 1 hit"},
    "counts": {"2 kernels": "3 kernels"},
    "dims": {"dims 256": "dims 128"},
    "alignment of kernels": {"built    182 ms": "built   182 ms"},
    "alignment of columns": {"key       kernel": "key  kernel"},
    "missing lines": {"\n1 kernel by nvrtc-13.5.37, 133 KiB": ""},
    "more lines": {"1 kernel by": "2 kernels\n1 kernel by"},
    "failures": {"1 kernel by nvrtc-13.5.37, 133 KiB": "[exit code 1]"},
}

NEW_KEYS = {KEY: OTHER, "/e/24/": "/e/fc/"}


@pytest.mark.parametrize("changes", FREE.values(), ids=FREE)
@pytest.mark.parametrize("is_same_compiler", [True, False])
def test_what_differs_between_runs_is_free(
    changes: Mapping[str, str], is_same_compiler: bool
) -> None:
    """The page is as it was."""
    assert replayed(changes, is_same_compiler=is_same_compiler) == ([], PAGE)


@pytest.mark.parametrize("changes", STALE.values(), ids=STALE)
def test_what_is_stale_is_found_and_renewed(changes: Mapping[str, str]) -> None:
    """A difference is reported, and the renewed page has no other one."""
    differences, renewed = replayed(changes)

    expected = PAGE
    for old, new in changes.items():
        expected = expected.replace(old, new)
    assert len(differences) >= 1
    assert renewed == expected


@pytest.mark.parametrize("name", [name for name in STALE if "alignment" not in name])
def test_what_is_stale_is_found_with_another_compiler(name: str) -> None:
    """Words, counts and lines depend on no compiler."""
    differences, _ = replayed(STALE[name], is_same_compiler=False, has_equal_keys=False)

    assert len(differences) >= 1


@pytest.mark.parametrize("changes", OF_COMPILER.values(), ids=OF_COMPILER)
def test_another_compiler_has_other_numbers(changes: Mapping[str, str]) -> None:
    """What depends on the compiler is compared only with the same one."""
    assert replayed(changes, is_same_compiler=False) == ([], PAGE)
    assert len(replayed(changes)[0]) >= 1


def test_another_key_is_stale() -> None:
    """With equal options keys are compared, and a renewed page has the new one everywhere."""
    differences, renewed = replayed(NEW_KEYS)

    assert len(differences) == 2
    assert renewed == PAGE.replace(KEY, OTHER).replace("/e/24/", "/e/fc/")
    assert len(replayed(NEW_KEYS, is_same_compiler=False)[0]) == 2


def test_with_other_options_a_key_stands_for_one_key() -> None:
    """Other keys are accepted if they are the same on the whole page."""
    other = {"is_same_compiler": False, "has_equal_keys": False}
    two_keys = {f"{KEY}  combine": f"{OTHER}  combine", f"show {KEY}": f"show {OTHER}"}

    assert replayed(NEW_KEYS, **other)[0] == []
    assert len(replayed(two_keys, **other)[0]) == 1


def test_a_page_names_its_compiler() -> None:
    """The mark of a page is read, and renewed."""
    renewed = renewed_mark(PAGE, "nvrtc-13.6.1")

    assert (toolchain_of(PAGE), toolchain_of(renewed)) == ("nvrtc-13.5.37", "nvrtc-13.6.1")
    with pytest.raises(AssertionError, match="expected a line"):
        toolchain_of("# A page\n")
