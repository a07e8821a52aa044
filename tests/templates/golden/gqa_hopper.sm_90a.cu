// Names and types that every kernel uses.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Tags that choose how elements are converted; the data itself is held as bytes, u16 or u32.
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

// What one load, store or cp.async moves at the most.
constexpr int kChunkBytes = 16;
struct alignas(kChunkBytes) Chunk {
  u32 words[4];
};

// What describes a tensor to the copy engine: opaque, made on the host.
struct alignas(64) TensorMap {
  u64 words[16];
};

constexpr int kWarpLanes = 32;
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLargest = __builtin_bit_cast(float, 0x7f7fffff);
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// The dynamic shared memory of the block, seen as one struct.
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

// What one launch passes to the kernel.

struct Params {
  TensorMap key_map;
  TensorMap value_map;
  const u16* query;
  const unsigned char* value_cache;
  const int* block_tables;
  const int* seq_lens;
  const int* cum_seq_lens_q;
  const u32* draft_mask;
  const float* bmm1_scale_tensor;
  const float* bmm2_scale_tensor;
  const float* sinks;
  unsigned char* out;
  float* partial_out;
  unsigned char* partial_rows;
  u32* counters;
  i64 query_stride;
  i64 query_head_stride;
  i64 value_page_stride;
  i64 value_token_stride;
  i64 value_head_stride;
  int tokens;
  int requests;
  int kv_heads;
  int group;
  int q_len;
  int row_tiles;
  int units;
  int teams;
  int team_size;
  int mask_words;
  int window;
  int max_pages;
  int most_tokens;
  int block_tables_stride;
  int num_pages;
  int scores_take_bmm2;
  float bmm1_scale;
  float bmm2_scale;
  float score_factor;
  float output_factor;
};

// The numbers of this kernel; the rest of the source only uses them.

using QueryElement = Bf16;
using Element = Bf16;  // of the products
using OutElement = Bf16;
constexpr int kHeadDim = 128;
constexpr int kPageSize = 64;
constexpr int kRowBytes = 256;  // of a cached token of one kv head
constexpr int kHeads = 1;  // kv heads that a block attends to at a time
constexpr int kLineBytes = 128;
constexpr int kTileTokens = 128;
constexpr int kBoxTokens = 64;
constexpr int kStages = 4;
constexpr int kRows = 8;
constexpr int kConsumerWarps = 8;
constexpr int kSharedBytes = 232448;

// Warps of the consumers come first, then the loader, the finder and two that merge, for registers
// are handed out by four warps.
constexpr int kConsumerThreads = kConsumerWarps * kWarpLanes;
constexpr int kLoaderWarp = kConsumerWarps;
constexpr int kThreads = 384;
constexpr int kFinderWarp = kLoaderWarp + 1;
constexpr int kFirstMerger = kFinderWarp + 1;
constexpr int kMergers = kThreads / kWarpLanes - kFirstMerger;
constexpr int kMergerThreads = kMergers * kWarpLanes;

// Registers of a thread, where a lane has more of the query and the output than kernels begin with.
constexpr bool kMovesRegisters = kRows * kHeadDim > 8 * 128;
constexpr int kFirstRegisters = 168;  // the most that so many threads may begin with
constexpr int kConsumerRegisters = 216;
constexpr int kLoaderRegisters = 72;

// A box of tokens arrives as columns of lines, kLineBytes of every token each, swizzled: those of
// one kv head, then those of the next.
constexpr int kColumns = kRowBytes / kLineBytes;
constexpr int kColumnBytes = kBoxTokens * kLineBytes;
constexpr int kHeadBytes = kColumns * kColumnBytes;
constexpr int kBoxBytes = kHeads * kHeadBytes;
constexpr int kTileBoxes = kTileTokens / kBoxTokens;
constexpr int kTileBytes = kTileBoxes * kBoxBytes;

// A warp has one of the heads, and of it as many tokens of each tile, and multiplies kStepTokens at
// a time.
constexpr int kHeadWarps = kConsumerWarps / kHeads;
constexpr int kHeadThreads = kHeadWarps * kWarpLanes;
constexpr int kWarpTokens = kTileTokens / kHeadWarps;
constexpr int kStepTokens = 16;
constexpr int kSteps = kWarpTokens / kStepTokens;
constexpr int kRowGroups = kRows / 8;
constexpr int kDimTiles = kHeadDim / 16;

// Whether the query fits into registers beside the output; else it is in shared memory.
constexpr bool kKeepsQuery = true;

// What is merged at a time of the warps of a block: as many rows and dims as there is room for
// beside the ring and the query. If they are all of a row tile, the mergers may do it while
// consumers go on.
constexpr int kMergeRows = 8;
constexpr int kMergeGroups = kMergeRows / 8;
constexpr int kMergeDims = 128;
constexpr bool kMergesApart = kMergeRows == kRows && kMergeDims == kHeadDim;

// Numbers of the barriers that warps meet at.
constexpr int kStartBarrier = 1;
constexpr int kConsumerBarrier = 2;
constexpr int kPartsFullBarrier = 3;
constexpr int kPartsEmptyBarrier = 4;
constexpr int kCheckedBarrier = 5;

static_assert(kTileBoxes * kBoxTokens == kTileTokens, "boxes fill a tile");
static_assert(!kMovesRegisters || kConsumerThreads * kConsumerRegisters + 128 * kLoaderRegisters <=
                                      kThreads * kFirstRegisters,
              "what consumers take, the others give");
static_assert(kTileBoxes <= kWarpLanes, "a lane copies a box");
static_assert(kBoxTokens % kStepTokens == 0, "what a warp multiplies lies in one box");
static_assert(kSteps * kStepTokens * kHeadWarps == kTileTokens, "warps share a tile");
static_assert(kHeadWarps * kHeads == kConsumerWarps, "and its heads");
static_assert(kHeads == 1 || kKeepsQuery, "shared memory has the query of one head");

// PTX ISA, "Parallel Synchronization and Communication Instructions: atom". Needs sm_80.

// atom.acq_rel.gpu.global.add.u32
// Adds, and returns what there was before.
__device__ inline u32 atom_add_acq_rel_gpu(u32* address, u32 value) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(value)
               : "memory");
  return before;
}

// atom.acq_rel.gpu.global.inc.u32
// Adds one, or makes `most` zero, and returns what there was before.
__device__ inline u32 atom_inc_acq_rel_gpu(u32* address, u32 most) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address), "r"(most)
               : "memory");
  return before;
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: barrier.cta". Needs sm_80.
// Barriers have numbers from 0 to 15; `threads` counts those that wait and those that only arrive.

