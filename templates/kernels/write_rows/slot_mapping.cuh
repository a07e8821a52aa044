// The entries of a pool that tokens are written to, as a tensor has them.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"

// Without a slot mapping tokens are in the order of whole pages.
__device__ inline bool is_in_order(const Params& params) { return params.slot_mapping == nullptr; }

// Where a token is written.
__device__ inline i64 entry_of(const Params& params, int token) {
  if (is_in_order(params)) return token;
  return params.has_wide_slots != 0 ? reinterpret_cast<const i64*>(params.slot_mapping)[token]
                                    : reinterpret_cast<const int*>(params.slot_mapping)[token];
}
