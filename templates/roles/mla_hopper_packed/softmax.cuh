// Online softmax of the scorer, over the rows of S^T. Needs SharedMemory, scales.cuh,
// roles/mla_hopper_narrow/accumulators.cuh, blocks/swizzle.cuh, ptx/barrier.cuh, ptx/cvt.cuh,
// ptx/ex2.cuh, ptx/fence.cuh, ptx/stmatrix.cuh.

// A thread has of eight neighbouring rows two, and of a warp's sixteen tokens g and g + 8 with
// g = lane / 4.
using Scores = float[kRows / 2];

// Probabilities are fp16: a row's largest is 2^6 when its reference moves, and 2^14 before that is
// so.
constexpr float kReferenceLead = 6.0f;  // log2 units
constexpr float kMostWeight = 0x1p14f;

struct Softmax {
  SharedMemory& shared;

  __device__ explicit Softmax(SharedMemory& shared) : shared(shared) {}

  // Before the first block of an item, whose query is here; `scale` makes scores log2 units.
  __device__ void begin(float scale) const {
    const int row = fresh_thread() % kScorerThreads;
    if (row == 0) shared.units = kFirstUnits;
    if (row < kRows) {
      shared.factor[row] = scale * shared.query_scale[row];
      shared.ones[row] = 1.0f;
      shared.reference[row] = -kLargest;
    }
    barrier_sync(kScorerBarrier, kScorerThreads);
  }

  // What a thread's rows have in one of the tables of rows: two neighbours in every eight.
  struct OfRows {
    const float* first;

    __device__ OfRows(const float* table, const ScorerThread& own)
        : first(table + own.lane % 4 * 2) {}

    __device__ float2 of_group(int group) const {
      return *reinterpret_cast<const float2*>(first + group * 8);
    }
  };

  // Turns scores into probabilities for the consumers, in shared memory: relative to references
  // that move if one is too large for them, as an item's first are. So does the unit by the scales
  // of their values, which have been left in units and are left again if these move.
  __device__ void take(const Scores& scores, const OwnScales& scales, const ScorerThread& own,
                       bool are_scaled, int stage, bool is_first) {
    bool moves = is_first;
    if (!is_first) {
      const bool is_exceeded = scales.exceed(shared.units);
      moves = write(scores, own, are_scaled, stage) || is_exceeded;
      moves = barrier_red_or(kScorerBarrier, kScorerThreads, moves) != 0;
    }
    if (moves) {
      move_references(scores, scales, own, are_scaled, stage);
      scales.leave(shared.tokens[stage], own, shared.units);
      write(scores, own, are_scaled, stage);
    }
    if (own.lane == 0 && own.warp == 0) {
      shared.rescales[stage] = moves && !is_first;
      shared.block_units[stage] = shared.units;
    }
    __syncwarp();
    if (own.lane == 0) arrive_at(shared.probabilities_full[stage]);
  }

  // Writes probabilities relative to the references as they are; says whether any is so large that
  // references must move. All are computed before the first is written: reading what others need
  // would wait for that.
  __device__ bool write(const Scores& scores, const ScorerThread& own, bool are_scaled,
                        int stage) const {
    const OfRows references(shared.reference, own);
    const OfRows factors(are_scaled ? shared.ones : shared.factor, own);
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
      pairs[group][0] = cvt_rn_x2_f32(Fp16{}, p[1], p[0]);
      pairs[group][1] = cvt_rn_x2_f32(Fp16{}, p[3], p[2]);
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
    return largest > kMostWeight;
  }

  // Moves the reference of every row to kReferenceLead below its maximum, if that is larger, and
  // the unit to what the largest scale wants.
  __device__ void move_references(const Scores& scores, const OwnScales& scales,
                                  const ScorerThread& own, bool are_scaled, int stage) {
    const OfRows factors(are_scaled ? shared.ones : shared.factor, own);
#pragma unroll
    for (int r = 0; r < kOwnRows; ++r) {
      const float2 both = factors.of_group(r / 2);
      const float factor = r % 2 == 0 ? both.x : both.y;
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
      float next = shared.reference[row];
#pragma unroll
      for (int warp = 0; warp < kScorerWarps; ++warp) {
        const float wanted = shared.warp_rows[warp][row] - kReferenceLead;
        if (wanted > next) next = wanted;
      }
      const float moved = ex2_approx(shared.reference[row] - next);
      shared.rescale[stage][row] = moved * (next_units / units);
      shared.reference[row] = next;
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
      shared.row_reference[slot][row] = shared.reference[row] - log2_of_power(units);
    }
    __syncwarp();
    if (fresh_lane() == 0) arrive_at(shared.rows_full[slot]);
  }
};
