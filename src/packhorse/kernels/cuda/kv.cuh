// How the kernels see a page of K and V: the layouts of quant/codec.py. -D CODEC, HEAD_DIM; PAGE_LEN is 64.
//
// A lane is (g, t) = (lane / 4, lane % 4). For the scores K is operand A of the tensor-core product (mma.cuh), 16
// tokens by 16 dims: a lane has tokens g and g + 8, and of their dims a quarter, in runs as long as its loads.
// For the output V is operand A too, 16 dims by 16 tokens: a lane has tokens 2t, 2t + 1, 2t + 8, 2t + 9 and an
// eighth of the dims. Which dim is at which place is free, as long as queries and output follow:
// `key_dim` and `value_dim` say it.
#pragma once

#include "mma.cuh"

enum Codecs { PLAIN, FP8, K5V4, K4V4 };
constexpr int PAGE_LEN = 64;
constexpr bool ROTATED = CODEC == K5V4 || CODEC == K4V4;
constexpr int GROUPS = HEAD_DIM / 32;  // scales of a head

// What K and V are multiplied in. Codes of fewer bits are exact in fp16 but for their scale.
#if MATH_BF16
typedef Bf16 Math;
#else
typedef Fp16 Math;
#endif

// Cards from 8.9 on have an instruction for two e4m3 bytes side by side. Before, their bits are put under fp16's
// exponent, where they are worth 2^-8 of the value. Both are exact.
#if __CUDA_ARCH__ >= 890
constexpr bool CONVERTS = true;
#else
constexpr bool CONVERTS = false;
#endif
constexpr float CODE_FACTOR = CODEC == FP8 && !CONVERTS ? 256.f : 1.f;

// Bytes of one head of a page, and where its parts begin (all but PLAIN).
constexpr int ROW_BYTES = CODEC == PLAIN ? 2 * HEAD_DIM : CODEC == FP8 ? HEAD_DIM : HEAD_DIM / 2;
constexpr int K_HIGH = PAGE_LEN * ROW_BYTES;
constexpr int K_SCALE = K_HIGH + (CODEC == K5V4 ? PAGE_LEN * GROUPS * 4 : 0);
constexpr int V_CODES = ROTATED ? K_SCALE + PAGE_LEN * GROUPS * 2 : K_HIGH;
constexpr int V_SCALE = V_CODES + PAGE_LEN * ROW_BYTES;
constexpr int HEAD_BYTES = V_SCALE + (ROTATED ? PAGE_LEN * GROUPS * 2 : 0);

struct Place {
    const unsigned char* head;  // of a page: the head's part, or (PLAIN) the head's first K
    size_t token_stride;        // bytes from token to token
    size_t v_offset;            // bytes from K to V

    __device__ __forceinline__ Place(const unsigned char* pages, int page, int head_index, int num_kv_heads) {
        if constexpr (CODEC == PLAIN) {
            v_offset = (size_t)num_kv_heads * ROW_BYTES;
            token_stride = 2 * v_offset;
            head = pages + page * (PAGE_LEN * token_stride) + (size_t)head_index * ROW_BYTES;
        } else {
            v_offset = V_CODES;
            token_stride = ROW_BYTES;
            head = pages + ((size_t)page * num_kv_heads + head_index) * HEAD_BYTES;
        }
    }
    __device__ __forceinline__ const unsigned char* k(int token) const { return head + token * token_stride; }
    __device__ __forceinline__ const unsigned char* v(int token) const { return k(token) + v_offset; }
};

