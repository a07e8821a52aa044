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
  const float* query_scales;
  const unsigned char* cache;
  const unsigned char* rope_cache;
  const unsigned char* value_cache;
  const float* kv_scales;
  const int* block_tables;
  const int* value_tables;
  const int* kv_indptr;
  const int* seq_lens;
  const int* cu_seqlens_q;
  const int* topk_length;
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
  int num_seqs;
  int heads;
  int q_len;
  int max_pages;
  int block_tables_stride;
  int num_pages;
  int row_tiles;
  int num_splits;
  int topk;
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

// Config of mla_sm80: facts of the spec as constants.

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
constexpr bool kDequantsKv = false;
constexpr int kBlockM = 64;
constexpr int kBlockN = 64;
constexpr int kStages = 2;
constexpr int kRowWarps = 2;
constexpr int kTokenWarps = 4;
constexpr int kDimWarps = 2;
constexpr int kCtasPerSm = 1;
constexpr int kStoredBytes = 1152;
constexpr int kStageRowBytes = 1152;
constexpr int kSharedBytes = 231488;

constexpr int kHeadDimQk = kLatentDim + kRopeDim;
constexpr int kHeadDimVo = kLatentDim;
constexpr int kWarps = kRowWarps * kTokenWarps;
constexpr int kThreads = kWarps * kWarpLanes;

// QK GEMM: a warp computes kBlockM / kRowWarps rows by kBlockN / kTokenWarps tokens of S.
constexpr int kScoreRowGroups = kBlockM / kRowWarps / 16;
constexpr int kScoreTokenGroups = kBlockN / kTokenWarps / 8;

// PV GEMM: a warp accumulates kWarpDims output dims of every row.
constexpr int kRowGroups = kBlockM / 16;
constexpr int kWarpDims = kHeadDimVo / kWarps;

constexpr int kTokenBytes = kHeadDimQk * 2;
constexpr int kProbabilityBytes = kBlockN * 2;
constexpr int kStageBytes = kBlockN * kStageRowBytes;
constexpr int kDecodedBytes = kDequantsKv ? kBlockN * kTokenBytes : 0;

// A stage holds a tile of tokens; with separate V, K and V of a tile take one stage each.
constexpr int kStagesPerBlock = kHasSeparateValues ? 2 : 1;
// Loads in flight while a stage is consumed. Dequantised tiles have a buffer of their own, which
// frees their stage early.
constexpr int kStagesAhead = kDequantsKv ? kStages : kStages - 1;

// Eight threads copy one token in each round. Partial scores that warps exchange go through the
// part of the stage that the last round fills, which is loaded late.
constexpr int kRoundTokens = kThreads / 8;
constexpr int kRounds = kBlockN / kRoundTokens;
constexpr int kScratchRounds = kDimWarps > 1 ? 1 : 0;
constexpr int kScratchOffset = (kRounds - 1) * kRoundTokens * kStageRowBytes;

static_assert(kScoreRowGroups * kRowWarps * 16 == kBlockM, "row warps share the rows evenly");
static_assert(kScoreTokenGroups * kTokenWarps * 8 == kBlockN, "token warps share the tokens");
static_assert(kWarpDims % 16 == 0, "a warp's output dims are whole 16-wide tiles");
static_assert(kTokenBytes % 128 == 0, "eight lanes copy 128 bytes of a token at a time");
static_assert(kRounds * kRoundTokens == kBlockN, "every thread copies the same tokens");
static_assert(kDequantsKv || kStageRowBytes == kTokenBytes, "a stage is what is multiplied");
static_assert(kDimWarps == 1 || kBlockM * kBlockN * 4 <= kRoundTokens * kStageRowBytes,
              "the exchange of partial scores fits into the scratch rounds of a stage");
static_assert(kDimWarps == 1 || !kHasSeparateValues, "V loads would overwrite the scratch rounds");

// Scales: a number from the host, or a one-element tensor on the device.

__device__ inline float value_of(const float* tensor, float value) {
  return tensor == nullptr ? value : *tensor;
}

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

// Work tile of a CTA: its query rows, and its split of the KV tokens.

