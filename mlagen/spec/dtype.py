"""Data types of queries and KV caches, by the names in keys, commands and documentation."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """Storage format of a tensor; ``str(dtype)`` is its stable name.

    Two FP8 KV cache formats hold 512 e4m3 latent elements and 64 bf16 rope elements per token:
    ``FP8_DS_MLA`` with a scale per 128 latent elements in between (DeepSeek-V3.2, FlashMLA),
    ``FP8_PER_TOKEN`` with one scale per token in a tensor of its own (Modular). ``FP8_DS_MLA``
    exists without the rope elements too.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    E4M3 = "e4m3"
    INT8 = "int8"
    NVFP4 = "nvfp4"  # two e2m1 per byte; an e4m3 scale per 16 elements in a separate tensor
    FP8_DS_MLA = "fp8_ds_mla"
    FP8_PER_TOKEN = "fp8_per_token"  # noqa: S105 - not a password

    def __str__(self) -> str:
        return self.value

    @property
    def is_16bit(self) -> bool:
        """Whether the tensor cores read the stored format directly."""
        return self in (DType.BF16, DType.FP16)

    def row_bytes(self, elements: int) -> int:
        """Bytes of a row of ``elements`` elements, inline scales included."""
        if self is DType.FP8_DS_MLA:
            return 656 if elements > 512 else 528  # with rope elements, or without
        if self is DType.FP8_PER_TOKEN:
            return 640
        if self is DType.NVFP4:
            return elements // 2
        return elements * (2 if self.is_16bit else 1)

    @property
    def cuda_name(self) -> str:
        """Tag type of the format in the templates."""
        return "".join(word[0].upper() + word[1:] for word in self.value.split("_"))
