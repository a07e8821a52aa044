"""Tests of tensors without readable memory and of read-only outputs, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mlagen
from mlagen import ArgumentError
from mlagen.mla import BatchMLAPagedAttentionWrapper, CausalPaddingMask, flare_mla_decoding
from mlagen.xqa import xqa, xqa_mla
from tests.ops_cases import Tensors, gqa, mla, parts, planned


class Holder(torch.Tensor):
    """A tensor subclass without memory of its own elements."""

    @staticmethod
    def __new__(cls: type[Holder], tensor: torch.Tensor) -> Holder:  # noqa: PYI034
        """Return a tensor without memory."""
        made: Holder = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )
        return made

    @classmethod  # the stub of torch takes `func` for self
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        """Reject all ops."""
        raise NotImplementedError(str(func))


class Harmless(torch.Tensor):
    """A tensor subclass with ordinary memory."""


def without_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose storage is freed."""
    freed = tensor.clone()
    freed.untyped_storage().resize_(0)
    return freed


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a FakeTensor": lambda t: FakeTensorMode().from_tensor(t),
    "a Holder": Holder,
    "a zero tensor": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
    "a functional tensor": torch._to_functional_tensor,
    "negative bit": torch._neg_view,
    "without storage": without_storage,
}


def _flare(of: Tensors, **other: Any) -> Any:
    given = {"q": of.query, "blocks": of.cache, "table": of.table, "cached": of.lengths - 1}
    given |= {"new": of.ones, "valid": of.lengths, "output": None} | other
    paged = mlagen.PagedKVCache(given["blocks"], given["table"], given["cached"])
    mask = CausalPaddingMask(given["valid"])
    q, output = given["q"], given["output"]
    return flare_mla_decoding(q, paged, mask, given["new"], scale=1.0, output=output)


def _xqa(of: Tensors, **other: Any) -> None:
    query = of.gqa_query.unsqueeze(1)
    given = {"q": query, "k_cache": of.keys, "v_cache": of.values, "page_table": of.table}
    given |= {"seq_lens": of.lengths, "output": torch.empty_like(query)}
    given |= {"workspace_buffer": of.workspace, "semaphores": of.ones}
    xqa(**given | other, num_kv_heads=2, page_size=16)


def _xqa_mla(of: Tensors, **other: Any) -> None:
    given = {"q": of.query, "k_cache": of.cache, "v_cache": of.cache, "page_table": of.table}
    given |= {"seq_lens": of.lengths, "output": of.query[..., :512].contiguous()}
    given |= {"workspace_buffer": of.workspace, "semaphores": of.ones}
    xqa_mla(**given | other, page_size=64)


def _planless(of: Tensors, **other: Any) -> Any:
    names = ("q_nope", "q_pe", "ckv_cache", "kpe_cache")
    given = dict(zip(names, (*parts(of.query[:, 0]), *parts(of.cache)), strict=True))
    given |= {"kv_len": of.lengths, "page_table": of.table}
    return BatchMLAPagedAttentionWrapper(of.workspace, backend="cutlass").run(**given | other)


def _trtllm(of: Tensors, **other: Any) -> Any:
    names = ("query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens")
    tensors = (of.query, of.cache, of.workspace, of.table, of.lengths)
    given = dict(zip(names, tensors, strict=True)) | other
    return mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(
        **given, qk_nope_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, max_seq_len=64
    )


def _plan(of: Tensors, **other: Any) -> None:
    ends = torch.arange(5, dtype=torch.int32, device=of.device)
    given = {"qo_indptr": ends, "kv_indptr": ends * 4, "kv_indices": of.table.flatten()}
    given |= {"kv_len_arr": of.lengths} | other
    sizes = (16, 512, 64, 64, True, 1.0, torch.bfloat16, torch.bfloat16)
    call: tuple[Any, ...] = (*given.values(), *sizes)
    BatchMLAPagedAttentionWrapper(of.workspace).plan(*call)


