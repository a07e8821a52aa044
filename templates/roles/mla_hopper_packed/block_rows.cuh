// Where the tokens of a block are that a warp brings. Needs stored_token.cuh, Part,
// blocks/table_row.cuh, ptx/prefetch.cuh.

// Which token of a block this lane looks after.
__device__ inline int own_token() {
  return mov_tid_x() / kWarpLanes % kLoadingWarps * kWarpTokens + mov_tid_x() % kWarpTokens;
}

// And which part of it, of those that its lanes share.
__device__ inline u32 own_share() { return mov_tid_x() % kWarpLanes / kWarpTokens; }

// Page ids of an item's blocks, or its listed tokens.
struct TokenIds {
  const int* ids;
  int end;  // tokens from here on are not read

  __device__ TokenIds(const Params& params, const Part& part)
      : ids(params.block_tables + table_row(params, part.request).start),
        end(min((part.first_block + part.blocks) * kBlockTokens, part.visible_to_any)) {}

  // Of this lane's token.
  __device__ int read(int block) const {
    const int token = token_of(block);
    return token < end ? ids[kIsSparse ? token : token / kPageSize] : -1;
  }

  __device__ static int token_of(int block) { return block * kBlockTokens + own_token(); }
};

// Where this lane's token of a block is in the cache, by what the tables have for it.
struct TokenPlace {
  int page;
  int slot;
  bool exists;

  __device__ TokenPlace(const Params& params, int id, int block) {
    page = kIsSparse && id >= 0 ? id / kPageSize : id;
    slot = (kIsSparse ? id : TokenIds::token_of(block)) % kPageSize;
    exists = is_page(page, params.num_pages);
  }
};

// What is read where there is no token.
__device__ const Chunk kNoToken[ceil_div(kStoredBytes, kChunkBytes)] = {};

// What a lane knows of its token.
struct TokenRow {
  const unsigned char* latent;
  const unsigned char* rope;  // where that is a tensor of its own
  float scales[kLaneScales];  // the lane's part of them
  u32 missing;  // tokens of the warp that do not exist, a bit each

  __device__ TokenRow(const Params& params, int id, int block)
      : latent(reinterpret_cast<const unsigned char*>(kNoToken)), rope(latent), scales{} {
    const TokenPlace place(params, id, block);
    if (place.exists) {
      const StoredToken token = stored_token(params, place.page, place.slot);
      latent = token.row;
      if constexpr (!kIsPacked) rope = stored_rope(params, place.page, place.slot);
#pragma unroll
      for (int i = 0; i < kLaneScales; ++i) scales[i] = token.scale(own_share() * kLaneScales + i);
    }
    missing = __ballot_sync(~0u, !place.exists);
  }
};

// Has the rows of a block brought into L2, line by line. The lanes of a token share its row.
__device__ inline void prefetch_rows(const Params& params, int id, int block) {
  constexpr int kLineBytes = 128;
  constexpr int kBytes = kIsPacked ? kStoredBytes : kLatentDim;
  constexpr int kLines = kBytes / kLineBytes + 1;  // that a row lies on
  const TokenPlace place(params, id, block);
  if (!place.exists) return;
  const unsigned char* row = stored_token(params, place.page, place.slot).row;
#pragma unroll
  for (int line = 0; line < kLines; line += kTokenLanes) {
    const u32 offset = (own_share() + line) * kLineBytes;
    prefetch_l2(row + min(offset, static_cast<u32>(kBytes - kChunkBytes)));
  }
}
