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

// Kernel configuration: the numbers of the spec as constants, named barriers, register budget.

using Element = Bf16;
constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kPageSize = 64;
constexpr bool kIsSparse = false;  // no top-k indices
constexpr int kBoxTokens = 64;
constexpr int kBlockM = 16;
constexpr int kConsumerWarps = 4;
constexpr int kProducerRegs = 56;  // per thread
constexpr int kConsumerRegs = 224;
constexpr int kSharedBytes = 232448;
constexpr int kSemaphoreBytes = 1024;  // SchedMetaCache follows them
constexpr int kMaxCachedSeqs = 510;
constexpr int kSchedMetaBytes = 128;

constexpr int kHeadDimQk = kLatentDim + kRopeDim;
constexpr int kHeadDimVo = kLatentDim;

// MMA operands lie in tiles of 64 elements per row: 128 bytes, the 128-byte swizzle atom.
constexpr int kTileElements = 64;
constexpr int kTileRowBytes = kTileElements * 2;
constexpr int kTiles = kHeadDimQk / kTileElements;
constexpr int kLatentTiles = kLatentDim / kTileElements;
constexpr int kBlockN = 64;
constexpr int kTileBytes = kBlockN * kTileRowBytes;
constexpr int kQueryTileBytes = kBlockM * kTileRowBytes;
constexpr int kBoxes = kBlockN / kBoxTokens;  // TMA boxes of a tile

// Consumer warps come first, then the producer warp and the scheduler warps.
constexpr int kConsumerThreads = kConsumerWarps * kWarpLanes;
constexpr int kProducerThreads = 4 * kWarpLanes;
constexpr int kThreads = kConsumerThreads + kProducerThreads;

// Arrivals that release a slot of work items, one per reading warp, the producer warp included; and
// those that release Q, one per consumer warpgroup.
constexpr int kWorkReaders = 1 + kConsumerWarps;
constexpr int kQueryReaders = kConsumerWarps / 4;

// float4 accumulators of a consumer thread; a fragment is a float4 of every lane of a warp.
constexpr int kAccumulators = kBlockM * kHeadDimVo / kConsumerThreads / 4;
constexpr int kNumFrags = kAccumulators * kConsumerWarps;

enum class NamedBarrier : int {
  ConsumersSynced = 1,  // all consumer warps have arrived
  WorkProduced = 2,  // the scheduler warp has written a work item
  P0Ready = 3,  // P of an even KV block is in shared memory
  P1Ready = 4,  // P of an odd one
  V0Cleared = 5,  // masked V of an even KV block is zeroed
  V1Cleared = 6,  // masked V of an odd one
  PartialsStored = 7,  // a ReduceGroup has arrived: all consumers or half 0; half 1 has the next
};

static_assert(kRopeDim == kTileElements, "the rope dims are one tile");
static_assert(kLatentTiles * kTileElements == kLatentDim, "the latent dims are whole tiles");
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

// Shared memory plan of the CTA, swap-AB.

// A KV stage is three of the nine tiles of a KV block.
constexpr int kStages = kBlockM == 16 ? 8 : 7;  // as many as fit
constexpr int kTilesPerStage = 3;
constexpr int kStagesPerBlock = kTiles / kTilesPerStage;

struct SharedMemoryPlan {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char kv[kStages][kTilesPerStage * kTileBytes];
  unsigned char probabilities[2][kQueryTileBytes];  // P, double-buffered
  unsigned char staging[kConsumerWarps][1024];  // of the output
  float warp_rows[kConsumerWarps][kBlockM];  // each warp's maximum, or sum, of a row
  WorkItem work_items[2];
  SchedulerStorage scheduler_storage;
  Barrier kv_full[kStages];
  Barrier kv_empty[kStages];
  Barrier first_query_full;
  Barrier query_full;
  Barrier query_empty;
  Barrier work_full[2];
  Barrier work_empty[2];
  int has_nonfinite;
};
// The split reduction aliases Q and KV: a CTA combines after its last work item only.
constexpr int kCombineSmemBytes = sizeof(SharedMemoryPlan::query) + sizeof(SharedMemoryPlan::kv);
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec states the size of the plan");
static_assert(kStagesPerBlock * kTilesPerStage == kTiles, "a KV block is whole stages");

