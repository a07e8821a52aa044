// Leaves what consumers have of an item where it belongs: in the output, or in the workspace to be
// merged. Needs merge.cuh, merge_slices.cuh, and from the consumers restore_nonfinite and
// store_rows.

__device__ inline void store_item(const Params& params, const Item& item, SharedMemory& shared,
                                  Accumulators& accumulators, RowState (&rows)[kOwnRows]) {
  if (shared.has_nonfinite) restore_nonfinite(params, item, accumulators);
  const bool is_shared_by_all = item.pieces > kFewPieces;
  if (item.piece > 0 || is_shared_by_all) {
    const int block = static_cast<int>(blockIdx.x);
    store_partial(params, item.piece > 0 ? first_place(block) : last_place(block), accumulators,
                  rows);
    announce(params, item);
    if (is_shared_by_all && item.piece < item.pieces - 1) merge_slices(params, item, shared);
  } else {
    if (item.pieces > 1) fold_piece(params, item, shared, accumulators, rows);
    store_rows(params, item, shared, accumulators, rows);
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (fresh_thread() == 0) shared.has_nonfinite = 0;
}
