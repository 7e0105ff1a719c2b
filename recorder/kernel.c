/* The recorder's passes over memory: statistics of float32 arrays in one fused pass each, at the speed of memory.
 *
 * Built as recorder/_kernel.abi3.so by hatch_build.py; NumpyKernel in recorder/kernel.py does the same where
 * it is missing. CPython's stable ABI 3.11, buffer protocol only, no NumPy headers.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t integers __attribute__((vector_size(4 * LANES)));
typedef double wide_lanes __attribute__((vector_size(8 * LANES)));

/* Float lanes are added to the float64 totals after this many vectors: a term sees at most 32 float32
 * roundings, which is the bound that tests/test_statistics.py states. */
#define VECTORS_PER_BLOCK 32

/* Floats that a pass asks for in advance: the processor by itself does so only up to the end of a page. 256 to
 * 1024 are alike; it saves a seventh of the pass over the gradients at the end of a step. */
#define AHEAD 512

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define FOR_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_CPU
#endif

/* Order of the columns of a row of statistics: Summary in recorder/statistics.py. */
enum {
    ELEMENT_COUNT, L2_NORM, MEAN, MEAN_ABS, STD, MINIMUM, MAXIMUM, ZERO_FRACTION,
    NAN_COUNT, POSITIVE_INFINITY_COUNT, NEGATIVE_INFINITY_COUNT, STATISTICS
};

/* A float32 sum of squares is trusted above this: squares of values near 1e-19 lose bits to underflow. */
#define SMALLEST_TRUSTED_SQUARE_SUM 1e-24
/* var = mean(x^2) - mean^2 loses log2(mean(x^2) / var) bits; a share of 1/64 leaves at least 17 of 23. */
#define SMALLEST_TRUSTED_VARIANCE_SHARE (1.0 / 64)

/* What a pass does with the second array beside the values, if there is one. */
typedef enum { NOTHING, COMPARE_AND_REPLACE, SUBTRACT } Second;

#define ALWAYS_INLINE static inline __attribute__((always_inline))

ALWAYS_INLINE lanes load(const float *values)
{
    lanes vector;
    memcpy(&vector, values, sizeof vector); /* arrays need not be aligned */
    return vector;
}

ALWAYS_INLINE double total_of(const wide_lanes *vector)
{
    double total = 0;
    for (int lane = 0; lane < LANES; lane++)
        total += (*vector)[lane];
    return total;
}

ALWAYS_INLINE lanes select_lanes(integers mask, lanes yes, lanes no)
{
    return (lanes)((mask & (integers)yes) | (~mask & (integers)no));
}

/* Sums of one array, float32 within a block of vectors and float64 over blocks. */
typedef struct {
    double sum, square_sum, absolute_sum, zero_count, product;
    float minimum, maximum;
} Totals;

/* One pass: the totals of values (NOTHING), also of their product with second, which then holds them
 * (COMPARE_AND_REPLACE), or the totals of values - second (SUBTRACT). */
