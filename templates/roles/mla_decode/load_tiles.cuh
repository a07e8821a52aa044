// Streams tiles of the paged cache into the stages. Needs Work, PageTable, blocks/swizzle.cuh.

// The page ids of a tile are read one tile ahead, so that no copy waits for them.
struct TileLoader {
  PageTable table;
  int end_token;  // tokens from here on are not read; their slots become zero
  int end_tile;
  int next_tile;
  int next_pages[kRounds];

  __device__ TileLoader(const Params& params, const Work& work)
      : table{params.cache,
              params.block_tables + work.request * static_cast<i64>(params.block_tables_stride),
              params.num_pages, params.page_stride, params.token_stride},
        end_token(work.visible_to_any),
        end_tile(work.last_tile),
        next_tile(work.first_tile) {
    read_page_ids();
  }

  // Token of the tile that this thread copies in a round.
  __device__ static int tile_token(int round) {
    return round * kRoundTokens + static_cast<int>(threadIdx.x) / 8;
  }

  __device__ void read_page_ids() {
#pragma unroll
    for (int round = 0; round < kRounds; ++round) {
      const int token = next_tile * kTileTokens + tile_token(round);
      next_pages[round] = token < end_token ? table.page_of(token) : -1;
    }
  }

  __device__ void copy_round(SharedMemory& shared, int round) const {
    const int chunk = lane_index() % 8;
    const unsigned char* row =
        table.row_of(next_pages[round], next_tile * kTileTokens + tile_token(round));
    const unsigned char* source = row == nullptr ? table.cache : row + chunk * kChunkBytes;
    const u32 bytes = row == nullptr ? 0 : kChunkBytes;
    const u32 target = shared_address(shared.kv[next_tile % kStages]) +
                       swizzled_offset<kTokenBytes>(tile_token(round), chunk);
#pragma unroll
    for (int column = 0; column < kTokenBytes; column += 128) {
      cp_async_cg_16(target + column, source + column, bytes);
    }
  }

  // Starts the copy of the next tile, if there is one, except for the borrowed rounds.
  __device__ void begin_next(SharedMemory& shared) const {
    if (next_tile >= end_tile) return;
#pragma unroll
    for (int round = 0; round < kRounds - kBorrowedRounds; ++round) copy_round(shared, round);
  }

  // Starts the rest of it, and closes its group whether there was a tile or not.
  __device__ void finish_next(SharedMemory& shared) {
    if (next_tile < end_tile) {
#pragma unroll
      for (int round = kRounds - kBorrowedRounds; round < kRounds; ++round) {
        copy_round(shared, round);
      }
      ++next_tile;
      read_page_ids();
    }
    cp_async_commit_group();
  }
};
