// The scorer, four warps: scores and probabilities of all blocks of all items. Needs multiply.cuh,
// softmax.cuh, schedule.cuh, roles/mla_hopper/half_scale.cuh, ptx/stmatrix.cuh.

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

  // The scores of a block, and the sum of the probabilities of the one before, of which a word
  // follows each step: tensor cores take a step only when they have done most of the one before,
  // and a warp that waits for that does nothing else.
  __device__ void multiply(Scores& scores, const Probabilities& before, int stage) {
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
    wgmma_wait_group<0>();
    wgmma_keep(scores);
  }

  // All of it stands here once: until an SM has had instructions, fetching them takes it longer
  // than what they say.
  __device__ void take_blocks() {
    Scores scores;
    Probabilities probabilities = {};
    const int end = item.first_block + item.blocks;
#pragma unroll 1
    for (int block = item.first_block; block < end; ++block) {
      const int stage = next_stage();
      multiply(scores, probabilities, stage);
      const bool rescales = take_scores(scores, probabilities, stage, block);
      publish(probabilities, stage, rescales);
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

  // Turns scores into probabilities, those computed anew that are not what they should be. Says
  // whether a reference has moved, so that what was before is multiplied by factors.
  __device__ bool take_scores(Scores& scores, Probabilities& probabilities, int stage, int block) {
    const float scale = shared.score_scale;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      softmax.take_word(scores, scale, probabilities, word);
    }
    const bool hides = block >= item.visible_to_all / kBlockTokens;
    if (!has_rows() || softmax.fits(probabilities, hides)) return false;
    scale_scores(scores, scale);
    if (hides) hide(scores, item, block * kBlockTokens);
    float moved[kScoreRows];
    softmax.take_moving(scores, probabilities, moved);
    return leave_factors(moved, stage, block);
  }

  // Leaves probabilities for the consumers.
  __device__ void publish(const Probabilities& probabilities, int stage, bool rescales) const {
    if (!has_rows()) return;
    const int lane = fresh_lane();
    const int warp = fresh_warp() % 4;
    const u32 address = shared_address(shared.tokens[stage]) + kProbabilitiesOffset +
                        swizzled_offset<kRopeRowBytes>(warp * kRowsOfWarp + lane % 16, lane / 16);
    stmatrix_x4(address, probabilities[0], probabilities[1], probabilities[2], probabilities[3]);
    stmatrix_x4(address ^ 32, probabilities[4], probabilities[5], probabilities[6],
                probabilities[7]);
    if (lane == 0) {
      reinterpret_cast<unsigned char*>(&shared.rescales[stage])[warp] =
          static_cast<unsigned char>(rescales);
    }
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) arrive_at(shared.probabilities_full[stage]);
  }

  // What the sums before a block are multiplied by: before a first block there are none. Says
  // whether it is other than 1.
  __device__ bool leave_factors(const float (&moved)[kScoreRows], int stage, int block) const {
    const bool moves = moved[0] != 1.0f || moved[1] != 1.0f;
    if (!__any_sync(~0u, moves) || block == item.first_block) return false;
    if (fresh_lane() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < kScoreRows; ++r) shared.rescale[stage][score_row(r)] = moved[r];
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
