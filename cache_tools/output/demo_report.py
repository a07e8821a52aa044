"""Human-readable report of the demo."""

from __future__ import annotations

from typing import Any

from .report import (
    SHORT_KEY,
    console,
    kernel_columns,
    print_facts,
    print_table,
    size_text,
    time_text,
)


def print_demo(document: dict[str, Any]) -> None:
    """Print the problem, the time of each step, the error and the kernels."""
    result, kernels, text = document["result"], document["kernels"], console()
    problem = document["problem"]
    lengths = problem["seq_lens"]
    text.print(
        f"MLA decode on {document['gpu'] or 'the CPU'}: {len(lengths)} requests of "
        f"{min(lengths)} to {max(lengths)} tokens, {problem['heads']} heads, "
        f"{problem['kv_lora_rank']} + {problem['qk_rope_head_dim']}, {problem['dtype']}, "
        f"page_size {problem['page_size']}\n",
        soft_wrap=True,
    )
    facts = {row["name"]: f"{time_text(row['ms']):>8}  {row['note']}" for row in document["times"]}
    verdict = "right" if result["is_right"] else "WRONG"
    facts["largest error to float64"] = (
        f"{result['largest_error']:8.5f}  {verdict}: "
        f"{result['share_of_bound']:.0%} of the {problem['dtype']} rounding bound"
    )
    print_facts(facts)
    text.print()
    print_table([_row(kernel) for kernel in kernels])
    text.print(f"\n{kernels[0]['path']}", soft_wrap=True)
    text.print(f"Read it: mlagen cache show {kernels[0]['key'][:SHORT_KEY]} --source")


def _row(kernel: dict[str, Any]) -> dict[str, Any]:
    columns = kernel_columns(kernel["family"], kernel["spec"])
    names = ("registers", "spill_bytes", "shared_bytes")
    return {
        "key": kernel["key"][:SHORT_KEY],
        "kernel": columns["kernel"],
        "arch": columns["arch"],
        "compiled in": time_text(kernel["compile_ms"]),
        **{name: kernel[name] for name in names},
        "cubin": size_text(kernel["cubin_bytes"]),
    }
