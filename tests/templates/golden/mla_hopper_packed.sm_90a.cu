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
  const unsigned char* query;
  const unsigned char* query_rope;
  const unsigned char* cache;
  const unsigned char* rope_cache;
  const float* query_scales;
  const float* kv_scales;
  const int* block_tables;
  const int* table_starts;
  const int* seq_lens;
  const int* cum_seq_lens_q;
  const int* list_ends;
  const int* top_k_lens;
  const float* bmm1_scale_tensor;
  const float* bmm2_scale_tensor;
  const float* sinks;
  u16* out;
  float* lse;
  unsigned char* partial_out;
  unsigned char* partial_rows;
  u32* counters;
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
  int requests;
  int heads;
  int q_len;
  int max_pages;
  int block_tables_stride;
  int num_pages;
  int list_requests;
  int list_q_len;
  int top_k;
  int teams;
  int team_size;
  int is_causal;
  int scores_take_bmm2;
  int plan;
  float bmm1_scale;
  float bmm2_scale;
  float latent_scale;
  float rope_scale;
  float lse_factor;
};

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

// How many registers a thread has from here on, of 128 that it began with: some roles give what
// others take. By whole warpgroups.

template <int kCount>
__device__ inline void set_registers() {
  if constexpr (kCount < 128) setmaxnreg_dec<kCount>();
  if constexpr (kCount > 128) setmaxnreg_inc<kCount>();
}

// The numbers of this kernel; the rest of the source only uses them.

using Element = Bf16;  // of ropes of packed rows and the output
using StoredElements = Fp8DsMla;
constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kPageSize = 64;
constexpr bool kSplitsQuery = true;
constexpr bool kIsSparse = true;
constexpr int kStoredBytes = 656;
constexpr int kRows = 64;
constexpr int kConsumerWarps = 8;
constexpr int kLoadingWarps = 4;
constexpr int kSharedBytes = 232448;
constexpr int kCountersBytes = 1024;  // behind them, what blocks begin with is kept
constexpr int kKeptLengths = 510;
constexpr int kBeginningBytes = 128;

constexpr int kHeadDimVo = kLatentDim;

// Packed rows have their rope part in bf16, at their end.
constexpr bool kIsPacked = !kIsSame<StoredElements, E4m3>;
constexpr int kRopeBytes = kIsPacked ? kRopeDim * 2 : kRopeDim;
constexpr int kRopeOffset = kStoredBytes - kRopeBytes;
constexpr int kRopeChunks = kRopeBytes / kChunkBytes;
constexpr int kScaledDims = 128;  // that share a scale
constexpr int kScaleGroups = kLatentDim / kScaledDims;

// Scales of a token: before its rope part, or in a tensor of their own; or one for all of it.
constexpr bool kHasInnerScales = kIsSame<StoredElements, Fp8DsMla>;
constexpr bool kHasOneScale = kIsSame<StoredElements, Fp8PerToken>;

// What is multiplied lies in tiles of 128 bytes a row, swizzled: 64 elements of 16 bits or 128 of
// eight. A rope part of eight bits has rows of 64 bytes.
constexpr int kTileRowBytes = 128;
constexpr int kQueryParts = kSplitsQuery ? 2 : 1;
constexpr int kLatentTiles = kQueryParts * kLatentDim / kTileRowBytes;  // of a query
constexpr int kTiles = kLatentTiles + 1;  // the last is the rope part
constexpr int kQueryTileBytes = kRows * kTileRowBytes;

// A block of tokens: its latent part, rope part and scales.
constexpr int kBlockTokens = 64;
constexpr int kTileBytes = kBlockTokens * kTileRowBytes;
constexpr int kStoredTiles = kLatentDim / kTileRowBytes;
constexpr int kRopeTileOffset = kStoredTiles * kTileBytes;
constexpr int kScalesOffset = kRopeTileOffset + kBlockTokens * kRopeBytes;
constexpr int kBlockBytes = kScalesOffset + kBlockTokens * kChunkBytes;

// Warps of the consumers, who add values, come first, then those who load, and the four of the
// scorer.
constexpr int kConsumerThreads = kConsumerWarps * kWarpLanes;
constexpr int kProducerThreads = kLoadingWarps * kWarpLanes;
constexpr int kScorerThreads = 128;
constexpr int kScorerWarps = kScorerThreads / kWarpLanes;
constexpr int kThreads = kConsumerThreads + kProducerThreads + kScorerThreads;
constexpr int kTokensOfWarp = kBlockTokens / kScorerWarps;  // that it scores

// Who is done with an item before the next is put there: those who load, consumers and scorer; and
// with its query, the scorer.
constexpr int kItemReaders = kLoadingWarps + kConsumerWarps + kScorerWarps;
constexpr int kQueryReaders = 1;

// Whether consumers begin a block's products when the next one's scores are done, so that these
// come while probabilities are computed.
constexpr bool kTakesTurns = kSplitsQuery && kRows > 32;

// How many accumulators a consumer thread has, as float4.
constexpr int kAccumulators = kRows * kHeadDimVo / kConsumerThreads / 4;
constexpr int kTasks = kAccumulators * kConsumerWarps;  // float4s of all threads of a warp

// Numbers of the barriers that warps meet at; 0 is __syncthreads.
constexpr int kConsumerBarrier = 1;
constexpr int kScorerBarrier = 2;
constexpr int kCrewBarrier = 7;  // of those who leave or merge pieces; of the second half the next

static_assert(kRopeDim * 2 == kTileRowBytes, "the rope part is one tile");
static_assert(kLatentDim % kTileRowBytes == 0, "the latent part is whole tiles");
static_assert(kScaledDims == kTileRowBytes, "a tile of tokens has one scale a token");
static_assert(kScaleGroups * sizeof(float) == kChunkBytes, "a token's scales are a chunk");

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

// PTX ISA, "Data Movement and Conversion Instructions: mov". Needs sm_80.

// mov.b64
// One word of 64 bits out of two, where it stands: compilers do not see through it.
__device__ inline u64 mov_b64(u32 low, u32 high) {
  u64 word;
  asm("mov.b64 %0, {%1, %2};" : "=l"(word) : "r"(low), "r"(high));
  return word;
}

// mov.b32
// A word into itself: compilers know no more what it holds.
__device__ inline void mov_b32(u32& word) { asm volatile("mov.b32 %0, %0;" : "+r"(word)); }

// mov.u32
// This thread's index in the block, read anew.
__device__ inline u32 mov_tid_x() {
  u32 thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Indices of this thread as compilers have not seen them: what is computed from them is computed
// where it is used, and takes no register from the products in between. Compilers are told that
// the index is not negative, so that division is a shift.

__device__ inline int fresh_thread() {
  const int thread = static_cast<int>(mov_tid_x());
  __builtin_assume(thread >= 0);
  return thread;
}
__device__ inline int fresh_lane() { return fresh_thread() % kWarpLanes; }
__device__ inline int fresh_warp() { return fresh_thread() / kWarpLanes; }

// Rows of 16-byte chunks in shared memory, permuted so that the eight rows that one ldmatrix
// reads at the same column lie in different banks.

constexpr int kChunkElements = 8;

// Byte offset of chunk `chunk` of row `row`. Rows of 128 bytes and more permute the eight chunks of
// every 128 bytes by the row; in 64-byte rows two rows share the 128 bytes.
template <int kRowBytes>
__device__ inline u32 swizzled_offset(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0, "a row is 64 bytes or whole 128 bytes");
  const int permuted = kRowBytes == 64 ? chunk ^ ((row >> 1) & 3) : chunk ^ (row & 7);
  return static_cast<u32>(row * kRowBytes + permuted * kChunkBytes);
}

// Which rows of which request a tile holds, also where requests have queries of different
// lengths. What ends of queries say is not trusted.

