// How many registers a thread of each role has, of 128 at first. Needs ptx/setmaxnreg.cuh.

constexpr bool kSharesRegisters = kRows > 32;
constexpr int kConsumerRegisters = 176;
constexpr int kScorerRegisters = 112;
constexpr int kProducerRegisters = 48;

__device__ inline void take_consumer_registers() {
  if constexpr (kSharesRegisters) setmaxnreg_inc<kConsumerRegisters>();
}
__device__ inline void give_producer_registers_back() {
  if constexpr (kSharesRegisters) setmaxnreg_dec<kProducerRegisters>();
}
__device__ inline void give_scorer_registers_back() {
  if constexpr (kSharesRegisters) setmaxnreg_dec<kScorerRegisters>();
}
