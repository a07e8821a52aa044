"""Shell completion of option values."""

from __future__ import annotations

import click
import pytest
from click.shell_completion import BashComplete

from cache_tools.cli import cli
from cache_tools.tools.completion import completer
from tests.fixture_types import Patch
from tests.kernels import COMBINE

from .conftest import Cached


def completed(args: str, typed: str) -> dict[str, str | None]:
    """Return the completed values, with their help."""
    shell = BashComplete(cli, {}, "mlagen", "_MLAGEN_COMPLETE")
    return {item.value: item.help for item in shell.get_completions(args.split(), typed)}


@pytest.mark.parametrize(
    ("args", "typed", "expected"),
    [
        ("prewarm --model", "deepseek-r1", ["deepseek-r1", "deepseek-r1-zero"]),
        ("prewarm --model", "llama-3-8b,Kimi", ["llama-3-8b,kimi-k2", "llama-3-8b,kimi-k2.5"]),
        ("prewarm --arch", "h1", ["H100"]),
        ("prewarm --arch", "sm_80,sm_90", ["sm_80,sm_90a"]),
        ("prewarm --arch", "na", ["native"]),
        ("prewarm --family", "comb", ["combine", "combine_states"]),
        ("cache ls --arch", "sm_9", ["sm_90a"]),
        ("cache ls --family", "comb", ["combine", "combine_states"]),
        ("cache show", "zz", []),
        ("kernel show", "foo(arch", []),
        ("kernel show --arch", "zz", []),
    ],
)
def test_values_are_completed_one_after_the_other(
    args: str, typed: str, expected: list[str]
) -> None:
    """Text before the last comma stays, and an unknown value has no completion."""
    assert list(completed(args, typed)) == expected


@pytest.mark.parametrize(
    "args", ["kernel show", "kernel diff combine", "cache why", "prewarm --kernel"]
)
def test_a_spec_is_completed_in_two_steps(args: str) -> None:
    """The family comes first, and behind its opening bracket every spec that begins so."""
    assert list(completed(args, "mla_sm90_")) == ["mla_sm90_fp8", "mla_sm90_fp8kv"]
    assert str(COMBINE).replace("sm_80", "sm_90a") in completed(args, "combine(arch=sm_90a, d")


@pytest.mark.parametrize(
    "words", ["show", "why", "explain 123456", "rm 123456", "push URL", "export FILE"]
)
def test_a_key_is_completed_from_the_cache(words: str, cached: Cached) -> None:
    """A key is completed to eight digits, or one more than are typed, with its kernel as help."""
    (first, second), args = cached.keys, f"cache {words}"
    assert {first[:8], second[:8]} <= set(completed(args, ""))
    assert completed(args, first[:6]) == {first[:8]: "combine sm_80 bf16 dims 512"}
    assert list(completed(args, first[:20].upper())) == [first[:21]]


def test_a_completion_never_raises(monkeypatch: Patch) -> None:
    """A broken setting or cache completes nothing."""
    monkeypatch.setenv("MLAGEN_CACHE_MAX_SIZE", "none")

    def broken() -> list[str]:
        raise OSError

    parameter, context = click.Option(["--model"]), click.Context(cli)
    assert completed("cache show", "") == {}
    assert completer(broken)(context, parameter, "") == []