// The last request that begins at or before `position`; `begin_of` says where a request begins.
template <typename BeginOf>
__device__ inline int request_at(i64 position, int requests, BeginOf begin_of) {
  int low = 0;
  int high = requests;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (begin_of(middle) <= position) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Request r takes the tiles from floor(its first row / kRows) + r on: as many as its rows fill, or
// one more. So the number of tiles follows from the number of rows, and no length is needed on the
// host.
__device__ inline i64 first_tile_of(const int* cum_seq_lens_q, int request, int rows_per_token) {
  return static_cast<i64>(cum_seq_lens_q[request]) * rows_per_token / kRows + request;
}

__device__ inline int request_of_tile(const int* cum_seq_lens_q, int requests, int rows_per_token,
                                      int tile) {
  return request_at(tile, requests, [&](int request) {
    return first_tile_of(cum_seq_lens_q, request, rows_per_token);
  });
}

__device__ inline int request_of_token(const int* cum_seq_lens_q, int requests, int token) {
  return request_at(token, requests, [&](int request) -> i64 { return cum_seq_lens_q[request]; });
}

// The rows of a tile: the rest of kRows is padding.
struct TileRows {
  int request;
  int q_len;  // query tokens of the request
  i64 first_query;  // index of its first query token among all
  int first_row;  // of the tile, among the request's rows
  int rows;
};

// The rows of tile `tile` of request `request`, each of whose requests has `q_len` query tokens,
// or, where ends of queries are given, of the request that they say. Query tokens outside the
// tensor are nobody's: nothing may be read or written there.
__device__ inline TileRows rows_of_tile(const int* cum_seq_lens_q, int requests, i64 q_len,
                                        int rows_per_token, i64 tokens, int request, i64 tile) {
  i64 first_query = request * q_len;
  if (cum_seq_lens_q != nullptr) {
    request = request_of_tile(cum_seq_lens_q, requests, rows_per_token, static_cast<int>(tile));
    tile -= first_tile_of(cum_seq_lens_q, request, rows_per_token);
    first_query = cum_seq_lens_q[request];
    q_len = cum_seq_lens_q[request + 1] - first_query;
  }
  const i64 first_row = tile * kRows;
  const bool is_inside =
      first_query >= 0 && q_len >= 0 && first_query + q_len <= tokens && first_row >= 0;
  const i64 rows = min(q_len * rows_per_token - first_row, static_cast<i64>(kRows));
  return {request, static_cast<int>(q_len), first_query, static_cast<int>(first_row),
          is_inside && rows > 0 ? static_cast<int>(rows) : 0};
}

// How many of its listed tokens a query token looks at.

// Either the lists themselves have lengths, or the requests that query tokens belong to.
struct TokenLists {
  const int* seq_lens;
  const int* top_k_lens;
  const int* cum_seq_lens_q;
  int requests;
  int q_len;
  int top_k;
};

// Of query token `token`.
__device__ inline int listed_tokens(const TokenLists& lists, int token) {
  i64 listed;
  if (lists.top_k_lens != nullptr) {
    listed = lists.top_k_lens[token];
  } else {
    int request;
    i64 end;  // of its query tokens
    if (lists.cum_seq_lens_q == nullptr) {
      request = token;
      if (lists.q_len > 1) request = static_cast<int>(static_cast<u32>(token) / lists.q_len);
      end = static_cast<i64>(request + 1) * lists.q_len;
    } else {
      request = request_of_token(lists.cum_seq_lens_q, lists.requests, token);
      end = lists.cum_seq_lens_q[request + 1];
    }
    listed = lists.seq_lens[request] - end + token + 1;
  }
  return static_cast<int>(max(static_cast<i64>(0), min(listed, static_cast<i64>(lists.top_k))));
}

// How many tokens a request has, where every query token has a list of its own and counts as a
// request.

__device__ inline int length_of(const Params& params, int request) {
  const TokenLists lists{params.seq_lens,      params.top_k_lens, params.list_ends,
                         params.list_requests, params.list_q_len, params.top_k};
  return listed_tokens(lists, request);
}

__device__ inline int tokens_of(const Params&, int, int length) { return length; }

// How the work of a call is divided among the blocks of the grid: each finds its own part.

// The tiles of rows of a request are taken in groups, one tile for each member of a team: blocks
// that are neighbours and read the same tokens. A unit is a request and a group. All units in a row
// make a line, on which a unit is as long as it has blocks of tokens, and somewhat longer for what
// else it costs. Every team takes an equal stretch of the line, its span; a unit that lies on
// several spans is computed in as many pieces, which are merged.
// What a unit costs besides its blocks, in blocks: with a wide tile there is more to begin and to
// end.
constexpr int kNarrowUnitCost = 2;
constexpr int kWideUnitCost = 6;
constexpr int kUnitCost = kRows > 32 ? kWideUnitCost : kNarrowUnitCost;
constexpr int kMergeCost = 5;  // of having any pieces to merge, in blocks
constexpr int kLeastSpan = 2;  // positions
constexpr int kMostSpans = 144;  // of so many pieces there is room for what is merged

struct RequestFacts {
  i64 first_query;  // index of the request's first query token among all
  int q_len;  // minus one where they end before they begin
  int rows;  // none where the request's queries are not inside the tensor
  int kv_len;
  int blocks;  // of tokens
  int groups;
};

// A number of members as teams, of four members at the most: by constants, for a division takes
// long, and without branches.
__device__ inline int in_teams(const Params& params, u32 members) {
  return static_cast<int>(params.team_size == 3 ? members / 3 : members >> params.team_size / 2);
}

// `length` is what length_of has for the request.
__device__ inline RequestFacts facts_of_request(const Params& params, int request, int length) {
  RequestFacts facts;
  facts.q_len = kIsSparse ? 1 : params.q_len;  // a list belongs to one query token
  facts.first_query = static_cast<i64>(request) * facts.q_len;
  bool is_inside = true;
  if (!kIsSparse && params.cum_seq_lens_q != nullptr) {
    facts.first_query = params.cum_seq_lens_q[request];
    const i64 end = params.cum_seq_lens_q[request + 1];
    const i64 q_len = min(end - facts.first_query, static_cast<i64>(0x7fffffff));
    facts.q_len = static_cast<int>(max(q_len, static_cast<i64>(-1)));
    is_inside = 0 <= facts.first_query && facts.first_query <= end &&
                end * params.heads <= params.total_rows;
  }
  facts.rows = is_inside ? facts.q_len * params.heads : 0;
  facts.kv_len = tokens_of(params, request, length);
  facts.blocks = static_cast<u32>(facts.kv_len + kBlockTokens - 1) / kBlockTokens;
  const u32 tiles = static_cast<u32>(facts.rows + kRows - 1) / kRows;
  facts.groups = in_teams(params, tiles + params.team_size - 1);
  return facts;
}

__device__ inline RequestFacts facts_of_request(const Params& params, int request) {
  return facts_of_request(params, request, length_of(params, request));
}

// The span of a team: the line's positions from `begin` to before `end`. The host sees to it that
// they fit.
struct Span {
  int total;  // length of the line
  int spans;  // in use
  int index;  // of this one; the last span is the first team's, so that no block waits for a later
  int unit_cost;
  int begin;
  int end;
};

// What a warp found of its requests.
enum class Requests { kUnsound, kMixed, kUniform };

struct alignas(kChunkBytes) WarpRequests {
  int length;  // of the line
  int blocks;  // of all requests, and their groups, if they are uniform
  int groups;
  Requests kind;
};

// Where a walk along the units is.
struct WalkState {
  RequestFacts facts;
  int request;
  int group;
  int unit_begin;
};

// Which queries and tokens an item is about: as much as loading them takes.
struct Part {
  i64 first_query;  // index of the request's first query token among all
  int request;  // minus one after the last item
  int first_row;  // of the tile, among the request's rows
  int rows;  // of the tile; the rest of kRows is padding
  int first_block;
  int blocks;  // of tokens, that this piece computes
  int visible_to_any;  // tokens that some row of the tile sees
};
constexpr Part kNoPart = {0, -1, 0, 0, 0, 0, 0};

// What a block begins with.
struct alignas(kChunkBytes) Beginning {
  Span span;
  WalkState first;  // at the first item; while that is looked for, at the unit that the span begins
                    // in, or before it
  Part part;  // of the first item
};

struct SpanScratch : Beginning {
  WarpRequests warps[kThreads / kWarpLanes];
  WalkState now;  // at the item that was handed on last
};

__device__ inline int line_length(const RequestFacts& facts, int unit_cost) {
  return facts.groups * (facts.blocks + unit_cost);
}

// Whether `a` is a multiple of `b`; of large numbers it may say no.
__device__ inline bool is_multiple(int a, int b) {
  return __float2int_rn(__fdividef(static_cast<float>(a), static_cast<float>(b))) * b == a;
}

// How many spans of the same number of whole units, or whole units of the same number of spans,
// there are at the most; where all units have `blocks` blocks. None if merging pieces costs less
// than the idle teams would. By whole warps.
__device__ inline int aligned_spans(int teams, int units, int blocks) {
  const int total = units * blocks;
  teams = min(teams, total);  // no span without a block
  const int spans = max(teams - lane_index(), 1);
  const bool is_aligned = is_multiple(units, spans) || is_multiple(spans, units);
  const bool is_cheap =
      static_cast<i64>(total) * teams <= (total + static_cast<i64>(kMergeCost) * teams) * spans;
  const u32 found = __ballot_sync(~0u, is_aligned && is_cheap);
  return found == 0 ? 0 : max(teams - __ffs(static_cast<int>(found)) + 1, 1);
}

// Where span `index` begins: index * total / spans, with `whole` and `rest` of the quotient of the
// last two. In floats, in which such small numbers lose nothing, a division is short.
__device__ inline int beginning_of(int index, int whole, int rest, int spans) {
  const float part = __fdividef(static_cast<float>(index * rest) + 0.5f, static_cast<float>(spans));
  return index * whole + __float2int_rz(part);
}

// How many requests a thread counts the blocks of, and the first; a thread behind the last request
// looks at that one.
__device__ inline int requests_of_thread(const Params& params) {
  return ceil_div(params.requests, kThreads);
}

__device__ inline int own_request(const Params& params) {
  const int first = static_cast<int>(threadIdx.x) * requests_of_thread(params);
  return min(first, params.requests - 1);
}

// Finds the span of the team `team`, by all threads of the block, and leaves it in `scratch`; says
// whether there is one. `length` is what length_of has for the thread's own_request.
__device__ inline bool find_span(const Params& params, int team, int length, SpanScratch& scratch) {
  const int each = requests_of_thread(params);
  const int first = static_cast<int>(threadIdx.x) * each;
  const int last = min(first + each, params.requests);
  const int end = own_request(params);
  RequestFacts facts;  // in the end of the first
  int blocks = 0;
  int groups = 0;
  int own = 0;
  bool is_uniform = true;
  bool is_unsound = false;
#pragma unroll 1
  for (int request = last - 1; request >= end; --request) {
    facts = facts_of_request(params, request, request == end ? length : length_of(params, request));
    is_uniform &= request == last - 1 || (facts.blocks == blocks && facts.groups == groups);
    is_unsound |= facts.q_len < 0;
    blocks = facts.blocks;
    groups = facts.groups;
    own += line_length(facts, kUnitCost);
  }
  if (first >= last) own = 0;
  // All lanes take part in both.
  const int lane_0_blocks = __shfl_sync(~0u, blocks, 0);
  const int lane_0_groups = __shfl_sync(~0u, groups, 0);
  is_uniform = __all_sync(~0u, is_uniform && blocks == lane_0_blocks && groups == lane_0_groups);
  is_unsound = __any_sync(~0u, is_unsound);
  int through = own;  // with all lanes before
#pragma unroll
  for (int lanes = 1; lanes < kWarpLanes; lanes *= 2) {
    const int before = __shfl_up_sync(~0u, through, lanes);
    if (lane_index() >= lanes) through += before;
  }
  if (lane_index() == kWarpLanes - 1) {
    const Requests kind = is_uniform ? Requests::kUniform : Requests::kMixed;
    scratch.warps[warp_index()] = {through, blocks, groups, is_unsound ? Requests::kUnsound : kind};
  }
  __syncthreads();
  // A lane looks at what one warp found; there are fewer warps than lanes.
  constexpr int kWarps = kThreads / kWarpLanes;
  const WarpRequests found = scratch.warps[min(lane_index(), kWarps - 1)];
  const int length_of_warp = lane_index() < kWarps ? found.length : 0;
  int total = __reduce_add_sync(~0u, length_of_warp);
  int begin = __reduce_add_sync(~0u, lane_index() < warp_index() ? length_of_warp : 0);
  begin += through - own;
  blocks = __shfl_sync(~0u, found.blocks, 0);
  groups = __shfl_sync(~0u, found.groups, 0);
  if (__any_sync(~0u, found.kind == Requests::kUnsound)) return false;
  is_uniform = __all_sync(~0u, found.kind == Requests::kUniform && found.blocks == blocks &&
                                   found.groups == groups && blocks > 0 && groups > 0);
  int spans = max(1, min(min(params.teams, kMostSpans), total / kLeastSpan));
  int unit_cost = kUnitCost;
  if (is_uniform) {
    const int aligned = aligned_spans(spans, params.requests * groups, blocks);
    if (aligned > 0) {
      spans = aligned;
      unit_cost = 0;
      const int of_request = groups * blocks;
      total = params.requests * of_request;
      begin = min(first, params.requests) * of_request;
      own = max(last - first, 0) * of_request;
    }
  }
  const int index = spans - 1 - team;
  if (index < 0 || total == 0) return false;
  const int whole = static_cast<u32>(total) / static_cast<u32>(spans);
  const int rest = total - whole * spans;
  const int span_begin = beginning_of(index, whole, rest, spans);
  if (begin <= span_begin && span_begin < begin + own) {
    const int unit = facts.blocks + unit_cost;
    // It may begin in a later one of the thread's requests, to which the walk comes.
    int group = 0;
    if (facts.groups != 1) {
      group = min(static_cast<int>(static_cast<u32>(span_begin - begin) / unit), facts.groups - 1);
    }
    const int span_end = beginning_of(index + 1, whole, rest, spans);
    scratch.span = {total, spans, index, unit_cost, span_begin, span_end};
    scratch.first = {facts, first, group, begin + group * unit};
  }
  __syncthreads();
  return true;
}

// Where the rows of a query lie in the caller's tensors.

// Of row `row` of the tile, or where it is padding of some row: index of the query token among all,
// and its head.
struct QueryRow {
  i64 query;
  int head;
};

__device__ inline QueryRow query_row(const Params& params, const Part& part, int row, bool is_row) {
  const u32 packed_row = is_row ? part.first_row + row : 0;
  const u32 heads = params.heads;
  // Mostly there is one token, and division takes long.
  const u32 token = kIsSparse || packed_row < heads ? 0 : packed_row / heads;
  return {is_row ? part.first_query + token : 0, static_cast<int>(packed_row - token * heads)};
}

// PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy, cp.async". Needs sm_80.

// cp.async.cg.shared.global.L2::128B
// Copies 16 bytes past L1; bytes from `source_bytes` on are not read and become zero.
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
// Waits until at most `kPending` of this thread's newest groups are still under way.
template <int kPending>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// cp.async.mbarrier.arrive.noinc.shared::cta.b64
// Arrives at a barrier when all copies that this thread has begun are there.
__device__ inline void cp_async_mbarrier_arrive_noinc(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Tokens of a block that no row sees, for its list names nothing there.

struct alignas(8) UnlistedTokens {
  u16 bits[kLoadingWarps];  // of sixteen tokens each

  __device__ u64 all() const { return *reinterpret_cast<const u64*>(bits); }
};
static_assert(kLoadingWarps * 16 == kBlockTokens, "each warp that loads brings sixteen tokens");

// How many tasks of a result each block adds up that merges pieces.

// A slice is as many tasks as make all mergers equally busy: whole groups of four, which a warp
// adds up together, for they are of the same rows; or, where there are many mergers, a part of one.
constexpr int kTasksTogether = 4;

// By unsigned numbers, whose division is shorter.
__device__ constexpr int tasks_of_slice(u32 mergers) {
  const int tasks = static_cast<int>((kTasks + mergers - 1) / mergers);
  return tasks < 3 ? tasks : ceil_div(tasks, kTasksTogether) * kTasksTogether;
}

// What a block computes one after the other: pieces of units, for one member of the team.

// The block of tokens that a position is in, counted from the unit's first; what comes before the
// blocks belongs to the first.
__device__ inline int block_at(int position, int unit_begin, const Span& span) {
  return max(position - unit_begin - span.unit_cost, 0);
}

// How a unit is cut: its pieces lie on the spans from `first_span` on, and the last of those may
// end with it.
struct Pieces {
  int count;
  int first_span;
  bool end_span;
};

// The first span that begins at or after a position: the least whose product with the line's length
// is no less than the position's with the spans. A quotient in floats is one too many or too few at
// the most, and ten times as short as a division of 64 bits.
__device__ inline int span_from(int position, const Span& span) {
  const i64 wanted = static_cast<i64>(position) * span.spans;
  const float share = __fdividef(static_cast<float>(span.spans), static_cast<float>(span.total));
  int index = __float2int_rz(static_cast<float>(position) * share) - 1;
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    if (static_cast<i64>(index) * span.total < wanted) ++index;
  }
  return index;
}

__device__ inline Pieces pieces_of(int unit_begin, int blocks, const Span& span) {
  const int first_block = unit_begin + span.unit_cost;
  const int second = span_from(first_block + 1, span);
  const int end = first_block + blocks;
  const int after = span_from(end, span);
  const bool end_span =
      static_cast<u64>(after) * span.total < static_cast<u64>(end + 1) * span.spans;
  return {1 + after - second, second - 1, end_span};
}

// One piece of a unit, for one member of the team, as all its warps need it.
struct Item : Part {
  u32 count;  // of items before
  int visible_to_all;  // tokens that every row of the tile sees
  int pieces;
  int mergers;  // of them, the first: the last is one if nothing follows it in its block
  int slice_tasks;  // where there are more than two pieces
  int piece;
  int owner;  // the block of the grid that has piece 0
  int row_visible[kRows];  // how many tokens a row sees
};

// Goes through the items of a span, by whole warps.
struct ItemWalk : WalkState {
  const Params& params;
  const Span& span;
  int member;

  __device__ ItemWalk(const Params& params, const Span& span, int member, const WalkState& state)
      : WalkState(state), params(params), span(span), member(member) {}

  __device__ void advance() {
    unit_begin += facts.blocks + span.unit_cost;
    if (++group < facts.groups) return;
    group = 0;
#pragma unroll 1
    do {
      if (++request >= params.requests) return;
      facts = facts_of_request(params, request);
    } while (facts.groups == 0);
  }

  // The item that it is at; its request is minus one if it is at none.
  __device__ Part here() const {
    const int first = first_block();
    const int last = last_block();
    const bool is_here = facts.blocks == 0 ? span.begin <= unit_begin : first < last;
    const int first_row = (group * params.team_size + member) * kRows;
    if (!is_here || first_row >= facts.rows) return kNoPart;
    const int rows = min(facts.rows - first_row, kRows);
    const int visible_to_any = visible_tokens(first_row + rows - 1);
    const int seen_blocks = static_cast<u32>(visible_to_any + kBlockTokens - 1) / kBlockTokens;
    const int blocks = max(min(last, seen_blocks) - first, 0);
    return {facts.first_query, request, first_row, rows, first, blocks, visible_to_any};
  }

  // Goes to the next item, or, if it `stays`, to none; its request is minus one if there is none.
  __device__ Part next(bool stays) {
    Part part;
#pragma unroll 1
    do {
      if (!stays) advance();
      stays = false;
      if (request >= params.requests || unit_begin >= span.end) return kNoPart;
      part = here();
    } while (part.request < 0);
    return part;
  }

  // The first item, from the unit on that the span begins in.
  __device__ Part first() {
    u32 stays = 1;
    mov_b32(stays);  // else compilers write the first turn apart
    return next(stays != 0);
  }

  // All of the item that it is at, and that `part` is of.
  __device__ void fill(Item& item, const Part& part, u32 count) const {
    if constexpr (!kIsSparse) {  // of a list all rows see all
#pragma unroll 1
      for (int row = fresh_lane(); row < kRows; row += kWarpLanes) {
        item.row_visible[row] = row < part.rows ? visible_tokens(part.first_row + row) : 0;
      }
    }
    if (fresh_lane() != 0) return;
    static_cast<Part&>(item) = part;
    Pieces pieces = {1, span.index, true};
    if (first_block() > 0 || last_block() < facts.blocks) {
      pieces = pieces_of(unit_begin, facts.blocks, span);
    }
    item.count = count;
    item.visible_to_all = visible_tokens(part.first_row);
    item.pieces = pieces.count;
    item.mergers = pieces.count - (pieces.end_span ? 0 : 1);
    item.slice_tasks = tasks_of_slice(item.mergers);
    item.piece = first_block() == 0 ? 0 : span.index - pieces.first_span;
    item.owner = block_of_span(pieces.first_span);
  }

  // The blocks of the unit that lie on the span.
  __device__ int first_block() const {
    return span.begin > unit_begin ? block_at(span.begin, unit_begin, span) : 0;
  }
  __device__ int last_block() const {
    const int unit_end = unit_begin + facts.blocks + span.unit_cost;
    return span.end < unit_end ? block_at(span.end, unit_begin, span) : facts.blocks;
  }

  // How many tokens a row of the request sees: all up to its own position, or all.
  __device__ int visible_tokens(int row) const {
    if (kIsSparse || !params.is_causal || facts.q_len <= 1) return facts.kv_len;
    const u32 token = static_cast<u32>(row) / static_cast<u32>(params.heads);
    return max(facts.kv_len - (facts.q_len - 1 - static_cast<int>(token)), 0);
  }

  // The block of the grid that has this member's part of a span.
  __device__ int block_of_span(int index) const {
    return (span.spans - 1 - index) * params.team_size + member;
  }
};

// Items are handed on in two places, queries in one; where the item that `count` have preceded is,
// and which phase of a barrier is its own.
__device__ inline u32 item_slot(u32 count) { return count % 2; }
__device__ inline u32 item_parity(u32 count) { return count / 2 % 2; }
__device__ inline u32 query_parity(u32 count) { return count % 2; }

// The shared memory of a block, whole.

// Blocks of tokens, as many as fit beside the query and what else there is: no more than twenty
// words a row and 2 KiB.
constexpr int kStageBytes = kBlockBytes + kQueryTileBytes + kRows * sizeof(float);
constexpr int kOtherBytes = 2048 + kRows * 80;
constexpr int kStagesBytes = kSharedBytes - kTiles * kQueryTileBytes - kOtherBytes;
constexpr int kStages = kStagesBytes / kStageBytes;
constexpr int kSpareBytes = kStagesBytes - kStages * kStageBytes;

// What scores of a row are multiplied by to be log2 units, and what is subtracted then.
struct alignas(8) ScoredRow {
  float factor;
  float reference;
};

struct SharedMemory {
  unsigned char query[kTiles * kQueryTileBytes];
  unsigned char tokens[kStages][kBlockBytes];
  unsigned char probabilities[kStages][kQueryTileBytes];
  unsigned char spare[kSpareBytes];  // room for merging
  float query_scale[kRows];  // what the query in here has been divided by
  alignas(kChunkBytes) ScoredRow rows[kRows];  // of the item whose scores are computed
  float warp_rows[kScorerWarps][kRows];  // the maximum that each warp found for a row
  float rescale[kStages][kRows];  // what a block multiplies the outputs before it by
  float warp_scales[kScorerWarps];  // the largest that each warp found
  float units;  // of that item: what scales of values are multiplied by
  float block_units[kStages];  // and those of a block
  float row_reference[2][kRows];  // of an item, when all its scores are done
  float row_sum[2][kRows];
  // What its outputs are multiplied by to be left as halves; it is read by pairs.
  alignas(sizeof(float2)) float row_scale[2][kRows];
  float row_units[2];  // of an item: what its outputs are in, and sums multiplied by
  UnlistedTokens unlisted[kStages];
  u32 rescales[kStages];  // whether a block multiplies those before it by others than 1
  Item items[2];
  SpanScratch scratch;
  Barrier tokens_full[kStages];
  Barrier tokens_empty[kStages];
  Barrier scores_full[kStages];
  Barrier probabilities_full[kStages];
  Barrier rows_full[2];
  Barrier first_query_full;
  Barrier query_full;
  Barrier query_empty;
  Barrier item_full[2];
  Barrier item_empty[2];
  int has_nonfinite[2];  // of an item
};
// Where pieces are merged, when no item follows.
constexpr int kRoomBytes = sizeof(SharedMemory::query) + sizeof(SharedMemory::tokens) +
                           sizeof(SharedMemory::probabilities) + sizeof(SharedMemory::spare);
static_assert(sizeof(SharedMemory) <= kSharedBytes, "the spec knows what the struct takes");
static_assert(kBlockBytes % 1024 == 0, "tiles are aligned");
static_assert(kSpareBytes % kChunkBytes == 0, "what lies behind it is aligned");

// By one thread. Of those who load, all threads' copies arrive, and what a warp has written.
__device__ inline void make_token_barriers(SharedMemory& shared) {
  for (int stage = 0; stage < kStages; ++stage) {
    make_barrier(shared.tokens_full[stage], kProducerThreads + kLoadingWarps);
    make_barrier(shared.tokens_empty[stage], kConsumerWarps);
    make_barrier(shared.scores_full[stage], kScorerWarps);
    make_barrier(shared.probabilities_full[stage], kScorerWarps);
  }
  for (int slot = 0; slot < 2; ++slot) make_barrier(shared.rows_full[slot], kScorerWarps);
  for (int slot = 0; slot < 2; ++slot) shared.has_nonfinite[slot] = 0;
}

// Brings the query of an item into shared memory.

// Begins to copy the rows of a query, by `threads` threads of which this is number `thread`. A
// row's tiles lie kQueryTileBytes apart; eight lanes copy 128 bytes.
__device__ inline void begin_query(const Params& params, const Part& part, SharedMemory& shared,
                                   int thread, int threads) {
  const int lane = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < kRows; row += threads / 8) {
    const bool is_row = row < part.rows;
    const auto [query, head] = query_row(params, part, row, is_row);
    const unsigned char* latent = params.query + query * params.query_stride +
                                  head * params.query_head_stride + lane * kChunkBytes;
    const unsigned char* rope = params.query_rope + query * params.query_rope_stride +
                                head * params.query_rope_head_stride + lane * kChunkBytes;
    const u32 target = shared_address(shared.query) + swizzled_offset<kTileRowBytes>(row, lane);
    const u32 bytes = is_row ? kChunkBytes : 0;  // padding is zeros
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

// What all roles need to hand items and queries on.

// By one thread. How many warps say that an item is there, read it, and bring queries.
__device__ inline void make_item_barriers(const SharedMemory& shared, int tellers, int readers,
                                          int query_warps) {
  make_barrier(shared.first_query_full, kConsumerWarps);
  make_barrier(shared.query_full, query_warps);
  make_barrier(shared.query_empty, kQueryReaders);
  for (int slot = 0; slot < 2; ++slot) {
    make_barrier(shared.item_full[slot], tellers);
    make_barrier(shared.item_empty[slot], readers);
  }
}

__device__ inline void finish_query(const Barrier& full) {
  cp_async_wait_group<0>();
  fence_proxy_async();
  __syncwarp();
  if (fresh_lane() == 0) arrive_at(full);
}

// Consumers bring the first query themselves: nothing can begin without it.
__device__ inline void begin_first_query(const Params& params, const Part& part,
                                         SharedMemory& shared) {
  begin_query(params, part, shared, static_cast<int>(threadIdx.x), kConsumerThreads);
}

// Keeps in shared memory where the walk is, for a scheduler has few registers.
__device__ inline void leave_item(const ItemWalk& walk, SharedMemory& shared) {
  __syncwarp();
  if (fresh_lane() == 0) shared.scratch.now = walk;
  __syncwarp();
}

// Makes the item that `count` have preceded; the walk stays at the first, where it is left.
__device__ inline void make_item(const Params& params, int member, u32 count,
                                 SharedMemory& shared) {
  ItemWalk walk(params, shared.scratch.span, member, shared.scratch.now);
  const Part part = walk.next(count == 0);
  Item& item = shared.items[item_slot(count)];
  if (part.request >= 0) {
    walk.fill(item, part, count);
    leave_item(walk, shared);
  } else if (fresh_lane() == 0) {
    item.request = -1;
  }
  __syncwarp();
}

// For those who load: done with the item that `count` have preceded; what the next is about.
__device__ inline Part next_part(SharedMemory& shared, u32& count) {
  __syncwarp();  // all lanes have read it
  if (fresh_lane() == 0) arrive_at(shared.item_empty[item_slot(count)]);
  ++count;
  wait_for(shared.item_full[item_slot(count)], item_parity(count));
  return shared.items[item_slot(count)];
}

// Waits for the query of the item that `count` have preceded.
__device__ inline void wait_for_query(const SharedMemory& shared, u32 count) {
  if (count == 0) {
    wait_for(shared.first_query_full, 0);
  } else {
    wait_for(shared.query_full, query_parity(count) ^ 1);
  }
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

// Where the page ids of a request begin in the tables.

// Where they begin, and how many there are.
struct TableRow {
  i64 start;
  int pages;
};

// Starts that lie outside the tables are read as the nearest inside.
__device__ inline TableRow table_row(const Params& params, int request) {
  if (kIsSparse || params.table_starts == nullptr) {
    return {request * static_cast<i64>(params.block_tables_stride), params.max_pages};
  }
  const int start = max(0, min(params.table_starts[request], params.max_pages));
  const int end = max(start, min(params.table_starts[request + 1], params.max_pages));
  return {start, end - start};
}

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

// Where the tokens of a block are that a warp brings.

// A warp brings as many of every block.
constexpr int kWarpTokens = kBlockTokens / kLoadingWarps;

// Which token of a block this lane looks after; lanes of both halves of a warp look after the same.
__device__ inline int own_token() {
  return fresh_warp() % kLoadingWarps * kWarpTokens + fresh_lane() % kWarpTokens;
}

// Page ids of an item's blocks, or its listed tokens.
struct TokenIds {
  const int* ids;
  int end;  // tokens from here on are not read

  __device__ TokenIds(const Params& params, const Part& part)
      : ids(params.block_tables + table_row(params, part.request).start),
        end(min((part.first_block + part.blocks) * kBlockTokens, part.visible_to_any)) {}

  // Of this lane's token.
  __device__ int read(int block) const {
    const int token = token_of(block);
    return token < end ? ids[kIsSparse ? token : token / kPageSize] : -1;
  }

  __device__ static int token_of(int block) { return block * kBlockTokens + own_token(); }
};

// Where this lane's token of a block is in the cache, by what the tables have for it.
struct TokenPlace {
  int page;  // the first where there is none
  int slot;
  u32 missing;  // tokens of the warp that do not exist, a bit each

  __device__ TokenPlace(const Params& params, int id, int block) {
    page = kIsSparse && id >= 0 ? id / kPageSize : id;
    slot = (kIsSparse ? id : TokenIds::token_of(block)) % kPageSize;
    const bool exists = is_page(page, params.num_pages);
    if (!exists) page = slot = 0;
    missing = __ballot_sync(~0u, !exists);
  }
};
static_assert(kWarpTokens * 2 == kWarpLanes, "two lanes look after a token");

// PTX ISA, "Data Movement and Conversion Instructions: cvt". Needs sm_89.

// cvt.rn.f16x2.e4m3x2
__device__ inline u32 cvt_rn_f16x2_e4m3x2(u16 pair) {
  u32 value;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(value) : "h"(pair));
  return value;
}

// cvt.rn.f16x2.e4m3x2
// Of the upper half of a word, which need not be shifted for it.
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

// Pairs of e4m3 with the instructions for them.

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

// A token as it lies in the cache: converted to elements by scales.

// Its row, or the latent part of it, and its scales: in the row, in a tensor of their own, or one
// number for all.
struct StoredToken {
  const unsigned char* row;
  const float* scales;  // one for each 128 latent dims, or for all
  float latent_scale;  // where there are none

  // Of the latent dims from 128 * `step` on.
  __device__ float scale(int step) const {
    return scales == nullptr ? latent_scale : scales[kHasOneScale ? 0 : step];
  }

  // One of its values.
  __device__ u16 element(int dim) const {
    const u32 halves = fp16x2_of_e4m3x2(row[dim]);
    const float value = cvt_f32(Fp16{}, static_cast<u16>(halves));
    return static_cast<u16>(cvt_rn_x2_f32(Element{}, 0.0f, value * scale(dim / kScaledDims)));
  }
};

// The token in `slot` of `page`, which exists.
__device__ inline StoredToken stored_token(const Params& params, int page, int slot) {
  const PagedRows rows{params.cache, params.page_stride, params.token_stride};
  const unsigned char* row = rows.row_of(page, slot);
  if constexpr (kHasInnerScales) {
    return {row, reinterpret_cast<const float*>(row + kLatentDim), 1.0f};
  }
  const i64 first = page * params.scale_page_stride + slot * params.scale_token_stride;
  return {row, params.kv_scales == nullptr ? nullptr : params.kv_scales + first,
          params.latent_scale};
}

// Its rope part, where that may be a tensor of its own.
__device__ inline const unsigned char* stored_rope(const Params& params, int page, int slot) {
  const PagedRows rows{params.rope_cache, params.rope_page_stride, params.rope_token_stride};
  return rows.row_of(page, slot);
}

// Four warps bring the tokens of every item into the stages, as they are stored.

// A pointer of another lane's token.
__device__ inline const unsigned char* row_of_lane(const unsigned char* own, int lane) {
  return reinterpret_cast<const unsigned char*>(__shfl_sync(~0u, reinterpret_cast<u64>(own), lane));
}

// So many turns of the loop that copies a block stand beside each other: all, or with lists, whose
// kernels have more to be fetched, fewer.
constexpr int kCopyTurns = kIsSparse ? 2 : kWarpTokens;

// Copies kCount chunks of every token of the warp from `own` on, kLanes of them at a time, to where
// `place` says; what does not exist becomes zeros.
template <int kLanes, int kCount, typename Place>
__device__ inline void copy_chunks(const unsigned char* own, u32 missing, u64 policy, Place place) {
  constexpr int kTokens = kWarpLanes / kLanes;  // at a time
  const int lane = fresh_lane();
  const int chunk = lane % kLanes;
#pragma unroll kCopyTurns
  for (int first = 0; first < kWarpTokens; first += kTokens) {
    const int token = first + lane / kLanes;
    const unsigned char* source = row_of_lane(own, token) + chunk * kChunkBytes;
    const u32 bytes = missing >> token & 1 ? 0 : kChunkBytes;
    const u32 target = place(token, chunk);
#pragma unroll
    for (int more = 0; more < kCount; more += kLanes) {
      // So many chunks on is so many tiles on.
      constexpr int kTileChunks = kTileRowBytes / kChunkBytes;
      cp_async_cg_16(target + more / kTileChunks * kTileBytes, source + more * kChunkBytes, bytes,
                     policy);
    }
  }
}

// Streams the blocks of an item.
struct BlockStream {
  const Params& params;
  const Part& part;  // in shared memory
  int next_id;  // of the block after the next
  TokenPlace place;  // in the next block

  __device__ BlockStream(const Params& params, const Part& part)
      : params(params),
        part(part),
        next_id(TokenIds(params, part).read(part.first_block + 1)),
        place(params, TokenIds(params, part).read(part.first_block), part.first_block) {}

  // Copies a block, and finds out where the next is.
  __device__ void take_block(SharedMemory& shared, RingPosition<kStages>& position, int block) {
    const int stage = position.stage;
    wait_for(shared.tokens_empty[stage], position.parity ^ 1);
    copy_rows(shared, stage);
    cp_async_mbarrier_arrive_noinc(shared_address(&shared.tokens_full[stage]));
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.tokens_full[stage]);
    position.advance();
    place = TokenPlace(params, next_id, block + 1);
    next_id = TokenIds(params, part).read(block + 2);
  }

  __device__ void copy_rows(SharedMemory& shared, int stage) const {
    const int warp = fresh_warp() % kLoadingWarps;
    const int first = warp * kWarpTokens;
    const u32 target = shared_address(shared.tokens[stage]);
    const StoredToken own = stored_token(params, place.page, place.slot);
    const u64 policy = policy_of_lines(params.team_size > 1);
    const auto latent_place = [&](int token, int chunk) {
      return target + chunk / 8 * kTileBytes + swizzled_offset<128>(first + token, chunk % 8);
    };
    copy_chunks<16, kLatentDim / kChunkBytes>(own.row, place.missing, policy, latent_place);
    const unsigned char* rope =
        kIsPacked ? own.row + kRopeOffset : stored_rope(params, place.page, place.slot);
    const auto rope_place = [&](int token, int chunk) {
      return target + kRopeTileOffset + swizzled_offset<kRopeBytes>(first + token, chunk);
    };
    copy_chunks<kRopeChunks, kRopeChunks>(rope, place.missing, policy, rope_place);
    copy_scales(own, shared.tokens[stage] + kScalesOffset + first * kChunkBytes);
    if (kIsSparse && fresh_lane() == 0) {
      shared.unlisted[stage].bits[warp] = static_cast<u16>(place.missing);
    }
  }

  // The scales of the warp's tokens, to `target`. Each lane has those of its own.
  __device__ void copy_scales(const StoredToken& own, unsigned char* target) const {
    const int token = fresh_lane();
    if (token >= kWarpTokens) return;
    target += token * kChunkBytes;
    const bool exists = (place.missing >> token & 1) == 0;
    if constexpr (kHasInnerScales) {
      cp_async_cg_16(shared_address(target), own.row + kLatentDim, exists ? kChunkBytes : 0);
    } else {
      if (own.scales == nullptr) {
        const float scale = exists ? own.latent_scale : 0.0f;
        *reinterpret_cast<float4*>(target) = {scale, scale, scale, scale};
        return;
      }
#pragma unroll
      for (int group = 0; group < kScaleGroups; ++group) {
        const float* source = own.scales + (kHasOneScale ? 0 : group);
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

// Makes a query what it is multiplied as.

// Keys are multiplied as they are stored, in e4m3, of which bf16 has twice the digits: an element
// of the query is the sum of two, if it is not 2^17 times smaller than the largest of its row.

// What a row is divided by, a power of two, so that its largest element is less than 256; and what
// it is multiplied by instead: of a row that is not all finite, NaN.
struct QueryScale {
  float scale;
  float factor;

  // `largest` is the magnitude of the largest element, as its bits.
  __device__ explicit QueryScale(u32 largest) {
    constexpr u32 kNan = 0xff;
    const u32 exponent = max(largest >> 7, 8u);  // both are normal numbers
    scale = __uint_as_float((exponent - 7) << 23);
    factor = __uint_as_float(exponent == kNan ? 0x7fffffff : (261 - exponent) << 23);
  }
};

__device__ inline float element_of(const Chunk& chunk, int i) {
  return cvt_f32(Bf16{}, static_cast<u16>(chunk.words[i / 2] >> i % 2 * 16));
}

// The first four significant bits of a bf16.
__device__ inline float first_part(float element) {
  return __uint_as_float(__float_as_uint(element) & 0xfff00000);
}

// Two elements: their first parts in the low half, the second in the high one.
__device__ inline u32 split_pair(float low, float high) {
  const float first_low = first_part(low);
  const float first_high = first_part(high);
  return e4m3x2_of_f32(first_high, first_low) | e4m3x2_of_f32(high - first_high, low - first_low)
                                                    << 16;
}

// A chunk, split: its eight elements' first parts, and the second.
struct SplitChunk {
  uint2 first;
  uint2 second;

  __device__ void take(const Chunk& chunk, float factor) {
    u32 pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] =
          split_pair(element_of(chunk, i * 2) * factor, element_of(chunk, i * 2 + 1) * factor);
    }
    first = make_uint2(__byte_perm(pairs[0], pairs[1], 0x5410),
                       __byte_perm(pairs[2], pairs[3], 0x5410));
    second = make_uint2(__byte_perm(pairs[0], pairs[1], 0x7632),
                        __byte_perm(pairs[2], pairs[3], 0x7632));
  }
};

// Splits this lane's chunks of a row from tile `first` on, an even one. Eight lanes have the row;
// the tiles are split together, for each waits for what the other lanes have to read. Of two tiles
// one becomes the first parts of both, the other the second.
template <int kCount>
__device__ inline void split_chunks(unsigned char* query, int row, int lane, int first,
                                    float factor) {
  unsigned char* tiles = query + first * kQueryTileBytes;
  SplitChunk split[kCount];
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
    const unsigned char* own = tiles + tile * kQueryTileBytes + swizzled_offset<128>(row, lane);
    split[tile].take(*reinterpret_cast<const Chunk*>(own), factor);
  }
  __syncwarp();  // all lanes have read
#pragma unroll
  for (int tile = 0; tile < kCount; ++tile) {
    const u32 chunk = swizzled_offset<128>(row, tile % 2 * 4 + lane / 2) + lane % 2 * sizeof(uint2);
    unsigned char* to = tiles + tile / 2 * 2 * kQueryTileBytes + chunk;
    *reinterpret_cast<uint2*>(to) = split[tile].first;
    *reinterpret_cast<uint2*>(to + kQueryTileBytes) = split[tile].second;
  }
}

// The same of the rope part, whose first parts come before the second in each row.
__device__ inline void split_rope(unsigned char* query, int row, int lane, float factor) {
  unsigned char* tile = query + kLatentTiles * kQueryTileBytes;
  SplitChunk split;
  split.take(*reinterpret_cast<const Chunk*>(tile + swizzled_offset<128>(row, lane)), factor);
  __syncwarp();  // all lanes have read
  tile += lane % 2 * sizeof(uint2);
  *reinterpret_cast<uint2*>(tile + swizzled_offset<128>(row, lane / 2)) = split.first;
  *reinterpret_cast<uint2*>(tile + swizzled_offset<128>(row, lane / 2 + 4)) = split.second;
}

__device__ inline void scale_chunk(Chunk& chunk, float factor) {
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    chunk.words[word] = cvt_rn_x2_f32(Bf16{}, element_of(chunk, word * 2 + 1) * factor,
                                      element_of(chunk, word * 2) * factor);
  }
}

// By the threads that have copied it, each its own chunks, kTogether tiles at a time; tells `full`.
template <int kTogether>
__device__ inline void finish_query(SharedMemory& shared, const Barrier& full, int thread,
                                    int threads) {
  cp_async_wait_group<0>();
  const int lane = thread % 8;
#pragma unroll 1
  for (int row = thread / 8; row < kRows; row += threads / 8) {
    unsigned char* place = shared.query + swizzled_offset<128>(row, lane);
    u32 largest = 0;  // of either half of the words
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const Chunk& chunk = *reinterpret_cast<const Chunk*>(place + tile * kQueryTileBytes);
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        largest = max_u16x2(largest, chunk.words[word] & 0x7fff7fff);
      }
    }
#pragma unroll
    for (int lanes = 1; lanes < 8; lanes *= 2) {
      largest = max_u16x2(largest, __shfl_xor_sync(~0u, largest, lanes));
    }
    const QueryScale of_row(max(largest & 0xffff, largest >> 16));
    if (lane == 0) shared.query_scale[row] = of_row.scale;
#pragma unroll 1
    for (int tile = 0; tile < kLatentTiles; tile += kTogether) {
      split_chunks<kTogether>(shared.query, row, lane, tile, of_row.factor);
    }
    if constexpr (kIsPacked) {
      scale_chunk(*reinterpret_cast<Chunk*>(place + kLatentTiles * kQueryTileBytes), of_row.factor);
    } else {
      split_rope(shared.query, row, lane, of_row.factor);
    }
  }
  fence_proxy_async();
  __syncwarp();
  if (fresh_lane() == 0) arrive_at(full);
}

