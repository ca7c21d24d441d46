// Packed weights (docs/formats.md) times up to 16 tokens on tensor cores: what the products of a dense matrix and of
// experts share. -D BITS, KIND, GROUP name the format, BF16 the type of the activations.
//
// A unit is 8 tiles: 512 columns of a row block. A warp takes whole units and runs their tiles in order; a kernel
// adds the warps' sums in the order of the warps. So a result depends on the weights, its own token and K alone:
// rows are the same to the bit whatever the batch, and whatever the card's size.
//
// A warp always has a unit's worth of weights on their way to it: each pair of tiles that it has taken is replaced by
// the same pair of its next unit. On the way they lie in shared memory that only their lane touches (cp.async, sm_80
// on), or in registers (Turing).
//
// Codes become 16-bit values exactly: q's bits under an exponent that makes them 1024 + q (fp16) or 128 + q (bf16),
// less what the code of zero gives. Where a group has whole tiles, the exact integers are multiplied and the fp32
// sum of the group is scaled; else (groups of 16 and 32, minima, K-quants) the scale is put on the values, with one
// rounding to 16 bits. In fp16 such values carry a factor of 64, which keeps small weights out of the subnormals.
#pragma once

#include "mma.cuh"

enum Kinds { SYMMETRIC, ZERO, MINIMUM, FP8, K_QUANT, Q6_K };
constexpr int TILE_BYTES = 128 * BITS;
constexpr int BLOCK_TILES = KIND >= K_QUANT ? 4 : GROUP / 16;
constexpr int LINES = KIND == SYMMETRIC ? 1 : KIND == Q6_K ? 3 : 2;
constexpr int BLOCK_BYTES = 128 * LINES + BLOCK_TILES * TILE_BYTES;
constexpr int UNIT_TILES = 8;
constexpr int UNIT_BLOCKS = UNIT_TILES / BLOCK_TILES;
constexpr bool ON_VALUES = KIND == MINIMUM || KIND >= K_QUANT || GROUP < 64;
constexpr float VALUE_FACTOR = ON_VALUES && !BF16 ? 64.f : 1.f;
constexpr float SUM_FACTOR = 1.f / VALUE_FACTOR;
// A 4-bit code of an odd pair is left where it is, 16 times its worth: only fp16 has the bits for that.
constexpr bool HIGH_IN_PLACE = BITS == 4 && !BF16;
// What the exponent under the codes adds.
constexpr float BIAS = BF16 ? 128.f : 1024.f;

