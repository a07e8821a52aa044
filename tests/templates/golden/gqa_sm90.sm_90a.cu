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
  TensorMap key_map;
  TensorMap value_map;
  const u16* query;
  const unsigned char* value_cache;
  const int* block_tables;
  const int* seq_lens;
  const int* cu_seqlens_q;
  const u32* draft_mask;
  const float* bmm1_scale_tensor;
  const float* bmm2_scale_tensor;
  const float* sinks;
  unsigned char* out;
  float* partial_out;
  unsigned char* partial_states;
  u32* semaphores;
  i64 query_stride;
  i64 query_head_stride;
  i64 value_page_stride;
  i64 value_token_stride;
  i64 value_head_stride;
  int tokens;
  int num_seqs;
  int kv_heads;
  int group_size;
  int q_len;
  int row_tiles;
  int num_tiles;
  int num_cta_groups;
  int cta_group_size;
  int mask_words;
  int window;
  int max_pages;
  int max_tokens;
  int block_tables_stride;
  int num_pages;
  int scores_take_bmm2;
  float bmm1_scale;
  float bmm2_scale;
  float score_factor;
  float output_factor;
};

// Config of gqa_sm90: facts of the spec as constants.

using QueryElement = Bf16;
using Element = Bf16;  // of the MMA operands
using OutElement = Bf16;
constexpr int kHeadDim = 128;
constexpr int kPageSize = 64;
constexpr int kRowBytes = 256;  // K or V row of a cached token of one kv head
constexpr int kHeadsPerCta = 1;  // kv heads of a work tile
constexpr int kSwizzleBytes = 128;
constexpr int kBlockN = 128;
constexpr int kBoxTokens = 64;  // of a TMA box
constexpr int kStages = 4;
constexpr int kBlockM = 8;
constexpr int kConsumerWarps = 8;
constexpr int kSharedBytes = 232448;

// Warp roles: the consumer warps, then a warpgroup of the producer warp, the scheduler warp and two
// epilogue warps, because setmaxnreg applies to whole warpgroups.
constexpr int kConsumerThreads = kConsumerWarps * kWarpLanes;
constexpr int kProducerWarp = kConsumerWarps;
constexpr int kThreads = 384;
constexpr int kSchedulerWarp = kProducerWarp + 1;
constexpr int kFirstEpilogueWarp = kSchedulerWarp + 1;
constexpr int kEpilogueWarps = kThreads / kWarpLanes - kFirstEpilogueWarp;
constexpr int kEpilogueThreads = kEpilogueWarps * kWarpLanes;

// setmaxnreg budgets, for kernels whose Q and O fragments exceed the registers at launch.
constexpr bool kReallocatesRegs = kBlockM * kHeadDim > 8 * 128;
constexpr int kInitialRegs = 168;  // max per thread at launch
constexpr int kConsumerRegs = 216;
constexpr int kProducerRegs = 72;

// A TMA box lands as swizzled columns, each kSwizzleBytes of every token: the columns of one kv
// head, then those of the next.
constexpr int kColumns = kRowBytes / kSwizzleBytes;
constexpr int kColumnBytes = kBoxTokens * kSwizzleBytes;
constexpr int kHeadBytes = kColumns * kColumnBytes;
constexpr int kBoxBytes = kHeadsPerCta * kHeadBytes;
constexpr int kBoxesPerKvBlock = kBlockN / kBoxTokens;
constexpr int kTileBytes = kBoxesPerKvBlock * kBoxBytes;

// Each warp takes one kv head, and kWarpTokens of its tokens in every KV block, in MMA steps of
// kStepTokens.
constexpr int kWarpsPerHead = kConsumerWarps / kHeadsPerCta;
constexpr int kThreadsPerHead = kWarpsPerHead * kWarpLanes;
constexpr int kWarpTokens = kBlockN / kWarpsPerHead;
constexpr int kStepTokens = 16;
constexpr int kSteps = kWarpTokens / kStepTokens;
constexpr int kRowGroups = kBlockM / 8;
constexpr int kDimTiles = kHeadDim / 16;

// Whether Q fits into registers beside the O accumulators; else it is in shared memory.
constexpr bool kQueryInRegs = true;

// Sub-tile of O that the warps of a CTA combine at a time: the rows and dims that fit into shared
// memory beside the KV pipeline and Q. If it is the whole row tile, the epilogue warps can combine
// it while the consumers proceed to the next work item.
constexpr int kCombineRows = 8;
constexpr int kCombineRowGroups = kCombineRows / 8;
constexpr int kCombineDims = 128;
constexpr bool kUsesEpilogueWarps = kCombineRows == kBlockM && kCombineDims == kHeadDim;

enum class NamedBarrier : int {
  FirstWorkReady = 1,  // the first work item is published to all warps
  ConsumersSynced = 2,  // all consumer warps have arrived
  PartialsReady = 3,  // consumers have published their partials to the epilogue warps
  PartialsFree = 4,  // the epilogue warps have read them
  FirstWorkChecked = 5,  // all warps have read whether the first work item is valid
};

static_assert(kBoxesPerKvBlock * kBoxTokens == kBlockN, "TMA boxes fill a KV block");
static_assert(!kReallocatesRegs ||
                  kConsumerThreads * kConsumerRegs + 128 * kProducerRegs <= kThreads * kInitialRegs,
              "consumers allocate at most what the other warps release");
static_assert(kBoxesPerKvBlock <= kWarpLanes, "each lane issues at most one TMA box of a KV block");
static_assert(kBoxTokens % kStepTokens == 0, "an MMA step lies in one TMA box");
static_assert(kSteps * kStepTokens * kWarpsPerHead == kBlockN, "a head's warps cover a KV block");
static_assert(kWarpsPerHead * kHeadsPerCta == kConsumerWarps, "every kv head has as many warps");
static_assert(kHeadsPerCta == 1 || kQueryInRegs, "shared memory holds the Q of one kv head");

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

// PTX ISA, "Floating Point Instructions: ex2". Needs sm_20.

// ex2.approx.ftz.f32
// 2 to the power of x, relative error below 2^-22; minus infinity gives zero.
__device__ inline float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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

// Validation of cu_seqlens_q: a sequence must not end before it begins. Then no two sequences share
// query tokens, and the host can bound the total work.

__device__ inline bool has_negative_q_len(const Params& params, int seq_idx) {
  const int* offsets = params.cu_seqlens_q;
  return offsets != nullptr && offsets[seq_idx + 1] < offsets[seq_idx];
}

// Shape of a sequence: its query rows, and the KV blocks that they attend to.

// A row is one (query token, query head of a kv head) pair of a sequence, query token first.
struct SeqInfo {
  int first_query;  // index of the sequence's first query token among all
  int q_len;
  int kv_len;  // tokens in the cache, the new ones included
  int row_tiles;  // of one kv head; 0 if cu_seqlens_q points outside the query tensor
  int num_tiles;  // work tiles
  int first_kv_block;  // that any row attends to
  int num_kv_blocks;  // from first_kv_block on
};

// First token in the sliding window of a query token.
__device__ inline int window_kv_begin(const Params& params, int kv_len, int q_len, int query) {
  return max(0, max(0, kv_len - q_len + query + 1) - params.window);
}

// Sets the KV blocks that any row attends to.
__device__ inline void set_kv_blocks(const Params& params, SeqInfo& seq_info, int seq_len) {
  seq_info.kv_len = min(max(seq_len, 0), params.max_tokens);
  seq_info.first_kv_block = window_kv_begin(params, seq_info.kv_len, seq_info.q_len, 0) / kBlockN;
  seq_info.num_kv_blocks = ceil_div(seq_info.kv_len, kBlockN) - seq_info.first_kv_block;
}

// `seq_len` is the unchecked entry of seq_lens.
__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx, int seq_len) {
  SeqInfo seq_info;
  seq_info.q_len = params.q_len;
  seq_info.row_tiles = params.row_tiles;
  seq_info.num_tiles = params.num_tiles;
  seq_info.first_query = seq_idx * params.q_len;
  if (params.cu_seqlens_q != nullptr) {
    const int first = params.cu_seqlens_q[seq_idx];
    const int end = params.cu_seqlens_q[seq_idx + 1];
    const bool is_inside = first >= 0 && first <= end && end <= params.tokens;
    seq_info.first_query = first;
    seq_info.q_len = is_inside ? end - first : 0;
    seq_info.row_tiles = ceil_div(seq_info.q_len * params.group_size, kBlockM);
    seq_info.num_tiles = seq_info.row_tiles * params.num_tiles;  // params.num_tiles is per row tile
  }
  set_kv_blocks(params, seq_info, seq_len);
  return seq_info;
}

__device__ inline SeqInfo seq_info_of(const Params& params, int seq_idx) {
  return seq_info_of(params, seq_idx, params.seq_lens[seq_idx]);
}

