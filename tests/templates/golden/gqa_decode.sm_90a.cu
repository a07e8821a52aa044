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

// The numbers of this kernel; the rest of the source only uses them.

using Element = Bf16;
using StoredToken = E4m3;
using OutElement = Bf16;
constexpr int kHeadDim = 128;
constexpr int kPageSize = 64;
constexpr int kSlices = 1;
constexpr int kRows = 16;
constexpr int kWarps = 4;
constexpr int kItems = 6;
constexpr int kBlocksPerSm = 2;
constexpr int kWarpTokens = 16;
constexpr bool kDecodesTokens = true;
constexpr int kStoredBytes = 128;
constexpr int kSharedBytes = 75600;

constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kRowGroups = kRows / 16;
constexpr int kSliceDims = kHeadDim / kSlices;  // output elements of one block

// Rows that are multiplied are 16 bytes longer than their elements: then the eight rows that one
// ldmatrix reads at the same column lie in different banks, whatever the head dim.
constexpr int kRowBytes = kHeadDim * 2 + kChunkBytes;
constexpr int kItemRowBytes = kDecodesTokens ? kStoredBytes : kRowBytes;
constexpr int kItemBytes = kWarpTokens * kItemRowBytes;
constexpr int kWarpBytes = kItems * kItemBytes + (kDecodesTokens ? kWarpTokens * kRowBytes : 0);
constexpr int kMergedFloats = kRows * (kSliceDims + 4);
// How many items are under way while one is used. Decoded tokens have a place of their own, and
// free that of their item.
constexpr int kItemsAhead = kDecodesTokens ? kItems : kItems - 1;

// What fits into the registers of a thread beside the output.
constexpr bool kKeepsQuery = kRowGroups * kHeadDim <= 128;

static_assert(kHeadDim % (16 * kSlices) == 0, "a slice is whole 16-wide tiles");
static_assert(kWarpTokens == 16, "the tokens of a warp are one step of mma in P V");
static_assert(kItemsAhead >= 1, "something is under way while an item is used");

// The output of one warp, in the fragments of mma.

// Element [m][n][e] belongs to row score_row(m, e / 2) and output dim output_dim(n, e % 2).
using Output = float[kRowGroups][kSliceDims / 8][4];

__device__ inline int output_dim(int group, int parity) {
  return group * 8 + lane_index() % 4 * 2 + parity;
}

__device__ inline void clear_output(Output& output) {
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int n = 0; n < kSliceDims / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) output[m][n][e] = 0.0f;
    }
  }
}

// Multiplies what this lane holds of one of its rows.
__device__ inline void rescale_output(int group, int half, float factor, Output& output) {
#pragma unroll
  for (int n = 0; n < kSliceDims / 8; ++n) {
    output[group][n][half * 2] *= factor;
    output[group][n][half * 2 + 1] *= factor;
  }
}

// What one launch passes to the kernel.

