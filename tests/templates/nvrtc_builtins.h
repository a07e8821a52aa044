// What NVRTC knows without a header, declared for clangd, which has no CUDA headers here.

#pragma once

#define __device__ __attribute__((device))
#define __noinline__ __attribute__((noinline))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __grid_constant__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))

struct uint2 {
  unsigned int x, y;
};
struct uint3 {
  unsigned int x, y, z;
};
struct uint4 {
  unsigned int x, y, z, w;
};
struct float2 {
  float x, y;
};
struct float4 {
  float x, y, z, w;
};

extern const __device__ uint3 threadIdx, blockIdx, blockDim, gridDim;

__device__ uint2 make_uint2(unsigned int x, unsigned int y);
__device__ uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w);
__device__ float2 make_float2(float x, float y);
__device__ float4 make_float4(float x, float y, float z, float w);

template <typename T>
__device__ constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
__device__ constexpr T max(T a, T b) {
  return a < b ? b : a;
}

__device__ float copysignf(float magnitude, float sign);
__device__ float fabsf(float value);
__device__ float fmaf(float a, float b, float c);
__device__ float fmaxf(float a, float b);
__device__ float fminf(float a, float b);
__device__ float __fdividef(float a, float b);
__device__ float __fadd_rn(float a, float b);
__device__ float __fdiv_rn(float a, float b);
__device__ float __fmaf_rn(float a, float b, float c);
__device__ float __fmul_rn(float a, float b);
__device__ float __fsqrt_rn(float value);
__device__ float __log2f(float value);
__device__ float __uint_as_float(unsigned int bits);
__device__ unsigned int __float_as_uint(float value);
__device__ int __float2int_rn(float value);
__device__ int __float2int_rz(float value);
__device__ unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int selector);
__device__ int __clz(int value);
__device__ int __ffs(int value);
__device__ int __popc(unsigned value);
__device__ unsigned long long __cvta_generic_to_shared(const void* pointer);

__device__ void __syncthreads();
__device__ int __syncthreads_or(int predicate);
__device__ void __syncwarp(unsigned int mask = ~0u);
__device__ int __all_sync(unsigned int mask, int predicate);
__device__ int __any_sync(unsigned int mask, int predicate);
__device__ unsigned int __ballot_sync(unsigned int mask, int predicate);
__device__ unsigned int __reduce_add_sync(unsigned int mask, unsigned int value);
__device__ unsigned int __reduce_max_sync(unsigned int mask, unsigned int value);
template <typename T>
__device__ T __shfl_sync(unsigned int mask, T value, int lane, int width = 32);
template <typename T>
__device__ T __shfl_up_sync(unsigned int mask, T value, unsigned int delta, int width = 32);
template <typename T>
__device__ T __shfl_xor_sync(unsigned int mask, T value, int lanes, int width = 32);

// Constants of the host are computed by functions of the device.
#pragma clang force_cuda_host_device begin
