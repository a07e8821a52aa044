"""Attention of a model, read from a ``config.json`` in Hugging Face format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.models.fields import Fields
from mlagen.models.keys import reject_type, reject_unknown, reject_unserved
from mlagen.models.layers import (
    POOL_KINDS,
    GqaHeads,
    caps_scores,
    gqa_heads,
    layers_left_out,
    reject_v_head_dim,
    window_of,
)
from mlagen.models.names import cached_config, is_hub_id, known_model, similar_names
from mlagen.paths import is_folder, is_regular, read_named, reason_of
from mlagen.settings import current_settings
from mlagen.spec.dtype import DSV4_ROW, DType
from mlagen.spec.gqa.variant import GqaVariant, require_supported
from mlagen.spec.mla.variant import SUPPORTED

__all__ = ["GqaModel", "MlaModel", "find_model", "read_model"]

# Keys of the text decoder in models with several parts.
_NESTED = ("thinker_config", "text_config", "language_config", "llm_config")
_CONFIG = "config.json"
# Keys beside those of the latent, which describe projections and the indexer.
_MLA_PROJECTIONS = (
    *("q_lora_rank", "qk_nope_head_dim", "qk_head_dim", "v_head_dim", "head_dim"),
    "num_key_value_heads",
)
# How tokens are compressed, which is an argument of the call.
_BLOCK = "index_block_size"  # of MiniMax-M3
_INDEXER = "indexer_n_heads"  # of Qwen3.8, whose layers have no indexer without it
_COMPRESSION = ("compress_ratios", "compress_rates")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The fields of a model that select its kernels."""

    name: str  # as requested
    dtype: DType  # of queries, and of the KV cache by default
    heads: int
    left_out: tuple[str, ...] = ()  # a sentence for each kind of layer without a kernel
    is_hybrid: bool = False  # some layers have a recurrent state, which inflates a server's blocks
    has_two_pools: bool = False  # DeepSeek-V4: of the last tokens, and of compressed ones
    # Tokens of the blocks that query tokens choose; 0: none. Of MiniMax-M3 some layers have blocks,
    # and of Qwen3.8, where a block is a token, all have, with an output gate.
    sparse_block: int = 0