struct Params {
  const u16* query;
  const unsigned char* key_cache;
  const unsigned char* value_cache;
  const unsigned char* key_scales;
  const unsigned char* value_scales;
  const int* block_tables;
  const int* seq_lens;
  const int* cum_seq_lens_q;
  const u32* draft_mask;
  const float* bmm1_scale_tensor;
  const float* bmm2_scale_tensor;
  const float* sinks;
  unsigned char* out;
  float* partial_out;
  float* partial_lse;
  i64 query_stride;
  i64 query_head_stride;
  i64 key_page_stride;
  i64 key_token_stride;
  i64 key_head_stride;
  i64 value_page_stride;
  i64 value_token_stride;
  i64 value_head_stride;
  i64 key_scale_page_stride;
  i64 key_scale_token_stride;
  i64 key_scale_head_stride;
  i64 value_scale_page_stride;
  i64 value_scale_token_stride;
  i64 value_scale_head_stride;
  i64 total_rows;
  int requests;
  int kv_heads;
  int group;
  int q_len;
  int mask_words;
  int window;
  int max_pages;
  int block_tables_stride;
  int num_pages;
  int row_tiles;
  int splits;
  int scores_take_bmm2;
  float bmm1_scale;
  float bmm2_scale;
  float score_factor;
  float output_factor;
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

// Which rows and which tokens this block attends to.

// A row is one (query token, query head of a kv head) pair of a request, query token first. A block
// takes kRows rows of one kv head, a slice of their output elements and one split of the tokens.
struct alignas(16) Work {
  int request;
  int kv_head;
  int slice;
  int split;
  int q_len;  // query tokens of this request
  i64 first_query;  // index of the request's first query token among all
  int kv_len;  // tokens in the cache, the new ones included
  int first_row;  // of this block, among the request's rows
  int rows;  // of this block; the rest of kRows is padding
  int all_begin, all_end;  // tokens that every row of this block sees
  int any_begin, any_end;  // tokens that some row may see
  int first_group, last_group;  // of kWarpTokens tokens each, that are this split's

  __device__ int query_of(const Params& params, int row) const {
    return (first_row + row) / params.group;
  }

  // The first token that a query token's window reaches back to.
  __device__ int window_begin(const Params& params, int query) const {
    return params.window > 0 ? max(0, kv_len - q_len + query + 1 - params.window) : 0;
  }

  __device__ int head_of(const Params& params, int row) const {
    return kv_head * params.group + (first_row + row) % params.group;
  }

  // Index of `row` in a [tokens * heads] array.
  __device__ i64 global_row(const Params& params, int row) const {
    const i64 query = first_query + query_of(params, row);
    return query * params.group * params.kv_heads + head_of(params, row);
  }

