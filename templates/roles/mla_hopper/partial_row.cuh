// What is left of a row of a piece. Needs the consumers' kScales.

struct PartialRow {
  float reference;  // log2 units
  float sum;
  float scales[kScales];  // what halves are multiplied by; later also by the piece's weight
};
