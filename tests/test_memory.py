"""Tensors without readable memory, and read-only outputs, are rejected on every device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from mlagen import ArgumentError
from mlagen.cascade import merge_state, merge_state_in_place, merge_states
from mlagen.distributed import local_seq_lens
from mlagen.families.common.tensor_guard import make_guard
from mlagen.mla import CausalPaddingMask, MaterializedMask, NullMask, OrMask
from tests.families.entry_points import ROWS, make_entry_point
from tests.ops_cases import (
    Tensors,
    flare,
    gqa,
    mla,
    parts,
    planless,
    planned,
    planned_gqa,
    trtllm_gqa,
    xqa_mla_of,
)
from tests.problems.entry_points import ENTRY_POINTS


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


def lazy(kind: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter or a buffer of a lazy module before its first call."""
    made: torch.Tensor = kind(requires_grad=False, device=tensor.device, dtype=tensor.dtype)
    return made


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a FakeTensor": lambda t: FakeTensorMode().from_tensor(t),
    "a Holder": Holder,
    "a zero tensor": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
    "a functional tensor": torch._to_functional_tensor,
    "negative bit": torch._neg_view,
    "without storage": without_storage,
    "an uninitialized UninitializedParameter": partial(lazy, UninitializedParameter),
    "an uninitialized UninitializedBuffer": partial(lazy, UninitializedBuffer),
}


# Each entry point with its tensor arguments, by the name of its test.
ENTRIES = {
    "trtllm": "query kv_cache workspace_buffer block_tables seq_lens out sinks bmm1_scale "
    "bmm2_scale",
    "grouped queries": "query out sinks bmm1_scale",
    "xqa": "q k_cache v_cache page_table seq_lens output workspace_buffer",
    "xqa_mla": "q k_cache v_cache page_table output",
    "wrapper": "q_nope kpe_cache kv_len page_table out",
    "plan": "qo_indptr kv_indices kv_len_arr",
    "flare": "q blocks table cached new valid output",
}
PLACES = [(entry, argument) for entry, names in ENTRIES.items() for argument in names.split()]
ADAPTERS = {"grouped queries": "xqa_batch", "wrapper": "planless", "plan": "wrapper"}
# The arguments of flare_mla_decoding, and their names in messages.
FLARE = {
    "blocks": ("blocks", "k.blocks"),
    "table": ("block_table", "k.block_table"),
    "cached": ("cache_lengths", "k.cache_lengths"),
    "new": ("valid_length", "valid_length"),
    "valid": ("mask", "mask.valid_lengths"),
}


class ValidCall:
    """A call of an entry point with all its tensors."""

    def __init__(self, entry: str, device: str) -> None:
        """Build the arguments of a small problem."""
        adapter = ENTRY_POINTS[ADAPTERS.get(entry, entry)]
        sinks: dict[str, Any] = {"trtllm": {"with_sinks": True}, "grouped queries": {"sink": 1.0}}
        problem = adapter.build(device, seq_lens=(40, 7), **sinks.get(entry, {}))
        given = adapter.arguments(problem)
        if "out" in adapter.names:
            given[adapter.names["out"]] = adapter.new_out(problem, 0.0)
        scales = {name: torch.ones(1, device=device) for name in given if name.startswith("bmm")}
        self.function = adapter.function
        self.arguments = given | scales
        self.lengths = problem.seq_lens

    def tensor(self, argument: str) -> torch.Tensor:
        """Return the valid tensor of an argument."""
        name, _ = FLARE.get(argument, (argument, ""))
        found = self.arguments.get("plan", {}).get(name, self.arguments.get(name))
        return found if isinstance(found, torch.Tensor) else self.lengths

    def __call__(self, argument: str, tensor: torch.Tensor) -> Any:
        """Call with another tensor for an argument."""
        name, _ = FLARE.get(argument, (argument, ""))
        value: Any = CausalPaddingMask(tensor) if argument == "valid" else tensor
        given = self.arguments | {name: value}
        if "plan" in given:
            given["plan"] = dict(given["plan"])  # which the adapter changes
        return self.function(**given)


