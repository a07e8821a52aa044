// Sequences of a call.

#pragma once

#include "scheduler/seq_info_mla.cuh"
