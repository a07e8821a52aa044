// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk". Needs sm_90.
// `map` is the generic address of a tensor map; x, y, z, w, v count elements, the innermost first.

// cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes
// Copies a box to shared memory, zeros for what lies outside the tensor, and then counts its bytes
// as arrived at the barrier.
__device__ inline void cp_async_bulk_tensor(u32 target, const void* map, u32 barrier, int x, int y,
                                            int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes
__device__ inline void cp_async_bulk_tensor(u32 target, const void* map, u32 barrier, int x, int y,
                                            int z, int w, int v) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w), "r"(v)
      : "memory");
}

// cp.async.bulk.prefetch.tensor.4d.L2.global
// Brings a box into L2.
__device__ inline void cp_async_bulk_prefetch_tensor(const void* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map),
               "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}
