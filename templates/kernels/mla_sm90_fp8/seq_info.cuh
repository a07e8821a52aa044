// Sequences of a call, as the schedule sees them.

#pragma once

#include "scheduler/seq_info_mla.cuh"