// A row is one (query token, head) pair of a sequence, query token first, so that rows are
// contiguous in [tokens, heads, dim] tensors. A CTA takes kBlockM rows and one split of the KV
// tokens. In sparse attention every query token is a sequence of its own.
struct alignas(64) Work {
  int seq_idx;
  int split;
  int heads;
  int q_len;  // query tokens of this sequence
  i64 first_query;  // index of the sequence's first query token among all
  int kv_len;  // tokens in the cache, the new ones included
  int first_row;  // of this CTA, among the sequence's rows
  int rows;  // of this CTA; the rest of kBlockM is padding
  int is_causal;
  int unmasked_kv_end;  // end of the tokens that every row attends to
  int kv_end;  // end of the tokens that any row attends to
  int first_kv_block;
  int end_kv_block;  // one past

  // KV limit of `row` (0 to kBlockM - 1): up to its own position, or all.
  __device__ int kv_end_of_row(int row) const {
    const int later = is_causal ? q_len - 1 - (first_row + row) / heads : 0;
    return row >= rows ? 0 : max(kv_len - later, 0);
  }

  // Index of `row` in a [tokens * heads] array.
  __device__ i64 global_row(int row) const { return first_query * heads + first_row + row; }
};

__device__ inline Work find_work(const Params& params) {
  Work work;
  const int cta = static_cast<int>(blockIdx.x);
  const int m_tile = cta % params.row_tiles;
  const int* cu_seqlens_q = kIsSparse ? nullptr : params.cu_seqlens_q;
  const TileRows found = rows_of_tile(cu_seqlens_q, params.num_seqs, kIsSparse ? 1 : params.q_len,
                                      params.heads, params.total_rows / params.heads,
                                      cta / params.row_tiles / params.num_splits, m_tile);
  work.seq_idx = found.seq_idx;
  work.split = cta / params.row_tiles % params.num_splits;
  work.heads = params.heads;
  work.q_len = found.q_len;
  work.first_query = found.first_query;
  work.first_row = found.first_row;
  work.rows = found.rows;
  work.is_causal = params.is_causal;

  const TopkIndices topk_indices{params.seq_lens, params.topk_length, params.cu_seqlens_q,
                                 params.num_seqs, params.q_len,       params.topk};
  work.kv_len = kIsSparse ? topk_length_of(topk_indices, work.seq_idx)
                          : clamp_kv_len(params.seq_lens[work.seq_idx],
                                         block_table_row(params, work.seq_idx).num_pages);
  work.unmasked_kv_end = work.kv_end_of_row(0);
  work.kv_end = work.kv_end_of_row(work.rows - 1);

  const int num_kv_blocks = ceil_div(work.kv_end, kBlockN);
  const int kv_blocks_per_split = ceil_div(num_kv_blocks, params.num_splits);
  work.first_kv_block = min(num_kv_blocks, work.split * kv_blocks_per_split);
  work.end_kv_block = min(num_kv_blocks, work.first_kv_block + kv_blocks_per_split);
  return work;
}

// Shared-memory plan of a CTA.

struct SharedMemoryPlan {
  unsigned char query[kBlockM * kTokenBytes];  // [kBlockM][kHeadDimQk], swizzled; then the output
  unsigned char kv[kStages * kStageBytes + kDecodedBytes];  // see stage_of and tokens_of
  unsigned char probabilities[kBlockM * kProbabilityBytes];  // [kBlockM][kBlockN], swizzled
  Work work;  // once per CTA instead of in the registers of every thread
  int is_masked[kBlockN];  // for some row, other than by its position
  int row_kv_end[kBlockM];  // KV limit of a row
  float row_partial[kTokenWarps][kBlockM];  // row max or row sum of each token warp
  float row_max[kBlockM];  // P is relative to it; base 2
  float row_alpha[kBlockM];  // rescale factor of O
};
static_assert(sizeof(SharedMemoryPlan) == kSharedBytes, "the spec computes what the struct takes");

// Publishes the work to all threads, computes the KV limit of every row once, and resets the row
// max.
__device__ inline void store_work(const Work& work, SharedMemoryPlan& smem) {
  if (threadIdx.x == 0) smem.work = work;
  for (int row = static_cast<int>(threadIdx.x); row < kBlockM; row += kThreads) {
    smem.row_kv_end[row] = work.kv_end_of_row(row);
    smem.row_max[row] = -kInfinity;
  }
}

// Stage that load `stage_idx` fills: [kBlockN] rows of kStageRowBytes.
__device__ inline unsigned char* stage_of(SharedMemoryPlan& smem, int stage_idx) {
  return smem.kv + stage_idx % kStages * kStageBytes;
}