// Those who load: one of them hands items on, all bring each item's query and tokens.

// By one thread.
__device__ inline void make_item_barriers(const SharedMemory& shared) {
  make_item_barriers(shared, 1, kItemReaders, kLoadingWarps);
}

// Which warp goes through the items.
__device__ inline bool walks_items() { return fresh_warp() == kConsumerWarps; }

// Which of its team this block is; worked out where it is used, not kept.
__device__ inline int own_member(const Params& params) {
  u32 index = blockIdx.x;
  mov_b32(index);
  const int block = static_cast<int>(index);
  return block - in_teams(params, block) * params.team_size;
}

// Hands on the item that `count` have preceded.
__device__ inline void hand_on(const Params& params, int member, u32 count, SharedMemory& shared) {
  wait_for(shared.item_empty[item_slot(count)], item_parity(count) ^ 1);
  make_item(params, member, count, shared);
  if (fresh_lane() == 0) arrive_at(shared.item_full[item_slot(count)]);
}

// Brings the query of an item; consumers have brought the first.
__device__ inline void load_query(const Params& params, const Item& item, SharedMemory& shared) {
  if (item.count == 0) return;
  wait_for(shared.query_empty, query_parity(item.count) ^ 1);
  const int thread = fresh_thread() % kProducerThreads;
  begin_query(params, item, shared, thread, kProducerThreads);
  finish_query<2>(shared, shared.query_full, thread, kProducerThreads);
}

