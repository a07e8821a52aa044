// Which threads write what there is of rows. Needs nothing.

// Whether the thread of that index in its crew writes what there is of its rows: all warps have the
// same.
__device__ inline bool is_row_writer(int thread) { return thread < 4; }
__device__ inline bool is_scale_writer(int thread) { return thread < 4; }
