// NaN detection in packed e4m3.

#pragma once

#include "common/types.cuh"

// Returns 0xff in each byte that holds a NaN. An e4m3 NaN has every bit but the sign set.
__device__ inline u32 nan_bytes(u32 word) {
  const u32 is_nan = ((word & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
  return (is_nan >> 7) * 0xff;
}
