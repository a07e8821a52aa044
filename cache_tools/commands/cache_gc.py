"""`mlagen cache gc`: garbage collection of the cache folder."""

from __future__ import annotations

import click

from ..output.report import count_text, json_option, print_json, size_text
from ..tools.entries import iso_time


@click.command()
@json_option
def gc(*, as_json: bool) -> None:
    """Delete abandoned files and evict kernels.

    Deletes unfinished files of dead processes, and the least recently used kernels above
    MLAGEN_CACHE_MAX_SIZE. Each process does the same after a compilation.
    """
    from mlagen.cache.store import kernel_store

    store = kernel_store()
    collected = store.collect()
    freed = sum(weight.size_bytes for weight in collected.evicted)
    if as_json:
        evicted = [
            {
                "path": str(weight.path),
                "size_bytes": weight.size_bytes,
                "used": iso_time(weight.used),
            }
            for weight in collected.evicted
        ]
        print_json(
            {
                "cache_dir": str(store.root),
                "abandoned": collected.abandoned,
                "evicted": evicted,
                "freed_bytes": freed,
            }
        )
    abandoned = count_text(collected.abandoned, "abandoned file")
    kernels = count_text(len(collected.evicted), "kernel")
    click.echo(
        f"deleted {abandoned}, {kernels} of {size_text(freed)}, from {store.root}",
        err=as_json,
    )
