"""GQA decode in vLLM on sm_90a: the backend ``MLAGEN_GQA``.

It is vLLM's FlashInfer backend, whose call of XQA goes to mlagen. Prefill, and the decode of a
layer that XQA does not serve, stay with FlashInfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends import flashinfer as vllm_flashinfer

from mlagen.decode import xqa_batch_decode_with_kv_cache

_XQA = "flashinfer_xqa_batch_decode_with_kv_cache"


class MlagenGQABackend(vllm_flashinfer.FlashInferBackend):
    """The GQA backend, as vLLM selects and validates it."""

    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3")
    ]

    @staticmethod
    def get_name() -> str:
        """Return the name that ``--attention-backend`` takes."""
        return "MLAGEN_GQA"

    @staticmethod
    def get_impl_cls() -> type[MlagenGQAImpl]:
        """Return the class that computes attention."""
        return MlagenGQAImpl

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        """Return whether the kernels have the dtype, as vLLM's XQA call has the cache."""
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether vLLM calls XQA on this GPU and mlagen has an sm90 kernel."""
        return (capability.major, capability.minor) == (9, 0)


class MlagenGQAImpl(vllm_flashinfer.FlashInferImpl):
    """FlashInfer's implementation with mlagen's decode in the place of XQA."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend as the base class does; its XQA call is mlagen's."""
        with _mlagen_for_xqa():
            out: torch.Tensor = super().forward(*args, **kwargs)
        return out


@contextmanager
def _mlagen_for_xqa() -> Iterator[None]:
    # vLLM names the function in its module alone; another backend of the process keeps its own.
    before = getattr(vllm_flashinfer, _XQA)
    setattr(vllm_flashinfer, _XQA, xqa_batch_decode_with_kv_cache)
    try:
        yield
    finally:
        setattr(vllm_flashinfer, _XQA, before)
