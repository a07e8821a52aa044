"""The attention of a model, read from a ``config.json`` in the form of Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from mlagen.errors import ArgumentError, UnsupportedError
from mlagen.paths import is_folder, read_named, reason_of
from mlagen.spec.dtype import DType
from mlagen.spec.gqa import GqaVariant, require_supported
from mlagen.spec.mla_support import SUPPORTED

# Where models of several parts keep the part that generates text.
_NESTED = ("text_config", "language_config", "llm_config")
_DTYPES = {"bfloat16": DType.BF16, "float16": DType.FP16}
_CONFIG = "config.json"


@dataclass(frozen=True, kw_only=True)
class Model:
    """What of a model decides about its kernels."""

    name: str  # as it was asked for
    dtype: DType  # of queries, and of the cache unless that is said to be another
    heads: int


@dataclass(frozen=True, kw_only=True)
class MlaModel(Model):
    """A model with multi-head latent attention."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    is_sparse: bool  # also chooses tokens for every query token


@dataclass(frozen=True, kw_only=True)
class GqaModel(Model):
    """A model with grouped-query attention, or one whose heads share nothing or all."""

    kv_heads: int
    head_dim: int


@cache
def preset_names() -> tuple[str, ...]:
    """Return the names of the models that come with mlagen."""
    files = resources.files("mlagen.models").iterdir()
    return tuple(sorted(file.name[:-5] for file in files if file.name.endswith(".json")))


def find_model(name: str) -> MlaModel | GqaModel:
    """Return the model of a preset name, or of the path of a ``config.json`` or its folder.

    Raises
    ------
    ArgumentError
        If there is no such model, or its configuration is none that mlagen serves.
    """
    if name.lower() in preset_names():
        file = resources.files("mlagen.models") / f"{name.lower()}.json"
        return read_model(name, file.read_bytes())
    path = Path(name).expanduser()
    try:
        return read_model(name, read_named(path / _CONFIG if is_folder(path) else path))
    except FileNotFoundError as error:
        raise ArgumentError(
            f"model: expected one of {', '.join(preset_names())}, or the path of a {_CONFIG} or "
            f"of its folder, got {name!r}"
        ) from error
    except (OSError, ValueError) as error:  # the latter of a path with a null byte
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(
            f"model: expected a readable {_CONFIG}, got {reason_of(error)}: {name}"
        ) from error


def read_model(name: str, content: bytes) -> MlaModel | GqaModel:
    """Return the model whose ``config.json`` has this content; ``name`` is for messages.

    Raises
    ------
    ArgumentError
        If it is no configuration, or none that mlagen serves.
    """
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{name}: expected JSON, got {error}") from error
    if not isinstance(config, dict):
        raise ArgumentError(f"{name}: expected a JSON object, got {type(config).__name__}")
    for label in _NESTED:
        if "num_attention_heads" not in config and isinstance(config.get(label), dict):
            config = {**config, **config[label]}
    fields = _Fields(name, config)
    heads = fields.count("num_attention_heads")
    return _mla(fields, heads) if config.get("kv_lora_rank") is not None else _gqa(fields, heads)


def _mla(fields: _Fields, heads: int) -> MlaModel:
    rank, rope = fields.count("kv_lora_rank"), fields.count("qk_rope_head_dim", least=0)
    known = dict.fromkeys(dims for row in SUPPORTED for dims in row.head_dims)
    if (rank, rope) not in known:
        raise ArgumentError(
            f"{fields.name}: kv_lora_rank, qk_rope_head_dim: expected "
            f"{' or '.join(map(str, known))}, got {(rank, rope)}"
        )
    return MlaModel(
        name=fields.name,
        dtype=fields.dtype(),
        heads=heads,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        is_sparse=fields.count("index_topk", default=0) != 0,
    )


def _gqa(fields: _Fields, heads: int) -> GqaModel:
    kv_heads = fields.count("num_key_value_heads", default=heads)
    if kv_heads > heads or heads % kv_heads:
        raise ArgumentError(
            f"{fields.name}: num_key_value_heads: expected a divisor of num_attention_heads "
            f"{heads}, got {kv_heads}"
        )
    head_dim = fields.count("head_dim", default=0)
    if not head_dim:
        hidden = fields.count("hidden_size")
        if hidden % heads:
            raise ArgumentError(
                f"{fields.name}: head_dim: expected it, or a hidden_size that is a multiple of "
                f"num_attention_heads {heads}, got {hidden}"
            )
        head_dim = hidden // heads
    variant = GqaVariant(
        query_dtype=DType.BF16, kv_dtype=DType.BF16, out_dtype=DType.BF16, head_dim=head_dim
    )
    try:
        require_supported(variant)
    except UnsupportedError as error:
        raise ArgumentError(f"{fields.name}: head_dim: {error}") from error
    return GqaModel(
        name=fields.name, dtype=fields.dtype(), heads=heads, kv_heads=kv_heads, head_dim=head_dim
    )


class _Fields:
    """The fields of a configuration, each checked when it is asked for."""

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name = name
        self._config = config

    def count(self, label: str, *, default: int | None = None, least: int = 1) -> int:
        """Return a number; where it is absent or null, the default if there is one."""
        value = self._config.get(label)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < least:
            got = "none" if value is None else repr(value)
            raise ArgumentError(f"{self.name}: {label}: expected {least} or more, got {got}")
        return value

    def dtype(self) -> DType:
        """Return the element type of the activations, bf16 where nothing is said."""
        for label in ("dtype", "torch_dtype"):
            value = self._config.get(label)
            if value not in (None, "auto"):
                known = _DTYPES.get(str(value).removeprefix("torch."))
                if known is None:
                    rule = " or ".join(_DTYPES)
                    raise ArgumentError(f"{self.name}: {label}: expected {rule}, got {value!r}")
                return known
        return DType.BF16
