// Basic types, dtype tags and thread indices of every kernel.

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

// Tags that select conversions; the data itself is held as bytes, u16 or u32.
struct Bf16 {};
struct Fp16 {};
struct E4m3 {};
struct E5m2 {};
struct Int8 {};
struct Nvfp4 {};

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

// PTX ISA, "Parallel Synchronization and Communication Instructions: barrier, elect, mbarrier,
// fence, griddepcontrol". Needs sm_80.
// Ids of barriers of a CTA are 0 to 15; `threads` counts those that wait and those that only
// arrive. An mbarrier is 8 bytes of shared memory, by address. griddepcontrol does nothing in a
// launch without the programmatic-stream-serialization attribute.

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

// elect.sync
// Waits for all lanes of the warp; true in one of them. So no lane still waits for a phase that a
// guarded copy lets end. Compilers know that no other lane executes what this guards: operands in
// uniform registers, as those of a bulk copy, need no loop over the lanes. Needs sm_90.
__device__ inline bool elect_sync() {
  u32 is_elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}"
               : "=r"(is_elected)::"memory");
  return is_elected != 0;
}

// mbarrier.init.shared::cta.b64
// A phase completes after `count` arrivals and all expected bytes. Needs sm_90.
__device__ inline void mbarrier_init(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// mbarrier.arrive.shared::cta.b64
// Needs sm_90.
__device__ inline void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.shared::cta.b64
// Called by lane 0. Adds `read` times the lane index, zero there, to the address: a false
// dependency that orders the arrive after the loads. Needs sm_90.
__device__ inline void mbarrier_arrive_after(u32 barrier, u32 read) {
  asm volatile(
      "{.reg .b32 address; mov.b32 address, %%laneid; and.b32 address, address, %1; "
      "add.u32 address, address, %0; mbarrier.arrive.shared::cta.b64 _, [address];}" ::"r"(barrier),
      "r"(read)
      : "memory");
}

// mbarrier.arrive.expect_tx.shared::cta.b64
// Arrives, and raises the byte count that the phase expects. Needs sm_90.
__device__ inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity.shared::cta.b64
// Waits until the phase of this parity completes. The spin loop is in PTX: across a C++ loop the
// compiler moves accumulators of wgmma in flight to other registers. Needs sm_90.
__device__ inline void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra "
      "again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// fence.acq_rel.cta
// Orders this thread's reads and writes before a later arrive, for the CTA. Needs sm_90.
__device__ inline void fence_acq_rel_cta() { asm volatile("fence.acq_rel.cta;" ::: "memory"); }

// fence.proxy.async.shared::cta
// Orders this thread's writes of shared memory before accesses of the async proxy: wgmma and TMA.
// Needs sm_90.
__device__ inline void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// fence.mbarrier_init.release.cluster
// Makes mbarrier inits of this thread visible to the async proxy. Needs sm_90.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// griddepcontrol.wait
// Waits until the preceding kernel has completed and its writes are visible. Needs sm_90.
__device__ inline void griddepcontrol_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// griddepcontrol.launch_dependents
// Lets the next kernel start once every CTA has executed this or exited. Needs sm_90.
__device__ inline void griddepcontrol_launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Kernel parameters of one launch, and programmatic dependent launch (PDL).

struct Params {
  const u16* query;
  const unsigned char* key_cache;
  const unsigned char* value_cache;
  const unsigned char* key_scales;
  const unsigned char* value_scales;
  const int* block_tables;
  const int* seq_lens;
  const int* cu_seqlens_q;
  const int* kv_indptr;
  const u32* draft_mask;
  const float* bmm1_scale_tensor;
  const float* bmm2_scale_tensor;
  const float* sinks;
  unsigned char* out;
  float* lse;
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
  int num_seqs;
  int kv_heads;
  int group_size;
  int q_len;
  int mask_words;
  int window;
  int max_pages;
  int block_tables_stride;
  int num_pages;
  int is_causal;
  int bmm2_scales_scores;
  float score_factor;
  float lse_factor;
  int m_tiles;
  int num_splits;
  float bmm1_scale;
  float bmm2_scale;
  float output_factor;
};

// A scale is a number from the host, or a one-element tensor on the device.
__device__ inline float value_of(const float* tensor, float value) {
  return tensor == nullptr ? value : *tensor;
}

// PDL: a kernel starts while the preceding one drains.
__device__ inline void pdl_wait() { griddepcontrol_wait(); }
__device__ inline void pdl_launch_dependents() { griddepcontrol_launch_dependents(); }

// Kernel configuration: the numbers of the spec as constants.

using Element = Bf16;
using StoredToken = E4m3;
using OutElement = Bf16;
constexpr int kHeadDim = 128;
constexpr int kHeadDimVo = 128;
constexpr int kPageSize = 64;
constexpr bool kHasTokenScales = false;
constexpr bool kHasSoftCap = false;
constexpr bool kHasDcp = false;
constexpr bool kSeparatePageIds = false;
constexpr bool kBatchInvariant = false;
constexpr int kSplitTokens = 1;  // of a fixed split
constexpr int kMaxSplits = 128;  // of a sequence, with fixed ones
constexpr int kSparseBlock = 0;  // tokens that an index names; 0: dense
constexpr bool kIsSparse = kSparseBlock > 0;
constexpr int kIndexTokens = kIsSparse ? kSparseBlock : 1;
constexpr bool kHasHeadTables = false;
constexpr bool kHasOutputGate = false;
constexpr int kSlices = 1;
constexpr int kBlockM = 16;
constexpr int kWarps = 4;
constexpr int kStages = 6;
constexpr int kCtasPerSm = 2;
constexpr int kBlockN = 16;
constexpr bool kDequantsKv = true;
constexpr int kStoredBytes = 128;  // of a key
constexpr int kSliceBytes = 128;  // of the slice of a value
constexpr int kSharedBytes = 75600;

constexpr int kThreads = kWarps * kWarpLanes;
constexpr int kRowGroups = kBlockM / 16;
constexpr int kSliceDims = kHeadDimVo / kSlices;  // output dims of one CTA

// MMA operand rows are padded by 16 bytes: the eight rows that one ldmatrix reads at the same
// column then lie in different banks, for any head dim.
constexpr int kRowBytes = kHeadDim * 2 + kChunkBytes;
constexpr int kStageRowBytes = kDequantsKv ? kStoredBytes : kRowBytes;
// Scales of the tokens lie behind their rows.
constexpr int kScalesOffset = kBlockN * kStageRowBytes;  // in a stage
constexpr int kScaleBytes = kHasTokenScales ? sizeof(float) : 0;
constexpr int kStageBytes = kScalesOffset + kBlockN * kScaleBytes;
constexpr int kWarpBytes = kStages * kStageBytes + (kDequantsKv ? kBlockN * kRowBytes : 0);
constexpr int kCombineFloats = kBlockM * (kSliceDims + 4);
// Loads in flight while a stage is consumed. Dequantized blocks have a buffer of their own, which
// frees their stage early.
constexpr int kStagesAhead = kDequantsKv ? kStages : kStages - 1;

// KV blocks of a warp whose cached tokens are known: those in flight, and the one in use.
constexpr int kSparseRing = 4;

// Whether the Q fragments fit into registers beside the O accumulators.
constexpr bool kQueryInRegs = kRowGroups * kHeadDim <= 128;

static_assert(kHeadDimVo % (16 * kSlices) == 0, "a slice is whole 16-wide dim tiles");
static_assert(kHeadDimVo <= kHeadDim, "a stage holds a key or the slice of a value");
static_assert(kBlockN == 16, "a KV block is one k-step of the PV GEMM");
static_assert(!kBatchInvariant || kSplitTokens % (kWarps * kBlockN) == 0,
              "a split has as many KV blocks for each warp");
static_assert(kStagesAhead / 2 < kSparseRing, "a block in use keeps its tokens");
static_assert(kStagesAhead >= 1, "a load is in flight while a stage is consumed");

// Fixed splits of batch-invariant kernels: the KV tokens of a sequence are cut at multiples of a
// number of tokens from its first one on, which follows from the sequence alone, so that no sum
// depends on the rest of the batch.

struct FixedSplit {
  int num_splits;  // of the sequence, at least one
  int first_token;
  int end_token;
};

// Splits that the tokens from `kv_begin` to `kv_end` lie in. A tile beyond the largest length still
// fits in an int, so nothing wraps around.
__device__ inline int splits_of(int kv_begin, int kv_end, u32 tokens) {
  return static_cast<int>((kv_end + tokens - 1) / tokens - kv_begin / tokens);
}

// Split `split_idx` of the tokens from `kv_begin` to `kv_end`: of kSplitTokens, or of twice as many
// until there are at most kMaxSplits. The host has workspace for `max_splits`; the last of them
// takes the tokens beyond the length that the host knows of.
__device__ inline FixedSplit fixed_split_of(int kv_begin, int kv_end, int split_idx,
                                            int max_splits) {
  u32 tokens = kSplitTokens;
  while (splits_of(kv_begin, kv_end, tokens) > kMaxSplits) tokens *= 2;
  const int num_splits = max(1, min(splits_of(kv_begin, kv_end, tokens), max_splits));
  const u32 first_token = (static_cast<u32>(kv_begin) / tokens + split_idx) * tokens;
  const bool is_last = split_idx + 1 >= num_splits;
  return {num_splits, static_cast<int>(first_token),
          is_last ? kv_end : static_cast<int>(first_token + tokens)};
}

// Splits of the sequence of a work item; another kernel combines more than one.
template <typename Work>
__device__ inline int num_splits_of(const Params& params, const Work& work) {
  if constexpr (kBatchInvariant) return work.fixed_split(params).num_splits;
  return params.num_splits;
}

// Stores the splits of the rows of a CTA for the combine kernel, if there is one: it skips rows of
// one split. A template: Params of other kernels lacks the parameter.
template <typename InvariantParams, typename RowOf>
__device__ inline void store_row_splits(const InvariantParams& params, int rows, int num_splits,
                                        RowOf global_row) {
  if (params.num_splits == 1) return;
  for (int row = static_cast<int>(threadIdx.x); row < rows; row += kThreads) {
    params.row_splits[global_row(row)] = num_splits;
  }
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

// cvt.rn.f16x2.e4m3x2
// Needs sm_89.
__device__ inline u32 cvt_rn_f16x2_e4m3x2(u16 pair) {
  u32 value;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(value) : "h"(pair));
  return value;
}

// cvt.rn.f16x2.e4m3x2
// Converts the upper half of a word without a shift. Needs sm_89.
__device__ inline u32 cvt_rn_f16x2_e4m3x2_high(u32 word) {
  u32 value;
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, high;}"
      : "=r"(value)
      : "r"(word));
  return value;
}