ALWAYS_INLINE Totals pass(const float *values, float *second, Py_ssize_t count, Second use)
{
    const integers magnitude_bits = (integers){0} + 0x7FFFFFFF;
    lanes low = (lanes){0} + INFINITY, high = (lanes){0} - INFINITY;
    wide_lanes sums = {0}, square_sums = {0}, absolute_sums = {0}, zero_counts = {0}, products = {0};
    Py_ssize_t position = 0;
    while (position + LANES <= count) {
        lanes sum = {0}, square_sum = {0}, absolute_sum = {0}, product = {0};
        integers zeros = {0};
        for (int v = 0; v < VECTORS_PER_BLOCK && position + LANES <= count; v++, position += LANES) {
            lanes x = load(values + position);
            __builtin_prefetch(values + position + AHEAD);
            if (use != NOTHING)
                __builtin_prefetch(second + position + AHEAD, use == COMPARE_AND_REPLACE);
            if (use == SUBTRACT)
                x -= load(second + position);
            if (use == COMPARE_AND_REPLACE) {
                product += x * load(second + position);
                memcpy(second + position, &x, sizeof x);
            }
            integers magnitude = (integers)x & magnitude_bits;
            sum += x;
            square_sum += x * x;
            absolute_sum += (lanes)magnitude;
            zeros += magnitude == 0; /* true is -1 */
            low = select_lanes(x < low, x, low);
            high = select_lanes(x > high, x, high);
        }
        sums += __builtin_convertvector(sum, wide_lanes);
        square_sums += __builtin_convertvector(square_sum, wide_lanes);
        absolute_sums += __builtin_convertvector(absolute_sum, wide_lanes);
        zero_counts -= __builtin_convertvector(zeros, wide_lanes);
        products += __builtin_convertvector(product, wide_lanes);
    }
    Totals totals = {total_of(&sums), total_of(&square_sums), total_of(&absolute_sums), total_of(&zero_counts),
                     total_of(&products), INFINITY, -INFINITY};
    for (int lane = 0; lane < LANES; lane++) {
        totals.minimum = low[lane] < totals.minimum ? low[lane] : totals.minimum;
        totals.maximum = high[lane] > totals.maximum ? high[lane] : totals.maximum;
    }
    for (; position < count; position++) {
        float x = use == SUBTRACT ? values[position] - second[position] : values[position];
        if (use == COMPARE_AND_REPLACE) {
            totals.product += (double)x * second[position];
            second[position] = x;
        }
        totals.sum += x;
        totals.square_sum += x * x; /* float32 like the lanes: the trusted range is the same */
        totals.absolute_sum += fabsf(x);
        totals.zero_count += x == 0;
        totals.minimum = x < totals.minimum ? x : totals.minimum;
        totals.maximum = x > totals.maximum ? x : totals.maximum;
    }
    return totals;
}

FOR_EVERY_CPU
static Totals plain_pass(const float *values, Py_ssize_t count)
{
    return pass(values, NULL, count, NOTHING);
}

FOR_EVERY_CPU
static Totals comparing_pass(const float *values, float *previous, Py_ssize_t count)
{
    return pass(values, previous, count, COMPARE_AND_REPLACE);
}

FOR_EVERY_CPU
static Totals subtracting_pass(const float *values, float *before, Py_ssize_t count)
{
    return pass(values, before, count, SUBTRACT);
}

/* Standard deviation by a second pass, in float64 about the approximate mean: where the spread is lost in
 * the cancellation of the first, as for gains near 1 and biases near a constant. */
static double centred_deviation(const float *values, const float *before, Py_ssize_t count, double mean)
{
    double sum = 0, square_sum = 0;
    for (Py_ssize_t position = 0; position < count; position++) {
        float x = before ? values[position] - before[position] : values[position];
        sum += x - mean;
        square_sum += (x - mean) * (x - mean);
    }
    return sqrt(fmax(square_sum / count - (sum / count) * (sum / count), 0));
}

/* Totals to a row of statistics; false, and std is NaN, where the row is not to be trusted: a value or a square
 * that is not finite, or squares that underflow. before: what was subtracted from the values, or NULL. */
static int write_statistics(const Totals *totals, const float *values, const float *before, Py_ssize_t count,
                            double *row)
{
    double elements = count > 0 ? count : 1;
    double mean = totals->sum / elements, mean_square = totals->square_sum / elements;
    double variance = mean_square - mean * mean;
    /* All zero: nothing to lose, and common in gradients. */
    int trusted = (totals->square_sum > SMALLEST_TRUSTED_SQUARE_SUM && isfinite(mean_square))
                  || totals->zero_count == elements;
    int cancelled = trusted && variance < SMALLEST_TRUSTED_VARIANCE_SHARE * mean_square;
    row[ELEMENT_COUNT] = count;
    row[L2_NORM] = sqrt(totals->square_sum);
    row[MEAN] = mean;
    row[MEAN_ABS] = totals->absolute_sum / elements;
    row[STD] = !trusted ? NAN : cancelled ? centred_deviation(values, before, count, mean) : sqrt(variance);
    row[MINIMUM] = totals->minimum;
    row[MAXIMUM] = totals->maximum;
    row[ZERO_FRACTION] = totals->zero_count / elements;
    row[NAN_COUNT] = row[POSITIVE_INFINITY_COUNT] = row[NEGATIVE_INFINITY_COUNT] = 0;
    return trusted;
}