# Each entry point, and its tensor arguments.
ENTRIES: dict[str, tuple[Callable[..., Any], dict[str, Callable[[Tensors], torch.Tensor]]]] = {
    "trtllm": (
        _trtllm,
        {
            "query": lambda of: of.query,
            "kv_cache": lambda of: of.cache,
            "workspace_buffer": lambda of: of.workspace,
            "block_tables": lambda of: of.table,
            "seq_lens": lambda of: of.lengths,
            "out": lambda of: of.query[..., :512].contiguous(),
            "sinks": lambda of: of.sinks,
            "bmm1_scale": lambda of: of.scale,
            "bmm2_scale": lambda of: of.scale,
        },
    ),
    "grouped queries": (
        lambda of, query=None, **other: gqa(of, of.gqa_query if query is None else query, **other),
        {
            "query": lambda of: of.gqa_query,
            "out": lambda of: of.gqa_query.clone(),
            "sinks": lambda of: of.sinks,
            "bmm1_scale": lambda of: of.scale,
        },
    ),
    "xqa": (
        _xqa,
        {
            "q": lambda of: of.gqa_query.unsqueeze(1),
            "k_cache": lambda of: of.keys,
            "v_cache": lambda of: of.values,
            "page_table": lambda of: of.table,
            "seq_lens": lambda of: of.lengths,
            "output": lambda of: of.gqa_query.unsqueeze(1).clone(),
            "workspace_buffer": lambda of: of.workspace,
        },
    ),
    "xqa_mla": (
        _xqa_mla,
        {
            "q": lambda of: of.query,
            "k_cache": lambda of: of.cache,
            "v_cache": lambda of: of.cache,
            "page_table": lambda of: of.table,
            "output": lambda of: of.query[..., :512].contiguous(),
        },
    ),
    "wrapper": (
        _planless,
        {
            "q_nope": lambda of: parts(of.query[:, 0])[0],
            "kpe_cache": lambda of: parts(of.cache)[1],
            "kv_len": lambda of: of.lengths,
            "page_table": lambda of: of.table,
            "out": lambda of: of.query[:, 0, :, :512].contiguous(),
        },
    ),
    "plan": (
        _plan,
        {
            "qo_indptr": lambda of: torch.arange(5, dtype=torch.int32, device=of.device),
            "kv_indices": lambda of: of.table.flatten(),
            "kv_len_arr": lambda of: of.lengths,
        },
    ),
    "flare": (
        _flare,
        {
            "q": lambda of: of.query,
            "blocks": lambda of: of.cache,
            "table": lambda of: of.table,
            "cached": lambda of: of.lengths - 1,
            "new": lambda of: of.ones,
            "valid": lambda of: of.lengths,
            "output": lambda of: of.query[..., :512].contiguous(),
        },
    ),
}
# Argument names of flare_mla_decoding.
NAMES = {
    "blocks": "k.blocks",
    "table": "k.block_table",
    "cached": "k.cache_lengths",
    "new": "valid_length",
    "valid": "mask.valid_lengths",
}
PLACES = [(entry, argument) for entry, (_, arguments) in ENTRIES.items() for argument in arguments]