// cvt.rn.satfinite.e4m3x2.f32
// Needs sm_89.
__device__ inline u16 cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// PTX ISA, "Warp Level Matrix Instructions: ldmatrix, mma, movmatrix, stmatrix". Needs sm_80.
// Lanes 8i to 8i + 7 give the shared-memory addresses of the eight 16-byte rows of matrix i of
// ldmatrix and stmatrix, of which word i is this lane's fragment.
// mma: d[16, 8] += a[16, 16] * b[16, 8]. A lane holds, with g = lane / 4 and c = lane % 4:
// d: rows g (0, 1) and g + 8 (2, 3), columns 2c and 2c + 1; a: two elements a word, rows g, g + 8,
// g, g + 8, columns 2c.. of the first (0, 1) and second (2, 3) half; b: rows 2c.. of each half,
// column g.

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

// movmatrix.sync.aligned.m8n8.trans.b16
// Transposes the matrix of which `a` is this lane's fragment.
__device__ inline u32 movmatrix_trans(u32 a) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
  return d;
}

// stmatrix.sync.aligned.m8n8.x4.shared.b16
// Needs sm_90.
__device__ inline void stmatrix_x4(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address), "r"(a),
      "r"(b), "r"(c), "r"(d)
      : "memory");
}

// stmatrix.sync.aligned.m8n8.x4.trans.shared.b16
// Needs sm_90.
__device__ inline void stmatrix_x4_trans(u32 row_address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row_address),
      "r"(a), "r"(b), "r"(c), "r"(d)
      : "memory");
}

// Accumulators of mma.m16n8k16 of one warp: element [m][n][e] lies in row fragment_row(m, e / 2)
// and column fragment_col(n, e % 2).

__device__ inline int fragment_row(int m, int half) { return m * 16 + half * 8 + lane_index() / 4; }
__device__ inline int fragment_col(int n, int i) { return n * 8 + lane_index() % 4 * 2 + i; }

template <int kM, int kN>
__device__ inline void clear_fragments(float (&d)[kM][kN][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < kN; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) d[m][n][e] = 0.0f;
    }
  }
}

template <int kN>
__device__ inline void rescale_row(float (&d)[kN][4], int half, float factor) {
#pragma unroll
  for (int n = 0; n < kN; ++n) {
    d[n][half * 2] *= factor;
    d[n][half * 2 + 1] *= factor;
  }
}

// Columns n and n + 1 of d += a * b: `b` is what one ldmatrix loads, 16 x 16 elements.
template <int kM, int kN>
__device__ inline void mma_columns(float (&d)[kM][kN][4], int n, const u32 (&a)[kM][4],
                                   const u32 (&b)[4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
    mma_m16n8k16(Element{}, d[m][n], a[m], b[0], b[1]);
    mma_m16n8k16(Element{}, d[m][n + 1], a[m], b[2], b[3]);
  }
}

// Rounds two adjacent elements of P, and adds them to the row sum as rounded.
__device__ inline u32 round_pair(float low, float high, float& row_sum) {
  const u32 pair = cvt_rn_x2_f32(Element{}, high, low);
  row_sum +=
      cvt_f32(Element{}, static_cast<u16>(pair)) + cvt_f32(Element{}, static_cast<u16>(pair >> 16));
  return pair;
}

// Adds two adjacent elements of V, times P, to those of a row of O.
__device__ inline void add_weighted_pair(float (&d)[4], int half, float p, u32 pair) {
  d[half * 2] += p * cvt_f32(Element{}, static_cast<u16>(pair));
  d[half * 2 + 1] += p * cvt_f32(Element{}, static_cast<u16>(pair >> 16));
}

// PTX ISA, "Integer, floating-point and half-precision: add, ex2, fma, max, mul, rcp". Needs sm_53.

// add.rn.f16x2
__device__ inline u32 add_f16x2(u32 a, u32 b) {
  u32 sum;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  return sum;
}

// ex2.approx.ftz.f32
// 2 to the power of x, relative error below 2^-22; minus infinity gives zero.
__device__ inline float ex2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// fma.rn.bf16x2
// Subnormal numbers are kept. Needs sm_80.
__device__ inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
  return sum;
}

