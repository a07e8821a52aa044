// More instructions: wgmma, copies by threads, and barriers of
// the whole block. Follows instructions.h.

inline int block_threads;  // as the kernel was launched

static void __syncthreads() { barrier_sync(0, block_threads); }
static bool __all_sync(unsigned mask, bool vote) { return !__any_sync(mask, !vote); }
static int __reduce_add_sync(unsigned, int value) {
  shown[current].words[0] = static_cast<u32>(value);
  meet();
  u32 sum = 0;
  for (int other = 0; other < kLanes; ++other) sum += shown_by(other).words[0];
  meet();
  return static_cast<int>(sum);
}
static unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  for (int lanes = 1; lanes < kLanes; lanes *= 2) {
    const unsigned other = __shfl_xor_sync(mask, value, lanes);
    if (other > value) value = other;
  }
  return value;
}
static int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<u32>(value)); }
static int __float2int_rn(float value) { return static_cast<int>(nearbyintf(value)); }
static int __float2int_rz(float value) { return static_cast<int>(value); }

static u64 mov_b64(u32 low, u32 high) { return static_cast<u64>(high) << 32 | low; }
static void mov_b32(u32&) {}
static void mov_b64(u64&) {}
static u32 mov_tid_x() { return threadIdx.x; }

static void exit_if(u32 word) {
  if (word != 0) end_thread();
}

inline u32 any_of_barrier[16];
static u32 barrier_red_or(int barrier, int threads, u32 value) {
  any_of_barrier[barrier] |= value != 0;
  barrier_sync(barrier, threads);
  const u32 any = any_of_barrier[barrier];
  barrier_sync(barrier, threads);
  any_of_barrier[barrier] = 0;
  barrier_sync(barrier, threads);
  return any;
}
static int __syncthreads_or(int value) { return barrier_red_or(0, block_threads, value); }

// Who looks again and again for what another block does lets it do so.
static u32 ld_acquire_gpu(const u32* address) {
  give_way();
  return *address;
}
static void red_inc_release_gpu(u32* address, u32 most) {
  *address = *address >= most ? 0 : *address + 1;
}
static void red_inc_relaxed_gpu(u32* address, u32 most) { red_inc_release_gpu(address, most); }
static void red_add_relaxed_gpu(u32* address, u32 value) { *address += value; }

// Copies of a thread arrive when it waits for their group; until then their places are poisoned.
static void copy_async(u32 target, const void* source, u32 count, u32 size) {
  if (target % size != 0) complain("misaligned copy", target);
  memset(bytes + target, 0x7f, size);
  note_write(target);
  Fiber& fiber = fibers[current];
  fiber.async_copies.push_back({target, source, count, size, fiber.async_groups});
}
static void cp_async_cg_16(u32 target, const void* source, u32 count) {
  copy_async(target, source, count, 16);
}
static void cp_async_cg_16(u32 target, const void* source, u32 count, u64) {
  copy_async(target, source, count, 16);
}
static void cp_async_ca_8(u32 target, const void* source, u32 count) {
  copy_async(target, source, count, 8);
}
static void cp_async_ca_4(u32 target, const void* source, u32 count) {
  copy_async(target, source, count, 4);
}
static void complete_async_copies(int groups) {
  std::erase_if(fibers[current].async_copies, [=](const AsyncCopy& copy) {
    if (copy.group >= groups) return false;
    memset(bytes + copy.target, 0, copy.size);
    if (copy.count > 0) memcpy(bytes + copy.target, copy.source, copy.count);
    note_write(copy.target);
    return true;
  });
}
static void cp_async_commit_group() { ++fibers[current].async_groups; }
template <int kPending>
static void cp_async_wait_group() {
  complete_async_copies(fibers[current].async_groups - kPending);
}
static void cp_async_mbarrier_arrive_noinc(u32 barrier) {
  complete_async_copies(fibers[current].async_groups + 1);
  mbarrier_arrive(barrier);
}

