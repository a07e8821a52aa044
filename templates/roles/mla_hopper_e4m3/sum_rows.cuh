// The summers, one warp or two: add up the probabilities of all rows, of all blocks of all items,
// as they have been rounded, so that rounding a large one changes nothing. Needs SharedMemory,
// block_stages.cuh, roles/mla_hopper/hand_over.cuh, ptx/add.cuh, blocks/e4m3.cuh.j2,
// blocks/swizzle.cuh.

// The sum of 16 probabilities, added in fp16: of equal ones, and of one with zeros, it is exact,
// and of others each of four roundings changes it by 2^-12 at the most, this way or that.
__device__ inline float sum_of_chunk(const Chunk& chunk) {
  u32 pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 word = chunk.words[i];
    pairs[i] = add_f16x2(fp16x2_of_e4m3x2(word & 0xffff), fp16x2_of_high_e4m3x2(word));
  }
  const u32 pair = add_f16x2(add_f16x2(pairs[0], pairs[1]), add_f16x2(pairs[2], pairs[3]));
  return cvt_f32(Fp16{}, static_cast<u16>(pair)) + cvt_f32(Fp16{}, static_cast<u16>(pair >> 16));
}

// A row's sum over a block, whose probabilities lie at `probabilities`.
__device__ inline float sum_of_block(const unsigned char* probabilities, int row) {
  float sum = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < kBlockTokens / kChunkBytes; ++chunk) {
    const u32 place = swizzled_offset<kRopeRowBytes>(row, chunk);
    sum += sum_of_chunk(*reinterpret_cast<const Chunk*>(probabilities + place));
  }
  return sum;
}

// `summer` is the warp's number among them. A lane has a row; with 16 rows half of them have none.
__device__ inline void sum_items(SharedMemory& shared, int summer) {
  const int row = summer * kWarpLanes + lane_index();
  const bool has_row = row < kRows;
  u32 taken = 0;  // blocks
  for (u32 count = 0;; ++count) {
    const int slot = item_slot(count);
    wait_for(shared.item_full[slot], item_parity(count));
    const Item& item = shared.items[slot];
    if (item.request < 0) return;
    float sum = 0.0f;
#pragma unroll 1
    for (int left = item.blocks; left > 0; --left, ++taken) {
      const int stage = block_stage(taken);
      wait_for(shared.probabilities_full[stage], block_parity(taken));
      if (has_row) {
        const bool moves = (shared.rescales[stage] >> row / kRowsOfWarp * 8 & 0xff) != 0;
        if (moves) sum *= shared.rescale[stage][row];
        sum += sum_of_block(shared.tokens[stage] + kProbabilitiesOffset, row);
      }
      __syncwarp();
      if (lane_index() == 0) arrive_at(shared.tokens_empty[stage]);
    }
    if (has_row) shared.row_sum[slot][row] = sum;
    __syncwarp();
    if (lane_index() == 0) {
      arrive_at(shared.rows_full[slot]);
      arrive_at(shared.item_empty[slot]);
    }
  }
}
