// Names and types that every kernel uses.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Tags that choose how elements are converted; the data itself is held as bytes, u16 or u32.
struct Bf16 {};
struct Fp16 {};
struct E4m3 {};
struct Int8 {};
struct Nvfp4 {};
struct Fp8DsMla {};
struct Fp8PerToken {};

template <typename A, typename B>
constexpr bool kIsSame = false;
template <typename A>
constexpr bool kIsSame<A, A> = true;

// What one load, store or cp.async moves at the most.
constexpr int kChunkBytes = 16;
struct alignas(kChunkBytes) Chunk {
  u32 words[4];
};

// What describes a tensor to the copy engine: opaque, made on the host.
struct alignas(64) TensorMap {
  u64 words[16];
};

constexpr int kWarpLanes = 32;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLargest = __builtin_bit_cast(float, 0x7f7fffff);
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// The dynamic shared memory of the block, seen as one struct.
template <typename Layout>
__device__ inline Layout& shared_memory() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return *reinterpret_cast<Layout*>(bytes);
}

__device__ inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x) / kWarpLanes; }

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// What one launch passes to the kernel.

struct Params {
  const float* partial_out;
  const float* partial_lse;
  const float* bmm2_scale_tensor;
  const float* sinks;
  unsigned char* out;
  float* lse;
  i64 total_rows;
  int heads;
  int splits;
  float bmm2_scale;
  float output_factor;
  float lse_factor;
};

// A scale is a number, or a tensor of one element that only the device knows.

__device__ inline float value_of(const float* tensor, float number) {
  return tensor == nullptr ? number : *tensor;
}

// The numbers of this kernel; the rest of the source only uses them.

using OutElement = Bf16;
constexpr int kHeadDimVo = 512;
constexpr int kSlices = 4;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kSliceDims = kWarpLanes * 4;  // output dims of one block: a float4 for each lane
static_assert(kHeadDimVo % 4 == 0 && kSlices * kSliceDims >= kHeadDimVo, "slices cover the row");

// PTX ISA, "Floating Point Instructions: ex2". Needs sm_20.

// ex2.approx.ftz.f32
// 2 to the power of x, relative error below 2^-22; minus infinity gives zero.
__device__ inline float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// How the statistics of a softmax row become its scale and its LSE.

struct RowResult {
  float factor;  // multiplies the accumulated values
  float lse;  // the sink included; of an empty row its sink, or minus infinity
};

// `reference` in log2 units, `sum` relative to it; `sink` is a natural-log logit without a value,
// or minus infinity. `lse_factor` brings log2 units to the base of the LSE.
__device__ inline RowResult finish_row(float reference, float sum, float sink,
                                       float lse_factor = 1.0f) {
  // Not by way of log2 units: a finite sink may overflow there, and not in base e.
  const float sink_lse = sink * (kLog2E * lse_factor);
  if (sum == 0.0f) return {0.0f, sink_lse};  // the row attends to nothing; a NaN is not nothing
  // Fused, so that only the distance may overflow, to an infinity of the right sign.
  const float distance = fmaf(sink, kLog2E, -reference);
  // Relative to the larger of the two, because 2^distance may overflow. Selects, for a NaN is kept.
  const bool is_sink_larger = distance > 0.0f;
  const float rescale = is_sink_larger ? ex2_approx(-distance) : 1.0f;
  const float total = sum * rescale + (is_sink_larger ? 1.0f : ex2_approx(distance));
  // Approximate: exact to some 22 bits, and a fraction of the instructions.
  const float log2_total = __log2f(total);
  return {__fdividef(rescale, total), is_sink_larger ? sink_lse + log2_total * lse_factor
                                                     : (reference + log2_total) * lse_factor};
}

// PTX ISA, "Data Movement and Conversion Instructions: cvt". Needs sm_80.