// max.f16x2
// Ignores NaN operands. Needs sm_80.
__device__ inline u32 max_f16x2(u32 a, u32 b) {
  u32 larger;
  asm("max.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// max.u16x2
// Needs sm_90.
__device__ inline u32 max_u16x2(u32 a, u32 b) {
  u32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// mul.rn.f16x2
__device__ inline u32 mul_f16x2(u32 a, u32 b) {
  u32 product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// rcp.approx.ftz.f32
// 1 / x, relative error below 2^-23; infinity gives zero.
__device__ inline float rcp_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// PTX ISA, "Data Movement and Conversion Instructions: createpolicy, ld, prefetch". Needs sm_80.

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

// prefetch.tensormap
// Prefetches a TMA descriptor by its generic address. Needs sm_90.
__device__ inline void prefetch_tensormap(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// prefetch.global.L2
// Prefetches the cache line of an address into L2.
__device__ inline void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address) : "memory");
}

// prefetch.global.L2::evict_last
// Prefetches the cache line of an address into L2, which evicts it after others.
__device__ inline void prefetch_l2_evict_last(const void* address) {
  asm volatile("prefetch.global.L2::evict_last [%0];" ::"l"(address) : "memory");
}

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

// Output gate of a sparse call: a 16-bit output times the sigmoid of a number for each element.

__device__ inline float sigmoid(float value) {
  return rcp_approx(1.0f + ex2_approx(value * -kLog2E));
}

// Prefetches the gates of `count` elements from `offset` on into L2, by thread `thread` of more
// threads than they have cache lines.
template <typename GateParams>
__device__ inline void prefetch_gates(const GateParams& params, i64 offset, int count, int thread) {
  constexpr int kGatesPerCacheLine = 64;
  if (thread * kGatesPerCacheLine >= count) return;
  prefetch_l2(params.output_gate + offset + thread * kGatesPerCacheLine);
}

// Gates four elements of the output, from `offset` on. The output is rounded before, as by a caller
// that multiplies it himself. A template: Params of a kernel without a gate lacks it.
template <typename Element16, typename GateParams>
__device__ inline float4 gated_output(Element16, const GateParams& params, i64 offset,
                                      float4 value) {
  const uint2 gates = *reinterpret_cast<const uint2*>(params.output_gate + offset);
  const u32 low = cvt_rn_x2_f32(Element16{}, value.y, value.x);
  const u32 high = cvt_rn_x2_f32(Element16{}, value.w, value.z);
  const auto gated = [](u32 rounded, u32 gate) {
    return cvt_f32(Element16{}, static_cast<u16>(rounded)) *
           sigmoid(cvt_f32(Element16{}, static_cast<u16>(gate)));
  };
  return make_float4(gated(low, gates.x), gated(low >> 16, gates.x >> 16), gated(high, gates.y),
                     gated(high >> 16, gates.y >> 16));
}

// Vectorized store of four output elements, in FP8 or in 16 bits, from float.

// `index` counts elements and is a multiple of 4.
template <typename Target>
__device__ inline void store_x4(Target target, unsigned char* out, i64 index, float a, float b,
                                float c, float d) {
  uint2 packed;
  packed.x = cvt_rn_x2_f32(target, b, a);
  packed.y = cvt_rn_x2_f32(target, d, c);
  *reinterpret_cast<uint2*>(out + index * 2) = packed;
}

// Coordinates of a CTA in a linearized grid.

// Decomposes `blockIdx.x`, the fastest dimension first. An unsigned division takes fewer
// instructions than a signed one, and most dimensions are 1.
struct CtaIndex {
  u32 rest = blockIdx.x;

  __device__ int next(int count) {
    if (count == 1) return 0;
    const u32 quotient = rest / static_cast<u32>(count);
    const u32 index = rest - quotient * static_cast<u32>(count);
    rest = quotient;
    return static_cast<int>(index);
  }

  // The slowest dimension.
  __device__ int last() const { return static_cast<int>(rest); }
};

// Decode context parallel (DCP): token k of a rank is token cp_world * k + cp_rank of the sequence,
// and the causal mask is by positions in the sequence. Templates: without DCP, Params lacks the
// parameters.

// End of the rank's tokens that a query token at position `pos` attends to, at most `kv_len`.
template <typename DcpParams, typename Position>
__device__ inline int dcp_kv_end_at(const DcpParams& params, Position pos, int kv_len) {
  if (pos < params.cp_rank) return 0;
  const u32 last = static_cast<u32>(pos - params.cp_rank) / static_cast<u32>(params.cp_world);
  return static_cast<int>(min(last + 1, static_cast<u32>(kv_len)));
}

// The same of query token `query` of a sequence: before its first one, all ranks have
// `causal_seqlens_kv_global` tokens.
template <typename DcpParams>
__device__ inline int dcp_kv_end_of_query(const DcpParams& params, int seq_idx, int query,
                                          int kv_len) {
  const i64 first = params.causal_seqlens_kv_global[seq_idx];
  return dcp_kv_end_at(params, first + query, kv_len);
}

// First query token of the sequence that attends to the rank's token `token`; may be past the last.
template <typename DcpParams>
__device__ inline i64 dcp_first_query(const DcpParams& params, int seq_idx, int token) {
  const i64 pos = static_cast<i64>(token) * params.cp_world + params.cp_rank;
  return max(pos - params.causal_seqlens_kv_global[seq_idx], static_cast<i64>(0));
}

// Paged KV cache: addresses of tokens, and L2 hints of their loads.

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

// Block tables of values. A template: Params of a kernel with one table for both lacks it.
template <typename SeparateParams>
__device__ inline const int* value_tables_of(const SeparateParams& params) {
  return params.value_tables;
}

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

// What createpolicy_evict_first returns. Copies take a policy from uniform registers, where only a
// constant is without an instruction per copy.
constexpr u64 kEvictFirst = 0x12f0000000000000;

// Evict-first keeps Q and partial O resident and avoids write-backs between reads, which cost far
// more bandwidth than their bytes. Two CTAs that read a tile still meet in L2; more drift apart.
__device__ inline u64 kv_cache_hint(int readers) {
  return readers > 2 ? createpolicy_evict_normal() : createpolicy_evict_first();
}

// Query rows of M tiles, of sequences of one length or ragged, and the top-k length of a query
// token. `cu_seqlens_q` is untrusted.

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
// outside the tensor, whose `total_rows` are those of all `heads`, has no rows: nothing may be read
// or written there.
__device__ inline TileRows rows_of_tile(const int* cu_seqlens_q, int num_seqs, i64 q_len,
                                        int rows_per_token, int heads, i64 total_rows, int seq_idx,
                                        i64 tile) {
  i64 first_query = seq_idx * q_len;
  if (cu_seqlens_q != nullptr) {
    seq_idx = seq_of_tile(cu_seqlens_q, num_seqs, rows_per_token, static_cast<int>(tile));
    tile -= first_tile_of(cu_seqlens_q, seq_idx, rows_per_token);
    first_query = cu_seqlens_q[seq_idx];
    q_len = cu_seqlens_q[seq_idx + 1] - first_query;
  }
  const i64 first_row = tile * kBlockM;
  const bool is_inside = first_query >= 0 && q_len >= 0 &&
                         (first_query + q_len) * heads <= total_rows && first_row >= 0;
  const i64 rows = min(q_len * rows_per_token - first_row, static_cast<i64>(kBlockM));
  return {seq_idx, static_cast<int>(q_len), first_query, static_cast<int>(first_row),
          is_inside && rows > 0 ? static_cast<int>(rows) : 0};
}

// Sparse attention: `topk_length` holds the number of valid top-k indices of each query token, or
// it follows from the causal KV length.
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

// Block indices of a sparse call. Every query token is a sequence to the kernel: its KV tokens are
// those that its indices name, in their order. Templates: Params of a dense kernel lacks the
// parameters. Indices, requests and page ids are untrusted.

// Without block tables an index names a token of the cache, page by page, and there are as many
// indices as the length of the query token says.

// The request of a query token, and the end of the request's tokens that it attends to.
struct SparseSeq {
  int seq_idx;
  int kv_end;  // 0: it attends to nothing
};

template <typename SparseParams>
__device__ inline SparseSeq sparse_seq_of(const SparseParams& params, int token) {
  if (params.block_tables == nullptr) return {0, kMaxKvLen};
  const int q_len = max(params.request_q_len, 1);
  int seq_idx = token;
  int query = 0;  // of the request
  if (q_len > 1) {
    seq_idx = token / q_len;
    query = token - seq_idx * q_len;
  }
  if (params.token_to_req != nullptr) seq_idx = params.token_to_req[token];
  if (static_cast<u32>(seq_idx) >= static_cast<u32>(params.num_requests)) return {0, 0};
  const i64 seq_len = params.seq_lens == nullptr ? kMaxKvLen : params.seq_lens[seq_idx];
  const int kv_len = clamp_kv_len(seq_len, params.max_pages);
  if (!params.is_causal) return {seq_idx, kv_len};
  return {seq_idx, min(kv_len, max(kv_len - q_len + query + 1, 0))};
}

// Indices of a query token and KV head.
template <typename SparseParams>
__device__ inline const int* block_indices_of(const SparseParams& params, int token, int kv_head) {
  return params.block_indices + token * params.indices_stride +
         kv_head * params.indices_head_stride;
}

// How many of them count, unchecked; `load` reads a number.
template <typename SparseParams, typename Load>
__device__ inline int load_num_indices(const SparseParams& params, int token, Load load) {
  int count = params.num_indices;
  if (params.block_tables == nullptr) {
    count = load(params.seq_lens + token);
  } else if (params.has_index_counts) {
    count = load(params.block_indices + token * params.indices_stride + params.num_indices);
  }
  return count;
}

template <typename SparseParams>
__device__ inline int num_indices_of(const SparseParams& params, int token) {
  const int count = load_num_indices(params, token, [](const int* number) { return *number; });
  return max(min(count, params.num_indices), 0);
}

// A token in the cache that an index names.
struct SparseToken {
  int page;  // -1: none
  int slot;
};

// Work item of a CTA: its query rows, its slice of the output dims, its split of the KV tokens,
// and the shared memory plan.

// A row is one (query token, query head of a kv head) pair of a sequence, query token first. A CTA
// takes kBlockM rows of one kv head, a slice of their output dims and one split of the KV tokens.
struct alignas(16) WorkItem {
  int seq_idx;
  int kv_head;
  int slice;
  int split_idx;
  int q_len;  // query tokens of this sequence
  i64 first_query;  // index of the sequence's first query token among all
  int kv_len;  // tokens in the cache, the new ones included
  int first_row;  // of this CTA, among the sequence's rows
  int rows;  // of this CTA; the rest of kBlockM is padding
  int unmasked_kv_begin, unmasked_kv_end;  // tokens that every row of this CTA attends to
  int kv_begin, kv_end;  // tokens that any row may attend to
  int first_kv_block, end_kv_block;  // KV blocks of kBlockN tokens of this split

  // Fixed split `split_idx` of these rows; as all tokens bound it, a mask changes none.
  __device__ FixedSplit fixed_split(const Params& params) const {
    return fixed_split_of(kv_begin, kIsSparse ? kv_end : kv_len, split_idx, params.num_splits);
  }

  // Sets the KV blocks of that split; a CTA beyond the splits of the sequence has no rows.
  __device__ void set_fixed_split(const Params& params) {
    const FixedSplit split = fixed_split(params);
    const int begin = kv_begin / kBlockN;
    const int end = max(begin, ceil_div(kv_end, kBlockN));
    first_kv_block = min(end, max(begin, split.first_token / kBlockN));
    end_kv_block = min(end, ceil_div(split.end_token, kBlockN));
    if (split_idx >= split.num_splits) rows = 0;
  }

  // Index of the sequence among block tables and lengths, which may be those of a KV head.
  __device__ int table_idx(const Params& params) const {
    return kHasHeadTables ? kv_head * params.num_seqs + seq_idx : seq_idx;
  }

  // Page ids of the sequence: a row of the block table, or a part of the flat page ids of a plan.
  __device__ const int* page_ids(const Params& params) const {
    const i64 start = params.kv_indptr == nullptr
                          ? table_idx(params) * static_cast<i64>(params.block_tables_stride)
                          : params.kv_indptr[seq_idx];
    return params.block_tables + start;
  }

  // The same of its values.
  __device__ const int* value_page_ids(const Params& params) const {
    if constexpr (kSeparatePageIds) {
      return value_tables_of(params) + seq_idx * static_cast<i64>(params.block_tables_stride);
    } else {
      return page_ids(params);
    }
  }

  __device__ int query_of(const Params& params, int row) const {
    return (first_row + row) / params.group_size;
  }

  // First token in the sliding window of a query token.
  __device__ int window_kv_begin(const Params& params, int query) const {
    return max(0, max(0, kv_len - q_len + query + 1) - params.window);
  }

  __device__ int head_of(const Params& params, int row) const {
    return kv_head * params.group_size + (first_row + row) % params.group_size;
  }

  // Index of `row` in a [tokens * heads] array.
  __device__ i64 global_row(const Params& params, int row) const {
    const i64 query = first_query + query_of(params, row);
    return query * params.group_size * params.kv_heads + head_of(params, row);
  }

  // Whether a row attends to a token that is masked for some rows.
  __device__ bool attends(const Params& params, int row, int token) const {
    if (row >= rows || token >= kv_len) return false;
    const int query = query_of(params, row);
    if constexpr (kHasDcp) return query >= dcp_first_query(params, seq_idx, token);
    if (token < window_kv_begin(params, query)) return false;
    const int draft = token - (kv_len - q_len);
    if (params.draft_mask == nullptr || draft < 0) return !params.is_causal || draft <= query;
    const u32* words = params.draft_mask + (first_query + query) * params.mask_words;
    // No row attends to speculative tokens beyond the mask.
    return draft / 32 < params.mask_words && (words[draft / 32] >> draft % 32 & 1) != 0;
  }

  // Whether every row of this CTA attends to a token, as a mask may say: it is no boundary then.
  __device__ bool all_attend(const Params& params, int token) const {
    bool all = true;
    for (int row = lane_index(); row < rows; row += kWarpLanes) all &= attends(params, row, token);
    return __all_sync(~0u, all);
  }
};

// The work item of a sparse call: one query token, whose KV tokens are those that its indices name,
// in their order. `kv_end` counts these, and `kv_len` is the end of the tokens that they may name.
// A template: Params of a dense kernel lacks the parameters.
template <typename SparseParams>
__device__ inline void set_sparse_work(const SparseParams& params, int token, int m_tile,
                                       WorkItem& work) {
  const SparseSeq seq = sparse_seq_of(params, token);
  work.seq_idx = seq.seq_idx;
  work.q_len = 1;
  work.first_query = token;
  work.first_row = m_tile * kBlockM;
  work.rows = max(min(params.group_size - work.first_row, kBlockM), 0);
  work.kv_len = seq.kv_end;
  work.kv_begin = 0;
  work.kv_end = work.kv_len > 0 ? num_indices_of(params, token) * kSparseBlock : 0;

  const int num_kv_blocks = ceil_div(work.kv_end, kBlockN);
  if constexpr (kBatchInvariant) return work.set_fixed_split(params);
  // Splits begin where blocks of an index do.
  constexpr int kIndexBlocks = kSparseBlock / kBlockN;
  constexpr int kSplitUnit = kIndexBlocks > kWarps ? kIndexBlocks : kWarps;
  const int kv_blocks_per_split =
      ceil_div(ceil_div(num_kv_blocks, kSplitUnit), params.num_splits) * kSplitUnit;
  work.first_kv_block = min(num_kv_blocks, work.split_idx * kv_blocks_per_split);
  work.end_kv_block = min(num_kv_blocks, work.first_kv_block + kv_blocks_per_split);
}

// Waits for the preceding kernel (PDL).
__device__ inline WorkItem find_work_item(const Params& params) {
  WorkItem work;
  CtaIndex cta;
  const int m_tile = cta.next(params.m_tiles);
  work.slice = cta.next(kSlices);
  work.kv_head = cta.next(params.kv_heads);
  work.split_idx = cta.next(params.num_splits);
  const int seq_idx = cta.last();
  pdl_wait();
  if constexpr (kIsSparse) {
    set_sparse_work(params, seq_idx, m_tile, work);
    return work;
  }
  const TileRows m_tile_rows =
      rows_of_tile(params.cu_seqlens_q, params.num_seqs, params.q_len, params.group_size,
                   params.group_size * params.kv_heads, params.total_rows, seq_idx, m_tile);
  work.seq_idx = m_tile_rows.seq_idx;
  work.q_len = m_tile_rows.q_len;
  work.first_query = m_tile_rows.first_query;
  work.first_row = m_tile_rows.first_row;
  work.rows = m_tile_rows.rows;
  work.kv_len = clamp_kv_len(params.seq_lens[work.table_idx(params)], params.max_pages);

  const int first = work.query_of(params, 0);
  const int last = work.query_of(params, max(work.rows, 1) - 1);
  const int context_len = work.kv_len - work.q_len;
  const bool has_mask = params.draft_mask != nullptr;
  const bool is_causal = !has_mask && params.is_causal;
  work.kv_begin = work.window_kv_begin(params, first);
  work.unmasked_kv_begin = work.window_kv_begin(params, last);
  work.kv_end = max(is_causal ? context_len + last + 1 : work.kv_len, 0);
  const int first_row_end = is_causal ? context_len + first + 1 : work.kv_len;
  work.unmasked_kv_end = max(has_mask ? context_len : first_row_end, 0);
  if constexpr (kHasDcp) {
    work.kv_end = dcp_kv_end_of_query(params, work.seq_idx, last, work.kv_len);
    work.unmasked_kv_end = dcp_kv_end_of_query(params, work.seq_idx, first, work.kv_len);
  }

  // All tokens bound the splits, also those behind a causal tile: a causal mask then adds up in the
  // order of causal tiles without one.
  const int begin = work.kv_begin / kBlockN;
  if constexpr (kBatchInvariant) {
    work.set_fixed_split(params);
    return work;
  }
  const int num_kv_blocks = max(ceil_div(work.kv_len, kBlockN) - begin, 0);
  const int kv_blocks_per_split =
      ceil_div(ceil_div(num_kv_blocks, kWarps), params.num_splits) * kWarps;
  const int end = begin + max(ceil_div(work.kv_end, kBlockN) - begin, 0);
  work.first_kv_block = min(end, begin + work.split_idx * kv_blocks_per_split);
  work.end_kv_block = min(end, work.first_kv_block + kv_blocks_per_split);
  return work;
}

// Tokens of a KV block in the cache, as the indices of a sparse call name them; page -1: none.
struct SparseBlock {
  int pages[kBlockN];
  int slots[kBlockN];
};

struct alignas(16) SharedMemoryPlan {
  WorkItem work;  // once per CTA instead of in the registers of every thread
  unsigned char query[kBlockM * kRowBytes];  // [kBlockM][kHeadDim]
  union {
    unsigned char warps[kWarps][kWarpBytes];  // see stage_ptr and tokens_of
    float combine_buffer[kCombineFloats];  // [kBlockM][kSliceDims + 4], after the main loop
  };
  float row_max[kWarps][kBlockM];  // base 2
  float row_sum[kWarps][kBlockM];
  union {
    float probabilities[kWarps][kBlockM][kBlockN];  // of blocks with tokens masked for some rows
    // Of a sparse call, which has no such blocks; with indices of values also theirs.
    SparseBlock sparse_blocks[kWarps][kSparseRing * (kSeparatePageIds ? 2 : 1)];
  };
};
static_assert(sizeof(SharedMemoryPlan) == kSharedBytes, "the spec computes the size of the struct");

// The tokens of load `stage_idx` of this warp.
__device__ inline SparseBlock& sparse_block_of(SharedMemoryPlan& smem, int stage_idx) {
  const int block = stage_idx / 2 % kSparseRing;
  return smem.sparse_blocks[warp_index()][kSeparatePageIds ? block * 2 + stage_idx % 2 : block];
}

// Stage that load `stage_idx` of this warp fills: [kBlockN] rows of kStageRowBytes.
__device__ inline unsigned char* stage_ptr(SharedMemoryPlan& smem, int stage_idx) {
  return smem.warps[warp_index()] + stage_idx % kStages * kStageBytes;
}

// The KV block as the MMA reads it: [kBlockN] rows of kRowBytes.
__device__ inline unsigned char* tokens_of(SharedMemoryPlan& smem, int stage_idx) {
  return kDequantsKv ? smem.warps[warp_index()] + kStages * kStageBytes
                     : stage_ptr(smem, stage_idx);
}

// MMAs of one KV block: S = Q K^T, and O += P V.

// S fragment of one warp: element [m][n][e] belongs to row fragment_row(m, e / 2) and token
// fragment_col(n, e % 2) of the KV block.
using Scores = float[kRowGroups][2][4];

// Q fragments of one k-step: 16 dims of all rows.
using QueryStep = u32[kRowGroups][4];

__device__ inline void load_query_step(const SharedMemoryPlan& smem, int step, QueryStep& query) {
  const u32 rows =
      shared_address(smem.query) + (step * 2 + lane_index() / 16) * static_cast<int>(kChunkBytes);
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
    ldmatrix_x4(query[m], rows + (m * 16 + lane_index() % 16) * kRowBytes);
  }
}

// Q fragments in registers if they fit; else scratch for the fragments of one k-step.
struct QueryFragments {
  QueryStep steps[kQueryInRegs ? kHeadDim / 16 : 1];

  __device__ explicit QueryFragments(const SharedMemoryPlan& smem) {
    if (!kQueryInRegs) return;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) load_query_step(smem, step, steps[step]);
  }
};

