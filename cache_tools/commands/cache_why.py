"""`mlagen cache why`: why a kernel is not found, or why it was compiled."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from mlagen.errors import CacheError

from ..options.exit_codes import DONE, FAILED
from ..output.report import SHORT_KEY, json_option, print_json
from ..tools.completion import complete_spec_or_key
from ..tools.entries import (
    Difference,
    document_of,
    entry_of,
    kernel_of,
    key_of_entry,
    nearest_entry,
    print_differences,
    require_valid,
)
from ..tools.kernel_specs import spec_named

if TYPE_CHECKING:
    from mlagen.cache.key import CacheKey
    from mlagen.cache.store import KernelStore, StoredEntry

_KEY = re.compile(r"[0-9a-fA-F]{6,64}(/.*)?")


@dataclass(frozen=True)
class _Answer:
    """Lookup result of a kernel or origin of an entry, with the nearest other entry."""

    key: CacheKey
    entry: StoredEntry | None
    reason: str | None  # of a miss, or why a present entry was compiled
    problem: str | None  # damage of the present entry
    nearest: tuple[StoredEntry, list[Difference]] | None


@click.command()
@click.argument("kernel", metavar="SPEC|KEY", shell_complete=complete_spec_or_key)
@json_option
@click.pass_context
def why(ctx: click.Context, /, *, kernel: str, as_json: bool) -> None:
    """Explain why a kernel is not found, or why it was compiled.

    SPEC is a kernel as in messages and logs, such as 'combine(arch=sm_90a, dtype=bf16,
    head_dim_vo=512)'; names that it leaves out have the defaults of `mlagen kernel show`. If it is
    not found, its key fields are compared with those of the nearest cached kernel, and the exit
    code is 1.

    KEY is six hex digits or more of a cached kernel, which is compared with the nearest one that
    was cached before it. Changes nothing; a damaged kernel stays in place.
    """
    from mlagen.cache.store import kernel_store

    store = kernel_store()
    is_key = _KEY.fullmatch(kernel) is not None
    answer = _of_key(store, kernel) if is_key else _of_spec(store, kernel)
    if as_json:
        print_json(_document(answer))
    elif is_key:
        _print_origin(answer)
    else:
        _print_search(answer)
    ctx.exit(DONE if answer.entry else FAILED)


def _of_spec(store: KernelStore, text: str) -> _Answer:
    from mlagen.cache.trust import UntrustedError
    from mlagen.engine import key_of

    key = key_of(spec_named(text))
    found = store.look_up(key, is_dry=True)
    if found.entry is not None:
        candidates = store.select(key.digest)
        stored = next((one for one in candidates if one.path == found.entry.path), None)
        return _Answer(key, stored, None if stored else "absent", None, None)
    nearest = None
    try:
        nearest = nearest_entry(key, store.entries(layers=True))
    except CacheError as error:
        if found.problem is None or not isinstance(error.__cause__, UntrustedError):
            raise  # otherwise the untrusted cache is the answer
    return _Answer(key, None, found.reason, found.problem, nearest)


def _of_key(store: KernelStore, name: str) -> _Answer:
    stored = entry_of(store, name)
    created = require_valid(stored)["created"]
    before = (
        other
        for other in store.entries(layers=True)
        if other.manifest is not None
        and (other.key, other.toolchain) != (stored.key, stored.toolchain)
        and str(other.manifest.created.get("time", "")) <= created["time"]
    )
    key = key_of_entry(stored)
    assert key is not None, "verifying compares it with the key fields"
    return _Answer(key, stored, created["because"], None, nearest_entry(key, before))


def _document(answer: _Answer) -> dict[str, Any]:
    near = answer.nearest
    return {
        "kernel": kernel_of(answer.key),
        "key": answer.key.digest,
        "toolchain": answer.key.toolchain,
        "is_found": answer.entry is not None,
        "reason": answer.reason,
        "problem": answer.problem,
        "entry": document_of(answer.entry) if answer.entry else None,
        "nearest": document_of(near[0]) if near else None,
        "differences": [
            {"key_field": label, "wanted": wanted, "nearest": got}
            for label, wanted, got in (near[1] if near else ())
        ],
    }


def _print_search(answer: _Answer) -> None:
    kernel, key = kernel_of(answer.key), answer.key
    if answer.entry is not None:
        click.echo(f"found: {kernel}")
        click.echo(f"{answer.entry.path}")
        return
    problem = f": {answer.problem}" if answer.problem else ""
    click.echo(f"not found: {answer.reason}{problem}")
    click.echo(f"{kernel}, key {key.digest[:SHORT_KEY]}, by {key.toolchain}")
    command = f"run: mlagen prewarm --kernel '{kernel}'"
    if answer.problem is None:
        _print_nearest(answer, "wanted")
    elif answer.reason == "damaged":
        stored = answer.nearest[0] if answer.nearest and not answer.nearest[1] else None
        if stored is not None:
            click.echo(f"damaged: {stored.path}")
        if stored is not None and stored.is_read_only:
            command = "build this layer again: prewarm writes into the cache folder only"
    else:
        command = "mend this folder: prewarm does not"
    click.echo(command)


def _print_origin(answer: _Answer) -> None:
    document = _document(answer)
    entry = document["entry"]
    created = entry["created"]
    click.echo(f"{document['kernel']}, key {document['key'][:SHORT_KEY]}, by {entry['toolchain']}")
    click.echo(
        f"compiled because: {answer.reason or 'not recorded'}, by {entry['created_by']} "
        f"of mlagen {created['mlagen']}, {created['time']}, on {created['host']}"
    )
    _print_nearest(answer, document["key"][:SHORT_KEY])


def _print_nearest(answer: _Answer, one: str) -> None:
    family = dict(answer.key.key_fields)["family"]
    if answer.nearest is None:
        click.echo(f"no other {family} is cached to compare with")
        return
    nearest, found = answer.nearest
    other = f"nearest {nearest.key[:SHORT_KEY]}"
    if found:
        print_differences(found, one, other)
    else:
        click.echo(f"{other} has no differences: {nearest.path}")
