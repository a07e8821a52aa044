"""Model configurations: the fields that are read, and rejections with field and rule."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.errors import ArgumentError
from mlagen.models.config import GqaModel, MlaModel, find_model, preset_names, read_model
from mlagen.models.names import known_names
from mlagen.spec.dtype import DType

# Values of the published configurations.
MLA_PRESETS = {
    "deepseek-v2": (128, False),
    "deepseek-v2-lite": (16, False),
    "deepseek-v3": (128, False),
    "deepseek-v3.2": (128, True),
    "glm-4.7-flash": (20, False),
    "glm-5": (64, True),
    "glm-5.3-flash": (64, True),
    "kimi-k2": (64, False),
}
GQA_PRESETS = {
    "llama-3-8b": (32, 8, 128),
    "llama-3-70b": (64, 8, 128),
    "qwen3-32b": (64, 8, 128),
    "gpt-oss-120b": (64, 8, 64),
}
MLA: dict[str, Any] = {
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "hidden_size": 2048,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
GQA: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}


RANKS = "(512, 64) or (256, 64) or (512, 0)"
OF_32, DIVISOR = "num_attention_heads 32, got", "divisor of"
MULTIPLE = "hidden_size that is a multiple of"


def read(config: object) -> MlaModel | GqaModel:
    """Return the model of a configuration."""
    return read_model("m", json.dumps(config).encode())


def test_every_preset_is_known_by_its_name() -> None:
    """The names are those of the files, and this module covers every file."""
    assert set(preset_names()) == {*MLA_PRESETS, *GQA_PRESETS}


@pytest.mark.parametrize("name", MLA_PRESETS)
def test_a_preset_with_latent_attention_is_as_it_was_published(name: str) -> None:
    """Heads, ranks and sparse attention match; names are case-insensitive."""
    heads, is_sparse = MLA_PRESETS[name]

    found = find_model(name.upper())

    assert found == MlaModel(
        name=name.upper(),
        dtype=DType.BF16,
        heads=heads,
        kv_lora_rank=512,
        qk_rope_head_dim=0 if name == "glm-5.3-flash" else 64,
        is_sparse=is_sparse,
    )


@pytest.mark.parametrize("name", GQA_PRESETS)
def test_a_preset_with_grouped_queries_is_as_it_was_published(name: str) -> None:
    """Heads, kv heads and head dim match."""
    heads, kv_heads, head_dim = GQA_PRESETS[name]
    assert find_model(name) == GqaModel(
        name=name, dtype=DType.BF16, heads=heads, kv_heads=kv_heads, head_dim=head_dim
    )


@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_any_other_model_is_found_by_its_path(is_folder: bool, tmp_path: Path) -> None:
    """The path is that of the file, or of its folder."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GQA))
    found = find_model(str(tmp_path if is_folder else path))
    assert isinstance(found, GqaModel)
    assert (found.kv_heads, found.head_dim) == (8, 128)


@pytest.mark.parametrize(
    ("changes", "kv_heads", "head_dim"),
    [
        ({}, 8, 128),
        ({"head_dim": None}, 8, 128),
        ({"head_dim": 64}, 8, 64),
        ({"num_key_value_heads": None}, 32, 128),
        ({"kv_lora_rank": None}, 8, 128),
    ],
    ids=str,
)
def test_defaults_of_grouped_queries(changes: dict[str, Any], kv_heads: int, head_dim: int) -> None:
    """Without head_dim it is hidden_size / heads, without kv heads every head has its own."""
    model = read(GQA | changes)
    assert isinstance(model, GqaModel)
    assert (model.kv_heads, model.head_dim) == (kv_heads, head_dim)


