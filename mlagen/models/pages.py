"""Page sizes that servers give the kernels: the rule of their plugins, and of prewarming."""

from __future__ import annotations

from math import gcd

# Pages of a server's KV block. The sm90 kernels need a multiple of 16 tokens, and FlashMLA and
# FlashInfer's decode kernels have no larger pages than 64.
PAGE_SIZES = (16, 32, 64)


def page_size_of(block_size: int) -> int:
    """Return the tokens of a page where a server's KV block has ``block_size``.

    Blocks of a hybrid model are inflated to the size of a recurrent state, and split into pages.
    """
    return gcd(block_size, max(PAGE_SIZES))


def served_page_sizes(*, is_mla: bool, is_hybrid: bool) -> tuple[int, ...]:
    """Return the page sizes that servers of a model use by default.

    ``is_hybrid`` is whether some of its layers have a recurrent state.
    """
    if is_mla:
        return (64,)  # FlashMLA's; blocks of hybrid models are multiples of 128
    # Servers usually default to 16, and 64 is the largest that all decode kernels of FlashInfer
    # support; blocks of hybrid models are any multiple of 16.
    return PAGE_SIZES if is_hybrid else (16, 64)
