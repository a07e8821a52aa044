"""Layers of DeepSeek-V4 and V4.1 without a model, and a step's metadata by vLLM's builders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from tests.integrations import dsv4 as problem
from tests.integrations.vllm.conftest import config_of

MODELS = ("vllm.models.deepseek_v4", "vllm.models.deepseek_v41")
TOP_K, TOKENS, REQUESTS = 64, 16, 3
# Two requests with a draft and a long or a short context, and a token that pads a CUDA graph.
STARTS, LENGTHS = [0, 2, 4, 5], [700, 5, 2]
POSITIONS, SLOTS = [698, 699, 3, 4, 1], [0, 1, 2, 3, -1]
TOKEN_REQUESTS = [0, 0, 1, 1, 2]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of layers: how many tokens a compressed one stands for, and pages of the pools."""

    package: str
    ratio: int
    swa_page: int = 64
    page: int | None = None  # none without a compressed pool


V4, V41 = (Kind(package=package, ratio=1) for package in MODELS)
KINDS = {
    "V4, the window only": V4,
    "V4, 4:1": replace(V4, ratio=4, page=64),
    "V4, 128:1": replace(V4, ratio=128, page=2),
    "V4.1, the window only": replace(V41, ratio=0, swa_page=32),
    "V4.1, 1:1": replace(V41, ratio=1, swa_page=32, page=64),
    "V4.1, 2:1": replace(V41, ratio=2, swa_page=32, page=32),
}


def layer_of(cls: Any, kind: Kind, device: str = "cpu", **members: Any) -> Any:
    """Return a layer with 8 heads of its own."""
    pages = REQUESTS * -(-max(LENGTHS) // kind.swa_page)
    swa = SimpleNamespace(
        kv_cache=on_device(problem.cache(pages, kind.swa_page, seed=1), device),
        packed_bytes_per_token=problem.ROW,
        prefix="layer.swa_cache",
    )
    compressed = torch.empty(0)
    if kind.page:
        pages = REQUESTS * -(-max(LENGTHS) // (kind.page * max(kind.ratio, 1)))
        compressed = problem.cache(pages, kind.page, seed=2, gap=3 * problem.DATA)
    known = {
        "prefix": "layer",
        "compress_ratio": kind.ratio,
        "n_local_heads": problem.HEADS,
        "padded_heads": problem.PADDED,
        "scale": problem.SCALE,
        "attn_sink": problem.sinks().to(device),
        "swa_cache_layer": swa,
        "kv_cache": on_device(compressed, device),
        "topk_indices_buffer": top_k_of(kind).to(device),
        "compressed_cache_prefix": "layer" if kind.page else None,
        "is_kv_source": True,
        "use_pcp": False,
    }
    return cls(**known | members)


def on_device(cache: torch.Tensor, device: str) -> torch.Tensor:
    """Return a cache with its gaps on a device."""
    if not cache.numel():
        return cache
    memory = cache.as_strided((len(cache), cache.stride(0)), (cache.stride(0), 1)).to(device)
    return memory.as_strided(cache.shape, cache.stride())


def top_k_of(kind: Kind) -> torch.Tensor:
    """Return for each token some of the compressed tokens before it."""
    generator = torch.Generator().manual_seed(4)
    buffer = torch.full((TOKENS, TOP_K), -1, dtype=torch.int32)
    for row, position in zip(buffer, POSITIONS, strict=False):
        known = (position + 1) // max(kind.ratio, 1)
        chosen = torch.randperm(known, generator=generator)[:TOP_K]
        row[: len(chosen)] = chosen.int()
    return buffer


def table_of(page_size: int) -> torch.Tensor:
    """Return the pages of the requests."""
    width = -(-max(LENGTHS) // page_size)
    generator = torch.Generator().manual_seed(3)
    return torch.randperm(REQUESTS * width, generator=generator).int().view(REQUESTS, width)


def spec_of(*, block: int, ratio: int, window: int | None = None) -> Any:
    """Return the specification of a cache."""
    specs = import_module("vllm.v1.kv_cache_interface")
    common: dict[str, Any] = {"num_kv_heads": 1, "max_tp_shards": 1, "head_size": 512}
    common |= {"dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla", "alignment": problem.DATA}
    common |= {"state_content_bytes": problem.ROW, "model_version": "deepseek_v4"}
    if window:
        return specs.SlidingWindowMLASpec(block_size=block, sliding_window=window, **common)
    return specs.MLAAttentionSpec(block_size=block, tokens_per_state=ratio, **common)


def server_config() -> Any:
    """Return what the builders read of vLLM's configuration: with one draft."""
    hf_config = SimpleNamespace(sliding_window=128, compress_ratios=None, index_topk=TOP_K)
    config = config_of(problem.HEADS, drafts=1, hf_config=hf_config)
    config.model_config.max_model_len = 40000
    config.scheduler_config = SimpleNamespace(max_num_batched_tokens=TOKENS, max_num_seqs=4)
    return config


def built_metadata(layer: Any, kind: Kind, device: str = "cpu") -> dict[str, Any]:
    """Return a step's metadata from the builders of vLLM."""
    common_class = import_module("vllm.v1.attention.backend").CommonAttentionMetadata
    starts = torch.tensor(STARTS).int()

    def build(builder: Any, spec: Any, ratio_types: set[str]) -> Any:
        made = builder(spec, [], server_config(), torch.device(device))
        made._layer_types = ratio_types
        common = common_class(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(LENGTHS).int().to(device),
            seq_lens_cpu_upper_bound=torch.tensor(LENGTHS).int(),
            num_reqs=REQUESTS,
            num_actual_tokens=len(POSITIONS),
            max_query_len=2,
            max_seq_len=max(LENGTHS),
            block_table_tensor=table_of(spec.block_size).to(device),
            slot_mapping=torch.tensor(SLOTS, device=device),
            positions=torch.tensor(POSITIONS, device=device),
        )
        return made.build(0, common)

    types = {1: "swaonly", 4: "c4a", 128: "c128a"}
    if kind.package == MODELS[1]:
        types = {0: "swaonly", 1: "c1a", 2: "c2a"}
    swa = spec_of(block=kind.swa_page, ratio=1, window=128)
    builder = layer.swa_backend_cls.get_builder_cls()
    metadata = {"layer.swa_cache": build(builder, swa, {types[kind.ratio]})}
    if kind.page:
        spec = spec_of(block=kind.page * kind.ratio, ratio=kind.ratio)
        metadata["layer"] = build(layer.backend_cls.get_builder_cls(), spec, set())
    return metadata