__device__ inline void qk_gemm(const SharedMemoryPlan& smem, QueryFragments& query,
                               const unsigned char* tokens, Scores& scores) {
  clear_fragments(scores);
  const int lane = lane_index();
  const u32 keys =
      shared_address(tokens) + (lane / 16 * 8 + lane % 8) * kRowBytes + lane / 8 % 2 * kChunkBytes;
#pragma unroll kQueryInRegs ? kHeadDim / 16 : 2
  for (int step = 0; step < kHeadDim / 16; ++step) {
    QueryStep& q = query.steps[kQueryInRegs ? step : 0];
    if (!kQueryInRegs) load_query_step(smem, step, q);
    u32 k[4];
    ldmatrix_x4(k, keys + step * 2 * kChunkBytes);
    mma_columns(scores, 0, q, k);
  }
}

// P of a KV block, rounded, as the A fragments of the PV GEMM: rows and tokens as in Scores.
using Probabilities = u32[kRowGroups][4];

// O fragment of one warp: element [m][n][e] belongs to row fragment_row(m, e / 2) and output dim
// fragment_col(n, e % 2).
using Output = float[kRowGroups][kSliceDims / 8][4];

// Adds the tokens of the KV block that are masked for some rows only to the rows that attend to
// them, and zeroes their V: 0 x NaN is NaN, so a masked V must not reach the tensor core.
__device__ inline void pv_gemm_boundary(const Params& params, const WorkItem& work, int first_token,
                                        const Probabilities& probabilities, unsigned char* tokens,
                                        SharedMemoryPlan& smem, Output& output) {
  auto& p = smem.probabilities[warp_index()];
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const u32 packed = probabilities[m][word];
      float* pair = &p[fragment_row(m, word % 2)][fragment_col(word / 2, 0)];
      pair[0] = cvt_f32(Element{}, static_cast<u16>(packed));
      pair[1] = cvt_f32(Element{}, static_cast<u16>(packed >> 16));
    }
  }
  __syncwarp();
  // Not unrolled: a rare path must not take registers from the main loop.
#pragma unroll 1
  for (int token = 0; token < kBlockN; ++token) {
    const int token_idx = first_token + token;
    if (token_idx >= work.unmasked_kv_begin && token_idx < work.unmasked_kv_end) continue;
    if (params.draft_mask != nullptr && work.all_attend(params, token_idx)) continue;
    u32* row = reinterpret_cast<u32*>(tokens + token * kRowBytes);
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!work.attends(params, fragment_row(m, half), token_idx)) continue;
        const float weight = p[fragment_row(m, half)][token];
#pragma unroll
        for (int n = 0; n < kSliceDims / 8; ++n) {
          const u32 pair = row[fragment_col(n, 0) / 2];
          add_weighted_pair(output[m][n], half, weight, pair);
        }
      }
    }
    __syncwarp();
    for (int word = lane_index(); word < kSliceDims / 2; word += kWarpLanes) row[word] = 0;
  }
  __syncwarp();
}

__device__ inline void pv_gemm(const Probabilities& probabilities, const unsigned char* tokens,
                               Output& output) {
  const int lane = lane_index();
  const u32 values = shared_address(tokens) + lane % 16 * kRowBytes + lane / 16 * kChunkBytes;
#pragma unroll
  for (int n = 0; n < kSliceDims / 8; n += 2) {
    u32 v[4];
    ldmatrix_x4_trans(v, values + n * kChunkBytes);
    mma_columns(output, n, probabilities, v);
  }
}

// Softmax state (m, l) of a row: combination of the parts that splits or warps have of it, final
// normalization factor and LSE, attention sink included.

// Softmax state (m, l) of a row, or of a part of it.
struct RowState {
  float row_max;  // base 2; O and row sum are relative to it
  float row_sum;  // of P
};

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
  // Fused, so that only the distance can overflow, to an infinity of the right sign.
  const float distance = fmaf(sink, kLog2E, -row_max);
  // Relative to the larger of the two, because 2^distance may overflow. Selects keep a NaN, and no
  // branch scatters code that runs once over instruction-cache lines.
  const bool is_sink_larger = distance > 0.0f;
  const float smaller = ex2_approx(-fabsf(distance));
  const float rescale = is_sink_larger ? smaller : 1.0f;
  const float total = row_sum * rescale + (is_sink_larger ? 1.0f : smaller);
  // Approximate, to about 22 bits, with a fraction of the instructions.
  const float log2_total = __log2f(total);
  const bool is_empty = row_sum == 0.0f;  // the row attends to nothing; a NaN is not nothing
  const float lse =
      is_sink_larger ? sink_lse + log2_total * lse_factor : (row_max + log2_total) * lse_factor;
  return {is_empty ? 0.0f : __fdividef(rescale, total), is_empty ? sink_lse : lse};
}

// The same without a sink.
__device__ inline RowResult finish_row_without_sink(float row_max, float row_sum,
                                                    float lse_factor = 1.0f) {
  if (row_sum == 0.0f) return {0.0f, -kInfinity};
  return {__fdividef(1.0f, row_sum), (row_max + __log2f(row_sum)) * lse_factor};
}