// Dims that a lane reads at once of a key and of a value.
constexpr int KEY_RUN = CODEC == PLAIN ? 8 : CODEC == FP8 ? 16 : HEAD_DIM / 4 < 32 ? HEAD_DIM / 4 : 32;
constexpr int VALUE_RUN = CODEC == PLAIN ? 8 : CODEC == FP8 ? (HEAD_DIM / 8 < 16 ? HEAD_DIM / 8 : 16) : HEAD_DIM / 8;
constexpr int KEY_LOADS = HEAD_DIM / (4 * KEY_RUN);
constexpr int VALUE_LOADS = HEAD_DIM / (8 * VALUE_RUN);
constexpr int KEY_WORDS = HEAD_DIM * ROW_BYTES / HEAD_DIM / 16;    // of a lane and token
constexpr int VALUE_WORDS = HEAD_DIM * ROW_BYTES / HEAD_DIM / 32;
constexpr int KEY_STEPS = HEAD_DIM / 16;    // products of 16 dims
constexpr int VALUE_STEPS = HEAD_DIM / 16;  // products that give 16 dims

// The first of four dims side by side that lane t has in product `step` of the scores.
__device__ __forceinline__ int key_dim(int t, int step) {
    constexpr int RUN_STEPS = KEY_RUN / 4;
    return 4 * KEY_RUN * (step / RUN_STEPS) + KEY_RUN * t + 4 * (step % RUN_STEPS);
}
// Those four of a query, in the order that `Keys` has them in.
__device__ __forceinline__ uint2 key_order(uint2 x) {
    if constexpr (CODEC == FP8 && !CONVERTS) return make_uint2(__byte_perm(x.x, x.y, 0x5410), __byte_perm(x.x, x.y, 0x7632));
    return x;
}

// The dim of row g + 8 half of product `step` of the output.
__device__ __forceinline__ int value_dim(int g, int step, int half) {
    constexpr int RUN_STEPS = VALUE_RUN / 2;
    return 8 * VALUE_RUN * (step / RUN_STEPS) + VALUE_RUN * g + 2 * (step % RUN_STEPS) + half;
}

// K and V are read once and stay out of L1.
template <int WORDS>
__device__ __forceinline__ void load(const unsigned char* p, u32* w) {
    if constexpr (WORDS == 4) {
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                     : "l"(p));
    } else if constexpr (WORDS == 2) {
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "l"(p));
    } else {
        asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(w[0]) : "l"(p));
    }
}
__device__ __forceinline__ u32 load_half(const unsigned char* p) {
    unsigned short v;
    asm volatile("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(p));
    return v;
}

__device__ __forceinline__ u32 sub2(u32 a, u32 b) {
    __half2 r = __hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
    return *reinterpret_cast<u32*>(&r);
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
    __half2 r = __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
    return *reinterpret_cast<u32*>(&r);
}
// e4m3 in the high byte of each half: sign, exponent and mantissa where fp16 has its own.
__device__ __forceinline__ u32 e4m3(u32 x) { return (x & 0x80008000u) | ((x >> 1) & 0x3f803f80u); }
// The e4m3 bytes 2 half and 2 half + 1 of x in fp16.
__device__ __forceinline__ u32 converted(u32 x, int half) {
    u32 y = 0;
#if __CUDA_ARCH__ >= 890
    const unsigned short pair = half ? x >> 16 : x & 0xffffu;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(pair));
#endif
    return y;
}

// x & mask | more, in one instruction.
__device__ __forceinline__ u32 under(u32 x, u32 mask, u32 more) {
    u32 y;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(more));
    return y;
}

// Masks and exponents in registers: an instruction holds one constant only.
struct Constants {
    u32 even, odd, even_one, odd_one;

    __device__ __forceinline__ Constants() {
        asm volatile("mov.b32 %0, 0x000f000f; mov.b32 %1, 0x00f000f0;" : "=r"(even), "=r"(odd));
        asm volatile("mov.b32 %0, 0x64006400; mov.b32 %1, 0x54005400;" : "=r"(even_one), "=r"(odd_one));
    }
};

