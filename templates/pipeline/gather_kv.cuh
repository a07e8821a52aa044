// KV producer by cp.async: four warps gather the stored tokens of each KV block, by page ids or
// top-k indices, and load Q; one of them is also the scheduler warp, which publishes work items.

#pragma once

#include "common/barriers.cuh"
#include "common/block_table.cuh"
#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/pools.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "pipeline/load_q.cuh"
#include "pipeline/work_pipeline.cuh"
#include "ptx/cp_async.cuh"
#include "scheduler/schedule_range.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "seq_info.cuh"
#include "shared_memory.cuh"

// Tokens of a KV block that each producer warp loads.
constexpr int kTokensPerProducerWarp = kBlockN / kProducerWarps;
static_assert(kTokensPerProducerWarp * 2 == kWarpLanes, "two lanes share a token");
static_assert(kQueryWriters == kProducerThreads || kQueryWriters == kProducerWarps,
              "each producer thread or warp arrives when its part of Q is complete");
static_assert(sizeof(InvalidMask::bits) * 8 == kBlockN, "a bit per token");

// Number of this warp among the producer warps.
__device__ inline int producer_warp() { return reload_warp() % kProducerWarps; }

// This lane's token of a KV block. Both halves of a warp have the same tokens.
__device__ inline int token_of_lane() {
  return producer_warp() * kTokensPerProducerWarp + reload_lane() % kTokensPerProducerWarp;
}

// Index of this lane's token of a KV block among those of its sequence.
__device__ inline int token_of(int kv_block) { return kv_block * kBlockN + token_of_lane(); }

// End of the tokens of a work item.
__device__ inline int end_of_tokens(const WorkCoord& coord) {
  return min((coord.first_kv_block + coord.num_kv_blocks) * kBlockN, coord.kv_end);
}

// With two pools, how many of the top-k indices of a sequence are into the first. Templates: only
// kernels over two pools have their parameters.
template <typename KernelParams, bool kPooled>
struct ListSplitOf {
  __device__ ListSplitOf(const KernelParams&, const WorkCoord&) {}
};
template <typename KernelParams>
struct ListSplitOf<KernelParams, true> {
  int num_indices;

  __device__ ListSplitOf(const KernelParams& params, const WorkCoord& coord)
      : num_indices(pooled_indices(params, coord.seq_idx).num_indices) {}
};
using ListSplit = ListSplitOf<Params, kHasTwoPools>;

// Page ids of a work item from the block table, or its top-k indices.
template <typename KernelParams, bool kPooled>
struct TokenIdsOf {
  const int* ids;
  int end;

  __device__ TokenIdsOf(const KernelParams& params, const WorkCoord& coord, const ListSplit&)
      : ids(params.block_tables + block_table_row(params, coord.seq_idx).start),
        end(end_of_tokens(coord)) {}

  // Page id or top-k index of this lane's token; -1 past the end.
  __device__ int read(int kv_block) const {
    const int token = token_of(kv_block);
    return token < end ? ids[kIsSparse ? token : token / kPageSize] : -1;
  }
};

// Its top-k indices into two pools.
template <typename KernelParams>
struct TokenIdsOf<KernelParams, true> {
  const KernelParams& params;
  int query;
  int num_indices;  // into the first pool
  int end;

  __device__ TokenIdsOf(const KernelParams& params, const WorkCoord& coord,
                        const ListSplitOf<KernelParams, true>& split)
      : params(params),
        query(coord.seq_idx),
        num_indices(split.num_indices),
        end(end_of_tokens(coord)) {}

  // Needs the length of the first list alone: the first KV load of a work item waits for this one.
  __device__ int read(int kv_block) const {
    const int token = token_of(kv_block);
    const bool is_extra = token >= num_indices;
    const int* ids = is_extra ? params.extra_indices - num_indices : params.block_tables;
    const i64 stride = is_extra ? params.extra_indices_stride : params.block_tables_stride;
    return token < end ? ids[query * stride + token] : -1;
  }
};

using TokenIds = TokenIdsOf<Params, kHasTwoPools>;

// Page and slot of this lane's token of a KV block in the cache.
template <typename KernelParams, bool kPooled>
struct TokenAddressOf {
  int page;  // 0 for an invalid token
  int slot;
  u32 invalid_bits;  // a bit per token of the warp, set if it is invalid

