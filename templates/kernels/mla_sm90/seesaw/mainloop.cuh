// Mainloop of two consumer warpgroups: seesaw over the pairs of KV blocks of each work item.

#pragma once

#include "accumulators.cuh"
#include "combine/epilogue.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "gemms.cuh"
#include "mask_v.cuh"
#include "ptx/mov.cuh"
#include "ptx/sync.cuh"
#include "ptx/warp_matrix.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "softmax/online_softmax.cuh"
#include "softmax/scores.cuh"
#include "thread_rows.cuh"

// A work item of so few KV blocks does not amortise fetching the code of the unmasked path.
constexpr int kShortWorkBlocks = 4;

// Both warpgroups accumulate the even KV block of a pair before the odd one, so that the row max
// only rises:
//
//   wg0:  softmax even | O += own P | O += P of wg1 | S of the next even block
//   wg1:  O += P of wg0, overlapped with softmax odd | O += own P | S of the next odd block
struct Consumer {
  const Params& params;
  SharedMemoryPlan& smem;
  const WorkItem& work;
  // Made opaque before each GEMM of a loop: otherwise the compiler hoists the descriptors of the
  // whole loop, and spills.
  u32& start_desc;
  float scale;  // from scores to the log2 domain
  u32& phase;  // of the stages
  Accumulators accumulators;
  Scores scores;
  Probabilities probabilities;
  Softmax softmax;

  __device__ Consumer(const Params& params, SharedMemoryPlan& smem, const WorkItem& work,
                      u32& start_desc, float scale, u32& phase)
      : params(params), smem(smem), work(work), start_desc(start_desc), scale(scale), phase(phase) {
#pragma unroll
    for (int i = 0; i < kHalfDims / 2; ++i) accumulators[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      softmax.row_sum[r] = 0.0f;
      softmax.row_max[r] = -kFloatMax;
    }
  }

  __device__ void release(const Barrier& barrier) const {
    if (consumer_thread() == 0) arrive(barrier);
  }

  template <int kStage>
  __device__ void store_p() const {
    const int thread = reload_tid();
    const int row = thread % 128 / kWarpLanes * 16 + thread % 16;
    const u32 address =
        shared_address(smem.kv[kStage] + kLatentTiles * kTileBytes) + row * kTileRowBytes;
    const int chunk = thread % kWarpLanes / 16 ^ row % 8;
#pragma unroll
    for (int k = 0; k < kBlockN / 16; ++k) {
      stmatrix_x4(address + ((chunk ^ (k * 2)) << 4), probabilities[k * 4],
                  probabilities[k * 4 + 1], probabilities[k * 4 + 2], probabilities[k * 4 + 3]);
    }
    fence_proxy_async();
  }

  // Whether a row does not attend to a token of the KV block in `kStage`.
  template <int kStage>
  __device__ bool is_masked(int first_token) const {
    if constexpr (kIsSparse) return smem.invalid_mask[kStage].all() != 0;
    return first_token + kBlockN > work.unmasked_kv_end;
  }

  // Computes P of a KV block with the stale row max; returns whether that failed. Issued beside
  // MMAs, so no branch may come between.
  __device__ bool try_softmax(bool needs_mask) {
    return !softmax.update(scores, scale, probabilities, needs_mask);
  }

