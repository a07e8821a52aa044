// What tells wgmma where an operand lies in shared memory: tiles of rows of 128 bytes, swizzled,
// at multiples of 1024 bytes, or of 64 bytes at multiples of 512. PTX ISA, "Matrix Descriptor
// Format".

#pragma once

#include "common/types.cuh"
#include "ptx/mov.cuh"

// A descriptor is made of two words where it is used: the lower holds the address and the distance
// of neighbouring tiles, the upper the distance of groups of eight rows and the kind of swizzle.
// Addresses count 16 bytes; adding to a lower word moves the operand.
constexpr u32 kDescriptorHigh = 1024 / 16 | 1u << 30;
constexpr u32 kDescriptorHigh64 = 512 / 16 | 2u << 30;

__device__ inline u32 descriptor_low(u32 address, u32 tile_distance) {
  return (address & 0x3ffff) >> 4 | tile_distance / 16 << 16;
}

// What moves the operand by so many bytes.
__device__ constexpr u32 descriptor_step(u32 bytes) { return bytes / 16; }

__device__ inline u64 smem_desc(u32 low) { return mov_b64(low, kDescriptorHigh); }
__device__ inline u64 descriptor_64(u32 low) { return mov_b64(low, kDescriptorHigh64); }
