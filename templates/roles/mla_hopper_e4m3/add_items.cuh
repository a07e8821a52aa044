// The consumers: add the values of all blocks of all items, by their probabilities. Needs
// values.cuh, multiply.cuh, store_output.cuh, roles/mla_hopper/store_item.cuh.

// The tensor cores keep sums with 13 bits, too few for a long sequence: each block has a sum of its
// own, which is added in fp32.
using BlockSum = float[kRows / 2];

struct Adder {
  SharedMemory& shared;
  const Item& item;
  Accumulators accumulators;

  __device__ Adder(SharedMemory& shared, const Item& item) : shared(shared), item(item) {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) accumulators[tile][i] = 0.0f;
    }
  }

  __device__ void rescale(int stage) {
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const float2 factor =
          *reinterpret_cast<const float2*>(&shared.rescale[stage][own_row(group * 2)]);
#pragma unroll
      for (int tile = 0; tile < kDimTiles; ++tile) {
        float* of = accumulators[tile] + group * 4;
        of[0] *= factor.x;
        of[1] *= factor.y;
        of[2] *= factor.x;
        of[3] *= factor.y;
      }
    }
  }

  template <bool kHides>
  __device__ void load_values(Values& values, const ValueRows& rows, int tile, int first_token) {
    rows.load(values, tile);
    if constexpr (kHides) {
      const int first = item.visible_to_all - first_token;
      if (clear_nan(values, first, item.visible_to_any - first_token)) shared.has_nonfinite = 1;
    }
  }

  template <bool kHides>
  __device__ void add_block(u32 stage, int first_token) {
    const u32 probabilities = operand_at(stage + kProbabilitiesOffset);
    const ValueRows rows(stage);
    Values values;
    BlockSum sum;
    load_values<kHides>(values, rows, 0, first_token);
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      wgmma_keep(sum);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        wgmma_mma(E4m3{}, sum, values[k],
                  descriptor_64(probabilities + descriptor_step(k * kStepElements)),
                  k > 0);
      }
      wgmma_commit_group();
      wgmma_wait_group<0>();
      wgmma_keep(sum);
      if (tile + 1 < kDimTiles) load_values<kHides>(values, rows, tile + 1, first_token);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) accumulators[tile][i] += sum[i];
      wgmma_keep(accumulators[tile]);  // added here, not when all sums have come
    }
  }

  template <bool kHides>
  __device__ void take_block(RingPosition<kStages>& position, int block) {
    wait_for(shared.probabilities_full[position.stage], position.parity);
    if (__any_sync(~0u, shared.rescales[position.stage] != 0)) rescale(position.stage);
    add_block<kHides>(shared_address(shared.tokens[0]) + position.stage * kBlockBytes,
                      block * kBlockTokens);
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.tokens_empty[position.stage]);
    position.advance();
  }

  // Blocks that all rows see whole come first.
  __device__ void take_item(RingPosition<kStages>& position) {
    int blocks = min(item.visible_to_all / kBlockTokens - item.first_block, item.blocks);
#pragma unroll 1
    for (; blocks > 0; --blocks) take_block<false>(position, 0);
    const int end = item.first_block + item.blocks;
    int block = max(min(item.visible_to_all / kBlockTokens, end), item.first_block);
#pragma unroll 1
    for (; block < end; ++block) take_block<true>(position, block);
  }
};

__device__ inline void take_rows(const SharedMemory& shared, int slot, u32 parity,
                                 RowState (&rows)[kOwnRows]) {
  wait_for(shared.rows_full[slot], parity);
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    rows[r] = {shared.row_reference[slot][own_row(r)], shared.row_sum[slot][own_row(r)]};
  }
}

__device__ inline void add_items(const Params& params, SharedMemory& shared) {
  finish_query(shared.first_query_full);
  RingPosition<kStages> position;
  u32 count = 0;
  while (true) {
    const int slot = item_slot(count);
    wait_for(shared.item_full[slot], item_parity(count));
    const Item& item = shared.items[slot];
    if (item.request < 0) return;
    Adder adder(shared, item);
    adder.take_item(position);
    RowState rows[kOwnRows];
    take_rows(shared, slot, item_parity(count), rows);
    // What either consumer has found to be not finite counts for both.
    barrier_sync(kConsumerBarrier, kConsumerThreads);
    store_item(params, item, shared, adder.accumulators, rows);
    count = item.count + 1;  // not kept in a register meanwhile
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.item_empty[slot]);
  }
}
