"""`mlagen cache prune`: remove kernels by age, size, compiler or version."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import click

from mlagen.errors import ArgumentError

from ..entries import document_of
from ..entry_options import Choice, age_option, arch_option, family_option, is_older
from ..installation import is_of_sources
from ..report import SHORT_KEY, count_text, json_option, print_json, size_text

if TYPE_CHECKING:
    from mlagen.cache.catalog import StoredEntry

# Why something goes, and what it goes for.
_Rule: TypeAlias = "tuple[str, Callable[[StoredEntry], bool]]"


@click.command()
@age_option
@click.option("--max-size", metavar="SIZE", help="The longest unused, until 500M or so are left.")
@click.option("--other-toolchains", is_flag=True, help="Not compiled by the installed NVRTC.")
@click.option("--other-versions", is_flag=True, help="Not of the kernel sources installed here.")
@arch_option
@family_option
@click.option("--dry-run", is_flag=True, help="Say what would go; remove nothing.")
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

    A kernel goes if any of --older-than, --other-toolchains and --other-versions says so, and for
    --max-size the longest unused go of what is left. With --arch and --family only the kernels
    that they name may go; without any other option, these do. Nothing is asked, and read-only
    layers are never touched.
    """
    from mlagen.cache.default_store import kernel_store
    from mlagen.settings import read_size

    max_bytes = None if max_size is None else read_size("max-size", max_size)
    rules = _rules(age_s, other_toolchains=other_toolchains, other_versions=other_versions)
    if not rules and max_bytes is None:
        if archs is None and families is None:
            raise ArgumentError("prune: expected an option that says what goes, got none")
        rules = [("named", lambda _stored: True)]
    store, choice = kernel_store(), Choice(archs=archs, families=families)
    entries = list(store.entries())
    going = list(_going(entries, choice, rules))
    if max_bytes is not None:
        going += _above(max_bytes, entries, choice, going)
    for stored, why in going:
        if not dry_run:
            store.remove(stored)
        size = size_text(stored.size_bytes)
        click.echo(f"{stored.key[:SHORT_KEY]} by {stored.toolchain}, {size}: {why}", err=as_json)
    freed = sum(stored.size_bytes for stored, _ in going)
    if as_json:
        print_json(
            {
                "cache_dir": str(store.root),
                "dry_run": dry_run,
                "removed": [{**document_of(stored), "why": why} for stored, why in going],
                "freed_bytes": freed,
                "kept": len(entries) - len(going),
                "kept_bytes": sum(stored.size_bytes for stored in entries) - freed,
            }
        )
    kernels, done = count_text(len(going), "kernel"), "would remove" if dry_run else "removed"
    click.echo(f"{done} {kernels}, {size_text(freed)}, from {store.root}", err=as_json)


def _rules(age_s: float | None, *, other_toolchains: bool, other_versions: bool) -> list[_Rule]:
    from mlagen.codegen.sources import template_digests
    from mlagen.compiler.toolchain import find_nvrtc

    rules: list[_Rule] = []
    if age_s is not None:
        limit = age_s  # mypy forgets what it is inside a function
        rules.append(("unused", lambda stored: is_older(stored, limit)))
    if other_toolchains:
        installed = str(find_nvrtc())
        rules.append(("other toolchain", lambda stored: stored.toolchain != installed))
    if other_versions:
        digests = template_digests()
        # Of a damaged one nobody knows; it goes by age, size or `verify --quarantine`.
        rules.append(
            (
                "other version",
                lambda stored: stored.manifest is not None and not is_of_sources(stored, digests),
            )
        )
    return rules


def _going(
    entries: Sequence[StoredEntry], choice: Choice, rules: Sequence[_Rule]
) -> Iterator[tuple[StoredEntry, str]]:
    for stored in entries:
        why = next((why for why, goes in rules if goes(stored)), None)
        if why is not None and choice.has(stored):
            yield stored, why


def _above(
    max_bytes: int,
    entries: Sequence[StoredEntry],
    choice: Choice,
    going: Sequence[tuple[StoredEntry, str]],
) -> Iterator[tuple[StoredEntry, str]]:
    """Yield the longest unused of what does not go anyway, until the rest fits."""
    gone = {stored.path for stored, _ in going}
    kept = [stored for stored in entries if stored.path not in gone]
    left = sum(stored.size_bytes for stored in kept)
    for stored in sorted(kept, key=lambda stored: stored.used):
        if left <= max_bytes:
            break
        if choice.has(stored):
            left -= stored.size_bytes
            yield stored, "size"