// Four matrices of 8 x 8, whose rows go where lanes 8 i and on point.
static void store_matrices(u32 address, const u32 (&d)[4], bool is_transposed) {
  if (address % 16 != 0 || address >= kMaxSharedBytes) complain("bad row of stmatrix", address);
  memcpy(shown[current].words, d, sizeof d);
  meet();
  note_write(address);
  const int row = lane() % 8;
  for (int column = 0; column < 8; ++column) {
    const int along = is_transposed ? row : column;
    const int across = is_transposed ? column : row;
    const u16 element = half_of(shown_by(across * 4 + along / 2).words[lane() / 8], along % 2);
    memcpy(bytes + address + column * 2, &element, 2);
  }
  meet();
}
static void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  store_matrices(address, {a, b, c, d}, false);
}
static void stmatrix_x4_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
  store_matrices(address, {a, b, c, d}, true);
}

// A warpgroup multiplies when all its threads have come, and goes on when all have multiplied.
constexpr int kGroupThreads = 128;
inline Meeting group_meetings[kMaxThreads / kGroupThreads];

static void meet_group() {
  Meeting& meeting = group_meetings[current / kGroupThreads];
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == kGroupThreads) {
    meeting = {0, generation + 1};
    has_progress = true;
    return;
  }
  wait_until([&] { return meeting.generation != generation; });
}

static void wgmma_fence() {}
static void wgmma_commit_group() {}
template <int>
static void wgmma_wait_group() {}
template <int kCount>
static void wgmma_fence_operand(float (&)[kCount]) {}
template <int kCount>
static void wgmma_fence_operand(u32 (&)[kCount]) {}

// Elements of the tensor cores, and how many of them a step multiplies.
static float float_of(E4m3, u16 bits) { return float_of_e4m3(bits & 0xff); }
template <typename T>
constexpr u32 kElementBytes = 2;
template <>
constexpr u32 kElementBytes<E4m3> = 1;
template <typename T>
constexpr int kDepth = 32 / kElementBytes<T>;

// An operand in shared memory, in rows of 128 bytes or 64 that are swizzled: along k, or
// transposed.
struct Operand {
  u32 base;
  u32 leading_bytes;
  u32 group_distance;
  u32 row_bytes;
  bool is_transposed;

  Operand(u64 descriptor, bool is_transposed)
      : base((descriptor & 0x3fff) << 4),
        leading_bytes((descriptor >> 16 & 0x3fff) << 4),
        group_distance((descriptor >> 32 & 0x3fff) << 4),
        row_bytes(descriptor >> 62 == 1 ? 128 : 64),
        is_transposed(is_transposed) {
    const u32 kind = descriptor >> 62;
    if (kind != 1 && (kind != 2 || is_transposed)) complain("a swizzle of another kind", kind);
    if (group_distance != 8 * row_bytes) complain("rows apart", group_distance);
  }

  template <typename T>
  float at(T type, int row, int k) const {
    const u32 line = is_transposed ? k : row;
    const u32 column = is_transposed ? row % 64 : k;
    u32 address =
        base + line / 8 * group_distance + line % 8 * row_bytes + column * kElementBytes<T>;
    if (is_transposed) address += row / 64 * leading_bytes;
    if (address >= kMaxSharedBytes) complain("operand beyond shared memory", address);
    address ^= (address >> 7 & (row_bytes / 16 - 1)) << 4;
    if (is_transposed || address % 16 == 0) require_fence(address);  // once for its 16 bytes
    u16 bits = 0;
    memcpy(&bits, bytes + address, kElementBytes<T>);
    return float_of(type, bits);
  }
};

