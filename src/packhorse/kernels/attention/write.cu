// From projections to queries and stored K and V: norm, partial rope, the codec's rotation, encoding.
//
// A warp has one head of one row, laid out as for `rotate`. The encoded bytes are those of quant/codec.py.
// -D CODEC, HEAD_DIM, MATH_BF16 (type of the queries), BF16 (type of the projections where they are not fp32).
#include "codes.cuh"

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
        put_head(place, is_k, token, x, lane);
    }
}
