"""JSON schemas of the cache commands' ``--json`` output.

A type is ``text``, ``integer``, ``number``, ``boolean``, a part of the same table in backquotes, or
a ``list of`` or ``map of`` them; ``or null`` marks an optional value. Tests compare the schemas
with the output, and docs/reference/cli.md shows them.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Field(NamedTuple):
    """One field of an object: the type and the meaning of its value."""

    type: str
    meaning: str


Part: TypeAlias = dict[str, Field]
Schema: TypeAlias = dict[str, Part]

# The first part of every schema.
DOCUMENT = "the document"

CACHE_DIR = Field("text", "the cache folder")
_SIZE = Field("integer", "size in bytes")

_ENTRY: Part = {
    "key": Field("text", "64 hex digits"),
    "toolchain": Field("text", "its compiler, such as `nvrtc-13.5.37`"),
    "path": Field("text", "its folder"),
    "layer": Field("text", "the cache folder that holds it"),
    "is_read_only": Field(
        "boolean", "whether that is a layer of `MLAGEN_CACHE_RO` or of a package"
    ),
    "size_bytes": _SIZE,
    "used": Field("text or null", "when it was last used, to the hour; ISO 8601"),
    "problem": Field("text or null", "its damage; if set, the fields below are null"),
    "family": Field("text or null", "kernel family"),
    "spec": Field("map of text or null", "the fields that select its code"),
    "resources": Field("list of `resources` or null", "one object for each kernel in it"),
    "dynamic_shared_bytes": Field("integer or null", "dynamic shared memory of a CTA"),
    "line_info": Field("text or null", "the folder of its `MLAGEN_LINEINFO`, null without"),
    "compile_ms": Field("number or null", "compile time of NVRTC in milliseconds"),
    "created": Field("`created` or null", "when and where it was compiled"),
    "created_by": Field("text or null", "`jit` or `prewarm`"),
}
RESOURCE_FIELDS: Part = {
    "symbol": Field("text", "name of the kernel in the cubin"),
    "registers": Field("integer", "registers per thread"),
    "stack_bytes": Field("integer", "stack per thread"),
    "spill_store_bytes": Field("integer", "registers written to local memory"),
    "spill_load_bytes": Field("integer", "registers read from local memory"),
    "static_shared_bytes": Field("integer", "static shared memory of a CTA"),
}
CREATED_FIELDS: Part = {
    "because": Field("text or null", "why the lookup missed: `absent`, `other toolchain`, ..."),
    "time": Field("text", "ISO 8601"),
    "host": Field("text", "name of the machine"),
    "pid": Field("integer", "process id"),
    "python": Field("text", "version of Python"),
    "mlagen": Field("text", "version of mlagen"),
}
_ENTRY_PARTS: Schema = {
    "`entry`": _ENTRY,
    "`resources`": RESOURCE_FIELDS,
    "`created`": CREATED_FIELDS,
}
_DIFFERENCE = Field("text or null", "its value, null if it has none")

LS: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "entries": Field("list of `entry`", "in the order of the table"),
    },
    **_ENTRY_PARTS,
}
SHOW: Schema = {
    DOCUMENT: {
        "entries": Field(
            "list of `entry`",
            "one for each toolchain; `--source`, `--log`, `--manifest`, `--sass` and `--reproduce` "
            "add their output under their own name",
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
        "usable": Field("integer", "kernels of all layers that this installation would load"),
        "unusable": Field("integer", "kernels of another toolchain, of other sources, or damaged"),
        "damaged": Field("integer", "kernels with an unreadable manifest"),
        "toolchain": Field(
            "text or null", "toolchain of the keys of this installation, null without cuda-bindings"
        ),
        "templates": Field("text", "digest of the installed kernel sources"),
        "oldest": Field("`seen` or null", "the kernel compiled first"),
        "newest": Field("`seen` or null", "the kernel compiled last"),
        "longest_unused": Field("`seen` or null", "the kernel that is evicted first"),
        "quarantine": Field("`quarantine`", "quarantined damaged kernels"),
        "abandoned": Field("`abandoned`", "unfinished folders of dead processes"),
        "groups": Field("list of `group`", "kernels of all layers, by each of five criteria"),
    },
    "`seen`": {"key": Field("text", "64 hex digits"), "time": Field("text", "ISO 8601")},
    "`quarantine`": {"entries": Field("integer", "count"), "size_bytes": _SIZE},
    "`abandoned`": {"folders": Field("integer", "count"), "size_bytes": _SIZE},
    "`group`": {
        "by": Field("text", "`layer`, `family`, `arch`, `toolchain` or `mlagen`"),
        "name": Field("text", "its value"),
        "entries": Field("integer", "its kernels"),
        "size_bytes": _SIZE,
    },
}
WHY: Schema = {
    DOCUMENT: {
        "kernel": Field("text", "the kernel, as in messages"),
        "key": Field("text", "its key, 64 hex digits"),
        "toolchain": Field("text", "the required one; `nvrtc-13` matches any 13.x"),
        "is_found": Field("boolean", "whether a call finds it"),
        "reason": Field(
            "text or null", "why it is not found; for a KEY, why it was compiled, if recorded"
        ),
        "problem": Field("text or null", "the damage of the entry that is present"),
        "entry": Field("`entry` or null", "the entry found"),
        "nearest": Field("`entry` or null", "the entry it is compared with"),
        "differences": Field("list of `difference`", "the differing key fields"),
    },
    "`difference`": {
        "key_field": Field("text", "its label; `templates` is the digest of the kernel sources"),
        "wanted": _DIFFERENCE,
        "nearest": _DIFFERENCE,
    },
    **_ENTRY_PARTS,
}
VERIFY: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "verified": Field("integer", "entries read"),
        "bad": Field("list of `bad`", "entries that do not match their digests"),
        "unreadable": Field("list of `unreadable`", "entries that cannot be read, and stay"),
    },
    "`bad`": {
        **_ENTRY,
        "problem": Field("text", "its damage"),
        "moved_to": Field("text or null", "its folder in the quarantine"),
    },
    "`unreadable`": {**_ENTRY, "problem": Field("text", "why it cannot be read")},
    "`resources`": RESOURCE_FIELDS,
    "`created`": CREATED_FIELDS,
}
PRUNE: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "dry_run": Field("boolean", "whether nothing was removed"),
        "removed": Field("list of `removed`", "the kernels removed"),
        "freed_bytes": Field("integer", "their size"),
        "kept": Field("integer", "kernels that remain"),
        "kept_bytes": Field("integer", "their size"),
    },
    "`removed`": {
        **_ENTRY,
        "why": Field("text", "`unused`, `other toolchain`, `other version`, `named` or `size`"),
    },
    "`resources`": RESOURCE_FIELDS,
    "`created`": CREATED_FIELDS,
}
GC: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "abandoned": Field("integer", "deleted folders of dead processes"),
        "quarantined": Field("integer", "damaged kernels deleted from the quarantine"),
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
    DOCUMENT: {"removed": Field("list of `entry`", "the kernels removed")},
    **_ENTRY_PARTS,
}
CLEAR: Schema = {
    DOCUMENT: {"cache_dir": CACHE_DIR, "removed": Field("integer", "number of kernels")},
}
DIR: Schema = {
    DOCUMENT: {"cache_dir": CACHE_DIR, "exists": Field("boolean", "whether it exists")},
}
_KERNEL: Part = {
    "kernel": Field("text", "the kernel, as in messages"),
    "family": Field("text", "kernel family"),
    "spec": Field("map of text", "the fields that select its code"),
    "key": Field("text", "its key, 64 hex digits"),
    "toolchain": Field("text", "its compiler"),
    "is_cached": Field("boolean", "whether it was read from the cache"),
    "threads": Field("integer", "threads of a CTA"),
    **RESOURCE_FIELDS,
    "dynamic_shared_bytes": Field("integer", "dynamic shared memory of a CTA"),
    "max_active_ctas": Field("integer", "CTAs that an SM holds at once"),
    "code_bytes": Field("integer", "size of the SASS"),
    "template": Field("text", "the template that it is rendered from"),
    "includes": Field(
        "list of text",
        "the templates that it includes, in order; `--source`, `--ptx` and `--sass` add their "
        "output under their own name, `--resources` a map of `instructions`, null without nvdisasm",
    ),
}
KERNEL_SHOW: Schema = {DOCUMENT: _KERNEL}

SCHEMAS: dict[str, Schema] = {
    "cache dir": DIR,
    "cache ls": LS,
    "cache stats": STATS,
    "cache show": SHOW,
    "cache why": WHY,
    "cache verify": VERIFY,
    "cache prune": PRUNE,
    "cache gc": GC,
    "cache rm": RM,
    "cache clear": CLEAR,
    "kernel show": KERNEL_SHOW,
}
