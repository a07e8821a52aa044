// PTX ISA, "Control Flow Instructions: exit". Needs sm_80.

#pragma once

#include "common/types.cuh"

// exit
// Ends this thread unless the word is zero. An unconditional exit would make the compiler move the
// path to it behind all other code.
__device__ inline void exit_if(u32 word) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %0, 0; @p exit;}" ::"r"(word) : "memory");
}