// Code pair p (0..3) of a word less 8, or with `high` (its bits at 4 and 8 for p even and odd) less 16: exact. An odd
// pair is left four bits up, under an exponent that takes them for ones.
template <bool FIVE>
__device__ __forceinline__ u32 code_pair(u32 x, int p, u32 high, const Constants& c) {
    x >>= 8 * (p >> 1);
    if (p & 1) {
        u32 v = under(x, c.odd, c.odd_one);
        if (FIVE) v = under(high, 0x01000100u, v);
        return sub2(v, FIVE ? 0x55005500u : 0x54805480u);
    }
    u32 v = under(x, c.even, c.even_one);
    if (FIVE) v = under(high, 0x00100010u, v);
    return sub2(v, FIVE ? 0x64106410u : 0x64086408u);
}

// The keys of 16 tokens.
struct Keys {
    u32 w[2][KEY_WORDS];
    u32 high[2][CODEC == K5V4 ? KEY_LOADS : 1];
    u32 scale[2][ROTATED ? KEY_LOADS : 1];

    __device__ __forceinline__ void read(const Place& place, int token, int lane) {
        const int g = lane >> 2, t = lane & 3;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned char* row = place.k(token + g + 8 * i);
#pragma unroll
            for (int l = 0; l < KEY_LOADS; l++) {
                constexpr int BYTES = 4 * KEY_WORDS / KEY_LOADS;
                load<KEY_WORDS / KEY_LOADS>(row + 4 * BYTES * l + BYTES * t, w[i] + l * (KEY_WORDS / KEY_LOADS));
            }
            if constexpr (ROTATED) {
#pragma unroll
                for (int l = 0; l < KEY_LOADS; l++) {
                    const int group = (4 * l + t) * KEY_RUN / 32;
                    const int at = (token + g + 8 * i) * GROUPS + group;
                    if constexpr (CODEC == K5V4) load<1>(place.head + K_HIGH + 4 * at, &high[i][l]);
                    scale[i][l] = load_half(place.head + K_SCALE + 2 * at);
                }
            }
        }
    }

    // Before the first `fragment`.
    __device__ __forceinline__ void prepare(int lane) {
        if constexpr (ROTATED) {
#pragma unroll
            for (int i = 0; i < 2; i++)
#pragma unroll
                for (int l = 0; l < KEY_LOADS; l++) {
                    scale[i][l] = __byte_perm(scale[i][l], 0, 0x1010);
                    // Half a group: its words are the group's second two for odd t.
                    if constexpr (CODEC == K5V4 && KEY_RUN < 32) high[i][l] >>= 2 * (lane & 1);
                }
        }
    }

    __device__ __forceinline__ void fragment(int step, u32 (&a)[4], const Constants& c) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (CODEC == PLAIN) {
                a[i] = w[i][2 * step], a[2 + i] = w[i][2 * step + 1];
            } else if constexpr (CODEC == FP8 && CONVERTS) {
                a[i] = converted(w[i][step], 0), a[2 + i] = converted(w[i][step], 1);
            } else if constexpr (CODEC == FP8) {
                a[i] = e4m3(w[i][step] << 8), a[2 + i] = e4m3(w[i][step]);
            } else {
                const int word = step >> 1, p = 2 * (step & 1);
                const int l = word / (KEY_RUN / 8), j = word % (KEY_RUN / 8);
                u32 h = 0;
                if constexpr (CODEC == K5V4) h = p ? high[i][l] >> (4 + j) : high[i][l] << (4 - j);
                a[i] = mul2(code_pair<CODEC == K5V4>(w[i][word], p, h, c), scale[i][l]);
                a[2 + i] = mul2(code_pair<CODEC == K5V4>(w[i][word], p + 1, h, c), scale[i][l]);
            }
        }
    }
};

// The values of 16 tokens.
struct Values {
    u32 w[4][VALUE_WORDS];
    u32 scale[ROTATED ? 4 : 1];

    __device__ __forceinline__ static int token_of(int i, int lane) { return 2 * (lane & 3) + (i & 1) + 8 * (i >> 1); }

