"""Continuous batching of the transformers integration, over stand-ins of transformers."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.errors import UnsupportedError
from tests.fixture_types import Patch
from tests.integrations.transformers_cases import (
    HEAD_DIM,
    KV_HEADS,
    MODULE,
    SCALE,
    assert_close,
    expected,
    qkv,
    random,
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "transformers_continuous.py"


class PagedCache:
    """The part of a paged cache that the integration reads: one layer, slots of one token."""

    layer_index_to_group_indices = ((0, 0),)

    def __init__(self, slots: int = 96, window: int = 1) -> None:
        self.sliding_windows = (window,)
        self.key_cache = [random(slots, KV_HEADS, HEAD_DIM)]
        self.value_cache = [random(slots, KV_HEADS, HEAD_DIM) + 1]


def paged_call(integration: Any, q_lens: list[int], seq_lens: list[int], **options: Any) -> Any:
    """Return the output of a batch, and what float64 says of it."""
    cache = options.pop("cache", None) or PagedCache()
    slots = torch.randperm(96, generator=torch.Generator().manual_seed(1))[: sum(seq_lens)]
    tokens, ends = sum(q_lens), torch.tensor([0, *seq_lens]).cumsum(0)
    query, keys, values = (random(1, heads, tokens, HEAD_DIM) for heads in (8, 2, 2))
    requests = [slots[ends[i] : ends[i + 1]] for i in range(len(seq_lens))]
    write = torch.cat(
        [own[len(own) - q_len :] for own, q_len in zip(requests, q_lens, strict=True)]
    )
    starts = torch.tensor([0, *q_lens]).cumsum(0)
    are_prompts = q_lens == seq_lens
    batch = {
        "scaling": SCALE,
        "cache": cache,
        "read_index": [slots[:0] if are_prompts else slots],
        "write_index": [write],
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": ends,
        "max_seqlen_q": max(q_lens),
        "max_seqlen_k": {"full_attention": max(seq_lens)},
    }
    for _ in range(options.pop("layers", 1)):
        out, _ = integration.continuous.paged_attention(
            SimpleNamespace(layer_idx=0), query, keys, values, None, **batch
        )
    wanted = []
    for i, own in enumerate(requests):
        sees = torch.ones(q_lens[i], len(own)).tril(len(own) - q_lens[i]).bool()
        cached = (
            part[0][own].transpose(0, 1)[None] for part in (cache.key_cache, cache.value_cache)
        )
        wanted.append(expected(query[:, :, starts[i] : starts[i + 1]], *cached, sees))
    return out, torch.cat(wanted, dim=1)


@pytest.mark.parametrize(
    ("q_lens", "seq_lens"),
    [([3, 5], [3, 5]), ([1, 1, 1], [9, 30, 2]), ([4, 1, 7], [20, 33, 7])],
    ids=["prompts", "decode", "both"],
)
def test_a_batch_of_requests_is_one_call(
    integration: Any, q_lens: list[int], seq_lens: list[int]
) -> None:
    """Every request attends to its own tokens, the new ones included."""
    out, wanted = paged_call(integration, q_lens, seq_lens)

    assert_close(out, wanted)
    assert integration.package.explain() == {"mlagen GQA, continuous batching": 1}


def test_layers_share_the_tables_of_a_batch(integration: Any, monkeypatch: Patch) -> None:
    """Tables are made once for a batch, and are as wide for a step as for the next."""
    calls: list[tuple[Any, ...]] = []
    attend = integration.continuous.xqa_batch_decode_with_kv_cache

    def spy(*inputs: Any, **keywords: Any) -> Any:
        calls.append((*inputs[3:5], keywords["q_cu_seq_lens"]))
        return attend(*inputs, **keywords)

    monkeypatch.setattr(integration.continuous, "xqa_batch_decode_with_kv_cache", spy)
    for seq_lens in ([9, 30, 2], [10, 31, 3]):
        out, wanted = paged_call(integration, [1, 1, 1], seq_lens, layers=2)
        assert_close(out, wanted)

    for first, second in (calls[:2], calls[2:]):
        assert all(each is other for each, other in zip(first, second, strict=True))
    assert calls[0][0].shape == calls[2][0].shape


def test_a_window_is_rejected(integration: Any) -> None:
    """A layer with a sliding window is not computed without it."""
    with pytest.raises(UnsupportedError, match="sliding window"):
        paged_call(integration, [1], [9], cache=PagedCache(window=4))


def test_a_call_outside_of_continuous_batching_is_rejected(integration: Any) -> None:
    """Without a paged cache there is nothing to attend to."""
    with pytest.raises(UnsupportedError, match="paged cache"):
        integration.continuous.paged_attention(MODULE, *qkv(64), None)


def test_the_paged_cache_of_another_version_is_rejected(integration: Any) -> None:
    """One line names the version that works, before anything is written."""
    cache = PagedCache()
    del cache.sliding_windows
    keys = cache.key_cache[0].clone()

    with pytest.raises(UnsupportedError, match=r"^transformers: expected 5\.17 .*, got \S+$"):
        paged_call(integration, [1], [9], cache=cache)

    assert torch.equal(cache.key_cache[0], keys)


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("5.24.0", "transformers: expected 5.17 for paged|mlagen, got 5.24.0"),
        ("5.17.1", "psutil: expected an installed package without a GPU, got none"),
    ],
)
def test_the_example_says_first_what_is_missing(
    integration: Any, monkeypatch: Patch, version: str, message: str
) -> None:
    """It makes no model where continuous batching cannot run."""
    module = integration.continuous.transformers
    names = ("GenerationConfig", "LlamaConfig", "LlamaForCausalLM", "ContinuousBatchingConfig")
    for name in names:
        monkeypatch.setattr(module, name, lambda **_: None, raising=False)
    for path in ("transformers.generation", "transformers.generation.configuration_utils"):
        monkeypatch.setitem(sys.modules, path, module)
    monkeypatch.setattr(module, "__version__", version)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLE))

    assert ended.value.code == message