// The tile as the MMA reads it, swizzled [kBlockN][kHeadDimQk].
__device__ inline unsigned char* tokens_of(SharedMemoryPlan& smem, int stage_idx) {
  return kDequantsKv ? smem.kv + kStages * kStageBytes : stage_of(smem, stage_idx);
}

// Masks beyond causality: invalid top-k indices, and a bias of minus infinity.

// Bias of `row`; null if there is none.
__device__ inline const float* row_bias(const Params& params, const Work& work, int row) {
  if constexpr (!kHasBias) return nullptr;
  const int packed_row = work.first_row + row;
  const i64 query = work.first_query + packed_row / work.heads;
  return params.bias + query * params.bias_stride +
         packed_row % work.heads * params.bias_head_stride;
}

// Returns whether a row attends to a token within its KV limit, and adds the token's bias to the
// score. Records tokens that a bias masks.
__device__ inline bool attends_token(const float* bias, int first_token, int token, float& score,
                                     SharedMemoryPlan& smem) {
  if constexpr (kIsSparse) {
    return smem.is_masked[token] == 0;
  } else if constexpr (kHasBias) {
    const float added = bias[first_token + token];
    if (added == -kInfinity) {
      smem.is_masked[token] = 1;  // all who write it write the same
      return false;
    }
    // A finite score stays finite: minus infinity means masked, and plus infinity makes NaN.
    const float in_log2 = added * kLog2E;
    const bool overflows = fabsf(in_log2) == kInfinity && added != kInfinity;
    score += overflows ? copysignf(kFloatMax, added) : in_log2;
  }
  return true;
}

// Called before a tile: marks invalid top-k indices, and clears what the bias masked.
__device__ inline void begin_kv_block(const Params& params, const int* topk_indices,
                                      int topk_length, int kv_block, SharedMemoryPlan& smem) {
  const int token = static_cast<int>(threadIdx.x);
  if (!(kIsSparse || kHasBias) || token >= kBlockN) return;
  bool is_masked = false;
  if constexpr (kIsSparse) {
    const int token_idx = kv_block * kBlockN + token;
    const int id = token_idx < topk_length ? topk_indices[token_idx] : -1;
    is_masked = id < 0 || !is_valid_page(id / kPageSize, params.num_pages);
  }
  smem.is_masked[token] = is_masked;
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

// PV GEMM of one KV tile: O += P V.

// O fragment of one warp, as mma lays it out: element [m][n][e] belongs to
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

__device__ inline void rescale_output(const SharedMemoryPlan& smem, Output& output) {
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
    const float low = smem.row_alpha[output_row(m, 0)];
    const float high = smem.row_alpha[output_row(m, 1)];
#pragma unroll
    for (int n = 0; n < kWarpDims / 8; ++n) {
      output[m][n][0] *= low;
      output[m][n][1] *= low;
      output[m][n][2] *= high;
      output[m][n][3] *= high;
    }
  }
}

// Whether a row attends to a token that some rows mask.
__device__ inline bool attends(const Params& params, const SharedMemoryPlan& smem, int row,
                               int first_token, int token) {
  if (first_token + token >= smem.row_kv_end[row]) return false;
  if constexpr (kHasBias) {
    return row_bias(params, smem.work, row)[first_token + token] != -kInfinity;
  }
  return true;
}

// Whether some row masks a token of [first, last).
__device__ inline bool is_at_boundary(const SharedMemoryPlan& smem, int first_token, int token) {
  if constexpr (kHasBias) {
    return smem.is_masked[token] != 0 || first_token + token >= smem.work.unmasked_kv_end;
  }
  return true;
}

// Adds the tokens [first, last) of the tile, masked for some rows only, to the rows that attend to
// them, and zeroes their V: 0 x NaN is NaN, so a masked V must not reach the tensor core.
__device__ inline void pv_gemm_boundary(const Params& params, SharedMemoryPlan& smem,
                                        unsigned char* values, int first_token, int first, int last,
                                        Output& output) {
  // Not unrolled: a rare path must not take registers from the main loop.
#pragma unroll 1
  for (int token = first; token < last; ++token) {
    if (!is_at_boundary(smem, first_token, token)) continue;
    float p[kRowGroups][2];
    u32 attending_rows = 0;  // a bit for each row of this thread
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = output_row(m, half);
        const u32 offset = swizzled_offset<kProbabilityBytes>(row, token / kChunkElements) +
                           token % kChunkElements * 2;
        p[m][half] = cvt_f32(Element{}, *reinterpret_cast<u16*>(smem.probabilities + offset));
        if (attends(params, smem, row, first_token, token)) attending_rows |= 1u << (m * 2 + half);
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
          if ((attending_rows >> (m * 2 + half) & 1) == 0) continue;
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
    if (!is_at_boundary(smem, first_token, word / (kTokenBytes / 4))) continue;
    reinterpret_cast<u32*>(values)[word] = 0;
  }
  __syncthreads();
}

