// QK GEMM and PV GEMM: S = Q K^T over all dims, O += P V over one half of the output dims.

#pragma once

#include "accumulators.cuh"
#include "common/barriers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "shared_memory.cuh"
#include "softmax/scores.cuh"

// Lower word of the wgmma descriptors of all operands: the start of shared memory. Only V, which is
// MN-major, has a leading dimension.
__device__ inline u32 smem_start_desc(const SharedMemoryPlan& smem) {
  return descriptor_low(shared_address(&smem), kTileBytes);
}

constexpr u32 kKvOffset = kTiles * kQueryTileBytes;

__device__ constexpr u32 tile_offset(int stage, int tile) {
  return kKvOffset + (stage * kStageTiles + tile) * kTileBytes;
}

// P of a stage overwrites its rope tile, if any: only the QK GEMM reads that. No barrier joins the
// four warps of warpgroup 0 before: wgmma.wait_group waits for the MMAs of the whole warpgroup, on
// which the release of a stage by one thread relies too.
__device__ constexpr u32 probabilities_offset(int stage) {
  return tile_offset(stage, kLatentTiles);
}

// Issues the QK GEMM of the KV block in `kStage`: each tile as it arrives, in its own wgmma group,
// and first those that this warpgroup itself has released.
template <int kStage, typename AfterTile>
__device__ inline void qk_gemm(u32 start_desc, const SharedMemoryPlan& smem, u32 phase,
                               Scores& scores, AfterTile after_tile) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int tile = (i + kStage * kLatentTiles / 2) % kTiles;
    if (tile % kTilesPerArrival == 0) {
      wait(smem.tile_full[kStage][tile], phase);
      if constexpr (kIsSparse) fence_proxy_async();  // wgmma reads what cp.async has written
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileElements / 16; ++k) {
      const u32 q_desc = start_desc + descriptor_step(tile * kQueryTileBytes + k * 32);
      const u32 k_desc = start_desc + descriptor_step(tile_offset(kStage, tile) + k * 32);
      wgmma_mma(Element{}, scores, smem_desc_sw128(q_desc), smem_desc_sw128(k_desc), i + k > 0);
    }
    wgmma_commit_group();
    after_tile(i);
  }
}

// PV GEMM with this warpgroup's own P, in registers.
template <int kStage, int kHalf>
__device__ inline void pv_gemm_local_p(u32 start_desc, const Probabilities& probabilities,
                                       Accumulators& accumulators) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kBlockN / 16; ++k) {
    const u32 v_desc =
        start_desc + descriptor_step(tile_offset(kStage, kHalf * kLatentTiles / 2) + k * 2048);
    wgmma_mma_trans_b(Element{}, accumulators, probabilities + k * 4, smem_desc_sw128(v_desc), 1);
  }
  wgmma_commit_group();
}

// PV GEMM with the other warpgroup's P, in shared memory.
template <int kStage, int kHalf>
__device__ inline void pv_gemm_remote_p(u32 start_desc, Accumulators& accumulators) {
  if constexpr (kIsSparse) fence_proxy_async();  // V, which only the other warpgroup has awaited
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kBlockN / 16; ++k) {
    const u32 p_desc = start_desc + descriptor_step(probabilities_offset(kStage) + k * 32);
    const u32 v_desc =
        start_desc + descriptor_step(tile_offset(kStage, kHalf * kLatentTiles / 2) + k * 2048);
    wgmma_mma_trans_b(Element{}, accumulators, smem_desc_sw128(p_desc), smem_desc_sw128(v_desc), 1);
  }
  wgmma_commit_group();
}

__device__ inline void wait_wgmma(Accumulators& accumulators) {
  wgmma_wait_group<0>();
  wgmma_fence_operand(accumulators);
}

__device__ inline void wait_wgmma(Scores& scores) {
  wgmma_wait_group<0>();
  wgmma_fence_operand(scores);
}