// Linear KV blocks of a work tile: one per KV block, and one for an empty sequence, so that a CTA
// writes its zeros. A work tile holds one row tile of kHeadsPerCta kv heads for each CTA of a
// group; all work tiles of a sequence have the same cost.
__device__ inline u32 tile_kv_blocks(const SeqInfo& seq_info) {
  return static_cast<u32>(max(seq_info.num_kv_blocks, 1));
}

__device__ inline u32 linear_kv_blocks(const SeqInfo& seq_info) {
  return static_cast<u32>(seq_info.num_tiles) * tile_kv_blocks(seq_info);
}

// Stream-K schedule: divides the KV blocks of all sequences evenly among CTA groups. Each CTA
// computes its own range.

// A CTA group is a set of consecutive CTAs that read the same tokens at the same time and share
// them through L2: each CTA for its own kv heads, which are adjacent in most caches, or for another
// row tile of the same heads. The KV blocks of all work tiles form one linear index space, of which
// every group takes an equal contiguous range. A work tile that crosses range boundaries is split,
// and its splits are combined. The host guarantees that total_blocks * num_ranges fits into 32
// bits.
struct ScheduleRange {
  u32 total_blocks;  // linear KV blocks of all work tiles
  u32 num_ranges;  // at most one per CTA group
  u32 index;  // of this range
  u32 begin;  // linear KV blocks
  u32 end;
  u32 rank_in_group;  // of this CTA
};

// Current work tile of a CTA.
struct SchedulerState {
  SeqInfo seq_info;
  int seq_idx;
  int tile;  // of the sequence
  u32 tile_begin;  // linear KV block
};

__device__ inline u32 range_begin_of(u32 index, u32 total_blocks, u32 num_ranges) {
  return index * total_blocks / num_ranges;
}

// Range that holds a linear KV block.
__device__ inline u32 range_of(u32 linear_block_idx, const ScheduleRange& range) {
  return ((linear_block_idx + 1) * range.num_ranges - 1) / range.total_blocks;
}

// Consecutive sequences whose lengths a lane loads together.
constexpr int kSeqsPerLane = 4;

// Their lengths, from sequence `first` on; indices behind the last sequence repeat it.
struct LaneSeqLens {
  int lens[kSeqsPerLane];

  __device__ LaneSeqLens(const Params& params, int first) {
#pragma unroll
    for (int i = 0; i < kSeqsPerLane; ++i) {
      lens[i] = ld_relaxed_gpu(params.seq_lens + min(first + i, params.num_seqs - 1));
    }
  }

  __device__ bool differs_from(const LaneSeqLens& other) const {
    bool differ = false;
#pragma unroll
    for (int i = 0; i < kSeqsPerLane; ++i) differ |= lens[i] != other.lens[i];
    return differ;
  }

  // Length of sequence `index` of lane `lane`.
  __device__ int of_lane(int index, int lane) const {
    int seq_len = lens[0];
#pragma unroll
    for (int i = 1; i < kSeqsPerLane; ++i) seq_len = i == index ? lens[i] : seq_len;
    return __shfl_sync(~0u, seq_len, lane);
  }
};

__device__ inline int seqs_per_lane(const Params& params) {
  return ceil_div(params.num_seqs, kWarpLanes);
}

// Lengths of the first sequences of this lane.
__device__ inline LaneSeqLens lane_seq_lens(const Params& params) {
  return LaneSeqLens(params, lane_index() * seqs_per_lane(params));
}

// Linear KV blocks of the sequences [first, end), which all have the same q_len.
__device__ inline u32 uniform_kv_blocks(const Params& params, LaneSeqLens seq_lens, int first,
                                        int end) {
  SeqInfo seq_info;
  seq_info.q_len = params.q_len;
  seq_info.num_tiles = params.num_tiles;
  u32 sum = 0;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < kSeqsPerLane; ++i) {
      set_kv_blocks(params, seq_info, seq_lens.lens[i]);
      sum += first + i < end ? linear_kv_blocks(seq_info) : 0;
    }
    first += kSeqsPerLane;
    if (first >= end) return sum;
    seq_lens = LaneSeqLens(params, first);
  }
}

// The same for ragged q_len; also reports a sequence that ends before it begins.
__device__ inline u32 ragged_kv_blocks(const Params& params, int first, int end,
                                       bool& any_negative_q_len) {
  u32 sum = 0;
#pragma unroll 1
  for (; first < end; ++first) {
    sum += linear_kv_blocks(seq_info_of(params, first, params.seq_lens[first]));
    any_negative_q_len |= has_negative_q_len(params, first);
  }
  return sum;
}

// Computes the range of this CTA's group and the work tile that it begins in, by a warp-wide prefix
// sum. Returns whether there is a range. `seq_lens` comes from lane_seq_lens.
__device__ inline bool find_range(const Params& params, const LaneSeqLens& seq_lens,
                                  ScheduleRange& range, SchedulerState& state) {
  const int per_lane = seqs_per_lane(params);
  const int first = min(lane_index() * per_lane, params.num_seqs);
  const int end = min(first + per_lane, params.num_seqs);
  u32 lane_blocks = 0;
  bool is_invalid = false;
  if (params.cu_seqlens_q == nullptr) {
    lane_blocks = uniform_kv_blocks(params, seq_lens, first, end);
  } else {
    lane_blocks = ragged_kv_blocks(params, first, end, is_invalid);
  }
  if (__any_sync(~0u, is_invalid)) return false;
  u32 inclusive_sum = lane_blocks;  // over lanes
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const u32 before = __shfl_up_sync(~0u, inclusive_sum, lanes);
    if (lane_index() >= lanes) inclusive_sum += before;
  }
  range.total_blocks = __shfl_sync(~0u, inclusive_sum, kWarpLanes - 1);
  range.num_ranges = min(static_cast<u32>(params.num_cta_groups), range.total_blocks);
  range.index = blockIdx.x / params.cta_group_size;
  range.rank_in_group = blockIdx.x - range.index * params.cta_group_size;
  if (range.index >= range.num_ranges) return false;
  range.begin = range_begin_of(range.index, range.total_blocks, range.num_ranges);
  range.end = range_begin_of(range.index + 1, range.total_blocks, range.num_ranges);

  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, inclusive_sum > range.begin))) - 1;
  u32 begin = __shfl_sync(~0u, inclusive_sum - lane_blocks, lane);
  state.seq_idx = lane * per_lane;
#pragma unroll 1
  while (true) {
    const int kv_len = per_lane <= kSeqsPerLane
                           ? seq_lens.of_lane(state.seq_idx - lane * per_lane, lane)
                           : params.seq_lens[state.seq_idx];
    state.seq_info = seq_info_of(params, state.seq_idx, kv_len);
    const u32 seq_blocks = linear_kv_blocks(state.seq_info);
    if (range.begin - begin < seq_blocks) break;
    begin += seq_blocks;
    ++state.seq_idx;
  }
  const u32 blocks_per_tile = tile_kv_blocks(state.seq_info);
  const u32 tile = (range.begin - begin) / blocks_per_tile;
  state.tile = static_cast<int>(tile);
  state.tile_begin = begin + tile * blocks_per_tile;
  return true;
}

// Stream-K tile scheduler: the sequence of work items of a CTA. A work item is one split of a work
// tile.

// Tokens that a row may attend to: [begin, end).
struct KvRange {
  int begin;
  int end;

  __device__ bool contains(int token) const { return token >= begin && token < end; }
};

struct WorkItem {
  static constexpr int kNone = -1;  // seq_idx behind the last item

  int first_query;  // index of the sequence's first query token among all
  int seq_idx;
  int kv_head;
  int first_row;  // of the tile, among the sequence's rows of the kv head
  int rows;  // of the tile; the rest of kBlockM is padding
  int q_len;
  int kv_len;
  int unmasked_kv_begin, unmasked_kv_end;  // tokens that every row attends to
  int kv_begin, kv_end;  // tokens that any row may attend to
  int first_kv_block;
  int num_kv_blocks;
  int num_splits;  // of the work tile
  int split_idx;
  int first_split_cta;  // CTA of split 0

  __device__ static WorkItem none() {
    WorkItem work = {};
    work.seq_idx = kNone;
    return work;
  }

  __device__ bool is_none() const { return seq_idx == kNone; }

  __device__ int query_of(const Params& params, int row) const {
    return q_len == 1 ? 0 : (first_row + row) / params.group_size;
  }

  __device__ int head_of(const Params& params, int row) const {
    return kv_head * params.group_size + first_row + row -
           query_of(params, row) * params.group_size;
  }

  // Index of a row in a [tokens * heads] array.
  __device__ i64 global_row(const Params& params, int row) const {
    const i64 query = first_query + query_of(params, row);
    return query * params.group_size * params.kv_heads + head_of(params, row);
  }

  __device__ KvRange kv_range_of(const Params& params, int row) const {
    if (row >= rows) return {0, 0};
    const int query = query_of(params, row);
    const int end = params.draft_mask == nullptr ? kv_len - q_len + query + 1 : kv_len;
    return {window_kv_begin(params, kv_len, q_len, query), end};
  }

