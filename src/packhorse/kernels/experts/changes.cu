// What the host wants changed in the table of experts before a step (kernels.experts.cuda.apply_changes): one block.
#include "mma.cuh"

// address, home [L E], spares, filled [L S]; changes [num_changes]: (l E + e or -1, l S + s or -1, slot address).
extern "C" __global__ void __launch_bounds__(512)
    expert_changes(u64* address, const u64* home, u64* spares, int* filled, long long* changes, int num_places,
                   int num_spares, int num_experts, int num_changes) {
    wait_for_previous();
    let_next_start();
    for (int i = threadIdx.x; i < num_places; i += blockDim.x) {
        const int expert = filled[i];
        if (expert >= 0) address[i / num_spares * num_experts + expert] = spares[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_changes; i += blockDim.x) {
        const long long expert = changes[3 * i];
        if (expert >= 0) address[expert] = home[expert];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_changes; i += blockDim.x) {
        const long long place = changes[3 * i + 1];
        if (place >= 0) spares[place] = changes[3 * i + 2], filled[place] = -1;
        changes[3 * i] = changes[3 * i + 1] = -1;
    }
}
