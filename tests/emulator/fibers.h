// The threads of a CTA on one thread of the CPU: every thread is a fiber, warps run in random
// order, and lanes of a warp give way to each other wherever they work together. Precedes the
// kernel.
#include <math.h>
#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __noinline__
#define __global__
#define __shared__
#define __align__(x)
#define __launch_bounds__(...)
#define __forceinline__ inline
#define __grid_constant__
#define __builtin_assume(x)

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
static uint2 make_uint2(unsigned a, unsigned b) { return {a, b}; }
static float2 make_float2(float a, float b) { return {a, b}; }
static float4 make_float4(float a, float b, float c, float d) { return {a, b, c, d}; }

template <typename T>
static T max(T a, T b) {
  return a > b ? a : b;
}
template <typename T>
static T min(T a, T b) {
  return a < b ? a : b;
}

// What is wrong with a kernel ends the launch, with a message.
inline char complaint[256];
inline jmp_buf launcher;
[[noreturn]] static void complain(const char* what, long number) {
  snprintf(complaint, sizeof complaint, "%s: %ld", what, number);
  longjmp(launcher, 1);
}

constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 256 * 1024;
// From stack to stack: their ends, which are in use, lie in different sets of the caches.
constexpr size_t kStackStride = kStackBytes + 4096 + 192;
constexpr int kLanes = 32;

// A cp.async of a thread, in its group.
struct AsyncCopy {
  unsigned target;
  const void* source;
  unsigned count;  // bytes that it reads; the rest of `size` become zero
  unsigned size;
  int group;
};

struct Fiber {
  jmp_buf place;
  ucontext_t context;
  char* stack;
  bool is_started;
  bool is_done;
  bool has_waited;  // for the kernel before
  bool (*is_ready)(const void*);  // whether what it waits for is so; none if it waits for a turn
  const void* condition;
  unsigned idle_since;  // of a first lane: the event after which its whole warp waits
  int async_groups;  // that it has committed
  std::vector<AsyncCopy> async_copies;  // under way
  void* result;  // of the instruction of several threads that it has come to
};

inline Fiber* fibers;  // of the block that runs
inline jmp_buf scheduler;
inline int current;  // thread
inline bool has_progress;
inline unsigned events = 1;  // after which a condition may be true
static void note_event() {
  ++events;
  has_progress = true;
}
unsigned chance();

struct Index {
  unsigned x, y, z;
};
inline Index blockIdx, gridDim;
#define threadIdx (Index{static_cast<unsigned>(current), 0, 0})

// The dynamic shared memory of the block that runs.
constexpr unsigned kMaxSharedBytes = 232448;
inline unsigned char* bytes;

static void give_way() {
  if (_setjmp(fibers[current].place) == 0) _longjmp(scheduler, 1);
}

static void end_thread() {
  fibers[current].is_done = true;
  _longjmp(scheduler, 1);
}

template <typename Condition>
static void wait_until(const Condition& is_true) {
  Fiber& fiber = fibers[current];
  fiber.condition = &is_true;
  fiber.is_ready = [](const void* condition) {
    return (*static_cast<const Condition*>(condition))();
  };
  if (!is_true()) give_way();
  fiber.is_ready = nullptr;
  has_progress = true;
}

// Threads meet: the last one that comes may do something for all.
struct Meeting {
  int arrived;
  unsigned generation;
};
inline Meeting meetings[kMaxThreads / kLanes];

template <typename Action>
static void meet_at(Meeting& meeting, int threads, const Action& action) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == threads) {
    action();
    meeting = {0, generation + 1};
    note_event();
    return;
  }
  wait_until([&] { return meeting.generation != generation; });
}

template <typename Action>
static void meet(const Action& action) {
  meet_at(meetings[current / kLanes], kLanes, action);
}
static void meet() {
  meet([] {});
}

// What a lane shows to the others of its warp, in one of two places by turns: it may show what is
// next while others still read.
struct Shown {
  uint32_t words[8];
};
inline Shown* shown;  // by each thread of the block that runs, twice kMaxThreads

static int lane() { return current % kLanes; }
static Shown* shown_by_warp(int warp) {
  return shown + meetings[warp].generation % 2 * kMaxThreads + warp * kLanes;
}

// Returns what all lanes show.
template <typename T>
static const Shown* show(const T& value) {
  static_assert(sizeof(T) <= sizeof(Shown));
  Shown* const lanes = shown_by_warp(current / kLanes);
  memcpy(lanes[lane()].words, &value, sizeof value);
  meet();
  return lanes;
}

template <typename T>
static T exchange(T value, int from) {
  T result;
  memcpy(&result, show(value)[from].words, sizeof result);
  return result;
}
template <typename T>
static T __shfl_sync(unsigned, T value, int from) {
  return exchange(value, from % kLanes);
}
template <typename T>
static T __shfl_xor_sync(unsigned, T value, int mask) {
  return exchange(value, lane() ^ mask);
}
template <typename T>
static T __shfl_up_sync(unsigned, T value, int lanes) {
  return exchange(value, lane() >= lanes ? lane() - lanes : lane());
}
static unsigned __ballot_sync(unsigned, bool vote) {
  const Shown* const lanes = show(unsigned{vote});
  unsigned votes = 0;
  for (int other = 0; other < kLanes; ++other) votes |= lanes[other].words[0] << other;
  return votes;
}
static bool __any_sync(unsigned, bool vote) { return __ballot_sync(~0u, vote) != 0; }
static void __syncwarp() { meet(); }

static int __popc(unsigned word) { return __builtin_popcount(word); }
static int __ffs(int value) { return __builtin_ffs(value); }
static float __fmul_rn(float a, float b) { return a * b; }  // compiled without fused products
static float __fadd_rn(float a, float b) { return a + b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fsqrt_rn(float a) { return sqrtf(a); }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static float __fdividef(float a, float b) { return a / b; }
#define __log2f log2f

template <typename To, typename From>
static To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
static unsigned __float_as_uint(float value) { return same_bits<unsigned>(value); }
static float __uint_as_float(unsigned value) { return same_bits<float>(value); }

static unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned from = selector >> 4 * i & 7;
    result |= static_cast<unsigned>(both >> 8 * from & 0xff) << 8 * i;
  }
  return result;
}

static size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - bytes;
}

// What grid.h has: compiled once, it shares the variables of these headers with each kernel.
inline void (*run_kernel)();
void run_warp(int warp);
const char* launch(int blocks, int threads, int seed, char* stacks);

// Nothing else is seen outside of its library, whose variables would be one for all libraries.
#define CALLED_FROM_PYTHON extern "C" __attribute__((visibility("default")))