  // Whether a row of this block sees a token that not all of them see.
  __device__ bool sees(const Params& params, int row, int token) const {
    if (row >= rows || token >= kv_len) return false;
    const int query = query_of(params, row);
    if (token < window_begin(params, query)) return false;
    const int draft = token - (kv_len - q_len);
    if (params.draft_mask == nullptr || draft < 0) return draft <= query;
    const u32* words = params.draft_mask + (first_query + query) * params.mask_words;
    // Drafts beyond the mask are in no row's sight.
    return draft / 32 < params.mask_words && (words[draft / 32] >> draft % 32 & 1) != 0;
  }
};

__device__ inline Work find_work(const Params& params) {
  Work work;
  int block = static_cast<int>(blockIdx.x);
  const int tile = block % params.row_tiles;
  block /= params.row_tiles;
  work.slice = block % kSlices;
  block /= kSlices;
  work.kv_head = block % params.kv_heads;
  block /= params.kv_heads;
  work.split = block % params.splits;
  const i64 tokens = params.total_rows / (static_cast<i64>(params.group) * params.kv_heads);
  const TileRows found = rows_of_tile(params.cum_seq_lens_q, params.requests, params.q_len,
                                      params.group, tokens, block / params.splits, tile);
  work.request = found.request;
  work.q_len = found.q_len;
  work.first_query = found.first_query;
  work.first_row = found.first_row;
  work.rows = found.rows;
  work.kv_len = tokens_held(params.seq_lens[work.request], params.max_pages);

  const int first = work.query_of(params, 0);
  const int last = work.query_of(params, max(work.rows, 1) - 1);
  const int before = work.kv_len - work.q_len;  // tokens before the new ones
  const bool has_mask = params.draft_mask != nullptr;
  work.any_begin = work.window_begin(params, first);
  work.all_begin = work.window_begin(params, last);
  work.any_end = max(has_mask ? work.kv_len : before + last + 1, 0);
  work.all_end = max(has_mask ? before : before + first + 1, 0);

  const int begin = work.any_begin / kWarpTokens;
  const int groups = max(ceil_div(work.any_end, kWarpTokens) - begin, 0);
  const int per_split = ceil_div(ceil_div(groups, kWarps), params.splits) * kWarps;
  work.first_group = begin + min(groups, work.split * per_split);
  work.last_group = min(begin + groups, work.first_group + per_split);
  return work;
}

// The shared memory of a block, whole.

struct alignas(16) SharedMemory {
  Work work;  // here, and not in the registers of every thread
  unsigned char query[kRows * kRowBytes];  // [kRows][kHeadDim]
  union {
    unsigned char warps[kWarps][kWarpBytes];  // see item_of and tokens_of
    float merged[kMergedFloats];  // [kRows][kSliceDims + 4], after the last tokens
  };
  float reference[kWarps][kRows];  // what a warp's part of a row is relative to, log2 units
  float sum[kWarps][kRows];
  float probabilities[kWarps][kRows][kWarpTokens];  // of tokens that some rows do not see
};
static_assert(sizeof(SharedMemory) == kSharedBytes, "the spec computes what the struct takes");

// Where item `item` of this warp arrives, [kWarpTokens] rows of kItemRowBytes.
__device__ inline unsigned char* item_of(SharedMemory& shared, int item) {
  return shared.warps[warp_index()] + item % kItems * kItemBytes;
}

// Where it is multiplied from once it is ready, [kWarpTokens] rows of kRowBytes.
__device__ inline unsigned char* tokens_of(SharedMemory& shared, int item) {
  return kDecodesTokens ? shared.warps[warp_index()] + kItems * kItemBytes : item_of(shared, item);
}

// Scores of one group of tokens: S = Q K^T.

// S of one warp, in the fragments of mma: element [m][n][e] belongs to row score_row(m, e / 2) and
// token score_token(n, e % 2) of the group.
using Scores = float[kRowGroups][2][4];

// Sixteen dims of the query's rows.
using QueryStep = u32[kRowGroups][4];

__device__ inline int score_row(int group, int half) {
  return group * 16 + half * 8 + lane_index() / 4;
}

__device__ inline int score_token(int group, int parity) {
  return group * 8 + lane_index() % 4 * 2 + parity;
}

__device__ inline void load_query_step(const SharedMemory& shared, int step, QueryStep& query) {
  const u32 rows =
      shared_address(shared.query) + (step * 2 + lane_index() / 16) * static_cast<int>(kChunkBytes);
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
    ldmatrix_x4(query[m], rows + (m * 16 + lane_index() % 16) * kRowBytes);
  }
}

// The query in registers, where it fits, or nothing.
struct KeptQuery {
  QueryStep steps[kKeepsQuery ? kHeadDim / 16 : 1];

  __device__ explicit KeptQuery(const SharedMemory& shared) {
    if (!kKeepsQuery) return;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) load_query_step(shared, step, steps[step]);
  }
};

__device__ inline void multiply_qk(const SharedMemory& shared, KeptQuery& query,
                                   const unsigned char* tokens, Scores& scores) {
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[m][n][e] = 0.0f;
    }
  }
  const int lane = lane_index();
  const u32 keys =
      shared_address(tokens) + (lane / 16 * 8 + lane % 8) * kRowBytes + lane / 8 % 2 * kChunkBytes;
#pragma unroll kKeepsQuery ? kHeadDim / 16 : 2
  for (int step = 0; step < kHeadDim / 16; ++step) {
    QueryStep& q = query.steps[kKeepsQuery ? step : 0];
    if (!kKeepsQuery) load_query_step(shared, step, q);
    u32 k[4];
    ldmatrix_x4(k, keys + step * 2 * kChunkBytes);
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
      mma_m16n8k16(Element{}, scores[m][0], q[m], k[0], k[1]);
      mma_m16n8k16(Element{}, scores[m][1], q[m], k[2], k[3]);
    }
  }
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

// Merges what the warps of a block found, and writes it: the finished rows, or the partial rows
// of one split.

