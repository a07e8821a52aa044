"""Decode with the signatures of XQA: the entry points of ``flashinfer.xqa``."""

from mlagen.gqa.xqa import xqa
from mlagen.mla.xqa import xqa_mla

__all__ = ["xqa", "xqa_mla"]