// Weights are read once and stay out of L1; volatile keeps them before a wait for the kernel before.
__device__ __forceinline__ uint4 read16(const unsigned char* p) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
__device__ __forceinline__ uint2 read8(const unsigned char* p) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
    return v;
}
__device__ __forceinline__ u32 read4(const unsigned char* p) {
    u32 v;
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

constexpr int UNIT_BYTES = UNIT_BLOCKS * BLOCK_BYTES;
#define ASYNC (__CUDA_ARCH__ >= 800)
// Blocks that a multiprocessor is to hold at least: where registers allow it.
#define MIN_BLOCKS (ASYNC && KIND < K_QUANT ? 2 : 1)
// The same for rows of 16 tokens: with zeros, minima or groups of 64 two blocks would leave too few registers.
#define ROWS_BLOCKS (NT == 2 && (KIND == ZERO || KIND == MINIMUM || GROUP == 64) ? 1 : MIN_BLOCKS)

constexpr int PAIRS = UNIT_TILES / 2;

// Where tile i of a unit and line l of its column block's header begin: in memory, and in shared memory alike.
__device__ __forceinline__ constexpr int header_at(int i, int l) { return i / BLOCK_TILES * BLOCK_BYTES + 128 * l; }
__device__ __forceinline__ constexpr int tile_at(int i) { return header_at(i, LINES) + i % BLOCK_TILES * TILE_BYTES; }

// A lane's words of a tile: BITS of them, since it has 32 of its values.
__device__ __forceinline__ void load_tile(const unsigned char* unit, int offset, int lane, u32 (&w)[BITS]) {
    const uint4 v = read16(unit + 16 * lane + offset);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    if constexpr (BITS == 5) w[4] = read4(unit + 4 * lane + offset + 512);
    if constexpr (BITS == 6) {
        const uint2 high = read8(unit + 8 * lane + offset + 512);
        w[4] = high.x, w[5] = high.y;
    }
    if constexpr (BITS == 8) {
        const uint4 second = read16(unit + 16 * lane + offset + 512);
        w[4] = second.x, w[5] = second.y, w[6] = second.z, w[7] = second.w;
    }
}

// The same words written to where `load_tile` would read them.
__device__ __forceinline__ void store_tile(unsigned char* unit, int offset, int lane, const u32 (&w)[BITS]) {
    *reinterpret_cast<uint4*>(unit + 16 * lane + offset) = make_uint4(w[0], w[1], w[2], w[3]);
    if constexpr (BITS == 5) *reinterpret_cast<u32*>(unit + 4 * lane + offset + 512) = w[4];
    if constexpr (BITS == 6) *reinterpret_cast<uint2*>(unit + 8 * lane + offset + 512) = make_uint2(w[4], w[5]);
    if constexpr (BITS == 8)
        *reinterpret_cast<uint4*>(unit + 16 * lane + offset + 512) = make_uint4(w[4], w[5], w[6], w[7]);
}
__device__ __forceinline__ void store_header(unsigned char* block, int lane, const u32 (&header)[LINES]) {
#pragma unroll
    for (int l = 0; l < LINES; l++) *reinterpret_cast<u32*>(block + 4 * lane + 128 * l) = header[l];
}

// The weights of one unit of R row blocks on their way to a warp.
template <int R>
struct Ring {
#if ASYNC
    unsigned char* slots;
    __device__ __forceinline__ Ring(unsigned char* shared, int warp) : slots(shared + warp * R * UNIT_BYTES) {}

    template <int SIZE>
    __device__ __forceinline__ static void copy(unsigned char* to, const unsigned char* from) {
        const u32 address = (u32)__cvta_generic_to_shared(to);
        if constexpr (SIZE == 16) {
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from) : "memory");
        } else {
            asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(SIZE) : "memory");
        }
    }
#else
    u32 w[R][UNIT_TILES][BITS], header[R][UNIT_BLOCKS][LINES];
    __device__ __forceinline__ Ring(unsigned char*, int) {}
#endif

    // Send for a pair of tiles, and for the headers of the column blocks that begin with them.
    __device__ __forceinline__ void fill(int pair, const unsigned char* const (&unit)[R], int lane) {
#pragma unroll
        for (int i = 2 * pair; i < 2 * pair + 2; i++)
#pragma unroll
            for (int r = 0; r < R; r++) {
#if ASYNC
                unsigned char* to = slots + r * UNIT_BYTES;
                if (i % BLOCK_TILES == 0)
#pragma unroll
                    for (int l = 0; l < LINES; l++)
                        copy<4>(to + 4 * lane + header_at(i, l), unit[r] + 4 * lane + header_at(i, l));
                to += tile_at(i);
                const unsigned char* from = unit[r] + tile_at(i);
                copy<16>(to + 16 * lane, from + 16 * lane);
                if constexpr (BITS == 5) copy<4>(to + 4 * lane + 512, from + 4 * lane + 512);
                if constexpr (BITS == 6) copy<8>(to + 8 * lane + 512, from + 8 * lane + 512);
                if constexpr (BITS == 8) copy<16>(to + 16 * lane + 512, from + 16 * lane + 512);
#else
                if (i % BLOCK_TILES == 0)
#pragma unroll
                    for (int l = 0; l < LINES; l++)
                        header[r][i / BLOCK_TILES][l] = read4(unit[r] + 4 * lane + header_at(i, l));
                load_tile(unit[r], tile_at(i), lane, w[r][i]);
#endif
            }
    }

    // Ends what a pair sends for; every pair does, so that `wait` can count.
    __device__ __forceinline__ static void commit() {
#if ASYNC
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }
    // The pair sent for a unit ago is there.
    __device__ __forceinline__ static void wait() {
#if ASYNC
        asm volatile("cp.async.wait_group %0;" ::"n"(PAIRS - 1) : "memory");
#endif
    }

    __device__ __forceinline__ void take(int i, int r, int lane, u32 (&to)[BITS], u32 (&head)[LINES]) const {
#if ASYNC
        const unsigned char* from = slots + r * UNIT_BYTES;
        if (i % BLOCK_TILES == 0)
#pragma unroll
            for (int l = 0; l < LINES; l++) head[l] = *reinterpret_cast<const u32*>(from + 4 * lane + header_at(i, l));
        from += tile_at(i);
        const uint4 v = *reinterpret_cast<const uint4*>(from + 16 * lane);
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        if constexpr (BITS == 5) to[4] = *reinterpret_cast<const u32*>(from + 4 * lane + 512);
        if constexpr (BITS == 6) {
            const uint2 high = *reinterpret_cast<const uint2*>(from + 8 * lane + 512);
            to[4] = high.x, to[5] = high.y;
        }
        if constexpr (BITS == 8) {
            const uint4 second = *reinterpret_cast<const uint4*>(from + 16 * lane + 512);
            to[4] = second.x, to[5] = second.y, to[6] = second.z, to[7] = second.w;
        }
#else
        // A header leaves with the first tile of its block: its place is filled again at once.
        if (i % BLOCK_TILES == 0)
#pragma unroll
            for (int l = 0; l < LINES; l++) head[l] = header[r][i / BLOCK_TILES][l];
#pragma unroll
        for (int k = 0; k < BITS; k++) to[k] = w[r][i][k];
#endif
    }
};