// barrier.cta.sync.aligned
__device__ inline void barrier_sync(int barrier, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier.cta.arrive.aligned
__device__ inline void barrier_arrive(int barrier, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// barrier.cta.red.or.aligned.pred
// Waits for all threads; returns whether any of them brought a number that is not zero.
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
// What was written before the value by others is seen after.
__device__ inline u32 ld_acquire_gpu(const u32* address) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// ld.relaxed.gpu.global.s32
// What others may be writing: any value that was there, and never what L1 has kept of it.
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
// Past L1: what others have just written.
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
// A phase ends after `count` arrivals and all bytes that were expected.
__device__ inline void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// mbarrier.arrive.shared::cta.b64
__device__ inline void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.shared::cta.b64
// By lane 0, and not before `read` is there: that times the lane's number makes up the address.
__device__ inline void mbarrier_arrive_after(u32 barrier, u32 read) {
  asm volatile(
      "{.reg .b32 address; mov.b32 address, %%laneid; and.b32 address, address, %1; "
      "add.u32 address, address, %0; mbarrier.arrive.shared::cta.b64 _, [address];}" ::"r"(barrier),
      "r"(read)
      : "memory");
}

// mbarrier.arrive.expect_tx.shared::cta.b64
// Arrives, and says that the phase waits for `bytes` more.
__device__ inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity.shared::cta.b64
// Waits until the phase of this parity has ended. The loop is in here, for compilers give products
// that are under way across a loop of theirs other registers.
__device__ inline void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra "
      "again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Barriers in shared memory, with phases that are counted by their parity.

using Barrier = u64;

// For `arrivals` in each phase.
__device__ inline void make_barrier(const Barrier& barrier, int arrivals) {
  mbarrier_init(shared_address(&barrier), arrivals);
}

__device__ inline void wait_for(const Barrier& barrier, u32 parity) {
  mbarrier_wait(shared_address(&barrier), parity);
}

__device__ inline void arrive_at(const Barrier& barrier) {
  mbarrier_arrive(shared_address(&barrier));
}

// By lane 0, once `read` is there and all that it was computed from. Arrivals overtake what a warp
// still reads of shared memory, and a copy that waits for them comes before the read.
__device__ inline void arrive_after(const Barrier& barrier, u32 read) {
  mbarrier_arrive_after(shared_address(&barrier), read);
}

// Steps through the stages of a ring; the parity changes whenever it begins anew.
template <int kCount>
struct RingPosition {
  int stage = 0;
  u32 parity = 0;

  __device__ void advance() {
    if (++stage == kCount) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence". Needs sm_90.

// fence.acq_rel.cta
// What this thread has read is in its registers, and what it has written is there for the block,
// before it tells others.
__device__ inline void fence_acq_rel_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// fence.proxy.async.shared::cta
// Orders this thread's own writes of shared memory before what tensor cores and bulk copies do.
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.mbarrier_init.release.cluster
// Makes barriers that this thread has made known to bulk copies.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// PTX ISA, "Data Movement and Conversion Instructions: prefetch". Needs sm_90.

// prefetch.tensormap
// Brings a tensor map, by its generic address, to where copies look for it.
__device__ inline void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// prefetch.global.L2
// Brings the line of an address into L2.
__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// Whether the query tokens of a request end before they begin. Where none do, requests share no
// tokens, and the host knows how much work there is at the most.

__device__ inline bool goes_back(const Params& params, int request) {
  const int* offsets = params.cum_seq_lens_q;
  return offsets != nullptr && offsets[request + 1] < offsets[request];
}

// What a request is to the kernel: its rows, and the tokens that they see.

// A row is one (query token, query head of a kv head) pair of a request, query token first.
struct RequestFacts {
  int first_query;  // index of the request's first query token among all
  int q_len;
  int kv_len;  // tokens in the cache, the new ones included
  int row_tiles;  // of one kv head; none where the request's queries are not inside the tensor
  int units;
  int first_tile;  // of tokens, that some row sees
  int tiles;  // of tokens, from that one on
};

// The first token that the window of a query token reaches back to.
__device__ inline int window_begin(const Params& params, int kv_len, int q_len, int query) {
  return max(0, max(0, kv_len - q_len + query + 1) - params.window);
}

// Sets the tiles of tokens that some row sees.
__device__ inline void set_tiles(const Params& params, RequestFacts& facts, int length) {
  facts.kv_len = min(max(length, 0), params.most_tokens);
  facts.first_tile = window_begin(params, facts.kv_len, facts.q_len, 0) / kTileTokens;
  facts.tiles = ceil_div(facts.kv_len, kTileTokens) - facts.first_tile;
}

// `length` is what seq_lens has for the request.
__device__ inline RequestFacts facts_of_request(const Params& params, int request, int length) {
  RequestFacts facts;
  facts.q_len = params.q_len;
  facts.row_tiles = params.row_tiles;
  facts.units = params.units;
  facts.first_query = request * params.q_len;
  if (params.cum_seq_lens_q != nullptr) {
    const int first = params.cum_seq_lens_q[request];
    const int end = params.cum_seq_lens_q[request + 1];
    const bool is_inside = first >= 0 && first <= end && end <= params.tokens;
    facts.first_query = first;
    facts.q_len = is_inside ? end - first : 0;
    facts.row_tiles = ceil_div(facts.q_len * params.group, kRows);
    facts.units = facts.row_tiles * params.units;  // those of one tile for each kv head
  }
  set_tiles(params, facts, length);
  return facts;
}

__device__ inline RequestFacts facts_of_request(const Params& params, int request) {
  return facts_of_request(params, request, params.seq_lens[request]);
}

// A part is a tile of rows of a kv head of a request, or of the heads that a block takes. As many
// parts as a team has members are a unit; units of a request are alike. Positions that a unit takes
// on the line of work: one for each tile of tokens, and one if there is none, so that somebody
// writes its zeros.
__device__ inline u32 unit_length(const RequestFacts& facts) {
  return static_cast<u32>(max(facts.tiles, 1));
}

__device__ inline u32 line_length(const RequestFacts& facts) {
  return static_cast<u32>(facts.units) * unit_length(facts);
}

// How the work of a call is divided among the blocks of the grid: each finds its own part.

// A team is some blocks of the grid that are neighbours. They read the same tokens at the same
// time, each those of its kv heads, which lie side by side in most caches; or the very same, for
// another tile of rows. All units in a row make a line. Every team takes an equal stretch of it,
// its span; a unit that lies on several spans is computed in as many pieces, which are merged. The
// host sees to it that the length of the line times the number of spans fits into 32 bits.
struct Span {
  u32 total;  // length of the line
  u32 spans;  // in use
  u32 index;  // of this one
  u32 begin;  // positions on the line
  u32 end;
  u32 member;  // of the team
};

// Where a walk along the units is.
struct WalkState {
  RequestFacts facts;
  int request;
  int unit;  // of the request
  u32 unit_begin;
};

__device__ inline u32 span_begin(u32 index, u32 total, u32 spans) { return index * total / spans; }

// The span that a position lies on.
__device__ inline u32 span_at(u32 position, const Span& span) {
  return ((position + 1) * span.spans - 1) / span.total;
}

// Requests whose lengths a lane asks for together; neighbours, that it adds up.
constexpr int kLaneRequests = 4;

// The lengths of such requests, from `first` on; behind the last one that one's.
struct LaneLengths {
  int each[kLaneRequests];

  __device__ LaneLengths(const Params& params, int first) {
#pragma unroll
    for (int i = 0; i < kLaneRequests; ++i) {
      each[i] = ld_relaxed_gpu(params.seq_lens + min(first + i, params.requests - 1));
    }
  }

  __device__ bool differ_from(const LaneLengths& other) const {
    bool differ = false;
#pragma unroll
    for (int i = 0; i < kLaneRequests; ++i) differ |= each[i] != other.each[i];
    return differ;
  }

  // The length of request `index` of these, of lane `lane`'s.
  __device__ int of_lane(int index, int lane) const {
    int length = each[0];
#pragma unroll
    for (int i = 1; i < kLaneRequests; ++i) length = i == index ? each[i] : length;
    return __shfl_sync(~0u, length, lane);
  }
};

__device__ inline int requests_of_lane(const Params& params) {
  return ceil_div(params.requests, kWarpLanes);
}

// What the lane has of the first of its requests.
__device__ inline LaneLengths own_lengths(const Params& params) {
  return LaneLengths(params, lane_index() * requests_of_lane(params));
}

// The positions on the line that requests from `first` to before `end` take, all of one q_len.
__device__ inline u32 even_length(const Params& params, LaneLengths lengths, int first, int end) {
  RequestFacts facts;
  facts.q_len = params.q_len;
  facts.units = params.units;
  u32 sum = 0;
#pragma unroll 1
  while (true) {
#pragma unroll
    for (int i = 0; i < kLaneRequests; ++i) {
      set_tiles(params, facts, lengths.each[i]);
      sum += first + i < end ? line_length(facts) : 0;
    }
    first += kLaneRequests;
    if (first >= end) return sum;
    lengths = LaneLengths(params, first);
  }
}

// The same where requests differ in their queries; finds out whether their offsets go back.
__device__ inline u32 ragged_length(const Params& params, int first, int end, bool& goes_back_any) {
  u32 sum = 0;
#pragma unroll 1
  for (; first < end; ++first) {
    sum += line_length(facts_of_request(params, first, params.seq_lens[first]));
    goes_back_any |= goes_back(params, first);
  }
  return sum;
}

// Finds the span of this block's team and the unit that it begins in, by a whole warp; says whether
// there is one. `lengths` are the lane's own_lengths.
__device__ inline bool find_span(const Params& params, const LaneLengths& lengths, Span& span,
                                 WalkState& walk) {
  const int each = requests_of_lane(params);
  const int first = min(lane_index() * each, params.requests);
  const int end = min(first + each, params.requests);
  u32 own = 0;
  bool is_unsound = false;
  if (params.cum_seq_lens_q == nullptr) {
    own = even_length(params, lengths, first, end);
  } else {
    own = ragged_length(params, first, end, is_unsound);
  }
  if (__any_sync(~0u, is_unsound)) return false;
  u32 through = own;  // with all lanes before
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const u32 before = __shfl_up_sync(~0u, through, lanes);
    if (lane_index() >= lanes) through += before;
  }
  span.total = __shfl_sync(~0u, through, kWarpLanes - 1);
  span.spans = min(static_cast<u32>(params.teams), span.total);
  span.index = blockIdx.x / params.team_size;
  span.member = blockIdx.x - span.index * params.team_size;
  if (span.index >= span.spans) return false;
  span.begin = span_begin(span.index, span.total, span.spans);
  span.end = span_begin(span.index + 1, span.total, span.spans);

  const int lane = __ffs(static_cast<int>(__ballot_sync(~0u, through > span.begin))) - 1;
  u32 begin = __shfl_sync(~0u, through - own, lane);
  walk.request = lane * each;
#pragma unroll 1
  while (true) {
    const int kv_len = each <= kLaneRequests ? lengths.of_lane(walk.request - lane * each, lane)
                                             : params.seq_lens[walk.request];
    walk.facts = facts_of_request(params, walk.request, kv_len);
    const u32 length = line_length(walk.facts);
    if (span.begin - begin < length) break;
    begin += length;
    ++walk.request;
  }
  const u32 each_unit = unit_length(walk.facts);
  const u32 unit = (span.begin - begin) / each_unit;
  walk.unit = static_cast<int>(unit);
  walk.unit_begin = begin + unit * each_unit;
  return true;
}

// What a block computes one after the other: items, which are pieces of units.

// Tokens that a row may see: from `begin` to before `end`.
struct Sight {
  int begin;
  int end;

  __device__ bool has(int token) const { return token >= begin && token < end; }
};

struct Item {
  static constexpr int kNone = -1;  // as request: there is no such item

  int first_query;  // index of the request's first query token among all
  int request;
  int kv_head;
  int first_row;  // of the tile, among the request's rows of the kv head
  int rows;  // of the tile; the rest of kRows is padding
  int q_len;
  int kv_len;
  int all_begin, all_end;  // tokens that every row sees
  int any_begin, any_end;  // tokens that some row may see
  int first_tile;  // of tokens
  int tiles;
  int pieces;
  int piece;  // which of them this is
  int first_block;  // of the grid, that has piece 0

  __device__ static Item none() {
    Item item = {};
    item.request = kNone;
    return item;
  }

  __device__ bool is_none() const { return request == kNone; }

  __device__ int query_of(const Params& params, int row) const {
    return q_len == 1 ? 0 : (first_row + row) / params.group;
  }

  __device__ int head_of(const Params& params, int row) const {
    return kv_head * params.group + first_row + row - query_of(params, row) * params.group;
  }

  // Index of a row in a [tokens * heads] array.
  __device__ i64 global_row(const Params& params, int row) const {
    const i64 query = first_query + query_of(params, row);
    return query * params.group * params.kv_heads + head_of(params, row);
  }

  __device__ Sight sight_of(const Params& params, int row) const {
    if (row >= rows) return {0, 0};
    const int query = query_of(params, row);
    const int end = params.draft_mask == nullptr ? kv_len - q_len + query + 1 : kv_len;
    return {window_begin(params, kv_len, q_len, query), end};
  }

  // Whether the draft mask, if there is one, shows a row a token.
  __device__ bool is_shown(const Params& params, int row, int token) const {
    const int draft = token - (kv_len - q_len);
    if (params.draft_mask == nullptr || draft < 0) return true;
    const u32* words = params.draft_mask +
                       static_cast<i64>(first_query + query_of(params, row)) * params.mask_words;
    // Drafts beyond the mask are shown to no row.
    return draft / 32 < params.mask_words && (words[draft / 32] >> draft % 32 & 1) != 0;
  }

  // Whether a row sees a token.
  __device__ bool sees(const Params& params, int row, int token) const {
    return sight_of(params, row).has(token) && is_shown(params, row, token);
  }
};

// The item that a walk is at, of the first of the block's kv heads.
__device__ inline Item item_at(const Params& params, const Span& span, const WalkState& walk) {
  const RequestFacts& facts = walk.facts;
  Item item;
  item.first_query = facts.first_query;
  item.request = walk.request;
  item.q_len = facts.q_len;
  item.kv_len = facts.kv_len;
  const int part = walk.unit * params.team_size + static_cast<int>(span.member);
  const int heads = facts.row_tiles == 1 ? part : part / facts.row_tiles;
  item.kv_head = heads * kHeads;
  item.first_row = (part - heads * facts.row_tiles) * kRows;
  item.rows = min(facts.q_len * params.group - item.first_row, kRows);

  const int first = item.query_of(params, 0);
  const int last = item.query_of(params, item.rows - 1);
  const int before = facts.kv_len - facts.q_len;  // tokens before the new ones
  const bool has_mask = params.draft_mask != nullptr;
  item.any_begin = window_begin(params, facts.kv_len, facts.q_len, first);
  item.all_begin = window_begin(params, facts.kv_len, facts.q_len, last);
  item.any_end = max(has_mask ? facts.kv_len : before + last + 1, 0);
  item.all_end = max(has_mask ? before : before + first + 1, 0);

  const u32 length = unit_length(facts);
  const u32 unit_end = walk.unit_begin + length;
  const int begin = static_cast<int>(max(span.begin, walk.unit_begin) - walk.unit_begin);
  const int end = static_cast<int>(min(span.end, unit_end) - walk.unit_begin);
  item.first_tile = max(facts.first_tile + begin, item.any_begin / kTileTokens);
  const int last_tile = min(facts.first_tile + end, ceil_div(item.any_end, kTileTokens));
  item.tiles = max(last_tile - item.first_tile, 0);
  item.pieces = 1;
  item.piece = 0;
  u32 first_span = span.index;
  if (begin > 0 || walk.unit_begin + end < unit_end) {
    first_span = span_at(walk.unit_begin, span);
    item.pieces = static_cast<int>(span_at(unit_end - 1, span) - first_span) + 1;
    item.piece = static_cast<int>(span.index - first_span);
  }
  item.first_block = static_cast<int>(first_span * params.team_size + span.member);
  return item;
}

// Goes to the next unit; says whether it begins on the span.
__device__ inline bool go_on(const Params& params, const Span& span, WalkState& walk) {
  walk.unit_begin += unit_length(walk.facts);
  if (walk.unit_begin >= span.end) return false;
  if (++walk.unit < walk.facts.units) return true;
  walk.unit = 0;
#pragma unroll 1
  do {
    walk.facts = facts_of_request(params, ++walk.request);
  } while (walk.facts.units == 0);
  return true;
}

// The items of a block, on their way from the warp that finds them to those that work on them.

// Item `count` of the block, from 0 on, is in place count % kPlaces, for each of the block's kv
// heads. Behind the last one comes one that is none.
struct ItemRing {
  static constexpr u32 kPlaces = 4;
  static constexpr int kReaders = kThreads / kWarpLanes - 1 - (kMergesApart ? 0 : kMergers);

  Item items[kPlaces][kHeads];
  Barrier full[kPlaces];
  Barrier empty[kPlaces];

  // By one lane.
  __device__ void make_barriers() {
    for (u32 place = 0; place < kPlaces; ++place) {
      make_barrier(full[place], 1);
      make_barrier(empty[place], kReaders);
    }
  }

  __device__ static u32 parity_of(u32 count) { return count / kPlaces % 2; }

  __device__ const Item& at(u32 count, int head) const { return items[count % kPlaces][head]; }

  // Whether there is such an item, which must be known.
  __device__ bool has(u32 count) const { return !at(count, 0).is_none(); }

  // Waits until it is known. All warps that read items wait for each of them but the first, of
  // which they learn when they begin.
  __device__ void await(u32 count) const {
    wait_for(full[count % kPlaces], parity_of(count));
    __syncwarp();  // before barriers of whole warps
  }

  // By a whole warp that has read the item for the last time. The place of what comes last is not
  // wanted again.
  __device__ void release(u32 count) const {
    fence_acq_rel_cta();  // else the arrival overtakes reads
    __syncwarp();
    if (lane_index() == 0) arrive_at(empty[count % kPlaces]);
  }

  // By the warp that finds items: those of all heads.
  __device__ void write(u32 count, const Item& first) {
    if (lane_index() < kHeads) {
      Item& target = items[count % kPlaces][lane_index()];
      target = first;
      target.kv_head += lane_index();
    }
    __syncwarp();
  }

  __device__ void await_place(u32 count) const {
    wait_for(empty[count % kPlaces], parity_of(count) ^ 1);
  }

  // Item 0 as well, which nobody awaits: else the next one in its place would seem to be there.
  __device__ void publish(u32 count) const {
    if (lane_index() == 0) arrive_at(full[count % kPlaces]);
  }
};

// The shared memory of a block, whole.

// What a warp has of a row, besides values.
struct RowState {
  float reference;  // log2 units; what values and sum are relative to
  float sum;  // of probabilities
};

// Rows of values are 16 bytes longer than their elements, so that a warp that writes its
// accumulators writes to all banks.
constexpr int kMergePitch = kMergeDims + 4;

struct SharedMemory {
  unsigned char tokens[kStages][kTileBytes];  // keys, values, keys, ...
  float merged[kConsumerWarps][kMergeGroups][8][kMergePitch];  // of each warp
  RowState states[kConsumerWarps][kMergeGroups][8];
  // By lanes, as each multiplies it, and what undoes a row's scaling; if it is not in registers.
  uint2 query[kKeepsQuery ? 1 : kRowGroups][kKeepsQuery ? 1 : kDimTiles][kKeepsQuery ? 1 : 32];
  float query_factors[kKeepsQuery ? 1 : kRows];
  ItemRing items;
  bool is_start_right;
  Barrier stage_full[kStages];
  Barrier stage_empty[kStages];
  u32 nonfinite_items[2];  // the count, of each parity, that has values restored
  int is_last_piece;
};
static_assert(sizeof(SharedMemory) <= kSharedBytes, "the spec knows what the struct takes");

// By one warp.
__device__ inline void make_barriers(const Params& params, SharedMemory& shared) {
  if (lane_index() == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      make_barrier(shared.stage_full[stage], 1);
      make_barrier(shared.stage_empty[stage], kConsumerWarps);
    }
    shared.items.make_barriers();
    fence_mbarrier_init();
    shared.nonfinite_items[0] = shared.nonfinite_items[1] = ~0u;
    prefetch_tensormap(&params.key_map);
    prefetch_tensormap(&params.value_map);
  }
  __syncwarp();
}

// A scale is a number, or a tensor of one element that only the device knows.

__device__ inline float value_of(const float* tensor, float number) {
  return tensor == nullptr ? number : *tensor;
}

// How the statistics of a softmax row become its scale and its LSE.

struct RowResult {
  float factor;  // multiplies the accumulated values
  float lse;  // the sink included; of an empty row its sink, or minus infinity
};

// `reference` in log2 units, `sum` relative to it; `sink` is a natural-log logit without a value,
// or minus infinity. `lse_factor` brings log2 units to the base of the LSE.
__device__ inline RowResult finish_row(float reference, float sum, float sink,
                                       float lse_factor = 1.0f) {
  // Not by way of log2 units: a finite sink may overflow there, and not in base e.
  const float sink_lse = sink * (kLog2E * lse_factor);
  if (sum == 0.0f) return {0.0f, sink_lse};  // the row attends to nothing; a NaN is not nothing
  // Fused, so that only the distance may overflow, to an infinity of the right sign.
  const float distance = fmaf(sink, kLog2E, -reference);
  // Relative to the larger of the two, because 2^distance may overflow. Selects, for a NaN is kept.
  const bool is_sink_larger = distance > 0.0f;
  const float rescale = is_sink_larger ? ex2_approx(-distance) : 1.0f;
  const float total = sum * rescale + (is_sink_larger ? 1.0f : ex2_approx(distance));
  // Approximate: exact to some 22 bits, and a fraction of the instructions.
  const float log2_total = __log2f(total);
  return {__fdividef(rescale, total), is_sink_larger ? sink_lse + log2_total * lse_factor
                                                     : (reference + log2_total) * lse_factor};
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

// Four neighbouring elements of an output, from float.

// `index` counts elements, and is a multiple of 4.
template <typename Target>
__device__ inline void store_x4(Target target, unsigned char* out, i64 index, float a, float b,
                                float c, float d) {
  uint2 packed;
  packed.x = cvt_rn_x2_f32(target, b, a);
  packed.y = cvt_rn_x2_f32(target, d, c);
  *reinterpret_cast<uint2*>(out + index * 2) = packed;
}

// Where rows go: into the output, or into the workspace as those of a piece.

// Each block of the grid has two places for pieces of each of its heads: for the one that its span
// begins with, and for the one that it ends with.
__device__ inline int place_of_piece(const Params& params, const Item& item, int piece) {
  const int place = (item.first_block + piece * params.team_size) * 2 + (piece == 0 ? 1 : 0);
  return place * kHeads + item.kv_head % kHeads;
}

__device__ inline RowState* piece_states(const Params& params, int place) {
  return reinterpret_cast<RowState*>(params.partial_rows) + place * kRows;
}

// Four neighbouring values of a row of a piece.
__device__ inline float4* piece_values(const Params& params, int place, int row, int dim) {
  return reinterpret_cast<float4*>(params.partial_out +
                                   (place * kRows + row) * static_cast<i64>(kHeadDim) + dim);
}

__device__ inline float4 add_weighted(float4 total, float4 value, float weight) {
  return make_float4(total.x + value.x * weight, total.y + value.y * weight,
                     total.z + value.z * weight, total.w + value.w * weight);
}

// Four neighbouring elements of a finished row.
__device__ inline void store_finished(const Params& params, const Item& item, int row, int dim,
                                      RowState state, float4 values) {
  const float sink = params.sinks == nullptr ? -kInfinity : params.sinks[item.head_of(params, row)];
  const float scale = value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor;
  const float factor = finish_row(state.reference, state.sum, sink).factor * scale;
  store_x4(OutElement{}, params.out, item.global_row(params, row) * kHeadDim + dim,
           values.x * factor, values.y * factor, values.z * factor, values.w * factor);
}

// Merging the pieces of a unit: the block that comes last adds up what all have left, in the
// order of the pieces. Nobody waits.

constexpr int kPiecesAtATime = 8;  // that are under way together

__device__ inline void merge_row(const Params& params, const Item& item, int row, int dim) {
  RowState state = {-kLargest, 0.0f};
  float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int first = 0; first < item.pieces; first += kPiecesAtATime) {
    float2 states[kPiecesAtATime];
    float4 parts[kPiecesAtATime];
#pragma unroll
    for (int i = 0; i < kPiecesAtATime; ++i) {
      // Behind the last piece it comes once more, and counts for nothing.
      const int place = place_of_piece(params, item, min(first + i, item.pieces - 1));
      states[i] = ld_global_cg_v2_f32(piece_states(params, place) + row);
      parts[i] = ld_global_cg_v4_f32(piece_values(params, place, row, dim));
    }
    float next = state.reference;
#pragma unroll
    for (int i = 0; i < kPiecesAtATime; ++i) next = fmaxf(next, states[i].x);
    const float before = ex2_approx(state.reference - next);
    state = {next, state.sum * before};
    values =
        make_float4(values.x * before, values.y * before, values.z * before, values.w * before);
#pragma unroll
    for (int i = 0; i < kPiecesAtATime; ++i) {
      if (first + i >= item.pieces) continue;
      const float weight = ex2_approx(states[i].x - next);
      state.sum += states[i].y * weight;
      values = add_weighted(values, parts[i], weight);
    }
  }
  store_finished(params, item, row, dim, state, values);
}

// By all consumers, each of its head, after all have left their part of this piece.
__device__ inline void merge_pieces(const Params& params, const Item& item, int head_thread,
                                    SharedMemory& shared) {
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (threadIdx.x == 0) {
    u32* arrivals = params.counters + item.first_block;
    const u32 others = static_cast<u32>(item.pieces - 1);
    const bool is_last = atom_add_acq_rel_gpu(arrivals, 1) == others;
    if (is_last) *arrivals = 0;  // for the next launch
    shared.is_last_piece = is_last;
  }
  __syncwarp();
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (!shared.is_last_piece) return;
  constexpr int kQuads = kHeadDim / 4;
#pragma unroll 1
  for (int task = head_thread; task < item.rows * kQuads; task += kHeadThreads) {
    merge_row(params, item, task / kQuads, task % kQuads * 4);
  }
}

// PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol". Needs sm_90.
// Both do nothing in a launch without the programmatic-stream-serialization attribute.

// griddepcontrol.wait
// Waits until the kernel before this one has finished and its writes are visible.
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents
// Lets the next kernel start once every block has said so or ended.
__device__ inline void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Programmatic dependent launch (PDL): starts while the preceding kernel drains.

__device__ inline void wait_for_previous_kernel() { griddepcontrol_wait(); }
__device__ inline void let_next_kernel_start() { griddepcontrol_launch_dependents(); }

// What a lane has of rows, tokens and dims, and where tokens lie in a tile.

// Tokens, or output dims, are the rows of a product, and rows of the query its columns: eight of
// those are enough to fill it.
using QueryRow = uint2[kDimTiles];  // a lane's part of a row
using Scores = float[kSteps][kRowGroups][4];
using Probabilities = u32[kSteps][kRowGroups][2];
using Output = float[kDimTiles][kRowGroups][4];

// The row of column `r` of a lane's accumulators, and of its part of the query.
__device__ inline int own_row(int group, int r) { return group * 8 + lane_index() % 4 * 2 + r; }
__device__ inline int query_row(int group) { return group * 8 + lane_index() / 4; }

// The token of accumulators `half * 2` and `half * 2 + 1`, among the warp's.
__device__ inline int own_token(int step, int half) {
  return step * kStepTokens + half * 8 + lane_index() / 4;
}

// A warp's kv head among the block's, and its place among the warps that have the same.
__device__ inline int head_of_warp(int warp) { return warp % kHeads; }
__device__ inline int place_of_warp(int warp) { return warp / kHeads; }

// The first of a warp's tokens of a tile.
__device__ inline int first_of_warp(int warp) { return place_of_warp(warp) * kWarpTokens; }

// Where a token of a tile begins, in the first column of a box's first head.
__device__ inline u32 token_offset(int token) {
  return static_cast<u32>(token / kBoxTokens * kBoxBytes + token % kBoxTokens * kLineBytes);
}

// How the chunks of a token are permuted among themselves: by exclusive or.
__device__ inline u32 swizzle_of(int token) {
  return static_cast<u32>(kLineBytes == 128 ? token & 7 : token >> 1 & 3) * kChunkBytes;
}

// Where a lane finds its row of the four matrices of an ldmatrix: tokens 0 to 7 and 8 to 15 of a
// step, in either of two neighbouring chunks.
struct MatrixRows {
  u32 offset;

  // Of lanes 0 to 7, 8 to 15 and so on: which half of the tokens, and which chunk.
  __device__ MatrixRows(int warp, int half, int chunk) {
    const int token = first_of_warp(warp) + half * 8 + lane_index() % 8;
    offset = head_of_warp(warp) * kHeadBytes + token_offset(token) +
             (swizzle_of(token) ^ chunk * kChunkBytes);
  }

  // Of pair `pair` of chunks, counted through all columns.
  __device__ u32 at(const unsigned char* tile, int step, int pair) const {
    constexpr int kLinePairs = kLineBytes / (2 * kChunkBytes);
    return shared_address(tile) + (offset ^ pair % kLinePairs * 2 * kChunkBytes) +
           pair / kLinePairs * kColumnBytes + token_offset(step * kStepTokens);
  }
};

// Both halves of the tokens and then the next chunk; both chunks and then the next tokens: as the
// first operand of mma has its parts in either product.
__device__ inline MatrixRows key_rows(int warp) {
  return MatrixRows(warp, lane_index() / 8 % 2, lane_index() / 16);
}
__device__ inline MatrixRows value_rows(int warp) {
  return MatrixRows(warp, lane_index() / 16, lane_index() / 8 % 2);
}

constexpr int kChunkPairs = kRowBytes / (2 * kChunkBytes);

// Where a token of a request lies in the paged cache.

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

constexpr int kMostTokens = 0x7fff0000;  // a tile more can still be counted

// How many tokens a request of length `length` has in a table of `pages` pages: a length beyond the
// table, or a negative one, is read as the nearest that the table can hold.
__device__ inline int tokens_held(i64 length, i64 pages) {
  constexpr i64 kMost = kMostTokens;
  return static_cast<int>(max(static_cast<i64>(0), min(min(length, pages * kPageSize), kMost)));
}

// An id outside the cache must not fault.
__device__ inline bool is_page(int page, int num_pages) {
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

// The products where keys and values are stored as they are multiplied.

// A lane's part of 16 elements of the query: those that it has of a key.
__device__ inline uint2 fragment_of(const u16* source) {
  const u32* pairs = reinterpret_cast<const u32*>(source) + lane_index() % 4;
  return make_uint2(pairs[0], pairs[4]);
}

// The query is multiplied as it is.
constexpr bool kScalesQuery = false;
__device__ inline float fit_row(QueryRow&) { return 1.0f; }

// Scores of one step: S^T = K Q^T.
template <typename Query>
__device__ inline void multiply_keys(const MatrixRows& rows, const unsigned char* keys, int step,
                                     const Query& query, float (&scores)[kRowGroups][4]) {
  constexpr int kChains = kRowGroups == 1 ? 2 : 1;  // products that do not wait for each other
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

// Adds one step to the output: O^T += V^T P^T. Returns a word made of all that has been read.
__device__ inline u32 add_values(const MatrixRows& rows, const unsigned char* values, int step,
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
  u32 read = 0;  // of sums, for words of all matrices would take registers
#pragma unroll
  for (int pair = 0; pair < kChunkPairs; ++pair) read ^= __float_as_uint(output[pair][0][0]);
  return read;
}

// The dim of accumulators `half * 2` and `half * 2 + 1` of a tile of dims.
__device__ inline int own_dim(int tile, int half) {
  return tile * 16 + half * 8 + lane_index() / 4;
}

// A chunk with zeros for what is not finite.
__device__ inline Chunk finite_part(Chunk chunk) {
  constexpr u32 kExponent = kIsSame<Element, Fp16> ? 0x7c00 : 0x7f80;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    u32& pair = chunk.words[word];
    if ((pair & kExponent) == kExponent) pair &= 0xffff0000;
    if ((pair >> 16 & kExponent) == kExponent) pair &= 0xffff;
  }
  return chunk;
}

// A stored element.
__device__ inline float element_at(const unsigned char* row, int dim) {
  return cvt_f32(Element{}, reinterpret_cast<const u16*>(row)[dim]);
}

// Leaves a warp's accumulators of eight rows and kMergeDims dims in `merged`.
__device__ inline void write_merged(const Output& output, int group, int first_tile,
                                    float (&merged)[8][kMergePitch]) {
#pragma unroll
  for (int tile = 0; tile < kMergeDims / 16; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      merged[own_row(0, e % 2)][own_dim(tile, e / 2)] = output[first_tile + tile][group][e];
    }
  }
}

// Keeps values that rows do not see out of products: 0 * NaN is NaN.

// Chunk `chunk` of a token of a tile that a warp has.
__device__ inline Chunk* chunk_at(unsigned char* tile, int warp, int own_token, int chunk) {
  constexpr int kLineChunks = kLineBytes / kChunkBytes;
  const int token = first_of_warp(warp) + own_token;
  unsigned char* head = tile + head_of_warp(warp) * kHeadBytes;
  const u32 place = static_cast<u32>(chunk % kLineChunks * kChunkBytes) ^ swizzle_of(token);
  return reinterpret_cast<Chunk*>(head + token_offset(token) + chunk / kLineChunks * kColumnBytes +
                                  place);
}

// Looks after the tokens that not all rows see, of those that this warp has of a tile. What nobody
// sees is cleared, and so is of the others what is not finite; says whether there was such, which
// rows that see it must still get.
__device__ inline bool clear_hidden(const Item& item, int first_token, int warp,
                                    unsigned char* tile) {
  constexpr int kChunks = kRowBytes / kChunkBytes;
  const Sight all = {item.all_begin, item.all_end};
  const Sight any = {item.any_begin, item.any_end};
  bool has_nonfinite = false;
  // Not unrolled: a rare path must not take registers from the loop over tokens.
#pragma unroll 1
  for (int i = lane_index(); i < kWarpTokens * kChunks; i += kWarpLanes) {
    const int token = first_token + i / kChunks;
    if (all.has(token)) continue;
    Chunk* chunk = chunk_at(tile, warp, i / kChunks, i % kChunks);
    Chunk kept{};
    if (any.has(token)) {
      const Chunk stored = *chunk;
      kept = finite_part(stored);
#pragma unroll
      for (int word = 0; word < 4; ++word) has_nonfinite |= kept.words[word] != stored.words[word];
    }
    *chunk = kept;
  }
  // What is copied here next comes after this.
  fence_proxy_async();
  __syncwarp();  // and all of it is there for all lanes
  return __any_sync(~0u, has_nonfinite);
}

// Adds what is not finite of a token that not all rows see: times any probability it is the same.
__device__ inline float4 add_nonfinite(const Params& params, const Item& item, int row, int dim,
                                       int token, float4 values) {
  if (!item.sees(params, row, token)) return values;
  const int* ids =
      params.block_tables + item.request * static_cast<i64>(params.block_tables_stride);
  const int page = ids[token / kPageSize];
  if (!is_page(page, params.num_pages)) return values;
  const PagedRows cached{params.value_cache + item.kv_head * params.value_head_stride,
                         params.value_page_stride, params.value_token_stride};
  const unsigned char* from = cached.row_of(page, token % kPageSize);
  float* sums[4] = {&values.x, &values.y, &values.z, &values.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float element = element_at(from, dim + i);
    if (!(fabsf(element) < kInfinity)) *sums[i] += element;
  }
  return values;
}

// All of it that the tiles of an item have, for four neighbouring values of a row.
__device__ inline float4 restore_nonfinite(const Params& params, const Item& item, int row, int dim,
                                           float4 values) {
  const int begin = max(item.any_begin, item.first_tile * kTileTokens);
  const int end = min(item.any_end, (item.first_tile + item.tiles) * kTileTokens);
#pragma unroll 1
  for (int token = begin; token < min(item.all_begin, end); ++token) {
    values = add_nonfinite(params, item, row, dim, token, values);
  }
#pragma unroll 1
  for (int token = max(max(begin, item.all_begin), item.all_end); token < end; ++token) {
    values = add_nonfinite(params, item, row, dim, token, values);
  }
  return values;
}

// The rows of an item's query, as a lane multiplies them: in its registers, or in shared memory
// for all warps. Where there are registers for them, they are asked for before the item begins:
// memory that is busy takes long to answer.

__device__ inline void load_row(const Params& params, const Item& item, int group, QueryRow& part) {
  const int row = query_row(group);
  const bool is_row = row < item.rows;
  const i64 token = item.first_query + (is_row ? item.query_of(params, row) : 0);
  const int head = is_row ? item.head_of(params, row) : 0;
  const u16* source = params.query + token * params.query_stride + head * params.query_head_stride;
#pragma unroll
  for (int k = 0; k < kDimTiles; ++k) {
    part[k] = is_row ? fragment_of(source + k * 16) : make_uint2(0, 0);
  }
}

struct KeptQuery {
  static constexpr bool kAsksAhead = true;  // before the item begins

  QueryRow rows[kRowGroups];
  QueryRow next_rows[kRowGroups];  // of the next item, under way
  float undone[kRowGroups];  // of the lane's row of each group

  __device__ explicit KeptQuery(const SharedMemory&) {}

  // By each warp for itself.
  __device__ void begin(const Params& params, const Item& item, int) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) load_row(params, item, n, next_rows[n]);
  }

  __device__ void finish(const Params&, const Item&, int, SharedMemory&) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) rows[n][k] = next_rows[n][k];
      undone[n] = fit_row(rows[n]);
    }
  }

  __device__ uint2 at(int group, int k) const { return rows[group][k]; }

  // What undoes the scaling of the row in column `r` of a lane's accumulators.
  __device__ float undone_of(int group, int r) const {
    return kScalesQuery ? __shfl_sync(~0u, undone[group], own_row(0, r) * 4) : 1.0f;
  }
};