FOR_EVERY_CPU
static float square_sum_of(const float *values, Py_ssize_t count)
{
    lanes sum = {0};
    float rest = 0;
    Py_ssize_t position = 0;
    for (; position + LANES <= count; position += LANES) {
        lanes x = load(values + position);
        sum += x * x;
    }
    for (; position < count; position++)
        rest += values[position] * values[position];
    for (int lane = 0; lane < LANES; lane++)
        rest += sum[lane];
    return rest;
}

/* The first count <= LANES of the values, and zeros; readable is how many may be read from there. */
ALWAYS_INLINE lanes load_first(const float *values, Py_ssize_t count, Py_ssize_t readable)
{
    static const integers lane_numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    lanes vector = {0};
    if (readable < LANES) { /* at the very end of the array */
        memcpy(&vector, values, sizeof(float) * count);
        return vector;
    }
    integers wanted = lane_numbers < (integers){0} + (int32_t)(count < LANES ? count : LANES);
    return (lanes)((integers)load(values) & wanted);
}

/* Natural logarithm of positive normal numbers: x = 2^e m with m within sqrt(2) of 1, and
 * ln m = 2 artanh(s), s = (m - 1) / (m + 1), |s| <= .172. The series ends before 2 s^11 / 11 < 7e-10. */
ALWAYS_INLINE lanes logarithm(lanes x)
{
    const int32_t half_root_bits = 0x3F3504F3; /* sqrt(1/2) */
    integers exponent = ((integers)x - half_root_bits) >> 23;
    lanes m = (lanes)((integers)x - (exponent << 23));
    lanes s = (m - 1.0f) / (m + 1.0f), square = s * s;
    lanes series = square * (1.0f / 9) + 1.0f / 7;
    series = series * square + 1.0f / 5;
    series = series * square + 1.0f / 3;
    lanes fraction = 2.0f * (s + s * square * series);
    return __builtin_convertvector(exponent, lanes) * 0.69314718f + fraction;
}

/* Sum of the attention that the real queries of one sequence and head give to later keys, and to keys
 * later than the next one. A sum of zeros is exactly zero. */
FOR_EVERY_CPU
static void add_future_mass(const float *probabilities, const uint8_t *real, Py_ssize_t length, double *sums)
{
    const float *end = probabilities + length * length;
    integers any = {0};
    for (Py_ssize_t query = 0; query + 1 < length; query++) {
        const float *row_end = probabilities + (query + 1) * length, *key = row_end - length + query + 1;
        for (; key + LANES <= row_end; key += LANES)
            any |= (integers)load(key);
        if (query + LANES < length) /* what is left of the row, and some of it again */
            any |= (integers)load(row_end - LANES);
        else
            any |= (integers)load_first(key, row_end - key, end - key);
    }
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++)
        bits |= any[lane];
    if (bits == 0) /* a causal mask: nothing to add */
        return;
    for (Py_ssize_t query = 0; query + 1 < length; query++) {
        if (!real[query])
            continue;
        const float *row = probabilities + query * length;
        double beyond = 0;
        for (Py_ssize_t key = query + 2; key < length; key++)
            beyond += row[key];
        sums[0] += row[query + 1] + beyond;
        sums[1] += beyond;
    }
}