  // Whether the draft mask (tree mask of speculative tokens), if any, lets a row attend to a token.
  __device__ bool draft_mask_allows(const Params& params, int row, int token) const {
    const int draft = token - (kv_len - q_len);
    if (params.draft_mask == nullptr || draft < 0) return true;
    const u32* words = params.draft_mask +
                       static_cast<i64>(first_query + query_of(params, row)) * params.mask_words;
    // No row attends to speculative tokens beyond the mask.
    return draft / 32 < params.mask_words && (words[draft / 32] >> draft % 32 & 1) != 0;
  }

  // Whether a row attends to a token.
  __device__ bool attends(const Params& params, int row, int token) const {
    return kv_range_of(params, row).contains(token) && draft_mask_allows(params, row, token);
  }
};

// Work item of the current work tile, for the first kv head of the CTA.
__device__ inline WorkItem work_at(const Params& params, const ScheduleRange& range,
                                   const SchedulerState& state) {
  const SeqInfo& seq_info = state.seq_info;
  WorkItem work;
  work.first_query = seq_info.first_query;
  work.seq_idx = state.seq_idx;
  work.q_len = seq_info.q_len;
  work.kv_len = seq_info.kv_len;
  const int head_tile = state.tile * params.cta_group_size + static_cast<int>(range.rank_in_group);
  const int head_group = seq_info.row_tiles == 1 ? head_tile : head_tile / seq_info.row_tiles;
  work.kv_head = head_group * kHeadsPerCta;
  work.first_row = (head_tile - head_group * seq_info.row_tiles) * kBlockM;
  work.rows = min(seq_info.q_len * params.group_size - work.first_row, kBlockM);

  const int first = work.query_of(params, 0);
  const int last = work.query_of(params, work.rows - 1);
  const int first_new_token = seq_info.kv_len - seq_info.q_len;
  const bool has_mask = params.draft_mask != nullptr;
  work.kv_begin = window_kv_begin(params, seq_info.kv_len, seq_info.q_len, first);
  work.unmasked_kv_begin = window_kv_begin(params, seq_info.kv_len, seq_info.q_len, last);
  work.kv_end = max(has_mask ? seq_info.kv_len : first_new_token + last + 1, 0);
  work.unmasked_kv_end = max(has_mask ? first_new_token : first_new_token + first + 1, 0);

  const u32 blocks = tile_kv_blocks(seq_info);
  const u32 tile_end = state.tile_begin + blocks;
  const int begin = static_cast<int>(max(range.begin, state.tile_begin) - state.tile_begin);
  const int end = static_cast<int>(min(range.end, tile_end) - state.tile_begin);
  work.first_kv_block = max(seq_info.first_kv_block + begin, work.kv_begin / kBlockN);
  const int end_kv_block = min(seq_info.first_kv_block + end, ceil_div(work.kv_end, kBlockN));
  work.num_kv_blocks = max(end_kv_block - work.first_kv_block, 0);
  work.num_splits = 1;
  work.split_idx = 0;
  u32 first_range = range.index;
  if (begin > 0 || state.tile_begin + end < tile_end) {
    first_range = range_of(state.tile_begin, range);
    work.num_splits = static_cast<int>(range_of(tile_end - 1, range) - first_range) + 1;
    work.split_idx = static_cast<int>(range.index - first_range);
  }
  work.first_split_cta =
      static_cast<int>(first_range * params.cta_group_size + range.rank_in_group);
  return work;
}

// Advances to the next work tile; returns whether it begins within the range.
__device__ inline bool next_work(const Params& params, const ScheduleRange& range,
                                 SchedulerState& state) {
  state.tile_begin += tile_kv_blocks(state.seq_info);
  if (state.tile_begin >= range.end) return false;
  if (++state.tile < state.seq_info.num_tiles) return true;
  state.tile = 0;
#pragma unroll 1
  do {
    state.seq_info = seq_info_of(params, ++state.seq_idx);
  } while (state.seq_info.num_tiles == 0);
  return true;
}

// Work pipeline: the scheduler warp publishes work items to the producer, consumer and epilogue
// warps through shared memory.

// Work item `work_idx` of the CTA occupies stage work_idx % kWorkStages, one entry per kv head. An
// empty item follows the last one.
struct WorkPipeline {
  static constexpr u32 kWorkStages = 4;
  static constexpr int kEmptyArrivals =
      kThreads / kWarpLanes - 1 - (kUsesEpilogueWarps ? 0 : kEpilogueWarps);

  WorkItem work_items[kWorkStages][kHeadsPerCta];
  Barrier full[kWorkStages];
  Barrier empty[kWorkStages];

  // Called by one lane.
  __device__ void init_barriers() {
    for (u32 stage = 0; stage < kWorkStages; ++stage) {
      init_barrier(full[stage], 1);
      init_barrier(empty[stage], kEmptyArrivals);
    }
  }

  __device__ static u32 phase_of(u32 work_idx) { return work_idx / kWorkStages % 2; }

  __device__ const WorkItem& at(u32 work_idx, int head) const {
    return work_items[work_idx % kWorkStages][head];
  }

  // Whether there is such an item; its stage must be full.
  __device__ bool has(u32 work_idx) const { return !at(work_idx, 0).is_none(); }

  // Waits until the item is published. All reading warps wait for every item but the first, which a
  // named barrier publishes.
  __device__ void wait_full(u32 work_idx) const {
    wait(full[work_idx % kWorkStages], phase_of(work_idx));
    __syncwarp();  // reconverge before warp-wide barriers
  }

  // Called by a whole warp after its last read of the item. Stages that no later item reuses need
  // no release.
  __device__ void release(u32 work_idx) const {
    fence_acq_rel_cta();  // otherwise the arrival overtakes reads
    __syncwarp();
    if (lane_index() == 0) arrive(empty[work_idx % kWorkStages]);
  }

  // Called by the scheduler warp: writes the entries of all kv heads.
  __device__ void write(u32 work_idx, const WorkItem& first_head) {
    if (lane_index() < kHeadsPerCta) {
      WorkItem& target = work_items[work_idx % kWorkStages][lane_index()];
      target = first_head;
      target.kv_head += lane_index();
    }
    __syncwarp();
  }

  __device__ void wait_empty(u32 work_idx) const {
    wait(empty[work_idx % kWorkStages], phase_of(work_idx) ^ 1);
  }

  // Also for item 0, which no warp waits for: without it, the phase of item kWorkStages would be
  // off by one.
  __device__ void publish(u32 work_idx) const {
    if (lane_index() == 0) arrive(full[work_idx % kWorkStages]);
  }
};

// Shared-memory plan of a CTA.

// Partial softmax state (m, l) of a row.
struct RowState {
  float row_max;  // base 2; partial O and row sum are relative to it
  float row_sum;
};

// Rows of the combine buffer are padded by 16 bytes, so that the accumulator stores of a warp
// spread over all banks.
constexpr int kCombinePitch = kCombineDims + 4;

struct SharedMemoryPlan {
  unsigned char kv[kStages][kTileBytes];  // K, V, K, ...
  float combine_buffer[kConsumerWarps][kCombineRowGroups][8][kCombinePitch];
  RowState states[kConsumerWarps][kCombineRowGroups][8];
  // Q in fragment order, one vector per lane, and the inverse row scales; unless Q is in registers.
  uint2 query[kQueryInRegs ? 1 : kRowGroups][kQueryInRegs ? 1 : kDimTiles][kQueryInRegs ? 1 : 32];
  float query_inverse_scales[kQueryInRegs ? 1 : kBlockM];
  WorkPipeline work_pipeline;
  bool is_first_work_valid;
  Barrier kv_full[kStages];
  Barrier kv_empty[kStages];
  u32 nonfinite_work[2];  // last even and last odd work_idx with non-finite V to restore
  int is_last_split;
};
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec computes the size of the struct");

// Called by one warp, before the first CTA-wide barrier publishes the mbarriers.
__device__ inline void init_barriers(const Params& params, SharedMemoryPlan& smem) {
  if (lane_index() == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(smem.kv_full[stage], 1);
      init_barrier(smem.kv_empty[stage], kConsumerWarps);
    }
    smem.work_pipeline.init_barriers();
    fence_mbarrier_init();
    smem.nonfinite_work[0] = smem.nonfinite_work[1] = ~0u;
    prefetch_tensormap(&params.key_map);
    prefetch_tensormap(&params.value_map);
  }
  __syncwarp();
}

// Scales: a number from the host, or a one-element tensor on the device.

__device__ inline float value_of(const float* tensor, float value) {
  return tensor == nullptr ? value : *tensor;
}

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

// Vectorised store of four output elements in fp16 or bf16, from float.

