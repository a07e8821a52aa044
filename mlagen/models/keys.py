"""Model types and attention keys that are not known, which are rejected by name.

A new kind of attention comes with a new model type, or adds keys to a known one. The class of a
known type reads no other keys than its own, so a key that it does not have matters only if it is
about attention: each of these is read, known to change no decode kernel, or rejected.
"""

from __future__ import annotations

import re

from mlagen.errors import ArgumentError
from mlagen.models.fields import ANY, Fields, ModelType, model_types, nearest

# Keys about attention,
_ATTENTION = re.compile(
    r"(^|_)(attn|attention|att|heads?|headdim|d_[kqv]|[kqv]_dim|kv|qk|qkv|quer(y|ies)|m[hq]a|gqa"
    r"|mla|lora|indexer|[cdmn]sa|moba|swa|sliding|windows?|hybrid|kda|softcap|(non)?causal"
    r"|(layers?|blocks?|mixers?)_(\w+_)?(types?|pattern))(_|$)|^index_|^per_layer_config$"
)
# and of other layers and parts.
_OTHER_PARTS = re.compile(
    r"(^|_)(linear|mamba|conv|ssm|lightning|kda|gdn|mtp|ngram|lm|mlp|moe|router|experts?|vision"
    r"|visual|audio|speech|image|video|resampler|aligner|projector|protein)(_|$)"
)
# Keys that no supported model sets, with the expected property.
_UNSERVED = {
    r"^is_encoder_decoder$": "a decoder alone",
    r"(^|_)compress(?!$|ion_(ratio|config)$)": "a KV cache of all tokens, not a compressed one",
    r"^(is_|use_)?bidirectional$": "causal attention",
    r"alibi": "attention without ALiBi",
    r"(^|_)rel(ative)?(_|$)|^position_bias": "attention without relative positions",
    r"(attn|attention)\w*(softcap|logit_cap)": "scores that are not capped",
    r"attention_chunk|chunk\w*_attention": "attention that is not chunked",
    r"sparse_(attn|attention|block|topk|config)|^index(er)?_\w*block": (
        "dense or top-k sparse (DSA) attention, not block-sparse attention"
    ),
}
_POSITIONS = ("rope", "rotary", "nope", "absolute", "learned")
_TEXT = "a model that generates text"
_BAICHUAN_7B = 4096  # its hidden_size


def reject_type(fields: Fields) -> None:
    """Reject a model type that no kernel supports, whatever its keys are.

    Raises ArgumentError with the property that the type lacks.
    """
    expected = fields.type.expected if fields.type else ""
    if expected:
        error = fields.rejection if expected == _TEXT else fields.unserved
        raise error("model_type", expected, fields.value("model_type"))


def reject_unserved(fields: Fields) -> ModelType:
    """Return the type of a model; reject an unknown one, or a model that no kernel supports.

    Raises ArgumentError, whose message names the key, the rule and the value, of a type also those
    that are spelled like it.
    """
    kind = fields.value("model_type")
    if fields.type is None:
        served = (name for name, row in model_types().items() if not row.expected and name != ANY)
        error = fields.rejection("model_type", "a type of decoder that mlagen knows", kind)
        raise ArgumentError(f"{error}{nearest(kind, served)}")
    position = fields.value("position_embedding_type") or "rope"
    if str(position).split("_")[0] not in _POSITIONS:
        raise fields.rejection("position_embedding_type", " or ".join(_POSITIONS), position)
    bidirectional = fields.value("use_bidirectional_attention")
    if bidirectional in (True, "all"):
        raise fields.rejection("use_bidirectional_attention", "causal attention", bidirectional)
    hidden_size = fields.value("hidden_size")
    if kind == "baichuan" and hidden_size != _BAICHUAN_7B:  # it has no other key for it
        rule = f"{_BAICHUAN_7B}, as larger ones of baichuan have ALiBi"
        raise fields.rejection("hidden_size", rule, hidden_size)
    for label, value in fields.config.items():
        if value is False and re.search("(^|_)causal(_|$)", label) and _is_of_text(label):
            raise fields.rejection(label, "causal attention", value)
    items = [item for item in fields.set_items() if _is_of_text(item[0])]
    for pattern, rule in _UNSERVED.items():
        for label, value in items:
            names = {label, label.split(".")[0]}
            if not names & fields.type.ignored and re.search(pattern, label.rsplit(".", 1)[-1]):
                raise fields.unserved(label, rule, value)
    return fields.type


def reject_unknown(fields: Fields, *, is_mla: bool) -> None:
    """Reject keys about attention that were not read and are not known, after all were read.

    Raises ArgumentError, whose message names the key and its value, and the known keys that are
    spelled like it.
    """
    assert fields.type is not None
    sources = {str(source) for source in fields.type.sources.values()}
    outside = model_types()[ANY].ignored
    known = fields.read | fields.type.ignored | outside | sources
    known |= {source.partition(".")[0] for source in sources}
    for label, value in fields.set_items():
        is_known = label in known or label.split(".")[0] in fields.read  # with its table
        is_known |= is_mla and label.startswith(("index_", "indexer_"))  # it chooses the tokens
        last = label.rsplit(".", 1)[-1]
        if not is_known and last not in outside and _ATTENTION.search(last) and _is_of_text(label):
            kind = "MLA" if is_mla else "GQA"
            rule = f"no such key, as mlagen does not know its effect on {kind}"
            error = fields.rejection(label, rule, value)
            raise ArgumentError(f"{error}{nearest(label, known)}")


def _is_of_text(label: str) -> bool:
    """Whether a key may be about the layers that attend over text."""
    return not any(_OTHER_PARTS.search(part) for part in label.split("."))