// Pairs of 16-bit values.
__device__ __forceinline__ u32 twice(float x) { return Act::pack(x, x); }
#if BF16
__device__ __forceinline__ __nv_bfloat162 as_pair(u32 v) { return *reinterpret_cast<__nv_bfloat162*>(&v); }
__device__ __forceinline__ u32 as_bits(__nv_bfloat162 v) { return *reinterpret_cast<u32*>(&v); }
#else
__device__ __forceinline__ __half2 as_pair(u32 v) { return *reinterpret_cast<__half2*>(&v); }
__device__ __forceinline__ u32 as_bits(__half2 v) { return *reinterpret_cast<u32*>(&v); }
#endif
__device__ __forceinline__ u32 add(u32 a, u32 b) { return as_bits(__hadd2(as_pair(a), as_pair(b))); }
__device__ __forceinline__ u32 mul(u32 a, u32 b) { return as_bits(__hmul2(as_pair(a), as_pair(b))); }
// (x & mask) | bits in one instruction; written with C's operators it takes two, one for each constant.
__device__ __forceinline__ u32 and_or(u32 x, u32 mask, u32 bits) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(x), "r"(mask), "r"(bits));
    return v;
}
__device__ __forceinline__ u32 fma(u32 a, u32 b, u32 c) {
    return as_bits(__hfma2(as_pair(a), as_pair(b), as_pair(c)));
}

// What a lane needs of a group's or sub-block's header for its rows g and g + 8.
struct Scale {
    float sum[2];    // fp32 factor of a group's sum
    u32 less[2];     // pair: minus what is to be taken from the bits under the exponent
    u32 value[2];    // pair: factor of values
    u32 minimum[2];  // pair: added to values
};

// Fragment A of k-step j (0..3): exact codes less their zero, scaled where scales are on values.
__device__ __forceinline__ void decode(const u32 (&w)[BITS], int j, const Scale& s, u32 (&a)[4]) {
#pragma unroll
    for (int p = 0; p < 4; p++) {
        const int row = p & 1;  // pair p is of row g (even) or g + 8 (odd)
        u32 v;
        if constexpr (KIND == FP8) {
            // e4m3's sign, exponent and mantissa where fp16 or bf16 have theirs: worth 2^-8 or 2^-120.
            const u32 x = __byte_perm(w[2 * j + p / 2], 0, p & 1 ? 0x3424 : 0x1404);
#if BF16
            v = mul((x & 0x80008000u) | ((x >> 4) & 0x07f007f0u), 0x7b807b80u);
#else
            v = (x & 0x80008000u) | ((x >> 1) & 0x3f803f80u);
#endif
        } else if constexpr (BITS == 8) {
            const u32 x = __byte_perm(w[2 * j + p / 2], 0, p & 1 ? 0x4342 : 0x4140);
#if BF16
            // Seven bits fit under the exponent; the eighth decides whether 128 or 256 is taken away: q - 128.
            v = as_bits(__hsub2(as_pair(and_or(x, 0x007f007fu, 0x43004300u)), as_pair((x & 0x00800080u) ^ 0x43804380u)));
            if constexpr (KIND != SYMMETRIC) v = add(v, s.less[row]);
#else
            v = add(x | 0x64006400u, s.less[row]);
#endif
        } else if constexpr (HIGH_IN_PLACE) {
            const u32 x = p < 2 ? w[j] : w[j] >> 8;
            if (p & 1) {
                v = fma(and_or(x, 0x00f000f0u, 0x64006400u), 0x2c002c00u, s.less[1]);
            } else {
                v = add(and_or(x, 0x000f000fu, 0x64006400u), s.less[0]);
            }
        } else {
            u32 x = and_or(w[j] >> (4 * p), 0x000f000fu, BF16 ? 0x43004300u : 0x64006400u);
            if constexpr (BITS == 5) {
                const int shift = 4 * p + j - 4;  // to bit 4
                x |= (shift < 0 ? w[4] << -shift : w[4] >> shift) & 0x00100010u;
            }
            if constexpr (BITS == 6) {
                const int shift = 4 * p + 2 * (j & 1) - 4;
                x |= (shift < 0 ? w[4 + j / 2] << -shift : w[4 + j / 2] >> shift) & 0x00300030u;
            }
            v = add(x, s.less[row]);
        }
        if constexpr (KIND == MINIMUM || KIND == K_QUANT) {
            v = fma(v, s.value[row], s.minimum[row]);
        } else if constexpr (ON_VALUES) {
            v = mul(v, s.value[row]);
        }
        a[p] = v;
    }
}

