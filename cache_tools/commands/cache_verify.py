"""`mlagen cache verify`: whether every entry is as it was published."""

from __future__ import annotations

import click

from ..entries import document_of
from ..exit_codes import FAILED
from ..report import SHORT_KEY, console, count_text, json_option, print_json


@click.command()
@click.option("--quarantine", is_flag=True, help="Move what is bad out of the way.")
@json_option
@click.pass_context
def verify(ctx: click.Context, /, *, quarantine: bool, as_json: bool) -> None:
    """Read every file of every entry and compare it with its digest.

    Exits with 1 if something is bad, moved away or not.
    """
    from mlagen.engine import kernel_store

    store, text = kernel_store(), console(stderr=as_json)
    bad, count = [], 0
    for stored in store.entries():
        count += 1
        problem = stored.problem or store.verify(stored)
        if problem is None:
            continue
        text.print(f"bad: {stored.key[:SHORT_KEY]}: {problem}", soft_wrap=True)
        cell = store.quarantine(stored, problem) if quarantine else None
        if cell is not None:
            text.print(f"moved to {cell}", soft_wrap=True)
        moved_to = str(cell) if cell else None
        bad.append({**document_of(stored), "problem": problem, "moved_to": moved_to})
    if as_json:
        print_json({"verified": count, "bad": bad})
    text.print(f"{count_text(count, 'entry', 'entries')}: {count - len(bad)} sound, {len(bad)} bad")
    if bad:
        ctx.exit(FAILED)