  __device__ TokenAddressOf(const KernelParams& params, const ListSplit&, int id, int kv_block) {
    page = kIsSparse && id >= 0 ? id / kPageSize : id;
    slot = (kIsSparse ? id : token_of(kv_block)) % kPageSize;
    const bool exists = is_valid_page(page, params.num_pages);
    if (!exists) page = slot = 0;
    invalid_bits = __ballot_sync(~0u, !exists);
  }
};

// Rows of this lane's token of a KV block in the pool of its list.
template <typename KernelParams>
struct TokenAddressOf<KernelParams, true> {
  PooledToken rows;
  u32 invalid_bits;

  __device__ TokenAddressOf(const KernelParams& params,
                            const ListSplitOf<KernelParams, true>& split, int id, int kv_block)
      : rows(pooled_token(params, id, token_of(kv_block) >= split.num_indices)),
        invalid_bits(__ballot_sync(~0u, !rows.exists)) {}
};

using TokenAddress = TokenAddressOf<Params, kHasTwoPools>;

// The row pointer that another lane holds.
__device__ inline const unsigned char* row_of_lane(const unsigned char* row_ptr, int lane) {
  return reinterpret_cast<const unsigned char*>(
      __shfl_sync(~0u, reinterpret_cast<u64>(row_ptr), lane));
}

// Copies kCount chunks of every token of the warp, kLanes of them at a time, to
// `address_of(token, chunk)`, in tiles that have kTileChunks of a row. `row_ptr` is the source of
// this lane's token. Invalid tokens are zero-filled.
template <int kLanes, int kCount, int kTileChunks = kTileRowBytes / kChunkBytes, typename AddressOf>
__device__ inline void copy_chunks(const unsigned char* row_ptr, u32 invalid_bits, u64 cache_hint,
                                   AddressOf address_of) {
  constexpr int kTokens = kWarpLanes / kLanes;  // per iteration
  const int lane = reload_lane();
  const int chunk = lane % kLanes;
#pragma unroll 2  // I-cache misses cost more than the instructions of the loop
  for (int first = 0; first < kTokensPerProducerWarp; first += kTokens) {
    const int token = first + lane / kLanes;
    const unsigned char* source = row_of_lane(row_ptr, token) + chunk * kChunkBytes;
    const u32 bytes = invalid_bits >> token & 1 ? 0 : kChunkBytes;
    const u32 target = address_of(token, chunk);
#pragma unroll
    for (int chunk_offset = 0; chunk_offset < kCount; chunk_offset += kLanes) {
      // A multiple of a row's chunks: the next ones lie whole tiles further.
      cp_async_cg_16(target + chunk_offset / kTileChunks * (kBlockN * kTileChunks * kChunkBytes),
                     source + chunk_offset * kChunkBytes, bytes, cache_hint);
    }
  }
}

// Arrives at `full` for the copies that this warp has issued, when they complete, and for its plain
// stores.
__device__ inline void arrive_after_copies(const Barrier& full) {
  cp_async_mbarrier_arrive_noinc(shared_address(&full));
  __syncwarp();
  if (reload_lane() == 0) arrive(full);
}

// The tokens of a work item, a KV block at a time.
struct TokenStream : ListSplit {
  const Params& params;
  const WorkCoord& coord;  // in shared memory
  int next_id;  // page id or top-k index of this lane's token in the KV block after the next
  TokenAddress token_address;  // of this lane's token in the next KV block

  __device__ TokenStream(const Params& params, const WorkCoord& coord)
      : ListSplit(params, coord),
        params(params),
        coord(coord),
        next_id(TokenIds(params, coord, *this).read(coord.first_kv_block + 1)),
        token_address(params, *this, TokenIds(params, coord, *this).read(coord.first_kv_block),
                      coord.first_kv_block) {}

  // Called when the addresses of the CTA's first KV block are known.
  __device__ static void begin_loads() {}

  // Called before the CTA's second KV block.
  __device__ static void wait_for_first(const SharedMemoryPlan&) {}

  // Resolves the addresses of the KV block after `kv_block`, and requests the ids of the one after.
  __device__ void advance(int kv_block) {
    token_address = TokenAddress(params, *this, next_id, kv_block + 1);
    next_id = TokenIds(params, coord, *this).read(kv_block + 2);
  }

  // Loads Q of a work item, which is complete when the copies of all producer threads are.
  __device__ static void load_query(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread) {
    load_q_async(params, coord, smem, thread, kProducerThreads);
    cp_async_mbarrier_arrive_noinc(shared_address(&smem.query_full));
  }

  // Stores which tokens of this warp, number `warp` of the producer warps, are invalid.
  __device__ void store_invalid_bits(InvalidMask& mask, int warp) const {
    if (kIsSparse && reload_lane() == 0) {
      mask.bits[warp] = static_cast<u16>(token_address.invalid_bits);
    }
  }
};

