// How many registers a thread of each role has, of 128 at first. Needs ptx/setmaxnreg.cuh.

__device__ inline void take_consumer_registers() { setmaxnreg_inc<192>(); }
__device__ inline void give_scorer_registers_back() { setmaxnreg_dec<80>(); }
__device__ inline void give_producer_registers_back() { setmaxnreg_dec<48>(); }
