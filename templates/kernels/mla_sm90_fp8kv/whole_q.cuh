// A query in eight bits is multiplied as it has been copied. Needs SharedMemory,
// roles/mla_hopper/hand_over.cuh.

// By the threads that have copied it; tells `full`.
template <int>
__device__ inline void finish_query(SharedMemory&, const Barrier& full, int, int) {
  finish_query(full);
}
