"""What servers give the kernels: the rules of their plugins, and of prewarming."""

from __future__ import annotations

from math import gcd

# Pages of a server's KV block. The sm90 kernels need a multiple of 16 tokens, and FlashMLA and
# FlashInfer's decode kernels have no larger pages than 64.
PAGE_SIZES = (16, 32, 64)
# Heads on a GPU from which on vLLM's plugin converts fp8_ds_mla rows to bf16 for a long sparse
# prefill, which pays on an H200: docs/explanation/performance.md.
CONVERSION_MIN_HEADS = 64


def page_size_of(block_size: int) -> int:
    """Return the tokens of a page where a server's KV block has ``block_size``.

    Blocks of a hybrid model are inflated to the size of a recurrent state, and split into pages.
    """
    return gcd(block_size, max(PAGE_SIZES))


def dcp_masks(dcp_size: int, *, is_sparse: bool) -> tuple[str, ...]:
    """Return the masks of MLA calls on a rank of decode context parallel.

    One query token attends to all tokens of its rank; several need the causal mask of all ranks.
    """
    return ("causal", "dcp") if dcp_size > 1 and not is_sparse else ("causal",)


def served_page_sizes(*, is_mla: bool, is_hybrid: bool) -> tuple[int, ...]:
    """Return the page sizes that servers of a model use by default.

    ``is_hybrid`` is whether some of its layers have a recurrent state.
    """
    if is_mla:
        return (64,)  # FlashMLA's; blocks of hybrid models are multiples of 128
    # Servers usually default to 16, and 64 is the largest that all decode kernels of FlashInfer
    # support; blocks of hybrid models are any multiple of 16.
    return PAGE_SIZES if is_hybrid else (16, 64)
