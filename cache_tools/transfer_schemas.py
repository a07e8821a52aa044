"""What `mlagen prewarm` and the commands around bundles print with ``--json``, name by name.

In the words of :mod:`cache_tools.schemas`, and compared in the same way with what they print.
"""

from __future__ import annotations

from .schemas import CACHE_DIR, DOCUMENT, Field, Part, Schema

_COUNT = Field("integer", "how many")

_BUNDLE: Part = {
    "bundle": Field("text", "the file or URL, without secrets"),
    "sha256": Field("text", "of the whole file, for `--expect-sha256`"),
    "size_bytes": Field("integer", "size of the file"),
    "content_bytes": Field("integer", "size of the kernels, unpacked"),
    "archs": Field("list of text", "the targets of its kernels"),
}
_ENTRY: Part = {
    "key": Field("text", "64 hex digits"),
    "toolchain": Field("text", "what compiled it, such as `nvrtc-13.5.37`"),
    "family": Field("text", "kernel family"),
    "arch": Field("text", "target, such as `sm_90a`"),
    "size_bytes": Field("integer", "size of its files"),
}

PREWARM: Schema = {
    DOCUMENT: {
        "cache_dir": CACHE_DIR,
        "totals": Field("`totals`", "units of each status"),
        "left_out": Field("list of text", "parts of models that no kernel serves"),
        "bundle": Field("`bundle` or null", "what `--bundle` wrote"),
        "units": Field("list of `unit`", "one for each kernel that was asked for"),
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
        "ms": Field("number", "milliseconds that all of it took"),
    },
    "`bundle`": _BUNDLE,
    "`unit`": {
        "key": _ENTRY["key"],
        "family": _ENTRY["family"],
        "spec": Field("map of text", "what changes its machine code"),
        "arch": _ENTRY["arch"],
        "toolchain": Field("text", "what compiled it, or is to"),
        "status": Field(
            "text",
            "`hit`, `built`, `failed`, `timeout`, or `skipped` by `--fail-fast`; with `--dry-run` "
            "`hit` or `missing`",
        ),
        "ms": Field("number", "milliseconds that it took"),
        "registers": Field("integer or null", "registers of a thread; null if there is no kernel"),
        "spill_bytes": Field("integer or null", "registers in local memory, written and read"),
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
