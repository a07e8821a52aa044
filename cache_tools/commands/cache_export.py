"""`mlagen cache export`: kernels as one portable file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mlagen.errors import ArgumentError

from ..options.entry_options import Choice, choice_options, chosen_entries
from ..output.progress import byte_progress
from ..output.report import count_text, json_option
from ..tools.bundles import report_written, require_path
from ..tools.interrupts import summarized


@click.command("export")
@click.argument("target", metavar="FILE", type=click.Path(path_type=Path), callback=require_path)
@choice_options
@click.option(
    "--wheel",
    "name",
    metavar="NAME",
    help="Write a wheel of that name; FILE is its folder, and is created.",
)
@click.option(
    "--wheel-version", "version", metavar="VERSION", help="Default: the version of mlagen."
)
@json_option
def export(
    *,
    target: Path,
    keys: tuple[str, ...],
    name: str | None,
    version: str | None,
    layers: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Write cached kernels into a bundle.

    `mlagen cache import` reads FILE. Exports all kernels, or those whose keys begin with KEY, six
    hex digits or more, and that match the options. Every file is checked against its digest
    first; a damaged kernel aborts the export. Equal entries give equal bytes.

    With --wheel, the result is a wheel: mlagen finds the kernels of an installed one.
    """
    from mlagen import __version__
    from mlagen.cache.bundle import export_bundle
    from mlagen.cache.store import kernel_store
    from mlagen.cache.wheel import export_wheel, normalized, package_of

    if version is not None and name is None:
        raise ArgumentError("wheel-version: expected --wheel with it, got it alone")
    if name is not None:  # before the long work
        package_of(name)
        normalized(version or __version__)
    chosen = chosen_entries(kernel_store(), keys, Choice(**filters), layers=layers)
    with (
        summarized(lambda: f"{name or target} not written"),
        byte_progress(f"packing {count_text(len(chosen), 'kernel')}") as on_progress,
    ):
        if name is None:
            written = export_bundle(chosen, target, on_progress=on_progress)
        else:
            target, written = export_wheel(
                chosen, target, name, version=version or __version__, on_progress=on_progress
            )
    report_written(written, str(target), "exported", as_json=as_json)
