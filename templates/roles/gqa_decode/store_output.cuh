// Merges what the warps of a block found, and writes it: the finished rows, or the partial rows of
// one split. Needs Softmax, Output, Work, blocks/row_result.cuh, blocks/scales.cuh, store_x4.

// The reference that all warps' parts of a row can be brought to.
__device__ inline float row_reference(const SharedMemory& shared, int row) {
  float reference = -kInfinity;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    reference = fmaxf(reference, shared.reference[warp][row]);
  }
  return reference;
}

// What a warp's part of a row is multiplied by to be relative to `reference`.
__device__ inline float part_factor(const SharedMemory& shared, int warp, int row,
                                    float reference) {
  const float own = shared.reference[warp][row];
  return own == -kInfinity ? 0.0f : ex2_approx(own - reference);
}

__device__ inline float* merged_row(SharedMemory& shared, int row) {
  return shared.merged + row * (kSliceDims + 4);
}

// The sum of all warps' outputs, one warp after the other. Begins with a barrier after which nobody
// uses tokens, and references and sums of all warps can be read; ends with a barrier too.
__device__ inline void merge_warps(SharedMemory& shared, const Output& output) {
  __syncthreads();
#pragma unroll 1
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp_index() == warp) {
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = score_row(m, half);
          const float factor = part_factor(shared, warp, row, row_reference(shared, row));
          float* target = merged_row(shared, row);
#pragma unroll
          for (int n = 0; n < kSliceDims / 8; ++n) {
            float2* pair = reinterpret_cast<float2*>(target + output_dim(n, 0));
            const float2 before = warp == 0 ? make_float2(0.0f, 0.0f) : *pair;
            // A warp that saw nothing of the row adds nothing.
            *pair = factor == 0.0f ? before
                                   : make_float2(before.x + output[m][n][half * 2] * factor,
                                                 before.y + output[m][n][half * 2 + 1] * factor);
          }
        }
      }
    }
    __syncthreads();
  }
}

// Normalised fp32 rows with their LSE in log2 units, or the whole result. A row of a split that saw
// nothing has LSE minus infinity, and its values are never read.
__device__ inline void store_output(const Params& params, const Work& work, SharedMemory& shared) {
  constexpr int kQuads = kSliceDims / 4;
  const bool is_partial = params.splits > 1;
  const float output_scale =
      is_partial ? 1.0f
                 : value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor;
  for (int i = static_cast<int>(threadIdx.x); i < work.rows * kQuads; i += kThreads) {
    const int row = i / kQuads;
    const int dim = i % kQuads * 4;
    const float reference = row_reference(shared, row);
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += shared.sum[warp][row] * part_factor(shared, warp, row, reference);
    }
    const i64 global_row = work.global_row(params, row);
    const float sink = is_partial || params.sinks == nullptr
                           ? -kInfinity
                           : params.sinks[work.head_of(params, row)];
    const RowResult result = finish_row(reference, sum, sink);
    const float factor = result.factor * output_scale;
    float4 value = *reinterpret_cast<const float4*>(merged_row(shared, row) + dim);
    value = make_float4(value.x * factor, value.y * factor, value.z * factor, value.w * factor);
    const int column = work.slice * kSliceDims + dim;
    if (is_partial) {
      const i64 partial_row = work.split * params.total_rows + global_row;
      *reinterpret_cast<float4*>(params.partial_out + partial_row * kHeadDim + column) = value;
      if (column == 0) params.partial_lse[partial_row] = result.lse;
    } else {
      store_x4(OutElement{}, params.out, global_row * kHeadDim + column, value.x, value.y, value.z,
               value.w);
    }
  }
}
