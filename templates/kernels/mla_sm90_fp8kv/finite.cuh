// Finite elements of V.

#pragma once

#include "softmax/finite_16bit.cuh"
