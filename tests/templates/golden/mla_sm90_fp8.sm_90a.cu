// Basic types, dtype tags and thread indices of every kernel.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Tags that select conversions; the data itself is held as bytes, u16 or u32.
struct Bf16 {};
struct Fp16 {};
struct E4m3 {};
struct Int8 {};
struct Nvfp4 {};
struct Fp8DsMla {};
struct Fp8PerToken {};

template <typename A, typename B>
constexpr bool kIsSame = false;
template <typename A>
constexpr bool kIsSame<A, A> = true;

// Largest size of one load, store or cp.async.
constexpr int kChunkBytes = 16;
struct alignas(kChunkBytes) Chunk {
  u32 words[4];
};

// TMA descriptor (CUtensorMap), opaque and encoded on the host.
struct alignas(64) TensorMap {
  u64 words[16];
};

constexpr int kWarpLanes = 32;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kFloatMax = __builtin_bit_cast(float, 0x7f7fffff);
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// The dynamic shared memory of the CTA, viewed as one struct.
template <typename Layout>
__device__ inline Layout& shared_memory() {
  extern __shared__ __align__(1024) unsigned char bytes[];
  return *reinterpret_cast<Layout*>(bytes);
}

__device__ inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ inline int lane_index() { return static_cast<int>(threadIdx.x) % kWarpLanes; }
__device__ inline int warp_index() { return static_cast<int>(threadIdx.x) / kWarpLanes; }

__device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Kernel parameters of one launch.

struct Params {
  TensorMap latent_map;
  TensorMap rope_map;
  TensorMap kv_map;
  const unsigned char* query;
  const unsigned char* query_rope;
  const unsigned char* cache;
  const int* block_tables;
  const int* kv_indptr;
  const int* seq_lens;
  const int* cu_seqlens_q;
  const float* bmm1_scale_tensor;
  const float* bmm2_scale_tensor;
  const float* sinks;
  u16* out;
  float* lse;
  unsigned char* partial_out;
  unsigned char* partial_states;
  u32* semaphores;
  i64 query_stride;
  i64 query_head_stride;
  i64 query_rope_stride;
  i64 query_rope_head_stride;
  i64 page_stride;
  i64 token_stride;
  i64 total_rows;
  int num_seqs;
  int heads;
  int q_len;
  int max_pages;
  int block_tables_stride;
  int num_pages;
  int num_cta_groups;
  int cta_group_size;
  int separate_rope;
  int is_causal;
  int scores_take_bmm2;
  int schedule_id;
  float bmm1_scale;
  float bmm2_scale;
  float lse_factor;
};

// PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol". Needs sm_90.
// Both do nothing in a launch without the programmatic-stream-serialization attribute.

// griddepcontrol.wait
// Waits until the preceding kernel has completed and its writes are visible.
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents
// Lets the next kernel start once every CTA has executed this or exited.
__device__ inline void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Programmatic dependent launch (PDL): starts while the preceding kernel drains.

__device__ inline void pdl_wait() { griddepcontrol_wait(); }
__device__ inline void pdl_launch_dependents() { griddepcontrol_launch_dependents(); }

// PTX ISA, "Miscellaneous Instructions: setmaxnreg". Needs sm_90.
// All warps of a warpgroup execute it; the number of registers is a multiple of 8.

// setmaxnreg.dec.sync.aligned.u32
// Gives registers back.
template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// setmaxnreg.inc.sync.aligned.u32
// Waits until there are so many registers to take.
template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Register reallocation between warpgroups (`setmaxnreg`), for kernels launched with 128 registers
// per thread: producer warpgroups release what consumer warpgroups acquire. Executed by whole
// warpgroups.

template <int kRegs>
__device__ inline void reg_alloc() {
  if constexpr (kRegs < 128) setmaxnreg_dec<kRegs>();
  if constexpr (kRegs > 128) setmaxnreg_inc<kRegs>();
}

// Kernel configuration: the numbers of the spec as constants.

using Element = Bf16;  // of the output; Q and KV are e4m3
constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kPageSize = 64;
constexpr bool kIsSparse = false;  // no top-k indices
constexpr int kBoxTokens = 64;
constexpr int kBlockM = 64;
constexpr int kConsumerWarps = 8;
constexpr int kSharedBytes = 232448;
constexpr int kSemaphoreBytes = 1024;  // SchedMetaCache lies behind them
constexpr int kMaxCachedSeqs = 510;
constexpr int kSchedMetaBytes = 128;

constexpr int kHeadDimQk = kLatentDim + kRopeDim;
constexpr int kHeadDimVo = kLatentDim;

// MMA operands lie in swizzled tiles: of 128 bytes per row, and of 64 for the rope part.
constexpr int kTileRowBytes = 128;
constexpr int kRopeRowBytes = kRopeDim;
constexpr int kLatentTiles = kLatentDim / kTileRowBytes;
constexpr int kBlockN = 64;
constexpr int kTileBytes = kBlockN * kTileRowBytes;
constexpr int kKvBlockBytes = kBlockN * kHeadDimQk;
constexpr int kQueryTileBytes = kBlockM * kTileRowBytes;
constexpr int kQueryBytes = kBlockM * kHeadDimQk;
constexpr int kBoxes = kBlockN / kBoxTokens;  // TMA boxes of a tile

// Warps of the PV warpgroups (the consumers) come first, then the producer and scheduler warps,
// then the QK warpgroup.
constexpr int kConsumerThreads = kConsumerWarps * kWarpLanes;
constexpr int kProducerThreads = 128;
constexpr int kProducerWarps = kProducerThreads / kWarpLanes;
constexpr int kQkThreads = 128;
constexpr int kQkWarps = kQkThreads / kWarpLanes;
constexpr int kThreads = kConsumerThreads + kProducerThreads + kQkThreads;

// Each QK warp owns 16 of the 64 rows of an MMA. Rows from `kBlockM` on are unused.
constexpr int kRowsPerWarp = 16;
constexpr int kWarpsWithRows = kBlockM / kRowsPerWarp;

// Arrivals that release a slot of work items, one per reading warp: producer, PV and QK warps. And
// those that release Q: one for the QK warpgroup.
constexpr int kWorkReaders = 1 + kConsumerWarps + kQkWarps;
constexpr int kQueryReaders = 1;

constexpr float kMaxE4m3 = 448.0f;

// float4 accumulators of a consumer thread; a fragment is a float4 of every lane of a warp.
constexpr int kAccumulators = kBlockM * kHeadDimVo / kConsumerThreads / 4;
constexpr int kNumFrags = kAccumulators * kConsumerWarps;

enum class NamedBarrier : int {
  ConsumersSynced = 1,  // all consumer warps have arrived
  WorkProduced = 2,  // the scheduler warp has written a work item
  QkSynced = 3,  // all warps of the QK warpgroup have arrived
  PartialsStored = 7,  // a ReduceGroup has arrived: all consumers or half 0; half 1 has the next
};

static_assert(kLatentTiles * kTileRowBytes == kLatentDim, "the latent part is whole tiles");
static_assert(kRopeRowBytes == 64, "the rope part is a tile of 64 bytes per row");
static_assert(kBlockM * kBlockN <= kBlockN * kRopeRowBytes, "P fits into the rope tile");
static_assert(kBoxes * kBoxTokens == kBlockN, "TMA boxes fill a tile");

// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier". Needs sm_90.
// Barriers are 8 bytes of shared memory, by address.

// mbarrier.init.shared::cta.b64
// A phase completes after `count` arrivals and all expected bytes.
__device__ inline void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// mbarrier.arrive.shared::cta.b64
__device__ inline void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.shared::cta.b64
// Called by lane 0. Adds `read` times the lane index, zero there, to the address: a false
// dependency that orders the arrive after the loads.
__device__ inline void mbarrier_arrive_after(u32 barrier, u32 read) {
  asm volatile(
      "{.reg .b32 address; mov.b32 address, %%laneid; and.b32 address, address, %1; "
      "add.u32 address, address, %0; mbarrier.arrive.shared::cta.b64 _, [address];}" ::"r"(barrier),
      "r"(read)
      : "memory");
}

// mbarrier.arrive.expect_tx.shared::cta.b64
// Arrives, and raises the byte count that the phase expects.
__device__ inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity.shared::cta.b64
// Waits until the phase of this parity completes. The spin loop is in PTX: across a C++ loop the
// compiler moves accumulators of wgmma in flight to other registers.
__device__ inline void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra "
      "again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// mbarriers in shared memory, and the pipeline state (index, phase) that steps through stages.

using Barrier = u64;

// A phase completes after `arrivals` arrivals.
__device__ inline void init_barrier(const Barrier& barrier, int arrivals) {
  mbarrier_init(shared_address(&barrier), arrivals);
}

__device__ inline void wait(const Barrier& barrier, u32 phase) {
  mbarrier_wait(shared_address(&barrier), phase);
}

__device__ inline void arrive(const Barrier& barrier) { mbarrier_arrive(shared_address(&barrier)); }

// Called by lane 0. Depends on `read` and everything it is computed from: a plain arrive may
// overtake shared-memory loads still in flight, and the copy that waits for it would overwrite
// what they read.
__device__ inline void arrive_after_reads(const Barrier& barrier, u32 read) {
  mbarrier_arrive_after(shared_address(&barrier), read);
}

// The phase bit flips whenever the index wraps around.
template <int kCount>
struct PipelineState {
  int index = 0;
  u32 phase = 0;

  __device__ void advance() {
    if (++index == kCount) {
      index = 0;
      phase ^= 1;
    }
  }
};

// PTX ISA, "Data Movement and Conversion Instructions: createpolicy". Needs sm_80.

// createpolicy.fractional.L2::evict_first.b64
// L2 evicts such lines before others.
__device__ inline u64 createpolicy_evict_first() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  return policy;
}

// createpolicy.fractional.L2::evict_normal.b64
__device__ inline u64 createpolicy_evict_normal() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
  return policy;
}

// L2 eviction hints for KV loads: evict-first when no other CTA reads the tile, evict-normal
// otherwise. Keeps Q and partial O resident and avoids write-backs between reads, which cost
// far more bandwidth than their bytes.

__device__ inline u64 kv_cache_hint(bool is_shared) {
  return is_shared ? createpolicy_evict_normal() : createpolicy_evict_first();
}

// Row of the block table: where the page ids of a sequence start, and how many there are.

struct BlockTableRow {
  i64 start;
  int num_pages;
};

// Clamps `kv_indptr` to the table, so that invalid offsets cannot fault.
__device__ inline BlockTableRow block_table_row(const Params& params, int seq_idx) {
  if (kIsSparse || params.kv_indptr == nullptr) {
    return {seq_idx * static_cast<i64>(params.block_tables_stride), params.max_pages};
  }
  const int start = max(0, min(params.kv_indptr[seq_idx], params.max_pages));
  const int end = max(start, min(params.kv_indptr[seq_idx + 1], params.max_pages));
  return {start, end - start};
}

// Addresses of tokens in the paged KV cache.

// One tensor of the cache; strides in bytes.
struct PagedRows {
  const unsigned char* rows;
  i64 page_stride;
  i64 token_stride;

  // The row in `slot` of `page`, which exists.
  __device__ const unsigned char* row_of(int page, int slot) const {
    return rows + page * page_stride + slot * token_stride;
  }
};

constexpr int kMaxKvLen = 0x7fff0000;  // one more tile still fits in an int

// KV length of a sequence, clamped to what a table of `num_pages` pages holds: `seq_lens` is
// untrusted.
__device__ inline int clamp_kv_len(i64 seq_len, i64 num_pages) {
  constexpr i64 kMax = kMaxKvLen;
  return static_cast<int>(max(static_cast<i64>(0), min(min(seq_len, num_pages * kPageSize), kMax)));
}

// Page ids are untrusted: one outside the cache must not fault.
__device__ inline bool is_valid_page(int page, int num_pages) {
  return static_cast<u32>(page) < static_cast<u32>(num_pages);
}

// KV length of a sequence whose pages a block table lists.

__device__ inline int seq_len_of(const Params& params, int seq_idx) {
  return params.seq_lens[seq_idx];
}

// `seq_len` is seq_len_of(seq_idx). The same clamp as clamp_kv_len, in fewer instructions.
__device__ inline int kv_len_of(const Params& params, int seq_idx, int seq_len) {
  const int num_pages = min(block_table_row(params, seq_idx).num_pages, kMaxKvLen / kPageSize);
  return max(0, min(seq_len, num_pages * kPageSize));
}

// Stream-K schedule (load-balanced split-KV): each CTA computes its own range of KV blocks.

// A CTA group is a set of neighbouring CTAs that share KV through L2. The row tiles of a sequence
// form groups of one tile per CTA of a CTA group; a work tile is one sequence and one such group.
// The work tiles, laid end to end, make the linearised KV-block space: a tile occupies its KV
// blocks plus a fixed overhead in front of them. Each CTA group processes one contiguous range of
// that space, all ranges being equally long. A tile that crosses range boundaries is split, one
// split per range, and the splits are combined.

// Fixed overhead of a work tile, prologue and epilogue, in KV blocks: more for a large tile.
constexpr int kSmallTileOverheadBlocks = 2;
constexpr int kLargeTileOverheadBlocks = 6;
constexpr int kFixedOverheadBlocks =
    kBlockM > 32 ? kLargeTileOverheadBlocks : kSmallTileOverheadBlocks;
constexpr int kSplitOverheadBlocks = 5;  // of combining splits at all, in KV blocks
constexpr int kMinBlocksPerRange = 2;  // overhead blocks included
constexpr int kMaxRanges = 144;  // CombineSmem holds the partial states of as many splits

struct SeqInfo {
  i64 first_query;  // index of the sequence's first query token in the query tensor
  int q_len;  // -1 where cu_seqlens_q decreases
  int rows;  // 0 where the query tokens are not inside the query tensor
  int kv_len;
  int num_kv_blocks;
  int num_m_groups;
};

// Divides by the CTA group size, 1 to 4. Divisors are constants, because an integer division takes
// many instructions, and a select replaces branches.
__device__ inline int div_by_group_size(const Params& params, u32 count) {
  return static_cast<int>(params.cta_group_size == 3 ? count / 3
                                                     : count >> params.cta_group_size / 2);
}

// `seq_len` is seq_len_of(seq_idx).
__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx, int seq_len) {
  SeqInfo seq_info;
  seq_info.q_len = kIsSparse ? 1 : params.q_len;  // each query token has its own top-k indices
  seq_info.first_query = static_cast<i64>(seq_idx) * seq_info.q_len;
  bool is_inside = true;
  if (!kIsSparse && params.cu_seqlens_q != nullptr) {
    seq_info.first_query = params.cu_seqlens_q[seq_idx];
    const i64 end = params.cu_seqlens_q[seq_idx + 1];
    const i64 q_len = min(end - seq_info.first_query, static_cast<i64>(0x7fffffff));
    seq_info.q_len = static_cast<int>(max(q_len, static_cast<i64>(-1)));
    is_inside = 0 <= seq_info.first_query && seq_info.first_query <= end &&
                end * params.heads <= params.total_rows;
  }
  seq_info.rows = is_inside ? seq_info.q_len * params.heads : 0;
  seq_info.kv_len = kv_len_of(params, seq_idx, seq_len);
  seq_info.num_kv_blocks = static_cast<u32>(seq_info.kv_len + kBlockN - 1) / kBlockN;
  const u32 m_tiles = static_cast<u32>(seq_info.rows + kBlockM - 1) / kBlockM;
  seq_info.num_m_groups = div_by_group_size(params, m_tiles + params.cta_group_size - 1);
  return seq_info;
}

__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx) {
  return seq_info_of(params, seq_idx, seq_len_of(params, seq_idx));
}

// Range of a CTA group: linear block indices [begin, end). The host guarantees that the linearised
// KV-block space fits in int32.
struct ScheduleRange {
  int total_blocks;  // of the linearised KV-block space
  int num_ranges;  // in use
  // In reverse order of CTA groups, so a pairwise combine waits for a CTA scheduled before it. With
  // more splits CTAs wait for each other, which the co-resident grid makes safe.
  int index;
  int fixed_overhead_blocks;
  int begin;
  int end;
};

// Whether all sequences of a warp have the same number of KV blocks and row-tile groups.
enum class SeqLengths { kInvalid, kMixed, kUniform };

struct alignas(kChunkBytes) WarpSeqs {
  int linear_blocks;  // sum over the warp's sequences
  int num_kv_blocks;  // of each sequence, as is num_m_groups, if the kind is kUniform
  int num_m_groups;
  SeqLengths kind;
};

// State of the tile scheduler: the current work tile.
struct SchedulerState {
  SeqInfo seq_info;
  int seq_idx;
  int m_group;
  int tile_begin;  // linear block index of the tile's overhead
};

// Coordinates of a work item: what loading its Q and KV needs.
struct WorkCoord {
  i64 first_query;  // index of the sequence's first query token in the query tensor
  int seq_idx;  // -1 after the last work item
  int first_row;  // of the row tile, among the sequence's rows
  int rows;  // of the row tile; the other rows up to kBlockM are padding
  int first_kv_block;
  int num_kv_blocks;  // of this split
  int kv_end;  // end of the tokens that any row of the tile attends to
};
constexpr WorkCoord kInvalidWork = {0, -1, 0, 0, 0, 0, 0};

// Scheduler metadata of a CTA.
struct alignas(kChunkBytes) SchedMeta {
  ScheduleRange range;
  // At the first work item. find_range stores the work tile that the range begins in, or one before
  // it, from which initial_work advances.
  SchedulerState initial_state;
  WorkCoord first_work;
};

struct SchedulerStorage : SchedMeta {
  WarpSeqs warp_seqs[kThreads / kWarpLanes];
  SchedulerState current_state;  // at the last published work item
};

__device__ inline int linear_kv_blocks(const SeqInfo& seq_info, int fixed_overhead_blocks) {
  return seq_info.num_m_groups * (seq_info.num_kv_blocks + fixed_overhead_blocks);
}

// Whether `a` is a multiple of `b`; may return false for numbers that a float does not represent.
__device__ inline bool is_multiple(int a, int b) {
  return __float2int_rn(__fdividef(static_cast<float>(a), static_cast<float>(b))) * b == a;
}

