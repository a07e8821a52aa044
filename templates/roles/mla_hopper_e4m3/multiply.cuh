// Where the operands of products lie. Needs SharedMemory, blocks/wgmma_descriptor.cuh.

// Elements that one step of a product multiplies, and so bytes.
constexpr int kStepElements = 32;

__device__ constexpr u32 descriptor_step(u32 bytes) { return bytes / 16; }

// Where P of a block lies in its stage: on the rope tile, which nobody needs once the scores are
// done. A row is 64 bytes, swizzled.
constexpr u32 kProbabilitiesOffset = kLatentTiles * kTileBytes;

// Lower word of the descriptor of what lies at an address.
__device__ inline u32 operand_at(u32 address) { return descriptor_low(address, 16); }

using Scores = float[kBlockTokens / 2];

// Begins S = Q K^T of the block in the stage that operand `keys` is the beginning of.
__device__ inline void begin_scores(u32 query, u32 keys, Scores& scores) {
  wgmma_fence();
#pragma unroll
  for (int tile = 0; tile < kLatentTiles; ++tile) {
#pragma unroll
    for (int k = 0; k < kTileRowBytes / kStepElements; ++k) {
      wgmma_mma(E4m3{}, scores,
                descriptor(query + descriptor_step(tile * kQueryTileBytes + k * kStepElements)),
                descriptor(keys + descriptor_step(tile * kTileBytes + k * kStepElements)),
                tile + k > 0);
    }
  }
#pragma unroll
  for (int k = 0; k < kRopeRowBytes / kStepElements; ++k) {
    wgmma_mma(
        E4m3{}, scores,
        descriptor_64(query + descriptor_step(kLatentTiles * kQueryTileBytes + k * kStepElements)),
        descriptor_64(keys + descriptor_step(kLatentTiles * kTileBytes + k * kStepElements)), 1);
  }
  wgmma_commit_group();
}

__device__ inline void finish(Scores& scores) {
  wgmma_wait_group<0>();
  wgmma_keep(scores);
}
