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
from mlagen.models.config import GqaModel, MlaModel, find_model, read_model
from mlagen.spec.dtype import DType

MLA: dict[str, Any] = {"model_type": "deepseek_v3", "num_attention_heads": 64, "v_head_dim": 128}
MLA |= {"hidden_size": 4096}
MLA |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1536, "qk_nope_head_dim": 128}
GQA: dict[str, Any] = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}
GQA |= {"hidden_size": 4096}


def read(config: object) -> MlaModel | GqaModel:
    """Return the model of a configuration."""
    return read_model("m", json.dumps(config).encode())


def test_any_other_model_is_found_by_its_path(tmp_path: Path) -> None:
    """The path is that of the file, or of its folder; what cannot be read is named."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GQA))
    for place in (tmp_path, path):
        found = find_model(str(place))
        assert isinstance(found, GqaModel)
        assert (found.kv_heads, found.head_dim) == (8, 128)
    path.unlink()
    path.mkdir()
    rule = "model: expected a readable config.json, got Is a directory: "
    with pytest.raises(ArgumentError, match=f"^{rule}{tmp_path}$"):
        find_model(str(tmp_path))


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
    assert (model.heads, model.dtype) == (64, DType.FP16)


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


def test_content_that_is_no_json_has_its_position() -> None:
    """The message has the position of the mistake."""
    with pytest.raises(ArgumentError, match=r"^m: expected JSON, got Expecting value: line 1"):
        read_model("m", b"\x7b\x22a\x22: }")


@pytest.mark.parametrize("key", ["attn\n\x1b[31m", "attn" * 50, "attn_config.\x07"])
def test_a_key_of_any_text_is_named_on_one_line(key: str) -> None:
    """Control characters of a foreign file do not reach the terminal, and a long key is cut."""
    with pytest.raises(ArgumentError) as caught:
        read(GQA | {f"{key}_heads": 1})
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


KEYS = (
    *("num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "v_head_dim"),
    *("kv_lora_rank", "qk_rope_head_dim", "index_topk", "layer_types", "per_layer_config"),
    *("num_attention_heads_per_layer", "swa_head_dim", "global_head_dim", "multi_query"),
    *("multi_query_attention", "multi_query_group_num", "attention_other_setting", "text_config"),
    *("hybrid_override_pattern", "attn_type_list", "model_type", "architectures", "dtype"),
    *("position_embedding_type", "num_kv_heads", "kv_channels", "alibi", "block_configs"),
)
LEAVES = [None, True, False, 0, 1, 8, 64, 512, -1, 0.5, "", "mamba", "full_attention"]
VALUES = st.recursive(
    st.sampled_from(LEAVES) | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)
CONFIGS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=10)
HEADS = {"num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 4096}


def outcome_of(config: dict[str, Any]) -> str:
    """Return the name of a configuration's model, or the rejection."""
    try:
        return f"{read(config).name}: "
    except ArgumentError as error:
        return str(error)


@given(CONFIGS)
@settings(max_examples=100, deadline=None)
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
