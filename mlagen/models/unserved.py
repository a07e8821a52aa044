"""Rejection of unsupported models: kinds of attention without a kernel, and encoders."""

from __future__ import annotations

import re

from mlagen.models.fields import Fields

# Keys that no supported model sets, with the expected property.
_KEYS = (
    (re.compile(r"^compress_"), "a KV cache of all tokens"),
    (re.compile(r"alibi"), "attention without ALiBi"),
    (re.compile(r"(attn|attention)\w*(softcap|logit_cap)"), "scores that are not capped"),
    (re.compile(r"attention_chunk|chunk\w*_attention"), "attention that is not chunked"),
    (re.compile(r"^is_encoder_decoder$"), "a decoder alone"),
    (re.compile(r"^type_vocab_size$"), "a decoder, not an encoder"),
)
_POSITIONS = ("rope", "rotary", "nope", "absolute", "learned")
# Model types whose attention differs without a key for it.
_KINDS = {"diffllama": "attention without differences", "bloom": "attention without ALiBi"}
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
    for label, value in fields.set_items():
        for pattern, rule in _KEYS:
            if pattern.search(label.rsplit(".", 1)[-1]):
                raise fields.rejection(label, rule, value)
    for label, (rule, is_broken) in _rules(fields).items():
        if is_broken:
            raise fields.rejection(label, rule, fields.value(label))


def _rules(fields: Fields) -> dict[str, tuple[str, bool]]:
    """Return the rule of each key, and whether the configuration breaks it."""
    get = fields.value
    kind = str(get("model_type"))
    classes = get("architectures")
    classes = classes if isinstance(classes, list) else []
    generates = not classes or not all(_NOT_GENERATING.search(str(name)) for name in classes)
    position = get("position_embedding_type")
    # The larger model uses ALiBi without a key for it.
    is_large_baichuan = kind == "baichuan" and get("hidden_size") != _BAICHUAN_7B
    # Only text decoders have a vocabulary.
    pictures = dict.fromkeys(_PICTURES, ("a model that generates text", False))
    for label in pictures:
        is_broken = get("vocab_size") is None and get(label) is not None
        pictures[label] = ("a model that generates text", is_broken)
    return {
        "model_type": (_KINDS.get(kind, "another kind"), kind in _KINDS),
        "architectures": ("a model that generates text", not generates),
        "position_embedding_type": (" or ".join(_POSITIONS), position not in (None, *_POSITIONS)),
        "use_bidirectional_attention": (
            "causal attention",
            get("use_bidirectional_attention") in (True, "all"),
        ),
        "is_causal": ("causal attention", get("is_causal") is False),
        "hidden_size": ("4096, as larger ones of baichuan have ALiBi", is_large_baichuan),
        **pictures,
    }