// `index` counts elements and is a multiple of 4.
template <typename Target>
__device__ inline void store_x4(Target target, unsigned char* out, i64 index, float a, float b,
                                float c, float d) {
  uint2 packed;
  packed.x = cvt_rn_x2_f32(target, b, a);
  packed.y = cvt_rn_x2_f32(target, d, c);
  *reinterpret_cast<uint2*>(out + index * 2) = packed;
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

// Stores of O rows: finished rows into the output, partial rows of a split into the workspace.

// Workspace slot of a split. Each CTA has two slots per kv head: for the split that its range
// begins with, and for the one that it ends with.
__device__ inline int partial_slot(const Params& params, const WorkItem& work, int split_idx) {
  const int slot =
      (work.first_split_cta + split_idx * params.cta_group_size) * 2 + (split_idx == 0 ? 1 : 0);
  return slot * kHeadsPerCta + work.kv_head % kHeadsPerCta;
}

__device__ inline RowState* partial_states(const Params& params, int slot) {
  return reinterpret_cast<RowState*>(params.partial_states) + slot * kBlockM;
}

// Four adjacent dims of a row of partial O.
__device__ inline float4* partial_out_ptr(const Params& params, int slot, int row, int dim) {
  return reinterpret_cast<float4*>(params.partial_out +
                                   (slot * kBlockM + row) * static_cast<i64>(kHeadDim) + dim);
}

__device__ inline float4 add_weighted(float4 total, float4 value, float weight) {
  return make_float4(total.x + value.x * weight, total.y + value.y * weight,
                     total.z + value.z * weight, total.w + value.w * weight);
}

// Normalises and stores four adjacent dims of a finished row.
__device__ inline void store_finished(const Params& params, const WorkItem& work, int row, int dim,
                                      RowState state, float4 out) {
  const float sink = params.sinks == nullptr ? -kInfinity : params.sinks[work.head_of(params, row)];
  const float scale = value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor;
  const float factor = finish_row(state.row_max, state.row_sum, sink).factor * scale;
  store_x4(OutElement{}, params.out, work.global_row(params, row) * kHeadDim + dim, out.x * factor,
           out.y * factor, out.z * factor, out.w * factor);
}

// Combine of the splits of a work tile: the last CTA to arrive at the semaphore reduces the
// partials of all splits, in split order. No CTA waits for another.

constexpr int kSplitsPerStep = 8;  // loads in flight

__device__ inline void combine_row(const Params& params, const WorkItem& work, int row, int dim) {
  RowState state = {-kFloatMax, 0.0f};
  float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int first = 0; first < work.num_splits; first += kSplitsPerStep) {
    float2 states[kSplitsPerStep];
    float4 partials[kSplitsPerStep];
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) {
      // Behind the last split, loads repeat it; the sum below skips them.
      const int slot = partial_slot(params, work, min(first + i, work.num_splits - 1));
      states[i] = ld_global_cg_v2_f32(partial_states(params, slot) + row);
      partials[i] = ld_global_cg_v4_f32(partial_out_ptr(params, slot, row, dim));
    }
    float next = state.row_max;
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) next = fmaxf(next, states[i].x);
    const float alpha = ex2_approx(state.row_max - next);
    state = {next, state.row_sum * alpha};
    out = make_float4(out.x * alpha, out.y * alpha, out.z * alpha, out.w * alpha);
#pragma unroll
    for (int i = 0; i < kSplitsPerStep; ++i) {
      if (first + i >= work.num_splits) continue;
      const float weight = ex2_approx(states[i].x - next);
      state.row_sum += states[i].y * weight;
      out = add_weighted(out, partials[i], weight);
    }
  }
  store_finished(params, work, row, dim, state, out);
}

// Called by all consumers, each for its kv head, after they have stored the partial of this split.
__device__ inline void combine_splits(const Params& params, const WorkItem& work,
                                      int thread_in_head, SharedMemoryPlan& smem) {
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  if (threadIdx.x == 0) {
    u32* semaphore = params.semaphores + work.first_split_cta;
    const u32 others = static_cast<u32>(work.num_splits - 1);
    const bool is_last = atom_add_acq_rel_gpu(semaphore, 1) == others;
    if (is_last) *semaphore = 0;  // for the next launch
    smem.is_last_split = is_last;
  }
  __syncwarp();
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  if (!smem.is_last_split) return;
  constexpr int kQuads = kHeadDim / 4;
#pragma unroll 1
  for (int vec_idx = thread_in_head; vec_idx < work.rows * kQuads; vec_idx += kThreadsPerHead) {
    combine_row(params, work, vec_idx / kQuads, vec_idx % kQuads * 4);
  }
}

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

// MMA fragments with swap-AB, and ldmatrix addresses in the swizzled KV tile.

// Swap-AB: tokens (QK GEMM) or output dims (PV GEMM) are M, and query rows are N, so that eight
// query rows fill an MMA.
using QueryRow = uint2[kDimTiles];  // a lane's fragment of a row
using Scores = float[kSteps][kRowGroups][4];
using Probabilities = u32[kSteps][kRowGroups][2];
using Output = float[kDimTiles][kRowGroups][4];

// Query row of column `r` of a lane's accumulators; query row of a lane's Q fragment.
__device__ inline int row_of(int group, int r) { return group * 8 + lane_index() % 4 * 2 + r; }
__device__ inline int query_row(int group) { return group * 8 + lane_index() / 4; }

// Token of accumulators `half * 2` and `half * 2 + 1`, relative to the warp's first token.
__device__ inline int token_of_lane(int step, int half) {
  return step * kStepTokens + half * 8 + lane_index() / 4;
}

// kv head of a warp among those of the CTA, and rank of the warp among the warps of that head.
__device__ inline int head_of_warp(int warp) { return warp % kHeadsPerCta; }
__device__ inline int rank_of_warp(int warp) { return warp / kHeadsPerCta; }

// First token of a warp in a KV block.
__device__ inline int first_token_of_warp(int warp) { return rank_of_warp(warp) * kWarpTokens; }

// Offset of a token of a KV tile, in the first column of the first head of its TMA box.
__device__ inline u32 token_offset(int token) {
  return static_cast<u32>(token / kBoxTokens * kBoxBytes + token % kBoxTokens * kSwizzleBytes);
}

// The swizzle of a token: an XOR on the offset of its 16-byte chunks.
__device__ inline u32 swizzle_of(int token) {
  return static_cast<u32>(kSwizzleBytes == 128 ? token & 7 : token >> 1 & 3) * kChunkBytes;
}

// Row address of a lane for ldmatrix.x4. Its four matrices are tokens 0 to 7 and 8 to 15 of a step,
// in each of two adjacent chunks.
struct LdmatrixRows {
  u32 offset;

  // `half` of the tokens and `chunk` that the group of eight lanes of this lane addresses.
  __device__ LdmatrixRows(int warp, int half, int chunk) {
    const int token = first_token_of_warp(warp) + half * 8 + lane_index() % 8;
    offset = head_of_warp(warp) * kHeadBytes + token_offset(token) +
             (swizzle_of(token) ^ chunk * kChunkBytes);
  }

  // Address in pair `pair` of chunks, counted across all swizzled columns.
  __device__ u32 at(const unsigned char* tile, int step, int pair) const {
    constexpr int kSwizzlePairs = kSwizzleBytes / (2 * kChunkBytes);
    return shared_address(tile) + (offset ^ pair % kSwizzlePairs * 2 * kChunkBytes) +
           pair / kSwizzlePairs * kColumnBytes + token_offset(step * kStepTokens);
  }
};

// Matrix order of the A operand: in the QK GEMM both token halves of a chunk, then of the next
// chunk; in the PV GEMM both chunks of a token half, then of the next half.
__device__ inline LdmatrixRows k_ldmatrix_rows(int warp) {
  return LdmatrixRows(warp, lane_index() / 8 % 2, lane_index() / 16);
}
__device__ inline LdmatrixRows v_ldmatrix_rows(int warp) {
  return LdmatrixRows(warp, lane_index() / 16, lane_index() / 8 % 2);
}

constexpr int kChunkPairs = kRowBytes / (2 * kChunkBytes);

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

// PTX ISA, "Warp Level Matrix Instructions: mma". Needs sm_80.
// d[16, 8] += a[16, 16] * b[16, 8]. A lane holds, with g = lane / 4 and c = lane % 4:
// d: rows g (0, 1) and g + 8 (2, 3), columns 2c and 2c + 1; a: two elements a word, rows g, g + 8,
// g, g + 8, columns 2c.. of the first (0, 1) and second (2, 3) half; b: rows 2c.. of each half,
// column g.

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
__device__ inline void mma_m16n8k16(Bf16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32
__device__ inline void mma_m16n8k16(Fp16, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// QK and PV GEMMs over a 16-bit KV cache, which needs no conversion.

// Loads a lane's fragment of 16 dims of Q, in the k order of its K fragment.
__device__ inline uint2 load_q_fragment(const u16* source) {
  const u32* pairs = reinterpret_cast<const u32*>(source) + lane_index() % 4;
  return make_uint2(pairs[0], pairs[4]);
}

// Q needs no conversion.
constexpr bool kScalesQ = false;
__device__ inline float convert_q_row(QueryRow&) { return 1.0f; }

// QK GEMM of one step: S^T = K Q^T.
template <typename Query>
__device__ inline void qk_gemm(const LdmatrixRows& rows, const unsigned char* keys, int step,
                               const Query& query, float (&scores)[kRowGroups][4]) {
  constexpr int kChains = kRowGroups == 1 ? 2 : 1;  // independent MMA chains
  float sums[kChains][kRowGroups][4] = {};
#pragma unroll
  for (int pair = 0; pair < kChunkPairs; ++pair) {
    u32 k[4];
    ldmatrix_x4(k, rows.at(keys, step, pair));
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
      const uint2 q = query.at(n, pair);
      mma_m16n8k16(Element{}, sums[pair % kChains][n], k, q.x, q.y);
    }
  }
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[n][e] = kChains == 1 ? sums[0][n][e] : sums[0][n][e] + sums[kChains - 1][n][e];
    }
  }
}

