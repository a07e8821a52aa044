// Names and types that every kernel uses. Needs nothing: no header exists where kernels are
// compiled.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Tags that choose the instruction for an element type; the data itself is held as u16 or u32.
struct Bf16 {};
struct Fp16 {};

constexpr int kWarpLanes = 32;
constexpr float kLog2E = 1.4426950408889634f;
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

// What one launch passes to the kernel. Needs blocks/prelude.cuh.
struct Params {
  const u16* query;
  const unsigned char* cache;
  const int* block_tables;
  const int* seq_lens;
  const int* cum_seq_lens_q;
  const float* bmm1_scale_tensor;
  const float* bmm2_scale_tensor;
  const float* sinks;
  u16* out;
  float* lse;
  float* partial_out;
  float* partial_lse;
  i64 query_stride;
  i64 query_head_stride;
  i64 page_stride;
  i64 token_stride;
  i64 total_rows;
  int heads;
  int q_len;
  int max_pages;
  int block_tables_stride;
  int num_pages;
  int row_tiles;
  int splits;
  float bmm1_scale;
  float bmm2_scale;
  float lse_factor;
};

// The numbers of this kernel; the rest of the source only uses them. Needs blocks/prelude.cuh.
using Element = Bf16;
constexpr int kHeadDimQk = 576;
constexpr int kHeadDimVo = 512;
constexpr int kPageSize = 64;
constexpr int kRows = 64;
constexpr int kTileTokens = 64;
constexpr int kStages = 2;
constexpr int kRowWarps = 2;
constexpr int kTokenWarps = 4;
constexpr int kDimWarps = 2;
constexpr int kBlocksPerSm = 1;
constexpr int kSharedBytes = 231232;

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

// Every thread copies one token of a tile in each round, eight threads together. Products that
// warps trade pass through the last round's part of the stage that is being filled.
constexpr int kRoundTokens = kThreads / 8;
constexpr int kRounds = kTileTokens / kRoundTokens;
constexpr int kBorrowedRounds = kDimWarps > 1 ? 1 : 0;
constexpr int kBorrowedOffset = (kRounds - 1) * kRoundTokens * kTokenBytes;

static_assert(kScoreRowGroups * kRowWarps * 16 == kRows, "row warps share the rows evenly");
static_assert(kScoreTokenGroups * kTokenWarps * 8 == kTileTokens, "token warps share the tokens");
static_assert(kWarpDims % 16 == 0, "a warp's output dims are whole 16-wide tiles");
static_assert(kTokenBytes % 128 == 0, "eight lanes copy 128 bytes of a token at a time");
static_assert(kRounds * kRoundTokens == kTileTokens, "every thread copies the same tokens");
static_assert(kDimWarps == 1 || kRows * kTileTokens * 4 <= kRoundTokens * kTokenBytes,
              "what is traded fits into what is borrowed");

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

// PTX ISA, "Data Movement and Conversion Instructions: Asynchronous copy, cp.async". Needs sm_80.

// cp.async.cg.shared.global.L2::128B
// Copies 16 bytes past L1; bytes from `source_bytes` on are not read and become zero.
__device__ inline void cp_async_cg_16(u32 shared_address, const void* global, u32 source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address),
               "l"(global), "r"(source_bytes)
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

// PTX ISA, "Floating Point Instructions: ex2". Needs sm_20.

// ex2.approx.ftz.f32
// 2 to the power of x, relative error below 2^-22; minus infinity gives zero.
__device__ inline float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
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

// Programmatic dependent launch: start while the kernel before drains. Needs
// ptx/griddepcontrol.cuh.

__device__ inline void wait_for_previous_kernel() { griddepcontrol_wait(); }
__device__ inline void let_next_kernel_start() { griddepcontrol_launch_dependents(); }

// Rows of 16-byte chunks in shared memory, permuted so that the eight rows that one ldmatrix reads
// at the same column lie in different banks. Needs blocks/prelude.cuh.

constexpr int kChunkBytes = 16;
constexpr int kChunkElements = 8;