// The reference that all warps' parts of a row can be brought to.
__device__ inline float row_reference(const SharedMemory& shared, int row) {
  float reference = -kInfinity;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    reference = fmaxf(reference, shared.reference[warp][row]);
  }
  return reference;
}

// What a warp's part of a row is multiplied by to be relative to `reference`.
__device__ inline float part_factor(const SharedMemory& shared, int warp, int row,
                                    float reference) {
  const float own = shared.reference[warp][row];
  return own == -kInfinity ? 0.0f : ex2_approx(own - reference);
}

// Where row `row` begins in `merged`, whose rows are 16 bytes longer than their elements.
__device__ constexpr int merged_row(int row) { return row * (kSliceDims + 4); }

// The sum of all warps' outputs, one warp after the other. Begins with a barrier after which nobody
// uses tokens, and references and sums of all warps can be read; ends with a barrier too.
__device__ inline void merge_warps(SharedMemory& shared, const Output& output) {
  __syncthreads();
#pragma unroll 1
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp_index() == warp) {
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = score_row(m, half);
          const float factor = part_factor(shared, warp, row, row_reference(shared, row));
          float* target = shared.merged + merged_row(row);
#pragma unroll
          for (int n = 0; n < kSliceDims / 8; ++n) {
            float2* pair = reinterpret_cast<float2*>(target + output_dim(n, 0));
            const float2 before = warp == 0 ? make_float2(0.0f, 0.0f) : *pair;
            // A warp that saw nothing of the row adds nothing.
            *pair = factor == 0.0f ? before
                                   : make_float2(before.x + output[m][n][half * 2] * factor,
                                                 before.y + output[m][n][half * 2 + 1] * factor);
          }
        }
      }
    }
    __syncthreads();
  }
}

// Leaves what each merged row is multiplied by in place of the first warp's sums, and writes the
// LSE of a split's rows in log2 units. A row of a split that saw nothing has LSE minus infinity,
// and its values are never read.
__device__ inline void finish_rows(const Params& params, const Work& work, SharedMemory& shared) {
  const bool is_partial = params.splits > 1;
  for (int row = static_cast<int>(threadIdx.x); row < work.rows; row += kThreads) {
    const float reference = row_reference(shared, row);
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      sum += shared.sum[warp][row] * part_factor(shared, warp, row, reference);
    }
    const float sink = is_partial || params.sinks == nullptr
                           ? -kInfinity
                           : params.sinks[work.head_of(params, row)];
    const RowResult result = finish_row(reference, sum, sink);
    const float output_scale =
        is_partial ? 1.0f
                   : value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor;
    shared.sum[0][row] = result.factor * output_scale;
    if (is_partial && work.slice == 0) {
      params.partial_lse[work.split * params.total_rows + work.global_row(params, row)] =
          result.lse;
    }
  }
  __syncthreads();
}

