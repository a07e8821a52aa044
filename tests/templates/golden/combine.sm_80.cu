// Basic types, dtype tags and thread indices of every kernel.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Tags that select conversions; the data itself is held as bytes, u16 or u32.
struct Bf16 {};
struct Fp16 {};
struct E4m3 {};
struct E5m2 {};
struct Int8 {};
struct Nvfp4 {};

template <typename A, typename B>
constexpr bool kIsSame = false;
template <typename A>
constexpr bool kIsSame<A, A> = true;

// Largest size of one load, store or cp.async.
constexpr int kChunkBytes = 16;
struct alignas(kChunkBytes) Chunk {
  u32 words[4];
};

// TMA descriptor (CUtensorMap), opaque and encoded on the host.
struct alignas(64) TensorMap {
  u64 words[16];
};

constexpr int kWarpLanes = 32;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kFloatMax = __builtin_bit_cast(float, 0x7f7fffff);
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// The dynamic shared memory of the CTA, viewed as one struct.
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

// PTX ISA, "Integer, floating-point and half-precision: add, ex2, fma, max, mul, rcp". Needs sm_53.

// add.rn.f16x2
__device__ inline u32 add_f16x2(u32 a, u32 b) {
  u32 sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// ex2.approx.ftz.f32
// 2 to the power of x, relative error below 2^-22; minus infinity gives zero.
__device__ inline float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// fma.rn.bf16x2
// Subnormal numbers are kept. Needs sm_80.
__device__ inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// max.f16x2
// Ignores NaN operands. Needs sm_80.
__device__ inline u32 max_f16x2(u32 a, u32 b) {
  u32 larger;
  asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// max.u16x2
// Needs sm_90.
__device__ inline u32 max_u16x2(u32 a, u32 b) {
  u32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// mul.rn.f16x2
__device__ inline u32 mul_f16x2(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// rcp.approx.ftz.f32
// 1 / x, relative error below 2^-23; infinity gives zero.
__device__ inline float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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

// cvt.rn.f16x2.e4m3x2
// Needs sm_89.
__device__ inline u32 cvt_rn_f16x2_e4m3x2(u16 pair) {
  u32 value;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(value) : "h"(pair));
  return value;
}

// cvt.rn.f16x2.e4m3x2
// Converts the upper half of a word without a shift. Needs sm_89.
__device__ inline u32 cvt_rn_f16x2_e4m3x2_high(u32 word) {
  u32 value;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}"
      : "=r"(value)
      : "r"(word));
  return value;
}

// cvt.rn.satfinite.e4m3x2.f32
// Needs sm_89.
__device__ inline u16 cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// PTX ISA, "Data Movement and Conversion Instructions: createpolicy, ld, prefetch". Needs sm_80.

// ld.acquire.gpu.global.u32
// Later accesses see what other CTAs wrote before they released the value.
__device__ inline u32 ld_acquire_gpu(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ld.relaxed.gpu.global.s32
// Relaxed at gpu scope: may race with writers, and is never served from L1.
__device__ inline int ld_relaxed_gpu(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ld.relaxed.gpu.global.u32
__device__ inline u32 ld_relaxed_gpu(const u32* address) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ld.global.cg.v2.f32
// Bypasses L1, which may hold stale data of other CTAs.
__device__ inline float2 ld_global_cg_v2_f32(const void* address) {
  float2 value;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "l"(address)
               : "memory");
  return value;
}

// ld.global.cg.v4.f32
__device__ inline float4 ld_global_cg_v4_f32(const void* address) {
  float4 value;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

// prefetch.tensormap
// Prefetches a TMA descriptor by its generic address. Needs sm_90.
__device__ inline void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// prefetch.global.L2
// Prefetches the cache line of an address into L2.
__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// prefetch.global.L2::evict_last
// Prefetches the cache line of an address into L2, which evicts it after others.
__device__ inline void prefetch_l2_evict_last(const void* address) {
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(address) : "memory");
}

// createpolicy.fractional.L2::evict_first.b64
// L2 evicts such lines before others.
__device__ inline u64 createpolicy_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}

// createpolicy.fractional.L2::evict_normal.b64
__device__ inline u64 createpolicy_evict_normal() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
  return policy;
}

