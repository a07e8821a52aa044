"""Any configuration is read, or rejected in one line."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlagen.errors import ArgumentError
from mlagen.models.config import read_model

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
