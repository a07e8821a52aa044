"""`mlagen cache`: the verbs that look after the kernels on the disk."""

from __future__ import annotations

import click

from .cache_clear import clear
from .cache_dir import dir_
from .cache_ls import ls
from .cache_rm import rm
from .cache_show import show
from .cache_verify import verify


@click.group()
def cache() -> None:
    """Look at the cached kernels, check them, remove them.

    All of it is safe beside running jobs: a job that misses a kernel compiles it again.
    """


for command in (dir_, ls, show, verify, rm, clear):
    cache.add_command(command)
