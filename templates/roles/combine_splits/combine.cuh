// Folds the partial rows of all splits into one. Needs Params, roles/combine_splits/constants,
// blocks/row_result.cuh.

struct SharedMemory {
  float sum[kWarps];
  float4 values[kWarps][kWarpLanes];
};

__device__ inline float warp_maximum(float value) {
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// The largest LSE of the row over its splits, found by every warp for itself.
__device__ inline float largest_lse(const Params& params, i64 row) {
  float largest = -kInfinity;
  for (int split = lane_index(); split < params.splits; split += kWarpLanes) {
    largest = fmaxf(largest, params.partial_lse[split * params.total_rows + row]);
  }
  return warp_maximum(largest);
}

// Sums this warp's share of the splits, each weighted by 2^(its LSE - largest).
__device__ inline float4 weighted_sum(const Params& params, i64 row, int dim, float largest,
                                      float& weights) {
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  weights = 0.0f;
#pragma unroll 4
  for (int split = warp_index(); split < params.splits; split += kWarps) {
    const i64 partial_row = split * params.total_rows + row;
    const float lse = params.partial_lse[partial_row];
    if (lse == -kInfinity) continue;  // nothing seen
    const float weight = ex2_approx(lse - largest);
    const float4 value =
        *reinterpret_cast<const float4*>(params.partial_out + partial_row * kHeadDimVo + dim);
    weights += weight;
    total.x += weight * value.x;
    total.y += weight * value.y;
    total.z += weight * value.z;
    total.w += weight * value.w;
  }
  return total;
}

__device__ inline void combine(const Params& params, SharedMemory& shared) {
  const i64 row = blockIdx.x / kSlices;
  const int dim = static_cast<int>(blockIdx.x) % kSlices * kSliceDims + lane_index() * 4;
  const bool is_outside = dim >= kHeadDimVo;  // the last slice may be wider than what is left
  const float largest = largest_lse(params, row);
  float weights;
  shared.values[warp_index()][lane_index()] =
      weighted_sum(params, row, is_outside ? 0 : dim, largest, weights);
  if (lane_index() == 0) shared.sum[warp_index()] = weights;
  __syncthreads();
  if (warp_index() != 0) return;

  float sum = 0.0f;
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float4 value = shared.values[warp][lane_index()];
    sum += shared.sum[warp];
    total.x += value.x;
    total.y += value.y;
    total.z += value.z;
    total.w += value.w;
  }
  const float sink = params.sinks == nullptr ? -kInfinity : params.sinks[row % params.heads];
  const RowResult result = finish_row(largest, sum, sink);
  const float factor =
      result.factor * value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor;
  if (!is_outside) {
    store_x4(OutElement{}, params.out, row * kHeadDimVo + dim, total.x * factor, total.y * factor,
             total.z * factor, total.w * factor);
  }
  if (params.lse != nullptr && blockIdx.x % kSlices == 0 && lane_index() == 0) {
    params.lse[row] = result.lse * params.lse_factor;
  }
}
