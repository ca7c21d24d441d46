// Blocks of a table that may lie in pinned host memory: what an embedding's rows lie in.
typedef unsigned long long u64;

// out block t = table block ids[t] / rows, of `vectors` times 16 bytes; ids outside [0, last] read row 0. Grid: (tokens, parts of a block).
extern "C" __global__ void __launch_bounds__(256)
    gather_blocks(const uint4* table, const long long* ids, uint4* out, int rows, int vectors, long long last) {
    const long long id = ids[blockIdx.x];
    const uint4* from = table + (u64)((id < 0 || id > last ? 0 : id) / rows) * vectors;
    uint4* to = out + (u64)blockIdx.x * vectors;
#pragma unroll 4
    for (int i = blockIdx.y * blockDim.x + threadIdx.x; i < vectors; i += gridDim.y * blockDim.x) to[i] = from[i];
}
