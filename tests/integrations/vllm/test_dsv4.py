"""Layers of DeepSeek-V4 and V4.1, whose decode is called as vLLM's forward calls FlashMLA's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mlagen.settings import current_settings
from mlagen.spec.dtype import DType
from tests.fixture_types import Log, Patch
from tests.integrations import dsv4 as problem
from tests.integrations.attended import assert_near
from tests.integrations.servers import Import, is_installed
from tests.integrations.signatures import disagreements
from tests.integrations.vllm.conftest import GROUP
from tests.integrations.vllm.dsv4_layers import (
    KINDS,
    MODELS,
    POSITIONS,
    SLOTS,
    TOKEN_REQUESTS,
    V4,
    V41,
    Kind,
    built_metadata,
    layer_of,
    server_config,
    spec_of,
    table_of,
)

# The modules of vLLM with kernels that build metadata, and those that are no objects.
TRITON = {
    "vllm.models.deepseek_v4.common.ops.cache_utils": [],
    "vllm.models.deepseek_v4.sparse_mla": [],
    "vllm.models.deepseek_v41.common.ops.cache_utils": [
        "_compute_global_topk_indices_and_lens_kernel"
    ],
    "vllm.v1.attention.backends.mla.compressor_utils": [],
    "vllm.v1.attention.backends.mla.sparse_swa": [],
    "vllm.v1.attention.ops.metadata": ["_token_request_mapping_kernel"],
}


@pytest.fixture
def flash_mla(vllm: Import, monkeypatch: Patch) -> Callable[[str], Any]:
    """Return the class of a package's layers, which are made from their members."""

    def start(self: Any, *_: Any, **members: Any) -> None:
        torch.nn.Module.__init__(self)
        vars(self).update(members)

    def of(package: str) -> Any:
        layer = vllm(f"{package}.nvidia.model").DeepseekV4FlashMLAAttention
        monkeypatch.setattr(layer, "__init__", start)
        return layer

    return of