  // Computes P of the KV block in `kStage` with a new row max if try_softmax failed, and stores it
  // for the other warpgroup, whose barrier is left to the caller.
  template <int kStage>
  __device__ void finish_softmax(int kv_block, bool needs_rescale, float (&alpha)[kRowsPerThread]) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) alpha[r] = 1.0f;
    if (needs_rescale) {
      const int first_token = kv_block * kBlockN;
      scale_scores(scores, scale);
      if (is_masked<kStage>(first_token)) {
        if constexpr (kIsSparse) {
          mask_invalid(scores, smem.invalid_mask[kStage].all());
        } else {
          mask_scores(scores, work, first_token, [](int r) { return row_of(r); });
          clear_nonfinite_v<kStage>(first_token);
        }
      }
      softmax.update_row_max(scores, probabilities, alpha);
    }
    softmax.publish(alpha, smem.row_max[kStage], smem.alpha[kStage]);
    store_p<kStage>();
  }

  // The first barrier waits until all warps of the warpgroup have S: the QK GEMM reads V as K.
  template <int kStage>
  __device__ void clear_nonfinite_v(int first_token) const {
    constexpr NamedBarrier kBarrier = NamedBarrier::V0Cleared + kStage;
    named_barrier_sync(kBarrier, 128);
    clear_nonfinite(smem, max(work.unmasked_kv_end - first_token, 0), work.kv_end - first_token,
                    [&](int tile) { return smem.kv[kStage] + tile * kTileBytes; });
    fence_proxy_async();
    named_barrier_sync(kBarrier, 128);
  }

  __device__ void adopt_row_max(int stage) {
    float alpha[kRowsPerThread];
    if (softmax.adopt_row_max(smem.row_max[stage], smem.alpha[stage], alpha)) {
      rescale(accumulators, alpha[0], alpha[1]);
    }
  }

  // A pair in warpgroup 0: the even KV block, then the odd one if it exists, whose PV GEMM is in
  // flight when the next pair begins.
  __device__ void wg0_pair(int kv_block, bool is_first, bool is_last, bool has_odd) {
    mov_b32(start_desc);
    qk_gemm<0>(start_desc, smem, phase, scores, [&](int issued) {
      if (issued != 0 || is_first) return;
      wgmma_wait_group<1>();
      release(smem.wg0_empty[1]);
    });
    wait_wgmma(accumulators);
    wgmma_fence_operand(scores);
    if (is_last) release_query();
    const bool needs_rescale = try_softmax(is_masked<0>(kv_block * kBlockN));
    float alpha[kRowsPerThread];
    finish_softmax<0>(kv_block, needs_rescale, alpha);
    named_barrier_arrive(NamedBarrier::P0Ready, kPvThreads);
    if (needs_rescale) rescale(accumulators, alpha[0], alpha[1]);
    wgmma_fence_operand(accumulators);
    pv_gemm_local_p<0, 0>(start_desc, probabilities, accumulators);
    wait_wgmma(accumulators);
    release(smem.wg0_empty[0]);
    phase ^= 1;
    if (!has_odd) return;
    named_barrier_sync(NamedBarrier::P1Ready, kPvThreads);
    adopt_row_max(1);
    wgmma_fence_operand(accumulators);
    pv_gemm_remote_p<1, 0>(start_desc, accumulators);
  }

  // Issues the PV GEMM of the even KV block in warpgroup 1, and tries P of the odd one beside it;
  // returns whether that failed. `kIsUnmasked` states that all rows attend to the whole odd block.
  template <bool kIsUnmasked>
  __device__ bool wg1_even(int kv_block, bool has_odd) {
    wgmma_fence_operand(accumulators);
    pv_gemm_remote_p<0, 1>(start_desc, accumulators);
    // Without an odd block S is undefined and P is dropped.
    return try_softmax(!kIsUnmasked && (!has_odd || is_masked<1>((kv_block + 1) * kBlockN)));
  }

  // A pair in warpgroup 1: the even KV block, then the odd one.
  __device__ void wg1_pair(int kv_block, bool is_last, bool has_odd, bool is_unmasked) {
    qk_gemm<1>(start_desc, smem, phase, scores, [](int) {});
    wait_wgmma(scores);
    if (is_last) release_query();
    mov_b32(start_desc);
    named_barrier_sync(NamedBarrier::P0Ready, kPvThreads);
    adopt_row_max(0);
    // A masked and an unmasked copy of what follows until P is tried; the rest is common to both.
    // The compiler places the masked one first; short work items fetch no other.
    const bool needs_rescale = !kIsSparse && is_unmasked ? wg1_even<true>(kv_block, true)
                                                         : wg1_even<false>(kv_block, has_odd);
    float alpha[kRowsPerThread];
    if (has_odd) finish_softmax<1>(kv_block + 1, needs_rescale, alpha);
    wait_wgmma(accumulators);
    release(smem.wg1_empty[0]);
    if (has_odd) {
      if (needs_rescale) rescale(accumulators, alpha[0], alpha[1]);
      wgmma_fence_operand(accumulators);
      pv_gemm_local_p<1, 1>(start_desc, probabilities, accumulators);
      // Not before: the PV GEMM of warpgroup 0 would slow this one, whose V tiles the next S of
      // warpgroup 1 awaits, while warpgroup 0 has time.
      named_barrier_arrive(NamedBarrier::P1Ready, kPvThreads);
      wait_wgmma(accumulators);
    } else {
      release(smem.wg0_empty[1]);  // warpgroup 0 does not wait for an odd block that does not exist
    }
    release(smem.wg1_empty[1]);
    phase ^= 1;
  }

  __device__ void process_work() {
    const int end = work.first_kv_block + work.num_kv_blocks;
    const int unmasked_blocks = work.unmasked_kv_end / kBlockN - work.first_kv_block;
    const int num_unmasked =
        work.num_kv_blocks > kShortWorkBlocks ? min(work.num_kv_blocks - 1, unmasked_blocks) : 0;
    const int unmasked_end = work.first_kv_block + max(num_unmasked / 2 * 2, 0);
    int kv_block = work.first_kv_block;
    if (is_wg0()) {
#pragma unroll 1
      for (; kv_block < end; kv_block += 2) {
        wg0_pair(kv_block, kv_block == work.first_kv_block, kv_block + 2 >= end,
                 kv_block + 1 < end);
      }
      wait_wgmma(accumulators);
      if (work.num_kv_blocks % 2 == 0) release(smem.wg0_empty[1]);
    } else {
#pragma unroll 1
      for (; kv_block < end; kv_block += 2) {
        wg1_pair(kv_block, kv_block + 2 >= end, kv_block + 1 < end, kv_block < unmasked_end);
      }
    }
  }

  __device__ void release_query() const { release(smem.query_empty); }
};

