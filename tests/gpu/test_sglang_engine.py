"""Engines of SGLang over a tiny random model: tokens of transformers by mlagen's kernels."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from tests.integrations import engines
from tests.integrations.servers import is_installed
from tests.integrations.sglang import engine

ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


@pytest.mark.skipif(
    not is_installed("sglang") or not entry_points(group="sglang.srt.plugins", name="mlagen"),
    reason="needs SGLang, and mlagen installed beside it",
)
@pytest.mark.parametrize("mode", ["eager", "graphs"])
def test_tokens_are_those_of_transformers(mode: str, device: str, tmp_path: Path) -> None:
    """Each decode step launches mlagen's kernels, and errs about as bf16 does elsewhere."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FlashAttention 3, which prefills, needs a GPU of compute capability 9.0")
    rounded, exact = engines.models_in(tmp_path, engines.deepseek_v3, device)
    prompts = engines.prompts()

    did = engines.engine_over(engine.__name__, ENVIRONMENT, tmp_path, "mlagen_mla", mode, prompts)

    assert did["backends"] == ["mlagen_mla"]
    engines.assert_decodes_by("mla_sm", did, mode)
    engines.assert_like_transformers(rounded, exact, prompts, did)
