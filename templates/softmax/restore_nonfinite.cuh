// Makes the rows that see what is not finite so, as they would be if it had been multiplied: in
// what has been stored of them, so that nothing of it is in the way of the usual case.

#pragma once

#include "accumulators.cuh"
#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "finite.cuh"
#include "kv_token.cuh"
#include "output_dims.cuh"
#include "ptx/cvt.cuh"
#include "scheduler/tile_scheduler.cuh"

// Adds what was cleared to the rows that see it; `add` takes what a token is in the cache and its
// position. A weight of 0 is not told from others: what is not finite makes a row so.
template <typename Add>
__device__ inline void add_nonfinite(const Params& params, const Item& item, Add add) {
  const int end = min((item.first_block + item.blocks) * kBlockTokens, item.visible_to_any);
  const int* ids = params.block_tables + table_row(params, item.request).start;
  for (int token = max(item.visible_to_all, item.first_block * kBlockTokens); token < end;
       ++token) {
    const int page = ids[token / kPageSize];
    if (!is_page(page, params.num_pages)) continue;
    add(stored_token(params, page, token % kPageSize), token);
  }
}

// `place` tells where this thread's element of part `c` of float4 `i` is: a Stored, which has been
// multiplied by `scale`.
template <typename Stored, typename Place>
__device__ inline void restore_nonfinite(const Params& params, const Item& item, float scale,
                                         Place place) {
  if constexpr (kIsSparse) return;  // of a list all rows see all, and nothing is cleared
  add_nonfinite(params, item, [&](const StoredToken& token, int position) {
    const int warp = fresh_warp();
#pragma unroll 1
    for (int part = 0; part < kAccumulators * 4; ++part) {
      const int i = part / 4;
      const int c = part % 4;
      if (position >= item.row_visible[part_row(warp, i, c)]) continue;
      const u16 element = token.element(part_dim(warp, i, c));
      if (is_finite(element)) continue;
      u16* stored = place(i, c);
      const float sum = cvt_f32(Stored{}, *stored) + value_of_element(element) * scale;
      *stored = static_cast<u16>(cvt_rn_x2_f32(Stored{}, 0.0f, sum));
    }
  });
}