struct SharedQuery {
  static constexpr bool kAsksAhead = false;

  const SharedMemory& shared;

  __device__ explicit SharedQuery(const SharedMemory& target) : shared(target) {}

  __device__ void begin(const Params&, const Item&, int) {}

  // By all consumers, of which some bring a group each.
  __device__ void finish(const Params& params, const Item& item, int warp, SharedMemory& target) {
    // Nobody multiplies by the one before: warps that merge have met since.
    if constexpr (kMergesApart) barrier_sync(kConsumerBarrier, kConsumerThreads);
    if (warp < kRowGroups) {
      QueryRow part;
      load_row(params, item, warp, part);
      const float undone = fit_row(part);
      if (lane_index() % 4 == 0) target.query_factors[query_row(warp)] = undone;
#pragma unroll
      for (int k = 0; k < kDimTiles; ++k) target.query[warp][k][lane_index()] = part[k];
    }
    barrier_sync(kConsumerBarrier, kConsumerThreads);
  }

  __device__ uint2 at(int group, int k) const { return shared.query[group][k][lane_index()]; }

  __device__ float undone_of(int group, int r) const {
    return kScalesQuery ? shared.query_factors[own_row(group, r)] : 1.0f;
  }
};

template <bool kKeeps>
struct QueryChoice {
  using Type = KeptQuery;
};
template <>
struct QueryChoice<false> {
  using Type = SharedQuery;
};
using Query = QueryChoice<kKeepsQuery>::Type;