// Called by one thread.
__device__ inline void init_kv_barriers(const SharedMemoryPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(smem.kv_full[stage], 1);
    init_barrier(smem.kv_empty[stage], 1);
  }
}

// Q loads: copies the query rows of a work item into swizzled shared memory by cp.async.

// Issues the copies of all rows, by `threads` threads of which this is number `thread`. A row's
// tiles lie kQueryTileBytes apart; eight lanes copy the 128 bytes of a row of one tile.
__device__ inline void load_q_async(const Params& params, const WorkCoord& coord,
                                    SharedMemoryPlan& smem, int thread, int threads) {
  const int lane = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < kBlockM; row += threads / 8) {
    const bool is_row = row < coord.rows;
    const auto [query, head] = query_row(params, coord, row, is_row);
    const unsigned char* latent = params.query + query * params.query_stride +
                                  head * params.query_head_stride + lane * kChunkBytes;
    const unsigned char* rope = params.query_rope + query * params.query_rope_stride +
                                head * params.query_rope_head_stride + lane * kChunkBytes;
    const u32 target = shared_address(smem.query) + swizzled_offset<kTileRowBytes>(row, lane);
    const u32 bytes = is_row ? kChunkBytes : 0;  // zero-fills padding
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      cp_async_cg_16(target + tile * kQueryTileBytes,
                     tile < kLatentTiles ? latent + tile * kTileRowBytes : rope, bytes);
    }
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

// Accumulator layout of O^T, swap-AB: output dims of a thread.

// One consumer warpgroup. The M dimension of the MMAs is tokens (S^T) or output dims (O^T), and the
// N dimension is query rows: M is 64 at least, so that few rows would leave a normal MMA mostly
// idle. A warp has 16 tokens of S^T, and 16 dims of each tile of O^T.
constexpr int kDimTiles = kLatentTiles;
using Scores = float[kBlockM / 2];
using ThreadRows = RowState[kBlockM / 4];

// First dim of accumulator float4 `i` of this lane in warp `warp`; the second is 8 higher.
__device__ inline int dim_of(int warp, int i) {
  return i / (kBlockM / 8) * kTileElements + warp * 16 + reload_lane() / 4;
}

// Dim of element `c` of accumulator float4 `i`.
__device__ inline int element_dim(int warp, int i, int c) { return dim_of(warp, i) + c / 2 * 8; }

// Rank of a warp in its half of the consumer warps, and the inverse.
__device__ inline int rank_in_half(int warp) { return warp % 2; }
__device__ inline int warp_at(int half, int rank) { return half * 2 + rank; }

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

// Shared-memory exchange of per-row values between the consumer warps.

// Aliases the output staging buffer of the warp.
__device__ inline float* amax_smem(SharedMemoryPlan& smem, int warp) {
  return reinterpret_cast<float*>(smem.staging[warp]);
}

// Publishes the amax of the finite elements that this warp has of each row.
__device__ inline void store_amax(SharedMemoryPlan& smem, const Accumulators& accumulators) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    float amax = 0.0f;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float* acc = accumulators[tile] + r / 2 * 4 + r % 2;
      amax = fmaxf(amax, fabsf(nan_unless_finite(acc[0])));
      amax = fmaxf(amax, fabsf(nan_unless_finite(acc[2])));
    }
    amax = max_over_lanes(amax);
    if (reload_lane() < 4) amax_smem(smem, reload_warp())[row_of(r)] = amax;
  }
}

// Whether a thread of a ReduceGroup writes the state, or the scale, of its rows. All warps hold the
// same rows, so the first four threads of the group do.
__device__ inline bool is_row_writer(int thread) { return thread < 4; }
__device__ inline bool is_scale_writer(int thread) { return thread < 4; }

