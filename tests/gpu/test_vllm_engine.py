"""Engines of vLLM over tiny random models: tokens of transformers by mlagen's kernels."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import engines
from tests.integrations.servers import is_installed
from tests.integrations.vllm import engine

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it is compiled for minutes
    "MLAGEN_JIT": "freeze",  # a kernel that the warm-up has not compiled ends the engine
}


@pytest.mark.skipif(
    not is_installed("vllm") or not entry_points(group="vllm.general_plugins", name="mlagen"),
    reason="needs vLLM, and mlagen installed beside it",
)
@pytest.mark.parametrize("mode", ["eager", "graphs"])
@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (engines.llama, "MLAGEN_GQA"),
        (engines.gpt_oss, "MLAGEN_GQA"),
        (engines.deepseek_v3, "MLAGEN_MLA"),
    ],
)
def test_tokens_are_those_of_transformers(
    make: Any, backend: str, mode: str, device: str, tmp_path: Path
) -> None:
    """Each decode step launches mlagen's kernels, warmed up, and errs as bf16 does elsewhere."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17")
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    if backend == "MLAGEN_GQA" and not (is_hopper and is_installed("flashinfer")):
        pytest.skip("MLAGEN_GQA needs FlashInfer, and a GPU of compute capability 9.0")
    rounded, exact = engines.models_in(tmp_path, make, device)
    prompts = engines.prompts()

    did = engines.engine_over(engine.__name__, ENVIRONMENT, tmp_path, backend, mode, prompts)

    assert did["backends"] == [backend] * engines.LAYERS
    kernel = f"{backend.removeprefix('MLAGEN_').lower()}_sm"
    engines.assert_decodes_by(kernel, did, mode)
    engines.assert_like_transformers(rounded, exact, prompts, did)
    assert did["jit"] == "error"
    log = (tmp_path / "log").read_text()
    warm_ups = [line for line in log.splitlines() if "mlagen: warm-up of" in line]
    assert warm_ups
    assert all(line.endswith("; frozen") for line in warm_ups)
    if mode == "graphs":  # without vLLM's warm-up, each group of layers has its own
        assert len(warm_ups) == 1
    assert "NVIDIA artifactory" not in log  # nobody asks the network for cubins
