"""`mlagen cache verify`: check every entry against its digests."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import click

from ..options.entry_options import layers_option
from ..options.exit_codes import CACHE_UNUSABLE, FAILED
from ..output.progress import byte_progress
from ..output.report import SHORT_KEY, count_text, json_option, print_json
from ..tools.entries import document_of
from ..tools.interrupts import summarized

if TYPE_CHECKING:
    from mlagen.cache.store import StoredEntry


@click.command()
@click.option("--remove", is_flag=True, help="Remove bad entries.")
@layers_option
@json_option
@click.pass_context
def verify(ctx: click.Context, /, *, remove: bool, layers: bool, as_json: bool) -> None:
    """Compare every file of every entry with its digest.

    Exits with 1 if an entry is bad, removed or not. Bad entries of a read-only layer stay, and so
    do those that cannot be read, which may be valid: if no other is bad, it exits with 4.
    """
    from mlagen.cache.store import UnreadableError, kernel_store
    from mlagen.cache.store import verify as problem_of

    store = kernel_store()
    entries = list(store.entries(layers=layers))
    counted = count_text(len(entries), "entry", "entries")
    problems: list[tuple[StoredEntry, str]] = []
    unreadable: list[tuple[StoredEntry, str]] = []
    verified = done = 0
    total = sum(stored.size_bytes for stored in entries)
    with (
        summarized(lambda: f"{verified} of {counted} verified, {len(problems)} bad, none removed"),
        byte_progress(f"verifying {counted}") as on_progress,
    ):
        for stored in entries:
            try:
                with suppress(FileNotFoundError):  # removed after it was listed
                    problem = problem_of(stored)
                    verified += 1
                    problems += [(stored, problem)] if problem else []
            except UnreadableError as error:
                unreadable.append((stored, str(error).removeprefix("cache: ")))
            done += stored.size_bytes
            on_progress(done, total)
    bad = []
    for stored, problem in problems:  # after all reads: an untrusted cache raises first
        is_removed = remove and not stored.is_read_only and store.remove(stored, if_unchanged=True)
        bad.append({**document_of(stored), "problem": problem, "is_removed": is_removed})
    for found in bad:
        kind = "bad, removed" if found["is_removed"] else "bad"
        click.echo(f"{kind}: {found['key'][:SHORT_KEY]}: {found['problem']}", err=as_json)
    stay = [{**document_of(stored), "problem": problem} for stored, problem in unreadable]
    for found in stay:
        click.echo(f"unreadable: {found['key'][:SHORT_KEY]}: {found['problem']}", err=as_json)
    if as_json:
        document = {"cache_dir": str(store.root), "verified": verified}
        print_json({**document, "bad": bad, "unreadable": stay})
    suffix = f", {len(stay)} unreadable" if stay else ""
    text = f"{verified - len(bad)} valid, {len(bad)} bad{suffix}"
    click.echo(f"{count_text(verified + len(stay), 'entry', 'entries')}: {text}", err=as_json)
    if bad or stay:
        ctx.exit(FAILED if bad else CACHE_UNUSABLE)