// Row abs-max (amax) of O, swap-AB: reduced over the warps through shared memory.

// amax of the finite elements of each row, over all warps of the ReduceGroup.
__device__ inline void row_amax(SharedMemoryPlan& smem, const ReduceGroup& reduce_group,
                                const Accumulators& accumulators, float (&amax)[kRowsPerThread]) {
  store_amax(smem, accumulators);
  reduce_group.sync();
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    amax[r] = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kConsumerWarps; ++warp) {
      const float found = amax_smem(smem, warp)[row_of(r)];
      if (reduce_group.has_warp(warp)) amax[r] = fmaxf(amax[r], found);
    }
  }
}

// Partial softmax state (m, l) and fp16 scales of a split's rows, from registers to the workspace.

__device__ inline void compute_fp16_scales(SharedMemoryPlan& smem, const ReduceGroup& reduce_group,
                                           const Accumulators& accumulators, const ThreadRows&,
                                           float (&scales)[kRowsPerThread]) {
  row_amax(smem, reduce_group, accumulators, scales);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) scales[r] = fp16_scale(scales[r]);
}

__device__ inline void store_partial_states(PartialState* target, const ReduceGroup& reduce_group,
                                            const ThreadRows& rows,
                                            const float (&scales)[kRowsPerThread]) {
  const bool writes_state = is_row_writer(reduce_group.thread_idx());
  const bool writes_scale = is_scale_writer(reduce_group.thread_idx());
  const int scale = scale_of_warp(reload_warp());
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    PartialState& row = target[row_of(r)];
    if (writes_state) {
      row.row_max = rows[r].row_max;
      row.row_sum = rows[r].row_sum;
    }
    if (writes_scale) row.scales[scale] = inverse_of_pow2(scales[r]);
  }
}

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

// Pairwise combine: adds the partial O of the other split, loaded into shared memory, to the
// accumulators, and its softmax state (m, l) to that of the rows.

__device__ inline void accumulate_partial(const ReduceGroup&, const CombineSmem& combine_smem,
                                          Accumulators& accumulators, ThreadRows& rows) {
  float own_weights[kRowsPerThread];
  float weights[kRowsPerThread];
  const int scale = scale_of_warp(reload_warp());
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const PartialState& other = combine_smem.state(0, row_of(r));
    const float row_max = fmaxf(rows[r].row_max, other.row_max);
    own_weights[r] = ex2_approx(rows[r].row_max - row_max);
    const float weight = ex2_approx(other.row_max - row_max);
    rows[r] = {row_max, rows[r].row_sum * own_weights[r] + other.row_sum * weight};
    weights[r] = weight * other.scales[scale];
  }
  const uint2* values =
      combine_smem.values(0) + lane_frag_offset() - combine_smem.first_frag * kWarpLanes;
