// What a block does between its matrix products, but for attention: norms, rotary embedding, sums,
// gating, and what it adds to the KV cache. Strides are in floats; rows are tokens, or heads of them.
#include "common.cuh"
#include "cache.cuh"

// ------------------------------------------------------------------------------ norms
// The sum over a block of whole warps; every thread gets it.
DEVICE float block_sum(float value) {
    __shared__ float parts[32];
    value = sum_of_warp(value);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = value;
    __syncthreads();
    float sum = 0.0f;
    for (u32 warp = 0; warp < blockDim.x / WARP; warp++) sum += parts[warp];
    __syncthreads(); // parts may be written again
    return sum;
}

// out = x / sqrt(mean(x^2) + eps) * weight; a block a row.
extern "C" __global__ void rms_norm(const float* x, int x_stride, float* out, int out_stride,
                                    const float* weight, int n, float eps) {
    const float* source = x + (u64)blockIdx.x * x_stride;
    float* target = out + (u64)blockIdx.x * out_stride;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) squares += source[i] * source[i];
    float factor = 1.0f / sqrtf(block_sum(squares) / n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) target[i] = source[i] * factor * weight[i];
}

// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias (0: none); a block a row.
extern "C" __global__ void layer_norm(const float* x, int x_stride, float* out, int out_stride,
                                      const float* weight, const float* bias, int n, float eps) {
    const float* source = x + (u64)blockIdx.x * x_stride;
    float* target = out + (u64)blockIdx.x * out_stride;
    float sum = 0.0f, squares = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += source[i];
    float mean = block_sum(sum) / n;
    for (int i = threadIdx.x; i < n; i += blockDim.x)
        squares += (source[i] - mean) * (source[i] - mean);
    float factor = 1.0f / sqrtf(block_sum(squares) / n + eps);
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        float scaled = (source[i] - mean) * factor * weight[i];
        target[i] = bias ? scaled + bias[i] : scaled;
    }
}

// ------------------------------------------------------------------------------ element by element
// grid = (pieces of a row, rows): the index within the row, and places in rows of a stride.
#define COLUMN (int)(blockIdx.x * blockDim.x + threadIdx.x)
#define AT(x, stride) (x)[(u64)blockIdx.y * (stride) + i]

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// out = silu(gate) * up
extern "C" __global__ void silu_mul(const float* gate, int gate_stride, const float* up,
                                    int up_stride, float* out, int out_stride, int n) {
    int i = COLUMN;
    if (i < n) AT(out, out_stride) = silu(AT(gate, gate_stride)) * AT(up, up_stride);
}

// out = sigmoid(gate) * up
extern "C" __global__ void sigmoid_mul(const float* gate, int gate_stride, const float* up,
                                       int up_stride, float* out, int out_stride, int n) {
    int i = COLUMN;
    if (i < n) AT(out, out_stride) = sigmoid(AT(gate, gate_stride)) * AT(up, up_stride);
}

// x += y; a stride of 0 adds one row, a bias, to all.
extern "C" __global__ void add_rows(float* x, int x_stride, const float* y, int y_stride, int n) {
    int i = COLUMN;
    if (i < n) AT(x, x_stride) += AT(y, y_stride);
}

// x[t] += sigmoid(gate[t]) * y[t]
extern "C" __global__ void add_gated(float* x, int x_stride, const float* y, int y_stride,
                                     const float* gate, int gate_stride, int n) {
    int i = COLUMN;
    if (i >= n) return;
    float factor = sigmoid(gate[(u64)blockIdx.y * gate_stride]);
    AT(x, x_stride) = fmaf(factor, AT(y, y_stride), AT(x, x_stride));
}

// x[t] *= factors[t]; a stride of 0 for the factors: one for all rows.
extern "C" __global__ void scale_rows(float* x, int x_stride, const float* factors, int factor_stride,
                                 int n) {
    int i = COLUMN;
    if (i < n) AT(x, x_stride) *= factors[(u64)blockIdx.y * factor_stride];
}

