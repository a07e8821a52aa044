// Work item of a CTA: its query rows, its split of the KV tokens, the masks beyond causality,
// and the shared memory plan.

#pragma once

#include "common/block_table.cuh"
#include "common/cta_index.cuh"
#include "common/fixed_splits.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/pools.cuh"
#include "common/ragged_tiles.cuh"
#include "common/types.cuh"
#include "config.cuh"

// A row is one (query token, head) pair of a sequence, query token first, so that rows are
// contiguous in [tokens, heads, dim] tensors. A CTA takes kBlockM rows and one split of the KV
// tokens. In sparse attention every query token is a sequence of its own.
struct alignas(64) WorkItem {
  int seq_idx;
  int split_idx;
  int heads;
  int q_len;  // query tokens of this sequence
  i64 first_query;  // index of the sequence's first query token among all
  int kv_len;  // tokens in the cache, the new ones included
  int first_row;  // of this CTA, among the sequence's rows
  int rows;  // of this CTA; the rest of kBlockM is padding
  int is_causal;
  int unmasked_kv_end;  // end of the tokens that every row attends to
  int kv_end;  // end of the tokens that any row attends to
  int first_kv_block;
  int end_kv_block;  // one past

  // Fixed split `split_idx` of these rows.
  __device__ FixedSplit fixed_split(const Params& params) const {
    return fixed_split_of(0, kv_end, split_idx, params.num_splits);
  }

  // Query token of `row` (0 to kBlockM - 1) among those of the sequence, and its head.
  __device__ int token_of(int row) const {
    return kIsSparse || q_len == 1 ? 0 : (first_row + row) / heads;
  }
  __device__ int head_of(int row) const { return first_row + row - token_of(row) * heads; }

  // KV limit of `row`: up to its own position, or all.
  __device__ int kv_end_of_row(const Params& params, int row) const {
    if (row >= rows) return 0;
    if constexpr (kHasDcp) return dcp_kv_end(params, seq_idx, kv_len, q_len, token_of(row));
    return is_causal ? max(kv_len - (q_len - 1 - token_of(row)), 0) : kv_len;
  }

  // Index of `row` in a [tokens * heads] array.
  __device__ i64 global_row(int row) const { return first_query * heads + first_row + row; }
};

// KV length of a sequence; in sparse attention, the number of indices of a query token.
__device__ inline int kv_len_of(const Params& params, int seq_idx) {
  if constexpr (kHasTwoPools) {
    return pooled_indices(params, seq_idx).count();
  } else if constexpr (kIsSparse) {
    const TopkIndices topk_indices{params.seq_lens, params.topk_length, params.cu_seqlens_q,
                                   params.num_seqs, params.q_len,       params.topk};
    return topk_length_of(topk_indices, seq_idx);
  } else {
    return clamp_kv_len(params.seq_lens[seq_idx], block_table_row(params, seq_idx).num_pages);
  }
}

// Waits for the preceding kernel (PDL).
__device__ inline WorkItem find_work_item(const Params& params) {
  WorkItem work;
  CtaIndex cta;
  const int m_tile = cta.next(params.m_tiles);
  work.split_idx = cta.next(params.num_splits);
  pdl_wait();
  const int* cu_seqlens_q = kIsSparse ? nullptr : params.cu_seqlens_q;
  const TileRows found =
      rows_of_tile(cu_seqlens_q, params.num_seqs, kIsSparse ? 1 : params.q_len, params.heads,
                   params.heads, params.total_rows, cta.last(), m_tile);
  work.seq_idx = found.seq_idx;
  work.heads = params.heads;
  work.q_len = found.q_len;
  work.first_query = found.first_query;
  work.first_row = found.first_row;
  work.rows = found.rows;
  work.is_causal = params.is_causal;

  work.kv_len = kv_len_of(params, work.seq_idx);
  work.unmasked_kv_end = work.kv_end_of_row(params, 0);
  work.kv_end = work.kv_end_of_row(params, work.rows - 1);

  if constexpr (kBatchInvariant) {
    const FixedSplit split = work.fixed_split(params);
    work.first_kv_block = split.first_token / kBlockN;
    work.end_kv_block = ceil_div(split.end_token, kBlockN);
    if (work.split_idx >= split.num_splits) work.rows = 0;
    return work;
  }
  const int num_kv_blocks = ceil_div(work.kv_end, kBlockN);
  const int kv_blocks_per_split = ceil_div(num_kv_blocks, params.num_splits);
  work.first_kv_block = min(num_kv_blocks, work.split_idx * kv_blocks_per_split);
  work.end_kv_block = min(num_kv_blocks, work.first_kv_block + kv_blocks_per_split);
  return work;
}

