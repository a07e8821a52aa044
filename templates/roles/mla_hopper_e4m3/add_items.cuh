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

  // The product of one tile of dims.
  __device__ void multiply(const Values& values, u32 probabilities, BlockSum& sum) const {
    wgmma_keep(sum);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_mma(E4m3{}, sum, values[k],
                descriptor_64(probabilities + descriptor_step(k * kStepElements)), k > 0);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_keep(sum);
  }

  template <bool kHides>
  __device__ void add_block(u32 stage, int block) {
    const u32 probabilities = operand_at(stage + kProbabilitiesOffset);
    const ValueRows rows(stage);
    Values values;
    BlockSum sum;
    if constexpr (!kHides) rows.load(values, 0);
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      if constexpr (kHides) {
        rows.load(values, tile);
        clear_values(values, block);
      }
      multiply(values, probabilities, sum);
      if (!kHides && tile + 1 < kDimTiles) rows.load(values, tile + 1);
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) accumulators[tile][i] += sum[i];
      wgmma_keep(accumulators[tile]);  // added here, not when all sums have come
    }
  }

  __device__ void clear_values(Values& values, int block) {
    const int first_token = block * kBlockTokens;
    const int first = item.visible_to_all - first_token;
    if (clear_nan(values, first, item.visible_to_any - first_token))
      nonfinite_flag(shared, item) = 1;
  }

  template <bool kHides>
  __device__ void take_block(u32& taken, int block) {
    const int stage = block_stage(taken);
    wait_for(shared.probabilities_full[stage], block_parity(taken));
    if (__any_sync(~0u, shared.rescales[stage] != 0)) rescale(stage);
    add_block<kHides>(shared_address(shared.tokens[0]) + stage * kBlockBytes, block);
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.tokens_empty[block_stage(taken)]);
    ++taken;
  }

  // Blocks that all rows see whole come first.
  __device__ void take_item(u32& taken) {
    int block = item.first_block;
#pragma unroll 1
    for (; block < min(item.visible_to_all / kBlockTokens, item.first_block + item.blocks); ++block)
      take_block<false>(taken, block);
#pragma unroll 1
    for (; block < item.first_block + item.blocks; ++block) take_block<true>(taken, block);
  }
};

__device__ inline void add_items(const Params& params, SharedMemory& shared) {
  finish_query(shared.first_query_full);
  u32 taken = 0;  // blocks
  u32 count = 0;
  while (true) {
    wait_for(shared.item_full[item_slot(count)], item_parity(count));
    const Item& item = shared.items[item_slot(count)];
    if (item.request < 0) return;
    Adder adder(shared, item);
    adder.take_item(taken);
    wait_for(shared.rows_full[item_slot(item.count)], item_parity(item.count));
    // What either consumer has found to be not finite counts for both.
    barrier_sync(kConsumerBarrier, kConsumerThreads);
    OwnRows rows{shared, item_slot(item.count)};
    store_item(params, item, shared, adder.accumulators, rows);
    count = item.count + 1;  // not kept in a register meanwhile
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.item_empty[item_slot(count - 1)]);
  }
}
