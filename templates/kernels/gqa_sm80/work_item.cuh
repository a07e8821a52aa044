// Work item of a CTA: its query rows, its slice of the output dims, its split of the KV tokens,
// and the shared memory plan.

#pragma once

#include "common/cta_index.cuh"
#include "common/dcp.cuh"
#include "common/fixed_splits.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/ragged_tiles.cuh"
#include "common/sparse_blocks.cuh"
#include "common/types.cuh"
#include "config.cuh"

// A row is one (query token, query head of a kv head) pair of a sequence, query token first. A CTA
// takes kBlockM rows of one kv head, a slice of their output dims and one split of the KV tokens.
struct alignas(16) WorkItem {
  int seq_idx;
  int kv_head;
  int slice;
  int split_idx;
  int q_len;  // query tokens of this sequence
  i64 first_query;  // index of the sequence's first query token among all
  int kv_len;  // tokens in the cache, the new ones included
  int first_row;  // of this CTA, among the sequence's rows
  int rows;  // of this CTA; the rest of kBlockM is padding
  int unmasked_kv_begin, unmasked_kv_end;  // tokens that every row of this CTA attends to
  int kv_begin, kv_end;  // tokens that any row may attend to
  int first_kv_block, end_kv_block;  // KV blocks of kBlockN tokens of this split

  // Fixed split `split_idx` of these rows; as all tokens bound it, a mask changes none.
  __device__ FixedSplit fixed_split(const Params& params) const {
    return fixed_split_of(kv_begin, kIsSparse ? kv_end : kv_len, split_idx, params.num_splits);
  }

  // Sets the KV blocks of that split; a CTA beyond the splits of the sequence has no rows.
  __device__ void set_fixed_split(const Params& params) {
    const FixedSplit split = fixed_split(params);
    const int begin = kv_begin / kBlockN;
    const int end = max(begin, ceil_div(kv_end, kBlockN));
    first_kv_block = min(end, max(begin, split.first_token / kBlockN));
    end_kv_block = min(end, ceil_div(split.end_token, kBlockN));
    if (split_idx >= split.num_splits) rows = 0;
  }

  // Index of the sequence among block tables and lengths, which may be those of a KV head.
  __device__ int table_idx(const Params& params) const {
    return kHasHeadTables ? kv_head * params.num_seqs + seq_idx : seq_idx;
  }

  // Page ids of the sequence: a row of the block table, or a part of the flat page ids of a plan.
  __device__ const int* page_ids(const Params& params) const {
    const i64 start = params.kv_indptr == nullptr
                          ? table_idx(params) * static_cast<i64>(params.block_tables_stride)
                          : params.kv_indptr[seq_idx];
    return params.block_tables + start;
  }

  // The same of its values.
  __device__ const int* value_page_ids(const Params& params) const {
    if constexpr (kSeparatePageIds) {
      return value_tables_of(params) + seq_idx * static_cast<i64>(params.block_tables_stride);
    } else {
      return page_ids(params);
    }
  }

  __device__ int query_of(const Params& params, int row) const {
    return (first_row + row) / params.group_size;
  }

  // First token in the sliding window of a query token.
  __device__ int window_kv_begin(const Params& params, int query) const {
    return max(0, max(0, kv_len - q_len + query + 1) - params.window);
  }

  __device__ int head_of(const Params& params, int row) const {
    return kv_head * params.group_size + (first_row + row) % params.group_size;
  }

  // Index of `row` in a [tokens * heads] array.
  __device__ i64 global_row(const Params& params, int row) const {
    const i64 query = first_query + query_of(params, row);
    return query * params.group_size * params.kv_heads + head_of(params, row);
  }

  // Whether a row attends to a token that is masked for some rows.
  __device__ bool attends(const Params& params, int row, int token) const {
    if (row >= rows || token >= kv_len) return false;
    const int query = query_of(params, row);
    if constexpr (kHasDcp) return query >= dcp_first_query(params, seq_idx, token);
    if (token < window_kv_begin(params, query)) return false;
    const int draft = token - (kv_len - q_len);
    if (params.draft_mask == nullptr || draft < 0) return !params.is_causal || draft <= query;
    const u32* words = params.draft_mask + (first_query + query) * params.mask_words;
    // No row attends to speculative tokens beyond the mask.
    return draft / 32 < params.mask_words && (words[draft / 32] >> draft % 32 & 1) != 0;
  }

  // Whether every row of this CTA attends to a token, as a mask may say: it is no boundary then.
  __device__ bool all_attend(const Params& params, int token) const {
    bool all = true;
    for (int row = lane_index(); row < rows; row += kWarpLanes) all &= attends(params, row, token);
    return __all_sync(~0u, all);
  }
};

// The work item of a sparse call: one query token, whose KV tokens are those that its indices name,
// in their order. `kv_end` counts these, and `kv_len` is the end of the tokens that they may name.
// A template: Params of a dense kernel lacks the parameters.
template <typename SparseParams>
__device__ inline void set_sparse_work(const SparseParams& params, int token, int m_tile,
                                       WorkItem& work) {
  const SparseSeq seq = sparse_seq_of(params, token);
  work.seq_idx = seq.seq_idx;
  work.q_len = 1;
  work.first_query = token;
  work.first_row = m_tile * kBlockM;
  work.rows = max(min(params.group_size - work.first_row, kBlockM), 0);
  work.kv_len = seq.kv_end;
  work.kv_begin = 0;
  work.kv_end = work.kv_len > 0 ? num_indices_of(params, token) * kSparseBlock : 0;

  const int num_kv_blocks = ceil_div(work.kv_end, kBlockN);
  if constexpr (kBatchInvariant) return work.set_fixed_split(params);
  // Splits begin where blocks of an index do.
  constexpr int kIndexBlocks = kSparseBlock / kBlockN;
  constexpr int kSplitUnit = kIndexBlocks > kWarps ? kIndexBlocks : kWarps;
  const int kv_blocks_per_split =
      ceil_div(ceil_div(num_kv_blocks, kSplitUnit), params.num_splits) * kSplitUnit;
  work.first_kv_block = min(num_kv_blocks, work.split_idx * kv_blocks_per_split);
  work.end_kv_block = min(num_kv_blocks, work.first_kv_block + kv_blocks_per_split);
}

