// Instructions of a whole warp or warpgroup, by its last thread.

// Four matrices of 8 x 8: the rows of matrix i are where lanes 8 i and on point, in different
// banks.
void load_matrices(bool is_transposed) {
  const int warp = current / kLanes;
  const auto row_of = [=](int row) { return shown_by_warp(warp)[row].words[0]; };
  for (int matrix = 0; matrix < 4; ++matrix) {
    int banks = 0;
    u16 elements[8][8];
    for (int row = 0; row < 8; ++row) {
      const u32 address = row_of(8 * matrix + row);
      if (address % 16 != 0 || address >= kMaxSharedBytes) complain("bad row of ldmatrix", address);
      banks |= 1 << address / 16 % 8;
      memcpy(elements[row], bytes + address, sizeof elements[row]);
    }
    if (banks != 0xff) complain("bank conflict in ldmatrix", row_of(8 * matrix));
    for (int lane = 0; lane < kLanes; ++lane) {
      const int across = lane / 4;
      const int along = lane % 4 * 2;
      const u32 low = is_transposed ? elements[along][across] : elements[across][along];
      const u32 high = is_transposed ? elements[along + 1][across] : elements[across][along + 1];
      static_cast<u32*>(fibers[warp * kLanes + lane].result)[matrix] = low | high << 16;
    }
  }
}

// Elements of the tensor cores, and how many of them a step multiplies.
static float float_of(E4m3, u16 bits) { return float_of_e4m3(bits & 0xff); }
template <typename T>
constexpr int kElementBytes = 2;
template <>
constexpr int kElementBytes<E4m3> = 1;
template <typename T>
constexpr int kDepth = 32 / kElementBytes<T>;

// The element of operand a in registers that the lanes of a warp show.
template <typename T>
static float element_of(T type, const Shown* lanes, int row, int k) {
  constexpr int kOfWord = 4 / kElementBytes<T>;
  constexpr int kHalf = kDepth<T> / 2;
  const Shown& lane = lanes[row % 8 * 4 + k % kHalf / kOfWord];
  const u32 word = lane.words[row / 8 + k / kHalf * 2];
  return float_of(type, static_cast<u16>(word >> k % kOfWord * 8 * kElementBytes<T>));
}

template <typename T>
void multiply_warp(T type) {
  constexpr int kColumns = 8;
  const int first = current / kLanes * kLanes;
  const Shown* const lanes = shown_by_warp(current / kLanes);
  float b[kDepth<T>][kColumns];
  for (int k = 0; k < kDepth<T>; ++k) {
    for (int n = 0; n < kColumns; ++n) {
      b[k][n] = float_of(type, half_of(lanes[n * 4 + k % 8 / 2].words[4 + k / 8], k % 2));
    }
  }
  for (int m = 0; m < 16; ++m) {
    float sums[kColumns];
    const auto sum = [=](int n) -> float& {
      return static_cast<float*>(fibers[first + m % 8 * 4 + n / 2].result)[m / 8 * 2 + n % 2];
    };
    for (int n = 0; n < kColumns; ++n) sums[n] = sum(n);
    for (int k = 0; k < kDepth<T>; ++k) {
      const float factor = element_of(type, lanes, m, k);
      for (int n = 0; n < kColumns; ++n) sums[n] += factor * b[k][n];
    }
    for (int n = 0; n < kColumns; ++n) sum(n) = sums[n];
  }
}
template void multiply_warp(Bf16);
template void multiply_warp(Fp16);

// An operand in shared memory, in rows of 128 bytes or 64 that are swizzled: along k, or
// transposed.
struct Operand {
  u32 base;
  u32 leading_bytes;
  u32 group_distance;
  u32 row_bytes;
  bool is_transposed;
  unsigned fenced;  // when all threads that read it had passed a fence

  Operand(u64 descriptor, bool is_transposed, unsigned fenced)
      : base((descriptor & 0x3fff) << 4),
        leading_bytes((descriptor >> 16 & 0x3fff) << 4),
        group_distance((descriptor >> 32 & 0x3fff) << 4),
        row_bytes(descriptor >> 62 == 1 ? 128 : 64),
        is_transposed(is_transposed),
        fenced(fenced) {
    const u32 kind = descriptor >> 62;
    if (kind != 1 && (kind != 2 || is_transposed)) complain("a swizzle of another kind", kind);
    if (group_distance != 8 * row_bytes) complain("rows apart", group_distance);
  }

  // Passes each element with its row and k.
  template <typename T, typename Put>
  void read(T type, int rows, const Put& put) const {
    constexpr int kOfChunk = 16 / kElementBytes<T>;
    for (int line = 0; line < (is_transposed ? kDepth<T> : rows); ++line) {
      for (int column = 0; column < (is_transposed ? rows : kDepth<T>); column += kOfChunk) {
        unsigned char chunk[16];
        memcpy(chunk, bytes + place_of(line, column, kElementBytes<T>), sizeof chunk);
        for (int i = 0; i < kOfChunk; ++i) {
          u16 bits = 0;
          memcpy(&bits, chunk + i * kElementBytes<T>, kElementBytes<T>);
          const float element = float_of(type, bits);
          is_transposed ? put(column + i, line, element) : put(line, column + i, element);
        }
      }
    }
  }

