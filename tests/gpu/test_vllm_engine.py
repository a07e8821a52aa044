"""Engines of vLLM over tiny random models: tokens of transformers by mlagen's kernels."""

from __future__ import annotations

from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import engines
from tests.integrations.servers import is_installed, require_parts
from tests.integrations.vllm import engine

# What DeepSeek-V4 needs of vLLM's wheel, and beside it: its operators, FlashMLA, DeepGEMM and what
# compiles the kernels of hyper-connections, and of compressed tokens.
V4_PARTS = (
    "vllm._C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm.third_party.deep_gemm._C_extension",
    "tilelang",
    "cutlass",
)
# vLLM's own for sparse layers.
M3_DECODE, QWEN_ATTENTION = "_gqa_sparse_decode_kernel", "_qsa_sparse_paged_gqa_splitk_kernel"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled for minutes
    "MLAGEN_JIT": "freeze",  # a kernel that the warm-up has not compiled ends the engine
}


needs_vllm = pytest.mark.skipif(
    not is_installed("vllm") or not entry_points(group="vllm.general_plugins", name="mlagen"),
    reason="needs vLLM, and mlagen installed beside it",
)


def require_gqa(device: str) -> None:
    """Skip where the GQA backend is not served."""
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    if not (is_hopper and is_installed("flashinfer")):
        pytest.skip("MLAGEN_GQA needs FlashInfer, and a GPU of compute capability 9.0")


@needs_vllm
@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (engines.llama, "MLAGEN_GQA"),
        (engines.gpt_oss, "MLAGEN_GQA"),
        (engines.gemma4, "MLAGEN_GQA"),
        (engines.deepseek_v3, "MLAGEN_MLA"),
    ],
)
def test_tokens_are_those_of_transformers(
    make: Any, backend: str, mode: str, device: str, tmp_path: Path
) -> None:
    """Each decode step launches mlagen's kernels, warmed up, and errs as bf16 does elsewhere."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17")
    if backend == "MLAGEN_GQA":
        require_gqa(device)
    rounded, exact = engines.models_in(tmp_path, make, device)
    prompts = engines.prompts()

    did = engines.engine_over(engine.__name__, ENVIRONMENT, tmp_path, backend, mode, prompts)

    assert did["backends"] == [backend] * engines.LAYERS
    kernel = f"{backend.removeprefix('MLAGEN_').lower()}_sm"
    engines.assert_decodes_by(kernel, did, mode)
    engines.assert_like_transformers(rounded, exact, prompts, did)
    assert did["jit"] == "error"
    warm_ups = [line for line in did["log"].splitlines() if "mlagen: warm-up of" in line]
    assert warm_ups
    assert all(line.endswith("; frozen") for line in warm_ups)
    if mode == "graphs":  # without vLLM's warm-up, each group of layers has its own
        assert len(warm_ups) == 1
    assert "NVIDIA artifactory" not in did["log"]  # nobody asks the network for cubins


@needs_vllm
@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize(
    ("make", "cache", "backends"),
    [
        (engines.gemma4, "nvfp4", ("FLASHINFER", "MLAGEN_GQA")),
        (engines.llama, "int8_per_token_head", ("TRITON_ATTN", "MLAGEN_GQA_TOKEN_SCALES")),
        (engines.llama, "fp8_per_token_head", ("TRITON_ATTN", "MLAGEN_GQA_TOKEN_SCALES")),
    ],
)
def test_tokens_over_a_quantized_cache_are_those_of_vllms_backend(
    make: Any, cache: str, backends: tuple[str, str], mode: str, device: str, tmp_path: Path
) -> None:
    """Layers, those of Gemma 4 with 256 and 512 dims, read the cache that vLLM writes and reads."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17")
    if "MLAGEN_GQA" in backends:
        require_gqa(device)
    engines.models_in(tmp_path, make, device)
    prompts, asked = engines.prompts(), f"{mode} {cache}"
    runs = [
        engines.engine_over(engine.__name__, ENVIRONMENT, tmp_path, backend, asked, prompts)
        for backend in backends
    ]

    theirs, ours = runs
    assert [run["backends"] for run in runs] == [[name] * engines.LAYERS for name in backends]
    assert not any(name.startswith("gqa_sm") for name in theirs["kernels"])
    engines.assert_decodes_by("gqa_sm", ours, mode)
    # Where rounding changes the code of a value that a decode step caches, NVFP4 moves it four
    # times as far as e4m3 does, which prompts of a few tokens show.
    tolerance = engines.COARSE if cache == "nvfp4" else engines.FINE
    engines.assert_like_another(ours, theirs, tolerance)
    assert ours["jit"] == "error"


