// Fixed splits of batch-invariant kernels: where their partials lie, and how they are combined.

#pragma once

#include "common/params.cuh"
#include "config.cuh"
#include "partials.cuh"
#include "ptx/load.cuh"
#include "scheduler/schedule_range.cuh"
#include "softmax/row_state.cuh"
#include "work_item.cuh"

// The splits of a work tile are the leaves of a binary tree: node `first` of a level stands for
// 2^level splits from `first` on, a multiple of that, and is the sum of two nodes of the level
// below. Its shape follows from the number of splits, and every sum takes the same operations, so
// the bits of a result do not depend on the CTAs that computed it. A CTA adds up the nodes in its
// range as it proceeds, and the last one to arrive at the semaphore of the tile those of several
// ranges. No CTA waits for another.

// Sum of two nodes. The rounding of every operation is spelled out: the compiler must not fuse
// those of one caller otherwise than those of another.
__device__ inline RowPart sum_of(const RowPart& left, const RowPart& right) {
  RowPart sum;
  sum.state.row_max = fmaxf(left.state.row_max, right.state.row_max);
  const float left_weight = weight_of(left.state, sum.state.row_max);
  const float right_weight = weight_of(right.state, sum.state.row_max);
  const auto add = [&](float of_left, float of_right) {
    return __fmaf_rn(of_right, right_weight, __fmul_rn(of_left, left_weight));
  };
  sum.state.row_sum = add(left.state.row_sum, right.state.row_sum);
  sum.out.x = add(left.out.x, right.out.x);
  sum.out.y = add(left.out.y, right.out.y);
  sum.out.z = add(left.out.z, right.out.z);
  sum.out.w = add(left.out.w, right.out.w);
  return sum;
}

// Whether the work tile begins in the range of this CTA.
__device__ inline bool begins_here(const WorkItem& work, const ScheduleRange& range) {
  return work.first_split >= range.begin;
}

// Whether a work item is the last of this CTA of a work tile that other CTAs have splits of.
__device__ inline bool ends_part(const WorkItem& work, const ScheduleRange& range) {
  const int end = work.first_split + work.num_splits;
  const bool is_shared = !begins_here(work, range) || end > range.end;
  return is_shared && work.first_split + work.split_idx + 1 == min(end, range.end);
}

// Parts of a work tile, each in the range of another CTA.
struct TileParts {
  int num_parts;
  int first_range;
  int first_cta;

  __device__ TileParts(const Params& params, const WorkItem& work, const ScheduleRange& range) {
    const Splits parts = splits_of(work.first_split, work.num_splits, range);
    const int rank_in_group = static_cast<int>(blockIdx.x) - range.index * params.cta_group_size;
    num_parts = parts.num_splits;
    first_range = parts.first_range;
    first_cta = first_range * params.cta_group_size + rank_in_group;
  }
};

// Workspace slot of a node. Of a tile that begins in the range of a CTA, it has at most one node of
// each level that waits for the next one; of a tile that began before, also one that the CTAs
// before have the sibling of.
__device__ inline int node_slot(const WorkItem& work, int cta, bool begins, int first, int level) {
  const int slot = begins ? level : kTreeLevels + level * 2 + (first >> level & 1);
  return (cta * 3 * kTreeLevels + slot) * kKvHeadsPerCta + work.kv_head % kKvHeadsPerCta;
}

__device__ inline RowPart load_partial(const Params& params, int slot, int row, int dim) {
  const float2 state = ld_global_cg_v2_f32(partial_states(params, slot) + row);
  RowPart part;
  part.state = {state.x, state.y};
  part.out = ld_global_cg_v4_f32(partial_out_ptr(params, slot, row, dim));
  return part;
}