#pragma unroll
  for (int i = 0; i < kAccumulators; ++i) {
    const float4 own = weighted(accumulator(accumulators, i), own_weights, i);
    const float4 other = weighted(unpack_half4(values[frag_offset(i) * kWarpLanes]), weights, i);
    set_accumulator(
        accumulators, i,
        make_float4(own.x + other.x, own.y + other.y, own.z + other.z, own.w + other.w));
    if (i % 4 == 3) __syncwarp();  // limits the loads in flight: registers are scarce
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

// Epilogue stores, swap-AB: normalised rows of O, and their LSE.

// Each warp stages 16 dims of every row in its own buffer, so that global stores are 32 contiguous
// bytes per row.
constexpr int kStagedBytes = 32;

__device__ inline void store_rows(const Params& params, const WorkItem& work,
                                  SharedMemoryPlan& smem, const Accumulators& accumulators,
                                  const ThreadRows& rows) {
  const int lane = reload_lane();
  const int warp = reload_warp();
  const float scale = output_scale(params);
  float factor[kRowsPerThread];
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const int row = row_of(r);
    const RowResult result = result_of(params, work, row, rows[r]);
    factor[r] = result.factor * scale;
    if (params.lse != nullptr && is_row_writer(reload_tid()) && row < work.rows) {
      params.lse[global_row(params, work, row)] = result.lse;
    }
  }
  unsigned char* staging = smem.staging[warp];
  const u32 address = shared_address(staging) + (lane / 16 * 8 + lane % 8) * kStagedBytes +
                      lane / 8 % 2 * kChunkBytes;
  unsigned char* out = reinterpret_cast<unsigned char*>(params.out) +
                       global_row(params, work, 0) * (kHeadDimVo * 2) + warp * kStagedBytes;
#pragma unroll
  for (int tile = 0; tile < kLatentTiles; ++tile) {
#pragma unroll
    for (int group = 0; group < kRowGroups; group += 2) {
      const float* a = accumulators[tile] + group * 4;
      const float* f = factor + group * 2;
      stmatrix_x4_trans(address + group * 8 * kStagedBytes,
                        cvt_rn_x2_f32(Element{}, a[1] * f[1], a[0] * f[0]),
                        cvt_rn_x2_f32(Element{}, a[3] * f[1], a[2] * f[0]),
                        cvt_rn_x2_f32(Element{}, a[5] * f[3], a[4] * f[2]),
                        cvt_rn_x2_f32(Element{}, a[7] * f[3], a[6] * f[2]));
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < kBlockM / 16; ++half) {
      const int row = half * 16 + lane / 2;
      const int chunk = lane % 2;
      const uint4 value =
          *reinterpret_cast<const uint4*>(staging + row * kStagedBytes + chunk * kChunkBytes);
      if (row < work.rows) {
        *reinterpret_cast<uint4*>(out + row * (kHeadDimVo * 2) + tile * kTileRowBytes +
                                  chunk * kChunkBytes) = value;
      }
    }
    __syncwarp();
  }
}

// Stores kCount combined fragments from `first` on: the same rows, consecutive tiles of dims.
template <int kCount>
__device__ inline void store_frags(const Params& params, const WorkItem& work, SharedMemoryPlan&,
                                   int first, const float4 (&values)[kCount]) {
  const FragRows rows = frag_rows(first);
  const int dim = dim_of(warp_of_frag(first), accumulator_of_frag(first));
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = r == 0 ? rows.a : rows.b;
    if (row >= work.rows) continue;
    u16* out = params.out + global_row(params, work, row) * kHeadDimVo + dim;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const u32 pair = cvt_rn_x2_f32(Element{}, (r == 0 ? values[n].z : values[n].w),
                                     (r == 0 ? values[n].x : values[n].y));
      out[n * kTileElements] = static_cast<u16>(pair);
      out[n * kTileElements + 8] = static_cast<u16>(pair >> 16);
    }
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

// Non-finite flag: whether any row of the work item attends to a V element that was cleared.

__device__ inline int& nonfinite_flag(SharedMemoryPlan& smem, const WorkItem&) {
  return smem.has_nonfinite;
}

// PTX ISA, "Control Flow Instructions: exit". Needs sm_80.

// exit
// Ends this thread unless the word is zero. An unconditional exit would make the compiler move the
// path to it behind all other code.
__device__ inline void exit_if(u32 word) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p exit;}" ::"r"(word) : "memory");
}

// Finite tests of fp16 and bf16 elements.

constexpr u32 kExponentBits = kIsSame<Element, Bf16> ? 0x7f80 : 0x7c00;

__device__ inline bool is_finite(u32 element) { return (element & kExponentBits) != kExponentBits; }

__device__ inline float value_of_element(u16 element) { return cvt_f32(Element{}, element); }

__device__ inline u32 finite_pair(u32 pair) {
  return (is_finite(pair) ? pair & 0xffff : 0) | (is_finite(pair >> 16) ? pair & 0xffff0000 : 0);
}

// A stored KV token: one row of the paged cache.

struct StoredToken {
  const unsigned char* row;

