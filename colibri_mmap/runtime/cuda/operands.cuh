// What a lane multiplies at a time: a unit of a weight row and the activations that meet it.
//
// A unit of a quantised row is RUNS runs of 4 * WORDS neighbouring weights as bytes, PARTS units to
// a block of WEIGHTS. Run r has the scale number r % SCALES: 1 where all runs of a unit share the
// scale and lie in the same 32 weights. A weight is scale * byte + offset; SUMS says how offsets
// meet the activations. A type gives start(part, run), read(block, part, unit) and
// takes_sum(part): which of the units that lie in the same 32 weights uses their sum.
#pragma once
#include "common.cuh"

enum Sums { NO_OFFSET, SUM_OF_32, SUM_OF_RUN };

struct Activations {
    const void* x;    // int8 [tokens, stride] where weights are quantised, else float32
    const float* d;   // [tokens, stride / 32]: x is d * q
    const float* s;   // [tokens, stride / 32]: d * sum(q)
    int stride;       // elements per token
};

template <class T, int RUNS_, int WORDS_, int SCALES_, Sums SUMS_>
struct Quantised {
    static const int RUNS = RUNS_, WORDS = WORDS_, SCALES = SCALES_;
    static const Sums SUMS = SUMS_;

    struct Unit {
        int w[RUNS][WORDS];
        float scale[SCALES], offset[SCALES];
    };
    struct Operand {
        int q[RUNS][WORDS];
        float d[SCALES], s[SCALES];
    };

    DEVICE bool takes_sum(int part) { return true; }

    DEVICE void unpack(const u8* block, int part, Unit& unit) { T::read(block, part, unit); }

    DEVICE void read_row(const u8* row, int block, int part, Unit& unit) {
        T::read(row + block * T::BYTES, part, unit);
        if (SUMS == SUM_OF_32 && !T::takes_sum(part))
#pragma unroll
            for (int i = 0; i < SCALES; i++) unit.offset[i] = 0.0f;
    }

    DEVICE void read_activations(const Activations& a, int token, int block, int part, Operand& to) {
        const i8* q = (const i8*)a.x + (u64)token * a.stride + block * T::WEIGHTS;
        u64 first = (u64)token * (a.stride / 32) + block * (T::WEIGHTS / 32);
#pragma unroll
        for (int run = 0; run < RUNS; run++) {
            const i8* p = q + T::start(part, run);
            if (WORDS == 4) {
                int4 words = fetch<int4>(p);
                to.q[run][0] = words.x;
                to.q[run][1 % WORDS] = words.y;
                to.q[run][2 % WORDS] = words.z;
                to.q[run][3 % WORDS] = words.w;
            } else if (WORDS == 2) {
                int2 words = fetch<int2>(p);
                to.q[run][0] = words.x;
                to.q[run][1 % WORDS] = words.y;
            } else {
                to.q[run][0] = fetch<int>(p);
            }
        }
#pragma unroll
        for (int i = 0; i < SCALES; i++) {
            u64 at = first + T::start(part, i) / 32;
            to.d[i] = fetch<float>(a.d + at);
            if (SUMS == SUM_OF_32) to.s[i] = fetch<float>(a.s + at);
        }
    }

    DEVICE float product(const Unit& unit, const Operand& with) {
        int dots[SCALES], sums[SCALES];
#pragma unroll
        for (int i = 0; i < SCALES; i++) dots[i] = sums[i] = 0;
#pragma unroll
        for (int run = 0; run < RUNS; run++)
#pragma unroll
            for (int word = 0; word < WORDS; word++) {
                int i = run % SCALES, q = with.q[run][word];
                dots[i] = __dp4a(unit.w[run][word], q, dots[i]);
                if (SUMS == SUM_OF_RUN) sums[i] = __dp4a(0x01010101, q, sums[i]);
            }
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < SCALES; i++) {
            if (SUMS == SUM_OF_RUN) {
                float scaled = unit.scale[i] * (float)dots[i] + unit.offset[i] * (float)sums[i];
                total += with.d[i] * scaled;
            } else {
                total += unit.scale[i] * (with.d[i] * (float)dots[i]);
            }
            if (SUMS == SUM_OF_32) total += unit.offset[i] * with.s[i];
        }
        return total;
    }

    DEVICE void write_floats(const Unit& unit, int part, float* block) {
#pragma unroll
        for (int run = 0; run < RUNS; run++)
#pragma unroll
            for (int word = 0; word < WORDS; word++) {
                float scale = unit.scale[run % SCALES];
                float offset = SUMS == NO_OFFSET ? 0.0f : unit.offset[run % SCALES];
                int bytes = unit.w[run][word];
                float4 four = make_float4(scale * (float)(i8)bytes + offset,
                                          scale * (float)(i8)(bytes >> 8) + offset,
                                          scale * (float)(i8)(bytes >> 16) + offset,
                                          scale * (float)(i8)(bytes >> 24) + offset);
                *(float4*)(block + T::start(part, run) + 4 * word) = four;
            }
    }
};

// Four weights that are floats, activations as they are.
template <class T>
struct Floats {
    static const int WEIGHTS = 4, PARTS = 1;

    struct Unit {
        float w[4];
    };
    struct Operand {
        float4 x;
    };

    DEVICE void unpack(const u8* block, int part, Unit& unit) { T::read(block, unit); }

    DEVICE void read_row(const u8* row, int block, int part, Unit& unit) {
        T::read(row + block * T::BYTES, unit);
    }

    DEVICE void read_activations(const Activations& a, int token, int block, int part, Operand& to) {
        to.x = fetch<float4>((const float*)a.x + (u64)token * a.stride + 4 * block);
    }

    DEVICE float product(const Unit& unit, const Operand& with) {
        return unit.w[0] * with.x.x + unit.w[1] * with.x.y + unit.w[2] * with.x.z + unit.w[3] * with.x.w;
    }

    DEVICE void write_floats(const Unit& unit, int part, float* block) {
        *(float4*)block = make_float4(unit.w[0], unit.w[1], unit.w[2], unit.w[3]);
    }
};

struct f32 : Floats<f32> {
    static const int BYTES = 16;
    DEVICE void read(const u8* block, Unit& unit) {
        float4 four = fetch<float4>(block);
        unit.w[0] = four.x;
        unit.w[1] = four.y;
        unit.w[2] = four.z;
        unit.w[3] = four.w;
    }
};

struct f16 : Floats<f16> {
    static const int BYTES = 8;
    DEVICE void read(const u8* block, Unit& unit) {
        uint2 two = fetch<uint2>(block);
        unit.w[0] = half_to_float((u16)two.x);
        unit.w[1] = half_to_float((u16)(two.x >> 16));
        unit.w[2] = half_to_float((u16)two.y);
        unit.w[3] = half_to_float((u16)(two.y >> 16));
    }
};

struct bf16 : Floats<bf16> {
    static const int BYTES = 8;
    DEVICE void read(const u8* block, Unit& unit) {
        uint2 two = fetch<uint2>(block);
        unit.w[0] = __uint_as_float(two.x << 16);
        unit.w[1] = __uint_as_float(two.x & 0xffff0000u);
        unit.w[2] = __uint_as_float(two.y << 16);
        unit.w[3] = __uint_as_float(two.y & 0xffff0000u);
    }
};
