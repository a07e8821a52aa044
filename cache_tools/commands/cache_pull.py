"""`mlagen cache pull`: kernels out of a bundle at a URL."""

from __future__ import annotations

import tempfile
from typing import Any

import click

from ..bundles import import_options, take_in
from ..byte_progress import byte_progress
from ..remote import download, shown
from ..report import json_option


@click.command()
@click.argument("url")
@import_options
@json_option
def pull(*, url: str, max_bytes: int, **options: Any) -> None:
    """Add the kernels of the bundle at URL to the cache.

    It is downloaded to the temporary folder, and then all that `mlagen cache import` says holds.
    URL is http, https or any that fsspec can read, such as s3://bucket/kernels.tar.gz.
    """
    with tempfile.TemporaryFile() as file:  # it has no name, and whatever happens is not left over
        with byte_progress(f"downloading {shown(url)}") as on_progress:
            download(url, file, max_bytes, on_progress)
        take_in(file, shown(url), max_bytes=max_bytes, **options)