// While a query is still in use, so many blocks of the next item are on their way already.
constexpr int kBlocksBeforeQuery = kStages - 1;

// `given` items have been handed on by the warp that does so.
__device__ inline void load_blocks(const Params& params, const Item& item, SharedMemory& shared,
                                   RingPosition<kStages>& position, u32& given) {
  BlockStream stream(params, item);
  const int before = min(item.blocks, kBlocksBeforeQuery);
#pragma unroll 1
  for (int done = 0;; ++done) {
    if (done == before) load_query(params, item, shared);
    // The first item is handed on when its first tokens are on their way, the next when all are.
    const u32 due = item.count + (done == item.blocks ? 2 : min(done, 1));
#pragma unroll 1
    while (walks_items() && given < due) hand_on(params, own_member(params), given++, shared);
    if (done == item.blocks) return;
    // The block's first tokens are there before it asks for more: else the last block's wait for
    // all that others have asked for.
    if (item.count == 0 && done == 1) wait_for(shared.tokens_full[0], 0);
    stream.take_block(shared, position, item.first_block + done);
  }
}

// `walk` is at the first item.
__device__ inline void load_items(const Params& params, const ItemWalk& walk, const Part& first,
                                  SharedMemory& shared) {
  // What an item is about, and its count, is read from there, not kept; all write the same.
  if (fresh_lane() == 0) {
    static_cast<Part&>(shared.items[0]) = first;
    shared.items[0].count = 0;
  }
  __syncwarp();
  if (walks_items()) leave_item(walk, shared);
  RingPosition<kStages> position;
  u32 count = 0;
  u32 given = 0;
#pragma unroll 1
  while (true) {
    load_blocks(params, shared.items[item_slot(count)], shared, position, given);
    count = shared.items[item_slot(count)].count;
    if (next_part(shared, count).request < 0) return;
  }
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

// Consumer warps that leave or merge pieces of a unit together: all, or those of one half of the
// tasks.

// Which half the tasks of a warp belong to.
__device__ inline int half_of_warp(int warp) { return warp % 4 / 2; }

struct Crew {
  int half;  // minus one for all

  __device__ int threads() const { return half < 0 ? kConsumerThreads : kConsumerThreads / 2; }
  __device__ void sync() const { barrier_sync(kCrewBarrier + max(half, 0), threads()); }

  // Index of this thread in the crew.
  __device__ int thread() const {
    const int warp = fresh_warp();
    return half < 0 ? fresh_thread() : (warp / 4 * 2 + warp % 2) * kWarpLanes + fresh_lane();
  }
  __device__ bool is_leader() const { return thread() == 0; }
  __device__ bool has_warp(int warp) const { return half < 0 || half_of_warp(warp) == half; }
};

// What of the output a thread of the consumers has.

// Two consumers of four warps each. Both have all rows and one half of the output dims, of which a
// warp has 64 neighbours, for these share a scale, in tiles of 16; a product is of a tile of each
// of four warps. A thread has two neighbours of a tile: in rows g and g + 8 of the product, with
// g = lane / 4, are dims 2g and 2g + 1.
constexpr int kDimsOfTile = 16;
constexpr int kDimsOfWarp = kHeadDimVo / kConsumerWarps;
constexpr int kDimTiles = kDimsOfWarp / kDimsOfTile;
static_assert(kScaledDims % kDimsOfWarp == 0, "a warp's dims have one scale a token");

// The first dim of float4 `i` of a thread of warp `warp`; the other is the next.
__device__ inline int dim_of(int warp, int i) {
  return warp * kDimsOfWarp + i / (kRows / 8) * kDimsOfTile + fresh_lane() / 4 * 2;
}

// What is alike for two consumers of four warps each, however dims are divided among warps.

// The dim of part `c` of float4 `i`.
__device__ inline int part_dim(int warp, int i, int c) { return dim_of(warp, i) + c / 2; }

// Where a warp is among those of its half, which are two of either consumer, and the warp that is
// there.
__device__ inline int place_in_half(int warp) { return warp / 4 * 2 + warp % 2; }
__device__ inline int warp_at(int half, int place) { return place / 2 * 4 + half * 2 + place % 2; }

// What a consumer has of the output in registers, where its dims take the place of rows in the
// products, and rows that of columns.

constexpr int kRowGroups = kRows / 8;
constexpr int kOwnRows = kRowGroups * 2;
using Accumulators = float[kDimTiles][kRows / 2];

// A thread's row `r`, the same in all warps, and lanes that have the same rows: those that agree
// modulo 4.
__device__ inline int own_row(int r) { return r / 2 * 8 + fresh_lane() % 4 * 2 + r % 2; }

// Row of part `c` of float4 `i`.
__device__ inline int part_row(int, int i, int c) { return own_row(i % kRowGroups * 2 + c % 2); }

__device__ inline float4 accumulator(const Accumulators& accumulators, int i) {
  const float* of = accumulators[i / kRowGroups] + i % kRowGroups * 4;
  return make_float4(of[0], of[1], of[2], of[3]);
}

__device__ inline void set_accumulator(Accumulators& accumulators, int i, float4 value) {
  float* of = accumulators[i / kRowGroups] + i % kRowGroups * 4;
  of[0] = value.x;
  of[1] = value.y;
  of[2] = value.z;
  of[3] = value.w;
}

// Multiplies a group of eight rows, of which a thread has two.
__device__ inline void multiply_group(Accumulators& accumulators, int group, float2 factor) {
#pragma unroll
  for (int tile = 0; tile < kDimTiles; ++tile) {
    float* of = accumulators[tile] + group * 4;
    of[0] *= factor.x;
    of[1] *= factor.y;
    of[2] *= factor.x;
    of[3] *= factor.y;
  }
}

// Float4 `i` holds two rows of each of its two dims.
__device__ inline float4 weighted(float4 value, const float (&weights)[kOwnRows], int i) {
  const float a = weights[i % kRowGroups * 2];
  const float b = weights[i % kRowGroups * 2 + 1];
  return make_float4(value.x * a, value.y * b, value.z * a, value.w * b);
}

// Of all warps' float4s in a row, the tasks, those of half of the warps come first, of these those
// of the same eight rows together, and of these those of a warp.
constexpr int kRowsOfGroup = 8;
constexpr int kTasksOfGroup = kConsumerWarps / 2 * kDimTiles;
constexpr int kHalfTasks = kRowGroups * kTasksOfGroup;

__device__ inline int first_task_of(int warp) {
  return half_of_warp(warp) * kHalfTasks + place_in_half(warp) * kDimTiles;
}

// Where float4 `i` is behind the first of its warp.
__device__ constexpr int task_offset(int i) {
  return i % kRowGroups * kTasksOfGroup + i / kRowGroups;
}

// Which float4 is number `task` in this order.
__device__ constexpr int accumulator_in_order(int task) {
  return task % kDimTiles * kRowGroups + task / kDimTiles;
}

// Which warp has a task, and as which of its float4s.
__device__ inline int warp_of_task(u32 task) {
  return warp_at(task / kHalfTasks, task % kTasksOfGroup / kDimTiles);
}
__device__ inline int accumulator_of_task(u32 task) {
  return task % kDimTiles * kRowGroups + task / kTasksOfGroup % kRowGroups;
}

struct TaskRows {
  int a;
  int b;
};

__device__ inline TaskRows task_rows(u32 task) {
  const int row = own_row(task / kTasksOfGroup % kRowGroups * 2);
  return {row, row + 1};
}

// A row has one scale.
constexpr int kScales = 1;
__device__ inline int scale_of_warp(int) { return 0; }
__device__ inline int scale_of_task(u32) { return 0; }

__device__ inline float4 add_task(float4 total, float4 value, float weight_a, float weight_b) {
  return make_float4(total.x + value.x * weight_a, total.y + value.y * weight_b,
                     total.z + value.z * weight_a, total.w + value.w * weight_b);
}

// Over the lanes that have the same rows.
__device__ inline float maximum_of_lanes(float value) {
#pragma unroll
  for (int lanes = 4; lanes < kWarpLanes; lanes *= 2) {
    value = fmaxf(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// A scale is a number, or a tensor of one element that only the device knows.

__device__ inline float value_of(const float* tensor, float number) {
  return tensor == nullptr ? number : *tensor;
}

// PTX ISA, "Floating Point Instructions: ex2". Needs sm_20.

// ex2.approx.ftz.f32
// 2 to the power of x, relative error below 2^-22; minus infinity gives zero.
__device__ inline float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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

// What a row has come to.

// A row's probabilities are relative to its reference. No maximum is asked for while none of them
// is larger than this, so that references move seldom.
constexpr float kMostProbability = 0x1p8f;

struct RowState {
  float reference;  // log2 units; what the accumulators are relative to
  float sum;  // of probabilities, relative to it
};

__device__ inline i64 global_row(const Params& params, const Item& item, int row) {
  return item.first_query * params.heads + item.first_row + row;
}

// The LSE is in the base that the call asks for.
__device__ inline RowResult result_of(const Params& params, const Item& item, int row,
                                      RowState state) {
  const float sink = params.sinks == nullptr || row >= item.rows
                         ? -kInfinity
                         : params.sinks[static_cast<u32>(item.first_row + row) % params.heads];
  return finish_row(state.reference, state.sum, sink, params.lse_factor);
}

__device__ inline float output_scale(const Params& params) {
  return value_of(params.bmm2_scale_tensor, params.bmm2_scale);
}

// For fmaxf, which ignores a NaN.
__device__ inline float nan_unless_finite(float value) { return fmaf(value, 0.0f, value); }

// What the rows of an item have come to, in shared memory: a consumer's thread has a quarter of
// all rows, and no registers for them.

struct OwnRows {
  SharedMemory& shared;
  int slot;  // of the item

  // Of row `r` of this thread.
  __device__ RowState operator[](int r) const { return state(own_row(r)); }

  __device__ RowState state(int row) const {
    return {shared.row_reference[slot][row], shared.row_sum[slot][row]};
  }
  __device__ void set_state(int row, RowState state) {
    shared.row_reference[slot][row] = state.reference;
    shared.row_sum[slot][row] = state.sum;
  }
};

// What is left of a row of a piece, in one chunk.

struct alignas(kChunkBytes) PartialRow {
  float reference;  // log2 units
  float sum;
  float scales[kScales];  // what halves are multiplied by; later also by the piece's weight
};
static_assert(sizeof(PartialRow) == kChunkBytes, "the plan counts on it, and a copy brings a row");

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

// PTX ISA, "Parallel Synchronization and Communication Instructions: red". Needs sm_80.

// red.release.gpu.global.inc.u32
// Adds one, or makes `most` zero; what was written before is seen by those who acquire the count.
__device__ inline void red_inc_release_gpu(u32* address, u32 most) {
  asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(address), "r"(most) : "memory");
}

// red.relaxed.gpu.global.inc.u32
// Adds one, or makes `most` zero.
__device__ inline void red_inc_relaxed_gpu(u32* address, u32 most) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(address), "r"(most) : "memory");
}

// red.relaxed.gpu.global.add.u32
__device__ inline void red_add_relaxed_gpu(u32* address, u32 value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// What values of a row are multiplied by to be left as halves.

// The power of two that brings what is finite of a row, `largest` at the most, below 2^14: the
// eleven bits of a half then tell more of a value than the output will. Both it and its inverse are
// normal numbers.
__device__ inline float half_scale(float largest) {
  const int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127;
  return __uint_as_float(static_cast<u32>(127 + 13 - max(exponent, -100)) << 23);
}

__device__ inline float inverse_of_power(float power) {
  return __uint_as_float((254u << 23) - __float_as_uint(power));
}

// What is left of the rows of a piece, by one thread each: they are in shared memory.

__device__ inline void scales_of_rows(SharedMemory& shared, const Crew&, const Accumulators&,
                                      const OwnRows& rows, float (&scales)[kOwnRows]) {
  const float* own = &shared.row_scale[rows.slot][own_row(0)];
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    const float2 pair = *reinterpret_cast<const float2*>(own + group * 8);
    scales[group * 2] = pair.x;
    scales[group * 2 + 1] = pair.y;
  }
}

__device__ inline void store_states(PartialRow* target, const Crew& crew, const OwnRows& rows,
                                    const float (&)[kOwnRows]) {
  const int row = crew.thread();
  if (row >= kRows) return;
  const RowState state = rows.state(row);
  target[row] = {
      state.reference, state.sum, {inverse_of_power(rows.shared.row_scale[rows.slot][row])}};
}
static_assert(kScales == 1 && kRows <= kConsumerThreads / 2, "a crew has a thread for each row");

// The pieces of a unit: how they are left in the workspace, brought from there, and two of them
// added.

// A task is one float4 of every thread of a warp. A piece is left in the workspace task by task, as
// four halves a thread, for what is written and read is what merging costs; and each row's state.
// Each block of the grid has two places: for the piece that its span begins with, and for the one
// it ends with.
constexpr int kTaskBytes = kWarpLanes * sizeof(uint2);

__device__ inline int first_place(int block) { return block * 2; }
__device__ inline int last_place(int block) { return block * 2 + 1; }

// Where this block leaves its piece.
__device__ inline int place_of_own(const Item& item) {
  const int block = static_cast<int>(blockIdx.x);
  return item.piece > 0 ? first_place(block) : last_place(block);
}

__device__ inline uint2* partial_values(const Params& params, int place) {
  return reinterpret_cast<uint2*>(params.partial_out) +
         static_cast<u32>(place * kTasks * kWarpLanes);
}

__device__ inline PartialRow* partial_rows(const Params& params, int place) {
  return reinterpret_cast<PartialRow*>(params.partial_rows) + place * kRows;
}

// Where this thread's values are among those of all tasks.
__device__ inline int own_values() {
  return first_task_of(fresh_warp()) * kWarpLanes + fresh_lane();
}

__device__ inline uint2 to_halves(float4 value) {
  return make_uint2(cvt_rn_x2_f32(Fp16{}, value.y, value.x),
                    cvt_rn_x2_f32(Fp16{}, value.w, value.z));
}

__device__ inline float4 from_halves(uint2 halves) {
  return make_float4(cvt_f32(Fp16{}, static_cast<u16>(halves.x)),
                     cvt_f32(Fp16{}, static_cast<u16>(halves.x >> 16)),
                     cvt_f32(Fp16{}, static_cast<u16>(halves.y)),
                     cvt_f32(Fp16{}, static_cast<u16>(halves.y >> 16)));
}

// Where the pieces of a unit lie. Spans are in the opposite order of blocks.
struct PiecePlaces {
  int owner;
  int team_size;

  __device__ PiecePlaces(const Params& params, const Item& item)
      : owner(item.owner), team_size(params.team_size) {}

  __device__ int operator[](int piece) const {
    return piece == 0 ? last_place(owner) : first_place(owner - piece * team_size);
  }
};

// How many crews leave a piece, or one half of it, for others: of two pieces each merger's half
// comes from the other block.
__device__ inline int announcements(const Item& item) {
  return item.pieces == 2 ? item.mergers : item.pieces;
}

// A unit's counter counts what is announced, and then the mergers that have seen all of that. The
// last of these makes it zero again, for the next launch.
__device__ inline u32* counter_of(const Params& params, const Item& item) {
  return params.counters + item.owner;
}

__device__ inline u32 last_count(const Item& item) {
  return static_cast<u32>(announcements(item) + item.mergers - 1);
}

// When all threads of the crew have written; tells those who wait.
__device__ inline void announce(const Params& params, const Item& item, const Crew& crew) {
  u32* counter = counter_of(params, item);
  const u32 last = last_count(item);
  crew.sync();
  if (crew.is_leader()) red_inc_release_gpu(counter, last);
}

// Waits for all pieces, by each merger once.
__device__ inline void await(const Params& params, const Item& item, const Crew& crew) {
  if (crew.is_leader()) {
    u32* counter = counter_of(params, item);
    const u32 last = last_count(item);
    const u32 awaited = static_cast<u32>(announcements(item));
    while (ld_acquire_gpu(counter) < awaited) {
    }
    red_inc_relaxed_gpu(counter, last);
  }
  crew.sync();
}

// What a crew has of pieces to merge, where query and tokens were: no item follows. First some
// rows, each of every piece, then of every piece some tasks.
struct MergeRoom {
  unsigned char* bytes;
  int pieces;
  int first_row;  // behind the last row comes the first again
  int rows;
  int first_task;
  int tasks;

  // Whether the values of the block's own piece are where they will be merged.
  __device__ bool keeps_own() const { return tasks >= kTasksTogether; }

  // A row of those from the first on, and where a row is among them.
  __device__ int row_at(u32 place) const { return static_cast<int>((first_row + place) % kRows); }
  __device__ u32 place_of(int row) const { return static_cast<u32>(row - first_row) % kRows; }

  __device__ PartialRow* states(u32 place) const {
    // An odd number of chunks, so that rows begin in different banks.
    return reinterpret_cast<PartialRow*>(bytes) + place * (pieces | 1);
  }
  __device__ PartialRow& state(int piece, int row) const { return states(place_of(row))[piece]; }
  __device__ uint2* values(int piece) const {
    return reinterpret_cast<uint2*>(states(rows)) + piece * tasks * kWarpLanes;
  }
};

static_assert(kRows * sizeof(PartialRow) + kTasks * kTaskBytes <= kRoomBytes,
              "the only other piece comes whole");

// Where a thread leaves the values of a piece: in the workspace, but for the tasks that this block
// will merge itself. These stay in its room, if they are whole groups of four.
struct PieceTarget {
  uint2* left;
  uint2* kept;
  int first_kept;
  int kept_tasks;

  // `room` is for a slice, which may be empty.
  __device__ PieceTarget(const Params& params, const Item& item, const MergeRoom& room)
      : left(partial_values(params, place_of_own(item)) + own_values()),
        kept(room.values(item.piece) + own_values() - room.first_task * kWarpLanes),
        first_kept(room.first_task - first_task_of(fresh_warp())),
        kept_tasks(room.keeps_own() ? room.tasks : 0) {}

  // Of float4 `i`.
  __device__ uint2* place(int i) const {
    const int group = task_offset(i) / kTasksTogether * kTasksTogether;
    const bool keeps = static_cast<u32>(group - first_kept) < static_cast<u32>(kept_tasks);
    return (keeps ? kept : left) + task_offset(i) * kWarpLanes;
  }
};

// By the threads of a crew.
__device__ inline void store_partial(const Params& params, const Item& item, SharedMemory& shared,
                                     const Crew& crew, const PieceTarget& target,
                                     const Accumulators& accumulators, const OwnRows& rows) {
  float scales[kOwnRows];
  scales_of_rows(shared, crew, accumulators, rows, scales);
#pragma unroll
  for (int task = 0; task < kAccumulators; ++task) {
    const int i = accumulator_in_order(task);
    *target.place(i) = to_halves(weighted(accumulator(accumulators, i), scales, i));
  }
  store_states(partial_rows(params, place_of_own(item)), crew, rows, scales);
}

// Begins to copy the tasks of all pieces but `own`, from `first_piece` on: of many pieces each by
// one warp, of few each by all. A warp copies some chunks of its lanes together.
__device__ inline void begin_values(const Params& params, const PiecePlaces& places,
                                    const Crew& crew, const MergeRoom& room, int first_piece,
                                    int own) {
  constexpr int kChunksTogether = 4;
  constexpr int kCopyBytes = kWarpLanes * kChunkBytes;
  const int warp = crew.thread() / kWarpLanes;
  const int warps = crew.threads() / kWarpLanes;
  const bool are_many = room.pieces >= kConsumerWarps;
  const int step = kChunksTogether * kCopyBytes * (are_many ? 1 : warps);
  const int first =
      kChunksTogether * kCopyBytes * (are_many ? 0 : warp) + fresh_lane() * kChunkBytes;
  const int bytes = room.tasks * kTaskBytes;
#pragma unroll 1
  for (int piece = are_many ? warp : 0; piece < room.pieces; piece += are_many ? warps : 1) {
    if (first_piece + piece == own) continue;
    const unsigned char* source = reinterpret_cast<const unsigned char*>(
        partial_values(params, places[first_piece + piece]) + room.first_task * kWarpLanes);
    const u32 target = shared_address(room.values(piece));
#pragma unroll 1
    for (int i = first; i < bytes; i += step) {
#pragma unroll
      for (int chunk = 0; chunk < kChunksTogether; ++chunk) {
        if (i + chunk * kCopyBytes >= bytes) continue;
        cp_async_cg_16(target + i + chunk * kCopyBytes, source + i + chunk * kCopyBytes,
                       kChunkBytes);
      }
    }
  }
}

// Adds a piece that has been brought to the accumulators, and its rows' states to theirs.

// What a piece and the other are multiplied by, in place of the other's state.
struct JoinedRow {
  float own_weight;
  float weight;
};

__device__ inline JoinedRow joined_row(const PartialRow& state) {
  return {state.reference, state.sum};
}

// By one thread for each row: all warps have all rows. Where two pieces are exchanged, this block's
// other crew has read the states before: what is awaited counts what it has left, too.
__device__ inline void join_rows(const Crew& crew, const MergeRoom& room, OwnRows& rows) {
  const int row = crew.thread();
  if (row < kRows) {
    PartialRow& state = room.state(0, row);
    const PartialRow other = state;
    const RowState own = rows.state(row);
    const float largest = fmaxf(own.reference, other.reference);
    const float own_weight = ex2_approx(own.reference - largest);
    const float weight = ex2_approx(other.reference - largest);
    rows.set_state(row, {largest, own.sum * own_weight + other.sum * weight});
    state.reference = own_weight;
    state.sum = weight * other.scales[0];
  }
  crew.sync();
}

__device__ inline void add_piece(const Crew& crew, const MergeRoom& room,
                                 Accumulators& accumulators, OwnRows& rows) {
  join_rows(crew, room, rows);
  const uint2* values = room.values(0) + own_values() - room.first_task * kWarpLanes;
#pragma unroll
  for (int group = 0; group < kRowGroups; ++group) {
    const int row = own_row(group * 2);
    const JoinedRow a = joined_row(room.state(0, row));
    const JoinedRow b = joined_row(room.state(0, row + 1));
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float4 other = from_halves(values[task_offset(tile * kRowGroups + group) * kWarpLanes]);
      float* own = accumulators[tile] + group * 4;
      own[0] = own[0] * a.own_weight + other.x * a.weight;
      own[1] = own[1] * b.own_weight + other.y * b.weight;
      own[2] = own[2] * a.own_weight + other.z * a.weight;
      own[3] = own[3] * b.own_weight + other.w * b.weight;
    }
    __syncwarp();
  }
}