/* Sum over the real queries of one sequence and head of the entropy of their attention times a weight. */
FOR_EVERY_CPU
static double entropy_sum(const float *probabilities, const uint8_t *real, const float *weights,
                          Py_ssize_t length)
{
    const float *end = probabilities + length * length;
    wide_lanes total = {0};
    for (Py_ssize_t query = 0; query < length;) {
        lanes sum = {0};
        for (int rows = 0; rows < VECTORS_PER_BLOCK && query < length; rows++, query++) {
            const float *row_end = probabilities + (query + 1) * length;
            if (!real[query] || weights[query] == 0)
                continue;
            for (const float *key = row_end - length; key < row_end; key += LANES) {
                lanes p = load_first(key, row_end - key, end - key);
                /* Below the normal numbers p ln p is nothing. A NaN is not below: it comes through the product. */
                lanes normal = select_lanes(p < FLT_MIN, (lanes){0} + 1.0f, p);
                sum += p * logarithm(normal) * weights[query];
            }
        }
        total += __builtin_convertvector(sum, wide_lanes);
    }
    return -total_of(&total);
}

/* Marks the units of (tokens, units) outputs that are not zero on some token. NaN is not zero. */
FOR_EVERY_CPU
static void mark_fired_units(const float *outputs, Py_ssize_t tokens, Py_ssize_t units, uint8_t *fired)
{
    for (Py_ssize_t first = 0; first < units; first += LANES) {
        Py_ssize_t count = units - first < LANES ? units - first : LANES;
        for (Py_ssize_t token = 0; token < tokens && memchr(fired + first, 0, count); token += VECTORS_PER_BLOCK) {
            Py_ssize_t last = token + VECTORS_PER_BLOCK < tokens ? token + VECTORS_PER_BLOCK : tokens;
            integers active = {0};
            for (Py_ssize_t t = token; t < last; t++) {
                const float *row = outputs + t * units + first;
                active |= load_first(row, count, (tokens - t) * units - first) != 0;
            }
            for (Py_ssize_t unit = 0; unit < count; unit++)
                fired[first + unit] |= active[unit] & 1;
        }
    }
}

/* back := W'W v for a row-major (rows, columns) W, and |W v|^2: one pass over the memory of W. */
FOR_EVERY_CPU
static double gram_product(const float *matrix, Py_ssize_t rows, Py_ssize_t columns, const float *vector,
                           float *back)
{
    double square_sum = 0;
    Py_ssize_t whole = columns - columns % LANES;
    memset(back, 0, sizeof(float) * columns);
    for (Py_ssize_t row = 0; row < rows; row++, matrix += columns) {
        lanes sum = {0};
        float image = 0;
        for (Py_ssize_t c = 0; c < whole; c += LANES)
            sum += load(matrix + c) * load(vector + c);
        for (Py_ssize_t c = whole; c < columns; c++)
            image += matrix[c] * vector[c];
        for (int lane = 0; lane < LANES; lane++)
            image += sum[lane];
        square_sum += (double)image * image;
        for (Py_ssize_t c = 0; c < whole; c += LANES) {
            lanes moved = load(back + c) + image * load(matrix + c);
            memcpy(back + c, &moved, sizeof moved);
        }
        for (Py_ssize_t c = whole; c < columns; c++)
            back[c] += image * matrix[c];
    }
    return square_sum;
}

#define MOST_LANCZOS_STEPS 32

static double dot(const float *left, const float *right, Py_ssize_t count)
{
    double sum = 0;
    for (Py_ssize_t position = 0; position < count; position++)
        sum += (double)left[position] * right[position];
    return sum;
}

/* Largest eigenvalue of a symmetric tridiagonal matrix, by bisection: below it, and only there, some pivot of
 * T - x is not negative (Sylvester's law of inertia). */