// `less` for a zero point of `zero` in row half `row`.
__device__ __forceinline__ u32 less_for(float zero, int row) {
    if constexpr (BF16 && BITS == 8) return twice(128.f - zero);
    if (HIGH_IN_PLACE && row == 1) return twice(-(BIAS / 16 + zero));
    return twice(-(BIAS + zero));
}

// Scales of tile `i` of a column block, from its header lines, one word of each in each lane.
__device__ __forceinline__ Scale scale_of(const u32 (&header)[LINES], int i, int lane) {
    const int g = lane >> 2, t = lane & 3;
    Scale s;
#pragma unroll
    for (int row = 0; row < 2; row++) {
        const int r = g + 8 * row;
        if constexpr (KIND == K_QUANT) {
            const int sub = 2 * i + (t >> 1);
            const u32 low = __shfl_sync(~0u, header[0], 2 * r + (i >> 1)) >> (8 * (sub & 3));
            const u32 high = __shfl_sync(~0u, header[1], r) >> (4 * sub);
            const u32 super = __shfl_sync(~0u, header[1], 16 + r);
            const float d = Fp16::low(super), dmin = Fp16::high(super);
            s.value[row] = twice(VALUE_FACTOR * d * (float)((low & 15) | ((high & 3) << 4)));
            s.minimum[row] = twice(-VALUE_FACTOR * dmin * (float)(((low >> 4) & 15) | ((high & 12) << 2)));
            s.less[row] = less_for(0, row);
        } else if constexpr (KIND == Q6_K) {
            const u32 word = __shfl_sync(~0u, header[row], 4 * g + i);
            const float d = Fp16::low(__shfl_sync(~0u, header[2], r >> 1) >> (16 * (r & 1)));
            s.value[row] = twice(VALUE_FACTOR * d * (float)(signed char)(word >> (8 * t)));
            s.less[row] = less_for(32, row);
        } else if constexpr (KIND == FP8) {
            const int group = 64 * i / GROUP;
            const u32 word = group < 2 ? header[0] : header[LINES - 1];
            s.sum[row] = __uint_as_float(__shfl_sync(~0u, word, (group & 1) * 16 + r)) * (BF16 ? 1.f : 256.f);
        } else {
            const int group = (64 * i + (GROUP < 64 ? 16 * t : 0)) / GROUP;
            const int source = 8 * group + (r >> 1);
            const u32 half = r & 1 ? 0x3232 : 0x1010;
            const u32 scale = __byte_perm(__shfl_sync(~0u, header[0], source), 0, half);
            s.less[row] = less_for(KIND == SYMMETRIC ? (float)(1 << (BITS - 1)) : 0.f, row);
            if constexpr (ON_VALUES) {
                s.value[row] = twice(VALUE_FACTOR * Fp16::low(scale));
            } else {
                s.sum[row] = Fp16::low(scale);
            }
            if constexpr (KIND != SYMMETRIC) {
                const float second = Fp16::low(__byte_perm(__shfl_sync(~0u, header[LINES - 1], source), 0, half));
                if constexpr (KIND == ZERO) s.less[row] = less_for(second, row);
                if constexpr (KIND == MINIMUM) s.minimum[row] = twice(VALUE_FACTOR * second);
            }
        }
    }
    return s;
}