// Waits for the preceding kernel (PDL).
__device__ inline WorkItem find_work_item(const Params& params) {
  WorkItem work;
  CtaIndex cta;
  const int m_tile = cta.next(params.m_tiles);
  work.slice = cta.next(kSlices);
  work.kv_head = cta.next(params.kv_heads);
  work.split_idx = cta.next(params.num_splits);
  const int seq_idx = cta.last();
  pdl_wait();
  if constexpr (kIsSparse) {
    set_sparse_work(params, seq_idx, m_tile, work);
    return work;
  }
  const TileRows m_tile_rows =
      rows_of_tile(params.cu_seqlens_q, params.num_seqs, params.q_len, params.group_size,
                   params.group_size * params.kv_heads, params.total_rows, seq_idx, m_tile);
  work.seq_idx = m_tile_rows.seq_idx;
  work.q_len = m_tile_rows.q_len;
  work.first_query = m_tile_rows.first_query;
  work.first_row = m_tile_rows.first_row;
  work.rows = m_tile_rows.rows;
  work.kv_len = clamp_kv_len(params.seq_lens[work.table_idx(params)], params.max_pages);

  const int first = work.query_of(params, 0);
  const int last = work.query_of(params, max(work.rows, 1) - 1);
  const int context_len = work.kv_len - work.q_len;
  const bool has_mask = params.draft_mask != nullptr;
  const bool is_causal = !has_mask && params.is_causal;
  work.kv_begin = work.window_kv_begin(params, first);
  work.unmasked_kv_begin = work.window_kv_begin(params, last);
  work.kv_end = max(is_causal ? context_len + last + 1 : work.kv_len, 0);
  const int first_row_end = is_causal ? context_len + first + 1 : work.kv_len;
  work.unmasked_kv_end = max(has_mask ? context_len : first_row_end, 0);
  if constexpr (kHasDcp) {
    work.kv_end = dcp_kv_end_of_query(params, work.seq_idx, last, work.kv_len);
    work.unmasked_kv_end = dcp_kv_end_of_query(params, work.seq_idx, first, work.kv_len);
  }

  // All tokens bound the splits, also those behind a causal tile: a causal mask then adds up in the
  // order of causal tiles without one.
  const int begin = work.kv_begin / kBlockN;
  if constexpr (kBatchInvariant) {
    work.set_fixed_split(params);
    return work;
  }
  const int num_kv_blocks = max(ceil_div(work.kv_len, kBlockN) - begin, 0);
  const int kv_blocks_per_split =
      ceil_div(ceil_div(num_kv_blocks, kWarps), params.num_splits) * kWarps;
  const int end = begin + max(ceil_div(work.kv_end, kBlockN) - begin, 0);
  work.first_kv_block = min(end, begin + work.split_idx * kv_blocks_per_split);
  work.end_kv_block = min(end, work.first_kv_block + kv_blocks_per_split);
  return work;
}

// Tokens of a KV block in the cache, as the indices of a sparse call name them; page -1: none.
struct SparseBlock {
  int pages[kBlockN];
  int slots[kBlockN];
};

struct alignas(16) SharedMemoryPlan {
  WorkItem work;  // once per CTA instead of in the registers of every thread
  unsigned char query[kBlockM * kRowBytes];  // [kBlockM][kHeadDim]
  union {
    unsigned char warps[kWarps][kWarpBytes];  // see stage_ptr and tokens_of
    float combine_buffer[kCombineFloats];  // [kBlockM][kSliceDims + 4], after the main loop
  };
  float row_max[kWarps][kBlockM];  // base 2
  float row_sum[kWarps][kBlockM];
  union {
    float probabilities[kWarps][kBlockM][kBlockN];  // of blocks with tokens masked for some rows
    // Of a sparse call, which has no such blocks; with indices of values also theirs.
    SparseBlock sparse_blocks[kWarps][kSparseRing * (kSeparatePageIds ? 2 : 1)];
  };
};
static_assert(sizeof(SharedMemoryPlan) == kSharedBytes, "the spec computes the size of the struct");

// The tokens of load `stage_idx` of this warp.
__device__ inline SparseBlock& sparse_block_of(SharedMemoryPlan& smem, int stage_idx) {
  const int block = stage_idx / 2 % kSparseRing;
  return smem.sparse_blocks[warp_index()][kSeparatePageIds ? block * 2 + stage_idx % 2 : block];
}

// Stage that load `stage_idx` of this warp fills: [kBlockN] rows of kStageRowBytes.
__device__ inline unsigned char* stage_ptr(SharedMemoryPlan& smem, int stage_idx) {
  return smem.warps[warp_index()] + stage_idx % kStages * kStageBytes;
}

// The KV block as the MMA reads it: [kBlockN] rows of kRowBytes.
__device__ inline unsigned char* tokens_of(SharedMemoryPlan& smem, int stage_idx) {
  return kDequantsKv ? smem.warps[warp_index()] + kStages * kStageBytes
                     : stage_ptr(smem, stage_idx);
}