// Of 16 bits, as they are. Of e4m3 tensor cores cut off each addend below 2^-13 of the largest
// power of two among them.
template <typename T>
static float add_products(T, const float* products, float before) {
  float sum = 0.0f;
  for (int k = 0; k < kDepth<T>; ++k) sum += products[k];
  return before + sum;
}
static float add_products(E4m3, const float* products, float before) {
  float largest = fabsf(before);
  for (int k = 0; k < kDepth<E4m3>; ++k) largest = max(largest, fabsf(products[k]));
  if (largest == 0.0f || !isfinite(largest)) largest = 1.0f;
  const float unit = ldexpf(1.0f, ilogbf(largest) - 13);
  const auto cut = [&](float addend) { return truncf(addend / unit) * unit; };
  float sum = cut(before);
  for (int k = 0; k < kDepth<E4m3>; ++k) sum += cut(products[k]);
  return sum;
}

template <typename T, typename A>
static void multiply(T type, float* d, int count, A a, const Operand& b, int accumulates) {
  float own[2][kDepth<T>];
  for (int row = 0; row < 2; ++row) {
    for (int k = 0; k < kDepth<T>; ++k) own[row][k] = a(lane() / 4 + row * 8, k);
  }
  for (int j = 0; j < count / 4; ++j) {
    for (int column = 0; column < 2; ++column) {
      float products[2][kDepth<T>];
      for (int k = 0; k < kDepth<T>; ++k) {
        const float factor = b.at(type, j * 8 + lane() % 4 * 2 + column, k);
        for (int row = 0; row < 2; ++row) products[row][k] = own[row][k] * factor;
      }
      for (int row = 0; row < 2; ++row) {
        float& element = d[j * 4 + row * 2 + column];
        element = add_products(type, products[row], accumulates ? element : 0.0f);
      }
    }
  }
  meet_group();
}

template <typename T>
static void multiply_shared(T type, float* d, int count, const Operand& a, const Operand& b,
                            int accumulates) {
  meet_group();
  const int first_row = current % kGroupThreads / kLanes * 16;
  multiply(
      type, d, count, [&](int row, int k) { return a.at(type, first_row + row, k); }, b,
      accumulates);
}
template <typename T, int kCount>
static void wgmma_mma(T type, float (&d)[kCount], u64 a, u64 b, int accumulates) {
  multiply_shared(type, d, kCount, {a, false}, {b, false}, accumulates);
}
template <typename T, int kCount>
static void wgmma_mma_trans_a(T type, float (&d)[kCount], u64 a, u64 b, int accumulates) {
  multiply_shared(type, d, kCount, {a, true}, {b, false}, accumulates);
}
template <typename T, int kCount>
static void wgmma_mma_trans_b(T type, float (&d)[kCount], u64 a, u64 b, int accumulates) {
  multiply_shared(type, d, kCount, {a, false}, {b, true}, accumulates);
}
template <typename T>
static void multiply_words(T type, float* d, int count, const u32* a, const Operand& b,
                           int accumulates) {
  memcpy(shown[current].words, a, 4 * sizeof *a);
  meet_group();
  multiply(
      type, d, count,
      [&](int row, int k) {
        const u32 word = shown_by(row % 8 * 4 + k % 8 / 2).words[row / 8 + k / 8 * 2];
        return float_of(type, half_of(word, k % 2));
      },
      b, accumulates);
}
template <typename T, int kCount>
static void wgmma_mma(T type, float (&d)[kCount], const u32* a, u64 b, int accumulates) {
  multiply_words(type, d, kCount, a, {b, false}, accumulates);
}
template <typename T, int kCount>
static void wgmma_mma_trans_b(T type, float (&d)[kCount], const u32* a, u64 b, int accumulates) {
  multiply_words(type, d, kCount, a, {b, true}, accumulates);
}
template <int kCount>
static void wgmma_mma(E4m3 type, float (&d)[kCount], const u32* a, u64 b, int accumulates) {
  memcpy(shown[current].words, a, 4 * sizeof *a);
  meet_group();
  multiply(
      type, d, kCount,
      [&](int row, int k) {
        const u32 word = shown_by(row % 8 * 4 + k % 16 / 4).words[row / 8 + k / 16 * 2];
        return float_of(type, static_cast<u16>(word >> k % 4 * 8));
      },
      Operand(b, false), accumulates);
}
