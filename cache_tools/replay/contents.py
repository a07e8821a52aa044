"""Contents of a rebuilt call's tensors: dumped, or random and valid."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from typing import Any

import torch

from mlagen.errors import ArgumentError
from mlagen.observe.document import OBJECT, SCRATCH
from mlagen.observe.dump import MAX_TENSOR_BYTES

from .document import Dump, reject
from .geometry import Geometry
from .rebuild import Leaf, Rebuilt

_MAX_BYTES = MAX_TENSOR_BYTES + (1 << 20)  # with the headers of the file

# Elements that are generated at a time.
_CHUNK = 1 << 26

# Scales of scores; other scales are near 1.
_SCORE_SCALES = ("bmm1_scale", "q_scale")
_SCORE_SCALE = 192**-0.5
_TOKEN_SCALES = ("k.scales", "kv_scales", "ckv_scale_arr", "q_scale", "bmm2_scale", "kv_scale")
_BLOCK_SCALES = ("kv_cache_sf", "k_sf_cache", "v_sf_cache")

# Widths of FP8 rows: 512 e4m3, then four scales of fp8_ds_mla, then 64 bf16 with a rope part.
_FP8_DS_MLA, _FP8_DS_MLA_WITHOUT_ROPE, _FP8_PER_TOKEN = 656, 528, 640
_FP8_ROW_WIDTHS = {_FP8_DS_MLA, _FP8_DS_MLA_WITHOUT_ROPE, _FP8_PER_TOKEN}

# Of `kv_layout`, which a dump omits.
_DEFAULT_LAYOUTS = {"trtllm_batch_decode_with_kv_cache": "HND"}


def fill(dump: Dump, rebuilt: Mapping[str, Rebuilt], seed: int) -> None:
    """Write the contents of all tensors; those that the dump lacks are random.

    Raises
    ------
    ArgumentError
        If the dumped contents do not fit the metadata.
    """
    given = read_tensors(dump)
    arguments: dict[str, Any] = {}
    tensors: dict[str, torch.Tensor] = {}
    parts = {name: rebuilt[name] for name in ("init", "plan", "call") if name in rebuilt}
    for part in parts.values():
        arguments |= part.arguments
        tensors |= {_plain(name): leaf.tensor for name, leaf in part.leaves.items()}
    layout = _DEFAULT_LAYOUTS.get(dump.entry, "NHD")
    geometry = Geometry({"kv_layout": layout} | arguments, tensors)
    for part_name, part in parts.items():
        # Offsets come first: lengths follow from them.
        names = sorted(part.leaves, key=lambda name: _plain(name) not in {"kv_indptr", "indptr"})
        for index, name in enumerate(names):
            leaf = part.leaves[name]
            with torch.no_grad():
                content = given.get(f"{part_name}:{name}")
                if content is not None:
                    _write_bytes(name, leaf.tensor, content)
                else:
                    _write_random(_plain(name), leaf, geometry, seed + index)


def _plain(name: str) -> str:
    """Return the name of a tensor, without that of the object of a plan's metadata."""
    return name.removeprefix(OBJECT)


def read_tensors(dump: Dump) -> dict[str, torch.Tensor]:
    """Return the dumped contents by part and name, as bytes; none without a file of them.

    Raises
    ------
    ArgumentError
        If the file is missing, too large, or no file of tensors.
    """
    path = dump.tensors
    if path is None:
        return {}
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        is_large = size > _MAX_BYTES
        loaded = None if is_large else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ArgumentError(f"{path}: expected a file of tensors, got {reason}") from error
    if is_large:
        raise ArgumentError(f"{path}: expected {_MAX_BYTES} bytes or less, got {size}")
    if not isinstance(loaded, dict):
        reject(str(path), "tensors by name", type(loaded).__name__)
    for name, tensor in loaded.items():
        if not isinstance(tensor, torch.Tensor) or tensor.dtype is not torch.uint8:
            reject(f"{path}: {name}", "bytes", type(tensor).__name__)
    return loaded


