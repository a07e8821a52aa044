"""The backend ``mlagen_dsv4``, called as SGLang's models call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.spec.dtype import DType
from tests.fixture_types import Patch
from tests.integrations import dsv4 as problem
from tests.integrations.attended import E4M3, assert_near
from tests.integrations.servers import Import, is_installed
from tests.integrations.sglang.conftest import DSV4, runner

PAGE, REQUESTS, TOP_K = 256, 3, 512  # tokens of a page, of both kinds of layers
LENGTHS, ROWS = [700, 130, 5], 5  # two rows of the query pad a CUDA graph
PAGES = -(-max(LENGTHS) // PAGE)


@dataclass(frozen=True)
class Kind:
    """A kind of layers: how many tokens a compressed one stands for, and the model's."""

    ratio: int
    of: tuple[int, ...] = (4, 128)


KINDS = {
    "V4, the window only": Kind(0),
    "V4, 4:1": Kind(4),
    "V4, 128:1": Kind(128),
    "V4.1, 1:1": Kind(1, (1, 2)),
    "V4.1, 2:1": Kind(2, (1, 2)),
}


def buffer_of(cache: torch.Tensor) -> torch.Tensor:
    """Return pages as SGLang stores them: whole, in elements of FP8."""
    pages, stride = len(cache), cache.stride(0)
    return cache.as_strided((pages, stride), (stride, 1)).view(E4M3)


def pool_of(sglang: Import, kind: Kind) -> Any:
    """Return the pools of a server, of one layer."""
    swa = buffer_of(problem.cache(REQUESTS * PAGES, PAGE, seed=1))
    page = PAGE // max(kind.ratio, 1)
    extra = buffer_of(problem.cache(REQUESTS * PAGES, page, seed=2, gap=problem.DATA))
    members: dict[str, Any] = {
        "get_swa_key_buffer_radix": lambda *_: swa,
        "get_swa_key_page_size": lambda _: PAGE,
        "get_swa_key_bytes_per_token": lambda _: problem.ROW,
        "get_extra_key_buffer": lambda *_: extra,
        "get_extra_key_page_size": lambda *_: page,
        "get_extra_key_bytes_per_token": lambda *_: problem.ROW,
        "request_window": None,
        "full_to_swa_index_mapping": swa_locations(),
    }
    base = sglang("sglang.srt.mem_cache.deepseek_v4_memory_pool").DeepSeekV4TokenToKVPool
    pool = type("Pool", (base,), members)
    return object.__new__(pool)


def pages_of_requests() -> torch.Tensor:
    """Return the pages of each request."""
    generator = torch.Generator().manual_seed(3)
    return torch.randperm(REQUESTS * PAGES, generator=generator).view(REQUESTS, PAGES)


def swa_locations() -> torch.Tensor:
    """Return where the pool of windows has each token."""
    generator = torch.Generator().manual_seed(4)
    order = torch.randperm(REQUESTS * PAGES, generator=generator)
    return (order[:, None] * PAGE + torch.arange(PAGE)).flatten()


