"""`mlagen cache clear`: remove every kernel."""

from __future__ import annotations

import sys

import click

from ..options.exit_codes import FAILED
from ..output.report import count_text, json_option, print_json, size_text


@click.command()
@click.option("--yes", is_flag=True, help="Do not prompt.")
@json_option
@click.pass_context
def clear(ctx: click.Context, /, *, yes: bool, as_json: bool) -> None:
    """Remove every cached kernel."""
    from mlagen.cache.store import kernel_store

    store = kernel_store()
    entries = list(store.entries())
    if entries and not yes:
        kernels = count_text(len(entries), "kernel")
        size = size_text(sum(stored.size_bytes for stored in entries))
        if not _confirm(f"Remove {kernels}, {size}, from {store.root}?", stderr=as_json):
            click.echo("nothing removed", err=as_json)
            ctx.exit(FAILED)
    removed = store.clear()
    if as_json:
        print_json({"cache_dir": str(store.root), "removed": removed})
    click.echo(f"removed {count_text(removed, 'kernel')} from {store.root}", err=as_json)


def _confirm(question: str, *, stderr: bool) -> bool:
    # Not click.confirm: before click 8.2 it ignores `err` and writes to stdout.
    click.echo(f"{question} [y/N] ", nl=False, err=stderr)
    answer = sys.stdin.readline()
    if not answer:
        click.echo("no answer, nothing removed; --yes skips the question", err=stderr)
        raise click.Abort
    return answer.strip().lower() in {"y", "yes"}