// Adds the row sums l of both warpgroups, which have the same row max at the end of the mainloop.
__device__ inline void reduce_row_sum(SharedMemoryPlan& smem, const Softmax& softmax,
                                      ThreadRows& rows) {
  const int thread = reload_tid();
  const int row = row_of_thread(thread);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const float row_sum = quad_reduce_sum(softmax.row_sum[r]);
    if (thread % 4 == 0) smem.row_sum[thread / 128][row + 8 * r] = row_sum;
  }
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    rows[r] = {softmax.row_max[r], smem.row_sum[0][row + 8 * r] + smem.row_sum[1][row + 8 * r]};
  }
}

// State that persists across work items.
struct ConsumerState {
  u32 start_desc;
  float scale;
  u32 phase = 0;

  __device__ ConsumerState(const Params& params, const SharedMemoryPlan& smem)
      : start_desc(smem_start_desc(smem)), scale(score_scale(params) * kLog2E) {}
};

__device__ inline void process_work(const Params& params, const WorkItem& work,
                                    SharedMemoryPlan& smem, ConsumerState& state) {
  Consumer consumer(params, smem, work, state.start_desc, state.scale, state.phase);
  if (work.num_kv_blocks > 0) {
    consumer.process_work();
  } else {
    // Without KV blocks no MMA orders the warps' waits for Q before its release.
    named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
    consumer.release_query();
  }
  ThreadRows rows;
  reduce_row_sum(smem, consumer.softmax, rows);
  epilogue(params, work, smem, consumer.accumulators, rows);
}
