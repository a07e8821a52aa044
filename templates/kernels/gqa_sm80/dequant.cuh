// Dequantization of K and V blocks, stored in FP8 (e4m3, e5m2), int8 or NVFP4 (e2m1), to the
// element type of the MMA.

#pragma once

#include "common/fp8.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "load.cuh"
#include "ptx/cvt.cuh"
#include "work_item.cuh"

// Reader of the block scales of a KV block: NVFP4 has an e4m3 scale for each 16 elements, the other
// dtypes none.
struct BlockScales {
  const WorkItem& work;
  const int* table;  // page ids of the sequence; of a sparse call a SparseBlock
  PagedRows rows;
  int num_pages;
  int first_token;
  int first_scale_group;

  // Zero for a token that is not loaded: its scales must not be read either.
  __device__ float scale_of(int token, int scale_group) const {
    const int at = first_token + token;
    if (at < work.kv_begin || at >= work.kv_end) return 0.0f;
    const int page = table[kIsSparse ? token : at / kPageSize];
    if (!is_valid_page(page, num_pages)) return 0.0f;
    const int slot = kIsSparse ? table[kBlockN + token] : at % kPageSize;
    const u32 stored = rows.row_of(page, slot)[first_scale_group + scale_group];
    return cvt_f32(Fp16{}, static_cast<u16>(fp16x2_of_e4m3x2(stored)));
  }
};

// Block scales of load `stage_idx`: of K if it is even, else of V.
__device__ inline BlockScales scales_of(const Params& params, const WorkItem& work, int stage_idx,
                                        int kv_block, const int* table) {
  const bool is_k = stage_idx % 2 == 0;
  return {work,
          table,
          is_k ? key_scales(params, work) : value_scales(params, work),
          params.num_pages,
          kv_block * kBlockN,
          is_k ? 0 : work.slice * kSliceDims / 16};
}

__device__ inline void dequant_elements(E4m3, const unsigned char* row, const BlockScales&, int,
                                        int scale_group, Chunk (&dequantized)[2]) {
  dequant_e4m3(Element{}, reinterpret_cast<const Chunk*>(row)[scale_group], dequantized);
}

// An e5m2 is the upper half of its fp16.
__device__ inline void dequant_elements(E5m2, const unsigned char* row, const BlockScales&, int,
                                        int scale_group, Chunk (&dequantized)[2]) {
  const Chunk stored = reinterpret_cast<const Chunk*>(row)[scale_group];
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const u32 word = stored.words[pair / 2];
    const float low = cvt_f32(Fp16{}, static_cast<u16>(word >> pair % 2 * 16 << 8));
    const float high = cvt_f32(Fp16{}, static_cast<u16>(word >> pair % 2 * 16 & 0xff00));
    dequantized[pair / 4].words[pair % 4] = cvt_rn_x2_f32(Element{}, high, low);
  }
}

__device__ inline void dequant_elements(Int8, const unsigned char* row, const BlockScales&, int,
                                        int scale_group, Chunk (&dequantized)[2]) {
  const Chunk stored = reinterpret_cast<const Chunk*>(row)[scale_group];
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const int bytes = static_cast<int>(stored.words[pair / 2]) >> pair % 2 * 16;
    const float low = static_cast<float>(static_cast<signed char>(bytes));
    const float high = static_cast<float>(static_cast<signed char>(bytes >> 8));
    dequantized[pair / 4].words[pair % 4] = cvt_rn_x2_f32(Element{}, high, low);
  }
}

// An e2m1 aligned with the low exponent bits of an fp16 encodes its value times 2^-14, because the
// exponent biases differ by 14.
__device__ inline float float_of_e2m1(u32 nibble) {
  constexpr float kTwoTo14 = 16384.0f;
  return cvt_f32(Fp16{}, static_cast<u16>((nibble & 8) << 12 | (nibble & 7) << 9)) * kTwoTo14;
}

__device__ inline void dequant_elements(Nvfp4, const unsigned char* row, const BlockScales& scales,
                                        int token, int scale_group, Chunk (&dequantized)[2]) {
  const uint2 stored = reinterpret_cast<const uint2*>(row)[scale_group];
  const float scale = scales.scale_of(token, scale_group);
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const u32 byte = (pair < 4 ? stored.x : stored.y) >> pair % 4 * 8;
    dequantized[pair / 4].words[pair % 4] =
        cvt_rn_x2_f32(Element{}, float_of_e2m1(byte >> 4) * scale, float_of_e2m1(byte) * scale);
  }
}

// Dequantizes the first `kDims` elements of every row, 16 at a time.
template <int kDims>
__device__ inline void dequant_tokens(const unsigned char* stage, const BlockScales& scales,
                                      unsigned char* tokens) {
  constexpr int kScaleGroups = kDims / 16;
#pragma unroll 2
  for (int first = 0; first < kBlockN * kScaleGroups; first += kWarpLanes) {
    const int group_idx = first + lane_index();
    const int token = group_idx / kScaleGroups;
    const int scale_group = group_idx % kScaleGroups;
    if (token >= kBlockN) continue;
    Chunk dequantized[2];
    dequant_elements(StoredToken{}, stage + token * kStageRowBytes, scales, token, scale_group,
                     dequantized);
    Chunk* target =
        reinterpret_cast<Chunk*>(tokens + token * kRowBytes + scale_group * 2 * kChunkBytes);
    target[0] = dequantized[0];
    target[1] = dequantized[1];
  }
}