static double largest_eigenvalue(const double *diagonal, const double *beside, int size)
{
    double low = diagonal[0], high = 0;
    for (int i = 0; i < size; i++) {
        double radius = (i > 0 ? beside[i - 1] : 0) + (i + 1 < size ? beside[i] : 0);
        low = fmax(low, diagonal[i]);
        high = fmax(high, diagonal[i] + radius); /* Gershgorin */
    }
    for (int halving = 0; halving < 60 && high > low; halving++) {
        double middle = low + (high - low) / 2, pivot = diagonal[0] - middle;
        for (int i = 1; i < size && pivot < 0; i++)
            pivot = diagonal[i] - middle - beside[i - 1] * beside[i - 1] / pivot;
        if (pivot < 0)
            high = middle;
        else
            low = middle;
    }
    return low;
}

/* Unit eigenvector of that eigenvalue, by inverse iteration: with a shift just above it T - shift is negative
 * definite, so elimination needs no pivoting. */
static void leading_eigenvector(const double *diagonal, const double *beside, int size, double value,
                                double *vector)
{
    double pivots[MOST_LANCZOS_STEPS], shift = value * (1 + 1e-10);
    for (int i = 0; i < size; i++) {
        pivots[i] = diagonal[i] - shift - (i > 0 ? beside[i - 1] * beside[i - 1] / pivots[i - 1] : 0);
        vector[i] = 1;
    }
    for (int repeat = 0; repeat < 3; repeat++) {
        double square_sum = 0;
        for (int i = 1; i < size; i++)
            vector[i] -= beside[i - 1] / pivots[i - 1] * vector[i - 1];
        for (int i = size - 1; i >= 0; i--) {
            vector[i] = (vector[i] - (i + 1 < size ? beside[i] * vector[i + 1] : 0)) / pivots[i];
            square_sum += vector[i] * vector[i];
        }
        for (int i = 0; i < size; i++)
            vector[i] /= sqrt(square_sum);
    }
}

/* Lanczos iteration on W'W from the unit vector basis[0], with full reorthogonalisation: the square root of the
 * largest Ritz value, and its Ritz vector in the place of basis[0]. basis: (steps + 1, columns). At most
 * MOST_LANCZOS_STEPS. NaN or 0 leaves a vector that is good for nothing. */
static double lanczos_norm(const float *matrix, Py_ssize_t rows, Py_ssize_t columns, float *basis, int steps)
{
    double diagonal[MOST_LANCZOS_STEPS], beside[MOST_LANCZOS_STEPS], weights[MOST_LANCZOS_STEPS];
    int size = 0;
    do {
        float *current = basis + size * columns, *next = current + columns;
        double square_sum = gram_product(matrix, rows, columns, current, next);
        if (!isfinite(square_sum) || (square_sum == 0 && size == 0))
            return square_sum == 0 ? 0 : NAN;
        diagonal[size++] = square_sum;
        for (int j = 0; j < 2 * size; j++) { /* twice is enough (Parlett 1998, section 6.9) */
            const float *earlier = basis + j % size * columns;
            double overlap = dot(earlier, next, columns);
            for (Py_ssize_t c = 0; c < columns; c++)
                next[c] -= (float)(overlap * earlier[c]);
        }
        double length = sqrt(dot(next, next, columns));
        beside[size - 1] = length;
        if (!(length > 1e-6 * diagonal[0])) /* an invariant subspace: nothing new is left but rounding */
            break;
        for (Py_ssize_t c = 0; c < columns; c++)
            next[c] = (float)(next[c] / length);
    } while (size < steps);
    double value = largest_eigenvalue(diagonal, beside, size);
    leading_eigenvector(diagonal, beside, size, value, weights);
    for (Py_ssize_t c = 0; c < columns; c++) {
        double sum = 0;
        for (int j = 0; j < size; j++)
            sum += weights[j] * basis[j * columns + c];
        basis[c] = (float)sum;
    }
    return sqrt(value);
}

static int read_floats(PyObject *object, Py_buffer *view, int flags)
{
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT | flags) == 0) {
        if (view->itemsize == 4 && view->format != NULL && strcmp(view->format, "f") == 0)
            return 0;
        PyBuffer_Release(view);
    }
    PyErr_Clear(); /* of a strided array NumPy says ValueError, others BufferError */
    PyErr_SetString(PyExc_TypeError, "expected C-contiguous float32 arrays");
    return -1;
}

