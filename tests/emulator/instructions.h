// What the wrappers of templates/ptx do, for one block at a time. Follows common/types.cuh.

#include "fences.h"

static float float_of(Fp16, u16 bits) { return static_cast<float>(same_bits<_Float16>(bits)); }
static float float_of(Bf16, u16 bits) { return __uint_as_float(static_cast<u32>(bits) << 16); }
static u16 bits_of(Fp16, float value) { return same_bits<u16>(static_cast<_Float16>(value)); }
static u16 bits_of(Bf16, float value) {
  const u32 bits = __float_as_uint(value);
  return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
template <typename T>
static float cvt_f32(T type, u16 bits) {
  return float_of(type, bits);
}
template <typename T>
static u32 cvt_rn_x2_f32(T type, float high, float low) {
  return bits_of(type, low) | static_cast<u32>(bits_of(type, high)) << 16;
}

// All numbers in e4m3, worked out once: nothing else is asked for as often.
static const auto numbers_in_e4m3 = [] {
  std::array<float, 256> numbers;
  for (int bits = 0; bits < 256; ++bits) {
    const int exponent = bits >> 3 & 15;
    const float fraction = (bits & 7) / 8.0f;
    const float size = exponent > 0 ? ldexpf(1 + fraction, exponent - 7) : ldexpf(fraction, -6);
    numbers[bits] = (bits & 0x7f) == 0x7f ? NAN : bits >> 7 ? -size : size;
  }
  return numbers;
}();
static float float_of_e4m3(int bits) { return numbers_in_e4m3[bits]; }
static u16 e4m3_of(float value) {
  if (value != value) return 0x7f;
  const float size = fminf(fabsf(value), 448.0f);
  const int exponent = size < 0x1p-6f ? -6 : ilogbf(size);  // of its unit, times 8
  const int units = static_cast<int>(nearbyintf(ldexpf(size, 3 - exponent)));
  return (exponent + 6) * 8 + units | (signbit(value) ? 0x80 : 0);
}
static u32 cvt_rn_f16x2_e4m3x2(u16 pair) {
  return cvt_rn_x2_f32(Fp16{}, float_of_e4m3(pair >> 8), float_of_e4m3(pair & 0xff));
}
static u32 cvt_rn_f16x2_e4m3x2_high(u32 word) { return cvt_rn_f16x2_e4m3x2(word >> 16); }
static u16 cvt_rn_satfinite_e4m3x2_f32(float high, float low) {
  return e4m3_of(low) | e4m3_of(high) << 8;
}
static u32 add_f16x2(u32 a, u32 b) {
  const float low = cvt_f32(Fp16{}, a & 0xffff) + cvt_f32(Fp16{}, b & 0xffff);
  return cvt_rn_x2_f32(Fp16{}, cvt_f32(Fp16{}, a >> 16) + cvt_f32(Fp16{}, b >> 16), low);
}
static u32 mul_f16x2(u32 a, u32 b) {
  const float low = cvt_f32(Fp16{}, a & 0xffff) * cvt_f32(Fp16{}, b & 0xffff);
  return cvt_rn_x2_f32(Fp16{}, cvt_f32(Fp16{}, a >> 16) * cvt_f32(Fp16{}, b >> 16), low);
}
static u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  const auto fma_of = [&](int shift) {
    const auto number = [&](u32 pair) { return cvt_f32(Bf16{}, pair >> shift & 0xffff); };
    return fmaf(number(a), number(b), number(c));
  };
  return cvt_rn_x2_f32(Bf16{}, fma_of(16), fma_of(0));
}
static u32 max_f16x2(u32 a, u32 b) {
  const float low = fmaxf(cvt_f32(Fp16{}, a & 0xffff), cvt_f32(Fp16{}, b & 0xffff));
  return cvt_rn_x2_f32(Fp16{}, fmaxf(cvt_f32(Fp16{}, a >> 16), cvt_f32(Fp16{}, b >> 16)), low);
}
static u32 max_u16x2(u32 a, u32 b) {
  return max(a & 0xffff, b & 0xffff) | max(a >> 16, b >> 16) << 16;
}
static float ex2_approx(float value) { return exp2f(value); }
static float rcp_approx(float value) { return 1.0f / value; }

