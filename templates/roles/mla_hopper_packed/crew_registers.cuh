// How many registers a thread of each role has, of 128 at first.

constexpr int kConsumerRegisters = kRows > 32 ? 176 : 128;
constexpr int kScorerRegisters = kRows > 32 ? 104 : 128;
constexpr int kProducerRegisters = kRows > 32 ? 56 : 128;
