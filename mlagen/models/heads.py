"""Head configurations of a GQA model, which may differ between layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from mlagen.models.fields import Fields

_KV_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
    *("num_attention_groups", "num_query_groups"),
)
# Aliases of num_attention_heads; alone they may belong to linear-attention layers.
_HEADS = ("num_heads", "n_heads", "n_head")
_HEAD_DIM = ("head_dim", "attention_head_dim", "kv_channels", "head_size", "hidden_size_per_head")
_OVERRIDES = {"num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"}
_OVERRIDES |= {"true_head_dim", "num_attention_groups", "sliding_window", "attention_type"}


class GqaHeads(NamedTuple):
    """Head configuration of one or more GQA layers."""

    heads: int
    kv_heads: int
    head_dim: int


def gqa_heads(fields: Fields) -> list[GqaHeads]:
    """Return the head configurations of the layers, the default one first, without duplicates.

    Raises
    ------
    ArgumentError
        If a number is missing, or conflicts with the others.
    """
    base = _base_heads(fields)
    for label in _HEADS:
        if fields.value(label) not in (None, fields.value("num_attention_heads")):
            rule = f"num_attention_heads {fields.value('num_attention_heads')}"
            raise fields.rejection(label, rule, fields.value(label))
    found = dict.fromkeys([*base, *_other_heads(fields, base[0])])
    for heads in found:
        if heads.heads % heads.kv_heads:
            rule = f"a divisor of num_attention_heads {heads.heads}"
            raise fields.rejection("num_key_value_heads", rule, heads.kv_heads)
    return list(found)


def reject_other_values(fields: Fields, head_dim: int | None = None) -> None:
    """Reject a V head dim that differs from the K head dim; ``head_dim`` is read if None.

    Raises
    ------
    ArgumentError
        Names the key, the rule and the value.
    """
    head_dim = head_dim or fields.count_of(_HEAD_DIM)
    if head_dim is None:
        return
    for label in ("v_head_dim", "swa_v_head_dim"):
        wanted = fields.value("swa_head_dim") or head_dim if label.startswith("swa") else head_dim
        value = fields.value(label)
        if value and value != wanted:
            raise fields.unserved(label, f"head_dim {wanted}", value)


def _base_heads(fields: Fields) -> list[GqaHeads]:
    """Return the default head configuration; several if the fields are per-layer lists."""
    label = "num_attention_heads"
    per_layer = fields.value(f"{label}_per_layer")
    heads = _several(fields, label, fields.value(label) if per_layer is None else per_layer)
    kv_label = "num_key_value_heads"
    kv_per_layer = fields.value(f"{kv_label}_per_layer") or fields.value(kv_label)
    if isinstance(kv_per_layer, list):
        kv_heads = _several(fields, kv_label, kv_per_layer)
        if len(heads) not in (1, len(kv_heads)):
            raise fields.rejection(kv_label, f"one for each of {len(heads)} layers", kv_per_layer)
        heads = heads * len(kv_heads) if len(heads) == 1 else heads
    else:
        kv_heads = [_kv_heads(fields, count) for count in heads]
    # The head dim follows from the hidden size, also for layers with fewer heads.
    first = fields.value(label)
    head_dim = _head_dim(fields, first if isinstance(first, int) else heads[0])
    return [GqaHeads(*pair, head_dim) for pair in zip(heads, kv_heads, strict=True)]


def _several(fields: Fields, label: str, value: object) -> list[int]:
    values = value if isinstance(value, list) and value else [value]
    return [fields.checked(label, one) for one in values]


def _kv_heads(fields: Fields, heads: int) -> int:
    for label in (*_KV_HEADS, "multi_query_group_num"):
        fields.value(label)  # whether it is used or not
    shared = fields.value("multi_query") and not fields.value("new_decoder_architecture")
    if shared:  # Falcon then has one kv head, and ignores num_kv_heads
        kv_heads = fields.count("num_key_value_heads", default=1)
        if kv_heads != 1:
            raise fields.rejection("num_key_value_heads", "1 beside multi_query", kv_heads)
        return 1
    if fields.value("multi_query_attention"):
        return fields.count("multi_query_group_num")
    found = fields.count_of(_KV_HEADS)
    if found is None and fields.omits("num_key_value_heads"):
        raise fields.rejection("num_key_value_heads", f"it in {fields.part}", None)
    if found is not None and found > heads:
        rule = f"a divisor of num_attention_heads {heads}"
        raise fields.rejection("num_key_value_heads", rule, found)
    return heads if found is None else found


def _head_dim(fields: Fields, heads: int) -> int:
    head_dim = fields.count_of(_HEAD_DIM)
    if head_dim is None:
        if fields.omits("head_dim"):
            raise fields.rejection("head_dim", f"it in {fields.part}", None)
        hidden = fields.count("hidden_size")
        if hidden % heads:
            rule = f"it, or a hidden_size that is a multiple of num_attention_heads {heads}"
            raise fields.rejection("head_dim", rule, hidden)
        head_dim = hidden // heads
    reject_other_values(fields, head_dim)
    return head_dim


def _other_heads(fields: Fields, base: GqaHeads) -> Iterator[GqaHeads]:
    """Yield the head configurations of sliding-window, global and individual layers."""
    swa = {
        "num_attention_heads": fields.value("swa_num_attention_heads")
        or fields.value("num_sliding_attention_heads"),
        "num_key_value_heads": fields.value("swa_num_key_value_heads"),
        "head_dim": fields.value("swa_head_dim"),
    }
    yield _override(fields, "swa_", base, swa)
    kv_heads = fields.value("num_global_key_value_heads")
    if fields.value("attention_k_eq_v") is False:
        kv_heads = None  # Gemma-4 uses them only if K equals V
    # Where transformers 5.24 saved the heads of single layers, they have replaced this key.
    is_replaced = "per_layer_config" in fields.config and "global_head_dim" not in fields.config
    head_dim = None if is_replaced else fields.value("global_head_dim")
    changes = {"num_key_value_heads": kv_heads, "head_dim": head_dim}
    yield _override(fields, "global_", base, changes)
    for label in ("attention_other_setting", "per_layer_config"):
        value = fields.value(label)
        if not value:
            continue
        if not isinstance(value, dict):
            raise fields.rejection(label, "a table", value)
        for one in [value] if label == "attention_other_setting" else value.values():
            if not isinstance(one, dict):
                raise fields.rejection(label, "a table for each layer", value)
            yield _override(fields, label, base, one)


def _override(fields: Fields, where: str, base: GqaHeads, changes: Mapping[str, Any]) -> GqaHeads:
    for key, value in changes.items():
        if key not in _OVERRIDES and value is not None:
            raise fields.rejection(
                f"{where}.{key}", f"one of {', '.join(sorted(_OVERRIDES))}", value
            )
    labels = ("num_attention_heads", "num_key_value_heads", "head_dim")
    given = [changes.get(label) for label in labels]
    if given[1] is None:
        given[1] = changes.get("num_attention_groups")
    made = GqaHeads(
        *(
            fields.checked(f"{where}{label}" if where.endswith("_") else f"{where}.{label}", value)
            if value is not None
            else known
            for label, value, known in zip(labels, given, base, strict=True)
        )
    )
    v_head_dim = changes.get("v_head_dim")
    if v_head_dim and v_head_dim != made.head_dim:
        raise fields.rejection(f"{where}.v_head_dim", f"head_dim {made.head_dim}", v_head_dim)
    return made
