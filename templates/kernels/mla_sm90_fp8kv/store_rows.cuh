// Epilogue stores.

#pragma once

#include "common/store_rows_swap_ab.cuh"
