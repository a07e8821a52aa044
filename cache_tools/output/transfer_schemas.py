"""JSON schemas of `mlagen prewarm` and of the bundle commands.

In the notation of :mod:`cache_tools.output.schemas`, and compared with the output in the same way.
"""

from __future__ import annotations

from .schemas import CACHE_DIR, DOCUMENT, Field, Part, Schema

_COUNT = Field("integer", "count")

_BUNDLE: Part = {
    "bundle": Field("text", "the file or URL, without secrets"),
    "sha256": Field("text", "digest of the whole file, for `--expect-sha256`"),
    "size_bytes": Field("integer", "size of the file"),
    "content_bytes": Field("integer", "size of the unpacked kernels"),
    "archs": Field("list of text", "targets of its kernels"),
}
_ENTRY: Part = {
    "key": Field("text", "64 hex digits"),
    "toolchain": Field("text", "its compiler, such as `nvrtc-13.5.37`"),
    "family": Field("text", "kernel family"),
    "arch": Field("text", "target, such as `sm_90a`"),
    "size_bytes": Field("integer", "size of its files"),
}

PREWARM: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "totals": Field("`totals`", "kernels of each status"),
        "left_out": Field("list of text", "parts of models without a kernel"),
        "bundle": Field("`bundle` or null", "the bundle that `--bundle` wrote"),
        "units": Field("list of `unit`", "one per requested kernel"),
    },
    "`totals`": {
        "units": _COUNT,
        "hit": _COUNT,
        "built": _COUNT,
        "failed": _COUNT,
        "timeout": _COUNT,
        "skipped": _COUNT,
        "missing": _COUNT,
        "loaded": Field("integer", "kernels times GPUs, with `--load`"),
        "ms": Field("number", "total time in milliseconds"),
    },
    "`bundle`": _BUNDLE,
    "`unit`": {
        "key": _ENTRY["key"],
        "family": _ENTRY["family"],
        "spec": Field("map of text", "the fields that select its code"),
        "arch": _ENTRY["arch"],
        "toolchain": Field("text", "its compiler, or the one that would compile it"),
        "status": Field(
            "text",
            "`hit`, `built`, `failed`, `timeout`, or `skipped` by `--fail-fast`; with `--dry-run` "
            "`hit` or `missing`",
        ),
        "ms": Field("number", "time in milliseconds"),
        "registers": Field("integer or null", "registers per thread; null if there is no kernel"),
        "spill_bytes": Field("integer or null", "spill stores and loads"),
        "cubin_bytes": Field("integer or null", "size of the cubin"),
        "error": Field("text or null", "why it failed"),
    },
}
WRITTEN: Schema = {
    DOCUMENT: {**_BUNDLE, "entries": Field("list of `entry`", "the kernels in it")},
    "`entry`": _ENTRY,
}
TAKEN: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "dry_run": Field("boolean", "whether nothing was added"),
        **_BUNDLE,
        "totals": Field("`totals`", "kernels of each outcome"),
        "entries": Field("list of `entry`", "the kernels in it"),
    },
    "`totals`": {"added": _COUNT, "kept": _COUNT, "replaced": _COUNT},
    "`entry`": {
        **_ENTRY,
        "outcome": Field("text", "`added`, `kept`, or `replaced` if a damaged one was there"),
    },
}

TRANSFER_SCHEMAS: dict[str, Schema] = {
    "prewarm": PREWARM,
    "cache export": WRITTEN,
    "cache import": TAKEN,
    "cache push": WRITTEN,
    "cache pull": TAKEN,
}
