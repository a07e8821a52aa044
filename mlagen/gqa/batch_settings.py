"""Settings of a plan of batch decode: the scalar arguments, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mlagen.errors import UnsupportedError
from mlagen.families.common.arguments import (
    DTYPES,
    INT32_MAX,
    reject_dtype,
    require,
    require_flag,
    require_float32,
    require_number,
    require_tensor,
    require_whole_number,
    shown,
)
from mlagen.families.gqa.args import window_of
from mlagen.families.gqa.validate_kv import QUANTIZED
from mlagen.values import is_scalar

_E4M3 = torch.float8_e4m3fn
_Q_DTYPES = (*DTYPES, _E4M3)
_KV_DTYPES = (*DTYPES, *QUANTIZED)

# Keywords that no kernel implements, with the values that ask for nothing.
_NOTHING: dict[str, tuple[object, ...]] = {
    "pos_encoding_mode": ("NONE",),
    "logits_soft_cap": (None, 0.0),
    "fixed_split_size": (None, -1),
    "disable_split_kv": (False,),
    "window_right": (0,),
    "use_token_head_sf": (False,),
}


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """The scalar arguments of a plan, checked."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_len: int
    is_causal: bool
    window: int  # tokens that a row attends to, including itself; 0: no limit
    sm_scale: float
    kv_layout: str
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    o_data_type: torch.dtype


def settings_of(call: Mapping[str, Any], kv_layout: str) -> DecodeSettings:
    """Return the settings of a plan; ``call`` has its arguments by name.

    Raises
    ------
    ArgumentError
        If an argument has a wrong type or value.
    UnsupportedError
        If a keyword requests what no kernel implements.
    """
    reject_unserved({name: (call[name], values) for name, values in _NOTHING.items()})
    require_flag(call["non_blocking"], "non_blocking")
    for name in ("rope_scale", "rope_theta"):
        if call[name] is not None:
            require_number(call[name], name)
    if call["block_tables"] is not None:
        require_tensor(call["block_tables"], "block_tables")
    names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "q_len_per_req")
    sizes = {name: require_whole_number(call[name], name, min_value=1) for name in names}
    q_len, kv_heads = sizes.pop("q_len_per_req"), sizes["num_kv_heads"]
    rule = f"a multiple of {kv_heads} (num_kv_heads)"
    require(sizes["num_qo_heads"] % kv_heads == 0, "num_qo_heads", rule, sizes["num_qo_heads"])
    is_causal, sm_scale = call["is_causal"], call["sm_scale"]
    if sm_scale is None:
        sm_scale = sizes["head_dim"] ** -0.5
    query, cached, output = _data_types(
        *(call[f"{part}data_type"] for part in ("q_", "kv_", "o_", ""))
    )
    return DecodeSettings(
        **sizes,
        q_len=q_len,
        is_causal=True if is_causal is None else require_flag(is_causal, "is_causal"),
        window=_window(call["window_left"]),
        sm_scale=require_float32(sm_scale, "sm_scale"),
        kv_layout=kv_layout,
        q_data_type=query,
        kv_data_type=cached,
        o_data_type=output,
    )


def settings_of_run(
    settings: DecodeSettings, window_left: object, q_len_per_req: object
) -> DecodeSettings:
    """Return the settings of a run that has a window or a number of query tokens of its own.

    Raises
    ------
    ArgumentError
        If one has a wrong type or value.
    """
    window, q_len = settings.window, settings.q_len
    if window_left is not None:
        window = _window(window_left)
    if q_len_per_req is not None:
        q_len = require_whole_number(q_len_per_req, "q_len_per_req", min_value=1)
    if (window, q_len) == (settings.window, settings.q_len):
        return settings
    return replace(settings, window=window, q_len=q_len)


def _dtype_of(given: object, argument: str, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    """Return a dtype that may be given by its name.

    Raises
    ------
    ArgumentError
        If it is none of ``allowed``.
    """
    dtype = getattr(torch, given, given) if isinstance(given, str) else given
    if not isinstance(dtype, torch.dtype) or dtype not in allowed:
        known = dtype if isinstance(dtype, torch.dtype) else given
        reject_dtype(argument, " or ".join(map(str, allowed)), known)
    return dtype


def _data_types(
    q_data_type: object, kv_data_type: object, o_data_type: object, data_type: object
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """Return the dtypes of query, cache and output.

    Raises
    ------
    ArgumentError
        If one is unknown.
    """
    if data_type is not None:
        data_type = _dtype_of(data_type, "data_type", _KV_DTYPES)
    query = _dtype_of(data_type if q_data_type is None else q_data_type, "q_data_type", _Q_DTYPES)
    kv = data_type if kv_data_type is None else kv_data_type
    cached = query if kv is None else _dtype_of(kv, "kv_data_type", _KV_DTYPES)
    allowed = (query, _E4M3) if query in DTYPES else (_E4M3, *DTYPES)
    return (
        query,
        cached,
        query if o_data_type is None else _dtype_of(o_data_type, "o_data_type", allowed),
    )


def reject_unserved(given: dict[str, tuple[object, tuple[object, ...]]]) -> None:
    """Reject keywords that no kernel implements, each unless it has one of the values beside it.

    Raises
    ------
    UnsupportedError
        The message names the keyword.
    """
    for keyword, (value, nothing) in given.items():
        if value is nothing[0]:
            continue
        if not any(value is each or (is_scalar(value) and value == each) for each in nothing):
            rule = f"not implemented, expected {nothing[0]!r}"
            raise UnsupportedError(f"{keyword}: {rule}, got {shown(value)}")


def _window(window_left: object) -> int:
    return min(window_of(window_left, "window_left"), INT32_MAX)
