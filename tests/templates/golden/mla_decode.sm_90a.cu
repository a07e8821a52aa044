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
  const float* query_scales;
  const unsigned char* cache;
  const unsigned char* rope_cache;
  const unsigned char* value_cache;
  const float* kv_scales;
  const int* block_tables;
  const int* value_tables;
  const int* table_starts;
  const int* seq_lens;
  const int* cum_seq_lens_q;
  const int* top_k_lens;
  const float* bias;
  const float* bmm1_scale_tensor;
  const float* bmm2_scale_tensor;
  const float* sinks;
  u16* out;
  float* lse;
  float* partial_out;
  float* partial_lse;
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
  i64 bias_stride;
  i64 bias_head_stride;
  i64 total_rows;
  int requests;
  int heads;
  int q_len;
  int max_pages;
  int block_tables_stride;
  int num_pages;
  int row_tiles;
  int splits;
  int top_k;
  int is_causal;
  int scores_take_bmm2;
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

// The numbers of this kernel; the rest of the source only uses them.

using Element = Bf16;
using OutElement = Bf16;
using StoredQuery = Bf16;
using StoredToken = Bf16;
constexpr int kLatentDim = 512;
constexpr int kRopeDim = 64;
constexpr int kPageSize = 64;
constexpr bool kIsSparse = false;
constexpr bool kHasSeparateValues = false;
constexpr bool kHasBias = false;
constexpr bool kDecodesTokens = false;
constexpr int kRows = 64;
constexpr int kTileTokens = 64;
constexpr int kStages = 2;
constexpr int kRowWarps = 2;
constexpr int kTokenWarps = 4;
constexpr int kDimWarps = 2;
constexpr int kBlocksPerSm = 1;
constexpr int kStoredBytes = 1152;
constexpr int kStageRowBytes = 1152;
constexpr int kSharedBytes = 231488;

constexpr int kHeadDimQk = kLatentDim + kRopeDim;
constexpr int kHeadDimVo = kLatentDim;
constexpr int kWarps = kRowWarps * kTokenWarps;
constexpr int kThreads = kWarps * kWarpLanes;

// Q K^T: a warp computes the scores of kRows / kRowWarps rows and kTileTokens / kTokenWarps tokens.
constexpr int kScoreRowGroups = kRows / kRowWarps / 16;
constexpr int kScoreTokenGroups = kTileTokens / kTokenWarps / 8;

// P V: a warp accumulates kWarpDims output elements of every row.
constexpr int kRowGroups = kRows / 16;
constexpr int kWarpDims = kHeadDimVo / kWarps;

constexpr int kTokenBytes = kHeadDimQk * 2;
constexpr int kProbabilityBytes = kTileTokens * 2;
constexpr int kStageBytes = kTileTokens * kStageRowBytes;
constexpr int kDecodedBytes = kDecodesTokens ? kTileTokens * kTokenBytes : 0;

// An item is what one stage holds: a tile of tokens, or of their keys and then of their values.
constexpr int kItemsPerTile = kHasSeparateValues ? 2 : 1;
// How many items are under way while one is used. Decoded tokens have a place of their own, and
// free their stage.
constexpr int kItemsAhead = kDecodesTokens ? kStages : kStages - 1;

// Every thread copies a part of one token in each round, eight threads together. Products that
// warps trade pass through the last round's part of the stage that is being filled.
constexpr int kRoundTokens = kThreads / 8;
constexpr int kRounds = kTileTokens / kRoundTokens;
constexpr int kBorrowedRounds = kDimWarps > 1 ? 1 : 0;
constexpr int kBorrowedOffset = (kRounds - 1) * kRoundTokens * kStageRowBytes;

static_assert(kScoreRowGroups * kRowWarps * 16 == kRows, "row warps share the rows evenly");
static_assert(kScoreTokenGroups * kTokenWarps * 8 == kTileTokens, "token warps share the tokens");
static_assert(kWarpDims % 16 == 0, "a warp's output dims are whole 16-wide tiles");
static_assert(kTokenBytes % 128 == 0, "eight lanes copy 128 bytes of a token at a time");
static_assert(kRounds * kRoundTokens == kTileTokens, "every thread copies the same tokens");
static_assert(kDecodesTokens || kStageRowBytes == kTokenBytes, "a stage is what is multiplied");
static_assert(kDimWarps == 1 || kRows * kTileTokens * 4 <= kRoundTokens * kStageRowBytes,
              "what is traded fits into what is borrowed");
static_assert(kDimWarps == 1 || !kHasSeparateValues, "values would arrive in what is borrowed");

// A scale is a number, or a tensor of one element that only the device knows.

__device__ inline float value_of(const float* tensor, float number) {
  return tensor == nullptr ? number : *tensor;
}

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

// Which rows and which tokens this block attends to.