// PV GEMM of one step: O^T += V^T P^T. Returns a word that depends on all V fragments, for
// arrive_after_reads.
__device__ inline u32 pv_gemm(const LdmatrixRows& rows, const unsigned char* values, int step,
                              const u32 (&probabilities)[kRowGroups][2], Output& output) {
#pragma unroll
  for (int pair = 0; pair < kChunkPairs; ++pair) {
    u32 v[4];
    ldmatrix_x4_trans(v, rows.at(values, step, pair));
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
      mma_m16n8k16(Element{}, output[pair][n], v, probabilities[n][0], probabilities[n][1]);
    }
  }
  u32 read = 0;  // from accumulators, because a word of every V fragment would take registers
#pragma unroll
  for (int pair = 0; pair < kChunkPairs; ++pair) read ^= __float_as_uint(output[pair][0][0]);
  return read;
}

// Dim of accumulators `half * 2` and `half * 2 + 1` of a 16-dim tile.
__device__ inline int dim_of_lane(int tile, int half) {
  return tile * 16 + half * 8 + lane_index() / 4;
}

// Zeroes NaN and Inf in a chunk.
__device__ inline Chunk zero_nonfinite(Chunk chunk) {
  constexpr u32 kExponent = kIsSame<Element, Fp16> ? 0x7c00 : 0x7f80;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    u32& pair = chunk.words[word];
    if ((pair & kExponent) == kExponent) pair &= 0xffff0000;
    if ((pair >> 16 & kExponent) == kExponent) pair &= 0xffff;
  }
  return chunk;
}

// Element of a cached V row.
__device__ inline float element_at(const unsigned char* row, int dim) {
  return cvt_f32(Element{}, reinterpret_cast<const u16*>(row)[dim]);
}

// Stores a warp's accumulators of eight rows and kCombineDims dims to `combine_buffer`.
__device__ inline void store_to_combine_buffer(const Output& output, int group, int first_tile,
                                               float (&combine_buffer)[8][kCombinePitch]) {
#pragma unroll
  for (int tile = 0; tile < kCombineDims / 16; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      combine_buffer[row_of(0, e % 2)][dim_of_lane(tile, e / 2)] =
          output[first_tile + tile][group][e];
    }
  }
}

// NaN/Inf handling of V: keeps masked and non-finite V out of the PV GEMM, because 0 x NaN is NaN,
// and adds non-finite elements back for the rows that attend to them.

// Chunk `chunk` of token `warp_token` of a warp in a V tile.
__device__ inline Chunk* chunk_at(unsigned char* tile, int warp, int warp_token, int chunk) {
  constexpr int kSwizzleChunks = kSwizzleBytes / kChunkBytes;
  const int token = first_token_of_warp(warp) + warp_token;
  unsigned char* head = tile + head_of_warp(warp) * kHeadBytes;
  const u32 offset = static_cast<u32>(chunk % kSwizzleChunks * kChunkBytes) ^ swizzle_of(token);
  return reinterpret_cast<Chunk*>(head + token_offset(token) +
                                  chunk / kSwizzleChunks * kColumnBytes + offset);
}

// Clears V of this warp's tokens that are masked for some rows: whole tokens that no row attends
// to, and non-finite elements of the others. Returns whether it cleared a non-finite element, which
// restore_nonfinite then adds back.
__device__ inline bool clear_masked(const WorkItem& work, int first_token, int warp,
                                    unsigned char* tile) {
  constexpr int kChunks = kRowBytes / kChunkBytes;
  const KvRange unmasked = {work.unmasked_kv_begin, work.unmasked_kv_end};
  const KvRange attended = {work.kv_begin, work.kv_end};
  bool has_nonfinite = false;
  // Not unrolled: a rare path must not take registers from the main loop.
#pragma unroll 1
  for (int i = lane_index(); i < kWarpTokens * kChunks; i += kWarpLanes) {
    const int token = first_token + i / kChunks;
    if (unmasked.contains(token)) continue;
    Chunk* chunk = chunk_at(tile, warp, i / kChunks, i % kChunks);
    Chunk cleared{};
    if (attended.contains(token)) {
      const Chunk stored = *chunk;
      cleared = zero_nonfinite(stored);
#pragma unroll
      for (int word = 0; word < 4; ++word)
        has_nonfinite |= cleared.words[word] != stored.words[word];
    }
    *chunk = cleared;
  }
  // Orders these writes before the next TMA write to the stage.
  fence_proxy_async();
  __syncwarp();  // the cleared V is visible to all lanes
  return __any_sync(~0u, has_nonfinite);
}

// Adds the non-finite elements of a token that is masked for some rows, if this row attends to it.
// Unweighted: times any probability they are the same.
__device__ inline float4 add_nonfinite(const Params& params, const WorkItem& work, int row, int dim,
                                       int token, float4 out) {
  if (!work.attends(params, row, token)) return out;
  const int* page_ids =
      params.block_tables + work.seq_idx * static_cast<i64>(params.block_tables_stride);
  const int page = page_ids[token / kPageSize];
  if (!is_valid_page(page, params.num_pages)) return out;
  const PagedRows cached{params.value_cache + work.kv_head * params.value_head_stride,
                         params.value_page_stride, params.value_token_stride};
  const unsigned char* element_row = cached.row_of(page, token % kPageSize);
  float* sums[4] = {&out.x, &out.y, &out.z, &out.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float element = element_at(element_row, dim + i);
    if (!(fabsf(element) < kInfinity)) *sums[i] += element;
  }
  return out;
}

// The same for all such tokens of a work item, and four adjacent dims of a row.
__device__ inline float4 restore_nonfinite(const Params& params, const WorkItem& work, int row,
                                           int dim, float4 out) {
  const int begin = max(work.kv_begin, work.first_kv_block * kBlockN);
  const int end = min(work.kv_end, (work.first_kv_block + work.num_kv_blocks) * kBlockN);
#pragma unroll 1
  for (int token = begin; token < min(work.unmasked_kv_begin, end); ++token) {
    out = add_nonfinite(params, work, row, dim, token, out);
  }
#pragma unroll 1
  for (int token = max(max(begin, work.unmasked_kv_begin), work.unmasked_kv_end); token < end;
       ++token) {
    out = add_nonfinite(params, work, row, dim, token, out);
  }
  return out;
}

// Q loads in fragment order: into registers, or into shared memory for all warps. Q in registers is
// prefetched before its work item begins, because latency is high while memory is busy.

__device__ inline void load_q_row(const Params& params, const WorkItem& work, int group,
                                  QueryRow& fragment) {
  const int row = query_row(group);
  const bool is_row = row < work.rows;
  const i64 token = work.first_query + (is_row ? work.query_of(params, row) : 0);
  const int head = is_row ? work.head_of(params, row) : 0;
  const u16* source = params.query + token * params.query_stride + head * params.query_head_stride;
#pragma unroll
  for (int k = 0; k < kDimTiles; ++k) {
    fragment[k] = is_row ? load_q_fragment(source + k * 16) : make_uint2(0, 0);
  }
}

struct QueryFragments {
  static constexpr bool kPrefetchesQ = true;

  QueryRow rows[kRowGroups];
  QueryRow next_rows[kRowGroups];  // of the next item, in flight
  float inverse_scale[kRowGroups];  // of this lane's row of each group

  __device__ explicit QueryFragments(const SharedMemoryPlan&) {}

  // Issues the loads of all rows; every warp calls it.
  __device__ void prefetch(const Params& params, const WorkItem& work, int) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) load_q_row(params, work, n, next_rows[n]);
  }

  __device__ void load(const Params&, const WorkItem&, int, SharedMemoryPlan&) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) rows[n][k] = next_rows[n][k];
      inverse_scale[n] = convert_q_row(rows[n]);
    }
  }

  __device__ uint2 at(int group, int k) const { return rows[group][k]; }

  // Inverse Q scale of the row in column `r` of a lane's accumulators.
  __device__ float inverse_scale_of(int group, int r) const {
    return kScalesQ ? __shfl_sync(~0u, inverse_scale[group], row_of(0, r) * 4) : 1.0f;
  }
};

struct SharedQuery {
  static constexpr bool kPrefetchesQ = false;

  const SharedMemoryPlan& smem;

