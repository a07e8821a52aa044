// Epilogue stores.

#include "common/store_rows_transposed.cuh"
