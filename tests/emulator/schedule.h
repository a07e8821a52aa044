// Runs the tile scheduler of each CTA of a grid, one CTA after the other. Follows the scheduler and
// `schedule_cta`, which calls it with all threads of a CTA.

static void schedule_ctas(const Params& params);
#define EMULATED schedule_ctas
#include "launch.h"

struct RangeRecord {
  int cta, begin, end, num_ranges, fixed_overhead_blocks;
};
struct WorkRecord {
  int cta, work_idx, seq_idx, first_query, kv_head, first_row, rows, first_kv_block, num_kv_blocks;
  int kv_end, unmasked_kv_end, num_splits, num_reducers, split_idx, first_split_cta;
};
static RangeRecord* next_range;
static WorkRecord* next_work_item;
static const WorkRecord* work_items_end;

static WorkRecord& new_work_item() {
  if (next_work_item == work_items_end)
    complain("more work items than their buffer has in cta", blockIdx.x);
  return *next_work_item++;
}

static void schedule_cta(const Params& params);

static void schedule_ctas(const Params& params) {
  for (unsigned cta = 0; cta < gridDim.x; ++cta) {
    blockIdx.x = cta;
    schedule_cta(params);
    __syncthreads();
  }
}

// Writes records from `ranges` and `work_items` on, no more than `max_work_items` of these, and
// their numbers into `counts`. Returns what is wrong, or an empty text.
CALLED_FROM_PYTHON const char* schedule(const void* params, int ctas, RangeRecord* ranges,
                                        WorkRecord* work_items, int max_work_items, int* counts) {
  keep_params(params);
  gridDim = {static_cast<unsigned>(ctas), 1, 1};
  block_threads = kScheduleThreads;
  next_range = ranges;
  next_work_item = work_items;
  work_items_end = work_items + max_work_items;
  complaint[0] = '\0';
  static Fiber threads[kScheduleThreads];
  static std::vector<char> stacks(kScheduleThreads * kStackBytes);
  for (int thread = 0; thread < kScheduleThreads; ++thread) {
    threads[thread] = {};
    threads[thread].stack = stacks.data() + thread * kStackBytes;
    threads[thread].has_waited = true;
  }
  alignas(1024) static unsigned char shared[kMaxSharedBytes];
  static Shown words[2 * kMaxThreads];
  fibers = threads;
  bytes = shared;
  shown = words;
  memset(barriers, 0, sizeof barriers);
  memset(meetings, 0, sizeof meetings);
  if (setjmp(launcher) == 0) {
    do {
      has_progress = false;
      for (int warp = 0; warp < kScheduleThreads / kLanes; ++warp) run_warp(warp);
    } while (has_progress);
    for (const Fiber& thread : threads) {
      if (!thread.is_done) complain("a thread waits for ever", &thread - threads);
    }
  }
  counts[0] = static_cast<int>(next_range - ranges);
  counts[1] = static_cast<int>(next_work_item - work_items);
  return complaint;
}
