// swap_bulk.cu on the host, against a copy byte by byte:  bulk_emulation SEED RUNS
//
// "emulated_kernel.inc" is that source with a call of what is below in place of each asm statement;
// test_swap_bulk_emulated.py makes it. The lanes of a warp are fibres that run in random order from one point at which
// they meet to the next; the warps run one after another. A bulk copy takes place at a random time after it was issued,
// or when it is waited for. What is not emulated is the order of memory: a fence does nothing.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, nbytes)
#define ASAN_UNPOISON_MEMORY_REGION(address, nbytes)
#endif

#define __device__
#define __forceinline__ inline
#define __global__
#define __shared__ static
#define __align__(nbytes) __attribute__((aligned(nbytes)))
#define __launch_bounds__(threads)

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct Index {
  uint32_t x;
};

static Index threadIdx, blockIdx;

constexpr size_t MOST_SHARED = 1 << 20;
alignas(128) char all_memory[MOST_SHARED];  // as the kernel declares it

namespace emulated {

constexpr int LANES = 32;
constexpr size_t PAGE = 4096;
constexpr size_t BYTES = 1 << 18;  // of the source, and of the target
constexpr size_t STACK = 1 << 16;
constexpr int MOST_TRIES = 1 << 20;

std::mt19937_64 random_bits;
long run_number;

uint64_t between(uint64_t least, uint64_t most) { return least + random_bits() % (most - least + 1); }
bool one_in(uint64_t number) { return between(1, number) == 1; }

// --- what is copied -------------------------------------------------------------------------------------------------

alignas(PAGE) char source[BYTES];
alignas(PAGE) char target[BYTES];
std::vector<bool> may_read;   // of each page of the source, whether a block lies in it
std::vector<bool> may_write;  // of each byte of the target, whether it is a block's
std::vector<uint64_t> descriptors_and_cuts;
size_t shared_bytes;

// --- lanes ----------------------------------------------------------------------------------------------------------

enum State { RUNNING, MEETING, ENDED };

struct Lane {
  ucontext_t context;
  State state;
  int line;            // of the source, where it meets the others
  unsigned exchanges;  // shuffles it has taken part in
  char stack[STACK];
};

Lane lanes[LANES];
ucontext_t scheduler;
int current;
uint64_t exchanged[2][LANES];  // a lane may be at the next shuffle before all have read what they got from this one

void require(bool fine, const char *rule) {
  if (fine) return;
  printf("run %ld, program %u, thread %u: %s\n", run_number, blockIdx.x, threadIdx.x, rule);
  fflush(stdout);
  _Exit(1);
}

void pause() { swapcontext(&lanes[current].context, &scheduler); }

void meet(int line) {
  lanes[current].state = MEETING, lanes[current].line = line;
  pause();
}

// --- bulk copies ----------------------------------------------------------------------------------------------------

struct Barrier {
  uint32_t phase;
  bool arrived;
  int64_t expected;  // bytes that have still to come in this phase
};

struct Fetch {
  uint32_t stage;
  uint64_t from;
  uint32_t nbytes;
  uint32_t barrier;
};

struct Put {
  uint64_t to;
  uint32_t stage;
  uint32_t nbytes;
  int group;
  bool was_read;
  std::vector<char> bytes;
};

std::map<uint32_t, Barrier> barriers;
std::vector<Fetch> fetches;
std::vector<Put> puts;
int group;  // that the next put belongs to
int tries;  // of waits, since the last fetch arrived

// Shared addresses have 32 bits; that of a static variable counts from the dynamic shared memory, too.
char *pointer(uint32_t address) { return all_memory + static_cast<int32_t>(address); }

bool overlap(uint32_t first, uint32_t first_bytes, uint32_t second, uint32_t second_bytes) {
  return first < second + second_bytes && second < first + first_bytes;
}

void require_shared(uint32_t address, uint32_t nbytes) {
  require(uint64_t{address} + nbytes <= shared_bytes, "a bulk copy leaves the shared memory");
}

Barrier &barrier_at(uint32_t address) {
  const auto found = barriers.find(address);
  require(found != barriers.end(), "a barrier is used that was not initialized");
  return found->second;
}

void arrive(size_t which) {
  const Fetch fetch = fetches[which];
  fetches.erase(fetches.begin() + which);
  memcpy(pointer(fetch.stage), reinterpret_cast<const char *>(fetch.from), fetch.nbytes);
  Barrier &barrier = barrier_at(fetch.barrier);
  barrier.expected -= fetch.nbytes;
  require(barrier.expected >= 0, "more bytes arrive than the barrier expects");
  if (barrier.arrived && barrier.expected == 0) ++barrier.phase, barrier.arrived = false;
  tries = 0;
}

void read(Put &put) {
  if (put.was_read) return;
  put.bytes.assign(pointer(put.stage), pointer(put.stage) + put.nbytes);
  put.was_read = true;
}

void write(Put &put) {
  read(put);
  memcpy(reinterpret_cast<char *>(put.to), put.bytes.data(), put.nbytes);
}

void time_passes() {
  while (!fetches.empty() && one_in(3)) arrive(random_bits() % fetches.size());
  for (size_t i = 0; i < puts.size();) {
    if (one_in(4)) read(puts[i]);
    if (puts[i].was_read && one_in(4)) {
      write(puts[i]);
      puts.erase(puts.begin() + i);
    } else {
      ++i;
    }
  }
}

// --- the instructions -----------------------------------------------------------------------------------------------

void barrier_init(uint32_t barrier) {
  require(barrier % 8 == 0, "a barrier is not at a multiple of 8");
  require(barriers.emplace(barrier, Barrier{}).second, "a barrier is initialized twice");
}

void barrier_expect(uint32_t address, uint32_t nbytes) {
  Barrier &barrier = barrier_at(address);
  require(!barrier.arrived && barrier.expected == 0, "a stage is filled while a fetch into it is under way");
  require(nbytes < 1 << 20, "a barrier expects more bytes than it can count");
  barrier.arrived = true, barrier.expected = nbytes;
}

bool barrier_try_wait(uint32_t address, uint32_t parity) {
  const Barrier &barrier = barrier_at(address);
  if ((barrier.phase & 1) != parity) return true;
  require(++tries < MOST_TRIES, "a wait never ends");
  time_passes();
  if (one_in(8)) pause();
  return (barrier.phase & 1) != parity;
}

void fetch(uint32_t stage, uint64_t from, uint32_t nbytes, uint32_t barrier) {
  require(threadIdx.x % LANES == 0, "a lane that does not lead fetches");
  require(nbytes > 0 && nbytes % 16 == 0, "a fetch is not of a multiple of 16 bytes");
  require(from % 128 == 0, "a fetch does not begin at a multiple of 128");
  require(stage % 128 == 0, "a stage does not begin at a multiple of 128");
  require_shared(stage, nbytes);
  const uint64_t offset = from - reinterpret_cast<uint64_t>(source);
  require(offset < BYTES && nbytes <= BYTES - offset, "a fetch leaves the source");
  for (uint64_t page = offset / PAGE; page <= (offset + nbytes - 1) / PAGE; ++page)
    require(may_read[page], "a page is read in which no block lies");
  for (const Put &put : puts)
    require(put.was_read || !overlap(put.stage, put.nbytes, stage, nbytes), "a stage is filled while a put reads it");
  for (const Fetch &other : fetches)
    require(!overlap(other.stage, other.nbytes, stage, nbytes), "a stage is filled while a fetch into it is under way");
  memset(pointer(stage), 0xEE, nbytes);  // until it has arrived
  fetches.push_back({stage, from, nbytes, barrier});
  time_passes();
}

void put(uint64_t to, uint32_t stage, uint32_t nbytes) {
  require(threadIdx.x % LANES == 0, "a lane that does not lead puts");
  require(nbytes > 0 && nbytes % 16 == 0, "a put is not of a multiple of 16 bytes");
  require(to % 16 == 0 && stage % 16 == 0, "a put is not at multiples of 16");
  require_shared(stage, nbytes);
  const uint64_t offset = to - reinterpret_cast<uint64_t>(target);
  require(offset < BYTES && nbytes <= BYTES - offset, "a put leaves the target");
  for (uint64_t at = offset; at < offset + nbytes; ++at) require(may_write[at], "a byte is put that is no block's");
  puts.push_back({to, stage, nbytes, group, false, {}});
  time_passes();
}

void fence() {}

void commit_group() {
  require(threadIdx.x % LANES == 0, "a lane that does not lead commits a group");
  ++group;
}

void wait_group_read(int pending) {
  require(threadIdx.x % LANES == 0, "a lane that does not lead waits for groups");
  for (Put &put : puts)
    if (put.group < group - pending) read(put);
}

void wait_group(int pending) {
  require(threadIdx.x % LANES == 0, "a lane that does not lead waits for groups");
  std::vector<Put> left;
  for (Put &put : puts) {
    if (put.group < group - pending)
      write(put);
    else
      left.push_back(put);
  }
  puts.swap(left);
}

}  // namespace emulated

