"""Rejection of configurations with attention that no kernel has, or that mlagen does not know.

A new kind of attention adds keys to its configuration; a reader that ignores them mistakes it for a
known kind. So every key about attention is either read, known to change no decode kernel, or
rejected by name.
"""

from __future__ import annotations

import re

from mlagen.models.fields import Fields
from mlagen.models.layers import ALIASES, GQA_KINDS, MLA_KINDS


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words of keys, between underscores: of keys about attention,
_ATTENTION = _words(
    "head heads headdim att attn attention kv q qk qkv query queries mha mqa gqa mla lora "
    "indexer dsa nsa csa msa moba swa sliding window windows hybrid kda softcap"
)
# of windows, which are arguments of the call,
_WINDOWS = _words(
    "sliding swa window windows size sizes layers attn attention local global pattern interleaved"
)
# of keys about other layers and parts,
_OTHER_PARTS = _words(
    "linear mamba conv ssm kda lightning gdn delta mtp nextn ngram lm mlp moe router experts "
    "vision visual vit audio speech image img video resampler aligner projector protein"
)
# of what is before or after a decode kernel, or an argument of its call: projections, norms, rotary
# embedding, scaling, gates; sinks, which every family supports,
_OUTSIDE = _words(
    "dropout pdrop prob bias norm layernorm rope nope rotary interleave sink sinks scale scalar "
    "scaling rescale multiplier temperature factor fp32 upcast dtype fuse fused fusion flash "
    "implementation impl parallel gate gated gating clip logn cache init initializer"
)
# and of shapes, which matter whatever the other words are.
_SHAPES = _words(
    "dim dims heads headdim rank size sizes layers block blocks group groups ratio topk index "
    "config"
)
# In a type that the table does not have, more words matter: of scores, masks, chosen tokens, states
# and positions,
_KINDS = _words(
    "softmax entmax sparsemax score scores tanh cap capped clip lambda differential polynomial "
    "forget decay retention retnet rwkv rnn hyena lru recurrent state latent latents compress "
    "compressed feature mixer mixers kinds prefix encoder noncausal non mask masks lookahead "
    "sparse sparsity seer selector select selected selection retrieval evict eviction budget "
    "merging pruning pool pooling pooled downsample top topk tokens stride dilation dilated band "
    "recent local global context lookback attend attends distance radius neighborhood hitter "
    "hitters landmark landmarks anchor anchors memory mem segment segments chunk chunks lsh hash "
    "hashes buckets cluster clusters page pages pos pe rpe cope kerple position positions "
    "positional encoding slot slots bidir gla gta tpa mfa hca ttt d"
)
# and of shapes;
_MORE_SHAPES = _SHAPES - {"config", "layers", "index"} | _words("width type types")
# but not beside words of the vocabulary, of feed-forward parts, precision, inputs and training,
_HARMLESS = _words(
    "vocab embedding embeddings embed embd emb word hidden intermediate inner ffn ff feed model "
    "original id ids per special added code codebook batch ep tp pp parallel act activation "
    "residual logit logits output problem summary weight weights loss task fp32 upcast dropout "
    "prob norm layernorm rotary yarn dtype version adapter frame input patch mm conv1d expert "
    "configs beam beams suppress spatial"
)
# or in keys of routing, generation, projections, recurrent layers, and the number of positions.
_HARMLESS_KEYS = _words(
    "base_width n_group n_groups num_group topk_group topk_method score_function score_func top_k "
    "top_p decoder_sparse_step max_new_tokens clip_qkv pool_type pooling_type "
    "short_conv_kernel_size lm_head_dim n_positions max_positions context_length "
    "max_context_length context_len"
)
# Keys that name the kinds of layers.
_LAYERS = re.compile(r"(^|_)(layers?|blocks?|mixers?)_(\w+_)?(types?|pattern)|^per_layer_config$")
# Keys that no supported model sets, with the expected property.
_UNSERVED = (
    (re.compile(r"^is_encoder_decoder$"), "a decoder alone"),
    (re.compile(r"^type_vocab_size$"), "a decoder, not an encoder"),
    (
        re.compile(r"(^|_)compress(?!$|ion_(ratio|config)$)"),
        "a KV cache of all tokens, not a compressed one",
    ),
    (re.compile(r"^(is_|use_)?bidirectional$"), "causal attention"),
    (re.compile("alibi"), "attention without ALiBi"),
    (re.compile(r"(^|_)rel(ative)?(_|$)|^position_bias"), "attention without relative positions"),
    (re.compile(r"(attn|attention)\w*(softcap|logit_cap)"), "scores that are not capped"),
    (re.compile(r"attention_chunk|chunk\w*_attention"), "attention that is not chunked"),
    (
        re.compile(r"sparse_(attn|attention|block|topk|config)|^index(er)?_\w*block"),
        "dense or top-k sparse (DSA) attention, not block-sparse attention",
    ),
)
_POSITIONS = ("rope", "rotary", "nope", "absolute", "learned")
_TEXT = "a model that generates text"
_NOT_GENERATING = re.compile(
    r"For(CTC|MaskedLM|\w*Classification|\w*Segmentation|\w*Detection|QuestionAnswering"
    r"|MultipleChoice|PreTraining)$"
)
_PICTURES = ("image_size", "patch_size", "num_mel_bins", "feat_extract_norm")
_BAICHUAN_7B = 4096  # its hidden_size


