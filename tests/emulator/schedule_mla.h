// The tile scheduler of the sm90 MLA kernels, as their prologue and their scheduler warp call it.

constexpr int kScheduleThreads = kThreads;
#include "schedule.h"

static void schedule_cta(const Params& params) {
  struct Shared {
    TileKeys keys;  // in the place of Q
    SchedulerStorage storage;
    WorkItem work;
  };
  Shared& smem = shared_memory<Shared>();
  const int cta = static_cast<int>(blockIdx.x);
  smem.storage.range.num_ranges = 0;
  __syncthreads();
  TileScheduler scheduler(params, smem.storage.range);
  WorkCoord coord = find_initial_work(params, smem.storage, scheduler);
  const ScheduleRange& range = smem.storage.range;
  if (threadIdx.x == 0 && range.num_ranges > 0) {
    *next_range++ = {cta, range.begin, range.end, range.num_ranges, range.fixed_overhead_blocks};
  }
  if (coord.seq_idx < 0 || warp_index() > 0) return;
  u32 work_idx = 0;
  while ((coord = scheduler.next_work(work_idx == 0)).seq_idx >= 0) {
    scheduler.fill_tokens(smem.work, coord, work_idx);
    if (lane_index() == 0) {
      if (work_idx == 0) {
        static_cast<WorkSplits&>(smem.work) = smem.storage.first_splits;
      } else {
        scheduler.fill_splits(smem.work);
      }
    }
    ++work_idx;
    __syncwarp();
    const WorkItem& work = smem.work;
    for (int row = lane_index(); row < work.rows; row += kWarpLanes) {
      const int before = row == 0 ? work.unmasked_kv_end : work.row_kv_end[row - 1];
      const int after = row == work.rows - 1 ? work.kv_end : work.row_kv_end[row + 1];
      if (work.row_kv_end[row] < before || work.row_kv_end[row] > after) {
        complain("a row attends to less than the row before it", row);
      }
    }
    if (lane_index() == 0) {
      new_work_item() = {cta,
                         static_cast<int>(work.work_idx),
                         work.seq_idx,
                         static_cast<int>(work.first_query),
                         0,
                         work.first_row,
                         work.rows,
                         work.first_kv_block,
                         work.num_kv_blocks,
                         work.kv_end,
                         work.unmasked_kv_end,
                         work.num_splits,
                         work.num_reducers,
                         work.split_idx,
                         kBatchInvariant ? work.first_slot : work.first_cta};
    }
    __syncwarp();
  }
}
