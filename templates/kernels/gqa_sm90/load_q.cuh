// The rows of an item's query, as a lane multiplies them: in its registers, or in shared memory
// for all warps. Where there are registers for them, they are asked for before the item begins:
// memory that is busy takes long to answer.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"
#include "mma.cuh"
#include "ptx/barrier.cuh"
#include "shared_memory.cuh"
#include "tile_scheduler.cuh"

__device__ inline void load_row(const Params& params, const Item& item, int group, QueryRow& part) {
  const int row = query_row(group);
  const bool is_row = row < item.rows;
  const i64 token = item.first_query + (is_row ? item.query_of(params, row) : 0);
  const int head = is_row ? item.head_of(params, row) : 0;
  const u16* source = params.query + token * params.query_stride + head * params.query_head_stride;
#pragma unroll
  for (int k = 0; k < kDimTiles; ++k) {
    part[k] = is_row ? fragment_of(source + k * 16) : make_uint2(0, 0);
  }
}

struct KeptQuery {
  static constexpr bool kAsksAhead = true;  // before the item begins

  QueryRow rows[kRowGroups];
  QueryRow next_rows[kRowGroups];  // of the next item, under way
  float undone[kRowGroups];  // of the lane's row of each group

  __device__ explicit KeptQuery(const SharedMemory&) {}

  // By each warp for itself.
  __device__ void begin(const Params& params, const Item& item, int) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) load_row(params, item, n, next_rows[n]);
  }

  __device__ void finish(const Params&, const Item&, int, SharedMemory&) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) rows[n][k] = next_rows[n][k];
      undone[n] = fit_row(rows[n]);
    }
  }

  __device__ uint2 at(int group, int k) const { return rows[group][k]; }

  // What undoes the scaling of the row in column `r` of a lane's accumulators.
  __device__ float undone_of(int group, int r) const {
    return kScalesQuery ? __shfl_sync(~0u, undone[group], own_row(0, r) * 4) : 1.0f;
  }
};

struct SharedQuery {
  static constexpr bool kAsksAhead = false;

  const SharedMemory& shared;

  __device__ explicit SharedQuery(const SharedMemory& target) : shared(target) {}

  __device__ void begin(const Params&, const Item&, int) {}

  // By all consumers, of which some bring a group each.
  __device__ void finish(const Params& params, const Item& item, int warp, SharedMemory& target) {
    // Nobody multiplies by the one before: warps that merge have met since.
    if constexpr (kMergesApart) barrier_sync(kConsumerBarrier, kConsumerThreads);
    if (warp < kRowGroups) {
      QueryRow part;
      load_row(params, item, warp, part);
      const float undone = fit_row(part);
      if (lane_index() % 4 == 0) target.query_factors[query_row(warp)] = undone;
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) target.query[warp][k][lane_index()] = part[k];
    }
    barrier_sync(kConsumerBarrier, kConsumerThreads);
  }

  __device__ uint2 at(int group, int k) const { return shared.query[group][k][lane_index()]; }

  __device__ float undone_of(int group, int r) const {
    return kScalesQuery ? shared.query_factors[own_row(group, r)] : 1.0f;
  }
};

template <bool kKeeps>
struct QueryChoice {
  using Type = KeptQuery;
};
template <>
struct QueryChoice<false> {
  using Type = SharedQuery;
};
using Query = QueryChoice<kKeepsQuery>::Type;
