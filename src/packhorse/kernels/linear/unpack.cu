// Packed weights to 16-bit or 32-bit values, for products of many rows that a library does.
//
// Layout: docs/formats.md. A warp takes a tile: lane (g, t) writes columns 16t .. 16t+15 of rows g and g + 8, so a
// row's 64 columns leave as one or two whole lines. Every value is computed in fp32 and rounded once.
//
// Matrices of a stack lie matrix_bytes apart. BITS 4, 5, 6, 8; KIND 0 symmetric, 1 zero, 2 min, 3 fp8, 4 k, 5 q6_k; GROUP columns; OUT 0 fp16, 1 bf16, 2 fp32.
#include "mma.cuh"

#if OUT == 0
typedef __half Value;
__device__ Value rounded(float x) { return __float2half_rn(x); }
#elif OUT == 1
typedef __nv_bfloat16 Value;
__device__ Value rounded(float x) { return __float2bfloat16_rn(x); }
#else
typedef float Value;
__device__ Value rounded(float x) { return x; }
#endif

#if KIND == 5
constexpr int BLOCK_COLS = 256, HEADER = 384;
#elif KIND == 4
constexpr int BLOCK_COLS = 256, HEADER = 256;
#else
constexpr int BLOCK_COLS = 4 * GROUP, HEADER = KIND == 0 ? 128 : 256;
#endif
constexpr int BLOCK_TILES = BLOCK_COLS / 64, TILE = 128 * BITS, BLOCK = HEADER + BLOCK_TILES * TILE;
constexpr int WARPS = 8;

__device__ float half_at(const unsigned char* at) {
    return __half2float(*reinterpret_cast<const __half*>(at));
}

// e4m3 has the exponent bias 7, fp16 15: the same bits one place down are the value times 2^-8.
__device__ float e4m3(u32 code) {
    const unsigned short bits = (code & 0x80) << 8 | (code & 0x7f) << 7;
    return __half2float(__ushort_as_half(bits)) * 256.f;
}

// What a code of row `row` in the 16 columns from `column` of its block means: code * scale + shift.
struct Meaning {
    float scale, shift;

    __device__ Meaning(const unsigned char* header, int row, int column) {
        const int group = column / GROUP;
#if KIND == 4
        const u32 low = header[8 * row + group];
        const u32 high = *reinterpret_cast<const u32*>(header + 128 + 4 * row) >> (4 * group);
        scale = float((low & 15) | (high & 3) << 4) * half_at(header + 192 + 4 * row);
        shift = float(low >> 4 | (high >> 2 & 3) << 4) * half_at(header + 194 + 4 * row);
#elif KIND == 5
        scale = float(reinterpret_cast<const signed char*>(header)[16 * row + group]) * half_at(header + 256 + 2 * row);
        shift = 32.f;
#elif KIND == 3
        scale = *reinterpret_cast<const float*>(header + 4 * (16 * group + row));
        shift = 0.f;
#else
        scale = half_at(header + 2 * (16 * group + row));
        shift = KIND == 0 ? float(1 << (BITS - 1)) : half_at(header + 128 + 2 * (16 * group + row));
#endif
    }

    // The order of operations is that of quant.packed.values, each rounded by itself: the same bits.
    __device__ float value(u32 code) const {
#if KIND == 3
        return __fmul_rn(e4m3(code), scale);
#elif KIND == 4
        return __fsub_rn(__fmul_rn(float(code), scale), shift);
#elif KIND == 2
        return __fadd_rn(__fmul_rn(float(code), scale), shift);
#else
        return __fmul_rn(float(code) - shift, scale);
#endif
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
unpack(const unsigned char* __restrict__ data, Value* __restrict__ out, long long row_blocks, int blocks_a_matrix,
       int num_rows, int num_cols, long long row_bytes, long long matrix_bytes) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tiles = (num_cols + 63) / 64;
    const int tile = blockIdx.x * WARPS + threadIdx.x / 32;
    const long long row_block = blockIdx.y + (long long)gridDim.y * blockIdx.z;
    if (tile >= tiles || row_block >= row_blocks) return;
    const long long matrix = row_block / blocks_a_matrix, block = row_block % blocks_a_matrix;
    const int first_row = int(block) * 16;
    const unsigned char* header =
        data + matrix * matrix_bytes + block * row_bytes + (long long)(tile / BLOCK_TILES) * BLOCK;
    const unsigned char* body = header + HEADER + (tile % BLOCK_TILES) * TILE;
#if BITS == 8
    unsigned char codes[32];
    *reinterpret_cast<uint4*>(codes) = *reinterpret_cast<const uint4*>(body + 16 * lane);
    *reinterpret_cast<uint4*>(codes + 16) = *reinterpret_cast<const uint4*>(body + 512 + 16 * lane);
#else
    const uint4 words = *reinterpret_cast<const uint4*>(body + 16 * lane);
    const u32 low[4] = {words.x, words.y, words.z, words.w};
#endif
#if BITS == 5
    const u32 high = *reinterpret_cast<const u32*>(body + 512 + 4 * lane);
#elif BITS == 6
    const uint2 high = *reinterpret_cast<const uint2*>(body + 512 + 8 * lane);
#endif
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + g + 8 * half;
        const Meaning meaning(header, g + 8 * half, tile % BLOCK_TILES * 64 + 16 * t);
        alignas(16) Value values[16];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int pair = e / 2 * 2 + half;
#if BITS == 8
                const u32 code = codes[8 * j + 2 * pair + e % 2];
#else
                const int at = 4 * pair + 16 * (e % 2);
                u32 code = low[j] >> at & 15;
#if BITS == 5
                code |= (high >> (at + j) & 1) << 4;
#elif BITS == 6
                code |= ((j < 2 ? high.x : high.y) >> (at + 2 * (j % 2)) & 3) << 4;
#endif
#endif
                values[4 * j + e] = rounded(meaning.value(code));
            }
        if (row >= num_rows) continue;
        const int column = 64 * tile + 16 * t;
        Value* place = out + (matrix * num_rows + row) * num_cols + column;
        if (column + 16 <= num_cols && num_cols % 8 == 0) {
#pragma unroll
            for (int i = 0; i < int(sizeof(values) / 16); ++i)
                reinterpret_cast<uint4*>(place)[i] = reinterpret_cast<const uint4*>(values)[i];
        } else {
#pragma unroll
            for (int i = 0; i < 16; ++i)
                if (column + i < num_cols) place[i] = values[i];
        }
    }
}