// Normalised fp32 rows of one split, or the whole result.
__device__ inline void store_output(const Params& params, const Work& work,
                                    const SharedMemory& shared) {
  constexpr int kQuads = kSliceDims / 4;
  for (int i = static_cast<int>(threadIdx.x); i < work.rows * kQuads; i += kThreads) {
    const int row = i / kQuads;
    const int dim = i % kQuads * 4;
    const float factor = shared.sum[0][row];
    float4 value = *reinterpret_cast<const float4*>(shared.merged + merged_row(row) + dim);
    value = make_float4(value.x * factor, value.y * factor, value.z * factor, value.w * factor);
    const i64 global_row = work.global_row(params, row);
    const int column = work.slice * kSliceDims + dim;
    if (params.splits > 1) {
      const i64 partial_row = work.split * params.total_rows + global_row;
      *reinterpret_cast<float4*>(params.partial_out + partial_row * kHeadDim + column) = value;
    } else {
      store_x4(OutElement{}, params.out, global_row * kHeadDim + column, value.x, value.y, value.z,
               value.w);
    }
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

// Streams keys and values of one warp's tokens.

// Items alternate: the keys of a group of tokens, its values, the keys of the warp's next group.
// Page ids are read one group ahead, so that no copy waits for them.
struct TokenLoader {
  const Params& params;
  const Work& work;
  const int* table;  // page ids of the request
  int next_item;
  int next_group;
  int pages;  // of token lane_index() % kWarpTokens of the next group; -1 for what is not read
  int next_pages;  // of the group after it

  __device__ TokenLoader(const Params& params, const Work& work)
      : params(params),
        work(work),
        table(params.block_tables + work.request * static_cast<i64>(params.block_tables_stride)),
        next_item(0),
        next_group(work.first_group + warp_index()) {
    pages = read_pages(next_group);
    next_pages = read_pages(next_group + kWarps);
  }

  __device__ int read_pages(int group) const {
    const int token = group * kWarpTokens + lane_index() % kWarpTokens;
    const bool is_read = group < work.last_group && token >= work.any_begin && token < work.any_end;
    return is_read ? table[token / kPageSize] : -1;
  }

  // Copies `kBytes` of every token's row, from byte `offset` on, to the rows of an item.
  template <int kBytes>
  __device__ void copy_rows(const PagedRows& rows, int offset, unsigned char* item) const {
    constexpr int kCopyBytes = kBytes % kChunkBytes == 0 ? kChunkBytes : 8;
    constexpr int kCopies = kBytes / kCopyBytes;
#pragma unroll 4  // more addresses at once would take registers from the output
    for (int first = 0; first < kWarpTokens * kCopies; first += kWarpLanes) {
      const int copy = first + lane_index();
      const int token = copy / kCopies;
      const int at = copy % kCopies * kCopyBytes;
      const int page = __shfl_sync(~0u, pages, token % kWarpTokens);
      if (token >= kWarpTokens) continue;
      const bool exists = is_page(page, params.num_pages);
      const int slot = (next_group * kWarpTokens + token) % kPageSize;
      const unsigned char* source = exists ? rows.row_of(page, slot) + offset + at : rows.rows;
      const u32 target = shared_address(item) + token * kItemRowBytes + at;
      if constexpr (kCopyBytes == kChunkBytes) {
        cp_async_cg_16(target, source, exists ? kChunkBytes : 0);
      } else {
        cp_async_ca_8(target, source, exists ? 8 : 0);
      }
    }
  }

  // Starts the copy of the next item, if there is one, and closes its group in any case.
  __device__ void begin_next(SharedMemory& shared) {
    if (next_group < work.last_group) {
      unsigned char* item = item_of(shared, next_item);
      if (next_item % 2 == 0) {
        const PagedRows keys{params.key_cache + work.kv_head * params.key_head_stride,
                             params.key_page_stride, params.key_token_stride};
        copy_rows<kStoredBytes>(keys, 0, item);
      } else {
        const PagedRows values{params.value_cache + work.kv_head * params.value_head_stride,
                               params.value_page_stride, params.value_token_stride};
        constexpr int kSliceBytes = kStoredBytes / kSlices;
        copy_rows<kSliceBytes>(values, work.slice * kSliceBytes, item);
        next_group += kWarps;
        pages = next_pages;
        next_pages = read_pages(next_group + kWarps);
      }
      ++next_item;
    }
    cp_async_commit_group();
  }
};

// Brings the block's rows of the query into shared memory.

__device__ inline void load_query(const Params& params, const Work& work, SharedMemory& shared) {
  constexpr int kChunks = kHeadDim * 2 / kChunkBytes;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    Chunk value{};
    if (row < work.rows) {
      const i64 query = work.first_query + work.query_of(params, row);
      const u16* source = params.query + query * params.query_stride +
                          work.head_of(params, row) * params.query_head_stride;
      value = reinterpret_cast<const Chunk*>(source)[chunk];
    }
    *reinterpret_cast<Chunk*>(shared.query + row * kRowBytes + chunk * kChunkBytes) = value;
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

// Online softmax over the tokens of one warp.

// The probabilities of a group of tokens, rounded, as mma takes them: rows and tokens as in Scores.
using Probabilities = u32[kRowGroups][4];

// Four lanes hold a row together. The sums are over this lane's tokens only, of probabilities as
// P V uses them: rounded.
struct Softmax {
  float scale;  // of the scores, times log2(e)
  float reference[kRowGroups][2];  // log2 units
  float sum[kRowGroups][2];

  __device__ explicit Softmax(const Params& params)
      : scale(score_scale(params) * params.score_factor * kLog2E) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        reference[m][half] = -kInfinity;
        sum[m][half] = 0.0f;
      }
    }
  }

  // Scores become log2 units, and minus infinity where a row does not see the token: a select, not
  // arithmetic, for the hidden score may be NaN.
  __device__ void scale_and_hide(const Params& params, const Work& work, int first_token,
                                 bool has_boundary, Scores& scores) const {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float score = __fmul_rn(scores[m][n][e], scale);
          const bool is_seen = !has_boundary || work.sees(params, score_row(m, e / 2),
                                                          first_token + score_token(n, e % 2));
          scores[m][n][e] = is_seen ? score : -kInfinity;
        }
      }
    }
  }

  // Whether a score of this warp exceeds its reference by too much, as any score does that is the
  // first of its row.
  __device__ bool exceeds(const Scores& scores) const {
    bool found = false;
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          found |= scores[m][n][e] - reference[m][e / 2] > kReferenceSlack;
        }
      }
    }
    return __any_sync(~0u, found);
  }

  // Moves the reference of every row whose maximum exceeds it by too much.
  __device__ void move_references(const Scores& scores, Output& output) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float maximum = fmaxf(fmaxf(scores[m][0][half * 2], scores[m][0][half * 2 + 1]),
                              fmaxf(scores[m][1][half * 2], scores[m][1][half * 2 + 1]));
        maximum = row_maximum(maximum);
        if (!(maximum - reference[m][half] > kReferenceSlack)) continue;
        const float rescale = ex2_approx(reference[m][half] - maximum);
        reference[m][half] = maximum;
        sum[m][half] *= rescale;
        rescale_output(m, half, rescale, output);
      }
    }
  }

  // The probabilities relative to the references as they are, and their sums.
  __device__ void find_probabilities(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float low = probability(scores[m][n][half * 2], reference[m][half]);
          const float high = probability(scores[m][n][half * 2 + 1], reference[m][half]);
          const u32 packed = cvt_rn_x2_f32(Element{}, high, low);
          sum[m][half] += cvt_f32(Element{}, static_cast<u16>(packed)) +
                          cvt_f32(Element{}, static_cast<u16>(packed >> 16));
          probabilities[m][n * 2 + half] = packed;
        }
      }
    }
  }

  __device__ static float probability(float score, float reference) {
    return score == -kInfinity ? 0.0f : ex2_approx(score - reference);
  }

  // Leaves references and sums of this warp's rows in shared memory.
  __device__ void publish(SharedMemory& shared) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sum[m][half] = row_total(sum[m][half]);
        if (lane_index() % 4 != 0) continue;
        shared.reference[warp_index()][score_row(m, half)] = reference[m][half];
        shared.sum[warp_index()][score_row(m, half)] = sum[m][half];
      }
    }
  }
};

