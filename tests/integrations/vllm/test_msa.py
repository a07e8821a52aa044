"""Sparse layers of MiniMax-M3, whose decode is called as vLLM's Triton attention calls its own."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Log, Patch
from tests.integrations.servers import Import, is_installed
from tests.problems.sparse_gqa import SparseProblem
from tests.problems.sparse_gqa_cases import msa

PACKAGE = "vllm.models.minimax_m3"
SPARSE, LAYERS = f"{PACKAGE}.common.sparse_attention", f"{PACKAGE}.nvidia.model"


class MiniMaxM3SparseTritonImpl:
    """vLLM's class, without what surrounds the call of its kernel."""

    def __init__(self, num_heads: int, head_size: int, scale: float, **named: Any) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = named["num_kv_heads"]
        self.use_fp8_kv = named["kv_cache_dtype"] != "auto"

    def forward(
        self, layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, output: torch.Tensor
    ) -> torch.Tensor:
        """Decode the batch of the forward context."""
        metadata = get_forward_context().attn_metadata[layer.layer_name]
        scales = (layer._k_scale, layer._v_scale) if self.use_fp8_kv else (None, None)
        heads = (-1, self.num_heads, self.head_size)
        minimax_m3_sparse_attn_decode(  # type: ignore[name-defined]  # noqa: F821 - of vLLM
            query.view(heads),
            kv_cache.view(torch.float8_e4m3fn) if self.use_fp8_kv else kv_cache,
            layer.topk_indices_buffer.transpose(0, 1),
            metadata.decode.block_table,
            metadata.decode.seq_lens,
            self.num_kv_heads,
            self.scale,
            output.view(heads),
            metadata.decode.decode_query_len,
            k_scale=scales[0],
            v_scale=scales[1],
        )
        return output


def get_forward_context() -> Any:
    """Return what a test puts in its place."""
    raise NotImplementedError


@pytest.fixture
def triton(vllm: Import, monkeypatch: Patch) -> Any:
    """Return vLLM's class, without the models of its package, which import torchvision."""
    if not is_installed("vllm"):
        return MiniMaxM3SparseTritonImpl
    package = ModuleType(PACKAGE)
    folder = Path(str(vllm("vllm").__file__)).parent
    package.__path__ = [str(folder.joinpath(*PACKAGE.split(".")[1:]))]
    monkeypatch.setitem(sys.modules, PACKAGE, package)
    return vllm(SPARSE).MiniMaxM3SparseTritonImpl


def metadata_of(vllm: Import, problem: SparseProblem) -> Any:
    """Return the metadata of a batch of decodes."""
    decode: dict[str, Any] = {
        "seq_lens": problem.seq_lens,
        "block_table": problem.block_tables,
        "decode_query_len": problem.case.q_len,
    }
    if not is_installed("vllm"):
        return SimpleNamespace(decode=SimpleNamespace(**decode))
    module, tokens = vllm(SPARSE), problem.case.tokens
    return module.MiniMaxM3SparseMetadata(
        seq_lens=problem.seq_lens,
        max_seq_len=max(problem.case.seq_lens),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        num_actual_tokens=tokens,
        num_decodes=len(problem.case.seq_lens),
        num_decode_tokens=tokens,
        num_prefills=0,
        num_prefill_tokens=0,
        decode=module.MiniMaxM3SparseDecodeMetadata(**decode),
    )


