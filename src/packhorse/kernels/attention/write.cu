// From projections to queries and stored K and V: norm, partial rope, the codec's rotation, encoding.
//
// A warp has one head of one row, laid out as for `rotate`. The encoded bytes are those of quant/codec.py.
// -D CODEC, HEAD_DIM, MATH_BF16 (type of the queries), BF16 (type of the projections where they are not fp32).
#include "kv.cuh"

constexpr int WARPS = 4;

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    return x;
}

// E 16-bit values side by side.
template <class T>
__device__ __forceinline__ void put16(void* to, const float (&x)[E], int lane) {
    u32* words = static_cast<u32*>(to) + lane * (E / 2);
#pragma unroll
    for (int e = 0; e < E; e += 2) words[e / 2] = T::pack(x[e], x[e + 1]);
}

__device__ __forceinline__ u32 to_e4m3(float x) {
    const u32 sign = (__float_as_uint(x) >> 24) & 0x80u;
    const float size = fminf(fabsf(x), 448.f);
    if (x != x) return sign | 0x7fu;
    if (size < 0.015625f) return sign | (u32)rintf(size * 512.f);
    u32 bits = __float_as_uint(size);
    bits += 0x7ffffu + ((bits >> 20) & 1u);
    return sign | ((bits >> 20) - (120u << 3));
}

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

// rows: a row's projections at r * stride: queries, gates if any, K, V, head by head; fp32 or the activations' type.
// cos, sin [rows, half] fp32: dims d and half + d turn together; half 0: no rope. q_norm, k_norm [D] or null.
// sequence [rows]: whose row it is, -1: nobody's. position [rows]. q [rows, num_heads, D] in the multiplied type.
// misfits: two counts of fp8. Grid: heads by WARPS, rows.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
    write_kv(const void* rows, unsigned char* pages, unsigned short* q, const int* page_table, const int* sequence,
             const int* position, const float* q_norm, const float* k_norm, const float* cos, const float* sin,
             u64* misfits, float eps, int stride, int rows_fp32, int num_heads, int num_kv_heads, int gated,
             int max_pages, int half) {
    __shared__ float shared[WARPS][HEAD_DIM];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int row = blockIdx.y, head = blockIdx.x * WARPS + warp;
    let_next_start();
    wait_for_previous();
    if (head >= num_heads + 2 * num_kv_heads || sequence[row] < 0) return;
    const bool is_q = head < num_heads, is_k = !is_q && head < num_heads + num_kv_heads;
    const size_t from = (size_t)row * stride + (size_t)(head + (is_q || !gated ? 0 : num_heads)) * HEAD_DIM;
    float x[E];
#pragma unroll
    for (int e = 0; e < E; e++) {
        const size_t at = from + lane * E + e;
        x[e] = rows_fp32 ? static_cast<const float*>(rows)[at]
                         : Act::low(static_cast<const unsigned short*>(rows)[at]);
    }
    const float* norm = is_q ? q_norm : is_k ? k_norm : nullptr;
    if (norm != nullptr) {
        float squares = 0;
#pragma unroll
        for (int e = 0; e < E; e++) squares += x[e] * x[e];
        const float factor = rsqrtf(warp_sum(squares) / HEAD_DIM + eps);
#pragma unroll
        for (int e = 0; e < E; e++) x[e] *= factor * norm[lane * E + e];
    }
    if ((is_q || is_k) && half > 0) {
#pragma unroll
        for (int e = 0; e < E; e++) shared[warp][lane * E + e] = x[e];
        __syncwarp();
#pragma unroll
        for (int e = 0; e < E; e++) {
            const int d = lane * E + e;
            if (d >= 2 * half) continue;
            const int pair = d < half ? d : d - half;
            const float c = cos[(size_t)row * half + pair], s = sin[(size_t)row * half + pair];
            x[e] = d < half ? x[e] * c - shared[warp][d + half] * s : x[e] * c + shared[warp][d - half] * s;
        }
    }
    if constexpr (ROTATED) rotate(x, lane);
    if (is_q) {
        put16<Math>(q + ((size_t)row * num_heads + head) * HEAD_DIM, x, lane);
        return;
    }
    const int kv_head = (head - num_heads) % num_kv_heads, at = position[row];
    const int page = page_table[(size_t)sequence[row] * max_pages + at / PAGE_LEN], token = at % PAGE_LEN;
    const Place place(pages, page, kv_head, num_kv_heads);
    unsigned char* to = const_cast<unsigned char*>(is_k ? place.k(token) : place.v(token));
    if constexpr (CODEC == PLAIN) {
        put16<Math>(to, x, lane);
    } else if constexpr (CODEC == FP8) {
        int above = 0, below = 0;
#pragma unroll
        for (int e = 0; e < E; e += 2) {
            const u32 pair = to_e4m3(x[e]) | to_e4m3(x[e + 1]) << 8;
            reinterpret_cast<unsigned short*>(to)[(lane * E + e) / 2] = pair;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float size = fabsf(x[e + i]);
                above += size > 448.f;
                below += size < 0.015625f && size > 0.f;
            }
        }
#pragma unroll
        for (int mask = 16; mask; mask /= 2) {
            above += __shfl_xor_sync(~0u, above, mask);
            below += __shfl_xor_sync(~0u, below, mask);
        }
        if (lane == 0 && above) atomicAdd(misfits, (u64)above);
        if (lane == 0 && below) atomicAdd(misfits + 1, (u64)below);
    } else {
        unsigned char* base = const_cast<unsigned char*>(place.head);
        if (is_k)
            put_codes<CODEC == K5V4 ? 5 : 4>(to, base + K_HIGH + token * GROUPS * 4,
                                            base + K_SCALE + token * GROUPS * 2, x, lane);
        else
            put_codes<4>(to, nullptr, base + V_SCALE + token * GROUPS * 2, x, lane);
    }
}
