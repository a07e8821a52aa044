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
  const unsigned char* query;
  const unsigned char* query_rope;
  const unsigned char* cache;
  const unsigned char* rope_cache;
  const float* query_scales;
  const float* kv_scales;
  const int* block_tables;
  const int* kv_indptr;
  const int* seq_lens;
  const int* cu_seqlens_q;
  const int* sparse_cu_seqlens_q;
  const int* topk_length;
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
  i64 rope_page_stride;
  i64 rope_token_stride;
  i64 scale_page_stride;
  i64 scale_token_stride;
  i64 total_rows;
  int num_seqs;
  int heads;
  int q_len;
  int max_pages;
  int block_tables_stride;
  int num_pages;
  int sparse_num_seqs;
  int sparse_q_len;
  int topk;
  int num_cta_groups;
  int cta_group_size;
  int is_causal;
  int scores_take_bmm2;
  int schedule_id;
  float bmm1_scale;
  float bmm2_scale;
  float latent_scale;
  float rope_scale;
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

using Element = Bf16;  // of the output, and of a 16-bit rope part
using KvElement = Fp8DsMla;
constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kPageSize = 64;
constexpr bool kSplitsQ = true;
constexpr bool kIsSparse = true;
constexpr int kStoredBytes = 656;
constexpr int kBlockM = 64;
constexpr int kConsumerWarps = 8;
constexpr int kProducerWarps = 4;
constexpr int kSharedBytes = 232448;
constexpr int kSemaphoreBytes = 1024;  // SchedMetaCache lies behind them
constexpr int kMaxCachedSeqs = 510;
constexpr int kSchedMetaBytes = 128;

constexpr int kHeadDimVo = kLatentDim;

// FP8_DS_MLA and FP8_PER_TOKEN rows end with a rope part in bf16.
constexpr bool kHasBf16Rope = !kIsSame<KvElement, E4m3>;
constexpr int kRopeBytes = kHasBf16Rope ? kRopeDim * 2 : kRopeDim;
constexpr int kRopeOffset = kStoredBytes - kRopeBytes;
constexpr int kRopeChunks = kRopeBytes / kChunkBytes;
constexpr int kScaledDims = 128;  // dims per scale
constexpr int kScaleGroups = kLatentDim / kScaledDims;

// Scales of a token: in its row before the rope part (FP8_DS_MLA), one in a separate tensor
// (FP8_PER_TOKEN), or otherwise one per 128 dims in a separate tensor or one for the whole cache.
constexpr bool kHasInlineScales = kIsSame<KvElement, Fp8DsMla>;
constexpr bool kHasPerTokenScale = kIsSame<KvElement, Fp8PerToken>;

// MMA operands lie in swizzled tiles of 128 bytes per row: 64 elements of 16 bits, or 128 in FP8. A
// rope part of K in FP8 has rows of 64 bytes.
constexpr int kTileRowBytes = 128;
constexpr int kNumQTerms = kSplitsQ ? 2 : 1;
constexpr int kLatentTiles = kNumQTerms * kLatentDim / kTileRowBytes;  // of Q
constexpr int kTiles = kLatentTiles + 1;  // the last is the rope part
constexpr int kQueryTileBytes = kBlockM * kTileRowBytes;

// A KV block: latent part, rope part and scales.
constexpr int kBlockN = 64;
constexpr int kTileBytes = kBlockN * kTileRowBytes;
constexpr int kStoredTiles = kLatentDim / kTileRowBytes;
constexpr int kRopeTileOffset = kStoredTiles * kTileBytes;
constexpr int kScalesOffset = kRopeTileOffset + kBlockN * kRopeBytes;
constexpr int kKvBlockBytes = kScalesOffset + kBlockN * kChunkBytes;

// Warps of the PV warpgroups (the consumers) come first, then the producer warpgroup, then the QK
// warpgroup.
constexpr int kConsumerThreads = kConsumerWarps * kWarpLanes;
constexpr int kProducerThreads = kProducerWarps * kWarpLanes;
constexpr int kQkThreads = 128;
constexpr int kQkWarps = kQkThreads / kWarpLanes;
constexpr int kThreads = kConsumerThreads + kProducerThreads + kQkThreads;
constexpr int kTokensPerQkWarp = kBlockN / kQkWarps;

// Arrivals that release a slot of work items, one per reading warp: producer, PV and QK warps. And
// those that release Q: one for the QK warpgroup.
constexpr int kWorkReaders = kProducerWarps + kConsumerWarps + kQkWarps;
constexpr int kQueryReaders = 1;

// The PV GEMM of a KV block starts once the QK GEMM of the next one is complete, so that it
// overlaps that block's softmax instead of its QK GEMM.
constexpr bool kDelaysPv = kSplitsQ && kBlockM > 32;

// float4 accumulators of a consumer thread; a fragment is a float4 of every lane of a warp.
constexpr int kAccumulators = kBlockM * kHeadDimVo / kConsumerThreads / 4;
constexpr int kNumFrags = kAccumulators * kConsumerWarps;

enum class NamedBarrier : int {
  ConsumersSynced = 1,  // all consumer warps have arrived
  QkSynced = 2,  // all warps of the QK warpgroup have arrived
  PartialsStored = 7,  // a ReduceGroup has arrived: all consumers or half 0; half 1 has the next
};

static_assert(kRopeDim * 2 == kTileRowBytes, "the rope part is one tile");
static_assert(kLatentDim % kTileRowBytes == 0, "the latent part is whole tiles");
static_assert(kScaledDims == kTileRowBytes, "a token has one scale per tile");
static_assert(kScaleGroups * sizeof(float) == kChunkBytes, "a token's scales are a chunk");

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

// Maps M tiles to query rows of sequences, uniform or ragged. `cu_seqlens_q` is untrusted.