__device__ inline void pv_gemm(const SharedMemoryPlan& smem, const unsigned char* tokens,
                               Output& output) {
  const int lane = lane_index();
  const u32 probabilities = shared_address(smem.probabilities);
  const u32 values = shared_address(tokens);
#pragma unroll
  for (int token = 0; token < kBlockN; token += 16) {
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

// Epilogue: stores finished rows, or the partial O and LSE of one split.

// Row sum over all token warps, after Softmax::publish and a barrier.
__device__ inline float total_row_sum(const SharedMemoryPlan& smem, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kTokenWarps; ++warp) sum += smem.row_partial[warp][row];
  return sum;
}

// One split of several: normalised fp32 rows and their base-2 LSE. An empty row has LSE minus
// infinity, and its values are never read.
__device__ inline void store_partial(const Params& params, const SharedMemoryPlan& smem,
                                     const Output& output) {
  const Work& work = smem.work;
  const i64 split_row = work.split * params.total_rows;
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = output_row(m, half);
      if (row >= work.rows) continue;
      const i64 target = split_row + work.global_row(row);
      const RowResult result = finish_row(smem.row_max[row], total_row_sum(smem, row), -kInfinity);
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

// Final rows, staged through the shared memory of Q so that stores are whole 128-byte lines.
__device__ inline void store_final(const Params& params, SharedMemoryPlan& smem,
                                   const Output& output) {
  const Work& work = smem.work;
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
          finish_row(smem.row_max[row], total_row_sum(smem, row), sink, params.lse_factor);
      const float factor = result.factor * output_scale;
#pragma unroll
      for (int n = 0; n < kWarpDims / 8; ++n) {
        const int dim = output_dim(n, 0);
        const u32 offset =
            swizzled_offset<kTokenBytes>(row, dim / kChunkElements) + dim % kChunkElements * 2;
        *reinterpret_cast<u32*>(smem.query + offset) = cvt_rn_x2_f32(
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
        *reinterpret_cast<const uint4*>(smem.query + swizzled_offset<kTokenBytes>(row, chunk));
    reinterpret_cast<uint4*>(params.out + work.global_row(row) * kHeadDimVo)[chunk] = value;
  }
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

// KV loads by cp.async: streams tiles of the paged or sparse cache into the pipeline stages.

// Bytes of a stored token before its rope part, if that part may be a separate tensor.
constexpr bool kHasBf16Rope = kIsSame<StoredToken, Fp8DsMla> || kIsSame<StoredToken, Fp8PerToken>;
constexpr int kStoredRopeBytes = kHasBf16Rope ? 0 : kStoredBytes / kHeadDimQk * kRopeDim;
constexpr int kStoredLatentBytes = kStoredBytes - kStoredRopeBytes;

// Scales of a token outside its row; the stage holds them behind it.
constexpr int kOuterScales = kStageRowBytes == kStoredBytes      ? 0
                             : kIsSame<StoredToken, Fp8PerToken> ? 1
                                                                 : 4;

// Reads page ids, or top-k indices, one stage ahead, so that no copy waits for them.
struct KvLoader {
  const Params& params;
  const int* key_ids;  // page ids, or top-k indices, of the sequence
  const int* value_ids;
  int end_token;  // tokens from here on are not loaded; their slots are zero-filled
  int end_stage;
  int next_stage;
  int next_ids[kRounds];

  __device__ KvLoader(const Params& params, const Work& work)
      : params(params),
        end_token(work.kv_end),
        end_stage(work.end_kv_block * kStagesPerBlock),
        next_stage(work.first_kv_block * kStagesPerBlock) {
    const i64 start = block_table_row(params, work.seq_idx).start;
    key_ids = params.block_tables + start;
    value_ids = kHasSeparateValues ? params.value_tables + start : nullptr;
    read_ids();
  }

  // Token of the tile that this thread copies in a round
  __device__ static int tile_token(int round) {
    return round * kRoundTokens + static_cast<int>(threadIdx.x) / 8;
  }

  __device__ bool holds_values() const { return kHasSeparateValues && next_stage % 2 == 1; }
  __device__ int next_kv_block() const { return next_stage / kStagesPerBlock; }

  __device__ void read_ids() {
    const int* ids = holds_values() ? value_ids : key_ids;
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int token = next_kv_block() * kBlockN + tile_token(round);
      next_ids[round] = token < end_token ? ids[kIsSparse ? token : token / kPageSize] : -1;
    }
  }

  // Copies a part of a row, eight lanes together. A null `source` zero-fills.
  template <int kBytes>
  __device__ static void copy_part(u32 target, const unsigned char* source,
                                   const unsigned char* anywhere) {
    const int lane = lane_index() % 8;
#pragma unroll
    for (int column = 0; column < kBytes; column += 128) {
      const int offset = column + lane * kChunkBytes;
      if (kBytes % 128 != 0 && offset >= kBytes) continue;
      // The swizzle permutes chunks within 128 bytes; the caller has applied it to the first.
      const u32 at = target + (kDequantsKv ? offset : column);
      cp_async_cg_16(at, source == nullptr ? anywhere : source + offset,
                     source == nullptr ? 0 : kChunkBytes);
    }
  }

  __device__ void copy_round(SharedMemoryPlan& smem, int round) const {
    const int token = tile_token(round);
    const int id = next_ids[round];
    const int page = kIsSparse && id >= 0 ? id / kPageSize : id;
    const int slot = (kIsSparse ? id : next_kv_block() * kBlockN + token) % kPageSize;
    const bool exists = is_valid_page(page, params.num_pages);
    const unsigned char* base = holds_values() ? params.value_cache : params.cache;
    const PagedRows latent{base, params.page_stride, params.token_stride};
    const int lane = lane_index() % 8;
    const u32 target = shared_address(stage_of(smem, next_stage)) +
                       (kDequantsKv ? static_cast<u32>(token * kStageRowBytes)
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

  // Issues the load of the next stage, if there is one, except for the scratch rounds.
  __device__ void load_next(SharedMemoryPlan& smem) const {
    if (next_stage >= end_stage) return;
#pragma unroll
    for (int round = 0; round < kRounds - kScratchRounds; ++round) copy_round(smem, round);
  }

  // Issues the rest of it, and commits the cp.async group, empty or not.
  __device__ void finish_next(SharedMemoryPlan& smem) {
    if (next_stage < end_stage) {
#pragma unroll
      for (int round = kRounds - kScratchRounds; round < kRounds; ++round) {
        copy_round(smem, round);
      }
      ++next_stage;
      read_ids();
    }
    cp_async_commit_group();
  }
};

// Source and destination of query rows.

// Latent and rope part may be separate tensors; strides in bytes.
__device__ inline const unsigned char* latent_q(const Params& params, i64 query, int head) {
  return params.query + query * params.query_stride + head * params.query_head_stride;
}

__device__ inline const unsigned char* rope_q(const Params& params, i64 query, int head) {
  return params.query_rope + query * params.query_rope_stride +
         head * params.query_rope_head_stride;
}

__device__ inline Chunk* query_chunk(SharedMemoryPlan& smem, int row, int chunk) {
  return reinterpret_cast<Chunk*>(smem.query + swizzled_offset<kTokenBytes>(row, chunk));
}

// Load of a Q row that needs no conversion.

__device__ inline void load_query_row(const Params& params, i64 query, int head, int row, int lane,
                                      SharedMemoryPlan& smem) {
  const unsigned char* latent = latent_q(params, query, head);
  const unsigned char* rope = rope_q(params, query, head);
  constexpr int kLatentChunks = kLatentDim / kChunkElements;
#pragma unroll
  for (int chunk = 0; chunk < kHeadDimQk / kChunkElements; chunk += 8) {
    const unsigned char* source = chunk < kLatentChunks
                                      ? latent + (chunk + lane) * kChunkBytes
                                      : rope + (chunk - kLatentChunks + lane) * kChunkBytes;
    cp_async_cg_16(shared_address(query_chunk(smem, row, chunk + lane)), source, kChunkBytes);
  }
}

// Loads the CTA's query rows into shared memory.

// Eight lanes load one row.
__device__ inline void load_q(const Params& params, const Work& work, SharedMemoryPlan& smem) {
  const int lane = lane_index() % 8;
  for (int row = static_cast<int>(threadIdx.x) / 8; row < kBlockM; row += kThreads / 8) {
    const int packed_row = work.first_row + row;
    if (row < work.rows) {
      const i64 query = work.first_query + packed_row / work.heads;
      load_query_row(params, query, packed_row % work.heads, row, lane, smem);
    } else {
      for (int chunk = lane; chunk < kTokenBytes / kChunkBytes; chunk += 8) {
        *query_chunk(smem, row, chunk) = Chunk{};
      }
    }
  }
}

// QK GEMM of one KV tile: S = Q K^T.

// S fragment of one warp, as mma lays it out: element [m][n][e] belongs to
// row score_row(m, e / 2) and tile token score_token(n, e % 2).
using Scores = float[kScoreRowGroups][kScoreTokenGroups][4];

// kDimWarps adjacent token warps cooperate: each takes the tokens of all of them and a part of the
// dims, which reads shared memory less often than a narrow MMA over all dims.
constexpr int kProductTokenGroups = kScoreTokenGroups * kDimWarps;
using PartialScores = float[kScoreRowGroups][kProductTokenGroups][4];

// Steps of 16 dims whose K fragments are loaded together.
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

// MMAs over this warp's dims: of every 64, the 32 or 64 that belong to it.
__device__ inline void qk_gemm_dims(const SharedMemoryPlan& smem, const unsigned char* tokens,
                                    PartialScores& partial_scores) {
  const int lane = lane_index();
  const u32 query = shared_address(smem.query);
  const u32 keys = shared_address(tokens);
  const int query_row = warp_index() / kTokenWarps * kScoreRowGroups * 16 + lane % 16;
  const int key_row = token_warp() / kDimWarps * kProductTokenGroups * 8 + lane % 8;

#pragma unroll
  for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
    for (int n = 0; n < kProductTokenGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) partial_scores[m][n][e] = 0.0f;
    }
  }

  // Not unrolled: the addresses of all steps at once would spill.
#pragma unroll 1
  for (int column = 0; column < kTokenBytes; column += 128) {
#pragma unroll
    for (int step = 0; step < 4 / kDimWarps; step += kKeySteps) {
      const int first_chunk = dim_warp() * 4 + step * 2;
      // One ldmatrix loads two fragments: of two token groups, or of two steps of a single one.
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
            mma_m16n8k16(Element{}, partial_scores[m][n], q, k[fragment / 2][fragment % 2 * 2],
                         k[fragment / 2][fragment % 2 * 2 + 1]);
          }
        }
      }
    }
  }
}

