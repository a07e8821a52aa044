"""Warm-up of a worker, by vLLM's registry of JIT kernels or without it."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.spec.dtype import DType
from tests.fixture_types import Patch
from tests.integrations.attended import HEADS
from tests.integrations.servers import Import, is_installed
from tests.integrations.vllm.conftest import ImplOf, config_of

BF16 = torch.bfloat16


class Group:
    """A group of layers, which records what its warm-up does."""

    def __init__(self, calls: list[str], steps: list[str], *, enabled: bool = True) -> None:
        kernel_config = SimpleNamespace(enable_jit_warmup=enabled)
        self.vllm_config = SimpleNamespace(kernel_config=kernel_config)
        self.calls, self.steps = calls, steps

    def decode_calls(self) -> list[str]:
        """Return calls; any hashable values are."""
        return self.calls

    def warm_up_prefill(self) -> None:
        """Record it."""
        self.steps.append(f"prefill of {self.calls[0]}")


@pytest.fixture
def module(vllm: Import, monkeypatch: Patch) -> Iterator[ModuleType]:
    """Return the module of the warm-up, on a GPU 5."""
    module = vllm("mlagen.integrations.vllm.warm_up")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    yield module
    module.WARM_UP.groups.clear()
    module.WARM_UP.warm.clear()


@pytest.fixture
def warmed(module: ModuleType, monkeypatch: Patch) -> list[Any]:
    """Return what is warmed up: calls and a GPU."""
    warmed: list[Any] = []

    def warm_up(calls: Any, device: int, log: Any) -> None:
        assert log.__self__.name.startswith("vllm.")
        warmed.append((list(calls), device))

    monkeypatch.setattr(module, "warm_up", warm_up)
    return warmed


def run_registered(vllm: Import, kernel: Any, monkeypatch: Patch) -> None:
    """Run the warm-up as vLLM's registry does, or as its source says."""
    if not is_installed("vllm"):
        kernel.compile_many(kernel.get_warmup_keys())
        return
    monkeypatch.setattr("vllm.distributed.is_global_first_rank", lambda: True)
    registry = vllm("vllm.model_executor.warmup.jit_warmup").JitWarmupRegistry(None)
    with registry.activate():
        for _ in range(2):  # of each layer
            kernel.register_warmup()
    registry.warmup()


def test_a_worker_warms_up_once(
    vllm: Import, module: ModuleType, warmed: list[Any], monkeypatch: Patch
) -> None:
    """All groups of layers, those of a draft too, are one warm-up, with each call once."""
    steps: list[str] = []
    groups = [Group(["a", "b"], steps), Group(["b", "c"], steps)]
    for group in groups:
        module.WARM_UP.add(group)
    assert warmed == []

    run_registered(vllm, module.WARM_UP, monkeypatch)

    ((calls, device),) = warmed
    assert sorted(calls) == ["a", "b", "c"]
    assert device == 5
    assert sorted(steps) == ["prefill of a", "prefill of b"]


def test_without_vllms_warm_up_each_group_warms_up_when_built(
    module: ModuleType, warmed: list[Any]
) -> None:
    """``--enforce-eager`` switches vLLM's warm-up off, and no request compiles still.

    A group whose calls are warm adds no line to the log.
    """
    steps: list[str] = []
    groups = [Group(calls, steps, enabled=False) for calls in (["a"], ["b", "a"], ["a"])]
    for group in groups:
        module.WARM_UP.add(group)
    assert warmed == [(["a"], 5), (["b"], 5)]
    assert steps == ["prefill of a", "prefill of b", "prefill of a"]


def test_groups_of_a_profiling_run_are_forgotten(module: ModuleType) -> None:
    """VLLM builds groups for a smaller cache to measure memory, and drops them."""
    module.WARM_UP.add(Group(["a"], []))
    assert module.WARM_UP.get_warmup_keys() == []


LAYERS: list[tuple[str, dict[str, Any], tuple[DType, DType, int]]] = [
    ("dense", {}, (DType.BF16, DType.BF16, 64)),
    ("dense", {"kv_cache_dtype": "fp8"}, (DType.E4M3, DType.E4M3, 64)),
    ("sparse", {}, (DType.BF16, DType.BF16, 64)),
    ("sparse", {"kv_cache_dtype": "fp8_e4m3"}, (DType.E4M3, DType.E4M3, 64)),
    ("sparse", {"kv_cache_dtype": "fp8_ds_mla"}, (DType.BF16, DType.FP8_DS_MLA, 64)),
    ("sparse", {"kv_cache_dtype": "fp8_ds_mla", "rope": 0}, (DType.BF16, DType.FP8_DS_MLA, 0)),
]
BUILDERS = {"dense": "MlagenMLA", "sparse": "MlagenSparseMLA"}


