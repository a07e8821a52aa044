// Scores of a KV block in shared memory, from the QK warpgroup to PV warpgroups that have the
// softmax.

#pragma once

#include "common/types.cuh"
#include "config.cuh"
#include "score_limits.cuh"
#include "shared_memory.cuh"
#include "v_scales.cuh"

// Rows in fp32. Swizzled so that no bank has two of what a warp accesses at once: eight tokens of
// four pairs of rows, of which QK lanes store one each, or two rows, of which PV lanes load a chunk
// of each quarter.
constexpr int kScoreRowBytes = kBlockN * sizeof(float);

// Offset of a chunk of four tokens.
__device__ inline int score_offset(int row, int chunk) {
  return row * kScoreRowBytes + (chunk ^ (row & 7) ^ (chunk >> 3 << 1)) * kChunkBytes;
}

// A lane has rows 2c and 2c + 1 of every eight, and of the tokens of its warp g and g + 8.
__device__ inline void store_scores(SharedMemoryPlan& smem, const Scores& scores,
                                    const QkThread& qk_thread) {
  const int token = qk_thread.token();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = qk_thread.lane % 4 * 2 + i % 2;
    const int offset = score_offset(row, (token + i / 2 * 8) / 4) + token % 4 * sizeof(float);
    float* first = reinterpret_cast<float*>(smem.spare + offset);
#pragma unroll
    for (int group = 0; group < kBlockM / 8; ++group) {
      first[group * 8 * kBlockN] = scores[group * 4 + i];
    }
  }
}