// The largest number of ranges aligned with work tiles of `num_kv_blocks` KV blocks each: every
// range has the same number of whole tiles, or every tile the same number of whole ranges. 0 if the
// CTA groups that would be idle cost more than the split overhead. Called by whole warps.
__device__ inline int aligned_ranges(int num_cta_groups, int num_tiles, int num_kv_blocks) {
  const int total_blocks = num_tiles * num_kv_blocks;
  num_cta_groups = min(num_cta_groups, total_blocks);  // every range has a KV block
  const int num_ranges = max(num_cta_groups - lane_index(), 1);
  const bool is_aligned = is_multiple(num_tiles, num_ranges) || is_multiple(num_ranges, num_tiles);
  const bool is_cheap =
      static_cast<i64>(total_blocks) * num_cta_groups <=
      (total_blocks + static_cast<i64>(kSplitOverheadBlocks) * num_cta_groups) * num_ranges;
  const u32 found = __ballot_sync(~0u, is_aligned && is_cheap);
  return found == 0 ? 0 : max(num_cta_groups - __ffs(static_cast<int>(found)) + 1, 1);
}

// First linear block index of range `index`: index * total_blocks / num_ranges, from `quotient` and
// `remainder` of the latter two. The float division is exact for numbers this small, and takes
// fewer instructions than an integer division.
__device__ inline int range_begin_of(int index, int quotient, int remainder, int num_ranges) {
  const float fraction =
      __fdividef(static_cast<float>(index * remainder) + 0.5f, static_cast<float>(num_ranges));
  return index * quotient + __float2int_rz(fraction);
}

// The sequences whose KV blocks a thread counts. A thread past the last sequence reads that one,
// and counts nothing.
__device__ inline int seqs_per_thread(const Params& params) {
  return ceil_div(params.num_seqs, kThreads);
}

__device__ inline int first_seq_of_thread(const Params& params) {
  const int first = static_cast<int>(threadIdx.x) * seqs_per_thread(params);
  return min(first, params.num_seqs - 1);
}

// Called by all threads. Stores the range of `cta_group` in `scheduler_storage` and returns whether
// it has one. A prefix sum over the sequences gives each thread the linear block indices of its
// sequences; the thread that holds the range's first block stores it. `seq_len` is
// seq_len_of(first_seq_of_thread).
__device__ inline bool find_range(const Params& params, int cta_group, int seq_len,
                                  SchedulerStorage& scheduler_storage) {
  const int per_thread = seqs_per_thread(params);
  const int first = static_cast<int>(threadIdx.x) * per_thread;
  const int last = min(first + per_thread, params.num_seqs);
  const int end = first_seq_of_thread(params);
  SeqInfo seq_info;  // of the thread's first sequence after the loop, which runs backwards
  int num_kv_blocks = 0;
  int num_m_groups = 0;
  int own_blocks = 0;
  bool is_uniform = true;
  bool is_invalid = false;
#pragma unroll 1
  for (int seq_idx = last - 1; seq_idx >= end; --seq_idx) {
    seq_info = seq_info_of(params, seq_idx, seq_idx == end ? seq_len : seq_len_of(params, seq_idx));
    is_uniform &= seq_idx == last - 1 || (seq_info.num_kv_blocks == num_kv_blocks &&
                                          seq_info.num_m_groups == num_m_groups);
    is_invalid |= seq_info.q_len < 0;
    num_kv_blocks = seq_info.num_kv_blocks;
    num_m_groups = seq_info.num_m_groups;
    own_blocks += linear_kv_blocks(seq_info, kFixedOverheadBlocks);
  }
  if (first >= last) own_blocks = 0;
  // Shuffles need all lanes: no short-circuit evaluation.
  const int lane_0_blocks = __shfl_sync(~0u, num_kv_blocks, 0);
  const int lane_0_m_groups = __shfl_sync(~0u, num_m_groups, 0);
  is_uniform = __all_sync(
      ~0u, is_uniform && num_kv_blocks == lane_0_blocks && num_m_groups == lane_0_m_groups);
  is_invalid = __any_sync(~0u, is_invalid);
  int inclusive_sum = own_blocks;  // prefix sum over the lanes
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const int lower_sum = __shfl_up_sync(~0u, inclusive_sum, lanes);
    if (lane_index() >= lanes) inclusive_sum += lower_sum;
  }
  if (lane_index() == kWarpLanes - 1) {
    const SeqLengths kind = is_uniform ? SeqLengths::kUniform : SeqLengths::kMixed;
    scheduler_storage.warp_seqs[warp_index()] = {inclusive_sum, num_kv_blocks, num_m_groups,
                                                 is_invalid ? SeqLengths::kInvalid : kind};
  }
  __syncthreads();
  // Each lane reads the result of one warp; there are fewer warps than lanes.
  constexpr int kWarps = kThreads / kWarpLanes;
  const WarpSeqs found = scheduler_storage.warp_seqs[min(lane_index(), kWarps - 1)];
  const int warp_blocks = lane_index() < kWarps ? found.linear_blocks : 0;
  int total_blocks = __reduce_add_sync(~0u, warp_blocks);
  int begin = __reduce_add_sync(~0u, lane_index() < warp_index() ? warp_blocks : 0);
  begin += inclusive_sum - own_blocks;
  num_kv_blocks = __shfl_sync(~0u, found.num_kv_blocks, 0);
  num_m_groups = __shfl_sync(~0u, found.num_m_groups, 0);
  if (__any_sync(~0u, found.kind == SeqLengths::kInvalid)) return false;
  is_uniform = __all_sync(
      ~0u, found.kind == SeqLengths::kUniform && found.num_kv_blocks == num_kv_blocks &&
               found.num_m_groups == num_m_groups && num_kv_blocks > 0 && num_m_groups > 0);
  int num_ranges =
      max(1, min(min(params.num_cta_groups, kMaxRanges), total_blocks / kMinBlocksPerRange));
  int fixed_overhead_blocks = kFixedOverheadBlocks;
  if (is_uniform) {
    const int aligned = aligned_ranges(num_ranges, params.num_seqs * num_m_groups, num_kv_blocks);
    if (aligned > 0) {
      num_ranges = aligned;
      fixed_overhead_blocks = 0;
      const int seq_blocks = num_m_groups * num_kv_blocks;
      total_blocks = params.num_seqs * seq_blocks;
      begin = min(first, params.num_seqs) * seq_blocks;
      own_blocks = max(last - first, 0) * seq_blocks;
    }
  }
  const int index = num_ranges - 1 - cta_group;
  if (index < 0 || total_blocks == 0) return false;
  const int quotient = static_cast<u32>(total_blocks) / static_cast<u32>(num_ranges);
  const int remainder = total_blocks - quotient * num_ranges;
  const int range_begin = range_begin_of(index, quotient, remainder, num_ranges);
  if (begin <= range_begin && range_begin < begin + own_blocks) {
    const int blocks_per_tile = seq_info.num_kv_blocks + fixed_overhead_blocks;
    // The range may begin in a later sequence of the thread; the scheduler advances to it.
    int m_group = 0;
    if (seq_info.num_m_groups != 1) {
      m_group = min(static_cast<int>(static_cast<u32>(range_begin - begin) / blocks_per_tile),
                    seq_info.num_m_groups - 1);
    }
    const int range_end = range_begin_of(index + 1, quotient, remainder, num_ranges);
    scheduler_storage.range = {total_blocks,          num_ranges,  index,
                               fixed_overhead_blocks, range_begin, range_end};
    scheduler_storage.initial_state = {seq_info, first, m_group, begin + m_group * blocks_per_tile};
  }
  __syncthreads();
  return true;
}

// Block-table reader: one warp loads the page ids of a work item ahead of their use, two per lane.

struct BlockTableReader {
  const int* page_ids;
  int end;  // of the pages of the work item
  int base;
  int current;  // id of page base + lane
  int next;  // id of page base + 32 + lane

  __device__ BlockTableReader(const Params& params, const WorkCoord& coord)
      : page_ids(params.block_tables + block_table_row(params, coord.seq_idx).start),
        end(ceil_div(min((coord.first_kv_block + coord.num_kv_blocks) * kBlockN, coord.kv_end),
                     kPageSize)),
        base(coord.first_kv_block * kBlockN / kPageSize) {
    current = read(base);
    next = read(base + kWarpLanes);
  }

  __device__ int read(int first) const {
    const int page = first + lane_index();
    return page < end ? page_ids[page] : -1;
  }

  // The id of the page last passed to advance: does not depend on the load of `next`.
  __device__ int current_page_id(int page) const { return __shfl_sync(~0u, current, page - base); }

  // The id of a page in [base, base + 64).
  __device__ int page_id(int page) const {
    const int distance = page - base;
    return __shfl_sync(~0u, distance < kWarpLanes ? current : next, distance % kWarpLanes);
  }

  // Drops the pages before `page`.
  __device__ void advance(int page) {
    if (page - base < kWarpLanes) return;
    base += kWarpLanes;
    current = next;
    next = read(base + kWarpLanes);
  }
};

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk". Needs sm_90.
// `map` is the generic address of a tensor map, `policy` one of createpolicy for L2; x, y, z, w, v
// count elements, the innermost first.

// cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
// Copies a box to shared memory, zero-fills what lies outside the tensor, and completes its bytes
// at the barrier.
__device__ inline void cp_async_bulk_tensor(u32 target, const void* map, u32 barrier, u64 policy,
                                            int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(target),
      "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
__device__ inline void cp_async_bulk_tensor(u32 target, const void* map, u32 barrier, u64 policy,
                                            int x, int y, int z, int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(target),
      "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

// cp.async.bulk.prefetch.tensor.4d.L2.global
// Prefetches a box into L2.
__device__ inline void cp_async_bulk_prefetch_tensor(const void* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// TMA boxes of a KV block: as many tokens per copy as lie in one page.

// Coordinates of the TMA boxes of a KV block. Boxes past the last token are not copied.
struct KvTileBoxes {
  int num_boxes;
  int slot[kBoxes];
  int page[kBoxes];

  __device__ KvTileBoxes(BlockTableReader& block_table, int kv_block, int end_token) {
    const int first_token = kv_block * kBlockN;
    num_boxes = min(ceil_div(end_token - first_token, kBoxTokens), kBoxes);
    block_table.advance(first_token / kPageSize);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int token = first_token + box * kBoxTokens;
      slot[box] = token % kPageSize;
      page[box] = box == 0 ? block_table.current_page_id(token / kPageSize)
                           : block_table.page_id(token / kPageSize);
    }
  }

  __device__ u32 tile_bytes() const { return num_boxes * kBoxTokens * kTileRowBytes; }

  // Copies one tile of the KV block; the bytes count at `barrier`. Called by one lane.
  __device__ void copy_tile(const TensorMap* map, int column, u32 target, u32 barrier,
                            u64 cache_hint, int row_bytes = kTileRowBytes) const {
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      if (kBoxes > 1 && box >= num_boxes) continue;
      cp_async_bulk_tensor(target + box * kBoxTokens * row_bytes, map, barrier, cache_hint, 0,
                           slot[box], column, page[box]);
    }
  }
};

// CTAs of a group read the same KV at about the same time. One of them prefetches each KV block
// into L2, so many KV blocks ahead.
constexpr int kPrefetchBlocks = 2;

__device__ inline void prefetch_kv_block(const Params& params, const BlockTableReader& block_table,
                                         int kv_block) {
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    const int token = kv_block * kBlockN + box * kBoxTokens;
    const int page = block_table.page_id(token / kPageSize);
    if (lane_index() != 0) continue;
    cp_async_bulk_prefetch_tensor(&params.kv_map, 0, token % kPageSize, 0, page);
    cp_async_bulk_prefetch_tensor(&params.rope_map, 0, token % kPageSize, 0, page);
  }
}

// PTX ISA, "Data Movement and Conversion Instructions: mov". Needs sm_80.

// mov.b64
// Packs two words into one of 64 bits, here: opaque to the compiler.
__device__ inline u64 mov_b64(u32 low, u32 high) {
  u64 word;
  asm("mov.b64 %0, {%1, %2};" : "=l"(word) : "r"(low), "r"(high));
  return word;
}

// mov.b32
// Makes a value opaque to the compiler.
__device__ inline void mov_b32(u32& word) { asm volatile("mov.b32 %0, %0;" : "+r"(word)); }

// mov.u32
// Re-reads this thread's index in the CTA.
__device__ inline u32 mov_tid_x() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Re-reads `%tid.x` through volatile assembly to cut live ranges: values derived from it are
// recomputed at their use instead of holding registers across the MMAs. The index is assumed
// non-negative, so that division becomes a shift.

__device__ inline int reload_tid() {
  const int thread = static_cast<int>(mov_tid_x());
  __builtin_assume(thread >= 0);
  return thread;
}
__device__ inline int reload_lane() { return reload_tid() % kWarpLanes; }
__device__ inline int reload_warp() { return reload_tid() / kWarpLanes; }

// Shared-memory swizzle of 16-byte chunks: the eight rows that one ldmatrix reads at the same
// column lie in different banks.

constexpr int kChunkElements = 8;

// Byte offset of chunk `chunk` of row `row`. Rows of 128 bytes and more permute the eight chunks of
// every 128 bytes by the row index; two 64-byte rows share 128 bytes.
template <int kRowBytes>
__device__ inline u32 swizzled_offset(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0, "a row is 64 bytes or whole 128 bytes");
  const int permuted = kRowBytes == 64 ? chunk ^ ((row >> 1) & 3) : chunk ^ (row & 7);
  return static_cast<u32>(row * kRowBytes + permuted * kChunkBytes);
}

// Query rows: query token and head of each row of a tile, in the caller's tensors.

struct QueryRow {
  i64 query;  // index of the query token in the query tensor
  int head;
};

// Padding, where `is_row` is false, maps to a row that exists, so that its address is valid.
__device__ inline QueryRow query_row(const Params& params, const WorkCoord& coord, int row,
                                     bool is_row) {
  const u32 packed_row = is_row ? coord.first_row + row : 0;
  const u32 heads = params.heads;
  // Most tiles have one query token; the branch avoids an integer division.
  const u32 token = kIsSparse || packed_row < heads ? 0 : packed_row / heads;
  return {is_row ? coord.first_query + token : 0, static_cast<int>(packed_row - token * heads)};
}

// PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy, cp.async". Needs sm_80.

// cp.async.cg.shared.global.L2::128B
// Copies 16 bytes, bypassing L1; bytes from `source_bytes` on are zero-filled.
__device__ inline void cp_async_cg_16(u32 shared_address, const void* global, u32 source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address),
               "l"(global), "r"(source_bytes)
               : "memory");
}

// cp.async.cg.shared.global.L2::cache_hint.L2::128B
// The same, with one of createpolicy for L2.
__device__ inline void cp_async_cg_16(u32 shared_address, const void* global, u32 source_bytes,
                                      u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(
                   shared_address),
               "l"(global), "r"(source_bytes), "l"(policy)
               : "memory");
}

// cp.async.ca.shared.global
// Copies 4 bytes; if `source_bytes` is 0 they are not read and become zero.
__device__ inline void cp_async_ca_4(u32 shared_address, const void* global, u32 source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address), "l"(global),
               "r"(source_bytes)
               : "memory");
}

// cp.async.ca.shared.global
// Copies 8 bytes; if `source_bytes` is 0 they are not read and become zero.
__device__ inline void cp_async_ca_8(u32 shared_address, const void* global, u32 source_bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(shared_address), "l"(global),
               "r"(source_bytes)
               : "memory");
}

// cp.async.commit_group
__device__ inline void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group
// Waits until at most `kPending` of this thread's newest groups are in flight.
template <int kPending>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.mbarrier.arrive.noinc.shared::cta.b64
// Arrives at a barrier when all copies issued by this thread have completed.
__device__ inline void cp_async_mbarrier_arrive_noinc(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Size of the sub-tile that each reducing CTA reduces.

// Sub-tiles balance the reducers: whole groups of four fragments, which one warp sums together
// because they share their rows, or with many reducers a part of one group.
constexpr int kFragsPerStep = 4;

// Unsigned, because that division is shorter.
__device__ constexpr int frags_per_subtile(u32 num_reducers) {
  const int frags = static_cast<int>((kNumFrags + num_reducers - 1) / num_reducers);
  return frags < 3 ? frags : ceil_div(frags, kFragsPerStep) * kFragsPerStep;
}

// Stream-K tile scheduler: iterates over the work items of a CTA's range. A work item is one split
// of one work tile, for the row tile of this CTA's rank in its CTA group.

// KV block of a linear block index, relative to the tile's first. The overhead in front of the KV
// blocks belongs to the first.
__device__ inline int kv_block_in_tile(int linear_block_idx, int tile_begin,
                                       const ScheduleRange& range) {
  return max(linear_block_idx - tile_begin - range.fixed_overhead_blocks, 0);
}

// Splits of a work tile: one per range, from `first_range` on.
struct Splits {
  int num_splits;
  int first_range;
  bool ends_at_range;  // the tile's last split ends its range
};

// The first range that begins at or after a linear block index: the smallest index with
// index * total_blocks >= linear_block_idx * num_ranges. The float quotient is off by one at most,
// and takes a tenth of the instructions of a 64-bit division.
__device__ inline int first_range_from(int linear_block_idx, const ScheduleRange& range) {
  const i64 scaled = static_cast<i64>(linear_block_idx) * range.num_ranges;
  const float ranges_per_block =
      __fdividef(static_cast<float>(range.num_ranges), static_cast<float>(range.total_blocks));
  int index = __float2int_rz(static_cast<float>(linear_block_idx) * ranges_per_block) - 1;
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    if (static_cast<i64>(index) * range.total_blocks < scaled) ++index;
  }
  return index;
}

__device__ inline Splits splits_of(int tile_begin, int num_kv_blocks, const ScheduleRange& range) {
  const int first_kv_block = tile_begin + range.fixed_overhead_blocks;
  const int second_range = first_range_from(first_kv_block + 1, range);
  const int end = first_kv_block + num_kv_blocks;
  const int end_range = first_range_from(end, range);
  const bool ends_at_range = static_cast<u64>(end_range) * range.total_blocks <
                             static_cast<u64>(end + 1) * range.num_ranges;
  return {1 + end_range - second_range, second_range - 1, ends_at_range};
}

// One split of one work tile, as the scheduler publishes it to all warps of the CTA.
struct WorkItem : WorkCoord {
  u32 work_idx;  // index among the CTA's work items
  int unmasked_kv_end;  // end of the tokens that every row of the tile attends to
  int num_splits;
  // The first `num_reducers` splits reduce a subtile each. The last split does so only if its CTA
  // has no work item after it.
  int num_reducers;
  int subtile_frags;  // with more than two splits
  int split_idx;
  int first_split_cta;  // CTA of split 0
  int row_kv_end[kBlockM];  // end of the tokens that a row attends to
};

// Called by whole warps.
struct TileScheduler : SchedulerState {
  const Params& params;
  const ScheduleRange& range;
  int rank_in_group;

  __device__ TileScheduler(const Params& params, const ScheduleRange& range, int rank_in_group,
                           const SchedulerState& state)
      : SchedulerState(state), params(params), range(range), rank_in_group(rank_in_group) {}