// PTX ISA, "Warp Level Matrix Instructions: movmatrix". Needs sm_75.

// movmatrix.sync.aligned.m8n8.trans.b16
// The matrix of which `a` is this lane's fragment, its rows as columns.
__device__ inline u32 movmatrix_trans(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// Softmax over the tokens of one warp, whose references are its own.

// A row's probabilities are relative to its reference. No maximum is asked for while no score
// exceeds it by more than this in log2 units, so that references move seldom.
constexpr float kReferenceSlack = 8.0f;

// Sums are over this lane's tokens only.
struct Softmax {
  float reference[kRowGroups][2];  // log2 units
  float sum[kRowGroups][2];

  __device__ Softmax() {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        reference[n][r] = -kLargest;
        sum[n][r] = 0.0f;
      }
    }
  }

  // Turns scores in log2 units into probabilities, and adds them up.
  __device__ void update(Scores& scores, Output& output) {
    if (__any_sync(~0u, exceeds(scores))) move_references(scores, output);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& score = scores[step][n][e];
          score = ex2_approx(score - reference[n][e % 2]);
          sum[n][e % 2] += score;
        }
      }
    }
  }

  // Whether a score exceeds its reference by too much, as any does that is the first of its row.
  __device__ bool exceeds(const Scores& scores) const {
    float largest = 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          largest = fmaxf(largest, scores[step][n][e] - reference[n][e % 2]);
        }
      }
    }
    return largest > kReferenceSlack;
  }

  // Moves the reference of every row to its maximum, if that is larger.
  __device__ void move_references(const Scores& scores, Output& output) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float maximum = -kInfinity;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          maximum = fmaxf(maximum, fmaxf(scores[step][n][r], scores[step][n][2 + r]));
        }