/* Fills a row of statistics for each array; whether all are to be trusted, or -1 with an exception set on misuse.
 * Arrays that are not C-contiguous float32 get a row of NaN. second: a flat float32 buffer as long as the arrays
 * together, or NULL. */
static int summarize_all(PyObject *arrays, const Py_buffer *statistics, const Py_buffer *second, Second use,
                         double *product)
{
    Py_ssize_t count = PyList_Size(arrays), offset = 0, available = second ? second->len / 4 : 0;
    int trusted = 1;
    double *row = statistics->buf;
    if (statistics->len != count * STATISTICS * (Py_ssize_t)sizeof(double)) {
        PyErr_SetString(PyExc_ValueError, "statistics: expected one row of 11 float64 for each array");
        return -1;
    }
    for (Py_ssize_t index = 0; index < count; index++, row += STATISTICS) {
        Py_buffer view;
        if (read_floats(PyList_GetItem(arrays, index), &view, 0) < 0) {
            if (second)
                return -1;
            PyErr_Clear();
            for (int column = 0; column < STATISTICS; column++)
                row[column] = NAN;
            trusted = 0;
            continue;
        }
        Py_ssize_t elements = view.len / 4;
        float *beside = second ? (float *)second->buf + offset : NULL;
        Totals totals;
        offset += elements;
        if (second && offset > available) {
            PyBuffer_Release(&view);
            break;
        }
        totals = use == NOTHING    ? plain_pass(view.buf, elements)
                 : use == SUBTRACT ? subtracting_pass(view.buf, beside, elements)
                                   : comparing_pass(view.buf, beside, elements);
        trusted &= write_statistics(&totals, view.buf, use == SUBTRACT ? beside : NULL, elements, row);
        PyBuffer_Release(&view);
        *product += totals.product;
    }
    if (second && offset != available) {
        PyErr_SetString(PyExc_ValueError, "expected a flat buffer of as many elements as the arrays have");
        return -1;
    }
    return trusted;
}

/* summarize(arrays, statistics) -> bool: statistics is (arrays, 11) float64; whether all rows are to be trusted. */
static PyObject *summarize(PyObject *module, PyObject *arguments)
{
    PyObject *arrays;
    Py_buffer statistics;
    double product = 0;
    if (!PyArg_ParseTuple(arguments, "O!w*", &PyList_Type, &arrays, &statistics))
        return NULL;
    int trusted = summarize_all(arrays, &statistics, NULL, NOTHING, &product);
    PyBuffer_Release(&statistics);
    return trusted < 0 ? NULL : PyBool_FromLong(trusted);
}

/* summarize_into(array, statistics, row) -> bool: fills one row of a (rows, 11) float64 buffer; false where it is not
 * to be trusted. For hooks: the array is still in the cache. */
static PyObject *summarize_into(PyObject *module, PyObject *arguments)
{
    PyObject *array;
    Py_buffer statistics, view;
    Py_ssize_t index;
    int trusted = 0;
    if (!PyArg_ParseTuple(arguments, "Ow*n", &array, &statistics, &index))
        return NULL;
    if (index < 0 || (index + 1) * STATISTICS * (Py_ssize_t)sizeof(double) > statistics.len)
        PyErr_SetString(PyExc_IndexError, "statistics: no such row");
    else if (read_floats(array, &view, 0) < 0)
        PyErr_Clear(); /* other than contiguous float32: not trusted */
    else {
        double *row = (double *)statistics.buf + index * STATISTICS;
        Totals totals = plain_pass(view.buf, view.len / 4);
        trusted = write_statistics(&totals, view.buf, NULL, view.len / 4, row);
        PyBuffer_Release(&view);
    }
    PyBuffer_Release(&statistics);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(trusted);
}

