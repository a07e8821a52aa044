"""JSON documents of the commands' ``--json``, as types, each field with its meaning.

:func:`schema_of` prints a document's types for docs/reference/cli.md; :func:`require_document`
holds a document from elsewhere against them.
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypedDict, get_args, get_origin, get_type_hints

from mlagen.values import reject, shown

_SCALARS: dict[type, tuple[str, str, tuple[type, ...]]] = {
    str: ("text", "a text", (str,)),
    int: ("integer", "an integer", (int,)),
    float: ("number", "a finite number", (int, float)),
    bool: ("boolean", "a boolean", (bool,)),
}


class Field(NamedTuple):
    """One field of an object: its type in words, and its meaning."""

    name: str
    type: str
    meaning: str


def schema_of(document: type) -> Iterator[tuple[str, list[Field]]]:
    """Yield the objects of a document, itself first, each with its name and fields."""
    waiting, seen = [document], [document]
    while waiting:
        kind = waiting.pop(0)
        found = [(name, *get_args(hint)) for name, hint in _hints(kind).items()]
        name = "the document" if kind is document else f"`{kind.__name__.lower()}`"
        yield name, [Field(field, _words(of), meaning) for field, of, meaning in found]
        new = [part for _, of, _ in found for part in _objects_in(of) if part not in seen]
        waiting += dict.fromkeys(new)
        seen += new


def require_document(value: Any, document: Any, where: str) -> None:
    """Require that a value has exactly the fields of a document, and finite numbers.

    Raises
    ------
    ArgumentError
        If it has others; the message begins with ``where`` and the path inside the value.
    """
    kinds = get_args(document) if get_origin(document) is types.UnionType else (document,)
    if value is None and types.NoneType in kinds:
        return
    kind, origin = kinds[0], get_origin(kinds[0])
    if origin in {list, dict}:
        if not isinstance(value, origin):
            reject(where, "a list" if origin is list else "a map", shown(value))
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            require_document(item, get_args(kind)[-1], f"{where}[{key}]")
    elif kind in _SCALARS:
        if not any(_is_scalar(value, each) for each in kinds):
            null = " or null" * (types.NoneType in kinds)
            reject(where, f"{_SCALARS[kind][1]}{null}", shown(value))
    else:
        hints = _hints(kind)
        if not isinstance(value, Mapping) or value.keys() != hints.keys():
            reject(where, f"the fields of `{kind.__name__.lower()}`", shown(value))
        for name, hint in hints.items():
            require_document(value[name], get_args(hint)[0], f"{where}.{name}")


def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _words(kind: Any) -> str:
    if get_origin(kind) is types.UnionType:
        return " or ".join(map(_words, get_args(kind)))
    if kind is types.NoneType:
        return "null"
    if get_origin(kind) in {list, dict}:
        outer = "list" if get_origin(kind) is list else "map"
        return f"{outer} of {_words(get_args(kind)[-1])}"
    return _SCALARS[kind][0] if kind in _SCALARS else f"`{kind.__name__.lower()}`"


def _objects_in(kind: Any) -> list[type]:
    if get_args(kind):
        return [each for of in get_args(kind) for each in _objects_in(of)]
    return [kind] if kind not in {*_SCALARS, types.NoneType} else []


def _is_scalar(value: object, kind: type) -> bool:
    if kind not in _SCALARS or not isinstance(value, _SCALARS[kind][2]):
        return False
    try:
        return isinstance(value, bool) == (kind is bool) and (
            kind is not float or math.isfinite(value)  # type: ignore[arg-type]
        )
    except OverflowError:  # an int that no float can hold
        return False


CacheDir = Annotated[str, "the cache folder"]
Size = Annotated[int, "size in bytes"]
Count = Annotated[int, "count"]
Key = Annotated[str, "64 hex digits"]
Toolchain = Annotated[str, "its compiler, such as `nvrtc-13.5.37`"]
Family = Annotated[str, "kernel family"]
Spec = Annotated[dict[str, str], "the fields that select its code"]
Freed = Annotated[int, "their size"]
DynamicShared = Annotated[int, "dynamic shared memory of a CTA"]


class Resources(TypedDict):
    symbol: Annotated[str, "name of the kernel in the cubin"]
    registers: Annotated[int, "registers per thread"]
    stack_bytes: Annotated[int, "stack per thread"]
    spill_store_bytes: Annotated[int, "registers written to local memory"]
    spill_load_bytes: Annotated[int, "registers read from local memory"]
    static_shared_bytes: Annotated[int, "static shared memory of a CTA"]


class Created(TypedDict):
    because: Annotated[str | None, "why the lookup missed: `absent`, `other toolchain`, ..."]
    time: Annotated[str, "ISO 8601"]
    host: Annotated[str, "name of the machine"]
    pid: Annotated[int, "process id"]
    python: Annotated[str, "version of Python"]
    mlagen: Annotated[str, "version of mlagen"]


class Entry(TypedDict):
    key: Key
    toolchain: Toolchain
    path: Annotated[str, "its folder"]
    layer: Annotated[str, "the cache folder that holds it"]
    is_read_only: Annotated[bool, "whether that is a layer of `MLAGEN_CACHE_RO` or of a package"]
    size_bytes: Size
    used: Annotated[str | None, "when it was last used, to the hour; ISO 8601"]
    problem: Annotated[str | None, "its damage; if set, the fields below are null"]
    family: Annotated[str | None, "kernel family"]
    spec: Annotated[dict[str, str] | None, "the fields that select its code"]
    resources: Annotated[list[Resources] | None, "one object for each kernel in it"]
    dynamic_shared_bytes: Annotated[int | None, "dynamic shared memory of a CTA"]
    line_info: Annotated[str | None, "the folder of its `MLAGEN_LINEINFO`, null without"]
    compile_ms: Annotated[float | None, "compile time of NVRTC in milliseconds"]
    created: Annotated[Created | None, "when and where it was compiled"]
    created_by: Annotated[str | None, "`jit` or `prewarm`"]


class Ls(TypedDict):
    cache_dir: CacheDir
    entries: Annotated[list[Entry], "in the order of the table"]


class Show(TypedDict):
    entries: Annotated[
        list[Entry],
        "one for each toolchain; `--source`, `--log`, `--manifest`, `--sass` and `--reproduce` add "
        "their output under their own name",
    ]


class Seen(TypedDict):
    key: Key
    time: Annotated[str, "ISO 8601"]


class Quarantine(TypedDict):
    entries: Count
    size_bytes: Size


class Abandoned(TypedDict):
    folders: Count
    size_bytes: Size


class Group(TypedDict):
    by: Annotated[str, "`layer`, `family`, `arch`, `toolchain` or `mlagen`"]
    name: Annotated[str, "its value"]
    entries: Annotated[int, "its kernels"]
    size_bytes: Size


class Stats(TypedDict):
    cache_dir: CacheDir
    entries: Annotated[int, "kernels in the cache folder"]
    size_bytes: Size
    max_bytes: Annotated[int | None, "`MLAGEN_CACHE_MAX_SIZE`, null if there is no limit"]
    share_of_max: Annotated[float | None, "`size_bytes` over `max_bytes`"]
    usable: Annotated[int, "kernels of all layers that this installation would load"]
    unusable: Annotated[int, "kernels of another toolchain, of other sources, or damaged"]
    damaged: Annotated[int, "kernels with an unreadable manifest"]
    toolchain: Annotated[
        str | None, "toolchain of the keys of this installation, null without cuda-bindings"
    ]
    templates: Annotated[str, "digest of the installed kernel sources"]
    oldest: Annotated[Seen | None, "the kernel compiled first"]
    newest: Annotated[Seen | None, "the kernel compiled last"]
    longest_unused: Annotated[Seen | None, "the kernel that is evicted first"]
    quarantine: Annotated[Quarantine, "quarantined damaged kernels"]
    abandoned: Annotated[Abandoned, "unfinished folders of dead processes"]
    groups: Annotated[list[Group], "kernels of all layers, by each of five criteria"]


class Difference(TypedDict):
    key_field: Annotated[str, "its label; `templates` is the digest of the kernel sources"]
    wanted: Annotated[str | None, "its value, null if it has none"]
    nearest: Annotated[str | None, "its value, null if it has none"]


class Why(TypedDict):
    kernel: Annotated[str, "the kernel, as in messages"]
    key: Annotated[str, "its key, 64 hex digits"]
    toolchain: Annotated[str, "the required one; `nvrtc-13` matches any 13.x"]
    is_found: Annotated[bool, "whether a call finds it"]
    reason: Annotated[
        str | None, "why it is not found; for a KEY, why it was compiled, if recorded"
    ]
    problem: Annotated[str | None, "the damage of the entry that is present"]
    entry: Annotated[Entry | None, "the entry found"]
    nearest: Annotated[Entry | None, "the entry it is compared with"]
    differences: Annotated[list[Difference], "the differing key fields"]


class Bad(Entry):
    moved_to: Annotated[str | None, "its folder in the quarantine"]


class Verify(TypedDict):
    cache_dir: CacheDir
    verified: Annotated[int, "entries read"]
    bad: Annotated[list[Bad], "entries that do not match their digests"]
    unreadable: Annotated[list[Entry], "entries that cannot be read, and stay"]


class Removed(Entry):
    why: Annotated[str, "`unused`, `other toolchain`, `other version`, `named` or `size`"]


class Prune(TypedDict):
    cache_dir: CacheDir
    dry_run: Annotated[bool, "whether nothing was removed"]
    removed: Annotated[list[Removed], "the kernels removed"]
    freed_bytes: Freed
    kept: Annotated[int, "kernels that remain"]
    kept_bytes: Freed


class Evicted(TypedDict):
    path: Annotated[str, "its folder"]
    size_bytes: Size
    used: Annotated[str | None, "when it was last used; ISO 8601"]


class Gc(TypedDict):
    cache_dir: CacheDir
    abandoned: Annotated[int, "deleted folders of dead processes"]
    quarantined: Annotated[int, "damaged kernels deleted from the quarantine"]
    evicted: Annotated[list[Evicted], "kernels above `MLAGEN_CACHE_MAX_SIZE`"]
    freed_bytes: Freed


class Rm(TypedDict):
    removed: Annotated[list[Entry], "the kernels removed"]


class Clear(TypedDict):
    cache_dir: CacheDir
    removed: Annotated[int, "number of kernels"]


class Dir(TypedDict):
    cache_dir: CacheDir
    exists: Annotated[bool, "whether it exists"]


class _Kernel(TypedDict):
    kernel: Annotated[str, "the kernel, as in messages"]
    family: Family
    spec: Spec
    key: Annotated[str, "its key, 64 hex digits"]
    toolchain: Annotated[str, "its compiler"]
    is_cached: Annotated[bool, "whether it was read from the cache"]
    threads: Annotated[int, "threads of a CTA"]


class _Code(TypedDict):
    dynamic_shared_bytes: DynamicShared
    max_active_ctas: Annotated[int, "CTAs that an SM holds at once"]
    code_bytes: Annotated[int, "size of the SASS"]
    template: Annotated[str, "the template that it is rendered from"]
    includes: Annotated[
        list[str],
        "the templates that it includes, in order; `--source`, `--ptx` and `--sass` add their "
        "output under their own name, `--resources` a map of `instructions`, null without nvdisasm",
    ]


class KernelShow(_Kernel, Resources, _Code):
    """`kernel show`."""


class Bundle(TypedDict):
    bundle: Annotated[str, "the file or URL, without secrets"]
    sha256: Annotated[str, "digest of the whole file, for `--expect-sha256`"]
    size_bytes: Annotated[int, "size of the file"]
    content_bytes: Annotated[int, "size of the unpacked kernels"]
    archs: Annotated[list[str], "targets of its kernels"]


class Packed(TypedDict):
    key: Key
    toolchain: Toolchain
    family: Family
    arch: Annotated[str, "target, such as `sm_90a`"]
    size_bytes: Annotated[int, "size of its files"]


class Written(Bundle):
    entries: Annotated[list[Packed], "the kernels in it"]


class Taken(Packed):
    outcome: Annotated[str, "`added`, `kept`, or `replaced` if a damaged one was there"]


class Outcomes(TypedDict):
    added: Count
    kept: Count
    replaced: Count


class _Folder(TypedDict):
    cache_dir: CacheDir
    dry_run: Annotated[bool, "whether nothing was added"]


class _TakenEntries(TypedDict):
    totals: Annotated[Outcomes, "kernels of each outcome"]
    entries: Annotated[list[Taken], "the kernels in it"]


class Import(_Folder, Bundle, _TakenEntries):
    """`cache import` and `cache pull`."""


class Totals(TypedDict):
    units: Count
    hit: Count
    built: Count
    failed: Count
    timeout: Count
    skipped: Count
    missing: Count
    loaded: Annotated[int, "kernels times GPUs, with `--load`"]
    ms: Annotated[float, "total time in milliseconds"]


class Unit(TypedDict):
    key: Key
    family: Family
    spec: Spec
    arch: Annotated[str, "target, such as `sm_90a`"]
    toolchain: Annotated[str, "its compiler, or the one that would compile it"]
    status: Annotated[
        str,
        "`hit`, `built`, `failed`, `timeout`, or `skipped` by `--fail-fast`; with `--dry-run` "
        "`hit` or `missing`",
    ]
    ms: Annotated[float, "time in milliseconds"]
    registers: Annotated[int | None, "registers per thread; null if there is no kernel"]
    spill_bytes: Annotated[int | None, "spill stores and loads"]
    cubin_bytes: Annotated[int | None, "size of the cubin"]
    error: Annotated[str | None, "why it failed"]


class Prewarm(TypedDict):
    cache_dir: CacheDir
    totals: Annotated[Totals, "kernels of each status"]
    left_out: Annotated[list[str], "parts of models without a kernel"]
    bundle: Annotated[Bundle | None, "the bundle that `--bundle` wrote"]
    units: Annotated[list[Unit], "one per requested kernel"]


class Model(TypedDict):
    name: Annotated[str, "the name that `--model` takes"]
    owner: Annotated[str, "its owner on the Hub; empty for a path"]
    aliases: Annotated[list[str], "models with the same attention"]
    attention: Annotated[str | None, "heads and dims on one GPU; null if `reason` is set"]
    page_sizes: Annotated[list[int], "those that servers use by default"]
    left_out: Annotated[list[str], "parts of it without a kernel"]
    reason: Annotated[str | None, "why no kernel serves it"]


class Models(TypedDict):
    models: Annotated[list[Model], "in the order of the table"]


class Dumped(TypedDict):
    mlagen: Annotated[str | None, "version of mlagen"]
    torch: Annotated[str | None, "version of torch"]
    cuda: Annotated[str | None, "CUDA version of torch"]
    driver: Annotated[str | None, "CUDA version of the driver"]
    gpu: Annotated[str | None, "name of the GPU"]
    is_captured: Annotated[bool, "whether a CUDA graph was captured"]
    served_by: Annotated[list[str], "the kernels, or `CPU backend`"]
    error: Annotated[str | None, "what the call raised"]


class Replay(TypedDict):
    file: Annotated[str, "the dump"]
    entry: Annotated[str, "the entry point"]
    mlagen: Annotated[str, "version of mlagen here"]
    dumped: Annotated[Dumped, "what the dump says of the call"]
    device: Annotated[str, "name of the GPU, or `cpu`"]
    served_by: Annotated[list[str], "the kernels, or `CPU backend`"]
    error: Annotated[str | None, "what the call raised"]
    relative_error: Annotated[
        float | None,
        "in the Frobenius norm, against the CPU backend in fp32; null where that served the call, "
        "or the call raised",
    ]
    error_bound: Annotated[float, "largest `relative_error` that counts as right"]
    is_right: Annotated[
        bool | None,
        "whether the call returned, within the bound; null if a call of a GPU returned on CPU "
        "tensors",
    ]


class Ceilings(TypedDict):
    read_gb_s: Annotated[
        float, "read-only bandwidth of a tensor larger than L2, 10^9 bytes a second"
    ]
    bf16_tflop_s: Annotated[float, "bf16 GEMM of 8192 x 8192 x 8192, 10^12 operations a second"]
    fp8_tflop_s: Annotated[
        float | None,
        "the same in e4m3; null if no case has an e4m3 query, or the GPU has no FP8 MMA",
    ]


class Result(TypedDict):
    us: Annotated[
        float | None, "median time of a whole call in microseconds, null if there is none"
    ]
    tflop_s: Annotated[float | None, "`flop` over that time"]
    gb_s: Annotated[float | None, "`bytes` over that time"]
    roofline_share: Annotated[float | None, "`roofline_us` over that time: 1 is the roofline bound"]
    error: Annotated[
        float | None, "relative error of the first call, in the Frobenius norm, against fp32"
    ]
    is_right: Annotated[bool, "whether `error` is within `error_bound`"]
    problem: Annotated[str | None, "why there is no result, null if there is one"]


class Case(TypedDict):
    case: Annotated[str, "the case in words"]
    mode: Annotated[str, "`fresh`, `sustained` or `model`"]
    family: Annotated[str, "`mla` or `gqa`"]
    batch: Annotated[int, "requests"]
    seq_len: Annotated[int, "tokens per request, the mean if `is_ragged`"]
    is_ragged: Annotated[bool, "whether requests differ in length"]
    tokens: Annotated[int, "cached tokens of all requests"]
    q_len: Annotated[int, "query tokens per request"]
    heads: Annotated[int, "query heads"]
    kv_heads: Annotated[int, "KV heads, 1 for MLA"]
    head_dim_qk: Annotated[int, "head dim of query and key"]
    head_dim_vo: Annotated[int, "head dim of value and output"]
    page_size: Annotated[int, "tokens per page"]
    top_k: Annotated[int, "indices per query token of sparse MLA, 0 for dense"]
    window_left: Annotated[int, "tokens before its own that a row attends to, -1 for all"]
    dtype: Annotated[str, "element type of the query"]
    kv_dtype: Annotated[str, "element type of the cache"]
    flop: Annotated[int, "multiplications and additions of the QK and PV GEMMs"]
    bytes: Annotated[
        int, "bytes to read each attended token once, read the query and write the output"
    ]
    flop_per_byte: Annotated[float, "`flop` over `bytes`"]
    roofline_us: Annotated[
        float, "roofline bound: the larger of bytes over `read_gb_s` and FLOP over GEMM rate"
    ]
    bound_by: Annotated[str, "the larger of the two, `memory` or `math`"]
    error_bound: Annotated[float, "largest `error` that counts as right"]
    input_sets: Annotated[int, "number of input sets that the timed calls rotate through"]
    mlagen: Annotated[Result, "result of mlagen"]
    baselines: Annotated[dict[str, Result], "result by baseline, of those that serve the case"]
    best_baseline: Annotated[str | None, "the fastest right baseline, null if there is none"]
    ratio: Annotated[
        float | None,
        "its time over mlagen's, above 1 if mlagen is faster; null unless both are right",
    ]


class Bench(TypedDict):
    mlagen: Annotated[str, "version of mlagen"]
    commit: Annotated[
        str | None,
        "commit of a checkout, with `-dirty` if files differ from it; null if there is none",
    ]
    gpu: Annotated[str, "name of the GPU"]
    driver: Annotated[str | None, "version of the driver, null if unknown"]
    power_limit_w: Annotated[float | None, "power cap in watts, null if unknown"]
    max_sm_mhz: Annotated[float | None, "highest SM clock, null if unknown"]
    max_memory_mhz: Annotated[float | None, "highest memory clock, null if unknown"]
    torch: Annotated[str, "version of torch"]
    nvrtc: Annotated[str | None, "version of NVRTC, null if unknown"]
    baselines: Annotated[
        dict[str, str], "package and version by baseline, empty without `--compare`"
    ]
    ceilings: Annotated[Ceilings, "peak rates of the GPU, measured in the same run"]
    cases: Annotated[list[Case], "one object per case and mode, in the order of the table"]


DOCUMENTS: dict[str, type] = {
    "cache dir": Dir,
    "cache ls": Ls,
    "cache stats": Stats,
    "cache show": Show,
    "cache why": Why,
    "cache verify": Verify,
    "cache prune": Prune,
    "cache gc": Gc,
    "cache rm": Rm,
    "cache clear": Clear,
    "kernel show": KernelShow,
    "prewarm": Prewarm,
    "cache export": Written,
    "cache import": Import,
    "cache push": Written,
    "cache pull": Import,
    "bench": Bench,
    "models": Models,
    "replay": Replay,
}
