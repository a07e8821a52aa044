// The consumer: S^T = K Q^T, softmax over the tokens, O^T += V^T P^T.

#pragma once

#include "accumulators.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "common/wgmma_descriptor.cuh"
#include "config.cuh"
#include "mask_v.cuh"
#include "output_dims.cuh"
#include "ptx/barrier.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ex2.cuh"
#include "ptx/fence.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax/row_state.cuh"

struct Consumer {
  const Params& params;
  SharedMemory& shared;
  const Item& item;
  float scale;  // of scores, to log2 units
  RingPosition<kStages>& position;
  u32& buffer;  // of the probabilities
  Accumulators accumulators;
  Scores scores;
  float sum[kOwnRows];  // over this thread's tokens
  float reference[kOwnRows];  // log2 units, the same in all warps

  __device__ Consumer(const Params& params, SharedMemory& shared, const Item& item, float scale,
                      RingPosition<kStages>& position, u32& buffer)
      : params(params),
        shared(shared),
        item(item),
        scale(scale),
        position(position),
        buffer(buffer) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      set_accumulator(accumulators, i, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      sum[r] = 0.0f;
      reference[r] = -kLargest;
    }
  }

  __device__ void release(const Barrier& barrier) const {
    if (fresh_thread() == 0) arrive_at(barrier);
  }

  // Where the parts of the block are that has been waited for.
  __device__ int stage(int part) const {
    const int stage = position.stage - kBlockStages + part;
    return stage < 0 ? stage + kStages : stage;
  }

  __device__ unsigned char* tile(int index) const {
    return shared.tokens[stage(index / kStageTiles)] + index % kStageTiles * kTileBytes;
  }

  // Waits for the block, multiplying what has arrived.
  __device__ void take_block_scores() {
    wgmma_keep(scores);
#pragma unroll
    for (int part = 0; part < kBlockStages; ++part) {
      wait_for(shared.stage_full[position.stage], position.parity);
      const u32 stage_address = shared_address(shared.tokens[position.stage]);
      position.advance();
      wgmma_fence();
#pragma unroll
      for (int index = 0; index < kStageTiles; ++index) {
        const u32 keys = descriptor_low(stage_address + index * kTileBytes, 16);
        const int tile = part * kStageTiles + index;
        const u32 query = descriptor_low(shared_address(shared.query) + tile * kQueryTileBytes, 16);
#pragma unroll
        for (int k = 0; k < kTileElements / 16; ++k) {
          wgmma_mma(Element{}, scores, descriptor(keys + k * 2), descriptor(query + k * 2),
                    tile + k > 0);
        }
      }
      wgmma_commit_group();
    }
    wgmma_wait_group<0>();
    wgmma_keep(scores);
  }

  // Hides, in log2 units, what a row does not see: a select, for the hidden score may be NaN.
  __device__ void hide(int first_token) {
    const int token = first_token + fresh_warp() * 16 + fresh_lane() / 4;
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const int visible = item.row_visible[own_row(r)];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[r / 2 * 4 + half * 2 + r % 2];
        score = token + half * 8 < visible ? __fmul_rn(score, scale) : -kInfinity;
      }
    }
  }

  // Writes probabilities relative to the references as they are; says whether any is so large that
  // references must move, and adds them up.
  __device__ bool write_probabilities(float factor, float (&part)[kOwnRows]) const {
    float largest = 0.0f;
    float p[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      // Rounded, never fused: equal scores must have equal distances from a reference.
      p[i] = ex2_approx(__fmul_rn(scores[i], factor) - reference[i / 4 * 2 + i % 2]);
      largest = fmaxf(largest, p[i]);
    }
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      part[r] = p[r / 2 * 4 + r % 2] + p[r / 2 * 4 + 2 + r % 2];
    }
    // Matrices: tokens 0 to 7 and 8 to 15 of the warp, for 8 rows and for the next 8.
    const int lane = fresh_lane();
    const u32 address =
        shared_address(shared.probabilities[buffer]) +
        swizzled_offset<kTileRowBytes>(lane / 16 * 8 + lane % 8, fresh_warp() * 2 + lane / 8 % 2);