@pytest.fixture
def build(vllm: Import, impl_of: ImplOf, module: ModuleType, monkeypatch: Patch) -> Any:
    """Return the constructor of a builder, called as vLLM calls it."""
    assert module

    def make(name: str, layer: dict[str, Any], block_size: int, drafts: int) -> Any:
        of = vllm(f"mlagen.integrations.vllm.{name}")
        impl = impl_of(getattr(of, f"{BUILDERS[name]}Impl"), **layer)
        dtype = layer.get("kv_cache_dtype", "auto")
        rope = layer.get("rope", 64)
        dims = {"q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128}
        dims |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": rope}
        prefill = SimpleNamespace(clone=lambda: SimpleNamespace(get_name=lambda: "prefill"))
        layers = {"layer": SimpleNamespace(impl=impl, prefill_backend=prefill, **dims)}
        text = SimpleNamespace(index_topk=2048, compress_ratios=None, **dims)
        config = config_of(HEADS, drafts=drafts, hf_text_config=text)
        config.cache_config = SimpleNamespace(cache_dtype=dtype, block_size=block_size)
        config.compilation_config.static_forward_context.update(layers)
        spec = SimpleNamespace(block_size=block_size, dtype=BF16)
        if is_installed("vllm"):
            base = next(each for each in impl.__class__.__mro__ if "vllm.model" in each.__module__)
            heads = "get_num_attention_heads_from_layers"
            monkeypatch.setattr(f"{base.__module__}.{heads}", lambda *_: HEADS, raising=False)
            monkeypatch.setattr(f"{base.__module__}.PIN_MEMORY", False, raising=False)
        cls = getattr(of, f"{BUILDERS[name]}MetadataBuilder")
        return cls(spec, ["layer"], config, torch.device("cpu"))

    return make


@pytest.mark.parametrize(("name", "layer", "expected"), LAYERS)
@pytest.mark.parametrize("dcp_size", [1, 2])
@pytest.mark.parametrize(("block_size", "page_size"), [(64, 64), (1152, 64)])
def test_the_calls_are_those_of_the_built_layers(
    build: Any,
    module: ModuleType,
    name: str,
    layer: dict[str, Any],
    expected: tuple[DType, DType, int],
    dcp_size: int,
    block_size: int,
    page_size: int,
) -> None:
    """Heads, dims, dtypes, pages and query lengths are exact; a DCP rank has the query of all."""
    if name == "dense":
        block_size = page_size  # vLLM splits it
    builder = build(name, layer, block_size, drafts=1)
    assert builder in module.WARM_UP.groups
    builder.dcp_world_size = dcp_size

    found = list(builder.decode_calls())

    heads = HEADS * dcp_size
    assert {rows for _, rows in found} == ({heads} if name == "sparse" else {heads, 2 * heads})
    for variant, _ in found:
        rope = variant.qk_rope_head_dim
        assert (variant.query_dtype, variant.kv_dtype, rope) == expected
        assert (variant.kv_lora_rank, variant.page_size) == (512, page_size)


def test_converted_prefills_are_warmed_up(build: Any) -> None:
    """A long prefill over fp8_ds_mla rows runs the kernel of bf16 rows."""
    builder = build("sparse", {"kv_cache_dtype": "fp8_ds_mla"}, 16, drafts=0)
    assert not builder.converts  # too few heads
    builder.converts = True
    assert [(v.kv_dtype, v.page_size) for v, _ in builder.decode_calls()] == [
        (DType.FP8_DS_MLA, 16),
        (DType.BF16, 64),
    ]


def gqa_builder(gqa: ModuleType, **fields: Any) -> Any:
    """Return a builder with what vLLM's sets."""
    builder = object.__new__(gqa.MlagenGQAMetadataBuilder)
    known: dict[str, Any] = {
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "page_size": 32,
    }
    known |= {"reorder_batch_threshold": 2, "use_dcp": False, "use_xqa": True}
    known |= {"logits_soft_cap": None}
    dtypes = {"q_data_type_decode": BF16, "kv_cache_dtype": torch.float8_e4m3fn}
    vars(builder).update(known | dtypes | {"device": torch.device("cpu")} | fields)
    return builder


def test_the_calls_of_gqa_layers(gqa: ModuleType) -> None:
    """A group that FlashInfer decodes has none."""
    found = list(gqa_builder(gqa).decode_calls())
    assert [rows for _, rows in found] == [4, 8]
    (variant,) = {variant for variant, _ in found}
    assert (variant.head_dim, variant.page_size) == (128, 32)
    assert (variant.query_dtype, variant.kv_dtype) == (DType.BF16, DType.E4M3)
    assert list(gqa_builder(gqa, use_xqa=False).decode_calls()) == []


@pytest.mark.parametrize("use_dcp", [False, True])
def test_a_prefill_is_planned(gqa: ModuleType, use_dcp: bool, monkeypatch: Patch) -> None:
    """FlashInfer compiles its prefill when it plans one request that is longer than a decode."""
    batches: list[Any] = []
    builder = gqa_builder(gqa, use_dcp=use_dcp, page_size=2)
    monkeypatch.setattr(type(builder), "build", lambda _, *call: batches.append(call[1]), False)
    builder.warm_up_prefill()
    assert len(batches) == (not use_dcp)
    for batch in batches:
        assert (batch.num_reqs, batch.num_actual_tokens) == (1, 3)
        assert batch.block_table_tensor.shape == (1, 2)


@pytest.mark.parametrize("name", ["dense", "sparse"])
def test_a_layer_registers_the_warm_up(
    vllm: Import, impl_of: ImplOf, module: ModuleType, name: str
) -> None:
    """The registry of the model runner that builds a layer has the warm-up of mlagen."""
    impl = {"dense": "MlagenMLAImpl", "sparse": "MlagenSparseMLAImpl"}[name]
    of = getattr(vllm(f"mlagen.integrations.vllm.{name}"), impl)
    if not is_installed("vllm"):
        before = module.WARM_UP.registered
        impl_of(of)
        assert module.WARM_UP.registered == before + 1
        return
    registry = vllm("vllm.model_executor.warmup.jit_warmup").JitWarmupRegistry(None)
    with registry.activate():
        impl_of(of)
    assert len(registry) == 1