// cvt.rn.bf16x2.f32
__device__ inline u32 cvt_rn_x2_f32(Bf16, float high, float low) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.rn.f16x2.f32
__device__ inline u32 cvt_rn_x2_f32(Fp16, float high, float low) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.f32.f16
__device__ inline float cvt_f32(Fp16, u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// A bf16 is the upper half of an fp32; sm_80 has no instruction for it and needs none.
__device__ inline float cvt_f32(Bf16, u16 bits) {
  return __uint_as_float(static_cast<u32>(bits) << 16);
}

// Four neighbouring elements of an output, from float.

// `index` counts elements, and is a multiple of 4.
template <typename Target>
__device__ inline void store_x4(Target target, unsigned char* out, i64 index, float a, float b,
                                float c, float d) {
  uint2 packed;
  packed.x = cvt_rn_x2_f32(target, b, a);
  packed.y = cvt_rn_x2_f32(target, d, c);
  *reinterpret_cast<uint2*>(out + index * 2) = packed;
}

// Folds the partial rows of all splits into one.

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

// What a warp has of some of the splits that are its own, every fourth: loads that wait for each
// other take longer than all else here.
constexpr int kSplitsAtOnce = 8;

struct PartialRows {
  float lse[kSplitsAtOnce];
  float4 values[kSplitsAtOnce];

  // Those from `first` on. Where there is no split, or it has seen nothing, values may be anything.
  __device__ PartialRows(const Params& params, i64 row, int dim, int first) {
    const i64 partial_row = first * params.total_rows + row;
    const float* lse_of_row = params.partial_lse + partial_row;
    const float* values_of_row = params.partial_out + partial_row * kHeadDimVo + dim;
#pragma unroll
    for (int i = 0; i < kSplitsAtOnce; ++i) {
      const bool exists = first + i * kWarps < params.splits;
      lse[i] = exists ? *lse_of_row : -kInfinity;
      if (exists) values[i] = *reinterpret_cast<const float4*>(values_of_row);
      lse_of_row += kWarps * params.total_rows;
      values_of_row += kWarps * params.total_rows * kHeadDimVo;
    }
  }

  // Adds them, each weighted by 2^(its LSE - largest).
  __device__ void add_to(float4& total, float& weights, float largest) const {
#pragma unroll
    for (int i = 0; i < kSplitsAtOnce; ++i) {
      if (lse[i] == -kInfinity) continue;
      const float weight = ex2_approx(lse[i] - largest);
      weights += weight;
      total.x += weight * values[i].x;
      total.y += weight * values[i].y;
      total.z += weight * values[i].z;
      total.w += weight * values[i].w;
    }
  }
};

__device__ inline void combine(const Params& params, SharedMemory& shared) {
  const int row = static_cast<int>(blockIdx.x) / kSlices;
  const int dim = static_cast<int>(blockIdx.x) % kSlices * kSliceDims + lane_index() * 4;
  const bool is_outside = dim >= kHeadDimVo;  // the last slice may be wider than what is left
  const float sink = params.sinks == nullptr ? -kInfinity : params.sinks[row % params.heads];
  const float scale = value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor;
  float largest = -kInfinity;
  float weights = 0.0f;
  float4 part = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int first = 0; first < params.splits; first += kSplitsAtOnce * kWarps) {
    const PartialRows rows(params, row, is_outside ? 0 : dim, first + warp_index());
    if (first == 0) largest = largest_lse(params, row);  // while these are on their way
    rows.add_to(part, weights, largest);
  }
  shared.values[warp_index()][lane_index()] = part;
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
  const RowResult result = finish_row(largest, sum, sink, params.lse_factor);
  const float factor = result.factor * scale;
  if (!is_outside) {
    store_x4(OutElement{}, params.out, static_cast<i64>(row) * kHeadDimVo + dim, total.x * factor,
             total.y * factor, total.z * factor, total.w * factor);
  }
  if (params.lse != nullptr && blockIdx.x % kSlices == 0 && lane_index() == 0) {
    params.lse[row] = result.lse;
  }
}

// Programmatic dependent launch (PDL): starts while the preceding kernel drains.

__device__ inline void wait_for_previous_kernel() {}
__device__ inline void let_next_kernel_start() {}

extern "C" __global__ void __launch_bounds__(kThreads)
    combine_splits(const __grid_constant__ Params params) {
  wait_for_previous_kernel();
  __shared__ SharedMemory shared;
  combine(params, shared);
  let_next_kernel_start();
}
