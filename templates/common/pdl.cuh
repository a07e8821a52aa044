// Programmatic dependent launch: start while the kernel before drains. Needs
// ptx/griddepcontrol.cuh.

__device__ inline void wait_for_previous_kernel() { griddepcontrol_wait(); }
__device__ inline void let_next_kernel_start() { griddepcontrol_launch_dependents(); }
