"""Model names: presets, aliases, Hub ids, and the local Hub cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlagen.errors import ArgumentError
from mlagen.models.config import find_model
from mlagen.models.names import known_model, known_models, known_names
from mlagen.settings import current_settings

CONFIG = {"model_type": "llama", "num_attention_heads": 24, "head_dim": 64}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Install a fake huggingface_hub that finds a config.json for two ids."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = dict.fromkeys(("our/model", "deepseek-ai/DeepSeek-V3"), str(path))
    library: Any = SimpleNamespace(try_to_load_from_cache=lambda name, _: found.get(name))
    errors: Any = SimpleNamespace(HFValidationError=ValueError)
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets MLAGEN_HF."""

    def set_it(value: str) -> None:
        monkeypatch.setenv("MLAGEN_HF", value)
        current_settings.cache_clear()

    return set_it


NAMES: dict[str | None, str] = {
    "deepseek-v3": "deepseek-ai/DeepSeek-V3 DEEPSEEK-AI/deepseek-r1-0528 deepseek-r1 deepseek-v3.1",
    "deepseek-v3.2": "deepseek-ai/DeepSeek-V3.2-Exp",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct",
    "kimi-k2": "moonshotai/Kimi-K2.5 moonshotai/Kimi-K2-Instruct-0905 Kimi-K2-Thinking",
    "glm-5": "zai-org/GLM-5 zai-org/GLM-5.1-FP8",
    "llama-3-8b": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama-3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "qwen3-32b": "Qwen/Qwen3-32B-FP8",
    "qwen3-8b": "Qwen/Qwen3-4B-Instruct-2507",
    "gemma-4-31b": "google/gemma-4-31B-it",
    "llama-4-scout": "meta-llama/Llama-4-Maverick-17B-128E-Instruct-FP8",
    "deepseek-v4-flash": "deepseek-ai/DeepSeek-V4-Flash DeepSeek-V4-Flash-Base",
    "deepseek-v4-pro": "deepseek-ai/DeepSeek-V4-Pro",
    "deepseek-v4.1": "deepseek-ai/DeepSeek-V4.1-Flash",
    "gpt-oss-120b": "openai/gpt-oss-20b",
    None: "deepseek-ai/DeepSeek-R1-Distill-Llama-8B someone/DeepSeek-V3 glm-6",
}


@pytest.mark.parametrize(
    ("preset", "name"), [(preset, name) for preset in NAMES for name in NAMES[preset].split()]
)
def test_a_name_resolves_to_the_preset_with_the_same_attention(
    name: str, preset: str | None
) -> None:
    """A model with other heads, or of another owner, has no preset; known names are valid."""
    known = known_model(name)
    assert (known and known.name) == preset
    assert known_model("") is None


def test_every_known_name_has_one_model() -> None:
    """No two models share a name or alias, and each known name is its model's."""
    assert len(set(known_names())) == len(known_names())
    assert {known.name for name in known_names() if (known := known_model(name))} == {
        *known_models()
    }


LISTS = "expected the path of a config.json or of its folder, or a name that `mlagen models` lists"


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("gpt-5", ""),
        ("", ""),
        ("qwen3-14", "; did you mean qwen3-14b?"),
        ("llama-3-8", "; did you mean llama-3-8b?"),
        ("kimi-k4", "; did you mean kimi-k3 or kimi-k2 or kimi-k2.5?"),
        (
            "gemma-4",
            "; did you mean gemma-4-26b-a4b or gemma-4-31b or gemma-4-e2b or gemma-4-e4b?",
        ),
    ],
)
def test_an_unknown_name_has_a_hint_and_similar_names(name: str, guess: str) -> None:
    """The path of a config.json comes first, then names that begin like it or are spelled so."""
    with pytest.raises(ArgumentError) as caught:
        find_model(name)
    assert str(caught.value) == f"model: {LISTS}, got {name!r}{guess}"


def test_a_missing_path_is_called_missing() -> None:
    """Not a name that is unknown."""
    with pytest.raises(ArgumentError) as caught:
        find_model("/no/such/config.json")
    expected = "model: expected a config.json or its folder, got none: /no/such/config.json"
    assert str(caught.value) == expected


def test_a_folder_comes_before_the_model_of_the_same_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path takes precedence over a name."""
    path = tmp_path / "deepseek-ai" / "DeepSeek-V3" / "config.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert find_model("deepseek-ai/DeepSeek-V3").heads == 24


@pytest.mark.usefixtures("hub")
def test_the_hub_cache_is_read_with_mlagen_hf(switch: Callable[[str], None]) -> None:
    """It takes precedence over a preset; rejections have the switch, or the download command."""
    switch("1")
    assert find_model("our/model").heads == find_model("deepseek-ai/DeepSeek-V3").heads == 24
    with pytest.raises(ArgumentError, match=r"; run: hf download our/other config\.json$"):
        find_model("our/other")
    switch("0")
    remedy = "got 'our/model'; MLAGEN_HF=1 looks for a Hub id in the Hub's local cache$"
    with pytest.raises(ArgumentError, match=remedy):
        find_model("our/model")


def test_without_huggingface_hub_the_remedy_is_named(
    switch: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A preset by its short name needs no huggingface_hub."""
    switch("1")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ArgumentError, match=r"^MLAGEN_HF: expected huggingface_hub to be install"):
        find_model("our/model")
    assert find_model("deepseek-v3").heads == 128