// A row that attends to nothing. Its row max is finite: a difference of minus infinities is NaN.
constexpr RowState kEmptyRow = {-kFloatMax, 0.0f};

template <int kCount>
__device__ inline float max_of(const RowState (&states)[kCount]) {
  float row_max = states[0].row_max;
#pragma unroll
  for (int i = 1; i < kCount; ++i) row_max = fmaxf(row_max, states[i].row_max);
  return row_max;
}

// Weight of a part in a row whose max is `row_max`.
__device__ inline float weight_of(const RowState& part, float row_max) {
  return ex2_approx(part.row_max - row_max);
}

// Four adjacent dims of a row of partial O, as a sum of parts.
struct RowPart {
  RowState state = kEmptyRow;
  float4 out = {0.0f, 0.0f, 0.0f, 0.0f};

  // Adds a part, whose row max is at most that of the sum.
  __device__ void add(const RowState& part, const float4& part_out) {
    const float weight = weight_of(part, state.row_max);
    state.row_sum += part.row_sum * weight;
    out.x += weight * part_out.x;
    out.y += weight * part_out.y;
    out.z += weight * part_out.z;
    out.w += weight * part_out.w;
  }
};

// Combines the first `count` of kCount parts, at least one; `out_of(i)` is partial O of part i. The
// row max is that of all states.
template <int kCount, typename OutOf>
__device__ inline RowPart combine_parts(const RowState (&states)[kCount], int count, OutOf out_of) {
  RowPart total;
  total.state.row_max = max_of(states);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i == 0 || i < count) total.add(states[i], out_of(i));
  }
  return total;
}

// Epilogue: combines the partial O of the warps of a CTA, and stores finished rows, or the partial
// O and LSE of one split.

// Row max over all warps.
__device__ inline float combined_row_max(const SharedMemoryPlan& smem, int row) {
  float row_max = -kInfinity;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    row_max = fmaxf(row_max, smem.row_max[warp][row]);
  }
  return row_max;
}

// Weight of a warp's partial row relative to `row_max`.
__device__ inline float combine_weight(const SharedMemoryPlan& smem, int warp, int row,
                                       float row_max) {
  const float own = smem.row_max[warp][row];
  return own == -kInfinity ? 0.0f : ex2_approx(own - row_max);
}

// Offset of a row in `combine_buffer`, whose rows are padded by 16 bytes.
__device__ constexpr int combine_buffer_row(int row) { return row * (kSliceDims + 4); }

// Sums the weighted O of all warps, one warp after the other. After the first barrier no warp reads
// the KV stages that `combine_buffer` aliases, and row max and row sum of all warps are visible.
// Ends with a barrier too.
__device__ inline void combine_warps(SharedMemoryPlan& smem, const Output& output) {
  __syncthreads();
#pragma unroll 1
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp_index() == warp) {
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = fragment_row(m, half);
          const float factor = combine_weight(smem, warp, row, combined_row_max(smem, row));
          float* target = smem.combine_buffer + combine_buffer_row(row);
#pragma unroll
          for (int n = 0; n < kSliceDims / 8; ++n) {
            float2* pair = reinterpret_cast<float2*>(target + fragment_col(n, 0));
            const float2 before = warp == 0 ? make_float2(0.0f, 0.0f) : *pair;
            // A warp of weight 0 adds nothing, whatever its accumulators hold.
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

__device__ inline float output_scale_of(const Params& params) {
  return value_of(params.bmm2_scale_tensor, params.bmm2_scale) * params.output_factor;
}

// Whether finished rows are normalized and then scaled, in the roundings of the combine kernel. The
// width of a sparse call's indices decides whether a list has splits behind its only tokens.
constexpr bool kScalesLikeCombine = kBatchInvariant && kIsSparse;

// Stores the normalization factor of each row over the row sums of warp 0, and the LSE: of a split
// in base 2 and without the sink, of finished rows if the call requests it. An empty row of a split
// has LSE minus infinity, and its partial O is never read.
__device__ inline void finish_rows(const Params& params, const WorkItem& work,
                                   SharedMemoryPlan& smem) {
  const bool is_partial = num_splits_of(params, work) > 1;
  for (int row = static_cast<int>(threadIdx.x); row < work.rows; row += kThreads) {
    const float row_max = combined_row_max(smem, row);
    float row_sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) {
      row_sum += smem.row_sum[warp][row] * combine_weight(smem, warp, row, row_max);
    }
    const float sink = is_partial || params.sinks == nullptr
                           ? -kInfinity
                           : params.sinks[work.head_of(params, row)];
    const RowResult result =
        finish_row(row_max, row_sum, sink, is_partial ? 1.0f : params.lse_factor);
    const float output_scale = is_partial || kScalesLikeCombine ? 1.0f : output_scale_of(params);
    smem.row_sum[0][row] = result.factor * output_scale;
    if (work.slice != 0) continue;
    const i64 global_row = work.global_row(params, row);
    if (is_partial) {
      params.partial_lse[work.split_idx * params.total_rows + global_row] = result.lse;
    } else if (params.lse != nullptr) {
      params.lse[global_row] = result.lse;
    }
  }
  __syncthreads();
}

__device__ inline float4 scaled(const float4& value, float factor) {
  return make_float4(value.x * factor, value.y * factor, value.z * factor, value.w * factor);
}

// Stores normalized fp32 rows of one split, or final rows.
__device__ inline void store_output(const Params& params, const WorkItem& work,
                                    const SharedMemoryPlan& smem) {
  constexpr int kQuads = kSliceDims / 4;
  for (int i = static_cast<int>(threadIdx.x); i < work.rows * kQuads; i += kThreads) {
    const int row = i / kQuads;
    const int dim = i % kQuads * 4;
    const float factor = smem.row_sum[0][row];
    float4 value =
        *reinterpret_cast<const float4*>(smem.combine_buffer + combine_buffer_row(row) + dim);
    value = scaled(value, factor);
    const i64 global_row = work.global_row(params, row);
    const int column = work.slice * kSliceDims + dim;
    if (num_splits_of(params, work) > 1) {
      const i64 partial_row = work.split_idx * params.total_rows + global_row;
      *reinterpret_cast<float4*>(params.partial_out + partial_row * kHeadDimVo + column) = value;
    } else {
      const i64 offset = global_row * kHeadDimVo + column;
      if constexpr (kScalesLikeCombine) value = scaled(value, output_scale_of(params));
      if constexpr (kHasOutputGate) value = gated_output(OutElement{}, params, offset, value);
      store_x4(OutElement{}, params.out, offset, value.x, value.y, value.z, value.w);
    }
  }
}

// PTX ISA, "Data Movement and Conversion Instructions: cp.async, cp.async.bulk". Needs sm_80.
// Of the bulk copies, `map` is the generic address of a tensor map; x, y, z, w, v count elements,
// the innermost first. `policy` is one of createpolicy for L2.

// cp.async.cg.shared.global.L2::128B
// Copies 16 bytes, bypassing L1; bytes from `source_bytes` on are zero-filled.
__device__ inline void cp_async_cg_16(u32 shared_address, const void* global, u32 source_bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address),
               "l"(global), "r"(source_bytes)
               : "memory");
}