// Output gate of a sparse call: a 16-bit output times the sigmoid of a number for each element.

__device__ inline float sigmoid(float value) {
  return rcp_approx(1.0f + ex2_approx(value * -kLog2E));
}

// Prefetches the gates of `count` elements from `offset` on into L2, by thread `thread` of more
// threads than they have cache lines.
template <typename GateParams>
__device__ inline void prefetch_gates(const GateParams& params, i64 offset, int count, int thread) {
  constexpr int kGatesPerCacheLine = 64;
  if (thread * kGatesPerCacheLine >= count) return;
  prefetch_l2(params.output_gate + offset + thread * kGatesPerCacheLine);
}

// Gates four elements of the output, from `offset` on. The output is rounded before, as by a caller
// that multiplies it himself. A template: Params of a kernel without a gate lacks it.
template <typename Element16, typename GateParams>
__device__ inline float4 gated_output(Element16, const GateParams& params, i64 offset,
                                      float4 value) {
  const uint2 gates = *reinterpret_cast<const uint2*>(params.output_gate + offset);
  const u32 low = cvt_rn_x2_f32(Element16{}, value.y, value.x);
  const u32 high = cvt_rn_x2_f32(Element16{}, value.w, value.z);
  const auto gated = [](u32 rounded, u32 gate) {
    return cvt_f32(Element16{}, static_cast<u16>(rounded)) *
           sigmoid(cvt_f32(Element16{}, static_cast<u16>(gate)));
  };
  return make_float4(gated(low, gates.x), gated(low >> 16, gates.x >> 16), gated(high, gates.y),
                     gated(high >> 16, gates.y >> 16));
}

// Kernel parameters of one launch, and programmatic dependent launch (PDL).

struct Params {
  const float* partial_out;
  const float* partial_lse;
  const float* bmm2_scale_tensor;
  const float* sinks;
  unsigned char* out;
  float* lse;
  i64 total_rows;
  int heads;
  int num_splits;
  float bmm2_scale;
  float output_factor;
  float lse_factor;
};

// A scale is a number from the host, or a one-element tensor on the device.
__device__ inline float value_of(const float* tensor, float value) {
  return tensor == nullptr ? value : *tensor;
}

// PDL: a kernel starts while the preceding one drains.
__device__ inline void pdl_wait() {}
__device__ inline void pdl_launch_dependents() {}

// Vectorized store of four output elements, in FP8 or in 16 bits, from float.

// `index` counts elements and is a multiple of 4.
template <typename Target>
__device__ inline void store_x4(Target target, unsigned char* out, i64 index, float a, float b,
                                float c, float d) {
  uint2 packed;
  packed.x = cvt_rn_x2_f32(target, b, a);
  packed.y = cvt_rn_x2_f32(target, d, c);
  *reinterpret_cast<uint2*>(out + index * 2) = packed;
}

// Kernel configuration: the numbers of the spec as constants.

using OutElement = Bf16;
constexpr int kHeadDimVo = 512;
constexpr bool kHasOutputGate = false;
constexpr int kSlices = 4;
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kSliceDims = kWarpLanes * 4;  // output dims of a CTA: a float4 for each lane
static_assert(kHeadDimVo % 4 == 0 && kSlices * kSliceDims >= kHeadDimVo, "slices cover the row");

// Softmax state (m, l) of a row: combination of the parts that splits or warps have of it, final
// normalization factor and LSE, attention sink included.

// Softmax state (m, l) of a row, or of a part of it.
struct RowState {
  float row_max;  // base 2; O and row sum are relative to it
  float row_sum;  // of P
};

