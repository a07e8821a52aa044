// Online softmax by the PV warpgroups, between their GEMMs, with a lazily updated row max and P in
// fp16. Four adjacent lanes share a row: each has a quarter of the tokens of a KV block.

#pragma once

#include "common/barriers.cuh"
#include "common/block_table.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"
#include "ptx/sync.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "score_limits.cuh"
#include "scores_smem.cuh"
#include "shared_memory.cuh"
#include "softmax/online_softmax.cuh"
#include "thread_token.cuh"
#include "v_scales.cuh"

constexpr int kTokensPerThread = kBlockN / kThreadsPerRow;
static_assert(kThreadsPerRow == 4, "a row has the four lanes of a quad");

// Row and quarter of the tokens of a PV thread, reread where they are used: they hold no registers
// beside the accumulators.
struct RowQuarter {
  int row;
  int quarter;

  __device__ RowQuarter() {
    const int thread = reload_tid();
    row = thread / kThreadsPerRow;
    quarter = thread % kThreadsPerRow;
  }
  __device__ bool is_first() const { return row == 0 && quarter == 0; }
};

// Scores of a thread: of its row and quarter of the tokens.
using ThreadScores = float[kTokensPerThread];

// Shared scale of the work item in use. It changes only when all PV warps are done with the KV
// block before.
__device__ inline float last_shared_scale(const SharedMemoryPlan& smem, int) {
  return smem.shared_scale;
}
__device__ inline float shared_scale_of(const SharedMemoryPlan& smem, int) {
  return smem.shared_scale;
}

// V scales of a KV block, behind the scores, and its P.
__device__ inline u16* v_scales_at(SharedMemoryPlan& smem, int, int buffer) {
  return reinterpret_cast<u16*>(smem.spare + kScoresBytes + buffer * kVScalesBytes);
}
__device__ inline u32 probabilities_desc(const SharedMemoryPlan& smem, int buffer) {
  return warp_uniform(descriptor_low(shared_address(smem.probabilities[buffer])));
}

struct PvSoftmax {
  SharedMemoryPlan& smem;
  int stage;
  int buffer;  // of P and of V scales
  ThreadToken token;

  __device__ PvSoftmax(SharedMemoryPlan& smem, int stage, int buffer)
      : smem(smem), stage(stage), buffer(buffer), token(smem.kv[stage]) {}

  __device__ void load_scores(ThreadScores& scores, float score_scale) const {
    const auto [row, quarter] = RowQuarter();
    const int first = score_offset(row, quarter * (kTokensPerThread / 4));
#pragma unroll
    for (int i = 0; i < kTokensPerThread / 4; ++i) {  // the index of a chunk is in two bits
      const float4 loaded =
          *reinterpret_cast<const float4*>(smem.spare + (first ^ i * kChunkBytes));
      scores[i * 4] = loaded.x;
      scores[i * 4 + 1] = loaded.y;
      scores[i * 4 + 2] = loaded.z;
      scores[i * 4 + 3] = loaded.w;
    }
    mask_invalid(scores, smem.invalid_mask[stage].bits[quarter], score_scale);
  }