// Reduces S over dims with the partner warps: each sends the partial scores of the others' tokens
// and adds those it receives. `scratch` is free until the barrier after the next one.
__device__ inline void reduce_partial_scores(const PartialScores& partial_scores, float* scratch,
                                             Scores& scores) {
  static_assert(kDimWarps <= 2, "a warp has one partner");
  constexpr int kExchanged = kScoreRowGroups * kScoreTokenGroups * 4;
  const bool is_second = dim_warp() == 1;
  float* sent = scratch + (warp_index() ^ 1) * kExchanged * kWarpLanes + lane_index();
  float* received = scratch + warp_index() * kExchanged * kWarpLanes + lane_index();
#pragma unroll
  for (int i = 0; i < kExchanged; ++i) {
    const int m = i / (kScoreTokenGroups * 4), n = i / 4 % kScoreTokenGroups, e = i % 4;
    sent[i * kWarpLanes] =
        is_second ? partial_scores[m][n][e] : partial_scores[m][n + kScoreTokenGroups][e];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kExchanged; ++i) {
    const int m = i / (kScoreTokenGroups * 4), n = i / 4 % kScoreTokenGroups, e = i % 4;
    const float own =
        is_second ? partial_scores[m][n + kScoreTokenGroups][e] : partial_scores[m][n][e];
    scores[m][n][e] = own + received[i * kWarpLanes];
  }
}

