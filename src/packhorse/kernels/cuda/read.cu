// Reads every byte once and keeps a sum that nobody needs: the plain read rate of a memory.
extern "C" __global__ void read_all(const uint4* data, unsigned long long num, unsigned* sink) {
    unsigned sum = 0;
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * step < num; i += 4 * step) {
        uint4 v[4];
#pragma unroll
        for (int k = 0; k < 4; k++) v[k] = __ldcs(data + i + k * step);
#pragma unroll
        for (int k = 0; k < 4; k++) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
    }
    for (; i < num; i += step) sum += data[i].x;
    if (sum == 0x12345678) *sink = sum;
}
