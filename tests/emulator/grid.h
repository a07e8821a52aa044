// Runs the blocks of a grid beside each other, in random order. Compiled once, for all kernels.
#include <algorithm>
#include <map>
#include <random>

#include "instructions.h"
#include "warpgroups.h"

static std::mt19937 generator;
unsigned chance() { return generator(); }

static std::map<u32, Mbarrier> mbarriers;

Mbarrier& mbarrier_at(u32 address) {
  const auto found = mbarriers.find(address);
  if (found == mbarriers.end()) complain("no barrier was made", address);
  return found->second;
}
void mbarrier_init(u32 address, u32 count) {
  const int arrivals = static_cast<int>(count);
  mbarriers[address] = {arrivals, arrivals, 0, 0};
}

// Follows the headers above, whose functions it defines.
#include "multiply.h"

static void run_thread() {
  run_kernel();
  end_thread();
}

void run_warp(int warp) {
  unsigned& idle_since = fibers[warp * kLanes].idle_since;
  if (idle_since == events) return;
  idle_since = events;
  for (int lane = 0; lane < kLanes; ++lane) {
    current = warp * kLanes + lane;
    Fiber& fiber = fibers[current];
    if (fiber.is_done || (fiber.is_ready && !fiber.is_ready(fiber.condition))) continue;
    idle_since = 0;
    if (_setjmp(scheduler) != 0) continue;
    if (fiber.is_started) _longjmp(fiber.place, 1);
    fiber.is_started = true;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_thread, 0);
    setcontext(&fiber.context);
  }
}

struct alignas(1024) SharedKib {
  u16 numbers[512];
};

// What a block has while others run; `bytes` and the rest are those of the one that does.
struct Block {
  unsigned index;
  bool is_done = false;
  bool is_placed = false;
  unsigned late;  // it begins when it has been passed over so often
  unsigned rounds;  // that a copy takes
  std::vector<Fiber> threads;
  std::vector<int> warps;
  std::vector<unsigned> slowness;  // of each warp: it runs in one of so many turns
  std::vector<SharedKib> shared;
  std::vector<Shown> words;
  std::vector<Copy> under_way;
  std::vector<ChunkWrite> writes;
  std::vector<unsigned> fenced;
  std::map<u32, Mbarrier> by_address;
  Meeting by_number[16] = {};
  Meeting of_warps[kMaxThreads / kLanes] = {};
  Meeting of_groups[kMaxThreads / kGroupThreads] = {};
  u32 votes[16] = {};

  Block(unsigned index, int count, char* stacks)
      : index(index),
        late(chance() % 4 == 0 ? chance() % 400 : 0),
        rounds(1u << chance() % 8),
        threads(count),
        warps(count / kLanes),
        slowness(count / kLanes),
        shared(kMaxSharedBytes / sizeof(SharedKib)),
        words(2 * kMaxThreads),
        writes(kMaxSharedBytes / 16),
        fenced(count) {
    for (SharedKib& kib : shared) {
      for (u16& number : kib.numbers) number = 0x7fff;  // NaN of any type
    }
    for (size_t warp = 0; warp < warps.size(); ++warp) warps[warp] = static_cast<int>(warp);
    for (unsigned& turns : slowness) turns = chance() % 6 == 0 ? 2u << chance() % 4 : 1;
    for (Fiber& fiber : threads) {
      fiber.stack = stacks;
      stacks += kStackStride;
    }
  }

  // Puts it in the place of what runs, or back.
  void change_places() {
    blockIdx = {index, 0, 0};
    fibers = threads.data();
    bytes = reinterpret_cast<unsigned char*>(shared.data());
    shown = words.data();
    std::swap(under_way, copies);
    std::swap(writes, chunk_writes);
    std::swap(fenced, fences);
    std::swap(by_address, mbarriers);
    std::swap(by_number, barriers);
    std::swap(of_warps, meetings);
    std::swap(of_groups, group_meetings);
    std::swap(votes, any_of_barrier);
    std::swap(rounds, copy_rounds);
  }

  // Runs it for a while; says whether anything happened, or will. Alone, it keeps its place.
  bool run(bool is_alone) {
    if (!is_placed) change_places();
    is_placed = is_alone;
    has_progress = false;
    for (unsigned round = chance() % 16; round-- > 0;) {
      std::shuffle(warps.begin(), warps.end(), generator);
      for (const int warp : warps) {
        if (chance() % 3 != 0 && chance() % slowness[warp] == 0) run_warp(warp);
      }
      let_copies_arrive();
    }
    is_done = std::all_of(threads.begin(), threads.end(),
                          [](const Fiber& fiber) { return fiber.is_done; });
    if (is_done) check_end();
    const bool goes_on = has_progress || !copies.empty();
    if (!is_alone) change_places();
    return goes_on;
  }

  void check_end() const {
    if (!copies.empty()) complain("copies under way at the end of block", index);
    for (const Meeting& barrier : barriers) {
      if (barrier.arrived > 0) complain("a barrier half full at the end of block", index);
    }
  }
};

// As many as wait for each other, and so all, run at the same time.
static void run_blocks(int count, int threads, char* stacks) {
  constexpr int kPatience = 1000;
  block_threads = threads;
  mbarriers.clear();  // a launch that went wrong may have left something
  copies.clear();
  memset(barriers, 0, sizeof barriers);
  memset(meetings, 0, sizeof meetings);
  memset(group_meetings, 0, sizeof group_meetings);
  memset(any_of_barrier, 0, sizeof any_of_barrier);
  static std::vector<Block> blocks;
  blocks.clear();
  for (int index = 0; index < count; ++index) {
    blocks.emplace_back(index, threads, stacks + kStackStride * threads * index);
  }
  for (int idle_rounds = 0; !blocks.empty(); ++idle_rounds) {
    Block& block = blocks[chance() % blocks.size()];
    if (block.late > 0) {
      --block.late;
      continue;
    }
    if (block.run(blocks.size() == 1)) idle_rounds = 0;
    if (idle_rounds > kPatience * count) complain("deadlock in block", block.index);
    if (block.is_done) {
      std::swap(block, blocks.back());
      blocks.pop_back();
    }
  }
}

const char* launch(int blocks, int threads, int seed, char* stacks) {
  generator.seed(static_cast<unsigned>(seed));
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  complaint[0] = '\0';
  if (setjmp(launcher) == 0) run_blocks(blocks, threads, stacks);
  return complaint;
}
