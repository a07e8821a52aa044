"""Human-readable report of the demo."""

from __future__ import annotations

from typing import Any

import pytest

from cache_tools.output.demo_report import print_demo

KEY = "0123456789abcdef" * 4


def demo_document(*, is_right: bool) -> dict[str, Any]:
    """Return a document of the demo on a GPU."""
    return {
        "problem": {
            "seq_lens": [17, 9001],
            "heads": 16,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "page_size": 64,
            "dtype": "bf16",
        },
        "gpu": "NVIDIA H200",
        "times": [{"name": "first call", "ms": 676.4, "note": "from an empty cache"}],
        "result": {"largest_error": 0.0078, "share_of_bound": 0.52, "is_right": is_right},
        "kernels": [
            {
                "key": KEY,
                "family": "combine",
                "spec": {"arch": "sm_90a", "dtype": "bf16", "head_dim_vo": "512"},
                "compile_ms": 84.0,
                "registers": 36,
                "spill_bytes": 0,
                "shared_bytes": 2064,
                "cubin_bytes": 16_200,
                "path": "/cache/entry",
            }
        ],
    }


@pytest.mark.parametrize(("is_right", "verdict"), [(True, "right"), (False, "WRONG")])
def test_the_report_is_complete(
    is_right: bool, verdict: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report has problem, times, error, kernels, and the command for details."""
    print_demo(demo_document(is_right=is_right))

    title, *page = capsys.readouterr().out.splitlines()
    assert title == (
        "MLA decode on NVIDIA H200: 2 requests of 17 to 9001 tokens, 16 heads, 512 + 64, bf16, "
        "page_size 64"
    )
    times, table, ending = page[1:3], [line.split("  ") for line in page[4:6]], page[6:]
    assert times == [
        "first call                  676 ms  from an empty cache",
        f"largest error to float64   0.00780  {verdict}: 52% of the bf16 rounding bound",
    ]
    header, row = ([cell.strip() for cell in line if cell] for line in table)
    assert dict(zip(header, row, strict=True)) == {
        "key": "01234567",
        "kernel": "combine",
        "arch": "sm_90a",
        "compiled in": "84 ms",
        "registers": "36",
        "spill_bytes": "0",
        "shared_bytes": "2064",
        "cubin": "16 KiB",
    }
    assert ending == ["", "/cache/entry", "Read it: mlagen cache show 01234567 --source"]
