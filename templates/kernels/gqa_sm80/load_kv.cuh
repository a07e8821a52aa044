// Streams keys and values of one warp's tokens.

#pragma once

#include "common/paged_kv.cuh"
#include "common/params.cuh"
#include "common/types.cuh"
#include "config.cuh"
#include "ptx/cp_async.cuh"
#include "shared_memory.cuh"
#include "work_tile.cuh"

// Items alternate: the keys of a group of tokens, its values, the keys of the warp's next group.
// Page ids are read one group ahead, so that no copy waits for them.
struct TokenLoader {
  const Params& params;
  const Work& work;
  const int* table;  // page ids of the request
  int next_item;
  int next_group;
  int pages;  // of token lane_index() % kWarpTokens of the next group; -1 for what is not read
  int next_pages;  // of the group after it

  __device__ TokenLoader(const Params& params, const Work& work)
      : params(params),
        work(work),
        table(params.block_tables + work.request * static_cast<i64>(params.block_tables_stride)),
        next_item(0),
        next_group(work.first_group + warp_index()) {
    pages = read_pages(next_group);
    next_pages = read_pages(next_group + kWarps);
  }

  __device__ int read_pages(int group) const {
    const int token = group * kWarpTokens + lane_index() % kWarpTokens;
    const bool is_read = group < work.last_group && token >= work.any_begin && token < work.any_end;
    return is_read ? table[token / kPageSize] : -1;
  }

  // Copies `kBytes` of every token's row, from byte `offset` on, to the rows of an item.
  template <int kBytes>
  __device__ void copy_rows(const PagedRows& rows, int offset, unsigned char* item) const {
    constexpr int kCopyBytes = kBytes % kChunkBytes == 0 ? kChunkBytes : 8;
    constexpr int kCopies = kBytes / kCopyBytes;
#pragma unroll 4  // more addresses at once would take registers from the output
    for (int first = 0; first < kWarpTokens * kCopies; first += kWarpLanes) {
      const int copy = first + lane_index();
      const int token = copy / kCopies;
      const int at = copy % kCopies * kCopyBytes;
      const int page = __shfl_sync(~0u, pages, token % kWarpTokens);
      if (token >= kWarpTokens) continue;
      const bool exists = is_page(page, params.num_pages);
      const int slot = (next_group * kWarpTokens + token) % kPageSize;
      const unsigned char* source = exists ? rows.row_of(page, slot) + offset + at : rows.rows;
      const u32 target = shared_address(item) + token * kItemRowBytes + at;
      if constexpr (kCopyBytes == kChunkBytes) {
        cp_async_cg_16(target, source, exists ? kChunkBytes : 0);
      } else {
        cp_async_ca_8(target, source, exists ? 8 : 0);
      }
    }
  }

  // Starts the copy of the next item, if there is one, and closes its group in any case.
  __device__ void begin_next(SharedMemory& shared) {
    if (next_group < work.last_group) {
      unsigned char* item = item_of(shared, next_item);
      if (next_item % 2 == 0) {
        const PagedRows keys{params.key_cache + work.kv_head * params.key_head_stride,
                             params.key_page_stride, params.key_token_stride};
        copy_rows<kStoredBytes>(keys, 0, item);
      } else {
        const PagedRows values{params.value_cache + work.kv_head * params.value_head_stride,
                               params.value_page_stride, params.value_token_stride};
        constexpr int kSliceBytes = kStoredBytes / kSlices;
        copy_rows<kSliceBytes>(values, work.slice * kSliceBytes, item);
        next_group += kWarps;
        pages = next_pages;
        next_pages = read_pages(next_group + kWarps);
      }
      ++next_item;
    }
    cp_async_commit_group();
  }
};
