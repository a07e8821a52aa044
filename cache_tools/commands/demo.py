"""`mlagen demo`: one decode from its first call to its cached kernels, with times and the error.

Times of a fresh process are measured in one: this module runs itself with ``--stage``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
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
    print_facts,
    print_json,
    time_text,
)
from ..tools.entries import entries_of, matches_toolchain, required_toolchain
from ..tools.interrupts import summarized
from .cache_lists import line_of, print_entries

if TYPE_CHECKING:
    import torch

    from mlagen.prewarming import PrewarmReport
    from mlagen.spec.kernel import KernelSpec

    from ..benchmark.cases import Case
    from ..benchmark.inputs import Inputs

# Without a GPU: the target of H100 and H200, and the oldest one.
CROSS_ARCHS = ("sm_90a", "sm_80")

# The kernels of the call, on any GPU.
_FAMILIES = ("mla_sm80", "mla_sm90", "combine")


def _case() -> Case:
    """Return a call of DeepSeek-V3, tensor parallelism 8, with requests of different lengths."""
    from ..benchmark.selection import case_of

    return case_of("mla", batch=6, heads=16, is_ragged=True)


@click.command()
@click.option("--stage", is_flag=True, hidden=True)
@json_option
@click.pass_context
def demo(ctx: click.Context, /, *, stage: bool, as_json: bool) -> None:
    """Run one MLA decode from first call to cached kernels.

    With a GPU: times of a first call, a second one, and the first of a new process. Without a GPU:
    the kernels are compiled, and the CPU backend computes. The result is compared with fp32, and
    the kernels stay in the cache. Exits with 1 if it is wrong.
    """
    if stage:
        print_json(_stage())
        return
    import torch

    from mlagen.cache.store import kernel_store

    kept: set[KernelSpec] = set()
    with summarized(lambda: f"{count_text(len(kept), 'kernel')} kept"):
        document, report = (_with_gpu if torch.cuda.is_available() else _without_gpu)(kept)
    store, toolchain = kernel_store(), required_toolchain()
    kernels = [
        line_of(stored)
        for unit in report.units
        for stored in entries_of(store, unit.key)
        if matches_toolchain(stored, toolchain)
    ]
    if as_json:
        print_json({**document, "kernels": [line.entry for line in kernels]})
    else:
        print_demo(document)
        click.echo()
        print_entries(kernels, store.root)
        key = kernels[0].entry["key"][:SHORT_KEY]
        click.echo(f"Read one: mlagen cache show {key} --source")
    ctx.exit(DONE if document["result"]["is_right"] else FAILED)


def print_demo(document: dict[str, Any]) -> None:
    """Print the call, the time of each step and the error."""
    result = document["result"]
    lengths = document["seq_lens"]
    console().print(
        f"{document['case']} on {document['gpu'] or 'the CPU'}: requests of {min(lengths)} to "
        f"{max(lengths)} tokens\n",
        soft_wrap=True,
    )
    facts = {row["name"]: f"{time_text(row['ms']):>8}  {row['note']}" for row in document["times"]}
    verdict = "right" if result["is_right"] else "WRONG"
    facts["relative error to fp32"] = (
        f"{result['error']:8.1e}  {verdict}, bound {result['error_bound']:g}"
    )
    print_facts(facts)


def _announce(step: str) -> None:
    console(stderr=True).print(f"{step} ...", soft_wrap=True)


def _with_gpu(kept: set[KernelSpec]) -> tuple[dict[str, Any], PrewarmReport]:
    with TemporaryDirectory(prefix="mlagen-demo-") as empty:
        _announce("first process")
        first = _in_new_process(empty)
        _announce("second process, same cache")
        second = _in_new_process(empty)
    report = _prewarm("native", kept)
    times = {
        "first call, empty cache": (first["first_ms"], "after imports and CUDA initialization"),
        "second call": (first["second_ms"], "until the GPU finishes"),
        "one of many calls": (first["steady_ms"], "on the GPU, in a CUDA graph"),
        "first call of a new process": (second["first_ms"], "kernels loaded from the cache"),
    }
    return _document(first["gpu"], times, first["result"]), report


def _without_gpu(kept: set[KernelSpec]) -> tuple[dict[str, Any], PrewarmReport]:
    from ..benchmark import calls, inputs

    _announce(f"no GPU: compiling for {' and '.join(CROSS_ARCHS)}")
    report = _prewarm(",".join(CROSS_ARCHS), kept)
    _announce("computing on the CPU")
    given = inputs.make_inputs(_case(), 1, "cpu")
    call = calls.mlagen_call(given)
    start = time.perf_counter()
    out = call(0)
    cpu_ms = (time.perf_counter() - start) * 1e3
    totals = report.totals()
    built = count_text(int(totals["built"]), "kernel")
    times = {
        "compiling": (report.ms, f"{built}; {totals['hit']} in the cache before"),
        "the call on the CPU backend": (cpu_ms, "slow, with the same checks and results"),
    }
    return _document(None, times, result_of(given, out)), report


def _document(
    gpu: str | None, times: dict[str, tuple[float, str]], result: dict[str, Any]
) -> dict[str, Any]:
    case = _case()
    return {
        "case": case.label,
        "seq_lens": case.seq_lens,
        "gpu": gpu,
        "times": [{"name": name, "ms": ms, "note": note} for name, (ms, note) in times.items()],
        "result": result,
    }


def result_of(inputs: Inputs, out: torch.Tensor) -> dict[str, Any]:
    """Compare an output as a benchmark does; NaN is never right."""
    from ..benchmark.inputs import attend, relative_error

    error, bound = relative_error(out, attend(inputs)), inputs.case.error_bound
    return {"error": error, "error_bound": bound, "is_right": error <= bound}


def _prewarm(archs: str, kept: set[KernelSpec]) -> PrewarmReport:
    from mlagen.prewarming import prewarm

    case = _case()
    with prewarm_progress(kept) as on_event:
        report = prewarm(
            archs,
            families=_FAMILIES,
            dtype=str(case.dtype),
            kv_dtype=str(case.kv_dtype),
            kv_lora_rank=case.head_dim_vo,
            qk_rope_head_dim=case.qk_rope_head_dim,
            page_size=case.page_size,
            heads=case.heads,
            on_event=on_event,
        )
    if errors := [unit.error for unit in report.units if unit.error is not None]:
        raise errors[0]
    return report


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

    from ..benchmark.calls import mlagen_call
    from ..benchmark.inputs import make_inputs
    from ..benchmark.timing import Replays

    inputs = make_inputs(_case(), 1, "cuda")
    call = mlagen_call(inputs)

    def timed() -> tuple[float, torch.Tensor]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = call(0)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3, out

    first_ms, out = timed()
    second_ms, _ = timed()
    return {
        "gpu": torch.cuda.get_device_name(),
        "first_ms": first_ms,
        "second_ms": second_ms,
        "steady_ms": Replays(call).median_us() / 1e3,
        "result": result_of(inputs, out),
    }
