"""Engines of SGLang over a tiny random model: tokens of transformers by mlagen's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.integrations import engines
from tests.integrations.servers import is_installed, require_parts
from tests.integrations.sglang import engine

# Behind the warm-up nothing is compiled.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "MLAGEN_JIT": "freeze"}
DRAWN_ENVIRONMENT = ENVIRONMENT | {
    "SGLANG_DSV4_FP4_EXPERTS": "0",  # it has no checkpoint to look into
    "SGLANG_ENABLE_COLOCATED_BATCH_GEN": "1",  # a list of prompts arrives at once
}


class Drawn(NamedTuple):
    """A model whose weights an engine draws, SGLang's backend for it, and ours."""

    save: Callable[[Path], None]
    backends: tuple[str, str]
    kernel: str
    layers: int = engines.LAYERS
    parts: tuple[str, ...] = ("sgl_kernel",)
    tolerance: float = engines.FINE
    least: float = 0.5


# Packages that SGLang calls for an indexer, and for DeepSeek-V4.
DSA_PARTS = ("sgl_kernel", "flash_mla", "deep_gemm")
V4_PARTS = (*DSA_PARTS, "tilelang")
DRAWN = {
    "deepseek_v4": Drawn(
        partial(engines.save_deepseek_v4, **engines.V4_OF_SGLANG),
        ("dsv4", "mlagen_dsv4"),
        "mla_sm",
        layers=len(engines.V4_LAYERS),
        parts=V4_PARTS,
        least=engines.V4_LEAST,
    ),
    "deepseek_v32": Drawn(
        engines.save_deepseek_v32, ("dsa", "mlagen_dsa"), "mla_sm", parts=DSA_PARTS
    ),
    "minimax_m3": Drawn(
        partial(engines.save_minimax_m3, **engines.M3_OF_SGLANG), ("fa3", "mlagen_mha"), "gqa_sm"
    ),
    # Over an FP8 cache Triton rounds the query and P to e4m3, and tokens differ early.
    "llama": Drawn(
        engines.save_llama,
        ("triton", "mlagen_mha"),
        "gqa_sm",
        tolerance=engines.COARSE,
        least=1 / 8,
    ),
}

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
    assert_warm(did)
    engines.assert_decodes_by(kernel, did, mode)
    engines.assert_like_transformers(rounded, exact, prompts, did)


@needs_sglang
@pytest.mark.parametrize(
    ("model", "mode"),
    [
        *product(("deepseek_v4",), ("eager", "graphs", "drafts")),
        ("minimax_m3", "graphs"),
        *product(("deepseek_v32", "llama"), ("graphs fp8_e4m3",)),
    ],
)
def test_tokens_are_those_of_sglangs_backend(
    model: str, mode: str, device: str, tmp_path: Path
) -> None:
    """Layers launch mlagen's kernels, and the engine decodes as with SGLang's own, drafts too."""
    pytest.importorskip("transformers", minversion="5.17", reason="needs transformers 5.17")
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0, of which these are SGLang's backends")
    drawn = DRAWN[model]
    require_parts(f"SGLang's {model}", drawn.parts)
    drawn.save(tmp_path)
    prompts = engines.prompts()
    theirs, ours = (
        engines.engine_over(engine.__name__, DRAWN_ENVIRONMENT, tmp_path, backend, mode, prompts)
        for backend in drawn.backends
    )

    assert (*theirs["backends"], *ours["backends"]) == drawn.backends
    assert not engines.launches(drawn.kernel, theirs)
    if mode == "drafts":  # rejected ones make a number of steps that is not known
        assert engines.launches(drawn.kernel, ours)
    else:
        engines.assert_decodes_by(drawn.kernel, ours, mode, layers=drawn.layers)
    engines.assert_like_another(ours, theirs, drawn.tolerance, drawn.least)
    assert_warm(ours, runners=2 if mode == "drafts" else 1)


def assert_warm(did: dict[str, Any], runners: int = 1) -> None:
    """Check that each runner of an engine compiled all its kernels before the first request."""
    lines = [each for each in did["log"].splitlines() if "mlagen: warm-up of" in each]
    assert len(lines) == runners
    assert all(line.endswith("; frozen") and "missing" not in line for line in lines)