// The last sequence that begins at or before `pos`; `begin_of` returns where a sequence begins.
template <typename BeginOf>
__device__ inline int find_seq(i64 pos, int num_seqs, BeginOf begin_of) {
  int low = 0;
  int high = num_seqs;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (begin_of(middle) <= pos) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Sequence s owns the tiles from floor(its first row / kBlockM) + s on: as many as its rows fill,
// or one more. The number of tiles then depends only on the number of rows, and the host needs no
// lengths.
__device__ inline i64 first_tile_of(const int* cu_seqlens_q, int seq_idx, int rows_per_token) {
  return static_cast<i64>(cu_seqlens_q[seq_idx]) * rows_per_token / kBlockM + seq_idx;
}

__device__ inline int seq_of_tile(const int* cu_seqlens_q, int num_seqs, int rows_per_token,
                                  int tile) {
  return find_seq(tile, num_seqs, [&](int seq_idx) {
    return first_tile_of(cu_seqlens_q, seq_idx, rows_per_token);
  });
}

__device__ inline int seq_of_token(const int* cu_seqlens_q, int num_seqs, int token) {
  return find_seq(token, num_seqs, [&](int seq_idx) -> i64 { return cu_seqlens_q[seq_idx]; });
}

// The rows of a tile; the rest of kBlockM is padding.
struct TileRows {
  int seq_idx;
  int q_len;  // query tokens of the sequence
  i64 first_query;  // index of its first query token among all
  int first_row;  // of the tile, among the sequence's rows
  int rows;
};

// The rows of a tile. Without `cu_seqlens_q` every sequence has `q_len` query tokens and `tile`
// counts within `seq_idx`; with it `tile` counts over all sequences. A tile whose query tokens lie
// outside the tensor has no rows: nothing may be read or written there.
__device__ inline TileRows rows_of_tile(const int* cu_seqlens_q, int num_seqs, i64 q_len,
                                        int rows_per_token, i64 num_tokens, int seq_idx, i64 tile) {
  i64 first_query = seq_idx * q_len;
  if (cu_seqlens_q != nullptr) {
    seq_idx = seq_of_tile(cu_seqlens_q, num_seqs, rows_per_token, static_cast<int>(tile));
    tile -= first_tile_of(cu_seqlens_q, seq_idx, rows_per_token);
    first_query = cu_seqlens_q[seq_idx];
    q_len = cu_seqlens_q[seq_idx + 1] - first_query;
  }
  const i64 first_row = tile * kBlockM;
  const bool is_inside =
      first_query >= 0 && q_len >= 0 && first_query + q_len <= num_tokens && first_row >= 0;
  const i64 rows = min(q_len * rows_per_token - first_row, static_cast<i64>(kBlockM));
  return {seq_idx, static_cast<int>(q_len), first_query, static_cast<int>(first_row),
          is_inside && rows > 0 ? static_cast<int>(rows) : 0};
}

// Sparse attention: the number of valid top-k indices of a query token.

// `topk_length` holds the numbers, or they follow from the causal KV length of each query token.
struct TopkIndices {
  const int* seq_lens;
  const int* topk_length;
  const int* cu_seqlens_q;
  int num_seqs;
  int q_len;
  int topk;
};

__device__ inline int topk_length_of(const TopkIndices& topk_indices, int token) {
  i64 length;
  if (topk_indices.topk_length != nullptr) {
    length = topk_indices.topk_length[token];
  } else {
    int seq_idx;
    i64 end;  // of its query tokens
    if (topk_indices.cu_seqlens_q == nullptr) {
      seq_idx = token;
      if (topk_indices.q_len > 1)
        seq_idx = static_cast<int>(static_cast<u32>(token) / topk_indices.q_len);
      end = static_cast<i64>(seq_idx + 1) * topk_indices.q_len;
    } else {
      seq_idx = seq_of_token(topk_indices.cu_seqlens_q, topk_indices.num_seqs, token);
      end = topk_indices.cu_seqlens_q[seq_idx + 1];
    }
    length = topk_indices.seq_lens[seq_idx] - end + token + 1;
  }
  return static_cast<int>(
      max(static_cast<i64>(0), min(length, static_cast<i64>(topk_indices.topk))));
}

// Sequence lengths of sparse calls: every query token is a sequence of its own, and its length is
// its `topk_length`.

__device__ inline int seq_len_of(const Params& params, int seq_idx) {
  const TopkIndices topk_indices{
      params.seq_lens,        params.topk_length,  params.sparse_cu_seqlens_q,
      params.sparse_num_seqs, params.sparse_q_len, params.topk};
  return topk_length_of(topk_indices, seq_idx);
}

__device__ inline int kv_len_of(const Params&, int, int seq_len) { return seq_len; }

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

// Mask of the invalid top-k indices of a KV block (FlashMLA's `is_kv_valid`, inverted).

struct alignas(8) InvalidMask {
  u16 bits[kProducerWarps];  // 16 tokens each

  __device__ u64 all() const { return *reinterpret_cast<const u64*>(bits); }
};
static_assert(kProducerWarps * 16 == kBlockN, "each producer warp loads 16 tokens");

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

// A stage is a KV block with its P and alpha; as many as fit beside Q and everything else, which is
// at most 20 words per row and 2 KiB.
constexpr int kStageBytes = kKvBlockBytes + kQueryTileBytes + kBlockM * sizeof(float);
constexpr int kOtherBytes = 2048 + kBlockM * 80;
constexpr int kStagesBytes = kSharedBytes - kTiles * kQueryTileBytes - kOtherBytes;
constexpr int kStages = kStagesBytes / kStageBytes;
constexpr int kSpareBytes = kStagesBytes - kStages * kStageBytes;

// Softmax of a row: scale of its scores to log2 units, and the stale row max in log2 units.
struct alignas(8) SoftmaxRow {
  float score_scale;
  float row_max;
};

struct SharedMemoryPlan {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char kv[kStages][kKvBlockBytes];
  unsigned char probabilities[kStages][kQueryTileBytes];
  unsigned char spare[kSpareBytes];  // for the split reduction only
  float query_scale[kBlockM];  // dequantisation scale of the rows of Q
  alignas(kChunkBytes) SoftmaxRow rows[kBlockM];  // of the work item in the QK warpgroup
  float warp_row_max[kQkWarps][kBlockM];  // each warp's maximum of a row
  float rescale[kStages][kBlockM];  // alpha of the KV block, for O and l
  float warp_scale_amax[kQkWarps];  // each warp's amax of the V scales
  float shared_scale;  // power of two on the V scales, of the work item in the QK warpgroup
  float block_scale[kStages];  // `shared_scale` as of the KV block
  float row_max[2][kBlockM];  // of a whole work item
  float row_sum[2][kBlockM];
  // fp16 scale of partial O; aligned because rows are read in pairs.
  alignas(sizeof(float2)) float row_scale[2][kBlockM];
  float row_shared_scale[2];  // `shared_scale` as of a whole work item, a factor of O and l
  InvalidMask invalid_mask[kStages];
  u32 needs_rescale[kStages];  // whether the KV block has an alpha other than 1
  WorkItem work_items[2];
  SchedulerStorage scheduler_storage;
  Barrier kv_full[kStages];
  Barrier kv_empty[kStages];
  Barrier scores_full[kStages];
  Barrier probabilities_full[kStages];
  Barrier row_state_full[2];
  Barrier first_query_full;
  Barrier query_full;
  Barrier query_empty;
  Barrier work_full[2];
  Barrier work_empty[2];
  int has_nonfinite[2];  // whether a row of the work item attends to a NaN/Inf in V
};
// The split reduction aliases Q, KV and P: a CTA combines behind its last work item only.
constexpr int kCombineSmemBytes = sizeof(SharedMemoryPlan::query) + sizeof(SharedMemoryPlan::kv) +
                                  sizeof(SharedMemoryPlan::probabilities) +
                                  sizeof(SharedMemoryPlan::spare);
static_assert(sizeof(SharedMemoryPlan) <= kSharedBytes, "the spec states the size of the plan");
static_assert(kKvBlockBytes % 1024 == 0, "tiles are aligned");
static_assert(kSpareBytes % kChunkBytes == 0, "the members behind it are aligned");

// Called by one thread. On `kv_full`, each producer thread arrives for its asynchronous copies, and
// each producer warp for its plain stores.
__device__ inline void init_kv_barriers(SharedMemoryPlan& smem) {
  for (int stage = 0; stage < kStages; ++stage) {
    init_barrier(smem.kv_full[stage], kProducerThreads + kProducerWarps);
    init_barrier(smem.kv_empty[stage], kConsumerWarps);
    init_barrier(smem.scores_full[stage], kQkWarps);
    init_barrier(smem.probabilities_full[stage], kQkWarps);
  }
  for (int stage = 0; stage < 2; ++stage) init_barrier(smem.row_state_full[stage], kQkWarps);
  for (int stage = 0; stage < 2; ++stage) smem.has_nonfinite[stage] = 0;
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

// Token addresses: from the block table or the top-k indices to the rows of the KV cache.

// Tokens of a KV block that each producer warp loads.
constexpr int kTokensPerProducerWarp = kBlockN / kProducerWarps;

// This lane's token of a KV block. Both halves of a warp have the same tokens.
__device__ inline int token_of_lane() {
  return reload_warp() % kProducerWarps * kTokensPerProducerWarp +
         reload_lane() % kTokensPerProducerWarp;
}

// Page ids of a work item from the block table, or its top-k indices.
struct TokenIds {
  const int* ids;
  int end;  // of the work item's tokens

  __device__ TokenIds(const Params& params, const WorkCoord& coord)
      : ids(params.block_tables + block_table_row(params, coord.seq_idx).start),
        end(min((coord.first_kv_block + coord.num_kv_blocks) * kBlockN, coord.kv_end)) {}

  // Page id or top-k index of this lane's token; -1 behind the end.
  __device__ int read(int kv_block) const {
    const int token = token_of(kv_block);
    return token < end ? ids[kIsSparse ? token : token / kPageSize] : -1;
  }

  __device__ static int token_of(int kv_block) { return kv_block * kBlockN + token_of_lane(); }
};

// Page and slot of this lane's token of a KV block in the cache.
struct TokenAddress {
  int page;  // 0 for an invalid token
  int slot;
  u32 invalid_bits;  // a bit per token of the warp, set if it is invalid

  __device__ TokenAddress(const Params& params, int id, int kv_block) {
    page = kIsSparse && id >= 0 ? id / kPageSize : id;
    slot = (kIsSparse ? id : TokenIds::token_of(kv_block)) % kPageSize;
    const bool exists = is_valid_page(page, params.num_pages);
    if (!exists) page = slot = 0;
    invalid_bits = __ballot_sync(~0u, !exists);
  }
};
static_assert(kTokensPerProducerWarp * 2 == kWarpLanes, "two lanes share a token");

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

// A stored KV token: one row of the paged FP8 KV cache, with its scales.

// The latent part of a row, and its scales: in the row, in a separate tensor, or one for the cache.
struct StoredToken {
  const unsigned char* row;
  const float* scales;  // one per 128 latent dims, or one per token
  float latent_scale;  // of the cache, if `scales` is null

  // Scale of the latent dims from 128 * `step` on.
  __device__ float scale(int step) const {
    return scales == nullptr ? latent_scale : scales[kHasPerTokenScale ? 0 : step];
  }

  // A dequantised element of the latent part.
  __device__ u16 element(int dim) const {
    const u32 fp16x2 = fp16x2_of_e4m3x2(row[dim]);
    const float value = cvt_f32(Fp16{}, static_cast<u16>(fp16x2));
    return static_cast<u16>(cvt_rn_x2_f32(Element{}, 0.0f, value * scale(dim / kScaledDims)));
  }
};

// `page` must exist.
__device__ inline StoredToken stored_token(const Params& params, int page, int slot) {
  const PagedRows rows{params.cache, params.page_stride, params.token_stride};
  const unsigned char* row = rows.row_of(page, slot);
  if constexpr (kHasInlineScales) {
    return {row, reinterpret_cast<const float*>(row + kLatentDim), 1.0f};
  }
  const i64 first = page * params.scale_page_stride + slot * params.scale_token_stride;
  return {row, params.kv_scales == nullptr ? nullptr : params.kv_scales + first,
          params.latent_scale};
}

// The rope part of a token, which may lie in a separate tensor.
__device__ inline const unsigned char* stored_rope(const Params& params, int page, int slot) {
  const PagedRows rows{params.rope_cache, params.rope_page_stride, params.rope_token_stride};
  return rows.row_of(page, slot);
}

// KV producer: four warps gather the stored tokens of each KV block into its stage by cp.async.

// The row pointer that another lane holds.
__device__ inline const unsigned char* row_of_lane(const unsigned char* row_ptr, int lane) {
  return reinterpret_cast<const unsigned char*>(
      __shfl_sync(~0u, reinterpret_cast<u64>(row_ptr), lane));
}

// Unroll factor of the copy loop: complete, or smaller for sparse kernels, whose I-cache footprint
// is larger.
constexpr int kCopyUnroll = kIsSparse ? 2 : kTokensPerProducerWarp;

// Copies kCount chunks of every token of the warp, kLanes of them at a time, to
// `address_of(token, chunk)`. `row_ptr` is the source of this lane's token. Invalid tokens are
// zero-filled.
template <int kLanes, int kCount, typename AddressOf>
__device__ inline void copy_chunks(const unsigned char* row_ptr, u32 invalid_bits, u64 cache_hint,
                                   AddressOf address_of) {
  constexpr int kTokens = kWarpLanes / kLanes;  // per iteration
  const int lane = reload_lane();
  const int chunk = lane % kLanes;
#pragma unroll kCopyUnroll
  for (int first = 0; first < kTokensPerProducerWarp; first += kTokens) {
    const int token = first + lane / kLanes;
    const unsigned char* source = row_of_lane(row_ptr, token) + chunk * kChunkBytes;
    const u32 bytes = invalid_bits >> token & 1 ? 0 : kChunkBytes;
    const u32 target = address_of(token, chunk);
#pragma unroll
    for (int chunk_offset = 0; chunk_offset < kCount; chunk_offset += kLanes) {
      // A multiple of a row's chunks: the next ones lie whole tiles further.
      constexpr int kTileChunks = kTileRowBytes / kChunkBytes;
      cp_async_cg_16(target + chunk_offset / kTileChunks * kTileBytes,
                     source + chunk_offset * kChunkBytes, bytes, cache_hint);
    }
  }
}

// Streams the KV blocks of a work item.
struct KvBlockStream {
  const Params& params;
  const WorkCoord& coord;  // in shared memory
  int next_id;  // page id or top-k index of this lane's token in the KV block after the next
  TokenAddress token_address;  // of this lane's token in the next KV block

  __device__ KvBlockStream(const Params& params, const WorkCoord& coord)
      : params(params),
        coord(coord),
        next_id(TokenIds(params, coord).read(coord.first_kv_block + 1)),
        token_address(params, TokenIds(params, coord).read(coord.first_kv_block),
                      coord.first_kv_block) {}

  // Issues the copies of a KV block, then resolves the addresses of the next one.
  __device__ void load_kv_block(SharedMemoryPlan& smem, PipelineState<kStages>& pipe,
                                int kv_block) {
    const int stage = pipe.index;
    wait(smem.kv_empty[stage], pipe.phase ^ 1);
    copy_rows(smem, stage);
    cp_async_mbarrier_arrive_noinc(shared_address(&smem.kv_full[stage]));
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.kv_full[stage]);
    pipe.advance();
    token_address = TokenAddress(params, next_id, kv_block + 1);
    next_id = TokenIds(params, coord).read(kv_block + 2);
  }

  __device__ void copy_rows(SharedMemoryPlan& smem, int stage) const {
    const int warp = reload_warp() % kProducerWarps;
    const int first = warp * kTokensPerProducerWarp;
    const u32 target = shared_address(smem.kv[stage]);
    const StoredToken stored = stored_token(params, token_address.page, token_address.slot);
    const u64 cache_hint = kv_cache_hint(params.cta_group_size > 1);
    const auto latent_address = [&](int token, int chunk) {
      return target + chunk / 8 * kTileBytes + swizzled_offset<128>(first + token, chunk % 8);
    };
    copy_chunks<16, kLatentDim / kChunkBytes>(stored.row, token_address.invalid_bits, cache_hint,
                                              latent_address);
    const unsigned char* rope = kHasBf16Rope
                                    ? stored.row + kRopeOffset
                                    : stored_rope(params, token_address.page, token_address.slot);
    const auto rope_address = [&](int token, int chunk) {
      return target + kRopeTileOffset + swizzled_offset<kRopeBytes>(first + token, chunk);
    };
    copy_chunks<kRopeChunks, kRopeChunks>(rope, token_address.invalid_bits, cache_hint,
                                          rope_address);
    copy_scales(stored, smem.kv[stage] + kScalesOffset + first * kChunkBytes);
    if (kIsSparse && reload_lane() == 0) {
      smem.invalid_mask[stage].bits[warp] = static_cast<u16>(token_address.invalid_bits);
    }
  }

  // Copies the scales of the warp's tokens to `target`; a lane copies those of its own token.
  __device__ void copy_scales(const StoredToken& stored, unsigned char* target) const {
    const int token = reload_lane();
    if (token >= kTokensPerProducerWarp) return;
    target += token * kChunkBytes;
    const bool exists = (token_address.invalid_bits >> token & 1) == 0;
    if constexpr (kHasInlineScales) {
      cp_async_cg_16(shared_address(target), stored.row + kLatentDim, exists ? kChunkBytes : 0);
    } else {
      if (stored.scales == nullptr) {
        const float scale = exists ? stored.latent_scale : 0.0f;
        *reinterpret_cast<float4*>(target) = {scale, scale, scale, scale};
        return;
      }
#pragma unroll
      for (int group = 0; group < kScaleGroups; ++group) {
        const float* source = stored.scales + (kHasPerTokenScale ? 0 : group);
        cp_async_ca_4(shared_address(target + group * sizeof(float)), source,
                      exists ? sizeof(float) : 0);
      }
    }
  }
};
static_assert(kLatentDim / kChunkBytes % 16 == 0, "lanes copy the same number of chunks");

// PTX ISA, "Integer Arithmetic Instructions: max". Needs sm_90.

// max.u16x2
__device__ inline u32 max_u16x2(u32 a, u32 b) {
  u32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// Two-term split of Q: a bf16 query as the sum of a hi and a lo term in e4m3.

// The QK GEMM takes K as stored, in e4m3, so Q must be e4m3 too. bf16 has twice the significant
// bits of e4m3, so hi + lo is exact for elements down to 2^-9 of the largest of their row. The
// terms of smaller ones are subnormal, and the error is less than 2^-16 of the largest.

// Scale of a row: the power of two that the row is divided by, so that its amax is below 256; and
// the inverse, which is NaN for a row with NaN or Inf.
struct QScale {
  float scale;
  float inv_scale;

  // `amax` is the largest magnitude, as bf16 bits.
  __device__ explicit QScale(u32 amax) {
    constexpr u32 kNan = 0xff;
    const u32 exponent = max(amax >> 7, 8u);  // both are normal numbers
    scale = __uint_as_float((exponent - 7) << 23);
    inv_scale = __uint_as_float(exponent == kNan ? 0x7fffffff : (261 - exponent) << 23);
  }
};

__device__ inline float element_of(const Chunk& chunk, int i) {
  return cvt_f32(Bf16{}, static_cast<u16>(chunk.words[i / 2] >> i % 2 * 16));
}

// The first four significant bits, which e4m3 holds.
__device__ inline float hi_part(float element) {
  return __uint_as_float(__float_as_uint(element) & 0xfff00000);
}

// Splits two elements: hi terms into the low half of the word, lo terms into the high half.
__device__ inline u32 split_pair(float low, float high) {
  const float hi_low = hi_part(low);
  const float hi_high = hi_part(high);
  return e4m3x2_of_f32(hi_high, hi_low) | e4m3x2_of_f32(high - hi_high, low - hi_low) << 16;
}

// Hi and lo terms of the eight elements of a chunk.
struct SplitChunk {
  uint2 hi;
  uint2 lo;

  __device__ void split(const Chunk& chunk, float inv_scale) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = split_pair(element_of(chunk, i * 2) * inv_scale,
                            element_of(chunk, i * 2 + 1) * inv_scale);
    }
    hi = make_uint2(__byte_perm(pairs[0], pairs[1], 0x5410),
                    __byte_perm(pairs[2], pairs[3], 0x5410));
    lo = make_uint2(__byte_perm(pairs[0], pairs[1], 0x7632),
                    __byte_perm(pairs[2], pairs[3], 0x7632));
  }
};