// cp.async.cg.shared.global.L2::cache_hint
// The same, with one of createpolicy for L2.
__device__ inline void cp_async_cg_16(u32 shared_address, const void* global, u32 source_bytes,
                                      u64 policy) {
  asm volatile(
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address),
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

// cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
// Copies a box to shared memory, zero-fills what lies outside the tensor, and completes its bytes
// at the barrier. Needs sm_90.
__device__ inline void cp_async_bulk_tensor(u32 target, const void* map, u32 barrier, u64 policy,
                                            int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(target),
      "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint
// Needs sm_90.
__device__ inline void cp_async_bulk_tensor(u32 target, const void* map, u32 barrier, u64 policy,
                                            int x, int y, int z, int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%4, %5, %6, %7, %8}], [%2], %3;" ::"r"(target),
      "l"(map), "r"(barrier), "l"(policy), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

// Reader of the block indices of a query token and of its block table, for the warp's KV blocks.

// Lane l reads token l % kBlockN of the warp's KV blocks: an index two blocks ahead, its page id
// one block ahead, so that no copy waits for one of the two dependent loads.
struct SparseReader {
  const int* indices;
  const int* value_indices;  // like the three below only if kSeparatePageIds
  SparseToken current, next;
  SparseToken value, next_value;
  int index_after_next;
  int value_index_after_next;

  // A template: Params of a dense kernel lacks the indices.
  template <typename SparseParams>
  __device__ void begin(const SparseParams& params, const WorkItem& work, const int* table,
                        int kv_block) {
    const int token = static_cast<int>(work.first_query);
    indices = block_indices_of(params, token, work.kv_head);
    if constexpr (kSeparatePageIds) {
      value_indices = value_tables_of(params) + token * params.indices_stride;
    }
    read_index(work, kv_block);
    read_token(params, work, table, kv_block);
    current = next;
    value = next_value;
    read_index(work, kv_block + kWarps);
    read_token(params, work, table, kv_block + kWarps);
    read_index(work, kv_block + 2 * kWarps);
  }

  // Goes on to `kv_block`, the warp's next one.
  __device__ void advance(const Params& params, const WorkItem& work, const int* table,
                          int kv_block) {
    current = next;
    value = next_value;
    read_token(params, work, table, kv_block + kWarps);
    read_index(work, kv_block + 2 * kWarps);
  }

  __device__ void read_index(const WorkItem& work, int kv_block) {
    index_after_next = index_of(work, indices, kv_block);
    if constexpr (kSeparatePageIds) {
      value_index_after_next = index_of(work, value_indices, kv_block);
    }
  }

  // A token without a key has no value, and the other way round.
  __device__ void read_token(const Params& params, const WorkItem& work, const int* table,
                             int kv_block) {
    next = token_of(params, work, table, kv_block, index_after_next);
    if constexpr (kSeparatePageIds) {
      next_value = token_of(params, work, table, kv_block, value_index_after_next);
      if (next.page < 0 || next_value.page < 0) next.page = next_value.page = -1;
    }
  }

  __device__ static int position_of(int kv_block) {
    return kv_block * kBlockN + lane_index() % kBlockN;
  }

  // -1 beyond this split's blocks; both ends fit in an int, as positions do.
  __device__ static int index_of(const WorkItem& work, const int* indices, int kv_block) {
    const int position = position_of(kv_block);
    const bool is_read = kv_block < work.end_kv_block && position < work.kv_end;
    return is_read ? indices[position / kIndexTokens] : -1;
  }

  // Indices and page ids are untrusted: an invalid one names no token.
  __device__ static SparseToken token_of(const Params& params, const WorkItem& work,
                                         const int* table, int kv_block, int index) {
    const int first_in_block = position_of(kv_block) % kIndexTokens;
    const i64 token = static_cast<i64>(index) * kIndexTokens + first_in_block;
    if (index < 0 || token >= work.kv_len) return {-1, 0};
    const i64 table_page = token / kPageSize;
    const int page =
        params.block_tables == nullptr ? static_cast<int>(table_page) : table[table_page];
    return {is_valid_page(page, params.num_pages) ? page : -1, static_cast<int>(token % kPageSize)};
  }
};

// The tokens of a KV block as bits, bit t for token t.
__device__ inline u32 sparse_mask(const SparseBlock& block) {
  const int lane = lane_index();
  return __ballot_sync(~0u, lane < kBlockN && block.pages[lane % kBlockN] >= 0);
}

// Loads of Q, and of KV blocks by cp.async: each warp streams its own blocks of the paged cache
// into its stages.

// Loads the CTA's query rows into shared memory.
__device__ inline void load_q(const Params& params, const WorkItem& work, SharedMemoryPlan& smem) {
  constexpr int kChunks = kHeadDim * 2 / kChunkBytes;
  for (int i = static_cast<int>(threadIdx.x); i < kBlockM * kChunks; i += kThreads) {
    const int row = i / kChunks;
    const int chunk = i % kChunks;
    Chunk value{};
    if (row < work.rows) {
      const i64 query = work.first_query + work.query_of(params, row);
      const u16* source = params.query + query * params.query_stride +
                          work.head_of(params, row) * params.query_head_stride;
      value = reinterpret_cast<const Chunk*>(source)[chunk];
    }
    *reinterpret_cast<Chunk*>(smem.query + row * kRowBytes + chunk * kChunkBytes) = value;
  }
}

// Scales of K and of V, of the kv head of a work item.
__device__ inline PagedRows key_scales(const Params& params, const WorkItem& work) {
  return {params.key_scales + work.kv_head * params.key_scale_head_stride,
          params.key_scale_page_stride, params.key_scale_token_stride};
}
__device__ inline PagedRows value_scales(const Params& params, const WorkItem& work) {
  return {params.value_scales + work.kv_head * params.value_scale_head_stride,
          params.value_scale_page_stride, params.value_scale_token_stride};
}

// Stages alternate: K of a KV block, its V, K of the warp's next block. Page ids are read one block
// ahead, so that no copy waits for them.
struct KvLoader {
  const Params& params;
  const WorkItem& work;
  const int* table;  // page ids of the sequence
  const int* value_table;  // those of its values; like the two below only if kSeparatePageIds
  int next_stage;
  int next_kv_block;
  int lane_page;  // of token lane_index() % kBlockN of the next block; -1 if it is not loaded
  int next_lane_page;  // of the block after it
  int value_lane_page;
  int next_value_lane_page;
  SparseReader sparse;  // of a sparse call, instead of the page ids

  __device__ KvLoader(const Params& params, const WorkItem& work)
      : params(params),
        work(work),
        table(work.page_ids(params)),
        next_stage(0),
        next_kv_block(work.first_kv_block + warp_index()) {
    if constexpr (kIsSparse) {
      sparse.begin(params, work, table, next_kv_block);
      return;
    }
    lane_page = load_lane_page(table, next_kv_block);
    next_lane_page = load_lane_page(table, next_kv_block + kWarps);
    if constexpr (kSeparatePageIds) {
      value_table = work.value_page_ids(params);
      value_lane_page = load_lane_page(value_table, next_kv_block);
      next_value_lane_page = load_lane_page(value_table, next_kv_block + kWarps);
    }
  }

  // Block table of load `stage_idx`.
  __device__ const int* table_of(int stage_idx) const {
    return kSeparatePageIds && stage_idx % 2 != 0 ? value_table : table;
  }

  __device__ int load_lane_page(const int* page_ids, int kv_block) const {
    const int token = kv_block * kBlockN + lane_index() % kBlockN;
    const bool is_read =
        kv_block < work.end_kv_block && token >= work.kv_begin && token < work.kv_end;
    return is_read ? page_ids[token / kPageSize] : -1;
  }

  // Place in its page of a token of the next block.
  __device__ int slot_of(int token) const { return (next_kv_block * kBlockN + token) % kPageSize; }

  // Copies `kBytes` of every token's row, from byte `offset` on, to the rows of a stage.
  template <int kBytes>
  __device__ void copy_rows(const PagedRows& rows, int own_page, int offset,
                            unsigned char* stage) const {
    constexpr bool kFillsChunks = kBytes % kChunkBytes == 0 && kStageRowBytes % kChunkBytes == 0;
    // Rows of a cache with token scales, such as [K, its scale, V, its scale], have any 4 bytes.
    constexpr int kCopyBytes = kHasTokenScales ? 4 : kFillsChunks ? kChunkBytes : 8;
    constexpr int kCopies = kBytes / kCopyBytes;
#pragma unroll 4  // more addresses at once would take registers from the O accumulators
    for (int first = 0; first < kBlockN * kCopies; first += kWarpLanes) {
      const int copy = first + lane_index();
      const int token = copy / kCopies;
      const int at = copy % kCopies * kCopyBytes;
      const int page = __shfl_sync(~0u, own_page, token % kBlockN);
      int sparse_slot = 0;
      if constexpr (kIsSparse) sparse_slot = __shfl_sync(~0u, sparse.current.slot, token % kBlockN);
      if (token >= kBlockN) continue;
      const bool exists = is_valid_page(page, params.num_pages);
      const int slot = kIsSparse ? sparse_slot : slot_of(token);
      const unsigned char* source = exists ? rows.row_of(page, slot) + offset + at : rows.rows;
      const u32 target = shared_address(stage) + token * kStageRowBytes + at;
      const u32 bytes = exists ? kCopyBytes : 0;
      if constexpr (kCopyBytes == 4) cp_async_ca_4(target, source, bytes);
      if constexpr (kCopyBytes == 8) cp_async_ca_8(target, source, bytes);
      if constexpr (kCopyBytes == 16) cp_async_cg_16(target, source, bytes);
    }
  }

  // Copies the scale of every token behind the rows of a stage; 0 of one that is not loaded.
  __device__ void copy_scales(const PagedRows& scales, int own_page, unsigned char* stage) const {
    const int token = lane_index();
    if (token >= kBlockN) return;
    const bool exists = is_valid_page(own_page, params.num_pages);
    const int slot = kIsSparse ? sparse.current.slot : slot_of(token);
    const unsigned char* source = exists ? scales.row_of(own_page, slot) : scales.rows;
    cp_async_ca_4(shared_address(stage) + kScalesOffset + token * kScaleBytes, source,
                  exists ? kScaleBytes : 0);
  }

  // Publishes the tokens of the next stage of a sparse call to the warp.
  __device__ void set_sparse_block(SharedMemoryPlan& smem) {
    lane_page = sparse.current.page;
    if (lane_index() < kBlockN) {
      sparse_block_of(smem, next_stage).pages[lane_index()] = sparse.current.page;
      sparse_block_of(smem, next_stage).slots[lane_index()] = sparse.current.slot;
    }
  }

  // Issues the copies of the next stage, if there is one. Always commits a cp.async group, so that
  // the number of groups to wait for is constant.
  __device__ void load_next(SharedMemoryPlan& smem) {
    if (next_kv_block < work.end_kv_block) {
      unsigned char* stage = stage_ptr(smem, next_stage);
      if (next_stage % 2 == 0) {
        const PagedRows keys{params.key_cache + work.kv_head * params.key_head_stride,
                             params.key_page_stride, params.key_token_stride};
        if constexpr (kIsSparse) set_sparse_block(smem);
        copy_rows<kStoredBytes>(keys, lane_page, 0, stage);
        if constexpr (kHasTokenScales) copy_scales(key_scales(params, work), lane_page, stage);
      } else {
        const PagedRows values{params.value_cache + work.kv_head * params.value_head_stride,
                               params.value_page_stride, params.value_token_stride};
        if constexpr (kIsSparse && kSeparatePageIds) {
          sparse.current = sparse.value;
          set_sparse_block(smem);
        }
        const int value_page = kSeparatePageIds && !kIsSparse ? value_lane_page : lane_page;
        copy_rows<kSliceBytes>(values, value_page, work.slice * kSliceBytes, stage);
        if constexpr (kHasTokenScales) copy_scales(value_scales(params, work), value_page, stage);
        next_kv_block += kWarps;
        if constexpr (kIsSparse) {
          sparse.advance(params, work, table, next_kv_block);
          ++next_stage;
          cp_async_commit_group();
          return;
        }
        lane_page = next_lane_page;
        next_lane_page = load_lane_page(table, next_kv_block + kWarps);
        if constexpr (kSeparatePageIds) {
          value_lane_page = next_value_lane_page;
          next_value_lane_page = load_lane_page(value_table, next_kv_block + kWarps);
        }
      }
      ++next_stage;
    }
    cp_async_commit_group();
  }
};

// Online softmax: the scale of the scores, the rescale threshold, and reductions over the quad of
// lanes that hold a row of an MMA accumulator.

// Factor of the scores Q K^T, natural base.
__device__ inline float score_scale(const Params& params) {
  const float scale = value_of(params.bmm1_scale_tensor, params.bmm1_scale);
  return params.bmm2_scales_scores ? scale * value_of(params.bmm2_scale_tensor, params.bmm2_scale)
                                   : scale;
}

// Rescale threshold (FA4 "conditional rescaling"): P is relative to a stale row max, which moves
// only when a score exceeds it by this much (base-2 exponent). Warps then need no common max per
// tile, O is rarely rescaled, and no element of P exceeds 2^8, which fp16 represents.
constexpr float kRescaleThreshold = 8.0f;

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

// Score of grouped-query attention: from Q K^T to the base-2 logit of the softmax.

// A template: Params of a kernel without a soft cap lacks it.
template <typename CappedParams>
__device__ inline float soft_cap_of(const CappedParams& params) {
  return params.soft_cap;
}

struct GqaScore {
  float scale;  // softmax scale times log2(e); with a soft cap, twice that and relative to the cap
  float cap;

  __device__ explicit GqaScore(const Params& params)
      : scale(score_scale(params) * params.score_factor * kLog2E), cap(0.0f) {
    if constexpr (kHasSoftCap) {
      cap = soft_cap_of(params);
      scale = 2.0f * scale / cap;
    }
  }

  // `row_scale` is `scale`, times the inverse scale of a row of Q. Rounded, never fused with what
  // follows: equal scores must have equal distances from the row max.
  __device__ float of(float qk, float row_scale) const {
    const float score = __fmul_rn(qk, row_scale);
    if constexpr (!kHasSoftCap) return score;
    // cap * tanh(z / cap) = cap - 2 * cap / (exp(2 * z / cap) + 1); the exponential may be
    // infinite. tanh.approx has a relative error of 2^-11, which near the cap is too much.
    const float base2_cap = cap * kLog2E;
    const float capped =
        __fmaf_rn(rcp_approx(ex2_approx(score) + 1.0f), -2.0f * base2_cap, base2_cap);
    // Far from the cap that difference would cancel. With x = z / cap, tanh(x) is x - x^3 / 3
    // there, to 2^-22, and `score` is 2 * log2(e) * x.
    constexpr float kSquare = -0.25f / (3.0f * kLog2E * kLog2E);
    const float uncapped = __fmul_rn(score * (0.5f * cap), fmaf(score * score, kSquare, 1.0f));
    return fabsf(score) < kFarFromCap ? uncapped : capped;
  }

  static constexpr float kFarFromCap = 0.0625f * kLog2E;  // of scores: x = 2^-5
};

// Scaling of P by the scales of values, where a cache has one for each token and kv head: P V of a
// token is multiplied by a scale before P is rounded for the PV GEMM.

__device__ inline float pow2(int exponent) {
  return __uint_as_float(static_cast<u32>(exponent + 127) << 23);
}

// Scales are multiplied by a power of two, so that fp16 represents P times a scale: no P exceeds
// 2^8, and no scaled scale 2^7. What is 2^-29 of that is still rounded relatively. Like a row max,
// the exponent moves only where a scale exceeds it; O is multiplied by the same power, and divided
// by it at the end.
struct ValueScaling {
  static constexpr float kMaxScaled = 128.0f;
  static constexpr int kExponentOfMax = 3;  // after a move, that of the largest scale

  int exponent = 126;  // both powers are normal numbers

  // Magnitude of a scale that may move the exponent; others are 0, since each of their elements is
  // infinite or NaN.
  __device__ static float magnitude_of(float scale) {
    return fabsf(scale) < kInfinity ? fabsf(scale) : 0.0f;
  }

  __device__ bool exceeds(float magnitude) const { return magnitude * pow2(exponent) > kMaxScaled; }

  // Moves the exponent for scales of up to `magnitude`; returns the factor of O.
  __device__ float move(float magnitude) {
    const int before = exponent;
    exponent = kExponentOfMax + 127 - static_cast<int>(__float_as_uint(magnitude) >> 23);
    return pow2(max(exponent - before, -126));
  }

  __device__ float scaled(float scale) const { return scale * pow2(exponent); }
  __device__ float inverse() const { return pow2(-exponent); }
};

// Scales of the tokens of a KV block: those of K multiply scores, and those of V multiply P. Each
// lane has the scale of one token.

// Of the token of this lane, in a stage that has arrived.
__device__ inline float token_scale_of(const unsigned char* stage) {
  return reinterpret_cast<const float*>(stage + kScalesOffset)[lane_index() % kBlockN];
}

// Scale of the token of column `n`, `e % 2` of Scores.
__device__ inline float scale_of_column(float scale, int n, int e) {
  return __shfl_sync(~0u, scale, fragment_col(n, e % 2));
}

__device__ inline void multiply_by_tokens(Scores& scores, float scale) {
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float own = scale_of_column(scale, n, e);
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
        scores[m][n][e] *= own;
        scores[m][n][e + 2] *= own;
      }
    }
  }
}