  __device__ u16 element(int dim) const { return reinterpret_cast<const u16*>(row)[dim]; }
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

// Softmax scale: the factor of the scores Q K^T, natural base.

__device__ inline float score_scale(const Params& params) {
  const float scale = value_of(params.bmm1_scale_tensor, params.bmm1_scale);
  return params.scores_take_bmm2 ? scale * value_of(params.bmm2_scale_tensor, params.bmm2_scale)
                                 : scale;
}

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

// NaN/Inf in masked V: replaces non-finite elements by zero before the PV GEMM. The probability of
// a masked token is 0, but 0 * NaN is NaN.

// Called by 128 threads. Clears non-finite V elements of a KV block's tokens from `first` on;
// `tile_of(i)` is the address of its tile i. Sets the flag if any row attends to such a token, that
// is, one before `num_attended`: the epilogue then restores the NaN/Inf.
template <typename TileOf>
__device__ inline void clear_nonfinite(SharedMemoryPlan& smem, int first, int num_attended,
                                       TileOf tile_of) {
  constexpr int kTokenChunks = kLatentDim * 2 / kChunkBytes;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x) % 128; i < (kBlockN - first) * kTokenChunks;
       i += 128) {
    const int token = first + i / kTokenChunks;
    const int chunk = i % kTokenChunks;
    Chunk* chunk_ptr =
        reinterpret_cast<Chunk*>(tile_of(chunk / 8) + token * kTileRowBytes) + chunk % 8;
    const Chunk stored = *chunk_ptr;
    Chunk cleared;
    bool is_changed = false;
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      cleared.words[word] = finite_pair(stored.words[word]);
      is_changed |= cleared.words[word] != stored.words[word];
    }
    if (!is_changed) continue;
    *chunk_ptr = cleared;
    if (token < num_attended) smem.has_nonfinite = 1;
  }
}

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

// Mainloop, swap-AB: S^T = K Q^T, online softmax over the tokens, O^T += V^T P^T.

struct Consumer {
  const Params& params;
  SharedMemoryPlan& smem;
  const WorkItem& work;
  float scale;  // from scores to the log2 domain
  PipelineState<kStages>& pipe;
  u32& p_buffer;  // of P
  Accumulators accumulators;
  Scores scores;
  float row_sum[kRowsPerThread];  // over this thread's tokens
  float row_max[kRowsPerThread];  // stale maximum, log2 domain, the same in all warps

  __device__ Consumer(const Params& params, SharedMemoryPlan& smem, const WorkItem& work,
                      float scale, PipelineState<kStages>& pipe, u32& p_buffer)
      : params(params), smem(smem), work(work), scale(scale), pipe(pipe), p_buffer(p_buffer) {
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      set_accumulator(accumulators, i, make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      row_sum[r] = 0.0f;
      row_max[r] = -kFloatMax;
    }
  }

  __device__ void release(const Barrier& barrier) const {
    if (reload_tid() == 0) arrive(barrier);
  }

  // Pipeline index of a stage of the current KV block, which qk_gemm has advanced past.
  __device__ int stage(int stage_in_block) const {
    const int stage = pipe.index - kStagesPerBlock + stage_in_block;
    return stage < 0 ? stage + kStages : stage;
  }

  __device__ unsigned char* tile(int index) const {
    return smem.kv[stage(index / kTilesPerStage)] + index % kTilesPerStage * kTileBytes;
  }

  // Issues the MMAs of each stage as it arrives.
  __device__ void qk_gemm() {
    wgmma_fence_operand(scores);
#pragma unroll
    for (int stage_in_block = 0; stage_in_block < kStagesPerBlock; ++stage_in_block) {
      wait(smem.kv_full[pipe.index], pipe.phase);
      const u32 stage_address = shared_address(smem.kv[pipe.index]);
      pipe.advance();
      wgmma_fence();
#pragma unroll
      for (int index = 0; index < kTilesPerStage; ++index) {
        const u32 k_desc = descriptor_low(stage_address + index * kTileBytes, 16);
        const int tile = stage_in_block * kTilesPerStage + index;
        const u32 q_desc = descriptor_low(shared_address(smem.query) + tile * kQueryTileBytes, 16);
#pragma unroll
        for (int k = 0; k < kTileElements / 16; ++k) {
          wgmma_mma(Element{}, scores, smem_desc_sw128(k_desc + k * 2),
                    smem_desc_sw128(q_desc + k * 2), tile + k > 0);
        }
      }
      wgmma_commit_group();
    }
    wgmma_wait_group<0>();
    wgmma_fence_operand(scores);
  }