// Splits this lane's chunks of a row, in `kCount` tiles from the even tile `first` on. Eight lanes
// share the row and overwrite each other's chunks in place, so all are read before any is written;
// `kCount` tiles share that barrier. The even tile of a pair receives the hi terms of both, the odd
// one the lo terms.
template <int kCount>
__device__ inline void split_chunks(unsigned char* query, int row, int lane, int first,
                                    float inv_scale) {
  unsigned char* tiles = query + first * kQueryTileBytes;
  SplitChunk split_chunk[kCount];
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
    const unsigned char* src = tiles + tile * kQueryTileBytes + swizzled_offset<128>(row, lane);
    split_chunk[tile].split(*reinterpret_cast<const Chunk*>(src), inv_scale);
  }
  __syncwarp();  // all lanes have read their chunks
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
    const u32 chunk = swizzled_offset<128>(row, tile % 2 * 4 + lane / 2) + lane % 2 * sizeof(uint2);
    unsigned char* dst = tiles + tile / 2 * 2 * kQueryTileBytes + chunk;
    *reinterpret_cast<uint2*>(dst) = split_chunk[tile].hi;
    *reinterpret_cast<uint2*>(dst + kQueryTileBytes) = split_chunk[tile].lo;
  }
}

// The same for the rope part: the hi terms of a row precede its lo terms.
__device__ inline void split_rope(unsigned char* query, int row, int lane, float inv_scale) {
  unsigned char* tile = query + kLatentTiles * kQueryTileBytes;
  SplitChunk split_chunk;
  split_chunk.split(*reinterpret_cast<const Chunk*>(tile + swizzled_offset<128>(row, lane)),
                    inv_scale);
  __syncwarp();  // all lanes have read their chunks
  tile += lane % 2 * sizeof(uint2);
  *reinterpret_cast<uint2*>(tile + swizzled_offset<128>(row, lane / 2)) = split_chunk.hi;
  *reinterpret_cast<uint2*>(tile + swizzled_offset<128>(row, lane / 2 + 4)) = split_chunk.lo;
}

