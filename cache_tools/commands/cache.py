"""`mlagen cache`: subcommands that manage the on-disk kernel cache."""

from __future__ import annotations

import click

from .cache_lists import dir_, ls, stats, verify
from .cache_removal import clear, gc, prune, rm
from .cache_show import show
from .cache_transfers import export, import_, pull, push
from .cache_why import why


@click.group()
def cache() -> None:
    """List, check, remove, export, import, push and pull kernels.

    Safe with running jobs: a job that misses a kernel recompiles it.
    """


for command in (
    dir_,
    ls,
    stats,
    show,
    why,
    verify,
    prune,
    gc,
    rm,
    clear,
    export,
    import_,
    push,
    pull,
):
    cache.add_command(command)