// A row is one (query token, head) pair of a request, query token first, so that rows are
// contiguous in [tokens, heads, dim] tensors. A block takes kRows rows and one split of the tokens.
// Where every query token has a list of tokens of its own, it counts as a request.
struct alignas(64) Work {
  int request;
  int split;
  int heads;
  int q_len;  // query tokens of this request
  i64 first_query;  // index of the request's first query token among all
  int kv_len;  // tokens in the cache, the new ones included
  int first_row;  // of this block, among the request's rows
  int rows;  // of this block; the rest of kRows is padding
  int is_causal;
  int visible_to_all;  // tokens that every row of this block sees
  int visible_to_any;  // tokens that some row sees
  int first_tile;
  int last_tile;  // one past

  // How many tokens `row` (0 to kRows - 1) sees: all up to its own position, or all.
  __device__ int visible_tokens(int row) const {
    const int later = is_causal ? q_len - 1 - (first_row + row) / heads : 0;
    return row >= rows ? 0 : max(kv_len - later, 0);
  }

  // Index of `row` in a [tokens * heads] array.
  __device__ i64 global_row(int row) const { return first_query * heads + first_row + row; }
};

__device__ inline Work find_work(const Params& params) {
  Work work;
  const int block = static_cast<int>(blockIdx.x);
  const int tile = block % params.row_tiles;
  const int* ends = kIsSparse ? nullptr : params.cum_seq_lens_q;
  const TileRows found = rows_of_tile(ends, params.requests, kIsSparse ? 1 : params.q_len,
                                      params.heads, params.total_rows / params.heads,
                                      block / params.row_tiles / params.splits, tile);
  work.request = found.request;
  work.split = block / params.row_tiles % params.splits;
  work.heads = params.heads;
  work.q_len = found.q_len;
  work.first_query = found.first_query;
  work.first_row = found.first_row;
  work.rows = found.rows;
  work.is_causal = params.is_causal;

  const TokenLists lists{params.seq_lens, params.top_k_lens, params.cum_seq_lens_q,
                         params.requests, params.q_len,      params.top_k};
  work.kv_len =
      kIsSparse ? listed_tokens(lists, work.request)
                : tokens_held(params.seq_lens[work.request], table_row(params, work.request).pages);
  work.visible_to_all = work.visible_tokens(0);
  work.visible_to_any = work.visible_tokens(work.rows - 1);

  const int tiles = ceil_div(work.visible_to_any, kTileTokens);
  const int tiles_per_split = ceil_div(tiles, params.splits);
  work.first_tile = min(tiles, work.split * tiles_per_split);
  work.last_tile = min(tiles, work.first_tile + tiles_per_split);
  return work;
}

// The shared memory of a block, whole.

struct SharedMemory {
  unsigned char query[kRows * kTokenBytes];  // [kRows][kHeadDimQk], swizzled; then the output
  unsigned char kv[kStages * kStageBytes + kDecodedBytes];  // see stage_of and tokens_of
  unsigned char probabilities[kRows * kProbabilityBytes];  // [kRows][kTileTokens], swizzled
  Work work;  // here, and not in the registers of every thread
  int is_hidden[kTileTokens];  // from some row, for another reason than its position
  int row_visible[kRows];  // how many tokens a row sees
  float row_partial[kTokenWarps][kRows];  // what each token warp found for a row: maximum, or sum
  float row_reference[kRows];  // what the probabilities are relative to, log2 units
  float row_rescale[kRows];  // what the output so far must be multiplied by
};
static_assert(sizeof(SharedMemory) == kSharedBytes, "the spec computes what the struct takes");

// Leaves the work for all threads to read, divides once per row for all tiles to come, and lets
// every row begin without a reference.
__device__ inline void share_work(const Work& work, SharedMemory& shared) {
  if (threadIdx.x == 0) shared.work = work;
  for (int row = static_cast<int>(threadIdx.x); row < kRows; row += kThreads) {
    shared.row_visible[row] = work.visible_tokens(row);
    shared.row_reference[row] = -kInfinity;
  }
}

// Where item `item` arrives, [kTileTokens] rows of kStageRowBytes.
__device__ inline unsigned char* stage_of(SharedMemory& shared, int item) {
  return shared.kv + item % kStages * kStageBytes;
}

// Where it is multiplied from once it is ready, swizzled [kTileTokens][kHeadDimQk].
__device__ inline unsigned char* tokens_of(SharedMemory& shared, int item) {
  return kDecodesTokens ? shared.kv + kStages * kStageBytes : stage_of(shared, item);
}

// Tokens that are hidden from rows for another reason than their position: entries of a list
// that name no token, and a bias of minus infinity.

// The numbers that are added to the scores of `row`; null if there are none.
__device__ inline const float* row_bias(const Params& params, const Work& work, int row) {
  if constexpr (!kHasBias) return nullptr;
  const int packed_row = work.first_row + row;
  const i64 query = work.first_query + packed_row / work.heads;
  return params.bias + query * params.bias_stride +
         packed_row % work.heads * params.bias_head_stride;
}

