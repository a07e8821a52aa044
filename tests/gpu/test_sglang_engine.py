"""Engines of SGLang over a tiny random model: tokens of transformers by mlagen's kernels."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import engines
from tests.integrations.servers import is_installed, require_parts
from tests.integrations.sglang import engine

# Behind the warm-up nothing is compiled.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "MLAGEN_JIT": "freeze"}


# What DeepSeek-V4 needs beside SGLang: its operators, FlashMLA, DeepGEMM, what compiles the kernels
# of hyper-connections, and what compiles those of lists and compressed tokens.
V4_PARTS = ("sgl_kernel", "flash_mla", "deep_gemm", "tilelang")

needs_sglang = pytest.mark.skipif(
    not is_installed("sglang") or not entry_points(group="sglang.srt.plugins", name="mlagen"),
    reason="needs SGLang, and mlagen installed beside it",
)


@needs_sglang
@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize(
    ("make", "backend", "kernel"),
    [
        (engines.deepseek_v3, "mlagen_mla", "mla_sm"),
        (engines.llama, "mlagen_mha", "gqa_sm"),
        (engines.gpt_oss, "mlagen_mha", "gqa_sm"),
    ],
    ids=["deepseek_v3", "llama", "gpt_oss"],
)
def test_tokens_are_those_of_transformers(
    make: Any, backend: str, kernel: str, mode: str, device: str, tmp_path: Path
) -> None:
    """Each decode step launches kernels of the warm-up, and errs about as bf16 does elsewhere."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention 3, which prefills, needs a GPU of compute capability 9.0")
    rounded, exact = engines.models_in(tmp_path, make, device)
    prompts = engines.prompts()

    did = engines.engine_over(engine.__name__, ENVIRONMENT, tmp_path, backend, mode, prompts)

    assert did["backends"] == [backend]
    (line,) = [each for each in did["log"].splitlines() if "mlagen: warm-up of" in each]
    assert line.endswith("; frozen")
    assert "missing" not in line
    engines.assert_decodes_by(kernel, did, mode)
    engines.assert_like_transformers(rounded, exact, prompts, did)


@needs_sglang
@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_tokens_of_deepseek_v4_are_those_of_flash_mla(
    mode: str, device: str, tmp_path: Path
) -> None:
    """Layers of all kinds launch mlagen's kernels, and the engine decodes as with FlashMLA's."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17")
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0, where SGLang decodes by FlashMLA")
    require_parts("SGLang's DeepSeek-V4", V4_PARTS)
    engines.save_deepseek_v4(tmp_path, **engines.V4_OF_SGLANG)
    prompts = engines.prompts()
    environment = ENVIRONMENT | {
        "SGLANG_DSV4_FP4_EXPERTS": "0",  # it has no checkpoint to look into
        "SGLANG_ENABLE_COLOCATED_BATCH_GEN": "1",  # a list of prompts arrives at once
    }
    theirs, ours = (
        engines.engine_over(engine.__name__, environment, tmp_path, backend, mode, prompts)
        for backend in ("dsv4", "mlagen_dsv4")
    )

    assert (theirs["backends"], ours["backends"]) == (["dsv4"], ["mlagen_dsv4"])
    assert not any(name.startswith("mla_sm") for name in theirs["kernels"])
    engines.assert_decodes_by("mla_sm", ours, mode, layers=len(engines.V4_LAYERS))
    engines.assert_like_another(ours, theirs, least=engines.V4_LEAST)
    (line,) = [each for each in ours["log"].splitlines() if "mlagen: warm-up of" in each]
    assert line.endswith("; frozen")
