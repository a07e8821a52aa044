"""`mlagen prewarm`: compile kernels before the first call."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import click

from ..exit_codes import CACHE_UNUSABLE, DONE, FAILED, exit_code_of
from ..options import names, numbers
from ..progress import prewarm_progress
from ..report import (
    SHORT_KEY,
    console,
    count_text,
    json_option,
    kernel_columns,
    print_json,
    print_table,
    time_text,
)

if TYPE_CHECKING:
    from mlagen.prewarming import PrewarmReport, PrewarmUnit


@click.command()
@click.option(
    "--arch",
    "archs",
    callback=names,
    default="native",
    metavar="ARCH,...",
    help="Targets such as sm_90a; native (the default) is those of the visible GPUs.",
)
@click.option(
    "--family",
    "families",
    callback=names,
    metavar="NAME,...",
    help="Kernel families, such as mla_decode.",
)
@click.option(
    "--dtype",
    callback=names,
    metavar="DTYPE,...",
    help="Element types of the queries, such as bf16.",
)
@click.option(
    "--kv-dtype",
    callback=names,
    metavar="DTYPE,...",
    help="Element types of the KV cache, such as e4m3.",
)
@click.option(
    "--page-size", callback=numbers(1), metavar="N,...", help="Tokens of a page of the KV cache."
)
@click.option(
    "--kv-lora-rank", callback=numbers(1), metavar="N,...", help="Latent part of a cached token."
)
@click.option(
    "--head-dim", callback=numbers(1), metavar="N,...", help="Elements of a head, for GQA."
)
@click.option(
    "--lookup", callback=names, metavar="HOW,...", help="paged (the default) or sparse, for MLA."
)
@click.option(
    "--values",
    callback=names,
    metavar="HOW,...",
    help="shared (the default) or separate, for MLA.",
)
@click.option(
    "--mask", callback=names, metavar="HOW,...", help="causal (the default) or bias, for MLA."
)
@click.option(
    "--qk-rope-head-dim",
    callback=numbers(0),
    metavar="N,...",
    help="Rope part of a cached token.",
)
@click.option(
    "--heads",
    callback=numbers(1),
    metavar="N,...",
    help="Query heads of a GPU: only the tiles that such calls take.",
)
@click.option(
    "--kv-heads",
    callback=numbers(1),
    metavar="N,...",
    help="KV heads of a GPU, beside --heads, for GQA.",
)
@click.option(
    "--q-len",
    callback=numbers(1),
    metavar="N,...",
    help="Query tokens of a request, beside --heads.",
)
@click.option(
    "-j",
    "--jobs",
    type=int,
    metavar="N",
    help="Kernels at once; default: one per CPU.",
)
@click.option("--dry-run", is_flag=True, help="Say what is cached and what is not; do nothing.")
@click.option("--load", is_flag=True, help="Load them on the visible GPUs too, as a check.")
@json_option
@click.pass_context
def prewarm(
    ctx: click.Context,
    /,
    *,
    archs: list[str],
    families: list[str] | None,
    heads: list[int] | None,
    kv_heads: list[int] | None,
    q_len: list[int] | None,
    jobs: int | None,
    dry_run: bool,
    load: bool,
    as_json: bool,
    **filters: list[Any] | None,
) -> None:
    """Compile kernels before the first call needs them.

    Every supported kernel that the options leave is compiled, unless the cache has it. No GPU is
    needed, except for --arch native and --load. Ctrl-C keeps what is finished.
    """
    from mlagen import prewarming

    with nullcontext() if dry_run else prewarm_progress() as on_event:
        report = prewarming.prewarm(
            archs,
            families=families,
            heads=heads,
            kv_heads=kv_heads,
            q_len=q_len,
            jobs=jobs,
            dry_run=dry_run,
            load=load,
            on_event=on_event,
            **{label: values for label, values in filters.items() if values is not None},
        )
    _print(report, dry_run=dry_run, as_json=as_json)
    ctx.exit(_exit_code(report))


def unit_document(unit: PrewarmUnit) -> dict[str, Any]:
    """Return a unit as JSON data."""
    return {
        "key": unit.key,
        "family": unit.spec.family,
        "spec": unit.spec.ingredients(),
        "arch": str(unit.spec.arch),
        "toolchain": unit.toolchain,
        "status": unit.status,
        "ms": unit.ms,
        "registers": unit.registers,
        "spill_bytes": unit.spill_bytes,
        "cubin_bytes": unit.cubin_bytes,
        "error": str(unit.error) if unit.error else None,
    }


def _print(report: PrewarmReport, *, dry_run: bool, as_json: bool) -> None:
    from mlagen.settings import current_settings

    cache_dir = current_settings().cache_dir
    totals = report.totals()
    text = console(stderr=as_json)
    if as_json:
        units = [unit_document(unit) for unit in report.units]
        print_json({"cache_dir": str(cache_dir), "totals": totals, "units": units})
    elif dry_run and report.units:
        print_table([_row(unit) for unit in report.units])
    names = ("hit", "missing") if dry_run else ("built", "hit", "failed")
    counts = ", ".join(f"{totals[name]} {name}" for name in names)
    if report.loaded:
        counts += f", {report.loaded} loaded"
    kernels, time = count_text(len(report.units), "kernel"), time_text(report.ms)
    text.print(f"{kernels}: {counts}, in {time}, cache {cache_dir}", soft_wrap=True)


def _row(unit: PrewarmUnit) -> dict[str, Any]:
    columns = kernel_columns(unit.spec.family, unit.spec.ingredients())
    return {"status": unit.status, "key": unit.key[:SHORT_KEY], **columns}


def _exit_code(report: PrewarmReport) -> int:
    codes = {exit_code_of(unit.error) for unit in report.units if unit.error}
    if not codes:
        return DONE
    # Any one kernel may fail for reasons of its own; a cache or a compiler fails them all.
    return codes.pop() if len(codes) == 1 else CACHE_UNUSABLE if CACHE_UNUSABLE in codes else FAILED