// Every value of x into [-limit, limit].
extern "C" __global__ void clamp_rows(float* x, int x_stride, int n, float limit) {
    int i = COLUMN;
    if (i < n) AT(x, x_stride) = fminf(fmaxf(AT(x, x_stride), -limit), limit);
}

// Every value of x becomes `value`.
extern "C" __global__ void fill_rows(float* x, int x_stride, int n, float value) {
    int i = COLUMN;
    if (i < n) AT(x, x_stride) = value;
}

// out[t] = x[index[t]]; without an index x[t].
extern "C" __global__ void copy_rows(const float* x, int x_stride, const int* index, float* out,
                                     int out_stride, int n) {
    int i = COLUMN;
    if (i >= n) return;
    int row = index ? index[blockIdx.y] : blockIdx.y;
    AT(out, out_stride) = x[(u64)row * x_stride + i];
}

// Rotate the first 2 * pairs numbers of every head. half_split 1: number i pairs with i + pairs,
// 0: 2i with 2i + 1. grid = (pieces of heads * pairs, tokens)
extern "C" __global__ void rope(float* x, int x_stride, int heads, int head_size,
                                const float* cosines, const float* sines, int table_stride,
                                int pairs, int half_split) {
    int i = COLUMN;
    if (i >= heads * pairs) return;
    int pair = i % pairs, apart = half_split ? pairs : 1;
    float* first = x + (u64)blockIdx.y * x_stride + i / pairs * head_size +
                   (half_split ? pair : 2 * pair);
    float c = cosines[(u64)blockIdx.y * table_stride + pair];
    float s = sines[(u64)blockIdx.y * table_stride + pair];
    float a = first[0], b = first[apart];
    first[0] = a * c - b * s;
    first[apart] = a * s + b * c;
}

// ------------------------------------------------------------------------------ the KV cache
template <int HALF> DEVICE void store_kv(u64 base, u64 element, float x) {
    if (HALF) ((u16*)base)[element] = float_to_half(x);
    else ((float*)base)[element] = x;
}

// Write k and v. grid = (pieces of heads * (d_k + padded d_v), most tokens of a slice, slices)
template <int HALF>
DEVICE void append(const float* k, int k_stride, const float* v, int v_stride, int heads, int dk,
                   int dv, const Slice* slices, const Place* places) {
    int padded = (dv + 15) / 16 * 16, i = COLUMN;
    Slice slice = slices[blockIdx.z];
    if (i >= heads * (dk + padded) || (int)blockIdx.y >= slice.tokens) return;
    Place place = places[blockIdx.z];
    u64 at = (slice.position + blockIdx.y) % (int)place.ring, row = slice.first + blockIdx.y;
    int head = i / (dk + padded), d = i % (dk + padded);
    if (d < dk) {
        u64 base = place.keys + head * place.key_head_stride;
        store_kv<HALF>(base, (at / 16 * dk + d) * 16 + at % 16, k[row * k_stride + head * dk + d]);
    } else {
        d -= dk;
        u64 base = place.values + head * place.value_head_stride;
        float value = d < dv ? v[row * v_stride + head * dv + d] : 0.0f;
        store_kv<HALF>(base, at * padded + d, value);
    }
}

#define APPEND_PARAMETERS                                                                          \
    const float *k, int k_stride, const float *v, int v_stride, int heads, int dk, int dv,         \
        const Slice *slices, const Place *places
#define APPEND_ARGUMENTS k, k_stride, v, v_stride, heads, dk, dv, slices, places

extern "C" __global__ void append_kv_f16(APPEND_PARAMETERS) { append<1>(APPEND_ARGUMENTS); }
extern "C" __global__ void append_kv_f32(APPEND_PARAMETERS) { append<0>(APPEND_ARGUMENTS); }