__device__ inline void scale_chunk(Chunk& chunk, float inv_scale) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    chunk.words[word] = cvt_rn_x2_f32(Bf16{}, element_of(chunk, word * 2 + 1) * inv_scale,
                                      element_of(chunk, word * 2) * inv_scale);
  }
}

// Waits for the copies of Q, splits it in place and arrives at `full`. Called by the threads that
// issued the copies, each for its own chunks; kTilesPerStep tiles at a time.
template <int kTilesPerStep>
__device__ inline void finish_q_load(SharedMemoryPlan& smem, const Barrier& full, int thread,
                                     int num_threads) {
  cp_async_wait_group<0>();
  const int lane = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < kBlockM; row += num_threads / 8) {
    unsigned char* ptr = smem.query + swizzled_offset<128>(row, lane);
    u32 amax = 0;  // of the low and of the high halves of all words
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const Chunk& chunk = *reinterpret_cast<const Chunk*>(ptr + tile * kQueryTileBytes);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        amax = max_u16x2(amax, chunk.words[word] & 0x7fff7fff);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
      amax = max_u16x2(amax, __shfl_xor_sync(~0u, amax, lanes));
    }
    const QScale q_scale(max(amax & 0xffff, amax >> 16));
    if (lane == 0) smem.query_scale[row] = q_scale.scale;
#pragma unroll 1
    for (int tile = 0; tile < kLatentTiles; tile += kTilesPerStep) {
      split_chunks<kTilesPerStep>(smem.query, row, lane, tile, q_scale.inv_scale);
    }
    if constexpr (kHasBf16Rope) {
      scale_chunk(*reinterpret_cast<Chunk*>(ptr + kLatentTiles * kQueryTileBytes),
                  q_scale.inv_scale);
    } else {
      split_rope(smem.query, row, lane, q_scale.inv_scale);
    }
  }
  fence_proxy_async();
  __syncwarp();
  if (reload_lane() == 0) arrive(full);
}

// Producer loop: all producer warps load Q and KV of each work item; one of them is also the
// scheduler warp, which publishes work items.

// Called by one thread.
__device__ inline void init_work_barriers(const SharedMemoryPlan& smem) {
  init_work_barriers(smem, 1, kWorkReaders, kProducerWarps);
}

__device__ inline bool is_scheduler_warp() { return reload_warp() == kConsumerWarps; }

// Rank of this CTA in its CTA group, recomputed where it is used so that it holds no register.
__device__ inline int cta_rank_in_group(const Params& params) {
  u32 index = blockIdx.x;
  mov_b32(index);
  const int cta = static_cast<int>(index);
  return cta - div_by_group_size(params, cta) * params.cta_group_size;
}

// Publishes work item `work_idx` to all warps.
__device__ inline void publish_work(const Params& params, int rank_in_group, u32 work_idx,
                                    SharedMemoryPlan& smem) {
  wait(smem.work_empty[work_slot(work_idx)], work_phase(work_idx) ^ 1);
  produce_work(params, rank_in_group, work_idx, smem);
  if (reload_lane() == 0) arrive(smem.work_full[work_slot(work_idx)]);
}

// Loads Q of a work item. Consumers have loaded the first one.
__device__ inline void load_next_q(const Params& params, const WorkItem& work,
                                   SharedMemoryPlan& smem) {
  if (work.work_idx == 0) return;
  wait(smem.query_empty, query_phase(work.work_idx) ^ 1);
  const int thread = reload_tid() % kProducerThreads;
  load_q_async(params, work, smem, thread, kProducerThreads);
  finish_q_load<2>(smem, smem.query_full, thread, kProducerThreads);
}

// KV blocks of the next work item that are loaded while Q of the current one is still in use.
constexpr int kBlocksBeforeQ = kStages - 1;

// `num_published` counts the work items that the scheduler warp has published.
__device__ inline void load_kv_blocks(const Params& params, const WorkItem& work,
                                      SharedMemoryPlan& smem, PipelineState<kStages>& pipe,
                                      u32& num_published) {
  KvBlockStream stream(params, work);
  const int num_before_q = min(work.num_kv_blocks, kBlocksBeforeQ);
#pragma unroll 1
  for (int num_loaded = 0;; ++num_loaded) {
    if (num_loaded == num_before_q) load_next_q(params, work, smem);
    // Publishes the first work item once its first KV block is in flight, and the next one once all
    // KV blocks of this one are: loads go first.
    const u32 num_due = work.work_idx + (num_loaded == work.num_kv_blocks ? 2 : min(num_loaded, 1));
#pragma unroll 1
    while (is_scheduler_warp() && num_published < num_due)
      publish_work(params, cta_rank_in_group(params), num_published++, smem);
    if (num_loaded == work.num_kv_blocks) return;
    // The CTA waits for its first KV block before it loads more: otherwise the first loads of the
    // last CTAs queue behind all loads of the others.
    if (work.work_idx == 0 && num_loaded == 1) wait(smem.kv_full[0], 0);
    stream.load_kv_block(smem, pipe, work.first_kv_block + num_loaded);
  }
}

