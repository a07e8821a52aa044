"""Element types, by the names that keys, commands and documentation use."""

from __future__ import annotations

from enum import Enum


class DType(Enum):
    """An element type; ``str(dtype)`` is its stable name."""

    BF16 = "bf16"
    FP16 = "fp16"

    def __str__(self) -> str:
        return self.value

    @property
    def bytes(self) -> int:
        """Size of one element."""
        return 2

    @property
    def cuda_name(self) -> str:
        """The tag type that stands for it in the templates."""
        return {"bf16": "Bf16", "fp16": "Fp16"}[self.value]
