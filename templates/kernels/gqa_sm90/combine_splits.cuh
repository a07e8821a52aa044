// Merging the pieces of a unit: the block that comes last adds up what all have left, in the
// order of the pieces. Nobody waits.

#pragma once

#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/atom.cuh"
#include "ptx/barrier.cuh"
#include "ptx/ex2.cuh"
#include "ptx/ld.cuh"
#include "shared_memory.cuh"
#include "store_rows.cuh"
#include "tile_scheduler.cuh"

constexpr int kPiecesAtATime = 8;  // that are under way together

__device__ inline void merge_row(const Params& params, const Item& item, int row, int dim) {
  RowState state = {-kLargest, 0.0f};
  float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int first = 0; first < item.pieces; first += kPiecesAtATime) {
    float2 states[kPiecesAtATime];
    float4 parts[kPiecesAtATime];
#pragma unroll
    for (int i = 0; i < kPiecesAtATime; ++i) {
      // Behind the last piece it comes once more, and counts for nothing.
      const int place = place_of_piece(params, item, min(first + i, item.pieces - 1));
      states[i] = ld_global_cg_v2_f32(piece_states(params, place) + row);
      parts[i] = ld_global_cg_v4_f32(piece_values(params, place, row, dim));
    }
    float next = state.reference;
#pragma unroll
    for (int i = 0; i < kPiecesAtATime; ++i) next = fmaxf(next, states[i].x);
    const float before = ex2_approx(state.reference - next);
    state = {next, state.sum * before};
    values =
        make_float4(values.x * before, values.y * before, values.z * before, values.w * before);
#pragma unroll
    for (int i = 0; i < kPiecesAtATime; ++i) {
      if (first + i >= item.pieces) continue;
      const float weight = ex2_approx(states[i].x - next);
      state.sum += states[i].y * weight;
      values = add_weighted(values, parts[i], weight);
    }
  }
  store_finished(params, item, row, dim, state, values);
}

// By all consumers, each of its head, after all have left their part of this piece.
__device__ inline void merge_pieces(const Params& params, const Item& item, int head_thread,
                                    SharedMemory& shared) {
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (threadIdx.x == 0) {
    u32* arrivals = params.semaphores + item.first_block;
    const u32 others = static_cast<u32>(item.pieces - 1);
    const bool is_last = atom_add_acq_rel_gpu(arrivals, 1) == others;
    if (is_last) *arrivals = 0;  // for the next launch
    shared.is_last_piece = is_last;
  }
  __syncwarp();
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (!shared.is_last_piece) return;
  constexpr int kQuads = kHeadDim / 4;
#pragma unroll 1
  for (int task = head_thread; task < item.rows * kQuads; task += kHeadThreads) {
    merge_row(params, item, task / kQuads, task % kQuads * 4);
  }
}
