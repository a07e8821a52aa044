"""Layer kinds of a model: which ones attend over a KV cache."""

from __future__ import annotations

from mlagen.models.fields import Fields

# Layer kinds of transformers. The first two sets have a KV cache; the window is an argument of the
# call.
_GQA_KINDS = ("full_attention", "sliding_attention", "attention")
_MLA_KINDS = ("full_attention", "attention", "deepseek_sparse_attention")
_STATE_KINDS = ("linear_attention", "mamba", "mamba2", "conv", "recurrent")
_FEED_FORWARD = ("mlp", "moe")
_KINDS = ("layer_types", "layers_block_type", "block_types")
# Layer letters of Nemotron-H.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# Fields that imply recurrent layers if there is no list of kinds.
_STATE_FIELDS = (
    "linear_attn_config",
    "full_attention_interval",
    "attn_layer_period",
    "mamba_d_state",
    "linear_num_value_heads",
    "linear_num_heads",
)


def layers_left_out(fields: Fields, *, is_mla: bool) -> tuple[str, ...]:
    """Return a sentence for each kind of layer without attention over a KV cache.

    Raises
    ------
    ArgumentError
        If a kind is unknown, or none attends over a KV cache.
    """
    attending = _MLA_KINDS if is_mla else _GQA_KINDS
    for label in (*_KINDS, "hybrid_override_pattern"):
        kinds = _kinds(fields, label)
        if not kinds:
            continue
        for kind in kinds:
            if kind not in (*attending, *_STATE_KINDS, *_FEED_FORWARD):
                rule = " or ".join((*attending, *_STATE_KINDS))
                raise fields.rejection(label, rule, kind)
        if not set(kinds) & set(attending):
            raise fields.rejection(label, f"some layers of {' or '.join(attending)}", kinds)
        return tuple(
            f"{fields.name}: layers of {kind}: they have a recurrent state, not a KV cache"
            for kind in kinds
            if kind in _STATE_KINDS
        )
    found = [label for label in _STATE_FIELDS if fields.value(label)]
    types = fields.value("attn_type_list")
    if isinstance(types, list) and 0 in types:
        found.append("attn_type_list")
    return tuple(
        f"{fields.name}: layers of {label}: they have a recurrent state, not a KV cache"
        for label in found[:1]
    )


def _kinds(fields: Fields, label: str) -> list[str]:
    value = fields.value(label)
    if not value:
        return []
    if label == "hybrid_override_pattern" and isinstance(value, str):
        return list(dict.fromkeys(_LETTERS.get(letter, letter) for letter in value))
    if not isinstance(value, list) or not all(isinstance(kind, str) for kind in value):
        raise fields.rejection(label, "a list of kinds of layers", value)
    return list(dict.fromkeys(value))