static uint64_t __cvta_generic_to_shared(const void *pointer) {
  return static_cast<uint32_t>(static_cast<const char *>(pointer) - all_memory);
}

static unsigned long long __ldcg(const unsigned long long *at) {
  const auto &all = emulated::descriptors_and_cuts;
  const auto *word = reinterpret_cast<const uint64_t *>(at);
  emulated::require(word >= all.data() && word < all.data() + all.size(), "a load leaves the descriptors and cuts");
  return *word;
}

static void __syncwarp(int line = __builtin_LINE()) { emulated::meet(line); }

static uint64_t __shfl_sync(unsigned, uint64_t value, int holder, int line = __builtin_LINE()) {
  emulated::require(holder >= 0 && holder < emulated::LANES, "a shuffle asks a lane that is not there");
  uint64_t *values = emulated::exchanged[emulated::lanes[emulated::current].exchanges++ % 2];
  values[emulated::current] = value;
  emulated::meet(line);
  return values[holder];
}

static uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
  return static_cast<uint32_t>((uint64_t{high} << 32 | low) >> (shift & 31));
}

static uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

#include "emulated_kernel.inc"

namespace emulated {

struct Launch {
  uint64_t blocks, programs;
  uint32_t stage_bytes, stages;
};

Launch launch;

void lane_body() {
  const uint64_t *descriptors = descriptors_and_cuts.data();
  h2d_patch_copy_blocks(descriptors, launch.blocks, descriptors + 3 * launch.blocks, launch.stage_bytes, launch.stages);
  lanes[current].state = ENDED;
  pause();
}

void start_lane(Lane &lane) {
  lane.state = RUNNING, lane.exchanges = 0;
  getcontext(&lane.context);
  lane.context.uc_stack.ss_sp = lane.stack;
  lane.context.uc_stack.ss_size = STACK;
  lane.context.uc_link = nullptr;
  makecontext(&lane.context, lane_body, 0);
}

void run_to_the_next_meeting(uint32_t warp) {
  int order[LANES];
  for (int i = 0; i < LANES; ++i) order[i] = i;
  std::shuffle(order, order + LANES, random_bits);
  for (bool running = true; running;) {
    running = false;
    for (const int lane : order) {
      if (lanes[lane].state != RUNNING) continue;
      current = lane, threadIdx.x = warp * LANES + lane;
      swapcontext(&scheduler, &lanes[lane].context);
      running = running || lanes[lane].state == RUNNING;
    }
  }
}

void run_warp(uint32_t program, uint32_t warp) {
  blockIdx.x = program;
  barriers.clear(), group = 0, tries = 0;
  for (Lane &lane : lanes) start_lane(lane);
  do {
    for (Lane &lane : lanes) lane.state = RUNNING;
    run_to_the_next_meeting(warp);
    for (const Lane &lane : lanes)
      require(lane.state == lanes[0].state && (lane.state == ENDED || lane.line == lanes[0].line),
              "the lanes of a warp do not meet at the same place");
  } while (lanes[0].state != ENDED);
  require(fetches.empty(), "a fetch is under way at the end");
  require(puts.empty(), "a put is not waited for at the end");
}

void fill_at_random(char *bytes) {
  for (size_t i = 0; i < BYTES; i += sizeof(uint64_t)) {
    const uint64_t word = random_bits();
    memcpy(bytes + i, &word, sizeof word);
  }
}

struct Block {
  uint64_t from, to, nbytes;  // from and to: offsets in the source and in the target
};

// All of one length or not, many or few, empty ones among them, aligned to some number or not, one behind the other in
// the target or with gaps, from anywhere in the source.
std::vector<Block> random_blocks() {
  const uint64_t alignments[] = {1, 4, 16, 16, 128}, most_blocks[] = {3, 20, 40, 200};
  const uint64_t alignment = alignments[between(0, 4)], number = between(1, most_blocks[between(0, 3)]);
  const uint64_t length_of_all = one_in(4) ? between(1, 6000) : 0;
  std::vector<Block> blocks;
  uint64_t to = between(0, 300) / alignment * alignment;
  for (uint64_t i = 0; i < number; ++i) {
    const uint64_t most_bytes[] = {0, 40, 3000, 3000, 3000, 20000};
    uint64_t nbytes = length_of_all ? length_of_all : between(0, most_bytes[between(0, 5)]);
    if (!length_of_all && one_in(2)) nbytes = nbytes / alignment * alignment;
    if (to + nbytes > BYTES) nbytes = 0;
    const uint64_t from = nbytes ? between(0, BYTES - nbytes) / alignment * alignment : between(0, BYTES);
    blocks.push_back({from, to, nbytes});
    if (nbytes) to += nbytes + (one_in(2) ? between(0, 200) : 0);
    to = std::min<uint64_t>((to + alignment - 1) / alignment * alignment, BYTES);
  }
  return blocks;
}

// Shares of whole KiB, cut as native.c cuts them.
void append_cuts(const std::vector<Block> &blocks, uint64_t total, uint64_t shares) {
  const uint64_t share = (total + shares * 1024 - 1) / (shares * 1024) * 1024;
  uint64_t block = 0, start = 0;
  for (uint64_t i = 0; i <= shares; ++i) {
    const uint64_t at = std::min(i * share, total);
    while (block < blocks.size() && start + blocks[block].nbytes <= at) start += blocks[block++].nbytes;
    descriptors_and_cuts.push_back(block);
    descriptors_and_cuts.push_back((at - start) & ~uint64_t{15});
  }
}

void run() {
  fill_at_random(source), fill_at_random(target);
  std::vector<char> wanted(target, target + BYTES);
  may_read.assign(BYTES / PAGE, false), may_write.assign(BYTES, false);
  uint64_t total = 0;
  std::vector<Block> blocks;
  while (!total) {
    blocks = random_blocks();
    for (const Block &block : blocks) total += block.nbytes;
  }
  std::vector<uint64_t> reads, writes, sizes;
  for (const Block &block : blocks) {
    reads.push_back(reinterpret_cast<uint64_t>(source) + block.from);
    writes.push_back(reinterpret_cast<uint64_t>(target) + block.to);
    sizes.push_back(block.nbytes);
    for (uint64_t i = 0; i < block.nbytes; ++i) {
      wanted[block.to + i] = source[block.from + i];
      may_read[(block.from + i) / PAGE] = true, may_write[block.to + i] = true;
    }
  }
  launch.blocks = blocks.size(), launch.programs = one_in(3) ? between(1, 40) : between(1, 3);
  descriptors_and_cuts = reads;
  descriptors_and_cuts.insert(descriptors_and_cuts.end(), writes.begin(), writes.end());
  descriptors_and_cuts.insert(descriptors_and_cuts.end(), sizes.begin(), sizes.end());
  append_cuts(blocks, total, launch.programs * WARPS);

  const uint32_t stage_bytes[] = {256, 384, 2048, 2048, 4096, 4096};
  launch.stage_bytes = stage_bytes[between(0, 5)];
  launch.stages = between(LAG + 1, one_in(2) ? 13 : MOST_STAGES);
  launch.stages = std::min<uint32_t>(launch.stages, (MOST_SHARED - 16) / (WARPS * launch.stage_bytes));
  shared_bytes = WARPS * launch.stages * launch.stage_bytes + 16;
  ASAN_UNPOISON_MEMORY_REGION(all_memory, MOST_SHARED);
  ASAN_POISON_MEMORY_REGION(all_memory + shared_bytes, MOST_SHARED - shared_bytes);

  for (uint32_t program = 0; program < launch.programs; ++program)
    for (uint32_t warp = 0; warp < WARPS; ++warp) run_warp(program, warp);
  for (size_t i = 0; i < BYTES; ++i)
    require(target[i] == wanted[i],
            may_write[i] ? "a byte of a block is wrong" : "a byte is written that is no block's");
}

}  // namespace emulated

int main(int, char **arguments) {
  emulated::random_bits.seed(strtoull(arguments[1], nullptr, 10));
  const long runs = strtol(arguments[2], nullptr, 10);
  while (emulated::run_number < runs) {
    ++emulated::run_number;
    emulated::run();
  }
  printf("%ld runs are right\n", emulated::run_number);
}