// Called by one thread.
__device__ inline void init_work_barriers(const SharedMemoryPlan& smem) {
  init_work_barriers(smem, 1, kWorkReaders, kQueryWriters);
}

__device__ inline bool is_scheduler_warp() { return reload_warp() == kPvWarps; }

// Publishes work item `work_idx` to all warps.
__device__ inline void publish_work(const Params& params, int rank_in_group, u32 work_idx,
                                    SharedMemoryPlan& smem) {
  wait(smem.work_empty[work_slot(work_idx)], work_phase(work_idx) ^ 1);
  produce_work(params, rank_in_group, work_idx, smem);
  if (reload_lane() == 0) arrive(smem.work_full[work_slot(work_idx)]);
}

// Publishes the first work item, whose splits are in the schedule of the CTA. Called by a warp that
// waits for it.
__device__ inline void publish_first_work(const TileScheduler& scheduler,
                                          const WorkCoord& first_work, SharedMemoryPlan& smem) {
  WorkItem& work = smem.work_items[0];
  scheduler.fill_tokens(work, first_work, 0);
  if (reload_lane() == 0) {
    static_cast<WorkSplits&>(work) = smem.scheduler_storage.first_splits;
  }
  __syncwarp();
  if (reload_lane() == 0) arrive(smem.work_full[0]);
}

// Loads Q of a work item. The PV warps have loaded the first one.
template <typename KvBlockStream>
__device__ inline void load_next_q(const Params& params, const WorkItem& work,
                                   SharedMemoryPlan& smem) {
  if (work.work_idx == 0) return;
  wait(smem.query_empty, query_phase(work.work_idx) ^ 1);
  KvBlockStream::load_query(params, work, smem, reload_tid() % kProducerThreads);
}

// `num_published` counts the work items that the scheduler warp has published. The kernel's
// KvBlockStream is a TokenStream that loads Q, and KV blocks, one or two at a time.
template <typename KvBlockStream>
__device__ inline void load_kv_blocks(const Params& params, const WorkItem& work,
                                      SharedMemoryPlan& smem, PipelineState<kStages>& pipe,
                                      u32& num_published) {
  KvBlockStream stream(params, work);
  if (work.work_idx == 0) KvBlockStream::begin_loads();
  // KV blocks that are loaded while Q of the preceding work item is still in use.
  const int num_before_q = min(work.num_kv_blocks, KvBlockStream::kBlocksBeforeQ);
#pragma unroll 1
  for (int num_loaded = 0;;) {
    if (num_loaded == num_before_q) load_next_q<KvBlockStream>(params, work, smem);
    // Publishes the first work item once its first KV block is in flight, and the next one once all
    // KV blocks of this one are: loads go first.
    const u32 num_due = work.work_idx + (num_loaded == work.num_kv_blocks ? 2 : min(num_loaded, 1));
#pragma unroll 1
    while (is_scheduler_warp() && num_published < num_due)
      publish_work(params, cta_rank_in_group(params), num_published++, smem);
    if (num_loaded == work.num_kv_blocks) return;
    if (work.work_idx == 0 && num_loaded == 1) KvBlockStream::wait_for_first(smem);
    num_loaded += stream.load_kv_blocks(smem, pipe, work.first_kv_block + num_loaded);
  }
}

// `scheduler` is at the first work item, which another warp may publish.
template <typename KvBlockStream, bool kPublishesFirst = true>
__device__ inline void gather_loop(const Params& params, const TileScheduler& scheduler,
                                   const WorkCoord& first_work, SharedMemoryPlan& smem) {
  // Coordinates and index of a work item are reloaded from shared memory, so that they hold no
  // registers. Every warp writes the same values here.
  if (reload_lane() == 0) {
    static_cast<WorkCoord&>(smem.work_items[0]) = first_work;
    smem.work_items[0].work_idx = 0;
  }
  __syncwarp();
  if (is_scheduler_warp()) save_scheduler_state(scheduler, smem);
  PipelineState<kStages> pipe;
  u32 work_idx = 0;
  u32 num_published = kPublishesFirst ? 0 : 1;
#pragma unroll 1
  while (true) {
    load_kv_blocks<KvBlockStream>(params, smem.work_items[work_slot(work_idx)], smem, pipe,
                                  num_published);
    work_idx = smem.work_items[work_slot(work_idx)].work_idx;
    if (next_work_coord(smem, work_idx).seq_idx < 0) return;
  }
}