// Byte offset of chunk `chunk` of row `row`. Rows of 128 bytes and more permute the eight chunks of
// every 128 bytes by the row; in 64-byte rows two rows share the 128 bytes.
template <int kRowBytes>
__device__ inline u32 swizzled_offset(int row, int chunk) {
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0, "a row is 64 bytes or whole 128 bytes");
  const int permuted = kRowBytes == 64 ? chunk ^ ((row >> 1) & 3) : chunk ^ (row & 7);
  return static_cast<u32>(row * kRowBytes + permuted * kChunkBytes);
}

// Where a token of a request lies in the paged cache. Needs blocks/prelude.cuh, kPageSize.

// The cache and one request's row of the block table.
struct PageTable {
  const unsigned char* cache;
  const int* pages;     // [max_pages] page ids; read only at index < ceil(tokens / kPageSize)
  int num_pages;        // pages of the cache
  i64 page_stride;      // bytes
  i64 token_stride;     // bytes

  __device__ int page_of(int token) const { return pages[token / kPageSize]; }

  // The row of `token`, or null if `page` is no page of the cache: such an id must not fault.
  __device__ const unsigned char* row_of(int page, int token) const {
    if (static_cast<u32>(page) >= static_cast<u32>(num_pages)) return nullptr;
    return cache + page * page_stride + (token % kPageSize) * token_stride;
  }
};

// How the statistics of a softmax row become its scale and its LSE. Needs ptx/ex2.cuh.

struct RowResult {
  float factor;  // multiplies the accumulated values
  float lse;  // log2 of the sum of 2^score, the sink included; minus infinity for an empty row
};

// `reference` in log2 units, `sum` relative to it; `sink` is a natural-log logit without a value,
// or minus infinity. A row that saw nothing is zero, sink or not.
__device__ inline RowResult finish_row(float reference, float sum, float sink) {
  if (sum == 0.0f) return {0.0f, -kInfinity};  // a NaN is not nothing
  const float sink_log2 = sink * kLog2E;
  // Relative to the larger of the two, because 2^(sink - reference) may overflow.
  const float larger = fmaxf(reference, sink_log2);
  const float rescale = ex2_approx(reference - larger);
  const float total = sum * rescale + ex2_approx(sink_log2 - larger);
  return {rescale / total, larger + log2f(total)};
}

// Which rows and which tokens this block attends to. Needs Params, roles/mla_decode/constants.

// A row is one (query token, head) pair of a request, query token first, so that rows are
// contiguous in [tokens, heads, dim] tensors. A block takes kRows rows and one split of the tokens.
struct alignas(64) Work {
  int request;
  int split;
  int heads;
  int q_len;  // query tokens of this request
  int kv_len;  // tokens in the cache, the new ones included
  i64 first_query;  // index of the request's first query token among all
  int first_row;  // of this block, among the request's rows
  int rows;  // of this block; the rest of kRows is padding
  int visible_to_all;  // tokens that every row of this block sees
  int visible_to_any;  // tokens that some row sees
  int first_tile;
  int last_tile;  // one past

  // How many tokens `row` (0 to kRows - 1) sees: all up to its own position.
  __device__ int visible_tokens(int row) const {
    const int query = (first_row + row) / heads;
    const int visible = kv_len - q_len + query + 1;
    return row >= rows || visible < 0 ? 0 : visible;
  }

  // Index of `row` in a [tokens * heads] array.
  __device__ i64 global_row(int row) const { return first_query * heads + first_row + row; }
};

