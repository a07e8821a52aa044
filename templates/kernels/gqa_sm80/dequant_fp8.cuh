// Elements of tokens that are stored as e4m3. Needs blocks/decode_e4m3.cuh.

struct TokenScales {};

__device__ inline void decode_elements(const unsigned char* row, const TokenScales&, int, int part,
                                       Chunk (&decoded)[2]) {
  decode_e4m3(Element{}, reinterpret_cast<const Chunk*>(row)[part], decoded);
}

__device__ inline TokenScales scales_of(const Params&, const Work&, int, int, const int*) {
  return {};
}