// Adding the only other piece of a unit to one that is in registers.

// Adds the only other piece to this one, which is in registers: by the owner, or by both to the
// half that either keeps.
__device__ inline void fold_piece(const Params& params, const Item& item, SharedMemory& shared,
                                  const Crew& crew, Accumulators& accumulators, OwnRows& rows) {
  await(params, item, crew);
  const int tasks = crew.half < 0 ? kTasks : kTasks / 2;
  const MergeRoom room = {shared.query, 1, 0, kRows, max(crew.half, 0) * tasks, tasks};
  const PiecePlaces places(params, item);
  const int row = crew.thread();
  if (row < kRows) {
    cp_async_cg_16(shared_address(&room.state(0, row)),
                   partial_rows(params, places[1 - item.piece]) + row, kChunkBytes);
  }
  begin_values(params, places, crew, room, 1 - item.piece, item.piece);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  crew.sync();
  add_piece(crew, room, accumulators, rows);
}

// Writes finished rows.

// Two neighbouring dims of a row; eight lanes write 32 bytes.
__device__ inline void store_pair(unsigned char* out, float low, float high) {
  *reinterpret_cast<u32*>(out) = cvt_rn_x2_f32(Element{}, high, low);
}

// What this thread's rows are multiplied by. All warps have all rows: every lane works out some of
// them, and one warp tells of the LSE besides.
__device__ inline void find_factors(const Params& params, const Item& item, const OwnRows& rows,
                                    float (&factors)[kOwnRows]) {
  constexpr int kRowsOfLane = ceil_div(kRows, kWarpLanes);
  const float scale = output_scale(params);
  float found[kRowsOfLane];
#pragma unroll
  for (int i = 0; i < kRowsOfLane; ++i) {
    const int row = (i * kWarpLanes + fresh_lane()) % kRows;
    const RowResult result = result_of(params, item, row, rows.state(row));
    found[i] = result.factor * scale;
    if (params.lse != nullptr && fresh_thread() < min(kRows, kWarpLanes) && row < item.rows) {
      params.lse[global_row(params, item, row)] = result.lse;
    }
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    factors[r] = __shfl_sync(~0u, found[r / 2 * 8 / kWarpLanes], own_row(r) % kWarpLanes);
  }
}

__device__ inline void store_rows(const Params& params, const Item& item, SharedMemory&,
                                  const Accumulators& accumulators, const OwnRows& rows) {
  float factors[kOwnRows];
  find_factors(params, item, rows, factors);
  unsigned char* out =
      reinterpret_cast<unsigned char*>(params.out) +
      (global_row(params, item, own_row(0)) * kHeadDimVo + dim_of(fresh_warp(), 0)) * 2;
#pragma unroll
  for (int r = 0; r < kOwnRows; ++r) {
    if (own_row(r) >= item.rows) continue;
    unsigned char* target = out + (r / 2 * 8 + r % 2) * kHeadDimVo * 2;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
      const float* of = accumulators[tile] + r / 2 * 4 + r % 2;
      store_pair(target + tile * kDimsOfTile * 2, of[0] * factors[r], of[2] * factors[r]);
    }
  }
}

// Writes some tasks from `first` on, after merging: of the same rows, one tile of dims after the
// other.
template <int kCount>
__device__ inline void store_tasks(const Params& params, const Item& item, SharedMemory&, int first,
                                   const float4 (&values)[kCount]) {
  const TaskRows rows = task_rows(first);
  const int dim = dim_of(warp_of_task(first), accumulator_of_task(first));
  unsigned char* out = reinterpret_cast<unsigned char*>(params.out) +
                       (global_row(params, item, rows.a) * kHeadDimVo + dim) * 2;
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
    unsigned char* target = out + n * kDimsOfTile * 2;
    if (rows.a < item.rows) store_pair(target, values[n].x, values[n].z);
    if (rows.b < item.rows) store_pair(target + kHeadDimVo * 2, values[n].y, values[n].w);
  }
}

// Merging three pieces and more of a unit: every block that is a merger takes a slice of the
// result.

// Over the lanes that share a row, which are neighbours.
template <typename Join>
__device__ inline float join_lanes(float value, int sharing, Join join) {
#pragma unroll 1
  for (int lanes = 1; lanes < sharing; lanes *= 2) {
    value = join(value, __shfl_xor_sync(~0u, value, lanes));
  }
  return value;
}

// Groups of tasks, one after the other, have the groups of rows, in some families all of them
// twice.
static_assert((kRows & (kRows - 1)) == 0, "rows are counted modulo all of them");
constexpr int kGroupsOfRows = kRows / kRowsOfGroup;

// The rows that a slice of so many tasks touches at the most: small ones those of one group.
__device__ constexpr int rows_of_slice(int tasks) {
  if (kTasksOfGroup % tasks == 0) return kRowsOfGroup;
  const int groups = (tasks + kTasksOfGroup - 2) / kTasksOfGroup + 1;
  return groups < kGroupsOfRows ? groups * kRowsOfGroup : kRows;
}

// What sharers of tasks have of them, behind what has been brought, and behind what a warp reads
// there that adds up four tasks of a slice of fewer.
using SharedTotals = float4[kTasksTogether][kWarpLanes];
constexpr int kSharedTotalsBytes = kConsumerWarps * static_cast<int>(sizeof(SharedTotals));
__device__ constexpr int shared_totals_offset(int pieces, int rows, int tasks) {
  return (pieces | 1) * rows * static_cast<int>(sizeof(PartialRow)) +
         (pieces * tasks + kTasksTogether) * kTaskBytes;
}

__device__ constexpr bool slices_fit() {
  for (int pieces = 3; pieces <= kMostSpans; ++pieces) {
    const int tasks = tasks_of_slice(pieces - 1);
    const int offset = shared_totals_offset(pieces, rows_of_slice(tasks), tasks);
    if (offset + kSharedTotalsBytes > kRoomBytes) return false;
  }
  return true;
}
static_assert(slices_fit(), "a slice of every piece comes at once");
static_assert(kTasksOfGroup % kTasksTogether == 0, "tasks that are added together have one row");

constexpr int kLog2ConsumerThreads = kConsumerThreads == 256 ? 8 : 7;
static_assert(kConsumerThreads == 1 << kLog2ConsumerThreads, "four or eight warps");

// Begins to copy the rows of all pieces, of each piece whole lines: group by group of rows.
__device__ inline void begin_states(const Params& params, const PiecePlaces& places,
                                    const MergeRoom& room) {
  const float share = __fdividef(1.0f, static_cast<float>(room.pieces));
  const int end = room.pieces * (room.rows / kRowsOfGroup);
#pragma unroll 1
  for (int i = fresh_thread() / kRowsOfGroup; i < end; i += kConsumerThreads / kRowsOfGroup) {
    // In floats, in which such small numbers lose nothing, a division is short.
    const int group = __float2int_rz((static_cast<float>(i) + 0.5f) * share);
    const int piece = i - group * room.pieces;
    const int row = room.row_at(group * kRowsOfGroup + fresh_thread() % kRowsOfGroup);
    cp_async_cg_16(shared_address(&room.state(piece, row)),
                   partial_rows(params, places[piece]) + row, kChunkBytes);
  }
}

// As many threads as there are see to each row, and no more than a warp has.
__device__ constexpr int log2_threads_of_row(int log2_rows) {
  return kLog2ConsumerThreads - log2_rows < 5 ? kLog2ConsumerThreads - log2_rows : 5;
}

// How many pieces of a row a thread sees to at the most.
__device__ constexpr int most_pieces_of_thread() {
  int most = 1;
  for (int pieces = 3; pieces <= kMostSpans; ++pieces) {
    const int rows = rows_of_slice(tasks_of_slice(pieces - 1));
    int log2_rows = 0;
    while (1 << log2_rows < rows) ++log2_rows;
    const int own = ceil_div(pieces, 1 << log2_threads_of_row(log2_rows));
    if (own > most) most = own;
  }
  return most;
}
constexpr int kMostOwnPieces = most_pieces_of_thread();

// Makes the scale of every piece the factor of its halves in the finished row.
__device__ inline void merge_rows(const Params& params, const Item& item, const MergeRoom& room) {
  const int log2_threads = log2_threads_of_row(32 - __clz(room.rows - 1));
  const int threads = 1 << log2_threads;
  const int place = fresh_thread() >> log2_threads;
  if (!__any_sync(~0u, place < room.rows)) return;  // rows are shared by whole warps
  const int row = room.row_at(place);
  const int first = fresh_thread() & (threads - 1);
  // Those behind the last piece count for nothing.
  PartialRow states[kMostOwnPieces];
  float reference = -kLargest;
#pragma unroll
  for (int i = 0; i < kMostOwnPieces; ++i) {
    const int piece = first + i * threads;
    states[i] = room.states(place)[min(piece, room.pieces - 1)];
    if (piece >= room.pieces) states[i].sum = 0.0f;
    reference = fmaxf(reference, states[i].reference);
  }
  reference = join_lanes(reference, threads, [](float a, float b) { return fmaxf(a, b); });
  float weights[kMostOwnPieces];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostOwnPieces; ++i) {
    weights[i] = ex2_approx(states[i].reference - reference);
    sum += states[i].sum * weights[i];
  }
  sum = join_lanes(sum, threads, [](float a, float b) { return a + b; });
  const RowResult result = result_of(params, item, row, {reference, sum});
  const float factor = result.factor * output_scale(params);
#pragma unroll
  for (int i = 0; i < kMostOwnPieces; ++i) {
    const int piece = first + i * threads;
    if (piece >= room.pieces) continue;
#pragma unroll
    for (int scale = 0; scale < kScales; ++scale) {
      room.states(place)[piece].scales[scale] = states[i].scales[scale] * (factor * weights[i]);
    }
  }
  // The slice that a row begins in tells of it.
  const int row_task = row / kRowsOfGroup * kTasksOfGroup;
  const bool is_begun = room.first_task <= row_task && row_task < room.first_task + room.tasks;
  if (params.lse != nullptr && is_begun && first == 0 && row < item.rows) {
    params.lse[global_row(params, item, row)] = result.lse;
  }
}

