// Stores a token by the format of a row: codes, scales and bf16 elements.

#pragma once

#include "common/packed_row.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "elements.cuh"
#include "quantize.cuh"
#include "token.cuh"

// One byte, or an fp32, of each group; the bytes of padding behind them are zero.
__device__ inline void write_scales(unsigned char* target, const GroupScale& group) {
  constexpr bool kIsFp32 = kIsSame<KvRow::ScaleCode, Fp32>;
  const int index = lane_index() / kGroupLanes;
  if (lane_index() % kGroupLanes == 0 && index < KvRow::kScales) {
    if constexpr (kIsFp32) {
      reinterpret_cast<u32*>(target)[index] = group.stored;
    } else {
      target[index] = static_cast<unsigned char>(group.stored);
    }
  }
  constexpr int kUsed = KvRow::kScales * (kIsFp32 ? 4 : 1);
  const int padding = kUsed + lane_index();
  if (padding < KvRow::kScaleBytes) target[padding] = 0;
}

__device__ inline void store_token(const Params& params, int index, const Token& token, int page,
                                   int slot, int lane) {
  unsigned char* page_bytes = params.cache + page * params.page_stride;
  unsigned char* row = page_bytes + slot * params.token_stride;
  const GroupScale group = scale_of(token.scaled);
  if (lane < kScaledLanes) {
    unsigned char* codes = row + lane * kLaneElements * KvRow::kCodeBits / 8;
    store_codes(KvRow::Code{}, codes, token.scaled, group);
  }
  if constexpr (KvRow::kHasInlineScales) {
    write_scales(row + KvRow::kCodeBytes, group);
  } else if constexpr (KvRow::kHasScaleRows) {
    write_scales(page_bytes + params.scale_rows_offset + slot * KvRow::kScaleBytes, group);
  } else if (lane == 0) {
    params.scales[page * params.scale_page_stride + slot * params.scale_token_stride] = group.value;
  }
  if (rest_lane_index() < kRestLanes) {
    const int offset = rest_lane_index() * kLaneElements * 2;
    store_rest(params, index, token, row + KvRow::kBf16Offset + offset, group.value);
  }
}
