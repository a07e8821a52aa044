"""Layer kinds of a model: which ones attend over a KV cache, and which keys name them."""

from __future__ import annotations

from mlagen.models.fields import Fields

# Kinds of transformers, and names that it or older files have for them.
ALIASES = {
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "mamba": "linear_attention",
}
# Kinds with a KV cache; the window is an argument of the call. "hybrid" layers have a state too.
GQA_KINDS = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")
MLA_KINDS = ("full_attention", "indexed_attention")
_STATE = "they have a recurrent state, not a KV cache"
_BESIDE = "beside the KV cache they have a recurrent state, which no kernel here updates"
# Kinds without a kernel, beside others that have one, with the reason.
LEFT_OUT = {
    "linear_attention": _STATE,
    "mamba2": _STATE,
    "conv": _STATE,
    "recurrent": _STATE,
    "hybrid": _BESIDE,
    "hybrid_sliding": _BESIDE,
    "chunked_attention": "no kernel attends in chunks",
}
_MLA_LEFT_OUT = LEFT_OUT | {"sliding_attention": "no MLA kernel has a window"}
_FEED_FORWARD = ("mlp", "moe")
_KINDS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
# Letters of Nemotron-H.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# Keys that imply recurrent layers where no key names the kinds, with their kind.
_STATE_FIELDS = {
    "linear_attn_config": "linear_attention",
    "layer_group_size": "linear_attention",  # the last layer of each group attends
    "full_attention_interval": "linear_attention",
    "full_attention_layers": "linear_attention",
    "linear_num_value_heads": "linear_attention",
    "linear_num_heads": "linear_attention",
    "attn_type_list": "linear_attention",  # 0 for each layer that is one
    "attn_layer_period": "mamba",
    "attn_layer_indices": "mamba",
    "mamba_d_state": "mamba",
}
# Windows of sliding layers, and which layers they are: arguments of the call.
_WINDOWS = (
    *("sliding_window", "sliding_window_size", "window_size", "attention_window_size"),
    "attn_window_size",
)
_PATTERNS = (
    *("use_sliding_window", "max_window_layers", "sliding_window_pattern"),
    *("_sliding_window_pattern", "prefix_dense_sliding_window_pattern", "local_attention"),
    *("global_attn_every_n_layers", "hybrid_layer_pattern", "attention_layers", "attention_types"),
    *("attn_layer_offset", "full_attn_idxs", "full_attention_idx"),
)


def layers_left_out(fields: Fields, *, is_mla: bool) -> tuple[tuple[str, ...], bool]:
    """Return a sentence for each kind of layer without a kernel, and whether any has a state.

    Raises
    ------
    ArgumentError
        If a kind is unknown, or none attends over a KV cache.
    """
    implied = _implied_kinds(fields)
    attending, left_out = (MLA_KINDS, _MLA_LEFT_OUT) if is_mla else (GQA_KINDS, LEFT_OUT)
    for label in _KINDS:
        written = _kinds(fields, label)
        kinds = [ALIASES.get(kind, kind) for kind in written]
        if not kinds:
            continue
        for name, kind in zip(written, kinds, strict=True):
            if kind not in (*attending, *left_out, *_FEED_FORWARD):
                rule = " or ".join(dict.fromkeys((*attending, *left_out)))
                raise fields.rejection(label, rule, name)
        if not set(kinds) & set(attending):
            raise fields.rejection(label, f"some layers of {' or '.join(attending)}", written)
        found = {
            name: left_out[kind]
            for name, kind in zip(written, kinds, strict=True)
            if kind in left_out
        }
        break
    else:
        found = dict.fromkeys(implied[:1], _STATE)
    has_state = any(why in (_STATE, _BESIDE) for why in found.values())
    sentences = (f"{fields.name}: layers of {kind}: {why}" for kind, why in found.items())
    return tuple(sentences), has_state


def window_of(fields: Fields) -> int | None:
    """Return the tokens of the window that some or all layers have, or None."""
    for label in _PATTERNS:
        fields.value(label)
    values = [fields.value(label) for label in _WINDOWS]
    if fields.value("use_sliding_window") is False:
        return None
    return next((value for value in values if type(value) is int and value > 0), None)


def _implied_kinds(fields: Fields) -> list[str]:
    """Return the kinds of recurrent layers that keys imply."""
    return [
        kind
        for label, kind in _STATE_FIELDS.items()
        if (value := fields.value(label)) not in (None, False, 0, 1)
        and (label != "attn_type_list" or (isinstance(value, list) and 0 in value))
    ]


def _kinds(fields: Fields, label: str) -> list[str]:
    value = fields.value(label)
    if value is None and fields.type is not None:  # null is derived from other keys
        value = fields.type.sources.get(label)
    if not value:
        return []
    if label == "hybrid_override_pattern" and isinstance(value, str):
        return list(dict.fromkeys(_LETTERS.get(letter, letter) for letter in value))
    if not isinstance(value, list) or not all(isinstance(kind, str) for kind in value):
        raise fields.rejection(label, "a list of kinds of layers", value)
    return list(dict.fromkeys(value))
