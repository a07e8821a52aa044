// The tile scheduler of gqa_sm90, as its scheduler warp calls it.

constexpr int kScheduleThreads = kWarpLanes;
#include "schedule.h"

static void schedule_cta(const Params& params) {
  const int cta = static_cast<int>(blockIdx.x);
  ScheduleRange range;
  WorkState state;
  const int cta_group = cta / params.cta_group_size;
  const int rank_in_group = cta - cta_group * params.cta_group_size;
  bool has_more = find_range(params, cta_group, lane_seq_lens(params), range, state);
  if (has_more && lane_index() == 0) {
    *next_range++ = {cta, range.begin, range.end, range.num_ranges, 0};
  }
  for (int work_idx = 0; has_more; ++work_idx) {
    const WorkItem work = work_at(params, range, rank_in_group, state);
    if (lane_index() == 0) {
      new_work_item() = {cta,
                         work_idx,
                         work.seq_idx,
                         work.first_query,
                         work.kv_head,
                         work.first_row,
                         work.rows,
                         work.first_kv_block,
                         work.num_kv_blocks,
                         work.kv_end,
                         work.unmasked_kv_end,
                         work.num_splits,
                         work.num_splits,
                         work.split_idx,
                         work.first_split};
    }
    has_more = state.advance(params, range);
  }
}