@pytest.mark.parametrize("kv", ["16-bit", "e4m3"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_step_is_what_the_indices_name(
    vllm: Import, triton: Any, kv: str, q_len: int, monkeypatch: Patch
) -> None:
    """In bf16 and FP8, with drafts and padded requests, as a layer keeps its caches and indices."""
    is_fp8 = kv == "e4m3"
    case = msa("", seq_lens=(500, 130, 0), q_len=q_len, kv=kv, output_scale=0.5 if is_fp8 else 1.0)
    problem = case.build("cpu")
    impl = vllm("mlagen.integrations.vllm.msa").impl_of(triton)(
        case.heads,
        case.head_dim,
        case.head_dim**-0.5,
        num_kv_heads=case.kv_heads,
        kv_cache_dtype="fp8" if is_fp8 else "auto",
        topk_blocks=case.num_indices,
        sparse_block_size=128,
    )
    impl.kv_cache_fp8_dtype = torch.float8_e4m3fn  # of a GPU
    context = SimpleNamespace(attn_metadata={"layer": metadata_of(vllm, problem)})
    namespace = sys.modules[triton.__module__]
    monkeypatch.setattr(namespace, "get_forward_context", lambda: context)
    cache = torch.cat([problem.store.key, problem.store.value], dim=-1).transpose(1, 2)
    cache = cache.contiguous()
    scales = torch.tensor([case.scale]), torch.tensor([case.output_scale])
    layer = SimpleNamespace(
        layer_name="layer",
        topk_indices_buffer=problem.indices.transpose(0, 1).contiguous(),
        _k_scale=scales[0],
        _v_scale=scales[1],
        _k_scale_float=case.scale,
        _v_scale_float=case.output_scale,
    )
    output = torch.full((case.tokens, case.heads * case.head_dim), 7.0, dtype=case.dtype)
    given = (problem.query.flatten(1), cache.view(torch.uint8) if is_fp8 else cache, output)

    for _ in range(2):
        assert impl.forward(layer, *given) is output

        problem.check(output)

    if is_fp8:
        layer._k_scale = torch.ones(2, 9)
        with pytest.raises(ValueError, match=r"^k_scale: expected one for the layer .*\[2, 9\]$"):
            impl.forward(layer, *given)


class Other:
    """Another attention of vLLM."""


class Builder:
    """A builder of metadata."""

    def __init__(self, *args: Any) -> None:
        self.kv_cache_spec, _, self.vllm_config, _ = args


class Backend:
    """A backend of sparse layers."""

    @staticmethod
    def get_builder_cls() -> Any:
        """Return the class that builds the metadata of a batch."""
        return Builder


def test_kernels_are_known_before_the_first_request(vllm: Import, triton: Any) -> None:
    """Those of the layers of a group, each once: of a query token of a KV head."""
    ours = vllm("mlagen.integrations.vllm.msa")
    named: dict[str, Any] = {"topk_blocks": 16, "sparse_block_size": 128}
    impls = [
        ours.impl_of(triton)(64, 128, 0.1, num_kv_heads=4, kv_cache_dtype=kv, **named)
        for kv in ("auto", "fp8")
    ]
    for impl in impls:
        impl.kv_cache_fp8_dtype = torch.float8_e4m3fn  # of a GPU
        impl.block_size = 128
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        compilation_config=SimpleNamespace(
            static_forward_context={
                str(i): SimpleNamespace(impl=each) for i, each in enumerate(impls)
            }
        ),
    )
    builder = ours.backend_of(Backend).get_builder_cls()(None, ["0", "1"], config, "cpu")

    calls = list(builder.decode_calls())

    builder.warm_up_prefill()
    assert [rows for _, rows in calls] == [16, 16]
    assert [str(variant.kv_dtype) for variant, _ in calls] == ["bf16", "e4m3"]
    assert {(each.sparse_block, each.page_size) for each, _ in calls} == {(128, 128)}


def test_the_option_chooses_the_decode(
    vllm: Import, triton: Any, monkeypatch: Patch, caplog: Log
) -> None:
    """Only MLAGEN_GQA does, and only where vLLM calls Triton; other modules are left alone."""
    models, chosen = vllm("mlagen.integrations.vllm.models"), [triton]
    module = SimpleNamespace(select_main_backend_and_impl_cls=lambda **_: (Backend, chosen[0]))
    monkeypatch.setitem(sys.modules, LAYERS, module)
    entry = models.Model(SimpleNamespace(load_model_cls=lambda: "model"), LAYERS)
    for _ in range(2):
        assert entry.load_model_cls() == "model"
    options = SimpleNamespace(backend=None)
    config = SimpleNamespace(attention_config=options)
    monkeypatch.setattr(vllm("vllm.config"), "get_current_vllm_config_or_none", lambda: config)
    choose = module.select_main_backend_and_impl_cls

    assert choose(topk_blocks=16) == (Backend, triton)
    options.backend = SimpleNamespace(name="MLAGEN_MLA")
    assert choose(topk_blocks=16) == (Backend, triton)
    options.backend = SimpleNamespace(name="MLAGEN_GQA")
    backend, ours = choose(topk_blocks=16)
    assert issubclass(backend, Backend)
    assert issubclass(ours, triton)
    chosen[0] = Other
    with pytest.raises(ValueError, match=r"expected MLAGEN_GQA where .*, got it for Other$"):
        choose(topk_blocks=16)
    assert caplog.records == [] or is_installed("vllm")
    assert "MiniMaxM3SparseForCausalLM" in models.MODELS
