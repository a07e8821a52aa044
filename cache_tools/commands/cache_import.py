"""`mlagen cache import`: kernels from a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..output.report import json_option
from ..tools.bundles import import_and_report, import_options, require_path


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
