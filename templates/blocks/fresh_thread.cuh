// Indices of this thread as compilers have not seen them: what is computed from them is computed
// where it is used, and takes no register from the products in between. Needs ptx/mov.cuh.

__device__ inline int fresh_thread() { return static_cast<int>(mov_tid_x()); }
__device__ inline int fresh_lane() { return fresh_thread() % kWarpLanes; }
__device__ inline int fresh_warp() { return fresh_thread() / kWarpLanes; }