static PyObject *summarize_beside(PyObject *arguments, Second use, double *product)
{
    PyObject *arrays, *flat;
    Py_buffer statistics, second;
    if (!PyArg_ParseTuple(arguments, "O!Ow*", &PyList_Type, &arrays, &flat, &statistics))
        return NULL;
    if (read_floats(flat, &second, use == COMPARE_AND_REPLACE ? PyBUF_WRITABLE : 0) < 0) {
        PyBuffer_Release(&statistics);
        return NULL;
    }
    int trusted = summarize_all(arrays, &statistics, &second, use, product);
    PyBuffer_Release(&second);
    PyBuffer_Release(&statistics);
    return trusted < 0 ? NULL : PyBool_FromLong(trusted);
}

/* summarize_and_compare(arrays, previous, statistics) -> (float, bool): the dot product of the arrays, end to end,
 * with the flat buffer, which then holds the arrays; and as summarize. */
static PyObject *summarize_and_compare(PyObject *module, PyObject *arguments)
{
    double product = 0;
    PyObject *trusted = summarize_beside(arguments, COMPARE_AND_REPLACE, &product);
    return trusted ? Py_BuildValue("dN", product, trusted) : NULL;
}

/* summarize_differences(arrays, before, statistics) -> bool: as summarize, of the arrays minus the flat buffer. */
static PyObject *summarize_differences(PyObject *module, PyObject *arguments)
{
    double product = 0;
    return summarize_beside(arguments, SUBTRACT, &product);
}

/* square_sums_finite(arrays) -> bool: false when an array holds NaN or infinity, or its squares overflow. */
static PyObject *square_sums_finite(PyObject *module, PyObject *arrays)
{
    Py_buffer view;
    int finite = 1;
    for (Py_ssize_t index = 0; finite && index < PyList_Size(arrays); index++) {
        if (read_floats(PyList_GetItem(arrays, index), &view, 0) < 0)
            break;
        finite = isfinite(square_sum_of(view.buf, view.len / 4));
        PyBuffer_Release(&view);
    }
    return PyErr_Occurred() ? NULL : PyBool_FromLong(finite);
}

/* Adds to the row of sums of each head, over all sequences of (B, H, T, T) attention with (B, T) real queries:
 * an entropy with the (T,) weights, or both future masses without. */
static void add_over_heads(const Py_buffer *attention, const Py_buffer *real, const float *weights,
                           const Py_buffer *sums)
{
    Py_ssize_t heads = attention->shape[1], length = attention->shape[2];
    const float *head = attention->buf;
    for (Py_ssize_t index = 0; index < attention->shape[0] * heads; index++, head += length * length) {
        const uint8_t *queries = (const uint8_t *)real->buf + index / heads * length;
        if (weights)
            ((double *)sums->buf)[index % heads] += entropy_sum(head, queries, weights, length);
        else
            add_future_mass(head, queries, length, (double *)sums->buf + 2 * (index % heads));
    }
}

