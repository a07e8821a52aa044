"""`mlagen cache push`: bundle of kernels at a URL."""

from __future__ import annotations

import tempfile
from typing import Any

import click

from ..options.entry_options import Choice, choice_options, chosen_entries
from ..output.progress import byte_progress
from ..output.report import count_text, json_option
from ..tools.bundles import report_written
from ..tools.interrupts import summarized
from ..tools.remote import redacted, upload


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