  __device__ explicit SharedQuery(const SharedMemoryPlan& target) : smem(target) {}

  __device__ void prefetch(const Params&, const WorkItem&, int) {}

  // Called by all consumers; the first kRowGroups warps load a row group each.
  __device__ void load(const Params& params, const WorkItem& work, int warp,
                       SharedMemoryPlan& target) {
    // No warp may still read the previous Q. Consumers that combine have synced since the main
    // loop; publish_partials does not sync them.
    if constexpr (kUsesEpilogueWarps)
      named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
    if (warp < kRowGroups) {
      QueryRow fragment;
      load_q_row(params, work, warp, fragment);
      const float inverse_scale = convert_q_row(fragment);
      if (lane_index() % 4 == 0) target.query_inverse_scales[query_row(warp)] = inverse_scale;
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) target.query[warp][k][lane_index()] = fragment[k];
    }
    named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
  }

  __device__ uint2 at(int group, int k) const { return smem.query[group][k][lane_index()]; }

  __device__ float inverse_scale_of(int group, int r) const {
    return kScalesQ ? smem.query_inverse_scales[row_of(group, r)] : 1.0f;
  }
};

template <bool kInRegs>
struct QueryChoice {
  using Type = QueryFragments;
};
template <>
struct QueryChoice<false> {
  using Type = SharedQuery;
};
using Query = QueryChoice<kQueryInRegs>::Type;

// PTX ISA, "Warp Level Matrix Instructions: movmatrix". Needs sm_75.

// movmatrix.sync.aligned.m8n8.trans.b16
// Transposes the matrix of which `a` is this lane's fragment.
__device__ inline u32 movmatrix_trans(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// Online softmax over the tokens of one warp, with a row max of its own.

// Conditional rescaling: P is relative to a row max that may be stale. It is updated only once a
// score exceeds it by more than this threshold, base 2, so rescaling is rare.
constexpr float kRescaleThreshold = 8.0f;

// Row sums cover this lane's tokens only.
struct Softmax {
  float row_max[kRowGroups][2];  // base 2
  float row_sum[kRowGroups][2];

  __device__ Softmax() {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        row_max[n][r] = -kFloatMax;
        row_sum[n][r] = 0.0f;
      }
    }
  }

  // Turns base-2 scores into P in place, and updates the row sums.
  __device__ void update(Scores& scores, Output& output) {
    if (__any_sync(~0u, exceeds_threshold(scores))) update_row_max(scores, output);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& score = scores[step][n][e];
          score = ex2_approx(score - row_max[n][e % 2]);
          row_sum[n][e % 2] += score;
        }
      }
    }
  }

  // Whether a score exceeds its row max by more than the rescale threshold, as the first score of a
  // row always does.
  __device__ bool exceeds_threshold(const Scores& scores) const {
    float max_score = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          max_score = fmaxf(max_score, scores[step][n][e] - row_max[n][e % 2]);
        }
      }
    }
    return max_score > kRescaleThreshold;
  }

  // Updates the row max of every row, and rescales its sum and O.
  __device__ void update_row_max(const Scores& scores, Output& output) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float tile_max = -kInfinity;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          tile_max = fmaxf(tile_max, fmaxf(scores[step][n][r], scores[step][n][2 + r]));
        }
#pragma unroll
        for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
          tile_max = fmaxf(tile_max, __shfl_xor_sync(~0u, tile_max, lanes));
        }
        const float next = fmaxf(tile_max, row_max[n][r]);
        const float alpha = ex2_approx(row_max[n][r] - next);
        row_max[n][r] = next;
        row_sum[n][r] *= alpha;
#pragma unroll
        for (int tile = 0; tile < kDimTiles; ++tile) {
          output[tile][n][r] *= alpha;
          output[tile][n][2 + r] *= alpha;
        }
      }
    }
  }

  // Publishes row max and row sum of a row group in shared memory.
  __device__ void publish(int group, RowState (&states)[8]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = row_sum[group][r];
#pragma unroll
      for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
        total += __shfl_xor_sync(~0u, total, lanes);
      }
      if (lane_index() < 4) states[row_of(0, r)] = {row_max[group][r], total};
    }
  }
};

// Base-2 softmax scale of each row; it includes the inverse Q scale.
struct ScoreScales {
  float scales[kScalesQ ? kRowGroups : 1][2];

  __device__ ScoreScales(const Query& query, float softmax_scale) {
#pragma unroll
    for (int n = 0; n < (kScalesQ ? kRowGroups : 1); ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) scales[n][r] = softmax_scale * query.inverse_scale_of(n, r);
    }
  }

  __device__ float of(int group, int r) const { return kScalesQ ? scales[group][r] : scales[0][0]; }
};

__device__ inline void scale_scores(const ScoreScales& score_scales, Scores& scores) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // Rounded, never fused: equal scores must have equal distances from the row max.
        scores[step][n][e] = __fmul_rn(scores[step][n][e], score_scales.of(n, e % 2));
      }
    }
  }
}

// Applies the draft mask (tree mask of speculative tokens).
__device__ inline void apply_draft_mask(const Params& params, const WorkItem& work, int first_token,
                                        Scores& scores) {
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = row_of(n, e % 2);
      if (row >= work.rows) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int token = first_token + token_of_lane(step, e / 2);
        if (!work.draft_mask_allows(params, row, token)) scores[step][n][e] = -kInfinity;
      }
    }
  }
}

// Masks the scores outside a row's KV range: a select, because the masked score may be NaN.
__device__ inline void mask_scores(const Params& params, const WorkItem& work, int first_token,
                                   Scores& scores) {
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const KvRange kv_range = work.kv_range_of(params, row_of(n, r));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = first_token + token_of_lane(step, half);
          if (!kv_range.contains(token)) scores[step][n][half * 2 + r] = -kInfinity;
        }
      }
    }
  }
  if (params.draft_mask != nullptr) apply_draft_mask(params, work, first_token, scores);
}

// P^T as the B fragments of the PV GEMM: tokens along K, query rows along N.
__device__ inline void transpose_probabilities(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* acc = scores[step][n] + half * 2;
        probabilities[step][n][half] = movmatrix_trans(cvt_rn_x2_f32(Element{}, acc[1], acc[0]));
      }
    }
  }
}

// Epilogue of a work item: combines the partial O of the consumer warps through shared memory, in
// sub-tiles of kCombineRows x kCombineDims. The consumers or the dedicated epilogue warps do it.

// Combines four adjacent dims of a row over all warps of kv head `head` of the CTA.
__device__ inline float4 combined_out(const SharedMemoryPlan& smem, int head, int row, int dim,
                                      RowState& state) {
  RowState states[kWarpsPerHead];
  state = {-kFloatMax, 0.0f};
#pragma unroll
  for (int rank = 0; rank < kWarpsPerHead; ++rank) {
    states[rank] = smem.states[rank * kHeadsPerCta + head][row / 8][row % 8];
    state.row_max = fmaxf(state.row_max, states[rank].row_max);
  }
  float4 out = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int rank = 0; rank < kWarpsPerHead; ++rank) {
    const float weight = ex2_approx(states[rank].row_max - state.row_max);
    state.row_sum += states[rank].row_sum * weight;
    const float4 partial = *reinterpret_cast<const float4*>(
        &smem.combine_buffer[rank * kHeadsPerCta + head][row / 8][row % 8][dim]);
    out = add_weighted(out, partial, weight);
  }
  return out;
}

// Stores four adjacent dims of a row: final if the work tile is not split, else partial.
__device__ inline void store_combined(const Params& params, const WorkItem& work, int row, int dim,
                                      RowState state, float4 out) {
  if (work.num_splits == 1) return store_finished(params, work, row, dim, state, out);
  const int slot = partial_slot(params, work, work.split_idx);
  *partial_out_ptr(params, slot, row, dim) = out;
  if (dim == 0) partial_states(params, slot)[row] = state;
}

// Stores a warp's share of a sub-tile to the combine buffer.
__device__ inline void store_warp_partial(int first_row, int first_dim, int warp,
                                          const Softmax& softmax, const Output& output,
                                          SharedMemoryPlan& smem) {
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
    const int group = n % kCombineRowGroups;
    if ((n - group) * 8 != first_row) continue;
    softmax.publish(n, smem.states[warp][group]);
#pragma unroll
    for (int dim = 0; dim < kHeadDim; dim += kCombineDims) {
      if (dim == first_dim)
        store_to_combine_buffer(output, n, dim / 16, smem.combine_buffer[warp][group]);
    }
  }
}