// Stores four adjacent dims of a row of a tile with several splits: final after all of them, or
// else of the largest node that ends with this split. No thread reads a node that another one
// writes: it writes a level above those that it reads.
__device__ inline void store_fixed_split(const Params& params, const WorkItem& work,
                                         const ScheduleRange& range, int row, int dim,
                                         RowPart part) {
  const int cta = static_cast<int>(blockIdx.x);
  const bool begins = begins_here(work, range);
  const int begin = begins ? 0 : range.begin - work.first_split;
  const bool is_whole = begins && work.split_idx == work.num_splits - 1;
  int first = work.split_idx;
  int level = 0;
#pragma unroll 1
  for (; level < kTreeLevels; ++level) {
    const int sibling = first - (1 << level);
    if ((first >> level & 1) == 0) {
      if (is_whole) continue;
      break;
    }
    if (sibling < begin) break;
    const int slot = node_slot(work, cta, begins, sibling, level);
    part = sum_of(load_partial(params, slot, row, dim), part);
    first = sibling;
  }
  if (is_whole) return store_finished(params, work, row, dim, part);
  const int slot = node_slot(work, cta, begins, first, level);
  *partial_out_ptr(params, slot, row, dim) = part.out;
  if (dim == 0) partial_states(params, slot)[row] = part.state;
}

// The nodes of all CTAs of a work tile, in ascending order.
struct NodeWalk {
  const WorkItem& work;
  const ScheduleRange& range;
  int cta_group_size;
  TileParts parts;
  int part = 0;
  int end;  // of the splits of the part
  int first = 0;  // of the current node
  int level;

  __device__ NodeWalk(const Params& params, const WorkItem& work, const ScheduleRange& range)
      : work(work),
        range(range),
        cta_group_size(params.cta_group_size),
        parts(params, work, range),
        end(end_of(0)) {
    find_level();
  }

  __device__ int end_of(int part) const {
    const ScheduleRange of_part = range_at(parts.first_range + part, range.num_ranges,
                                           range.total_blocks, kFixedOverheadBlocks);
    return min(of_part.end - work.first_split, work.num_splits);
  }

  // The largest level of a node that begins at `first` and lies in the part.
  __device__ void find_level() {
    level = 0;
#pragma unroll 1
    while ((first >> level & 1) == 0 && first + (2 << level) <= end) ++level;
  }

  __device__ int slot() const {
    return node_slot(work, parts.first_cta + part * cta_group_size, part == 0, first, level);
  }

  __device__ bool is_last() const { return first + (1 << level) >= work.num_splits; }

  __device__ void advance() {
    first += 1 << level;
    if (first == end) end = end_of(++part);
    find_level();
  }
};

// Adds up the nodes of all CTAs of a work tile.
constexpr int kNodesPerStep = 4;  // loads in flight

__device__ inline void combine_fixed_row(const Params& params, const WorkItem& work,
                                         const ScheduleRange& range, int row, int dim) {
  // Nodes whose right siblings follow.
  RowState waiting_states[kTreeLevels];
  float4 waiting_outs[kTreeLevels];
  RowPart sum;
  NodeWalk walk(params, work, range);
  bool is_last = false;
#pragma unroll 1
  while (!is_last) {
    RowPart nodes[kNodesPerStep];
    int firsts[kNodesPerStep];
    int levels[kNodesPerStep];
#pragma unroll
    for (int i = 0; i < kNodesPerStep; ++i) {
      // Behind the last node, loads repeat it.
      firsts[i] = walk.first;
      levels[i] = is_last ? kTreeLevels : walk.level;
      nodes[i] = load_partial(params, walk.slot(), row, dim);
      is_last = walk.is_last();
      if (!is_last) walk.advance();
    }
#pragma unroll
    for (int i = 0; i < kNodesPerStep; ++i) {
      const bool ends_tile = firsts[i] + (1 << levels[i]) >= work.num_splits;
      if (levels[i] < kTreeLevels) sum = nodes[i];
#pragma unroll 1
      for (int level = levels[i]; level < kTreeLevels; ++level) {
        if ((firsts[i] >> level & 1) != 0) {
          sum = sum_of({waiting_states[level], waiting_outs[level]}, sum);
        } else if (!ends_tile) {
          waiting_states[level] = sum.state;
          waiting_outs[level] = sum.out;
          break;
        }
      }
    }
  }
  store_finished(params, work, row, dim, sum);
}
