// Many small blocks between pinned host memory and the device, in either direction, by bulk asynchronous copies through
// shared memory (Hopper and later). What a server loads is swap_bulk.ptx, made from this by tools/make_ptx.py.
//
// Why: such copies keep tens of pieces in flight with one thread, so that a few SMs reach the speed of the link where a
// kernel that loads and stores by itself needs many (docs/swap.md).
//
// A few warps in each program, each for itself: what one issues takes it some 0.6 us a piece, whatever its size. It walks
// its share of the bytes, block by block and piece by piece: a piece is fetched into a stage of shared memory, and leaves
// it again when it has arrived. Lane 0 issues the bulk copies. They take multiples of 16 bytes at multiples of 16, and
// are slow over the link unless they begin at a multiple of 128: what lies in front of a piece since the last such
// address is fetched too (it lies in the same page), and where it must, the warp itself writes the piece and no more.

#include <stdint.h>

namespace {

constexpr int WARPS = 4;
constexpr int LAG = 4;  // stages of a warp that are being emptied while the others are being filled
constexpr int MOST_STAGES = 56;
constexpr uint32_t LINE = 128;
constexpr unsigned ALL = 0xffffffffu;

struct Piece {
  uint64_t target;
  uint32_t nbytes;
  uint32_t skip;  // bytes in front of it that were fetched too
};

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void expect(uint64_t *barrier, uint32_t nbytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(nbytes)
               : "memory");
}

__device__ __forceinline__ void wait(uint64_t *barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n\t.reg .pred p;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, p;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

__device__ __forceinline__ void fetch(void *stage, uint64_t source, uint32_t nbytes, uint64_t *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(stage)),
               "l"(source), "r"(nbytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void put(uint64_t target, const void *stage, uint32_t nbytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(shared_address(stage)), "r"(nbytes)
               : "memory");
}

__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Descriptors may lie in host memory. Of a relaxed load each lane's would cross the link by itself.
__device__ __forceinline__ uint64_t load(const uint64_t *at) {
  return __ldcg(reinterpret_cast<const unsigned long long *>(at));
}

// The descriptors of 32 blocks in the registers of a warp, and those of the next 32 on their way.
struct Window {
  uint32_t lane;
  const uint64_t *descriptors;
  uint64_t blocks;
  uint64_t first;
  uint64_t read, write, nbytes, next_read, next_write, next_nbytes;

  __device__ void load_next(uint64_t start) {
    const uint64_t block = start + lane;
    if (block < blocks) {
      next_read = load(descriptors + block);
      next_write = load(descriptors + blocks + block);
      next_nbytes = load(descriptors + 2 * blocks + block);
    }
  }

  __device__ void advance() {
    read = next_read, write = next_write, nbytes = next_nbytes;
    load_next(first + 32);
  }

  __device__ void open(uint64_t block) {
    first = block;
    load_next(block);
    advance();
  }

  __device__ void get(uint64_t block, uint64_t &from, uint64_t &to, uint64_t &size) {
    if (block >= first + 32) {
      first += 32;
      advance();
    }
    const int holder = static_cast<int>(block - first);
    from = __shfl_sync(ALL, read, holder);
    to = __shfl_sync(ALL, write, holder);
    size = __shfl_sync(ALL, nbytes, holder);
  }
};

// A warp's share: from byte `offset` of `block` to byte `end_offset` of `end_block`.
struct Walk {
  uint64_t block, offset, end_block, end_offset;
  uint64_t source, target, end;  // of `block`; `end` is where this warp's part of it ends
  bool fresh;                    // `block` has not been looked up

  // The next piece of at most `most` bytes including what is skipped; false at the end.
  __device__ bool next(Window &window, uint32_t most, uint64_t &from, Piece &piece) {
    for (;;) {
      if (fresh) {
        if (block > end_block || (block == end_block && end_offset == 0)) return false;
        window.get(block, source, target, end);
        if (block == end_block) end = end_offset;
        fresh = false;
      }
      if (offset < end) break;
      ++block, offset = 0, fresh = true;
    }
    const uint64_t start = source + offset;
    piece.skip = static_cast<uint32_t>(start & (LINE - 1));
    const uint64_t left = end - offset, room = most - piece.skip;
    piece.nbytes = static_cast<uint32_t>(left < room ? left : room);
    piece.target = target + offset;
    from = start - piece.skip;
    offset += piece.nbytes;
    return true;
  }
};

// By all lanes: a piece that no bulk copy can write, from shared memory at `at` to `target`.
__device__ __forceinline__ void write_odd(const char *at, uint64_t target, uint32_t nbytes, uint32_t lane) {
  char *to = reinterpret_cast<char *>(target);
  const uint32_t before = static_cast<uint32_t>(-target & 15);
  const uint32_t head = before < nbytes ? before : nbytes;
  if (lane < head) to[lane] = at[lane];
  at += head, to += head, nbytes -= head;
  const uint32_t shift = static_cast<uint32_t>(reinterpret_cast<uint64_t>(at) & 3);
  const uint32_t *words = reinterpret_cast<const uint32_t *>(at - shift);
  for (uint32_t i = lane; i < nbytes / 16; i += 32) {
    const uint32_t *from = words + 4 * i;
    uint32_t w0 = from[0], w1 = from[1], w2 = from[2], w3 = from[3];
    if (shift) {
      const uint32_t w4 = from[4];
      w0 = __funnelshift_r(w0, w1, 8 * shift), w1 = __funnelshift_r(w1, w2, 8 * shift);
      w2 = __funnelshift_r(w2, w3, 8 * shift), w3 = __funnelshift_r(w3, w4, 8 * shift);
    }
    reinterpret_cast<uint4 *>(to)[i] = make_uint4(w0, w1, w2, w3);
  }
  const uint32_t whole = nbytes & ~15u;
  if (lane < nbytes - whole) to[whole + lane] = at[whole + lane];
}

}  // namespace