// Order and hints: fibers see everything at once.
static void fence_acq_rel_cta() {}
static void fence_mbarrier_init() {}
static void griddepcontrol_wait() { fibers[current].has_waited = true; }
static void griddepcontrol_launch_dependents() {}
static void prefetch_tensormap(const void*) {}
static void prefetch_l2(const void*) {}
static void prefetch_l2_evict_last(const void*) {}
template <int>
static void setmaxnreg_dec() {}
template <int>
static void setmaxnreg_inc() {}

template <typename T>
static T load(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0) complain("misaligned load", sizeof(T));
  T value;
  memcpy(&value, address, sizeof value);
  return value;
}
// Before a thread has waited, the kernel before may not have written what it will; every other
// block is too early.
static int ld_relaxed_gpu(const int* address) {
  const int value = load<int>(address);
  const bool is_early = !fibers[current].has_waited && blockIdx.x % 2 != 0;
  return is_early && chance() % 4 == 0 ? static_cast<int>(chance()) : value;
}
// What others are counting may be anything.
static u32 ld_relaxed_gpu(const u32* address) {
  const u32 value = load<u32>(address);
  return chance() % 4 == 0 ? static_cast<u32>(chance()) : value;
}
static float2 ld_global_cg_v2_f32(const void* address) { return load<float2>(address); }
static float4 ld_global_cg_v4_f32(const void* address) { return load<float4>(address); }
static u32 atom_inc_acq_rel_gpu(u32* address, u32 most) {
  const u32 before = *address;
  *address = before >= most ? 0 : before + 1;
  return before;
}
static u32 atom_add_acq_rel_gpu(u32* address, u32 value) {
  const u32 before = *address;
  *address += value;
  return before;
}

// Instructions of a warp: the last lane that comes does for all what grid.h has.
template <typename Operands, typename Action>
static void run_by_warp(const Operands& operands, void* result, const Action& action) {
  memcpy(shown_by_warp(current / kLanes)[lane()].words, &operands, sizeof operands);
  fibers[current].result = result;
  meet(action);
}

void load_matrices(bool is_transposed);
static void ldmatrix_x4(u32 (&d)[4], u32 address) {
  run_by_warp(address, d, [] { load_matrices(false); });
}
static void ldmatrix_x4_trans(u32 (&d)[4], u32 address) {
  run_by_warp(address, d, [] { load_matrices(true); });
}

template <typename T>
void multiply_warp(T type);
template <typename T>
static void mma_m16n8k16(T type, float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  run_by_warp(std::array{a[0], a[1], a[2], a[3], b0, b1}, d, [=] { multiply_warp(type); });
}

static u16 half_of(u32 word, int half) { return static_cast<u16>(word >> 16 * half); }

static u32 movmatrix_trans(u32 word) {
  const Shown* const lanes = show(word);
  u32 result = 0;
  for (int k = 0; k < 2; ++k) {
    const int row = lane() % 4 * 2 + k;
    const int column = lane() / 4;
    const u32 from = lanes[row * 4 + column / 2].words[0];
    result |= static_cast<u32>(half_of(from, column % 2)) << 16 * k;
  }
  return result;
}

// Barriers in shared memory, by their addresses.
struct Mbarrier {
  int count;
  int pending;
  long bytes;  // that have been announced and have not come
  unsigned phase;
};
Mbarrier& mbarrier_at(u32 address);
void mbarrier_init(u32 address, u32 count);
static void complete(Mbarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes > 0) return;
  ++barrier.phase;
  barrier.pending = barrier.count;
  note_event();
}
static void mbarrier_arrive_expect_tx(u32 address, u32 more) {
  Mbarrier& barrier = mbarrier_at(address);
  if (barrier.pending == 0) complain("an arrival too many", address);
  barrier.bytes += more;
  --barrier.pending;
  complete(barrier);
}
// Any lane, but one. Lanes wait for each other.
static bool elect_sync() {
  meet();
  return lane() == kLanes - 1;
}
static void mbarrier_arrive(u32 address) { mbarrier_arrive_expect_tx(address, 0); }
static void mbarrier_arrive_after(u32 address, u32) { mbarrier_arrive(address); }
static void mbarrier_wait(u32 address, u32 parity) {
  const Mbarrier& barrier = mbarrier_at(address);
  wait_until([&] { return barrier.phase % 2 != parity; });
}