#pragma unroll
        for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
          maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, lanes));
        }
        const float next = fmaxf(maximum, reference[n][r]);
        const float moved = ex2_approx(reference[n][r] - next);
        reference[n][r] = next;
        sum[n][r] *= moved;
#pragma unroll
        for (int tile = 0; tile < kDimTiles; ++tile) {
          output[tile][n][r] *= moved;
          output[tile][n][2 + r] *= moved;
        }
      }
    }
  }

  // Leaves this warp's rows of a group in shared memory.
  __device__ void publish(int group, RowState (&states)[8]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[group][r];
#pragma unroll
      for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
        total += __shfl_xor_sync(~0u, total, lanes);
      }
      if (lane_index() < 4) states[own_row(0, r)] = {reference[group][r], total};
    }
  }
};

// What scores are multiplied by, in log2 units.
struct ScoreFactors {
  float each[kScalesQuery ? kRowGroups : 1][2];

  __device__ ScoreFactors(const Query& query, float factor) {
#pragma unroll
    for (int n = 0; n < (kScalesQuery ? kRowGroups : 1); ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) each[n][r] = factor * query.undone_of(n, r);
    }
  }

  __device__ float of(int group, int r) const { return kScalesQuery ? each[group][r] : each[0][0]; }
};

__device__ inline void scale_scores(const ScoreFactors& factors, Scores& scores) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // Rounded, never fused: equal scores must have equal distances from a reference.
        scores[step][n][e] = __fmul_rn(scores[step][n][e], factors.of(n, e % 2));
      }
    }
  }
}

