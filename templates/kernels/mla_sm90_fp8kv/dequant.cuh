// Dequantization: KV scales of a KV block, fp32 for K and fp16 with a shared scale for V, and V
// fragments, dequantized to fp16 in registers.

#pragma once

#include "accumulators.cuh"
#include "common/fp8.cuh"
#include "common/registers.cuh"
#include "common/smem_layout.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/arithmetic.cuh"
#include "ptx/cvt.cuh"
#include "ptx/warp_matrix.cuh"

// V is dequantized to fp16 by scales in fp16. A shared scale, a power of two per work item, keeps
// them in range: the largest V scale times the shared scale is between 2^6 and 2^7 when the shared
// scale is chosen, and times 448 it is below 65504. Scaled V below 2^-14 loses bits (subnormal
// fp16): a token loses none if its scale is at least 2^-11 of the largest. The shared scale shrinks
// when a KV block has a larger scale.
constexpr float kMaxScaled = 128.0f;
constexpr float kMaxV = kMaxScaled * 448.0f;

// Shared scale before the first KV block; almost any V scale exceeds the limit with it.
constexpr float kInitialSharedScale = 0x1p90f;

// The shared scale that scales `amax`, the largest V scale, to less than kMaxScaled.
__device__ inline float shared_scale_for(float amax) {
  const u32 exponent = max(__float_as_uint(amax) >> 23, 43u);  // a shared scale of at most 2^90
  return __uint_as_float((260 - exponent) << 23);
}

__device__ inline float log2_of_pow2(float pow2) {
  return static_cast<float>(static_cast<int>(__float_as_uint(pow2) >> 23) - 127);
}

// V scales overwrite the stored scales in place: each QK warp stores those of its 16 tokens as fp16
// for the PV warpgroups. The order is by scale group; within it, tokens 2c, 2c + 1, 2c + 8 and
// 2c + 9 are adjacent, as the V fragments of a lane need them.
__device__ constexpr int v_scale_index(int token, int group) {
  return token / kTokensPerQkWarp * (kTokensPerQkWarp * kScaleGroups * 2) +
         group * kTokensPerQkWarp + token % 8 / 2 * 4 + token % kTokensPerQkWarp / 8 * 2 +
         token % 2;
}

__device__ inline u16& v_scale(unsigned char* stage, int token, int group) {
  return reinterpret_cast<u16*>(stage + kScalesOffset)[v_scale_index(token, group)];
}

// Lane and warp of a QK thread, read once per KV block: reading %tid takes as long as an MMA.
struct QkThread {
  int lane;
  int warp;

  __device__ QkThread() {
    const int thread = reload_tid() % kQkThreads;
    lane = thread % kWarpLanes;
    warp = thread / kWarpLanes;
  }

  // The first of this thread's two tokens; the second is 8 further.
  __device__ int token() const { return warp * kTokensPerQkWarp + lane / 4; }
};

// K scales of a thread's two tokens.
struct KScales {
  float per_token[2][kScaleGroups];

  __device__ KScales(const unsigned char* stage, const QkThread& qk_thread) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 loaded =
          reinterpret_cast<const float4*>(stage + kScalesOffset)[qk_thread.token() + half * 8];
      const float scales[kScaleGroups] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
      for (int group = 0; group < kScaleGroups; ++group) {
        // Equal scales take one register.
        per_token[half][group] = scales[kHasPerTokenScale ? 0 : group];
      }
    }
  }
};

// Scales of the group lane % 4 alone, which this thread stores as V scales.
struct ThreadScales {
  float per_token[2];