// A lane's token rows: of token column g in each group of 8, from its 16 columns of the first tile on.
template <int N8>
struct Tokens {
    const unsigned char* row[N8];

    // Words 2j and 2j + 1 are fragment B of k-step j.
    __device__ __forceinline__ void load(int tile, u32 (&x)[N8][8]) const {
#pragma unroll
        for (int n = 0; n < N8; n++) {
            const uint4* p = reinterpret_cast<const uint4*>(row[n] + 128 * tile);
            const uint4 u = p[0], v = p[1];
            x[n][0] = u.x, x[n][1] = u.y, x[n][2] = u.z, x[n][3] = u.w;
            x[n][4] = v.x, x[n][5] = v.y, x[n][6] = v.z, x[n][7] = v.w;
        }
    }

    __device__ __forceinline__ void load_pair(int tile, u32 (&x)[2][N8][8]) const {
        load(tile, x[0]);
        load(tile + 1, x[1]);
    }
};

// One tile of one row block: fragments times tokens, added to sum.
template <int N8>
__device__ __forceinline__ void multiply(const u32 (&w)[BITS], const Scale& s, const u32 (&x)[N8][8],
                                         float (&sum)[N8][4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        u32 a[4];
        decode(w, j, s, a);
#pragma unroll
        for (int n = 0; n < N8; n++) Act::mma(sum[n], a, x[n][2 * j], x[n][2 * j + 1]);
    }
}

template <int N8>
__device__ __forceinline__ void add_scaled(const Scale& s, const float (&part)[N8][4], float (&acc)[N8][4]) {
#pragma unroll
    for (int n = 0; n < N8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) acc[n][e] = fmaf(s.sum[e >> 1], part[n][e], acc[n][e]);
}

// Adds to acc[r] (fragment D, times VALUE_FACTOR) the units first, first + step, .. of R row blocks at rows[r].
// Weights are sent for before the wait for the kernel before, tokens are read after it. `filled`: the first unit has
// been sent for already. after: the first unit that the warp will take next, or null: it is sent for at the end.
// keep: how far from where they are read the weights are written too; 0: nowhere.
template <int R, int N8, bool KEEP = false>
__device__ __forceinline__ void add_units(Ring<R>& ring, const unsigned char* const (&rows)[R], int first, int step,
                                          int num_tiles, const Tokens<N8>& tokens, int lane, float (&acc)[R][N8][4],
                                          bool filled = false, const unsigned char* after = nullptr, u64 keep = 0) {
    constexpr bool PREFETCH = N8 == 1;  // with more tokens there are no registers for it
    constexpr bool LATE = !ASYNC && (R * N8 == 4 || R * BITS == 16);  // nor for a whole unit
    const int whole = num_tiles / UNIT_TILES;
    const unsigned char *next[R], *now_at[R];
#pragma unroll
    for (int r = 0; r < R; r++) next[r] = rows[r] + (size_t)first * UNIT_BYTES;
    if (!LATE && first < whole && !filled)
#pragma unroll
        for (int pair = 0; pair < PAIRS; pair++) {
            ring.fill(pair, next, lane);
            ring.commit();
        }
    wait_for_previous();
    int unit = first;
    u32 header[R][LINES], x[2][2][N8][8];  // tokens of a pair and of the pair after it
    // Even and odd tiles have sums of their own: a tensor-core product waits for the one before it.
    float odd[R][N8][4] = {};
    if (PREFETCH && unit < whole) tokens.load_pair(unit * UNIT_TILES, x[0]);
#pragma unroll 1
    for (; unit < whole; unit += step) {
        const bool more = unit + step < whole;
#pragma unroll
        for (int r = 0; r < R; r++) {
            now_at[r] = rows[r] + (size_t)unit * UNIT_BYTES;
            next[r] = more ? now_at[r] + (size_t)step * UNIT_BYTES : after;
        }
        // Unrolled whole only for a ring in registers: else the compiler takes all tiles at once and few warps fit.
#pragma unroll(!ASYNC ? PAIRS : PREFETCH ? 2 : 1)
        for (int pair = 0; pair < PAIRS; pair++) {
            const int tile = unit * UNIT_TILES + 2 * pair;
            u32(&now)[2][N8][8] = x[PREFETCH ? pair & 1 : 0];
            if (!PREFETCH) {
                tokens.load_pair(tile, now);
            } else if (pair + 1 < PAIRS) {
                tokens.load_pair(tile + 2, x[(pair + 1) & 1]);
            } else if (more) {
                tokens.load_pair((unit + step) * UNIT_TILES, x[(pair + 1) & 1]);
            }
            if (LATE) ring.fill(pair, now_at, lane);
            ring.wait();
#pragma unroll
            for (int r = 0; r < R; r++) {
                float part[2][N8][4] = {};
#pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int i = 2 * pair + j;
                    u32 w[BITS];
                    ring.take(i, r, lane, w, header[r]);
                    if (KEEP && keep != 0) {
                        unsigned char* copy = const_cast<unsigned char*>(now_at[r]) + keep;
                        store_tile(copy, tile_at(i), lane, w);
                        if (i % BLOCK_TILES == 0) store_header(copy + header_at(i, 0), lane, header[r]);
                    }
                    const Scale s = scale_of(header[r], i % BLOCK_TILES, lane);
                    if constexpr (ON_VALUES) {
                        multiply(w, s, now[j], j ? odd[r] : acc[r]);
                    } else {
                        multiply(w, s, now[j], part[j]);
                        if (GROUP == 64) add_scaled(s, part[j], acc[r]);
                        if (GROUP == 128 && j == 1) {
#pragma unroll
                            for (int n = 0; n < N8; n++)
#pragma unroll
                                for (int e = 0; e < 4; e++) part[0][n][e] += part[1][n][e];
                            add_scaled(s, part[0], acc[r]);
                        }
                    }
                }
            }
            if (!LATE && next[0] != nullptr) ring.fill(pair, next, lane);
            ring.commit();
        }
    }
    if constexpr (ON_VALUES)