// `tokens` is the tile of load `stage_idx`, the last one that has completed.
__device__ inline void qk_gemm(SharedMemoryPlan& smem, const unsigned char* tokens, int stage_idx,
                               Scores& scores) {
  PartialScores partial_scores;
  qk_gemm_dims(smem, tokens, partial_scores);
  if constexpr (kDimWarps > 1) {
    unsigned char* loading_stage = stage_of(smem, stage_idx + kStagesAhead);
    reduce_partial_scores(partial_scores, reinterpret_cast<float*>(loading_stage + kScratchOffset),
                          scores);
  } else {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int n = 0; n < kScoreTokenGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[m][n][e] = partial_scores[m][n][e];
      }
    }
  }
}

// Rescale threshold of the online softmax of the sm80 families (FA4 "conditional rescaling").

// P is relative to a stale row max, which moves only when a score exceeds it by this much (base-2
// exponent). Warps then need no common max per tile, O is rarely rescaled, and no element of P
// exceeds 2^8, which fp16 represents.
constexpr float kRescaleThreshold = 8.0f;

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

// Softmax scale: the factor of the scores Q K^T, natural base.

__device__ inline float score_scale(const Params& params) {
  const float scale = value_of(params.bmm1_scale_tensor, params.bmm1_scale);
  return params.scores_take_bmm2 ? scale * value_of(params.bmm2_scale_tensor, params.bmm2_scale)
                                 : scale;
}

