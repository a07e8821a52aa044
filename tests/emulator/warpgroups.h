// More instructions: wgmma, copies by threads, and barriers of
// the whole block. Follows instructions.h.

inline int block_threads;  // as the kernel was launched

static void __syncthreads() { barrier_sync(0, block_threads); }
static bool __all_sync(unsigned mask, bool vote) { return !__any_sync(mask, !vote); }
static int __reduce_add_sync(unsigned, int value) {
  const Shown* const lanes = show(value);
  u32 sum = 0;
  for (int other = 0; other < kLanes; ++other) sum += lanes[other].words[0];
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
static void store_matrices(u32 address, const std::array<u32, 4>& d, bool is_transposed) {
  if (address % 16 != 0 || address >= kMaxSharedBytes) complain("bad row of stmatrix", address);
  const Shown* const lanes = show(d);
  note_write(address);
  const int row = lane() % 8;
  for (int column = 0; column < 8; ++column) {
    const int along = is_transposed ? row : column;
    const int across = is_transposed ? column : row;
    const u16 element = half_of(lanes[across * 4 + along / 2].words[lane() / 8], along % 2);
    memcpy(bytes + address + column * 2, &element, 2);
  }
}
static void stmatrix_x4(u32 address, u32 a, u32 b, u32 c, u32 d) {
  store_matrices(address, std::array{a, b, c, d}, false);
}
static void stmatrix_x4_trans(u32 address, u32 a, u32 b, u32 c, u32 d) {
  store_matrices(address, std::array{a, b, c, d}, true);
}

constexpr int kGroupThreads = 128;
inline Meeting group_meetings[kMaxThreads / kGroupThreads];

static void wgmma_fence() {}
static void wgmma_commit_group() {}
template <int>
static void wgmma_wait_group() {}
template <int kCount>
static void wgmma_fence_operand(float (&)[kCount]) {}
template <int kCount>
static void wgmma_fence_operand(u32 (&)[kCount]) {}

// Where operand a is; in shared memory it has rows along k, or transposed.
enum class Place { kRegisters, kRows, kTransposed };

// The last thread that comes multiplies for its warpgroup, in grid.h.
template <typename T>
void multiply_group(T type, int columns, Place place, bool is_b_transposed);
template <typename T, int kCount>
static void wgmma(T type, float (&d)[kCount], Place place, const void* a, u64 b,
                  bool is_b_transposed, int accumulates) {
  u32* const own = shown_by_warp(current / kLanes)[lane()].words;
  memcpy(own, a, place == Place::kRegisters ? 4 * sizeof(u32) : sizeof(u64));
  memcpy(own + 4, &b, sizeof b);
  own[6] = accumulates != 0;
  fibers[current].result = d;
  meet_at(group_meetings[current / kGroupThreads], kGroupThreads,
          [=] { multiply_group(type, kCount * 2, place, is_b_transposed); });
}
template <typename T, int kCount>
static void wgmma_mma(T type, float (&d)[kCount], u64 a, u64 b, int accumulates) {
  wgmma(type, d, Place::kRows, &a, b, false, accumulates);
}
template <typename T, int kCount>
static void wgmma_mma_trans_a(T type, float (&d)[kCount], u64 a, u64 b, int accumulates) {
  wgmma(type, d, Place::kTransposed, &a, b, false, accumulates);
}
template <typename T, int kCount>
static void wgmma_mma_trans_b(T type, float (&d)[kCount], u64 a, u64 b, int accumulates) {
  wgmma(type, d, Place::kRows, &a, b, true, accumulates);
}
template <typename T, int kCount>
static void wgmma_mma(T type, float (&d)[kCount], const u32* a, u64 b, int accumulates) {
  wgmma(type, d, Place::kRegisters, a, b, false, accumulates);
}
template <typename T, int kCount>
static void wgmma_mma_trans_b(T type, float (&d)[kCount], const u32* a, u64 b, int accumulates) {
  wgmma(type, d, Place::kRegisters, a, b, true, accumulates);
}
