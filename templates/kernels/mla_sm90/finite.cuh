// Finite elements of V.

#include "softmax/finite_16bit.cuh"
