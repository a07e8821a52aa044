// Online softmax of the scorer, over the rows of S^T.

#pragma once

#include "accumulators.cuh"
#include "common/barriers.cuh"
#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ex2.cuh"
#include "ptx/fence.cuh"
#include "ptx/max.cuh"
#include "ptx/stmatrix.cuh"
#include "shared_memory.cuh"

// A thread has of eight neighbouring rows two, and of a warp's sixteen tokens g and g + 8 with
// g = lane / 4.
using Scores = float[kBlockM / 2];

// Probabilities are fp16: a row's largest is 2^6 when its reference moves, and 2^14 before that is
// so.
constexpr float kRowMaxLead = 6.0f;  // log2 units
constexpr u32 kMaxProbabilityFp16 = 0x7400;  // as fp16

// Instead of 0, which would make NaN of the scores of hidden tokens, as a factor does that is NaN.
constexpr float kTinyScale = 0x1p-126f;

// Two neighbouring rows.
struct RowPair {
  float4 both;  // factor and reference of each

  __device__ float factor(int row) const { return row == 0 ? both.x : both.z; }

  // How far a score of the first is from its reference, and of the second.
  __device__ float low(float score) const { return fmaf(score, both.x, -both.y); }
  __device__ float high(float score) const { return fmaf(score, both.z, -both.w); }
};

// Those of a thread: two in every eight.
struct ThreadRowPairs {
  const SoftmaxRow* first;

  __device__ ThreadRowPairs(const SharedMemoryPlan& smem, const QkThread& qk_thread)
      : first(smem.rows + qk_thread.lane % 4 * 2) {}

  __device__ RowPair of_group(int group) const {
    return {*reinterpret_cast<const float4*>(first + group * 8)};
  }
};

struct Softmax {
  SharedMemoryPlan& smem;

  __device__ explicit Softmax(SharedMemoryPlan& smem) : smem(smem) {}

  // Before the first block of an item, whose query is here; `scale` makes scores log2 units.
  __device__ void begin(float scale) const {
    const int row = reload_tid() % kQkThreads;
    if (row == 0) smem.shared_scale = kInitialSharedScale;
    if (row < kBlockM) {
      const float factor = scale * smem.query_scale[row];
      smem.rows[row] = {factor == 0.0f ? kTinyScale : factor, -kFloatMax};
    }
    barrier_sync(kQkBarrier, kQkThreads);
  }

  // Turns scores into probabilities for the consumers, in shared memory: relative to references
  // that move if one is too large for them, as an item's first are. So does the unit by the scales
  // of their values, which have been left in units and are left again if these move.
  __device__ void update(const Scores& scores, const ThreadScales& scales,
                         const QkThread& qk_thread, int stage, bool is_first) {
    bool needs_rescale = is_first;
    if (!is_first) {
      const bool is_exceeded = scales.exceeds_max_scaled(smem.shared_scale);
      needs_rescale = store_probabilities(scores, qk_thread, stage) || is_exceeded;
      needs_rescale = barrier_red_or(kQkBarrier, kQkThreads, needs_rescale) != 0;
    }
    if (__any_sync(~0u, needs_rescale)) {
      update_row_max(scores, scales, qk_thread, stage);
      scales.store(smem.kv[stage], qk_thread, smem.shared_scale);
      store_probabilities(scores, qk_thread, stage);
      publish_block_scale(qk_thread, stage, !is_first);
    }
    __syncwarp();
    if (qk_thread.lane == 0) arrive(smem.probabilities_full[stage]);
  }

  // Leaves the units of a block, and whether it multiplies the outputs before it: at first, before
  // its scores are there, as if no reference moved.
  __device__ void publish_block_scale(const QkThread& qk_thread, int stage, bool rescales) const {
    if (qk_thread.lane != 0 || qk_thread.warp != 0) return;
    smem.rescales[stage] = rescales;
    smem.block_scale[stage] = smem.shared_scale;
  }

