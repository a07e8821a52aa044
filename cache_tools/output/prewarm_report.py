"""Final report of `mlagen prewarm`: a table or a document, and the totals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..tools.bundles import bundle_facts, print_bundle
from .report import (
    SHORT_KEY,
    console,
    count_text,
    kernel_columns,
    print_json,
    print_table,
    size_text,
    time_text,
)

if TYPE_CHECKING:
    from pathlib import Path

    from mlagen.cache.bundle import BundleSummary
    from mlagen.prewarming import PrewarmReport, PrewarmUnit

# Totals that are printed only if they are not 0.
_RARE = ("timeout", "skipped", "loaded")


def print_report(
    report: PrewarmReport,
    bundle: Path | None,
    packed: BundleSummary | None,
    *,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Print the report; ``packed`` describes the bundle written to ``bundle``, if any."""
    from mlagen.settings import current_settings

    cache_dir = current_settings().cache_dir
    totals = report.totals()
    if as_json:
        facts = bundle_facts(packed, str(bundle)) if packed else None
        units = [_document(unit) for unit in report.units]
        document = {"cache_dir": str(cache_dir), "totals": totals, "left_out": report.left_out}
        print_json({**document, "bundle": facts, "units": units})
    elif dry_run and report.units and not quiet:
        print_table([_row(unit) for unit in report.units])
    for sentence in report.left_out:  # quiet runs too: a server would miss these kernels
        console(stderr=True).print(f"left out {sentence}", soft_wrap=True)
    if quiet:
        return
    always = ("hit", "missing") if dry_run else ("built", "hit", "failed")
    counts = [f"{totals[name]} {name}" for name in always]
    counts += [f"{totals[name]} {name}" for name in _RARE if totals[name]]
    kernels, time = count_text(len(report.units), "kernel"), time_text(report.ms)
    text = f"{kernels}: {', '.join(counts)}, in {time}, cache {cache_dir}"
    console(stderr=as_json).print(text, soft_wrap=True)
    if packed:
        size = size_text(packed.size_bytes)
        print_bundle(f"bundled to {bundle}, {size}", packed.sha256, as_json=as_json)


def _document(unit: PrewarmUnit) -> dict[str, Any]:
    return {
        "key": unit.key,
        "family": unit.spec.family,
        "spec": unit.spec.key_fields(),
        "arch": str(unit.spec.arch),
        "toolchain": unit.toolchain,
        "status": unit.status,
        "ms": unit.ms,
        "registers": unit.registers,
        "spill_bytes": unit.spill_bytes,
        "cubin_bytes": unit.cubin_bytes,
        "error": str(unit.error) if unit.error else None,
    }


def _row(unit: PrewarmUnit) -> dict[str, Any]:
    columns = kernel_columns(unit.spec.family, unit.spec.key_fields())
    return {"status": unit.status, "key": unit.key[:SHORT_KEY], **columns}
