// Online softmax of the scorer, over the rows of S^T.

#pragma once

#include "accumulators.cuh"
#include "common/barriers.cuh"
#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "kv_scales.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ex2.cuh"
#include "ptx/fence.cuh"
#include "ptx/max.cuh"
#include "ptx/stmatrix.cuh"
#include "shared_memory.cuh"

// A thread has of eight neighbouring rows two, and of a warp's sixteen tokens g and g + 8 with
// g = lane / 4.
using Scores = float[kRows / 2];

// Probabilities are fp16: a row's largest is 2^6 when its reference moves, and 2^14 before that is
// so.
constexpr float kReferenceLead = 6.0f;  // log2 units
constexpr u32 kMostWeight = 0x7400;  // as fp16

// Instead of 0, which would make NaN of the scores of hidden tokens, as a factor does that is NaN.
constexpr float kAlmostNothing = 0x1p-126f;

// Two neighbouring rows.
struct RowPair {
  float4 both;  // factor and reference of each

  __device__ float factor(int row) const { return row == 0 ? both.x : both.z; }

  // How far a score of the first is from its reference, and of the second.
  __device__ float low(float score) const { return fmaf(score, both.x, -both.y); }
  __device__ float high(float score) const { return fmaf(score, both.z, -both.w); }
};

// Those of a thread: two in every eight.
struct OwnRowPairs {
  const ScoredRow* first;

  __device__ OwnRowPairs(const SharedMemory& shared, const ScorerThread& own)
      : first(shared.rows + own.lane % 4 * 2) {}

  __device__ RowPair of_group(int group) const {
    return {*reinterpret_cast<const float4*>(first + group * 8)};
  }
};

struct Softmax {
  SharedMemory& shared;

  __device__ explicit Softmax(SharedMemory& shared) : shared(shared) {}

  // Before the first block of an item, whose query is here; `scale` makes scores log2 units.
  __device__ void begin(float scale) const {
    const int row = fresh_thread() % kScorerThreads;
    if (row == 0) shared.units = kFirstUnits;
    if (row < kRows) {
      const float factor = scale * shared.query_scale[row];
      shared.rows[row] = {factor == 0.0f ? kAlmostNothing : factor, -kLargest};
    }
    barrier_sync(kScorerBarrier, kScorerThreads);
  }

  // Turns scores into probabilities for the consumers, in shared memory: relative to references
  // that move if one is too large for them, as an item's first are. So does the unit by the scales
  // of their values, which have been left in units and are left again if these move.
  __device__ void take(const Scores& scores, const OwnScales& scales, const ScorerThread& own,
                       int stage, bool is_first) {
    bool moves = is_first;
    if (!is_first) {
      const bool is_exceeded = scales.exceed(shared.units);
      moves = write(scores, own, stage) || is_exceeded;
      moves = barrier_red_or(kScorerBarrier, kScorerThreads, moves) != 0;
    }
    if (__any_sync(~0u, moves)) {
      move_references(scores, scales, own, stage);
      scales.leave(shared.tokens[stage], own, shared.units);
      write(scores, own, stage);
      leave_units(own, stage, !is_first);
    }
    __syncwarp();
    if (own.lane == 0) arrive_at(shared.probabilities_full[stage]);
  }

  // Leaves the units of a block, and whether it multiplies the outputs before it: at first, before
  // its scores are there, as if no reference moved.
  __device__ void leave_units(const ScorerThread& own, int stage, bool rescales) const {
    if (own.lane != 0 || own.warp != 0) return;
    shared.rescales[stage] = rescales;
    shared.block_units[stage] = shared.units;
  }

  // Writes probabilities relative to the references as they are; says whether any is so large that
  // references must move. All are computed before the first is written: reading what others need
  // would wait for that.
  __device__ bool write(const Scores& scores, const ScorerThread& own, int stage) const {
    const OwnRowPairs rows(shared, own);
    u32 largest = 0;
    u32 pairs[kRowGroups][2];  // of two neighbouring rows, for tokens g and g + 8
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const RowPair pair = rows.of_group(group);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* of = scores + group * 4 + half * 2;
        pairs[group][half] =
            cvt_rn_x2_f32(Fp16{}, ex2_approx(pair.high(of[1])), ex2_approx(pair.low(of[0])));
      }
      largest = max_f16x2(largest, max_f16x2(pairs[group][0], pairs[group][1]));
    }
    // Matrices: tokens 0 to 7 and 8 to 15 of the warp, for 8 rows and for the next 8.
    const int chunk = own.warp * 2 + own.lane / 8 % 2;
    const u32 address = shared_address(shared.probabilities[stage]) +
                        swizzled_offset<kTileRowBytes>(own.lane / 16 * 8 + own.lane % 8, chunk);
#pragma unroll
    for (int group = 0; group < kRowGroups; group += 2) {
      stmatrix_x4_trans(address + group * 8 * kTileRowBytes, pairs[group][0], pairs[group][1],
                        pairs[group + 1][0], pairs[group + 1][1]);
    }
    fence_proxy_async();
    return max(largest & 0xffff, largest >> 16) > kMostWeight;
  }

  // Moves the reference of every row to kReferenceLead below its maximum, if that is larger, and
  // the unit to what the largest scale wants.
  __device__ void move_references(const Scores& scores, const OwnScales& scales,
                                  const ScorerThread& own, int stage) {
    const OwnRowPairs rows(shared, own);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const float factor = rows.of_group(r / 2).factor(r % 2);
      const float maximum =
          maximum_of_lanes(fmaxf(__fmul_rn(scores[r / 2 * 4 + r % 2], factor),
                                 __fmul_rn(scores[r / 2 * 4 + 2 + r % 2], factor)));
      if (own.lane < 4) shared.warp_rows[own.warp][own_row(r)] = maximum;
    }
    shared.warp_scales[own.warp] =
        __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(scales.largest())));
    const float units = shared.units;
    barrier_sync(kScorerBarrier, kScorerThreads);
    const int row = own.warp * kWarpLanes + own.lane;
    const float next_units = units_after(units);
    if (row < kRows) {
      float& reference = shared.rows[row].reference;
      float next = reference;
#pragma unroll
      for (int warp = 0; warp < kScorerWarps; ++warp) {
        const float wanted = shared.warp_rows[warp][row] - kReferenceLead;
        if (wanted > next) next = wanted;
      }
      shared.rescale[stage][row] = ex2_approx(reference - next) * (next_units / units);
      reference = next;
    }
    if (row == 0) shared.units = next_units;
    barrier_sync(kScorerBarrier, kScorerThreads);
  }

  // What `units` become by the scales of a block.
  __device__ float units_after(float units) const {
    float largest = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kScorerWarps; ++warp) {
      largest = fmaxf(largest, shared.warp_scales[warp]);
    }
    return largest * units >= kMostUnits ? units_of(largest) : units;
  }

  // Leaves what references have come to, for the consumers: of outputs in units, they are as much
  // lower.
  __device__ void leave_references(int slot) const {
    const float units = shared.units;  // before any thread begins the next item
    barrier_sync(kScorerBarrier, kScorerThreads);
    const int row = fresh_thread() % kScorerThreads;
    if (row < kRows) {
      shared.row_reference[slot][row] = shared.rows[row].reference - log2_of_power(units);
    }
    if (row == 0) shared.row_units[slot] = units;
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.rows_full[slot]);
  }
};