// Adds one group of tokens to the output: O += P V.

// Adds the tokens of a group that some rows see and others do not to the rows that see them, and
// clears them: 0 * NaN is NaN, so a hidden V must not meet the tensor core.
__device__ inline void accumulate_boundary(const Params& params, const Work& work, int first_token,
                                           const Probabilities& probabilities,
                                           unsigned char* tokens, SharedMemory& shared,
                                           Output& output) {
  auto& p = shared.probabilities[warp_index()];
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const u32 packed = probabilities[m][word];
      float* pair = &p[score_row(m, word % 2)][score_token(word / 2, 0)];
      pair[0] = cvt_f32(Element{}, static_cast<u16>(packed));
      pair[1] = cvt_f32(Element{}, static_cast<u16>(packed >> 16));
    }
  }
  __syncwarp();
  // Not unrolled: a rare path must not take registers from the loop over tokens.
#pragma unroll 1
  for (int token = 0; token < kWarpTokens; ++token) {
    const int at = first_token + token;
    if (at >= work.all_begin && at < work.all_end) continue;
    u32* row = reinterpret_cast<u32*>(tokens + token * kRowBytes);
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!work.sees(params, score_row(m, half), at)) continue;
        const float weight = p[score_row(m, half)][token];
#pragma unroll
        for (int n = 0; n < kSliceDims / 8; ++n) {
          const u32 pair = row[output_dim(n, 0) / 2];
          output[m][n][half * 2] += weight * cvt_f32(Element{}, static_cast<u16>(pair));
          output[m][n][half * 2 + 1] += weight * cvt_f32(Element{}, static_cast<u16>(pair >> 16));
        }
      }
    }
    __syncwarp();
    for (int word = lane_index(); word < kSliceDims / 2; word += kWarpLanes) row[word] = 0;
  }
  __syncwarp();
}

