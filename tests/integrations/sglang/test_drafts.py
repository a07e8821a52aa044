"""The backends of draft models, which SGLang makes by the name of the target's."""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.fixture_types import Patch
from tests.integrations.servers import Import
from tests.integrations.sglang.conftest import DSV4, runner


@pytest.fixture
def factory(sglang: Import, calls: list[Any], monkeypatch: Patch) -> Any:
    """Return SGLang's factory, in a process where no backend of mlagen was made."""
    del calls
    module = sglang("sglang.srt.speculative.draft_utils")
    drafts = sglang("mlagen.integrations.sglang.runner")
    hooks = sglang("sglang.srt.plugins.hook_registry").HookRegistry
    monkeypatch.setattr(hooks, "_hooks", defaultdict(list))
    monkeypatch.setattr(hooks, "_patched", set())
    monkeypatch.setattr(drafts, "HookRegistry", hooks)
    monkeypatch.setattr(drafts, "_served", {})
    made = module.DraftBackendFactory
    monkeypatch.setattr(made, "_create_backend", made._create_backend)
    monkeypatch.setattr(module, "attention_backends", lambda: (None, None), raising=False)
    spec = SimpleNamespace(speculative_attention_mode="prefill")
    monkeypatch.setattr(module, "get_spec", lambda: spec, raising=False)
    return made


@pytest.mark.parametrize(
    ("module", "backend", "fields"),
    [
        ("dsa", "MlagenDSABackend", {}),
        ("mla", "MlagenMLABackend", {}),
        ("mha", "MlagenMHABackend", {"use_mla_backend": False}),
        ("dsv4", "MlagenDSV4Backend", DSV4),
    ],
)
def test_a_draft_model_has_the_backend_of_the_target(
    request: pytest.FixtureRequest, factory: Any, module: str, backend: str, fields: dict[str, Any]
) -> None:
    """Appended tokens run our kernels, by the name that the models know."""
    ours, name = request.getfixturevalue(module), f"mlagen_{module}"
    ours.backend_of(runner(**fields), name)

    made = factory(runner(draft_attention_backend=name, **fields), 1, 3)
    extension = made.create_draft_extend_backend()

    assert type(extension) is getattr(ours, backend)
    assert extension.decode_attention_backend_str == name


def test_each_step_of_a_draft_has_the_backend_of_the_target(factory: Any, dsa: ModuleType) -> None:
    """The layer of multi-token prediction (MTP) has an indexer, and so the sparse backend."""
    dsa.backend_of(runner(), "mlagen_dsa")

    steps = factory(runner(draft_attention_backend="mlagen_dsa"), 1, 3).create_decode_backend()

    assert [type(each) for each in steps.attn_backends] == [dsa.MlagenDSABackend] * 2
    assert {each.dsa_decode_impl for each in steps.attn_backends} == {"fa3"}
    assert {each.decode_attention_backend_str for each in steps.attn_backends} == {"mlagen_dsa"}


def test_each_step_of_deepseek_v4_has_the_backend_of_the_target(
    factory: Any, dsv4: ModuleType
) -> None:
    """The layer of multi-token prediction attends to the window only."""
    dsv4.backend_of(runner(**DSV4), "mlagen_dsv4")
    fields = DSV4 | {"draft_attention_backend": "mlagen_dsv4"}

    steps = factory(runner(**fields), 1, 3).create_decode_backend()

    assert {type(each) for each in steps.attn_backends} == {dsv4.MlagenDSV4Backend}
    assert {each.decode_attention_backend_str for each in steps.attn_backends} == {"mlagen_dsv4"}


def test_other_draft_models_are_as_before(factory: Any, dsa: ModuleType) -> None:
    """SGLang's own backends stay its own, and it still rejects names that it does not know."""
    dsa.backend_of(runner(), "mlagen_dsa")

    own = factory(runner(draft_attention_backend="dsa"), 1, 3).create_draft_extend_backend()

    assert type(own) is dsa.DeepseekSparseAttnBackend
    with pytest.raises(ValueError, match="not supported in attention backend mlagen_mha"):
        factory(runner(draft_attention_backend="mlagen_mha"), 1, 3).create_draft_extend_backend()
