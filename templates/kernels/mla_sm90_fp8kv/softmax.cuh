// Online softmax of the QK warpgroup over S^T, with a lazily updated row max and P in fp16.

#pragma once

#include "accumulators.cuh"
#include "common/barriers.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"
#include "ptx/sync.cuh"
#include "ptx/warp_matrix.cuh"
#include "score_limits.cuh"
#include "shared_memory.cuh"
#include "v_scales.cuh"

// Two adjacent rows.
struct RowPair {
  float4 both;  // score scale and row max of each

  __device__ float score_scale(int row) const { return row == 0 ? both.x : both.z; }

  // Difference of a score to the row max, in the log2 domain: of the first row, and of the second.
  __device__ float low(float score) const { return fmaf(score, both.x, -both.y); }
  __device__ float high(float score) const { return fmaf(score, both.z, -both.w); }
};

// The row pairs of a thread: one in every eight rows.
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

  // Called before the first KV block of a work item, once Q is in shared memory. `scale` is the
  // softmax scale to the log2 domain.
  __device__ void begin(float scale) const {
    const int row = reload_tid() % kQkThreads;
    if (row == 0) smem.shared_scale = kInitialSharedScale;
    if (row < kBlockM) {
      const float score_scale = scale * smem.query_scale[0][row];
      smem.rows[row] = {score_scale == 0.0f ? kTinyScale : score_scale, -kFloatMax};
    }
    named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
  }

  // Softmax of a KV block: stores P for the PV warpgroups. The fast path uses the stale row max and
  // the stale shared scale of V. On the first KV block of a work item, or if a probability or a V
  // scale exceeds its limit, the slow path updates both, and stores the V scales and P again: a
  // second iteration, so that there is one copy of the code that stores P.
  __device__ void update(const Scores& scores, const ThreadScales& scales,
                         const QkThread& qk_thread, int stage, bool is_first,
                         bool exceeds_max_scaled) {
    bool needs_rescale = is_first;
#pragma unroll 1
    while (true) {
      if (__any_sync(~0u, needs_rescale)) {
        update_row_max(scores, scales, stage);
        scales.store(smem.kv[stage], QkThread(), smem.shared_scale);
        publish_block_scale(QkThread(), stage, !is_first);
      }
      const bool is_exceeded = store_probabilities(scores, qk_thread, stage);
      if (__any_sync(~0u, needs_rescale)) break;
      needs_rescale = named_barrier_sync_or(NamedBarrier::QkSynced, kQkThreads,
                                            is_exceeded || exceeds_max_scaled);
      if (!__any_sync(~0u, needs_rescale)) break;
    }
    __syncwarp();
    if (qk_thread.lane == 0) arrive(smem.probabilities_full[stage]);
  }

  // Publishes the shared scale of a KV block, and whether O needs a rescale before it. The first
  // call, before the scores are complete, assumes the fast path.
  __device__ void publish_block_scale(const QkThread& qk_thread, int stage,
                                      bool needs_rescale) const {
    if (qk_thread.lane != 0 || qk_thread.warp != 0) return;
    smem.needs_rescale[stage] = needs_rescale;
    smem.block_scale[stage] = smem.shared_scale;
  }

  // Stores P relative to the stale row max, and returns whether any probability exceeds
  // `kMaxProbabilityFp16`. Computes all of P before the first store: the loads of later rows would
  // have to wait for the stores.
  __device__ bool store_probabilities(const Scores& scores, const QkThread& qk_thread,
                                      int stage) const {
    const ThreadRowPairs rows(smem, qk_thread);
    u32 max_p = 0;
    u32 pairs[kRowGroups][2];  // of two adjacent rows, for tokens g and g + 8
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
    // The four 8x8 matrices: tokens 0-7 and 8-15 of the warp, for 8 rows and for the next 8.
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

  // Raises every row max to `kMaxOffset` below the maximum of the row's scores, and lowers the
  // shared scale to what the amax of the V scales requires.
  __device__ void update_row_max(const Scores& scores, const ThreadScales& scales, int stage) {
    const QkThread qk_thread;
    const ThreadRowPairs rows(smem, qk_thread);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const float score_scale = rows.of_group(r / 2).score_scale(r % 2);
      const float maximum =
          max_over_lanes(fmaxf(__fmul_rn(scores[r / 2 * 4 + r % 2], score_scale),
                               __fmul_rn(scores[r / 2 * 4 + 2 + r % 2], score_scale)));
      if (qk_thread.lane < 4) smem.warp_row_max[qk_thread.warp][row_of(r)] = maximum;
    }
    smem.warp_scale_amax[qk_thread.warp] =
        __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(scales.amax())));
    const float shared_scale = smem.shared_scale;
    named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
    const int row = qk_thread.warp * kWarpLanes + qk_thread.lane;
    const float next_shared_scale = next_shared_scale_for(shared_scale);
    if (row < kBlockM) {
      float& row_max = smem.rows[row].row_max;
      float next = row_max;
#pragma unroll
      for (int warp = 0; warp < kQkWarps; ++warp) {
        const float target = smem.warp_row_max[warp][row] - kMaxOffset;
        if (target > next) next = target;
      }
      smem.alpha[stage][row] = ex2_approx(row_max - next) * (next_shared_scale / shared_scale);
      row_max = next;
    }
    if (row == 0) smem.shared_scale = next_shared_scale;
    named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
  }

  // Shared scale for the V scales of a KV block; unchanged while they stay below the limit.
  __device__ float next_shared_scale_for(float shared_scale) const {
    float amax = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kQkWarps; ++warp) {
      amax = fmaxf(amax, smem.warp_scale_amax[warp]);
    }
    return amax * shared_scale >= kMaxScaled ? shared_scale_for(amax) : shared_scale;
  }

  // Publishes the row max of the work item to the PV warpgroups, lowered by the log2 of the shared
  // scale, since O and l carry that factor.
  __device__ void publish_row_max(int stage) const {
    const float shared_scale = smem.shared_scale;  // read before the next work item resets it
    named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
    const int row = reload_tid() % kQkThreads;
    if (row < kBlockM) {
      smem.row_max[stage][row] = smem.rows[row].row_max - log2_of_pow2(shared_scale);
    }
    if (row == 0) smem.row_shared_scale[stage] = shared_scale;
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.row_state_full[stage]);
  }
};
