// What a consumer has of the output in registers, where its dims take the place of rows in the
// products, and rows that of columns.

#pragma once

#include "combine/reduce_group.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "output_dims.cuh"

constexpr int kRowGroups = kRows / 8;
constexpr int kOwnRows = kRowGroups * 2;
using Accumulators = float[kDimTiles][kRows / 2];

// A thread's row `r`, the same in all warps, and lanes that have the same rows: those that agree
// modulo 4.
__device__ inline int own_row(int r) { return r / 2 * 8 + fresh_lane() % 4 * 2 + r % 2; }

// Row of part `c` of float4 `i`.
__device__ inline int part_row(int, int i, int c) { return own_row(i % kRowGroups * 2 + c % 2); }

__device__ inline float4 accumulator(const Accumulators& accumulators, int i) {
  const float* of = accumulators[i / kRowGroups] + i % kRowGroups * 4;
  return make_float4(of[0], of[1], of[2], of[3]);
}

__device__ inline void set_accumulator(Accumulators& accumulators, int i, float4 value) {
  float* of = accumulators[i / kRowGroups] + i % kRowGroups * 4;
  of[0] = value.x;
  of[1] = value.y;
  of[2] = value.z;
  of[3] = value.w;
}

// Multiplies a group of eight rows, of which a thread has two.
__device__ inline void multiply_group(Accumulators& accumulators, int group, float2 factor) {
#pragma unroll
  for (int tile = 0; tile < kDimTiles; ++tile) {
    float* of = accumulators[tile] + group * 4;
    of[0] *= factor.x;
    of[1] *= factor.y;
    of[2] *= factor.x;
    of[3] *= factor.y;
  }
}

// Float4 `i` holds two rows of each of its two dims.
__device__ inline float4 weighted(float4 value, const float (&weights)[kOwnRows], int i) {
  const float a = weights[i % kRowGroups * 2];
  const float b = weights[i % kRowGroups * 2 + 1];
  return make_float4(value.x * a, value.y * b, value.z * a, value.w * b);
}

// Of all warps' float4s in a row, the tasks, those of half of the warps come first, of these those
// of the same eight rows together, and of these those of a warp.
constexpr int kRowsOfGroup = 8;
constexpr int kTasksOfGroup = kConsumerWarps / 2 * kDimTiles;
constexpr int kHalfTasks = kRowGroups * kTasksOfGroup;

__device__ inline int first_task_of(int warp) {
  return half_of_warp(warp) * kHalfTasks + place_in_half(warp) * kDimTiles;
}

// Where float4 `i` is behind the first of its warp.
__device__ constexpr int task_offset(int i) {
  return i % kRowGroups * kTasksOfGroup + i / kRowGroups;
}

// Which float4 is number `task` in this order.
__device__ constexpr int accumulator_in_order(int task) {
  return task % kDimTiles * kRowGroups + task / kDimTiles;
}

// Which warp has a task, and as which of its float4s.
__device__ inline int warp_of_task(u32 task) {
  return warp_at(task / kHalfTasks, task % kTasksOfGroup / kDimTiles);
}
__device__ inline int accumulator_of_task(u32 task) {
  return task % kDimTiles * kRowGroups + task / kTasksOfGroup % kRowGroups;
}

struct TaskRows {
  int a;
  int b;
};

__device__ inline TaskRows task_rows(u32 task) {
  const int row = own_row(task / kTasksOfGroup % kRowGroups * 2);
  return {row, row + 1};
}

// A row has one scale.
constexpr int kScales = 1;
__device__ inline int scale_of_warp(int) { return 0; }
__device__ inline int scale_of_task(u32) { return 0; }

__device__ inline float4 add_task(float4 total, float4 value, float weight_a, float weight_b) {
  return make_float4(total.x + value.x * weight_a, total.y + value.y * weight_b,
                     total.z + value.z * weight_a, total.w + value.w * weight_b);
}

// Over the lanes that have the same rows.
__device__ inline float maximum_of_lanes(float value) {
#pragma unroll
  for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}
