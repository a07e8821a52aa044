"""Token-sparse layers of Qwen3.8, whose decode is called as vLLM calls its Triton kernel."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations.servers import Import, is_installed
from tests.integrations.signatures import disagreement
from tests.integrations.vllm.conftest import current_config
from tests.problems.sparse_gqa import SparseProblem
from tests.problems.sparse_gqa_cases import qsa

LAYERS = "vllm.models.qwen4_exp.nvidia.model"


class Qwen4ExpQSAFlashAttentionImpl:
    """vLLM's class, with a list in the place of its kernel."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads

    def forward_qsa(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        token_to_req: torch.Tensor,
        use_prefill_config: bool,
        output_gate: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> Any:
        """Return what is not decoded."""
        del layer, query, key, value, kv_cache, attn_metadata, output
        return token_to_req, use_prefill_config, output_gate, output_scale, output_block_scale


class Builder:
    """A builder of metadata."""

    def __init__(self, *args: Any) -> None:
        self.kv_cache_spec, _, self.vllm_config, _ = args


class Qwen4ExpQSAFlashAttentionBackend:
    """The backend of the layers."""

    @staticmethod
    def get_builder_cls() -> Any:
        """Return the class that builds the metadata of a batch."""
        return Builder


class Qwen4ExpQSAAttention:
    """A layer, as vLLM makes it."""

    def __init__(self, *, vllm_config: Any, prefix: str) -> None:
        del vllm_config
        self.prefix = prefix
        self.attn_backend = Qwen4ExpQSAFlashAttentionBackend
        self.impl = Qwen4ExpQSAFlashAttentionImpl(24, 256, 1 / 16, 2)


@pytest.fixture
def layers(vllm: Import, monkeypatch: Patch) -> Any:
    """Return vLLM's module of layers, without the models around it, which import torchvision."""
    if not is_installed("vllm"):
        return sys.modules[__name__]
    for name in (LAYERS, "vllm.model_executor.models.qwen3_vl"):
        module = ModuleType(name)
        vars(module)["mrope_positions_factor"] = None
        monkeypatch.setitem(sys.modules, name, module)
    module = vllm("vllm.models.qwen4_exp.nvidia.qsa")
    monkeypatch.setattr(module, "is_flash_attn_varlen_func_available", lambda: True)
    return module


def layer_of(problem: SparseProblem) -> tuple[Any, torch.Tensor]:
    """Return a layer with the indices and scales of a problem, and its cache as vLLM has it."""
    case, store = problem.case, problem.store
    spare = torch.full((5, problem.indices.shape[1]), -1, dtype=torch.int32)
    layer = SimpleNamespace(
        topk_indices_buffer=torch.cat([problem.indices, spare]),
        _k_scale_float=case.scale,
        _v_scale_float=case.output_scale,
    )
    cache = torch.cat([store.key, store.value], dim=-1).transpose(1, 2)
    return layer, cache.view(torch.uint8) if case.kv == "e4m3" else cache


@pytest.mark.parametrize("kv", ["16-bit", "e4m3"])
@pytest.mark.parametrize("page_size", [16, 48])
def test_a_step_is_what_the_indices_name(
    vllm: Import, layers: Any, kv: str, page_size: int
) -> None:
    """In bf16 and FP8, with drafts and padding, as a layer keeps its caches and indices."""
    scale = 0.5 if kv == "e4m3" else 1.0
    case = qsa("", seq_lens=(300, 70), requests=(0, 0, 1, -1), kv=kv, output_scale=scale, gate=True)
    problem = replace(case, page_size=page_size).build("cpu")
    layer, cache = layer_of(problem)
    theirs = layers.Qwen4ExpQSAFlashAttentionImpl
    rest = (None, None, "fp8" if kv == "e4m3" else "auto") if is_installed("vllm") else ()
    with current_config():
        impl = vllm("mlagen.integrations.vllm.qsa").impl_of(theirs)(
            case.heads, case.head_dim, case.head_dim**-0.5, case.kv_heads, *rest
        )
    tokens = case.tokens
    metadata = SimpleNamespace(num_actual_tokens=tokens, block_table=problem.block_tables)
    requests = torch.tensor([*case.requests, 0], dtype=torch.int32)
    assert problem.gates is not None
    query, gates = (torch.cat([each, each[:3]]) for each in (problem.query, problem.gates))
    output = torch.full_like(query, 7.0)

    def forward(*, is_prefill: bool, **fused: Any) -> Any:
        return impl.forward_qsa(
            *(layer, query, None, None, cache, metadata, output),
            token_to_req=requests,
            use_prefill_config=is_prefill,
            output_gate=gates.flatten(1),
            **fused,
        )

    assert forward(is_prefill=False) is output

    problem.check(output[:tokens])
    assert not output[tokens:].any()
    metadata.num_actual_tokens = 0
    assert not forward(is_prefill=False).any()


def test_a_prompt_stays_with_vllm(vllm: Import) -> None:
    """So does an output that vLLM would have quantized, which it rejects."""
    impl = vllm("mlagen.integrations.vllm.qsa").impl_of(Qwen4ExpQSAFlashAttentionImpl)(
        24, 256, 1, 2
    )
    given = (None,) * 7

    assert impl.forward_qsa(*given, "requests", True, "gate") == (
        "requests",
        True,
        "gate",
        None,
        None,
    )
    fused = impl.forward_qsa(*given, "requests", False, "gate", output_scale="scale")
    assert fused == ("requests", False, "gate", "scale", None)


def test_the_option_chooses_the_decode(vllm: Import, layers: Any, monkeypatch: Patch) -> None:
    """A layer is made of our classes with MLAGEN_GQA only, and its kernels are warmed up."""
    models, ours = vllm("mlagen.integrations.vllm.models"), vllm("mlagen.integrations.vllm.qsa")
    module = SimpleNamespace(Qwen4ExpQSAAttention=Qwen4ExpQSAAttention)
    monkeypatch.setitem(sys.modules, LAYERS, module)
    entry = models.Model(SimpleNamespace(load_model_cls=lambda: "model"), LAYERS)
    for _ in range(2):
        assert entry.load_model_cls() == "model"
    config = SimpleNamespace(
        attention_config=SimpleNamespace(backend=None),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
        kernel_config=SimpleNamespace(enable_jit_warmup=True),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )

    def make(backend: str | None) -> Any:
        config.attention_config.backend = backend and SimpleNamespace(name=backend)
        return module.Qwen4ExpQSAAttention(vllm_config=config, prefix="layers.3")

    for backend in (None, "MLAGEN_MLA", "FLASH_ATTN"):
        assert type(make(backend)) is Qwen4ExpQSAAttention
        assert type(make(backend).impl) is Qwen4ExpQSAFlashAttentionImpl
    layer = make("MLAGEN_GQA")
    assert isinstance(layer, Qwen4ExpQSAAttention)
    assert isinstance(layer.impl, Qwen4ExpQSAFlashAttentionImpl)
    assert type(layer.impl) is not Qwen4ExpQSAFlashAttentionImpl
    assert layer.prefix == "layers.3"
    config.compilation_config.static_forward_context["layers.3"] = layer
    for dtype, kv in ((torch.bfloat16, "bf16"), (torch.uint8, "e4m3")):
        spec = SimpleNamespace(block_size=1056, dtype=dtype)
        builder = layer.attn_backend.get_builder_cls()(spec, ["layers.3"], config, "cpu")
        ((variant, rows),) = builder.decode_calls()
        assert (str(variant.kv_dtype), variant.page_size, rows) == (kv, 1056, 12)
        assert (variant.sparse_block, variant.has_output_gate, variant.head_dim) == (1, True, 256)
    assert issubclass(ours.attention_of(layers.Qwen4ExpQSAAttention), layers.Qwen4ExpQSAAttention)
    theirs = layers.Qwen4ExpQSAFlashAttentionImpl
    assert disagreement(ours.impl_of(theirs).forward_qsa, theirs.forward_qsa) is None
    assert "Qwen4ExpForConditionalGeneration" in models.MODELS