struct SharedMemoryPlan {
  unsigned char query[kBlockM * kTokenBytes];  // [kBlockM][kHeadDimQk], swizzled; then the output
  unsigned char kv[kStages * kStageBytes + kDequantBytes];  // see stage_ptr and tokens_of
  unsigned char probabilities[kBlockM * kProbabilityBytes];  // [kBlockM][kBlockN], swizzled
  WorkItem work;  // once per CTA instead of in the registers of every thread
  int is_masked[kBlockN];  // for some row, other than by its position
  int row_kv_end[kBlockM];  // KV limit of a row
  float row_partial[kTokenWarps][kBlockM];  // row max or row sum of each token warp
  float row_max[kBlockM];  // P is relative to it; base 2
  float row_alpha[kBlockM];  // rescale factor of O
};
static_assert(sizeof(SharedMemoryPlan) == kSharedBytes, "the spec computes what the struct takes");

// Publishes the work to all threads, computes the KV limit of every row once, and resets the row
// max.
__device__ inline void publish_work_item(const Params& params, const WorkItem& work,
                                         SharedMemoryPlan& smem) {
  if (threadIdx.x == 0) smem.work = work;
  for (int row = static_cast<int>(threadIdx.x); row < kBlockM; row += kThreads) {
    smem.row_kv_end[row] = work.kv_end_of_row(params, row);
    smem.row_max[row] = -kInfinity;
  }
}

// Stage that load `stage_idx` fills: [kBlockN] rows of kStageRowBytes.
__device__ inline unsigned char* stage_ptr(SharedMemoryPlan& smem, int stage_idx) {
  return smem.kv + stage_idx % kStages * kStageBytes;
}

// The KV block as the MMA reads it, swizzled [kBlockN][kHeadDimQk].
__device__ inline unsigned char* tokens_of(SharedMemoryPlan& smem, int stage_idx) {
  return kDequantsKv ? smem.kv + kStages * kStageBytes : stage_ptr(smem, stage_idx);
}

// Bias of `row`; null if there is none.
__device__ inline const float* row_bias(const Params& params, const WorkItem& work, int row) {
  if constexpr (!kHasBias) return nullptr;
  const i64 query = work.first_query + work.token_of(row);
  return params.bias + query * params.bias_stride + work.head_of(row) * params.bias_head_stride;
}

// Returns whether a row attends to a token within its KV limit, and adds the token's bias to the
// score. Records tokens that a bias masks.
__device__ inline bool attends_token(const float* bias, int first_token, int token, float& score,
                                     SharedMemoryPlan& smem) {
  if constexpr (kIsSparse) {
    return smem.is_masked[token] == 0;
  } else if constexpr (kHasBias) {
    const float added = bias[first_token + token];
    if (added == -kInfinity) {
      smem.is_masked[token] = 1;  // all who write it write the same
      return false;
    }
    // A finite score stays finite: minus infinity means masked, and plus infinity makes NaN.
    const float in_log2 = added * kLog2E;
    const bool overflows = fabsf(in_log2) == kInfinity && added != kInfinity;
    score += overflows ? copysignf(kFloatMax, added) : in_log2;
  }
  return true;
}

// Called before a KV block: marks invalid top-k indices, and clears what the bias masked.
__device__ inline void begin_kv_block(const Params& params, const int* topk_indices,
                                      const PooledIndices& pooled, int topk_length, int kv_block,
                                      SharedMemoryPlan& smem) {
  const int token = static_cast<int>(threadIdx.x);
  if (!(kIsSparse || kHasBias) || token >= kBlockN) return;
  bool is_masked = false;
  const int token_idx = kv_block * kBlockN + token;
  if constexpr (kHasTwoPools) {
    const int index = token_idx < topk_length ? pooled.read(token_idx) : -1;
    is_masked = !pooled_token(params, index, pooled.is_extra(token_idx)).exists;
  } else if constexpr (kIsSparse) {
    const int id = token_idx < topk_length ? topk_indices[token_idx] : -1;
    is_masked = id < 0 || !is_valid_page(id / kPageSize, params.num_pages);
  }
  smem.is_masked[token] = is_masked;
}
