"""Base class of kernel specs, and the parameters of kernels."""

from __future__ import annotations

from collections.abc import Iterable
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
    is_constant: bool = False  # of all calls of one launcher


# Codes of the types; a pointer's is "Q". A float may differ between calls of one launcher.
_CODES = {
    "TensorMap": "128s",
    "i64": "q",
    "int": "i",
    "u32": "I",
    "float": "f",
    "const float": "f",
}


# Of all kernels: a launcher rejects any other name.
PARAMETER_NAMES: set[str] = set()


def parameters(text: str) -> tuple[Parameter, ...]:
    """Return the parameters of a text such as ``const int*: seq_lens cu_seqlens_q``.

    Each type is followed by its names, which may continue on the next lines. The launcher of a
    call determines an ``i64``, an ``int``, a ``u32`` and a ``const float``.
    """
    found: list[Parameter] = []
    kind = ""
    for line in text.strip().splitlines():
        before, colon, names = line.rpartition(":")
        kind = before.strip() if colon else kind
        code = "Q" if kind.endswith("*") else _CODES[kind]
        is_constant = code in "qiI" or kind == "const float"
        cuda_type = "float" if code == "f" else kind
        found += [Parameter(name, cuda_type, code, is_constant) for name in names.split()]
    PARAMETER_NAMES.update(one.name for one in found)
    return tuple(found)


# Of decode context parallel.
DCP_PARAMETERS = parameters("const int*: causal_seqlens_kv_global\n int: cp_world cp_rank")

_ORDER = ("128s", "Q", "q", "i", "I", "f")  # of codes


def in_order(given: Iterable[Parameter]) -> tuple[Parameter, ...]:
    """Return each parameter once, in the order of the codes, and constants before numbers."""
    distinct = dict.fromkeys(given)
    return tuple(sorted(distinct, key=lambda one: (_ORDER.index(one.code), not one.is_constant)))


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

    family: ClassVar[str]  # also the symbol of the kernel
    common_parameters: ClassVar[tuple[Parameter, ...]]  # of every kernel of the family

    # Whether CTAs wait for each other, so that all of them must be co-resident; whether a grid has
    # at most one CTA for each SM that it is planned for; and whether CTAs arrive on semaphores,
    # which persist with the workspace.
    is_cooperative: ClassVar[bool] = False
    is_persistent: ClassVar[bool] = False
    uses_semaphores: ClassVar[bool] = False

    arch: Arch

    @property
    def symbol(self) -> str:
        """Name of the kernel in its cubin."""
        return self.family

    @property
    def folder(self) -> str:
        """Folder of the kernel's own templates; those of the folders above it are shared."""
        return f"kernels/{self.family}"

    @property
    def added_parameters(self) -> tuple[Parameter, ...]:
        """Parameters of this kernel besides the common ones."""
        return ()

    @property
    def unused_parameters(self) -> tuple[Parameter, ...]:
        """Common parameters that this kernel does not have."""
        return ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Fields of the kernel's parameter struct, in order."""
        added, unused = self.added_parameters, self.unused_parameters
        common = tuple(one for one in self.common_parameters if one not in unused)
        return in_order((*common, *added)) if added else common

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