  // Scales to the log2 domain and masks. A select, not an addition: a masked score may be NaN.
  __device__ void mask_scores(int first_token) {
    const int token = first_token + reload_warp() * 16 + reload_lane() / 4;
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const int kv_limit = work.row_kv_end[row_of(r)];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& score = scores[r / 2 * 4 + half * 2 + r % 2];
        score = token + half * 8 < kv_limit ? __fmul_rn(score, scale) : -kInfinity;
      }
    }
  }

  // Writes P relative to the stale row max and sums it per row. Returns whether any probability
  // exceeds the rescale threshold, in which case P must be recomputed with the new row max.
  __device__ bool store_p(float factor, float (&partial_sum)[kRowsPerThread]) const {
    float max_p = 0.0f;
    float p[kBlockM / 2];
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      // Rounded, never fused into an FMA: equal scores must have equal differences to the row max.
      p[i] = ex2_approx(__fmul_rn(scores[i], factor) - row_max[i / 4 * 2 + i % 2]);
      max_p = fmaxf(max_p, p[i]);
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      partial_sum[r] = p[r / 2 * 4 + r % 2] + p[r / 2 * 4 + 2 + r % 2];
    }
    // The four 8x8 matrices: tokens 0-7 and 8-15 of the warp, for 8 rows and for the next 8.
    const int lane = reload_lane();
    const u32 address =
        shared_address(smem.probabilities[p_buffer]) +
        swizzled_offset<kTileRowBytes>(lane / 16 * 8 + lane % 8, reload_warp() * 2 + lane / 8 % 2);
#pragma unroll
    for (int group = 0; group < kRowGroups; group += 2) {
      const float* acc = p + group * 4;
      stmatrix_x4_trans(
          address + group * 8 * kTileRowBytes, cvt_rn_x2_f32(Element{}, acc[1], acc[0]),
          cvt_rn_x2_f32(Element{}, acc[3], acc[2]), cvt_rn_x2_f32(Element{}, acc[5], acc[4]),
          cvt_rn_x2_f32(Element{}, acc[7], acc[6]));
    }
    fence_proxy_async();
    return max_p > kMaxUnnormalizedP;
  }

  // Raises the row max to the maximum of all warps' scores, and rescales l and O by alpha.
  __device__ void update_row_max(float factor) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const float maximum = max_over_lanes(fmaxf(__fmul_rn(scores[r / 2 * 4 + r % 2], factor),
                                                 __fmul_rn(scores[r / 2 * 4 + 2 + r % 2], factor)));
      if (reload_lane() < 4) smem.warp_rows[reload_warp()][row_of(r)] = maximum;
    }
    named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
    float alpha[kRowsPerThread];
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      float maximum = -kInfinity;
#pragma unroll
      for (int warp = 0; warp < kConsumerWarps; ++warp) {
        maximum = fmaxf(maximum, smem.warp_rows[warp][row_of(r)]);
      }
      const float next = maximum > row_max[r] ? maximum : row_max[r];
      alpha[r] = ex2_approx(row_max[r] - next);
      row_max[r] = next;
      row_sum[r] *= alpha[r];
    }
