// Basic types, dtype tags and thread indices of every kernel.

#pragma once

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