__device__ inline Work find_work(const Params& params) {
  Work work;
  int block = static_cast<int>(blockIdx.x);
  const int row_tile = block % params.row_tiles;
  block /= params.row_tiles;
  work.split = block % params.splits;
  work.request = block / params.splits;

  work.heads = params.heads;
  if (params.cum_seq_lens_q == nullptr) {
    work.q_len = params.q_len;
    work.first_query = static_cast<i64>(work.request) * params.q_len;
  } else {
    work.first_query = params.cum_seq_lens_q[work.request];
    work.q_len = params.cum_seq_lens_q[work.request + 1] - static_cast<int>(work.first_query);
  }
  work.first_row = row_tile * kRows;
  const i64 request_rows = static_cast<i64>(work.q_len) * work.heads;
  const i64 before = work.first_query * work.heads;
  // Query tokens outside the tensor are nobody's: nothing may be read or written there.
  const bool is_outside = before < 0 || before + request_rows > params.total_rows;
  work.rows = is_outside
                  ? 0
                  : static_cast<int>(min(static_cast<i64>(kRows), request_rows - work.first_row));

  // A length beyond the table, or a negative one, is read as the nearest that the table can hold.
  const i64 capacity = static_cast<i64>(params.max_pages) * kPageSize;
  const i64 length = params.seq_lens[work.request];
  work.kv_len = static_cast<int>(max(static_cast<i64>(0), min(length, capacity)));
  work.visible_to_all = work.visible_tokens(0);
  work.visible_to_any = work.visible_tokens(work.rows - 1);

  const int tiles = ceil_div(work.visible_to_any, kTileTokens);
  const int tiles_per_split = ceil_div(tiles, params.splits);
  work.first_tile = min(tiles, work.split * tiles_per_split);
  work.last_tile = min(tiles, work.first_tile + tiles_per_split);
  return work;
}

// The shared memory of a block, whole. Needs Work, roles/mla_decode/constants.
struct SharedMemory {
  unsigned char query[kRows * kTokenBytes];  // [kRows][kHeadDimQk], swizzled; then the output
  unsigned char kv[kStages][kTileTokens * kTokenBytes];  // [kTileTokens][kHeadDimQk], swizzled
  unsigned char probabilities[kRows * kProbabilityBytes];  // [kRows][kTileTokens], swizzled
  Work work;  // here, and not in the registers of every thread
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

// Copies the block's rows of the query into shared memory. Needs Work, blocks/swizzle.cuh.

__device__ inline void load_query(const Params& params, const Work& work, SharedMemory& shared) {
  const int chunk = lane_index() % kChunkElements;
  for (int row = static_cast<int>(threadIdx.x) / kChunkElements; row < kRows;
       row += kThreads / kChunkElements) {
    const int packed_row = work.first_row + row;
    const i64 query = work.first_query + packed_row / work.heads;
    const int head = packed_row % work.heads;
    const bool is_padding = row >= work.rows;
    const u16* source =
        is_padding ? params.query
                   : params.query + query * params.query_stride + head * params.query_head_stride;
    const u32 target = shared_address(shared.query) + swizzled_offset<kTokenBytes>(row, chunk);
#pragma unroll
    for (int column = 0; column < kTokenBytes / 128; ++column) {
      cp_async_cg_16(target + column * 128, source + (column * 8 + chunk) * kChunkElements,
                     is_padding ? 0 : kChunkBytes);
    }
  }
}

// Streams tiles of the paged cache into the stages. Needs Work, PageTable, blocks/swizzle.cuh.

// The page ids of a tile are read one tile ahead, so that no copy waits for them.
struct TileLoader {
  PageTable table;
  int end_token;  // tokens from here on are not read; their slots become zero
  int end_tile;
  int next_tile;
  int next_pages[kRounds];

  __device__ TileLoader(const Params& params, const Work& work)
      : table{params.cache,
              params.block_tables + work.request * static_cast<i64>(params.block_tables_stride),
              params.num_pages, params.page_stride, params.token_stride},
        end_token(work.visible_to_any),
        end_tile(work.last_tile),
        next_tile(work.first_tile) {
    read_page_ids();
  }

  // Token of the tile that this thread copies in a round.
  __device__ static int tile_token(int round) {
    return round * kRoundTokens + static_cast<int>(threadIdx.x) / 8;
  }

  __device__ void read_page_ids() {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int token = next_tile * kTileTokens + tile_token(round);
      next_pages[round] = token < end_token ? table.page_of(token) : -1;
    }
  }