__device__ inline void accumulate_pv(const Probabilities& probabilities,
                                     const unsigned char* tokens, Output& output) {
  const int lane = lane_index();
  const u32 values = shared_address(tokens) + lane % 16 * kRowBytes + lane / 16 * kChunkBytes;
#pragma unroll
  for (int n = 0; n < kSliceDims / 8; n += 2) {
    u32 v[4];
    ldmatrix_x4_trans(v, values + n * kChunkBytes);
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
      mma_m16n8k16(Element{}, output[m][n], probabilities[m], v[0], v[1]);
      mma_m16n8k16(Element{}, output[m][n + 1], probabilities[m], v[2], v[3]);
    }
  }
}

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

// Stored e4m3 elements to the element type of the tensor cores.

// Pair `pair` of 16 elements, as fp16.
__device__ inline u32 decode_pair(const Chunk& stored, int pair) {
  const u32 word = stored.words[pair / 2];
  return pair % 2 == 0 ? fp16x2_of_e4m3x2(word & 0xffff) : fp16x2_of_high_e4m3x2(word);
}

// Sixteen elements times `scale`, rounded once.
template <typename Target>
__device__ inline void decode_e4m3(Target target, const Chunk& stored, float scale,
                                   Chunk (&decoded)[2]) {
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const u32 halves = decode_pair(stored, pair);
    const float low = cvt_f32(Fp16{}, static_cast<u16>(halves));
    const float high = cvt_f32(Fp16{}, static_cast<u16>(halves >> 16));
    decoded[pair / 4].words[pair % 4] = cvt_rn_x2_f32(target, high * scale, low * scale);
  }
}

// Sixteen elements as they are: either type holds every e4m3.
template <typename Target>
__device__ inline void decode_e4m3(Target target, const Chunk& stored, Chunk (&decoded)[2]) {
  if constexpr (kIsSame<Target, Fp16>) {
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      decoded[pair / 4].words[pair % 4] = decode_pair(stored, pair);
    }
  } else {
    decode_e4m3(target, stored, 1.0f, decoded);
  }
}

// Eight bf16 elements times `scale`.
template <typename Target>
__device__ inline Chunk decode_bf16(Target target, const Chunk& stored, float scale) {
  Chunk decoded;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const float low = cvt_f32(Bf16{}, static_cast<u16>(stored.words[word]));
    const float high = cvt_f32(Bf16{}, static_cast<u16>(stored.words[word] >> 16));
    decoded.words[word] = cvt_rn_x2_f32(target, high * scale, low * scale);
  }
  return decoded;
}