def compressed_lists(kind: Kind) -> tuple[torch.Tensor, torch.Tensor]:
    """Return some compressed tokens of each request, in any order, and how many."""
    generator = torch.Generator().manual_seed(5)
    page, pages = PAGE // kind.ratio, pages_of_requests()
    lists = torch.full((REQUESTS, TOP_K), -1, dtype=torch.int32)
    lengths = torch.ones(REQUESTS, dtype=torch.int32)
    for request, length in enumerate(LENGTHS):
        chosen = torch.randperm(length // kind.ratio, generator=generator)[:TOP_K]
        lists[request, : len(chosen)] = (pages[request, chosen // page] * page) + chosen % page
        lengths[request] = max(1, len(chosen))
    return lists, lengths


def built_metadata(sglang: Import, backend: Any, kind: Kind, monkeypatch: Patch) -> Any:
    """Return a step's metadata from SGLang's builder, with lists of an indexer where it has one."""
    module = sglang("sglang.srt.layers.attention.deepseek_v4_backend")
    unplanned = SimpleNamespace(have_initialized=False)
    monkeypatch.setattr(module, "_create_flashmla_metadata", lambda: unplanned)
    locations = pages_of_requests()[:, :, None] * PAGE + torch.arange(PAGE)
    low = tuple(ratio for ratio in kind.of if ratio < 4)
    vars(backend).update(
        page_size=PAGE,
        req_to_token=locations.flatten(1).int(),
        present_ratios=(0, *kind.of),
        low_ratios=low,
        index_topk=TOP_K,
        cuda_int32_kwargs={"device": torch.device("cpu"), "dtype": torch.int32},
        trtllm_attn=False,
        encoder_replay=False,
        encoder_row_floor=None,
    )
    lengths = torch.tensor(LENGTHS).int()
    rows = torch.arange(REQUESTS)
    core = backend.make_core_attn_metadata(
        req_to_token=backend.req_to_token,
        req_pool_indices_repeated=rows,
        seq_lens_casual=lengths,
        max_seq_len=PAGES * PAGE,
        out_loc=backend.req_to_token[rows, lengths - 1],
    )
    if kind.ratio in (1, 2, 4):
        indices, counts = compressed_lists(kind)
        core.set_sparse_topk(kind.ratio, page_indices=indices, topk_lengths=counts)
    return core


def stand_in_metadata(sglang: Import, kind: Kind) -> Any:
    """Return a step's metadata as SGLang's builder returns it."""
    core = sglang("sglang.srt.layers.attention.deepseek_v4_backend").DSV4AttnMetadata()
    windows = torch.zeros(ROWS, 128, dtype=torch.int32)
    counts = torch.ones(ROWS, dtype=torch.int32)
    for request, length in enumerate(LENGTHS):
        seen = torch.arange(max(0, length - 128), length)
        location = pages_of_requests()[request, seen // PAGE] * PAGE + seen % PAGE
        windows[request] = -1
        windows[request, : len(seen)] = swa_locations()[location].int()
        counts[request] = len(seen)
    lists = torch.full((ROWS, TOP_K), -1, dtype=torch.int32)
    lengths = torch.ones(ROWS, dtype=torch.int32)
    if kind.ratio:
        lists[:REQUESTS], lengths[:REQUESTS] = compressed_lists(kind)
    core.swa_page_indices, core.swa_topk_lengths = windows, counts
    core.sparse_page_indices, core.sparse_topk_lengths = lambda _: lists, lambda _: lengths
    core.get_flashmla_metadata = lambda _: SimpleNamespace(have_initialized=False)
    return core


def backend_over(cls: Any, pool: Any, kind: Kind, **fields: Any) -> Any:
    """Return a backend without a server."""
    backend = object.__new__(cls)
    vars(backend).update(
        token_to_kv_pool=pool,
        softmax_scale=problem.SCALE,
        head_dim_v=512,
        mtp_enabled=False,
        is_dsv41=kind.of == (1, 2),
        is_dspark_draft=False,
        _swa_interleaved=False,
        **fields,
    )
    return backend


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_is_what_flash_mla_computes_from_its_arguments(
    sglang: Import, dsv4: ModuleType, kind: Kind, monkeypatch: Patch
) -> None:
    """Rows of padding too, without the heads of padding, whose queries have no value."""
    if is_installed("sglang") and torch.cuda.is_available():
        pytest.skip("interprets SGLang's kernels, where there is no GPU: make test-sglang")
    calls: list[dict[str, Any]] = []

    def recorded(**call: Any) -> Any:
        calls.append(call)
        return problem.flash_mla(**call)

    pool = pool_of(sglang, kind)
    theirs = backend_over(
        *(dsv4.DeepseekV4AttnBackend, pool, kind),
        _flash_mla_with_kvcache=recorded,
    )
    if is_installed("sglang"):
        core = built_metadata(sglang, theirs, kind, monkeypatch)
    else:
        core = stand_in_metadata(sglang, kind)
    mode = SimpleNamespace(is_idle=lambda: False, is_extend_without_speculative=lambda: False)
    query, layer = problem.queries(ROWS), SimpleNamespace(tp_q_head_num=problem.HEADS, layer_id=0)
    results = []

    for backend in (theirs, backend_over(dsv4.MlagenDSV4Backend, pool, kind)):
        backend.forward_metadata = SimpleNamespace(core_attn_metadata=core)
        results.append(
            backend.forward(
                *(query, query, query, layer, SimpleNamespace(forward_mode=mode)),
                compress_ratio=kind.ratio,
                save_kv_cache=False,
                attn_sink=problem.sinks(),
            )
        )

    (call,) = calls
    expected, got = results
    assert got.shape == query.shape
    assert got[:, : problem.HEADS].is_contiguous()  # no kernel copies it
    assert_near(got[:, : problem.HEADS], expected[:, : problem.HEADS])
    assert call["topk_length"].tolist() == [128, 128, 5, 1, 1]
    assert (call["extra_k_cache"] is None) == (kind.ratio == 0)
    assert not call["tile_scheduler_metadata"].have_initialized


def test_a_server_gets_the_backend(sglang: Import, dsv4: ModuleType, calls: list[Any]) -> None:
    """Layers of all kinds have one call, which is warmed up."""
    registry = sglang("sglang.srt.layers.attention.attention_registry")
    sglang("mlagen.integrations.sglang").register()

    backend = registry.ATTENTION_BACKENDS["mlagen_dsv4"](runner(**DSV4))

    assert type(backend) is dsv4.MlagenDSV4Backend
    ((variant, rows),) = dict.fromkeys(calls)
    assert (variant.kv_dtype, variant.lookup, rows) == (DType.FP8_DSV4, "two_pools", 8)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architecture": "DeepseekV3ForCausalLM"}, "for no other model, got DeepseekV3ForCausalLM"),
    (
        {"prefill_attention_backend": "dsv4"},
        "^--attention-backend: expected mlagen_dsv4 for prefill too, got dsv4",
    ),
    (
        {"dtype": torch.float16},
        "^dtype: expected torch.bfloat16 with mlagen_dsv4, got torch.float16$",
    ),
    (
        {"token_to_kv_pool": SimpleNamespace(get_swa_key_bytes_per_token=lambda: 528)},
        "^mlagen_dsv4: expected rows of 584 bytes, got 528",
    ),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_a_server_that_cannot_work_does_not_start(
    dsv4: ModuleType, fields: dict[str, Any], message: str
) -> None:
    """What no kernel serves is refused."""
    with pytest.raises(ValueError, match=message):
        dsv4.backend_of(runner(**DSV4 | fields), "mlagen_dsv4")


@pytest.mark.parametrize(
    ("kernels", "is_sm120"), [("flashmla_mega", False), ("trtllm", False), ("flashmla", True)]
)
def test_other_kernels_than_flash_mla_are_not_replaced(
    dsv4: ModuleType, kernels: str, is_sm120: bool, monkeypatch: Patch
) -> None:
    """Blackwell has kernels of its own, over caches of their own."""
    names = SimpleNamespace(kernel=SimpleNamespace(dsv4_attn_backend=kernels))
    monkeypatch.setattr(dsv4, "get_exec", lambda: names)
    monkeypatch.setattr(
        dsv4, "get_platform", lambda: SimpleNamespace(is_sm100=False, is_sm120=is_sm120)
    )
    rule = f"where SGLang calls FlashMLA, got --dsv4-attn-backend {kernels}$"
    with pytest.raises(ValueError, match=rule):
        dsv4.backend_of(runner(**DSV4), "mlagen_dsv4")


def test_v41_on_blackwell_is_refused(dsv4: ModuleType, monkeypatch: Patch) -> None:
    """There SGLang calls a kernel of its own for some batches, whatever the backend."""
    blackwell = SimpleNamespace(is_sm100=True, is_sm120=False)
    monkeypatch.setattr(dsv4, "get_platform", lambda: blackwell)
    of_v41 = DSV4 | {"architecture": "DeepseekV41ForCausalLM"}
    with pytest.raises(
        ValueError, match=r"expected compute capability 9.0 for DeepSeek-V4.1, got 10.0$"
    ):
        dsv4.backend_of(runner(**of_v41), "mlagen_dsv4")
    assert dsv4.backend_of(runner(**DSV4), "mlagen_dsv4")


def test_another_sglang_with_another_call_is_refused(dsv4: ModuleType, monkeypatch: Patch) -> None:
    """An attribute that SGLang does not call would be FlashMLA without a word."""
    other: Callable[..., Any] = lambda *_: None  # noqa: E731
    monkeypatch.setattr(dsv4.DeepseekV4AttnBackend, "_forward_attention", other)
    rule = "expected SGLang's DeepseekV4AttnBackend._flash_mla_with_kvcache, got none$"
    with pytest.raises(ValueError, match=rule):
        dsv4.backend_of(runner(**DSV4), "mlagen_dsv4")
