// What a block computes one after the other: pieces of units. Needs span.cuh.

struct Item {
  int first_query;  // index of the request's first query token among all
  int request;
  int kv_head;
  int first_row;  // of the tile, among the request's rows of the kv head
  int rows;  // of the tile; the rest of kRows is padding
  int q_len;
  int kv_len;
  int all_begin, all_end;  // tokens that every row sees
  int any_begin, any_end;  // tokens that some row may see
  int first_tile;  // of tokens
  int tiles;
  int pieces;
  int piece;  // which of them this is
  int first_block;  // of the grid, that has piece 0

  __device__ int query_of(const Params& params, int row) const {
    return q_len == 1 ? 0 : (first_row + row) / params.group;
  }

  __device__ int head_of(const Params& params, int row) const {
    return kv_head * params.group + first_row + row - query_of(params, row) * params.group;
  }

  // Index of a row in a [tokens * heads] array.
  __device__ i64 global_row(const Params& params, int row) const {
    const i64 query = first_query + query_of(params, row);
    return query * params.group * params.kv_heads + head_of(params, row);
  }

  // Whether a row sees a token.
  __device__ bool sees(const Params& params, int row, int token) const {
    if (row >= rows || token >= kv_len) return false;
    const int query = query_of(params, row);
    if (token < window_begin(params, kv_len, q_len, query)) return false;
    const int draft = token - (kv_len - q_len);
    if (params.draft_mask == nullptr || draft < 0) return draft <= query;
    const u32* words =
        params.draft_mask + static_cast<i64>(first_query + query) * params.mask_words;
    // Drafts beyond the mask are in no row's sight.
    return draft / 32 < params.mask_words && (words[draft / 32] >> draft % 32 & 1) != 0;
  }
};

// The item that a walk is at, of kv head `head` of the block's.
__device__ inline Item item_at(const Params& params, const Span& span, const WalkState& walk,
                               int head) {
  const RequestFacts& facts = walk.facts;
  Item item;
  item.first_query = facts.first_query;
  item.request = walk.request;
  item.q_len = facts.q_len;
  item.kv_len = facts.kv_len;
  const int part = walk.unit * params.team_size + static_cast<int>(span.member);
  const int heads = facts.row_tiles == 1 ? part : part / facts.row_tiles;
  item.kv_head = heads * kHeads + head;
  item.first_row = (part - heads * facts.row_tiles) * kRows;
  item.rows = min(facts.q_len * params.group - item.first_row, kRows);

  const int first = item.query_of(params, 0);
  const int last = item.query_of(params, item.rows - 1);
  const int before = facts.kv_len - facts.q_len;  // tokens before the new ones
  const bool has_mask = params.draft_mask != nullptr;
  item.any_begin = window_begin(params, facts.kv_len, facts.q_len, first);
  item.all_begin = window_begin(params, facts.kv_len, facts.q_len, last);
  item.any_end = max(has_mask ? facts.kv_len : before + last + 1, 0);
  item.all_end = max(has_mask ? before : before + first + 1, 0);

  const u32 length = unit_length(facts);
  const u32 unit_end = walk.unit_begin + length;
  const int begin = static_cast<int>(max(span.begin, walk.unit_begin) - walk.unit_begin);
  const int end = static_cast<int>(min(span.end, unit_end) - walk.unit_begin);
  item.first_tile = max(facts.first_tile + begin, item.any_begin / kTileTokens);
  const int last_tile = min(facts.first_tile + end, ceil_div(item.any_end, kTileTokens));
  item.tiles = max(last_tile - item.first_tile, 0);
  item.pieces = 1;
  item.piece = 0;
  u32 first_span = span.index;
  if (begin > 0 || walk.unit_begin + end < unit_end) {
    first_span = span_at(walk.unit_begin, span);
    item.pieces = static_cast<int>(span_at(unit_end - 1, span) - first_span) + 1;
    item.piece = static_cast<int>(span.index - first_span);
  }
  item.first_block = static_cast<int>(first_span * params.team_size + span.member);
  return item;
}

// Goes to the next unit; says whether it begins on the span.
__device__ inline bool go_on(const Params& params, const Span& span, WalkState& walk) {
  walk.unit_begin += unit_length(walk.facts);
  if (walk.unit_begin >= span.end) return false;
  if (++walk.unit < walk.facts.units) return true;
  walk.unit = 0;
#pragma unroll 1
  do {
    walk.facts = facts_of_request(params, ++walk.request);
  } while (walk.facts.units == 0);
  return true;
}

// The work of a block, as the loader has found it.
struct Start {
  Span span;
  WalkState walk;  // at the first item
  bool has_work;
};

// What a consumer warp knows of its work; here, and not in the registers of every lane.
struct WarpWork {
  static constexpr int kNone = -1;  // the request of an item that there is not

  WalkState walk;
  Item items[2];  // an item and the next one, by the parity of their counts

  __device__ bool has(u32 count) const { return items[count % 2].request != kNone; }

  // Goes to the first item, `count`, of kv head `head` of the block's.
  __device__ void begin(const Params& params, const Start& start, int head, u32 count) {
    const WalkState at = start.walk;
    keep(at, item_at(params, start.span, at, head), count);
  }

  // Goes on to item `count`, if there is one.
  __device__ void find_next(const Params& params, const Span& span, int head, u32 count) {
    WalkState at = walk;
    if (go_on(params, span, at)) {
      keep(at, item_at(params, span, at, head), count);
    } else {
      __syncwarp();  // all lanes have read what was here
      if (lane_index() == 0) items[count % 2].request = kNone;
      __syncwarp();
    }
  }

  // Leaves what item `count` is, and the place of the walk that is there.
  __device__ void keep(const WalkState& at, const Item& found, u32 count) {
    __syncwarp();  // all lanes have read what was here
    if (lane_index() == 0) {
      walk = at;
      items[count % 2] = found;
    }
    __syncwarp();
  }
};
