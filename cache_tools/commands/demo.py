"""`mlagen demo`: one decode from its first call to its cached kernels, with times and the error.

Times of a fresh process are measured in one: this module runs itself with ``--stage``.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from ..options.exit_codes import DONE, FAILED
from ..output.progress import prewarm_progress
from ..output.report import (
    SHORT_KEY,
    console,
    count_text,
    json_option,
    kernel_columns,
    print_facts,
    print_json,
    print_table,
    resource_columns,
    size_text,
    time_text,
)
from ..tools.interrupts import summarized

if TYPE_CHECKING:
    import torch

    from mlagen.prewarming import PrewarmReport
    from mlagen.spec.kernel import KernelSpec


# DeepSeek-V3 with tensor parallelism 8, and requests of very different lengths.
SEQ_LENS = (17, 64, 1000, 2500, 4099, 9001)
HEADS = 16
PAGE_SIZE = 64
KV_LORA_RANK = 512
QK_ROPE_HEAD_DIM = 64
SCALE = 192**-0.5


def problem_on(device: str) -> dict[str, Any]:
    """Return the arguments of the call, and the tokens of each request for the reference."""
    import torch

    generator = torch.Generator().manual_seed(0)
    width = KV_LORA_RANK + QK_ROPE_HEAD_DIM
    counts = [-(-length // PAGE_SIZE) for length in SEQ_LENS]
    order = torch.randperm(sum(counts), generator=generator)
    # Slots outside of all requests are NaN: a kernel that reads one fails the comparison.
    cache = torch.full((sum(counts), PAGE_SIZE, width), torch.nan, dtype=torch.bfloat16)
    tables = torch.full((len(SEQ_LENS), max(counts)), -1, dtype=torch.int32)
    tokens = []
    page_ids = torch.split(order, counts)
    for request, (length, pages) in enumerate(zip(SEQ_LENS, page_ids, strict=True)):
        slots = torch.full((len(pages) * PAGE_SIZE, width), torch.nan, dtype=torch.bfloat16)
        slots[:length] = torch.randn(length, width, generator=generator)
        cache[pages] = slots.view(len(pages), PAGE_SIZE, width)
        tables[request, : len(pages)] = pages
        tokens.append(slots[:length])
    query = torch.randn(len(SEQ_LENS), 1, HEADS, width, generator=generator).bfloat16()
    return {
        "tokens": tokens,
        "query": query.to(device),
        "kv_cache": cache.to(device),
        "block_tables": tables.to(device),
        "seq_lens": torch.tensor(SEQ_LENS, dtype=torch.int32).to(device),
        "workspace_buffer": torch.empty(64 << 20, dtype=torch.uint8, device=device),
    }


def decode(problem: dict[str, Any]) -> torch.Tensor:
    """Return the output of the call."""
    from mlagen.mla import trtllm_batch_decode_with_kv_cache_mla

    tensors = {name: value for name, value in problem.items() if name != "tokens"}
    out = trtllm_batch_decode_with_kv_cache_mla(
        **tensors,
        qk_nope_head_dim=128,
        kv_lora_rank=KV_LORA_RANK,
        qk_rope_head_dim=QK_ROPE_HEAD_DIM,
        max_seq_len=max(SEQ_LENS),
        bmm1_scale=SCALE,
    )
    assert not isinstance(out, tuple)
    return out


def result_of(problem: dict[str, Any], out: torch.Tensor) -> dict[str, Any]:
    """Compare every element with float64, within its rounding bound.

    With u = 2^-8 of bf16: 2 u of the result, for rounding it and for a single weight; 3.5 u of the
    root of sum((P * V)^2), six standard deviations of independently rounded P; and 2^-13 of
    sum(P * |V|) for the float32 intermediates.
    """
    import torch

    largest, share = 0.0, 0.0
    for request, tokens in enumerate(problem["tokens"]):
        query = problem["query"][request, 0].cpu().double()
        values = tokens[:, :KV_LORA_RANK].double()
        weights = torch.softmax(query @ tokens.double().T * SCALE, dim=1)
        expected = weights @ values
        spread = (weights.square() @ values.square()).sqrt()
        bound = 2**-8 * (2 * expected.abs() + 3.5 * spread) + 2**-13 * (weights @ values.abs())
        error = (out[request, 0].cpu().double() - expected).abs()
        error = torch.where(error.isnan(), math.inf, error)
        largest = max(largest, error.max().item())
        share = max(share, (error / bound).max().item())
    return {"largest_error": largest, "share_of_bound": share, "is_right": share <= 1}


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


# Without a GPU: the target of H100 and H200, and the oldest one.
CROSS_ARCHS = ("sm_90a", "sm_80")


@click.command()
@click.option("--stage", is_flag=True, hidden=True)
@json_option
@click.pass_context
def demo(ctx: click.Context, /, *, stage: bool, as_json: bool) -> None:
    """Run one MLA decode from first call to cached kernels.

    With a GPU: times of a first call, a second one, and the first of a new process. Without a GPU:
    the kernels are compiled, and the CPU backend computes. The result is compared with float64,
    and the kernels stay in the cache. Exits with 1 if it is wrong.
    """
    if stage:
        print_json(_stage())
        return
    import torch

    def announce(step: str) -> None:
        console(stderr=True).print(f"{step} ...", soft_wrap=True)

    kept: set[KernelSpec] = set()
    with summarized(lambda: f"{count_text(len(kept), 'kernel')} kept"):
        if torch.cuda.is_available():
            document = _with_gpu(announce, kept)
        else:
            document = _without_gpu(announce, kept)
    if as_json:
        print_json(document)
    else:
        print_demo(document)
    ctx.exit(DONE if document["result"]["is_right"] else FAILED)


def _with_gpu(announce: Callable[[str], None], kept: set[KernelSpec]) -> dict[str, Any]:
    with TemporaryDirectory(prefix="mlagen-demo-") as empty:
        announce("first process")
        first = _in_new_process(empty)
        announce("second process, same cache")
        second = _in_new_process(empty)
    report = _prewarm("native", kept)
    times = {
        "first call, empty cache": (first["first_ms"], "after imports and CUDA initialization"),
        "second call": (first["second_ms"], "until the GPU finishes"),
        "one of many calls": (first["steady_ms"], "on the GPU, by CUDA events"),
        "first call of a new process": (second["first_ms"], "kernels loaded from the cache"),
    }
    return _document(first["gpu"], times, first["result"], report)


def _without_gpu(announce: Callable[[str], None], kept: set[KernelSpec]) -> dict[str, Any]:
    announce(f"no GPU: compiling for {' and '.join(CROSS_ARCHS)}")
    report = _prewarm(",".join(CROSS_ARCHS), kept)
    announce("computing on the CPU")
    problem = problem_on("cpu")
    start = time.perf_counter()
    out = decode(problem)
    cpu_ms = (time.perf_counter() - start) * 1e3
    totals = report.totals()
    built = count_text(int(totals["built"]), "kernel")
    times = {
        "compiling": (report.ms, f"{built}; {totals['hit']} in the cache before"),
        "the call on the CPU backend": (cpu_ms, "slow, with the same checks and results"),
    }
    return _document(None, times, result_of(problem, out), report)


def _prewarm(archs: str, kept: set[KernelSpec]) -> PrewarmReport:
    from mlagen.prewarming import prewarm

    with prewarm_progress(kept) as on_event:
        report = prewarm(archs, families=_FAMILIES, heads=HEADS, on_event=on_event, **_KERNELS)
    if errors := [unit.error for unit in report.units if unit.error is not None]:
        raise errors[0]
    return report


# The kernels of the call, on any GPU.
_FAMILIES = ("mla_sm80", "mla_sm90", "combine")
_KERNELS: dict[str, Any] = {
    "dtype": "bf16",
    "kv_dtype": "bf16",
    "kv_lora_rank": KV_LORA_RANK,
    "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
    "page_size": PAGE_SIZE,
}


def _in_new_process(cache_dir: str) -> dict[str, Any]:
    package = __package__.rpartition(".commands")[0]
    command = [sys.executable, "-m", package, "demo", "--stage"]
    from mlagen.settings import unread_variables

    environment = {
        **os.environ,
        "MLAGEN_CACHE_DIR": cache_dir,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    for name in unread_variables(os.environ):  # this process has warned of it
        del environment[name]
    # In its own session: Ctrl-C reaches only this process, which ends the other one.
    ran = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, check=False, start_new_session=True
    )
    if ran.returncode != DONE:  # it shares stderr, and has printed the reason
        click.get_current_context().exit(ran.returncode)
    return dict(json.loads(ran.stdout))


def _stage() -> dict[str, Any]:
    import torch

    import_module("mlagen.mla")  # keeps the import out of the first call
    problem = problem_on("cuda")

    def timed() -> tuple[float, torch.Tensor]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = decode(problem)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3, out

    first_ms, out = timed()
    second_ms, _ = timed()
    return {
        "gpu": torch.cuda.get_device_name(),
        "first_ms": first_ms,
        "second_ms": second_ms,
        "steady_ms": median(_gpu_ms(lambda: decode(problem), calls=20) for _ in range(10)),
        "result": result_of(problem, out),
    }


def _gpu_ms(call: Callable[[], object], *, calls: int) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / calls


def _document(
    gpu: str | None,
    times: dict[str, tuple[float, str]],
    result: dict[str, Any],
    report: PrewarmReport,
) -> dict[str, Any]:
    from mlagen.cache.store import kernel_store
    from mlagen.engine import key_of

    kernels = []
    for unit in report.units:
        entry = kernel_store().find(key_of(unit.spec))
        assert entry is not None, "just published"
        assert entry.path is not None
        facts = entry.manifest.facts
        kernels.append(
            {
                "key": unit.key,
                "family": unit.spec.family,
                "spec": unit.spec.key_fields(),
                "compile_ms": facts["compile_ms"],
                **resource_columns(facts["resources"], facts["kernel"]["dynamic_shared_bytes"]),
                "cubin_bytes": len(entry.cubin),
                "path": str(entry.path),
            }
        )
    return {
        "problem": {
            "seq_lens": SEQ_LENS,
            "heads": HEADS,
            "kv_lora_rank": KV_LORA_RANK,
            "qk_rope_head_dim": QK_ROPE_HEAD_DIM,
            "page_size": PAGE_SIZE,
            "dtype": "bf16",
        },
        "gpu": gpu,
        "times": [{"name": name, "ms": ms, "note": note} for name, (ms, note) in times.items()],
        "result": result,
        "kernels": kernels,
    }
