// Sequences of an MLA call: lengths, work tiles and KV blocks of each. A CTA group has all rows of
// a work tile, those of every head and query token.

#pragma once

#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/pools.cuh"
#include "common/ragged_tiles.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/mov.cuh"

// In a sparse call every query token is a sequence of its own, and its length is its `topk_length`.
// A template: dense kernels lack these parameters.
template <typename SparseParams>
__device__ inline int sparse_seq_len_of(const SparseParams& params, int seq_idx) {
  if constexpr (kHasTwoPools) return pooled_indices(params, seq_idx).count();
  const TopkIndices topk_indices{
      params.seq_lens,        params.topk_length,  params.sparse_cu_seqlens_q,
      params.sparse_num_seqs, params.sparse_q_len, params.topk};
  return topk_length_of(topk_indices, seq_idx);
}

__device__ inline int seq_len_of(const Params& params, int seq_idx) {
  if constexpr (kIsSparse) return sparse_seq_len_of(params, seq_idx);
  return params.seq_lens[seq_idx];
}

// `seq_len` is seq_len_of(seq_idx). The same clamp as clamp_kv_len, in fewer instructions.
__device__ inline int kv_len_of(const Params& params, int seq_idx, int seq_len) {
  if constexpr (kIsSparse) return seq_len;
  const int num_pages = min(block_table_row(params, seq_idx).num_pages, kMaxKvLen / kPageSize);
  return max(0, min(seq_len, num_pages * kPageSize));
}

// The CTAs of a group each take another M tile of a sequence; a work tile is one sequence and one
// such group of M tiles. In batch-invariant kernels it is one split of these.
template <bool kHasFixedSplits>
struct SeqInfoOf {
  i64 first_query;  // index of the sequence's first query token in the query tensor
  int q_len;  // -1 where cu_seqlens_q decreases
  int rows;  // 0 where the query tokens are not inside the query tensor
  int kv_len;
  int num_kv_blocks;  // of a work tile
  int num_tiles;  // work tiles

  __device__ void set_first_slot(int) {}
  __device__ int get_first_slot() const { return 0; }
};
// The same fields, and one that only these kernels have.
template <>
struct SeqInfoOf<true> {
  i64 first_query;
  int q_len;
  int rows;
  int kv_len;
  int num_kv_blocks;
  int num_tiles;
  int first_slot;  // of the partials of its splits

  __device__ void set_first_slot(int slot) { first_slot = slot; }
  __device__ int get_first_slot() const { return first_slot; }
};
using SeqInfo = SeqInfoOf<kBatchInvariant>;

// Batch-invariant kernels: the splits of a sequence, which depend on its length alone. They are
// equally long, but for the last one; the host's splits_of() has as many.
struct FixedSplits {
  int kv_len;
  int split_blocks;

  __device__ static int blocks_of(int kv_len) {
    return static_cast<u32>(kv_len + kBlockN - 1) / kBlockN;
  }
  // Templates: other kernels lack these parameters.
  template <typename KernelParams>
  __device__ static FixedSplits of(const KernelParams& params, int kv_len) {
    const u32 blocks = blocks_of(kv_len);
    const int of_product = static_cast<int>(params.split_product / max(blocks, 1u));
    const u32 max_blocks = min(max(of_product, params.min_split_blocks), params.max_split_blocks);
    const u32 wanted = (blocks + max_blocks - 1) / max_blocks;
    const u32 splits = max(min(wanted, static_cast<u32>(params.max_splits)), 1u);
    return {kv_len, static_cast<int>((blocks + splits - 1) / splits)};
  }
  __device__ static FixedSplits of(const SeqInfo& seq_info) {
    return {seq_info.kv_len, seq_info.num_kv_blocks};
  }

  // At least one.
  __device__ u32 count() const {
    return static_cast<u32>(max(blocks_of(kv_len) + split_blocks - 1, 1)) / max(split_blocks, 1);
  }
  // Whether the partials of the splits are combined; otherwise they have no slots.
  __device__ bool are_combined() const { return blocks_of(kv_len) > split_blocks; }
};

template <typename KernelParams>
__device__ inline void split_seq(const KernelParams& params, SeqInfo& seq_info) {
  if constexpr (kBatchInvariant) {
    const FixedSplits splits = FixedSplits::of(params, seq_info.kv_len);
    seq_info.num_kv_blocks = splits.split_blocks;
    seq_info.num_tiles *= static_cast<int>(splits.count());
  }
}

// Divides by the CTA group size, 1 to 4. Divisors are constants, because an integer division takes
// many instructions, and a select replaces branches.
__device__ inline int div_by_group_size(const Params& params, u32 count) {
  return static_cast<int>(params.cta_group_size == 3 ? count / 3
                                                     : count >> params.cta_group_size / 2);
}

// Rank of this CTA in its CTA group, recomputed where it is used so that it holds no register.
__device__ inline int cta_rank_in_group(const Params& params) {
  u32 index = blockIdx.x;
  mov_b32(index);
  const int cta = static_cast<int>(index);
  return cta - div_by_group_size(params, cta) * params.cta_group_size;
}

// `seq_len` is seq_len_of(seq_idx).
__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx, int seq_len) {
  SeqInfo seq_info;
  seq_info.q_len = kIsSparse ? 1 : params.q_len;  // each query token has its own top-k indices
  seq_info.first_query = static_cast<i64>(seq_idx) * seq_info.q_len;
  bool is_inside = true;
  if (!kIsSparse && params.cu_seqlens_q != nullptr) {
    seq_info.first_query = params.cu_seqlens_q[seq_idx];
    const i64 end = params.cu_seqlens_q[seq_idx + 1];
    const i64 q_len = min(end - seq_info.first_query, static_cast<i64>(0x7fffffff));
    seq_info.q_len = static_cast<int>(max(q_len, static_cast<i64>(-1)));
    is_inside = 0 <= seq_info.first_query && seq_info.first_query <= end &&
                end * params.heads <= params.total_rows;
  }
  seq_info.rows = is_inside ? seq_info.q_len * params.heads : 0;
  seq_info.kv_len = kv_len_of(params, seq_idx, seq_len);
  seq_info.num_kv_blocks = static_cast<u32>(seq_info.kv_len + kBlockN - 1) / kBlockN;
  const u32 m_tiles = static_cast<u32>(seq_info.rows + kBlockM - 1) / kBlockM;
  seq_info.num_tiles = div_by_group_size(params, m_tiles + params.cta_group_size - 1);
  split_seq(params, seq_info);
  return seq_info;
}

// Slots of the partials of a sequence, in batch-invariant kernels; each has a place for every CTA
// of a group.
__device__ inline int slots_of(const SeqInfo& seq_info) {
  return FixedSplits::of(seq_info).are_combined() ? seq_info.num_tiles : 0;
}

__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx) {
  return seq_info_of(params, seq_idx, seq_len_of(params, seq_idx));
}
