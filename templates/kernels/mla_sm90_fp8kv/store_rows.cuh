// Epilogue stores of O^T.

#pragma once

#include "combine/store_rows_smem.cuh"
