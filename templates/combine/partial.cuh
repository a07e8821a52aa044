// Partial O and softmax states of splits: how they are stored, in the workspace and in the shared
// memory of a CTA that combines them; slots, semaphores and copies of the workspace.

#pragma once

#include "accumulators.cuh"
#include "combine/subtile_frags.cuh"
#include "common/barriers.cuh"
#include "common/params.cuh"
#include "common/registers.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/atomic.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/load.cuh"
#include "scheduler/tile_scheduler.cuh"
#include "softmax/row_state.cuh"

// Softmax state of a row of a split, in one 16-byte chunk.
struct alignas(kChunkBytes) PartialState : RowState {
  float scales[kNumScales];  // inverse fp16 scales; the combine multiplies in the split's weight
};
static_assert(sizeof(PartialState) == kChunkBytes, "one cp.async copies the state of a row");
static_assert(sizeof(PartialState) == kPartialStateBytes, "the host plans with it");

// Weights of a row in the sum of two splits: of the one in registers, and of the other one as it is
// stored, in fp16.
struct PairWeights {
  float own;
  float other;
};
static_assert(sizeof(PairWeights) <= sizeof(PartialState), "weights take the place of states");

// Adds the state of the other split of a row to that of this one.
__device__ inline PairWeights combine_pair_states(RowState& own, const PartialState* stored,
                                                  int scale) {
  const float4 loaded = ld_global_cg_v4_f32(stored);
  const RowState other = {loaded.x, loaded.y};
  const float row_max = fmaxf(own.row_max, other.row_max);
  const float own_weight = weight_of(own, row_max);
  const float other_weight = weight_of(other, row_max);
  own = {row_max, own.row_sum * own_weight + other.row_sum * other_weight};
  return {own_weight, other_weight * (scale == 0 ? loaded.z : loaded.w)};
}

// Power-of-two scale of a row of partial O in fp16. It brings finite magnitudes of at most `amax`
// below 2^14: the eleven significant bits of fp16 then exceed those of the output. The scale and
// its inverse are normal numbers.
__device__ inline float fp16_scale(float amax) {
  const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 127;
  return __uint_as_float(static_cast<u32>(127 + 13 - max(exponent, -100)) << 23);
}

__device__ inline float inverse_of_pow2(float pow2) {
  return __uint_as_float((254u << 23) - __float_as_uint(pow2));
}

// Bytes of a fragment: one float4 of every lane of a warp, as fp16.
constexpr int kFragBytes = kWarpLanes * sizeof(uint2);

__device__ inline uint2 pack_half4(float4 value) {
  return make_uint2(cvt_rn_x2_f32(Fp16{}, value.y, value.x),
                    cvt_rn_x2_f32(Fp16{}, value.w, value.z));
}

__device__ inline float4 unpack_half4(uint2 half4) {
  return make_float4(
      cvt_f32(Fp16{}, static_cast<u16>(half4.x)), cvt_f32(Fp16{}, static_cast<u16>(half4.x >> 16)),
      cvt_f32(Fp16{}, static_cast<u16>(half4.y)), cvt_f32(Fp16{}, static_cast<u16>(half4.y >> 16)));
}

// Shared memory of the combine: partial states of some rows (all splits of a row together), then
// some fragments of every split. Aliases Q and the KV stages, because no item follows.
struct CombineSmem {
  unsigned char* bytes;
  int num_splits;
  int first_row;
  int rows;
  int first_frag;
  int num_frags;

  // Whether this CTA's own split is already in shared memory.
  __device__ bool holds_own_split() const { return num_frags >= kFragsPerStep; }

  // The states of row `first_row` + `index`.
  __device__ PartialState* states(int index) const {
    // An odd number of chunks, so that rows start in different banks.
    return reinterpret_cast<PartialState*>(bytes) + index * (num_splits | 1);
  }
  __device__ PartialState& state(int split_idx, int row) const {
    return states(row - first_row)[split_idx];
  }
  __device__ uint2* values(int split_idx) const {
    return reinterpret_cast<uint2*>(states(rows)) + split_idx * num_frags * kWarpLanes;
  }
};

// A fragment is one float4 of every lane of a warp. Partial O is stored fragment by fragment as
// four fp16 a lane, because the combine is bound by these bytes; the partial state is stored per
// row. Each CTA has two slots: for the split that its range begins with, and for the one it ends
// with. In batch-invariant kernels the splits of a work item have one each.
__device__ inline int first_slot(int cta) { return cta * 2; }
__device__ inline int last_slot(int cta) { return cta * 2 + 1; }

// Workspace slots of the splits of a work tile. Ranges run in reverse `blockIdx` order.
struct PartialSlots {
  int first;  // as in the work item: a slot, or a CTA, which has two
  int cta_group_size;

  __device__ PartialSlots(const Params& params, const WorkItem& work)
      : first(kBatchInvariant ? work.first_slot : work.first_cta),
        cta_group_size(params.cta_group_size) {}

  __device__ int operator[](int split_idx) const {
    if constexpr (kBatchInvariant) return first + split_idx * cta_group_size;
    return split_idx == 0 ? last_slot(first) : first_slot(first - split_idx * cta_group_size);
  }
};

