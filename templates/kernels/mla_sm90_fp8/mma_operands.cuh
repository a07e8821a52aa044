// Where the operands of products lie.

#pragma once

#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "config.cuh"
#include "ptx/mov.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "shared_memory.cuh"

// Elements that one step of a product multiplies, and so bytes.
constexpr int kStepElements = 32;

// Where P of a block lies in its stage: on the rope tile, which nobody needs once the scores are
// done; the four warps' parts of a product end together, or at least not as far apart as a warp
// takes for its probabilities. A row is 64 bytes, swizzled.
constexpr u32 kProbabilitiesOffset = kLatentTiles * kTileBytes;

// Lower word of the descriptor of what lies at an address.
__device__ inline u32 operand_at(u32 address) { return descriptor_low(address, 16); }

using Scores = float[kBlockN / 2];

constexpr int kTileSteps = kTileRowBytes / kStepElements;
constexpr int kScoreSteps = kHeadDimQk / kStepElements;

// S = Q K^T of the block in a stage, step by step.
struct ScoreSteps {
  u32 query;
  u32 keys;

  __device__ ScoreSteps(const SharedMemoryPlan& smem, int stage)
      : query(operand_at(shared_address(&smem))) {
    // Else compilers compute descriptors ahead of the loop, for which there are no registers.
    mov_b32(query);
    keys = query + descriptor_step(kQueryBytes) + stage * descriptor_step(kKvBlockBytes);
  }

  __device__ void begin(Scores& scores, int step) const {
    const int tile = step / kTileSteps;
    const u32 k_offset = step % kTileSteps * kStepElements;
    const u32 q = query + descriptor_step(tile * kQueryTileBytes + k_offset);
    const u32 k = keys + descriptor_step(tile * kTileBytes + k_offset);
    if (tile < kLatentTiles) {
      wgmma_mma(E4m3{}, scores, smem_desc(q), smem_desc(k), step > 0);
    } else {
      wgmma_mma(E4m3{}, scores, descriptor_64(q), descriptor_64(k), 1);
    }
  }
};
