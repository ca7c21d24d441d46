// Packed matrix [N, K] times 1 to 16 tokens [M, K]. A block takes ROWS (1 or 2) row blocks of 16 outputs; its warps
// share the units of K. NT: groups of 8 tokens.
#include "packed.cuh"

// out: M rows of out_stride values, fp32 or the activations' type. bias [N] or null; residual fp32, out's shape, or
// null: added. swiglu: the matrix is gate rows, then up rows, and out [M, N / 2] = silu(gate) * up * swiglu in the
// activations' type; values beyond it are counted in `saturated`. 0 is no swiglu.
extern "C" __global__ void __launch_bounds__(32 * MAX_WARPS, ROWS_BLOCKS)
    packed_gemv(const unsigned char* weight, const unsigned char* x, void* out, const float* bias,
                const float* residual, u64* saturated, int num_rows, int num_tiles, int num_tokens, int out_stride,
                int out_fp32, float swiglu) {
    extern __shared__ __align__(128) unsigned char shared[];  // a ring for each warp, later the sums
    float* sums = reinterpret_cast<float*>(shared);  // [warp][ROWS][8 NT tokens][TOKEN_FLOATS]
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
    const int num_blocks = (num_rows + 15) / 16;
    const unsigned char* rows[ROWS];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        const int block = swiglu != 0 ? blockIdx.x + r * (num_blocks / 2) : blockIdx.x * ROWS + r;
        rows[r] = weight + min(block, num_blocks - 1) * row_bytes(num_tiles);
    }
    Tokens<NT> tokens;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        // Columns beyond M repeat the last token; nobody reads their sums.
        const int token = min(8 * n + (lane >> 2), num_tokens - 1);
        tokens.row[n] = x + (size_t)token * num_tiles * 128 + 32 * (lane & 3);
    }
    float acc[ROWS][NT][4] = {};
    Ring<ROWS> ring(shared, warp);
    add_units(ring, rows, warp, num_warps, num_tiles, tokens, lane, acc);
    let_next_start();  // it sends for its weights while this one adds up

    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; r++) put_sums(sums + (warp * ROWS + r) * 8 * NT * TOKEN_FLOATS, lane, acc[r]);
    __syncthreads();
    // A thread adds up an output; of a gate and its up both.
    const int row = threadIdx.x & 15, outputs = swiglu != 0 ? 1 : ROWS;
    for (int i = threadIdx.x >> 4; i < num_tokens * outputs; i += blockDim.x >> 4) {
        const int token = i / outputs, r = i % outputs;
        const float* from = sums + (r * 8 * NT + token) * TOKEN_FLOATS + row;
        const int n = (blockIdx.x * outputs + r) * 16 + row;
        float v = 0;
        for (int w = 0; w < num_warps; w++) v += from[w * ROWS * 8 * NT * TOKEN_FLOATS];
        if (n >= num_rows) continue;
        if (bias != nullptr) v += bias[n];
        const size_t at = (size_t)token * out_stride + n;
        if (swiglu != 0) {
            float up = 0;
            from += 8 * NT * TOKEN_FLOATS;
            for (int w = 0; w < num_warps; w++) up += from[w * ROWS * 8 * NT * TOKEN_FLOATS];
            if (bias != nullptr) up += bias[n + num_rows / 2];
            static_cast<unsigned short*>(out)[at] = to_act(silu(v) * up * swiglu, saturated);
        } else if (out_fp32) {
            static_cast<float*>(out)[at] = residual != nullptr ? residual[at] + v : v;
        } else {
            static_cast<unsigned short*>(out)[at] = to_act(v, saturated);
        }
    }
}