// Elements of tokens that are stored as e4m3.

struct TokenScales {};

__device__ inline void decode_elements(const unsigned char* row, const TokenScales&, int, int part,
                                       Chunk (&decoded)[2]) {
  decode_e4m3(Element{}, reinterpret_cast<const Chunk*>(row)[part], decoded);
}

__device__ inline TokenScales scales_of(const Params&, const Work&, int, int, const int*) {
  return {};
}

// From the tokens of an item as they are stored to tokens that can be multiplied.

// Decodes the first `kDims` elements of every row, 16 at a time.
template <int kDims>
__device__ inline void decode_tokens(const unsigned char* item, const TokenScales& scales,
                                     unsigned char* tokens) {
  constexpr int kParts = kDims / 16;
#pragma unroll 2
  for (int first = 0; first < kWarpTokens * kParts; first += kWarpLanes) {
    const int task = first + lane_index();
    const int token = task / kParts;
    const int part = task % kParts;
    if (token >= kWarpTokens) continue;
    Chunk decoded[2];
    decode_elements(item + token * kItemRowBytes, scales, token, part, decoded);
    Chunk* target = reinterpret_cast<Chunk*>(tokens + token * kRowBytes + part * 2 * kChunkBytes);
    target[0] = decoded[0];
    target[1] = decoded[1];
  }
}

// Waits for an item of this warp, and begins the copy of one more where it may be written. `kDims`
// elements of its rows are used.
template <int kDims>
__device__ inline unsigned char* next_tokens(const Params& params, const Work& work, int item,
                                             int group, TokenLoader& loader, SharedMemory& shared) {
  cp_async_wait_group<kItemsAhead - 1>();
  __syncwarp();  // the item is here for all lanes, and all are done with the one before
  const TokenScales scales = scales_of(params, work, item, group, loader.table);
  decode_tokens<kDims>(item_of(shared, item), scales, tokens_of(shared, item));
  __syncwarp();  // it can be multiplied, and its place is free
  loader.begin_next(shared);
  return tokens_of(shared, item);
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    gqa_decode(const __grid_constant__ Params params) {
  SharedMemory& shared = shared_memory<SharedMemory>();
  wait_for_previous_kernel();
  const Work found = find_work(params);
  if (found.rows <= 0) return;
  if (threadIdx.x == 0) shared.work = found;
  __syncthreads();

  const Work& work = shared.work;
  TokenLoader loader(params, work);
#pragma unroll 1
  for (int ahead = 0; ahead < kItemsAhead; ++ahead) loader.begin_next(shared);
  load_query(params, work, shared);
  __syncthreads();

  KeptQuery query(shared);
  Softmax softmax(params);
  Output output;
  clear_output(output);
  int item = 0;
#pragma unroll 1
  for (int group = work.first_group + warp_index(); group < work.last_group; group += kWarps) {
    const int first_token = group * kWarpTokens;
    const bool has_boundary =
        first_token < work.all_begin || first_token + kWarpTokens > work.all_end;
    unsigned char* keys = next_tokens<kHeadDim>(params, work, item++, group, loader, shared);
    Scores scores;
    multiply_qk(shared, query, keys, scores);
    softmax.scale_and_hide(params, work, first_token, has_boundary, scores);
    if (softmax.exceeds(scores)) softmax.move_references(scores, output);
    Probabilities probabilities;
    softmax.find_probabilities(scores, probabilities);

    unsigned char* values = next_tokens<kSliceDims>(params, work, item++, group, loader, shared);
    if (has_boundary) {
      accumulate_boundary(params, work, first_token, probabilities, values, shared, output);
    }
    accumulate_pv(probabilities, values, output);
  }

  let_next_kernel_start();
  cp_async_wait_group<0>();
  softmax.publish(shared);
  merge_warps(shared, output);
  finish_rows(params, work, shared);
  store_output(params, work, shared);
}
