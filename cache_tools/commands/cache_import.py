"""`mlagen cache import`: kernels out of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..bundles import import_options, take_in
from ..report import json_option


@click.command("import")
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@import_options
@json_option
def import_(*, file: Path, **options: Any) -> None:
    """Add the kernels of a bundle to the cache.

    FILE is what `mlagen cache export` or `mlagen prewarm --bundle` wrote. All of it is checked
    before the first kernel is added. Kernels that are there stay; a damaged one goes to the
    quarantine. Kernels run on the GPU with the rights of the process: import what you would run,
    and name what you mean with --expect-sha256.
    """
    from mlagen.cache.bundle_reading import opened_bundle

    with opened_bundle(file) as opened:
        take_in(opened, str(file), **options)