struct RowResult {
  float factor;  // multiplies the accumulators
  float lse;  // includes the sink; an empty row has its sink, or minus infinity
};

// `row_max` is base 2, `row_sum` is relative to it; `sink` is a natural-log logit without a V row,
// or minus infinity. `lse_factor` converts base 2 to the base of the LSE.
__device__ inline RowResult finish_row(float row_max, float row_sum, float sink,
                                       float lse_factor = 1.0f) {
  // Computed in base e: a finite sink may overflow in base 2.
  const float sink_lse = sink * (kLog2E * lse_factor);
  // Fused, so that only the distance can overflow, to an infinity of the right sign.
  const float distance = fmaf(sink, kLog2E, -row_max);
  // Relative to the larger of the two, because 2^distance may overflow. Selects keep a NaN, and no
  // branch scatters code that runs once over instruction-cache lines.
  const bool is_sink_larger = distance > 0.0f;
  const float smaller = ex2_approx(-fabsf(distance));
  const float rescale = is_sink_larger ? smaller : 1.0f;
  const float total = row_sum * rescale + (is_sink_larger ? 1.0f : smaller);
  // Approximate, to about 22 bits, with a fraction of the instructions.
  const float log2_total = __log2f(total);
  const bool is_empty = row_sum == 0.0f;  // the row attends to nothing; a NaN is not nothing
  const float lse =
      is_sink_larger ? sink_lse + log2_total * lse_factor : (row_max + log2_total) * lse_factor;
  return {is_empty ? 0.0f : __fdividef(rescale, total), is_empty ? sink_lse : lse};
}

// The same without a sink.
__device__ inline RowResult finish_row_without_sink(float row_max, float row_sum,
                                                    float lse_factor = 1.0f) {
  if (row_sum == 0.0f) return {0.0f, -kInfinity};
  return {__fdividef(1.0f, row_sum), (row_max + __log2f(row_sum)) * lse_factor};
}

// A row that attends to nothing. Its row max is finite: a difference of minus infinities is NaN.
constexpr RowState kEmptyRow = {-kFloatMax, 0.0f};

template <int kCount>
__device__ inline float max_of(const RowState (&states)[kCount]) {
  float row_max = states[0].row_max;
#pragma unroll
  for (int i = 1; i < kCount; ++i) row_max = fmaxf(row_max, states[i].row_max);
  return row_max;
}

// Weight of a part in a row whose max is `row_max`.
__device__ inline float weight_of(const RowState& part, float row_max) {
  return ex2_approx(part.row_max - row_max);
}

// Four adjacent dims of a row of partial O, as a sum of parts.
struct RowPart {
  RowState state = kEmptyRow;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};

  // Adds a part, whose row max is at most that of the sum.
  __device__ void add(const RowState& part, const float4& part_out) {
    const float weight = weight_of(part, state.row_max);
    state.row_sum += part.row_sum * weight;
    out.x += weight * part_out.x;
    out.y += weight * part_out.y;
    out.z += weight * part_out.z;
    out.w += weight * part_out.w;
  }
};

// Combines the first `count` of kCount parts, at least one; `out_of(i)` is partial O of part i. The
// row max is that of all states.
template <int kCount, typename OutOf>
__device__ inline RowPart combine_parts(const RowState (&states)[kCount], int count, OutOf out_of) {
  RowPart total;
  total.state.row_max = max_of(states);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i == 0 || i < count) total.add(states[i], out_of(i));
  }
  return total;
}

// Combine (split-KV reduction): weighs the partial O of all splits by their LSE.

struct SharedMemoryPlan {
  float row_sum[kWarps];
  float4 values[kWarps][kWarpLanes];
};

