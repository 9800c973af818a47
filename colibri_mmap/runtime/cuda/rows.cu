// Activations made ready for products, and the outputs of experts put together.
#include "common.cuh"

// x [count, width] -> q int8, and per 32 numbers d and d * sum(q): x is about d * q, d = max |x| / 127
// over the 32, or with `shared` over all numbers of a block of threads, which then are in the row.
// A warp per 32 numbers, grid.y over rows. What is not a number makes its d not a number.
extern "C" __global__ void quantise_q8(const float* x, i8* q, float2* scales, int x_stride, int width,
                                       int shared) {
    __shared__ float of_warp[8];
    int block = blockIdx.x * blockDim.y + threadIdx.y, row = blockIdx.y;
    if (block >= width / WARP) return;  // whole warps
    float value = x[(u64)row * x_stride + block * WARP + threadIdx.x];
    float largest = largest_of_warp(fabsf(value));
    if (shared) {
        if (threadIdx.x == 0) of_warp[threadIdx.y] = largest;
        __syncthreads();
        for (int i = 0; i < blockDim.y; i++) largest = larger(largest, of_warp[i]);
    }
    float scale = largest / 127.0f;
    int rounded = scale == 0.0f ? 0 : min(127, max(-127, __float2int_rn(value / scale)));
    u64 to = (u64)row * (width / WARP) + block;
    q[to * WARP + threadIdx.x] = (i8)rounded;
    float sum = sum_of_warp((float)rounded);  // integers: exact
    if (threadIdx.x == 0) scales[to] = make_float2(scale, scale * sum);
}

// out[t, i] (+)= sum of weights[e] * y[row[e], i] over the entries e from off[t] to off[t + 1], in order.
extern "C" __global__ void combine_pairs(const float* y, const int* off, const int* row, const float* weights,
                                         float* out, int out_stride, int width, int add) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
    if (i >= width) return;
    float* to = out + (u64)token * out_stride + i;
    float sum = add ? *to : 0.0f;
    for (int e = off[token]; e < off[token + 1]; e++) sum += weights[e] * y[(u64)row[e] * width + i];
    *to = sum;
}