static PyObject *over_heads(PyObject *arguments, Py_ssize_t columns, int with_entropy)
{
    PyObject *array;
    Py_buffer real, sums, view;
    float *weights = NULL;
    if (!PyArg_ParseTuple(arguments, "Oy*w*", &array, &real, &sums))
        return NULL;
    if (read_floats(array, &view, 0) == 0) {
        const Py_ssize_t *shape = view.shape;
        if (view.ndim != 4 || shape[2] != shape[3] || real.len != shape[0] * shape[2]
            || sums.len != shape[1] * columns * (Py_ssize_t)sizeof(double))
            PyErr_SetString(PyExc_ValueError, "expected (B, H, T, T), (B, T) and a row of sums for each head");
        else if (with_entropy && (weights = PyMem_Malloc(sizeof(float) * (shape[2] + 1))) == NULL)
            PyErr_NoMemory();
        else {
            for (Py_ssize_t query = 0; weights && query < shape[2]; query++) /* query 0 has no choice */
                weights[query] = query > 0 ? (float)(1 / log(query + 1.0)) : 0;
            add_over_heads(&view, &real, weights, &sums);
            PyMem_Free(weights);
        }
        PyBuffer_Release(&view);
    }
    PyBuffer_Release(&real);
    PyBuffer_Release(&sums);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* future_mass(probabilities (B, H, T, T), real (B, T) uint8, sums (H, 2) float64): adds to sums. */
static PyObject *future_mass(PyObject *module, PyObject *arguments)
{
    return over_heads(arguments, 2, 0);
}

/* attention_entropy(probabilities (B, H, T, T), real (B, T) uint8, sums (H,) float64): adds to sums. */
static PyObject *attention_entropy(PyObject *module, PyObject *arguments)
{
    return over_heads(arguments, 1, 1);
}

/* mark_fired(outputs (tokens, units), fired (units,) bool): sets what fires. */
static PyObject *mark_fired(PyObject *module, PyObject *arguments)
{
    PyObject *array;
    Py_buffer fired, view;
    if (!PyArg_ParseTuple(arguments, "Ow*", &array, &fired))
        return NULL;
    if (read_floats(array, &view, 0) == 0) {
        if (view.ndim != 2 || view.shape[1] != fired.len)
            PyErr_SetString(PyExc_ValueError, "expected (tokens, units) and (units,)");
        else
            mark_fired_units(view.buf, view.shape[0], view.shape[1], fired.buf);
        PyBuffer_Release(&view);
    }
    PyBuffer_Release(&fired);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* lanczos(matrix (m, n), vector (n,), steps) -> float: a lower bound of the largest singular value; the vector
 * moves on. */
static PyObject *lanczos(PyObject *module, PyObject *arguments)
{
    PyObject *array, *start;
    Py_buffer matrix, vector;
    int steps;
    double norm = 0;
    if (!PyArg_ParseTuple(arguments, "OOi", &array, &start, &steps))
        return NULL;
    if (read_floats(array, &matrix, 0) == 0) {
        if (read_floats(start, &vector, PyBUF_WRITABLE) == 0) {
            float *basis = NULL;
            if (matrix.ndim != 2 || vector.len != matrix.shape[1] * 4 || steps < 1 || steps > MOST_LANCZOS_STEPS)
                PyErr_SetString(PyExc_ValueError, "expected (m, n) and (n,) float32, and 1 to 32 steps");
            else if ((basis = PyMem_Malloc(vector.len * (steps + 1) + 1)) == NULL)
                PyErr_NoMemory();
            else {
                memcpy(basis, vector.buf, vector.len);
                norm = lanczos_norm(matrix.buf, matrix.shape[0], matrix.shape[1], basis, steps);
                memcpy(vector.buf, basis, vector.len);
                PyMem_Free(basis);
            }
            PyBuffer_Release(&vector);
        }
        PyBuffer_Release(&matrix);
    }
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(norm);
}

static PyMethodDef methods[] = {
    {"summarize", summarize, METH_VARARGS, "Fill a row of statistics for each array."},
    {"summarize_into", summarize_into, METH_VARARGS, "Fill one row; false where it is not to be trusted."},
    {"summarize_and_compare", summarize_and_compare, METH_VARARGS,
     "The same, and the dot product with a buffer, which is overwritten."},
    {"summarize_differences", summarize_differences, METH_VARARGS, "The same for arrays minus a buffer."},
    {"square_sums_finite", square_sums_finite, METH_O, "Whether every array's sum of squares is finite."},
    {"future_mass", future_mass, METH_VARARGS, "Add attention on later keys to sums per head."},
    {"attention_entropy", attention_entropy, METH_VARARGS, "Add normalised entropies to sums per head."},
    {"mark_fired", mark_fired, METH_VARARGS, "Mark the units that are not zero on some token."},
    {"lanczos", lanczos, METH_VARARGS, "Bound a spectral norm from below, and move a vector on."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "recorder._kernel", "Fused statistics of float32 arrays.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
