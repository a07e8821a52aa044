// Leaves what consumers have of an item where it belongs: in the output, or in the workspace to be
// merged. Needs merge.cuh, merge_slices.cuh, restore_nonfinite.cuh, and from the consumers
// store_rows.

__device__ inline void store_piece(const Params& params, const Item& item, SharedMemory& shared,
                                   const Accumulators& accumulators,
                                   const RowState (&rows)[kOwnRows]) {
  const int block = static_cast<int>(blockIdx.x);
  const int place = item.piece > 0 ? first_place(block) : last_place(block);
  store_partial(params, shared, place, accumulators, rows);
  if (!shared.has_nonfinite) return;
  uint2* values = partial_values(params, place) + fresh_thread();
  restore_nonfinite<Fp16>(params, item, 1.0f, [&](int i, int c) {
    return reinterpret_cast<u16*>(values + i * kConsumerThreads) + c;
  });
}

__device__ inline void store_whole(const Params& params, const Item& item, SharedMemory& shared,
                                   const Accumulators& accumulators,
                                   const RowState (&rows)[kOwnRows]) {
  store_rows(params, item, shared, accumulators, rows);
  if (!shared.has_nonfinite) return;
  restore_nonfinite<Element>(params, item, output_scale(params), [&](int i, int c) {
    const int warp = fresh_warp();
    return params.out + global_row(params, item, part_row(warp, i, c)) * kHeadDimVo +
           part_dim(warp, i, c);
  });
}

__device__ inline void store_item(const Params& params, const Item& item, SharedMemory& shared,
                                  Accumulators& accumulators, RowState (&rows)[kOwnRows]) {
  const bool is_shared_by_all = item.pieces > kFewPieces;
  if (item.piece > 0 || is_shared_by_all) {
    store_piece(params, item, shared, accumulators, rows);
    announce(params, item);
    if (is_shared_by_all && item.piece < item.pieces - 1) merge_slices(params, item, shared);
  } else {
    if (item.pieces > 1) fold_piece(params, item, shared, accumulators, rows);
    store_whole(params, item, shared, accumulators, rows);
  }
  barrier_sync(kConsumerBarrier, kConsumerThreads);
  if (fresh_thread() == 0) shared.has_nonfinite = 0;
}