// Online softmax over the KV tiles of one CTA.

// Row sums cover this thread's tokens only, of P as rounded for the PV GEMM. The row max, base 2,
// is in shared memory.
struct Softmax {
  const Params& params;
  float scale;  // of the scores, times log2(e)
  float row_sum[kScoreRowGroups][2];
  float block_row_sum[kScoreRowGroups][2];

  __device__ explicit Softmax(const Params& params)
      : params(params), scale(score_scale(params) * kLog2E) {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) row_sum[m][half] = 0.0f;
    }
  }

  // Base-2 score. Rounded on its own, never fused with a subtraction: the ballot on whether it
  // exceeds the row max and the row max updated to it must use the same number.
  __device__ float scaled(float score) const { return __fmul_rn(score, scale); }

  // KV limit of a row within the tile; more than kBlockN means all.
  __device__ static int kv_end_of_row(int row, int first_token, const SharedMemoryPlan& smem) {
    // Padding has no bias to read.
    const bool is_unmasked = !kHasBias && first_token + kBlockN <= smem.work.unmasked_kv_end;
    return is_unmasked ? kBlockN : smem.row_kv_end[row] - first_token;
  }

  // Writes P of a tile relative to the current row max. Returns whether a score exceeds it by more
  // than the rescale threshold, as the first score of a row always does; P is invalid then.
  __device__ bool write_probabilities(const Scores& scores, int first_token,
                                      SharedMemoryPlan& smem) {
    bool exceeds = false;
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = score_row(m, half);
        const int col_limit = kv_end_of_row(row, first_token, smem);
        const float row_max = smem.row_max[row];
        const float* bias = row_bias(params, smem.work, row);
        block_row_sum[m][half] = 0.0f;
#pragma unroll
        for (int n = 0; n < kScoreTokenGroups; ++n) {
          float p[2];
#pragma unroll
          for (int parity = 0; parity < 2; ++parity) {
            const int token = score_token(n, parity);
            float score = scaled(scores[m][n][half * 2 + parity]);
            const bool attends =
                token < col_limit && attends_token(bias, first_token, token, score, smem);
            // A select, not arithmetic: the masked score may be NaN.
            const float relative = attends ? score - row_max : -kInfinity;
            exceeds |= relative > kRescaleThreshold;
            p[parity] = ex2_approx(relative);
          }
          const u32 packed = cvt_rn_x2_f32(Element{}, p[1], p[0]);
          block_row_sum[m][half] += cvt_f32(Element{}, static_cast<u16>(packed)) +
                                    cvt_f32(Element{}, static_cast<u16>(packed >> 16));
          const int first = score_token(n, 0);
          const u32 offset = swizzled_offset<kProbabilityBytes>(row, first / kChunkElements) +
                             first % kChunkElements * 2;
          *reinterpret_cast<u32*>(smem.probabilities + offset) = packed;
        }
      }
    }
    return exceeds;
  }

  // Updates the row max of every row whose max over all token warps exceeds the threshold, computes
  // the rescale factor alpha of O, and writes P again.
  __device__ void update_row_max(const Scores& scores, int first_token, SharedMemoryPlan& smem) {
    write_maxima(scores, first_token, smem);
    __syncthreads();
    for (int row = static_cast<int>(threadIdx.x); row < kBlockM; row += kThreads) {
      float maximum = -kInfinity;
#pragma unroll
      for (int warp = 0; warp < kTokenWarps; ++warp) {
        maximum = fmaxf(maximum, smem.row_partial[warp][row]);
      }
      const float row_max = smem.row_max[row];
      const bool exceeds = maximum - row_max > kRescaleThreshold;
      smem.row_alpha[row] = exceeds ? ex2_approx(row_max - maximum) : 1.0f;
      if (exceeds) smem.row_max[row] = maximum;
    }
    __syncthreads();
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[m][half] *= smem.row_alpha[score_row(m, half)];
      }
    }
    write_probabilities(scores, first_token, smem);
    __syncthreads();
  }

  // Publishes the max of every row of the tile over this warp's tokens.
  __device__ void write_maxima(const Scores& scores, int first_token,
                               SharedMemoryPlan& smem) const {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = score_row(m, half);
        const int col_limit = kv_end_of_row(row, first_token, smem);
        const float* bias = row_bias(params, smem.work, row);
        float maximum = -kInfinity;
#pragma unroll
        for (int n = 0; n < kScoreTokenGroups; ++n) {
#pragma unroll
          for (int parity = 0; parity < 2; ++parity) {
            const int token = score_token(n, parity);
            float score = scaled(scores[m][n][half * 2 + parity]);
            if (token < col_limit && attends_token(bias, first_token, token, score, smem)) {
              maximum = fmaxf(maximum, score);
            }
          }
        }
        maximum = quad_reduce_max(maximum);
        if (lane_index() % 4 == 0) smem.row_partial[token_warp()][row] = maximum;
      }
    }
  }

  __device__ void add_block_row_sum() {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) row_sum[m][half] += block_row_sum[m][half];
    }
  }

  // Publishes the partial sums of each row to all warps.
  __device__ void publish(SharedMemoryPlan& smem) {
#pragma unroll
    for (int m = 0; m < kScoreRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[m][half] = quad_reduce_sum(row_sum[m][half]);
        if (lane_index() % 4 == 0) {
          smem.row_partial[token_warp()][score_row(m, half)] = row_sum[m][half];
        }
      }
    }
  }
};

