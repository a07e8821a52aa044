// Fixed splits of batch-invariant kernels: where their partials lie, and how they are combined.

#pragma once

#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
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

// Workspace slot of a node, of the first kv head of the CTA. Of a tile that begins in its range, a
// CTA has at most one node of each level that waits for the next one; of a tile that began before,
// also one that the CTAs before have the sibling of.
__device__ inline int node_slot(int cta, bool begins, int first, int level) {
  const int slot = begins ? level : kTreeLevels + level * 2 + (first >> level & 1);
  return (cta * 3 * kTreeLevels + slot) * kKvHeadsPerCta;
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
constexpr int kSiblingsPerStep = 2;  // loads in flight

__device__ inline void store_fixed_split(const Params& params, const WorkItem& work,
                                         const ScheduleRange& range, int row, int dim,
                                         RowPart part) {
  const int cta = static_cast<int>(blockIdx.x);
  const int head = work.kv_head % kKvHeadsPerCta;
  const bool begins = begins_here(work, range);
  const int begin = begins ? 0 : range.begin - work.first_split;
  const bool is_whole = begins && work.split_idx == work.num_splits - 1;
  // Bits of the levels of the left siblings: all that wait, or as far as the node is a right child.
  int siblings = is_whole ? work.split_idx : (work.split_idx ^ work.split_idx + 1) >> 1;
  while (work.split_idx - siblings < begin) siblings >>= 1;
  const int first = work.split_idx - siblings;
  const int level = __popc(siblings);
#pragma unroll 1
  while (siblings != 0) {
    RowPart loaded[kSiblingsPerStep];
    int next = siblings;
#pragma unroll
    for (int i = 0; i < kSiblingsPerStep; ++i) {
      // Behind the last sibling, of level 0: not used.
      const int sibling_level = max(__ffs(next) - 1, 0);
      loaded[i] = load_partial(params, node_slot(cta, begins, 0, sibling_level) + head, row, dim);
      next &= next - 1;
    }
#pragma unroll
    for (int i = 0; i < kSiblingsPerStep; ++i) {
      if (siblings != 0) part = sum_of(loaded[i], part);
      siblings &= siblings - 1;
    }
  }
  if (is_whole) return store_finished(params, work, row, dim, part);
  const int slot = node_slot(cta, begins, first, level) + head;
  *partial_out_ptr(params, slot, row, dim) = part.out;
  if (dim == 0) partial_states(params, slot)[row] = part.state;
}

// The nodes of all CTAs of a work tile, in ascending order.
struct NodeList {
  struct Node {
    int slot;
    int num_sums;  // with the nodes before it, the nearest one first
  };
  Node nodes[kMaxSplits];
  u32 starts[(kMaxSplits + kWarpLanes - 1) / kWarpLanes];  // splits that nodes begin with

  // Called by all consumers. Returns the number of nodes.
  __device__ int fill(const Params& params, const WorkItem& work, const ScheduleRange& range) {
    const int rank_in_group = static_cast<int>(blockIdx.x) - range.index * params.cta_group_size;
    const int words = ceil_div(work.num_splits, kWarpLanes);
    int count = 0;
    // The passes: first the starts, then each node behind as many others as begin before it.
#pragma unroll 1
    for (int pass = 0; pass < 2; ++pass) {
#pragma unroll 1
      for (int word = static_cast<int>(threadIdx.x) / kWarpLanes; word < words;
           word += kConsumerWarps) {
        const int split = word * kWarpLanes + lane_index();
        // The splits of the range that has this one.
        const int range_idx =
            first_range_from(work.first_split + min(split, work.num_splits - 1) + 1, range) - 1;
        const ScheduleRange part =
            range_at(range_idx, range.num_ranges, range.total_blocks, kFixedOverheadBlocks);
        const int begin = max(part.begin - work.first_split, 0);
        const int end = min(part.end - work.first_split, work.num_splits);
        // The largest node with this split that lies in the range.
        int size = 1;
        while ((split & -2 * size) >= begin && (split & -2 * size) + 2 * size <= end) size *= 2;
        const bool is_start = split < work.num_splits && split % size == 0;
        const u32 lane_starts = __ballot_sync(~0u, is_start);
        if (pass == 0) {
          if (lane_index() == 0) starts[word] = lane_starts;
          continue;
        }
        int index = __popc(lane_starts & (1u << lane_index()) - 1);
        for (int before = 0; before < word; ++before) index += __popc(starts[before]);
        const bool is_last = split + size == work.num_splits;
        const int level = __ffs(size) - 1;
        const int cta = range_idx * params.cta_group_size + rank_in_group;
        if (is_start) {
          nodes[index] = {node_slot(cta, begin == 0, split, level),
                          is_last ? __popc(split) : __ffs(~(split >> level)) - 1};
        }
      }
      __syncwarp();
      named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
    }
    for (int word = 0; word < words; ++word) count += __popc(starts[word]);
    return count;
  }
};

// Adds up the nodes of all CTAs of a work tile.
constexpr int kNodesPerStep = 8;  // loads in flight

__device__ inline void combine_nodes(const Params& params, const WorkItem& work,
                                     const NodeList& list, int count, int row, int dim) {
  const int head = work.kv_head % kKvHeadsPerCta;
  // Nodes before the last one whose right siblings follow.
  RowState waiting_states[kTreeLevels];
  float4 waiting_outs[kTreeLevels];
  int num_waiting = -1;
  RowPart last;
#pragma unroll 1
  for (int begin = 0; begin < count; begin += kNodesPerStep) {
    RowPart loaded[kNodesPerStep];
#pragma unroll
    for (int i = 0; i < kNodesPerStep; ++i) {
      // Behind the last node, loads repeat it.
      loaded[i] = load_partial(params, list.nodes[min(begin + i, count - 1)].slot + head, row, dim);
    }
#pragma unroll
    for (int i = 0; i < kNodesPerStep; ++i) {
      if (begin + i >= count) break;
      int num_sums = list.nodes[begin + i].num_sums;
      if (num_sums == 0) {
        if (num_waiting >= 0) {
          waiting_states[num_waiting] = last.state;
          waiting_outs[num_waiting] = last.out;
        }
        ++num_waiting;
        last = loaded[i];
        continue;
      }
      last = sum_of(last, loaded[i]);
#pragma unroll 1
      while (--num_sums > 0) {
        --num_waiting;
        last = sum_of({waiting_states[num_waiting], waiting_outs[num_waiting]}, last);
      }
    }
  }
  store_finished(params, work, row, dim, last);
}