@dataclass(frozen=True, kw_only=True)
class MlaModel(Model):
    """A model with multi-head latent attention."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    is_sparse: bool  # has sparse (top-k) attention


@dataclass(frozen=True, kw_only=True)
class GqaModel(Model):
    """A model with grouped-query, multi-head or multi-query attention."""

    kv_heads: int
    head_dim: int
    head_dim_vo: int = 0  # of a value; 0: as of a key
    others: tuple[GqaHeads, ...] = ()  # of layers with other heads
    window: int | None = None  # tokens that sliding layers attend to: an argument of the call
    has_soft_cap: bool = False  # of the scores, whose value is an argument of the call

    def heads_of_layers(self) -> tuple[GqaHeads, ...]:
        """Return the head configurations of the layers, without duplicates."""
        first = GqaHeads(self.heads, self.kv_heads, self.head_dim, self.head_dim_vo)
        return (first, *self.others)


def find_model(name: str) -> MlaModel | GqaModel:
    """Return the model of a name or Hub id, or of the path of a ``config.json`` or its folder.

    With ``MLAGEN_HF=1``, the local Hub cache is searched for a Hub id first. Raises ArgumentError
    if there is no such model, or mlagen does not support its configuration.
    """
    path = Path(name).expanduser()
    known = known_model(name)
    try:
        path = path / _CONFIG if is_folder(path) else path
        is_path = "/" in name and is_regular(path)
        if not is_path and current_settings().reads_hub_cache and (found := cached_config(name)):
            path, known = found, None
        if known is not None and not is_path:
            return _model_of(name, dict(known.config))
        return read_model(name, read_named(path))
    except FileNotFoundError as error:
        if "/" in name and not is_hub_id(name):
            raise ArgumentError(
                f"model: expected a {_CONFIG} or its folder, got none: {path}"
            ) from error
        raise ArgumentError(
            f"model: expected the path of a {_CONFIG} or of its folder, or a name that "
            f"`mlagen models` lists, got {name!r}{_remedy(name)}"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a path with a null byte
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"model: expected a readable {_CONFIG}, got {reason_of(error)}: {name}"
        ) from error


def _remedy(name: str) -> str:
    """Return the advice for a name or Hub id that is not found."""
    names = similar_names(name) if "/" not in name or is_hub_id(name) else []
    guess = f"; did you mean {' or '.join(names)}?" if names else ""
    if not is_hub_id(name):
        return guess
    if not current_settings().reads_hub_cache:
        return f"{guess}; MLAGEN_HF=1 looks for a Hub id in the Hub's local cache"
    return f"{guess}; run: hf download {name} {_CONFIG}"


def read_model(name: str, content: bytes) -> MlaModel | GqaModel:
    """Return the model whose ``config.json`` has this content; ``name`` is for messages.

    Raises ArgumentError if it is not a configuration, or mlagen does not support it.
    """
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{name}: expected JSON, got {error}") from error
    if not isinstance(config, dict):
        raise ArgumentError(f"{name}: expected a JSON object, got {type(config).__name__}")
    try:
        return _model_of(name, config)
    except RecursionError as error:
        raise ArgumentError(f"{name}: expected a few levels of tables, got too many") from error


def _model_of(name: str, config: dict[str, Any]) -> MlaModel | GqaModel:
    fields = _text_part(Fields(name, config))
    kind = reject_unserved(fields)
    if kind.sources.get("layer_types") == [*POOL_KINDS]:
        return _two_pools(fields)
    is_latent = "kv_lora_rank" in kind.sources and bool(fields.value("kv_lora_rank"))
    is_mla = is_latent and fields.value("use_mla") is not False
    if not is_mla:
        reject_v_head_dim(fields)
    return _mla(fields) if is_mla else _gqa(fields)


def _text_part(fields: Fields) -> Fields:
    """Return the innermost text decoder that has heads, or else the innermost part."""
    reject_type(fields)
    for label in _NESTED:
        inner = fields.value(label)
        if isinstance(inner, dict):
            # Outer keys belong to other parts, except for the dtype, which may be on either level.
            around = {key: fields.value(key) for key in ("dtype", "torch_dtype")}
            found = _text_part(Fields(fields.name, around | inner, fields.type))
            if found.value("num_attention_heads") or not fields.value("num_attention_heads"):
                return found
    return fields


def _two_pools(fields: Fields) -> MlaModel:
    layers = layers_left_out(fields, "two pools")
    fields.read.update((*_MLA_PROJECTIONS, *_COMPRESSION, "kv_lora_rank"))
    ((rank, rope),), (roped,) = DSV4_ROW.head_dims, DSV4_ROW.bf16_elements
    heads, head_dim = fields.count("num_attention_heads"), fields.count("head_dim")
    dims = (head_dim, fields.count("qk_rope_head_dim", default=roped))
    if dims != (rank + rope, roped):
        rule = str((rank + rope, roped))
        raise fields.rejection("head_dim, qk_rope_head_dim", rule, dims)
    window_of(fields)  # read: the window is an argument of the call, too
    return _mla_model(fields, heads, layers, (rank, rope), is_sparse=True, has_two_pools=True)


def _mla(fields: Fields) -> MlaModel:
    heads = fields.count("num_attention_heads")
    layers = layers_left_out(fields, "mla")
    fields.read.update(_MLA_PROJECTIONS)
    if window_of(fields) is not None and not any("layers of sliding_" in one for one in layers[0]):
        raise fields.rejection("sliding_window", "MLA without a window", window_of(fields))
    is_sparse = fields.count("index_topk", default=0) != 0
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim", minimum=0)
    known = dict.fromkeys(dims for row in SUPPORTED for dims in row.head_dims)
    if (rank, rope) not in known:
        rule = " or ".join(map(str, known))
        raise fields.rejection("kv_lora_rank, qk_rope_head_dim", rule, (rank, rope))
    return _mla_model(fields, heads, layers, (rank, rope), is_sparse=is_sparse)


def _mla_model(
    fields: Fields,
    heads: int,
    layers: tuple[tuple[str, ...], bool],
    dims: tuple[int, int],
    **facts: bool,
) -> MlaModel:
    reject_unknown(fields, is_mla=True)
    return MlaModel(
        name=fields.name,
        dtype=fields.dtype(),
        heads=heads,
        left_out=layers[0],
        is_hybrid=layers[1],
        kv_lora_rank=dims[0],
        qk_rope_head_dim=dims[1],
        **facts,
    )


def _gqa(fields: Fields) -> GqaModel:
    assert fields.type is not None
    sources = fields.type.sources
    kinds = "block gqa" if _BLOCK in sources else "token gqa" if _INDEXER in sources else "gqa"
    sparse_block = _sparse_block(fields)
    left_out, is_hybrid = layers_left_out(fields, kinds)
    if fields.value("use_mla") is False:  # keys of MLA stay in the configuration then
        fields.read |= {*_MLA_PROJECTIONS, "kv_lora_rank", "qk_rope_head_dim"}
    layers, window, has_soft_cap = gqa_heads(fields), window_of(fields), caps_scores(fields)
    reject_unknown(fields, is_mla=False)
    rejections = {heads: _rejection_of(heads) for heads in layers}
    left_out += tuple(f"{fields.name}: head_dim: {why}" for why in rejections.values() if why)
    served = [heads for heads, why in rejections.items() if not why]
    if not served:
        raise ArgumentError(left_out[-1])
    first, *others = served
    return GqaModel(
        name=fields.name,
        dtype=fields.dtype(),
        left_out=left_out,
        is_hybrid=is_hybrid,
        window=window,
        has_soft_cap=has_soft_cap,
        sparse_block=sparse_block,
        **first._asdict(),
        others=tuple(others),
    )


def _sparse_block(fields: Fields) -> int:
    """Return the tokens that an index of sparse layers names, or 0."""
    assert fields.type is not None
    if _INDEXER in fields.type.sources:
        return int(fields.count(_INDEXER, default=0, minimum=0) != 0)
    if _BLOCK not in fields.type.sources:
        return 0
    table = "sparse_attention_config"
    fields.read.add(table)  # its other keys choose the blocks
    label = f"{table}.sparse_block_size"
    label = label if fields.value(label) is not None else _BLOCK
    tokens = fields.count(label)
    if tokens != fields.type.sources[_BLOCK]:
        raise fields.rejection(label, str(fields.type.sources[_BLOCK]), tokens)
    return tokens


def _rejection_of(heads: GqaHeads) -> str | None:
    """Return the reason why no kernel supports such heads, or None."""
    dtype = DType.BF16
    variant = GqaVariant(
        query_dtype=dtype,
        kv_dtype=dtype,
        out_dtype=dtype,
        head_dim=heads.head_dim,
        head_dim_vo=heads.head_dim_vo,
    )
    try:
        require_supported(variant)
    except UnsupportedError as error:
        return str(error)
    return None