  __device__ void select(const KScales& scales, const QkThread& qk_thread) {
    const int group = qk_thread.lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = group % 2 == 0 ? scales.per_token[half][0] : scales.per_token[half][1];
      const float high = group % 2 == 0 ? scales.per_token[half][2] : scales.per_token[half][3];
      per_token[half] = group < 2 ? low : high;
    }
  }

  __device__ bool exceeds_max_scaled(float shared_scale) const {
    return amax() * shared_scale >= kMaxScaled;
  }

  // Largest finite magnitude.
  __device__ float amax() const {
    const float a = fabsf(per_token[0]);
    const float b = fabsf(per_token[1]);
    return fmaxf(a <= kFloatMax ? a : 0.0f, b <= kFloatMax ? b : 0.0f);
  }

  // Overwrites the stored scales, which all lanes of the warp must have read.
  __device__ void store(unsigned char* stage, const QkThread& qk_thread, float shared_scale) const {
    u16* first = &v_scale(stage, qk_thread.token(), qk_thread.lane % 4);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first[v_scale_index(half * 8, 0)] =
          static_cast<u16>(cvt_rn_x2_f32(Fp16{}, 0.0f, per_token[half] * shared_scale));
    }
  }
};
static_assert(kTokensPerQkWarp == 16, "a thread has two tokens of its warp");
static_assert(kScaleGroups == 4, "a thread stores the scales of one group");

// V fragments: the A operand of O^T += V^T P^T, transposed from shared memory into registers.
// A fragment has 32 tokens of a tile of dims: two MMAs.
constexpr int kVTokens = 32;
constexpr int kVSteps = kVTokens / 16;
constexpr int kTokenHalves = kBlockN / kVTokens;
using VFragments = u32[kVSteps * 4];
using StoredV = u32[4];
using VScales = uint2[kVTokens / 16];  // two tokens of each of two matrices

// PV steps: for each half of the tokens, one tile of dims after the other.
constexpr int kPvSteps = kDimTiles * kTokenHalves;
__device__ constexpr int token_half_of(int pv_step) { return pv_step / kDimTiles; }
__device__ constexpr int dim_tile_of(int pv_step) { return pv_step % kDimTiles; }

// ldmatrix loads four matrices of eight tokens and 16 dims; of each, a lane gets dims 2g and 2g + 1
// of tokens 2c and 2c + 1, with g = lane / 4 and c = lane % 4.
struct VLoader {
  const u16* scales;  // of this lane's first two tokens
  u32 address;  // of this lane's ldmatrix row, in tile 0

  // `stage` is the KV block.
  __device__ explicit VLoader(unsigned char* stage) {
    const int lane = reload_lane();
    const int warp = reload_warp();
    scales = &v_scale(stage, lane % 4 * 2, warp * kWarpDims / kScaledDims);
    address = shared_address(stage) + warp / 2 * kTileBytes +
              swizzled_offset<kTileRowBytes>(lane, warp % 2 * kDimTiles);
  }

  __device__ void load_scales(VScales& loaded, int half) const {
#pragma unroll
    for (int i = 0; i < kVTokens / 16; ++i) {
      const int token = half * kVTokens + i * 16;
      loaded[i] = *reinterpret_cast<const uint2*>(scales + v_scale_index(token, 0));
    }
  }

  // Loads the stored V of a PV step. A tile of dims is one of the four chunks that a warp has of a
  // row of 128 bytes, so its index is two bits of the swizzled address.
  __device__ void load(StoredV& loaded, int pv_step) const {
    const u32 row = address ^ (dim_tile_of(pv_step) * kChunkBytes);
    ldmatrix_x4_trans(loaded, row + token_half_of(pv_step) * kVTokens * kTileRowBytes);
  }
};

__device__ inline void dequant_v(VFragments& v, const StoredV& stored, const VScales& scales) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32* step = v + i / 2 * 4 + i % 2 * 2;
    const u32 scale = i % 2 == 0 ? scales[i / 2].x : scales[i / 2].y;
    const u32 transposed = transpose_bytes_2x2(stored[i]);
    step[0] = mul_f16x2(fp16x2_of_e4m3x2(transposed & 0xffff), scale);
    step[1] = mul_f16x2(fp16x2_of_high_e4m3x2(transposed), scale);
  }
}
