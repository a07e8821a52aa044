"""Top-k indices of ``trtllm_batch_decode_with_kv_cache``: tokens of the cache, not pages."""

from __future__ import annotations

from mlagen.families.common.arguments import require
from mlagen.families.gqa.args import GqaArgs

_STEP = 4  # of indices that FlashInfer reads together
_KEYWORD = "sparse_top_k"


def with_top_k(args: GqaArgs, top_k: int) -> GqaArgs:
    """Return the arguments of a call whose block tables are top-k indices; 0 is none.

    Each query token has indices of its own, so it is a request of one.
    """
    if not top_k:
        return args
    names = args.names
    require(top_k > 0 and top_k % _STEP == 0, _KEYWORD, f"0, or a multiple of {_STEP}", top_k)
    for name, value in (
        (names.mask, args.mask),
        ("sinks", args.sinks),
        (names.cum_seq_lens_q, args.cum_seq_lens_q),
        ("causal_seqlens_kv_global", args.causal_seqlens_kv_global),
    ):
        require(value is None, name, f"None with {_KEYWORD}", "a tensor")
    require(args.window == 0, names.window, f"no window with {_KEYWORD}", args.window)
    name = "enable_block_sparse_attention"
    require(not args.has_head_tables, name, f"False with {_KEYWORD}", "True")
    return args._replace(
        block_tables=None,
        block_indices=args.block_tables,
        sparse_block=1,
        top_k=top_k,
        separate_page_ids=True,
        is_causal=False,
        q_len=1,
        names=names._replace(block_indices=names.block_tables),
    )