// Returns whether a row sees a token that it is not too early for, and adds the token's bias to the
// score. Leaves word of what is hidden by a bias.
__device__ inline bool see_token(const float* bias, int first_token, int token, float& score,
                                 SharedMemory& shared) {
  if constexpr (kIsSparse) {
    return shared.is_hidden[token] == 0;
  } else if constexpr (kHasBias) {
    const float added = bias[first_token + token];
    if (added == -kInfinity) {
      shared.is_hidden[token] = 1;  // all who write it write the same
      return false;
    }
    // A finite number stays finite: minus infinity is for what is hidden, and infinity makes NaN.
    const float in_log2 = added * kLog2E;
    const bool overflows = fabsf(in_log2) == kInfinity && added != kInfinity;
    score += overflows ? copysignf(kLargest, added) : in_log2;
  }
  return true;
}

// Before a tile: which entries of the list name no token, and that no row has hidden any yet.
__device__ inline void begin_tile(const Params& params, const int* list, int listed, int tile,
                                  SharedMemory& shared) {
  const int token = static_cast<int>(threadIdx.x);
  if (!(kIsSparse || kHasBias) || token >= kTileTokens) return;
  bool is_hidden = false;
  if constexpr (kIsSparse) {
    const int position = tile * kTileTokens + token;
    const int id = position < listed ? list[position] : -1;
    is_hidden = id < 0 || !is_page(id / kPageSize, params.num_pages);
  }
  shared.is_hidden[token] = is_hidden;
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

// The output of one block: O += P V.

// The part of O that one warp holds, in the fragments of mma: element [m][n][e] belongs to
// row output_row(m, e / 2) and output dim output_dim(n, e % 2).
using Output = float[kRowGroups][kWarpDims / 8][4];

__device__ inline int output_row(int group, int half) {
  return group * 16 + half * 8 + lane_index() / 4;
}

__device__ inline int output_dim(int group, int parity) {
  return warp_index() * kWarpDims + group * 8 + lane_index() % 4 * 2 + parity;
}

__device__ inline void clear_output(Output& output) {
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int n = 0; n < kWarpDims / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) output[m][n][e] = 0.0f;
    }
  }
}

__device__ inline void rescale_output(const SharedMemory& shared, Output& output) {
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
    const float low = shared.row_rescale[output_row(m, 0)];
    const float high = shared.row_rescale[output_row(m, 1)];
#pragma unroll
    for (int n = 0; n < kWarpDims / 8; ++n) {
      output[m][n][0] *= low;
      output[m][n][1] *= low;
      output[m][n][2] *= high;
      output[m][n][3] *= high;
    }
  }
}

// Whether a row sees a token that not all rows see.
__device__ inline bool sees(const Params& params, const SharedMemory& shared, int row,
                            int first_token, int token) {
  if (first_token + token >= shared.row_visible[row]) return false;
  if constexpr (kHasBias) {
    return row_bias(params, shared.work, row)[first_token + token] != -kInfinity;
  }
  return true;
}

// Whether a token of [first, last) is one of those that some rows do not see.
__device__ inline bool is_at_boundary(const SharedMemory& shared, int first_token, int token) {
  if constexpr (kHasBias) {
    return shared.is_hidden[token] != 0 || first_token + token >= shared.work.visible_to_all;
  }
  return true;
}

// Adds the tokens [first, last) of the tile, which some rows see and others do not, to the rows
// that see them, and clears them: 0 * NaN is NaN, so a hidden V must not meet the tensor core.
__device__ inline void accumulate_boundary(const Params& params, SharedMemory& shared,
                                           unsigned char* values, int first_token, int first,
                                           int last, Output& output) {
  // Not unrolled: a rare path must not take registers from the loop over tiles.
#pragma unroll 1
  for (int token = first; token < last; ++token) {
    if (!is_at_boundary(shared, first_token, token)) continue;
    float p[kRowGroups][2];
    u32 seen = 0;  // a bit for each row of this thread
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = output_row(m, half);
        const u32 offset = swizzled_offset<kProbabilityBytes>(row, token / kChunkElements) +
                           token % kChunkElements * 2;
        p[m][half] = cvt_f32(Element{}, *reinterpret_cast<u16*>(shared.probabilities + offset));
        if (sees(params, shared, row, first_token, token)) seen |= 1u << (m * 2 + half);
      }
    }
#pragma unroll
    for (int n = 0; n < kWarpDims / 8; ++n) {
      const int dim = output_dim(n, 0);
      const u32 offset =
          swizzled_offset<kTokenBytes>(token, dim / kChunkElements) + dim % kChunkElements * 2;
      const u32 pair = *reinterpret_cast<u32*>(values + offset);
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if ((seen >> (m * 2 + half) & 1) == 0) continue;
          output[m][n][half * 2] += p[m][half] * cvt_f32(Element{}, static_cast<u16>(pair));
          output[m][n][half * 2 + 1] +=
              p[m][half] * cvt_f32(Element{}, static_cast<u16>(pair >> 16));
        }
      }
    }
  }
  __syncthreads();
  for (int word = first * kTokenBytes / 4 + static_cast<int>(threadIdx.x);
       word < last * kTokenBytes / 4; word += kThreads) {
    if (!is_at_boundary(shared, first_token, word / (kTokenBytes / 4))) continue;
    reinterpret_cast<u32*>(values)[word] = 0;
  }
  __syncthreads();
}

