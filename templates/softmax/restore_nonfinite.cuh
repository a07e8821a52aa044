// Propagates NaN/Inf from V. The main loop zeroes non-finite V elements so that masked tokens
// cannot poison a row (0 x NaN). Rows that do attend to one are patched here, after the store, off
// the fast path.

#pragma once

#include "accumulators.cuh"
#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_token.cuh"
#include "ptx/cvt.cuh"
#include "scheduler/tile_scheduler.cuh"

// Visits the tokens that may hold cleared elements; `add` takes the stored token and its position.
// A probability of 0 counts like any other: a non-finite V makes the row non-finite.
template <typename Add>
__device__ inline void add_nonfinite(const Params& params, const WorkItem& work, Add add) {
  const int end = min((work.first_kv_block + work.num_kv_blocks) * kBlockN, work.kv_end);
  const int* page_ids = params.block_tables + block_table_row(params, work.seq_idx).start;
  for (int token = max(work.unmasked_kv_end, work.first_kv_block * kBlockN); token < end; ++token) {
    const int page = page_ids[token / kPageSize];
    if (!is_valid_page(page, params.num_pages)) continue;
    add(stored_token(params, page, token % kPageSize), token);
  }
}

// `ptr_of` returns the address of component `c` of float4 `i` of this thread: a `Stored`, already
// multiplied by `scale`.
template <typename Stored, typename PtrOf>
__device__ inline void restore_nonfinite(const Params& params, const WorkItem& work, float scale,
                                         PtrOf ptr_of) {
  if constexpr (kIsSparse) return;  // every row attends to all top-k tokens, nothing is cleared
  add_nonfinite(params, work, [&](const StoredToken& cached, int token) {
    const int warp = reload_warp();
#pragma unroll 1
    for (int element_idx = 0; element_idx < kAccumulators * 4; ++element_idx) {
      const int i = element_idx / 4;
      const int c = element_idx % 4;
      if (token >= work.row_kv_end[element_row(warp, i, c)]) continue;
      const float value = cached.value(element_dim(warp, i, c));
      if (fabsf(value) <= kFloatMax) continue;
      u16* stored = ptr_of(i, c);
      const float sum = cvt_f32(Stored{}, *stored) + value * scale;
      *stored = static_cast<u16>(cvt_rn_x2_f32(Stored{}, 0.0f, sum));
    }
  });
}