// Hides what a draft mask does.
__device__ inline void hide_by_mask(const Params& params, const Item& item, int first_token,
                                    Scores& scores) {
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = own_row(n, e % 2);
      if (row >= item.rows) continue;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int token = first_token + own_token(step, e / 2);
        if (!item.is_shown(params, row, token)) scores[step][n][e] = -kInfinity;
      }
    }
  }
}

// Hides what rows do not see: a select, for the hidden score may be NaN.
__device__ inline void hide_scores(const Params& params, const Item& item, int first_token,
                                   Scores& scores) {
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Sight sight = item.sight_of(params, own_row(n, r));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int token = first_token + own_token(step, half);
          if (!sight.has(token)) scores[step][n][half * 2 + r] = -kInfinity;
        }
      }
    }
  }
  if (params.draft_mask != nullptr) hide_by_mask(params, item, first_token, scores);
}

// Probabilities as the next product takes them: tokens along its depth, rows as columns.
__device__ inline void turn_probabilities(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int n = 0; n < kRowGroups; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* of = scores[step][n] + half * 2;
        probabilities[step][n][half] = movmatrix_trans(cvt_rn_x2_f32(Element{}, of[1], of[0]));
      }
    }
  }
}

// Adds up what the consumer warps of a block have of an item, kMergeRows and kMergeDims at a
// time: by themselves, or by the mergers, warps that do nothing else.

// Four neighbouring values of row `row` of those, from all warps that have kv head `head` of the
// block's.
__device__ inline float4 merged_values(const SharedMemory& shared, int head, int row, int dim,
                                       RowState& state) {
  RowState states[kHeadWarps];
  state = {-kLargest, 0.0f};
#pragma unroll
  for (int place = 0; place < kHeadWarps; ++place) {
    states[place] = shared.states[place * kHeads + head][row / 8][row % 8];
    state.reference = fmaxf(state.reference, states[place].reference);
  }
  float4 values = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int place = 0; place < kHeadWarps; ++place) {
    const float weight = ex2_approx(states[place].reference - state.reference);
    state.sum += states[place].sum * weight;
    const float4 part = *reinterpret_cast<const float4*>(
        &shared.merged[place * kHeads + head][row / 8][row % 8][dim]);
    values = add_weighted(values, part, weight);
  }
  return values;
}