// Waits for a stage, and issues the copy into the stage that is free by then.
__device__ inline unsigned char* next_kv(const Params& params, int stage_idx, KvLoader& loader,
                                         SharedMemoryPlan& smem) {
  cp_async_wait_group<kStagesAhead - 1>();
  __syncthreads();  // the stage is visible to all warps, and all are done with the previous one
  loader.load_next(smem);
  return tokens_of(smem, stage_idx);
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    mla_sm80(const __grid_constant__ Params params) {
  SharedMemoryPlan& smem = shared_memory<SharedMemoryPlan>();
  pdl_wait();
  const Work work = find_work(params);
  if (work.rows <= 0) return;

  store_work(work, smem);
  load_q(params, work, smem);
  KvLoader loader(params, work);
#pragma unroll
  for (int stage = 0; stage < kStagesAhead; ++stage) {
    loader.load_next(smem);
    loader.finish_next(smem);
  }

  Softmax softmax(params);
  Output output;
  clear_output(output);
  const int end_kv_block = work.end_kv_block;
  for (int kv_block = work.first_kv_block; kv_block < end_kv_block; ++kv_block) {
    const int first_token = kv_block * kBlockN;
    begin_kv_block(params, loader.key_ids, loader.end_token, kv_block, smem);
    int stage_idx = kv_block * kStagesPerBlock;
    unsigned char* kv = next_kv(params, stage_idx, loader, smem);

    Scores scores;
    qk_gemm(smem, kv, stage_idx, scores);
    const bool exceeds = softmax.write_probabilities(scores, first_token, smem);
    // All of P is written, and no warp reads the scratch rounds any more.
    if (__syncthreads_or(exceeds)) {
      softmax.update_row_max(scores, first_token, smem);
      rescale_output(smem, output);
    }
    softmax.add_block_row_sum();
    loader.finish_next(smem);
    if constexpr (kHasSeparateValues) {
      kv = next_kv(params, ++stage_idx, loader, smem);
      loader.finish_next(smem);
    }
    const int first_masked = kHasBias ? 0 : max(smem.work.unmasked_kv_end - first_token, 0);
    const int end_masked = min(smem.work.kv_end - first_token, kBlockN);
    if (first_masked < end_masked) {
      pv_gemm_boundary(params, smem, kv, first_token, first_masked, end_masked, output);
    }
    pv_gemm(smem, kv, output);
  }

  pdl_launch_dependents();
  cp_async_wait_group<0>();
  softmax.publish(smem);
  __syncthreads();
  if (params.num_splits > 1) {
    store_partial(params, smem, output);
  } else {
    store_final(params, smem, output);
  }
}
