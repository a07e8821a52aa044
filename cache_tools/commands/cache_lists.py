"""`mlagen cache dir`, `ls`, `stats` and `verify`: what is in the cache."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..options.entry_options import (
    Choice,
    age_option,
    arch_option,
    family_option,
    layers_option,
    toolchain_option,
)
from ..options.exit_codes import CACHE_UNUSABLE, FAILED
from ..output.progress import byte_progress
from ..output.report import (
    SHORT_KEY,
    age_text,
    count_text,
    json_option,
    kernel_columns,
    natural_order,
    print_facts,
    print_json,
    print_table,
    resource_columns,
    size_text,
)
from ..tools.entries import (
    document_of,
    iso_time,
    matches_sources,
    matches_toolchain,
    required_line_info,
    required_toolchain,
)
from ..tools.interrupts import summarized

if TYPE_CHECKING:
    from mlagen.cache.store import StoredEntry


@click.command("dir")
@json_option
def dir_(*, as_json: bool) -> None:
    """Print the cache folder, whether it exists or not."""
    from mlagen.paths import is_folder
    from mlagen.settings import current_settings

    path = current_settings().cache_dir
    if as_json:
        print_json({"cache_dir": str(path), "exists": is_folder(path)})
    else:
        # For programs the bytes of the path, which no locale needs to have.
        click.echo(str(path) if sys.stdout.isatty() else os.fsencode(path))


@click.command()
@arch_option
@family_option
@toolchain_option
@age_option
@click.option(
    "--sort",
    type=click.Choice(["name", "size", "age", "spills"]),
    default="name",
    show_default=True,
    help="By name; or the largest, least recently used or most spilling first.",
)
@layers_option
@json_option
def ls(*, sort: str, layers: bool, as_json: bool, **chosen: Any) -> None:
    """List the cached kernels, sorted by their columns.

    Manifests are read but not verified: mlagen cache verify detects changes.
    """
    from mlagen.cache.store import kernel_store

    store, choice = kernel_store(), Choice(**chosen)
    # One at a time, so that the rest of each manifest is freed at once.
    lines = [line_of(stored) for stored in store.entries(layers=layers) if choice.matches(stored)]
    lines.sort(key=_name)
    if sort != "name":
        lines.sort(key=_ORDERS[sort])
    if as_json:
        print_json({"cache_dir": str(store.root), "entries": [line.entry for line in lines]})
    else:
        print_entries(lines, store.root)


class _Line(NamedTuple):
    """An entry as JSON data, and its kernel columns: none if it has a problem, of that kind."""

    entry: dict[str, Any]
    columns: dict[str, str]
    kind: str


def line_of(stored: StoredEntry) -> _Line:
    """Return the line of an entry in a list."""
    entry = document_of(stored)
    if entry["problem"] is not None:
        return _Line(entry, {}, "damaged" if stored.is_damaged else "unreadable")
    columns = kernel_columns(entry["family"], entry["spec"])
    if entry["line_info"] is not None:
        columns["variant"] = ", ".join(filter(None, (columns["variant"], "line info")))
    return _Line(entry, columns, "valid")


def _name(line: _Line) -> list[tuple[int, int, str]]:
    return natural_order([*line.columns.values(), line.entry["toolchain"]])


def _spills(line: _Line) -> int:
    resources = line.entry["resources"]
    return resource_columns(resources, 0)["spill_bytes"] if resources else 0


_ORDERS: dict[str, Callable[[_Line], Any]] = {
    "size": lambda line: -line.entry["size_bytes"],
    "age": lambda line: line.entry["used"] or "",
    "spills": lambda line: -_spills(line),
}


def print_entries(lines: Sequence[_Line], cache_dir: Path) -> None:
    """Print entries as a table, with their number and size."""
    entries = [line.entry for line in lines]
    rows = [_row(line) for line in lines if line.columns]
    for name in ("toolchain", "layer"):
        if len({row[name] for row in rows}) == 1:
            for row in rows:
                del row[name]  # the last line has it
    if rows:
        print_table(rows)
    for entry, _, kind in lines:
        if entry["problem"] is not None:
            click.echo(f"{kind}: {entry['key'][:SHORT_KEY]}: {entry['problem']}")
    kernels = count_text(len(entries), "kernel")
    toolchains = sorted({entry["toolchain"] for entry in entries})
    by = f" by {', '.join(toolchains)}" if toolchains else ""
    total = size_text(sum(entry["size_bytes"] for entry in entries))
    layers = dict.fromkeys([str(cache_dir), *(entry["layer"] for entry in entries)])
    click.echo(f"{kernels}{by}, {total}, in {', '.join(layers)}")


def _row(line: _Line) -> dict[str, Any]:
    entry = line.entry
    resources = resource_columns(entry["resources"], entry["dynamic_shared_bytes"])
    return {
        "key": entry["key"][:SHORT_KEY],
        **line.columns,
        "registers": resources["registers"],
        "spill_bytes": resources["spill_bytes"],
        "size": size_text(entry["size_bytes"]),
        "used": _age_of(entry["used"]),
        "toolchain": entry["toolchain"],
        "layer": entry["layer"],
    }


def _age_of(moment: str | None) -> str | None:
    if moment is None:
        return None
    return age_text(time.time() - datetime.fromisoformat(moment).timestamp())


# Criteria by which entries are grouped.
GROUPS = ("layer", "family", "arch", "toolchain", "mlagen")


@dataclass
class Tally:
    """Running totals over the entries."""

    templates: frozenset[str]  # digests of the kernel sources that are installed
    toolchain: str | None
    line_info: str | None = None  # folder of the templates, of MLAGEN_LINEINFO
    entries: int = 0  # of the cache folder alone, as size_bytes
    size_bytes: int = 0
    usable: int = 0
    unusable: int = 0
    damaged: int = 0
    ends: dict[str, tuple[str, str]] = field(default_factory=dict)  # time and key
    groups: dict[str, dict[str, tuple[int, int]]] = field(
        default_factory=lambda: {by: defaultdict(lambda: (0, 0)) for by in GROUPS}
    )

    def add(self, stored: StoredEntry) -> None:
        """Add an entry to the totals."""
        key_fields = dict(stored.manifest.key_fields) if stored.manifest else {}
        fits = (
            matches_sources(stored, self.templates)
            and matches_toolchain(stored, self.toolchain)
            and key_fields.get("line_info") == self.line_info
        )
        self.usable += fits
        self.unusable += not fits
        self.damaged += stored.manifest is None
        if not stored.is_read_only:
            self.entries += 1
            self.size_bytes += stored.size_bytes
        named = {"layer": str(stored.layer), "toolchain": stored.toolchain}
        if stored.manifest is not None:
            created = stored.manifest.created
            named["family"] = key_fields.get("family", "")
            named["arch"] = key_fields.get("spec.arch", "")
            named["mlagen"] = str(created.get("mlagen", ""))
            if not stored.is_read_only:
                self._date(str(created.get("time", "")), stored)
        for by, name in named.items():
            count, size = self.groups[by][name]
            self.groups[by][name] = (count + 1, size + stored.size_bytes)

    def _date(self, time: str, stored: StoredEntry) -> None:
        created = (time, stored.key)
        used = (iso_time(stored.used) or "", stored.key)
        self.ends["oldest"] = min(self.ends.get("oldest", created), created)
        self.ends["newest"] = max(self.ends.get("newest", created), created)
        self.ends["longest_unused"] = min(self.ends.get("longest_unused", used), used)


@click.command()
@json_option
def stats(*, as_json: bool) -> None:
    """Print statistics of the cache.

    The counts include read-only layers. Ages and sizes outside of the table are of the cache
    folder alone.
    """
    from mlagen.cache.store import kernel_store
    from mlagen.codegen.sources import template_digests
    from mlagen.settings import current_settings

    store, max_bytes = kernel_store(), current_settings().cache_max_bytes
    tally = Tally(template_digests(), required_toolchain(), required_line_info())
    for stored in store.entries(layers=True):
        tally.add(stored)
    abandoned = store.sweep(dry_run=True)
    document = {
        "cache_dir": str(store.root),
        "entries": tally.entries,
        "size_bytes": tally.size_bytes,
        "max_bytes": max_bytes,
        "share_of_max": tally.size_bytes / max_bytes if max_bytes else None,
        "usable": tally.usable,
        "unusable": tally.unusable,
        "damaged": tally.damaged,
        "toolchain": tally.toolchain,
        "templates": hashlib.sha256("".join(sorted(tally.templates)).encode()).hexdigest(),
        **{
            name: {"key": end[1], "time": end[0]} if (end := tally.ends.get(name)) else None
            for name in ("oldest", "newest", "longest_unused")
        },
        "abandoned": {"files": len(abandoned), "size_bytes": sum(abandoned)},
        "groups": [
            {"by": by, "name": name, "entries": count, "size_bytes": size}
            for by in GROUPS
            for name, (count, size) in sorted(tally.groups[by].items())
        ],
    }
    if as_json:
        print_json(document)
    else:
        _print_stats(document)


def _print_stats(document: dict[str, Any]) -> None:
    size, max_bytes = size_text(document["size_bytes"]), document["max_bytes"]
    limit = f"{document['share_of_max']:.1%} of {size_text(max_bytes)}" if max_bytes else "no limit"
    abandoned = document["abandoned"]
    facts = {
        "cache": f"{document['cache_dir']}",
        "kernels": f"{document['entries']}, {size}, {limit}",
        "usable here": f"{document['usable']}: by {document['toolchain'] or 'no compiler'}, "
        f"templates {document['templates'][:SHORT_KEY]}",
        "not usable here": document["unusable"],
        "damaged": document["damaged"],
        "abandoned": f"{count_text(abandoned['files'], 'file')}, "
        f"{size_text(abandoned['size_bytes'])}",
    }
    for name in ("oldest", "newest", "longest_unused"):
        if seen := document[name]:
            facts[name.replace("_", " ")] = f"{seen['key'][:SHORT_KEY]}, {seen['time']}"
    print_facts(facts)
    if document["groups"]:
        click.echo()
        print_table(
            [
                {
                    "by": group["by"],
                    "name": group["name"],
                    "kernels": group["entries"],
                    "size": size_text(group["size_bytes"]),
                }
                for group in document["groups"]
            ]
        )


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
