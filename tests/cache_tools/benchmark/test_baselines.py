"""Calls of other libraries, whose ops mlagen plays on the CPU backend, and how they are found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import mlagen
from cache_tools.benchmark.baselines import fa3, find_baselines, flashinfer, flashmla, hpc, triton
from cache_tools.benchmark.calls import Call
from cache_tools.benchmark.inputs import Inputs, relative_error
from cache_tools.benchmark.pools import expected_of, inputs_for
from cache_tools.benchmark.selection import case_of
from tests.fixture_types import Patch

Cases = list[tuple[str, dict[str, Any]]]
TOPK: dict[str, Any] = {"top_k": 40, "is_ragged": False}
BLOCKS = {**TOPK, "top_k": 256, "seq_len": 386, "sparse_block": 128, "page_size": 128}
V4: dict[str, Any] = {"kv_dtype": "fp8_dsv4", "seq_len": 512}
NO_ROPE = {"qk_rope_head_dim": 0}
MLA: Cases = [("mla", {}), ("mla", {"q_len": 3})]
BF16_TOPK: Cases = [("mla", {**TOPK, "q_len": 2}), ("mla", {**TOPK, **NO_ROPE})]
GQA: Cases = [
    ("gqa", {}),
    ("gqa", {"q_len": 3, "kv_dtype": "e4m3", "head_dim": 64}),
    ("gqa", {"window_left": 20}),
    ("gqa", {"soft_cap": 1}),
]
FLASHMLA: Cases = [
    *MLA,
    *BF16_TOPK,
    ("mla", {"dtype": "e4m3"}),
    ("mla", {**TOPK, "kv_dtype": "fp8_ds_mla"}),
    ("mla", {**TOPK, **NO_ROPE, "kv_dtype": "fp8_ds_mla"}),
    ("mla", V4),
    ("mla", {**V4, "top_k": 64}),
    ("mla", {**V4, "top_k": 64, "is_ragged": False, "q_len": 2}),
]
DIMS_192_128 = {"head_dim": 192, "head_dim_vo": 128}
FA3: Cases = [*MLA, *BF16_TOPK, *GQA, ("mla", {**NO_ROPE, "q_len": 3}), ("gqa", DIMS_192_128)]
FLASHINFER: Cases = [
    *FA3[:-1],
    ("gqa", {"q_len": 18}),  # more drafts than a word of the mask has bits
    ("mla", {"dtype": "fp16", "page_size": 16}),
    ("mla", {"kv_dtype": "e4m3"}),
    ("mla", {**TOPK, **NO_ROPE, "kv_dtype": "e4m3"}),
    ("gqa", {"kv_dtype": "nvfp4", "window_left": 20}),
    ("gqa", {"kv_dtype": "e4m3", "head_dim": 512}),
    ("gqa", {**BLOCKS, "kv_heads": 2, "q_len": 3}),
    ("gqa", {**TOPK, "kv_dtype": "nvfp4", "q_len": 2}),
]
HPC: Cases = [
    ("gqa", {"kv_heads": 2}),
    ("gqa", {"kv_heads": 1, "q_len": 3, "kv_dtype": "e4m3"}),
]
TRITON: Cases = [
    *GQA,
    ("gqa", {"kv_dtype": "int8"}),
    ("gqa", {"kv_dtype": "int8_per_token_head"}),
    ("gqa", {"kv_dtype": "fp8_per_token_head"}),
    ("gqa", {"head_dim": 512, "batch": 40}),
    ("gqa", {**BLOCKS, "kv_heads": 2, "q_len": 3}),
    ("gqa", {**BLOCKS, "kv_dtype": "e4m3"}),
    ("gqa", {**TOPK, "kv_heads": 2, "q_len": 2}),
    ("gqa", {**TOPK, "kv_dtype": "e4m3"}),
]


def inputs_of(family: str, facts: dict[str, Any]) -> Inputs:
    """Return two small input sets."""
    shared = {"batch": 3, "seq_len": 70, "heads": 8, "is_ragged": True}
    return inputs_for(case_of(family, **{**shared, **facts}), 2, "cpu")


def mla(
    query: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lengths: Any, scale: float
) -> torch.Tensor:
    """Return MLA of mlagen; ``tables`` of three dimensions are top-k indices."""
    top_k = tables.shape[-1] if tables.dim() == 3 else 0
    workspace, dims = torch.empty(0, dtype=torch.uint8), (128, 512, query.shape[-1] - 512)
    decode = mlagen.mla.trtllm_batch_decode_with_kv_cache_mla
    given = (query, cache, workspace, *dims, tables, lengths, 105)
    out = decode(*given, sparse_mla_top_k=top_k, bmm1_scale=scale)
    assert isinstance(out, torch.Tensor)
    return out


def two_pools(*args: Any) -> torch.Tensor:
    """Return the output over rows of DeepSeek-V4, with lengths for each request."""
    query, cache, indices, lengths, sinks, metadata, splits, *extra, dim, scale, kv_format = args
    assert (sinks, dim, kv_format) == (None, 512, None)
    assert (metadata, splits) in {(None, None), ("metadata", "splits")}
    given = {}
    if extra[0] is not None:
        given = {
            "compressed_kv_cache": extra[0].view(torch.uint8),
            "extra_sparse_indices": extra[1],
            "extra_sparse_topk_lens": extra[2].repeat_interleave(query.shape[1]),
        }
    out = mlagen.mla.trtllm_batch_decode_sparse_mla_dsv4(
        query,
        cache.view(torch.uint8),
        torch.empty(0, dtype=torch.uint8),
        sparse_indices=indices,
        swa_topk_lens=lengths.repeat_interleave(query.shape[1]),
        kv_layout="NHD",
        bmm1_scale=scale,
        **given,
    )
    assert isinstance(out, torch.Tensor)
    return out


class FlashMla:
    """The ops of FlashMLA with the arguments of its Python interface."""

    def dense_decode_fwd(self, *args: Any) -> tuple[Any, ...]:
        """Return the output, and metadata that the next call has to pass."""
        query, cache, head_dim_v, lengths, tables, scale, causal, metadata, splits, *_ = args
        assert (head_dim_v, causal) == (512, query.shape[1] > 1)
        assert (metadata, splits) in {(None, None), ("metadata", "splits")}
        return mla(query, cache.squeeze(2), tables, lengths, scale), None, "metadata", "splits"

    def get_mla_decoding_metadata_dense_fp8(self, *args: Any) -> tuple[Any, Any]:
        """Return the metadata of e4m3 calls."""
        assert (len(args[0]), *args[1:]) == (3, 8, 1)
        return "metadata", "splits"

    def fwd_kvcache_mla_fp8(self, *args: Any) -> tuple[torch.Tensor, None]:
        """Return the output of an e4m3 call."""
        query, cache, _, lengths, tables, scale, _, *planned, key_scale, value_scale = args
        assert planned == ["metadata", "splits"]
        assert key_scale.item() == value_scale.item() == 1.0
        return mla(query, cache.squeeze(2), tables, lengths, scale), None

    def sparse_decode_fwd(self, *args: Any) -> tuple[Any, ...]:
        """Return the output of a call with top-k indices, for a multiple of 64 heads."""
        query, cache, indices = args[:3]
        assert query.shape[2] == 64
        if cache.shape[-1] == 584:
            return two_pools(*args), None, "metadata", "splits"
        kv_format = {(576, 656): None, (512, 528): "V32_NO_ROPE"}
        assert args[10] == 512
        assert args[12] == kv_format[query.shape[-1], cache.shape[-1]]
        lengths = torch.full((len(query),), 70, dtype=torch.int32)
        rows = cache.view(torch.uint8).squeeze(2)
        return mla(query, rows, indices, lengths, args[11]), None, "metadata", "splits"

    def sparse_prefill_fwd(self, *args: Any) -> list[Any]:
        """Return the output of query tokens with lists over the rows of a 16-bit cache."""
        query, cache, indices, scale, head_dim_v = args
        assert (query.shape[1], cache.shape[1], indices.shape[1]) == (64, 1, 1)
        assert head_dim_v == 512
        lengths = torch.full((len(query),), 70, dtype=torch.int32)
        return [mla(query.unsqueeze(1), cache, indices, lengths, scale).squeeze(1), None, None]


class Fa3:
    """The ops of FlashAttention-3 with the arguments of its Python interface."""

    def get_scheduler_metadata(self, *args: Any) -> str:
        """Return what the calls have to pass."""
        assert len(args) == 23
        self.dims = args[5:7]
        self.planned = (args[0], args[1], args[2], args[14], args[19])
        return "schedule"

    def fwd(self, *args: Any) -> tuple[torch.Tensor]:
        """Return the output of mlagen."""
        query, keys, values, _, _, latent = args[:6]
        assert len(args) == 37
        assert args[29] == "schedule"
        lengths, q_len, longest, tables = args[11:15]
        scale, causal, left, right = args[23:27]
        assert causal
        assert self.dims == (query.shape[-1], values.shape[-1])
        assert self.planned == (len(lengths), q_len, longest, keys.shape[1], args[27] > 0)
        if latent is not None:
            assert self.dims == (64, 512)
            has_rope = bool(query.any())
            if not has_rope:  # keys are any 64 elements, under a query of zeros
                query, keys = query[..., :0], keys[..., :0]
            query = torch.cat([latent, query], -1)
            query = query.view(-1, q_len, *query.shape[1:])
            cache = torch.cat([values, keys], -1).squeeze(2)
            return (mla(query, cache, tables, lengths, scale).flatten(0, 1),)
        assert right == (0 if left >= 0 else -1)
        workspace, window = torch.empty(0, dtype=torch.uint8), {"window_left": left}
        given = (query.bfloat16(), (keys, values), workspace, tables, lengths, longest)
        decode = mlagen.decode.xqa_batch_decode_with_kv_cache
        out = decode(
            *given, bmm1_scale=scale, q_len_per_req=q_len, logits_soft_cap=args[27], **window
        )
        assert isinstance(out, torch.Tensor)
        return (out,)


class Triton:
    """The modules of vLLM's kernels in Triton."""

    def minimax_m3_sparse_attn_decode(self, *args: Any) -> None:
        """Write the output of mlagen."""
        query, cache, indices, tables, lengths, kv_heads, scale, out, q_len = args
        assert cache.shape[1] == len(indices) == kv_heads
        mlagen.msa_ops.msa_sparse_decode_attention(
            query,
            cache[..., : query.shape[-1]],
            cache[..., query.shape[-1] :],
            indices,
            page_table=tables,
            seqused_k=lengths,
            seqlen_q=q_len,
            softmax_scale=scale,
            out=out,
        )

    def qsa_sparse_paged_attention(self, *args: Any, **given: Any) -> Any:
        """Return the output of mlagen."""
        assert {*given} == {"out", "k_scale", "v_scale", "output_gate"}
        return mlagen.sparse.qsa_sparse_paged_attention(*args, **given)

    KVQuantMode = SimpleNamespace(FP8_PER_TENSOR=1, INT8_PER_TOKEN_HEAD=2, FP8_PER_TOKEN_HEAD=3)

    def unified_attention(self, q: Any, k: Any, v: Any, out: torch.Tensor, **given: Any) -> None:
        """Write the output of mlagen."""
        batch, kv_heads, mode = len(given["seqused_k"]), k.shape[2], given.get("kv_quant_mode", 0)
        scales: Any = [given.get(f"{part}_scale_cache") for part in "kv"]
        of_fp8 = 1 if scales[0] is None else 3
        assert mode == {torch.float8_e4m3fn: of_fp8, torch.int8: 2}.get(k.dtype, 0)
        assert (q.dtype == torch.float8_e4m3fn) == (mode == 1)
        assert given["causal"]
        assert given["cu_seqlens_q"].tolist() == [
            n * given["max_seqlen_q"] for n in range(batch + 1)
        ]
        assert ("seq_threshold_3D" in given) == (batch <= 128 // kv_heads)
        left, right = given["window_size"]
        assert right == (0 if left >= 0 else -1)
        decode = mlagen.decode.xqa_batch_decode_with_kv_cache
        decode(
            q.bfloat16(),
            (k, v),
            torch.empty(0, dtype=torch.uint8),
            given["block_table"],
            given["seqused_k"],
            given["max_seqlen_k"],
            bmm1_scale=given["softmax_scale"],
            kv_cache_sf=None if scales[0] is None else scales,
            q_len_per_req=given["max_seqlen_q"],
            window_left=left,
            logits_soft_cap=given["softcap"],
            out=out,
        )


class Hpc:
    """The functions of hpc-ops."""

    def get_attention_decode_task_workspace(self, *args: Any, **given: Any) -> dict[str, Any]:
        """Return what the schedule is written to."""
        return {"args": args, **given}

    def assign_attention_decode_task(
        self, lengths: Any, tasks: Any, *args: Any, **given: Any
    ) -> None:
        """Write the schedule."""
        assert tasks == {"args": (len(lengths), lengths.max(), args[0]), **given}
        tasks["q_len"], has_new = args[1:]
        assert has_new

    def attention_decode_bf16(
        self, q: Any, k: Any, v: Any, tables: Any, lengths: Any, **given: Any
    ) -> None:
        """Write the output of mlagen."""
        q_len = given["mtp"] + 1
        assert given["new_kv_included"]
        assert given["task_map"]["q_len"] == q_len
        mlagen.decode.xqa_batch_decode_with_kv_cache(
            q.bfloat16(),
            (k, v),
            torch.empty(0, dtype=torch.uint8),
            tables,
            lengths,
            int(lengths.max()),
            bmm1_scale=q.shape[-1] ** -0.5,
            q_len_per_req=q_len,
            out=given["output"],
        )

    def attention_decode_fp8(self, *args: Any, **given: Any) -> None:
        """Write the same over an e4m3 cache, with scales of the query's rows, keys and values."""
        *tensors, query_scale, key_scale, value_scale = args
        assert {each.dtype for each in tensors[:3]} == {torch.float8_e4m3fn}
        assert query_scale.shape == tensors[0].shape[:2]
        assert all(scale.eq(1).all() for scale in (query_scale, key_scale, value_scale))
        self.attention_decode_bf16(*tensors, **given)


Make = Callable[[Inputs], Call]


def of_flashmla(unused: int) -> Make:
    """Return how to call FlashMLA, whose dense op has other unused arguments in each package."""
    ops = FlashMla()
    dense = partial(flashmla._dense, ops.dense_decode_fwd, unused)
    return lambda inputs: flashmla._call(inputs, dense, ops, ops)


def of_fa3(inputs: Inputs) -> Call:
    """Return a call of FlashAttention-3."""
    return (fa3._mla_call if inputs.case.family == "mla" else fa3._gqa_call)(Fa3(), inputs)


LIBRARIES: dict[str, tuple[Make, Cases]] = {
    "FlashMLA of SGLang": (of_flashmla(0), FLASHMLA),
    "FlashMLA of vLLM": (of_flashmla(1), FLASHMLA),
    "FA3": (of_fa3, FA3),
    "FlashInfer": (flashinfer.flashinfer_call, FLASHINFER),
    "hpc-ops": (partial(hpc.hpc_call, Hpc()), HPC),
    "Triton": (partial(triton.triton_call, Triton()), TRITON),
}


@pytest.mark.parametrize(
    ("library", "family", "facts"),
    [(name, *case) for name, (_, cases) in LIBRARIES.items() for case in cases],
    ids=str,
)
def test_a_library_is_called_with_the_case(
    library: str, family: str, facts: dict[str, Any], monkeypatch: Patch
) -> None:
    """A call has query, cache, lengths, masks and plan of its case; metadata is made once."""
    modules = {"flashinfer": SimpleNamespace(), "flashinfer.mla": mlagen.mla}
    modules |= {"flashinfer.msa_ops": mlagen.msa_ops, "flashinfer.sparse": mlagen.sparse}
    for name, module in {**modules, "flashinfer.decode": mlagen.decode}.items():
        monkeypatch.setitem(sys.modules, name, module)
    inputs = inputs_of(family, facts)
    call, expected = LIBRARIES[library][0](inputs), expected_of(inputs)
    for _ in range(2):  # the first call may make metadata that the next ones reuse
        assert relative_error(call(0), expected) < inputs.case.error_bound
    assert relative_error(call(1), expected) > 0.5


@pytest.fixture
def site(tmp_path: Path, monkeypatch: Patch) -> Path:
    """Return a folder as `pip install --target` fills it, with all libraries but FlashInfer."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    libraries = ["_flashmla_C", "_flashmla_extension_C", "vllm_flash_attn/_vllm_fa3_C"]
    kernels = [triton._DENSE, triton._MSA, triton._QSA]
    for package, version, names in (
        ("vllm", "0.23.0", [*(f"vllm/{name}.abi3.so" for name in libraries), *kernels]),
        ("sgl-flash-mla", "1.0.0", ["flash_mla/_C_legacy.abi3.so"]),
        ("triton", "3.0", ["triton/__init__.py"]),
    ):
        info = f"{package.replace('-', '_')}-{version}.dist-info/METADATA"
        metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        for name in (info, *names):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(metadata if name == info else "")
    return tmp_path


def test_libraries_are_found_in_a_folder(site: Path) -> None:
    """The wheels of vLLM and SGLang are two baselines; without names, a missing one is left out."""
    found = find_baselines(["flashmla", "fa3", "triton"], site)
    (site / "flash_mla" / "_C_legacy.abi3.so").unlink()
    vllm = dict.fromkeys(("flashmla-vllm", "fa3", "triton"), "vllm 0.23.0")
    versions = {each.name: each.version for each in found}
    assert versions == {**vllm, "flashmla-sglang": "sgl-flash-mla 1.0.0"}
    assert {each.name for each in find_baselines([], site)} - {"flashinfer"} == {*vllm}


def test_a_kernel_of_vllm_is_loaded_without_its_package(site: Path) -> None:
    """Packages of models, which import all of vLLM, are not run; a file that is missing is none."""
    (site / "vllm/__init__.py").write_text("raise ImportError")
    (site / triton._MSA).write_text("def minimax_m3_sparse_attn_decode(*args): args[7].fill_(3)")
    (site / triton._QSA).unlink()
    (found,) = find_baselines(["triton"], site)
    assert found.make(inputs_of("gqa", BLOCKS))(0).eq(3).all()
    served = [found.serves(case_of("gqa", **facts)) for facts in ({}, {**BLOCKS}, {**TOPK})]
    assert served == [True, True, False]


@pytest.mark.parametrize(
    ("family", "facts", "expected"),
    [
        ("mla", {}, "fa3 flashinfer flashmla-sglang flashmla-vllm"),
        ("mla", {"page_size": 32}, "fa3 flashinfer"),
        ("mla", NO_ROPE, "fa3 flashinfer"),
        ("mla", {"dtype": "e4m3"}, "flashmla-sglang flashmla-vllm"),
        ("mla", {**NO_ROPE, "dtype": "e4m3"}, ""),
        ("mla", {"kv_dtype": "e4m3"}, "flashinfer"),
        ("mla", {"top_k": 64, "kv_dtype": "e4m3"}, "flashinfer"),
        ("mla", {"top_k": 64, "kv_dtype": "fp8_ds_mla"}, "flashmla-sglang flashmla-vllm"),
        ("mla", {**NO_ROPE, "top_k": 64, "kv_dtype": "fp8_ds_mla"}, "flashmla-sglang"),
        ("mla", {"top_k": 64, "dtype": "e4m3", "kv_dtype": "fp8_ds_mla"}, ""),
        ("mla", {"top_k": 64}, "fa3 flashinfer flashmla-sglang"),
        ("mla", V4, "flashmla-sglang flashmla-vllm"),
        ("mla", {**V4, "top_k": 64, "page_size": 256}, "flashmla-sglang flashmla-vllm"),
        ("mla", {**V4, "top_k": 40}, ""),
        ("mla", {**V4, "heads": 256}, ""),
        ("mla", {"kv_dtype": "fp8_dsv41", "top_k": 64}, ""),
        ("mla", {**NO_ROPE, "top_k": 64}, "fa3 flashinfer flashmla-sglang"),
        ("mla", {"top_k": 64, "dtype": "fp16"}, "fa3 flashinfer"),
        ("gqa", {}, "fa3 flashinfer hpc triton"),
        ("gqa", {"kv_dtype": "e4m3"}, "fa3 flashinfer hpc triton"),
        ("gqa", {"kv_heads": 4}, "fa3 flashinfer triton"),
        ("gqa", {"page_size": 32}, "fa3 flashinfer triton"),
        ("gqa", {"kv_dtype": "int8"}, "triton"),
        ("gqa", {"kv_dtype": "int8_per_token_head"}, "triton"),
        ("gqa", {"kv_dtype": "nvfp4"}, "flashinfer"),
        ("gqa", {"kv_dtype": "nvfp4", "q_len": 2}, ""),
        ("gqa", {"kv_dtype": "nvfp4", "head_dim": 64}, ""),
        ("gqa", {"head_dim": 512}, "flashinfer triton"),
        ("gqa", {"soft_cap": 50}, "fa3 flashinfer triton"),
        ("gqa", DIMS_192_128, "fa3"),
        ("gqa", {"head_dim_vo": 64}, ""),
        ("gqa", {"top_k": 64}, "triton"),
        ("gqa", {"top_k": 64, "head_dim": 256}, "flashinfer triton"),
        ("gqa", {"top_k": 64, "head_dim": 256, "kv_dtype": "nvfp4"}, "flashinfer"),
        (
            "gqa",
            {**BLOCKS, "top_k": 2048, "seq_len": 4096, "kv_dtype": "e4m3"},
            "flashinfer triton",
        ),
        ("gqa", {**BLOCKS, "top_k": 2048, "seq_len": 4096}, "triton"),
        ("gqa", {"top_k": 64, "kv_dtype": "nvfp4"}, ""),
        ("gqa", {**BLOCKS, "kv_dtype": "e4m3"}, "triton"),
        ("gqa", {**BLOCKS, "kv_dtype": "int8"}, ""),
    ],
)
def test_a_library_is_measured_where_it_has_a_kernel(
    family: str, facts: dict[str, Any], expected: str, site: Path, monkeypatch: Patch
) -> None:
    """A case that a library has no kernel for has no result of it, rather than a failure."""
    for library in (flashinfer, hpc):
        monkeypatch.setattr(library, "version_of", lambda _: "0.7.2")
    case, found = case_of(family, **facts), find_baselines([], site)
    assert " ".join(sorted(each.name for each in found if each.serves(case))) == expected


def test_a_missing_library_is_named_with_its_installation(tmp_path: Path) -> None:
    """The message has the command that installs it; the folder of --libraries has to exist."""
    with pytest.raises(mlagen.UnsupportedError) as caught:
        find_baselines(["fa3"], tmp_path)
    assert str(caught.value) == (
        "compare: expected vllm for fa3, got none; run: pip install --no-deps --target DIR vllm, "
        "and pass --libraries DIR, or omit fa3"
    )
    with pytest.raises(
        mlagen.ArgumentError, match="libraries: expected a folder of packages, got "
    ):
        find_baselines([], tmp_path / "none")