  // Writes probabilities relative to the references as they are; says whether any is so large that
  // references must move. All are computed before the first is written: reading what others need
  // would wait for that.
  __device__ bool store_probabilities(const Scores& scores, const QkThread& qk_thread,
                                      int stage) const {
    const ThreadRowPairs rows(smem, qk_thread);
    u32 max_p = 0;
    u32 pairs[kRowGroups][2];  // of two neighbouring rows, for tokens g and g + 8
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const RowPair pair = rows.of_group(group);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* acc = scores + group * 4 + half * 2;
        pairs[group][half] =
            cvt_rn_x2_f32(Fp16{}, ex2_approx(pair.high(acc[1])), ex2_approx(pair.low(acc[0])));
      }
      max_p = max_f16x2(max_p, max_f16x2(pairs[group][0], pairs[group][1]));
    }
    // Matrices: tokens 0 to 7 and 8 to 15 of the warp, for 8 rows and for the next 8.
    const int chunk = qk_thread.warp * 2 + qk_thread.lane / 8 % 2;
    const u32 address =
        shared_address(smem.probabilities[stage]) +
        swizzled_offset<kTileRowBytes>(qk_thread.lane / 16 * 8 + qk_thread.lane % 8, chunk);
#pragma unroll
    for (int group = 0; group < kRowGroups; group += 2) {
      stmatrix_x4_trans(address + group * 8 * kTileRowBytes, pairs[group][0], pairs[group][1],
                        pairs[group + 1][0], pairs[group + 1][1]);
    }
    fence_proxy_async();
    return max(max_p & 0xffff, max_p >> 16) > kMaxProbabilityFp16;
  }

  // Moves the reference of every row to kRowMaxLead below its maximum, if that is larger, and
  // the unit to what the largest scale wants.
  __device__ void update_row_max(const Scores& scores, const ThreadScales& scales,
                                 const QkThread& qk_thread, int stage) {
    const ThreadRowPairs rows(smem, qk_thread);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const float factor = rows.of_group(r / 2).factor(r % 2);
      const float maximum = max_over_lanes(fmaxf(__fmul_rn(scores[r / 2 * 4 + r % 2], factor),
                                                 __fmul_rn(scores[r / 2 * 4 + 2 + r % 2], factor)));
      if (qk_thread.lane < 4) smem.warp_rows[qk_thread.warp][row_of(r)] = maximum;
    }
    smem.warp_scales[qk_thread.warp] =
        __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(scales.amax())));
    const float shared_scale = smem.shared_scale;
    barrier_sync(kQkBarrier, kQkThreads);
    const int row = qk_thread.warp * kWarpLanes + qk_thread.lane;
    const float next_shared_scale = next_shared_scale_for(shared_scale);
    if (row < kBlockM) {
      float& row_max = smem.rows[row].row_max;
      float next = row_max;
#pragma unroll
      for (int warp = 0; warp < kQkWarps; ++warp) {
        const float target = smem.warp_rows[warp][row] - kRowMaxLead;
        if (target > next) next = target;
      }
      smem.rescale[stage][row] = ex2_approx(row_max - next) * (next_shared_scale / shared_scale);
      row_max = next;
    }
    if (row == 0) smem.shared_scale = next_shared_scale;
    barrier_sync(kQkBarrier, kQkThreads);
  }

  // What `shared_scale` become by the scales of a block.
  __device__ float next_shared_scale_for(float shared_scale) const {
    float amax = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kQkWarps; ++warp) {
      amax = fmaxf(amax, smem.warp_scales[warp]);
    }
    return amax * shared_scale >= kMaxScaled ? shared_scale_for(amax) : shared_scale;
  }

  // Leaves what references have come to, for the consumers: of outputs in units, they are as much
  // lower.
  __device__ void publish_row_max(int stage) const {
    const float shared_scale = smem.shared_scale;  // before any thread begins the next item
    barrier_sync(kQkBarrier, kQkThreads);
    const int row = reload_tid() % kQkThreads;
    if (row < kBlockM) {
      smem.row_max[stage][row] = smem.rows[row].row_max - log2_of_pow2(shared_scale);
    }
    if (row == 0) smem.row_shared_scale[stage] = shared_scale;
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.row_state_full[stage]);
  }
};
