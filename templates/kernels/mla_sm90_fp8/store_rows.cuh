// Epilogue stores.

#pragma once

#include "common/store_rows_transposed.cuh"
