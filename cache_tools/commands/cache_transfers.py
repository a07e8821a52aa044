"""`mlagen cache export`, `import`, `push` and `pull`: bundles and wheels of kernels."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from mlagen.errors import ArgumentError

from ..options.entry_options import Choice, choice_options, chosen_entries
from ..output.progress import byte_progress
from ..output.report import count_text, json_option
from ..tools.bundles import import_and_report, import_options, report_written, require_path
from ..tools.interrupts import summarized
from ..tools.remote import download, redacted, upload


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


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path), callback=require_path)
@import_options
@json_option
def import_(*, file: Path, **options: Any) -> None:
    """Add the kernels of a bundle to the cache.

    `mlagen cache export` or `mlagen prewarm --bundle` wrote FILE. The whole file is checked
    before the first kernel is added. Present kernels stay; a damaged one is replaced. Kernels run
    on the GPU with the rights of the process: import only trusted files, and pin them with
    --expect-sha256.
    """
    from mlagen.cache.bundle import open_bundle

    with open_bundle(file) as opened:
        import_and_report(opened, str(file), **options)


@click.command()
@click.argument("url")
@choice_options
@json_option
def push(*, url: str, keys: tuple[str, ...], layers: bool, as_json: bool, **filters: Any) -> None:
    """Write cached kernels into a bundle at URL.

    Writes the same bundle as `mlagen cache export`, for `mlagen cache pull`. URL is any that fsspec
    writes, such as s3://bucket/kernels.tar.gz; its package must be installed, and finds its own
    credentials.
    """
    from mlagen.cache.bundle import write_bundle
    from mlagen.cache.store import kernel_store

    chosen = chosen_entries(kernel_store(), keys, Choice(**filters), layers=layers)
    with summarized(lambda: f"{redacted(url)} not written"), tempfile.TemporaryFile() as file:
        with byte_progress(f"packing {count_text(len(chosen), 'kernel')}") as on_progress:
            written = write_bundle(chosen, file, on_progress=on_progress)
        with byte_progress(f"uploading to {redacted(url)}") as on_progress:
            upload(file, written.size_bytes, url, on_progress)
    report_written(written, redacted(url), "pushed", as_json=as_json)


@click.command()
@click.argument("url")
@import_options
@json_option
def pull(*, url: str, max_bytes: int, **options: Any) -> None:
    """Add the kernels of the bundle at URL to the cache.

    Downloads it to the temporary folder, then does the same as `mlagen cache import`. URL is http,
    https or any other that fsspec reads, such as s3://bucket/kernels.tar.gz.
    """
    with tempfile.TemporaryFile() as file:  # it has no name, so nothing remains after a crash
        with (
            summarized(lambda: "nothing imported"),
            byte_progress(f"downloading {redacted(url)}") as on_progress,
        ):
            download(url, file, max_bytes, on_progress)
        import_and_report(file, redacted(url), max_bytes=max_bytes, **options)
