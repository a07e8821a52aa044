"""What the commands that look after the cache print with ``--json``, name by name.

A type is ``text``, ``integer``, ``number``, ``boolean``, a part of the same table in backquotes, or
a ``list of`` or ``map of`` them; with ``or null``, there may be none. Tests compare it with what
the commands print, and docs/reference/cli.md shows it.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Field(NamedTuple):
    """One name of an object: the type of its value, and what it means."""

    type: str
    meaning: str


Part: TypeAlias = dict[str, Field]
Schema: TypeAlias = dict[str, Part]

# The part that every schema begins with.
DOCUMENT = "the document"

CACHE_DIR = Field("text", "the cache folder")
_SIZE = Field("integer", "size in bytes")

_ENTRY: Part = {
    "key": Field("text", "64 hex digits"),
    "toolchain": Field("text", "what compiled it, such as `nvrtc-13.5.37`"),
    "path": Field("text", "its folder"),
    "layer": Field("text", "the cache folder that it lies in"),
    "is_read_only": Field("boolean", "whether that is one of `MLAGEN_CACHE_RO` or a package's"),
    "size_bytes": _SIZE,
    "used": Field("text or null", "when it was last used, to the hour; ISO 8601"),
    "problem": Field("text or null", "what is wrong with it; the names below are null then"),
    "family": Field("text or null", "kernel family"),
    "spec": Field("map of text or null", "what changes its machine code"),
    "resources": Field("list of `resources` or null", "one object for each kernel in it"),
    "dynamic_shared_bytes": Field("integer or null", "dynamic shared memory of a block"),
    "compile_ms": Field("number or null", "milliseconds that NVRTC took"),
    "created": Field("`created` or null", "when and where it was compiled"),
    "created_by": Field("text or null", "`jit` or `prewarm`"),
}
_RESOURCES: Part = {
    "symbol": Field("text", "name of the kernel in the cubin"),
    "registers": Field("integer", "registers of a thread"),
    "stack_bytes": Field("integer", "stack of a thread"),
    "spill_store_bytes": Field("integer", "registers written to local memory"),
    "spill_load_bytes": Field("integer", "registers read from local memory"),
    "static_shared_bytes": Field("integer", "static shared memory of a block"),
}
_CREATED: Part = {
    "because": Field("text or null", "why it was not found: `absent`, `other toolchain`, ..."),
    "time": Field("text", "ISO 8601"),
    "host": Field("text", "name of the machine"),
    "pid": Field("integer", "the process"),
    "python": Field("text", "version of Python"),
    "mlagen": Field("text", "version of mlagen"),
}
_ENTRY_PARTS: Schema = {"`entry`": _ENTRY, "`resources`": _RESOURCES, "`created`": _CREATED}
_DIFFERENCE = Field("text or null", "its value there, null if it has none")

LS: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "entries": Field("list of `entry`", "in the order of the list"),
    },
    **_ENTRY_PARTS,
}
SHOW: Schema = {
    DOCUMENT: {
        "entries": Field(
            "list of `entry`",
            "one for each toolchain; `--source`, `--log`, `--manifest`, `--sass` and `--reproduce` "
            "add what they print under their own name",
        ),
    },
    **_ENTRY_PARTS,
}
STATS: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "entries": Field("integer", "kernels in the cache folder"),
        "size_bytes": _SIZE,
        "max_bytes": Field("integer or null", "`MLAGEN_CACHE_MAX_SIZE`, null if there is no limit"),
        "share_of_max": Field("number or null", "`size_bytes` over `max_bytes`"),
        "usable": Field("integer", "kernels of all layers that this installation would take"),
        "unusable": Field("integer", "those of another toolchain, other sources, or damaged"),
        "damaged": Field("integer", "those whose manifest cannot be read"),
        "toolchain": Field("text or null", "what keys name here, null without cuda-bindings"),
        "templates": Field("text", "digest of the kernel sources that are installed"),
        "oldest": Field("`seen` or null", "the kernel compiled first"),
        "newest": Field("`seen` or null", "the kernel compiled last"),
        "longest_unused": Field("`seen` or null", "the kernel that is evicted first"),
        "quarantine": Field("`quarantine`", "damaged kernels that were moved away"),
        "abandoned": Field("`abandoned`", "what dead processes left half-written"),
        "groups": Field("list of `group`", "kernels of all layers, counted five times"),
    },
    "`seen`": {"key": Field("text", "64 hex digits"), "time": Field("text", "ISO 8601")},
    "`quarantine`": {"entries": Field("integer", "how many"), "size_bytes": _SIZE},
    "`abandoned`": {"folders": Field("integer", "how many"), "size_bytes": _SIZE},
    "`group`": {
        "by": Field("text", "`layer`, `family`, `arch`, `toolchain` or `mlagen`"),
        "name": Field("text", "which one"),
        "entries": Field("integer", "its kernels"),
        "size_bytes": _SIZE,
    },
}
WHY: Schema = {
    DOCUMENT: {
        "kernel": Field("text", "the kernel, as messages name it"),
        "key": Field("text", "its key, 64 hex digits"),
        "toolchain": Field("text", "the one wanted; `nvrtc-13` is any of that major version"),
        "is_found": Field("boolean", "whether a call would find it"),
        "reason": Field("text or null", "why not; for a KEY, why it was compiled, if recorded"),
        "problem": Field("text or null", "what is wrong with the one that is there"),
        "entry": Field("`entry` or null", "where it is found"),
        "nearest": Field("`entry` or null", "what it is compared with"),
        "differences": Field("list of `difference`", "in what the two differ"),
    },
    "`difference`": {
        "ingredient": Field("text", "its label; `templates` stands for the kernel sources"),
        "wanted": _DIFFERENCE,
        "nearest": _DIFFERENCE,
    },
    **_ENTRY_PARTS,
}
EXPLAIN: Schema = {
    DOCUMENT: {
        "first": Field("`entry`", "the first KEY"),
        "second": Field("`entry`", "the second KEY"),
        "differences": Field("list of `difference`", "in what they are made of"),
        "facts": Field("list of `fact`", "what was measured of both, alike or not"),
    },
    "`difference`": {
        "ingredient": Field("text", "its label; `templates` stands for the kernel sources"),
        "first": _DIFFERENCE,
        "second": _DIFFERENCE,
    },
    "`fact`": {
        "fact": Field("text", "such as `registers`"),
        "first": Field("text or number", "of the first KEY"),
        "second": Field("text or number", "of the second KEY"),
    },
    **_ENTRY_PARTS,
}
VERIFY: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "verified": Field("integer", "entries that were read"),
        "bad": Field("list of `bad`", "those that are not as they were published"),
    },
    "`bad`": {
        **_ENTRY,
        "problem": Field("text", "what is wrong"),
        "moved_to": Field("text or null", "its place in the quarantine"),
    },
    "`resources`": _RESOURCES,
    "`created`": _CREATED,
}
PRUNE: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "dry_run": Field("boolean", "whether nothing was removed"),
        "removed": Field("list of `removed`", "what goes"),
        "freed_bytes": Field("integer", "their size"),
        "kept": Field("integer", "kernels that stay"),
        "kept_bytes": Field("integer", "their size"),
    },
    "`removed`": {
        **_ENTRY,
        "why": Field("text", "`unused`, `other toolchain`, `other version`, `named` or `size`"),
    },
    "`resources`": _RESOURCES,
    "`created`": _CREATED,
}
GC: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "abandoned": Field("integer", "folders that dead processes had left"),
        "quarantined": Field("integer", "damaged kernels that were deleted from the quarantine"),
        "evicted": Field("list of `evicted`", "kernels above `MLAGEN_CACHE_MAX_SIZE`"),
        "freed_bytes": Field("integer", "their size"),
    },
    "`evicted`": {
        "path": Field("text", "its folder"),
        "size_bytes": _SIZE,
        "used": Field("text or null", "when it was last used; ISO 8601"),
    },
}
RM: Schema = {
    DOCUMENT: {"removed": Field("list of `entry`", "what was removed")},
    **_ENTRY_PARTS,
}
CLEAR: Schema = {
    DOCUMENT: {"cache_dir": CACHE_DIR, "removed": Field("integer", "how many kernels")},
}
DIR: Schema = {
    DOCUMENT: {"cache_dir": CACHE_DIR, "exists": Field("boolean", "whether it is there yet")},
}
RESOURCES: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "kernels": Field("list of `kernel`", "in the order of the list"),
        "spilling": Field("integer", "how many spill registers"),
        "damaged": Field("integer", "entries that tell nothing"),
    },
    "`kernel`": {
        "key": Field("text", "64 hex digits"),
        "toolchain": Field("text", "what compiled it"),
        "symbol": Field("text", "name of the kernel in the cubin"),
        "family": Field("text", "kernel family"),
        "spec": Field("map of text", "what changes its machine code"),
        "registers": Field("integer", "registers of a thread"),
        "spill_bytes": Field("integer", "the two below together"),
        "spill_store_bytes": Field("integer", "registers written to local memory"),
        "spill_load_bytes": Field("integer", "registers read from local memory"),
        "stack_bytes": Field("integer", "stack of a thread"),
        "shared_bytes": Field("integer", "the two below together"),
        "static_shared_bytes": Field("integer", "static shared memory of a block"),
        "dynamic_shared_bytes": Field("integer", "dynamic shared memory of a block"),
    },
}

SCHEMAS: dict[str, Schema] = {
    "cache dir": DIR,
    "cache ls": LS,
    "cache stats": STATS,
    "cache show": SHOW,
    "cache why": WHY,
    "cache explain": EXPLAIN,
    "cache verify": VERIFY,
    "cache prune": PRUNE,
    "cache gc": GC,
    "cache rm": RM,
    "cache clear": CLEAR,
    "resources": RESOURCES,
}
