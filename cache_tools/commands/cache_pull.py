"""`mlagen cache pull`: kernels from a bundle at a URL."""

from __future__ import annotations

import tempfile
from typing import Any

import click

from ..output.progress import byte_progress
from ..output.report import json_option
from ..tools.bundles import import_and_report, import_options
from ..tools.interrupts import summarized
from ..tools.remote import download, redacted


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
