"""Prose of the support page, with the numbers of the tables that it describes."""

from __future__ import annotations

from mlagen.compiler.toolchain import OLDEST_NVRTC
from mlagen.families.mla.validate_query import MAX_HEADS
from mlagen.spec.gqa import sm90 as gqa_sm90
from mlagen.spec.gqa import variant as gqa
from mlagen.spec.mla import sm90 as mla_sm90
from mlagen.spec.mla import variant as mla_support

# Modes and dtypes of each entry point; the arguments of a call select them, not a setting.
ENTRY_POINTS = [
    {
        "entry point": "`mlagen.mla.trtllm_batch_decode_with_kv_cache_mla`",
        "kernels": "`mla_sm80`, `mla_sm90`, `mla_sm90_fp8`, `mla_sm90_fp8kv`",
        "supports": "paged, sparse and separate; every pair but `fp8_per_token`",
    },
    {
        "entry point": "`mlagen.mla.xqa_batch_decode_with_kv_cache_mla`",
        "kernels": "`mla_sm80`, `mla_sm90`, `mla_sm90_fp8`, `mla_sm90_fp8kv`",
        "supports": "paged; every pair but `fp8_per_token`",
    },
    {
        "entry point": "`mlagen.mla.BatchMLAPagedAttentionWrapper`",
        "kernels": "`mla_sm80`, `mla_sm90`, `mla_sm90_fp8kv`",
        "supports": "paged; `bf16` or `fp16` for both, or `bf16` over `e4m3` with latent 512",
    },
    {
        "entry point": "`mlagen.mla.flare_mla_decoding`",
        "kernels": "`mla_sm80`, `mla_sm90`, `mla_sm90_fp8`, `mla_sm90_fp8kv`",
        "supports": "paged and bias; dims (512, 64)",
    },
    {
        "entry point": "`mlagen.xqa.xqa_mla`",
        "kernels": "`mla_sm80`, `mla_sm90`, `mla_sm90_fp8`, `mla_sm90_fp8kv`",
        "supports": "paged and separate; dims (512, 64); no `fp8_ds_mla`, no `fp8_per_token`",
    },
    {
        "entry point": "`mlagen.decode.xqa_batch_decode_with_kv_cache`",
        "kernels": "`gqa_sm80`, `gqa_sm90`",
        "supports": "all",
    },
    {
        "entry point": "`mlagen.decode.trtllm_batch_decode_with_kv_cache`",
        "kernels": "`gqa_sm80`, `gqa_sm90`",
        "supports": "all",
    },
    {
        "entry point": "`mlagen.decode.BatchDecodeWithPagedKVCacheWrapper`",
        "kernels": "`gqa_sm80`, `gqa_sm90`",
        "supports": "all",
    },
    {
        "entry point": "`mlagen.xqa.xqa`",
        "kernels": "`gqa_sm80`, `gqa_sm90`",
        "supports": "all",
    },
]

SOURCES = """\
This page is generated from the tables that the code itself reads: `SUPPORTED`, `TILES`
and `BLOCK_MS` in `mlagen/spec/mla/` and `mlagen/spec/gqa/`, `ARCHS` in `mlagen/spec/arch.py`."""

ENTRY_READING = """\
The table lists the kernel families of each entry point; `combine` also runs where an sm80 kernel
splits sequences."""

MLA_READING = f"""\
Dims are pairs of `kv_lora_rank` and `qk_rope_head_dim`. Each row supports 1 to {MAX_HEADS} heads, 1
or more query tokens, any batch size, any sequence length and any page size; prewarming compiles
page sizes {", ".join(map(str, mla_support.PAGE_SIZES))}. CPU tensors support the same.

The mode is how a call finds its tokens. *Paged*: a block table, all tokens or a causal prefix.
*Sparse*: top-k indices for every query token. *Separate*: values from a block table or a buffer of
their own. *Bias*: a number added to every score, which also expresses masks."""

DTYPES_READING = """\
`fp8_ds_mla`, the FP8 KV cache of DeepSeek-V3.2, is 656 bytes per token: 512 e4m3 elements, 4 fp32
scales for 128 of them each, 64 bf16 elements. `fp8_per_token` is 640 bytes per token: 512 e4m3 and
64 bf16 elements, with one fp32 scale per token in a separate tensor. `nvfp4` is two e2m1 elements
per byte, with an e4m3 scale for 16 elements in a separate tensor."""

SM90_READING = f"""\
On `sm_90a` these calls take the named kernel, and all others `mla_sm80`, unless
[`MLAGEN_MLA_KERNEL`](environment.md#the-kernel-of-mla-calls) overrides it. The page size is a
multiple of 16 tokens, and any for `mla_sm90_fp8kv`; of paged calls with query and cache in `e4m3`
that kernel serves other page sizes, and those with
[P in fp16](environment.md#the-dtype-of-p). `BLOCK_M` is
{", ".join(map(str, sorted(mla_sm90.BLOCK_MS)))}: a request takes the smallest tile that holds its
rows, or the largest, and a smaller one if there is too little work for all SMs; in a sparse call
every query token is a request. A cache with strides of 2^40 bytes or more takes `mla_sm80`, unless
`mla_sm90_fp8kv` is the kernel of the call."""

GQA_READING = f"""\
Each row supports head dims that are multiples of 16 up to {gqa.SLICE_DIMS}, and 512; any page size;
any number of query heads that is a multiple of the KV heads; 1 or more query tokens, with any draft
mask, window and sinks; any batch size, any sequence length. Prewarming compiles head dims
{", ".join(map(str, gqa.HEAD_DIMS))} and page sizes {", ".join(map(str, gqa.PAGE_SIZES))}; the first
call compiles the others. CPU tensors support the same."""

GQA_SM90_READING = f"""\
On `sm_90a` calls take `gqa_sm90`, unless
[`MLAGEN_GQA_KERNEL`](environment.md#the-kernel-of-grouped-query-calls) overrides it, if the cache
has the dtype of the query or e4m3, the head dim is {", ".join(map(str, gqa.HEAD_DIMS[:-1]))} or
{gqa.HEAD_DIMS[-1]}, the page size is a multiple of 16 tokens, and no stride of the cache is 2^40
bytes or more; all others take `gqa_sm80`. `BLOCK_M` is
{", ".join(map(str, sorted(gqa_sm90.BLOCK_MS)))}, for head dim 256 at most 16: a request takes the
smallest tile that holds its rows of a KV head, or the largest."""

ARCHS_READING = f"""\
The numbers are kernels that prewarming compiles, each an entry of the cache. NVRTC
{".".join(map(str, OLDEST_NVRTC))} or newer compiles them, if it supports the architecture. An empty
last cell means that no kernel has run there yet."""

TILES_READING = """\
The tile of a call depends on the rows of a request, and on the shared memory that the architecture
allows per CTA: the smallest tile that holds the rows, or the largest one. `2 per SM` means two CTAs
per SM."""

MLA_TILES_READING = """\
A tile of 16 x 32 is `BLOCK_M` x `BLOCK_N`: 16 rows, heads times query tokens, by 32 tokens of a KV
block; in the sparse mode a request is one query token."""

GQA_TILES_READING = """\
A tile of 16 x 4 x 6 is 16 rows, query heads of one KV head times query tokens, by 4 warps of 16
tokens each, and 6 pipeline stages of keys or values per warp."""