__device__ inline void accumulate_pv(const SharedMemory& shared, const unsigned char* tokens,
                                     Output& output) {
  const int lane = lane_index();
  const u32 probabilities = shared_address(shared.probabilities);
  const u32 values = shared_address(tokens);
#pragma unroll
  for (int token = 0; token < kTileTokens; token += 16) {
    u32 p[kRowGroups][4];
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
      const int chunk = token / kChunkElements + lane / 16;
      ldmatrix_x4(p[m],
                  probabilities + swizzled_offset<kProbabilityBytes>(m * 16 + lane % 16, chunk));
    }
#pragma unroll
    for (int n = 0; n < kWarpDims / 8; n += 2) {
      u32 v[4];
      const int chunk = (warp_index() * kWarpDims + n * 8) / kChunkElements + lane / 16;
      ldmatrix_x4_trans(v, values + swizzled_offset<kTokenBytes>(token + lane % 16, chunk));
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
        mma_m16n8k16(Element{}, output[m][n], p[m], v[0], v[1]);
        mma_m16n8k16(Element{}, output[m][n + 1], p[m], v[2], v[3]);
      }
    }
  }
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

// Writes what a block found: the finished rows, or the partial rows of one split.

// The sum of a row over all token warps, after Softmax::publish and a barrier.
__device__ inline float row_sum(const SharedMemory& shared, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kTokenWarps; ++warp) sum += shared.row_partial[warp][row];
  return sum;
}

// One split of several: normalised fp32 rows and their LSE in log2 units. A row that saw nothing
// has LSE minus infinity, and its values are never read.
__device__ inline void store_partial(const Params& params, const SharedMemory& shared,
                                     const Output& output) {
  const Work& work = shared.work;
  const i64 split_row = work.split * params.total_rows;
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = output_row(m, half);
      if (row >= work.rows) continue;
      const i64 target = split_row + work.global_row(row);
      const RowResult result =
          finish_row(shared.row_reference[row], row_sum(shared, row), -kInfinity);
      float* values = params.partial_out + target * kHeadDimVo;
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; ++n) {
        *reinterpret_cast<float2*>(values + output_dim(n, 0)) = make_float2(
            output[m][n][half * 2] * result.factor, output[m][n][half * 2 + 1] * result.factor);
      }
      if (warp_index() == 0 && lane_index() % 4 == 0) params.partial_lse[target] = result.lse;
    }
  }
}

// The whole result. It passes through the query's shared memory, so that a row leaves in whole
// 128-byte lines.
__device__ inline void store_final(const Params& params, SharedMemory& shared,
                                   const Output& output) {
  const Work& work = shared.work;
  const float output_scale = value_of(params.bmm2_scale_tensor, params.bmm2_scale);
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = output_row(m, half);
      const float sink = params.sinks == nullptr || row >= work.rows
                             ? -kInfinity
                             : params.sinks[(work.first_row + row) % work.heads];
      const RowResult result =
          finish_row(shared.row_reference[row], row_sum(shared, row), sink, params.lse_factor);
      const float factor = result.factor * output_scale;
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; ++n) {
        const int dim = output_dim(n, 0);
        const u32 offset =
            swizzled_offset<kTokenBytes>(row, dim / kChunkElements) + dim % kChunkElements * 2;
        *reinterpret_cast<u32*>(shared.query + offset) = cvt_rn_x2_f32(
            OutElement{}, output[m][n][half * 2 + 1] * factor, output[m][n][half * 2] * factor);
      }
      if (params.lse != nullptr && warp_index() == 0 && lane_index() % 4 == 0 && row < work.rows) {
        params.lse[work.global_row(row)] = result.lse;
      }
    }
  }
  __syncthreads();
  constexpr int kChunks = kHeadDimVo / kChunkElements;
  for (int i = static_cast<int>(threadIdx.x); i < work.rows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    const uint4 value =
        *reinterpret_cast<const uint4*>(shared.query + swizzled_offset<kTokenBytes>(row, chunk));
    reinterpret_cast<uint4*>(params.out + work.global_row(row) * kHeadDimVo)[chunk] = value;
  }
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

// Streams tiles of the paged cache into the stages.

// Bytes of a stored token before its rope part, if that part may be a tensor of its own.
constexpr bool kIsPacked = kIsSame<StoredToken, Fp8DsMla> || kIsSame<StoredToken, Fp8PerToken>;
constexpr int kStoredRopeBytes = kIsPacked ? 0 : kStoredBytes / kHeadDimQk * kRopeDim;
constexpr int kStoredLatentBytes = kStoredBytes - kStoredRopeBytes;

// Scales that a token has outside its row; they are put behind it in the stage.
constexpr int kOuterScales = kStageRowBytes == kStoredBytes    ? 0
                             : kIsSame<StoredToken, Fp8PerToken> ? 1
                                                               : 4;

// The page ids of a tile, or its listed tokens, are read one item ahead, so that no copy waits.
struct TileLoader {
  const Params& params;
  const int* keys;  // page ids, or tokens, of the request
  const int* values;
  int end_token;  // tokens from here on are not read; their slots become zero
  int end_item;
  int next_item;
  int next_ids[kRounds];

