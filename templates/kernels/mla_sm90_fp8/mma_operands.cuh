// MMA operands: descriptors of Q, K and P in shared memory.

#pragma once

#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/mov.cuh"
#include "ptx/wgmma.cuh"
#include "shared_memory.cuh"

// K dimension of an FP8 MMA, in elements and so in bytes.
constexpr int kStepElements = 32;

// P overwrites the rope tile of its stage, in swizzled rows of 64 bytes. The tile is dead once the
// QK GEMM is complete: the four warps complete an MMA closer together than the time one of them
// takes to compute P.
constexpr u32 kProbabilitiesOffset = kLatentTiles * kTileBytes;

// Low word of the matrix descriptor of an operand.
__device__ inline u32 operand_desc(u32 address) { return descriptor_low(address, 16); }

using Scores = float[kBlockN / 2];

constexpr int kTileSteps = kTileRowBytes / kStepElements;
constexpr int kQkSteps = kHeadDimQk / kStepElements;

// The MMAs of S = Q K^T for the KV block in a stage.
struct QkMma {
  u32 q_desc;
  u32 k_desc;

  __device__ QkMma(const SharedMemoryPlan& smem, int stage)
      : q_desc(operand_desc(shared_address(&smem))) {
    // Opaque: compilers would hoist all descriptors out of the loop, and spill.
    mov_b32(q_desc);
    k_desc = q_desc + descriptor_step(kQueryBytes) + stage * descriptor_step(kKvBlockBytes);
  }

  __device__ void issue(Scores& scores, int step) const {
    const int tile = step / kTileSteps;
    const u32 k_offset = step % kTileSteps * kStepElements;
    const u32 q = q_desc + descriptor_step(tile * kQueryTileBytes + k_offset);
    const u32 k = k_desc + descriptor_step(tile * kTileBytes + k_offset);
    if (tile < kLatentTiles) {
      wgmma_mma(E4m3{}, scores, smem_desc_sw128(q), smem_desc_sw128(k), step > 0);
    } else {
      wgmma_mma(E4m3{}, scores, smem_desc_sw64(q), smem_desc_sw64(k), 1);
    }
  }
};