// Adds up the four tasks from `first` on, of some pieces: of the one that is `sharer`, and every
// 2^`log2_sharers` from there. Those behind the slice are anything.
__device__ inline void add_tasks(const MergeRoom& room, int first, int sharer, int log2_sharers,
                                 float4 (&totals)[kTasksTogether]) {
#pragma unroll
  for (int n = 0; n < kTasksTogether; ++n) totals[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int lane = fresh_lane();
  const uint2* values = room.values(sharer) + (first - room.first_task) * kWarpLanes + lane;
  const int values_step = room.tasks * kWarpLanes << log2_sharers;
  const TaskRows rows = task_rows(first);
  const int scale = scale_of_task(first);
  const PartialRow* state_a = &room.state(sharer, rows.a);
  const int to_b = (rows.b - rows.a) * (room.pieces | 1);  // of the same group
#pragma unroll 1
  for (int piece = sharer; piece < room.pieces; piece += 1 << log2_sharers) {
    const float a = state_a->scales[scale];
    const float b = state_a[to_b].scales[scale];
#pragma unroll
    for (int n = 0; n < kTasksTogether; ++n) {
      totals[n] = add_task(totals[n], from_halves(values[n * kWarpLanes]), a, b);
    }
    values += values_step;
    state_a += 1 << log2_sharers;
  }
}

// Adds up the tasks of a slice, four together by each warp, and writes them.
__device__ inline void merge_tasks(const Params& params, const Item& item, SharedMemory& shared,
                                   const MergeRoom& room) {
#pragma unroll 1
  for (int i = fresh_warp() * kTasksTogether; i < room.tasks;
       i += kConsumerWarps * kTasksTogether) {
    float4 totals[kTasksTogether];
    add_tasks(room, room.first_task + i, 0, 0, totals);
    store_tasks<kTasksTogether>(params, item, shared, room.first_task + i, totals);
  }
}

// The same where there are so few tasks that 2^`log2_sharers` warps share four of them.
__device__ inline void merge_shared_tasks(const Params& params, const Item& item,
                                          SharedMemory& shared, const MergeRoom& room,
                                          int log2_sharers) {
  SharedTotals* all_totals = reinterpret_cast<SharedTotals*>(
      room.bytes + shared_totals_offset(room.pieces, room.rows, room.tasks));
  const int lane = fresh_lane();
  const int warp = fresh_warp();
  const int sharers = 1 << log2_sharers;
  const int own = (warp >> log2_sharers) * kTasksTogether;
  if (own < room.tasks) {
    float4 totals[kTasksTogether];
    add_tasks(room, room.first_task + own, warp & (sharers - 1), log2_sharers, totals);
#pragma unroll
    for (int n = 0; n < kTasksTogether; ++n) all_totals[warp][n][lane] = totals[n];
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
#pragma unroll 1
  for (int i = warp; i < room.tasks; i += kConsumerWarps) {
    float4 total[1] = {make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll 2
    for (int sharer = 0; sharer < sharers; ++sharer) {
      const int other = (i / kTasksTogether << log2_sharers) + sharer;
      const float4 value = all_totals[other][i % kTasksTogether][lane];
      total[0] = make_float4(total[0].x + value.x, total[0].y + value.y, total[0].z + value.z,
                             total[0].w + value.w);
    }
    store_tasks<1>(params, item, shared, room.first_task + i, total);
  }
}

// What of all pieces belongs to the tasks that the block of a piece merges: none if it is no
// merger, or if there are no more than two pieces.
__device__ inline MergeRoom room_of_slice(SharedMemory& shared, const Item& item) {
  const bool merges = item.pieces > 2 && item.piece < item.mergers;
  const int first = merges ? item.piece * item.slice_tasks : kTasks;
  const int tasks = min(item.slice_tasks, kTasks - first);
  const u32 first_group = static_cast<u32>(first) / kTasksOfGroup;
  const u32 last_group = static_cast<u32>(first + tasks - 1) / kTasksOfGroup;
  const u32 first_row = first_group % kGroupsOfRows * kRowsOfGroup;
  const u32 rows = min((last_group + 1 - first_group) * kRowsOfGroup, static_cast<u32>(kRows));
  return {shared.query,           item.pieces, static_cast<int>(first_row),
          static_cast<int>(rows), first,       tasks};
}

__device__ inline void merge_slices(const Params& params, const Item& item, SharedMemory& shared,
                                    const MergeRoom& room) {
  const Crew all = {-1};
  const PiecePlaces places(params, item);
  await(params, item, all);
  if (room.tasks <= 0) return;
  begin_states(params, places, room);
  cp_async_commit_group();
  begin_values(params, places, all, room, 0, room.keeps_own() ? item.piece : -1);
  cp_async_commit_group();
  cp_async_wait_group<1>();
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  merge_rows(params, item, room);
  cp_async_wait_group<0>();
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  const int groups = ceil_div(room.tasks, kTasksTogether);
  if (groups * 2 > kConsumerWarps) {
    merge_tasks(params, item, shared, room);
  } else {
    merge_shared_tasks(params, item, shared, room, __clz(groups * 2 - 1) - __clz(kConsumerWarps));
  }
}

// Whether some row of an item sees a value that has been cleared. One consumer may be at the
// next item before the other has set this one's back.

__device__ inline int& nonfinite_flag(SharedMemory& shared, const Item& item) {
  return shared.has_nonfinite[item_slot(item.count)];
}

// PTX ISA, "Control Flow Instructions: exit". Needs sm_80.

// exit
// Ends this thread, unless the word is zero. Compilers put what leads to an end without a condition
// behind all other code.
__device__ inline void exit_if(u32 word) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p exit;}" ::"r"(word) : "memory");
}

// Which elements of 16 bits are finite.

constexpr u32 kExponentBits = kIsSame<Element, Bf16> ? 0x7f80 : 0x7c00;

__device__ inline bool is_finite(u32 element) { return (element & kExponentBits) != kExponentBits; }

__device__ inline float value_of_element(u16 element) { return cvt_f32(Element{}, element); }

__device__ inline u32 finite_pair(u32 pair) {
  return (is_finite(pair) ? pair & 0xffff : 0) | (is_finite(pair >> 16) ? pair & 0xffff0000 : 0);
}

// Makes the rows that see what is not finite so, as they would be if it had been multiplied: in
// what has been stored of them, so that nothing of it is in the way of the usual case.

// Adds what was cleared to the rows that see it; `add` takes what a token is in the cache and its
// position. A weight of 0 is not told from others: what is not finite makes a row so.
template <typename Add>
__device__ inline void add_nonfinite(const Params& params, const Item& item, Add add) {
  const int end = min((item.first_block + item.blocks) * kBlockTokens, item.visible_to_any);
  const int* ids = params.block_tables + table_row(params, item.request).start;
  for (int token = max(item.visible_to_all, item.first_block * kBlockTokens); token < end;
       ++token) {
    const int page = ids[token / kPageSize];
    if (!is_page(page, params.num_pages)) continue;
    add(stored_token(params, page, token % kPageSize), token);
  }
}

// `place` tells where this thread's element of part `c` of float4 `i` is: a Stored, which has been
// multiplied by `scale`.
template <typename Stored, typename Place>
__device__ inline void restore_nonfinite(const Params& params, const Item& item, float scale,
                                         Place place) {
  if constexpr (kIsSparse) return;  // of a list all rows see all, and nothing is cleared
  add_nonfinite(params, item, [&](const StoredToken& token, int position) {
    const int warp = fresh_warp();
#pragma unroll 1
    for (int part = 0; part < kAccumulators * 4; ++part) {
      const int i = part / 4;
      const int c = part % 4;
      if (position >= item.row_visible[part_row(warp, i, c)]) continue;
      const u16 element = token.element(part_dim(warp, i, c));
      if (is_finite(element)) continue;
      u16* stored = place(i, c);
      const float sum = cvt_f32(Stored{}, *stored) + value_of_element(element) * scale;
      *stored = static_cast<u16>(cvt_rn_x2_f32(Stored{}, 0.0f, sum));
    }
  });
}

// Leaves what consumers have of an item where it belongs: in the output, or in the workspace to
// be merged.

__device__ inline void store_piece(const Params& params, const Item& item, SharedMemory& shared,
                                   const Crew& crew, const MergeRoom& room,
                                   const Accumulators& accumulators, const OwnRows& rows) {
  const PieceTarget target(params, item, room);
  store_partial(params, item, shared, crew, target, accumulators, rows);
  if (!nonfinite_flag(shared, item)) return;
  restore_nonfinite<Fp16>(params, item, 1.0f, [&](int i, int c) {
    return reinterpret_cast<u16*>(target.place(i)) + c;
  });
}

__device__ inline void store_whole(const Params& params, const Item& item, SharedMemory& shared,
                                   const Accumulators& accumulators, const OwnRows& rows) {
  store_rows(params, item, shared, accumulators, rows);
  if (!nonfinite_flag(shared, item)) return;
  restore_nonfinite<Element>(params, item, output_scale(params), [&](int i, int c) {
    const int warp = fresh_warp();
    return params.out + global_row(params, item, part_row(warp, i, c)) * kHeadDimVo +
           part_dim(warp, i, c);
  });
}

// Two pieces of which neither is followed by anything in its block are merged by both: either keeps
// one half of the tasks and leaves the other. Of other two the owner keeps its own, and of more
// everything is left, but for the slice that the block will merge.
__device__ inline void store_item(const Params& params, const Item& item, SharedMemory& shared,
                                  Accumulators& accumulators, OwnRows& rows) {
  const bool are_exchanged = item.pieces == 2 && item.mergers == 2;
  const int half = half_of_warp(fresh_warp());
  const Crew crew = {are_exchanged ? half : -1};
  const bool keeps = are_exchanged ? half == item.piece : item.piece == 0 && item.pieces <= 2;
  if (keeps) {
    if (item.pieces > 1) fold_piece(params, item, shared, crew, accumulators, rows);
    store_whole(params, item, shared, accumulators, rows);
  } else {
    const MergeRoom room = room_of_slice(shared, item);
    store_piece(params, item, shared, crew, room, accumulators, rows);
    announce(params, item, crew);
    if (item.pieces > 2 && item.piece < item.mergers) {
      merge_slices(params, item, shared, room);
      exit_if(item.pieces);  // nothing follows in this block
    }
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (fresh_thread() == 0) nonfinite_flag(shared, item) = 0;
}

// A number that all lanes have, and that compilers know to be the same in all: what depends on
// it is then in registers of the whole warp, where products want their descriptors.

__device__ inline u32 of_all(u32 number) { return __reduce_max_sync(~0u, number); }

// What tells wgmma where an operand lies in shared memory: tiles of rows of 128 bytes, swizzled,
// at multiples of 1024 bytes, or of 64 bytes at multiples of 512. PTX ISA, "Matrix Descriptor
// Format".

// A descriptor is made of two words where it is used: the lower holds the address and the distance
// of neighbouring tiles, the upper the distance of groups of eight rows and the kind of swizzle.
// Addresses count 16 bytes; adding to a lower word moves the operand.
constexpr u32 kDescriptorHigh = 1024 / 16 | 1u << 30;
constexpr u32 kDescriptorHigh64 = 512 / 16 | 2u << 30;

__device__ inline u32 descriptor_low(u32 address, u32 tile_distance) {
  return (address & 0x3ffff) >> 4 | tile_distance / 16 << 16;
}

// What moves the operand by so many bytes.
__device__ constexpr u32 descriptor_step(u32 bytes) { return bytes / 16; }

__device__ inline u64 descriptor(u32 low) { return mov_b64(low, kDescriptorHigh); }
__device__ inline u64 descriptor_64(u32 low) { return mov_b64(low, kDescriptorHigh64); }

// The scales of a block's tokens in shared memory.

// Values are multiplied as fp16, by scales in fp16. So that none is too large for that, they are in
// units of an item, a power of two: the largest scale is between 2^6 and 2^7 of them when one is
// chosen, and times 448 it is below 65504. What is below 2^-14 units loses bits: nothing of a token
// whose scale is 2^11 times smaller. The unit becomes larger when a block has a larger scale.
constexpr float kMostUnits = 128.0f;
constexpr float kLargestValue = kMostUnits * 448.0f;

// How many units are 1, before there is a scale: what any may exceed.
constexpr float kFirstUnits = 0x1p90f;

// How many are 1 so that the largest scale, which has that magnitude, is below kMostUnits.
__device__ inline float units_of(float largest) {
  const u32 exponent = max(__float_as_uint(largest) >> 23, 43u);  // of 2^90 at the most
  return __uint_as_float((260 - exponent) << 23);
}

// The logarithm of a power of two.
__device__ inline float log2_of_power(float power) {
  return static_cast<float>(static_cast<int>(__float_as_uint(power) >> 23) - 127);
}

// For consumers, a warp of the scorer puts the scales of its sixteen tokens, as fp16, where their
// own were: group by group, for tokens 2c and 2c + 1 of either half of them a word beside each
// other.
__device__ constexpr int value_scale_place(int token, int group) {
  return token / kTokensOfWarp * (kTokensOfWarp * kScaleGroups * 2) + group * kTokensOfWarp +
         token % 8 / 2 * 4 + token % kTokensOfWarp / 8 * 2 + token % 2;
}

__device__ inline u16& value_scale(unsigned char* stage, int token, int group) {
  return reinterpret_cast<u16*>(stage + kScalesOffset)[value_scale_place(token, group)];
}

// A thread of the scorer, asked for its index once a block: that takes as long as a product.
struct ScorerThread {
  int lane;
  int warp;

  __device__ ScorerThread() {
    const int thread = fresh_thread() % kScorerThreads;
    lane = thread % kWarpLanes;
    warp = thread / kWarpLanes;
  }

  __device__ int token() const { return warp * kTokensOfWarp + lane / 4; }  // and that 8 further
};

// Of the tokens of a thread.
struct KeyScales {
  float of[2][kScaleGroups];

  __device__ KeyScales(const unsigned char* stage, const ScorerThread& own) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4 found =
          reinterpret_cast<const float4*>(stage + kScalesOffset)[own.token() + half * 8];
      of[half][0] = found.x;
      of[half][1] = found.y;
      of[half][2] = found.z;
      of[half][3] = found.w;
    }
  }
};

// And those of the group lane % 4 alone, which this thread leaves for consumers.
struct OwnScales {
  float of[2];

  __device__ void take(const KeyScales& scales, const ScorerThread& own) {
    const int group = own.lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = group % 2 == 0 ? scales.of[half][0] : scales.of[half][1];
      const float high = group % 2 == 0 ? scales.of[half][2] : scales.of[half][3];
      of[half] = group < 2 ? low : high;
    }
  }

  // Whether any is too large for its unit.
  __device__ bool exceed(float units) const { return largest() * units >= kMostUnits; }

  // The largest finite magnitude.
  __device__ float largest() const {
    const float a = fabsf(of[0]);
    const float b = fabsf(of[1]);
    return fmaxf(a <= kLargest ? a : 0.0f, b <= kLargest ? b : 0.0f);
  }

  // All lanes have read theirs.
  __device__ void leave(unsigned char* stage, const ScorerThread& own, float units) const {
    u16* first = &value_scale(stage, own.token(), own.lane % 4);
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      first[value_scale_place(half * 8, 0)] =
          static_cast<u16>(cvt_rn_x2_f32(Fp16{}, 0.0f, of[half] * units));
    }
  }
};
static_assert(kTokensOfWarp == 16, "a thread has two tokens of a warp's");
static_assert(kScaleGroups == 4, "a thread leaves the scales of one group");

// Values that some row of a tile must not see: 0 * NaN is NaN, so what is not finite must not
// meet the tensor cores, though its weight is 0.

// A pair of stored elements with zeros for what is no number: of that all bits are set but the
// sign.
__device__ inline u32 number_bytes(u32 pair) {
  return ((pair & 0x7f) == 0x7f ? 0 : pair & 0xff) |
         ((pair & 0x7f00) == 0x7f00 ? 0 : pair & 0xff00);
}