// `scheduler` is at the first work item.
__device__ inline void producer_loop(const Params& params, const TileScheduler& scheduler,
                                     const WorkCoord& first_work, SharedMemoryPlan& smem) {
  // Coordinates and index of a work item are reloaded from shared memory, so that they hold no
  // registers. Every warp writes the same values here.
  if (reload_lane() == 0) {
    static_cast<WorkCoord&>(smem.work_items[0]) = first_work;
    smem.work_items[0].work_idx = 0;
  }
  __syncwarp();
  if (is_scheduler_warp()) save_scheduler_state(scheduler, smem);
  PipelineState<kStages> pipe;
  u32 work_idx = 0;
  u32 num_published = 0;
#pragma unroll 1
  while (true) {
    load_kv_blocks(params, smem.work_items[work_slot(work_idx)], smem, pipe, num_published);
    work_idx = smem.work_items[work_slot(work_idx)].work_idx;
    if (next_work_coord(smem, work_idx).seq_idx < 0) return;
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

// Accumulator layout of O^T: output dims of a thread of the PV warpgroups.

// Two PV warpgroups each hold all query rows and one half of the output dims. A warp holds 64
// adjacent dims, because these share a scale, in tiles of 16; an MMA covers one tile of each of
// four warps. A thread holds two adjacent dims of a tile: with g = lane / 4, rows g and g + 8 of
// the MMA are dims 2g and 2g + 1.
constexpr int kDimsOfTile = 16;
constexpr int kDimsPerWarp = kHeadDimVo / kConsumerWarps;
constexpr int kDimTiles = kDimsPerWarp / kDimsOfTile;
static_assert(kScaledDims % kDimsPerWarp == 0, "the dims of a warp have one scale per token");

// First dim of accumulator float4 `i` of this lane in warp `warp`; the second is the next one.
__device__ inline int dim_of(int warp, int i) {
  return warp * kDimsPerWarp + i / (kBlockM / 8) * kDimsOfTile + reload_lane() / 4 * 2;
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

// Finite tests of fp16 and bf16 elements.

constexpr u32 kExponentBits = kIsSame<Element, Bf16> ? 0x7f80 : 0x7c00;

__device__ inline bool is_finite(u32 element) { return (element & kExponentBits) != kExponentBits; }

__device__ inline float value_of_element(u16 element) { return cvt_f32(Element{}, element); }

__device__ inline u32 finite_pair(u32 pair) {
  return (is_finite(pair) ? pair & 0xffff : 0) | (is_finite(pair >> 16) ? pair & 0xffff0000 : 0);
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

// KV scales of a KV block in shared memory: fp32 for K, and fp16 with a shared scale for V.

// V is dequantised to fp16 by scales in fp16. A shared scale, a power of two per work item, keeps
// them in range: the largest V scale times the shared scale is between 2^6 and 2^7 when the shared
// scale is chosen, and times 448 it is below 65504. Scaled V below 2^-14 loses bits (subnormal
// fp16): a token loses none if its scale is at least 2^-11 of the largest. The shared scale shrinks
// when a KV block has a larger scale.
constexpr float kMaxScaled = 128.0f;
constexpr float kMaxV = kMaxScaled * 448.0f;

// Shared scale before the first KV block; almost any V scale exceeds the limit with it.
constexpr float kInitialSharedScale = 0x1p90f;

// The shared scale that scales `amax`, the largest V scale, to less than kMaxScaled.
__device__ inline float shared_scale_for(float amax) {
  const u32 exponent = max(__float_as_uint(amax) >> 23, 43u);  // a shared scale of at most 2^90
  return __uint_as_float((260 - exponent) << 23);
}

__device__ inline float log2_of_pow2(float pow2) {
  return static_cast<float>(static_cast<int>(__float_as_uint(pow2) >> 23) - 127);
}

// V scales overwrite the stored scales in place: each QK warp stores those of its 16 tokens as fp16
// for the PV warpgroups. The order is by scale group; within it, tokens 2c, 2c + 1, 2c + 8 and
// 2c + 9 are adjacent, as the V fragments of a lane need them.
__device__ constexpr int v_scale_index(int token, int group) {
  return token / kTokensPerQkWarp * (kTokensPerQkWarp * kScaleGroups * 2) +
         group * kTokensPerQkWarp + token % 8 / 2 * 4 + token % kTokensPerQkWarp / 8 * 2 +
         token % 2;
}

__device__ inline u16& v_scale(unsigned char* stage, int token, int group) {
  return reinterpret_cast<u16*>(stage + kScalesOffset)[v_scale_index(token, group)];
}

// Lane and warp of a QK thread, read once per KV block: reading %tid takes as long as an MMA.
struct QkThread {
  int lane;
  int warp;

  __device__ QkThread() {
    const int thread = reload_tid() % kQkThreads;
    lane = thread % kWarpLanes;
    warp = thread / kWarpLanes;
  }

  // The first of this thread's two tokens; the second is 8 behind.
  __device__ int token() const { return warp * kTokensPerQkWarp + lane / 4; }
};

// K scales of a thread's two tokens.
struct KScales {
  float per_token[2][kScaleGroups];

  __device__ KScales(const unsigned char* stage, const QkThread& qk_thread) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 loaded =
          reinterpret_cast<const float4*>(stage + kScalesOffset)[qk_thread.token() + half * 8];
      per_token[half][0] = loaded.x;
      per_token[half][1] = loaded.y;
      per_token[half][2] = loaded.z;
      per_token[half][3] = loaded.w;
    }
  }
};

// Scales of the group lane % 4 alone, which this thread stores as V scales.
struct ThreadScales {
  float per_token[2];

  __device__ void select(const KScales& scales, const QkThread& qk_thread) {
    const int group = qk_thread.lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = group % 2 == 0 ? scales.per_token[half][0] : scales.per_token[half][1];
      const float high = group % 2 == 0 ? scales.per_token[half][2] : scales.per_token[half][3];
      per_token[half] = group < 2 ? low : high;
    }
  }

  __device__ bool exceeds_max_scaled(float shared_scale) const {
    return amax() * shared_scale >= kMaxScaled;
  }

  // Largest finite magnitude.
  __device__ float amax() const {
    const float a = fabsf(per_token[0]);
    const float b = fabsf(per_token[1]);
    return fmaxf(a <= kFloatMax ? a : 0.0f, b <= kFloatMax ? b : 0.0f);
  }

  // Overwrites the stored scales, which all lanes of the warp must have read.
  __device__ void store(unsigned char* stage, const QkThread& qk_thread, float shared_scale) const {
    u16* first = &v_scale(stage, qk_thread.token(), qk_thread.lane % 4);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first[v_scale_index(half * 8, 0)] =
          static_cast<u16>(cvt_rn_x2_f32(Fp16{}, 0.0f, per_token[half] * shared_scale));
    }
  }
};
static_assert(kTokensPerQkWarp == 16, "a thread has two tokens of its warp");
static_assert(kScaleGroups == 4, "a thread stores the scales of one group");

// NaN/Inf in masked V: replaces non-finite elements and scales by zero before the PV GEMM. The
// probability of a masked token is 0, but 0 * NaN is NaN.

// A pair of stored elements with zero for NaN. An e4m3 NaN has every bit but the sign set.
__device__ inline u32 finite_bytes(u32 pair) {
  return ((pair & 0x7f) == 0x7f ? 0 : pair & 0xff) |
         ((pair & 0x7f00) == 0x7f00 ? 0 : pair & 0xff00);
}

// Called by all PV threads. Clears non-finite V elements and scales of the tokens from `first` to
// `end` of the KV block at `stage`. Some row attends to these tokens, so a NaN/Inf sets the flag
// and the epilogue restores it.
__device__ inline void clear_nonfinite(SharedMemoryPlan& smem, const WorkItem& work,
                                       unsigned char* stage, int first, int end) {
  constexpr int kTokenPairs = kLatentDim / 2;
#pragma unroll 1
  for (int i = reload_tid(); i < (end - first) * kTokenPairs; i += kConsumerThreads) {
    const int token = first + i / kTokenPairs;
    const int dim = i % kTokenPairs * 2;
    u16& scale = v_scale(stage, token, dim / kScaledDims);
    const u32 row = dim / kTileRowBytes * kTileBytes +
                    swizzled_offset<128>(token, dim % kTileRowBytes / kChunkBytes);
    u16& stored = *reinterpret_cast<u16*>(stage + row + dim % kChunkBytes);
    const bool is_scale_finite = (scale & 0x7c00) != 0x7c00;
    const u32 finite = finite_bytes(stored);
    if (is_scale_finite && finite == stored) continue;
    stored = static_cast<u16>(finite);
    if (!is_scale_finite) scale = 0;
    nonfinite_flag(smem, work) = 1;
  }
  named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
}

// KV pipeline: stage and phase of a KV block, counted over all work items of the CTA.

__device__ inline int stage_of(u32 i) { return static_cast<int>(i % kStages); }
__device__ inline u32 phase_of(u32 i) { return i / kStages % 2; }

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

// Row sum l, computed by the PV warpgroups, which are less loaded than the QK warpgroup: every
// thread sums some tokens of one row of P.

constexpr int kThreadsPerRow = kConsumerThreads / kBlockM;
constexpr int kBytesPerThread = kTileRowBytes / kThreadsPerRow;  // of a row of P
static_assert(kThreadsPerRow * kBlockM == kConsumerThreads, "threads share the rows");

struct RowSum {
  float row_sum = 0.0f;  // over this thread's tokens, times the shared scale as O is

  __device__ static int row() { return reload_tid() / kThreadsPerRow; }

  // Adds P of the KV block in `stage`.
  __device__ void add(const SharedMemoryPlan& smem, int stage) {
    const int first = reload_tid() % kThreadsPerRow * kBytesPerThread;
    float sum = 0.0f;
#pragma unroll
    for (int byte_offset = 0; byte_offset < kBytesPerThread; byte_offset += sizeof(uint2)) {
      const int byte = first + byte_offset;
      const u32 offset = swizzled_offset<kTileRowBytes>(row(), byte / kChunkBytes);
      const uint2 loaded =
          *reinterpret_cast<const uint2*>(smem.probabilities[stage] + offset + byte % kChunkBytes);
      sum += sum_of_pair(loaded.x) + sum_of_pair(loaded.y);
    }
    row_sum = fmaf(sum, smem.block_scale[stage], row_sum);
  }

  __device__ static float sum_of_pair(u32 pair) {
    return cvt_f32(Fp16{}, static_cast<u16>(pair)) + cvt_f32(Fp16{}, static_cast<u16>(pair >> 16));
  }

  __device__ void rescale(const SharedMemoryPlan& smem, int stage) {
    row_sum *= smem.rescale[stage][row()];
  }

  // Reduces over the threads of a row, and publishes row sum and fp16 scale.
  __device__ void publish(SharedMemoryPlan& smem, int stage) const {
    float sum = row_sum;
#pragma unroll
    for (int lanes = 1; lanes < kThreadsPerRow; lanes *= 2) {
      sum += __shfl_xor_sync(~0u, sum, lanes);
    }
    if (reload_tid() % kThreadsPerRow != 0) return;
    smem.row_sum[stage][row()] = sum;
    // |O| <= l * max |V|.
    const float amax = sum * inverse_of_pow2(smem.row_shared_scale[stage]) * kMaxV;
    smem.row_scale[stage][row()] = fp16_scale(amax);
  }
};

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

// PTX ISA, "Half Precision Floating Point Instructions: mul". Needs sm_53.

