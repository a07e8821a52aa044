// Rows of K and V at multiples of 4 bytes, as vLLM's [key, scale, value, scale], in shared memory.
// TMA strides are multiples of 16 bytes, and those of two tokens are: a TMA box has the rows of
// even tokens of a page, another those of odd ones, from the multiple of 16 bytes before them on.

#pragma once

#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "fragments.cuh"

// Of K, or of V. Templates: Params of other kernels lacks the parameters of K.
struct CachedRows {
  const unsigned char* rows;
  i64 token_stride;
  i64 head_stride;
};
template <typename RowParams>
__device__ inline CachedRows cached_rows(const RowParams& params, int kv) {
  return kv == 0
             ? CachedRows{params.key_cache, params.key_token_stride, params.key_head_stride}
             : CachedRows{params.value_cache, params.value_token_stride, params.value_head_stride};
}

constexpr u32 kBoxAlignment = 16;

// Place of a row in the tensor map, whose first axis has bytes: kv heads are an axis of their own
// if their stride is one that TMA takes.
struct RowPlace {
  u32 x;
  int head;

  template <typename RowParams>
  __device__ RowPlace(const RowParams& params, int kv, int kv_head, int parity) {
    const CachedRows cached = cached_rows(params, kv);
    const bool is_axis = cached.head_stride % kBoxAlignment == 0;
    x = static_cast<u32>(reinterpret_cast<u64>(cached.rows) % kBoxAlignment +
                         (is_axis ? 0 : kv_head * cached.head_stride) +
                         parity * cached.token_stride);
    head = is_axis ? kv_head : 0;
  }

  __device__ int word_of_box() const {
    return static_cast<int>(x / kBoxAlignment * kBoxAlignment / sizeof(u32));
  }
  __device__ u32 shift() const { return x % kBoxAlignment; }
};

// Offset in a tile of row `row` of the even or odd tokens of step 0 of a warp.
template <typename Tile>
__device__ inline u32 unaligned_offset(int warp, int parity, int row) {
  const int token = first_token_of_warp(warp);
  return static_cast<u32>(token / kBoxTokens * Tile::kBoxBytes + parity * (Tile::kBoxBytes / 2) +
                          (token % kBoxTokens / 2 + row) * Tile::kPitch);
}
// From a step to the next.
template <typename Tile>
constexpr int kUnalignedStep =
    kBoxTokens > kStepTokens ? kStepTokens / 2 * Tile::kPitch : Tile::kBoxBytes;

// Bytes between the places of rows and the rows: of even tokens of K, odd ones, and those of V. One
// register, from which offsets are made anew in every KV block.
struct RowShifts {
  u32 bytes;

  __device__ RowShifts() = default;
  template <typename RowParams>
  __device__ RowShifts(const RowParams& params, int kv_head) : bytes(0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes |= RowPlace(params, i / 2, kv_head, i % 2).shift() << i * 8;
  }

  __device__ u32 of(int kv, int parity) const { return bytes >> (kv * 2 + parity) * 8 & 0xff; }
};

__device__ inline u32 word_at(const unsigned char* tile, u32 offset) {
  return *reinterpret_cast<const u32*>(tile + offset);
}

// What ldmatrix would load of a K fragment: the words of a lane of two tokens, in each of the two
// chunks of a pair.
struct UnalignedKeyRows {
  u32 offsets[2];

  __device__ UnalignedKeyRows(int warp, const RowShifts& shifts) {
    const int lane = reload_lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      offsets[half] = unaligned_offset<KeyTile>(warp, half, lane / 4) + shifts.of(0, half) +
                      lane % 4 * sizeof(u32);
    }
  }

  __device__ void load(u32 (&loaded)[4], const unsigned char* tile, int step, int pair) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      loaded[i] = word_at(
          tile, offsets[i % 2] + step * kUnalignedStep<KeyTile> + (pair * 2 + i / 2) * kChunkBytes);
    }
  }

  // Of the scale of the token of a lane's accumulators. The lane is read again, so that no other
  // offsets hold registers.
  __device__ u32 scale_offset(int step, int half) const {
    return offsets[half] + step * kUnalignedStep<KeyTile> + kKeyRowBytes -
           reload_lane() % 4 * sizeof(u32);
  }
};

// What transposed ldmatrix would load of a V fragment, with other dims: a lane has four adjacent
// dims of its tokens, two in each of the two tiles of O.
struct UnalignedValueRows {
  u32 offsets[2];

  __device__ UnalignedValueRows(int warp, const RowShifts& shifts) {
    const int lane = reload_lane();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      offsets[half] = unaligned_offset<ValueTile>(warp, half, lane % 4 * 2) + shifts.of(1, half) +
                      part_of_warp(warp) * (kValueRowBytes / kDimParts) + lane / 4 * sizeof(u32);
    }
  }

  __device__ void load(u32 (&loaded)[4], const unsigned char* tile, int step, int pair) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 offset = offsets[half] + step * kUnalignedStep<ValueTile> + pair * 2 * kChunkBytes;
      const u32 first = word_at(tile, offset);
      const u32 second = word_at(tile, offset + ValueTile::kPitch);
      loaded[half * 2] = __byte_perm(first, second, 0x5410);
      loaded[half * 2 + 1] = __byte_perm(first, second, 0x7632);
    }
  }

  __device__ u32 scale_offset(int step, int half) const {
    const int lane = reload_lane();
    const int to_row = (lane / 4 - lane % 4 * 2) * ValueTile::kPitch;
    const int in_row = kValueRowBytes - lane / 4 * static_cast<int>(sizeof(u32));
    return offsets[half] + step * kUnalignedStep<ValueTile> + to_row + in_row -
           part_of_warp(reload_warp()) * (kValueRowBytes / kDimParts);
  }
};
