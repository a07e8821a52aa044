"""Block-sparse decode of MiniMax-M3: the entry point of ``flashinfer.msa_ops``."""

from mlagen.gqa.msa import msa_sparse_decode_attention

__all__ = ["msa_sparse_decode_attention"]
