"""Rejection of unknown attention keys in a model configuration.

A new kind of attention adds keys to its configuration; a reader that ignores them mistakes it for a
known kind. So every key about attention is either read, known to change no decode kernel, or
rejected by name.
"""

from __future__ import annotations

import re

from mlagen.models.fields import Fields

# Keys about attention, by their words.
_ATTENTION_KEYS = re.compile(
    r"(^|_)(heads?|headdim|attn|attention|kv|q|qk|qkv|query|queries|mla|swa|lora_rank|sliding"
    r"|window|alibi|softcap\w*|relative|rel|compress\w*|hybrid|chunked|kda|sparse_(attn|block|topk|config))"
    r"(_|$)|^index(er)?_|^(mtp_)?(layers?_(block_)?types?|layers_block_type|block_types)$"
    r"|^position_(bias|embedding_type)|^per_layer_config$|^full_attn"
)
# Attention keys that no decode kernel depends on: projections, rotary embedding and scaling, sinks,
# which every family supports, and heads of other layers.
_IGNORED_KEYS = re.compile(
    r"dropout|pdrop|(?<!position)_bias$|^qkv_bias$|norm($|_)|(rope|rotary)(?!_head_dim)|sink"
    r"|_in_fp32$|reorder_and_upcast|scal(e|ar|ing)(_|$)|multiplier|temperature|(alpha|beta)_factor"
    r"|fuse|_attn_implementation|^attn_implementation|flash_att|^output_attentions$|clip_qkv"
    r"|(^|_)lm_head(_|$)|ngram|num_query_tokens|kv_shared|parallel_attn|attention_(k_eq_v|out_bias)"
    r"|^(linear|mamba|conv|ssm|kda)_|mlp_layer|mtp_|query_dict|initializer|kv_cache|_gate$"
    r"|^resampler_|^cross_attention_layers$|^(n|num)_mamba_heads$|latent_size|gating|logn|^mla_use_nope$|^attention_method$|^full_attn_mod$|^share_q_dim$"
    r"|^compression_ratio$"
)
_NEVER_IGNORED = re.compile(r"alibi|relative|compress(ed|_)|(attn|attention)\w*softcap")
_BOTH = {"num_attention_heads", "num_key_value_heads", "layer_types", "layers_block_type"}
_BOTH |= {"head_dim", "v_head_dim", "use_mla", "kv_lora_rank", "linear_attn_config"}
_BOTH |= {"position_embedding_type", "full_attention_interval", "use_bidirectional_attention"}
_BOTH |= {"num_heads", "n_heads", "n_head"}  # compared with num_attention_heads
_BOTH |= {"final_logit_softcapping", "moe_router_logit_softcapping", "hybrid_override_pattern"}
_MLA = {"q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "qk_head_dim"}
_GQA = {"num_kv_heads", "multi_query", "multi_query_attention", "multi_query_group_num"}
_GQA |= {
    "num_attention_groups",
    "num_query_groups",
    "attention_head_dim",
    "head_size",
    "kv_channels",
}
_GQA |= {"num_attention_heads_per_layer", "num_key_value_heads_per_layer", "per_layer_config"}
_GQA |= {"swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim"}
_GQA |= {"num_sliding_attention_heads", "attention_other_setting", "block_types"}
_GQA |= {"global_head_dim", "num_global_key_value_heads", "attn_type_list"}
# Windows and layer patterns: the window is an argument of the call, not of the kernel.
_GQA |= {"sliding_window", "sliding_window_size", "sliding_window_pattern", "window_size"}
_GQA |= {"_sliding_window_pattern", "prefix_dense_sliding_window_pattern", "use_sliding_window"}
_GQA |= {"max_window_layers", "attention_window_size", "attn_window_size"}
_GQA |= {"global_attn_every_n_layers"}
_GQA |= {"hybrid_layer_pattern", "attn_layer_period", "attn_layer_offset", "attn_layer_indices"}
_GQA |= {"local_attention", "full_attn_idxs", "attention_layers", "attention_types"}
_SPARSE_ATTENTION = re.compile(r"^index(er)?_(?!.*(block|compress))")


def reject_unknown(fields: Fields, *, is_mla: bool) -> None:
    """Reject attention keys that mlagen does not know.

    Raises
    ------
    ArgumentError
        Names the key and its value.
    """
    known = _BOTH | (_MLA if is_mla else _GQA)
    if fields.value("use_mla") is False:  # MLA fields stay in the configuration then
        known |= _MLA
    rule = f"no such key, as mlagen does not know its effect on {'MLA' if is_mla else 'GQA'}"
    for label, value in fields.set_items():
        # Keys inside a known table are read with it.
        table, last = label.split(".")[0], label.split(".")[-1]
        if not _ATTENTION_KEYS.search(last) or table in known:
            continue
        if is_mla and _SPARSE_ATTENTION.match(table):
            continue
        if not _IGNORED_KEYS.search(last) or _NEVER_IGNORED.search(last):
            raise fields.rejection(label, rule, value)
