"""Sparse MLA over the two pools of DeepSeek-V4 and V4.1, for every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlagen.families.mla import two_pools
from mlagen.mla import trtllm_batch_decode_sparse_mla_dsv4
from mlagen.spec import dtype as dtypes
from mlagen.spec.dtype import DType
from mlagen.spec.mla import variant
from mlagen.spec.mla.variant import TWO_POOLS, MlaSupport
from mlagen.spec.rows import RowFormat
from tests.problems import dsv4_rows
from tests.problems.dsv4 import Dsv4Case, Dsv4Problem, decode_dsv4
from tests.problems.dsv4_cases import CASES, case
from tests.problems.dsv4_rows import Pages, decoded, empty_pool, random_rows

USUAL = case("usual", seq_lens=(40, 3, 0, 128), extra_lens=(9, 50, 0, 128), sinks="random")
# Keywords with values that change no result.
UNUSED: dict[str, tuple[Any, ...]] = {
    "backend": ("auto", "sparse"),
    "kv_layout": ("HND", "NHD"),  # of pools with three dimensions
    "cum_seq_lens_q": (torch.zeros(5, dtype=torch.int32),),
    "max_q_len": (0, 1, 7),
    "enable_pdl": (True, False),
    "multi_ctas_kv_counter_buffer": (torch.zeros(3, dtype=torch.uint8),),
    "hca_is_causal": (True,),
    "hca_use_persistent": (False,),
    "sparse_topk_lens_offset": (0,),
}


def _call(problem: Dsv4Problem, **changes: Any) -> Any:
    return trtllm_batch_decode_sparse_mla_dsv4(**problem.arguments(**changes))


class TestDsv4:
    """Rules of ``trtllm_batch_decode_sparse_mla_dsv4``, on the device of the fixture."""

    def test_the_order_of_a_list_and_what_is_past_it(self, device: str) -> None:
        """A permuted list gives the same numbers, and other padding the same bits."""
        problem = USUAL.build(device)
        out, lse = decode_dsv4(problem)
        padded, permuted = problem.block_tables.clone(), problem.block_tables.clone()
        for token, n in enumerate(USUAL.seq_lens):
            padded[token, n:] = torch.arange(128 - n) * 2 - 5
            permuted[token, :n] = permuted[token, :n].flip(0)

        other, other_lse = decode_dsv4(problem, sparse_indices=padded)

        assert torch.equal(out, other)
        assert torch.equal(lse, other_lse)
        problem.check(*decode_dsv4(problem, sparse_indices=permuted))

    def test_given_outputs(self, device: str) -> None:
        """Outputs with and without gaps get the same numbers, and nothing else is written."""
        problem = USUAL.build(device)
        out, lse = decode_dsv4(problem, return_lse_base="basee")
        problem.check(out, lse, natural=True)
        tokens, heads = lse.shape
        wide = torch.full((tokens, 2 * heads, 1024), 7.0, dtype=torch.bfloat16, device=device)
        wide_lse = torch.full((tokens, heads + 3), 7.0, device=device)
        for target, target_lse in (
            (torch.empty_like(out), torch.empty_like(lse)),
            (wide[:, :heads, 512:], wide_lse[:, :heads]),
        ):
            for _ in range(2):  # planned, and with the cached launcher
                target.fill_(3.0)
                given = {"out": target, "lse": target_lse, "return_lse_base": "basee"}

                results = decode_dsv4(problem, **given)

                assert results[0] is target
                assert results[1] is target_lse
                assert torch.equal(target, out)
                assert torch.equal(target_lse, lse)
                assert _call(problem, out=target) is target
        assert (wide[:, heads:] == 7.0).all()
        assert (wide[..., :512] == 7.0).all()
        assert (wide_lse[:, heads:] == 7.0).all()

    def test_a_compressed_pool_without_indices_is_not_read(self, device: str) -> None:
        """Whatever it is."""
        problem = Dsv4Case(seq_lens=(40, 3)).build(device)
        expected = _call(problem)
        for pool in (problem.swa_kv_cache, torch.zeros(3, device=device)):
            assert torch.equal(_call(problem, compressed_kv_cache=pool), expected)

    @pytest.mark.parametrize("name", ["swa_kv_cache", "compressed_kv_cache"])
    def test_a_pool_without_pages(self, name: str, device: str) -> None:
        """No index names a token of it."""
        problem = USUAL.build(device)
        lists = {"swa_kv_cache": "sparse_indices", "compressed_kv_cache": "extra_sparse_indices"}
        given = problem.arguments()
        nothing = torch.full_like(given[lists[name]], -1)

        results = decode_dsv4(problem, **{name: given[name][:0]})

        expected = decode_dsv4(problem, **{lists[name]: nothing})
        assert all(map(torch.equal, results, expected))

    @pytest.mark.parametrize("q_len", [0, 2])
    def test_no_query_tokens(self, q_len: int, device: str) -> None:
        """Outputs are empty."""
        problem = Dsv4Case(seq_lens=(4, 4), extra_lens=(1, 1), q_len=q_len).build(device)
        names = ("query", "sparse_indices", "swa_topk_lens", "extra_sparse_indices")
        arguments = problem.arguments(return_lse=True)
        for name in (*names, "extra_sparse_topk_lens"):
            arguments[name] = arguments[name][:0]

        out, lse = trtllm_batch_decode_sparse_mla_dsv4(**arguments)

        assert out.shape == (0, *problem.query.shape[1:])
        assert lse.shape == out.shape[:-1]

    @pytest.mark.parametrize(
        ("keyword", "value"), [(name, value) for name, each in UNUSED.items() for value in each]
    )
    def test_a_keyword_changes_no_result(self, keyword: str, value: Any, device: str) -> None:
        """Neither a default nor a keyword of another backend does."""
        problem = USUAL.build(device)
        if isinstance(value, torch.Tensor):
            value = value.to(device)

        out, lse = decode_dsv4(problem, **{keyword: value})

        assert torch.equal(out, decode_dsv4(problem)[0])
        problem.check(out, lse)

    def test_other_forms_of_arguments(self, device: str) -> None:
        """Scales in tensors, sinks in a list, lists of uint32 and lengths [batch, q_len]."""
        problem = case("", seq_lens=(40, 3, 7, 0), extra_lens=(1, 2, 3, 4), q_len=2).build(device)
        factor = torch.full((1,), problem.case.score_scale, device=device)
        sinks = torch.linspace(-3, 3, problem.case.heads, device=device)
        expected = _call(problem, sinks=sinks)
        given = problem.arguments(
            sinks=[sinks], bmm1_scale=factor, bmm2_scale=torch.ones_like(factor)
        )
        for name in ("sparse_indices", "swa_topk_lens", "extra_sparse_indices"):
            given[name] = given[name].view(torch.uint32)
        given["swa_topk_lens"] = given["swa_topk_lens"].flatten()

        assert torch.equal(_call(problem, **given), expected)


class TestDsv41:
    """Rules of the rows of DeepSeek-V4.1, on the device of the fixture."""

    def test_numbers_of_both_rows(self, device: str) -> None:
        """Numbers that rows of 584 and of 528 bytes can have give the same result in both."""
        generator = torch.Generator().manual_seed(0)
        data, _ = random_rows(dsv4_rows.V41, 64, "alike", generator)
        scales = torch.randint(118, 122, (64, 8), generator=generator).to(torch.uint8)
        last = decoded(dsv4_rows.V41, data, scales.repeat_interleave(2, dim=1))[:, 448:]
        rope = last.to(torch.bfloat16).view(torch.uint8)
        rows = {
            "fp8": (torch.cat([data[:, :448], rope], dim=1), scales[:, :7]),
            "fp8_dsv41": (data, scales.repeat_interleave(2, dim=1)),
        }
        problem = Dsv4Case(seq_lens=(64, 10), swa=Pages(count=1)).build(device)
        lists = torch.arange(128, dtype=torch.int32, device=device).expand(2, 128).contiguous()
        outs = []
        for name, (own, own_scales) in rows.items():
            pool = empty_pool(dsv4_rows.FORMATS[name][0], Pages(count=1), is_inline=False)
            for entry in range(64):
                pool.store(entry, own[entry], own_scales[entry])
            given = {"swa_kv_cache": pool.view(device, "3-D"), "sparse_indices": lists}
            outs.append(_call(problem, kv_cache_format=name, **given).float())

        assert (outs[0].abs() > 0).any()
        assert (outs[0] - outs[1]).abs().max() <= 2.0**-7 * outs[0].abs().max()

    @pytest.mark.parametrize("suffix", ["", "_fp4_ca"])
    def test_both_arrangements_give_the_same_bits(self, suffix: str, device: str) -> None:
        """Rows with inline scales and rows whose scales are behind the page."""
        facts: dict[str, Any] = {
            "swa": Pages(page_size=16),
            "extra": Pages(page_size=48, padding=16),
            "sinks": "random",
        }
        results = [
            decode_dsv4(
                case("", kv_cache_format=f"fp8_dsv41{place}{suffix}", **facts).build(device)
            )
            for place in ("", "_inline")
        ]

        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_edge_cases(case: Dsv4Case) -> None:
    """Every case gives the float64 result on the CPU, and what no list names has no effect."""
    problem = case.build("cpu")

    problem.check(*decode_dsv4(problem))


def test_nan_stays_in_its_query_tokens() -> None:
    """A NaN in a token is in all numbers of the query tokens that list it, and in no others."""
    for what, is_of_heads in (("code", False), ("scale", False), ("rope", False), ("head", True)):
        problem = case("", seq_lens=(30, 9, 0), extra_lens=(0, 3, 5), nonfinite=what).build("cpu")
        out, lse = decode_dsv4(problem)
        has_nan = torch.stack([rows.isnan().any() for rows in problem.rows])[:, None]
        if is_of_heads:
            has_nan = problem.query.isnan().any(dim=-1)
        assert has_nan.any()
        assert not has_nan.all()
        assert torch.equal(lse.isnan(), has_nan.expand_as(lse))
        assert torch.equal(out.isnan(), has_nan[..., None].expand_as(out))


def test_a_format_is_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of 384 bytes, of e2m1 and bf16, are read and checked once they are described."""
    row = RowFormat(
        scaled_elements=448,
        group=16,
        code="e2m1",
        scale_code="e4m3",
        scale_place="page",
        scale_padding=4,
        is_named=True,
    )
    support = MlaSupport(
        query_dtype=DType.BF16, kv_dtype=DType.NVFP4, head_dims=((512, 0),), modes=(TWO_POOLS,)
    )
    for formats in (dtypes.ROW_FORMATS, dtypes.EXTRA_ROW_FORMATS):
        monkeypatch.setitem(formats, DType.NVFP4, row)
    monkeypatch.setattr(variant, "SUPPORTED", (*variant.SUPPORTED, support))
    monkeypatch.setitem(two_pools.FORMATS, "nvfp4", DType.NVFP4)
    monkeypatch.setitem(dsv4_rows.FORMATS, "nvfp4", (dsv4_rows.NVFP4, dsv4_rows.NVFP4))
    for each in (
        case("", kv_cache_format="nvfp4", sinks="random"),
        case("", kv_cache_format="nvfp4", extra=Pages(page_size=2, padding=16), extra_lens=(3, 9)),
    ):
        problem = each.build("cpu")

        problem.check(*decode_dsv4(problem))

    wrong = problem.swa_kv_cache[..., :352]
    with pytest.raises(ValueError, match=r"swa_kv_cache.shape\[-1\]: expected 384 .*, got 352"):
        _call(problem, swa_kv_cache=wrong)
