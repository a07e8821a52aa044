"""Engines of SGLang over a tiny random model: tokens of transformers by mlagen's kernels."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations import engines
from tests.integrations.servers import is_installed
from tests.integrations.sglang import engine

# Behind the warm-up nothing is compiled.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "MLAGEN_JIT": "freeze"}


@pytest.mark.skipif(
    not is_installed("sglang") or not entry_points(group="sglang.srt.plugins", name="mlagen"),
    reason="needs SGLang, and mlagen installed beside it",
)
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