__device__ inline void multiply_output(Output& output, float factor) {
#pragma unroll
  for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) rescale_row(output[m], half, factor);
  }
}

// Returns the scale of V for P, and scales O if the scaling moves.
__device__ inline float scale_value(ValueScaling& scaling, float scale, Output& output) {
  float magnitude = ValueScaling::magnitude_of(scale);
  if (__any_sync(~0u, scaling.exceeds(magnitude))) {
#pragma unroll
    for (int lanes = 1; lanes < kBlockN; lanes *= 2) {
      magnitude = fmaxf(magnitude, __shfl_xor_sync(~0u, magnitude, lanes));
    }
    multiply_output(output, scaling.move(magnitude));
  }
  return scaling.scaled(scale);
}

// Online softmax over the KV blocks of one warp.

// Four lanes share a row. Row sums cover this lane's tokens only, of P as rounded for the PV GEMM.
struct Softmax {
  GqaScore score;
  float row_max[kRowGroups][2];  // base 2
  float row_sum[kRowGroups][2];
  ValueScaling value_scaling;

  __device__ explicit Softmax(const Params& params) : score(params) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_max[m][half] = -kInfinity;
        row_sum[m][half] = 0.0f;
      }
    }
  }

  // Turns S into base-2 scores, minus infinity where masked: a select, not arithmetic, because the
  // masked score may be NaN. `attended` has the tokens of a sparse call.
  __device__ void scale_and_mask(const Params& params, const WorkItem& work, int first_token,
                                 bool has_boundary, u32 attended, Scores& scores) const {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float base2 = score.of(scores[m][n][e], score.scale);
          bool attends = !has_boundary || work.attends(params, fragment_row(m, e / 2),
                                                       first_token + fragment_col(n, e % 2));
          if constexpr (kIsSparse) attends = (attended >> fragment_col(n, e % 2) & 1) != 0;
          scores[m][n][e] = attends ? base2 : -kInfinity;
        }
      }
    }
  }

  // Whether a score of this warp exceeds its row max by more than the rescale threshold, as the
  // first score of a row always does.
  __device__ bool exceeds_threshold(const Scores& scores) const {
    bool exceeds = false;
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          exceeds |= scores[m][n][e] - row_max[m][e / 2] > kRescaleThreshold;
        }
      }
    }
    return __any_sync(~0u, exceeds);
  }

  // Updates the row max of every row that exceeds the threshold, and rescales its sum and O.
  __device__ void update_row_max(const Scores& scores, Output& output) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float block_max = fmaxf(fmaxf(scores[m][0][half * 2], scores[m][0][half * 2 + 1]),
                                fmaxf(scores[m][1][half * 2], scores[m][1][half * 2 + 1]));
        block_max = quad_reduce_max(block_max);
        if (!(block_max - row_max[m][half] > kRescaleThreshold)) continue;
        const float alpha = ex2_approx(row_max[m][half] - block_max);
        row_max[m][half] = block_max;
        row_sum[m][half] *= alpha;
        rescale_row(output[m], half, alpha);
      }
    }
  }

  // P relative to the current row max, and the row sums.
  __device__ void compute_probabilities(const Scores& scores, Probabilities& probabilities) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float low = probability(scores[m][n][half * 2], row_max[m][half]);
          const float high = probability(scores[m][n][half * 2 + 1], row_max[m][half]);
          probabilities[m][n * 2 + half] = round_pair(low, high, row_sum[m][half]);
        }
      }
    }
  }

  // The same for values with token scales, of which this lane has one: P is multiplied by them
  // before it is rounded. A select where masked, because the scale may be NaN.
  __device__ void compute_scaled_probabilities(const Scores& scores, float scale,
                                               Probabilities& probabilities, Output& output) {
    scale = scale_value(value_scaling, scale, output);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float scales[2] = {scale_of_column(scale, n, 0), scale_of_column(scale, n, 1)};
#pragma unroll
      for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float scaled[2];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float score = scores[m][n][half * 2 + i];
            const float p = probability(score, row_max[m][half]);
            row_sum[m][half] += p;
            scaled[i] = score == -kInfinity ? 0.0f : p * scales[i];
          }
          probabilities[m][n * 2 + half] = cvt_rn_x2_f32(Element{}, scaled[1], scaled[0]);
        }
      }
    }
  }

  __device__ static float probability(float score, float row_max) {
    return score == -kInfinity ? 0.0f : ex2_approx(score - row_max);
  }

  // Publishes row max and row sum of this warp in shared memory.
  __device__ void publish(SharedMemoryPlan& smem) {
#pragma unroll
    for (int m = 0; m < kRowGroups; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        row_sum[m][half] = quad_reduce_sum(row_sum[m][half]);
        if (lane_index() % 4 != 0) continue;
        smem.row_max[warp_index()][fragment_row(m, half)] = row_max[m][half];
        smem.row_sum[warp_index()][fragment_row(m, half)] = row_sum[m][half];
      }
    }
  }
};

// FP8 (e4m3): conversion of pairs, by instruction where the architecture has it, else in software;
// NaN detection; dequantization to the element type of the MMA.

__device__ inline u32 fp16x2_of_e4m3x2(u32 pair) {
  return cvt_rn_f16x2_e4m3x2(static_cast<u16>(pair));
}

// The pair in the upper half of a word.
__device__ inline u32 fp16x2_of_high_e4m3x2(u32 word) { return cvt_rn_f16x2_e4m3x2_high(word); }

__device__ inline u32 e4m3x2_of_f32(float high, float low) {
  return cvt_rn_satfinite_e4m3x2_f32(high, low);
}

// Returns 0xff in each byte that holds a NaN. An e4m3 NaN has every bit but the sign set.
__device__ inline u32 nan_bytes(u32 word) {
  const u32 is_nan = ((word & 0x7f7f7f7f) + 0x01010101) & 0x80808080;
  return (is_nan >> 7) * 0xff;
}

// Transposes 2x2 bytes: from dims within tokens to tokens within dims.
__device__ inline u32 transpose_bytes_2x2(u32 word) { return __byte_perm(word, 0, 0x3120); }

// Converts pair `pair` of 16 elements to fp16.
__device__ inline u32 dequant_pair(const Chunk& stored, int pair) {
  const u32 word = stored.words[pair / 2];
  return pair % 2 == 0 ? fp16x2_of_e4m3x2(word & 0xffff) : fp16x2_of_high_e4m3x2(word);
}