def reject_unserved(fields: Fields) -> None:
    """Reject a model that no kernel supports.

    Raises
    ------
    ArgumentError
        Names the key, the rule and the value.
    """
    for label, rule in _broken_rules(fields).items():
        raise fields.rejection(label, rule, fields.value(label))
    items = [
        (label, value)
        for label, value in fields.set_items()
        if not _is_ignored(fields, label) and not set(_words_of(label)) & _OTHER_PARTS
    ]
    for pattern, rule in _UNSERVED:
        for label, value in items:
            if pattern.search(label.rsplit(".", 1)[-1]):
                raise fields.unserved(label, rule, value)


def reject_type(fields: Fields) -> None:
    """Reject a model type that no kernel supports, whatever its keys are.

    Raises
    ------
    ArgumentError
        Has the property that the type lacks.
    """
    if fields.type is not None and fields.type.expected:
        expected, name = fields.type.expected, fields.value("model_type")
        raise (fields.rejection if expected == _TEXT else fields.unserved)(
            "model_type", expected, name
        )


def reject_unknown(fields: Fields, *, is_mla: bool) -> None:
    """Reject keys about attention that were not read and are not known, after all were read.

    Raises
    ------
    ArgumentError
        Names the key and its value.
    """
    kind = "MLA" if is_mla else "GQA"
    sources = {str(source) for source in fields.type.sources.values()} if fields.type else set()
    known = fields.read | sources | {source.partition(".")[0] for source in sources}
    for label, value in fields.set_items():
        # Keys inside a table that was read are read with it.
        is_read = label in known or label.split(".")[0] in fields.read
        is_read |= is_mla and label.startswith(("index_", "indexer_"))  # it chooses the tokens
        is_read |= _are_known_kinds(value, is_mla=is_mla) or _is_known_position(label, value)
        matters = _may_matter(label, is_mla=is_mla, is_new=fields.type is None)
        if not is_read and not _is_ignored(fields, label) and matters:
            rule = f"no such key, as mlagen does not know its effect on {kind}"
            raise fields.rejection(label, rule, value)


def _are_known_kinds(value: object, *, is_mla: bool) -> bool:
    """Whether a value is a list of kinds of layers that attend."""
    known = {*(MLA_KINDS if is_mla else GQA_KINDS), *ALIASES}
    return isinstance(value, list) and all(
        isinstance(kind, str) and kind in known for kind in value
    )


def _is_known_position(label: str, value: object) -> bool:
    """Whether a key names an encoding of positions that kernels need not know."""
    is_of_positions = {"pos", "pe", "position", "positional"} & set(_words_of(label))
    return bool(is_of_positions and isinstance(value, str) and value.startswith(_POSITIONS))


def _is_ignored(fields: Fields, label: str) -> bool:
    return fields.type is not None and label in fields.type.ignored


def _may_matter(label: str, *, is_mla: bool, is_new: bool) -> bool:
    """Whether a key may change the decode kernels, by its words; more do in a new model type."""
    last, words = label.rsplit(".", 1)[-1], _words_of(label)
    if is_new and _may_be_new(label, is_mla=is_mla):
        return True
    if set(words) & _OTHER_PARTS:
        return False
    if _LAYERS.search(last):
        return True
    if not set(words) & _ATTENTION and words[0] != "index":  # at the end it is that of a token
        return False
    if not is_mla and _is_of_window(set(words)):
        return False
    return not set(words) & _OUTSIDE or bool(set(words) & _SHAPES)


def _may_be_new(label: str, *, is_mla: bool) -> bool:
    """Whether a key may be one of a new kind of attention."""
    table, _, key = label.rpartition(".")
    words = set(_words_of(key))
    of_others = (words | set(re.split("[._]", table))) & (_OTHER_PARTS - {"conv", "lm"})
    if of_others or words & _HARMLESS or key in _HARMLESS_KEYS:
        return False
    if not is_mla and _is_of_window(words):
        return False
    return bool(words & _KINDS or (words & _MORE_SHAPES and not words & _OUTSIDE))


def _words_of(label: str) -> list[str]:
    return label.rsplit(".", 1)[-1].lower().strip("_").split("_")


def _is_of_window(words: set[str]) -> bool:
    """Whether the words are about windows only."""
    if {"sliding", "swa"} & words and not words & _SHAPES:
        return True
    return bool({"window", "windows", "sliding"} & words) and words <= _WINDOWS


def _broken_rules(fields: Fields) -> dict[str, str]:
    """Return the rules that the configuration breaks, by key."""
    get = fields.value
    classes = get("architectures")
    classes = classes if isinstance(classes, list) else []
    position = str(get("position_embedding_type") or "rope").split("_")[0]
    broken = {
        "architectures": (
            _TEXT,
            bool(classes) and all(_NOT_GENERATING.search(str(name)) for name in classes),
        ),
        "position_embedding_type": (" or ".join(_POSITIONS), position not in _POSITIONS),
        "use_bidirectional_attention": (
            "causal attention",
            get("use_bidirectional_attention") in (True, "all"),
        ),
        "hidden_size": (  # the larger model has no key for it
            "4096, as larger ones of baichuan have ALiBi",
            get("model_type") == "baichuan" and get("hidden_size") != _BAICHUAN_7B,
        ),
    }
    for label, value in fields.config.items():
        if "causal" in _words_of(label) and not set(_words_of(label)) & _OTHER_PARTS:
            broken[label] = ("causal attention", value not in (True, None))
    # Only text decoders have a vocabulary.
    for label in _PICTURES:
        broken[label] = (_TEXT, get("vocab_size") is None and get(label) is not None)
    return {label: rule for label, (rule, is_broken) in broken.items() if is_broken}
