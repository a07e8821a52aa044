"""`mlagen cache dir`: path of the cache folder."""

from __future__ import annotations

import os
import sys

import click

from ..output.report import json_option, print_json


@click.command("dir")
@json_option
def dir_(*, as_json: bool) -> None:
    """Print the cache folder, whether it exists or not."""
    from mlagen.paths import is_folder
    from mlagen.settings import current_settings

    path = current_settings().cache_dir
    if as_json:
        print_json({"cache_dir": str(path), "exists": is_folder(path)})
    else:
        # For programs the bytes of the path, which no locale needs to have.
        click.echo(str(path) if sys.stdout.isatty() else os.fsencode(path))
