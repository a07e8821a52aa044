// The products of the consumers: S = Q K^T over all dims, and O += P V over one half of them.

#pragma once

#include "accumulators.cuh"
#include "common/barriers.cuh"
#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "config.cuh"
#include "ptx/mov.cuh"
#include "ptx/wgmma.cuh"
#include "shared_memory.cuh"

// Lower words of descriptors: of what lies along the dims, and of values, which are multiplied
// along the tokens. Both begin at the start of shared memory.
struct Descriptors {
  u32 k_major;
  u32 mn_major;

  __device__ explicit Descriptors(const SharedMemoryPlan& smem)
      : k_major(descriptor_low(shared_address(&smem), 16)),
        mn_major(descriptor_low(shared_address(&smem), kTileBytes)) {}

  // Keeps compilers from computing the descriptors of a whole loop ahead, for which there are no
  // registers.
  __device__ void opaque() {
    mov_b32(k_major);
    mov_b32(mn_major);
  }
};

constexpr u32 kKvOffset = kTiles * kQueryTileBytes;

__device__ constexpr u32 tile_offset(int stage, int tile) {
  return kKvOffset + (stage * kTiles + tile) * kTileBytes;
}

// Where the probabilities of a stage are: on its rope tile, which nobody needs any more.
__device__ constexpr u32 probabilities_offset(int stage) {
  return tile_offset(stage, kLatentTiles);
}

// Begins the scores of the block in `kStage`, each tile as it arrives, one group for each.
template <int kStage, typename AfterTile>
__device__ inline void qk_gemm(const Descriptors& descriptors, const SharedMemoryPlan& smem,
                               u32 phase, Scores& scores, AfterTile after_tile) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    wait(smem.tile_full[kStage][tile], phase);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileElements / 16; ++k) {
      const u32 query = descriptors.k_major + descriptor_step(tile * kQueryTileBytes + k * 32);
      const u32 keys = descriptors.k_major + descriptor_step(tile_offset(kStage, tile) + k * 32);
      wgmma_mma(Element{}, scores, smem_desc(query), smem_desc(keys), tile + k > 0);
    }
    wgmma_commit_group();
    after_tile(tile);
  }
}

// Adds the product with probabilities in registers.
template <int kStage, int kHalf>
__device__ inline void pv_gemm_local_p(const Descriptors& descriptors,
                                       const Probabilities& probabilities,
                                       Accumulators& accumulators) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kBlockN / 16; ++k) {
    const u32 values = descriptors.mn_major +
                       descriptor_step(tile_offset(kStage, kHalf * kLatentTiles / 2) + k * 2048);
    wgmma_mma_trans_b(Element{}, accumulators, probabilities + k * 4, smem_desc(values), 1);
  }
  wgmma_commit_group();
}

// Adds the product with the probabilities that the other consumer has left.
template <int kStage, int kHalf>
__device__ inline void pv_gemm_remote_p(const Descriptors& descriptors,
                                        Accumulators& accumulators) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kBlockN / 16; ++k) {
    const u32 probabilities =
        descriptors.k_major + descriptor_step(probabilities_offset(kStage) + k * 32);
    const u32 values = descriptors.mn_major +
                       descriptor_step(tile_offset(kStage, kHalf * kLatentTiles / 2) + k * 2048);
    wgmma_mma_trans_b(Element{}, accumulators, smem_desc(probabilities), smem_desc(values), 1);
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
