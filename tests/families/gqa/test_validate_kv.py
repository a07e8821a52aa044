"""Invalid caches and scales of grouped-query decode, message by message."""

from __future__ import annotations

import pytest
import torch

import mlagen.decode
from mlagen.errors import UnsupportedError
from tests.families.gqa_rejections import (
    E4M3_KV,
    NVFP4,
    NVFP4_STACKED,
    SINGLE,
    STACKED,
    Rejection,
    check,
    check_xqa,
    rejections,
)
from tests.families.rejections import padded, strided
from tests.problems.gqa import GqaCase, GqaProblem


def key(problem: GqaProblem) -> torch.Tensor:
    """Return the keys of a problem."""
    return problem.store.key


def value(problem: GqaProblem) -> torch.Tensor:
    """Return the values of a problem."""
    return problem.store.value


DTYPES_OF_A_CACHE = (
    "torch.bfloat16 or torch.float8_e4m3fn or torch.int8 or torch.uint8 "
    "(the first is that of query)"
)


@rejections(
    Rejection(
        "none",
        lambda _: {"kv_cache": None},
        "kv_cache: expected a torch.Tensor, got NoneType",
    ),
    Rejection(
        "three tensors",
        lambda p: {"kv_cache": (key(p), value(p), value(p))},
        "kv_cache: expected a tensor, or two in a tuple or list, got 3 of them",
    ),
    Rejection(
        "keys without values",
        lambda p: {"kv_cache": (key(p), None)},
        "kv_cache[1]: expected a torch.Tensor, got NoneType",
    ),
    Rejection(
        "another device",
        lambda p: {"kv_cache": [key(p), value(p).to("meta")]},
        "kv_cache[1].device: expected cpu (of query), got meta",
    ),
    Rejection(
        "three dimensions",
        lambda p: {"kv_cache": [key(p)[0], value(p)]},
        "kv_cache[0].ndim: expected 4, got 3",
    ),
    Rejection(
        "one tensor of four dimensions",
        lambda p: {"kv_cache": key(p)},
        "kv_cache.ndim: expected 5, got 4",
    ),
    Rejection(
        "three in one tensor",
        lambda p: {"kv_cache": torch.stack([key(p)] * 3, dim=1)},
        "kv_cache.shape[1]: expected 2, or 1 where K is V, got 3",
    ),
    Rejection(
        "another 16-bit dtype than the query",
        lambda p: {"kv_cache": (key(p).half(), value(p).half())},
        f"kv_cache[0].dtype: expected {DTYPES_OF_A_CACHE}, got torch.float16",
    ),
    Rejection(
        "another 8-bit dtype",
        lambda p: {"kv_cache": torch.stack([key(p), value(p)], dim=1).to(torch.float8_e5m2)},
        f"kv_cache.dtype: expected {DTYPES_OF_A_CACHE}, got torch.float8_e5m2",
    ),
    Rejection(
        "keys and values of two dtypes",
        lambda p: {"kv_cache": (key(p), value(p).to(torch.int8))},
        "kv_cache[1].dtype: expected torch.bfloat16 (dtype of kv_cache[0]), got torch.int8",
    ),
    Rejection(
        "keys and values of two shapes",
        lambda p: {"kv_cache": (key(p), value(p)[1:])},
        "kv_cache[1].shape: expected [10, 16, 2, 128] (shape of kv_cache[0]), got [9, 16, 2, 128]",
    ),
    Rejection(
        "gaps in a token",
        lambda p: {"kv_cache": (key(p), strided(value(p)))},
        "kv_cache[1].stride(-1): expected 1, got 2",
    ),
    Rejection(
        "a head stride that is no multiple of 16 bytes",
        lambda p: {"kv_cache": (padded(key(p), 1), value(p))},
        "kv_cache[0].stride(1): expected a multiple of 8, got 258",
    ),
    Rejection(
        "no kv heads",
        lambda p: {"kv_cache": (key(p)[:, :, :0], value(p)[:, :, :0])},
        "kv_cache[0]: expected 1 head or more, got 0",
    ),
    Rejection(
        "pages without tokens",
        lambda p: {"kv_cache": (key(p)[:, :0], value(p)[:, :0])},
        "kv_cache[0]: expected 1 token or more in a page, got 0",
    ),
    Rejection(
        "an unknown layout",
        lambda _: {"kv_layout": "nhd"},
        "kv_layout: expected one of NHD, HND, got 'nhd'",
    ),
    Rejection(
        "a layout that is no text",
        lambda _: {"kv_layout": ["NHD"]},
        "kv_layout: expected one of NHD, HND, got ['NHD']",
    ),
)
def test_kv_cache(rejection: Rejection) -> None:
    """Layout, dtype, device and strides of the cache are checked."""
    check(rejection)