// mul.rn.f16x2
__device__ inline u32 mul_f16x2(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// V fragments: A operand of O^T += V^T P^T, transposed from shared memory into registers and
// dequantised to fp16.

// A fragment has 32 tokens of a tile of dims: two MMAs.
constexpr int kVTokens = 32;
constexpr int kVSteps = kVTokens / 16;
constexpr int kTokenHalves = kBlockN / kVTokens;
using VFragments = u32[kVSteps * 4];
using StoredV = u32[4];
using VScales = uint2[kVTokens / 16];  // two tokens of each of two matrices

// PV steps: for each half of the tokens, one tile of dims after the other.
constexpr int kPvSteps = kDimTiles * kTokenHalves;
__device__ constexpr int token_half_of(int pv_step) { return pv_step / kDimTiles; }
__device__ constexpr int dim_tile_of(int pv_step) { return pv_step % kDimTiles; }

// ldmatrix loads four matrices of eight tokens and 16 dims; of each, a lane gets dims 2g and 2g + 1
// of tokens 2c and 2c + 1, with g = lane / 4 and c = lane % 4.
struct VLoader {
  const u16* scales;  // of this lane's first two tokens
  u32 address;  // of this lane's ldmatrix row, in tile 0

  // `stage` is the KV block.
  __device__ explicit VLoader(unsigned char* stage) {
    const int lane = reload_lane();
    const int warp = reload_warp();
    scales = &v_scale(stage, lane % 4 * 2, warp * kDimsPerWarp / kScaledDims);
    address = shared_address(stage) + warp / 2 * kTileBytes +
              swizzled_offset<kTileRowBytes>(lane, warp % 2 * kDimTiles);
  }

  __device__ void load_scales(VScales& loaded, int half) const {
#pragma unroll
    for (int i = 0; i < kVTokens / 16; ++i) {
      const int token = half * kVTokens + i * 16;
      loaded[i] = *reinterpret_cast<const uint2*>(scales + v_scale_index(token, 0));
    }
  }

  // Loads the stored V of a PV step. A tile of dims is one of the four chunks that a warp has of a
  // row of 128 bytes, so its index is two bits of the swizzled address.
  __device__ void load(StoredV& loaded, int pv_step) const {
    const u32 row = address ^ (dim_tile_of(pv_step) * kChunkBytes);
    ldmatrix_x4_trans(loaded, row + token_half_of(pv_step) * kVTokens * kTileRowBytes);
  }
};

__device__ inline void dequant_v(VFragments& v, const StoredV& stored, const VScales& scales) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32* step = v + i / 2 * 4 + i % 2 * 2;
    const u32 scale = i % 2 == 0 ? scales[i / 2].x : scales[i / 2].y;
    const u32 by_dims = __byte_perm(stored[i], 0, 0x3120);
    step[0] = mul_f16x2(fp16x2_of_e4m3x2(by_dims & 0xffff), scale);
    step[1] = mul_f16x2(fp16x2_of_high_e4m3x2(by_dims), scale);
  }
}

// PV loop of the PV warpgroups: O^T += V^T P^T for every KV block of every work item.

// Double-buffered V fragments: dequantisation overlaps the MMAs in flight.
constexpr int kVBuffers = 2;

struct PvWarpgroup {
  SharedMemoryPlan& smem;
  const WorkItem& work;
  u32 first_kv_block;  // `blocks_done` at the first KV block of the work item
  Accumulators accumulators;
  RowSum row_sum;

  __device__ PvWarpgroup(SharedMemoryPlan& smem, const WorkItem& work, u32 blocks_done)
      : smem(smem), work(work), first_kv_block(blocks_done) {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kBlockM / 2; ++i) accumulators[tile][i] = 0.0f;
    }
  }

  __device__ void rescale(int stage) {
    row_sum.rescale(smem, stage);
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const float2 alpha =
          *reinterpret_cast<const float2*>(&smem.rescale[stage][row_of(group * 2)]);
      rescale_group(accumulators, group, alpha);
    }
  }

  // Issues the MMAs of half of the tokens and one tile of dims.
  __device__ void pv_mma(const VFragments& v, u32 p_desc, int half, int tile) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kVSteps; ++step) {
      const u32 p_offset = (half * kVTokens + step * 16) * 2;
      wgmma_mma(Fp16{}, accumulators[tile], v + step * 4,
                smem_desc_sw128(p_desc + descriptor_step(p_offset)), 1);
    }
    wgmma_commit_group();
  }

  // Loads and dequantises the V fragments of a step while the preceding MMAs are in flight.
  __device__ void pv_gemm(int stage) {
    const u32 p_desc = descriptor_low(shared_address(smem.probabilities[stage]), 16);
    const VLoader v_loader(smem.kv[stage]);
    StoredV stored;
    VFragments v[kVBuffers];
    VScales scales;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_fence_operand(accumulators[tile]);
#pragma unroll
    for (int pv_step = 0; pv_step < kPvSteps; ++pv_step) {
      const int half = token_half_of(pv_step);
      v_loader.load(stored, pv_step);
      if (pv_step % kDimTiles == 0) v_loader.load_scales(scales, half);
      if (pv_step >= kVBuffers) wgmma_wait_group<kVBuffers - 1>();
      dequant_v(v[pv_step % kVBuffers], stored, scales);
      pv_mma(v[pv_step % kVBuffers], p_desc, half, dim_tile_of(pv_step));
    }
    row_sum.add(smem, stage);
    wgmma_wait_group<0>();
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_fence_operand(accumulators[tile]);
  }

  __device__ void process_block(u32& blocks_done, u32 end) {
    const int stage = stage_of(blocks_done);
    wait(smem.probabilities_full[stage], phase_of(blocks_done));
    if (kDelaysPv && __any_sync(~0u, blocks_done + 1 != end)) {
      wait(smem.scores_full[stage_of(blocks_done + 1)], phase_of(blocks_done + 1));
    }
    if (__any_sync(~0u, smem.needs_rescale[stage] != 0)) rescale(stage);
    if constexpr (!kIsSparse) clear_masked(stage, blocks_done);  // top-k tokens: no causal mask
    pv_gemm(stage);
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.kv_empty[stage]);
    ++blocks_done;
  }

  __device__ void clear_masked(int stage, u32 blocks_done) const {
    const int first_token =
        (work.first_kv_block + static_cast<int>(blocks_done - first_kv_block)) * kBlockN;
    const int first_masked = max(work.unmasked_kv_end - first_token, 0);
    const int end = min(work.kv_end - first_token, kBlockN);
    if (first_masked < end) clear_nonfinite(smem, work, smem.kv[stage], first_masked, end);
  }

  // The any-sync makes stages and descriptors warp-uniform.
  __device__ void process_work(u32& blocks_done) {
    const u32 end = blocks_done + warp_uniform(work.num_kv_blocks);
#pragma unroll 1
    while (__any_sync(~0u, blocks_done != end)) process_block(blocks_done, end);
  }
};

__device__ inline void pv_loop(const Params& params, SharedMemoryPlan& smem) {
  finish_q_load<kLatentTiles / 2>(smem, smem.first_query_full, reload_tid(), kConsumerThreads);
  u32 blocks_done = 0;  // KV blocks, over all work items
  u32 work_idx = 0;
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    if (work.seq_idx < 0) return;
    PvWarpgroup pv_warpgroup(smem, work, blocks_done);
    pv_warpgroup.process_work(blocks_done);
    wait(smem.row_state_full[work_slot(work.work_idx)], work_phase(work.work_idx));
    pv_warpgroup.row_sum.publish(smem, work_slot(work.work_idx));
    // All row sums are published, and a NaN/Inf that either PV warpgroup found counts for both.
    named_barrier_sync(NamedBarrier::ConsumersSynced, kConsumerThreads);
    ThreadRows rows{smem, work_slot(work.work_idx)};
    epilogue(params, work, smem, pv_warpgroup.accumulators, rows);
    work_idx = work.work_idx + 1;  // reloaded, so that the main loop holds no register for it
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx - 1)]);
  }
}

// PTX ISA, "Half Precision Floating Point Instructions: max". Needs sm_80.

