// The consumers: each warp attends to tokens of its own in every tile, with no word to the other
// consumers until an item ends.

#pragma once

#include "combine_splits.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/pdl.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "epilogue.cuh"
#include "fragments.cuh"
#include "load_q.cuh"
#include "mask_v.cuh"
#include "mma.cuh"
#include "ptx/barrier.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "softmax/softmax_scale.cuh"
#include "tile_scheduler.cuh"
#include "work_pipeline.cuh"

// A word made of all keys that have been multiplied.
__device__ inline u32 word_of(const Scores& scores) {
  u32 word = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) word ^= __float_as_uint(scores[step][0][0]);
  return word;
}

// `read` is made of all that the lane has read.
__device__ inline void release(const Barrier& empty, u32 read) {
  __syncwarp();  // all lanes have read
  if (lane_index() == 0) arrive_after(empty, read);
}

// Goes by a stage of which this warp needs nothing. It waits all the same: who releases what has
// not come yet could do so twice before the loader looks.
__device__ inline void skip_stage(SharedMemory& shared, RingPosition<kStages>& position) {
  wait_for(shared.stage_full[position.stage], position.parity);
  release(shared.stage_empty[position.stage], 0);
  position.advance();
}

// Item `count` of the block, whose query has been asked for; asks for the next one's. Says whether
// there is one.
__device__ inline bool consume_item(const Params& params, int warp, float factor, u32 count,
                                    Query& query, bool& are_merging, SharedMemory& shared,
                                    RingPosition<kStages>& position) {
  const ItemRing& items = shared.items;
  const int head = head_of_warp(warp);
  const Item& item = items.at(count, head);
  const MatrixRows key_matrices = key_rows(warp);
  const MatrixRows value_matrices = value_rows(warp);
  query.finish(params, item, warp, shared);
  const ScoreFactors factors(query, factor);
  Softmax softmax;
  Output output = {};
  const int all_begin = item.all_begin;
  const int all_end = item.all_end;
  int first_token = item.first_tile * kTileTokens + first_of_warp(warp);
#pragma unroll 1
  for (int tile = max(item.tiles, 1); tile > 0; --tile, first_token += kTileTokens) {
    if (tile == 1) {
      if constexpr (Query::kAsksAhead) {
        items.await(count + 1);
        if (items.has(count + 1)) query.begin(params, items.at(count + 1, head), warp);
      }
      if (item.tiles == 0) break;
    }
    const int end_token = first_token + kWarpTokens;
    const bool has_boundary = first_token < all_begin || end_token > all_end;
    if (has_boundary && (end_token <= item.any_begin || first_token >= item.any_end)) {
      skip_stage(shared, position);
      skip_stage(shared, position);
      continue;
    }
    Scores scores;
    wait_for(shared.stage_full[position.stage], position.parity);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply_keys(key_matrices, shared.tokens[position.stage], step, query, scores[step]);
    }
    release(shared.stage_empty[position.stage], word_of(scores));
    position.advance();

    scale_scores(factors, scores);
    if (has_boundary) hide_scores(params, item, first_token, scores);
    softmax.update(scores, output);
    Probabilities probabilities;
    turn_probabilities(scores, probabilities);

    unsigned char* values = shared.tokens[position.stage];
    wait_for(shared.stage_full[position.stage], position.parity);
    if (has_boundary && clear_hidden(item, first_token, warp, values)) {
      shared.nonfinite_items[count % 2] = count;
    }
    u32 read = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      read ^= add_values(value_matrices, values, step, probabilities[step], output);
    }
    release(shared.stage_empty[position.stage], read);
    position.advance();
  }
  if constexpr (!Query::kAsksAhead) items.await(count + 1);
  const bool has_next = items.has(count + 1);
  await_mergers(are_merging);
  if (is_merged_apart(item, has_next)) {
    leave_parts(warp, softmax, output, shared);
    are_merging = true;
  } else {
    merge_warps(params, item, warp, count, softmax, output, shared);
    if (item.pieces > 1) merge_pieces(params, item, head_thread(warp), shared);
  }
  items.release(count);
  return has_next;
}

// All items of the block.
__device__ inline void consume_tokens(const Params& params, int warp, SharedMemory& shared) {
  const ItemRing& items = shared.items;
  Query query(shared);
  do {
    __syncwarp();
    barrier_sync(kStartBarrier, kThreads);
    wait_for_previous_kernel();
    if (items.has(0)) query.begin(params, items.at(0, head_of_warp(warp)), warp);
    __syncwarp();
    barrier_sync(kCheckedBarrier, kThreads);
  } while (!shared.is_start_right);
  if (!items.has(0)) return;
  const float factor = score_scale(params) * params.score_factor * kLog2E;
  RingPosition<kStages> position;
  bool are_merging = false;
  u32 count = 0;
  while (consume_item(params, warp, factor, count, query, are_merging, shared, position)) ++count;
}
