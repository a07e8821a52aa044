"""Base class of kernel specs, and the parameters of kernels."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import ClassVar

from mlagen.spec.arch import Arch


@dataclass(frozen=True)
class Parameter:
    """One field of a kernel's parameter struct; ``code`` is its format in :mod:`struct`."""

    name: str
    cuda_type: str
    code: str
    is_constant: bool = False  # of all calls with one signature


def pointer(name: str, element: str) -> Parameter:
    """Return an 8-byte pointer field."""
    return Parameter(name, f"{element}*", "Q")


def tensor_map(name: str) -> Parameter:
    """Return a 128-byte TMA descriptor field (``CUtensorMap``)."""
    return Parameter(name, "TensorMap", "128s")


def int64(name: str) -> Parameter:
    """Return a signed 8-byte field."""
    return Parameter(name, "i64", "q", is_constant=True)


def int32(name: str) -> Parameter:
    """Return a signed 4-byte field."""
    return Parameter(name, "int", "i", is_constant=True)


def float32(name: str) -> Parameter:
    """Return a 4-byte floating-point field, which calls of one signature may differ in."""
    return Parameter(name, "float", "f")


def constant_float32(name: str) -> Parameter:
    """Return a 4-byte floating-point field that the signature of a call determines."""
    return Parameter(name, "float", "f", is_constant=True)


@dataclass(frozen=True, kw_only=True)
class CallShape:
    """Shape of a call, which selects the tile and the KV heads per CTA."""

    heads: int
    kv_heads: int | None = None  # of grouped-query attention, if given
    q_len: int = 1


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Kernel properties that a call determines; the tile is selected separately."""


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Everything that determines the cubin of a kernel.

    ``parameters`` lists tensor maps, then 8-byte fields, then 4-byte fields, so that neither the
    CUDA struct nor the packed bytes contain padding.
    """

    family: ClassVar[str]
    symbol: ClassVar[str]

    arch: Arch

    @property
    def folder(self) -> str:
        """Folder of the kernel's own templates; those of the folders above it are shared."""
        return f"kernels/{self.family}"

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Fields of the kernel's parameter struct, in order."""
        raise NotImplementedError

    @property
    def declarations(self) -> tuple[str, ...]:
        """Members of the kernel's parameter struct, in order."""
        return tuple(f"{one.cuda_type} {one.name}" for one in self.parameters)

    @property
    def threads(self) -> int:
        """Threads per CTA."""
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory per CTA."""
        raise NotImplementedError

    @property
    def is_cooperative(self) -> bool:
        """Whether CTAs wait for each other, so that all of them must be co-resident."""
        return False

    @property
    def is_persistent(self) -> bool:
        """Whether a grid has at most one CTA for each SM that it is planned for."""
        return self.is_cooperative

    @property
    def uses_semaphores(self) -> bool:
        """Whether CTAs arrive on semaphores, which persist with the workspace."""
        return self.is_cooperative

    def serves(self, call: CallShape) -> bool:  # noqa: ARG002 - for the families that depend on it
        """Whether the call uses this tile and these KV heads per CTA of the variant."""
        return True

    def key_fields(self) -> dict[str, str]:
        """Return the fields as stable text, with variant and tile flattened."""
        return dict(_key_fields(self))

    def __str__(self) -> str:
        named = self.key_fields().items()
        return f"{self.family}({', '.join(f'{name}={value}' for name, value in named)})"


@lru_cache(maxsize=1 << 14)  # filters read those of every kernel
def _key_fields(spec: KernelSpec) -> dict[str, str]:
    named: dict[str, object] = {}
    for field in fields(spec):
        value = getattr(spec, field.name)
        parts = getattr(value, "_asdict", None)  # a tile's fields
        if isinstance(value, Variant):
            named |= {part.name: getattr(value, part.name) for part in fields(value)}
        else:
            named |= parts() if parts else {field.name: value}
    return {name: str(value) for name, value in named.items()}