// max.f16x2
// Ignores NaN operands.
__device__ inline u32 max_f16x2(u32 a, u32 b) {
  u32 larger;
  asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
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

// Online softmax of the QK warpgroup over S^T, with a lazily updated row max and P in fp16.

// A thread holds two of every eight adjacent rows, and of a warp's 16 tokens g and g + 8 with
// g = lane / 4.
using Scores = float[kBlockM / 2];

// Max offset: an update of the row max makes the largest probability of a row 2^6, in fp16. The
// next update is due when a probability exceeds 2^14.
constexpr float kMaxOffset = 6.0f;  // log2 units
constexpr u32 kMaxProbabilityFp16 = 0x7400;  // as fp16

// Replaces a score scale of 0: a masked score is infinite, and 0 * infinity is NaN.
constexpr float kTinyScale = 0x1p-126f;

// Two adjacent rows.
struct RowPair {
  float4 both;  // score scale and row max of each

  __device__ float score_scale(int row) const { return row == 0 ? both.x : both.z; }

  // Difference of a score to the row max, in log2 units: of the first row, and of the second.
  __device__ float low(float score) const { return fmaf(score, both.x, -both.y); }
  __device__ float high(float score) const { return fmaf(score, both.z, -both.w); }
};

// The row pairs of a thread: one in every eight rows.
struct ThreadRowPairs {
  const SoftmaxRow* first;

  __device__ ThreadRowPairs(const SharedMemoryPlan& smem, const QkThread& qk_thread)
      : first(smem.rows + qk_thread.lane % 4 * 2) {}

  __device__ RowPair of_group(int group) const {
    return {*reinterpret_cast<const float4*>(first + group * 8)};
  }
};

struct Softmax {
  SharedMemoryPlan& smem;

  __device__ explicit Softmax(SharedMemoryPlan& smem) : smem(smem) {}

  // Called before the first KV block of a work item, once Q is in shared memory. `scale` is the
  // softmax scale to log2 units.
  __device__ void begin(float scale) const {
    const int row = reload_tid() % kQkThreads;
    if (row == 0) smem.shared_scale = kInitialSharedScale;
    if (row < kBlockM) {
      const float score_scale = scale * smem.query_scale[row];
      smem.rows[row] = {score_scale == 0.0f ? kTinyScale : score_scale, -kFloatMax};
    }
    named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
  }

  // Softmax of a KV block: stores P for the PV warpgroups. The fast path uses the stale row max and
  // the stale shared scale of V. On the first KV block of a work item, or if a probability or a V
  // scale exceeds its limit, the slow path updates both, and stores P and the V scales again.
  __device__ void update(const Scores& scores, const ThreadScales& scales,
                         const QkThread& qk_thread, int stage, bool is_first) {
    bool needs_rescale = is_first;
    if (!is_first) {
      const bool is_exceeded = scales.exceeds_max_scaled(smem.shared_scale);
      needs_rescale = store_probabilities(scores, qk_thread, stage) || is_exceeded;
      needs_rescale = named_barrier_sync_or(NamedBarrier::QkSynced, kQkThreads, needs_rescale);
    }
    if (__any_sync(~0u, needs_rescale)) {
      update_row_max(scores, scales, qk_thread, stage);
      scales.store(smem.kv[stage], qk_thread, smem.shared_scale);
      store_probabilities(scores, qk_thread, stage);
      publish_block_scale(qk_thread, stage, !is_first);
    }
    __syncwarp();
    if (qk_thread.lane == 0) arrive(smem.probabilities_full[stage]);
  }

  // Publishes the shared scale of a KV block, and whether O needs a rescale before it. The first
  // call, before the scores are complete, assumes the fast path.
  __device__ void publish_block_scale(const QkThread& qk_thread, int stage,
                                      bool needs_rescale) const {
    if (qk_thread.lane != 0 || qk_thread.warp != 0) return;
    smem.needs_rescale[stage] = needs_rescale;
    smem.block_scale[stage] = smem.shared_scale;
  }

  // Stores P relative to the stale row max, and returns whether any probability exceeds
  // `kMaxProbabilityFp16`. Computes all of P before the first store: the loads of later rows would
  // have to wait for the stores.
  __device__ bool store_probabilities(const Scores& scores, const QkThread& qk_thread,
                                      int stage) const {
    const ThreadRowPairs rows(smem, qk_thread);
    u32 max_p = 0;
    u32 pairs[kRowGroups][2];  // of two adjacent rows, for tokens g and g + 8
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const RowPair pair = rows.of_group(group);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* acc = scores + group * 4 + half * 2;
        pairs[group][half] =
            cvt_rn_x2_f32(Fp16{}, ex2_approx(pair.high(acc[1])), ex2_approx(pair.low(acc[0])));
      }
      max_p = max_f16x2(max_p, max_f16x2(pairs[group][0], pairs[group][1]));
    }
    // The four 8x8 matrices: tokens 0-7 and 8-15 of the warp, for 8 rows and for the next 8.
    const int chunk = qk_thread.warp * 2 + qk_thread.lane / 8 % 2;
    const u32 address =
        shared_address(smem.probabilities[stage]) +
        swizzled_offset<kTileRowBytes>(qk_thread.lane / 16 * 8 + qk_thread.lane % 8, chunk);
#pragma unroll
    for (int group = 0; group < kRowGroups; group += 2) {
      stmatrix_x4_trans(address + group * 8 * kTileRowBytes, pairs[group][0], pairs[group][1],
                        pairs[group + 1][0], pairs[group + 1][1]);
    }
    fence_proxy_async();
    return max(max_p & 0xffff, max_p >> 16) > kMaxProbabilityFp16;
  }

  // Raises every row max to `kMaxOffset` below the maximum of the row's scores, and lowers the
  // shared scale to what the amax of the V scales requires.
  __device__ void update_row_max(const Scores& scores, const ThreadScales& scales,
                                 const QkThread& qk_thread, int stage) {
    const ThreadRowPairs rows(smem, qk_thread);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const float score_scale = rows.of_group(r / 2).score_scale(r % 2);
      const float maximum =
          max_over_lanes(fmaxf(__fmul_rn(scores[r / 2 * 4 + r % 2], score_scale),
                               __fmul_rn(scores[r / 2 * 4 + 2 + r % 2], score_scale)));
      if (qk_thread.lane < 4) smem.warp_row_max[qk_thread.warp][row_of(r)] = maximum;
    }
    smem.warp_scale_amax[qk_thread.warp] =
        __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(scales.amax())));
    const float shared_scale = smem.shared_scale;
    named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
    const int row = qk_thread.warp * kWarpLanes + qk_thread.lane;
    const float next_shared_scale = next_shared_scale_for(shared_scale);
    if (row < kBlockM) {
      float& row_max = smem.rows[row].row_max;
      float next = row_max;
#pragma unroll
      for (int warp = 0; warp < kQkWarps; ++warp) {
        const float target = smem.warp_row_max[warp][row] - kMaxOffset;
        if (target > next) next = target;
      }
      smem.rescale[stage][row] = ex2_approx(row_max - next) * (next_shared_scale / shared_scale);
      row_max = next;
    }
    if (row == 0) smem.shared_scale = next_shared_scale;
    named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
  }

  // Shared scale for the V scales of a KV block; unchanged while they stay below the limit.
  __device__ float next_shared_scale_for(float shared_scale) const {
    float amax = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kQkWarps; ++warp) {
      amax = fmaxf(amax, smem.warp_scale_amax[warp]);
    }
    return amax * shared_scale >= kMaxScaled ? shared_scale_for(amax) : shared_scale;
  }

  // Publishes the row max of the work item to the PV warpgroups, lowered by the log2 of the shared
  // scale, since O and l carry that factor.
  __device__ void publish_row_max(int stage) const {
    const float shared_scale = smem.shared_scale;  // read before the next work item resets it
    named_barrier_sync(NamedBarrier::QkSynced, kQkThreads);
    const int row = reload_tid() % kQkThreads;
    if (row < kBlockM) {
      smem.row_max[stage][row] = smem.rows[row].row_max - log2_of_pow2(shared_scale);
    }
    if (row == 0) smem.row_shared_scale[stage] = shared_scale;
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.row_state_full[stage]);
  }
};

// Softmax scale: the factor of the scores Q K^T, natural base.

__device__ inline float score_scale(const Params& params) {
  const float scale = value_of(params.bmm1_scale_tensor, params.bmm1_scale);
  return params.scores_take_bmm2 ? scale * value_of(params.bmm2_scale_tensor, params.bmm2_scale)
                                 : scale;
}

// QK loop of the QK warpgroup: S^T = K Q^T and online softmax for all KV blocks of all work items.

// K dimension of an FP8 MMA.
constexpr int kStepElements = 32;
constexpr int kHalfTileBytes = kTileRowBytes / 2;  // hi terms, then lo terms of a rope row

// With 16 and 32 rows, the hi and lo terms of Q are stacked along N: each MMA covers both, and
// reads K once.
constexpr bool kStacksQTerms = kSplitsQ && kBlockM <= 32;
using GroupScores = float[kStacksQTerms ? kBlockM : kBlockM / 2];

// Scale groups whose MMAs are in flight at once, as many as registers allow.
constexpr int kGroupsInFlight = kBlockM > 32 ? 1 : sizeof(GroupScores) > 64 ? 2 : kScaleGroups;

struct QkWarpgroup {
  const Params& params;
  SharedMemoryPlan& smem;
  const WorkItem& work;
  u32& blocks_done;  // KV blocks, over all work items
  Scores scores;
  ThreadScales thread_scales;
  Softmax softmax;

  __device__ QkWarpgroup(const Params& params, SharedMemoryPlan& smem, const WorkItem& work,
                         u32& blocks_done)
      : params(params), smem(smem), work(work), blocks_done(blocks_done), softmax(smem) {}

