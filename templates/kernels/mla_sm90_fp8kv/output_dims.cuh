// Output dims of a thread of the PV warpgroups.

#pragma once

#include "common/pv_warpgroups.cuh"
#include "dim_tiles.cuh"