  __device__ void advance() {
    tile_begin += seq_info.num_kv_blocks + range.fixed_overhead_blocks;
    if (++m_group < seq_info.num_m_groups) return;
    m_group = 0;
#pragma unroll 1
    do {
      if (++seq_idx >= params.num_seqs) return;
      seq_info = seq_info_of(params, seq_idx);
    } while (seq_info.num_m_groups == 0);
  }

  // Coordinates of the current work item; kInvalidWork if the current tile has none for this CTA.
  __device__ WorkCoord current_work() const {
    const int first = first_kv_block();
    const int last = end_kv_block();
    const bool has_work = seq_info.num_kv_blocks == 0 ? range.begin <= tile_begin : first < last;
    const int first_row = (m_group * params.cta_group_size + rank_in_group) * kBlockM;
    if (!has_work || first_row >= seq_info.rows) return kInvalidWork;
    const int rows = min(seq_info.rows - first_row, kBlockM);
    const int kv_end = kv_end_of_row(first_row + rows - 1);
    const int attended_blocks = static_cast<u32>(kv_end + kBlockN - 1) / kBlockN;
    const int num_kv_blocks = max(min(last, attended_blocks) - first, 0);
    return {seq_info.first_query, seq_idx, first_row, rows, first, num_kv_blocks, kv_end};
  }

  // Advances to the next work item and returns its coordinates; kInvalidWork after the last one.
  // `is_first` starts at the current tile instead of the next one.
  __device__ WorkCoord next_work(bool is_first) {
    WorkCoord coord;
#pragma unroll 1
    do {
      if (!is_first) advance();
      is_first = false;
      if (seq_idx >= params.num_seqs || tile_begin >= range.end) return kInvalidWork;
      coord = current_work();
    } while (coord.seq_idx < 0);
    return coord;
  }

  // The first work item, from the tile of `initial_state` on.
  __device__ WorkCoord initial_work() {
    u32 is_first = 1;
    mov_b32(is_first);  // opaque: otherwise the compiler peels the first iteration
    return next_work(is_first != 0);
  }

  // Writes the current work item, of which `coord` is the coordinates.
  __device__ void fill(WorkItem& work, const WorkCoord& coord, u32 work_idx) const {
    if constexpr (!kIsSparse) {  // sparse rows attend to all top-k indices
#pragma unroll 1
      for (int row = reload_lane(); row < kBlockM; row += kWarpLanes) {
        work.row_kv_end[row] = row < coord.rows ? kv_end_of_row(coord.first_row + row) : 0;
      }
    }
    if (reload_lane() != 0) return;
    static_cast<WorkCoord&>(work) = coord;
    Splits splits = {1, range.index, true};
    if (first_kv_block() > 0 || end_kv_block() < seq_info.num_kv_blocks) {
      splits = splits_of(tile_begin, seq_info.num_kv_blocks, range);
    }
    work.work_idx = work_idx;
    work.unmasked_kv_end = kv_end_of_row(coord.first_row);
    work.num_splits = splits.num_splits;
    work.num_reducers = splits.num_splits - (splits.ends_at_range ? 0 : 1);
    work.subtile_frags = frags_per_subtile(work.num_reducers);
    work.split_idx = first_kv_block() == 0 ? 0 : range.index - splits.first_range;
    work.first_split_cta = cta_of_range(splits.first_range);
  }

  // The tile's KV blocks inside the range, relative to the tile: [first_kv_block, end_kv_block).
  __device__ int first_kv_block() const {
    return range.begin > tile_begin ? kv_block_in_tile(range.begin, tile_begin, range) : 0;
  }
  __device__ int end_kv_block() const {
    const int tile_end = tile_begin + seq_info.num_kv_blocks + range.fixed_overhead_blocks;
    return range.end < tile_end ? kv_block_in_tile(range.end, tile_begin, range)
                                : seq_info.num_kv_blocks;
  }

  // End of the tokens that a row of the sequence attends to: its own position under a causal mask.
  __device__ int kv_end_of_row(int row) const {
    if (kIsSparse || !params.is_causal || seq_info.q_len <= 1) return seq_info.kv_len;
    const u32 token = static_cast<u32>(row) / static_cast<u32>(params.heads);
    return max(seq_info.kv_len - (seq_info.q_len - 1 - static_cast<int>(token)), 0);
  }

  // The CTA that has a range, at this CTA's rank in the CTA group.
  __device__ int cta_of_range(int index) const {
    return (range.num_ranges - 1 - index) * params.cta_group_size + rank_in_group;
  }
};

// Slot and phase in the work pipeline: two slots for work items, one buffer for Q.
__device__ inline u32 work_slot(u32 work_idx) { return work_idx % 2; }
__device__ inline u32 work_phase(u32 work_idx) { return work_idx / 2 % 2; }
__device__ inline u32 query_phase(u32 work_idx) { return work_idx % 2; }

// Shared memory plan of the CTA.

constexpr int kStages = 5;  // KV blocks, as many as fit

struct SharedMemoryPlan {
  unsigned char query[kQueryBytes];
  unsigned char kv[kStages][kKvBlockBytes];  // P overwrites the rope tile
  float rescale[kStages][kBlockM];  // alpha of the KV block, for O
  float row_max[2][kBlockM];  // of a whole work item, log2 units
  float row_sum[2][kBlockM];
  // fp16 scale of partial O; aligned because rows are read in pairs.
  alignas(sizeof(float2)) float row_scale[2][kBlockM];
  u32 rescale_flags[kStages];  // a byte per QK warp: whether any alpha of its rows is not 1
  WorkItem work_items[2];
  SchedulerStorage scheduler_storage;
  Barrier kv_full[kStages];
  Barrier kv_empty[kStages];
  Barrier probabilities_full[kStages];
  Barrier row_state_full[2];
  Barrier first_query_full;
  Barrier query_full;
  Barrier query_empty;
  Barrier work_full[2];
  Barrier work_empty[2];
  int has_nonfinite[2];  // whether a row of the work item attends to a NaN in V
  float score_scale;  // to log2 units
};
// The split reduction aliases Q and KV: a CTA combines behind its last work item only.
constexpr int kCombineSmemBytes = sizeof(SharedMemoryPlan::query) + sizeof(SharedMemoryPlan::kv);
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec states the size of the plan");
static_assert(kQueryBytes % 1024 == 0 && kKvBlockBytes % 1024 == 0, "swizzled tiles are aligned");

// Called by one thread.
__device__ inline void init_kv_barriers(SharedMemoryPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(smem.kv_full[stage], 1);
    init_barrier(smem.kv_empty[stage], kConsumerWarps);
    init_barrier(smem.probabilities_full[stage], kWarpsWithRows);
  }
  for (int stage = 0; stage < 2; ++stage) init_barrier(smem.row_state_full[stage], kWarpsWithRows);
  for (int stage = 0; stage < kStages; ++stage) smem.rescale_flags[stage] = 0;
  for (int stage = 0; stage < 2; ++stage) smem.has_nonfinite[stage] = 0;
}

// Q load: the FP8 query rows of a work item, by cp.async.

// Called by `threads` threads; eight lanes copy a row, 128 bytes at a time. Only issues the copies.
__device__ inline void load_q_async(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread, int threads) {
  const int lane = thread % 8;
  const u32 target = shared_address(smem.query);
#pragma unroll 1
  for (int row = thread / 8; row < kBlockM; row += threads / 8) {
    const bool is_row = row < coord.rows;
    const auto [query, head] = query_row(params, coord, row, is_row);
    const unsigned char* latent = params.query + query * params.query_stride +
                                  head * params.query_head_stride + lane * kChunkBytes;
    const u32 latent_target = target + swizzled_offset<kTileRowBytes>(row, lane);
    const u32 bytes = is_row ? kChunkBytes : 0;  // zero-fills padding rows
#pragma unroll
    for (int tile = 0; tile < kLatentTiles; ++tile) {
      cp_async_cg_16(latent_target + tile * kQueryTileBytes, latent + tile * kTileRowBytes, bytes);
    }
    if (lane >= kRopeRowBytes / kChunkBytes) continue;
    const unsigned char* rope = params.query_rope + query * params.query_rope_stride +
                                head * params.query_rope_head_stride + lane * kChunkBytes;
    cp_async_cg_16(
        target + kLatentTiles * kQueryTileBytes + swizzled_offset<kRopeRowBytes>(row, lane), rope,
        bytes);
  }
  cp_async_commit_group();
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence". Needs sm_90.

// fence.acq_rel.cta
// Orders this thread's reads and writes before a later arrive, for the CTA.
__device__ inline void fence_acq_rel_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// fence.proxy.async.shared::cta
// Orders this thread's writes of shared memory before accesses of the async proxy: wgmma and TMA.
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.mbarrier_init.release.cluster
// Makes mbarrier inits of this thread visible to the async proxy.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Work pipeline: publishes work items and Q to the producer and consumer warps through mbarriers.

// Called by one thread, with the number of warps that publish a work item, read it, and load Q.
__device__ inline void init_work_barriers(const SharedMemoryPlan& smem, int producers,
                                          int consumers, int q_warps) {
  init_barrier(smem.first_query_full, kConsumerWarps);
  init_barrier(smem.query_full, q_warps);
  init_barrier(smem.query_empty, kQueryReaders);
  for (int stage = 0; stage < 2; ++stage) {
    init_barrier(smem.work_full[stage], producers);
    init_barrier(smem.work_empty[stage], consumers);
  }
}

__device__ inline void finish_q_load(const Barrier& full) {
  cp_async_wait_group<0>();
  fence_proxy_async();
  __syncwarp();
  if (reload_lane() == 0) arrive(full);
}

// The consumer warps load the first Q themselves: they have no other work before it arrives.
__device__ inline void load_first_q_async(const Params& params, const WorkCoord& coord,
                                          SharedMemoryPlan& smem) {
  load_q_async(params, coord, smem, static_cast<int>(threadIdx.x), kConsumerThreads);
}

// Keeps the scheduler's state in shared memory, because scheduler warps have few registers.
__device__ inline void save_scheduler_state(const TileScheduler& scheduler,
                                            SharedMemoryPlan& smem) {
  __syncwarp();
  if (reload_lane() == 0) smem.scheduler_storage.current_state = scheduler;
  __syncwarp();
}

// Writes work item `work_idx` to its slot. The saved state is already at the first work item, so
// that one does not advance.
__device__ inline void produce_work(const Params& params, int rank_in_group, u32 work_idx,
                                    SharedMemoryPlan& smem) {
  TileScheduler scheduler(params, smem.scheduler_storage.range, rank_in_group,
                          smem.scheduler_storage.current_state);
  const WorkCoord coord = scheduler.next_work(work_idx == 0);
  WorkItem& work = smem.work_items[work_slot(work_idx)];
  if (coord.seq_idx >= 0) {
    scheduler.fill(work, coord, work_idx);
    save_scheduler_state(scheduler, smem);
  } else if (reload_lane() == 0) {
    work.seq_idx = -1;
  }
  __syncwarp();
}

// Called by the producer warp: releases work item `work_idx` and waits for the next one.
__device__ inline WorkCoord next_work_coord(SharedMemoryPlan& smem, u32& work_idx) {
  __syncwarp();  // all lanes have read the work item
  if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx)]);
  ++work_idx;
  wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
  return smem.work_items[work_slot(work_idx)];
}

// Waits for Q of work item `work_idx`.
__device__ inline void wait_query(const SharedMemoryPlan& smem, u32 work_idx) {
  if (work_idx == 0) {
    wait(smem.first_query_full, 0);
  } else {
    wait(smem.query_full, query_phase(work_idx) ^ 1);
  }
}

// PTX ISA, "Data Movement and Conversion Instructions: ld". Needs sm_80.

// ld.acquire.gpu.global.u32
// Later accesses see what other CTAs wrote before they released the value.
__device__ inline u32 ld_acquire_gpu(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ld.relaxed.gpu.global.s32
// Relaxed at gpu scope: may race with writers, and is never served from L1.
__device__ inline int ld_relaxed_gpu(const int* address) {
  int value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ld.relaxed.gpu.global.u32
__device__ inline u32 ld_relaxed_gpu(const u32* address) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ld.global.cg.v2.f32
// Bypasses L1, which may hold stale data of other CTAs.
__device__ inline float2 ld_global_cg_v2_f32(const void* address) {
  float2 value;
  asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];"
               : "=f"(value.x), "=f"(value.y)
               : "l"(address)
               : "memory");
  return value;
}

// ld.global.cg.v4.f32
__device__ inline float4 ld_global_cg_v4_f32(const void* address) {
  float4 value;
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(address)
               : "memory");
  return value;
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: red". Needs sm_80.

// red.release.gpu.global.inc.u32
// Adds one, and wraps to zero at `limit`. Releases preceding writes to threads that acquire the
// count.
__device__ inline void red_inc_release_gpu(u32* address, u32 limit) {
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(address), "r"(limit) : "memory");
}

// red.relaxed.gpu.global.inc.u32
// Adds one, and wraps to zero at `limit`.
__device__ inline void red_inc_relaxed_gpu(u32* address, u32 limit) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(address), "r"(limit) : "memory");
}