// Barriers by number.
inline Meeting barriers[16];

static bool arrive_at_barrier(int barrier, int threads) {
  Meeting& meeting = barriers[barrier];
  if (++meeting.arrived < threads) return false;
  meeting = {0, meeting.generation + 1};
  note_event();
  return true;
}
static void barrier_arrive(int barrier, int threads) { arrive_at_barrier(barrier, threads); }
static void barrier_sync(int barrier, int threads) {
  const unsigned generation = barriers[barrier].generation;
  if (arrive_at_barrier(barrier, threads)) return;
  wait_until([=] { return barriers[barrier].generation != generation; });
}

// A tensor map as tests/emulator/emulated.py packs it; sizes and coordinates from the innermost.
struct Map {
  unsigned char* base;
  int element_bytes;
  int box[5];
  int sizes[5];
  int is_plain;  // not swizzled
  int64_t strides[4];
};
struct Copy {
  u32 target;
  const Map* map;
  u32 barrier;
  int at[5];
};
inline std::vector<Copy> copies;  // under way

// Copies a box, swizzled by its lines; or poisons its place, which must not be read meanwhile.
static u32 copy_box(const Copy& copy, bool is_poison) {
  const Map& map = *copy.map;
  const u32 line = map.box[0] * map.element_bytes;
  const u32 rows = map.is_plain ? 0 : line / 16 - 1;
  if (copy.target % (128 * (rows + 1)) != 0) complain("misaligned box", copy.target);
  const int lines = map.box[1] * map.box[2] * map.box[3] * map.box[4];
  for (int index = 0; index < lines; ++index) {
    int64_t at[5] = {copy.at[0]};
    int64_t offset = 0;
    bool is_inside = true;
    for (int dim = 1, rest = index; dim < 5; rest /= map.box[dim], ++dim) {
      at[dim] = copy.at[dim] + rest % map.box[dim];
      is_inside &= at[dim] >= 0 && at[dim] < map.sizes[dim];
      offset += at[dim] * map.strides[dim - 1];
    }
    for (u32 chunk = 0; chunk < line; chunk += 16) {
      const u32 flat = copy.target + index * line + chunk;
      const u32 place = flat ^ (flat >> 7 & rows) << 4;
      chunk_writes[place / 16] = {};
      unsigned char* to = bytes + place;
      const int64_t first = copy.at[0] * int64_t{map.element_bytes} + chunk;
      const int64_t inside = int64_t{map.sizes[0]} * map.element_bytes - first;
      memset(to, is_poison ? 0x7f : 0, 16);
      if (is_poison || !is_inside || inside <= 0) continue;
      memcpy(to, map.base + offset + first, inside < 16 ? inside : 16);
    }
  }
  return lines * line;
}
static u64 createpolicy_evict_first() { return 0; }
static u64 createpolicy_evict_normal() { return 0; }
static void cp_async_bulk_tensor(u32 target, const void* map, u32 barrier, u64, int x, int y, int z,
                                 int w, int v) {
  copies.push_back({target, static_cast<const Map*>(map), barrier, {x, y, z, w, v}});
  if (x * copies.back().map->element_bytes % 16 != 0)
    complain("a box at no multiple of 16 bytes", x);
  copy_box(copies.back(), true);
  has_progress = true;
}

static void cp_async_bulk_tensor(u32 target, const void* map, u32 barrier, u64 policy, int x, int y,
                                 int z, int w) {
  cp_async_bulk_tensor(target, map, barrier, policy, x, y, z, w, 0);
}

inline unsigned copy_rounds;  // of warps that a copy takes, on average

// Some of the copies under way may arrive, in any order.
static void let_copies_arrive() {
  while (!copies.empty() && chance() % (copy_rounds + 1) == 0) {
    const size_t which = chance() % copies.size();
    const Copy copy = copies[which];
    copies.erase(copies.begin() + which);
    Mbarrier& barrier = mbarrier_at(copy.barrier);
    barrier.bytes -= copy_box(copy, false);
    complete(barrier);
    has_progress = true;
  }
}