// Combines the sub-tile of one kv head; thread `thread` of `threads` takes every `threads`-th
// vector.
__device__ inline void combine_partials(const Params& params, const WorkItem& work, u32 work_idx,
                                        int first_row, int first_dim, int thread, int threads,
                                        const SharedMemoryPlan& smem) {
  constexpr int kQuads = kCombineDims / 4;
#pragma unroll 1
  for (int vec_idx = thread; vec_idx < kCombineRows * kQuads; vec_idx += threads) {
    const int row_in_buffer = vec_idx / kQuads;
    const int row = first_row + row_in_buffer;
    if (row >= work.rows) break;
    const int dim_in_buffer = vec_idx % kQuads * 4;
    const int dim = first_dim + dim_in_buffer;
    RowState state;
    float4 out =
        combined_out(smem, work.kv_head % kHeadsPerCta, row_in_buffer, dim_in_buffer, state);
    if (smem.nonfinite_work[work_idx % 2] == work_idx) {
      out = restore_nonfinite(params, work, row, dim, out);
    }
    store_combined(params, work, row, dim, state, out);
  }
}

// Index of this thread among the consumer threads of its kv head.
__device__ inline int thread_in_head(int warp) {
  return rank_of_warp(warp) * kWarpLanes + lane_index();
}

__device__ inline void combine_warps(const Params& params, const WorkItem& work, int warp,
                                     u32 work_idx, const Softmax& softmax, const Output& output,
                                     SharedMemoryPlan& smem) {
  // Not unrolled, to limit the I-cache footprint.
#pragma unroll 1
  for (int first_row = 0; first_row < work.rows; first_row += kCombineRows) {
#pragma unroll 1
    for (int first_dim = 0; first_dim < kHeadDim; first_dim += kCombineDims) {
      named_barrier_sync(NamedBarrier::ConsumersSynced,
                         kConsumerThreads);  // no warp reads the buffer any more
      store_warp_partial(first_row, first_dim, warp, softmax, output, smem);
      named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
      combine_partials(params, work, work_idx, first_row, first_dim, thread_in_head(warp),
                       kThreadsPerHead, smem);
      __syncwarp();
    }
  }
}

// Whether the epilogue warps combine an item: an unsplit work tile that another item follows. All
// consumers together finish the last item sooner. After an item that consumers combine themselves,
// they must sync before they store to the buffer again: combine_splits does after a split.
__device__ inline bool uses_epilogue_warps(const WorkItem& work, bool has_next) {
  return kUsesEpilogueWarps && work.num_splits == 1 && has_next;
}

// Consumers wait here until the epilogue warps have read the combine buffer.
__device__ inline void wait_for_epilogue(bool& is_epilogue_busy) {
  if (is_epilogue_busy)
    named_barrier_sync(NamedBarrier::PartialsFree, kConsumerThreads + kEpilogueThreads);
  is_epilogue_busy = false;
}

// Publishes the partials of an item to the epilogue warps.
__device__ inline void publish_partials(int warp, const Softmax& softmax, const Output& output,
                                        SharedMemoryPlan& smem) {
  store_warp_partial(0, 0, warp, softmax, output, smem);
  named_barrier_arrive(NamedBarrier::PartialsReady, kConsumerThreads + kEpilogueThreads);
}

// Epilogue warps: combine and store the items for which uses_epilogue_warps holds.
__device__ inline void epilogue_loop(const Params& params, SharedMemoryPlan& smem) {
  const WorkPipeline& work_pipeline = smem.work_pipeline;
  do {
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);
  } while (!smem.is_first_work_valid);
  if (!kUsesEpilogueWarps || !work_pipeline.has(0)) return;
  pdl_wait();
  const int thread = static_cast<int>(threadIdx.x) - kFirstEpilogueWarp * kWarpLanes;
#pragma unroll 1
  for (u32 work_idx = 0;; ++work_idx) {
    work_pipeline.wait_full(work_idx + 1);
    const bool has_next = work_pipeline.has(work_idx + 1);
    if (uses_epilogue_warps(work_pipeline.at(work_idx, 0), has_next)) {
      named_barrier_sync(NamedBarrier::PartialsReady, kConsumerThreads + kEpilogueThreads);
#pragma unroll 1
      for (int head = 0; head < kHeadsPerCta; ++head) {
        combine_partials(params, work_pipeline.at(work_idx, head), work_idx, 0, 0, thread,
                         kEpilogueThreads, smem);
      }
      __syncwarp();
      named_barrier_arrive(NamedBarrier::PartialsFree, kConsumerThreads + kEpilogueThreads);
    }
    if (!has_next) return;
    work_pipeline.release(work_idx);
  }
}

// Softmax scale: the factor of the scores Q K^T, natural base.

__device__ inline float score_scale(const Params& params) {
  const float scale = value_of(params.bmm1_scale_tensor, params.bmm1_scale);
  return params.scores_take_bmm2 ? scale * value_of(params.bmm2_scale_tensor, params.bmm2_scale)
                                 : scale;
}

// Consumer warps: QK GEMM, online softmax and PV GEMM. Each warp takes its own tokens of every KV
// block, and does not synchronise with the other consumers until the work item ends.

// A word that depends on all K fragments, for arrive_after_reads.
__device__ inline u32 dependency_on(const Scores& scores) {
  u32 word = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) word ^= __float_as_uint(scores[step][0][0]);
  return word;
}

// Releases a stage; `read` depends on all that the lane has loaded from it.
__device__ inline void release(const Barrier& empty, u32 read) {
  __syncwarp();  // all lanes have read
  if (lane_index() == 0) arrive_after_reads(empty, read);
}

// Skips a stage whose tokens this warp masks. It still waits for the stage to fill: a warp that
// releases early could arrive twice before the producer observes the phase.
__device__ inline void skip_stage(SharedMemoryPlan& smem, PipelineState<kStages>& kv_pipe) {
  wait(smem.kv_full[kv_pipe.index], kv_pipe.phase);
  release(smem.kv_empty[kv_pipe.index], 0);
  kv_pipe.advance();
}

// Processes work item `work_idx`, whose Q load is in flight, and issues the Q load of the next one.
// Returns whether there is a next one.
__device__ inline bool process_work(const Params& params, int warp, float softmax_scale,
                                    u32 work_idx, Query& query, bool& is_epilogue_busy,
                                    SharedMemoryPlan& smem, PipelineState<kStages>& kv_pipe) {
  const WorkPipeline& work_pipeline = smem.work_pipeline;
  const int head = head_of_warp(warp);
  const WorkItem& work = work_pipeline.at(work_idx, head);
  const LdmatrixRows k_rows = k_ldmatrix_rows(warp);
  const LdmatrixRows v_rows = v_ldmatrix_rows(warp);
  query.load(params, work, warp, smem);
  const ScoreScales score_scales(query, softmax_scale);
  Softmax softmax;
  Output output = {};
  const int unmasked_kv_begin = work.unmasked_kv_begin;
  const int unmasked_kv_end = work.unmasked_kv_end;
  int first_token = work.first_kv_block * kBlockN + first_token_of_warp(warp);
#pragma unroll 1
  for (int kv_block = max(work.num_kv_blocks, 1); kv_block > 0;
       --kv_block, first_token += kBlockN) {
    if (kv_block == 1) {
      if constexpr (Query::kPrefetchesQ) {
        work_pipeline.wait_full(work_idx + 1);
        if (work_pipeline.has(work_idx + 1))
          query.prefetch(params, work_pipeline.at(work_idx + 1, head), warp);
      }
      if (work.num_kv_blocks == 0) break;
    }
    const int end_token = first_token + kWarpTokens;
    const bool has_boundary = first_token < unmasked_kv_begin || end_token > unmasked_kv_end;
    if (has_boundary && (end_token <= work.kv_begin || first_token >= work.kv_end)) {
      skip_stage(smem, kv_pipe);
      skip_stage(smem, kv_pipe);
      continue;
    }
    Scores scores;
    wait(smem.kv_full[kv_pipe.index], kv_pipe.phase);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      qk_gemm(k_rows, smem.kv[kv_pipe.index], step, query, scores[step]);
    }
    release(smem.kv_empty[kv_pipe.index], dependency_on(scores));
    kv_pipe.advance();

    scale_scores(score_scales, scores);
    if (has_boundary) mask_scores(params, work, first_token, scores);
    softmax.update(scores, output);
    Probabilities probabilities;
    transpose_probabilities(scores, probabilities);

    unsigned char* values = smem.kv[kv_pipe.index];
    wait(smem.kv_full[kv_pipe.index], kv_pipe.phase);
    if (has_boundary && clear_masked(work, first_token, warp, values)) {
      smem.nonfinite_work[work_idx % 2] = work_idx;
    }
    u32 read = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      read ^= pv_gemm(v_rows, values, step, probabilities[step], output);
    }
    release(smem.kv_empty[kv_pipe.index], read);
    kv_pipe.advance();
  }
  if constexpr (!Query::kPrefetchesQ) work_pipeline.wait_full(work_idx + 1);
  const bool has_next = work_pipeline.has(work_idx + 1);
  wait_for_epilogue(is_epilogue_busy);
  if (uses_epilogue_warps(work, has_next)) {
    publish_partials(warp, softmax, output, smem);
    is_epilogue_busy = true;
  } else {
    combine_warps(params, work, warp, work_idx, softmax, output, smem);
    if (work.num_splits > 1) combine_splits(params, work, thread_in_head(warp), smem);
  }
  work_pipeline.release(work_idx);
  return has_next;
}

