// The scorer, four warps: scores and probabilities of all blocks of all items. Needs multiply.cuh,
// softmax.cuh, schedule.cuh, ptx/stmatrix.cuh.

struct Scorer {
  SharedMemory& shared;
  const Item& item;
  u32 operands;  // of the beginning of shared memory
  float scale;  // of scores, to log2 units
  RingPosition<kStages>& position;
  Scores scores;
  Softmax softmax;

  __device__ Scorer(SharedMemory& shared, const Item& item, u32 operands, float scale,
                    RingPosition<kStages>& position)
      : shared(shared), item(item), operands(operands), scale(scale), position(position) {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      softmax.sum[r] = 0.0f;
      softmax.reference[r] = -kLargest;
    }
  }

  __device__ void begin_block() {
    wait_for(shared.tokens_full[position.stage], position.parity);
    begin_scores(operands,
                 operands + descriptor_step(kQueryBytes) +
                     position.stage * descriptor_step(kBlockBytes),
                 scores);
  }

  // Scores to probabilities, in shared memory for the consumers.
  __device__ void take_block(int block) {
    const int first_token = block * kBlockTokens;
    const bool hides = first_token + kBlockTokens > item.visible_to_all;
    Probabilities probabilities;
    float moved[kScoreRows] = {1.0f, 1.0f};
    if (!softmax.take(scores, scale, probabilities, hides)) {
      scale_scores(scores, scale);
      if (hides) hide(scores, item, first_token);
      softmax.take_moving(scores, probabilities, moved);
    }
    publish(probabilities, moved, block == item.first_block);
  }

  // Leaves probabilities, and what the sums before them are multiplied by: of a first block there
  // are none.
  __device__ void publish(const Probabilities& probabilities, const float (&moved)[kScoreRows],
                          bool is_first) const {
    const bool moves = moved[0] != 1.0f || moved[1] != 1.0f;
    const bool rescales = __any_sync(~0u, moves) && !is_first;
    const int lane = fresh_lane();
    const int warp = fresh_warp() % 4;
    const u32 address = shared_address(shared.tokens[position.stage]) + kProbabilitiesOffset +
                        swizzled_offset<kRopeRowBytes>(warp * kRowsOfWarp + lane % 16, lane / 16);
    stmatrix_x4(address, probabilities[0], probabilities[1], probabilities[2], probabilities[3]);
    stmatrix_x4(address ^ 32, probabilities[4], probabilities[5], probabilities[6],
                probabilities[7]);
    fence_proxy_async();
    if (lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < kScoreRows; ++r) shared.rescale[position.stage][score_row(r)] = moved[r];
    }
    if (lane == 0) {
      reinterpret_cast<unsigned char*>(&shared.rescales[position.stage])[warp] =
          static_cast<unsigned char>(rescales);
    }
    __syncwarp();
    if (lane == 0) arrive_at(shared.probabilities_full[position.stage]);
  }

  __device__ void take_item() {
    const int end = item.first_block + item.blocks;
    const bool has_rows = fresh_warp() % 4 < kWarpsWithRows;
    if (item.blocks == 0) {
      // When all warps have seen the query come; products would see to that.
      barrier_sync(kScorerBarrier, kScorerThreads);
      release_query();
      return;
    }
#pragma unroll 1
    for (int block = item.first_block; block < end; ++block) {
      begin_block();
      finish(scores);
      if (block + 1 == end) release_query();
      if (has_rows) take_block(block);
      position.advance();
    }
  }

  __device__ void release_query() const {
    if (fresh_thread() % 128 == 0) arrive_at(shared.query_empty);
  }

  // Leaves what the rows have come to, for the consumers.
  __device__ void leave_rows(int slot) const {
    if (fresh_warp() % 4 >= kWarpsWithRows) return;
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      const float sum = row_total(softmax.sum[r]);
      if (fresh_lane() % 4 != 0) continue;
      shared.row_reference[slot][score_row(r)] = softmax.reference[r];
      shared.row_sum[slot][score_row(r)] = sum;
    }
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.rows_full[slot]);
  }
};

__device__ inline void score_items(const Params& params, SharedMemory& shared) {
  const u32 operands = operand_at(shared_address(&shared));
  const float scale = score_scale(params) * kLog2E;
  RingPosition<kStages> position;
  u32 count = 0;
  while (true) {
    const int slot = item_slot(count);
    wait_for(shared.item_full[slot], item_parity(count));
    const Item& item = shared.items[slot];
    if (item.request < 0) return;
    wait_for_query(shared, count);
    Scorer scorer(shared, item, operands, scale, position);
    scorer.take_item();
    scorer.leave_rows(slot);
    ++count;
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.item_empty[slot]);
  }
}
