"""What a GPU call is remembered by, and what it hands to the kernels; seen without a GPU."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mlagen
from mlagen.api import mla_call
from mlagen.api.mla_inputs import MlaInputs
from mlagen.api.mla_request import check_request
from mlagen.errors import ArgumentError
from mlagen.runtime.loader import LoadedKernel
from mlagen.runtime.plan import MlaDecodeProblem, plan_mla_decode
from mlagen.spec.arch import Arch
from mlagen.spec.combine import CombineSplitsSpec
from mlagen.spec.dtype import DType
from mlagen.spec.kernel import KernelSpec
from mlagen.spec.mla import mla_decode_spec
from tests.cases import MlaCase

UNIFORM = MlaCase(name="", seq_lens=(70, 3), heads=16, with_sinks=True)
RAGGED = MlaCase(name="", seq_lens=(70, 3), q_lens=(1, 4), heads=16)


def inputs_of(case: MlaCase, **changes: Any) -> MlaInputs:
    """Return the inputs of a call as the entry point makes them, with some changed."""
    arguments = case.build("cpu").arguments()
    defaults = {
        "out": None,
        "lse": None,
        "return_lse": False,
        "return_lse_base": "base2",
        "cum_seq_lens_q": None,
        "max_q_len": None,
    }
    values = defaults | {name: arguments[name] for name in arguments if name in MlaInputs._fields}
    return MlaInputs(**values | changes)


CHANGES: dict[str, Callable[[MlaInputs], MlaInputs]] = {
    "query shape": lambda i: i._replace(query=i.query[:, :, :8]),
    "query dtype": lambda i: i._replace(query=i.query.half()),
    "cache shape": lambda i: i._replace(kv_cache=i.kv_cache[:, :32]),
    "cache strides": lambda i: i._replace(kv_cache=i.kv_cache.repeat(1, 2, 1)[:, :64]),
    "workspace size": lambda i: i._replace(workspace_buffer=i.workspace_buffer[1:]),
    "kv_lora_rank": lambda i: i._replace(kv_lora_rank=256),
    "qk_rope_head_dim": lambda i: i._replace(qk_rope_head_dim=32),
    "block table width": lambda i: i._replace(block_tables=i.block_tables[:, :2]),
    "lengths dtype": lambda i: i._replace(seq_lens=i.seq_lens.long()),
    "max_seq_len": lambda i: i._replace(max_seq_len=1000),
    "out given": lambda i: i._replace(out=torch.zeros(2, 1, 16, 512)),
    "bmm1_scale a tensor": lambda i: i._replace(bmm1_scale=torch.tensor(1.0)),
    "bmm2_scale an int": lambda i: i._replace(bmm2_scale=1),
    "no sinks": lambda i: i._replace(sinks=None),
    "return_lse": lambda i: i._replace(return_lse=True),
    "lse given": lambda i: i._replace(lse=torch.zeros(2, 16)),
    "return_lse_base": lambda i: i._replace(return_lse_base="basee"),
    "cum_seq_lens_q": lambda i: i._replace(cum_seq_lens_q=torch.zeros(3, dtype=torch.int32)),
    "max_q_len": lambda i: i._replace(max_q_len=2),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_a_check_or_plan_may_see_is_part_of_the_form(
    change: Callable[[MlaInputs], MlaInputs],
) -> None:
    """A call that differs in it is checked and planned anew."""
    inputs = inputs_of(UNIFORM)

    changed = mla_call._form_of(change(inputs))

    assert changed != mla_call._form_of(inputs)


def test_content_is_no_part_of_the_form() -> None:
    """Other numbers in tensors of the same layout, and another float, make the same form."""
    inputs = inputs_of(UNIFORM)
    other = inputs._replace(
        query=inputs.query.clone().zero_(), seq_lens=inputs.seq_lens + 1, bmm1_scale=0.5
    )

    assert mla_call._form_of(other) == mla_call._form_of(inputs)


def test_what_cannot_be_hashed_is_refused_with_its_name() -> None:
    """A list for a number meets the check, not the dictionary."""
    arguments = UNIFORM.build("cpu").arguments(kv_lora_rank=[512])

    with pytest.raises(ArgumentError) as caught:
        mlagen.mla.trtllm_batch_decode_with_kv_cache_mla(**arguments)

    assert str(caught.value) == "kv_lora_rank: expected an int, 0 or more, got [512]"


Launch = tuple[str, int, bool, dict[str, float]]


def launches_of(
    case: MlaCase, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> tuple[MlaInputs, mla_call.MlaCall, torch.Tensor, list[Launch]]:
    """Run a call whose launches are recorded, each with its values by name."""
    inputs = inputs_of(case, **changes)
    request = check_request(inputs)
    spec = mla_decode_spec(
        arch=Arch(90, "a"),
        query_dtype=DType.BF16,
        kv_dtype=DType.BF16,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        page_size=64,
        rows=request.q_len * request.heads,
    )
    problem = MlaDecodeProblem(
        batch=request.batch,
        q_len=request.q_len,
        heads=request.heads,
        total_rows=request.tokens * request.heads,
        longest_kv=inputs.max_seq_len,
    )
    plan = plan_mla_decode(spec, problem, 132)
    combine = CombineSplitsSpec(arch=spec.arch, dtype=DType.BF16, head_dim_vo=512)
    call = mla_call.MlaCall(
        request=request,
        plan=plan,
        decode=_loaded(spec),
        combine=_loaded(combine) if plan.splits > 1 else None,
        combine_blocks=problem.total_rows * combine.slices,
        layout=mla_call._layout(spec, request, plan),
    )
    launches: list[Launch] = []

    def record(kernel: LoadedKernel, blocks: int, enable_pdl: bool, *values: float) -> None:
        kernel.packing.pack(*values)  # what the driver would be given can be made of them
        names = [parameter.name for parameter in kernel.spec.parameters]
        named = dict(zip(names, values, strict=True))
        launches.append((kernel.spec.family, blocks, enable_pdl, named))

    monkeypatch.setattr(mla_call, "launch", record)
    out, _ = mla_call._run_on_gpu(call, inputs, enable_pdl=True)
    return inputs, call, out, launches


def _loaded(spec: KernelSpec) -> LoadedKernel:
    packing = struct.Struct("<" + "".join(parameter.code for parameter in spec.parameters))
    return LoadedKernel(spec, 0, packing, None, None)


def test_a_whole_call_launches_one_kernel_with_every_value_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pointers, strides, counts and scales are those of the arguments."""
    inputs, call, out, launches = launches_of(
        UNIFORM, monkeypatch, bmm1_scale=0.25, bmm2_scale=torch.tensor(2.0), max_seq_len=32
    )

    ((family, blocks, enable_pdl, values),) = launches

    assert (family, blocks, enable_pdl) == ("mla_decode", 2, True)
    assert isinstance(inputs.bmm2_scale, torch.Tensor)
    assert inputs.sinks is not None
    assert values == {
        "query": inputs.query.data_ptr(),
        "cache": inputs.kv_cache.data_ptr(),
        "block_tables": inputs.block_tables.data_ptr(),
        "seq_lens": inputs.seq_lens.data_ptr(),
        "cum_seq_lens_q": 0,
        "bmm1_scale_tensor": 0,
        "bmm2_scale_tensor": inputs.bmm2_scale.data_ptr(),
        "sinks": inputs.sinks.data_ptr(),
        "out": out.data_ptr(),
        "lse": 0,
        "partial_out": inputs.workspace_buffer.data_ptr(),
        "partial_lse": inputs.workspace_buffer.data_ptr(),
        "query_stride": 16 * 576,
        "query_head_stride": 576,
        "page_stride": 64 * 576 * 2,
        "token_stride": 576 * 2,
        "total_rows": 32,
        "heads": 16,
        "q_len": 1,
        "max_pages": inputs.block_tables.shape[1],
        "block_tables_stride": inputs.block_tables.stride(0),
        "num_pages": len(inputs.kv_cache),
        "row_tiles": 1,
        "splits": 1,
        "bmm1_scale": 0.25,
        "bmm2_scale": 0.0,
        "lse_factor": 1.0,
    }
    assert call.plan.workspace_bytes == 0