  __device__ TileLoader(const Params& params, const Work& work)
      : params(params),
        end_token(work.visible_to_any),
        end_item(work.last_tile * kItemsPerTile),
        next_item(work.first_tile * kItemsPerTile) {
    const i64 start = table_row(params, work.request).start;
    keys = params.block_tables + start;
    values = kHasSeparateValues ? params.value_tables + start : nullptr;
    read_ids();
  }

  // Token of the tile that this thread copies in a round.
  __device__ static int tile_token(int round) {
    return round * kRoundTokens + static_cast<int>(threadIdx.x) / 8;
  }

  __device__ bool holds_values() const { return kHasSeparateValues && next_item % 2 == 1; }
  __device__ int next_tile() const { return next_item / kItemsPerTile; }

  __device__ void read_ids() {
    const int* ids = holds_values() ? values : keys;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int token = next_tile() * kTileTokens + tile_token(round);
      next_ids[round] = token < end_token ? ids[kIsSparse ? token : token / kPageSize] : -1;
    }
  }

  // Copies a part of a row, eight lanes together. A null `source` means zeros.
  template <int kBytes>
  __device__ static void copy_part(u32 target, const unsigned char* source,
                                   const unsigned char* anywhere) {
    const int lane = lane_index() % 8;
#pragma unroll
    for (int column = 0; column < kBytes; column += 128) {
      const int offset = column + lane * kChunkBytes;
      if (kBytes % 128 != 0 && offset >= kBytes) continue;
      // Swizzling permutes the chunks of 128 bytes, which the caller has done for the first.
      const u32 at = target + (kDecodesTokens ? offset : column);
      cp_async_cg_16(at, source == nullptr ? anywhere : source + offset,
                     source == nullptr ? 0 : kChunkBytes);
    }
  }

  __device__ void copy_round(SharedMemory& shared, int round) const {
    const int token = tile_token(round);
    const int id = next_ids[round];
    const int page = kIsSparse && id >= 0 ? id / kPageSize : id;
    const int slot = (kIsSparse ? id : next_tile() * kTileTokens + token) % kPageSize;
    const bool exists = is_page(page, params.num_pages);
    const unsigned char* base = holds_values() ? params.value_cache : params.cache;
    const PagedRows latent{base, params.page_stride, params.token_stride};
    const int lane = lane_index() % 8;
    const u32 target = shared_address(stage_of(shared, next_item)) +
                       (kDecodesTokens ? static_cast<u32>(token * kStageRowBytes)
                                       : swizzled_offset<kTokenBytes>(token, lane));
    copy_part<kStoredLatentBytes>(target, exists ? latent.row_of(page, slot) : nullptr, base);
    if constexpr (kStoredRopeBytes > 0) {
      if (!holds_values()) {
        const PagedRows rope{params.rope_cache, params.rope_page_stride, params.rope_token_stride};
        copy_part<kStoredRopeBytes>(target + kStoredLatentBytes,
                                    exists ? rope.row_of(page, slot) : nullptr, base);
      }
    }
    if constexpr (kOuterScales > 0) {
      if (params.kv_scales != nullptr && lane < kOuterScales) {
        const i64 scale = page * params.scale_page_stride + slot * params.scale_token_stride + lane;
        cp_async_ca_4(target + kStoredBytes + lane * 4, params.kv_scales + (exists ? scale : 0),
                      exists ? 4 : 0);
      }
    }
  }

  // Starts the copy of the next item, if there is one, except for the borrowed rounds.
  __device__ void begin_next(SharedMemory& shared) const {
    if (next_item >= end_item) return;
#pragma unroll
    for (int round = 0; round < kRounds - kBorrowedRounds; ++round) copy_round(shared, round);
  }

  // Starts the rest of it, and closes its group whether there was an item or not.
  __device__ void finish_next(SharedMemory& shared) {
    if (next_item < end_item) {
#pragma unroll
      for (int round = kRounds - kBorrowedRounds; round < kRounds; ++round) {
        copy_round(shared, round);
      }
      ++next_item;
      read_ids();
    }
    cp_async_commit_group();
  }
};

// Where a row of the query is, and where it goes.

// Latent and rope part may be tensors of their own; strides in bytes.
__device__ inline const unsigned char* latent_part(const Params& params, i64 query, int head) {
  return params.query + query * params.query_stride + head * params.query_head_stride;
}

__device__ inline const unsigned char* rope_part(const Params& params, i64 query, int head) {
  return params.query_rope + query * params.query_rope_stride +
         head * params.query_rope_head_stride;
}

__device__ inline Chunk* query_chunk(SharedMemory& shared, int row, int chunk) {
  return reinterpret_cast<Chunk*>(shared.query + swizzled_offset<kTokenBytes>(row, chunk));
}

// A row of a query that is multiplied as it is stored.

__device__ inline void load_query_row(const Params& params, i64 query, int head, int row, int lane,
                                      SharedMemory& shared) {
  const unsigned char* latent = latent_part(params, query, head);
  const unsigned char* rope = rope_part(params, query, head);
  constexpr int kLatentChunks = kLatentDim / kChunkElements;
#pragma unroll
  for (int chunk = 0; chunk < kHeadDimQk / kChunkElements; chunk += 8) {
    const unsigned char* source = chunk < kLatentChunks
                                      ? latent + (chunk + lane) * kChunkBytes
                                      : rope + (chunk - kLatentChunks + lane) * kChunkBytes;
    cp_async_cg_16(shared_address(query_chunk(shared, row, chunk + lane)), source, kChunkBytes);
  }
}

