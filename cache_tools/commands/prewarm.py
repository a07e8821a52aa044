"""`mlagen prewarm`: compile kernels before the first call."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..options.exit_codes import CACHE_UNUSABLE, DONE, FAILED, TIMEOUT, exit_code_of
from ..options.selection_options import selection_options
from ..output.progress import prewarm_progress
from ..output.report import (
    SHORT_KEY,
    console,
    count_text,
    json_option,
    kernel_columns,
    print_json,
    print_table,
    size_text,
    time_text,
)
from ..tools.bundles import bundle_facts, print_bundle, require_path
from ..tools.interrupts import summarized, terminated_as_interrupted

if TYPE_CHECKING:
    from mlagen.cache.bundle import BundleSummary
    from mlagen.prewarming import PrewarmReport, PrewarmUnit
    from mlagen.spec.kernel import KernelSpec


@click.command()
@click.argument("files", nargs=-1, metavar="[FILE.toml|FILE.json|-]...")
@selection_options
@click.option(
    "-j",
    "--jobs",
    type=int,
    metavar="N",
    help="Parallel compilations; default: one per CPU, limited by memory.",
)
@click.option("--isolate", is_flag=True, help="Compile each kernel in its own process.")
@click.option(
    "--timeout",
    "timeout_s",
    type=float,
    metavar="SECONDS",
    help="Time limit of such a process; default: 600.",
)
@click.option(
    "--fail-fast/--keep-going",
    help="Whether to stop at the first failure; default: keep going.",
)
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    callback=require_path,
    metavar="FILE",
    help="Write exactly these kernels into a bundle for mlagen cache import.",
)
@click.option(
    "--dry-run", is_flag=True, help="Report what is cached, and exit with 1 if a kernel is not."
)
@click.option("--load", is_flag=True, help="Also load them on the visible GPUs, as a check.")
@click.option("-q", "--quiet", is_flag=True, help="Print only failures.")
@json_option
@click.pass_context
def prewarm(
    ctx: click.Context,
    /,
    *,
    files: tuple[str, ...],
    archs: list[str] | None,
    kernels: tuple[str, ...],
    logs: tuple[str, ...],
    bundle: Path | None,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compile kernels before the first call needs them.

    Compiles the kernels of --model, --kernel, --from-log and the files, which hold [[kernel]]
    tables with the names of these options. Without any of them, every supported kernel that
    matches the options. Cached kernels are not recompiled. Only --arch native and --load need a
    GPU. Ctrl-C keeps finished kernels.
    """
    from mlagen import prewarming
    from mlagen.errors import CacheError

    _require_usable(bundle, dry_run=dry_run, options=options)
    if kernels and archs and not (files or logs or options["models"]):
        raise click.UsageError("arch: expected none with --kernel, whose text names it, got one")
    kept: set[KernelSpec] = set()
    with terminated_as_interrupted(), summarized(lambda: f"{count_text(len(kept), 'kernel')} kept"):
        left_out: dict[str, None] = {}
        named = _named_kernels(files, kernels, logs, archs, left_out.setdefault)
        progress = prewarm_progress(
            kept,
            selects_all=named is None and options["models"] is None,
            is_quiet=quiet,
        )
        with nullcontext() if dry_run else progress as on_event:
            report = prewarming.prewarm(
                ["native"] if archs is None else archs,
                kernels=named,
                dry_run=dry_run,
                on_event=on_event,
                **{label: value for label, value in options.items() if value is not None},
            )
        left_out |= dict.fromkeys(report.left_out)
        report = replace(report, left_out=tuple(left_out))
        status, packed, failure = _exit_code(report), None, None
        if bundle is not None and status == DONE:
            try:
                packed = _bundled(report, bundle)
            except CacheError as error:  # raised below the report, which would be lost
                failure = error
    if dry_run and not quiet:
        for line in _assumptions(options):
            click.echo(line, err=as_json)
    print_report(report, bundle, packed, dry_run=dry_run, quiet=quiet, as_json=as_json)
    if failure is not None:
        raise failure
    missing = sum(unit.status == "missing" for unit in report.units)
    if missing and not quiet:  # in a dry run
        counted = f"{count_text(missing, 'kernel')} missing"
        advice = "without --dry-run, prewarm compiles them"
        click.echo(f"exit code {status}: {counted}; {advice}", err=as_json)
    ctx.exit(status)