#pragma unroll
    for (int i = 0; i < kAccumulators; ++i) {
      set_accumulator(accumulators, i, weighted(accumulator(accumulators, i), alpha, i));
    }
  }

  __device__ void clear_nonfinite_v(int first_token) const {
    named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
    clear_nonfinite(smem, max(work.unmasked_kv_end - first_token, 0), work.kv_end - first_token,
                    [&](int index) { return tile(index); });
    fence_proxy_async();
  }

  __device__ void process_block(int kv_block) {
    qk_gemm();
    float factor = scale;
    const int first_token = kv_block * kBlockN;
    if (first_token + kBlockN > work.unmasked_kv_end) {
      mask_scores(first_token);
      factor = 1.0f;
      clear_nonfinite_v(first_token);
    }
    float partial_sum[kRowsPerThread];
    const bool needs_rescale = store_p(factor, partial_sum);
    if (named_barrier_sync_or(NamedBarrier::P0Ready, kConsumerThreads, needs_rescale)) {
      update_row_max(factor);
      store_p(factor, partial_sum);
      named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
    }
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) row_sum[r] += partial_sum[r];
    pv_gemm();
    p_buffer ^= 1;
  }

  __device__ void pv_gemm() {
    const u32 p_desc =
        descriptor_low(shared_address(smem.probabilities) + p_buffer * kQueryTileBytes, 16);
#pragma unroll
    for (int index = 0; index < kLatentTiles; ++index) wgmma_fence_operand(accumulators[index]);
    wgmma_fence();
#pragma unroll
    for (int index = 0; index < kLatentTiles; ++index) {
      const u32 v_desc = descriptor_low(shared_address(tile(index)), kTileBytes);
#pragma unroll
      for (int k = 0; k < kBlockN / 16; ++k) {
        wgmma_mma_trans_a(Element{}, accumulators[index], smem_desc_sw128(v_desc + k * 128),
                          smem_desc_sw128(p_desc + k * 2), 1);
      }
      if (index % kTilesPerStage == kTilesPerStage - 1) wgmma_commit_group();
    }
    wgmma_commit_group();
    wgmma_wait_group<2>();
    release(smem.kv_empty[stage(0)]);
    wgmma_wait_group<1>();
    release(smem.kv_empty[stage(1)]);
    wgmma_wait_group<0>();
    release(smem.kv_empty[stage(2)]);
#pragma unroll
    for (int index = 0; index < kLatentTiles; ++index) wgmma_fence_operand(accumulators[index]);
  }
};

// Work item of the consumer warpgroup, swap-AB: mainloop, row-sum reduction, epilogue.

// Sums over the eight lanes that hold the same rows.
__device__ inline float sum_over_lanes(float value) {
#pragma unroll
  for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
    value += __shfl_xor_sync(~0u, value, lanes);
  }
  return value;
}

// Reduces the row sum l over the warps, each of which has other tokens.
__device__ inline void reduce_row_sum(SharedMemoryPlan& smem, const Consumer& consumer,
                                      ThreadRows& rows) {
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    const float row_sum = sum_over_lanes(consumer.row_sum[r]);
    if (reload_lane() < 4) smem.warp_rows[reload_warp()][row_of(r)] = row_sum;
  }
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
#pragma unroll
  for (int r = 0; r < kRowsPerThread; ++r) {
    float row_sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kConsumerWarps; ++warp) row_sum += smem.warp_rows[warp][row_of(r)];
    rows[r] = {consumer.row_max[r], row_sum};
  }
}

// State that persists across work items.
struct ConsumerState {
  float scale;
  PipelineState<kStages> pipe;
  u32 p_buffer = 0;

  __device__ ConsumerState(const Params& params, const SharedMemoryPlan&)
      : scale(score_scale(params) * kLog2E) {}
};

__device__ inline void process_work(const Params& params, const WorkItem& work,
                                    SharedMemoryPlan& smem, ConsumerState& state) {
  Consumer consumer(params, smem, work, state.scale, state.pipe, state.p_buffer);
  const int end = work.first_kv_block + work.num_kv_blocks;
#pragma unroll 1
  for (int kv_block = work.first_kv_block; kv_block < end; ++kv_block)
    consumer.process_block(kv_block);
  // Without KV blocks no barrier of the mainloop orders the warps' waits for Q before its release.
  if (work.num_kv_blocks == 0) named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  if (reload_tid() == 0) arrive(smem.query_empty);
  ThreadRows rows;
  reduce_row_sum(smem, consumer, rows);
  epilogue(params, work, smem, consumer.accumulators, rows);
}