// Brings the block's rows of the query into shared memory.

// Eight lanes take one row.
__device__ inline void load_query(const Params& params, const Work& work, SharedMemory& shared) {
  const int lane = lane_index() % 8;
  for (int row = static_cast<int>(threadIdx.x) / 8; row < kRows; row += kThreads / 8) {
    const int packed_row = work.first_row + row;
    if (row < work.rows) {
      const i64 query = work.first_query + packed_row / work.heads;
      load_query_row(params, query, packed_row % work.heads, row, lane, shared);
    } else {
      for (int chunk = lane; chunk < kTokenBytes / kChunkBytes; chunk += 8) {
        *query_chunk(shared, row, chunk) = Chunk{};
      }
    }
  }
}

// Scores of one tile: S = Q K^T.

// The part of S that one warp holds, in the fragments of mma: element [m][n][e] belongs to
// row score_row(m, e / 2) and tile token score_token(n, e % 2).
using Scores = float[kScoreRowGroups][kScoreTokenGroups][4];

// kDimWarps neighbouring token warps multiply together: each takes the tokens of all of them and a
// part of the dims, which reads shared memory less often than a narrow product over all dims.
constexpr int kProductTokenGroups = kScoreTokenGroups * kDimWarps;
using Products = float[kScoreRowGroups][kProductTokenGroups][4];

// Steps of 16 dims whose keys are loaded together.
constexpr int kKeySteps = kProductTokenGroups % 2 == 0 ? 1 : 2;

__device__ inline int token_warp() { return warp_index() % kTokenWarps; }
__device__ inline int dim_warp() { return warp_index() % kDimWarps; }

__device__ inline int score_row(int group, int half) {
  const int row_warp = warp_index() / kTokenWarps;
  return (row_warp * kScoreRowGroups + group) * 16 + half * 8 + lane_index() / 4;
}

__device__ inline int score_token(int group, int parity) {
  return (token_warp() * kScoreTokenGroups + group) * 8 + lane_index() % 4 * 2 + parity;
}

// Multiplies this warp's dims: of every 64, the 32 or 64 that belong to it.
__device__ inline void multiply_dims(const SharedMemory& shared, const unsigned char* tokens,
                                     Products& products) {
  const int lane = lane_index();
  const u32 query = shared_address(shared.query);
  const u32 keys = shared_address(tokens);
  const int query_row = warp_index() / kTokenWarps * kScoreRowGroups * 16 + lane % 16;
  const int key_row = token_warp() / kDimWarps * kProductTokenGroups * 8 + lane % 8;

#pragma unroll
  for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
    for (int n = 0; n < kProductTokenGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) products[m][n][e] = 0.0f;
    }
  }

  // Not unrolled: the addresses of all steps at once would spill.
#pragma unroll 1
  for (int column = 0; column < kTokenBytes; column += 128) {
#pragma unroll
    for (int step = 0; step < 4 / kDimWarps; step += kKeySteps) {
      const int first_chunk = dim_warp() * 4 + step * 2;
      // A load brings two fragments: of two token groups, or of two steps of a lone one.
      u32 k[kProductTokenGroups * kKeySteps / 2][4];
#pragma unroll
      for (int load = 0; load < kProductTokenGroups * kKeySteps / 2; ++load) {
        const int fragment = load * 2 + lane / 16;
        const int chunk = first_chunk + fragment % kKeySteps * 2 + lane / 8 % 2;
        ldmatrix_x4(k[load],
                    keys + column +
                        swizzled_offset<kTokenBytes>(key_row + fragment / kKeySteps * 8, chunk));
      }
#pragma unroll
      for (int half = 0; half < kKeySteps; ++half) {
#pragma unroll
        for (int m = 0; m < kScoreRowGroups; ++m) {
          u32 q[4];
          const int chunk = first_chunk + half * 2 + lane / 16;
          ldmatrix_x4(q, query + column + swizzled_offset<kTokenBytes>(query_row + m * 16, chunk));
#pragma unroll
          for (int n = 0; n < kProductTokenGroups; ++n) {
            const int fragment = n * kKeySteps + half;
            mma_m16n8k16(Element{}, products[m][n], q, k[fragment / 2][fragment % 2 * 2],
                         k[fragment / 2][fragment % 2 * 2 + 1]);
          }
        }
      }
    }
  }
}