#pragma unroll
        for (int r = 0; r < R; r++)
#pragma unroll
            for (int n = 0; n < N8; n++)
#pragma unroll
                for (int e = 0; e < 4; e++) acc[r][n][e] += odd[r][n][e];
    if (unit != whole) return;
#pragma unroll 1
    for (int tile = whole * UNIT_TILES; tile < num_tiles; tile++) {  // of a K that is no multiple of 512
        u32 x[N8][8];
        tokens.load(tile, x);
#pragma unroll
        for (int r = 0; r < R; r++) {
            const unsigned char* block = rows[r] + (size_t)(tile / BLOCK_TILES) * BLOCK_BYTES;
            u32 header[LINES], w[BITS];
#pragma unroll
            for (int l = 0; l < LINES; l++) header[l] = read4(block + 4 * lane + 128 * l);
            load_tile(block, 128 * LINES + tile % BLOCK_TILES * TILE_BYTES, lane, w);
            if (KEEP && keep != 0) {
                unsigned char* copy = const_cast<unsigned char*>(block) + keep;
                store_tile(copy, 128 * LINES + tile % BLOCK_TILES * TILE_BYTES, lane, w);
                store_header(copy, lane, header);
            }
            const Scale s = scale_of(header, tile % BLOCK_TILES, lane);
            if constexpr (ON_VALUES) {
                multiply(w, s, x, acc[r]);
            } else {
                float part[N8][4] = {};
                multiply(w, s, x, part);
                add_scaled(s, part, acc[r]);
            }
        }
    }
}

// Bytes of one row block.
__device__ __forceinline__ size_t row_bytes(int num_tiles) {
    return (size_t)((num_tiles + BLOCK_TILES - 1) / BLOCK_TILES) * (128 * LINES) + (size_t)num_tiles * TILE_BYTES;
}

// A fragment D in shared memory: 16 rows of a token side by side; 20 floats a token keep the banks apart.
constexpr int TOKEN_FLOATS = 20;

template <int N8>
__device__ __forceinline__ void put_sums(float* to, int lane, const float (&acc)[N8][4]) {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int n = 0; n < N8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[(8 * n + 2 * t + (e & 1)) * TOKEN_FLOATS + g + 8 * (e >> 1)] = acc[n][e] * SUM_FACTOR;
}