// Sixteen elements times `scale`, with one rounding.
template <typename Target>
__device__ inline void dequant_e4m3(Target target, const Chunk& stored, float scale,
                                    Chunk (&dequantized)[2]) {
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const u32 fp16x2 = dequant_pair(stored, pair);
    const float low = cvt_f32(Fp16{}, static_cast<u16>(fp16x2));
    const float high = cvt_f32(Fp16{}, static_cast<u16>(fp16x2 >> 16));
    dequantized[pair / 4].words[pair % 4] = cvt_rn_x2_f32(target, high * scale, low * scale);
  }
}

// Sixteen elements unscaled: fp16 and bf16 both represent every e4m3 value.
template <typename Target>
__device__ inline void dequant_e4m3(Target target, const Chunk& stored, Chunk (&dequantized)[2]) {
  if constexpr (kIsSame<Target, Fp16>) {
#pragma unroll
    for (int pair = 0; pair < 8; ++pair) {
      dequantized[pair / 4].words[pair % 4] = dequant_pair(stored, pair);
    }
  } else {
    dequant_e4m3(target, stored, 1.0f, dequantized);
  }
}

// Eight bf16 elements times `scale`.
template <typename Target>
__device__ inline Chunk scale_bf16(Target target, const Chunk& stored, float scale) {
  Chunk dequantized;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    const float low = cvt_f32(Bf16{}, static_cast<u16>(stored.words[word]));
    const float high = cvt_f32(Bf16{}, static_cast<u16>(stored.words[word] >> 16));
    dequantized.words[word] = cvt_rn_x2_f32(target, high * scale, low * scale);
  }
  return dequantized;
}

// Dequantization of K and V blocks, stored in FP8 (e4m3, e5m2), int8 or NVFP4 (e2m1), to the
// element type of the MMA.

// Reader of the block scales of a KV block: NVFP4 has an e4m3 scale for each 16 elements, the other
// dtypes none.
struct BlockScales {
  const WorkItem& work;
  const int* table;  // page ids of the sequence; of a sparse call a SparseBlock
  PagedRows rows;
  int num_pages;
  int first_token;
  int first_scale_group;

  // Zero for a token that is not loaded: its scales must not be read either.
  __device__ float scale_of(int token, int scale_group) const {
    const int at = first_token + token;
    if (at < work.kv_begin || at >= work.kv_end) return 0.0f;
    const int page = table[kIsSparse ? token : at / kPageSize];
    if (!is_valid_page(page, num_pages)) return 0.0f;
    const int slot = kIsSparse ? table[kBlockN + token] : at % kPageSize;
    const u32 stored = rows.row_of(page, slot)[first_scale_group + scale_group];
    return cvt_f32(Fp16{}, static_cast<u16>(fp16x2_of_e4m3x2(stored)));
  }
};

// Block scales of load `stage_idx`: of K if it is even, else of V.
__device__ inline BlockScales scales_of(const Params& params, const WorkItem& work, int stage_idx,
                                        int kv_block, const int* table) {
  const bool is_k = stage_idx % 2 == 0;
  return {work,
          table,
          is_k ? key_scales(params, work) : value_scales(params, work),
          params.num_pages,
          kv_block * kBlockN,
          is_k ? 0 : work.slice * kSliceDims / 16};
}

__device__ inline void dequant_elements(E4m3, const unsigned char* row, const BlockScales&, int,
                                        int scale_group, Chunk (&dequantized)[2]) {
  dequant_e4m3(Element{}, reinterpret_cast<const Chunk*>(row)[scale_group], dequantized);
}

// An e5m2 is the upper half of its fp16.
__device__ inline void dequant_elements(E5m2, const unsigned char* row, const BlockScales&, int,
                                        int scale_group, Chunk (&dequantized)[2]) {
  const Chunk stored = reinterpret_cast<const Chunk*>(row)[scale_group];
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const u32 word = stored.words[pair / 2];
    const float low = cvt_f32(Fp16{}, static_cast<u16>(word >> pair % 2 * 16 << 8));
    const float high = cvt_f32(Fp16{}, static_cast<u16>(word >> pair % 2 * 16 & 0xff00));
    dequantized[pair / 4].words[pair % 4] = cvt_rn_x2_f32(Element{}, high, low);
  }
}

__device__ inline void dequant_elements(Int8, const unsigned char* row, const BlockScales&, int,
                                        int scale_group, Chunk (&dequantized)[2]) {
  const Chunk stored = reinterpret_cast<const Chunk*>(row)[scale_group];
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const int bytes = static_cast<int>(stored.words[pair / 2]) >> pair % 2 * 16;
    const float low = static_cast<float>(static_cast<signed char>(bytes));
    const float high = static_cast<float>(static_cast<signed char>(bytes >> 8));
    dequantized[pair / 4].words[pair % 4] = cvt_rn_x2_f32(Element{}, high, low);
  }
}

// An e2m1 aligned with the low exponent bits of an fp16 encodes its value times 2^-14, because the
// exponent biases differ by 14.
__device__ inline float float_of_e2m1(u32 nibble) {
  constexpr float kTwoTo14 = 16384.0f;
  return cvt_f32(Fp16{}, static_cast<u16>((nibble & 8) << 12 | (nibble & 7) << 9)) * kTwoTo14;
}

__device__ inline void dequant_elements(Nvfp4, const unsigned char* row, const BlockScales& scales,
                                        int token, int scale_group, Chunk (&dequantized)[2]) {
  const uint2 stored = reinterpret_cast<const uint2*>(row)[scale_group];
  const float scale = scales.scale_of(token, scale_group);
#pragma unroll
  for (int pair = 0; pair < 8; ++pair) {
    const u32 byte = (pair < 4 ? stored.x : stored.y) >> pair % 4 * 8;
    dequantized[pair / 4].words[pair % 4] =
        cvt_rn_x2_f32(Element{}, float_of_e2m1(byte >> 4) * scale, float_of_e2m1(byte) * scale);
  }
}

// Dequantizes the first `kDims` elements of every row, 16 at a time.
template <int kDims>
__device__ inline void dequant_tokens(const unsigned char* stage, const BlockScales& scales,
                                      unsigned char* tokens) {
  constexpr int kScaleGroups = kDims / 16;
#pragma unroll 2
  for (int first = 0; first < kBlockN * kScaleGroups; first += kWarpLanes) {
    const int group_idx = first + lane_index();
    const int token = group_idx / kScaleGroups;
    const int scale_group = group_idx % kScaleGroups;
    if (token >= kBlockN) continue;
    Chunk dequantized[2];
    dequant_elements(StoredToken{}, stage + token * kStageRowBytes, scales, token, scale_group,
                     dequantized);
    Chunk* target =
        reinterpret_cast<Chunk*>(tokens + token * kRowBytes + scale_group * 2 * kChunkBytes);
    target[0] = dequantized[0];
    target[1] = dequantized[1];
  }
}

// Waits for the next stage of this warp, dequantizes the first `kDims` elements of its rows if need
// be, and issues the copy into the stage that is free by then. Gets the token scale of this lane.
template <int kDims>
__device__ inline unsigned char* next_kv(const Params& params, const WorkItem& work, int stage_idx,
                                         int kv_block, KvLoader& loader, float& scale,
                                         SharedMemoryPlan& smem) {
  cp_async_wait_group<kStagesAhead - 1>();
  __syncwarp();  // the stage is visible to all lanes, and all are done with the previous one
  if constexpr (kHasTokenScales) scale = token_scale_of(stage_ptr(smem, stage_idx));
  const BlockScales scales =
      scales_of(params, work, stage_idx, kv_block,
                kIsSparse ? sparse_block_of(smem, stage_idx).pages : loader.table_of(stage_idx));
  dequant_tokens<kDims>(stage_ptr(smem, stage_idx), scales, tokens_of(smem, stage_idx));
  __syncwarp();  // the dequantized block is complete, and its stage is free
  loader.load_next(smem);
  return tokens_of(smem, stage_idx);
}

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    gqa_sm80(const __grid_constant__ Params params) {
  SharedMemoryPlan& smem = shared_memory<SharedMemoryPlan>();
  const WorkItem cta_work = find_work_item(params);  // includes pdl_wait
  if (cta_work.rows <= 0) return;
  if (threadIdx.x == 0) smem.work = cta_work;
  __syncthreads();

  const WorkItem& work = smem.work;
  KvLoader loader(params, work);
#pragma unroll 1
  for (int stage = 0; stage < kStagesAhead; ++stage) loader.load_next(smem);
  load_q(params, work, smem);
  __syncthreads();

  QueryFragments query(smem);
  Softmax softmax(params);
  Output output;
  clear_fragments(output);
  int stage_idx = 0;
#pragma unroll 1
  for (int kv_block = work.first_kv_block + warp_index(); kv_block < work.end_kv_block;
       kv_block += kWarps) {
    const int first_token = kv_block * kBlockN;
    const bool has_boundary = !kIsSparse && (first_token < work.unmasked_kv_begin ||
                                             first_token + kBlockN > work.unmasked_kv_end);
    float scale;
    unsigned char* keys =
        next_kv<kHeadDim>(params, work, stage_idx++, kv_block, loader, scale, smem);
    const u32 attended = kIsSparse ? sparse_mask(sparse_block_of(smem, stage_idx - 1)) : 0;
    Scores scores;
    qk_gemm(smem, query, keys, scores);
    if constexpr (kHasTokenScales) multiply_by_tokens(scores, scale);
    softmax.scale_and_mask(params, work, first_token, has_boundary, attended, scores);
    if (softmax.exceeds_threshold(scores)) softmax.update_row_max(scores, output);
    Probabilities probabilities;
    if constexpr (!kHasTokenScales) softmax.compute_probabilities(scores, probabilities);

    unsigned char* values =
        next_kv<kSliceDims>(params, work, stage_idx++, kv_block, loader, scale, smem);
    if constexpr (kHasTokenScales)
      softmax.compute_scaled_probabilities(scores, scale, probabilities, output);
    if (has_boundary)
      pv_gemm_boundary(params, work, first_token, probabilities, values, smem, output);
    pv_gemm(probabilities, values, output);
  }

  pdl_launch_dependents();
  cp_async_wait_group<0>();
  softmax.publish(smem);
  if constexpr (kBatchInvariant) {
    if (work.split_idx == 0 && work.slice == 0)
      store_row_splits(params, work.rows, num_splits_of(params, work),
                       [&](int row) { return work.global_row(params, row); });
  }
  if constexpr (kHasTokenScales) multiply_output(output, softmax.value_scaling.inverse());
  combine_warps(smem, output);
  finish_rows(params, work, smem);
  store_output(params, work, smem);
}
