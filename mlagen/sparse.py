"""Token-sparse decode of Qwen3.8: the entry point of ``flashinfer.sparse``."""

from mlagen.gqa.qsa import qsa_sparse_paged_attention

__all__ = ["qsa_sparse_paged_attention"]
