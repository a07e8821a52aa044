"""Model types and attention keys of configurations: each is known, or rejected by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from mlagen.errors import ArgumentError
from mlagen.models.config import GqaModel, MlaModel
from tests.models.test_config import GQA as BARE_GQA
from tests.models.test_config import MLA, read

GQA = BARE_GQA | {"head_dim": 128}
FALCON = {"model_type": "falcon", "num_attention_heads": 64, "hidden_size": 4096, "num_kv_heads": 8}
M3 = {"model_type": "minimax_m3_vl_text"}
V4: dict[str, Any] = {"model_type": "deepseek_v4", "num_attention_heads": 64, "head_dim": 512}
CHATGLM: dict[str, Any] = {"model_type": "chatglm", "num_attention_heads": 32, "kv_channels": 128}
CHATGLM |= {"hidden_size": 4096, "multi_query_group_num": 2}


def changed(config: dict[str, Any]) -> Callable[..., dict[str, Any]]:
    """Return a function that changes a configuration."""
    return lambda **changes: config | changes


gqa, mla = changed(GQA), changed(MLA)


def layers(**changes: object) -> dict[str, Any]:
    """Return a GQA configuration whose second layer has changes."""
    return gqa(per_layer_config={"1": changes})


def heads_of(config: object) -> list[tuple[int, int, int]]:
    """Return the heads of the layers of a GQA configuration."""
    model = read(config)
    assert isinstance(model, GqaModel)
    return [(made.heads, made.kv_heads, made.head_dim) for made in model.heads_of_layers()]


DBRX = {"d_model": 6144, "n_heads": 48, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8}}
STEP = {
    "model_type": "step3p5",
    "num_attention_heads": 64,
    "num_attention_groups": 8,
    "head_dim": 128,
}
STEP_OTHERS = {"num_attention_heads": 96, "num_attention_groups": 8}
SWA = {"swa_num_attention_heads": 64, "swa_num_key_value_heads": 16, "swa_head_dim": 64}
GLOBAL = {"global_head_dim": 256, "num_global_key_value_heads": 2}
LAYERS = {"5": {"head_dim": 512}, "11": {"head_dim": 512}}


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        (gqa(global_head_dim=512), [(32, 8, 128), (32, 8, 512)]),
        (gqa(**GLOBAL), [(32, 8, 128), (32, 2, 256)]),
        (gqa(model_type="gemma4_text"), [(32, 8, 128), (32, 8, 512)]),
        (gqa(model_type="gemma4_text", per_layer_config={}), [(32, 8, 128)]),
        ({"model_type": "llama"}, [(32, 32, 128)]),
        ({"model_type": "gpt2", "n_head": 20, "n_embd": 1280}, [(20, 20, 64)]),
        ({"model_type": "dbrx", **DBRX}, [(48, 8, 128)]),
        (gqa(**GLOBAL, attention_k_eq_v=False), [(32, 8, 128), (32, 8, 256)]),
        (gqa(per_layer_config=LAYERS), [(32, 8, 128), (32, 8, 512)]),
        (gqa(per_layer_config={"5": {"num_attention_heads": 64}}), [(32, 8, 128), (64, 8, 128)]),
        (gqa(num_attention_heads_per_layer=[32, 48]), [(32, 8, 128), (48, 8, 128)]),
        (gqa(num_key_value_heads=[8, 4, 8]), [(32, 8, 128), (32, 4, 128)]),
        (gqa(**SWA), [(32, 8, 128), (64, 16, 64)]),
        (gqa(num_sliding_attention_heads=96), [(32, 8, 128), (96, 8, 128)]),
        (STEP | {"attention_other_setting": STEP_OTHERS}, [(64, 8, 128), (96, 8, 128)]),
        (FALCON | {"multi_query": True}, [(64, 1, 64)]),
        (FALCON | {"multi_query": False}, [(64, 8, 64)]),
        (FALCON | {"multi_query": True, "new_decoder_architecture": True}, [(64, 8, 64)]),
        (CHATGLM | {"multi_query_attention": True}, [(32, 2, 128)]),
        (CHATGLM | {"multi_query_attention": False}, [(32, 32, 128)]),
        (gqa(model_type="deepseek_v2", use_mla=False, qk_nope_head_dim=64), [(32, 8, 128)]),
    ],
)
def test_heads_are_those_of_every_layer(config: object, heads: list[tuple[int, int, int]]) -> None:
    """Layers with other heads are read, and every alias of a field."""
    assert heads_of(config) == heads


BLOCKS = "expected dense or top-k sparse (DSA) attention, not block-sparse attention, got"
NO_KEY = "expected no such key, as mlagen does not know"
NO_TYPE = "model_type: expected a type of decoder that mlagen knows, got"
RANKS = "(512, 64) or (256, 64) or (512, 0)"
HEADS, OF_32 = "num_attention_heads: expected 1 or more, got", "num_attention_heads 32, got"
MULTIPLE = "hidden_size that is a multiple of"
V_HEADS = {"head_dim": 192, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([], "expected a JSON object, got list"),
        ({}, f"{NO_TYPE} none"),
        (gqa(model_type=5), f"{NO_TYPE} 5"),
        (gqa(model_type="hubert"), f"{NO_TYPE} 'hubert'"),
        (gqa(model_type="minimax_m4"), f"{NO_TYPE} 'minimax_m4'; did you mean minimax_m3 or mini"),
        ({"text_config": GQA | {"model_type": "future"}}, f"{NO_TYPE} 'future'"),
        (mla(num_attention_heads=0), f"{HEADS} 0"),
        (mla(num_attention_heads=True), f"{HEADS} True"),
        (mla(num_attention_heads="16"), f"{HEADS} '16'"),
        (mla(num_attention_heads=10**400), "num_attention_heads: expected at most 2147483647, got"),
        (mla(qk_rope_head_dim=None), "qk_rope_head_dim: expected 0 or more, got none"),
        (mla(kv_lora_rank=128), f"kv_lora_rank, qk_rope_head_dim: expected {RANKS}, got"),
        (mla(index_topk=-1), "index_topk: expected 1 or more, got -1"),
        (mla(dtype="float32"), "dtype: expected bfloat16 or float16, got 'float32'"),
        (gqa(num_key_value_heads=5), f"num_key_value_heads: expected a divisor of {OF_32} 5"),
        (
            gqa(num_key_value_heads=[8, 4], num_attention_heads=[8] * 3),
            "num_key_value_heads: expected",
        ),
        (BARE_GQA | {"hidden_size": 4097}, f"head_dim: expected it, or a {MULTIPLE} {OF_32} 4097"),
        (BARE_GQA | {"hidden_size": None}, "hidden_size: expected 1 or more, got none"),
        (gqa(head_dim=72), "head_dim: no GQA decode kernel for head_dim 72; supported: "),
        (gqa(compress_rates={"a": 4}), "compress_rates: expected a KV cache of all tokens, not "),
        (V4 | {"head_dim": 576}, "head_dim, qk_rope_head_dim: expected (512, 64), got (576, 64)"),
        (V4 | {"qk_rope_head_dim": 32}, "head_dim, qk_rope_head_dim: expected (512, 64), got"),
        (V4 | {"layer_types": ["full_attention"]}, "layer_types: expected sliding_attention or c"),
        (V4 | {"compress_group": 4}, "compress_group: expected a KV cache of all tokens, not a c"),
        (V4 | {"kv_group_dim": 4}, f"kv_group_dim: {NO_KEY} its effect on MLA, got 4"),
        (
            {"model_type": "qwen4_exp", "layer_types": ["sliding_attention"]},
            "layer_types: expected full_attention or indexed_attention or linear_attention or ",
        ),
        (M3 | {"index_block_size": 64}, "index_block_size: expected 128, got 64"),
        (
            M3 | {"sparse_attention_config": {"sparse_block_size": 64}},
            "sparse_attention_config.sparse_block_size: expected 128, got 64",
        ),
        ({"model_type": "mamba"}, "model_type: expected layers that attend over a KV cache, got"),
        (gqa(model_type="diffllama"), "model_type: expected attention without differences"),
        (gqa(layer_types=["minimax_m3_sparse"]), "layer_types: expected full_attention or "),
        (gqa(layer_types=["mamba"]), "layer_types: expected some layers of full_attention"),
        (gqa(layer_types="full_attention"), "layer_types: expected a list of kinds of layers"),
        (gqa(layer_types=["indexed_attention"]), "layer_types: expected full_attention or "),
        (mla(layer_types=["sliding_attention"]), "layer_types: expected some layers of full_"),
        (mla(sliding_window=128), "sliding_window: expected MLA without a window, got 128"),
        (gqa(**V_HEADS), "v_head_dim: expected head_dim 192, got 128"),
        (
            gqa(model_type="mimo_v2", v_head_dim=192),
            "head_dim: no GQA decode kernel for values of 1",
        ),
        (gqa(swa_head_dim=192, swa_v_head_dim=128), "swa_v_head_dim: expected head_dim 192, got 1"),
        (layers(v_head_dim=64), "per_layer_config.v_head_dim: expected head_dim 128, got 64"),
        (layers(latent_dim=64), "per_layer_config.latent_dim: expected one of "),
        (gqa(per_layer_config=5), "per_layer_config: expected a table, got 5"),
        (gqa(per_layer_config={"1": 5}), "per_layer_config: expected a table for each layer, got "),
        (gqa(alibi=True), "alibi: expected attention without ALiBi, got True"),
        (gqa(attn_config={"alibi": True}), "attn_config.alibi: expected attention without"),
        (gqa(position_embedding_type="alibi"), "position_embedding_type: expected rope or "),
        (gqa(attn_logit_softcapping=50.0), "attn_logit_softcapping: expected scores that are not "),
        (
            gqa(model_type="gemma2", attn_logit_softcapping=-1),
            "attn_logit_softcapping: expected a f",
        ),
        (gqa(attention_chunk_size=8192), "attention_chunk_size: expected attention that is not ch"),
        (gqa(index_topk_blocks=16), f"index_topk_blocks: {BLOCKS} 16"),
        (mla(index_topk=1, index_block_size=4), f"index_block_size: {BLOCKS} 4"),
        (gqa(sparse_config={"topk": 64}), f"sparse_config: {BLOCKS}"),
        (gqa(d_rel=16), "d_rel: expected attention without relative positions, got 16"),
        (gqa(is_encoder_decoder=True), "is_encoder_decoder: expected a decoder alone, got"),
        (gqa(is_causal=False), "is_causal: expected causal attention, got False"),
        (gqa(use_bidirectional_attention=True), "use_bidirectional_attention: expected caus"),
        (gqa(block_configs=[{"attention": {"n": 8}}]), f"block_configs.attention: {NO_KEY}"),
        (gqa(kv_lora_rank=512), f"kv_lora_rank: {NO_KEY} its effect on GQA, got 512"),
        (gqa(num_kv_heads=4), f"num_kv_heads: {NO_KEY} its effect on GQA, got 4; did you mean num"),
    ],
)
def test_a_configuration_is_rejected_by_key(config: object, message: str) -> None:
    """The message has key, rule and value, in one line."""
    with pytest.raises(ArgumentError) as caught:
        read(config)
    assert str(caught.value).startswith(f"m: {message}")
    assert "\n" not in str(caught.value)


# A key about attention that no model has is rejected, in any known type.
UNKNOWN = (
    "attn_top_k attention_sparsity kv_group_dim q_heads_per_kv qk_dim d_kv use_mqa gqa_ratio "
    "nsa_block_size moba_chunk_size dsa_topk kv_latent_dim block_sparse_attention bidirectional "
    "softcap position_bias layer_pattern differential_attention cross_layer_kv value_head_dim "
    "local_attention_block_size attention_type attn_block_size num_landmark_heads keep_window_size "
    "compress_ratio kv_compression_ratio o_lora_rank attention_chunk attn_hop_size sparse_topk "
    "mixer_types shared_kv_heads num_heads kv_channels multi_query noncausal attn_forget_gate "
    "window_sizes sliding_windows sliding_layers use_tpa_attention qk_clip index_heads"
)
# A key of other layers, of norms, gates and positions, or of no attention, is not.
HARMLESS = (
    "attention_bias attn_pdrop qk_norm_eps qkv_bias attention_scaling use_flash_attention theta "
    "kv_cache_dtype attn_output_gate swa_rope_theta lm_head_dim mamba_heads linear_num_heads "
    "vision_heads mtp_num_heads moe_heads attn_softmax_in_fp32 mla_use_nope num_experts "
    "intermediate_size vocab_size topk_group n_positions max_position_embeddings prefix_lm"
)


@pytest.mark.parametrize("config", [gqa(), mla()], ids=["gqa", "mla"])
def test_an_unknown_key_about_attention_is_rejected(config: dict[str, Any]) -> None:
    """A key that nobody thought of is one of another kind of attention, if it is about any."""
    for key in UNKNOWN.split():
        if not (key == "index_heads" and "kv_lora_rank" in config):  # it chooses the tokens
            with pytest.raises(ArgumentError, match=f"^m: {key}: expected "):
                read(config | {key: 2})
    plain = read(config)
    for key in HARMLESS.split():
        assert (key, replace(read(config | {key: 2}), left_out=(), is_hybrid=False)) == (key, plain)


def test_a_nested_part_omits_class_defaults() -> None:
    """A missing number is the default of the type, or of the type around a part without one."""
    for label, llama, gemma in (
        ("head_dim", (32, 8, 128), (32, 8, 256)),
        ("num_key_value_heads", (32, 32, 128), (32, 4, 128)),
    ):
        part = {key: value for key, value in GQA.items() if key != label}
        assert heads_of({"text_config": part}) == [llama]
        assert heads_of({"text_config": part | {"model_type": "gemma3_text"}}) == [gemma]
    inner = {"num_attention_heads": 32, "kv_lora_rank": 512, "attn_res_block_size": 12}
    assert read({"model_type": "kimi_k3", "text_config": inner}).left_out
    config = {"num_attention_heads": 4, "thinker_config": {"alibi": 1, "text_config": GQA}}
    assert heads_of(config) == [(32, 8, 128)]  # at any depth


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 4},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window_pattern": "LG"},
        {"attn_logit_softcapping": None, "alibi": False, "attention_chunk_size": None},
        {"v_head_dim": 128, "o_lora_rank": None, "position_embedding_type": "rope_gptj"},
        {"quantization_config": {"kv_cache_scheme": {"a": 1}, "ignore": ["head"]}},
        {"vision_config": {"num_heads": 16, "compress_ratio": 2}, "rope_scaling": {"full": 1}},
        {"layer_group_size": 1, "moe": {"attn_topk": 2}, "causal": True},
        mla(index_topk=2048, index_n_heads=32, index_head_dim=128, index_kpool=4),
        mla(indexer_types=["full", "shared"], layer_types=["deepseek_sparse_attention"]),
        mla(layer_types=["indexed_attention"], index_kpool_always_select_tail=True),
        mla(mla_use_output_gate=True, use_sliding_window=False, window_size=4),
        mla(head_dim=64, qk_head_dim=192, num_key_value_heads=64, attention_bias=False),
    ],
)
def test_keys_that_change_no_kernel_are_ignored(change: dict[str, Any]) -> None:
    """Windows are arguments; unset keys and those of other parts and the indexer do not matter."""
    if "kv_lora_rank" not in change:
        assert heads_of(GQA | change) == [(32, 8, 128)]
    else:
        model = read(change)
        assert isinstance(model, MlaModel)
        assert (model.heads, model.left_out) == (64, ())


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (mla(layer_types=["full_attention", "linear_attention"]), "layers of linear_att"),
        (mla(model_type="bailing_hybrid", layer_types=None), "layers of linear_attention: they"),
        (mla(layer_types=["indexed_attention", "sliding_attention"]), "layers of sliding_attent"),
        (gqa(model_type="llama4_text", attention_chunk_size=8192), "layers of chunked_attention"),
        (gqa(layer_types=["hybrid"]), "layers of hybrid: beside the KV cache they have a rec"),
        (gqa(layer_types=["mamba", "attention"], mamba_n_heads=8), "layers of mamba:"),
        (gqa(layers_block_type=["mlp", "mamba", "attention"]), "layers of mamba:"),
        (gqa(hybrid_override_pattern="M-M*-"), "layers of mamba:"),
        (
            gqa(model_type="qwen3_next", full_attention_interval=4),
            "layers of linear_attention: they",
        ),
        (gqa(model_type="minimax_text_01", attn_type_list=[0, 1]), "layers of linear_attention: t"),
        (gqa(global_head_dim=272), "head_dim: no GQA decode kernel for head_dim 272"),
        (gqa(head_dim=272, global_head_dim=256), "head_dim: no GQA decode kernel for"),
    ],
)
def test_layers_without_a_kernel_are_left_out_and_named(config: object, kind: str) -> None:
    """Recurrent layers have no kernel here; the other layers have theirs."""
    (sentence,) = read(config).left_out
    assert sentence.startswith(f"m: {kind}")