// red.relaxed.gpu.global.add.u32
__device__ inline void red_add_relaxed_gpu(u32* address, u32 value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// CTA throttle: delays CTAs that run ahead. In the memory-bound regime SMs do not share HBM
// bandwidth evenly; fast CTAs finish early and their share of the bandwidth is lost.

// A CTA may be this far ahead of the mean of all CTAs, in halves of a KV block.
constexpr u32 kMaxHalfBlocksAhead = 3;
// A CTA adds its progress to the total once per so many KV blocks.
constexpr u32 kReportInterval = 2;

// The progress counter lies in the last partial-output slot of CTA 0, see combine/partial_out.cuh.
// That slot is unused: CTA 0 has the last range, so no split continues past its end.
constexpr int kProgressOffset = kBlockM * kHeadDimVo * sizeof(u16);

// Counts the KV blocks that all CTAs have requested in an otherwise unused word of the workspace.
// The word is not initialised, so each CTA subtracts the value it reads before its first report. A
// CTA that starts late subtracts reports of others, too, and appears to be ahead; `num_polls`
// bounds what that costs to one poll per requested KV block.
struct CtaThrottle {
  u32* progress;
  // 0, no throttling, where ranges differ in work, or where CTAs of a group share KV through L2.
  u32 num_ctas;
  u32 initial_total = 0;
  u32 total_blocks = 0;
  u32 own_blocks = 0;
  u32 reported = 0;
  u32 num_polls = 0;

  __device__ CtaThrottle(const Params& params, const ScheduleRange& range)
      : progress(reinterpret_cast<u32*>(params.partial_out + kProgressOffset)),
        num_ctas(range.fixed_overhead_blocks == 0 && params.cta_group_size == 1 ? range.num_ranges
                                                                                : 0) {}

  // Called before a KV block is requested. Never delays the prologue that fills the pipeline.
  __device__ void wait() {
    if (num_ctas == 0) return;
#pragma unroll 1
    while (reported > 0 && num_polls < own_blocks && is_ahead()) {
      total_blocks = ld_relaxed_gpu(progress);
      ++num_polls;
    }
  }

  // Called after a KV block has been requested.
  __device__ void report() {
    if (num_ctas == 0) return;
    if (++own_blocks == 1) initial_total = ld_relaxed_gpu(progress);
    if (own_blocks <= kStages || own_blocks % kReportInterval != 0) return;
    if (lane_index() == 0) red_add_relaxed_gpu(progress, own_blocks - reported);
    __syncwarp();
    reported = own_blocks;
    total_blocks = ld_relaxed_gpu(progress);
  }

  __device__ bool is_ahead() const {
    return static_cast<int>(own_blocks * num_ctas - (total_blocks - initial_total)) * 2 >
           static_cast<int>(kMaxHalfBlocksAhead * num_ctas);
  }
};

// KV producer warp: loads the KV blocks of all work items by TMA, one pipeline stage per KV block.

// Issuing a TMA copy takes hundreds of cycles beside MMAs. So the latent part of a KV block that
// lies in one page is one copy, and otherwise each lane copies one tile.
__device__ inline void copy_kv_block(const Params& params, const KvTileBoxes& boxes, u32 target,
                                     u32 full, u64 cache_hint) {
  const int lane = lane_index();
  if (lane == 0) mbarrier_arrive_expect_tx(full, boxes.num_boxes * kBoxTokens * kHeadDimQk);
  __syncwarp();
  if constexpr (kBoxes == 1) {
    if (lane == 0) {
      cp_async_bulk_tensor(target, &params.kv_map, full, cache_hint, 0, boxes.slot[0], 0,
                           boxes.page[0]);
      cp_async_bulk_tensor(target + kLatentTiles * kTileBytes, &params.rope_map, full, cache_hint,
                           0, boxes.slot[0], 0, boxes.page[0]);
    }
  } else if (lane <= kLatentTiles) {
    const bool is_rope = lane == kLatentTiles;
    boxes.copy_tile(is_rope ? &params.rope_map : &params.latent_map, is_rope ? 0 : lane,
                    target + lane * kTileBytes, full, cache_hint,
                    is_rope ? kRopeRowBytes : kTileRowBytes);
  }
  __syncwarp();
}

// `coord` is the first work item. A CTA of a CTA group waits for its first KV block before it loads
// more: otherwise the first load of the last CTA queues behind all loads of the others.
__device__ inline void producer_loop(const Params& params, int, WorkCoord coord,
                                     SharedMemoryPlan& smem) {
  const u64 cache_hint = kv_cache_hint(params.cta_group_size > 1);
  CtaThrottle throttle(params, smem.scheduler_storage.range);
  PipelineState<kStages> pipe;
  bool waits_for_first = params.cta_group_size > 1;
  for (u32 work_idx = 0; coord.seq_idx >= 0; coord = next_work_coord(smem, work_idx)) {
    const int end = coord.first_kv_block + coord.num_kv_blocks;
    BlockTableReader block_table(params, coord);
#pragma unroll 1
    for (int kv_block = coord.first_kv_block; kv_block < end; ++kv_block) {
      const KvTileBoxes boxes(block_table, kv_block, coord.kv_end);
      wait(smem.kv_empty[pipe.index], pipe.phase ^ 1);
      throttle.wait();
      copy_kv_block(params, boxes, shared_address(smem.kv[pipe.index]),
                    shared_address(&smem.kv_full[pipe.index]), cache_hint);
      if (waits_for_first) wait(smem.kv_full[0], 0);
      waits_for_first = false;
      throttle.report();
      pipe.advance();
    }
  }
}

// PTX ISA, "Data Movement and Conversion Instructions: prefetch". Needs sm_90.

// prefetch.tensormap
// Prefetches a TMA descriptor by its generic address.
__device__ inline void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// prefetch.global.L2
// Prefetches the cache line of an address into L2.
__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: barrier.cta". Needs sm_80.
// Barrier ids are 0 to 15; `threads` counts those that wait and those that only arrive.

// barrier.cta.sync.aligned
__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier.cta.arrive.aligned
__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier.cta.red.or.aligned.pred
// Waits for all threads; returns whether any of them passes a nonzero value.
__device__ inline u32 barrier_red_or(int barrier, int threads, u32 value) {
  u32 any;
  asm volatile(
      "{.reg .pred p, q; setp.ne.u32 p, %3, 0; barrier.cta.red.or.aligned.pred q, %1, %2, p; "
      "selp.u32 %0, 1, 0, q;}"
      : "=r"(any)
      : "r"(barrier), "r"(threads), "r"(value)
      : "memory");
  return any;
}

// Named barriers of a CTA: `config.cuh` enumerates them by the fact they announce. Barrier 0 is
// __syncthreads.

// `threads` counts those that wait and those that only arrive.
__device__ inline void named_barrier_sync(NamedBarrier barrier, int threads) {
  barrier_sync(static_cast<int>(barrier), threads);
}

__device__ inline void named_barrier_arrive(NamedBarrier barrier, int threads) {
  barrier_arrive(static_cast<int>(barrier), threads);
}

// Returns whether any thread passes true.
__device__ inline bool named_barrier_sync_or(NamedBarrier barrier, int threads, bool value) {
  return barrier_red_or(static_cast<int>(barrier), threads, value) != 0;
}

// The barrier `index` places behind one that has several: one for each stage, or for each half.
__device__ constexpr NamedBarrier operator+(NamedBarrier barrier, int index) {
  return static_cast<NamedBarrier>(static_cast<int>(barrier) + index);
}

// A group of consumer warps that cooperates in the split reduction: all consumer warps, or the
// half that owns one half of the accumulators.

// Half of the accumulators that a warp belongs to.
__device__ inline int half_of_warp(int warp) { return warp % 4 / 2; }

struct ReduceGroup {
  int half;  // -1 for all warps

  __device__ int num_threads() const { return half < 0 ? kConsumerThreads : kConsumerThreads / 2; }
  __device__ void sync() const {
    named_barrier_sync(NamedBarrier::PartialsStored + max(half, 0), num_threads());
  }

  // Index of this thread in the group.
  __device__ int thread_idx() const {
    const int warp = reload_warp();
    return half < 0 ? reload_tid() : (warp / 4 * 2 + warp % 2) * kWarpLanes + reload_lane();
  }
  __device__ bool is_leader() const { return thread_idx() == 0; }
  __device__ bool has_warp(int warp) const { return half < 0 || half_of_warp(warp) == half; }
};

// Accumulator layout of O^T: output dims of a thread of the PV warpgroups.

// Two PV warpgroups each hold all query rows and one half of the output dims, in tiles of 64. A
// warp holds 16 dims of a tile, and a thread two adjacent ones: rows g and g + 8 of the MMA, with
// g = lane / 4, are dims 2g and 2g + 1.
constexpr int kDimsOfTile = 64;
constexpr int kHalfDims = kHeadDimVo / 2;
constexpr int kDimTiles = kHalfDims / kDimsOfTile;

// First dim of accumulator float4 `i` of this lane in warp `warp`; the second is the next one.
__device__ inline int dim_of(int warp, int i) {
  return warp / 4 * kHalfDims + i / (kBlockM / 8) * kDimsOfTile + warp % 4 * 16 +
         reload_lane() / 4 * 2;
}

// Warp ranks within the two PV warpgroups, for any division of output dims among warps.

// Output dim of component `c` of float4 `i`.
__device__ inline int element_dim(int warp, int i, int c) { return dim_of(warp, i) + c / 2; }

// Rank of a warp within its half, which takes two warps of each warpgroup, and its inverse.
__device__ inline int rank_in_half(int warp) { return warp / 4 * 2 + warp % 2; }
__device__ inline int warp_at(int half, int rank) { return rank / 2 * 4 + half * 2 + rank % 2; }

// Accumulator fragments of the output with swap-AB: O^T = V^T P^T, so M counts output dims and N
// counts query rows.

constexpr int kRowGroups = kBlockM / 8;
constexpr int kRowsPerThread = kRowGroups * 2;
using Accumulators = float[kDimTiles][kBlockM / 2];

// Row `r` of this thread, the same in all warps. Lanes that are equal modulo 4 hold the same rows.
__device__ inline int row_of(int r) { return r / 2 * 8 + reload_lane() % 4 * 2 + r % 2; }

// Row of component `c` of float4 `i`.
__device__ inline int element_row(int, int i, int c) { return row_of(i % kRowGroups * 2 + c % 2); }

__device__ inline float4 accumulator(const Accumulators& accumulators, int i) {
  const float* acc = accumulators[i / kRowGroups] + i % kRowGroups * 4;
  return make_float4(acc[0], acc[1], acc[2], acc[3]);
}

__device__ inline void set_accumulator(Accumulators& accumulators, int i, float4 value) {
  float* acc = accumulators[i / kRowGroups] + i % kRowGroups * 4;
  acc[0] = value.x;
  acc[1] = value.y;
  acc[2] = value.z;
  acc[3] = value.w;
}

// Rescales a group of eight rows; a thread holds two of them.
__device__ inline void rescale_group(Accumulators& accumulators, int group, float2 factor) {
#pragma unroll
  for (int tile = 0; tile < kDimTiles; ++tile) {
    float* acc = accumulators[tile] + group * 4;
    acc[0] *= factor.x;
    acc[1] *= factor.y;
    acc[2] *= factor.x;
    acc[3] *= factor.y;
  }
}

// Float4 `i` holds two rows of each of its two dims.
__device__ inline float4 weighted(float4 value, const float (&weights)[kRowsPerThread], int i) {
  const float a = weights[i % kRowGroups * 2];
  const float b = weights[i % kRowGroups * 2 + 1];
  return make_float4(value.x * a, value.y * b, value.z * a, value.w * b);
}

// Fragment order in memory: first by half of the warps, then by group of eight rows, then by warp.
constexpr int kRowsPerGroup = 8;
constexpr int kFragsPerRowGroup = kConsumerWarps / 2 * kDimTiles;
constexpr int kHalfFrags = kRowGroups * kFragsPerRowGroup;

__device__ inline int first_frag_of_warp(int warp) {
  return half_of_warp(warp) * kHalfFrags + rank_in_half(warp) * kDimTiles;
}

// Position of float4 `i` relative to the first fragment of its warp.
__device__ constexpr int frag_offset(int i) {
  return i % kRowGroups * kFragsPerRowGroup + i / kRowGroups;
}

// The float4 with index `frag` in this order.
__device__ constexpr int accumulator_in_frag_order(int frag) {
  return frag % kDimTiles * kRowGroups + frag / kDimTiles;
}

// The warp that holds a fragment, and the index of the fragment among its float4s.
__device__ inline int warp_of_frag(u32 frag) {
  return warp_at(frag / kHalfFrags, frag % kFragsPerRowGroup / kDimTiles);
}
__device__ inline int accumulator_of_frag(u32 frag) {
  return frag % kDimTiles * kRowGroups + frag / kFragsPerRowGroup % kRowGroups;
}

struct FragRows {
  int a;
  int b;
};

__device__ inline FragRows frag_rows(u32 frag) {
  const int row = row_of(frag / kFragsPerRowGroup % kRowGroups * 2);
  return {row, row + 1};
}

// One fp16 scale per row.
constexpr int kNumScales = 1;
__device__ inline int scale_of_warp(int) { return 0; }
__device__ inline int scale_of_frag(u32) { return 0; }

__device__ inline float4 accumulate_frag(float4 total, float4 value, float weight_a,
                                         float weight_b) {
  return make_float4(total.x + value.x * weight_a, total.y + value.y * weight_b,
                     total.z + value.z * weight_a, total.w + value.w * weight_b);
}

// Over the lanes that hold the same rows.
__device__ inline float max_over_lanes(float value) {
#pragma unroll
  for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// Scales: a number from the host, or a one-element tensor on the device.

__device__ inline float value_of(const float* tensor, float value) {
  return tensor == nullptr ? value : *tensor;
}

// PTX ISA, "Floating Point Instructions: ex2". Needs sm_20.

// ex2.approx.ftz.f32
// 2 to the power of x, relative error below 2^-22; minus infinity gives zero.
__device__ inline float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Final softmax state of a row: its normalisation factor and its LSE, attention sink included.

struct RowResult {
  float factor;  // multiplies the accumulators
  float lse;  // includes the sink; an empty row has its sink, or minus infinity
};

// `row_max` is base 2, `row_sum` is relative to it; `sink` is a natural-log logit without a V row,
// or minus infinity. `lse_factor` converts base 2 to the base of the LSE.
__device__ inline RowResult finish_row(float row_max, float row_sum, float sink,
                                       float lse_factor = 1.0f) {
  // Computed in base e: a finite sink may overflow in base 2.
  const float sink_lse = sink * (kLog2E * lse_factor);
  if (row_sum == 0.0f) return {0.0f, sink_lse};  // the row attends to nothing; a NaN is not nothing
  // Fused, so that only the distance can overflow, to an infinity of the right sign.
  const float distance = fmaf(sink, kLog2E, -row_max);
  // Relative to the larger of the two, because 2^distance may overflow. Selects keep a NaN.
  const bool is_sink_larger = distance > 0.0f;
  const float rescale = is_sink_larger ? ex2_approx(-distance) : 1.0f;
  const float total = row_sum * rescale + (is_sink_larger ? 1.0f : ex2_approx(distance));
  // Approximate, to about 22 bits, with a fraction of the instructions.
  const float log2_total = __log2f(total);
  return {__fdividef(rescale, total), is_sink_larger ? sink_lse + log2_total * lse_factor
                                                     : (row_max + log2_total) * lse_factor};
}

// Online-softmax state of a row: running max m and row sum l.

// P is relative to a stale row max. The max is not recomputed while no element of P exceeds this,
// so that rescales are rare.
constexpr float kMaxUnnormalizedP = 0x1p8f;

struct RowState {
  float row_max;  // base 2; the accumulators are relative to it
  float row_sum;  // of P, relative to it
};

__device__ inline i64 global_row(const Params& params, const WorkItem& work, int row) {
  return work.first_query * params.heads + work.first_row + row;
}

// The LSE is in the base of the call.
__device__ inline RowResult result_of(const Params& params, const WorkItem& work, int row,
                                      RowState state) {
  const float sink = params.sinks == nullptr || row >= work.rows
                         ? -kInfinity
                         : params.sinks[static_cast<u32>(work.first_row + row) % params.heads];
  return finish_row(state.row_max, state.row_sum, sink, params.lse_factor);
}

__device__ inline float output_scale(const Params& params) {
  return value_of(params.bmm2_scale_tensor, params.bmm2_scale);
}

// For fmaxf, which ignores a NaN.
__device__ inline float nan_unless_finite(float value) { return fmaf(value, 0.0f, value); }

// Online-softmax state of a thread's rows, in shared memory: a thread of a PV warpgroup holds a
// quarter of all rows and has no registers for their state.

struct ThreadRows {
  SharedMemoryPlan& smem;
  int stage;  // of the work pipeline

  // State of row `r` of this thread.
  __device__ RowState operator[](int r) const { return state(row_of(r)); }

  __device__ RowState state(int row) const {
    return {smem.row_max[stage][row], smem.row_sum[stage][row]};
  }
  __device__ void set_state(int row, RowState state) {
    smem.row_max[stage][row] = state.row_max;
    smem.row_sum[stage][row] = state.row_sum;
  }
};

// Partial softmax state (m, l) of a row of a split, in one 16-byte chunk.

struct alignas(kChunkBytes) PartialState {
  float row_max;  // base 2
  float row_sum;
  float scales[kNumScales];  // inverse fp16 scales; the combine multiplies in the split's weight
};
static_assert(sizeof(PartialState) == kChunkBytes,
              "the host plans with it, and one cp.async copies a row");

// PTX ISA, "Data Movement and Conversion Instructions: cvt". Needs sm_80.

// cvt.rn.bf16x2.f32
__device__ inline u32 cvt_rn_x2_f32(Bf16, float high, float low) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.rn.f16x2.f32
__device__ inline u32 cvt_rn_x2_f32(Fp16, float high, float low) {
  u32 packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// cvt.f32.f16
__device__ inline float cvt_f32(Fp16, u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// A bf16 is the upper half of an fp32; sm_80 has no instruction for it and needs none.
__device__ inline float cvt_f32(Bf16, u16 bits) {
  return __uint_as_float(static_cast<u32>(bits) << 16);
}

// Per-row power-of-two scale of partial O in fp16.

// Scales a row whose finite magnitudes are at most `amax` below 2^14: the eleven significant bits
// of fp16 then exceed those of the output. The scale and its inverse are normal numbers.
__device__ inline float fp16_scale(float amax) {
  const int exponent = static_cast<int>(__float_as_uint(amax) >> 23) - 127;
  return __uint_as_float(static_cast<u32>(127 + 13 - max(exponent, -100)) << 23);
}

__device__ inline float inverse_of_pow2(float pow2) {
  return __uint_as_float((254u << 23) - __float_as_uint(pow2));
}

// Stores the partial states of a split, one thread per row: they are in shared memory.

__device__ inline void compute_fp16_scales(SharedMemoryPlan& smem, const ReduceGroup&,
                                           const Accumulators&, const ThreadRows& rows,
                                           float (&scales)[kRowsPerThread]) {
  const float* own = &smem.row_scale[rows.stage][row_of(0)];
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    const float2 pair = *reinterpret_cast<const float2*>(own + group * 8);
    scales[group * 2] = pair.x;
    scales[group * 2 + 1] = pair.y;
  }
}

__device__ inline void store_partial_states(PartialState* target, const ReduceGroup& reduce_group,
                                            const ThreadRows& rows,
                                            const float (&)[kRowsPerThread]) {
  const int row = reduce_group.thread_idx();
  if (row >= kBlockM) return;
  const RowState state = rows.state(row);
  target[row] = {
      state.row_max, state.row_sum, {inverse_of_pow2(rows.smem.row_scale[rows.stage][row])}};
}
static_assert(kNumScales == 1 && kBlockM <= kConsumerThreads / 2,
              "a reduce group has a thread for each row");

// Partial O and softmax states of splits in the workspace: slots, stores, loads, semaphores.

// A fragment is one float4 of every lane of a warp. Partial O is stored fragment by fragment as
// four fp16 a lane, because the combine is bound by these bytes; the partial state is stored per
// row. Each CTA has two slots: for the split that its range begins with, and for the one it ends
// with.
constexpr int kFragBytes = kWarpLanes * sizeof(uint2);

__device__ inline int first_slot(int cta) { return cta * 2; }
__device__ inline int last_slot(int cta) { return cta * 2 + 1; }

// Workspace slot of this CTA's split.
__device__ inline int own_slot(const WorkItem& work) {
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

__device__ inline uint2 pack_half4(float4 value) {
  return make_uint2(cvt_rn_x2_f32(Fp16{}, value.y, value.x),
                    cvt_rn_x2_f32(Fp16{}, value.w, value.z));
}

__device__ inline float4 unpack_half4(uint2 half4) {
  return make_float4(
      cvt_f32(Fp16{}, static_cast<u16>(half4.x)), cvt_f32(Fp16{}, static_cast<u16>(half4.x >> 16)),
      cvt_f32(Fp16{}, static_cast<u16>(half4.y)), cvt_f32(Fp16{}, static_cast<u16>(half4.y >> 16)));
}

// Workspace slots of the splits of a work tile. Ranges run in reverse `blockIdx` order.
struct PartialSlots {
  int first_split_cta;
  int cta_group_size;

  __device__ PartialSlots(const Params& params, const WorkItem& work)
      : first_split_cta(work.first_split_cta), cta_group_size(params.cta_group_size) {}

  __device__ int operator[](int split_idx) const {
    return split_idx == 0 ? last_slot(first_split_cta)
                          : first_slot(first_split_cta - split_idx * cta_group_size);
  }
};

// Number of reduce groups that publish a split, or one half of it: with two splits each reducer
// waits for the half from the other CTA.
__device__ inline int expected_arrivals(const WorkItem& work) {
  return work.num_splits == 2 ? work.num_reducers : work.num_splits;
}

// The semaphore of a work tile counts arrivals, and then the reducers that have seen all of them.
// The last reducer wraps it to zero for the next launch.
__device__ inline u32* semaphore_of(const Params& params, const WorkItem& work) {
  return params.semaphores + work.first_split_cta;
}

__device__ inline u32 last_arrival(const WorkItem& work) {
  return static_cast<u32>(expected_arrivals(work) + work.num_reducers - 1);
}

// Publishes the stores of the whole reduce group.
__device__ inline void semaphore_arrive(const Params& params, const WorkItem& work,
                                        const ReduceGroup& reduce_group) {
  u32* semaphore = semaphore_of(params, work);
  const u32 last = last_arrival(work);
  reduce_group.sync();
  if (reduce_group.is_leader()) red_inc_release_gpu(semaphore, last);
}

// Waits for all splits; each reducer calls it once.
__device__ inline void semaphore_wait(const Params& params, const WorkItem& work,
                                      const ReduceGroup& reduce_group) {
  if (reduce_group.is_leader()) {
    u32* semaphore = semaphore_of(params, work);
    const u32 last = last_arrival(work);
    const u32 expected = static_cast<u32>(expected_arrivals(work));
    while (ld_acquire_gpu(semaphore) < expected) {
    }
    red_inc_relaxed_gpu(semaphore, last);
  }
  reduce_group.sync();
}

// Shared memory of the combine: partial states of some rows (all splits of a row together), then
// some fragments of every split. Aliases Q and the KV stages, because no item follows.
struct CombineSmem {
  unsigned char* bytes;
  int num_splits;
  int first_row;  // rows wrap around at kBlockM
  int rows;
  int first_frag;
  int num_frags;

  // Whether this CTA's own split is already in shared memory.
  __device__ bool holds_own_split() const { return num_frags >= kFragsPerStep; }

  // Row at an index relative to `first_row`, and the inverse.
  __device__ int row_at(u32 index) const { return static_cast<int>((first_row + index) % kBlockM); }
  __device__ u32 index_of(int row) const { return static_cast<u32>(row - first_row) % kBlockM; }

  __device__ PartialState* states(u32 index) const {
    // An odd number of chunks, so that rows start in different banks.
    return reinterpret_cast<PartialState*>(bytes) + index * (num_splits | 1);
  }
  __device__ PartialState& state(int split_idx, int row) const {
    return states(index_of(row))[split_idx];
  }
  __device__ uint2* values(int split_idx) const {
    return reinterpret_cast<uint2*>(states(rows)) + split_idx * num_frags * kWarpLanes;
  }
};

static_assert(kBlockM * sizeof(PartialState) + kNumFrags * kFragBytes <= kCombineSmemBytes,
              "the other split of a pair fits");

// Destination of a thread's partial O: the workspace, except for the fragments that this CTA
// reduces itself. Those stay in shared memory if they are whole groups of four.
struct PartialOut {
  uint2* workspace;
  uint2* smem_values;
  int first_smem_frag;
  int num_smem_frags;

  // `combine_smem` is that of a sub-tile, which may be empty.
  __device__ PartialOut(const Params& params, const WorkItem& work, const CombineSmem& combine_smem)
      : workspace(partial_values(params, own_slot(work)) + lane_frag_offset()),
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

// Called by the threads of a reduce group.
__device__ inline void write_partial(const Params& params, const WorkItem& work,
                                     SharedMemoryPlan& smem, const ReduceGroup& reduce_group,
                                     const PartialOut& target, const Accumulators& accumulators,
                                     const ThreadRows& rows) {
  float scales[kRowsPerThread];
  compute_fp16_scales(smem, reduce_group, accumulators, rows, scales);
#pragma unroll
  for (int frag = 0; frag < kAccumulators; ++frag) {
    const int i = accumulator_in_frag_order(frag);
    *target.slot(i) = pack_half4(weighted(accumulator(accumulators, i), scales, i));
  }
  store_partial_states(partial_states(params, own_slot(work)), reduce_group, rows, scales);
}

// Issues the copies of the fragments of all splits but `own`, from `first_split` on: many splits by
// one warp each, few splits by all warps. A warp issues several chunks per lane back to back.
__device__ inline void load_partial_values(const Params& params, const PartialSlots& slots,
                                           const ReduceGroup& reduce_group,
                                           const CombineSmem& combine_smem, int first_split,
                                           int own) {
  constexpr int kChunksPerStep = 4;
  constexpr int kCopyBytes = kWarpLanes * kChunkBytes;
  const int warp = reduce_group.thread_idx() / kWarpLanes;
  const int warps = reduce_group.num_threads() / kWarpLanes;
  const bool is_one_split_per_warp = combine_smem.num_splits >= kConsumerWarps;
  const int step = kChunksPerStep * kCopyBytes * (is_one_split_per_warp ? 1 : warps);
  const int first = kChunksPerStep * kCopyBytes * (is_one_split_per_warp ? 0 : warp) +
                    reload_lane() * kChunkBytes;
  const int bytes = combine_smem.num_frags * kFragBytes;
#pragma unroll 1
  for (int split_idx = is_one_split_per_warp ? warp : 0; split_idx < combine_smem.num_splits;
       split_idx += is_one_split_per_warp ? warps : 1) {
    if (first_split + split_idx == own) continue;
    const unsigned char* source = reinterpret_cast<const unsigned char*>(
        partial_values(params, slots[first_split + split_idx]) +
        combine_smem.first_frag * kWarpLanes);
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

// Pairwise combine of a loaded split into the accumulators, with softmax states in shared memory.

// Weights of this CTA's split and of the loaded one; they overwrite the loaded state.
struct RowWeights {
  float own_weight;
  float weight;
};

__device__ inline RowWeights row_weights_of(const PartialState& state) {
  return {state.row_max, state.row_sum};
}

// One thread per row, because all warps hold all rows. When two CTAs exchange halves, the other
// reduce group of this CTA has already read the states: the awaited count includes its arrival.
__device__ inline void combine_row_pair(const ReduceGroup& reduce_group,
                                        const CombineSmem& combine_smem, ThreadRows& rows) {
  const int row = reduce_group.thread_idx();
  if (row < kBlockM) {
    PartialState& state = combine_smem.state(0, row);
    const PartialState other = state;
    const RowState own = rows.state(row);
    const float row_max = fmaxf(own.row_max, other.row_max);
    const float own_weight = ex2_approx(own.row_max - row_max);
    const float weight = ex2_approx(other.row_max - row_max);
    rows.set_state(row, {row_max, own.row_sum * own_weight + other.row_sum * weight});
    state.row_max = own_weight;
    state.row_sum = weight * other.scales[0];
  }
  reduce_group.sync();
}

__device__ inline void accumulate_partial(const ReduceGroup& reduce_group,
                                          const CombineSmem& combine_smem,
                                          Accumulators& accumulators, ThreadRows& rows) {
  combine_row_pair(reduce_group, combine_smem, rows);
  const uint2* values =
      combine_smem.values(0) + lane_frag_offset() - combine_smem.first_frag * kWarpLanes;
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    const int row = row_of(group * 2);
    const RowWeights a = row_weights_of(combine_smem.state(0, row));
    const RowWeights b = row_weights_of(combine_smem.state(0, row + 1));
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float4 other =
          unpack_half4(values[frag_offset(tile * kRowGroups + group) * kWarpLanes]);
      float* own = accumulators[tile] + group * 4;
      own[0] = own[0] * a.own_weight + other.x * a.weight;
      own[1] = own[1] * b.own_weight + other.y * b.weight;
      own[2] = own[2] * a.own_weight + other.z * a.weight;
      own[3] = own[3] * b.own_weight + other.w * b.weight;
    }
    __syncwarp();
  }
}

// Pairwise combine: a work tile with two splits, one of which is still in registers.

// Combines the other split into this one: by the first CTA, or by both CTAs, each for the half of
// the accumulators that it keeps.
__device__ inline void combine_pair(const Params& params, const WorkItem& work,
                                    SharedMemoryPlan& smem, const ReduceGroup& reduce_group,
                                    Accumulators& accumulators, ThreadRows& rows) {
  semaphore_wait(params, work, reduce_group);
  const int num_frags = reduce_group.half < 0 ? kNumFrags : kNumFrags / 2;
  const CombineSmem combine_smem = {
      smem.query, 1, 0, kBlockM, max(reduce_group.half, 0) * num_frags, num_frags};
  const PartialSlots slots(params, work);
  const int row = reduce_group.thread_idx();
  if (row < kBlockM) {
    cp_async_cg_16(shared_address(&combine_smem.state(0, row)),
                   partial_states(params, slots[1 - work.split_idx]) + row, kChunkBytes);
  }
  load_partial_values(params, slots, reduce_group, combine_smem, 1 - work.split_idx,
                      work.split_idx);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  reduce_group.sync();
  accumulate_partial(reduce_group, combine_smem, accumulators, rows);
}

// Epilogue with swap-AB: normalises accumulators, and stores output rows and LSE.

// Two adjacent dims of a row; eight lanes write 32 bytes.
__device__ inline void store_pair(unsigned char* out, float low, float high) {
  *reinterpret_cast<u32*>(out) = cvt_rn_x2_f32(Element{}, high, low);
}

// Normalisation factors of this thread's rows. All warps hold all rows: every lane computes some
// of the factors, and one warp also stores the LSE.
__device__ inline void compute_row_factors(const Params& params, const WorkItem& work,
                                           const ThreadRows& rows,
                                           float (&factors)[kRowsPerThread]) {
  constexpr int kRowsPerLane = ceil_div(kBlockM, kWarpLanes);
  const float scale = output_scale(params);
  float found[kRowsPerLane];
#pragma unroll
  for (int i = 0; i < kRowsPerLane; ++i) {
    const int row = (i * kWarpLanes + reload_lane()) % kBlockM;
    const RowResult result = result_of(params, work, row, rows.state(row));
    found[i] = result.factor * scale;
    if (params.lse != nullptr && reload_tid() < min(kBlockM, kWarpLanes) && row < work.rows) {
      params.lse[global_row(params, work, row)] = result.lse;
    }
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    factors[r] = __shfl_sync(~0u, found[r / 2 * 8 / kWarpLanes], row_of(r) % kWarpLanes);
  }
}

__device__ inline void store_rows(const Params& params, const WorkItem& work, SharedMemoryPlan&,
                                  const Accumulators& accumulators, const ThreadRows& rows) {
  float factors[kRowsPerThread];
  compute_row_factors(params, work, rows, factors);
  unsigned char* out =
      reinterpret_cast<unsigned char*>(params.out) +
      (global_row(params, work, row_of(0)) * kHeadDimVo + dim_of(reload_warp(), 0)) * 2;
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    if (row_of(r) >= work.rows) continue;
    unsigned char* target = out + (r / 2 * 8 + r % 2) * kHeadDimVo * 2;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float* acc = accumulators[tile] + r / 2 * 4 + r % 2;
      store_pair(target + tile * kDimsOfTile * 2, acc[0] * factors[r], acc[2] * factors[r]);
    }
  }
}

// Stores `kCount` reduced fragments from `first` on: same rows, consecutive dim tiles.
template <int kCount>
__device__ inline void store_frags(const Params& params, const WorkItem& work, SharedMemoryPlan&,
                                   int first, const float4 (&values)[kCount]) {
  const FragRows rows = frag_rows(first);
  const int dim = dim_of(warp_of_frag(first), accumulator_of_frag(first));
  unsigned char* out = reinterpret_cast<unsigned char*>(params.out) +
                       (global_row(params, work, rows.a) * kHeadDimVo + dim) * 2;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    unsigned char* target = out + n * kDimsOfTile * 2;
    if (rows.a < work.rows) store_pair(target, values[n].x, values[n].z);
    if (rows.b < work.rows) store_pair(target + kHeadDimVo * 2, values[n].y, values[n].w);
  }
}

// Combine of three and more splits: every reducing CTA reduces one sub-tile of the output.

// Over the adjacent lanes that share a row.
template <typename Op>
__device__ inline float reduce_lanes(float value, int num_lanes, Op op) {
#pragma unroll 1
  for (int lanes = 1; lanes < num_lanes; lanes *= 2) {
    value = op(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// Consecutive groups of fragments cover consecutive groups of rows, in some families twice.
static_assert((kBlockM & (kBlockM - 1)) == 0, "rows are counted modulo all of them");
constexpr int kNumRowGroups = kBlockM / kRowsPerGroup;

// Max number of rows that a sub-tile of `num_frags` fragments touches; a small one touches one
// group.
__device__ constexpr int rows_per_subtile(int num_frags) {
  if (kFragsPerRowGroup % num_frags == 0) return kRowsPerGroup;
  const int num_groups = (num_frags + kFragsPerRowGroup - 2) / kFragsPerRowGroup + 1;
  return num_groups < kNumRowGroups ? num_groups * kRowsPerGroup : kBlockM;
}

// Partial sums of warps that share fragments. They lie behind the loaded splits, and behind what a
// warp over-reads when it sums four fragments of a smaller sub-tile.
using WarpPartials = float4[kFragsPerStep][kWarpLanes];
constexpr int kWarpPartialsBytes = kConsumerWarps * static_cast<int>(sizeof(WarpPartials));
__device__ constexpr int warp_partials_offset(int num_splits, int rows, int num_frags) {
  return (num_splits | 1) * rows * static_cast<int>(sizeof(PartialState)) +
         (num_splits * num_frags + kFragsPerStep) * kFragBytes;
}

__device__ constexpr bool subtiles_fit() {
  for (int num_splits = 3; num_splits <= kMaxRanges; ++num_splits) {
    const int num_frags = frags_per_subtile(num_splits - 1);
    const int offset = warp_partials_offset(num_splits, rows_per_subtile(num_frags), num_frags);
    if (offset + kWarpPartialsBytes > kCombineSmemBytes) return false;
  }
  return true;
}
static_assert(subtiles_fit(), "a sub-tile of every split is resident at once");
static_assert(kFragsPerRowGroup % kFragsPerStep == 0, "fragments of a step share their rows");

constexpr int kLog2ConsumerThreads = kConsumerThreads == 256 ? 8 : 7;
static_assert(kConsumerThreads == 1 << kLog2ConsumerThreads, "four or eight warps");

// Issues the copies of the partial states of all splits, by groups of rows: whole cache lines.
__device__ inline void load_partial_states(const Params& params, const PartialSlots& slots,
                                           const CombineSmem& combine_smem) {
  const float reciprocal = __fdividef(1.0f, static_cast<float>(combine_smem.num_splits));
  const int end = combine_smem.num_splits * (combine_smem.rows / kRowsPerGroup);
#pragma unroll 1
  for (int i = reload_tid() / kRowsPerGroup; i < end; i += kConsumerThreads / kRowsPerGroup) {
    // A float division is short, and exact for numbers this small.
    const int row_group = __float2int_rz((static_cast<float>(i) + 0.5f) * reciprocal);
    const int split_idx = i - row_group * combine_smem.num_splits;
    const int row = combine_smem.row_at(row_group * kRowsPerGroup + reload_tid() % kRowsPerGroup);
    cp_async_cg_16(shared_address(&combine_smem.state(split_idx, row)),
                   partial_states(params, slots[split_idx]) + row, kChunkBytes);
  }
}

// All consumer threads divided among the rows, at most a warp per row.
__device__ constexpr int log2_threads_of_row(int log2_rows) {
  return kLog2ConsumerThreads - log2_rows < 5 ? kLog2ConsumerThreads - log2_rows : 5;
}

// Max number of splits of a row that one thread handles.
__device__ constexpr int max_splits_per_thread() {
  int max_splits = 1;
  for (int num_splits = 3; num_splits <= kMaxRanges; ++num_splits) {
    const int rows = rows_per_subtile(frags_per_subtile(num_splits - 1));
    int log2_rows = 0;
    while (1 << log2_rows < rows) ++log2_rows;
    const int own = ceil_div(num_splits, 1 << log2_threads_of_row(log2_rows));
    if (own > max_splits) max_splits = own;
  }
  return max_splits;
}
constexpr int kMaxSplitsPerThread = max_splits_per_thread();

// Turns the fp16 scale of every split into its weight in the finished row, and stores the LSE.
__device__ inline void combine_rows(const Params& params, const WorkItem& work,
                                    const CombineSmem& combine_smem) {
  const int log2_threads = log2_threads_of_row(32 - __clz(combine_smem.rows - 1));
  const int threads = 1 << log2_threads;
  const int row_idx = reload_tid() >> log2_threads;
  if (!__any_sync(~0u, row_idx < combine_smem.rows)) return;  // rows are shared by whole warps
  const int row = combine_smem.row_at(row_idx);
  const int first = reload_tid() & (threads - 1);
  // Slots behind the last split have weight 0.
  PartialState states[kMaxSplitsPerThread];
  float row_max = -kFloatMax;
#pragma unroll
  for (int i = 0; i < kMaxSplitsPerThread; ++i) {
    const int split_idx = first + i * threads;
    states[i] = combine_smem.states(row_idx)[min(split_idx, combine_smem.num_splits - 1)];
    if (split_idx >= combine_smem.num_splits) states[i].row_sum = 0.0f;
    row_max = fmaxf(row_max, states[i].row_max);
  }
  row_max = reduce_lanes(row_max, threads, [](float a, float b) { return fmaxf(a, b); });
  float weights[kMaxSplitsPerThread];
  float row_sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxSplitsPerThread; ++i) {
    weights[i] = ex2_approx(states[i].row_max - row_max);
    row_sum += states[i].row_sum * weights[i];
  }
  row_sum = reduce_lanes(row_sum, threads, [](float a, float b) { return a + b; });
  const RowResult result = result_of(params, work, row, {row_max, row_sum});
  const float factor = result.factor * output_scale(params);
#pragma unroll
  for (int i = 0; i < kMaxSplitsPerThread; ++i) {
    const int split_idx = first + i * threads;
    if (split_idx >= combine_smem.num_splits) continue;
#pragma unroll
    for (int scale = 0; scale < kNumScales; ++scale) {
      combine_smem.states(row_idx)[split_idx].scales[scale] =
          states[i].scales[scale] * (factor * weights[i]);
    }
  }
  // The sub-tile that holds the first fragment of a row stores its LSE.
  const int row_frag = row / kRowsPerGroup * kFragsPerRowGroup;
  const bool owns_row = combine_smem.first_frag <= row_frag &&
                        row_frag < combine_smem.first_frag + combine_smem.num_frags;
  if (params.lse != nullptr && owns_row && first == 0 && row < work.rows) {
    params.lse[global_row(params, work, row)] = result.lse;
  }
}

// Sums four fragments from `first` on over the splits `sharer`, `sharer` + 2^`log2_sharers`, ...
// Fragments behind the sub-tile are undefined.
__device__ inline void sum_frags(const CombineSmem& combine_smem, int first, int sharer,
                                 int log2_sharers, float4 (&totals)[kFragsPerStep]) {
#pragma unroll
  for (int n = 0; n < kFragsPerStep; ++n) totals[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int lane = reload_lane();
  const uint2* values =
      combine_smem.values(sharer) + (first - combine_smem.first_frag) * kWarpLanes + lane;
  const int values_step = combine_smem.num_frags * kWarpLanes << log2_sharers;
  const FragRows rows = frag_rows(first);
  const int scale = scale_of_frag(first);
  const PartialState* state_a = &combine_smem.state(sharer, rows.a);
  const int to_b = (rows.b - rows.a) * (combine_smem.num_splits | 1);  // in the same row group
#pragma unroll 1
  for (int split_idx = sharer; split_idx < combine_smem.num_splits;
       split_idx += 1 << log2_sharers) {
    const float a = state_a->scales[scale];
    const float b = state_a[to_b].scales[scale];
#pragma unroll
    for (int n = 0; n < kFragsPerStep; ++n) {
      totals[n] = accumulate_frag(totals[n], unpack_half4(values[n * kWarpLanes]), a, b);
    }
    values += values_step;
    state_a += 1 << log2_sharers;
  }
}

// Reduces and stores the fragments of a sub-tile, four per warp and step.
__device__ inline void combine_frags(const Params& params, const WorkItem& work,
                                     SharedMemoryPlan& smem, const CombineSmem& combine_smem) {
#pragma unroll 1
  for (int i = reload_warp() * kFragsPerStep; i < combine_smem.num_frags;
       i += kConsumerWarps * kFragsPerStep) {
    float4 totals[kFragsPerStep];
    sum_frags(combine_smem, combine_smem.first_frag + i, 0, 0, totals);
    store_frags<kFragsPerStep>(params, work, smem, combine_smem.first_frag + i, totals);
  }
}

// The same for small sub-tiles: 2^`log2_sharers` warps share four fragments.
__device__ inline void combine_shared_frags(const Params& params, const WorkItem& work,
                                            SharedMemoryPlan& smem, const CombineSmem& combine_smem,
                                            int log2_sharers) {
  WarpPartials* warp_partials = reinterpret_cast<WarpPartials*>(
      combine_smem.bytes +
      warp_partials_offset(combine_smem.num_splits, combine_smem.rows, combine_smem.num_frags));
  const int lane = reload_lane();
  const int warp = reload_warp();
  const int sharers = 1 << log2_sharers;
  const int own = (warp >> log2_sharers) * kFragsPerStep;
  if (own < combine_smem.num_frags) {
    float4 totals[kFragsPerStep];
    sum_frags(combine_smem, combine_smem.first_frag + own, warp & (sharers - 1), log2_sharers,
              totals);
#pragma unroll
    for (int n = 0; n < kFragsPerStep; ++n) warp_partials[warp][n][lane] = totals[n];
  }
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
#pragma unroll 1
  for (int i = warp; i < combine_smem.num_frags; i += kConsumerWarps) {
    float4 total[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 2
    for (int sharer = 0; sharer < sharers; ++sharer) {
      const int other = (i / kFragsPerStep << log2_sharers) + sharer;
      const float4 value = warp_partials[other][i % kFragsPerStep][lane];
      total[0] = make_float4(total[0].x + value.x, total[0].y + value.y, total[0].z + value.z,
                             total[0].w + value.w);
    }
    store_frags<1>(params, work, smem, combine_smem.first_frag + i, total);
  }
}

// The accumulator sub-tile this CTA reduces. Empty if the CTA is not a reducer, or if the tile has
// at most two splits (those use the pairwise path).
__device__ inline CombineSmem combine_smem_of_subtile(SharedMemoryPlan& smem,
                                                      const WorkItem& work) {
  const bool is_reducer = work.num_splits > 2 && work.split_idx < work.num_reducers;
  const int first = is_reducer ? work.split_idx * work.subtile_frags : kNumFrags;
  const int num_frags = min(work.subtile_frags, kNumFrags - first);
  const u32 first_group = static_cast<u32>(first) / kFragsPerRowGroup;
  const u32 last_group = static_cast<u32>(first + num_frags - 1) / kFragsPerRowGroup;
  const u32 first_row = first_group % kNumRowGroups * kRowsPerGroup;
  const u32 rows = min((last_group + 1 - first_group) * kRowsPerGroup, static_cast<u32>(kBlockM));
  return {smem.query, work.num_splits, static_cast<int>(first_row), static_cast<int>(rows),
          first,      num_frags};
}

__device__ inline void combine_subtiles(const Params& params, const WorkItem& work,
                                        SharedMemoryPlan& smem, const CombineSmem& combine_smem) {
  const ReduceGroup all = {-1};
  const PartialSlots slots(params, work);
  semaphore_wait(params, work, all);
  if (combine_smem.num_frags <= 0) return;
  load_partial_states(params, slots, combine_smem);
  cp_async_commit_group();
  load_partial_values(params, slots, all, combine_smem, 0,
                      combine_smem.holds_own_split() ? work.split_idx : -1);
  cp_async_commit_group();
  cp_async_wait_group<1>();
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  combine_rows(params, work, combine_smem);
  cp_async_wait_group<0>();
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  const int num_groups = ceil_div(combine_smem.num_frags, kFragsPerStep);
  if (num_groups * 2 > kConsumerWarps) {
    combine_frags(params, work, smem, combine_smem);
  } else {
    combine_shared_frags(params, work, smem, combine_smem,
                         __clz(num_groups * 2 - 1) - __clz(kConsumerWarps));
  }
}

// Flag per work item: a row attends to a non-finite V element that the main loop cleared. One flag
// per slot, because one warpgroup may reach the next item before the other resets this one's.

__device__ inline int& nonfinite_flag(SharedMemoryPlan& smem, const WorkItem& work) {
  return smem.has_nonfinite[work_slot(work.work_idx)];
}

// PTX ISA, "Control Flow Instructions: exit". Needs sm_80.

// exit
// Ends this thread unless the word is zero. An unconditional exit would make the compiler move the
// path to it behind all other code.
__device__ inline void exit_if(u32 word) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p exit;}" ::"r"(word) : "memory");
}

// PTX ISA, "Data Movement and Conversion Instructions: cvt". Needs sm_89.

// cvt.rn.f16x2.e4m3x2
__device__ inline u32 cvt_rn_f16x2_e4m3x2(u16 pair) {
  u32 value;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(value) : "h"(pair));
  return value;
}

// cvt.rn.f16x2.e4m3x2
// Converts the upper half of a word without a shift.
__device__ inline u32 cvt_rn_f16x2_e4m3x2_high(u32 word) {
  u32 value;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}"
      : "=r"(value)
      : "r"(word));
  return value;
}

// cvt.rn.satfinite.e4m3x2.f32
__device__ inline u16 cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// FP8 (e4m3) pair conversions by `cvt`.

__device__ inline u32 fp16x2_of_e4m3x2(u32 pair) {
  return cvt_rn_f16x2_e4m3x2(static_cast<u16>(pair));
}

// The pair in the upper half of a word.
__device__ inline u32 fp16x2_of_high_e4m3x2(u32 word) { return cvt_rn_f16x2_e4m3x2_high(word); }

__device__ inline u32 e4m3x2_of_f32(float high, float low) {
  return cvt_rn_satfinite_e4m3x2_f32(high, low);
}

// Finite elements of V in e4m3, which has no Inf; a NaN has every bit but the sign set. Masked V is
// cleared of NaN before the PV GEMM: its probability is 0, but 0 * NaN is NaN.

__device__ inline bool is_finite(u32 element) { return (element & 0x7f) != 0x7f; }

__device__ inline float value_of_element(u16 element) {
  return cvt_f32(Fp16{}, static_cast<u16>(fp16x2_of_e4m3x2(element)));
}

// A stored KV token: one row of the paged FP8 KV cache.

struct StoredToken {
  const unsigned char* row;

  __device__ u16 element(int dim) const { return row[dim]; }
};

// `page` must exist.
__device__ inline StoredToken stored_token(const Params& params, int page, int slot) {
  const PagedRows rows{params.cache, params.page_stride, params.token_stride};
  return {rows.row_of(page, slot)};
}

// Propagates NaN/Inf from V. The main loop zeroes non-finite V elements so that masked tokens
// cannot poison a row (0 x NaN). Rows that do attend to one are patched here, after the store, off
// the fast path.

// Visits the tokens that may hold cleared elements; `add` takes the stored token and its position.
// A probability of 0 counts like any other: a non-finite V makes the row non-finite.
template <typename Add>
__device__ inline void add_nonfinite(const Params& params, const WorkItem& work, Add add) {
  const int end = min((work.first_kv_block + work.num_kv_blocks) * kBlockN, work.kv_end);
  const int* page_ids = params.block_tables + block_table_row(params, work.seq_idx).start;
  for (int token = max(work.unmasked_kv_end, work.first_kv_block * kBlockN); token < end; ++token) {
    const int page = page_ids[token / kPageSize];
    if (!is_valid_page(page, params.num_pages)) continue;
    add(stored_token(params, page, token % kPageSize), token);
  }
}

// `ptr_of` returns the address of component `c` of float4 `i` of this thread: a `Stored`, already
// multiplied by `scale`.
template <typename Stored, typename PtrOf>
__device__ inline void restore_nonfinite(const Params& params, const WorkItem& work, float scale,
                                         PtrOf ptr_of) {
  if constexpr (kIsSparse) return;  // every row attends to all top-k tokens, nothing is cleared
  add_nonfinite(params, work, [&](const StoredToken& cached, int token) {
    const int warp = reload_warp();
#pragma unroll 1
    for (int element_idx = 0; element_idx < kAccumulators * 4; ++element_idx) {
      const int i = element_idx / 4;
      const int c = element_idx % 4;
      if (token >= work.row_kv_end[element_row(warp, i, c)]) continue;
      const u16 element = cached.element(element_dim(warp, i, c));
      if (is_finite(element)) continue;
      u16* stored = ptr_of(i, c);
      const float sum = cvt_f32(Stored{}, *stored) + value_of_element(element) * scale;
      *stored = static_cast<u16>(cvt_rn_x2_f32(Stored{}, 0.0f, sum));
    }
  });
}

// Epilogue of a work item: stores final rows, or publishes a partial and combines splits.

__device__ inline void store_partial(const Params& params, const WorkItem& work,
                                     SharedMemoryPlan& smem, const ReduceGroup& reduce_group,
                                     const CombineSmem& combine_smem,
                                     const Accumulators& accumulators, const ThreadRows& rows) {
  const PartialOut target(params, work, combine_smem);
  write_partial(params, work, smem, reduce_group, target, accumulators, rows);
  if (!nonfinite_flag(smem, work)) return;
  restore_nonfinite<Fp16>(params, work, 1.0f,
                          [&](int i, int c) { return reinterpret_cast<u16*>(target.slot(i)) + c; });
}

__device__ inline void store_final(const Params& params, const WorkItem& work,
                                   SharedMemoryPlan& smem, const Accumulators& accumulators,
                                   const ThreadRows& rows) {
  store_rows(params, work, smem, accumulators, rows);
  if (!nonfinite_flag(smem, work)) return;
  restore_nonfinite<Element>(params, work, output_scale(params), [&](int i, int c) {
    const int warp = reload_warp();
    return params.out + global_row(params, work, element_row(warp, i, c)) * kHeadDimVo +
           element_dim(warp, i, c);
  });
}

// Two splits that are both the last item of their CTA are combined by both CTAs: each keeps one
// half of the accumulators and publishes the other. Of any other two splits the first CTA keeps its
// own. With more splits each CTA publishes everything but the sub-tile that it reduces itself.
__device__ inline void epilogue(const Params& params, const WorkItem& work, SharedMemoryPlan& smem,
                                Accumulators& accumulators, ThreadRows& rows) {
  const bool is_pairwise = work.num_splits == 2 && work.num_reducers == 2;
  const int half = half_of_warp(reload_warp());
  const ReduceGroup reduce_group = {is_pairwise ? half : -1};
  const bool finishes =
      is_pairwise ? half == work.split_idx : work.split_idx == 0 && work.num_splits <= 2;
  if (finishes) {
    if (work.num_splits > 1) combine_pair(params, work, smem, reduce_group, accumulators, rows);
    store_final(params, work, smem, accumulators, rows);
  } else {
    const CombineSmem combine_smem = combine_smem_of_subtile(smem, work);
    store_partial(params, work, smem, reduce_group, combine_smem, accumulators, rows);
    semaphore_arrive(params, work, reduce_group);
    if (work.num_splits > 2 && work.split_idx < work.num_reducers) {
      combine_subtiles(params, work, smem, combine_smem);
      exit_if(work.num_splits);  // the last item of this CTA
    }
  }
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  if (reload_tid() == 0) nonfinite_flag(smem, work) = 0;
}

// Warp-uniform value: equal in all lanes, and known to the compiler to be so. Values derived from
// it live in uniform registers, where wgmma takes its descriptors from.

__device__ inline u32 warp_uniform(u32 value) { return __reduce_max_sync(~0u, value); }

// wgmma shared-memory matrix descriptors: swizzled tiles of 128-byte rows at multiples of 1024
// bytes, or of 64-byte rows at multiples of 512. PTX ISA, "Matrix Descriptor Format".

// A descriptor is assembled from two words where it is used: the lower holds the address and the
// leading-dimension byte offset, the upper the stride between groups of eight rows and the swizzle
// mode. Addresses count 16 bytes; adding to the lower word advances the operand.
constexpr u32 kDescHighSw128 = 1024 / 16 | 1u << 30;
constexpr u32 kDescHighSw64 = 512 / 16 | 2u << 30;

__device__ inline u32 descriptor_low(u32 address, u32 leading_bytes) {
  return (address & 0x3ffff) >> 4 | leading_bytes / 16 << 16;
}

// The lower word's increment that advances the operand by `bytes`.
__device__ constexpr u32 descriptor_step(u32 bytes) { return bytes / 16; }

__device__ inline u64 smem_desc_sw128(u32 low) { return mov_b64(low, kDescHighSw128); }
__device__ inline u64 smem_desc_sw64(u32 low) { return mov_b64(low, kDescHighSw64); }

// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: wgmma". Needs sm_90.
// d[64, N] = a[64, 16] * b[16, N], plus d if `accumulates`, by four warps with 16 rows of d each.
// A lane holds, with g = lane / 4 and c = lane % 4: of d rows g (0, 1) and g + 8 (2, 3), columns
// 8j + 2c, in words 4j and after; of a in registers two elements a word, as of mma.
// Descriptors give the layout of operands in shared memory: K-major unless they are transposed.

// wgmma.fence.sync.aligned
// Orders accesses of registers before the wgmma that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group.sync.aligned
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group.sync.aligned
// Waits until at most `kPending` of this warp's newest groups are in flight.
template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Compiler fence of accumulators: reads stay after the preceding wait, and writes before the next
// wgmma (CUTLASS warpgroup_fence_operand); no instruction.
template <int kCount>
__device__ inline void wgmma_fence_operand(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Compiler fence of an operand in registers: its writes stay before the next wgmma.fence; no
// instruction.
template <int kCount>
__device__ inline void wgmma_fence_operand(u32 (&a)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
__device__ inline void wgmma_mma(Bf16, float (&d)[8], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %10, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "%8, %9, p, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16
// `a` is M-major (transposed).
__device__ inline void wgmma_mma_trans_a(Bf16, float (&d)[8], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %10, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "%8, %9, p, 1, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16
__device__ inline void wgmma_mma(Bf16, float (&d)[16], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %18, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16
// `a` is M-major (transposed).
__device__ inline void wgmma_mma_trans_a(Bf16, float (&d)[16], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %18, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16
__device__ inline void wgmma_mma(Bf16, float (&d)[32], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16
// `b` is N-major (transposed).
__device__ inline void wgmma_mma_trans_b(Bf16, float (&d)[128], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %130, 0; "
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "%128, %129, p, 1, 1, 0, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]),
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16
// `a` is in registers; `b` is N-major (transposed).
__device__ inline void wgmma_mma_trans_b(Bf16, float (&d)[128], const u32* a, u64 b,
                                         int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %133, 0; "
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "{%128, %129, %130, %131}, %132, p, 1, 1, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]),
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16
__device__ inline void wgmma_mma(Fp16, float (&d)[8], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %10, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "%8, %9, p, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16
// `a` is M-major (transposed).
__device__ inline void wgmma_mma_trans_a(Fp16, float (&d)[8], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %10, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "%8, %9, p, 1, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16
__device__ inline void wgmma_mma(Fp16, float (&d)[16], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %18, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16
// `a` is M-major (transposed).
__device__ inline void wgmma_mma_trans_a(Fp16, float (&d)[16], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %18, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16
__device__ inline void wgmma_mma(Fp16, float (&d)[32], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1, 0, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16
// `b` is N-major (transposed).
__device__ inline void wgmma_mma_trans_b(Fp16, float (&d)[128], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %130, 0; "
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "%128, %129, p, 1, 1, 0, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]),
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16
// `a` is in registers; `b` is N-major (transposed).
__device__ inline void wgmma_mma_trans_b(Fp16, float (&d)[128], const u32* a, u64 b,
                                         int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %133, 0; "
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "
      "%127}, "
      "{%128, %129, %130, %131}, %132, p, 1, 1, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]),
        "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]),
        "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]),
        "+f"(d[63]), "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]),
        "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]),
        "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]),
        "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]),
        "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]),
        "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),
        "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),
        "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),
        "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),
        "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16
// `a` is in registers.
__device__ inline void wgmma_mma(Fp16, float (&d)[8], const u32* a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %13, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, p, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16
// `a` is in registers.
__device__ inline void wgmma_mma(Fp16, float (&d)[16], const u32* a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16
// `a` is in registers.
__device__ inline void wgmma_mma(Fp16, float (&d)[32], const u32* a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 0;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates));
}

// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: wgmma". Needs sm_90.
// FP8 (e4m3) as in ptx/wgmma.cuh, with 32 elements along k: a[64, 32] * b[32, N], four elements a
// word. Both operands are K-major. Accumulation keeps few bits and truncates below them.

// wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3
__device__ inline void wgmma_mma(E4m3, float (&d)[8], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %10, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "%8, %9, p, 1, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3
__device__ inline void wgmma_mma(E4m3, float (&d)[16], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %18, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, p, 1, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3
__device__ inline void wgmma_mma(E4m3, float (&d)[32], u64 a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %34, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, p, 1, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "l"(a), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3
// `a` is in registers.
__device__ inline void wgmma_mma(E4m3, float (&d)[8], const u32* a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %13, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7}, "
      "{%8, %9, %10, %11}, %12, p, 1, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3
// `a` is in registers.
__device__ inline void wgmma_mma(E4m3, float (&d)[16], const u32* a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %21, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "{%16, %17, %18, %19}, %20, p, 1, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates));
}

// wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3
// `a` is in registers.
__device__ inline void wgmma_mma(E4m3, float (&d)[32], const u32* a, u64 b, int accumulates) {
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %37, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1;}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulates));
}

// MMA operands: descriptors of Q, K and P in shared memory.

// K dimension of an FP8 MMA, in elements and so in bytes.
constexpr int kStepElements = 32;

// P overwrites the rope tile of its stage, in swizzled rows of 64 bytes. The tile is dead once the
// QK GEMM is complete: the four warps complete an MMA closer together than the time one of them
// takes to compute P.
constexpr u32 kProbabilitiesOffset = kLatentTiles * kTileBytes;

// Low word of the matrix descriptor of an operand.
__device__ inline u32 operand_desc(u32 address) { return descriptor_low(address, 16); }

using Scores = float[kBlockN / 2];

constexpr int kTileSteps = kTileRowBytes / kStepElements;
constexpr int kQkSteps = kHeadDimQk / kStepElements;

// The MMAs of S = Q K^T for the KV block in a stage.
struct QkMma {
  u32 q_desc;
  u32 k_desc;

  __device__ QkMma(const SharedMemoryPlan& smem, int stage)
      : q_desc(operand_desc(shared_address(&smem))) {
    // Opaque: compilers would hoist all descriptors out of the loop, and spill.
    mov_b32(q_desc);
    k_desc = q_desc + descriptor_step(kQueryBytes) + stage * descriptor_step(kKvBlockBytes);
  }

  __device__ void issue(Scores& scores, int step) const {
    const int tile = step / kTileSteps;
    const u32 k_offset = step % kTileSteps * kStepElements;
    const u32 q = q_desc + descriptor_step(tile * kQueryTileBytes + k_offset);
    const u32 k = k_desc + descriptor_step(tile * kTileBytes + k_offset);
    if (tile < kLatentTiles) {
      wgmma_mma(E4m3{}, scores, smem_desc_sw128(q), smem_desc_sw128(k), step > 0);
    } else {
      wgmma_mma(E4m3{}, scores, smem_desc_sw64(q), smem_desc_sw64(k), 1);
    }
  }
};

// KV pipeline: stage and phase of a KV block, counted over all work items of the CTA.

__device__ inline int stage_of(u32 i) { return static_cast<int>(i % kStages); }
__device__ inline u32 phase_of(u32 i) { return i / kStages % 2; }

// NaN detection in packed e4m3.

// Returns 0xff in each byte that holds a NaN. An e4m3 NaN has every bit but the sign set.
__device__ inline u32 nan_bytes(u32 word) {
  const u32 is_nan = ((word & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
  return (is_nan >> 7) * 0xff;
}

// PTX ISA, "Warp Level Matrix Instructions: ldmatrix". Needs sm_75.
// Lanes 8i to 8i + 7 give the shared-memory addresses of the eight 16-byte rows of matrix i;
// word i of the result is this lane's fragment of matrix i.

// ldmatrix.sync.aligned.m8n8.x4.shared.b16
__device__ inline void ldmatrix_x4(u32 (&d)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row_address)
               : "memory");
}

// ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16
__device__ inline void ldmatrix_x4_trans(u32 (&d)[4], u32 row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(row_address)
               : "memory");
}

// V fragments: A operand of O^T += V^T P^T, transposed from shared memory into registers.

constexpr int kPvSteps = kBlockN / kStepElements;  // MMAs per KV block and tile of dims
using VFragments = u32[kPvSteps][4];

// ldmatrix loads four matrices of eight tokens and 16 dims; of each, a lane gets dims 2g and 2g + 1
// of tokens 2c and 2c + 1. After the byte permutation a word holds four of 16 tokens of one dim, in
// the order of P: 2c, 2c + 8, 2c + 1, 2c + 9.
struct VLoader {
  u32 address;  // of this lane's row, at the warp's dims of tile 0

  // `stage` is the shared address of the KV block.
  __device__ explicit VLoader(u32 stage) {
    const int lane = reload_lane();
    const int warp = reload_warp();
    address = stage + warp / 4 * (kHalfDims / kTileRowBytes) * kTileBytes +
              swizzled_offset<kTileRowBytes>(lane, warp % 4);
  }

  // A tile of dims is half a row, four chunks, so `tile % 2` is one bit of the swizzled address.
  __device__ u32 row_address(int tile) const {
    return (address ^ (tile % 2 * 64)) + tile / 2 * kTileBytes;
  }

  __device__ void load(VFragments& v, int tile) const {
    const u32 row = row_address(tile);
#pragma unroll
    for (int k = 0; k < kPvSteps; ++k) {
      u32 loaded[4];
      ldmatrix_x4_trans(loaded, row + k * kStepElements * kTileRowBytes);
      v[k][0] = __byte_perm(loaded[0], loaded[1], 0x6240);
      v[k][1] = __byte_perm(loaded[0], loaded[1], 0x7351);
      v[k][2] = __byte_perm(loaded[2], loaded[3], 0x6240);
      v[k][3] = __byte_perm(loaded[2], loaded[3], 0x7351);
    }
  }

  // Clears NaN in this lane's rows of the KV block, in tokens from `first` on and the dims that
  // only this warp reads. Returns whether any row attends to such a token, that is, one before
  // `num_attended`.
  __device__ bool clear_nan(SharedMemoryPlan& smem, int first, int num_attended) const {
    bool has_attended_nan = false;
#pragma unroll 1
    for (int i = 0; i < kPvSteps * kDimTiles; ++i) {
      const int tile = i / kPvSteps;
      const int token = i % kPvSteps * kStepElements + reload_lane();
      if (token < first) continue;
      const u32 chunk_address = row_address(tile) + i % kPvSteps * kStepElements * kTileRowBytes;
      uint4& dims =
          *reinterpret_cast<uint4*>(smem.kv[0] + (chunk_address - shared_address(smem.kv[0])));
      const uint4 loaded = dims;
      const uint4 cleared = {loaded.x & ~nan_bytes(loaded.x), loaded.y & ~nan_bytes(loaded.y),
                             loaded.z & ~nan_bytes(loaded.z), loaded.w & ~nan_bytes(loaded.w)};
      const u32 differs = (loaded.x ^ cleared.x) | (loaded.y ^ cleared.y) | (loaded.z ^ cleared.z) |
                          (loaded.w ^ cleared.w);
      if (differs == 0) continue;
      dims = cleared;
      has_attended_nan |= token < num_attended;
    }
    return has_attended_nan;
  }
};

// PV loop of the PV warpgroups: O^T += V^T P^T for every KV block of every work item.

// FP8 MMAs accumulate with 13 bits, too few for a long sequence (two-level accumulation, as in
// DeepGEMM): each KV block has accumulators of its own, promoted into fp32 ones.
using BlockAccumulators = float[kBlockM / 2];

struct PvWarpgroup {
  SharedMemoryPlan& smem;
  const WorkItem& work;
  Accumulators accumulators;

  __device__ PvWarpgroup(SharedMemoryPlan& smem, const WorkItem& work) : smem(smem), work(work) {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kBlockM / 2; ++i) accumulators[tile][i] = 0.0f;
    }
  }

  // Rescales O by alpha, for the rows of the QK warps whose flag is set; others stored no alpha.
  __device__ void rescale(int stage, u32 rescale_flags) {
    const float* alpha = &smem.rescale[stage][row_of(0)];
#pragma unroll
    for (int warp = 0; warp < kWarpsWithRows; ++warp) {
      if (!__any_sync(~0u, (rescale_flags >> warp * 8 & 0xff) != 0)) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int group = warp * 2 + half;
        rescale_group(accumulators, group, make_float2(alpha[group * 8], alpha[group * 8 + 1]));
      }
    }
  }

  // Issues the PV GEMM of one tile of dims.
  __device__ static void pv_gemm_tile(VFragments& v, u32 p_desc, BlockAccumulators& block_acc) {
    wgmma_fence_operand(block_acc);
#pragma unroll
    for (int k = 0; k < kPvSteps; ++k) wgmma_fence_operand(v[k]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kPvSteps; ++k) {
      wgmma_mma(E4m3{}, block_acc, v[k],
                smem_desc_sw64(p_desc + descriptor_step(k * kStepElements)), k > 0);
    }
    wgmma_commit_group();
  }

  __device__ void accumulate_block(BlockAccumulators& block_acc, int tile) {
    wgmma_wait_group<0>();
    wgmma_fence_operand(block_acc);
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) accumulators[tile][i] += block_acc[i];
    wgmma_fence_operand(accumulators[tile]);  // keeps the addition here, beside the next MMA
  }

  // `v` holds the V fragments of tile 0. The rescale of O overlaps the first MMAs, which do not
  // touch the fp32 accumulators.
  __device__ void pv_gemm(const VLoader& v_loader, VFragments& v, u32 p_desc, int stage,
                          u32 rescale_flags) {
    BlockAccumulators block_acc;
    pv_gemm_tile(v, p_desc, block_acc);
    if (__any_sync(~0u, rescale_flags != 0)) rescale(stage, rescale_flags);
#pragma unroll
    for (int tile = 1; tile < kDimTiles; ++tile) {
      accumulate_block(block_acc, tile - 1);
      v_loader.load(v, tile);
      pv_gemm_tile(v, p_desc, block_acc);
    }
    accumulate_block(block_acc, kDimTiles - 1);
  }

  // Clears NaN in the KV block that is the first of the last `num_remaining` of the work item.
  __device__ void clear_nan_v(const VLoader& v_loader, int num_remaining) {
    const int first_token = (work.first_kv_block + work.num_kv_blocks - num_remaining) * kBlockN;
    const int first = work.unmasked_kv_end - first_token;
    if (v_loader.clear_nan(smem, first, work.kv_end - first_token)) {
      nonfinite_flag(smem, work) = 1;
    }
    fence_proxy_async();  // TMA overwrites the stage later
    __syncwarp();
  }

  // KV blocks from `first_masked` on, counted as `blocks_done`, need a mask for some row.
  __device__ void process_block(u32& blocks_done, u32 first_masked, u32 end) {
    const int stage = stage_of(blocks_done);
    const u32 phase = phase_of(blocks_done);
    wait(smem.kv_full[stage], phase);
    const u32 address = shared_address(smem.kv[0]) + stage * kKvBlockBytes;
    const VLoader v_loader(address);
    VFragments v;
    // The first V fragments are in registers before P arrives. Once it has, the QK warpgroup no
    // longer reads the KV block, and NaN may be cleared in place.
    v_loader.load(v, 0);
    wait(smem.probabilities_full[stage], phase);
    const u32 rescale_flags = smem.rescale_flags[stage];
    if (__any_sync(~0u, blocks_done >= first_masked)) {
      clear_nan_v(v_loader, end - blocks_done);
      v_loader.load(v, 0);
    }
    pv_gemm(v_loader, v, operand_desc(address + kProbabilitiesOffset), stage, rescale_flags);
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.kv_empty[stage_of(blocks_done)]);
    ++blocks_done;
  }

  // Unmasked KV blocks come first. The any-sync and the single counter `blocks_done` make stages
  // and addresses warp-uniform, so they live in uniform registers.
  __device__ void process_work(u32& blocks_done) {
    const int unmasked =
        min(work.unmasked_kv_end / kBlockN - work.first_kv_block, work.num_kv_blocks);
    const u32 first_masked = blocks_done + warp_uniform(max(unmasked, 0));
    const u32 end = blocks_done + warp_uniform(work.num_kv_blocks);
#pragma unroll 1
    while (__any_sync(~0u, blocks_done != end)) process_block(blocks_done, first_masked, end);
  }
};

__device__ inline void pv_loop(const Params& params, SharedMemoryPlan& smem) {
  finish_q_load(smem.first_query_full);
  u32 blocks_done = 0;  // KV blocks, over all work items
  u32 work_idx = 0;
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    if (smem.work_items[work_slot(work_idx)].seq_idx < 0) return;
    mov_b32(work_idx);  // else compilers hold the address of the work item during the main loop
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    PvWarpgroup pv_warpgroup(smem, work);
    pv_warpgroup.process_work(blocks_done);
    wait(smem.row_state_full[work_slot(work.work_idx)], work_phase(work.work_idx));
    // A NaN that either PV warpgroup found counts for both.
    named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
    ThreadRows rows{smem, work_slot(work.work_idx)};
    epilogue(params, work, smem, pv_warpgroup.accumulators, rows);
    work_idx = work.work_idx + 1;  // reloaded, so that the main loop holds no register for it
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx - 1)]);
  }
}

// PTX ISA, "Warp Level Matrix Instructions: stmatrix". Needs sm_90.
// Lanes 8i to 8i + 7 give the shared-memory addresses of the eight 16-byte rows of matrix i, of
// which word i is this lane's fragment.

// stmatrix.sync.aligned.m8n8.x4.shared.b16
__device__ inline void stmatrix_x4(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(a),
      "r"(b), "r"(c), "r"(d)
      : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.trans.shared.b16
__device__ inline void stmatrix_x4_trans(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

// PTX ISA, "Half Precision Floating Point Instructions: add". Needs sm_53.

// add.rn.f16x2
__device__ inline u32 add_f16x2(u32 a, u32 b) {
  u32 sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// Quad reductions: the four adjacent lanes that hold a row of an MMA accumulator.

__device__ inline float quad_reduce_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float quad_reduce_min(float value) {
  value = fminf(value, __shfl_xor_sync(~0u, value, 1));
  return fminf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float quad_reduce_sum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// Online softmax of the QK warpgroup, with a lazily updated row max and P in e4m3.

// A thread holds two rows of the scores, g and g + 8 of its warp's with g = lane / 4; four lanes
// share a row. A word of P holds four of 16 tokens, in the order of the V fragments: 2c, 2c + 8,
// 2c + 1, 2c + 9 with c = lane % 4.
constexpr int kScoreRows = 2;
constexpr int kTokenGroups = kBlockN / 16;
constexpr int kPWords = kTokenGroups * kScoreRows;
using Probabilities = u32[kPWords];

// Max offset: an update sets the row max this far below the maximum of the scores, in log2 units.
// The next update is due when a score exceeds that maximum by more than 8.8 minus the offset. The
// smallest e4m3 is 2^-9, so probabilities below 2^-(9 + offset) of the largest are lost.
constexpr float kMaxOffset = 7.0f;

// An update costs time in the compute-bound regime, so a large `kBlockM` uses a smaller offset:
// more headroom for larger scores. The exception is a row whose maximum is an outlier: one of the
// four lanes that share the row, with a quarter of the KV block's tokens each, has no score within
// `kOutlierSpread` of it.
constexpr float kMaxOffsetWithHeadroom = kBlockM > 32 ? 3.0f : kMaxOffset;
constexpr float kOutlierSpread = 8.0f;

// Above this magnitude, the rounding of a score changes P by more than its tolerance.
constexpr float kLargeRowMax = 0x1p14f;  // log2 units

__device__ inline int score_row(int r) {
  return reload_warp() % 4 * kRowsPerWarp + reload_lane() / 4 + 8 * r;
}

// Sets the top bit of each byte of P that is the largest e4m3 (448, possibly saturated) or NaN.
__device__ inline u32 saturated_bytes(u32 word) { return (word + 0x02020202) & 0x80808080; }

// Row sums of the rounded probabilities of a KV block, so that l matches the weights of the PV
// GEMM. Sixteen of them are added in fp16. The sum of equal ones, and of one with zeros, is exact;
// otherwise each of four roundings has a relative error of at most 2^-12, of either sign.
struct ProbabilitySums {
  u32 pairs[kScoreRows];

  __device__ void add_word(const Probabilities& probabilities, int word) {
    const u32 four = probabilities[word];
    const u32 pair = add_f16x2(fp16x2_of_e4m3x2(four & 0xffff), fp16x2_of_high_e4m3x2(four));
    u32& sum = pairs[word % kScoreRows];
    sum = word < kScoreRows ? pair : add_f16x2(sum, pair);
    mov_b32(sum);  // keeps the addition here: compilers would sink it behind the last word
  }

  __device__ float total(int r) const {
    return cvt_f32(Fp16{}, static_cast<u16>(pairs[r])) +
           cvt_f32(Fp16{}, static_cast<u16>(pairs[r] >> 16));
  }
};

// New row max of a row, from the maximum of this lane's scores.
__device__ inline float target_row_max(float maximum) {
  const float amax = quad_reduce_max(maximum);
  const bool is_outlier = !(amax - quad_reduce_min(maximum) < kOutlierSpread);
  return amax - (is_outlier ? kMaxOffset : kMaxOffsetWithHeadroom);
}

struct Softmax {
  float row_sum[kScoreRows];  // over this lane's tokens, of P as rounded
  float row_max[kScoreRows];  // stale maximum less its offset, log2 units

  __device__ Softmax() {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      row_sum[r] = 0.0f;
      row_max[r] = -kFloatMax;
    }
  }

  // Fast path: a word of P from unscaled scores, with the stale row max and without a mask.
  __device__ void exp_word(const Scores& scores, float scale, Probabilities& probabilities,
                           int word) const {
    const int r = word % kScoreRows;
    probabilities[word] = exponentiate([&](int i) { return fmaf(scores[i], scale, -row_max[r]); },
                                       word / kScoreRows * 8 + r * 2);
  }

  // Returns whether the fast path holds for this warp; if not, update_row_max must follow.
  __device__ bool fast_path_holds(const Probabilities& probabilities, bool needs_mask) const {
    u32 saturated = 0;
#pragma unroll
    for (int word = 0; word < kPWords; ++word) saturated |= saturated_bytes(probabilities[word]);
    const bool is_large = fmaxf(fabsf(row_max[0]), fabsf(row_max[1])) > kLargeRowMax;
    return !__any_sync(~0u, saturated != 0 || is_large || needs_mask);
  }

  // Slow path: raises the row max to the target of the scores, here in log2 units, and rescales the
  // row sums. Scores and row max are rounded alike, so equal scores have equal probabilities.
  __device__ void update_row_max(const Scores& scores, Probabilities& probabilities,
                                 float (&alpha)[kScoreRows]) {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      float maximum = -kInfinity;
#pragma unroll
      for (int i = 0; i < kBlockN / 8; ++i) {
        maximum = fmaxf(maximum, fmaxf(scores[i * 4 + r * 2], scores[i * 4 + r * 2 + 1]));
      }
      const float target = target_row_max(maximum);
      const float next = target > row_max[r] ? target : row_max[r];
      alpha[r] = ex2_approx(row_max[r] - next);
      row_max[r] = next;
      row_sum[r] *= alpha[r];
#pragma unroll
      for (int group = 0; group < kTokenGroups; ++group) {
        probabilities[group * 2 + r] =
            exponentiate([&](int i) { return scores[i] - next; }, group * 8 + r * 2);
      }
    }
  }

  __device__ void add(const ProbabilitySums& sums) {
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) row_sum[r] += sums.total(r);
  }

  // A word of P from the differences of four scores to the row max; the first is score `i`.
  template <typename Difference>
  __device__ static u32 exponentiate(Difference difference, int i) {
    const u32 low = e4m3x2_of_f32(ex2_approx(difference(i + 4)), ex2_approx(difference(i)));
    const u32 high = e4m3x2_of_f32(ex2_approx(difference(i + 5)), ex2_approx(difference(i + 1)));
    return low | high << 16;
  }
};

// To log2 units, rounded as the row max is.
__device__ inline void scale_scores(Scores& scores, float scale) {
#pragma unroll
  for (int i = 0; i < kBlockN / 2; ++i) scores[i] = __fmul_rn(scores[i], scale);
}

// A select, not an addition: a masked score may be NaN.
__device__ inline void mask_scores(Scores& scores, const WorkItem& work, int first_token) {
#pragma unroll
  for (int r = 0; r < kScoreRows; ++r) {
    const int col_limit = work.row_kv_end[score_row(r)] - first_token - lane_index() % 4 * 2;
#pragma unroll
    for (int i = 0; i < kBlockN / 8; ++i) {
      if (i * 8 >= col_limit) scores[i * 4 + r * 2] = -kInfinity;
      if (i * 8 + 1 >= col_limit) scores[i * 4 + r * 2 + 1] = -kInfinity;
    }
  }
}

// Softmax scale: the factor of the scores Q K^T, natural base.

__device__ inline float score_scale(const Params& params) {
  const float scale = value_of(params.bmm1_scale_tensor, params.bmm1_scale);
  return params.scores_take_bmm2 ? scale * value_of(params.bmm2_scale_tensor, params.bmm2_scale)
                                 : scale;
}

// QK loop of the QK warpgroup: S = Q K^T and online softmax for every KV block of every work item.

// The KV block whose scores become probabilities.
struct SoftmaxBlock {
  int kv_block_idx;  // in the sequence
  int stage;
  u32 p_addr;  // this lane's stmatrix address of P
  bool needs_mask;  // whether any row does not attend to the whole KV block
};

struct QkWarpgroup {
  SharedMemoryPlan& smem;
  const WorkItem& work;
  PipelineState<kStages>& pipe;  // at the next KV block
  Softmax softmax;

  __device__ QkWarpgroup(SharedMemoryPlan& smem, const WorkItem& work, PipelineState<kStages>& pipe)
      : smem(smem), work(work), pipe(pipe) {}

  // Waits for the next KV block and returns its stage.
  __device__ int next_stage() {
    const int stage = pipe.index;
    wait(smem.kv_full[stage], pipe.phase);
    pipe.advance();
    return stage;
  }

  // Issues the QK GEMM of a KV block, interleaved with the row sums of the preceding one: a word of
  // P after each MMA. The tensor cores accept an MMA only when they have done most of the previous
  // one, and a warp that waits for that issues nothing else.
  __device__ void qk_gemm(Scores& scores, const Probabilities& previous, int stage) {
    const QkMma qk_mma(smem, stage);
    ProbabilitySums sums;
    wgmma_fence_operand(scores);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kQkSteps; ++step) {
      qk_mma.issue(scores, step);
      if (step < kPWords) sums.add_word(previous, step);
    }
    wgmma_commit_group();
    softmax.add(sums);
  }

  // This lane's stmatrix address of P of the KV block in `stage`.
  __device__ u32 p_address(int stage) const {
    const int lane = reload_lane();
    const int row = reload_warp() % 4 * kRowsPerWarp + lane % 16;
    return shared_address(smem.kv[stage]) + kProbabilitiesOffset +
           swizzled_offset<kRopeRowBytes>(row, lane / 16);
  }

  // One loop body for all KV blocks, not unrolled: I-cache misses at kernel start cost more than
  // the instructions themselves. The operands of the softmax are ready before the scores are: the
  // step from S to P is the critical path of the CTA.
  __device__ void process_blocks() {
    Scores scores;
    Probabilities probabilities = {};
    const int end = work.first_kv_block + work.num_kv_blocks;
    const int first_masked = work.unmasked_kv_end / kBlockN;
#pragma unroll 1
    for (int kv_block = work.first_kv_block; kv_block < end; ++kv_block) {
      const int stage = next_stage();
      qk_gemm(scores, probabilities, stage);
      const float scale = smem.score_scale;
      const SoftmaxBlock softmax_block = {kv_block, stage, p_address(stage),
                                          kv_block >= first_masked};
      wgmma_wait_group<0>();
      wgmma_fence_operand(scores);
      const bool needs_rescale = softmax_step(scores, scale, probabilities, softmax_block);
      publish_p(stage, needs_rescale);
    }
    ProbabilitySums sums;
#pragma unroll
    for (int word = 0; word < kPWords; ++word) sums.add_word(probabilities, word);
    softmax.add(sums);
  }

  // With a small `kBlockM` the last warps have no rows. An any-sync makes the result warp-uniform.
  __device__ static bool has_rows() {
    return kWarpsWithRows == kQkWarps || __any_sync(~0u, reload_warp() % 4 < kWarpsWithRows);
  }

  // Softmax of a KV block. The fast path computes and stores P with the stale row max and no mask.
  // If the result does not hold, the slow path masks, updates the row max and stores P again.
  // Returns whether O needs a rescale.
  __device__ bool softmax_step(Scores& scores, float scale, Probabilities& probabilities,
                               const SoftmaxBlock& softmax_block) {
#pragma unroll
    for (int word = 0; word < kPWords; ++word) {
      softmax.exp_word(scores, scale, probabilities, word);
    }
    if (!has_rows()) return false;
    store(probabilities, softmax_block.p_addr);
    if (softmax.fast_path_holds(probabilities, softmax_block.needs_mask)) return false;
    scale_scores(scores, scale);
    if (softmax_block.needs_mask) mask_scores(scores, work, softmax_block.kv_block_idx * kBlockN);
    float alpha[kScoreRows];
    softmax.update_row_max(scores, probabilities, alpha);
    store(probabilities, softmax_block.p_addr);
    return publish_alpha(alpha, softmax_block);
  }

  __device__ static void store(const Probabilities& probabilities, u32 p_addr) {
    stmatrix_x4(p_addr, probabilities[0], probabilities[1], probabilities[2], probabilities[3]);
    stmatrix_x4(p_addr ^ 32, probabilities[4], probabilities[5], probabilities[6],
                probabilities[7]);
  }

  // Arrives at `probabilities_full` for the PV warpgroups.
  __device__ void publish_p(int stage, bool needs_rescale) const {
    if (!has_rows()) return;
    if (reload_lane() == 0) {
      reinterpret_cast<unsigned char*>(&smem.rescale_flags[stage])[reload_warp() % 4] =
          static_cast<unsigned char>(needs_rescale);
    }
    fence_proxy_async();
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.probabilities_full[stage]);
  }

  // Stores alpha of the rows unless it is 1 for the whole warp. The first KV block of a work item
  // has no O to rescale. Returns whether alpha was stored.
  __device__ bool publish_alpha(const float (&alpha)[kScoreRows],
                                const SoftmaxBlock& softmax_block) const {
    const bool needs_rescale = alpha[0] != 1.0f || alpha[1] != 1.0f;
    if (!__any_sync(~0u, needs_rescale) || softmax_block.kv_block_idx == work.first_kv_block)
      return false;
    if (reload_lane() % 4 == 0) {
#pragma unroll
      for (int r = 0; r < kScoreRows; ++r)
        smem.rescale[softmax_block.stage][score_row(r)] = alpha[r];
    }
    return true;
  }

  __device__ void process_work() {
    if (work.num_kv_blocks == 0) {
      // All warps must have observed the phase of Q before it is released. With KV blocks the MMAs
      // ensure that: they complete after all four warps have issued them.
      named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
      release_query();
      return;
    }
    process_blocks();
    release_query();
  }

  __device__ void release_query() const {
    if (reload_tid() % 128 == 0) arrive(smem.query_empty);
  }

  // Publishes row max and row sum of the work item to the PV warpgroups.
  __device__ void publish_row_state(int stage) const {
    if (!has_rows()) return;
#pragma unroll
    for (int r = 0; r < kScoreRows; ++r) {
      const float row_sum = quad_reduce_sum(softmax.row_sum[r]);
      if (reload_lane() % 4 != 0) continue;
      smem.row_max[stage][score_row(r)] = softmax.row_max[r];
      smem.row_sum[stage][score_row(r)] = row_sum;
      // |O| <= l * max |V|.
      smem.row_scale[stage][score_row(r)] = fp16_scale(row_sum * kMaxE4m3);
    }
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.row_state_full[stage]);
  }
};

__device__ inline void qk_loop(const Params& params, SharedMemoryPlan& smem) {
  if (reload_tid() % 128 == 0) smem.score_scale = score_scale(params) * kLog2E;
  named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
  PipelineState<kStages> pipe;
  u32 work_idx = 0;
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    if (work.seq_idx < 0) return;
    wait_query(smem, work_idx);
    QkWarpgroup qk_warpgroup(smem, work, pipe);
    qk_warpgroup.process_work();
    work_idx = work.work_idx;  // reloaded, so that the main loop holds no register for it
    qk_warpgroup.publish_row_state(work_slot(work_idx));
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx)]);
    ++work_idx;
  }
}

// Register budget: registers per thread of each warpgroup role after setmaxnreg, 128 before.

constexpr int kConsumerRegs = kBlockM > 32 ? 184 : 152;
constexpr int kQkRegs = kBlockM > 32 ? 96 : 152;
constexpr int kProducerRegs = 48;

// Block-table prefetch: the first block-table entries (or top-k indices) of the CTA's range, into
// L2. The first KV load of the producer depends on them.

constexpr int kIdsPerCacheLine = 128 / sizeof(int);
constexpr int kTokensPerId = kIsSparse ? 1 : kPageSize;
constexpr int kPrefetchLines = 4;  // the top-k indices of two KV blocks

// Called by one warp, if the CTA has a range.
__device__ inline void prefetch_block_table(const Params& params,
                                            const SchedulerStorage& scheduler_storage) {
  const int cache_line = lane_index();
  if (cache_line >= kPrefetchLines) return;
  const BlockTableRow row = block_table_row(params, scheduler_storage.initial_state.seq_idx);
  const int kv_block = scheduler_storage.range.begin - scheduler_storage.initial_state.tile_begin -
                       scheduler_storage.range.fixed_overhead_blocks;
  // The range may begin in a later sequence: never prefetches past the end of the row.
  const u32 token = static_cast<u32>(max(kv_block, 0)) * kBlockN;
  const u32 index = token / kTokensPerId + cache_line * kIdsPerCacheLine;
  if (index < static_cast<u32>(row.num_pages)) prefetch_l2(params.block_tables + row.start + index);
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: atom". Needs sm_80.

// atom.acq_rel.gpu.global.add.u32
// Adds, and returns the old value.
__device__ inline u32 atom_add_acq_rel_gpu(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

// atom.acq_rel.gpu.global.inc.u32
// Adds one, wraps to zero at `limit`, and returns the old value.
__device__ inline u32 atom_inc_acq_rel_gpu(u32* address, u32 limit) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(limit)
               : "memory");
  return before;
}

// Scheduler metadata cache: each CTA's range and first work item, kept across launches. All layers
// of a decode step share `seq_lens`, so layers 2..N skip the prefix sum over the sequences.

// Padded to whole L2 cache lines, so that no two CTAs write the same line.
struct alignas(kSchedMetaBytes) CachedSchedMeta {
  SchedMeta sched_meta;
};

// Follows the semaphores of a workspace. The last CTA of a launch to arrive writes the schedule
// id and the sequence lengths, after every CTA has compared them: either all CTAs of a launch hit
// or all miss.
struct SchedMetaCache {
  int schedule_id;  // of the launch that stored it; 0 is an empty cache
  u32 arrivals;  // CTAs of the current launch that missed and stored their metadata
  int seq_lens[kMaxCachedSeqs];
  CachedSchedMeta ctas[1];  // gridDim.x of them
};

static_assert(sizeof(CachedSchedMeta) == kSchedMetaBytes, "the host allocates this size");
static_assert(sizeof(SchedMetaCache) == (2 + kMaxCachedSeqs) * sizeof(int) + kSchedMetaBytes,
              "the host allocates the header and the entries back to back");

__device__ inline SchedMetaCache& sched_meta_cache(const Params& params) {
  unsigned char* semaphores = reinterpret_cast<unsigned char*>(params.semaphores);
  return *reinterpret_cast<SchedMetaCache*>(semaphores + kSemaphoreBytes);
}

// Called by all threads. Loads this CTA's metadata into `scheduler_storage` and returns whether it
// is valid: stored under the same schedule id and for the same sequence lengths. `seq_len` is
// seq_len_of(first_seq_of_thread); where metadata is cached, a thread has no other sequence.
__device__ inline bool load_cached_schedule(const Params& params, int seq_len,
                                            SchedulerStorage& scheduler_storage) {
  if (params.schedule_id == 0) return false;
  const SchedMetaCache& cache = sched_meta_cache(params);
  bool is_stale = ld_relaxed_gpu(&cache.seq_lens[first_seq_of_thread(params)]) != seq_len;
  if (threadIdx.x == 0) is_stale |= ld_relaxed_gpu(&cache.schedule_id) != params.schedule_id;
  const u32 chunk = threadIdx.x;
  if (chunk < sizeof(SchedMeta) / kChunkBytes) {
    reinterpret_cast<float4*>(&scheduler_storage)[chunk] =
        ld_global_cg_v4_f32(reinterpret_cast<const float4*>(&cache.ctas[blockIdx.x]) + chunk);
  }
  return barrier_red_or(0, kThreads, is_stale) == 0;
}

// Called by all threads. Stores this CTA's metadata; the last CTA to arrive publishes the schedule
// id and the sequence lengths. Branches are warp-uniform by any-sync: otherwise the compiler moves
// operands of the MMAs out of uniform registers.
__device__ inline void store_cached_schedule(const Params& params, const SchedMeta& sched_meta) {
  const bool stores = params.schedule_id != 0 && warp_index() == kThreads / kWarpLanes - 1;
  if (!__any_sync(~0u, stores)) return;
  SchedMetaCache& cache = sched_meta_cache(params);
  const u32 last = gridDim.x - 1;
  u32 arrival = 0;
  if (lane_index() == 0) {
    cache.ctas[blockIdx.x].sched_meta = sched_meta;
    arrival = atom_inc_acq_rel_gpu(&cache.arrivals, last);
  }
  if (!__any_sync(~0u, lane_index() == 0 && arrival == last)) return;
#pragma unroll 1
  for (int first = 0; __any_sync(~0u, first < params.num_seqs); first += kWarpLanes) {
    const int seq_idx = first + lane_index();
    if (seq_idx < params.num_seqs) cache.seq_lens[seq_idx] = seq_len_of(params, seq_idx);
  }
  if (lane_index() == 0) cache.schedule_id = params.schedule_id;
}

// Called by whole warps that have no work left: load_cached_schedule is the first access of the
// next launch.
__device__ inline void prefetch_sched_meta(const Params& params) {
  constexpr int kWordsPerCacheLine = 128 / sizeof(int);
  if (params.schedule_id == 0) return;
  const SchedMetaCache& cache = sched_meta_cache(params);
  const int lane = lane_index();
  const bool is_cta_meta = lane == kWarpLanes - 1;
  if (!is_cta_meta && lane * kWordsPerCacheLine >= params.num_seqs + 2) return;
  prefetch_l2(is_cta_meta ? reinterpret_cast<const int*>(&cache.ctas[blockIdx.x])
                          : &cache.schedule_id + lane * kWordsPerCacheLine);
}
static_assert((2 + kMaxCachedSeqs) / (128 / sizeof(int)) < kWarpLanes, "a lane per cache line");

// Initial work of a CTA: from cached scheduler metadata, or computed and then cached.

// Called by all threads. Advances `scheduler` to the CTA's first work item and returns that item.
__device__ inline WorkCoord find_initial_work(const Params& params, int cta_group, int seq_len,
                                              SchedulerStorage& scheduler_storage,
                                              TileScheduler& scheduler) {
  const bool is_cached = __any_sync(~0u, load_cached_schedule(params, seq_len, scheduler_storage));
  bool has_range = is_cached && scheduler_storage.first_work.seq_idx >= 0;
  if (!is_cached) has_range = find_range(params, cta_group, seq_len, scheduler_storage);
  has_range = __any_sync(~0u, has_range);
  if (has_range && warp_index() == kConsumerWarps - 1)
    prefetch_block_table(params, scheduler_storage);
  static_cast<SchedulerState&>(scheduler) = scheduler_storage.initial_state;
  WorkCoord first_work = scheduler_storage.first_work;
  if (!is_cached) {
    first_work = has_range ? scheduler.initial_work() : kInvalidWork;
    store_cached_schedule(params, {scheduler_storage.range, scheduler, first_work});
  }
  return first_work;
}

// Scheduler warps: produce work items, publish them to the producer and consumer warps, and load Q
// of each work item into shared memory.

constexpr int kSchedulerWarps = 3;
constexpr int kSchedulerThreads = kSchedulerWarps * kWarpLanes;

// Called by one thread.
__device__ inline void init_work_barriers(const SharedMemoryPlan& smem) {
  init_work_barriers(smem, kSchedulerWarps, kWorkReaders, kSchedulerWarps);
}

// `scheduler` is at the first work item, for which the consumer warps load Q themselves.
__device__ inline void scheduler_loop(const Params& params, const TileScheduler& scheduler,
                                      SharedMemoryPlan& smem) {
  const bool produces = warp_index() == kConsumerWarps + 1;  // the first of the three warps
  const int rank_in_group = scheduler.rank_in_group;
  if (produces) save_scheduler_state(scheduler, smem);
  const int thread = static_cast<int>(threadIdx.x) % 128 - kWarpLanes;
#pragma unroll 1
  for (u32 work_idx = 0;; ++work_idx) {
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    wait(smem.work_empty[work_slot(work_idx)], work_phase(work_idx) ^ 1);
    if (produces) produce_work(params, rank_in_group, work_idx, smem);
    named_barrier_sync(NamedBarrier::WorkProduced, kSchedulerThreads);
    if (lane_index() == 0) arrive(smem.work_full[work_slot(work_idx)]);
    if (work.seq_idx < 0) return;
    if (work_idx == 0) continue;
    wait(smem.query_empty, query_phase(work_idx) ^ 1);
    load_q_async(params, work, smem, thread, kSchedulerThreads);
    finish_q_load(smem.query_full);
  }
}

// One QK and two PV warpgroups, one producer warp and the scheduler warps.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sm90_fp8(const __grid_constant__ Params params) {
  SharedMemoryPlan& smem = shared_memory<SharedMemoryPlan>();
  // Prologue, one warp each: overlaps the tail of the preceding kernel (PDL).
  if (threadIdx.x == 0) {
    init_kv_barriers(smem);
    fence_mbarrier_init();
  } else if (threadIdx.x == kWarpLanes) {
    init_work_barriers(smem);
    fence_mbarrier_init();
  } else if (threadIdx.x == 2 * kWarpLanes) {
    prefetch_tensormap(&params.latent_map);
    prefetch_tensormap(&params.rope_map);
    prefetch_tensormap(&params.kv_map);
  }
  pdl_wait();
  const int seq_len = seq_len_of(params, first_seq_of_thread(params));
  pdl_launch_dependents();
  const int cta = static_cast<int>(blockIdx.x);
  const int cta_group = div_by_group_size(params, cta);
  const int rank_in_group = cta - cta_group * params.cta_group_size;
  SchedulerStorage& scheduler_storage = smem.scheduler_storage;
  TileScheduler scheduler(params, scheduler_storage.range, rank_in_group, {});
  const WorkCoord first_work =
      find_initial_work(params, cta_group, seq_len, scheduler_storage, scheduler);
  if (__any_sync(~0u, first_work.seq_idx < 0)) return;

  const int warp_role = __shfl_sync(~0u, warp_index(), 0) - kConsumerWarps;
  if (warp_role < 0) {
    reg_alloc<kConsumerRegs>();
    load_q_async(params, first_work, smem, static_cast<int>(threadIdx.x), kConsumerThreads);
    pv_loop(params, smem);
  } else if (warp_role >= kProducerWarps) {
    reg_alloc<kQkRegs>();
    qk_loop(params, smem);
  } else {
    reg_alloc<kProducerRegs>();
    if (warp_role > 0) {
      scheduler_loop(params, scheduler, smem);
    } else {
      producer_loop(params, rank_in_group, first_work, smem);
      prefetch_sched_meta(params);
    }
  }
}