  __device__ void copy_round(SharedMemory& shared, int round) const {
    const int chunk = lane_index() % 8;
    const unsigned char* row =
        table.row_of(next_pages[round], next_tile * kTileTokens + tile_token(round));
    const unsigned char* source = row == nullptr ? table.cache : row + chunk * kChunkBytes;
    const u32 bytes = row == nullptr ? 0 : kChunkBytes;
    const u32 target = shared_address(shared.kv[next_tile % kStages]) +
                       swizzled_offset<kTokenBytes>(tile_token(round), chunk);
#pragma unroll
    for (int column = 0; column < kTokenBytes; column += 128) {
      cp_async_cg_16(target + column, source + column, bytes);
    }
  }

  // Starts the copy of the next tile, if there is one, except for the borrowed rounds.
  __device__ void begin_next(SharedMemory& shared) const {
    if (next_tile >= end_tile) return;
#pragma unroll
    for (int round = 0; round < kRounds - kBorrowedRounds; ++round) copy_round(shared, round);
  }

  // Starts the rest of it, and closes its group whether there was a tile or not.
  __device__ void finish_next(SharedMemory& shared) {
    if (next_tile < end_tile) {
#pragma unroll
      for (int round = kRounds - kBorrowedRounds; round < kRounds; ++round) {
        copy_round(shared, round);
      }
      ++next_tile;
      read_page_ids();
    }
    cp_async_commit_group();
  }
};

// Scores of one tile: S = Q K^T. Needs ptx/mma.cuh, ptx/ldmatrix.cuh, blocks/swizzle.cuh.

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
__device__ inline void multiply_dims(const SharedMemory& shared, int stage, Products& products) {
  const int lane = lane_index();
  const u32 query = shared_address(shared.query);
  const u32 keys = shared_address(shared.kv[stage]);
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

__device__ inline void multiply_qk(SharedMemory& shared, int tile, Scores& scores) {
  Products products;
  multiply_dims(shared, tile % kStages, products);
  if constexpr (kDimWarps > 1) {
    unsigned char* filling = shared.kv[(tile + kStages - 1) % kStages];
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

// Online softmax over the tiles of one block. Needs Scores, SharedMemory, ptx/ex2.cuh, ptx/cvt.cuh.

// A row's probabilities are relative to its reference, which is kept until a score exceeds it by
// this much in log2 units. So the warps need not agree on a maximum for every tile, the output is
// rescaled seldom, and no probability exceeds 2^8, which fp16 holds.
constexpr float kReferenceSlack = 8.0f;

// The sums are over this thread's tokens only, of probabilities as P V uses them: rounded. The
// references, in log2 units, are in shared memory.
struct Softmax {
  float scale;  // bmm1_scale * log2(e)
  float sum[kScoreRowGroups][2];
  float tile_sum[kScoreRowGroups][2];

  __device__ explicit Softmax(float bmm1_scale) : scale(bmm1_scale * kLog2E) {
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
    const bool is_visible_to_all = first_token + kTileTokens <= shared.work.visible_to_all;
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
        tile_sum[m][half] = 0.0f;
#pragma unroll
        for (int n = 0; n < kScoreTokenGroups; ++n) {
          float p[2];
#pragma unroll
          for (int parity = 0; parity < 2; ++parity) {
            const float score = scaled(scores[m][n][half * 2 + parity]) - reference;
            // A select, not arithmetic: the hidden score may be NaN.
            const float seen = score_token(n, parity) < visible ? score : -kInfinity;
            exceeds |= seen > kReferenceSlack;
            p[parity] = ex2_approx(seen);
          }
          const u32 packed = cvt_rn_x2_f32(Element{}, p[1], p[0]);
          tile_sum[m][half] += cvt_f32(Element{}, static_cast<u16>(packed)) +
                               cvt_f32(Element{}, static_cast<u16>(packed >> 16));
          const int token = score_token(n, 0);
          const u32 offset = swizzled_offset<kProbabilityBytes>(row, token / kChunkElements) +
                             token % kChunkElements * 2;
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
        float maximum = -kInfinity;
#pragma unroll
        for (int n = 0; n < kScoreTokenGroups; ++n) {
#pragma unroll
          for (int parity = 0; parity < 2; ++parity) {
            const float score = scaled(scores[m][n][half * 2 + parity]);
            if (score_token(n, parity) < visible) maximum = fmaxf(maximum, score);
          }
        }
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 1));
        maximum = fmaxf(maximum, __shfl_xor_sync(~0u, maximum, 2));
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
        sum[m][half] += __shfl_xor_sync(~0u, sum[m][half], 1);
        sum[m][half] += __shfl_xor_sync(~0u, sum[m][half], 2);
        if (lane_index() % 4 == 0) {
          shared.row_partial[token_warp()][score_row(m, half)] = sum[m][half];
        }
      }
    }
  }
};