#pragma unroll
    for (int group = 0; group < kRowGroups; group += 2) {
      const float* of = p + group * 4;
      stmatrix_x4_trans(address + group * 8 * kTileRowBytes, cvt_rn_x2_f32(Element{}, of[1], of[0]),
                        cvt_rn_x2_f32(Element{}, of[3], of[2]),
                        cvt_rn_x2_f32(Element{}, of[5], of[4]),
                        cvt_rn_x2_f32(Element{}, of[7], of[6]));
    }
    fence_proxy_async();
    return largest > kMostProbability;
  }

  // Moves the reference of every row to its maximum, if that is larger.
  __device__ void move_references(float factor) {
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const float maximum =
          maximum_of_lanes(fmaxf(__fmul_rn(scores[r / 2 * 4 + r % 2], factor),
                                 __fmul_rn(scores[r / 2 * 4 + 2 + r % 2], factor)));
      if (fresh_lane() < 4) shared.warp_rows[fresh_warp()][own_row(r)] = maximum;
    }
    barrier_sync(kConsumerBarrier, kConsumerThreads);
    float moved[kOwnRows];
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      float maximum = -kInfinity;
#pragma unroll
      for (int warp = 0; warp < kConsumerWarps; ++warp) {
        maximum = fmaxf(maximum, shared.warp_rows[warp][own_row(r)]);
      }
      const float next = maximum > reference[r] ? maximum : reference[r];
      moved[r] = ex2_approx(reference[r] - next);
      reference[r] = next;
      sum[r] *= moved[r];
    }
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      set_accumulator(accumulators, i, weighted(accumulator(accumulators, i), moved, i));
    }
  }

  __device__ void clear_values(int first_token) const {
    barrier_sync(kConsumerBarrier, kConsumerThreads);
    clear_nonfinite(shared, max(item.visible_to_all - first_token, 0),
                    item.visible_to_any - first_token, [&](int index) { return tile(index); });
    fence_proxy_async();
  }

  __device__ void take_block(int block) {
    take_block_scores();
    float factor = scale;
    const int first_token = block * kBlockTokens;
    if (first_token + kBlockTokens > item.visible_to_all) {
      hide(first_token);
      factor = 1.0f;
      clear_values(first_token);
    }
    float part[kOwnRows];
    const bool moves = write_probabilities(factor, part);
    if (barrier_red_or(kProbabilitiesBarrier, kConsumerThreads, moves)) {
      move_references(factor);
      write_probabilities(factor, part);
      barrier_sync(kConsumerBarrier, kConsumerThreads);
    }
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) sum[r] += part[r];
    add_values();
    buffer ^= 1;
  }

  __device__ void add_values() {
    const u32 probabilities =
        descriptor_low(shared_address(shared.probabilities) + buffer * kQueryTileBytes, 16);
#pragma unroll
    for (int index = 0; index < kLatentTiles; ++index) wgmma_keep(accumulators[index]);
    wgmma_fence();
#pragma unroll
    for (int index = 0; index < kLatentTiles; ++index) {
      const u32 values = descriptor_low(shared_address(tile(index)), kTileBytes);
#pragma unroll
      for (int k = 0; k < kBlockTokens / 16; ++k) {
        wgmma_mma_trans_a(Element{}, accumulators[index], descriptor(values + k * 128),
                          descriptor(probabilities + k * 2), 1);
      }
      if (index % kStageTiles == kStageTiles - 1) wgmma_commit_group();
    }
    wgmma_commit_group();
    wgmma_wait_group<2>();
    release(shared.stage_empty[stage(0)]);
    wgmma_wait_group<1>();
    release(shared.stage_empty[stage(1)]);
    wgmma_wait_group<0>();
    release(shared.stage_empty[stage(2)]);
#pragma unroll
    for (int index = 0; index < kLatentTiles; ++index) wgmma_keep(accumulators[index]);
  }
};
