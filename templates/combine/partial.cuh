// Partial O and softmax states of splits: how they are stored, and where shared memory holds them
// while a CTA combines them.

#pragma once

#include "accumulators.cuh"
#include "combine/reduce_group.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "softmax/row_result.cuh"

// Softmax state of a row of a split, in one 16-byte chunk.
struct alignas(kChunkBytes) PartialState : RowState {
  float scales[kNumScales];  // inverse fp16 scales; the combine multiplies in the split's weight
};
static_assert(sizeof(PartialState) == kChunkBytes, "one cp.async copies the state of a row");
static_assert(sizeof(PartialState) == kPartialStateBytes, "the host plans with it");

// Power-of-two scale of a row of partial O in fp16. It brings finite magnitudes of at most `amax`
// below 2^14: the eleven significant bits of fp16 then exceed those of the output. The scale and
// its inverse are normal numbers.
__device__ inline float fp16_scale(float amax) {
  const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 127;
  return __uint_as_float(static_cast<u32>(127 + 13 - max(exponent, -100)) << 23);
}

__device__ inline float inverse_of_pow2(float pow2) {
  return __uint_as_float((254u << 23) - __float_as_uint(pow2));
}

// Bytes of a fragment: one float4 of every lane of a warp, as fp16.
constexpr int kFragBytes = kWarpLanes * sizeof(uint2);

__device__ inline uint2 pack_half4(float4 value) {
  return make_uint2(cvt_rn_x2_f32(Fp16{}, value.y, value.x),
                    cvt_rn_x2_f32(Fp16{}, value.w, value.z));
}

__device__ inline float4 unpack_half4(uint2 half4) {
  return make_float4(
      cvt_f32(Fp16{}, static_cast<u16>(half4.x)), cvt_f32(Fp16{}, static_cast<u16>(half4.x >> 16)),
      cvt_f32(Fp16{}, static_cast<u16>(half4.y)), cvt_f32(Fp16{}, static_cast<u16>(half4.y >> 16)));
}

// Shared memory of the combine: partial states of some rows (all splits of a row together), then
// some fragments of every split. Aliases Q and the KV stages, because no item follows.
struct CombineSmem {
  unsigned char* bytes;
  int num_splits;
  int first_row;  // rows wrap around at kBlockM
  int rows;
  int first_frag;
  int num_frags;

  // Whether this CTA's own split is already in shared memory.
  __device__ bool holds_own_split() const { return num_frags >= kFragsPerStep; }

  // Row at an index relative to `first_row`, and the inverse.
  __device__ int row_at(u32 index) const { return static_cast<int>((first_row + index) % kBlockM); }
  __device__ u32 index_of(int row) const { return static_cast<u32>(row - first_row) % kBlockM; }

  __device__ PartialState* states(u32 index) const {
    // An odd number of chunks, so that rows start in different banks.
    return reinterpret_cast<PartialState*>(bytes) + index * (num_splits | 1);
  }
  __device__ PartialState& state(int split_idx, int row) const {
    return states(index_of(row))[split_idx];
  }
  __device__ uint2* values(int split_idx) const {
    return reinterpret_cast<uint2*>(states(rows)) + split_idx * num_frags * kWarpLanes;
  }
};