  // A select, not an addition: a masked score may be NaN. Times the score scale once more, the
  // score is minus infinity, whatever the sign of the scale.
  __device__ static void mask_invalid(ThreadScores& scores, u32 invalid, float score_scale) {
    static_assert(kTokensPerThread == sizeof(InvalidMask::bits[0]) * 8, "a word of the mask");
    if (!__any_sync(~0u, invalid != 0)) return;
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      if ((invalid >> i & 1) != 0) scores[i] = score_scale * -kInfinity;
    }
  }

  // Stores P and V scales for the GEMMs of both PV warpgroups. The fast path uses the stale row max
  // and the stale shared scale of V. On the first KV block of a work item, or if a probability or a
  // V scale exceeds its limit, the slow path updates both. Returns whether O needs a rescale.
  __device__ bool process(const Params& params, const WorkItem& work, bool is_first) {
    const int row = RowQuarter().row;
    SoftmaxRow state = smem.rows[row];
    float shared_scale = smem.shared_scale;
    if (__any_sync(~0u, is_first)) {
      const float score_scale = ::score_scale(params) * (kLog2E / kKScaleFactor) *
                                smem.query_scale[work_slot(work.work_idx)][row];
      state = {score_scale == 0.0f ? kTinyScale : score_scale, -kFloatMax};
      shared_scale = kInitialSharedScale;
    }
    bool needs_update = is_first;
#pragma unroll 1
    while (true) {
      ThreadScores scores;
      load_scores(scores, state.score_scale);
      if (__any_sync(~0u, needs_update)) update_row_max(scores, state, shared_scale);
      bool is_exceeded = store_probabilities(scores, state);
      token.store(smem.kv[stage], v_scales_at(smem, stage, buffer), shared_scale);
      is_exceeded |= token.exceeds_max_scaled(shared_scale);
      const bool exceeds =
          named_barrier_sync_or(NamedBarrier::PvWarpsSynced, kPvThreads, is_exceeded);
      if (__any_sync(~0u, needs_update || !exceeds)) break;
      needs_update = true;
    }
    if (reload_lane() == 0) arrive(smem.scores_empty);
    return needs_update && !is_first;
  }

  // Stores P relative to the stale row max, and returns whether any probability exceeds
  // `kMaxProbabilityFp16`.
  __device__ bool store_probabilities(const ThreadScores& scores, const SoftmaxRow& state) const {
    u32 max_p = 0;
    Chunk chunks[kTokensPerThread / 8];
#pragma unroll
    for (int i = 0; i < kTokensPerThread / 2; ++i) {
      const float low = fmaf(scores[i * 2], state.score_scale, -state.row_max);
      const float high = fmaf(scores[i * 2 + 1], state.score_scale, -state.row_max);
      const u32 pair = cvt_rn_x2_f32(Fp16{}, ex2_approx(high), ex2_approx(low));
      max_p = max_f16x2(max_p, pair);
      chunks[i / 4].words[i % 4] = pair;
    }
    const auto [row, quarter] = RowQuarter();
    const u32 first = swizzled_offset<kTileRowBytes>(row, quarter * (kTokensPerThread / 8));
#pragma unroll
    for (int i = 0; i < kTokensPerThread / 8; ++i) {
      *reinterpret_cast<Chunk*>(smem.probabilities[buffer] + (first ^ i * kChunkBytes)) = chunks[i];
    }
    fence_proxy_async();
    return max(max_p & 0xffff, max_p >> 16) > kMaxProbabilityFp16;
  }

  // Raises the row max to `kMaxOffset` below the maximum of the row's scores, and lowers the shared
  // scale to what the amax of the V scales requires.
  __device__ void update_row_max(const ThreadScores& scores, SoftmaxRow& state,
                                 float& shared_scale) {
    float maximum = __fmul_rn(scores[0], state.score_scale);
#pragma unroll
    for (int i = 1; i < kTokensPerThread; ++i) {
      maximum = fmaxf(maximum, __fmul_rn(scores[i], state.score_scale));
    }
    const float target = quad_reduce_max(maximum) - kMaxOffset;
    smem.warp_scale_amax[reload_warp()] =
        __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(token.amax)));
    named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
    float amax = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kPvWarps; ++warp) amax = fmaxf(amax, smem.warp_scale_amax[warp]);
    const float next_scale =
        amax * shared_scale >= kMaxScaled ? shared_scale_for(amax) : shared_scale;
    const float next = target > state.row_max ? target : state.row_max;
    const float alpha = ex2_approx(state.row_max - next) * (next_scale / shared_scale);
    state.row_max = next;
    shared_scale = next_scale;
    const RowQuarter thread;
    if (thread.quarter == 0) {
      smem.alpha[stage][thread.row] = alpha;
      smem.rows[thread.row] = state;
    }
    if (thread.is_first()) smem.shared_scale = next_scale;
  }
};

// Waits for the scores of a KV block, and computes its softmax. Returns whether O needs a rescale.
__device__ inline bool finish_softmax(const Params& params, SharedMemoryPlan& smem,
                                      const WorkItem& work, u32 blocks_done, u32 end) {
  const int stage = stage_of<kStages>(blocks_done);
  wait(smem.scores_full[stage], phase_of<kStages>(blocks_done));
  PvSoftmax softmax(smem, stage, stage_of<kPBuffers>(blocks_done));
  const bool is_first = end - blocks_done == static_cast<u32>(work.num_kv_blocks);
  return softmax.process(params, work, is_first);
}

// Publishes the row max of a work item, lowered by the log2 of the shared scale, since O and l
// carry that factor. The combine of a batch-invariant kernel takes the place of Q, for which the PV
// warps of a work item without KV blocks have not waited: the QK warps are done with it now.
__device__ inline void finish_row_max(SharedMemoryPlan& smem, const WorkItem& work) {
  if constexpr (kBatchInvariant) {
    wait(smem.row_state_full[work_slot(work.work_idx)], work_phase(work.work_idx));
  }
  const RowQuarter thread;
  if (__any_sync(~0u, work.num_kv_blocks == 0)) {
    if (thread.is_first()) smem.shared_scale = kInitialSharedScale;
    if (thread.quarter == 0) smem.rows[thread.row].row_max = -kFloatMax;
    named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
  }
  const int slot = work_slot(work.work_idx);
  const float shared_scale = smem.shared_scale;
  if (thread.quarter == 0) {
    smem.row_max[slot][thread.row] = smem.rows[thread.row].row_max - log2_of_pow2(shared_scale);
  }
  if (thread.is_first()) smem.row_shared_scale[slot] = shared_scale;
}