// Workspace slot of this CTA's split.
__device__ inline int own_slot(const Params& params, const WorkItem& work) {
  if constexpr (kBatchInvariant) return PartialSlots(params, work)[work.split_idx];
  const int cta = static_cast<int>(blockIdx.x);
  return work.split_idx > 0 ? first_slot(cta) : last_slot(cta);
}

__device__ inline uint2* partial_values(const Params& params, int slot) {
  return reinterpret_cast<uint2*>(params.partial_out) +
         static_cast<u32>(slot * kNumFrags * kWarpLanes);
}

__device__ inline PartialState* partial_states(const Params& params, int slot) {
  return reinterpret_cast<PartialState*>(params.partial_states) + slot * kBlockM;
}

// Offset of this thread's values within a slot.
__device__ inline int lane_frag_offset() {
  return first_frag_of_warp(reload_warp()) * kWarpLanes + reload_lane();
}

// The only reducer of two splits waits for the other one alone.
__device__ inline int expected_arrivals(const WorkItem& work) {
  return work.num_reducers == 1 ? 1 : work.num_splits;
}

// The semaphore of a work tile counts arrivals, and then the reducers that have seen all of them.
// The last reducer wraps it to zero for the next launch.
__device__ inline u32* semaphore_of(const Params& params, const WorkItem& work) {
  return params.semaphores + work.first_cta;
}

__device__ inline u32 last_arrival(const WorkItem& work) {
  return static_cast<u32>(expected_arrivals(work) + work.num_reducers - 1);
}

// Publishes the stores of all PV warps.
__device__ inline void semaphore_arrive(const Params& params, const WorkItem& work) {
  u32* semaphore = semaphore_of(params, work);
  const u32 last = last_arrival(work);
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
  if (reload_tid() == 0) red_inc_release_gpu(semaphore, last);
}

// Waits for all splits; each reducer calls it once.
__device__ inline void semaphore_wait(const Params& params, const WorkItem& work) {
  if (reload_tid() == 0) {
    u32* semaphore = semaphore_of(params, work);
    const u32 last = last_arrival(work);
    const u32 expected = static_cast<u32>(expected_arrivals(work));
    while (ld_acquire_gpu(semaphore) < expected) {
    }
    red_inc_relaxed_gpu(semaphore, last);
  }
  named_barrier_sync(NamedBarrier::PvWarpsSynced, kPvThreads);
}

// Destination of a thread's partial O: the workspace, except for the fragments that this CTA
// reduces itself. Those stay in shared memory if they are whole groups of four.
struct PartialOut {
  uint2* workspace;
  uint2* smem_values;
  int first_smem_frag;
  int num_smem_frags;

  // `combine_smem` is that of a sub-tile, which may be empty.
  __device__ PartialOut(const Params& params, const WorkItem& work, const CombineSmem& combine_smem)
      : workspace(partial_values(params, own_slot(params, work)) + lane_frag_offset()),
        smem_values(combine_smem.values(work.split_idx) + lane_frag_offset() -
                    combine_smem.first_frag * kWarpLanes),
        first_smem_frag(combine_smem.first_frag - first_frag_of_warp(reload_warp())),
        num_smem_frags(combine_smem.holds_own_split() ? combine_smem.num_frags : 0) {}

  // Address of float4 `i`.
  __device__ uint2* slot(int i) const {
    const int frag_group = frag_offset(i) / kFragsPerStep * kFragsPerStep;
    const bool is_in_smem =
        static_cast<u32>(frag_group - first_smem_frag) < static_cast<u32>(num_smem_frags);
    return (is_in_smem ? smem_values : workspace) + frag_offset(i) * kWarpLanes;
  }
};

// Issues the copies of the fragments of all splits but `own`: many splits by one warp each, few
// splits by all warps. A warp issues several chunks per lane back to back.
__device__ inline void load_partial_values(const Params& params, const PartialSlots& slots,
                                           const CombineSmem& combine_smem, int own) {
  constexpr int kChunksPerStep = 4;
  constexpr int kCopyBytes = kWarpLanes * kChunkBytes;
  const int warp = reload_warp();
  const bool is_one_split_per_warp = combine_smem.num_splits >= kPvWarps;
  const int step = kChunksPerStep * kCopyBytes * (is_one_split_per_warp ? 1 : kPvWarps);
  const int first = kChunksPerStep * kCopyBytes * (is_one_split_per_warp ? 0 : warp) +
                    reload_lane() * kChunkBytes;
  const int bytes = combine_smem.num_frags * kFragBytes;
#pragma unroll 1
  for (int split_idx = is_one_split_per_warp ? warp : 0; split_idx < combine_smem.num_splits;
       split_idx += is_one_split_per_warp ? kPvWarps : 1) {
    if (split_idx == own) continue;
    const unsigned char* source = reinterpret_cast<const unsigned char*>(
        partial_values(params, slots[split_idx]) + combine_smem.first_frag * kWarpLanes);
    const u32 target = shared_address(combine_smem.values(split_idx));
#pragma unroll 1
    for (int i = first; i < bytes; i += step) {
#pragma unroll
      for (int chunk = 0; chunk < kChunksPerStep; ++chunk) {
        if (i + chunk * kCopyBytes >= bytes) continue;
        cp_async_cg_16(target + i + chunk * kCopyBytes, source + i + chunk * kCopyBytes,
                       kChunkBytes);
      }
    }
  }
}
