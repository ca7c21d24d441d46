// Packed weights (docs/formats.md) times up to 16 tokens on tensor cores: what the products of a dense matrix and of
// experts share. -D BITS, KIND, GROUP name the format, BF16 the type of the activations.
//
// A unit is 8 tiles: 512 columns of a row block. A warp takes whole units, loads a unit's weights at once and runs
// its tiles in order; a kernel adds the warps' sums in the order of the warps. So a result depends on the weights,
// its own token and K alone: rows are the same to the bit whatever the batch, and whatever the card's size.
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

// Where a lane reads in a stretch of column blocks: one address for each width, so that the rest are constants.
struct Source {
    const unsigned char *of16, *of8, *of4;
    __device__ __forceinline__ Source(const unsigned char* start, int lane)
        : of16(start + 16 * lane), of8(start + 8 * lane), of4(start + 4 * lane) {}
};

// A lane's words of the tile at `offset`: BITS of them, since it has 32 of the tile's values.
__device__ __forceinline__ void load_tile(const Source& source, int offset, u32 (&w)[BITS]) {
    const uint4 v = read16(source.of16 + offset);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
    if constexpr (BITS == 5) w[4] = read4(source.of4 + offset + 512);
    if constexpr (BITS == 6) {
        const uint2 high = read8(source.of8 + offset + 512);
        w[4] = high.x, w[5] = high.y;
    }
    if constexpr (BITS == 8) {
        const uint4 second = read16(source.of16 + offset + 512);
        w[4] = second.x, w[5] = second.y, w[6] = second.z, w[7] = second.w;
    }
}

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
            v = as_bits(__hsub2(as_pair((x & 0x007f007fu) | 0x43004300u), as_pair((x & 0x00800080u) ^ 0x43804380u)));
            if constexpr (KIND != SYMMETRIC) v = add(v, s.less[row]);
#else
            v = add(x | 0x64006400u, s.less[row]);