@needs_vllm
@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_a_batch_invariant_engine_gives_each_request_the_bits_that_it_has_alone(
    mode: str, device: str, tmp_path: Path
) -> None:
    """Log probabilities of a prompt alone and among 31 others are equal, projections included."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17")
    require_gqa(device)
    engines.models_in(tmp_path, engines.llama, device)
    prompts = [prompt for _ in range(4) for prompt in engines.prompts()]
    environment = ENVIRONMENT | {"VLLM_BATCH_INVARIANT": "1"}

    did = engines.engine_over(engine.__name__, environment, tmp_path, "MLAGEN_GQA", mode, prompts)

    assert did["backends"] == ["MLAGEN_GQA"] * engines.LAYERS
    engines.assert_decodes_by("gqa_sm", did, mode)
    assert did["repeated"] == did["tokens"]
    assert len(did["alone"]) == engine.ALONE
    assert did["alone"] == did["logprobs"][: engine.ALONE]
    assert did["jit"] == "error"


SPARSE: dict[str, tuple[Any, str, str, list[str]]] = {
    "minimax_m3": (engines.save_minimax_m3, "MINIMAX_M3_SPARSE", M3_DECODE, ["MLAGEN_GQA"]),
    "qwen3_8": (engines.save_qwen3_8, "QWEN4_EXP_QSA_TRITON", QWEN_ATTENTION, []),
}


@needs_vllm
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        *product(SPARSE, ("eager", "graphs")),
        pytest.param("qwen3_8", "eager fp8", id="qwen3_8-fp8"),
    ],
)
def test_tokens_of_sparse_layers_are_those_of_triton(
    model: str, mode: str, device: str, tmp_path: Path
) -> None:
    """Layers launch mlagen's kernels, and decode as where vLLM decodes the sparse ones."""
    require_gqa(device)
    save, sparse, kernel, dense = SPARSE[model]
    save(tmp_path)
    prompts = engines.prompts()
    runs = [
        engines.engine_over(engine.__name__, ENVIRONMENT, tmp_path, backend, mode, prompts)
        for backend in (f"MLAGEN_GQA {engine.WITHOUT_MODELS}", "MLAGEN_GQA")
    ]

    theirs, ours = runs
    layers = engines.LAYERS - len(dense)
    assert [run["backends"] for run in runs] == [dense + [sparse] * layers] * 2
    engines.assert_decodes_by("gqa_sm", theirs, mode, layers=len(dense))
    engines.assert_decodes_by("gqa_sm", ours, mode, layers=engines.LAYERS)
    # What prefill launches of it too, both do.
    left = engines.launches(kernel, ours)
    assert engines.launches(kernel, theirs) == left + layers * engines.STEPS, theirs["kernels"]
    engines.assert_like_another(ours, theirs)
    assert ours["jit"] == "error"


@needs_vllm
@pytest.mark.parametrize("mode", ["eager", "graphs", "drafts"])
def test_tokens_of_deepseek_v4_are_those_of_flash_mla(
    mode: str, device: str, tmp_path: Path
) -> None:
    """Layers of all kinds launch mlagen's kernels, and the engine decodes as with FlashMLA's."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17")
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0, where vLLM decodes by FlashMLA")
    require_parts("vLLM's DeepSeek-V4", V4_PARTS)
    engines.save_deepseek_v4(tmp_path)
    prompts = engines.prompts()
    runs = [
        engines.engine_over(engine.__name__, ENVIRONMENT, tmp_path, backend, mode, prompts)
        for backend in ("FLASHMLA_SPARSE_DSV4", "MLAGEN_MLA_SPARSE")
    ]

    theirs, ours = runs
    assert set(theirs["layers"]) == {"DeepseekV4FlashMLAAttention"}
    assert set(ours["layers"]) == {"MlagenDSV4Attention"}
    assert not any(name.startswith("mla_sm") for name in theirs["kernels"])
    if mode != "drafts":  # rejected drafts make a number of steps that is not known
        engines.assert_decodes_by("mla_sm", ours, mode, layers=len(engines.V4_LAYERS))
    assert any(name.startswith("mla_sm") for name in ours["kernels"])
    engines.assert_like_another(ours, theirs, least=engines.V4_LEAST)
    assert ours["jit"] == "error"
    assert "mlagen: warm-up of" in ours["log"]