// The registers of a thread at launch suffice for all roles: no setmaxnreg.
__device__ inline void producer_reg_dealloc() {}
__device__ inline void consumer_reg_alloc() {}

// Consumer loop: processes the work items of the CTA in order.

__device__ inline void consumer_loop(const Params& params, SharedMemoryPlan& smem) {
  ConsumerState state(params, smem);
  finish_q_load(smem.first_query_full);
  u32 work_idx = 0;
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    if (work.seq_idx < 0) return;
    wait_query(smem, work_idx);
    process_work(params, work, smem, state);
    work_idx = work.work_idx + 1;  // reloaded: takes no register during the mainloop
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx - 1)]);
  }
}

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

// KV producer warp, swap-AB: loads the KV blocks of all work items by TMA, three stages per block.

// A stage is one TMA copy of three tiles if pages hold whole KV blocks and the rope dims are not a
// separate tensor, and one copy per tile and TMA box otherwise.
__device__ inline void copy_stage(const Params& params, const KvTileBoxes& boxes, int first_tile,
                                  u32 target, u32 full, u64 cache_hint) {
  mbarrier_arrive_expect_tx(full, kTilesPerStage * boxes.tile_bytes());
  if (kBoxes == 1 && !params.separate_rope) {
    cp_async_bulk_tensor(target, &params.kv_map, full, cache_hint, 0, boxes.slot[0], first_tile,
                         boxes.page[0]);
    return;
  }
#pragma unroll
  for (int tile = 0; tile < kTilesPerStage; ++tile) {
    const bool is_rope = first_tile + tile == kLatentTiles;
    boxes.copy_tile(is_rope ? &params.rope_map : &params.latent_map,
                    is_rope ? 0 : first_tile + tile, target + tile * kTileBytes, full, cache_hint);
  }
}

// `coord` is the first work item.
__device__ inline void producer_loop(const Params& params, int, WorkCoord coord,
                                     SharedMemoryPlan& smem) {
  const u64 cache_hint = kv_cache_hint(params.cta_group_size > 1);
  PipelineState<kStages> pipe;
  for (u32 work_idx = 0; coord.seq_idx >= 0; coord = next_work_coord(smem, work_idx)) {
    const int end = coord.first_kv_block + coord.num_kv_blocks;
    BlockTableReader block_table(params, coord);
    for (int kv_block = coord.first_kv_block; kv_block < end; ++kv_block) {
      const KvTileBoxes boxes(block_table, kv_block, coord.kv_end);
#pragma unroll
      for (int stage = 0; stage < kStagesPerBlock; ++stage) {
        wait(smem.kv_empty[pipe.index], pipe.phase ^ 1);
        if (lane_index() == 0) {
          copy_stage(params, boxes, stage * kTilesPerStage, shared_address(smem.kv[pipe.index]),
                     shared_address(&smem.kv_full[pipe.index]), cache_hint);
        }
        __syncwarp();
        pipe.advance();
      }
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

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sm90(const __grid_constant__ Params params) {
  SharedMemoryPlan& smem = shared_memory<SharedMemoryPlan>();
  // Prologue, one warp each: overlaps the tail of the preceding kernel (PDL).
  if (threadIdx.x == 0) {
    init_kv_barriers(smem);
    fence_mbarrier_init();
  } else if (threadIdx.x == kWarpLanes) {
    init_work_barriers(smem);
    smem.has_nonfinite = 0;
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
    consumer_reg_alloc();
    load_first_q_async(params, first_work, smem);
    consumer_loop(params, smem);
  } else {
    producer_reg_dealloc();
    if (warp_role == 0) {
      producer_loop(params, rank_in_group, first_work, smem);
      prefetch_sched_meta(params);
    } else {
      scheduler_loop(params, scheduler, smem);
    }
  }
}