// The output of one block: O += P V. Needs SharedMemory, Work, ptx/mma.cuh, ptx/ldmatrix.cuh.

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

// Adds the tokens [first, last) of the tile, which some rows see and others do not, to the rows
// that see them, and clears them: 0 * NaN is NaN, so a hidden V must not meet the tensor core.
__device__ inline void accumulate_boundary(SharedMemory& shared, int stage, int first_token,
                                           int first, int last, Output& output) {
  unsigned char* values = shared.kv[stage];
  // Not unrolled: a rare path must not take registers from the loop over tiles.
#pragma unroll 1
  for (int token = first; token < last; ++token) {
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
        if (first_token + token < shared.row_visible[row]) seen |= 1u << (m * 2 + half);
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
    reinterpret_cast<u32*>(values)[word] = 0;
  }
  __syncthreads();
}

__device__ inline void accumulate_pv(const SharedMemory& shared, int stage, Output& output) {
  const int lane = lane_index();
  const u32 probabilities = shared_address(shared.probabilities);
  const u32 values = shared_address(shared.kv[stage]);
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

// Writes what a block found: the finished rows, or the partial rows of one split.
// Needs Work, Softmax, Output, blocks/row_result.cuh.

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
  const float bmm2_scale =
      params.bmm2_scale_tensor == nullptr ? params.bmm2_scale : *params.bmm2_scale_tensor;
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = output_row(m, half);
      const float sink = params.sinks == nullptr || row >= work.rows
                             ? -kInfinity
                             : params.sinks[(work.first_row + row) % work.heads];
      const RowResult result = finish_row(shared.row_reference[row], row_sum(shared, row), sink);
      const float factor = result.factor * bmm2_scale;
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; ++n) {
        const int dim = output_dim(n, 0);
        const u32 offset =
            swizzled_offset<kTokenBytes>(row, dim / kChunkElements) + dim % kChunkElements * 2;
        *reinterpret_cast<u32*>(shared.query + offset) = cvt_rn_x2_f32(
            Element{}, output[m][n][half * 2 + 1] * factor, output[m][n][half * 2] * factor);
      }
      if (params.lse != nullptr && warp_index() == 0 && lane_index() % 4 == 0 && row < work.rows) {
        params.lse[work.global_row(row)] = result.lse * params.lse_factor;
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
  for (int stage = 0; stage < kStages - 1; ++stage) {
    loader.begin_next(shared);
    loader.finish_next(shared);
  }

  Softmax softmax(params.bmm1_scale_tensor == nullptr ? params.bmm1_scale
                                                      : *params.bmm1_scale_tensor);
  Output output;
  clear_output(output);
  for (int tile = work.first_tile; tile < work.last_tile; ++tile) {
    cp_async_wait_group<kStages - 2>();
    __syncthreads();  // the tile is here for all warps, and all are done with the one before
    loader.begin_next(shared);

    const int stage = tile % kStages;
    const int first_token = tile * kTileTokens;
    Scores scores;
    multiply_qk(shared, tile, scores);
    const bool exceeds = softmax.write_probabilities(scores, first_token, shared);
    // All probabilities are written, and nobody reads what was borrowed.
    if (__syncthreads_or(exceeds)) {
      softmax.move_references(scores, first_token, shared);
      rescale_output(shared, output);
    }
    softmax.add_tile();
    loader.finish_next(shared);
    const int boundary = max(shared.work.visible_to_all - first_token, 0);
    const int end = min(shared.work.visible_to_any - first_token, kTileTokens);
    if (boundary < end) {
      accumulate_boundary(shared, stage, first_token, boundary, end, output);
    }
    accumulate_pv(shared, stage, output);
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