  u32 place_of(int line, int column, int element_bytes) const {
    u32 place = base + line / 8 * group_distance + line % 8 * row_bytes;
    place += is_transposed ? column / 64 * leading_bytes + column % 64 * 2 : column * element_bytes;
    place ^= (place >> 7 & (row_bytes / 16 - 1)) << 4;
    if (place >= kMaxSharedBytes) complain("operand beyond shared memory", place);
    require_fence(place, fenced);
    return place;
  }
};

// Accumulators of a thread that are added to together: two columns of a row and two of another, by
// turns.
constexpr int kWidth = 16;
typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
typedef int IntVector __attribute__((vector_size(kWidth * sizeof(int))));
constexpr IntVector kIsOther = {0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1};

// Of 16 bits, as they are. Of e4m3 tensor cores cut off each addend below 2^-13 of the largest
// power of two among them.
template <typename T>
static Vector add_products(T, const Vector* a, const Vector* b, Vector before) {
  Vector sum = {};
  for (int k = 0; k < kDepth<T>; ++k) sum += a[k] * b[k];
  return before + sum;
}
static Vector add_products(E4m3, const Vector* a, const Vector* b, Vector before) {
  const auto size_of = [](Vector v) { return (Vector)((IntVector)v & 0x7fffffff); };
  Vector largest = size_of(before);
  for (int k = 0; k < kDepth<E4m3>; ++k) {
    const Vector size = size_of(a[k] * b[k]);
    largest = largest > size ? largest : size;
  }
  largest = largest > 0x1p-100f ? largest : 0x1p-100f + Vector{};
  largest = largest < 0x1p100f ? largest : 1.0f + Vector{};
  const Vector unit = (Vector)((IntVector)largest & 0x7f800000) * 0x1p-13f;
  const Vector scale = 1.0f / unit;
  const auto cut = [=](Vector addend) {
    const Vector units = addend * scale;
    const Vector whole = __builtin_convertvector(__builtin_convertvector(units, IntVector), Vector);
    return (size_of(units) < 0x1p24f ? whole : units) * unit;
  };
  Vector sum = cut(before);
  for (int k = 0; k < kDepth<E4m3>; ++k) sum += cut(a[k] * b[k]);
  return sum;
}

template <typename T>
void multiply_group(T type, int columns, Place place, bool is_b_transposed) {
  constexpr int kRows = 64;
  const int first = current / kGroupThreads * kGroupThreads;
  const Shown* const first_warp = shown_by_warp(first / kLanes);
  const u32* const common = first_warp->words;
  unsigned fenced = fences[first];
  for (int thread = first; thread < first + kGroupThreads; ++thread) {
    const u32* const words = shown_by_warp(thread / kLanes)[thread % kLanes].words;
    const bool has_same_a = place == Place::kRegisters || memcmp(words, common, 8) == 0;
    if (!has_same_a || memcmp(words + 4, common + 4, 12) != 0) complain("other operands", thread);
    fenced = min(fenced, fences[thread]);
  }
  static float a[kRows][kDepth<T>];
  static Vector b[4][128 / kWidth][kDepth<T>];  // for each lane of a row
  if (place == Place::kRegisters) {
    for (int row = 0; row < kRows; ++row) {
      const Shown* const lanes = shown_by_warp(first / kLanes + row / 16);
      for (int k = 0; k < kDepth<T>; ++k) a[row][k] = element_of(type, lanes, row % 16, k);
    }
  } else {
    const Operand from(mov_b64(common[0], common[1]), place == Place::kTransposed, fenced);
    from.read(type, kRows, [](int row, int k, float element) { a[row][k] = element; });
  }
  const Operand from(mov_b64(common[4], common[5]), is_b_transposed, fenced);
  from.read(type, columns, [](int n, int k, float element) {
    const int i = n / 8 * 4 + n % 2;
    Vector& factors = b[n % 8 / 2][i / kWidth][k];
    factors[i % kWidth] = factors[i % kWidth + 2] = element;
  });
  for (int thread = 0; thread < kGroupThreads; ++thread) {
    const int row = thread / kLanes * 16 + thread % kLanes / 4;
    Vector factors[kDepth<T>];
    for (int k = 0; k < kDepth<T>; ++k) {
      factors[k] = kIsOther ? a[row + 8][k] + Vector{} : a[row][k] + Vector{};
    }
    float* const result = static_cast<float*>(fibers[first + thread].result);
    for (int i = 0; i < columns / 2; i += kWidth) {
      const size_t size = min(kWidth, columns / 2 - i) * sizeof(float);
      Vector sum = {};
      if (common[6] != 0) memcpy(&sum, result + i, size);
      sum = add_products(type, factors, b[thread % 4][i / kWidth], sum);
      memcpy(result + i, &sum, size);
    }
  }
}
template void multiply_group(Bf16, int, Place, bool);
template void multiply_group(Fp16, int, Place, bool);
template void multiply_group(E4m3, int, Place, bool);
