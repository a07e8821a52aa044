"""Tensors without readable memory, and read-only outputs, are rejected on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from mlagen.mla import CausalPaddingMask, MaterializedMask, OrMask
from tests.families.entry_points import ROWS, make_entry_point
from tests.odd_values import nested
from tests.ops_cases import Tensors, flare, gqa, mla, parts, planless, planned, planned_gqa
from tests.problems.entry_points import ENTRY_POINTS, EntryPoint


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
    "a sparse tensor": torch.Tensor.to_sparse,
    "a nested tensor": nested,
}
LAYOUTS = ("a sparse tensor", "a nested tensor")  # a guard compares strided tensors alone


Call = tuple[Callable[..., Any], dict[str, Any]]

# Facts of a problem whose call has sinks.
WITH_SINKS: dict[str, dict[str, Any]] = {
    "trtllm": {"with_sinks": True},
    **{name: {"sink": 1.0} for name in ("xqa_batch", "trtllm_gqa", "xqa")},
}
# Arguments of adapters, and their names in messages.
SHOWN = {name: f"k.{name}" for name in ("blocks", "block_table", "cache_lengths")}
SHOWN |= {"valid_lengths": "mask.a.valid_lengths", "tensor": "mask.b.tensor"}


def adapted(entry: EntryPoint, device: str) -> Call:
    """Return a call of an entry point with its output, and with its scales in tensors."""
    problem = entry.build(device, seq_lens=(40, 7), **WITH_SINKS.get(entry.name, {}))
    given = entry.arguments(problem)
    if "out" in entry.names:
        given[entry.names["out"]] = entry.new_out(problem, 0.0)
    given |= {name: torch.ones(1, device=device) for name in given if name.startswith("bmm")}
    if entry.name == "trtllm_gqa":
        scale, given["bmm1_scale"] = given["bmm1_scale"], 1.0
        given |= {"bmm1_scale_log2": scale, "sinks": given["sinks"].half()}
    return entry.function, given


def masked_flare(of: Tensors, valid_lengths: torch.Tensor, tensor: torch.Tensor) -> Any:
    """Call an entry point with tensors in its mask."""
    mask = OrMask(CausalPaddingMask(valid_lengths), MaterializedMask(tensor))
    return flare(of, of.query, mask)


def mla_of_fp16(of: Tensors, query: torch.Tensor, **others: Any) -> Any:
    """Call an entry point whose fp16 result is copied to a bf16 output."""
    fp16 = Tensors(of.device)
    fp16.made["cache"] = of.cache.half()
    return mla(fp16, query.half(), **others)


def merge(function: Callable[..., object], names: str, *count: int) -> Callable[[Tensors], Call]:
    """Return what builds a merge of states, each argument by its name."""

    def build(of: Tensors) -> Call:
        shape = (3, *count, 4, 64)
        states = {"v": torch.zeros(shape), "s": torch.zeros(shape[:-1]), "m": torch.ones(3).byte()}
        return function, {name: states[name[0]].to(of.device).clone() for name in names.split()}

    return build


# Calls with every tensor that is read, converted, multiplied or copied.
CALLS: dict[str, Callable[[Tensors], Call]] = {
    **{
        name: lambda of, entry=entry: adapted(entry, of.device)  # type: ignore[misc]
        for name, entry in ENTRY_POINTS.items()
        if name != "flare, padded"  # whose adapter copies the query
    },
    "masks of flare": lambda of: (
        partial(masked_flare, of),
        {"valid_lengths": of.lengths.clone(), "tensor": of.bias.clone()},
    ),
    "a copied output": lambda of: (
        partial(mla_of_fp16, of, of.query),
        {"out": of.query[..., :512].clone(), "sinks": of.sinks.half()},
    ),
    "plan of batch decode": lambda of: (
        partial(planned_gqa, of),
        {"seq_lens": of.lengths.clone()},
    ),
    "run of batch decode": lambda of: (
        partial(planned_gqa(of).run, of.gqa_query, (of.keys, of.values)),
        {"q_scale": of.scale.clone(), "k_scale": of.scale.clone(), "sinks": of.sinks.half()},
    ),
    "local_seq_lens": lambda of: (
        partial(local_seq_lens, cp_world=2, cp_rank=0),
        {"seq_lens": of.lengths.clone()},
    ),
    "merge_state": merge(merge_state, "v_a s_a v_b s_b"),
    "merge_state_in_place": merge(merge_state_in_place, "v s v_other s_other mask"),
    "merge_states": merge(merge_states, "v s", 2),
}


def tensors_in(given: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a call by name; a plan has its arguments apart."""
    for name, value in given.items():
        if isinstance(value, torch.Tensor) and name != "semaphores":  # which no call reads
            yield name, value
        elif isinstance(value, dict):
            yield from tensors_in(value)


def changed(given: dict[str, Any], name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Return the arguments with another tensor."""
    plan = {"plan": {**given["plan"]}} if "plan" in given else {}  # which the adapter changes
    if name in plan.get("plan", {}):
        plan["plan"][name] = tensor
        return given | plan
    return given | plan | {name: tensor}


class TestMemory:
    """Rejection of tensors without memory, on the device of the fixture."""

    @pytest.fixture
    def of(self, device: str) -> Tensors:
        """Return the tensors of the calls."""
        return Tensors(device)

    @pytest.mark.parametrize("name", CALLS)
    def test_a_tensor_without_memory_is_rejected_by_name(self, name: str, of: Tensors) -> None:
        """Each kind is rejected in one line for any argument, also after a valid call."""
        function, given = CALLS[name](of)
        tensors = dict(tensors_in(given))
        for argument, tensor in tensors.items():
            function(**changed(given, argument, tensor))
            for kind, made in KINDS.items():
                with pytest.raises(ArgumentError) as caught:
                    function(**changed(given, argument, made(tensor)))

                message = str(caught.value)
                shown = SHOWN.get(argument, argument)
                assert message.startswith(f"{shown}: expected a dense tensor"), (kind, argument)
                assert kind in message
                assert "\n" not in message
        assert tensors

    @pytest.mark.parametrize("name", ["trtllm", "xqa_mla", "flare", "planless"])
    def test_a_tensor_of_vmap_is_rejected_by_name(self, name: str, of: Tensors) -> None:
        """A batched tensor has no strides and no address."""
        function, given = CALLS[name](of)
        argument, tensor = next(tensors_in(given))

        with pytest.raises(ArgumentError, match=f"^{argument}: expected .* of vmap"):
            torch.func.vmap(lambda one: function(**changed(given, argument, one)))(tensor[None])

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


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"without storage", *LAYOUTS}))
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
    """A tensor of vmap is rejected by its check, not by torch's data_ptr."""
    entry_point = make_entry_point(monkeypatch, ROWS["trtllm"])
    arguments = entry_point.row.build()
    entry_point.call(arguments)

    def launched(batched: torch.Tensor) -> torch.Tensor:
        outcome = entry_point.outcome(arguments | {"query": batched})
        assert "query: expected a dense tensor in memory, got a batched tensor" in outcome
        return batched

    torch.func.vmap(launched)(arguments["query"][None])


@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_call_rejects_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signature does not distinguish it from a tensor in memory, so every such call checks."""
    entry_point = make_entry_point(monkeypatch, ROWS["trtllm"])
    arguments = entry_point.row.build()
    for _ in range(3):
        entry_point.call(arguments)

    outcome = entry_point.outcome(arguments | {"kv_cache": KINDS[kind](arguments["kv_cache"])})

    assert outcome.startswith("ArgumentError: kv_cache: expected a dense tensor in memory")