# Arguments that an entry point uses before the check of its call: a valid tensor, and the call.
USES: dict[str, tuple[Callable[[Tensors], torch.Tensor], Callable[[Tensors, Any], Any]]] = {
    "trtllm: out": (
        lambda of: of.query[..., :512].clone(),
        lambda of, t: mla_of_fp16(of, of.query, out=t),
    ),
    "trtllm: sinks": (lambda of: of.sinks.half(), lambda of, t: mla(of, of.query, sinks=t)),
    "xqa_batch: sinks": (lambda of: of.sinks.half(), lambda of, t: gqa(of, of.gqa_query, sinks=t)),
    "trtllm_gqa: bmm1_scale_log2": (
        lambda of: of.scale.clone(),
        lambda of, t: trtllm_gqa(of, of.gqa_query, q_len_per_req=1, bmm1_scale_log2=t),
    ),
    "xqa_mla: seq_lens": (
        lambda of: of.lengths[:, None],
        lambda of, t: xqa_mla_of(of, of.query, t),
    ),
    "flare: mask.a.valid_lengths": (
        lambda of: of.lengths.clone(),
        lambda of, t: flare(of, of.query, OrMask(CausalPaddingMask(t), NullMask())),
    ),
    "flare: mask.b.tensor": (
        lambda of: of.bias.clone(),
        lambda of, t: flare(of, of.query, OrMask(NullMask(), MaterializedMask(t))),
    ),
    "plan: seq_lens": (lambda of: of.lengths.clone(), lambda of, t: planned_gqa(of, seq_lens=t)),
    "run: q_scale": (lambda of: of.scale.clone(), lambda of, t: run_gqa(of, q_scale=t)),
    "run: k_scale": (lambda of: of.scale.clone(), lambda of, t: run_gqa(of, k_scale=t)),
    "run: sinks": (lambda of: of.sinks.half(), lambda of, t: run_gqa(of, sinks=t)),
    "local_seq_lens: seq_lens": (
        lambda of: of.lengths.clone(),
        lambda _, t: local_seq_lens(t, 2, 0),
    ),
}
MERGES: dict[Callable[..., object], str] = {
    merge_state: "v_a s_a v_b s_b",
    merge_state_in_place: "v s v_other s_other mask",
    merge_states: "v s",
}


def mla_of_fp16(of: Tensors, query: torch.Tensor, **others: Any) -> Any:
    """Call an entry point whose fp16 result is copied to a bf16 output."""
    fp16 = Tensors(of.device)
    fp16.made["cache"] = of.cache.half()
    return mla(fp16, query.half(), **others)


def run_gqa(of: Tensors, **others: Any) -> Any:
    """Plan and run grouped-query decode."""
    return planned_gqa(of).run(of.gqa_query, (of.keys, of.values), **others)


def check_rejected(name: str, tensor: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> None:
    """Fail unless a call takes a tensor, and rejects in one line each kind without memory."""
    call(tensor)
    for kind, made in KINDS.items():
        with pytest.raises(ArgumentError) as caught:
            call(made(tensor))

        message = str(caught.value)
        assert message.startswith(f"{name}: expected a dense tensor")
        assert kind in message
        assert "\n" not in message


class TestMemory:
    """Rejection of tensors without memory, on the device of the fixture."""

    @pytest.fixture
    def of(self, device: str) -> Tensors:
        """Return the tensors of the calls."""
        return Tensors(device)

    @pytest.mark.parametrize(("entry", "argument"), PLACES)
    def test_a_tensor_without_memory_is_rejected_by_name(
        self, entry: str, argument: str, device: str
    ) -> None:
        """Each kind is rejected in one line for any argument, also after a valid call."""
        call = ValidCall(entry, device)
        _, name = FLARE.get(argument, ("", argument))
        check_rejected(name, call.tensor(argument), lambda tensor: call(argument, tensor))

    @pytest.mark.parametrize("use", USES)
    def test_a_tensor_without_memory_is_rejected_before_it_is_used(
        self, use: str, of: Tensors
    ) -> None:
        """Also where an entry point converts, multiplies or copies it."""
        tensor_of, call = USES[use]
        check_rejected(use.partition(": ")[2], tensor_of(of), partial(call, of))

    @pytest.mark.parametrize(
        ("merge", "argument"), [(each, name) for each in MERGES for name in MERGES[each].split()]
    )
    def test_a_merge_rejects_a_tensor_without_memory(
        self, merge: Callable[..., object], argument: str, device: str
    ) -> None:
        """Any tensor of a state, also an LSE that is converted, and a mask."""
        shape = (3, 4, 64) if merge is not merge_states else (3, 2, 4, 64)
        states = {"v": torch.zeros(shape), "s": torch.zeros(shape[:-1]), "m": torch.ones(3).byte()}
        given = {name: states[name[0]].to(device).clone() for name in MERGES[merge].split()}

        check_rejected(argument, given[argument], lambda t: merge(**given | {argument: t}))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
    @pytest.mark.parametrize("entry", ["trtllm", "xqa_mla", "flare", "wrapper"])
    def test_unsupported_layouts_are_rejected_by_name(self, entry: str, device: str) -> None:
        """Sparse, nested and batched tensors, without strides or an address, are rejected."""
        call, name = ValidCall(entry, device), ENTRIES[entry].split()[0]
        query = call.tensor(name)
        call(name, query)
        for kind, tensor in {
            "sparse": query.to_sparse(),
            "nested": torch.nested.nested_tensor(list(query)),
        }.items():
            with pytest.raises(ArgumentError, match=f"^{name}: expected .* got a {kind} tensor"):
                call(name, tensor)

        with pytest.raises(ArgumentError, match=f"^{name}: expected .* of vmap"):
            torch.func.vmap(lambda one: call(name, one))(query[None])

    def test_ordinary_subclasses_are_accepted(self, of: Tensors) -> None:
        """Parameters, buffers and subclasses with memory give the same results."""
        expected = mla(of, of.query)
        for query in (
            torch.nn.Parameter(of.query, requires_grad=False),
            torch.nn.Buffer(of.query),
            of.query.as_subclass(Harmless),
        ):
            assert torch.equal(torch.Tensor(mla(of, query)), torch.Tensor(expected))

    @pytest.mark.parametrize(
        "entry", ["mla", "copied", "gqa", "lse", "wrapper", "plan", "plan, gaps"]
    )
    def test_an_inference_output_is_rejected_before_it_is_written(
        self, of: Tensors, entry: str, device: str
    ) -> None:
        """An output made under inference_mode keeps its elements when passed outside."""
        with torch.inference_mode():
            wide = torch.zeros_like(of.query[..., :512])
            grouped = torch.zeros_like(of.gqa_query)
            lse = torch.zeros(4, 16, device=device)
            gaps = torch.zeros_like(of.query)[:, 0, :, :512]
        plain = torch.zeros_like(wide)
        calls: dict[str, Callable[[], Any]] = {
            "mla": lambda: mla(of, of.query, out=wide),
            "copied": lambda: mla_of_fp16(of, of.query, out=wide),
            "gqa": lambda: gqa(of, of.gqa_query, out=grouped),
            "lse": lambda: mla(of, of.query, out=plain, lse=lse, return_lse=True),
            "wrapper": lambda: planless(of, of.query, out=wide[:, 0]),
            "plan": lambda: _run_into(of, wide[:, 0]),
            "plan, gaps": lambda: _run_into(of, gaps),
        }

        with pytest.raises(ArgumentError, match="expected a tensor that may be written outside"):
            calls[entry]()

        assert not any(tensor.any() for tensor in (wide, grouped, lse, gaps, plain))
        with torch.inference_mode():
            assert torch.equal(mla(of, of.query, out=wide), mla(of, of.query))

    def test_an_output_that_autograd_tracks_is_rejected(self, of: Tensors, device: str) -> None:
        """Leaves that require grad, their views, and untrackable views are rejected."""
        leaf = torch.zeros_like(of.query[..., :512]).requires_grad_()
        with torch.no_grad():
            view = torch.zeros(2, *leaf.shape, dtype=leaf.dtype, device=device)[0]
        trained = of.query.clone().requires_grad_()
        for query, out in ((of.query, leaf), (of.query, leaf[:]), (trained, view)):
            for call in (mla, mla_of_fp16):
                with pytest.raises(ArgumentError, match=r"^out: expected .* written in place, got"):
                    call(of, query, out=out)

                assert not out.any()

    def test_a_self_overlapping_output_is_rejected(self, of: Tensors, device: str) -> None:
        """Gaps are allowed, expanded elements are not."""
        out = torch.zeros(1, 1, 512, dtype=torch.bfloat16, device=device).expand(4, 16, 512)

        with pytest.raises(ArgumentError, match=r"^out: expected elements that do not overlap"):
            _run_into(of, out)

        assert not out.any()


def _run_into(of: Tensors, out: torch.Tensor) -> None:
    planned(of).run(*parts(of.query[:, 0]), *parts(of.cache), out=out)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"without storage"}))
