// The scorer, four warps: scores and probabilities of all blocks of all items.

#pragma once

#include "combine/fp16_scale.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/swizzle.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "mma_operands.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "softmax.cuh"
#include "softmax/row_reduce.cuh"
#include "softmax/softmax_scale.cuh"

// A block whose scores are computed.
struct ScoredBlock {
  int number;  // of the request's
  int stage;
  u32 place;  // where this lane stores its part of the probabilities
  bool hides;  // whether some row does not see all of it
};

struct Scorer {
  SharedMemory& shared;
  const Item& item;
  RingPosition<kStages>& position;  // of the block whose scores are next
  Softmax softmax;

  __device__ Scorer(SharedMemory& shared, const Item& item, RingPosition<kStages>& position)
      : shared(shared), item(item), position(position) {}

  // When the tokens of the next block have come; its stage.
  __device__ int next_stage() {
    const int stage = position.stage;
    wait_for(shared.tokens_full[stage], position.parity);
    position.advance();
    return stage;
  }

  // Begins the scores of a block, and adds up the probabilities of the one before, of which a word
  // follows each step: tensor cores take a step only when they have done most of the one before,
  // and a warp that waits for that does nothing else.
  __device__ void begin_scores(Scores& scores, const Probabilities& before, int stage) {
    const ScoreSteps steps(shared, stage);
    ProbabilitySums sums;
    wgmma_keep(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kScoreSteps; ++step) {
      steps.begin(scores, step);
      if (step < kWords) sums.add_word(before, step);
    }
    wgmma_commit_group();
    softmax.add(sums);
  }

  // Where this lane stores its part of the probabilities of the block in `stage`.
  __device__ u32 place_of_probabilities(int stage) const {
    const int lane = fresh_lane();
    const int row = fresh_warp() % 4 * kRowsOfWarp + lane % 16;
    return shared_address(shared.tokens[stage]) + kProbabilitiesOffset +
           swizzled_offset<kRopeRowBytes>(row, lane / 16);
  }

  // All of it stands here once: until an SM has had instructions, fetching them takes it longer
  // than what they say. What probabilities take is at hand when the scores are: nobody waits as
  // long for anything as for what follows them.
  __device__ void take_blocks() {
    Scores scores;
    Probabilities probabilities = {};
    const int end = item.first_block + item.blocks;
    const int hiding = item.visible_to_all / kBlockTokens;
#pragma unroll 1
    for (int block = item.first_block; block < end; ++block) {
      const int stage = next_stage();
      begin_scores(scores, probabilities, stage);
      const float scale = shared.score_scale;
      const ScoredBlock scored = {block, stage, place_of_probabilities(stage), block >= hiding};
      wgmma_wait_group<0>();
      wgmma_keep(scores);
      const bool rescales = take_scores(scores, scale, probabilities, scored);
      publish(stage, rescales);
    }
    ProbabilitySums sums;
#pragma unroll
    for (int word = 0; word < kWords; ++word) sums.add_word(probabilities, word);
    softmax.add(sums);
  }

  // Of a narrow tile, the last warps have none. A vote, so that compilers know all lanes agree.
  __device__ static bool has_rows() {
    return kWarpsWithRows == kScorerWarps || __any_sync(~0u, fresh_warp() % 4 < kWarpsWithRows);
  }

  // Turns scores into probabilities and stores them, and once more those that are not what they
  // should be. Says whether a reference has moved, so that what was before is multiplied by
  // factors.
  __device__ bool take_scores(Scores& scores, float scale, Probabilities& probabilities,
                              const ScoredBlock& block) {
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      softmax.take_word(scores, scale, probabilities, word);
    }
    if (!has_rows()) return false;
    store(probabilities, block.place);
    if (softmax.fits(probabilities, block.hides)) return false;
    scale_scores(scores, scale);
    if (block.hides) hide(scores, item, block.number * kBlockTokens);
    float moved[kScoreRows];
    softmax.take_moving(scores, probabilities, moved);
    store(probabilities, block.place);
    return leave_factors(moved, block);
  }

  __device__ static void store(const Probabilities& probabilities, u32 place) {
    stmatrix_x4(place, probabilities[0], probabilities[1], probabilities[2], probabilities[3]);
    stmatrix_x4(place ^ 32, probabilities[4], probabilities[5], probabilities[6], probabilities[7]);
  }

  // Tells consumers that the probabilities are there.
  __device__ void publish(int stage, bool rescales) const {
    if (!has_rows()) return;
    if (fresh_lane() == 0) {
      reinterpret_cast<unsigned char*>(&shared.rescales[stage])[fresh_warp() % 4] =
          static_cast<unsigned char>(rescales);
    }
    fence_proxy_async();
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.probabilities_full[stage]);
  }

  // What the sums before a block are multiplied by: before a first block there are none. Says
  // whether it is other than 1.
  __device__ bool leave_factors(const float (&moved)[kScoreRows], const ScoredBlock& block) const {
    const bool moves = moved[0] != 1.0f || moved[1] != 1.0f;
    if (!__any_sync(~0u, moves) || block.number == item.first_block) return false;
    if (fresh_lane() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < kScoreRows; ++r) shared.rescale[block.stage][score_row(r)] = moved[r];
    }
    return true;
  }

  __device__ void take_item() {
    if (item.blocks == 0) {
      // When all warps have seen the query come; products would see to that.
      barrier_sync(kScorerBarrier, kScorerThreads);
      release_query();
      return;
    }
    take_blocks();
    release_query();
  }

  __device__ void release_query() const {
    if (fresh_thread() % 128 == 0) arrive_at(shared.query_empty);
  }

  // Leaves what the rows have come to, for the consumers.
  __device__ void leave_rows(int slot) const {
    if (!has_rows()) return;
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      const float sum = row_total(softmax.sum[r]);
      if (fresh_lane() % 4 != 0) continue;
      shared.row_reference[slot][score_row(r)] = softmax.reference[r];
      shared.row_sum[slot][score_row(r)] = sum;
      // A row adds up values by its probabilities.
      shared.row_scale[slot][score_row(r)] = half_scale(sum * kLargestValue);
    }
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.rows_full[slot]);
  }
};

__device__ inline void score_items(const Params& params, SharedMemory& shared) {
  if (fresh_thread() % 128 == 0) shared.score_scale = score_scale(params) * kLog2E;
  barrier_sync(kScorerBarrier, kScorerThreads);
  RingPosition<kStages> position;
  u32 count = 0;
  while (true) {
    wait_for(shared.item_full[item_slot(count)], item_parity(count));
    const Item& item = shared.items[item_slot(count)];
    if (item.request < 0) return;
    wait_for_query(shared, count);
    Scorer scorer(shared, item, position);
    scorer.take_item();
    count = item.count;  // not kept in a register meanwhile
    scorer.leave_rows(item_slot(count));
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.item_empty[item_slot(count)]);
    ++count;
  }
}
