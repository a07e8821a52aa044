"""Element types and packed rows, by the names that keys, commands and documentation use."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """How the elements of a tensor are stored; ``str(dtype)`` is its stable name.

    The packed rows hold 512 e4m3 latent elements and 64 bf16 rope elements: ``PACKED656`` with a
    scale for every 128 latent elements between them (the V3.2 layout of FlashMLA), ``PACKED640``
    with one scale for a row, kept elsewhere (Modular's rope-aware layout).
    """

    BF16 = "bf16"
    FP16 = "fp16"
    E4M3 = "e4m3"
    INT8 = "int8"
    NVFP4 = "nvfp4"  # two e2m1 a byte, an e4m3 scale for every 16, kept elsewhere
    PACKED656 = "packed656"
    PACKED640 = "packed640"

    def __str__(self) -> str:
        return self.value

    @property
    def is_16bit(self) -> bool:
        """Whether the tensor cores take it as it is stored."""
        return self in (DType.BF16, DType.FP16)

    def row_bytes(self, elements: int) -> int:
        """Size of a row of ``elements`` elements; a packed row has but one size."""
        if self is DType.PACKED656:
            return 656
        if self is DType.PACKED640:
            return 640
        if self is DType.NVFP4:
            return elements // 2
        return elements * (2 if self.is_16bit else 1)

    @property
    def cuda_name(self) -> str:
        """The tag type that stands for it in the templates."""
        return self.value[0].upper() + self.value[1:]