__device__ inline float warp_reduce_max(float value) {
#pragma unroll
  for (int lanes = kWarpLanes / 2; lanes > 0; lanes /= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// Max LSE of the row over its splits; every warp computes it.
__device__ inline float row_max_lse(const Params& params, i64 row) {
  float max_lse = -kInfinity;
  for (int split = lane_index(); split < params.num_splits; split += kWarpLanes) {
    max_lse = fmaxf(max_lse, params.partial_lse[split * params.total_rows + row]);
  }
  return warp_reduce_max(max_lse);
}

// Splits loaded per step by one warp, which takes every kWarps-th split. Loads are issued together:
// dependent loads would dominate this kernel.
constexpr int kSplitsPerStep = 8;

struct SplitPartials {
  float lse[kSplitsPerStep];
  float4 values[kSplitsPerStep];

  // Loads splits from `first` on. `values` is undefined where there is no split or it is empty.
  __device__ SplitPartials(const Params& params, i64 row, int dim, int first) {
    const i64 partial_row = first * params.total_rows + row;
    const float* lse_of_row = params.partial_lse + partial_row;
    const float* values_of_row = params.partial_out + partial_row * kHeadDimVo + dim;
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) {
      const bool exists = first + i * kWarps < params.num_splits;
      lse[i] = exists ? *lse_of_row : -kInfinity;
      if (exists) values[i] = *reinterpret_cast<const float4*>(values_of_row);
      lse_of_row += kWarps * params.total_rows;
      values_of_row += kWarps * params.total_rows * kHeadDimVo;
    }
  }

  // Adds the splits that are not empty.
  __device__ void add_to(RowPart& total) const {
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) {
      if (lse[i] == -kInfinity) continue;
      // O is normalized: the LSE is its row max, and the row sum is 1.
      total.add({lse[i], 1.0f}, values[i]);
    }
  }
};

__device__ inline void combine(const Params& params, SharedMemoryPlan& smem) {
  const int row = static_cast<int>(blockIdx.x) / kSlices;
  const int dim = static_cast<int>(blockIdx.x) % kSlices * kSliceDims + lane_index() * 4;
  const bool is_outside = dim >= kHeadDimVo;  // the last slice may be partial
  const float sink = params.sinks == nullptr ? -kInfinity : params.sinks[row % params.heads];
  const float scale = value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor;
  RowPart partial;
#pragma unroll 1
  for (int first = 0; first < params.num_splits; first += kSplitsPerStep * kWarps) {
    const SplitPartials rows(params, row, is_outside ? 0 : dim, first + warp_index());
    // Overlaps the loads of `rows`.
    if (first == 0) partial.state.row_max = row_max_lse(params, row);
    rows.add_to(partial);
  }
  smem.values[warp_index()][lane_index()] = partial.out;
  if (lane_index() == 0) smem.row_sum[warp_index()] = partial.state.row_sum;
  __syncthreads();
  if (warp_index() != 0) return;

  float row_sum = 0.0f;
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    const float4 value = smem.values[warp][lane_index()];
    row_sum += smem.row_sum[warp];
    total.x += value.x;
    total.y += value.y;
    total.z += value.z;
    total.w += value.w;
  }
  const RowResult result = finish_row(partial.state.row_max, row_sum, sink, params.lse_factor);
  const float factor = result.factor * scale;
  if (!is_outside) {
    total = make_float4(total.x * factor, total.y * factor, total.z * factor, total.w * factor);
    const i64 offset = static_cast<i64>(row) * kHeadDimVo + dim;
    if constexpr (kHasOutputGate) total = gated_output(OutElement{}, params, offset, total);
    store_x4(OutElement{}, params.out, offset, total.x, total.y, total.z, total.w);
  }
  if (params.lse != nullptr && blockIdx.x % kSlices == 0 && lane_index() == 0) {
    params.lse[row] = result.lse;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    combine(const __grid_constant__ Params params) {
  pdl_wait();
  __shared__ SharedMemoryPlan smem;
  combine(params, smem);
  pdl_launch_dependents();
}
