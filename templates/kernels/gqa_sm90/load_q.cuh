// Loads of the Q of a work item by the consumer warps.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "convert_q.cuh"
#include "fragments.cuh"
#include "mma.cuh"
#include "shared_memory.cuh"
#include "work_item.cuh"

// Q is loaded in fragment order: into registers, or into shared memory for all warps. Q in
// registers is prefetched before its work item begins, because latency is high while memory is
// busy.
__device__ inline void load_q_row(const Params& params, const WorkItem& work, int group,
                                  QFragment& fragment) {
  const int row = q_fragment_row(group);
  const bool is_row = row < work.rows;
  const i64 token = work.first_query + (is_row ? work.query_of(params, row) : 0);
  const int head = is_row ? work.head_of(params, row) : 0;
  const u16* source = params.query + token * params.query_stride + head * params.query_head_stride;
#pragma unroll
  for (int k = 0; k < kDimTiles; ++k) {
    fragment[k] = is_row ? load_q_fragment(source, k) : make_uint2(0, 0);
  }
}

struct QueryFragments {
  static constexpr bool kPrefetchesQ = true;

  QFragment rows[kRowGroups];
  QFragment next_rows[kRowGroups];  // of the next item, in flight
  float inverse_scale[kRowGroups];  // of this lane's row of each group

  __device__ explicit QueryFragments(const SharedMemoryPlan&) {}

  // Issues the loads of all rows; every warp calls it.
  __device__ void prefetch(const Params& params, const WorkItem& work, int) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) load_q_row(params, work, n, next_rows[n]);
  }

  __device__ void load(const Params&, const WorkItem&, int, SharedMemoryPlan&) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) rows[n][k] = next_rows[n][k];
      inverse_scale[n] = convert_q_row(rows[n]);
    }
  }

  __device__ uint2 at(int group, int k) const { return rows[group][k]; }

  // Inverse Q scale of the row in column `r` of a lane's accumulators.
  __device__ float inverse_scale_of(int group, int r) const {
    return kScalesQ ? __shfl_sync(~0u, inverse_scale[group], row_of(0, r) * 4) : 1.0f;
  }
};

struct SharedQuery {
  static constexpr bool kPrefetchesQ = false;

  const SharedMemoryPlan& smem;

  __device__ explicit SharedQuery(const SharedMemoryPlan& target) : smem(target) {}

  __device__ void prefetch(const Params&, const WorkItem&, int) {}

  // Called by all consumers; the first kRowGroups warps load a row group each.
  __device__ void load(const Params& params, const WorkItem& work, int warp,
                       SharedMemoryPlan& target) {
    // No warp may still read the previous Q. Consumers that combine have synced since the main
    // loop; publish_partials does not sync them.
    if constexpr (kUsesEpilogueWarps)
      named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
    if (warp < kRowGroups) {
      QFragment fragment;
      load_q_row(params, work, warp, fragment);
      const float inverse_scale = convert_q_row(fragment);
      if (lane_index() % 4 == 0) target.query_inverse_scales[q_fragment_row(warp)] = inverse_scale;
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) target.query[warp][k][lane_index()] = fragment[k];
    }
    named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  }

  __device__ uint2 at(int group, int k) const { return smem.query[group][k][lane_index()]; }

  __device__ float inverse_scale_of(int group, int r) const {
    return kScalesQ ? smem.query_inverse_scales[row_of(group, r)] : 1.0f;
  }
};

template <bool kInRegs>
struct QueryChoice {
  using Type = QueryFragments;
};
template <>
struct QueryChoice<false> {
  using Type = SharedQuery;
};
using Query = QueryChoice<kQueryInRegs>::Type;