// Gives the partner its tokens' products over this warp's dims, and adds what the partner gives.
// `borrowed` is shared memory that nobody else uses before the next barrier but one.
__device__ inline void trade_products(const Products& products, float* borrowed, Scores& scores) {
  static_assert(kDimWarps <= 2, "a warp has one partner");
  constexpr int kTraded = kScoreRowGroups * kScoreTokenGroups * 4;
  const bool is_second = dim_warp() == 1;
  float* given = borrowed + (warp_index() ^ 1) * kTraded * kWarpLanes + lane_index();
  float* taken = borrowed + warp_index() * kTraded * kWarpLanes + lane_index();
#pragma unroll
  for (int i = 0; i < kTraded; ++i) {
    const int m = i / (kScoreTokenGroups * 4), n = i / 4 % kScoreTokenGroups, e = i % 4;
    given[i * kWarpLanes] = is_second ? products[m][n][e] : products[m][n + kScoreTokenGroups][e];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kTraded; ++i) {
    const int m = i / (kScoreTokenGroups * 4), n = i / 4 % kScoreTokenGroups, e = i % 4;
    const float own = is_second ? products[m][n + kScoreTokenGroups][e] : products[m][n][e];
    scores[m][n][e] = own + taken[i * kWarpLanes];
  }
}

// `tokens` are those of item `item`, the last one that is ready.
__device__ inline void multiply_qk(SharedMemory& shared, const unsigned char* tokens, int item,
                                   Scores& scores) {
  Products products;
  multiply_dims(shared, tokens, products);
  if constexpr (kDimWarps > 1) {
    unsigned char* filling = stage_of(shared, item + kItemsAhead);
    trade_products(products, reinterpret_cast<float*>(filling + kBorrowedOffset), scores);
  } else {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int n = 0; n < kScoreTokenGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][n][e] = products[m][n][e];
      }
    }
  }
}

// When the reference of a row moves, in the online softmax of the portable families.

// A row's probabilities are relative to its reference, which is kept until a score exceeds it by
// this much in log2 units. So warps need not agree on a maximum for every tile, the output is
// rescaled seldom, and no probability exceeds 2^8, which fp16 holds.
constexpr float kReferenceSlack = 8.0f;

// Reductions over the four neighbouring lanes that have a row's parts, as products leave them.

__device__ inline float row_maximum(float value) {
  value = fmaxf(value, __shfl_xor_sync(~0u, value, 1));
  return fmaxf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float row_minimum(float value) {
  value = fminf(value, __shfl_xor_sync(~0u, value, 1));
  return fminf(value, __shfl_xor_sync(~0u, value, 2));
}

__device__ inline float row_total(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// What products of query and key are multiplied by, in the natural domain.

__device__ inline float score_scale(const Params& params) {
  const float scale = value_of(params.bmm1_scale_tensor, params.bmm1_scale);
  return params.scores_take_bmm2 ? scale * value_of(params.bmm2_scale_tensor, params.bmm2_scale)
                                 : scale;
}

// Online softmax over the tiles of one block.

// The sums are over this thread's tokens only, of probabilities as P V uses them: rounded. The
// references, in log2 units, are in shared memory.
struct Softmax {
  const Params& params;
  float scale;  // of the scores, times log2(e)
  float sum[kScoreRowGroups][2];
  float tile_sum[kScoreRowGroups][2];

  __device__ explicit Softmax(const Params& params)
      : params(params), scale(score_scale(params) * kLog2E) {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] = 0.0f;
    }
  }

  // A score in log2 units. Rounded by itself, never fused with a subtraction: the vote on whether
  // it exceeds a reference, and the reference that is moved to it, must speak of the same number.
  __device__ float scaled(float score) const { return __fmul_rn(score, scale); }

  // How many tokens of the tile a row sees; more than kTileTokens means all.
  __device__ static int visible_tokens(int row, int first_token, const SharedMemory& shared) {
    // Padding has no bias to read.
    const bool is_visible_to_all =
        !kHasBias && first_token + kTileTokens <= shared.work.visible_to_all;
    return is_visible_to_all ? kTileTokens : shared.row_visible[row] - first_token;
  }

  // Writes the probabilities of a tile relative to the references as they are. Returns whether a
  // score exceeds its reference by too much, as any score does that is the first of its row; then
  // what was written has no meaning.
  __device__ bool write_probabilities(const Scores& scores, int first_token, SharedMemory& shared) {
    bool exceeds = false;
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = score_row(m, half);
        const int visible = visible_tokens(row, first_token, shared);
        const float reference = shared.row_reference[row];
        const float* bias = row_bias(params, shared.work, row);
        tile_sum[m][half] = 0.0f;
#pragma unroll
        for (int n = 0; n < kScoreTokenGroups; ++n) {
          float p[2];
#pragma unroll
          for (int parity = 0; parity < 2; ++parity) {
            const int token = score_token(n, parity);
            float score = scaled(scores[m][n][half * 2 + parity]);
            const bool is_seen =
                token < visible && see_token(bias, first_token, token, score, shared);
            // A select, not arithmetic: the hidden score may be NaN.
            const float seen = is_seen ? score - reference : -kInfinity;
            exceeds |= seen > kReferenceSlack;
            p[parity] = ex2_approx(seen);
          }
          const u32 packed = cvt_rn_x2_f32(Element{}, p[1], p[0]);
          tile_sum[m][half] += cvt_f32(Element{}, static_cast<u16>(packed)) +
                               cvt_f32(Element{}, static_cast<u16>(packed >> 16));
          const int first = score_token(n, 0);
          const u32 offset = swizzled_offset<kProbabilityBytes>(row, first / kChunkElements) +
                             first % kChunkElements * 2;
          *reinterpret_cast<u32*>(shared.probabilities + offset) = packed;
        }
      }
    }
    return exceeds;
  }

  // Moves the reference of every row whose maximum over all token warps exceeds it by too much, and
  // says what the output so far must be multiplied by. Ends with the probabilities written anew.
  __device__ void move_references(const Scores& scores, int first_token, SharedMemory& shared) {
    write_maxima(scores, first_token, shared);
    __syncthreads();
    for (int row = static_cast<int>(threadIdx.x); row < kRows; row += kThreads) {
      float maximum = -kInfinity;
#pragma unroll
      for (int warp = 0; warp < kTokenWarps; ++warp) {
        maximum = fmaxf(maximum, shared.row_partial[warp][row]);
      }
      const float reference = shared.row_reference[row];
      const bool exceeds = maximum - reference > kReferenceSlack;
      shared.row_rescale[row] = exceeds ? ex2_approx(reference - maximum) : 1.0f;
      if (exceeds) shared.row_reference[row] = maximum;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[m][half] *= shared.row_rescale[score_row(m, half)];
      }
    }
    write_probabilities(scores, first_token, shared);
    __syncthreads();
  }

  // Leaves the maximum of every row of the tile over this warp's tokens.
  __device__ void write_maxima(const Scores& scores, int first_token, SharedMemory& shared) const {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = score_row(m, half);
        const int visible = visible_tokens(row, first_token, shared);
        const float* bias = row_bias(params, shared.work, row);
        float maximum = -kInfinity;
#pragma unroll
        for (int n = 0; n < kScoreTokenGroups; ++n) {
#pragma unroll
          for (int parity = 0; parity < 2; ++parity) {
            const int token = score_token(n, parity);
            float score = scaled(scores[m][n][half * 2 + parity]);
            if (token < visible && see_token(bias, first_token, token, score, shared)) {
              maximum = fmaxf(maximum, score);
            }
          }
        }
        maximum = row_maximum(maximum);
        if (lane_index() % 4 == 0) shared.row_partial[token_warp()][row] = maximum;
      }
    }
  }

  __device__ void add_tile() {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[m][half] += tile_sum[m][half];
    }
  }

  // Leaves the parts of each row's sum in shared memory, for every warp to read.
  __device__ void publish(SharedMemory& shared) {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[m][half] = row_total(sum[m][half]);
        if (lane_index() % 4 == 0) {
          shared.row_partial[token_warp()][score_row(m, half)] = sum[m][half];
        }
      }
    }
  }
};

