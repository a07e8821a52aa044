"""Published configurations: each is planned as its model attends, or refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from mlagen.errors import ArgumentError
from mlagen.models.config import MlaModel, read_model
from mlagen.models.fields import model_types
from mlagen.models.layers import ALIASES, BLOCK_KINDS, GQA_KINDS, LEFT_OUT, MLA_KINDS, POOL_KINDS

TABLE = Path(__file__).parent / "public_configs.tsv"
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None
    or Version(metadata.version("transformers")) < Version("5.24"),
    reason="needs transformers 5.24, whose words the table has",
)


def rows() -> Iterator[list[str]]:
    """Yield name, year, expected outcome and configuration of each model."""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            yield line.split("\t")


def outcome_of(content: str) -> str:
    """Return heads, dims and windows of each kind of layer, or the key that is refused."""
    try:
        model = read_model("m", content.encode())
    except ArgumentError as error:
        return f"refused {str(error).split(': ')[1]}"
    if isinstance(model, MlaModel):
        sparse = " sparse" if model.is_sparse else ""
        pools = " two pools" if model.has_two_pools else ""
        text = f"mla {model.heads} {model.kv_lora_rank}+{model.qk_rope_head_dim}{sparse}{pools}"
    else:
        layers = (f"{made.heads}/{made.kv_heads}x{made.dims}" for made in model.heads_of_layers())
        window = f" window {model.window}" if model.window else ""
        cap = " soft cap" if model.has_soft_cap else ""
        blocks = {0: "", 1: " tokens", 128: " blocks of 128"}[model.sparse_block]
        text = f"gqa {' '.join(layers)}{window}{cap}{blocks}"
    left_out = [sentence.split(": ")[1].removeprefix("layers of ") for sentence in model.left_out]
    return f"{text}; left out {' '.join(left_out)}" if left_out else text


@pytest.mark.parametrize(
    ("expected", "content"), [row[2:] for row in rows()], ids=[r[0] for r in rows()]
)
def test_a_published_configuration_is_planned_or_refused(expected: str, content: str) -> None:
    """Heads, dims, windows and omitted layers are those of the model, a refusal names the key."""
    assert outcome_of(content) == expected


def test_forty_models_are_tried_fifteen_of_them_of_2026() -> None:
    """The table has enough models, each once."""
    assert len({name for name, *_ in rows()}) == len(list(rows())) >= 40
    assert sum(year == "2026" for _, year, *_ in rows()) >= 15


@needs_transformers
def test_the_kinds_of_layers_are_those_of_transformers() -> None:
    """Aliases of kinds are the same, and each kind that transformers knows is known or refused."""
    from transformers import configuration_utils as upstream

    remap = upstream._LEGACY_LAYER_TYPE_REMAP
    assert {kind: remap[kind] for kind in ALIASES} == ALIASES
    # By the kind, and most of them by the model type too.
    refused = {"window_attention", "reference_sliding_attention"}
    known = {*GQA_KINDS, *BLOCK_KINDS, *MLA_KINDS, *POOL_KINDS, *LEFT_OUT, "moe"} - {
        "mamba2",
        "recurrent",
    }
    assert {*upstream.ALLOWED_ATTN_LAYER_TYPES} == known | refused


@needs_transformers
@pytest.mark.parametrize(
    "name",
    [
        *(
            "llama",
            "gemma3_text",
            "qwen3_5_text",
            "qwen3_moe",
            "gpt_oss",
            "cohere2",
            "gpt2",
            "dbrx",
        ),
        *(
            "deepseek_v3",
            "deepseek_v32",
            "deepseek_v4",
            "glm_moe_dsa",
            "kimi_linear",
            "hy_v4",
            "mistral4",
        ),
    ],
)
def test_what_a_missing_key_stands_for_is_the_default_of_transformers(name: str) -> None:
    """A missing number is the default of the class, by its own name for it."""
    from transformers import CONFIG_MAPPING

    row, made = model_types()[name], CONFIG_MAPPING[name]
    aliases: dict[str, Any] = made.attribute_map
    for label, source in row.sources.items():
        if isinstance(source, int):
            assert getattr(made, label) == source
        elif isinstance(source, str) and "." not in source:
            assert aliases[label] == source
