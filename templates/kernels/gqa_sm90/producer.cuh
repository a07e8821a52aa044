// Producer warps: load the K and V tiles of all work items.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "load_kv.cuh"
#include "ptx/load.cuh"
#include "shared_memory.cuh"
#include "work_item.cuh"
#include "work_pipeline.cuh"

// Loads the KV blocks of all work items.
__device__ inline void producer_loop(const Params& params, SharedMemoryPlan& smem) {
  const WorkPipeline& work_pipeline = smem.work_pipeline;
  WorkItem work;
  KvSource source;
  do {
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
    work = work_pipeline.at(0, 0);
    pdl_wait();
    source = KvSource(params, work);
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);
  } while (!smem.is_first_work_valid);
  pdl_launch_dependents();
  PipelineState<kStages> kv_pipe;
#pragma unroll 1
  for (u32 work_idx = 0; !work.is_none();) {
    load_work(params, work, source, smem, kv_pipe);
    work_pipeline.release(work_idx);
    work_pipeline.wait_full(++work_idx);
    work = work_pipeline.at(work_idx, 0);
    source = KvSource(params, work);
  }
}

// Prefetches the block tables of all sequences into L2. The consumers call it: one cache line per
// thread, so it covers at most as many lines as there are consumer threads in the grid.
__device__ inline void prefetch_block_table(const Params& params, int thread) {
  if constexpr (kIsSparse) return;  // it reads little of them
  constexpr int kIdsPerCacheLine = 32;
  const u32 lines_per_seq = static_cast<u32>(ceil_div(params.max_pages, kIdsPerCacheLine));
  const u32 cache_line = blockIdx.x * kConsumerThreads + thread;
  if (lines_per_seq == 0) return;
  const u32 seq_idx = cache_line / lines_per_seq;
  if (seq_idx >= params.num_seqs) return;
  prefetch_l2(params.block_tables + seq_idx * static_cast<i64>(params.block_tables_stride) +
              (cache_line - seq_idx * lines_per_seq) * kIdsPerCacheLine);
}
