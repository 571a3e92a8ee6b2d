/* exp(-a) and log1p(u), which softplus is made of, without branches, so that loops are vectorised. The
 * polynomials are printed by tools/softplus. */

INLINE uint64_t bits_of_double(double d)
{
    uint64_t u;
    memcpy(&u, &d, sizeof u);
    return u;
}

INLINE double double_of(uint64_t u)
{
    double d;
    memcpy(&d, &u, sizeof d);
    return d;
}

/* From here on, exp(-a) is zero in float32. */
#define SOFTPLUS_LIMIT_F32 150.0
#define SOFTPLUS_LIMIT_HALF 104.0f

/* For a from 0 to SOFTPLUS_LIMIT_F32, with a relative error below 2^-34: 2^-n exp(n ln 2 - a). */
INLINE double exp_minus_f32(double a)
{
    /* Near this number, doubles are integers, and the lower bits of the sum are n. */
    const double whole = 6755399441055744.0, shifted = a * 1.4426950408889634 + whole;
    const double r = (shifted - whole) * 0.6931471805599453 - a;
    /* Even and odd powers apart, because a chain of sums takes longer than their number. */
    const double rr = r * r;
    double even = 0.0013948578326459795, odd = 0.00019907569310848288;
    even = even * rr + 0.041666218319291945, odd = odd * rr + 0.008333283538708528;
    even = even * rr + 0.5000000107729166, odd = odd * rr + 0.16666666786308587;
    even = even * rr + 0.9999999999595618, odd = odd * rr + 0.999999999995509;
    const double p = even + odd * r;
    return double_of(bits_of_double(p) - (bits_of_double(shifted) << 52));
}

/* For u from 0 to 1, with a relative error below 2^-33. */
INLINE double log1p_f32(double u)
{
    const double uu = u * u;
    double even = -0.008009632563823666, odd = 0.0011261745502929483;
    even = even * uu - 0.056546791059659804, odd = odd * uu + 0.02666285302885365;
    even = even * uu - 0.11697161413148038, odd = odd * uu + 0.08907937721356587;
    even = even * uu - 0.1663354003469392, odd = odd * uu + 0.14084001010579714;
    even = even * uu - 0.24999829427637563, odd = odd * uu + 0.19996719986775702;
    even = even * uu - 0.4999999998780975, odd = odd * uu + 0.3333332981138023;
    return u + uu * (even + odd * u);
}

/* As above for half precision: in float, with relative errors below 2^-21 and 2^-19. */
INLINE float exp_minus_half(float a)
{
    const float whole = 12582912.0f, shifted = a * 1.44269504f + whole;
    const float r = (shifted - whole) * 0.693147181f - a;
    /* A power of two that is too small for a float is a product of two that are not. */
    const uint32_t n = bits_of(shifted) - bits_of(whole), first = n >> 1;
    float p = 0.008369148490856347f;
    p = p * r + 0.04191750724961526f;
    p = p * r + 0.16666505260408124f;
    p = p * r + 0.49998869378303396f;
    p = p * r + 1.00000001077157f;
    p = p * r + 1.0000000754548972f;
    return p * float_of((127 - first) << 23) * float_of((127 - (n - first)) << 23);
}

INLINE float log1p_half(float u)
{
    float p = -0.011684066983334834f;
    p = p * u + 0.05476871895059311f;
    p = p * u - 0.12181987872771625f;
    p = p * u + 0.18663247910600975f;
    p = p * u - 0.24796362119440318f;
    p = p * u + 0.3332116616580786f;
    p = p * u - 0.49999876948614136f;
    return u + u * u * p;
}
