// How many tasks of a result each block adds up that merges pieces. Needs
// roles/mla_hopper/constants.

// A slice is as many tasks as make all mergers equally busy. Of many, a warp adds up some together,
// whose elements lie side by side in the output.
constexpr int kTasksTogether = 4;
constexpr int kManyTasks = kTasksTogether * kConsumerWarps;

// By unsigned numbers, whose division is shorter.
__device__ constexpr int tasks_of_slice(u32 mergers) {
  const int tasks = static_cast<int>((kTasks + mergers - 1) / mergers);
  return tasks < kManyTasks ? tasks : ceil_div(tasks, kTasksTogether) * kTasksTogether;
}
