"""The base of every kernel family's spec."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from mlagen.spec.arch import Arch
from mlagen.values import reject


@dataclass(frozen=True)
class Parameter:
    """One field of the struct a kernel reads; ``code`` is its format in :mod:`struct`."""

    name: str
    cuda_type: str
    code: str


def pointer(name: str, element: str) -> Parameter:
    """Return an 8-byte pointer field."""
    return Parameter(name, f"{element}*", "Q")


def tensor_map(name: str) -> Parameter:
    """Return a field of 128 opaque bytes that tells the copy engine of a tensor."""
    return Parameter(name, "TensorMap", "128s")


def int64(name: str) -> Parameter:
    """Return a signed 8-byte field."""
    return Parameter(name, "i64", "q")


def int32(name: str) -> Parameter:
    """Return a signed 4-byte field."""
    return Parameter(name, "int", "i")


def float32(name: str) -> Parameter:
    """Return a 4-byte floating-point field."""
    return Parameter(name, "float", "f")


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """What of a call decides which tile it takes, and how many heads in a block."""

    heads: int
    kv_heads: int | None = None  # of grouped-query attention, if it is said
    q_len: int = 1


@dataclass(frozen=True, kw_only=True)
class Variant:
    """What a call determines of its kernel, where a tile is chosen besides."""


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """What changes the machine code of a kernel, and nothing else.

    ``parameters`` lists what a launch passes: tensor maps, then 8-byte fields, then 4-byte ones, so
    that neither the CUDA struct nor the packed bytes have padding inside.
    """

    family: ClassVar[str]
    symbol: ClassVar[str]
    template: ClassVar[str]
    parameters: ClassVar[tuple[Parameter, ...]]

    arch: Arch

    @property
    def threads(self) -> int:
        """Threads of one block."""
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one block."""
        raise NotImplementedError

    @property
    def is_cooperative(self) -> bool:
        """Whether blocks wait for each other, so that all of them must run at once."""
        return False

    @property
    def uses_semaphores(self) -> bool:
        """Whether blocks count each other's arrivals, in memory that stays with the workspace."""
        return self.is_cooperative

    def serves(self, call: CallShape) -> bool:  # noqa: ARG002 - for the families that depend on it
        """Whether such a call takes this kernel, of those that differ in tile and heads."""
        return True

    def key_fields(self) -> dict[str, str]:
        """Return the fields, those of variant and tile each by itself, as stable text."""
        named: dict[str, object] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            parts = getattr(value, "_asdict", None)  # of a tile
            if isinstance(value, Variant):
                named |= {part.name: getattr(value, part.name) for part in fields(value)}
            else:
                named |= parts() if parts else {field.name: value}
        return {name: str(value) for name, value in named.items()}

    def __str__(self) -> str:
        named = self.key_fields().items()
        return f"{self.family}({', '.join(f'{name}={value}' for name, value in named)})"


def packing_of(spec: KernelSpec) -> struct.Struct:
    """Return how a launch packs its values.

    All tensor maps are one value, and all integers another: what does not change from call to call
    is joined once.
    """
    codes = "".join(parameter.code for parameter in spec.parameters)
    joined = re.sub(r"(?:128s)+|[qi]+", lambda those: f"{struct.calcsize('<' + those[0])}s", codes)
    return struct.Struct("<" + joined)


def pack_scalars(spec: KernelSpec, values: Mapping[str, int]) -> bytes:
    """Return the integers that a launch passes, of values by name; others are left out.

    Raises
    ------
    ArgumentError
        If a value is too large for its field: a shape that no memory backs, such as of a view of
        one element.
    """
    named = [field for field in spec.parameters if field.code in {"q", "i"}]
    for field in named:
        bits, value = 8 * struct.calcsize(f"<{field.code}"), values[field.name]
        if value.bit_length() >= bits:
            reject(field.name, f"an int of {bits} bits", value)
    packing = "<" + "".join(field.code for field in named)
    return struct.pack(packing, *(values[field.name] for field in named))
