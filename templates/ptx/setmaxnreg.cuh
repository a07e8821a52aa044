// PTX ISA, "Miscellaneous Instructions: setmaxnreg". Needs sm_90.
// All warps of a warpgroup execute it; the number of registers is a multiple of 8.

#pragma once

// setmaxnreg.dec.sync.aligned.u32
// Gives registers back.
template <int kRegisters>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// setmaxnreg.inc.sync.aligned.u32
// Waits until there are so many registers to take.
template <int kRegisters>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