// All work items of the CTA. Starts over if the first one turns out stale, see scheduler_warp.cuh.
__device__ inline void consumer_loop(const Params& params, int warp, SharedMemoryPlan& smem) {
  const WorkPipeline& work_pipeline = smem.work_pipeline;
  Query query(smem);
  do {
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
    pdl_wait();
    if (work_pipeline.has(0)) query.prefetch(params, work_pipeline.at(0, head_of_warp(warp)), warp);
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);
  } while (!smem.is_first_work_valid);
  if (!work_pipeline.has(0)) return;
  const float softmax_scale = score_scale(params) * params.score_factor * kLog2E;
  PipelineState<kStages> kv_pipe;
  bool is_epilogue_busy = false;
  u32 work_idx = 0;
  while (
      process_work(params, warp, softmax_scale, work_idx, query, is_epilogue_busy, smem, kv_pipe))
    ++work_idx;
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

// Producer warp: streams the K and V tiles of every work item through the TMA pipeline.

// Each lane issues one TMA box of every kKvBlocksPerWindow-th KV block, and prefetches its page id.
constexpr int kKvBlocksPerWindow = kWarpLanes / kBoxesPerKvBlock;

struct KvTmaBoxes {
  const int* page_ids;  // block table of the sequence
  int begin;  // boxes with a token that any row attends to
  int end;
  int box;  // of this lane, counted from the first token of the sequence
  int page;  // page id of `box`
  int next_page;  // page id of the lane's next box

  __device__ KvTmaBoxes() = default;
  __device__ KvTmaBoxes(const Params& params, const WorkItem& work)
      : page_ids(params.block_tables + work.seq_idx * static_cast<i64>(params.block_tables_stride)),
        begin(work.kv_begin / kBoxTokens),
        end(ceil_div(work.kv_end, kBoxTokens)),
        box(work.first_kv_block * kBoxesPerKvBlock + lane_index()) {
    page = read(box);
    next_page = read(box + kWarpLanes);
  }

  __device__ bool is_inside(int index) const { return index >= begin && index < end; }

  __device__ int read(int index) const {
    return is_inside(index) ? page_ids[index * kBoxTokens / kPageSize] : 0;
  }

  __device__ void advance() {
    box += kWarpLanes;
    page = next_page;
    next_page = read(box + kWarpLanes);
  }

  // Transaction bytes of a KV block: fully masked boxes are not loaded.
  __device__ u32 bytes_of(int kv_block) const {
    const int first = max(kv_block * kBoxesPerKvBlock, begin);
    return static_cast<u32>(min((kv_block + 1) * kBoxesPerKvBlock, end) - first) * kBoxBytes;
  }
};

__device__ inline void load_work(const Params& params, const WorkItem& work, KvTmaBoxes& boxes,
                                 SharedMemoryPlan& smem, PipelineState<kStages>& kv_pipe) {
  const int end = work.first_kv_block + work.num_kv_blocks;
  const int lane_block = lane_index() / kBoxesPerKvBlock;
  const u32 box_offset = lane_index() % kBoxesPerKvBlock * kBoxBytes;
  const u64 cache_hint = kv_cache_hint(params.row_tiles != 1);
#pragma unroll 1
  for (int kv_block = work.first_kv_block, in_window = 0; kv_block < end; ++kv_block) {
    const bool issues_copy = lane_block == in_window && boxes.is_inside(boxes.box);
    const int slot = boxes.box * kBoxTokens % kPageSize;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
      const u32 full = shared_address(&smem.kv_full[kv_pipe.index]);
      wait(smem.kv_empty[kv_pipe.index], kv_pipe.phase ^ 1);
      if (lane_index() == 0) mbarrier_arrive_expect_tx(full, boxes.bytes_of(kv_block));
      __syncwarp();
      if (issues_copy) {
        cp_async_bulk_tensor(shared_address(smem.kv[kv_pipe.index]) + box_offset,
                             kv == 0 ? &params.key_map : &params.value_map, full, cache_hint, 0,
                             slot, 0, work.kv_head, boxes.page);
      }
      __syncwarp();
      kv_pipe.advance();
    }
    if (++in_window == kKvBlocksPerWindow) {
      in_window = 0;
      boxes.advance();
    }
  }
}

// Loads the KV blocks of all work items.
__device__ inline void producer_loop(const Params& params, SharedMemoryPlan& smem) {
  const WorkPipeline& work_pipeline = smem.work_pipeline;
  WorkItem work;
  KvTmaBoxes boxes;
  do {
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
    work = work_pipeline.at(0, 0);
    pdl_wait();
    boxes = KvTmaBoxes(params, work);
    __syncwarp();
    named_barrier_sync(NamedBarrier::FirstWorkChecked, kThreads);
  } while (!smem.is_first_work_valid);
  pdl_launch_dependents();
  PipelineState<kStages> kv_pipe;
#pragma unroll 1
  for (u32 work_idx = 0; !work.is_none();) {
    load_work(params, work, boxes, smem, kv_pipe);
    work_pipeline.release(work_idx);
    work_pipeline.wait_full(++work_idx);
    work = work_pipeline.at(work_idx, 0);
    boxes = KvTmaBoxes(params, work);
  }
}

// Prefetches the block tables of all sequences into L2. The consumers call it: one cache line per
// thread, so it covers at most as many lines as there are consumer threads in the grid.
__device__ inline void prefetch_block_table(const Params& params, int thread) {
  constexpr int kIdsPerCacheLine = 32;
  const u32 lines_per_seq = static_cast<u32>(ceil_div(params.max_pages, kIdsPerCacheLine));
  const u32 cache_line = blockIdx.x * kConsumerThreads + thread;
  if (lines_per_seq == 0) return;
  const u32 seq_idx = cache_line / lines_per_seq;
  if (seq_idx >= params.num_seqs) return;
  prefetch_l2(params.block_tables + seq_idx * static_cast<i64>(params.block_tables_stride) +
              (cache_line - seq_idx * lines_per_seq) * kIdsPerCacheLine);
}

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

// Scheduler warp: computes the work items of the CTA and publishes them ahead of the other warps.

// Whether the first work item may be computed before the preceding kernel completes (PDL): then its
// inputs are few enough to be loaded once more and compared.
__device__ inline bool schedules_before_pdl_wait(const Params& params) {
  return params.cu_seqlens_q == nullptr && seqs_per_lane(params) <= kSeqsPerLane;
}

// Starts before the preceding kernel completes. After pdl_wait it loads seq_lens again, while the
// other warps load the first page ids and the first Q. If the preceding kernel has changed them,
// all warps start over.
__device__ inline void scheduler_loop(const Params& params, SharedMemoryPlan& smem) {
  if (!schedules_before_pdl_wait(params)) pdl_wait();
  LaneSeqLens seq_lens = lane_seq_lens(params);
  ScheduleRange range;
  SchedulerState state;
  bool has_more;
  while (true) {
    has_more = find_range(params, seq_lens, range, state);
    smem.work_pipeline.write(0, has_more ? work_at(params, range, state) : WorkItem::none());
    named_barrier_sync(NamedBarrier::FirstWorkReady, kThreads);
    pdl_wait();
    const LaneSeqLens current = lane_seq_lens(params);
    const bool is_valid = !__any_sync(~0u, current.differs_from(seq_lens));
    if (lane_index() == 0) smem.is_first_work_valid = is_valid;
    __syncwarp();
    if (is_valid) break;
    named_barrier_sync(NamedBarrier::FirstWorkChecked,
                       kThreads);  // no warp reads the first item any more
    seq_lens = current;
  }
  named_barrier_arrive(NamedBarrier::FirstWorkChecked, kThreads);
  smem.work_pipeline.publish(0);
#pragma unroll 1
  for (u32 work_idx = 1; has_more; ++work_idx) {
    has_more = next_work(params, range, state);
    const WorkItem next = has_more ? work_at(params, range, state) : WorkItem::none();
    smem.work_pipeline.wait_empty(work_idx);
    smem.work_pipeline.write(work_idx, next);
    smem.work_pipeline.publish(work_idx);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gqa_sm90(const __grid_constant__ Params params) {
  SharedMemoryPlan& smem = shared_memory<SharedMemoryPlan>();
  // The shuffle makes the warp index provably warp-uniform for the compiler.
  const int warp = __shfl_sync(~0u, warp_index(), 0);
  if (warp < kConsumerWarps) {
    if constexpr (kReallocatesRegs) setmaxnreg_inc<kConsumerRegs>();
    prefetch_block_table(params, static_cast<int>(threadIdx.x));
    return consumer_loop(params, warp, smem);
  }
  if constexpr (kReallocatesRegs) setmaxnreg_dec<kProducerRegs>();
  if (warp == kProducerWarp) return producer_loop(params, smem);
  if (warp == kSchedulerWarp) return scheduler_loop(params, smem);
  if (warp == kFirstEpilogueWarp) init_barriers(params, smem);
  epilogue_loop(params, smem);
}
