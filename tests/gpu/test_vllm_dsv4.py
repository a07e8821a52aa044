"""Layers of DeepSeek-V4 and V4.1 with vLLM's FlashMLA, and with mlagen in its place."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.fixture_types import Patch
from tests.integrations import dsv4 as problem
from tests.integrations.attended import assert_near
from tests.integrations.servers import is_installed
from tests.integrations.vllm.dsv4_layers import (
    KINDS,
    POSITIONS,
    SLOTS,
    Kind,
    built_metadata,
    layer_of,
)

SCHEDULES = ("swaonly", "c4a", "c128a", "c1a", "c2a")


def start(self: Any, **members: Any) -> None:
    """Make a layer from its members."""
    torch.nn.Module.__init__(self)
    vars(self).update(members)


@pytest.mark.skipif(
    not is_installed("vllm") or find_spec("vllm._flashmla_C") is None,
    reason="needs vLLM with its FlashMLA",
)
@pytest.mark.filterwarnings("ignore")  # of vLLM's imports
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_and_its_graph_are_as_with_flash_mla(
    kind: Kind, device: str, monkeypatch: Patch
) -> None:
    """A graph attends to the lists that are there when it is replayed."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0, where vLLM calls FlashMLA")
    theirs = import_module(f"{kind.package}.nvidia.model").DeepseekV4FlashMLAAttention
    monkeypatch.setattr(theirs, "__init__", start)
    ours = import_module("mlagen.integrations.vllm.dsv4").attention_of(theirs)
    layers = [layer_of(cls, kind, device) for cls in (theirs, ours)]
    metadata = built_metadata(layers[0], kind, device)
    forward_context = import_module("vllm.forward_context")
    flash_mla = import_module("vllm.v1.attention.ops.flashmla")
    query = problem.queries(len(POSITIONS)).nan_to_num().to(device)

    def attended(layer: Any, output: torch.Tensor) -> torch.Tensor:
        for name in SCHEDULES:  # one that is not planned
            meta = flash_mla.get_mla_metadata()[0]
            setattr(metadata["layer.swa_cache"], f"tile_sched_{name}", meta)
        context = SimpleNamespace(attn_metadata=metadata)
        with forward_context.override_forward_context(context):
            layer.forward_mqa(query, None, None, output)
        return output[:, : problem.HEADS]

    expected = attended(layers[0], torch.empty_like(query))
    output = layers[1]._alloc_attn_out(len(query), query)
    got = attended(layers[1], output)
    assert_near(got.cpu(), expected.cpu())
    assert [bool(token.any()) for token in expected] == [slot >= 0 for slot in SLOTS]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attended(layers[1], output)
    metadata["layer.swa_cache"].decode_swa_lens.clamp_(max=3)
    query.mul_(-1)
    graph.replay()
    assert_near(got.cpu(), attended(layers[0], torch.empty_like(query)).cpu())