// Waits for an item, and begins the copy of one more where it may be written.
__device__ inline unsigned char* next_tokens(const Params& params, int item, TileLoader& loader,
                                             SharedMemory& shared) {
  cp_async_wait_group<kItemsAhead - 1>();
  __syncthreads();  // the item is here for all warps, and all are done with the one before
  loader.begin_next(shared);
  return tokens_of(shared, item);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    mla_decode(const __grid_constant__ Params params) {
  SharedMemory& shared = shared_memory<SharedMemory>();
  wait_for_previous_kernel();
  const Work work = find_work(params);
  if (work.rows <= 0) return;

  share_work(work, shared);
  load_query(params, work, shared);
  TileLoader loader(params, work);
#pragma unroll
  for (int ahead = 0; ahead < kItemsAhead; ++ahead) {
    loader.begin_next(shared);
    loader.finish_next(shared);
  }

  Softmax softmax(params);
  Output output;
  clear_output(output);
  const int last_tile = work.last_tile;
  for (int tile = work.first_tile; tile < last_tile; ++tile) {
    const int first_token = tile * kTileTokens;
    begin_tile(params, loader.keys, loader.end_token, tile, shared);
    int item = tile * kItemsPerTile;
    unsigned char* tokens = next_tokens(params, item, loader, shared);

    Scores scores;
    multiply_qk(shared, tokens, item, scores);
    const bool exceeds = softmax.write_probabilities(scores, first_token, shared);
    // All probabilities are written, and nobody reads what was borrowed.
    if (__syncthreads_or(exceeds)) {
      softmax.move_references(scores, first_token, shared);
      rescale_output(shared, output);
    }
    softmax.add_tile();
    loader.finish_next(shared);
    if constexpr (kHasSeparateValues) {
      tokens = next_tokens(params, ++item, loader, shared);
      loader.finish_next(shared);
    }
    const int boundary = kHasBias ? 0 : max(shared.work.visible_to_all - first_token, 0);
    const int end = min(shared.work.visible_to_any - first_token, kTileTokens);
    if (boundary < end) {
      accumulate_boundary(params, shared, tokens, first_token, boundary, end, output);
    }
    accumulate_pv(shared, tokens, output);
  }

  let_next_kernel_start();
  cp_async_wait_group<0>();
  softmax.publish(shared);
  __syncthreads();
  if (params.splits > 1) {
    store_partial(params, shared, output);
  } else {
    store_final(params, shared, output);
  }
}
