"""Shell completion of option values."""

from __future__ import annotations

import pytest
from click.shell_completion import BashComplete

from cache_tools.cli import cli


@pytest.mark.parametrize(
    ("args", "typed", "expected"),
    [
        (["prewarm", "--model"], "deepseek-r1", ["deepseek-r1", "deepseek-r1-zero"]),
        (["prewarm", "--model"], "llama-3-8b,Kimi", ["llama-3-8b,kimi-k2", "llama-3-8b,kimi-k2.5"]),
        (["prewarm", "--arch"], "h1", ["H100"]),
        (["prewarm", "--arch"], "sm_80,sm_90", ["sm_80,sm_90a"]),
        (["prewarm", "--arch"], "na", ["native"]),
        (["prewarm", "--family"], "comb", ["combine"]),
        (["cache", "ls", "--arch"], "sm_9", ["sm_90a"]),
        (["cache", "ls", "--family"], "comb", ["combine"]),
    ],
)
def test_values_are_completed_one_after_the_other(
    args: list[str], typed: str, expected: list[str]
) -> None:
    """Text before the last comma stays."""
    shell = BashComplete(cli, {}, "mlagen", "_MLAGEN_COMPLETE")

    found = [item.value for item in shell.get_completions(args, typed)]

    assert found == expected
