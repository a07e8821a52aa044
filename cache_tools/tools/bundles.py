"""Shared parts of `cache export`, `import`, `push` and `pull`: options, the import, reports."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from ..output.progress import byte_progress
from ..output.report import console, count_text, print_json, size_text
from .interrupts import summarized

if TYPE_CHECKING:
    from pathlib import Path

    from mlagen.cache.bundle import BundleSummary

    from ..output.report import Command

_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_URL = re.compile(r"[a-zA-Z][\w+.-]+:/")  # a Path has one slash of two


def _sha256(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    if value is not None and not _SHA256.fullmatch(value):
        raise click.BadParameter(f"expected 64 hex digits, got {value!r}")
    return value


def _size(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    from mlagen.settings import read_size

    return read_size("max-size", value)


def require_path(_ctx: click.Context, _param: click.Parameter, value: Path | None) -> Path | None:
    """Reject a URL, whose secrets the messages about a file would show."""
    if value is not None and _URL.match(str(value)):
        raise click.BadParameter("expected a path, got a URL, which cache push and pull take")
    return value


def import_options(command: Command) -> Command:
    """Add the options of :func:`import_and_report`."""
    for decorate in (
        click.option(
            "--max-size",
            "max_bytes",
            callback=_size,
            default="2GiB",
            show_default=True,
            metavar="SIZE",
            help="Largest total size of the unpacked kernels.",
        ),
        click.option(
            "--dry-run", is_flag=True, help="Verify it and report what is new; add nothing."
        ),
        click.option(
            "--expect-sha256",
            callback=_sha256,
            metavar="HEX",
            help="Required digest of the file; checked before its content.",
        ),
    ):
        command = decorate(command)
    return command


def import_and_report(
    file: BinaryIO,
    name: str,
    *,
    expect_sha256: str | None,
    dry_run: bool,
    max_bytes: int,
    as_json: bool,
) -> None:
    """Verify a bundle, publish what is new, and report it."""
    from mlagen.cache.bundle import import_bundle, verify_bundle
    from mlagen.cache.store import kernel_store

    with (
        summarized(lambda: "nothing imported"),
        byte_progress(f"verifying {name}") as on_progress,
    ):
        bundle = verify_bundle(
            file,
            name,
            expect_sha256=expect_sha256,
            max_bytes=max_bytes,
            on_progress=on_progress,
        )
    store = kernel_store()
    published = 0
    kernels = count_text(len(bundle.entries), "kernel")
    with (
        summarized(lambda: f"{published} of {kernels} kept"),
        byte_progress("comparing" if dry_run else "publishing") as show,
    ):

        def on_progress(done: int, total: int) -> None:  # once per kernel
            nonlocal published
            published += 1
            show(done, total)

        outcomes = import_bundle(bundle, store, dry_run=dry_run, on_progress=on_progress)
    counts = Counter(outcomes)
    totals = {outcome: counts[outcome] for outcome in ("added", "kept", "replaced")}
    if as_json:
        rows = [
            {**row, "outcome": outcome}
            for row, outcome in zip(map(asdict, bundle.entries), outcomes, strict=True)
        ]
        document = {"cache_dir": str(store.root), "dry_run": dry_run, **bundle_facts(bundle, name)}
        print_json({**document, "totals": totals, "entries": rows})
    summary = (
        ", ".join(f"{count} {name}" for name, count in totals.items() if count) or "nothing new"
    )
    verb = "would import" if dry_run else "imported"
    what = f"{_kernels(bundle)}: {summary}" if bundle.entries else "an empty bundle"
    print_bundle(f"{verb} {what}, into {store.root}", bundle.sha256, as_json=as_json)


def report_written(written: BundleSummary, place: str, verb: str, *, as_json: bool) -> None:
    """Report a bundle or wheel written to ``place``."""
    if as_json:
        print_json({**bundle_facts(written, place), "entries": [*map(asdict, written.entries)]})
    size = size_text(written.size_bytes)
    print_bundle(f"{verb} {_kernels(written)} to {place}, {size}", written.sha256, as_json=as_json)


def print_bundle(line: str, sha256: str, *, as_json: bool) -> None:
    """Print a line about a bundle, and its digest below it."""
    text = console(stderr=as_json)
    text.print(line, soft_wrap=True)
    text.print(f"sha256 {sha256}", soft_wrap=True)


def bundle_facts(bundle: BundleSummary, place: str) -> dict[str, Any]:
    """Return the JSON fields of a bundle or wheel at ``place``."""
    return {
        "bundle": place,
        "sha256": bundle.sha256,
        "size_bytes": bundle.size_bytes,
        "content_bytes": bundle.content_bytes,
        "archs": bundle.archs,
    }


def _kernels(bundle: BundleSummary) -> str:
    parts = [count_text(len(bundle.entries), "kernel")]
    parts += [f"for {', '.join(bundle.archs)}"] if bundle.archs else []
    parts += [f"by {', '.join(bundle.toolchains)}"] if bundle.toolchains else []
    return f"{' '.join(parts)}, {size_text(bundle.content_bytes)}"
