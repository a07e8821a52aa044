"""`mlagen cache`: subcommands that manage the on-disk kernel cache."""

from __future__ import annotations

import click

from .cache_clear import clear
from .cache_dir import dir_
from .cache_export import export
from .cache_gc import gc
from .cache_import import import_
from .cache_ls import ls
from .cache_prune import prune
from .cache_pull import pull
from .cache_push import push
from .cache_rm import rm
from .cache_show import show
from .cache_stats import stats
from .cache_verify import verify
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
