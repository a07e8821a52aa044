// Shared-memory swizzle of 16-byte chunks: the eight rows that one ldmatrix reads at the same
// column lie in different banks.

#pragma once

#include "common/types.cuh"

constexpr int kChunkElements = 8;

// Byte offset of chunk `chunk` of row `row`. Rows of 128 bytes and more permute the eight chunks of
// every 128 bytes by the row index; two 64-byte rows share 128 bytes.
template <int kRowBytes>
__device__ inline u32 swizzled_offset(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0, "a row is 64 bytes or whole 128 bytes");
  const int permuted = kRowBytes == 64 ? chunk ^ ((row >> 1) & 3) : chunk ^ (row & 7);
  return static_cast<u32>(row * kRowBytes + permuted * kChunkBytes);
}
