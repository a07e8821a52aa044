// Online softmax of the scorer, over the rows of S^T. Needs SharedMemory, Item,
// roles/mla_hopper_narrow/accumulators.cuh, ptx/barrier.cuh, ptx/ex2.cuh, ptx/stmatrix.cuh.

// A thread has of eight neighbouring rows two, and of a warp's sixteen tokens g and g + 8 with
// g = lane / 4.
using Scores = float[kRows / 2];

struct Softmax {
  SharedMemory& shared;
  float sum[kOwnRows];  // of the probabilities of this thread's tokens

  __device__ explicit Softmax(SharedMemory& shared) : shared(shared) {
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) sum[r] = 0.0f;
  }

  // Before the first block of an item, whose query is here; `scale` makes scores log2 units.
  __device__ void begin(float scale) const {
    const int row = fresh_thread() % kScorerThreads;
    if (row < kRows) {
      shared.factor[row] = scale * shared.query_scale[row];
      shared.ones[row] = 1.0f;
      shared.reference[row] = -kLargest;
    }
    barrier_sync(kScorerBarrier, kScorerThreads);
  }

  // What this thread's rows have in one of the tables of rows: two neighbours in every eight. Read
  // by its index once; to ask for that again takes longer than all else.
  struct OfRows {
    const float* first;

    __device__ explicit OfRows(const float* table) : first(table + own_row(0)) {}

    __device__ float2 of_group(int group) const {
      return *reinterpret_cast<const float2*>(first + group * 8);
    }
  };

  // Turns scores into probabilities for the consumers, in shared memory: relative to references
  // that move if one is too large for them.
  __device__ void take(const Scores& scores, bool are_scaled, int stage, bool is_first) {
    float part[kOwnRows];
    bool moves = write(scores, are_scaled, stage, part);
    moves = barrier_red_or(kScorerBarrier, kScorerThreads, moves) != 0;
    if (moves) {
      move_references(scores, are_scaled, stage);
      write(scores, are_scaled, stage, part);
      barrier_sync(kScorerBarrier, kScorerThreads);
    }
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) sum[r] += part[r];
    if (fresh_thread() % kScorerThreads != 0) return;
    shared.rescales[stage] = moves && !is_first;
    arrive_at(shared.probabilities_full[stage]);
  }

  // Writes probabilities relative to the references as they are; says whether any is so large that
  // references must move, and adds them up. All are computed before the first is written: reading
  // what others need would wait for that.
  __device__ bool write(const Scores& scores, bool are_scaled, int stage,
                        float (&part)[kOwnRows]) const {
    const OfRows references(shared.reference);
    const OfRows factors(are_scaled ? shared.ones : shared.factor);
    float largest = 0.0f;
    u32 pairs[kRowGroups][2];  // of two neighbouring rows, for tokens g and g + 8
#pragma unroll
    for (int group = 0; group < kRowGroups; ++group) {
      const float2 reference = references.of_group(group);
      const float2 factor = factors.of_group(group);
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Rounded, never fused: equal scores must have equal distances from a reference.
        const float score = __fmul_rn(scores[group * 4 + i], i % 2 == 0 ? factor.x : factor.y);
        p[i] = ex2_approx(score - (i % 2 == 0 ? reference.x : reference.y));
        largest = fmaxf(largest, p[i]);
      }
      part[group * 2] = p[0] + p[2];
      part[group * 2 + 1] = p[1] + p[3];
      pairs[group][0] = cvt_rn_x2_f32(Element{}, p[1], p[0]);
      pairs[group][1] = cvt_rn_x2_f32(Element{}, p[3], p[2]);
    }
    // Matrices: tokens 0 to 7 and 8 to 15 of the warp, for 8 rows and for the next 8.
    const int lane = fresh_lane();
    const int chunk = fresh_warp() % kScorerWarps * 2 + lane / 8 % 2;
    const u32 address = shared_address(shared.probabilities[stage]) +
                        swizzled_offset<kTileRowBytes>(lane / 16 * 8 + lane % 8, chunk);
#pragma unroll
    for (int group = 0; group < kRowGroups; group += 2) {
      stmatrix_x4_trans(address + group * 8 * kTileRowBytes, pairs[group][0], pairs[group][1],
                        pairs[group + 1][0], pairs[group + 1][1]);
    }
    fence_proxy_async();
    return largest > kMostProbability;
  }

  // Moves the reference of every row to its maximum, if that is larger.
  __device__ void move_references(const Scores& scores, bool are_scaled, int stage) {
    const OfRows factors(are_scaled ? shared.ones : shared.factor);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const float2 both = factors.of_group(r / 2);
      const float factor = r % 2 == 0 ? both.x : both.y;
      const float maximum =
          maximum_of_lanes(fmaxf(__fmul_rn(scores[r / 2 * 4 + r % 2], factor),
                                 __fmul_rn(scores[r / 2 * 4 + 2 + r % 2], factor)));
      if (fresh_lane() < 4) own_warp_rows()[own_row(r)] = maximum;
    }
    barrier_sync(kScorerBarrier, kScorerThreads);
    const int row = fresh_thread() % kScorerThreads;
    if (row < kRows) {
      float next = shared.reference[row];
#pragma unroll
      for (int warp = 0; warp < kScorerWarps; ++warp) {
        if (shared.warp_rows[warp][row] > next) next = shared.warp_rows[warp][row];
      }
      shared.rescale[stage][row] = ex2_approx(shared.reference[row] - next);
      shared.reference[row] = next;
    }
    barrier_sync(kScorerBarrier, kScorerThreads);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) sum[r] *= shared.rescale[stage][own_row(r)];
  }

  // Leaves what the rows have come to, for the consumers.
  __device__ void leave_rows(int slot) const {
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const float total = total_of_lanes(sum[r]);
      if (fresh_lane() < 4) own_warp_rows()[own_row(r)] = total;
    }
    barrier_sync(kScorerBarrier, kScorerThreads);
    const int row = fresh_thread() % kScorerThreads;
    if (row < kRows) {
      float total = 0.0f;
#pragma unroll
      for (int warp = 0; warp < kScorerWarps; ++warp) total += shared.warp_rows[warp][row];
      shared.row_sum[slot][row] = total;
      shared.row_reference[slot][row] = shared.reference[row];
    }
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.rows_full[slot]);
  }

  __device__ float* own_warp_rows() const { return shared.warp_rows[fresh_warp() % kScorerWarps]; }
};