// Four neighbouring values of a row, which is finished if the item is a whole unit.
__device__ inline void store_merged(const Params& params, const Item& item, int row, int dim,
                                    RowState state, float4 values) {
  if (item.pieces == 1) return store_finished(params, item, row, dim, state, values);
  const int place = place_of_piece(params, item, item.piece);
  *piece_values(params, place, row, dim) = values;
  if (dim == 0) piece_states(params, place)[row] = state;
}

// Leaves a warp's part of what is merged at a time in shared memory.
__device__ inline void write_part(int first_row, int first_dim, int warp, const Softmax& softmax,
                                  const Output& output, SharedMemory& shared) {
#pragma unroll
  for (int n = 0; n < kRowGroups; ++n) {
    const int place = n % kMergeGroups;
    if ((n - place) * 8 != first_row) continue;
    softmax.publish(n, shared.states[warp][place]);
#pragma unroll
    for (int dim = 0; dim < kHeadDim; dim += kMergeDims) {
      if (dim == first_dim) write_merged(output, n, dim / 16, shared.merged[warp][place]);
    }
  }
}

// Of what is merged at a time of a head, those values that are thread `thread`'s of `threads`.
__device__ inline void merge_parts(const Params& params, const Item& item, u32 count, int first_row,
                                   int first_dim, int thread, int threads,
                                   const SharedMemory& shared) {
  constexpr int kQuads = kMergeDims / 4;
#pragma unroll 1
  for (int task = thread; task < kMergeRows * kQuads; task += threads) {
    const int row_in_part = task / kQuads;
    const int row = first_row + row_in_part;
    if (row >= item.rows) break;
    const int dim_in_part = task % kQuads * 4;
    const int dim = first_dim + dim_in_part;
    RowState state;
    float4 values = merged_values(shared, item.kv_head % kHeads, row_in_part, dim_in_part, state);
    if (shared.nonfinite_items[count % 2] == count) {
      values = restore_nonfinite(params, item, row, dim, values);
    }
    store_merged(params, item, row, dim, state, values);
  }
}

// A thread's place among those that merge what their own head's warps have left.
__device__ inline int head_thread(int warp) {
  return place_of_warp(warp) * kWarpLanes + lane_index();
}

__device__ inline void merge_warps(const Params& params, const Item& item, int warp, u32 count,
                                   const Softmax& softmax, const Output& output,
                                   SharedMemory& shared) {
  // Not unrolled, for the sake of the instructions' cache.
#pragma unroll 1
  for (int first_row = 0; first_row < item.rows; first_row += kMergeRows) {
#pragma unroll 1
    for (int first_dim = 0; first_dim < kHeadDim; first_dim += kMergeDims) {
      barrier_sync(kConsumerBarrier, kConsumerThreads);  // nobody reads any more
      write_part(first_row, first_dim, warp, softmax, output, shared);
      barrier_sync(kConsumerBarrier, kConsumerThreads);
      merge_parts(params, item, count, first_row, first_dim, head_thread(warp), kHeadThreads,
                  shared);
      __syncwarp();
    }
  }
}

// Whether the mergers merge an item: one that is a whole unit, and that another follows. What comes
// last is done sooner by all consumers; and after what they merge themselves they must have met
// before they leave more, as they do where they merge pieces.
__device__ inline bool is_merged_apart(const Item& item, bool has_next) {
  return kMergesApart && item.pieces == 1 && has_next;
}

// For consumers: what they have left for the mergers has been merged.
__device__ inline void await_mergers(bool& are_merging) {
  if (are_merging) barrier_sync(kPartsEmptyBarrier, kConsumerThreads + kMergerThreads);
  are_merging = false;
}

// Leaves an item to the mergers.
__device__ inline void leave_parts(int warp, const Softmax& softmax, const Output& output,
                                   SharedMemory& shared) {
  write_part(0, 0, warp, softmax, output, shared);
  barrier_arrive(kPartsFullBarrier, kConsumerThreads + kMergerThreads);
}

// The mergers: every item that is merged apart.
__device__ inline void merge_items(const Params& params, SharedMemory& shared) {
  const ItemRing& items = shared.items;
  do {
    __syncwarp();
    barrier_sync(kStartBarrier, kThreads);
    barrier_sync(kCheckedBarrier, kThreads);
  } while (!shared.is_start_right);
  if (!kMergesApart || !items.has(0)) return;
  wait_for_previous_kernel();
  const int thread = static_cast<int>(threadIdx.x) - kFirstMerger * kWarpLanes;
#pragma unroll 1
  for (u32 count = 0;; ++count) {
    items.await(count + 1);
    const bool has_next = items.has(count + 1);
    if (is_merged_apart(items.at(count, 0), has_next)) {
      barrier_sync(kPartsFullBarrier, kConsumerThreads + kMergerThreads);
#pragma unroll 1
      for (int head = 0; head < kHeads; ++head) {
        merge_parts(params, items.at(count, head), count, 0, 0, thread, kMergerThreads, shared);
      }
      __syncwarp();
      barrier_arrive(kPartsEmptyBarrier, kConsumerThreads + kMergerThreads);
    }
    if (!has_next) return;
    items.release(count);
  }
}

// What products of query and key are multiplied by, in the natural domain.

__device__ inline float score_scale(const Params& params) {
  const float scale = value_of(params.bmm1_scale_tensor, params.bmm1_scale);
  return params.scores_take_bmm2 ? scale * value_of(params.bmm2_scale_tensor, params.bmm2_scale)
                                 : scale;
}

// The consumers: each warp attends to tokens of its own in every tile, with no word to the other
// consumers until an item ends.

// A word made of all keys that have been multiplied.
__device__ inline u32 word_of(const Scores& scores) {
  u32 word = 0;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) word ^= __float_as_uint(scores[step][0][0]);
  return word;
}

// `read` is made of all that the lane has read.
__device__ inline void release(const Barrier& empty, u32 read) {
  __syncwarp();  // all lanes have read
  if (lane_index() == 0) arrive_after(empty, read);
}

// Goes by a stage of which this warp needs nothing. It waits all the same: who releases what has
// not come yet could do so twice before the loader looks.
__device__ inline void skip_stage(SharedMemory& shared, RingPosition<kStages>& position) {
  wait_for(shared.stage_full[position.stage], position.parity);
  release(shared.stage_empty[position.stage], 0);
  position.advance();
}

// Item `count` of the block, whose query has been asked for; asks for the next one's. Says whether
// there is one.
__device__ inline bool consume_item(const Params& params, int warp, float factor, u32 count,
                                    Query& query, bool& are_merging, SharedMemory& shared,
                                    RingPosition<kStages>& position) {
  const ItemRing& items = shared.items;
  const int head = head_of_warp(warp);
  const Item& item = items.at(count, head);
  const MatrixRows key_matrices = key_rows(warp);
  const MatrixRows value_matrices = value_rows(warp);
  query.finish(params, item, warp, shared);
  const ScoreFactors factors(query, factor);
  Softmax softmax;
  Output output = {};
  const int all_begin = item.all_begin;
  const int all_end = item.all_end;
  int first_token = item.first_tile * kTileTokens + first_of_warp(warp);
#pragma unroll 1
  for (int tile = max(item.tiles, 1); tile > 0; --tile, first_token += kTileTokens) {
    if (tile == 1) {
      if constexpr (Query::kAsksAhead) {
        items.await(count + 1);
        if (items.has(count + 1)) query.begin(params, items.at(count + 1, head), warp);
      }
      if (item.tiles == 0) break;
    }
    const int end_token = first_token + kWarpTokens;
    const bool has_boundary = first_token < all_begin || end_token > all_end;
    if (has_boundary && (end_token <= item.any_begin || first_token >= item.any_end)) {
      skip_stage(shared, position);
      skip_stage(shared, position);
      continue;
    }
    Scores scores;
    wait_for(shared.stage_full[position.stage], position.parity);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      multiply_keys(key_matrices, shared.tokens[position.stage], step, query, scores[step]);
    }
    release(shared.stage_empty[position.stage], word_of(scores));
    position.advance();

    scale_scores(factors, scores);
    if (has_boundary) hide_scores(params, item, first_token, scores);
    softmax.update(scores, output);
    Probabilities probabilities;
    turn_probabilities(scores, probabilities);

    unsigned char* values = shared.tokens[position.stage];
    wait_for(shared.stage_full[position.stage], position.parity);
    if (has_boundary && clear_hidden(item, first_token, warp, values)) {
      shared.nonfinite_items[count % 2] = count;
    }
    u32 read = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      read ^= add_values(value_matrices, values, step, probabilities[step], output);
    }
    release(shared.stage_empty[position.stage], read);
    position.advance();
  }
  if constexpr (!Query::kAsksAhead) items.await(count + 1);
  const bool has_next = items.has(count + 1);
  await_mergers(are_merging);
  if (is_merged_apart(item, has_next)) {
    leave_parts(warp, softmax, output, shared);
    are_merging = true;
  } else {
    merge_warps(params, item, warp, count, softmax, output, shared);
    if (item.pieces > 1) merge_pieces(params, item, head_thread(warp), shared);
  }
  items.release(count);
  return has_next;
}