// Puts zeros for what is not finite in the tokens from `first` to `end` of the block at `stage`, by
// the consumers; and for a scale that is not. Some row sees these tokens.
__device__ inline void clear_nonfinite(SharedMemory& shared, const Item& item, unsigned char* stage,
                                       int first, int end) {
  constexpr int kTokenPairs = kLatentDim / 2;
#pragma unroll 1
  for (int i = fresh_thread(); i < (end - first) * kTokenPairs; i += kConsumerThreads) {
    const int token = first + i / kTokenPairs;
    const int dim = i % kTokenPairs * 2;
    u16& scale = value_scale(stage, token, dim / kScaledDims);
    const u32 row = dim / kTileRowBytes * kTileBytes +
                    swizzled_offset<128>(token, dim % kTileRowBytes / kChunkBytes);
    u16& stored = *reinterpret_cast<u16*>(stage + row + dim % kChunkBytes);
    const bool is_scaled = (scale & 0x7c00) != 0x7c00;
    const u32 finite = number_bytes(stored);
    if (is_scaled && finite == stored) continue;
    stored = static_cast<u16>(finite);
    if (!is_scaled) scale = 0;
    nonfinite_flag(shared, item) = 1;
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
}

// Blocks of tokens in the stages of a ring, counted from the first of all items.

// The block that `blocks` have preceded: where it is, and which phase of a barrier is its own.
__device__ inline int block_stage(u32 blocks) { return static_cast<int>(blocks % kStages); }
__device__ inline u32 block_parity(u32 blocks) { return blocks / kStages % 2; }

// PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: wgmma". Needs sm_90.
// d[64, N] = a[64, 16] * b[16, N], plus d if `accumulates`, by four warps with 16 rows of d each.
// A lane holds, with g = lane / 4 and c = lane % 4: of d rows g (0, 1) and g + 8 (2, 3), columns
// 8j + 2c, in words 4j and after; of a in registers two elements a word, as of mma.
// Operands in shared memory lie as their descriptors say, along k unless they are transposed.

// wgmma.fence.sync.aligned
// Orders accesses of registers before the wgmma that follow.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// wgmma.commit_group.sync.aligned
__device__ inline void wgmma_commit_group() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// wgmma.wait_group.sync.aligned
// Waits until at most `kPending` of this warp's newest groups are still under way.
template <int kPending>
__device__ inline void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps what reads the accumulators behind the wait before, and what writes them before the next
// wgmma; no instruction.
template <int kCount>
__device__ inline void wgmma_keep(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Has an operand in registers made before the fence that follows; no instruction.
template <int kCount>
__device__ inline void wgmma_keep(u32 (&a)[kCount]) {
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
// `a` lies along its rows.
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
// `a` lies along its rows.
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
// `b` lies along its columns.
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
// `a` is in registers; `b` lies along its columns.
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
// `a` lies along its rows.
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
// `a` lies along its rows.
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
// `b` lies along its columns.
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
// `a` is in registers; `b` lies along its columns.
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
// Of e4m3; as in ptx/wgmma.cuh, with 32 elements along k: a[64, 32] * b[32, N], four elements a
// word. Both operands lie along k. Sums keep few bits, and what is below them is cut off.

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

// Sums of the probabilities of rows, by the consumers, who have time for it: every thread has
// some of a row's tokens.

constexpr int kSummersOfRow = kConsumerThreads / kRows;
constexpr int kSummedBytes = kTileRowBytes / kSummersOfRow;  // of a block's row
static_assert(kSummersOfRow * kRows == kConsumerThreads, "threads share the rows");

struct RowSum {
  float total = 0.0f;  // of this thread's tokens, in the units of the outputs

  __device__ static int row() { return fresh_thread() / kSummersOfRow; }

  // Adds those of the block in `stage`.
  __device__ void add(const SharedMemory& shared, int stage) {
    const int first = fresh_thread() % kSummersOfRow * kSummedBytes;
    float sum = 0.0f;
#pragma unroll
    for (int more = 0; more < kSummedBytes; more += sizeof(uint2)) {
      const int byte = first + more;
      const u32 place = swizzled_offset<kTileRowBytes>(row(), byte / kChunkBytes);
      const uint2 found =
          *reinterpret_cast<const uint2*>(shared.probabilities[stage] + place + byte % kChunkBytes);
      sum += sum_of_pair(found.x) + sum_of_pair(found.y);
    }
    total = fmaf(sum, shared.block_units[stage], total);
  }

  __device__ static float sum_of_pair(u32 pair) {
    return cvt_f32(Fp16{}, static_cast<u16>(pair)) + cvt_f32(Fp16{}, static_cast<u16>(pair >> 16));
  }

  // By what a block multiplies all before it by.
  __device__ void rescale(const SharedMemory& shared, int stage) {
    total *= shared.rescale[stage][row()];
  }

  // Leaves what the row has come to.
  __device__ void leave(SharedMemory& shared, int slot) const {
    float sum = total;
#pragma unroll
    for (int lanes = 1; lanes < kSummersOfRow; lanes *= 2) {
      sum += __shfl_xor_sync(~0u, sum, lanes);
    }
    if (fresh_thread() % kSummersOfRow != 0) return;
    shared.row_sum[slot][row()] = sum;
    // A row adds up values by its probabilities.
    const float largest = sum * inverse_of_power(shared.row_units[slot]) * kLargestValue;
    shared.row_scale[slot][row()] = half_scale(largest);
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

// Values as the left operand of O^T += V^T P^T: out of shared memory into registers, across, and
// converted.

// Of 32 tokens and a tile of dims: two steps of a product.
constexpr int kValueTokens = 32;
constexpr int kValueSteps = kValueTokens / 16;
constexpr int kHalves = kBlockTokens / kValueTokens;
using Values = u32[kValueSteps * 4];
using StoredValues = u32[4];
using ValueScales = uint2[kValueTokens / 16];  // of two tokens each, for two matrices

// Values are multiplied in parts: of half of the tokens one tile of dims after the other.
constexpr int kValueParts = kDimTiles * kHalves;
__device__ constexpr int half_of_part(int part) { return part / kDimTiles; }
__device__ constexpr int tile_of_part(int part) { return part % kDimTiles; }

// Four matrices of eight tokens each and 16 dims; a lane gets dims 2g and 2g + 1 of tokens 2c and
// 2c + 1 of each, with g = lane / 4 and c = lane % 4.
struct ValueRows {
  const u16* scales;  // of this lane's first two tokens
  u32 address;  // of the row that this lane points to for ldmatrix, in tile 0

  // Of the block at `stage`.
  __device__ explicit ValueRows(unsigned char* stage) {
    const int lane = fresh_lane();
    const int warp = fresh_warp();
    scales = &value_scale(stage, lane % 4 * 2, warp * kDimsOfWarp / kScaledDims);
    address = shared_address(stage) + warp / 2 * kTileBytes +
              swizzled_offset<kTileRowBytes>(lane, warp % 2 * kDimTiles);
  }

  __device__ void load_scales(ValueScales& found, int half) const {
#pragma unroll
    for (int i = 0; i < kValueTokens / 16; ++i) {
      const int token = half * kValueTokens + i * 16;
      found[i] = *reinterpret_cast<const uint2*>(scales + value_scale_place(token, 0));
    }
  }

  // What is stored of part `part`. A tile of dims is a chunk of a row of 128 bytes, of which two
  // warps have four each, and so two bits of the swizzled address.
  __device__ void load(StoredValues& found, int part) const {
    const u32 row = address ^ (tile_of_part(part) * kChunkBytes);
    ldmatrix_x4_trans(found, row + half_of_part(part) * kValueTokens * kTileRowBytes);
  }
};

__device__ inline void decode_values(Values& values, const StoredValues& stored,
                                     const ValueScales& scales) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32* step = values + i / 2 * 4 + i % 2 * 2;
    const u32 scale = i % 2 == 0 ? scales[i / 2].x : scales[i / 2].y;
    const u32 by_dims = __byte_perm(stored[i], 0, 0x3120);
    step[0] = mul_f16x2(fp16x2_of_e4m3x2(by_dims & 0xffff), scale);
    step[1] = mul_f16x2(fp16x2_of_high_e4m3x2(by_dims), scale);
  }
}

// The consumers: add the values of all blocks of all items, by their probabilities.

// So many products may be under way.
constexpr int kValueBuffers = 2;

struct Adder {
  SharedMemory& shared;
  const Item& item;
  u32 first;  // its first block, of all
  Accumulators accumulators;
  RowSum row_sum;

  __device__ Adder(SharedMemory& shared, const Item& item, u32 taken)
      : shared(shared), item(item), first(taken) {
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < kRows / 2; ++i) accumulators[tile][i] = 0.0f;
    }
  }

  __device__ void rescale(int stage) {
    row_sum.rescale(shared, stage);
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const float2 factor =
          *reinterpret_cast<const float2*>(&shared.rescale[stage][own_row(group * 2)]);
      multiply_group(accumulators, group, factor);
    }
  }

  // Begins the products of half of the tokens and one tile of dims.
  __device__ void multiply(const Values& values, u32 probabilities, int half, int tile) {
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kValueSteps; ++step) {
      const u32 at = (half * kValueTokens + step * 16) * 2;
      wgmma_mma(Fp16{}, accumulators[tile], values + step * 4,
                descriptor(probabilities + descriptor_step(at)), 1);
    }
    wgmma_commit_group();
  }

  // While one product is under way, the values of the next come and are converted.
  __device__ void add_block(int stage) {
    const u32 probabilities = descriptor_low(shared_address(shared.probabilities[stage]), 16);
    const ValueRows rows(shared.tokens[stage]);
    StoredValues stored;
    Values values[kValueBuffers];
    ValueScales scales;
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_keep(accumulators[tile]);
#pragma unroll
    for (int part = 0; part < kValueParts; ++part) {
      const int half = half_of_part(part);
      rows.load(stored, part);
      if (part % kDimTiles == 0) rows.load_scales(scales, half);
      if (part >= kValueBuffers) wgmma_wait_group<kValueBuffers - 1>();
      decode_values(values[part % kValueBuffers], stored, scales);
      multiply(values[part % kValueBuffers], probabilities, half, tile_of_part(part));
    }
    row_sum.add(shared, stage);
    wgmma_wait_group<0>();
#pragma unroll
    for (int tile = 0; tile < kDimTiles; ++tile) wgmma_keep(accumulators[tile]);
  }

  __device__ void take_block(u32& taken, u32 end) {
    const int stage = block_stage(taken);
    wait_for(shared.probabilities_full[stage], block_parity(taken));
    if (kTakesTurns && __any_sync(~0u, taken + 1 != end)) {
      wait_for(shared.scores_full[block_stage(taken + 1)], block_parity(taken + 1));
    }
    if (__any_sync(~0u, shared.rescales[stage] != 0)) rescale(stage);
    if constexpr (!kIsSparse) clear_hidden(stage, taken);  // of a list all rows see all
    add_block(stage);
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.tokens_empty[stage]);
    ++taken;
  }

  __device__ void clear_hidden(int stage, u32 taken) const {
    const int first_token = (item.first_block + static_cast<int>(taken - first)) * kBlockTokens;
    const int from = max(item.visible_to_all - first_token, 0);
    const int end = min(item.visible_to_any - first_token, kBlockTokens);
    if (from < end) clear_nonfinite(shared, item, shared.tokens[stage], from, end);
  }

  // Votes tell compilers that all lanes go on, so that stages and descriptors are theirs in common.
  __device__ void take_item(u32& taken) {
    const u32 end = taken + of_all(item.blocks);
#pragma unroll 1
    while (__any_sync(~0u, taken != end)) take_block(taken, end);
  }
};

__device__ inline void add_items(const Params& params, SharedMemory& shared) {
  finish_query<kLatentTiles / 2>(shared, shared.first_query_full, fresh_thread(), kConsumerThreads);
  u32 taken = 0;  // blocks
  u32 count = 0;
  while (true) {
    wait_for(shared.item_full[item_slot(count)], item_parity(count));
    const Item& item = shared.items[item_slot(count)];
    if (item.request < 0) return;
    Adder adder(shared, item, taken);
    adder.take_item(taken);
    wait_for(shared.rows_full[item_slot(item.count)], item_parity(item.count));
    adder.row_sum.leave(shared, item_slot(item.count));
    // All have left theirs; and what either consumer has found to be not finite counts for both.
    barrier_sync(kConsumerBarrier, kConsumerThreads);
    OwnRows rows{shared, item_slot(item.count)};
    store_item(params, item, shared, adder.accumulators, rows);
    count = item.count + 1;  // not kept in a register meanwhile
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.item_empty[item_slot(count - 1)]);
  }
}

// PTX ISA, "Half Precision Floating Point Instructions: max". Needs sm_80.

// max.f16x2
// Of a number and NaN it is the number.
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

// Online softmax of the scorer, over the rows of S^T.

// A thread has of eight neighbouring rows two, and of a warp's sixteen tokens g and g + 8 with
// g = lane / 4.
using Scores = float[kRows / 2];

// Probabilities are fp16: a row's largest is 2^6 when its reference moves, and 2^14 before that is
// so.
constexpr float kReferenceLead = 6.0f;  // log2 units
constexpr u32 kMostWeight = 0x7400;  // as fp16

// Instead of 0, which would make NaN of the scores of hidden tokens, as a factor does that is NaN.
constexpr float kAlmostNothing = 0x1p-126f;

// Two neighbouring rows.
struct RowPair {
  float4 both;  // factor and reference of each

  __device__ float factor(int row) const { return row == 0 ? both.x : both.z; }

  // How far a score of the first is from its reference, and of the second.
  __device__ float low(float score) const { return fmaf(score, both.x, -both.y); }
  __device__ float high(float score) const { return fmaf(score, both.z, -both.w); }
};

// Those of a thread: two in every eight.
struct OwnRowPairs {
  const ScoredRow* first;

  __device__ OwnRowPairs(const SharedMemory& shared, const ScorerThread& own)
      : first(shared.rows + own.lane % 4 * 2) {}

  __device__ RowPair of_group(int group) const {
    return {*reinterpret_cast<const float4*>(first + group * 8)};
  }
};

struct Softmax {
  SharedMemory& shared;

  __device__ explicit Softmax(SharedMemory& shared) : shared(shared) {}

  // Before the first block of an item, whose query is here; `scale` makes scores log2 units.
  __device__ void begin(float scale) const {
    const int row = fresh_thread() % kScorerThreads;
    if (row == 0) shared.units = kFirstUnits;
    if (row < kRows) {
      const float factor = scale * shared.query_scale[row];
      shared.rows[row] = {factor == 0.0f ? kAlmostNothing : factor, -kLargest};
    }
    barrier_sync(kScorerBarrier, kScorerThreads);
  }

  // Turns scores into probabilities for the consumers, in shared memory: relative to references
  // that move if one is too large for them, as an item's first are. So does the unit by the scales
  // of their values, which have been left in units and are left again if these move.
  __device__ void take(const Scores& scores, const OwnScales& scales, const ScorerThread& own,
                       int stage, bool is_first) {
    bool moves = is_first;
    if (!is_first) {
      const bool is_exceeded = scales.exceed(shared.units);
      moves = write(scores, own, stage) || is_exceeded;
      moves = barrier_red_or(kScorerBarrier, kScorerThreads, moves) != 0;
    }
    if (__any_sync(~0u, moves)) {
      move_references(scores, scales, own, stage);
      scales.leave(shared.tokens[stage], own, shared.units);
      write(scores, own, stage);
      leave_units(own, stage, !is_first);
    }
    __syncwarp();
    if (own.lane == 0) arrive_at(shared.probabilities_full[stage]);
  }

  // Leaves the units of a block, and whether it multiplies the outputs before it: at first, before
  // its scores are there, as if no reference moved.
  __device__ void leave_units(const ScorerThread& own, int stage, bool rescales) const {
    if (own.lane != 0 || own.warp != 0) return;
    shared.rescales[stage] = rescales;
    shared.block_units[stage] = shared.units;
  }

  // Writes probabilities relative to the references as they are; says whether any is so large that
  // references must move. All are computed before the first is written: reading what others need
  // would wait for that.
  __device__ bool write(const Scores& scores, const ScorerThread& own, int stage) const {
    const OwnRowPairs rows(shared, own);
    u32 largest = 0;
    u32 pairs[kRowGroups][2];  // of two neighbouring rows, for tokens g and g + 8
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const RowPair pair = rows.of_group(group);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* of = scores + group * 4 + half * 2;
        pairs[group][half] =
            cvt_rn_x2_f32(Fp16{}, ex2_approx(pair.high(of[1])), ex2_approx(pair.low(of[0])));
      }
      largest = max_f16x2(largest, max_f16x2(pairs[group][0], pairs[group][1]));
    }
    // Matrices: tokens 0 to 7 and 8 to 15 of the warp, for 8 rows and for the next 8.
    const int chunk = own.warp * 2 + own.lane / 8 % 2;
    const u32 address = shared_address(shared.probabilities[stage]) +
                        swizzled_offset<kTileRowBytes>(own.lane / 16 * 8 + own.lane % 8, chunk);
#pragma unroll
    for (int group = 0; group < kRowGroups; group += 2) {
      stmatrix_x4_trans(address + group * 8 * kTileRowBytes, pairs[group][0], pairs[group][1],
                        pairs[group + 1][0], pairs[group + 1][1]);
    }
    fence_proxy_async();
    return max(largest & 0xffff, largest >> 16) > kMostWeight;
  }

  // Moves the reference of every row to kReferenceLead below its maximum, if that is larger, and
  // the unit to what the largest scale wants.
  __device__ void move_references(const Scores& scores, const OwnScales& scales,
                                  const ScorerThread& own, int stage) {
    const OwnRowPairs rows(shared, own);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const float factor = rows.of_group(r / 2).factor(r % 2);
      const float maximum =
          maximum_of_lanes(fmaxf(__fmul_rn(scores[r / 2 * 4 + r % 2], factor),
                                 __fmul_rn(scores[r / 2 * 4 + 2 + r % 2], factor)));
      if (own.lane < 4) shared.warp_rows[own.warp][own_row(r)] = maximum;
    }
    shared.warp_scales[own.warp] =
        __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(scales.largest())));
    const float units = shared.units;
    barrier_sync(kScorerBarrier, kScorerThreads);
    const int row = own.warp * kWarpLanes + own.lane;
    const float next_units = units_after(units);
    if (row < kRows) {
      float& reference = shared.rows[row].reference;
      float next = reference;
#pragma unroll
      for (int warp = 0; warp < kScorerWarps; ++warp) {
        const float wanted = shared.warp_rows[warp][row] - kReferenceLead;
        if (wanted > next) next = wanted;
      }
      shared.rescale[stage][row] = ex2_approx(reference - next) * (next_units / units);
      reference = next;
    }
    if (row == 0) shared.units = next_units;
    barrier_sync(kScorerBarrier, kScorerThreads);
  }

  // What `units` become by the scales of a block.
  __device__ float units_after(float units) const {
    float largest = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kScorerWarps; ++warp) {
      largest = fmaxf(largest, shared.warp_scales[warp]);
    }
    return largest * units >= kMostUnits ? units_of(largest) : units;
  }

  // Leaves what references have come to, for the consumers: of outputs in units, they are as much
  // lower.
  __device__ void leave_references(int slot) const {
    const float units = shared.units;  // before any thread begins the next item
    barrier_sync(kScorerBarrier, kScorerThreads);
    const int row = fresh_thread() % kScorerThreads;
    if (row < kRows) {
      shared.row_reference[slot][row] = shared.rows[row].reference - log2_of_power(units);
    }
    if (row == 0) shared.row_units[slot] = units;
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.rows_full[slot]);
  }
};

