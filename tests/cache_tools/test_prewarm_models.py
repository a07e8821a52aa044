"""First lines of `mlagen prewarm --dry-run`: how models are served."""

from __future__ import annotations

import pytest

from .conftest import Run

LLAMA = "llama-3-8b, tp 1 and 2: 32 and 16 heads, page size 16 and 64, q_len 1"
QWEN = "qwen3-32b, tp 1 and 2: 64 and 32 heads, page size 16 and 64, q_len 1"
DEEPSEEK = "deepseek-v3.2, tp 1: 128 heads, page size 64, q_len 1 and 4"


@pytest.mark.parametrize(
    ("options", "assumed"),
    [
        (
            ("deepseek-v3", "--tp", "8"),
            ["deepseek-v3, tp 8: 16 heads, page size 64, q_len 1, query/cache bf16/bf16, paged"],
        ),
        (
            ("deepseek-v3.2", "--kv-dtype", "fp8_ds_mla", "--q-len", "1,4"),
            [f"{DEEPSEEK}, query/cache bf16/fp8_ds_mla, paged and sparse"],
        ),
        (
            ("llama-3-8b,qwen3-32b", "--tp", "1,2"),
            [f"{LLAMA}, query/cache bf16/bf16", f"{QWEN}, query/cache bf16/bf16"],
        ),
    ],
)
def test_a_dry_run_says_how_models_are_served(
    options: tuple[str, ...], assumed: list[str], run: Run
) -> None:
    """Defaults are named as well, before the table, and on stderr with --json."""
    command = ("prewarm", "--dry-run", "--arch", "sm_90a", "--model", *options)

    table, document, quiet = run(*command), run(*command, "--json"), run(*command, "-q")

    assert table.stdout.splitlines()[: len(assumed)] == assumed
    assert document.stderr.splitlines()[: len(assumed)] == assumed
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (1, "", "")