def stand_in_metadata(kind: Kind) -> dict[str, Any]:
    """Return a step's metadata as the builders of vLLM return it."""
    lists = torch.full((len(POSITIONS), 128), -1, dtype=torch.int32)
    lengths = torch.zeros(len(POSITIONS), dtype=torch.int32)
    table = table_of(kind.swa_page)
    for token, (position, request) in enumerate(zip(POSITIONS, TOKEN_REQUESTS, strict=True)):
        if SLOTS[token] < 0:
            continue
        seen = torch.arange(max(0, position - 127), position + 1)
        lists[token, : len(seen)] = (
            table[request, seen // kind.swa_page] * kind.swa_page + seen % kind.swa_page
        )
        lengths[token] = len(seen)
    swa = SimpleNamespace(
        decode_swa_indices=lists.unsqueeze(1),
        decode_swa_lens=lengths,
        token_to_req_indices=torch.tensor(TOKEN_REQUESTS),
        is_valid_token=torch.tensor(SLOTS) >= 0,
    )
    metadata: dict[str, Any] = {"layer.swa_cache": swa}
    if kind.page:
        metadata["layer"] = SimpleNamespace(block_table=table_of(kind.page * kind.ratio))
    return metadata


def interpret(vllm: Import, monkeypatch: Patch) -> None:
    """Run the kernels that build metadata in Triton's interpreter, which vLLM does not choose."""
    triton, interpreter = import_module("triton"), import_module("triton.runtime.interpreter")
    jit = vllm("vllm.model_executor.warmup.jit_warmup_triton_helper").VllmTritonJitKernel

    def replaced(owner: Any, name: str) -> None:
        kernel = interpreter.InterpretedFunction(getattr(owner, name))
        monkeypatch.setattr(owner, name, kernel)

    for name, kernels in TRITON.items():
        module = vllm(name)
        for attribute, real in (("tl", triton.language), ("triton", triton)):
            monkeypatch.setattr(module, attribute, real)
        for owner in vars(module).values():
            if isinstance(owner, jit):
                replaced(owner, "kernel")
        for kernel in kernels:
            replaced(module, kernel)
    # A schedule of FlashMLA's, which its first call plans.
    unplanned = SimpleNamespace(have_initialized=False)
    module = vllm("vllm.v1.attention.backends.mla.sparse_swa")
    monkeypatch.setattr(module, "get_mla_metadata", lambda: (unplanned, None))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_step_is_what_flash_mla_computes_from_its_arguments(
    vllm: Import, flash_mla: Callable[[str], Any], kind: Kind, monkeypatch: Patch
) -> None:
    """Drafts and padding too, without the heads of padding, which stay as they are."""
    if is_installed("vllm"):
        if torch.cuda.is_available():
            pytest.skip("interprets vLLM's kernels, where there is no GPU: make test-vllm")
        interpret(vllm, monkeypatch)
    theirs = flash_mla(kind.package)
    module = vllm("mlagen.integrations.vllm.dsv4")
    ours = module.attention_of(theirs)
    names = theirs._forward_decode.__globals__
    calls: list[dict[str, Any]] = []

    def recorded(**call: Any) -> Any:
        calls.append(call)
        return problem.flash_mla(**call)

    monkeypatch.setitem(names, "flash_mla_with_kvcache", recorded)
    layer = layer_of(theirs, kind)
    if is_installed("vllm"):
        metadata = built_metadata(layer, kind)
    elif kind.ratio == 128:
        pytest.skip("the lists of such layers are a builder's of vLLM: make test-vllm")
    else:
        metadata = stand_in_metadata(kind)
    context = SimpleNamespace(attn_metadata=metadata)
    for each in (names, vars(module)):
        monkeypatch.setitem(each, "get_forward_context", lambda: context)
    query = problem.queries(len(POSITIONS))
    served, expected = layer_of(ours, kind), torch.zeros_like(query)
    got = served._alloc_attn_out(len(query), query)

    layer.forward_mqa(query, None, None, expected)
    (call,) = calls
    served.forward_mqa(query, None, None, got)

    assert len(calls) == 1
    assert got[:, : problem.HEADS].is_contiguous()  # no kernel copies it
    assert_near(got[:, : problem.HEADS], expected[:, : problem.HEADS])
    heads = expected[:, : problem.HEADS]
    assert [bool(token.any()) for token in heads] == [slot >= 0 for slot in SLOTS]
    assert call["topk_length"].tolist() == [128, 128, 4, 5, 0]
    assert (call["extra_k_cache"] is None) == (kind.page is None)
    if is_installed("vllm"):
        assert not call["tile_scheduler_metadata"].have_initialized


@pytest.mark.parametrize(("members", "is_copied"), [({}, True), ({"_prefill_num_heads": 8}, False)])
def test_a_prefill_keeps_its_heads(
    vllm: Import,
    flash_mla: Callable[[str], Any],
    members: dict[str, int],
    is_copied: bool,
    monkeypatch: Patch,
) -> None:
    """FlashMLA's prefill writes heads of padding, where other tokens have theirs."""
    theirs, outputs = flash_mla(MODELS[1]), []

    def prefill(_: Any, q: Any, *caches: Any) -> None:
        output = caches[3]
        outputs.append(output)
        heads = members.get("_prefill_num_heads", problem.PADDED)
        for token, row in enumerate(output):  # in any order
            row[:heads] = q[token, :heads]

    monkeypatch.setattr(theirs, "_forward_prefill", prefill)
    ours = vllm("mlagen.integrations.vllm.dsv4").attention_of(theirs)
    layer, query = layer_of(ours, replace(V41, ratio=0), "cpu", **members), problem.queries(5)
    output = layer._alloc_attn_out(5, query)
    output.zero_()  # as in a dummy run

    unread = dict.fromkeys(("positions", "compressed_k_cache", "swa_k_cache"))
    metadata = dict.fromkeys(("attn_metadata", "swa_metadata"))
    layer._forward_prefill(q=query[2:], output=output[2:], **unread, **metadata)

    heads = slice(problem.HEADS)
    assert torch.equal(output[2:, heads], query[2:, heads])
    assert not output[:2, heads].any()
    assert (outputs[0].data_ptr() != output[2:].data_ptr()) is is_copied


@pytest.mark.parametrize(("heads", "is_counted"), [(problem.PADDED, True), (problem.HEADS, False)])
def test_a_dummy_run_has_the_memory_of_a_prefill(
    vllm: Import,
    flash_mla: Callable[[str], Any],
    heads: int,
    is_counted: bool,
    monkeypatch: Patch,
) -> None:
    """VLLM sizes the KV cache by what such a run, without metadata, allocates."""
    module, theirs = vllm("mlagen.integrations.vllm.dsv4"), flash_mla(MODELS[1])
    context, shapes = SimpleNamespace(attn_metadata=None), []

    def recorded(output: torch.Tensor) -> torch.Tensor:
        shapes.append(output.shape)
        return output

    monkeypatch.setattr(module, "prefill_output", recorded)
    monkeypatch.setattr(module, "get_forward_context", lambda: context)
    monkeypatch.setattr(theirs, "forward_mqa", lambda *_: None)
    layer = layer_of(module.attention_of(theirs), V41, _prefill_num_heads=heads)
    query = problem.queries(5)

    for context.attn_metadata in (None, {}):
        layer.forward_mqa(query, None, None, layer._alloc_attn_out(5, query))

    assert shapes == ([query.shape] if is_counted else [])


def test_batch_invariance_is_followed_or_refused(
    vllm: Import, flash_mla: Callable[[str], Any], monkeypatch: Patch
) -> None:
    """As with vLLM's other backends."""
    module = vllm("mlagen.integrations.vllm.dsv4")
    monkeypatch.setattr(module.envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    monkeypatch.setenv("MLAGEN_BATCH_INVARIANT", "0")
    current_settings.cache_clear()
    module.attention_of.cache_clear()
    with pytest.raises(ValueError, match=r"^VLLM_BATCH_INVARIANT: expected MLAGEN.*, got 0$"):
        module.attention_of(flash_mla(MODELS[0]))
    monkeypatch.delenv("MLAGEN_BATCH_INVARIANT")
    current_settings.cache_clear()
    module.attention_of(flash_mla(MODELS[0]))
    assert current_settings().batch_invariant


def config_with(backend: str | None, **per_kind: str) -> Any:
    """Return a configuration that names backends."""

    def named(name: str | None) -> Any:
        return None if name is None else SimpleNamespace(name=name)

    kinds = {kind: named(name) for kind, name in per_kind.items()}
    options = SimpleNamespace(backend=named(backend), backend_per_kind=kinds)
    parallel = SimpleNamespace(prefill_context_parallel_size=1)
    return SimpleNamespace(attention_config=options, parallel_config=parallel)


@pytest.fixture
def choose(vllm: Import, monkeypatch: Patch) -> Callable[[str], Any]:
    """Return the choice of a package's layers, after vLLM has loaded a model."""
    models = vllm("mlagen.integrations.vllm.models")

    def of(package: str) -> Any:
        name = f"{package}.nvidia.model"
        module = vllm(name)
        theirs = getattr(module._select_dsv4_attn_cls, "__wrapped__", module._select_dsv4_attn_cls)
        monkeypatch.setattr(module, "_select_dsv4_attn_cls", theirs)
        entry = models.Model(SimpleNamespace(load_model_cls=lambda: "model"), name)
        for _ in range(2):  # a draft is loaded after its model
            assert entry.load_model_cls() == "model"
        assert module._select_dsv4_attn_cls.__wrapped__ is theirs
        return module._select_dsv4_attn_cls

    return of


@pytest.mark.parametrize("package", MODELS)
@pytest.mark.parametrize(
    ("backend", "per_kind", "is_ours"),
    [
        ("MLAGEN_MLA_SPARSE", {}, True),
        (None, {"mla_attention": "MLAGEN_MLA_SPARSE"}, True),
        ("FLASHMLA_SPARSE", {}, False),
        (None, {}, False),
    ],
)
def test_the_option_chooses_the_layers(
    vllm: Import,
    choose: Callable[[str], Any],
    package: str,
    backend: str | None,
    per_kind: dict[str, str],
    is_ours: bool,
) -> None:
    """Only the class with mlagen's decode is new; without the option it is vLLM's."""
    theirs = vllm(f"{package}.nvidia.model").DeepseekV4FlashMLAAttention
    chosen = choose(package)(config_with(backend, **per_kind))
    assert issubclass(chosen, theirs)
    assert (chosen is not theirs) is is_ours


@pytest.mark.parametrize("package", MODELS)
@pytest.mark.parametrize("name", ["MLAGEN_MLA", "MLAGEN_GQA"])
def test_another_backend_of_mlagen_is_refused(
    choose: Callable[[str], Any], package: str, name: str
) -> None:
    """VLLM ignores names that it does not know there, and the log would not say so."""
    rule = f"^--attention-backend: expected MLAGEN_MLA_SPARSE for DeepSeek-V4.*, got {name}$"
    with pytest.raises(ValueError, match=rule):
        choose(package)(config_with(name))


def test_a_gpu_without_flash_mla_is_refused(vllm: Import) -> None:
    """On such a GPU vLLM has another cache."""
    module = vllm(f"{MODELS[0]}.nvidia.model")

    class Other:
        pass

    def theirs(_: Any) -> Any:
        return Other

    theirs.__module__ = module.__name__
    chosen = vllm("mlagen.integrations.vllm.models").choosing(theirs)
    assert chosen(config_with(None)) is Other
    with pytest.raises(ValueError, match=r"calls FlashMLA .*, got it for Other$"):
        chosen(config_with("MLAGEN_MLA_SPARSE"))


def test_other_rows_are_refused(vllm: Import, flash_mla: Callable[[str], Any]) -> None:
    """V4.1 has rows of 528 bytes on Blackwell."""
    ours = vllm("mlagen.integrations.vllm.dsv4").attention_of(flash_mla(MODELS[1]))
    swa = SimpleNamespace(packed_bytes_per_token=528)
    rule = "^--attention-backend: expected rows of 584 bytes with MLAGEN_MLA_SPARSE, got 528$"
    with pytest.raises(ValueError, match=rule):
        ours(swa_cache_layer=swa)


def test_models_are_loaded_by_entries_of_ours(vllm: Import) -> None:
    """An entry knows what vLLM's knows; those of other models are left alone."""
    models = vllm("mlagen.integrations.vllm.models")
    registry = vllm("vllm.model_executor.models.registry").ModelRegistry
    before = registry.models["DeepseekV32ForCausalLM"]
    for _ in range(2):  # vLLM may load plugins more than once
        vllm("mlagen.integrations.vllm").register()
    for name in ("DeepseekV4ForCausalLM", "DeepseekV41ForCausalLM"):
        entry = registry.models[name]
        assert isinstance(entry, models.Model)
        assert not isinstance(entry.theirs, models.Model)
        assert f"{entry.layers} {name}".count("V41" if "V41" in name else "v4.") == 1
        assert hash(entry) == hash(replace(entry))
    assert registry.models["DeepseekV32ForCausalLM"] is before
    known = models.Model(SimpleNamespace(inspect_model_cls=lambda: "known"), "layers")
    assert known.inspect_model_cls() == "known"


def test_a_vllm_without_the_choice_serves_its_own(
    vllm: Import, monkeypatch: Patch, caplog: Log
) -> None:
    """A model is loaded on every platform and by every version, and a warning says what lacks."""
    models, platforms = vllm("mlagen.integrations.vllm.models"), vllm("vllm.platforms")
    vllms = SimpleNamespace(load_model_cls=lambda: "model")
    for is_cuda in (False, True):
        platform = SimpleNamespace(is_cuda=partial(bool, is_cuda))
        monkeypatch.setattr(platforms, "current_platform", platform)
        assert models.Model(vllms, "another.place").load_model_cls() == "model"
        warning = "vllm: expected a module another.place of the model, got none"
        assert caplog.messages == ([warning] if is_cuda else [])
    caplog.clear()
    monkeypatch.setitem(sys.modules, "another.version", SimpleNamespace())
    assert models.Model(vllms, "another.version").load_model_cls() == "model"
    assert caplog.messages == ["another.version: expected _select_dsv4_attn_cls in it, got none"]


@pytest.mark.parametrize("package", MODELS)
def test_an_override_has_the_parameters_of_the_overridden(vllm: Import, package: str) -> None:
    """VLLM calls the methods of these classes as it calls its own, and the warm-up the others."""
    of = vllm("mlagen.integrations.vllm.dsv4")
    theirs = vllm(f"{package}.nvidia.model").DeepseekV4FlashMLAAttention
    swa, ours = theirs.swa_backend_cls, of.attention_of(theirs)
    pairs = [(ours, theirs), (ours.swa_backend_cls, swa)]
    pairs += [tuple(each.get_builder_cls() for each in pairs[1])]
    found = [
        {each.partition(":")[0] for each in disagreements(ours, base, "mlagen.integrations.vllm")}
        for ours, base in pairs
    ]
    assert all(names <= {"__init__", *GROUP} for names in found)


def test_another_decode_is_refused(vllm: Import) -> None:
    """A name that a function does not use would be replaced without effect."""
    with_names = vllm("mlagen.integrations.vllm.dsv4").with_names
    with pytest.raises(LookupError, match=r"^config_with: expected a use of flash_mla$"):
        with_names(config_with, flash_mla=print)


@pytest.mark.parametrize("package", MODELS)
def test_the_builder_of_windows_warms_layers_up(
    vllm: Import, flash_mla: Callable[[str], Any], package: str, monkeypatch: Patch
) -> None:
    """Layers of all kinds have one call: pages and widths of lists are arguments of a kernel."""
    warm_up = vllm("mlagen.integrations.vllm.warm_up").WARM_UP
    monkeypatch.setattr(warm_up, "register_warmup", lambda: None)
    ours = vllm("mlagen.integrations.vllm.dsv4").attention_of(flash_mla(package))
    kind = V4 if package == MODELS[0] else replace(V41, ratio=0, swa_page=32)
    config = server_config()
    layers = {f"layers.{each}.attn": layer_of(ours, kind) for each in range(3)}
    config.compilation_config.static_forward_context = layers
    spec: Any = SimpleNamespace(block_size=kind.swa_page)
    if is_installed("vllm"):
        spec = spec_of(block=kind.swa_page, ratio=1, window=128)
    builder = ours.swa_backend_cls.get_builder_cls()

    made = builder(spec, [f"{name}.swa_cache" for name in layers], config, torch.device("cpu"))

    assert made in warm_up.groups
    ((variant, rows),) = made.decode_calls()
    assert (variant.kv_dtype, variant.lookup, rows) == (DType.FP8_DSV4, "two_pools", 8)
    assert made.warm_up_prefill() is None
    warm_up.groups.clear()
