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
#include "mask_v.cuh"
#include "output_dims.cuh"
#include "pipeline/kv_stages.cuh"
#include "pipeline/work_pipeline.cuh"
#include "prepare_q.cuh"
#include "ptx/barrier.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_e4m3.cuh"
#include "row_sum.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "shared_memory.cuh"
#include "v_fragments.cuh"

// So many products may be under way.
constexpr int kValueBuffers = 2;

struct Adder {
  SharedMemory& shared;
  const Item& item;
  u32 first;  // its first block, of all
  Accumulators accumulators;
  RowSum row_sum;

  __device__ Adder(SharedMemory& shared, const Item& item, u32 taken)
      : shared(shared), item(item), first(taken) {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) accumulators[tile][i] = 0.0f;
    }
  }

  __device__ void rescale(int stage) {
    row_sum.rescale(shared, stage);
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const float2 factor =
          *reinterpret_cast<const float2*>(&shared.rescale[stage][own_row(group * 2)]);
      multiply_group(accumulators, group, factor);
    }
  }

  // Begins the products of half of the tokens and one tile of dims.
  __device__ void multiply(const Values& values, u32 probabilities, int half, int tile) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const u32 at = (half * kValueTokens + step * 16) * 2;
      wgmma_mma(Fp16{}, accumulators[tile], values + step * 4,
                descriptor(probabilities + descriptor_step(at)), 1);
    }
    wgmma_commit_group();
  }

  // While one product is under way, the values of the next come and are converted.
  __device__ void add_block(int stage) {
    const u32 probabilities = descriptor_low(shared_address(shared.probabilities[stage]), 16);
    const ValueRows rows(shared.tokens[stage]);
    StoredValues stored;
    Values values[kValueBuffers];
    ValueScales scales;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_keep(accumulators[tile]);
#pragma unroll
    for (int part = 0; part < kValueParts; ++part) {
      const int half = half_of_part(part);
      rows.load(stored, part);
      if (part % kDimTiles == 0) rows.load_scales(scales, half);
      if (part >= kValueBuffers) wgmma_wait_group<kValueBuffers - 1>();
      decode_values(values[part % kValueBuffers], stored, scales);
      multiply(values[part % kValueBuffers], probabilities, half, tile_of_part(part));
    }
    row_sum.add(shared, stage);
    wgmma_wait_group<0>();
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_keep(accumulators[tile]);
  }

  __device__ void take_block(u32& taken, u32 end) {
    const int stage = block_stage(taken);
    wait_for(shared.probabilities_full[stage], block_parity(taken));
    if (kTakesTurns && __any_sync(~0u, taken + 1 != end)) {
      wait_for(shared.scores_full[block_stage(taken + 1)], block_parity(taken + 1));
    }
    if (__any_sync(~0u, shared.rescales[stage] != 0)) rescale(stage);
    if constexpr (!kIsSparse) clear_hidden(stage, taken);  // of a list all rows see all
    add_block(stage);
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.tokens_empty[stage]);
    ++taken;
  }

  __device__ void clear_hidden(int stage, u32 taken) const {
    const int first_token = (item.first_block + static_cast<int>(taken - first)) * kBlockTokens;
    const int from = max(item.visible_to_all - first_token, 0);
    const int end = min(item.visible_to_any - first_token, kBlockTokens);
    if (from < end) clear_nonfinite(shared, item, shared.tokens[stage], from, end);
  }

  // Votes tell compilers that all lanes go on, so that stages and descriptors are theirs in common.
  __device__ void take_item(u32& taken) {
    const u32 end = taken + of_all(item.blocks);
#pragma unroll 1
    while (__any_sync(~0u, taken != end)) take_block(taken, end);
  }
};

__device__ inline void add_items(const Params& params, SharedMemory& shared) {
  finish_query<kLatentTiles / 2>(shared, shared.first_query_full, fresh_thread(), kConsumerThreads);
  u32 taken = 0;  // blocks
  u32 count = 0;
  while (true) {
    wait_for(shared.item_full[item_slot(count)], item_parity(count));
    const Item& item = shared.items[item_slot(count)];
    if (item.request < 0) return;
    Adder adder(shared, item, taken);
    adder.take_item(taken);
    wait_for(shared.rows_full[item_slot(item.count)], item_parity(item.count));
    adder.row_sum.leave(shared, item_slot(item.count));
    // All have left theirs; and what either consumer has found to be not finite counts for both.
    barrier_sync(kConsumerBarrier, kConsumerThreads);
    OwnRows rows{shared, item_slot(item.count)};
    store_item(params, item, shared, adder.accumulators, rows);
    count = item.count + 1;  // not kept in a register meanwhile
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.item_empty[item_slot(count - 1)]);
  }
}