class MemorySemantics:
    """Device-independent tests; a subclass sets the device."""

    device: str

    @pytest.fixture
    def of(self) -> Tensors:
        """Return the tensors of the calls."""
        return Tensors(self.device)

    @pytest.mark.parametrize(("entry", "argument"), PLACES)
    def test_a_tensor_without_memory_is_rejected_by_name(
        self, of: Tensors, entry: str, argument: str
    ) -> None:
        """Each kind is rejected in one line for any argument, also after a valid call."""
        call, arguments = ENTRIES[entry]
        tensor = arguments[argument](of)
        call(of, **{argument: tensor})
        for kind, made in KINDS.items():
            with pytest.raises(ArgumentError) as caught:
                call(of, **{argument: made(tensor)})

            message = str(caught.value)
            assert message.startswith(f"{NAMES.get(argument, argument)}: expected a dense tensor")
            assert kind in message
            assert "\n" not in message

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("entry", ["trtllm", "xqa_mla", "flare", "wrapper"])
    def test_unsupported_layouts_are_rejected_by_name(self, of: Tensors, entry: str) -> None:
        """Sparse, nested and batched tensors, without strides or an address, are rejected."""
        call, arguments = ENTRIES[entry]
        name = next(iter(arguments))
        query = arguments[name](of)
        call(of, **{name: query})
        for kind, tensor in {
            "sparse": query.to_sparse(),
            "nested": torch.nested.nested_tensor(list(query)),
        }.items():
            with pytest.raises(ArgumentError, match=f"^{name}: expected .* got a {kind} tensor"):
                call(of, **{name: tensor})

        with pytest.raises(ArgumentError, match=f"^{name}: expected .* of vmap"):
            torch.func.vmap(lambda one: call(of, **{name: one}))(query[None])

    def test_ordinary_subclasses_are_accepted(self, of: Tensors) -> None:
        """Parameters, buffers and subclasses with memory give the same results."""
        expected = mla(of, of.query)
        for query in (
            torch.nn.Parameter(of.query, requires_grad=False),
            torch.nn.Buffer(of.query),
            of.query.as_subclass(Harmless),
        ):
            assert torch.equal(torch.Tensor(mla(of, query)), torch.Tensor(expected))

    @pytest.mark.parametrize("entry", ["mla", "gqa", "lse", "wrapper", "plan", "plan, gaps"])
    def test_an_inference_output_is_rejected_before_it_is_written(
        self, of: Tensors, entry: str
    ) -> None:
        """An output made under inference_mode keeps its elements when passed outside."""
        with torch.inference_mode():
            wide = torch.zeros_like(of.query[..., :512])
            grouped = torch.zeros_like(of.gqa_query)
            lse = torch.zeros(4, 16, device=self.device)
            gaps = torch.zeros_like(of.query)[:, 0, :, :512]
        plain = torch.zeros_like(wide)
        calls: dict[str, Callable[[], Any]] = {
            "mla": lambda: mla(of, of.query, out=wide),
            "gqa": lambda: gqa(of, of.gqa_query, out=grouped),
            "lse": lambda: mla(of, of.query, out=plain, lse=lse, return_lse=True),
            "wrapper": lambda: _planless(of, out=wide[:, 0]),
            "plan": lambda: _run_into(of, wide[:, 0]),
            "plan, gaps": lambda: _run_into(of, gaps),
        }

        with pytest.raises(ArgumentError, match="expected a tensor that may be written outside"):
            calls[entry]()

        assert not any(tensor.any() for tensor in (wide, grouped, lse, gaps, plain))
        with torch.inference_mode():
            assert torch.equal(mla(of, of.query, out=wide), mla(of, of.query))

    def test_an_output_that_autograd_tracks_is_rejected(self, of: Tensors) -> None:
        """Leaves that require grad, their views, and untrackable views are rejected."""
        leaf = torch.zeros_like(of.query[..., :512]).requires_grad_()
        with torch.no_grad():
            view = torch.zeros(2, *leaf.shape, dtype=leaf.dtype, device=self.device)[0]
        trained = of.query.clone().requires_grad_()
        for query, out in ((of.query, leaf), (of.query, leaf[:]), (trained, view)):
            with pytest.raises(ArgumentError, match=r"^out: expected .* written in place, got"):
                mla(of, query, out=out)

            assert not out.any()

    def test_a_self_overlapping_output_is_rejected(self, of: Tensors) -> None:
        """Gaps are allowed, expanded elements are not."""
        out = torch.zeros(1, 1, 512, dtype=torch.bfloat16, device=self.device).expand(4, 16, 512)

        with pytest.raises(ArgumentError, match=r"^out: expected elements that do not overlap"):
            _run_into(of, out)

        assert not out.any()


def _run_into(of: Tensors, out: torch.Tensor) -> None:
    planned(of).run(*parts(of.query[:, 0]), *parts(of.cache), out=out)