  // Issues the QK GEMM over the dims of one scale group.
  __device__ static void qk_gemm_group(GroupScores& group_scores, u32 k_desc, u32 q_desc,
                                       int group) {
    k_desc += descriptor_step(group * kTileBytes);
    q_desc += descriptor_step(group * kNumQTerms * kQueryTileBytes);
    wgmma_fence_operand(group_scores);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kScaledDims / kStepElements; ++k) {
      const u32 k_offset = descriptor_step(k * kStepElements);
      wgmma_mma(E4m3{}, group_scores, smem_desc_sw128(k_desc + k_offset),
                smem_desc_sw128(q_desc + k_offset), k > 0);
      if constexpr (kSplitsQ && !kStacksQTerms) {
        const u32 q_lo = q_desc + k_offset + descriptor_step(kQueryTileBytes);
        wgmma_mma(E4m3{}, group_scores, smem_desc_sw128(k_desc + k_offset), smem_desc_sw128(q_lo),
                  1);
      }
    }
    wgmma_commit_group();
  }

  // Issues the QK GEMM over the rope part.
  __device__ void qk_gemm_rope(u32 k_desc, u32 q_desc) {
    k_desc += descriptor_step(kRopeTileOffset);
    q_desc += descriptor_step(kLatentTiles * kQueryTileBytes);
    wgmma_fence_operand(scores);
    wgmma_fence();
    if constexpr (kHasBf16Rope) {
#pragma unroll
      for (int k = 0; k < kRopeDim / 16; ++k) {
        const u32 k_offset = descriptor_step(k * 32);
        wgmma_mma(Bf16{}, scores, smem_desc_sw128(k_desc + k_offset),
                  smem_desc_sw128(q_desc + k_offset), k > 0);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kRopeDim / kStepElements; ++k) {
        const u32 k_offset = descriptor_step(k * kStepElements);
        const u64 k_smem_desc = smem_desc_sw64(k_desc + k_offset);
        wgmma_mma(E4m3{}, scores, k_smem_desc, smem_desc_sw128(q_desc + k_offset), k > 0);
        if constexpr (kSplitsQ) {
          const u32 q_lo = q_desc + k_offset + descriptor_step(kHalfTileBytes);
          wgmma_mma(E4m3{}, scores, k_smem_desc, smem_desc_sw128(q_lo), 1);
        }
      }
    }
    wgmma_commit_group();
  }

  // The bf16 rope part of FP8_DS_MLA is not scaled.
  __device__ void scale_rope(const KScales& scales) {
    wgmma_fence_operand(scores);
    if constexpr (kHasInlineScales) return;
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      scores[i] *= kHasPerTokenScale ? scales.per_token[i / 2 % 2][0] : params.rope_scale;
    }
  }

  // Promotes the scores of a scale group into `scores`, times the K scales of tokens g and g + 8.
  __device__ void add_scaled_group(GroupScores& group_scores, const KScales& scales, int group) {
    wgmma_fence_operand(group_scores);
#pragma unroll
    for (int i = 0; i < kBlockM / 2; ++i) {
      const float score =
          kStacksQTerms ? group_scores[i] + group_scores[i + kBlockM / 2] : group_scores[i];
      scores[i] = fmaf(score, scales.per_token[i / 2 % 2][group], scores[i]);
    }
  }

  // QK GEMM of the KV block in `stage`. Converts and stores its V scales while MMAs are in flight.
  __device__ void qk_gemm(int stage, const QkThread& qk_thread, u32 k_desc, u32 q_desc) {
    unsigned char* kv = smem.kv[stage];
    GroupScores pending_scores[kGroupsInFlight];
    qk_gemm_rope(k_desc, q_desc);
#pragma unroll
    for (int group = 0; group < kGroupsInFlight; ++group) {
      qk_gemm_group(pending_scores[group], k_desc, q_desc, group);
    }
    const KScales scales(kv, qk_thread);
    thread_scales.select(scales, qk_thread);
    thread_scales.store(kv, qk_thread, smem.shared_scale);
    softmax.publish_block_scale(qk_thread, stage, false);
    wgmma_wait_group<kGroupsInFlight>();
    scale_rope(scales);
    add_groups<0>(pending_scores, scales, k_desc, q_desc);
  }

  // Promotes the scale groups from `kGroup` on, and refills the MMAs in flight.
  template <int kGroup>
  __device__ void add_groups(GroupScores (&pending_scores)[kGroupsInFlight], const KScales& scales,
                             u32 k_desc, u32 q_desc) {
    constexpr int kRemaining = kScaleGroups - 1 - kGroup;
    constexpr int kNext = kGroup + kGroupsInFlight;
    wgmma_wait_group<(kRemaining < kGroupsInFlight ? kRemaining : kGroupsInFlight - 1)>();
    GroupScores& group_scores = pending_scores[kGroup % kGroupsInFlight];
    add_scaled_group(group_scores, scales, kGroup);
    if constexpr (kNext < kScaleGroups) qk_gemm_group(group_scores, k_desc, q_desc, kNext);
    if constexpr (kRemaining > 0) add_groups<kGroup + 1>(pending_scores, scales, k_desc, q_desc);
  }

  // Masks the scores of tokens g and g + 8 for which `is_masked(r, offset)`. A select, not an
  // addition: a masked score may be NaN. The sign of the infinity is that of minus the row's score
  // scale, so that the scaled score is minus infinity.
  template <typename IsMasked>
  __device__ void mask_scores(const QkThread& qk_thread, IsMasked is_masked) {
    const ThreadRowPairs rows(smem, qk_thread);
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
      const float masked = copysignf(kInfinity, -rows.of_group(r / 2).score_scale(r % 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (is_masked(r, half * 8)) scores[r / 2 * 4 + half * 2 + r % 2] = masked;
      }
    }
  }

  __device__ void mask_by_kv_len(int first_token, const QkThread& qk_thread) {
    const int token = first_token + qk_thread.token();
    mask_scores(qk_thread,
                [&](int r, int offset) { return token + offset >= work.row_kv_end[row_of(r)]; });
  }

  __device__ void mask_invalid(u64 invalid_mask, const QkThread& qk_thread) {
    const u64 bits = invalid_mask >> qk_thread.token();
    mask_scores(qk_thread, [&](int, int offset) { return (bits >> offset & 1) != 0; });
  }

  __device__ void process_block(int kv_block) {
    const int stage = stage_of(blocks_done);
    // Computed before the wait, off the critical path.
    const u32 k_desc = warp_uniform(descriptor_low(shared_address(smem.kv[stage]), 16));
    const u32 q_desc = warp_uniform(descriptor_low(shared_address(smem.query), 16));
    const QkThread qk_thread;
    wait(smem.kv_full[stage], phase_of(blocks_done));
    fence_proxy_async();  // wgmma reads what cp.async has written
    qk_gemm(stage, qk_thread, k_desc, q_desc);
    if (kDelaysPv && qk_thread.lane == 0) arrive(smem.scores_full[stage]);
    const int first_token = kv_block * kBlockN;
    if constexpr (kIsSparse) {
      const u64 invalid_mask = smem.invalid_mask[stage].all();
      if (__any_sync(~0u, invalid_mask != 0)) mask_invalid(invalid_mask, qk_thread);
    } else if (__any_sync(~0u, first_token + kBlockN > work.unmasked_kv_end)) {
      mask_by_kv_len(first_token, qk_thread);
    }
    softmax.update(scores, thread_scales, qk_thread, stage, kv_block == work.first_kv_block);
    ++blocks_done;
  }

  __device__ void process_work() {
    softmax.begin(score_scale(params) * kLog2E);
    const u32 end = blocks_done + warp_uniform(work.num_kv_blocks);
    int kv_block = work.first_kv_block;
#pragma unroll 1
    while (__any_sync(~0u, blocks_done != end)) process_block(kv_block++);
    // All warps are done with Q: they have met at a barrier since its last read, or never read it.
    if (reload_tid() % kQkThreads == 0) arrive(smem.query_empty);
    softmax.publish_row_max(work_slot(work.work_idx));
  }
};

__device__ inline void qk_loop(const Params& params, SharedMemoryPlan& smem) {
  u32 blocks_done = 0;
  u32 work_idx = 0;
  while (true) {
    wait(smem.work_full[work_slot(work_idx)], work_phase(work_idx));
    const WorkItem& work = smem.work_items[work_slot(work_idx)];
    if (work.seq_idx < 0) return;
    wait_query(smem, work_idx);
    QkWarpgroup qk_warpgroup(params, smem, work, blocks_done);
    qk_warpgroup.process_work();
    work_idx = work.work_idx + 1;  // reloaded, so that the main loop holds no register for it
    __syncwarp();
    if (reload_lane() == 0) arrive(smem.work_empty[work_slot(work_idx - 1)]);
  }
}

// Register budget: registers per thread of each warpgroup role after setmaxnreg, 128 before. With
// 64 rows the two PV warpgroups get most. A larger budget of the QK warpgroup for unsplit Q makes
// the compiler hoist so much that it serialises the wgmma (C7512).

constexpr int kConsumerRegs = kBlockM > 32 ? 176 : 128;
constexpr int kQkRegs = kBlockM > 32 ? (kSplitsQ ? 104 : 96) : 128;
constexpr int kProducerRegs = 4 * 128 - 2 * kConsumerRegs - kQkRegs;

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

// One QK, two PV and one producer warpgroup. The QK GEMM takes K in FP8 as stored, the PV GEMM
// takes V dequantised to FP16 in registers.
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_sm90_fp8kv(const __grid_constant__ Params params) {
  SharedMemoryPlan& smem = shared_memory<SharedMemoryPlan>();
  // Prologue, one warp each: overlaps the tail of the preceding kernel (PDL).
  if (threadIdx.x == 0) {
    init_kv_barriers(smem);
    fence_mbarrier_init();
  } else if (threadIdx.x == kWarpLanes) {
    init_work_barriers(smem);
    fence_mbarrier_init();
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
    load_first_q_async(params, first_work, smem);
    pv_loop(params, smem);
  } else if (warp_role >= kProducerWarps) {
    reg_alloc<kQkRegs>();
    qk_loop(params, smem);
    prefetch_sched_meta(params);
  } else {
    reg_alloc<kProducerRegs>();
    producer_loop(params, scheduler, first_work, smem);
  }
}
