// Combine of attention states: weighs the outputs of a row over disjoint keys by their LSE.

#pragma once

#include "common/params.cuh"
#include "common/store_vec4.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cvt.cuh"
#include "softmax/row_state.cuh"

// The states of a row: the first, and `num_others` more.
struct RowStates {
  const Params& params;
  const unsigned char* first_out;
  const unsigned char* other_out;
  const float* first_lse;
  const float* other_lse;

  __device__ RowStates(const Params& params, i64 token, i64 head)
      : params(params),
        first_out(params.first_out +
                  (token * params.first_out_stride + head * params.first_out_head_stride) * 2),
        other_out(params.other_out +
                  (token * params.other_out_stride + head * params.other_out_head_stride) * 2),
        first_lse(params.first_lse + token * params.first_lse_stride +
                  head * params.first_lse_head_stride),
        other_lse(params.other_lse + token * params.other_lse_stride +
                  head * params.other_lse_head_stride) {}

  // Base-2 LSE. Plus infinity is that of a row without keys in FlashMLA and FlashAttention-2.
  __device__ float lse(int state) const {
    const float given =
        state == 0 ? *first_lse : other_lse[(state - 1) * params.other_lse_state_stride];
    return given == kInfinity ? -kInfinity : given / params.lse_factor;
  }

  // Four dims of the output.
  __device__ float4 out(int state, int dim) const {
    const unsigned char* row =
        state == 0 ? first_out : other_out + (state - 1) * params.other_out_state_stride * 2;
    const uint2 packed = *reinterpret_cast<const uint2*>(row + dim * 2);
    return make_float4(cvt_f32(OutElement{}, static_cast<u16>(packed.x)),
                       cvt_f32(OutElement{}, static_cast<u16>(packed.x >> 16)),
                       cvt_f32(OutElement{}, static_cast<u16>(packed.y)),
                       cvt_f32(OutElement{}, static_cast<u16>(packed.y >> 16)));
  }
};

__device__ inline void combine_row(const Params& params) {
  const i64 row = static_cast<i64>(blockIdx.x) * kWarps + warp_index();
  if (row >= params.total_rows) return;
  const i64 token = row / params.heads;
  const i64 head = row % params.heads;
  if (params.mask != nullptr && params.mask[token] == 0) return;
  const RowStates states(params, token, head);
  const int num_states = params.num_others + 1;
  float row_max = kEmptyRow.row_max;
  for (int i = 0; i < num_states; ++i) row_max = fmaxf(row_max, states.lse(i));
  unsigned char* out = params.out + (token * params.out_stride + head * params.out_head_stride) * 2;
  RowResult result;
#pragma unroll 1
  for (int dim = lane_index() * 4; dim - lane_index() * 4 < kHeadDimVo; dim += kWarpLanes * 4) {
    const bool is_outside = dim >= kHeadDimVo;  // the last lanes compute the LSE only
    RowPart total;
    total.state.row_max = row_max;
#pragma unroll 4
    for (int i = 0; i < num_states; ++i) {
      const RowState state = {states.lse(i), 1.0f};
      if (weight_of(state, row_max) == 0.0f) continue;  // the output may be NaN
      total.add(state, states.out(i, is_outside ? 0 : dim));
    }
    result = finish_row_without_sink(row_max, total.state.row_sum, params.lse_factor);
    if (is_outside) continue;
    store_x4(OutElement{}, out, dim, total.out.x * result.factor, total.out.y * result.factor,
             total.out.z * result.factor, total.out.w * result.factor);
  }
  __syncwarp();  // all lanes have read the LSE, which may be in the same memory
  if (lane_index() == 0) {
    params.lse[token * params.lse_stride + head * params.lse_head_stride] = result.lse;
  }
}
