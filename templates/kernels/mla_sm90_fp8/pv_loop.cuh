// The consumers: add the values of all blocks of all items, by their probabilities.

#pragma once

#include "accumulators.cuh"
#include "combine/epilogue.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/reload_tid.cuh"
#include "common/types.cuh"
#include "common/warp_uniform.cuh"
#include "common/wgmma_descriptor.cuh"
#include "config.cuh"
#include "mma_operands.cuh"
#include "nonfinite_flag.cuh"
#include "output_dims.cuh"
#include "pipeline/kv_stages.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/barrier.cuh"
#include "ptx/fence.cuh"
#include "ptx/mov.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "v_fragments.cuh"

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

  // By the factors that warps of the scorer have left; others have left none.
  __device__ void rescale(int stage, u32 rescales) {
    const float* factors = &shared.rescale[stage][own_row(0)];
#pragma unroll
    for (int warp = 0; warp < kWarpsWithRows; ++warp) {
      if (!__any_sync(~0u, (rescales >> warp * 8 & 0xff) != 0)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int group = warp * 2 + half;
        multiply_group(accumulators, group,
                       make_float2(factors[group * 8], factors[group * 8 + 1]));
      }
    }
  }

  // Begins the product of one tile of dims.
  __device__ static void begin_tile(Values& values, u32 probabilities, BlockSum& sum) {
    wgmma_keep(sum);
#pragma unroll
    for (int k = 0; k < kSteps; ++k) wgmma_keep(values[k]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      wgmma_mma(E4m3{}, sum, values[k],
                descriptor_64(probabilities + descriptor_step(k * kStepElements)), k > 0);
    }
    wgmma_commit_group();
  }

  __device__ void add_sum(BlockSum& sum, int tile) {
    wgmma_wait_group<0>();
    wgmma_keep(sum);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) accumulators[tile][i] += sum[i];
    wgmma_keep(accumulators[tile]);  // added here, not when all sums have come
  }

  // `values` are those of tile 0. What was before the block is multiplied by factors while its
  // first product is under way, for that is a sum of its own.
  __device__ void add_block(const ValueRows& rows, Values& values, u32 probabilities, int stage,
                            u32 rescales) {
    BlockSum sum;
    begin_tile(values, probabilities, sum);
    if (__any_sync(~0u, rescales != 0)) rescale(stage, rescales);
#pragma unroll
    for (int tile = 1; tile < kDimTiles; ++tile) {
      add_sum(sum, tile - 1);
      rows.load(values, tile);
      begin_tile(values, probabilities, sum);
    }
    add_sum(sum, kDimTiles - 1);
  }

  // Of the block that is the first of the `left` that are left of the item.
  __device__ void clear_values(const ValueRows& rows, int left) {
    const int first_token = (item.first_block + item.blocks - left) * kBlockTokens;
    const int first = item.visible_to_all - first_token;
    if (rows.clear_nan(shared, first, item.visible_to_any - first_token)) {
      nonfinite_flag(shared, item) = 1;
    }
    fence_proxy_async();  // tokens are copied to the same place
    __syncwarp();
  }

  // From block number `hiding` on, some row does not see all tokens.
  __device__ void take_block(u32& taken, u32 hiding, u32 end) {
    const int stage = block_stage(taken);
    const u32 parity = block_parity(taken);
    wait_for(shared.tokens_full[stage], parity);
    const u32 address = shared_address(shared.tokens[0]) + stage * kBlockBytes;
    const ValueRows rows(address);
    Values values;
    // The first values are in registers when probabilities come. Once they have, nobody needs the
    // tokens as they are.
    rows.load(values, 0);
    wait_for(shared.probabilities_full[stage], parity);
    const u32 rescales = shared.rescales[stage];
    if (__any_sync(~0u, taken >= hiding)) {
      clear_values(rows, end - taken);
      rows.load(values, 0);
    }
    add_block(rows, values, operand_at(address + kProbabilitiesOffset), stage, rescales);
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.tokens_empty[block_stage(taken)]);
    ++taken;
  }

  // Blocks that all rows see whole come first. The loop ends by a vote, and blocks are counted by
  // `taken` alone: what depends on it is then in registers of the whole warp.
  __device__ void take_item(u32& taken) {
    const int whole = min(item.visible_to_all / kBlockTokens - item.first_block, item.blocks);
    const u32 hiding = taken + of_all(max(whole, 0));
    const u32 end = taken + of_all(item.blocks);
#pragma unroll 1
    while (__any_sync(~0u, taken != end)) take_block(taken, hiding, end);
  }
};

__device__ inline void add_items(const Params& params, SharedMemory& shared) {
  finish_query(shared.first_query_full);
  u32 taken = 0;  // blocks
  u32 count = 0;
  while (true) {
    wait_for(shared.item_full[item_slot(count)], item_parity(count));
    if (shared.items[item_slot(count)].request < 0) return;
    mov_b32(count);  // else the address of the request is kept meanwhile
    const Item& item = shared.items[item_slot(count)];
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