@rejections(
    Rejection(
        "none for NVFP4",
        lambda _: {"kv_cache_sf": None},
        "kv_cache_sf: expected a torch.Tensor, got NoneType",
        NVFP4,
    ),
    Rejection(
        "some for 16 bits",
        lambda p: {"kv_cache_sf": (key(p), value(p))},
        "kv_cache_sf[0]: expected None for a cache of torch.bfloat16, got a tensor",
    ),
    Rejection(
        "some for e4m3",
        lambda _: {"kv_cache_sf": torch.zeros(10, 2, 16, 2, 8)},
        "kv_cache_sf: expected None for a cache of torch.float8_e4m3fn, got a tensor",
        E4M3_KV,
    ),
    Rejection(
        "one tensor",
        lambda p: {"kv_cache_sf": [p.store.key_scale]},
        "kv_cache_sf: expected a tensor, or two in a tuple or list, got 1 of them",
        NVFP4,
    ),
    Rejection(
        "another dtype",
        lambda p: {"kv_cache_sf": (p.store.key_scale.half(), p.store.value_scale.half())},
        "kv_cache_sf[0].dtype: expected torch.uint8 or torch.float8_e4m3fn, got torch.float16",
        NVFP4,
    ),
    Rejection(
        "too few scales",
        lambda p: {"kv_cache_sf": (p.store.key_scale, p.store.value_scale[..., :4])},
        "kv_cache_sf[1].shape: expected [10, 16, 2, 8] (one for 16 elements of the cache), "
        "got [10, 16, 2, 4]",
        NVFP4,
    ),
    Rejection(
        "scales in another layout",
        lambda p: {
            "kv_cache": [key(p).transpose(1, 2), value(p).transpose(1, 2)],
            "kv_layout": "HND",
        },
        "kv_cache_sf[0].shape: expected [10, 2, 16, 8] (one for 16 elements of the cache), "
        "got [10, 16, 2, 8]",
        NVFP4,
    ),
    Rejection(
        "scales with gaps",
        lambda p: {"kv_cache_sf": (strided(p.store.key_scale), p.store.value_scale)},
        "kv_cache_sf[0].stride(-1): expected 1, got 2",
        NVFP4,
    ),
    Rejection(
        "scales on another device",
        lambda _: {"kv_cache_sf": torch.zeros(10, 2, 16, 2, 8, device="meta")},
        "kv_cache_sf.device: expected cpu (of query), got meta",
        NVFP4_STACKED,
    ),
    Rejection(
        "rows of bytes for elements",
        lambda p: {"query": p.query[..., :64]},
        "kv_cache[0].shape[-1]: expected 32 (head_dim of query / 2), got 64",
        NVFP4,
    ),
)
def test_scales_of_nvfp4(rejection: Rejection) -> None:
    """An NVFP4 cache has a scale for 16 elements, and no other cache has scales."""
    check(rejection)


@rejections(
    Rejection(
        "no values",
        lambda _: {"v_cache": None},
        "v_cache: expected a torch.Tensor, got NoneType",
    ),
    Rejection(
        "keys and values in one tensor",
        lambda p: {"k_cache": torch.stack([key(p), value(p)], dim=1)},
        "k_cache.ndim: expected 4, got 5",
    ),
    Rejection(
        "values of another dtype",
        lambda p: {"v_cache": value(p).half()},
        "v_cache.dtype: expected torch.bfloat16 (dtype of k_cache), got torch.float16",
    ),
    Rejection(
        "scales of keys only",
        lambda _: {"v_sf_cache": None},
        "v_sf_cache: expected a torch.Tensor, got NoneType",
        NVFP4,
    ),
    Rejection(
        "scales of values only",
        lambda p: {"v_sf_cache": value(p)},
        "k_sf_cache: expected a torch.Tensor, got NoneType",
    ),
    Rejection(
        "no scales for NVFP4",
        lambda _: {"k_sf_cache": None, "v_sf_cache": None},
        "k_sf_cache: expected a torch.Tensor, got NoneType",
        NVFP4,
    ),
)
def test_caches_of_xqa(rejection: Rejection) -> None:
    """Keys, values and their scales are separate tensors of four dimensions."""
    check_xqa(rejection)


@pytest.mark.parametrize("head_dim", [8, 24, 272, 400, 528])
def test_head_dims_without_a_kernel_are_rejected_on_the_cpu_too(head_dim: int) -> None:
    """The CPU backend rejects what no kernel supports; the message lists supported values."""
    wide = GqaCase(name="", seq_lens=(70, 3), head_dim=528).build("cpu")
    keys, values = (torch.zeros(10, 16, 2, head_dim, dtype=torch.bfloat16) for _ in range(2))
    query = torch.zeros(2, 8, head_dim, dtype=torch.bfloat16)

    with pytest.raises(UnsupportedError) as caught:
        mlagen.decode.xqa_batch_decode_with_kv_cache(
            **wide.arguments(query=query, kv_cache=(keys, values))
        )

    assert str(caught.value) == (
        f"no GQA decode kernel for head_dim {head_dim}; supported: multiples of 16 up to 256, "
        "and 512"
    )


def test_views_of_one_tensor_are_two_caches() -> None:
    """Keys and values may be views of one buffer."""
    problem = STACKED.build("cpu")
    both = problem.arguments()["kv_cache"]

    out = mlagen.decode.xqa_batch_decode_with_kv_cache(
        **problem.arguments(kv_cache=(both[:, 0], both[:, 1]))
    )

    problem.check(out)


def test_a_device_without_a_backend_is_rejected() -> None:
    """Tensors are on a GPU or on the CPU."""
    arguments = SINGLE.build("cpu").arguments()
    for name in ("query", "workspace_buffer", "block_tables", "seq_lens"):
        arguments[name] = arguments[name].to("meta")
    arguments["kv_cache"] = [cache.to("meta") for cache in arguments["kv_cache"]]

    with pytest.raises(UnsupportedError) as caught:
        mlagen.decode.xqa_batch_decode_with_kv_cache(**arguments)

    assert str(caught.value) == "query.device: expected cuda or cpu, got meta"