// What products of query and key are multiplied by, in the natural domain.

__device__ inline float score_scale(const Params& params) {
  const float scale = value_of(params.bmm1_scale_tensor, params.bmm1_scale);
  return params.scores_take_bmm2 ? scale * value_of(params.bmm2_scale_tensor, params.bmm2_scale)
                                 : scale;
}

// The scorer, four warps: scores and probabilities of all blocks of all items.

// Elements that one step of a product multiplies, in eight bits.
constexpr int kStepElements = 32;
constexpr int kHalfTileBytes = kTileRowBytes / 2;  // to the second parts of a row's rope

// With 16 and 32 rows, both parts of a query are multiplied at once, as so many rows more: keys are
// read once.
constexpr bool kStacksParts = kSplitsQuery && kRows <= 32;
using GroupScores = float[kStacksParts ? kRows : kRows / 2];

// So many groups of dims have their scores under way at once: as many as there are registers for.
constexpr int kGroupsAtOnce = kRows > 32 ? 1 : sizeof(GroupScores) > 64 ? 2 : kScaleGroups;

struct Scorer {
  const Params& params;
  SharedMemory& shared;
  const Item& item;
  u32& taken;  // blocks
  Scores scores;
  OwnScales own_scales;
  Softmax softmax;

  __device__ Scorer(const Params& params, SharedMemory& shared, const Item& item, u32& taken)
      : params(params), shared(shared), item(item), taken(taken), softmax(shared) {}

  // Begins the scores of the dims of one scale.
  __device__ static void begin_group(GroupScores& part, u32 keys, u32 query, int group) {
    keys += descriptor_step(group * kTileBytes);
    query += descriptor_step(group * kQueryParts * kQueryTileBytes);
    wgmma_keep(part);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < kScaledDims / kStepElements; ++k) {
      const u32 along = descriptor_step(k * kStepElements);
      wgmma_mma(E4m3{}, part, descriptor(keys + along), descriptor(query + along), k > 0);
      if constexpr (kSplitsQuery && !kStacksParts) {
        const u32 second = query + along + descriptor_step(kQueryTileBytes);
        wgmma_mma(E4m3{}, part, descriptor(keys + along), descriptor(second), 1);
      }
    }
    wgmma_commit_group();
  }

  // Begins the scores of the rope part.
  __device__ void begin_rope(u32 keys, u32 query) {
    keys += descriptor_step(kRopeTileOffset);
    query += descriptor_step(kLatentTiles * kQueryTileBytes);
    wgmma_keep(scores);
    wgmma_fence();
    if constexpr (kIsPacked) {
#pragma unroll
      for (int k = 0; k < kRopeDim / 16; ++k) {
        const u32 along = descriptor_step(k * 32);
        wgmma_mma(Bf16{}, scores, descriptor(keys + along), descriptor(query + along), k > 0);
      }
    } else {
#pragma unroll
      for (int k = 0; k < kRopeDim / kStepElements; ++k) {
        const u32 along = descriptor_step(k * kStepElements);
        const u64 key = descriptor_64(keys + along);
        wgmma_mma(E4m3{}, scores, key, descriptor(query + along), k > 0);
        if constexpr (kSplitsQuery) {
          const u32 second = query + along + descriptor_step(kHalfTileBytes);
          wgmma_mma(E4m3{}, scores, key, descriptor(second), 1);
        }
      }
    }
    wgmma_commit_group();
  }

  // Of a packed row with scales of its own, the rope part needs none.
  __device__ void scale_rope(const KeyScales& scales) {
    wgmma_keep(scores);
    if constexpr (kHasInnerScales) return;
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      scores[i] *= kHasOneScale ? scales.of[i / 2 % 2][0] : params.rope_scale;
    }
  }

  // A group's scores come to the others by the scales of tokens g and g + 8.
  __device__ void add_group(GroupScores& part, const KeyScales& scales, int group) {
    wgmma_keep(part);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      const float score = kStacksParts ? part[i] + part[i + kRows / 2] : part[i];
      scores[i] = fmaf(score, scales.of[i / 2 % 2][group], scores[i]);
    }
  }

  // Of the block in `stage`; `keys` and `query` are descriptors.
  __device__ void take_scores(int stage, const ScorerThread& own, u32 keys, u32 query) {
    unsigned char* tokens = shared.tokens[stage];
    GroupScores parts[kGroupsAtOnce];
    begin_rope(keys, query);
#pragma unroll
    for (int group = 0; group < kGroupsAtOnce; ++group) {
      begin_group(parts[group], keys, query, group);
    }
    const KeyScales scales(tokens, own);
    own_scales.take(scales, own);
    own_scales.leave(tokens, own, shared.units);
    softmax.leave_units(own, stage, false);
    wgmma_wait_group<kGroupsAtOnce>();
    scale_rope(scales);
    add_groups<0>(parts, scales, keys, query);
  }

  // From group `kGroup` on, which is under way, and so are those that may be with it.
  template <int kGroup>
  __device__ void add_groups(GroupScores (&parts)[kGroupsAtOnce], const KeyScales& scales, u32 keys,
                             u32 query) {
    constexpr int kLater = kScaleGroups - 1 - kGroup;
    constexpr int kNext = kGroup + kGroupsAtOnce;
    wgmma_wait_group<(kLater < kGroupsAtOnce ? kLater : kGroupsAtOnce - 1)>();
    GroupScores& part = parts[kGroup % kGroupsAtOnce];
    add_group(part, scales, kGroup);
    if constexpr (kNext < kScaleGroups) begin_group(part, keys, query, kNext);
    if constexpr (kLater > 0) add_groups<kGroup + 1>(parts, scales, keys, query);
  }

  // Hides the scores of the tokens g and g + 8 where `is_hidden` says so of row `r`: a select, for
  // they may be NaN, of what the row's factor makes minus infinity.
  template <typename IsHidden>
  __device__ void hide(const ScorerThread& own, IsHidden is_hidden) {
    const OwnRowPairs rows(shared, own);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const float hidden = copysignf(kInfinity, -rows.of_group(r / 2).factor(r % 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (is_hidden(r, half * 8)) scores[r / 2 * 4 + half * 2 + r % 2] = hidden;
      }
    }
  }

  // Hides what a row does not see.
  __device__ void hide_unseen(int first_token, const ScorerThread& own) {
    const int token = first_token + own.token();
    hide(own, [&](int r, int more) { return token + more >= item.row_visible[own_row(r)]; });
  }

  // Hides what a list does not name.
  __device__ void hide_unlisted(u64 unlisted, const ScorerThread& own) {
    const u64 bits = unlisted >> own.token();
    hide(own, [&](int, int more) { return (bits >> more & 1) != 0; });
  }

  __device__ void take_block(int block) {
    const int stage = block_stage(taken);
    // Worked out before tokens are waited for, not after that.
    const u32 keys = of_all(descriptor_low(shared_address(shared.tokens[stage]), 16));
    const u32 query = of_all(descriptor_low(shared_address(shared.query), 16));
    const ScorerThread own;
    wait_for(shared.tokens_full[stage], block_parity(taken));
    fence_proxy_async();  // what threads have copied, tensor cores read
    take_scores(stage, own, keys, query);
    if (kTakesTurns && own.lane == 0) arrive_at(shared.scores_full[stage]);
    const int first_token = block * kBlockTokens;
    if constexpr (kIsSparse) {
      const u64 unlisted = shared.unlisted[stage].all();
      if (__any_sync(~0u, unlisted != 0)) hide_unlisted(unlisted, own);
    } else if (__any_sync(~0u, first_token + kBlockTokens > item.visible_to_all)) {
      hide_unseen(first_token, own);
    }
    softmax.take(scores, own_scales, own, stage, block == item.first_block);
    ++taken;
  }

  __device__ void take_item() {
    softmax.begin(score_scale(params) * kLog2E);
    const u32 end = taken + of_all(item.blocks);
    int block = item.first_block;
#pragma unroll 1
    while (__any_sync(~0u, taken != end)) take_block(block++);
    // All warps have met since they read the query last, or have not read it.
    if (fresh_thread() % kScorerThreads == 0) arrive_at(shared.query_empty);
    softmax.leave_references(item_slot(item.count));
  }
};

__device__ inline void score_items(const Params& params, SharedMemory& shared) {
  u32 taken = 0;  // blocks
  u32 count = 0;
  while (true) {
    wait_for(shared.item_full[item_slot(count)], item_parity(count));
    const Item& item = shared.items[item_slot(count)];
    if (item.request < 0) return;
    wait_for_query(shared, count);
    Scorer scorer(params, shared, item, taken);
    scorer.take_item();
    count = item.count + 1;  // not kept in a register meanwhile
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.item_empty[item_slot(count - 1)]);
  }
}

// How many registers a thread of each role has, of 128 at first: with 64 rows, the two consumers
// most. A scorer with more than it needs for a whole query brings so much forward that its
// products are serialised (C7512).

constexpr int kConsumerRegisters = kRows > 32 ? 176 : 128;
constexpr int kScorerRegisters = kRows > 32 ? (kSplitsQuery ? 104 : 96) : 128;
constexpr int kProducerRegisters = 4 * 128 - 2 * kConsumerRegisters - kScorerRegisters;

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

// Has the first page ids, or listed tokens, of a span brought into L2: loaders wait for them.

constexpr int kIdsOfLine = 128 / sizeof(int);
constexpr int kTokensOfId = kIsSparse ? 1 : kPageSize;
constexpr int kFirstLines = 4;  // as many as two blocks have of listed tokens

// By a warp, where a span has been found.
__device__ inline void prefetch_ids(const Params& params, const SpanScratch& scratch) {
  const int line = lane_index();
  if (line >= kFirstLines) return;
  const TableRow row = table_row(params, scratch.first.request);
  const int block = scratch.span.begin - scratch.first.unit_begin - scratch.span.unit_cost;
  // A span may begin in a later request; what is behind the row's end is nobody's.
  const u32 token = static_cast<u32>(max(block, 0)) * kBlockTokens;
  const u32 index = token / kTokensOfId + line * kIdsOfLine;
  if (index < static_cast<u32>(row.pages)) prefetch_l2(params.block_tables + row.start + index);
}

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

// Keeps what blocks begin with from launch to launch: the layers of a model have the same
// lengths.

// In whole lines of L2.
struct alignas(kBeginningBytes) KeptBeginning {
  Beginning beginning;
};

// Behind the counters of a workspace. Its plan and lengths change when all blocks of a launch have
// looked at them, so that all find what they begin with there, or none does.
struct KeptSpans {
  int plan;  // of the launch that has left it; none at first
  u32 misses;  // blocks of a launch that have not found their own
  int lengths[kKeptLengths];  // of requests
  KeptBeginning blocks[1];  // as many as there are
};

static_assert(sizeof(KeptBeginning) == kBeginningBytes, "the host allocates it");
static_assert(sizeof(KeptSpans) == (2 + kKeptLengths) * sizeof(int) + kBeginningBytes, "in turn");

__device__ inline KeptSpans& kept_spans(const Params& params) {
  unsigned char* counters = reinterpret_cast<unsigned char*>(params.counters);
  return *reinterpret_cast<KeptSpans*>(counters + kCountersBytes);
}

// By all threads of the block: brings what it begins with, if the same plan has left it and all
// lengths are what they were; says whether that is so. `length` is what length_of has for the
// thread's own_request, of which it has no other.
__device__ inline bool recall_beginning(const Params& params, int length, SpanScratch& scratch) {
  if (params.plan == 0) return false;
  const KeptSpans& kept = kept_spans(params);
  bool is_other = ld_relaxed_gpu(&kept.lengths[own_request(params)]) != length;
  if (threadIdx.x == 0) is_other |= ld_relaxed_gpu(&kept.plan) != params.plan;
  const u32 chunk = threadIdx.x;
  if (chunk < sizeof(Beginning) / kChunkBytes) {
    reinterpret_cast<float4*>(&scratch)[chunk] =
        ld_global_cg_v4_f32(reinterpret_cast<const float4*>(&kept.blocks[blockIdx.x]) + chunk);
  }
  return barrier_red_or(0, kThreads, is_other) == 0;
}

// By all threads: leaves what this block begins with. The block that is the last to do so leaves
// whose all of it is. All lanes of a warp go the same way, by votes: else compilers keep what
// products want in registers of the whole warp elsewhere.
__device__ inline void keep_beginning(const Params& params, const Beginning& beginning) {
  const bool keeps = params.plan != 0 && warp_index() == kThreads / kWarpLanes - 1;
  if (!__any_sync(~0u, keeps)) return;
  KeptSpans& kept = kept_spans(params);
  const u32 last = gridDim.x - 1;
  u32 before = 0;
  if (lane_index() == 0) {
    kept.blocks[blockIdx.x].beginning = beginning;
    before = atom_inc_acq_rel_gpu(&kept.misses, last);
  }
  if (!__any_sync(~0u, lane_index() == 0 && before == last)) return;
#pragma unroll 1
  for (int first = 0; __any_sync(~0u, first < params.requests); first += kWarpLanes) {
    const int request = first + lane_index();
    if (request < params.requests) kept.lengths[request] = length_of(params, request);
  }
  if (lane_index() == 0) kept.plan = params.plan;
}

// By whole warps, once they have nothing else to do: the next launch looks there first of all.
__device__ inline void prefetch_kept(const Params& params) {
  constexpr int kLineWords = 128 / sizeof(int);
  if (params.plan == 0) return;
  const KeptSpans& kept = kept_spans(params);
  const int lane = lane_index();
  const bool is_own = lane == kWarpLanes - 1;
  if (!is_own && lane * kLineWords >= params.requests + 2) return;
  prefetch_l2(is_own ? reinterpret_cast<const int*>(&kept.blocks[blockIdx.x])
                     : &kept.plan + lane * kLineWords);
}
static_assert((2 + kKeptLengths) / (128 / sizeof(int)) < kWarpLanes, "a lane for each line");

// Where every block begins.

// By all threads: brings the walk to the block's first item, and returns that.
__device__ inline Part begin_walk(const Params& params, int team, int length, SpanScratch& scratch,
                                  ItemWalk& walk) {
  const bool is_kept = __any_sync(~0u, recall_beginning(params, length, scratch));
  bool has_span = is_kept && scratch.part.request >= 0;
  if (!is_kept) has_span = find_span(params, team, length, scratch);
  has_span = __any_sync(~0u, has_span);
  if (has_span && warp_index() == kConsumerWarps - 1) prefetch_ids(params, scratch);
  static_cast<WalkState&>(walk) = scratch.first;
  Part first = scratch.part;
  if (!is_kept) {
    first = has_span ? walk.first() : kNoPart;
    keep_beginning(params, {scratch.span, walk, first});
  }
  return first;
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    mla_hopper_packed(const __grid_constant__ Params params) {
  SharedMemory& shared = shared_memory<SharedMemory>();
  // One warp each, before the kernel before has ended.
  if (threadIdx.x == 0) {
    make_token_barriers(shared);
    fence_mbarrier_init();
  } else if (threadIdx.x == kWarpLanes) {
    make_item_barriers(shared);
    fence_mbarrier_init();
  }
  wait_for_previous_kernel();
  const int length = length_of(params, own_request(params));
  let_next_kernel_start();
  const int block = static_cast<int>(blockIdx.x);
  const int team = in_teams(params, block);
  const int member = block - team * params.team_size;
  SpanScratch& scratch = shared.scratch;
  ItemWalk walk(params, scratch.span, member, {});
  const Part first = begin_walk(params, team, length, scratch, walk);
  if (__any_sync(~0u, first.request < 0)) return;

  const int role = __shfl_sync(~0u, warp_index(), 0) - kConsumerWarps;
  if (role < 0) {
    set_registers<kConsumerRegisters>();
    begin_first_query(params, first, shared);
    add_items(params, shared);
  } else if (role >= kLoadingWarps) {
    set_registers<kScorerRegisters>();
    score_items(params, shared);
    prefetch_kept(params);
  } else {
    set_registers<kProducerRegisters>();
    load_items(params, walk, first, shared);
  }
}
