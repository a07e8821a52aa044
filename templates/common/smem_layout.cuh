// Layout of MMA operands in shared memory: the swizzle of 16-byte chunks, and wgmma descriptors.

#pragma once

#include "common/types.cuh"
#include "ptx/mov.cuh"

constexpr int kChunkElements = 8;

// Byte offset of chunk `chunk` of row `row`. Rows of 128 bytes and more permute the eight chunks of
// every 128 bytes by the row index; two 64-byte rows share 128 bytes.
template <int kRowBytes>
__device__ inline u32 swizzled_offset(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0, "a row is 64 bytes or whole 128 bytes");
  const int permuted = kRowBytes == 64 ? chunk ^ ((row >> 1) & 3) : chunk ^ (row & 7);
  return static_cast<u32>(row * kRowBytes + permuted * kChunkBytes);
}

// wgmma matrix descriptors of swizzled tiles: 128-byte rows at multiples of 1024 bytes, or 64-byte
// rows at multiples of 512. PTX ISA, "Matrix Descriptor Format".
// A descriptor is assembled from two words where it is used: the lower holds the address and the
// leading-dimension byte offset, the upper the stride between groups of eight rows and the swizzle
// mode. Addresses count 16 bytes; adding to the lower word advances the operand.
// Only MN-major operands of more than one tile have a leading dimension.
constexpr u32 kDescHighSw128 = 1024 / 16 | 1u << 30;
constexpr u32 kDescHighSw64 = 512 / 16 | 2u << 30;

__device__ inline u32 descriptor_low(u32 address, u32 leading_bytes = 0) {
  return (address & 0x3ffff) >> 4 | leading_bytes / 16 << 16;
}

// The lower word's increment that advances the operand by `bytes`.
__device__ constexpr u32 descriptor_step(u32 bytes) { return bytes / 16; }

__device__ inline u64 smem_desc_sw128(u32 low) { return mov_b64(low, kDescHighSw128); }
__device__ inline u64 smem_desc_sw64(u32 low) { return mov_b64(low, kDescHighSw64); }