def test_no_guard_accepts_it(kind: str) -> None:
    """The fast path never receives a tensor without memory."""
    tensors = (torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(4))
    guard = make_guard(tensors)
    assert guard is not None
    assert guard(*tensors)

    is_taken = guard(KINDS[kind](tensors[0]), tensors[1])

    assert not is_taken


def test_a_guard_checks_requires_grad() -> None:
    """A guard rejects a tensor that requires grad while grad is recorded."""
    plain, trained = torch.ones(2), torch.ones(2).requires_grad_()
    of_plain = make_guard((plain,))
    assert of_plain is not None
    assert not of_plain(trained)
    with torch.no_grad():
        guard = make_guard((trained,))
    assert guard is not None

    assert not guard(trained)
    with torch.no_grad():
        assert guard(trained)


def test_a_tensor_without_an_address_is_not_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor of vmap, or a sparse one, is rejected by its check, not by torch's data_ptr."""
    entry_point = make_entry_point(monkeypatch, ROWS["trtllm"])
    arguments = entry_point.row.build()
    entry_point.call(arguments)

    def launched(batched: torch.Tensor) -> torch.Tensor:
        outcome = entry_point.outcome(arguments | {"query": batched})
        assert "query: expected a dense tensor in memory, got a batched tensor" in outcome
        return batched

    torch.func.vmap(launched)(arguments["query"][None])
    sparse = entry_point.outcome(arguments | {"query": arguments["query"].to_sparse()})
    assert "query: expected a dense tensor in memory, got a sparse tensor" in sparse


@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_call_rejects_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature does not distinguish it from a tensor in memory, so every such call checks."""
    entry_point = make_entry_point(monkeypatch, ROWS["trtllm"])
    arguments = entry_point.row.build()
    for _ in range(3):
        entry_point.call(arguments)

    outcome = entry_point.outcome(arguments | {"kv_cache": KINDS[kind](arguments["kv_cache"])})

    assert outcome.startswith("ArgumentError: kv_cache: expected a dense tensor in memory")