// descriptors: uint64 [3, blocks], addresses to read, addresses to write, bytes. cuts: uint64 [programs * WARPS + 1, 2],
// (block, offset in it) where the share of each warp begins and the last one ends. Shared memory:
// WARPS * stages * stage_bytes + 16. stage_bytes: a multiple of LINE, larger than it. stages: LAG + 1 to MOST_STAGES.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    h2d_patch_copy_blocks(const uint64_t *descriptors, uint64_t blocks, const uint64_t *cuts, uint32_t stage_bytes,
                          uint32_t stages) {
  extern __shared__ __align__(128) char all_memory[];
  __shared__ uint64_t all_barriers[WARPS][MOST_STAGES];
  __shared__ Piece all_pieces[WARPS][MOST_STAGES];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool leads = lane == 0;
  char *memory = all_memory + warp * stages * stage_bytes;
  uint64_t *barriers = all_barriers[warp];
  Piece *pieces = all_pieces[warp];

  for (uint32_t i = lane; i < stages; i += 32)
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barriers + i)) : "memory");
  proxy_fence();
  __syncwarp();

  Walk walk;
  const uint64_t cut = load(cuts + 2 * (blockIdx.x * WARPS + warp) + (lane & 3));
  walk.block = __shfl_sync(ALL, cut, 0), walk.offset = __shfl_sync(ALL, cut, 1);
  walk.end_block = __shfl_sync(ALL, cut, 2), walk.end_offset = __shfl_sync(ALL, cut, 3);
  walk.fresh = true;
  Window window = {};
  window.lane = lane, window.descriptors = descriptors, window.blocks = blocks;
  window.open(walk.block);

  uint32_t filling = 0, emptying = 0, parity = 0, under_way = 0;
  bool more = true;
  auto fill = [&] {
    uint64_t from;
    Piece piece;
    more = walk.next(window, stage_bytes, from, piece);
    if (!more) return;
    if (leads) {
      pieces[filling] = piece;
      const uint32_t fetched = (piece.skip + piece.nbytes + 15) & ~15u;
      expect(barriers + filling, fetched);
      fetch(memory + filling * stage_bytes, from, fetched, barriers + filling);
    }
    if (++filling == stages) filling = 0;
    ++under_way;
  };

  while (more && under_way < stages - LAG) fill();
  __syncwarp();
  while (under_way) {
    wait(barriers + emptying, parity);
    const Piece piece = pieces[emptying];
    const char *at = memory + emptying * stage_bytes + piece.skip;
    const uint32_t whole = ((piece.target | piece.skip) & 15) == 0 ? piece.nbytes & ~15u : 0;
    if (whole && leads) put(piece.target, at, whole);
    if (whole < piece.nbytes) {
      write_odd(at + whole, piece.target + whole, piece.nbytes - whole, lane);
      proxy_fence();  // what was read is read before the stage is filled again
    }
    if (leads) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (++emptying == stages) emptying = 0, parity ^= 1;
    --under_way;
    if (more) {
      if (leads) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LAG) : "memory");
      __syncwarp();
      fill();
      __syncwarp();
    }
  }
  if (leads) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