def _require_usable(bundle: Path | None, *, dry_run: bool, options: Mapping[str, Any]) -> None:
    """Reject options that cannot be followed, before the long work."""
    from mlagen.cache.bundle import require_target

    if bundle is not None and dry_run:
        raise click.UsageError("bundle: expected none with --dry-run, got one")
    if options["timeout_s"] is not None and not options["isolate"]:
        raise click.UsageError("timeout: expected --isolate with it, got it alone")
    if bundle is not None:
        require_target(bundle)


def _assumptions(options: Mapping[str, Any]) -> list[str]:
    """Return how each of the models is served, as far as options and defaults say."""
    if options["models"] is None:
        return []
    from mlagen.prewarming.selection import MODEL_OPTIONS, serving_texts

    names = ("models", "tp", "dcp", "q_len", *MODEL_OPTIONS)
    return serving_texts(**{name: options[name] for name in names if options[name] is not None})


def _named_kernels(
    files: tuple[str, ...],
    kernels: tuple[str, ...],
    logs: tuple[str, ...],
    archs: list[str] | None,
    on_left_out: Callable[[str], None],
) -> list[KernelSpec] | None:
    """Return the kernels of the given texts, files and records; None if none is given."""
    if not (files or kernels or logs):
        return None
    from mlagen.errors import ArgumentError
    from mlagen.paths import MAX_NAMED_BYTES
    from mlagen.prewarming.files import read_record, read_spec_file
    from mlagen.spec.text import parse_spec

    specs = [parse_spec(text) for text in kernels]
    default = ["native"] if archs is None else archs
    for file in files:
        if file == "-":
            content = sys.stdin.buffer.read(MAX_NAMED_BYTES + 1)
            if len(content) > MAX_NAMED_BYTES:
                rule = f"at most {MAX_NAMED_BYTES >> 20} MiB"
                raise ArgumentError(f"-: expected {rule}, got more")
            specs += read_spec_file("-", content, archs=default, on_left_out=on_left_out)
        elif file.endswith((".toml", ".json")):
            specs += read_spec_file(file, archs=default, on_left_out=on_left_out)
        else:
            raise ArgumentError(f"file: expected one that ends with .toml or .json, got {file!r}")
    for log in logs:
        specs += read_record(Path(log), archs=archs)
    return specs


def _bundled(report: PrewarmReport, target: Path) -> BundleSummary:
    """Write exactly the kernels of a report into a bundle."""
    from mlagen.cache.bundle import export_bundle
    from mlagen.cache.store import kernel_store
    from mlagen.errors import ArgumentError, CacheError

    if not report.units:
        raise ArgumentError(f"bundle: expected kernels, got none for {target}")
    store = kernel_store()
    # Entries of the cache folder take precedence over those of a layer.
    found = {
        (stored.key, stored.toolchain): stored
        for unit in report.units
        for stored in reversed(store.select(unit.key))
    }
    wanted = dict.fromkeys((unit.key, unit.toolchain) for unit in report.units)
    if not wanted.keys() <= found.keys():
        message = f"cache: expected entries on the disk, got some in memory only: {store.root}"
        raise CacheError(message, path=store.root)
    return export_bundle([found[name] for name in wanted], target)


def _exit_code(report: PrewarmReport) -> int:
    codes = {
        TIMEOUT if unit.status == "timeout" else exit_code_of(unit.error)
        for unit in report.units
        if unit.error
    }
    if any(unit.status == "missing" for unit in report.units):  # in a dry run
        codes.add(FAILED)
    if not codes:
        return DONE
    # A single kernel may fail on its own; a broken cache or compiler fails all of them.
    return codes.pop() if len(codes) == 1 else CACHE_UNUSABLE if CACHE_UNUSABLE in codes else FAILED


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
