"""`mlagen cache prune`, `gc`, `rm` and `clear`: removal of cached kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import click

from mlagen.errors import ArgumentError

from ..options.entry_options import Choice, age_option, arch_option, family_option, is_older
from ..options.exit_codes import FAILED
from ..output.report import SHORT_KEY, count_text, json_option, print_json, size_text
from ..tools.completion import complete_key
from ..tools.entries import document_of, entries_of, iso_time, matches_sources

if TYPE_CHECKING:
    from mlagen.cache.store import StoredEntry


# Reason of a removal, and its condition.
_Rule: TypeAlias = "tuple[str, Callable[[StoredEntry], bool]]"


@click.command()
@age_option
@click.option(
    "--max-size",
    metavar="SIZE",
    help="Remove the least recently used down to this size, e.g. 500M.",
)
@click.option(
    "--other-toolchains", is_flag=True, help="Remove those not compiled by the installed NVRTC."
)
@click.option(
    "--other-versions",
    is_flag=True,
    help="Remove those of other kernel sources, and older layouts of the cache.",
)
@arch_option
@family_option
@click.option("--dry-run", is_flag=True, help="Report what would be removed; remove nothing.")
@json_option
def prune(
    *,
    age_s: float | None,
    max_size: str | None,
    other_toolchains: bool,
    other_versions: bool,
    archs: list[str] | None,
    families: list[str] | None,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove kernels by age, size, compiler or version.

    Removes a kernel that matches any of --older-than, --other-toolchains and --other-versions;
    then --max-size evicts the least recently used of the rest. --arch and --family restrict the
    removal to the kernels they name; alone, they remove all of these. Never prompts, and never
    changes read-only layers.
    """
    from mlagen.cache.store import kernel_store
    from mlagen.settings import read_size

    max_bytes = None if max_size is None else read_size("max-size", max_size)
    rules = _rules(age_s, other_toolchains=other_toolchains, other_versions=other_versions)
    if not rules and max_bytes is None:
        if archs is None and families is None:
            raise ArgumentError("prune: expected an option that selects kernels, got none")
        rules = [("named", lambda _stored: True)]
    store, choice = kernel_store(), Choice(archs=archs, families=families)
    entries = list(store.entries())
    removals = [
        (stored, why)
        for stored in entries
        if (why := next((why for why, applies in rules if applies(stored)), None))
        and choice.matches(stored)
    ]
    if max_bytes is not None:
        removals += _above(max_bytes, entries, choice, removals)
    for stored, why in removals:
        if not dry_run:
            store.remove(stored)
        size = size_text(stored.size_bytes)
        click.echo(f"{stored.key[:SHORT_KEY]} by {stored.toolchain}, {size}: {why}", err=as_json)
    removed = sum(stored.size_bytes for stored, _ in removals)
    old = store.remove_old_layouts(dry_run=dry_run) if other_versions else 0
    freed = removed + old
    if old:
        click.echo(f"v1, the folder of an older layout, {size_text(old)}", err=as_json)
    if as_json:
        print_json(
            {
                "cache_dir": str(store.root),
                "dry_run": dry_run,
                "removed": [{**document_of(stored), "why": why} for stored, why in removals],
                "old_layout_bytes": old,
                "freed_bytes": freed,
                "kept": len(entries) - len(removals),
                "kept_bytes": sum(stored.size_bytes for stored in entries) - removed,
            }
        )
    kernels, done = count_text(len(removals), "kernel"), "would remove" if dry_run else "removed"
    click.echo(f"{done} {kernels}, {size_text(freed)}, from {store.root}", err=as_json)


def _rules(age_s: float | None, *, other_toolchains: bool, other_versions: bool) -> list[_Rule]:
    from mlagen.codegen.sources import template_digests
    from mlagen.compiler.toolchain import find_nvrtc

    rules: list[_Rule] = []
    if age_s is not None:
        limit = age_s  # mypy does not narrow it inside the lambda
        rules.append(("unused", lambda stored: is_older(stored, limit)))
    if other_toolchains:
        installed = str(find_nvrtc())
        rules.append(("other toolchain", lambda stored: stored.toolchain != installed))
    if other_versions:
        digests = template_digests()
        # The version of a damaged one is unknown; age, size or `verify --remove` remove it.
        rules.append(
            (
                "other version",
                lambda stored: stored.manifest is not None and not matches_sources(stored, digests),
            )
        )
    return rules


def _above(
    max_bytes: int,
    entries: Sequence[StoredEntry],
    choice: Choice,
    removals: Sequence[tuple[StoredEntry, str]],
) -> Iterator[tuple[StoredEntry, str]]:
    """Yield the least recently used of the remaining entries, until the rest fits."""
    removed = {stored.path for stored, _ in removals}
    kept = [stored for stored in entries if stored.path not in removed]
    remaining = sum(stored.size_bytes for stored in kept)
    for stored in sorted(kept, key=lambda stored: stored.used):
        if remaining <= max_bytes:
            break
        if choice.matches(stored):
            remaining -= stored.size_bytes
            yield stored, "size"


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
            {"path": str(one.path), "size_bytes": one.size_bytes, "used": iso_time(one.used)}
            for one in collected.evicted
        ]
        document = {"cache_dir": str(store.root), "abandoned": collected.abandoned}
        print_json({**document, "evicted": evicted, "freed_bytes": freed})
    abandoned = count_text(collected.abandoned, "abandoned file")
    kernels = count_text(len(collected.evicted), "kernel")
    click.echo(
        f"deleted {abandoned}, {kernels} of {size_text(freed)}, from {store.root}",
        err=as_json,
    )


@click.command()
@click.argument("keys", metavar="KEY...", nargs=-1, required=True, shell_complete=complete_key)
@json_option
def rm(*, keys: tuple[str, ...], as_json: bool) -> None:
    """Remove the kernels whose keys begin with KEY.

    Six hex digits or more of each; KEY/TOOLCHAIN selects the entry of one compiler. Nothing is
    removed unless every KEY matches exactly one kernel outside of read-only layers.
    """
    from mlagen.cache.store import kernel_store

    store = kernel_store()
    found = {stored.path: stored for key in keys for stored in entries_of(store, key)}
    for stored in found.values():
        if stored.is_read_only:
            got = f"{stored.key[:SHORT_KEY]} in {stored.layer}"
            raise ArgumentError(f"key: expected a kernel of the cache folder, got {got}")
    for stored in found.values():
        store.remove(stored)
        size = size_text(stored.size_bytes)
        text = f"removed {stored.key[:SHORT_KEY]} by {stored.toolchain}, {size}"
        click.echo(text, err=as_json)
    if as_json:
        print_json({"removed": [document_of(stored) for stored in found.values()]})


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