    __device__ __forceinline__ void read(const Place& place, int token, int lane) {
        const int g = lane >> 2;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned char* row = place.v(token + token_of(i, lane));
#pragma unroll
            for (int l = 0; l < VALUE_LOADS; l++) {
                constexpr int BYTES = 4 * VALUE_WORDS / VALUE_LOADS;
                load<VALUE_WORDS / VALUE_LOADS>(row + 8 * BYTES * l + BYTES * g, w[i] + l * (VALUE_WORDS / VALUE_LOADS));
            }
            if constexpr (ROTATED) {
                const int at = (token + token_of(i, lane)) * GROUPS + g * VALUE_RUN / 32;
                scale[i] = load_half(place.head + V_SCALE + 2 * at);
            }
        }
    }

    // What is not written yet may be NaN: zero from token `count` of the 16 on.
    __device__ __forceinline__ void cut(int count, int lane) {
        __syncwarp();  // makes a branch of this, taken once, where selects would be paid for in every tile
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (token_of(i, lane) >= count) {
#pragma unroll
                for (int j = 0; j < VALUE_WORDS; j++) w[i][j] = 0;
                if constexpr (ROTATED) scale[i] = 0;
            }
    }

    __device__ __forceinline__ void prepare() {
        if constexpr (ROTATED) {
            scale[0] = __byte_perm(scale[0], scale[1], 0x5410);
            scale[1] = __byte_perm(scale[2], scale[3], 0x5410);
        }
    }

    __device__ __forceinline__ void fragment(int step, u32 (&a)[4], const Constants& c) const {
#pragma unroll
        for (int i = 0; i < 2; i++) {  // tokens 2t, 2t + 1, then 2t + 8, 2t + 9
            if constexpr (CODEC == PLAIN) {
                a[2 * i] = __byte_perm(w[2 * i][step], w[2 * i + 1][step], 0x5410);
                a[2 * i + 1] = __byte_perm(w[2 * i][step], w[2 * i + 1][step], 0x7632);
            } else if constexpr (CODEC == FP8 && CONVERTS) {
                const int word = step >> 1;
                const u32 x = __byte_perm(w[2 * i][word], w[2 * i + 1][word], step & 1 ? 0x7362 : 0x5140);
                a[2 * i] = converted(x, 0), a[2 * i + 1] = converted(x, 1);
            } else if constexpr (CODEC == FP8) {
                const int word = step >> 1;
                const u32 x = __byte_perm(w[2 * i][word], w[2 * i + 1][word], step & 1 ? 0x7632 : 0x5410);
                a[2 * i] = e4m3(x << 8), a[2 * i + 1] = e4m3(x);
            } else {
                const int word = step >> 2, p = step & 3;
                const u32 even = __byte_perm(w[2 * i][word], w[2 * i + 1][word], 0x5410);
                const u32 odd = __byte_perm(w[2 * i][word], w[2 * i + 1][word], 0x7632);
                a[2 * i] = mul2(code_pair<false>(even, p, 0, c), scale[i]);
                a[2 * i + 1] = mul2(code_pair<false>(odd, p, 0, c), scale[i]);
            }
        }
    }
};

constexpr int E = HEAD_DIM / 32;

// A head in a warp: lane l has dims E l .. E l + E - 1. It times the Hadamard matrix over sqrt(D): sums and differences, neighbours first.
__device__ __forceinline__ void rotate(float (&x)[E], int lane) {
#pragma unroll
    for (int width = 1; width < E; width *= 2)
#pragma unroll
        for (int e = 0; e < E; e++)
            if (!(e & width)) {
                const float a = x[e], b = x[e + width];
                x[e] = a + b, x[e + width] = a - b;
            }
#pragma unroll
    for (int mask = 1; mask < 32; mask *= 2)
#pragma unroll
        for (int e = 0; e < E; e++) {
            const float other = __shfl_xor_sync(~0u, x[e], mask);
            x[e] = lane & mask ? other - x[e] : x[e] + other;
        }
#pragma unroll
    for (int e = 0; e < E; e++) x[e] *= HEAD_DIM == 256 ? 0.0625f : HEAD_DIM == 128 ? 0.08838834764831845f : 0.125f;
}
