"""Layers of a model: which kinds attend over a KV cache, their windows, and the heads of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mlagen.models.fields import Fields

# Kinds of transformers, and names that it or older files have for them.
ALIASES = {
    "attention": "full_attention",
    "deepseek_sparse_attention": "indexed_attention",
    "qwen_sparse_attention": "indexed_attention",
    "mamba": "linear_attention",
}
# Kinds with a KV cache; the window is an argument of the call. "hybrid" layers have a state too.
GQA_KINDS = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")
MLA_KINDS = ("full_attention", "indexed_attention")
# DeepSeek-V4's: a query token attends to its last tokens, and to compressed ones in another pool.
POOL_KINDS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
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
# MiniMax-M3's: a query token attends to blocks of its own.
BLOCK_KINDS = ("minimax_m3_sparse",)
# Kinds with a kernel, and those without.
_KINDS_OF = {
    "gqa": (GQA_KINDS, LEFT_OUT),
    "block gqa": ((*GQA_KINDS, *BLOCK_KINDS), LEFT_OUT),
    "token gqa": (("full_attention", "indexed_attention"), LEFT_OUT),
    "mla": (MLA_KINDS, _MLA_LEFT_OUT),
    "two pools": (POOL_KINDS, {}),
}
_FEED_FORWARD = ("mlp", "moe")
_KINDS = ("layer_types", "layers_block_type", "block_types", "hybrid_override_pattern")
# Letters of Nemotron-H.
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# Windows of sliding layers: arguments of the call.
_WINDOWS = (
    *("sliding_window", "sliding_window_size", "window_size", "attention_window_size"),
    "attn_window_size",
)
_SOFT_CAP = "attn_logit_softcapping"
_LABELS = ("num_attention_heads", "num_key_value_heads", "head_dim")
# Other keys of single layers.
_OF_LAYERS = (
    *("attention_type", "num_attention_groups", "sliding_window", "true_head_dim", "v_head_dim"),
)


class GqaHeads(NamedTuple):
    """Head configuration of one or more GQA layers."""

    heads: int
    kv_heads: int
    head_dim: int
    head_dim_vo: int = 0  # of a value; 0: as of a key

    @property
    def dims(self) -> str:
        """The elements of a key, and of a value if they differ."""
        return f"{self.head_dim}/{self.head_dim_vo}" if self.head_dim_vo else f"{self.head_dim}"


def layers_left_out(fields: Fields, attention: str) -> tuple[tuple[str, ...], bool]:
    """Return a sentence for each kind of layer without a kernel, and whether any has a state.

    ``attention`` is ``gqa``, ``block gqa``, ``token gqa``, ``mla`` or ``two pools``. Raises
    ArgumentError if a kind is unknown, or none attends over a KV cache.
    """
    attending, left_out = _KINDS_OF[attention]
    found: dict[str, str] = {}
    for label in _KINDS:
        written = {name: ALIASES.get(name, name) for name in _kinds(fields, label)}
        for name, kind in written.items():
            if kind not in (*attending, *left_out, *_FEED_FORWARD):
                rule = " or ".join(dict.fromkeys((*attending, *left_out)))
                raise fields.rejection(label, rule, name)
        if written and not {*written.values()} & {*attending}:
            raise fields.rejection(label, f"some layers of {' or '.join(attending)}", [*written])
        if written:
            found = {name: left_out[kind] for name, kind in written.items() if kind in left_out}
            break
    has_state = any(why in (_STATE, _BESIDE) for why in found.values())
    sentences = (f"{fields.name}: layers of {kind}: {why}" for kind, why in found.items())
    return tuple(sentences), has_state


def window_of(fields: Fields) -> int | None:
    """Return the tokens of the window that some or all layers have, or None."""
    values = [fields.value(label) for label in _WINDOWS]
    if fields.value("use_sliding_window") is False:
        return None
    return next((value for value in values if type(value) is int and value > 0), None)


def caps_scores(fields: Fields) -> bool:
    """Return whether the scores have a soft cap.

    Raises ArgumentError if its value is none.
    """
    value = fields.value(_SOFT_CAP)
    is_number = type(value) in {int, float}
    if value and not (is_number and 0 < value < math.inf):
        raise fields.rejection(_SOFT_CAP, "a finite number above 0", value)
    return bool(value)


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


def gqa_heads(fields: Fields) -> list[GqaHeads]:
    """Return the head configurations of the layers, the default one first, without duplicates.

    Raises ArgumentError if a number is missing, or conflicts with the others.
    """
    base = _base_heads(fields)
    found = dict.fromkeys([*base, *_other_heads(fields, base[0])])
    for heads in found:
        if heads.heads % heads.kv_heads:
            rule = f"a divisor of num_attention_heads {heads.heads}"
            raise fields.rejection("num_key_value_heads", rule, heads.kv_heads)
    return list(found)


def reject_v_head_dim(fields: Fields, head_dim: int | None = None) -> None:
    """Reject a V head dim that differs from the K head dim, unless the type has such heads.

    ``head_dim`` is read if None. Raises ArgumentError, whose message names the key, the rule and
    the value.
    """
    if _has_value_dims(fields):
        return
    head_dim = head_dim or fields.value("head_dim")
    for label, wanted in (
        ("v_head_dim", head_dim),
        ("swa_v_head_dim", fields.value("swa_head_dim") or head_dim),
    ):
        value = fields.value(label)
        if value and wanted and value != wanted:
            raise fields.unserved(label, f"head_dim {wanted}", value)


def _has_value_dims(fields: Fields) -> bool:
    """Whether the class of a type reads the key; in other types it is unknown."""
    return fields.type is not None and "v_head_dim" in fields.type.sources


def _base_heads(fields: Fields) -> list[GqaHeads]:
    """Return the default head configuration; several if the fields are per-layer lists."""
    heads = _per_layer(fields, "num_attention_heads")
    kv_heads = _per_layer(fields, "num_key_value_heads")
    if not isinstance(heads, list):
        heads = [fields.checked("num_attention_heads", heads)]
    if not isinstance(kv_heads, list):
        kv_heads = [_kv_heads(fields, count) for count in heads]
    heads = heads * len(kv_heads) if len(heads) == 1 else heads
    if len(heads) != len(kv_heads):
        rule = f"one for each of {len(heads)} layers"
        raise fields.rejection("num_key_value_heads", rule, kv_heads)
    # The head dim follows from the hidden size, also for layers with fewer heads.
    first = fields.value("num_attention_heads")
    head_dim = _head_dim(fields, first if isinstance(first, int) else heads[0])
    head_dim_vo = _value_dim(fields, "v_head_dim", head_dim) if _has_value_dims(fields) else 0
    return [GqaHeads(*pair, head_dim, head_dim_vo) for pair in zip(heads, kv_heads, strict=True)]


def _value_dim(fields: Fields, label: str, head_dim: int) -> int:
    """Return the elements of a value, 0 for those of a key."""
    value = fields.count(label, default=head_dim)
    return value if value != head_dim else 0


def _per_layer(fields: Fields, label: str) -> Any:
    """Return the value of a field, or a checked list of those of each layer."""
    value = fields.value(label)
    value = fields.value(f"{label}_per_layer") or value
    if isinstance(value, list) and value:
        return [fields.checked(label, one) for one in value]
    return value


def _kv_heads(fields: Fields, heads: int) -> int:
    own_keys = fields.type.sources if fields.type else {}
    is_grouped = fields.value("new_decoder_architecture")  # of Falcon
    if "multi_query" in own_keys and fields.value("multi_query") and not is_grouped:
        return 1
    if "multi_query_attention" in own_keys and not fields.value("multi_query_attention"):
        return heads  # of ChatGLM
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if kv_heads > heads:
        rule = f"a divisor of num_attention_heads {heads}"
        raise fields.rejection("num_key_value_heads", rule, kv_heads)
    return kv_heads


def _head_dim(fields: Fields, heads: int) -> int:
    if fields.value("head_dim"):
        head_dim = fields.count("head_dim")
    else:
        hidden = fields.count("hidden_size")
        if hidden % heads:
            rule = f"it, or a hidden_size that is a multiple of num_attention_heads {heads}"
            raise fields.rejection("head_dim", rule, hidden)
        head_dim = hidden // heads
    reject_v_head_dim(fields, head_dim)
    return head_dim


def _other_heads(fields: Fields, base: GqaHeads) -> Iterator[GqaHeads]:
    """Yield the head configurations of sliding-window, global and individual layers."""
    swa = {label: fields.value(f"swa_{label}") for label in _LABELS}
    swa["num_attention_heads"] = swa["num_attention_heads"] or fields.value(
        "num_sliding_attention_heads"
    )
    swa["v_head_dim"] = fields.value("swa_v_head_dim")
    yield _override(fields, "swa_", base, swa)
    kv_heads = fields.value("num_global_key_value_heads")
    if fields.value("attention_k_eq_v") is False:
        kv_heads = None  # Gemma-4 uses them only if K equals V
    # Where transformers 5.24 saved the heads of single layers, they have replaced this key.
    is_replaced = "per_layer_config" in fields.config and "global_head_dim" not in fields.config
    head_dim = None if is_replaced else fields.value("global_head_dim")
    yield _override(
        fields, "global_", base, {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    )
    for label in ("attention_other_setting", "per_layer_config"):
        value = fields.value(label)
        if not value:
            continue
        if not isinstance(value, dict):
            raise fields.rejection(label, "a table", value)
        for one in [value] if label == "attention_other_setting" else value.values():
            if not isinstance(one, dict):
                raise fields.rejection(label, "a table for each layer", value)
            yield _override(fields, f"{label}.", base, one)


def _override(fields: Fields, where: str, base: GqaHeads, changes: Mapping[str, Any]) -> GqaHeads:
    """Return heads with the changes of some layers."""
    for key, value in changes.items():
        if key not in (*_LABELS, *_OF_LAYERS) and value is not None:
            rule = f"one of {', '.join(sorted((*_LABELS, *_OF_LAYERS)))}"
            raise fields.rejection(f"{where}{key}", rule, value)
    changes = {"num_key_value_heads": changes.get("num_attention_groups")} | {
        key: value for key, value in changes.items() if value is not None
    }
    values = [
        known if changes.get(label) is None else fields.checked(f"{where}{label}", changes[label])
        for label, known in zip(_LABELS, base[:3], strict=True)
    ]
    made = GqaHeads(*values)._replace(head_dim_vo=base.head_dim_vo)
    v_head_dim = changes.get("v_head_dim")
    if not v_head_dim:
        return made if made.head_dim == base.head_dim else made._replace(head_dim_vo=0)
    if v_head_dim == made.head_dim:
        return made._replace(head_dim_vo=0)
    if not _has_value_dims(fields):
        raise fields.rejection(f"{where}v_head_dim", f"head_dim {made.head_dim}", v_head_dim)
    return made._replace(head_dim_vo=fields.checked(f"{where}v_head_dim", v_head_dim))
