// Runs the blocks of a grid one after the other, in random order. Follows the kernel, EMULATED.

static const Params* launched_params;

static void run_thread() {
  EMULATED(*launched_params);
  fibers[current].is_done = true;
  _longjmp(scheduler, 1);
}

static void run_warp(int warp) {
  for (int lane = 0; lane < kLanes; ++lane) {
    current = warp * kLanes + lane;
    Fiber& fiber = fibers[current];
    if (fiber.is_done || _setjmp(scheduler) != 0) continue;
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

static bool are_all_done(int threads) {
  return std::all_of(fibers, fibers + threads, [](const Fiber& fiber) { return fiber.is_done; });
}

static void run_block(unsigned block, int threads) {
  blockIdx = {block, 0, 0};
  for (size_t i = 0; i < sizeof bytes; ++i) bytes[i] = i % 2 ? 0x7f : 0xff;  // NaN of every type
  mbarriers.clear();
  copies.clear();
  copy_rounds = 1u << chance() % 8;
  memset(barriers, 0, sizeof barriers);
  memset(meetings, 0, sizeof meetings);
  memset(group_meetings, 0, sizeof group_meetings);
  block_threads = threads;
  for (int thread = 0; thread < threads; ++thread) {
    Fiber& fiber = fibers[thread];
    fiber.is_started = fiber.is_done = false;
    if (fiber.stack == nullptr) fiber.stack = static_cast<char*>(malloc(kStackBytes));
  }
  std::vector<int> warps(threads / kLanes);
  for (size_t warp = 0; warp < warps.size(); ++warp) warps[warp] = static_cast<int>(warp);
  constexpr int kPatience = 1000;
  for (int idle_rounds = 0; !are_all_done(threads); ++idle_rounds) {
    has_progress = false;
    std::shuffle(warps.begin(), warps.end(), chance);
    for (const int warp : warps) {
      if (chance() % 3 != 0) run_warp(warp);
    }
    let_copies_arrive();
    if (has_progress || !copies.empty()) idle_rounds = 0;  // what is under way will arrive
    if (idle_rounds > kPatience) complain("deadlock in block", block);
  }
  if (!copies.empty()) complain("copies under way at the end of block", block);
  for (const Meeting& barrier : barriers) {
    if (barrier.arrived > 0) complain("a barrier half full at the end of block", block);
  }
}

// Returns what is wrong, or an empty text.
extern "C" const char* launch_emulated(const void* params, int blocks, int threads, int seed) {
  static Params copy;  // aligned as it wants to be
  memcpy(static_cast<void*>(&copy), params, sizeof copy);
  launched_params = &copy;
  chance.seed(static_cast<unsigned>(seed));
  gridDim = {static_cast<unsigned>(blocks), 1, 1};
  complaint[0] = '\0';
  std::vector<unsigned> order(static_cast<size_t>(blocks));
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<unsigned>(i);
  std::shuffle(order.begin(), order.end(), chance);
  if (setjmp(launcher) == 0) {
    for (const unsigned block : order) run_block(block, threads);
  }
  return complaint;
}
