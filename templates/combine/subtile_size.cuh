// How many tasks of a result each block adds up that merges pieces.

#pragma once

#include "common/types.cuh"
#include "config.cuh"

// A slice is as many tasks as make all mergers equally busy: whole groups of four, which a warp
// adds up together, for they are of the same rows; or, where there are many mergers, a part of one.
constexpr int kTasksTogether = 4;

// By unsigned numbers, whose division is shorter.
__device__ constexpr int tasks_of_slice(u32 mergers) {
  const int tasks = static_cast<int>((kTasks + mergers - 1) / mergers);
  return tasks < 3 ? tasks : ceil_div(tasks, kTasksTogether) * kTasksTogether;
}