def test_a_split_call_leaves_partial_rows_and_then_their_lse_for_the_second_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both kernels agree on where the partial rows are, and the LSE factor reaches both."""
    lse = torch.zeros(5, 16)
    inputs, call, out, launches = launches_of(
        RAGGED,
        monkeypatch,
        max_seq_len=50_000,
        lse=lse,
        return_lse=True,
        return_lse_base="basee",
        cum_seq_lens_q=torch.tensor([0, 1, 5], dtype=torch.int32),
        max_q_len=4,
    )

    (first, _, _, decode), (second, blocks, _, combine) = launches

    assert (first, second) == ("mla_decode", "combine_splits")
    workspace = inputs.workspace_buffer.data_ptr()
    partial_rows = call.plan.splits * 5 * 16
    assert call.plan.splits > 1
    assert decode["partial_lse"] == workspace + partial_rows * 512 * 4
    assert call.plan.workspace_bytes == partial_rows * 513 * 4
    assert blocks == 5 * 16 * 4
    shared = ("partial_out", "partial_lse", "out", "lse", "splits", "total_rows", "lse_factor")
    assert {name: combine[name] for name in shared} == {name: decode[name] for name in shared}
    assert combine["lse_factor"] == math.log(2)
    assert (combine["lse"], combine["out"]) == (lse.data_ptr(), out.data_ptr())
    assert combine["heads"] == 16
