// A head's values in a warp, laid out as for `rotate`, into the codes of a page: the bytes of quant/codec.py.
#pragma once

#include "kv.cuh"

// Bits that lanes of a run of `lanes` have of one word, in all of them.
template <int LANES>
__device__ __forceinline__ u32 join(u32 x) {
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) x |= __shfl_xor_sync(~0u, x, mask);
    return x;
}

template <int BITS>
__device__ __forceinline__ void put_codes(unsigned char* codes, unsigned char* high, unsigned char* scales,
                                          const float (&x)[E], int lane) {
    constexpr int LANES = 32 / E;  // of a group of 32 dims
    constexpr float HALF = 1 << (BITS - 1);
    float greatest = x[0], least = x[0];
    bool broken = false;
#pragma unroll
    for (int e = 0; e < E; e++) {
        greatest = fmaxf(greatest, x[e]), least = fminf(least, x[e]);
        broken |= x[e] != x[e];
    }
#pragma unroll
    for (int mask = 1; mask < LANES; mask *= 2) {
        greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, mask));
        least = fminf(least, __shfl_xor_sync(~0u, least, mask));
        broken |= __shfl_xor_sync(~0u, (int)broken, mask) != 0;
    }
    const float extreme = greatest >= -least ? greatest : least;
    const __half scale = broken ? __ushort_as_half(0x7e00)
                                : __float2half_rn(fminf(fmaxf(extreme / -HALF, -65504.f), 65504.f));
    u32 word = 0, bits = 0;
    const int first = lane * E % 8, j = lane * E / 8 % 4;
#pragma unroll
    for (int e = 0; e < E; e++) {
        float c = __fdiv_rn(x[e], __half2float(scale));
        c = c != c ? 0.f : fminf(fmaxf(rintf(c), -HALF), HALF - 1);
        const u32 code = (int)c + (int)HALF;
        const int bit = 4 * ((first + e) / 2) + 16 * ((first + e) % 2);
        word |= (code & 15u) << bit;
        bits |= (code >> 4) << (bit + j);
    }
    word = join<8 / E>(word);
    if (lane % (8 / E) == 0) reinterpret_cast<u32*>(codes)[lane * E / 8] = word;
    if constexpr (BITS == 5) {
        bits = join<LANES>(bits);
        if (lane % LANES == 0) reinterpret_cast<u32*>(high)[lane / LANES] = bits;
    }
    if (lane % LANES == 0) reinterpret_cast<__half*>(scales)[lane / LANES] = scale;
}

// K or V of a token of a page, turned already.
__device__ __forceinline__ void put_head(const Place& place, bool is_k, int token, const float (&x)[E], int lane) {
    unsigned char* base = const_cast<unsigned char*>(place.head);
    if (is_k)
        put_codes<CODEC == K5V4 ? 5 : 4>(base + token * ROW_BYTES, base + K_HIGH + token * GROUPS * 4,
                                        base + K_SCALE + token * GROUPS * 2, x, lane);
    else
        put_codes<4>(base + V_CODES + token * ROW_BYTES, nullptr, base + V_SCALE + token * GROUPS * 2, x, lane);
}