#endif
        } else if constexpr (HIGH_IN_PLACE) {
            const u32 x = p < 2 ? w[j] : w[j] >> 8;
            if (p & 1) {
                v = fma((x & 0x00f000f0u) | 0x64006400u, 0x2c002c00u, s.less[1]);
            } else {
                v = add((x & 0x000f000fu) | 0x64006400u, s.less[0]);
            }
        } else {
            u32 x = (w[j] >> (4 * p)) & 0x000f000fu;
            if constexpr (BITS == 5) {
                const int shift = 4 * p + j - 4;  // to bit 4
                x |= (shift < 0 ? w[4] << -shift : w[4] >> shift) & 0x00100010u;
            }
            if constexpr (BITS == 6) {
                const int shift = 4 * p + 2 * (j & 1) - 4;
                x |= (shift < 0 ? w[4 + j / 2] << -shift : w[4 + j / 2] >> shift) & 0x00300030u;
            }
            v = add(x | (BF16 ? 0x43004300u : 0x64006400u), s.less[row]);
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

// Weights of STEP tiles of R row blocks, and the headers of the column blocks that they are of.
template <int R, int STEP>
struct Step {
    static constexpr int HEADERS = STEP > BLOCK_TILES ? STEP / BLOCK_TILES : 1;
    u32 header[R][HEADERS][LINES], w[R][STEP][BITS];

    // start: first tile, in its unit. `last` is the step before: it may be of the same column block.
    __device__ __forceinline__ void load(const unsigned char* const (&unit)[R], int start, int lane, const Step& last) {
#pragma unroll
        for (int r = 0; r < R; r++) {
            const Source source(unit[r] + (start / BLOCK_TILES) * BLOCK_BYTES, lane);
#pragma unroll
            for (int h = 0; h < HEADERS; h++)
#pragma unroll
                for (int l = 0; l < LINES; l++)
                    header[r][h][l] = start % BLOCK_TILES == 0 ? read4(source.of4 + h * BLOCK_BYTES + 128 * l)
                                                               : last.header[r][h][l];
        }
#pragma unroll
        for (int i = 0; i < STEP; i++)
#pragma unroll
            for (int r = 0; r < R; r++) {
                const Source source(unit[r] + (start / BLOCK_TILES) * BLOCK_BYTES +
                                        (STEP < BLOCK_TILES ? start % BLOCK_TILES * TILE_BYTES : 0),
                                    lane);
                load_tile(source, i / BLOCK_TILES * BLOCK_BYTES + 128 * LINES + i % BLOCK_TILES * TILE_BYTES, w[r][i]);
            }
    }
};

// Adds to acc[r] (fragment D, times VALUE_FACTOR) unit `unit` of R row blocks that start at rows[r].
// Weights are loaded before the wait for the kernel before, tokens after.
template <int R, int N8>
__device__ __forceinline__ void add_unit(const unsigned char* const (&rows)[R], int unit, int num_tiles,
                                         const Tokens<N8>& tokens, int lane, float (&acc)[R][N8][4]) {
    // Tiles whose weights are loaded together. With 16 tokens the loop stays one: unrolled, the compiler fills all
    // registers with tokens read early, and spills.
    constexpr int STEP = N8 == 2 ? 2 : BITS * R <= 6 ? 8 : BITS * R <= 12 ? 4 : 2;
    constexpr int GROUP_TILES = ON_VALUES ? 1 : GROUP / 64;
    const int first = unit * UNIT_TILES;
    if (first + UNIT_TILES <= num_tiles) {
        const unsigned char* starts[R];
#pragma unroll
        for (int r = 0; r < R; r++) starts[r] = rows[r] + (size_t)unit * (UNIT_BLOCKS * BLOCK_BYTES);
        Step<R, STEP> now, next;
        float part[R][N8][4];
        now.load(starts, 0, lane, now);
        wait_for_previous();
#pragma unroll(N8 == 2 ? 1 : UNIT_TILES / STEP)
        for (int start = 0; start < UNIT_TILES; start += STEP) {
            if (start + STEP < UNIT_TILES) next.load(starts, start + STEP, lane, now);
#pragma unroll
            for (int i = 0; i < STEP; i++) {
                u32 x[N8][8];
                tokens.load(first + start + i, x);
#pragma unroll
                for (int r = 0; r < R; r++) {
                    const int in_block = STEP < BLOCK_TILES ? start % BLOCK_TILES + i : i % BLOCK_TILES;
                    const Scale s = scale_of(now.header[r][i / BLOCK_TILES], in_block, lane);
                    if constexpr (ON_VALUES) {
                        multiply(now.w[r][i], s, x, acc[r]);
                    } else {
                        if (i % GROUP_TILES == 0)
#pragma unroll
                            for (int n = 0; n < N8; n++)
#pragma unroll
                                for (int e = 0; e < 4; e++) part[r][n][e] = 0;
                        multiply(now.w[r][i], s, x, part[r]);
                        if (i % GROUP_TILES == GROUP_TILES - 1) add_scaled(s, part[r], acc[r]);
                    }
                }
            }
            now = next;
        }
        return;
    }
    wait_for_previous();
#pragma unroll 1
    for (int tile = first; tile < num_tiles; tile++) {  // the last unit of a K that is no multiple of 512
        u32 x[N8][8];
        tokens.load(tile, x);
#pragma unroll
        for (int r = 0; r < R; r++) {
            const Source source(rows[r] + (size_t)(tile / BLOCK_TILES) * BLOCK_BYTES, lane);
            u32 header[LINES], w[BITS];
#pragma unroll
            for (int l = 0; l < LINES; l++) header[l] = read4(source.of4 + 128 * l);
            load_tile(source, 128 * LINES + (tile % BLOCK_TILES) * TILE_BYTES, w);
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

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

// x as the activations' type; what it cannot hold becomes its largest value and is counted.
__device__ __forceinline__ unsigned short to_act(float x, u64* saturated) {
    if (fabsf(x) > Act::MAX) {
        atomicAdd(saturated, 1ull);
        x = copysignf(Act::MAX, x);
    }
    return Act::bits(x);
}