def _write_bytes(name: str, tensor: torch.Tensor, content: torch.Tensor) -> None:
    size = tensor.numel() * tensor.element_size()
    if content.numel() != size:
        reject(name, f"{size} bytes", content.numel())
    whole = content.flatten().clone().view(tensor.dtype).view(tensor.shape)
    for axis, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[axis] > 1:
            whole = whole.narrow(axis, 0, 1)
    _copy(_without_repeats(tensor), whole)


def _write_random(name: str, leaf: Leaf, geometry: Geometry, seed: int) -> None:
    tensor = leaf.tensor
    if name in SCRATCH:
        if not name.endswith("workspace_buffer"):  # a workspace needs no initial value
            tensor.zero_()
        return
    tensor = _without_repeats(tensor)
    values = leaf.entry.get("values")
    if values is not None:
        _write_values(name, tensor, values)
        return
    if not tensor.dtype.is_floating_point and tensor.element_size() == 4:
        generator = torch.Generator().manual_seed(seed)
        indices = geometry.indices_of(name, tensor.numel(), generator)
        if indices is not None:
            _copy(tensor.view(torch.int32), indices.int().view(tensor.shape))
            return
    generator = torch.Generator(tensor.device).manual_seed(seed)
    flat = tensor if tensor.dim() else tensor[None]
    rows = max(1, _CHUNK * flat.shape[0] // max(1, flat.numel()))
    for start in range(0, flat.shape[0], rows):
        part = flat[start : start + rows]
        _copy(part, _random(name, part, generator))


def _write_values(name: str, tensor: torch.Tensor, values: object) -> None:
    if not isinstance(values, list) or len(values) != tensor.numel():
        reject(f"{name}.values", f"{tensor.numel()} numbers", values)
    try:
        content = torch.tensor(values, dtype=torch.int32)
        target = tensor.view(torch.int32)
    except (OverflowError, RuntimeError, TypeError, ValueError):
        reject(f"{name}.values", "numbers of 32 bits", values)
    _copy(target, content.view(tensor.shape))


def _random(name: str, like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return contents of a tensor's shape and dtype."""
    made = _Random(like, generator)
    if name in _SCORE_SCALES and like.numel() == 1:
        return torch.full_like(like, _SCORE_SCALE)
    if like.element_size() == 1 and like.dim() and like.shape[-1] in _FP8_ROW_WIDTHS:
        return made.packed_rows()
    if name.startswith(_BLOCK_SCALES):
        return made.bytes(0x30, 0x40)  # e4m3 from 0.5 to 1.9
    if like.dtype in {torch.uint8, torch.int8} or name == "mask":
        return made.bytes(0, 256)
    if like.dtype.is_floating_point:
        make = made.scales if name in _TOKEN_SCALES else made.normal
        return make(*like.shape).to(like.dtype)
    return torch.zeros_like(like)


class _Random:
    """Random contents of a tensor."""

    def __init__(self, like: torch.Tensor, generator: torch.Generator) -> None:
        self._like = like
        self._given: dict[str, Any] = {"generator": generator, "device": like.device}

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, **self._given)

    def scales(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, **self._given) + 0.5

    def bytes(self, low: int, high: int) -> torch.Tensor:
        """Return bytes as the tensor's dtype, whatever operations that has."""
        like = self._like
        shape = (*like.shape, like.element_size())
        raw = torch.randint(low, high, shape, dtype=torch.uint8, **self._given)
        return raw.view(like.dtype).view(like.shape)

    def packed_rows(self) -> torch.Tensor:
        """Return rows of 512 e4m3, scales if they are fp8_ds_mla, and 64 bf16 of a rope part."""
        *rows, width = self._like.shape
        parts = [self.normal(*rows, 512).to(torch.float8_e4m3fn)]
        if width != _FP8_PER_TOKEN:
            parts.append(self.scales(*rows, 4))
        if width != _FP8_DS_MLA_WITHOUT_ROPE:
            parts.append(self.normal(*rows, 64).bfloat16())
        packed = torch.cat([part.view(torch.uint8) for part in parts], dim=-1)
        return packed.view(self._like.dtype)


def _without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view without the repetitions of an axis with a stride of 0."""
    for axis, stride in enumerate(tensor.stride()):
        if not stride and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def _copy(target: torch.Tensor, content: torch.Tensor) -> None:
    if target.numel():
        target.copy_(content.to(target.device))