// All items of the block.
__device__ inline void consume_tokens(const Params& params, int warp, SharedMemory& shared) {
  const ItemRing& items = shared.items;
  Query query(shared);
  do {
    __syncwarp();
    barrier_sync(kStartBarrier, kThreads);
    wait_for_previous_kernel();
    if (items.has(0)) query.begin(params, items.at(0, head_of_warp(warp)), warp);
    __syncwarp();
    barrier_sync(kCheckedBarrier, kThreads);
  } while (!shared.is_start_right);
  if (!items.has(0)) return;
  const float factor = score_scale(params) * params.score_factor * kLog2E;
  RingPosition<kStages> position;
  bool are_merging = false;
  u32 count = 0;
  while (consume_item(params, warp, factor, count, query, are_merging, shared, position)) ++count;
}

// PTX ISA, "Data Movement and Conversion Instructions: createpolicy". Needs sm_80.

// createpolicy.fractional.L2::evict_first.b64
// Lines that are evicted from L2 before others.
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

// How long lines of a cache stay in L2. What nobody reads again leaves first, so that queries
// stay, and outputs need not be written out between reads, which costs memory far more than
// their bytes.

__device__ inline u64 policy_of_lines(bool are_read_again) {
  return are_read_again ? createpolicy_evict_normal() : createpolicy_evict_first();
}

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk". Needs sm_90.
// `map` is the generic address of a tensor map, `policy` one of createpolicy for L2; x, y, z, w, v
// count elements, the innermost first.

// cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
// Copies a box to shared memory, zeros for what lies outside the tensor, and then counts its bytes
// as arrived at the barrier.
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
// Brings a box into L2.
__device__ inline void cp_async_bulk_prefetch_tensor(const void* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// The loader, one warp: streams the tiles of keys and values of every item through the ring.

// A lane copies one box of every kWindowTiles-th tile, of which it reads the page ids ahead.
constexpr int kWindowTiles = kWarpLanes / kTileBoxes;

struct Boxes {
  const int* ids;  // of the request's pages
  int begin;  // boxes that hold a token that some row sees
  int end;
  int box;  // this lane's, counted from the request's first token
  int page;  // its page id
  int next_page;  // that of its next box

  __device__ Boxes() = default;
  __device__ Boxes(const Params& params, const Item& item)
      : ids(params.block_tables + item.request * static_cast<i64>(params.block_tables_stride)),
        begin(item.any_begin / kBoxTokens),
        end(ceil_div(item.any_end, kBoxTokens)),
        box(item.first_tile * kTileBoxes + lane_index()) {
    page = read(box);
    next_page = read(box + kWarpLanes);
  }

  __device__ bool is_inside(int index) const { return index >= begin && index < end; }

  __device__ int read(int index) const {
    return is_inside(index) ? ids[index * kBoxTokens / kPageSize] : 0;
  }

  __device__ void advance() {
    box += kWarpLanes;
    page = next_page;
    next_page = read(box + kWarpLanes);
  }

  // Bytes that come of a tile: boxes that nobody sees are not copied.
  __device__ u32 bytes_of(int tile) const {
    const int first = max(tile * kTileBoxes, begin);
    return static_cast<u32>(min((tile + 1) * kTileBoxes, end) - first) * kBoxBytes;
  }
};

__device__ inline void load_item(const Params& params, const Item& item, Boxes& boxes,
                                 SharedMemory& shared, RingPosition<kStages>& position) {
  const int end = item.first_tile + item.tiles;
  const int own_tile = lane_index() / kTileBoxes;
  const u32 target = lane_index() % kTileBoxes * kBoxBytes;
  const u64 policy = policy_of_lines(params.row_tiles != 1);
#pragma unroll 1
  for (int tile = item.first_tile, in_window = 0; tile < end; ++tile) {
    const bool copies = own_tile == in_window && boxes.is_inside(boxes.box);
    const int slot = boxes.box * kBoxTokens % kPageSize;
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      const u32 full = shared_address(&shared.stage_full[position.stage]);
      wait_for(shared.stage_empty[position.stage], position.parity ^ 1);
      if (lane_index() == 0) mbarrier_arrive_expect_tx(full, boxes.bytes_of(tile));
      __syncwarp();
      if (copies) {
        cp_async_bulk_tensor(shared_address(shared.tokens[position.stage]) + target,
                             part == 0 ? &params.key_map : &params.value_map, full, policy, 0, slot,
                             0, item.kv_head, boxes.page);
      }
      __syncwarp();
      position.advance();
    }
    if (++in_window == kWindowTiles) {
      in_window = 0;
      boxes.advance();
    }
  }
}

// The loader: copies the tokens of all items.
__device__ inline void load_tokens(const Params& params, SharedMemory& shared) {
  const ItemRing& items = shared.items;
  Item item;
  Boxes boxes;
  do {
    __syncwarp();
    barrier_sync(kStartBarrier, kThreads);
    item = items.at(0, 0);
    wait_for_previous_kernel();
    boxes = Boxes(params, item);
    __syncwarp();
    barrier_sync(kCheckedBarrier, kThreads);
  } while (!shared.is_start_right);
  let_next_kernel_start();
  RingPosition<kStages> position;
#pragma unroll 1
  for (u32 count = 0; !item.is_none();) {
    load_item(params, item, boxes, shared, position);
    items.release(count);
    items.await(++count);
    item = items.at(count, 0);
    boxes = Boxes(params, item);
  }
}

// Brings the page ids of all requests into L2, by the consumers: a line for each thread, and for no
// more tables than that are lines.
__device__ inline void prefetch_ids(const Params& params, int thread) {
  constexpr int kLineIds = 32;
  const u32 row_lines = static_cast<u32>(ceil_div(params.max_pages, kLineIds));
  const u32 line = blockIdx.x * kConsumerThreads + thread;
  if (row_lines == 0) return;
  const u32 request = line / row_lines;
  if (request >= params.requests) return;
  prefetch_l2(params.block_tables + request * static_cast<i64>(params.block_tables_stride) +
              (line - request * row_lines) * kLineIds);
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

// The finder, one warp: finds the work of the block, item by item, ahead of those that do it.

// Whether the work may be found before the kernel before has ended: what is read for it then is
// read once more.
__device__ inline bool finds_ahead(const Params& params) {
  return params.cum_seq_lens_q == nullptr && requests_of_lane(params) <= kLaneRequests;
}

// Begins before the kernel before has ended. Then lengths are looked at again, while others ask for
// the first page ids and the first query; if that kernel has changed them, all begin anew.
__device__ inline void find_items(const Params& params, SharedMemory& shared) {
  if (!finds_ahead(params)) wait_for_previous_kernel();
  LaneLengths lengths = own_lengths(params);
  Span span;
  WalkState walk;
  bool has_more;
  while (true) {
    has_more = find_span(params, lengths, span, walk);
    shared.items.write(0, has_more ? item_at(params, span, walk) : Item::none());
    barrier_sync(kStartBarrier, kThreads);
    wait_for_previous_kernel();
    const LaneLengths now = own_lengths(params);
    const bool is_right = !__any_sync(~0u, now.differ_from(lengths));
    if (lane_index() == 0) shared.is_start_right = is_right;
    __syncwarp();
    if (is_right) break;
    barrier_sync(kCheckedBarrier, kThreads);  // nobody reads the first item any more
    lengths = now;
  }
  barrier_arrive(kCheckedBarrier, kThreads);
  shared.items.publish(0);
#pragma unroll 1
  for (u32 count = 1; has_more; ++count) {
    has_more = go_on(params, span, walk);
    const Item next = has_more ? item_at(params, span, walk) : Item::none();
    shared.items.await_place(count);
    shared.items.write(count, next);
    shared.items.publish(count);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gqa_hopper(const __grid_constant__ Params params) {
  SharedMemory& shared = shared_memory<SharedMemory>();
  // The same in all lanes, as compilers can see.
  const int warp = __shfl_sync(~0u, warp_index(), 0);
  if (warp < kConsumerWarps) {
    if constexpr (kMovesRegisters) setmaxnreg_inc<kConsumerRegisters>();
    prefetch_ids(params, static_cast<int>(threadIdx.x));
    return consume_tokens(params, warp, shared);
  }
  if constexpr (kMovesRegisters) setmaxnreg_dec<kLoaderRegisters>();
  if (warp == kLoaderWarp) return load_tokens(params, shared);
  if (warp == kFinderWarp) return find_items(params, shared);
  if (warp == kFirstMerger) make_barriers(params, shared);
  merge_items(params, shared);
}
