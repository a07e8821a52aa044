// The two consumers: how they take turns over the pairs of blocks of an item.

#pragma once

#include "accumulators.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mask_v.cuh"
#include "no_swap_ab/mma_operands.cuh"
#include "no_swap_ab/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"

// An item of so few blocks of tokens is not worth fetching the loop for pairs that are seen whole.
constexpr int kShortItem = 4;

// Both add the even block of a pair first and then the odd one, so that references only move
// forward:
//
//   left:   softmax even | O += own P | O += right's P | scores of the next even block
//   right:  O += left's P, softmax odd meanwhile | O += own P | scores of the next odd block
struct Consumer {
  const Params& params;
  SharedMemory& shared;
  const Item& item;
  Descriptors& descriptors;
  float scale;  // of scores, to log2 units
  u32& parity;  // of the stages
  Accumulators accumulators;
  Scores scores;
  Probabilities probabilities;
  Softmax softmax;

  __device__ Consumer(const Params& params, SharedMemory& shared, const Item& item,
                      Descriptors& descriptors, float scale, u32& parity)
      : params(params),
        shared(shared),
        item(item),
        descriptors(descriptors),
        scale(scale),
        parity(parity) {
#pragma unroll
    for (int i = 0; i < kHalfDims / 2; ++i) accumulators[i] = 0.0f;
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      softmax.sum[r] = 0.0f;
      softmax.reference[r] = -kLargest;
    }
  }

  __device__ void release(const Barrier& barrier) const {
    if (consumer_thread() == 0) arrive_at(barrier);
  }

  template <int kStage>
  __device__ void store_probabilities() const {
    const int thread = fresh_thread();
    const int row = thread % 128 / kWarpLanes * 16 + thread % 16;
    const u32 address =
        shared_address(shared.tokens[kStage] + kLatentTiles * kTileBytes) + row * kTileRowBytes;
    const int chunk = thread % kWarpLanes / 16 ^ row % 8;
#pragma unroll
    for (int k = 0; k < kBlockTokens / 16; ++k) {
      stmatrix_x4(address + ((chunk ^ (k * 2)) << 4), probabilities[k * 4],
                  probabilities[k * 4 + 1], probabilities[k * 4 + 2], probabilities[k * 4 + 3]);
    }
    fence_proxy_async();
  }

  // Scores of the block in `kStage`, which are here, to probabilities; says whether references have
  // moved. Of a block that does not `exist`, scores may be anything, and nothing is kept.
  // `kIsPlain` where all rows see the whole block.
  template <int kStage, bool kIsPlain>
  __device__ bool take_scores(int block, bool exists, float (&moved)[kOwnRows]) {
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) moved[r] = 1.0f;
    const int first_token = block * kBlockTokens;
    const bool hides = !kIsPlain && (!exists || first_token + kBlockTokens > item.visible_to_all);
    // No branch before this: it runs while products before it begin.
    const bool moves = !softmax.take(scores, scale, probabilities, hides);
    if (!kIsPlain && !exists) return false;
    if (moves) {
      scale_scores(scores, scale);
      if constexpr (!kIsPlain) {
        if (hides) {
          hide(scores, item, first_token);
          clear_values<kStage>(first_token);
        }
      }
      softmax.take_moving(scores, probabilities, moved);
    }
    softmax.publish(moved, shared.reference[kStage], shared.rescale[kStage]);
    store_probabilities<kStage>();
    barrier_arrive(kProbabilitiesBarrier + kStage, kConsumerThreads);
    return moves;
  }

  // When all warps of this consumer have their scores.
  template <int kStage>
  __device__ void clear_values(int first_token) const {
    const int barrier = kValuesBarrier + kStage;
    barrier_sync(barrier, 128);
    clear_nonfinite(shared, max(item.visible_to_all - first_token, 0),
                    item.visible_to_any - first_token,
                    [&](int tile) { return shared.tokens[kStage] + tile * kTileBytes; });
    fence_proxy_async();
    barrier_sync(barrier, 128);
  }

  __device__ void follow(int stage) {
    float moved[kOwnRows];
    if (softmax.follow(shared.reference[stage], shared.rescale[stage], moved)) {
      rescale(accumulators, moved[0], moved[1]);
    }
  }

  // The left consumer: all of the even block, then the odd one if there is one, with the scores of
  // the next even block behind it.
  __device__ void take_pair_left(int block, bool is_last, bool has_odd) {
    descriptors.forget();
    float moved[kOwnRows];
    if (take_scores<0, false>(block, true, moved)) rescale(accumulators, moved[0], moved[1]);
    wgmma_keep(accumulators);
    add_own<0, 0>(descriptors, probabilities, accumulators);
    finish(accumulators);
    release(shared.left_empty[0]);
    if (has_odd) {
      barrier_sync(kProbabilitiesBarrier + 1, kConsumerThreads);
      follow(1);
      wgmma_keep(accumulators);
      add_others<1, 0>(descriptors, accumulators);
    }
    parity ^= 1;
    if (is_last) {
      finish(accumulators);
      if (has_odd) release_odd_left();
      return;
    }
    begin_scores<0>(descriptors, shared, parity, scores, [&](int tile) {
      if (tile != 3) return;
      wgmma_wait_group<4>();
      release_odd_left();
    });
    finish(accumulators);
    wgmma_keep(scores);
  }

  __device__ void release_odd_left() const {
    release(shared.left_empty[1]);
    release(shared.rope_empty[1]);
  }

  // And the right one: it begins with the even block, and ends with the odd one.
  template <bool kIsPlain>
  __device__ void take_pair_right(int block, bool has_odd) {
    descriptors.forget();
    barrier_sync(kProbabilitiesBarrier, kConsumerThreads);
    follow(0);
    wgmma_keep(accumulators);
    add_others<0, 1>(descriptors, accumulators);
    float moved[kOwnRows];
    const bool moves = take_scores<1, kIsPlain>(block + 1, has_odd, moved);
    finish(accumulators);
    release(shared.right_empty[0]);
    release(shared.rope_empty[0]);
    if (kIsPlain || has_odd) {
      if (moves) rescale(accumulators, moved[0], moved[1]);
      wgmma_keep(accumulators);
      add_own<1, 1>(descriptors, probabilities, accumulators);
      finish(accumulators);
    } else {
      release_odd_left();  // only this consumer has waited for the block that does not exist
    }
    release(shared.right_empty[1]);
    parity ^= 1;
  }

  // The scores that a pair begins with.
  template <int kStage>
  __device__ void begin_pair() {
    begin_scores<kStage>(descriptors, shared, parity, scores, [](int) {});
    finish(scores);
  }

  __device__ void take_item() {
    const int end = item.first_block + item.blocks;
    const int seen_blocks = item.visible_to_all / kBlockTokens - item.first_block;
    const int plain_blocks = item.blocks > kShortItem ? min(item.blocks - 1, seen_blocks) : 0;
    const int plain_end = item.first_block + max(plain_blocks / 2 * 2, 0);
    int block = item.first_block;
    if (is_left()) {
      begin_pair<0>();
#pragma unroll 1
      for (; block < end; block += 2) {
        const bool is_last = block + 2 >= end;
        if (is_last) release_query();
        take_pair_left(block, is_last, block + 1 < end);
      }
    } else {
#pragma unroll 1
      for (; block < end; block += 2) {
        begin_pair<1>();
        // What comes last here comes first in the program, and short items need no other.
        if (block < plain_end) {
          take_pair_right<true>(block, true);
        } else {
          if (block + 2 >= end) release_query();
          take_pair_right<false>(block, block + 1 < end);
        }
      }
    }
  }

  __device__ void release_query() const { release(shared.query_empty); }
};
