// What a lane multiplies at a time: a unit of a weight row and the activations that meet it.
//
// A unit of a quantised row is RUNS runs of 4 * WORDS (8 or 16) weights as bytes, PARTS units to
// a block of WEIGHTS. Run r has the scale number r % SCALES: 1 where all runs of a unit share the
// scale and lie in the same 32 weights. A weight is scale * byte + offset; SUMS says how offsets
// meet the activations. A type gives start(part, run); load(block, part, raw), which only loads, so
// that a lane has several units under way; unpack(raw, part, unit); and takes_sum(part): which of
// the units that lie in the same 32 weights uses their sum.
#pragma once
#include "common.cuh"

enum Sums { NO_OFFSET, SUM_OF_32, SUM_OF_RUN };

struct Activations {  // fewer than 2^32 numbers in all
    const void* x;         // int8 [tokens, stride] where weights are quantised, else float32
    const float2* scales;  // [tokens, stride / 32]: d, by which x is d * q, and d * sum(q)
    u32 stride;            // numbers per token
};

template <class T, u32 RUNS_, u32 WORDS_, u32 SCALES_, Sums SUMS_>
struct Quantised {
    static const u32 RUNS = RUNS_, WORDS = WORDS_, SCALES = SCALES_;
    static const Sums SUMS = SUMS_;

    struct Unit {
        int w[RUNS][WORDS];
        float scale[SCALES], offset[SCALES];
    };
    struct Operand {
        int q[RUNS][WORDS];
        float d[SCALES], s[SCALES];
    };

    DEVICE bool takes_sum(u32 part) { return true; }

    // `at`: the number of the first activation that meets the block.
    DEVICE void load_activations(const Activations& a, u32 at, u32 part, Operand& to) {
#pragma unroll
        for (u32 run = 0; run < RUNS; run++) {
            const i8* q = (const i8*)a.x + (at + T::start(part, run));
            if (WORDS == 4) {
                int4 words = fetch<int4>(q);
                to.q[run][0] = words.x;
                to.q[run][1] = words.y;
                to.q[run][2 % WORDS] = words.z;
                to.q[run][3 % WORDS] = words.w;
            } else {
                int2 words = fetch<int2>(q);
                to.q[run][0] = words.x;
                to.q[run][1] = words.y;
            }
        }
        T::load_scales(a, at, part, to);
    }

    DEVICE void load_scales(const Activations& a, u32 at, u32 part, Operand& to) {
#pragma unroll
        for (u32 i = 0; i < SCALES; i++) {
            const float2* scales = a.scales + (at + T::start(part, i)) / 32;
            if (SUMS == SUM_OF_32) {
                float2 both = fetch<float2>(scales);
                to.d[i] = both.x;
                to.s[i] = both.y;
            } else {
                to.d[i] = fetch<float>(scales);
            }
        }
    }

    DEVICE float product(const Unit& unit, u32 part, const Operand& with) {
        int dots[SCALES], sums[SCALES];
#pragma unroll
        for (u32 i = 0; i < SCALES; i++) dots[i] = sums[i] = 0;
#pragma unroll
        for (u32 run = 0; run < RUNS; run++)
#pragma unroll
            for (u32 word = 0; word < WORDS; word++) {
                int q = with.q[run][word];
                dots[run % SCALES] = __dp4a(unit.w[run][word], q, dots[run % SCALES]);
                if (SUMS == SUM_OF_RUN) sums[run % SCALES] = __dp4a(0x01010101, q, sums[run % SCALES]);
            }
        float total = 0.0f;
#pragma unroll
        for (u32 i = 0; i < SCALES; i++) {
            if (SUMS == SUM_OF_RUN) {
                float scaled = unit.scale[i] * (float)dots[i] + unit.offset[i] * (float)sums[i];
                total += with.d[i] * scaled;
            } else {
                total += unit.scale[i] * (with.d[i] * (float)dots[i]);
            }
            if (SUMS == SUM_OF_32) total += (T::takes_sum(part) ? unit.offset[i] : 0.0f) * with.s[i];
        }
        return total;
    }

    DEVICE void write_floats(const Unit& unit, u32 part, float* block) {
#pragma unroll
        for (u32 run = 0; run < RUNS; run++)
#pragma unroll
            for (u32 word = 0; word < WORDS; word++) {
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
template <class T, class RAW>
struct Floats {
    static const u32 WEIGHTS = 4, BYTES = sizeof(RAW), PARTS = 1;
    typedef RAW Raw;
    typedef float4 Unit;
    typedef float4 Operand;

    DEVICE void load(const u8* block, u32 part, Raw& raw) { raw = fetch<RAW>(block); }

    DEVICE void load_activations(const Activations& a, u32 at, u32 part, Operand& to) {
        to = fetch<float4>((const float*)a.x + at);
    }

    DEVICE float product(const Unit& unit, u32 part, const Operand& with) {
        return unit.x * with.x + unit.y * with.y + unit.z * with.z + unit.w * with.w;
    }

    DEVICE void write_floats(const Unit& unit, u32 part, float* block) { *(float4*)block = unit; }
};

struct f32 : Floats<f32, float4> {
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) { unit = raw; }
};

struct f16 : Floats<f16, uint2> {
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        unit = make_float4(half_to_float((u16)raw.x), half_to_float((u16)(raw.x >> 16)),
                           half_to_float((u16)raw.y), half_to_float((u16)(raw.y >> 16)));
    }
};

struct bf16 : Floats<bf16, uint2> {
    DEVICE void unpack(const Raw& raw, u32 part, Unit& unit) {
        unit = make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
                           __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u));
    }
};
