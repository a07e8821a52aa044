"""`mlagen cache stats`: statistics of the cache."""

from __future__ import annotations

import hashlib
from typing import Any

import click

from ..output.report import (
    SHORT_KEY,
    count_text,
    json_option,
    print_facts,
    print_json,
    print_table,
    size_text,
)
from ..output.tally import GROUPS, Tally
from ..tools.installation import required_line_info, required_toolchain


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
    abandoned = store.abandoned()
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
        **{name: _seen(tally.ends.get(name)) for name in ("oldest", "newest", "longest_unused")},
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
        _print(document)


def _seen(end: tuple[str, str] | None) -> dict[str, str] | None:
    return {"key": end[1], "time": end[0]} if end else None


def _print(document: dict[str, Any]) -> None:
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