@pytest.mark.parametrize("label", ["text_config", "language_config", "llm_config"])
def test_the_part_that_generates_text_counts(label: str) -> None:
    """Multi-part models nest the text decoder; the dtype may be on either level."""
    model = read({label: MLA, "torch_dtype": "float16", "hidden_size": 1})
    assert isinstance(model, MlaModel)
    assert (model.heads, model.dtype) == (16, DType.FP16)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({}, DType.BF16),
        ({"dtype": "float16"}, DType.FP16),
        ({"torch_dtype": "float16"}, DType.FP16),
        ({"torch_dtype": "torch.float16"}, DType.FP16),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, DType.BF16),
        ({"dtype": "auto", "torch_dtype": None}, DType.BF16),
    ],
    ids=["absent", "new name", "old name", "of torch", "both", "auto"],
)
def test_the_dtype_is_that_of_the_activations(changes: dict[str, Any], dtype: DType) -> None:
    """The default is bf16."""
    assert read(MLA | changes).dtype is dtype


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "m: expected a JSON object, got list"),
        ({}, "m: num_attention_heads: expected 1 or more, got none"),
        (MLA | {"num_attention_heads": 0}, "m: num_attention_heads: expected 1 or more, got 0"),
        (MLA | {"num_attention_heads": True}, "m: num_attention_heads: expected 1 or more, got T"),
        (MLA | {"num_attention_heads": "16"}, "m: num_attention_heads: expected 1 or more, got '"),
        (MLA | {"qk_rope_head_dim": None}, "m: qk_rope_head_dim: expected 0 or more, got none"),
        (
            MLA | {"kv_lora_rank": 128},
            f"m: kv_lora_rank, qk_rope_head_dim: expected {RANKS}, got",
        ),
        (MLA | {"index_topk": -1}, "m: index_topk: expected 1 or more, got -1"),
        (MLA | {"dtype": "float32"}, "m: dtype: expected bfloat16 or float16, got 'float32'"),
        (
            GQA | {"num_key_value_heads": 5},
            f"m: num_key_value_heads: expected a divisor of {OF_32} 5",
        ),
        (GQA | {"hidden_size": 4097}, f"m: head_dim: expected it, or a {MULTIPLE} {OF_32} 4097"),
        (GQA | {"hidden_size": None}, "m: hidden_size: expected 1 or more, got none"),
        (GQA | {"head_dim": 72}, "m: head_dim: no GQA decode kernel for head_dim 72; supported: "),
    ],
)
def test_an_unsupported_configuration_is_rejected_by_field(config: object, message: str) -> None:
    """The message has the model, the field, the rule and the value."""
    with pytest.raises(ArgumentError) as caught:
        read(config)
    assert str(caught.value).startswith(message)


def test_invalid_json_is_rejected() -> None:
    """The message has the parse position."""
    with pytest.raises(ArgumentError, match=r"^m: expected JSON, got Expecting value: line 1"):
        read_model("m", b"\x7b\x22a\x22: }")


def test_an_unknown_name_lists_the_known_ones() -> None:
    """The message lists the known names, and mentions a path."""
    with pytest.raises(ArgumentError) as caught:
        find_model("gpt-5")
    assert str(caught.value) == (
        f"model: expected one of {', '.join(known_names())}, or the path of a config.json or of "
        f"its folder, got 'gpt-5'"
    )


def test_an_unreadable_file_is_rejected_with_the_reason(tmp_path: Path) -> None:
    """A folder in place of the file is one example."""
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ArgumentError) as caught:
        find_model(str(tmp_path))
    rule = "model: expected a readable config.json, got Is a directory: "
    assert str(caught.value) == f"{rule}{tmp_path}"


KEYS = (
    *("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "index_topk", "layer_types", "per_layer_config"),
    *("num_attention_heads_per_layer", "swa_head_dim", "global_head_dim", "multi_query"),
    *("multi_query_attention", "multi_query_group_num", "attention_other_setting", "text_config"),
    *("hybrid_override_pattern", "attn_type_list", "model_type", "architectures", "dtype"),
    *("position_embedding_type", "num_kv_heads", "kv_channels", "alibi", "block_configs"),
)
VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, 8, 64, 512, -1, 0.5, "", "mamba", "full_attention"])
    | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)
CONFIGS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=10)
HEADS = {"num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 4096}


def outcome_of(config: dict[str, Any]) -> str:
    """Return the model of a configuration, or the rejection."""
    try:
        model = read_model("m", json.dumps(config).encode())
    except ArgumentError as error:
        return str(error)
    return f"m: {model.heads} heads"


@given(CONFIGS)
@settings(max_examples=150, deadline=None)
def test_any_configuration_is_read_or_rejected_in_one_line(config: dict[str, Any]) -> None:
    """Values of a wrong type are rejected like any other mistake."""
    for whole in (config, HEADS | config, {**config, "text_config": HEADS | config}):
        outcome = outcome_of(whole)
        assert outcome.startswith("m: ")
        assert "\n" not in outcome
        assert len(outcome) < 300


@pytest.mark.parametrize("depth", [10, 200, 500, 900, 2000, 100_000])
@pytest.mark.parametrize("key", ["a", "attn_config", "alibi"])
def test_tables_in_tables_end(key: str, depth: int) -> None:
    """A deeply nested configuration is read or rejected without a RecursionError."""
    for begin, end in ((f'{{"{key}":', "}"), ("[", "]")):
        text = f'{{"{key}": {begin * depth}1{end * depth}}}'
        with suppress(ArgumentError):
            read_model("m", text.encode())
