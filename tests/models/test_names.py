"""Model names: presets, aliases, Hub ids, and the local Hub cache."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlagen.errors import ArgumentError
from mlagen.models.config import find_model, preset_names
from mlagen.models.names import known_names, preset_of
from mlagen.settings import current_settings

CONFIG = {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 64}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the config.json that a fake huggingface_hub finds for one id."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    library, errors = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.errors")
    found = {"our/model": str(path), "deepseek-ai/DeepSeek-V3": str(path)}
    stand_in: Any = library
    stand_in.try_to_load_from_cache = lambda name, file: found.get(name) if file else None
    other: Any = errors
    other.HFValidationError = ValueError
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return path


def switch(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Set MLAGEN_HF."""
    monkeypatch.setenv("MLAGEN_HF", value)
    current_settings.cache_clear()


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("DEEPSEEK-AI/deepseek-r1-0528", "deepseek-v3"),
        ("deepseek-r1", "deepseek-v3"),
        ("deepseek-v3.1", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V3.2-Exp", "deepseek-v3.2"),
        ("deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct", "deepseek-v2-lite"),
        ("moonshotai/Kimi-K2.5", "kimi-k2"),
        ("moonshotai/Kimi-K2-Instruct-0905", "kimi-k2"),
        ("Kimi-K2-Thinking", "kimi-k2"),
        ("zai-org/GLM-5", "glm-5"),
        ("zai-org/GLM-5.1-FP8", "glm-5"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3-70b"),
        ("Qwen/Qwen3-32B-FP8", "qwen3-32b"),
        ("openai/gpt-oss-20b", "gpt-oss-120b"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", None),
        ("someone/DeepSeek-V3", None),
        ("deepseek-ai/DeepSeek-V4", None),
        ("glm-6", None),
        ("", None),
    ],
)
def test_a_name_resolves_to_the_preset_with_the_same_attention(
    name: str, preset: str | None
) -> None:
    """A model with other heads, or of another owner, has no preset."""
    assert preset_of(name) == preset


def test_every_known_name_resolves_to_a_preset() -> None:
    """The names in a rejection are valid."""
    assert {preset_of(name) for name in known_names()} == set(preset_names())


def test_a_folder_comes_before_the_model_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path takes precedence over a name."""
    folder = tmp_path / "deepseek-ai" / "DeepSeek-V3"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert find_model("deepseek-ai/DeepSeek-V3").heads == 24


@pytest.mark.parametrize("name", ["our/model", "deepseek-ai/DeepSeek-V3"])
@pytest.mark.usefixtures("hub")
def test_the_hub_cache_is_read_with_mlagen_hf(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of the id takes precedence over a preset."""
    switch(monkeypatch, "1")
    assert find_model(name).heads == 24


@pytest.mark.usefixtures("hub")
def test_the_hub_cache_is_not_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rejection mentions MLAGEN_HF."""
    switch(monkeypatch, "0")
    with pytest.raises(ArgumentError) as caught:
        find_model("our/model")
    remedy = "got 'our/model'; MLAGEN_HF=1 looks for a Hub id in the Hub's local cache"
    assert str(caught.value).endswith(remedy)


@pytest.mark.usefixtures("hub")
def test_a_missing_hub_configuration_is_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rejection has the download command."""
    switch(monkeypatch, "1")
    with pytest.raises(ArgumentError, match=r"; run: hf download our/other config\.json$"):
        find_model("our/other")


def test_without_huggingface_hub_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preset by its short name needs no huggingface_hub."""
    switch(monkeypatch, "1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ArgumentError, match=r"^MLAGEN_HF: expected huggingface_hub to be install"):
        find_model("our/model")
    assert find_model("deepseek-v3").heads == 128
