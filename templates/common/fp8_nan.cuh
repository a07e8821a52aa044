// Which e4m3 of a word are no numbers.

#pragma once

#include "common/types.cuh"

// The bytes that hold a NaN, as 0xff each: of that all bits are set but the sign.
__device__ inline u32 nan_bytes(u32 word) {
  const u32 is_nan = ((word & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
  return (is_nan >> 7) * 0xff;
}
