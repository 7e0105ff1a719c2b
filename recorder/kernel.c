/* One fused pass over float32 arrays: sums, extremes and zeros together, at the speed of memory.
 *
 * Built as recorder/_kernel.abi3.so by hatch_build.py; recorder/statistics.py does the same with NumPy
 * where it is missing. CPython's stable ABI 3.11, buffer protocol only, no NumPy headers.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
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

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define FOR_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EVERY_CPU
#endif

/* Order of the columns of a totals row; recorder/statistics.py reads it. */
enum { SUM, SQUARE_SUM, ABSOLUTE_SUM, ZERO_COUNT, MINIMUM, MAXIMUM, TOTALS };

static inline lanes load(const float *values)
{
    lanes vector;
    memcpy(&vector, values, sizeof vector); /* arrays need not be aligned */
    return vector;
}

static inline double total_of(const wide_lanes *vector)
{
    double total = 0;
    for (int lane = 0; lane < LANES; lane++)
        total += (*vector)[lane];
    return total;
}

static inline lanes select_lanes(integers mask, lanes yes, lanes no)
{
    return (lanes)((mask & (integers)yes) | (~mask & (integers)no));
}

FOR_EVERY_CPU
static void add_array(const float *values, Py_ssize_t count, double *totals)
{
    const integers magnitude_bits = (integers){0} + 0x7FFFFFFF;
    lanes low = (lanes){0} + INFINITY, high = (lanes){0} - INFINITY;
    wide_lanes sums = {0}, square_sums = {0}, absolute_sums = {0}, zero_counts = {0};
    Py_ssize_t position = 0;
    while (position + LANES <= count) {
        lanes sum = {0}, square_sum = {0}, absolute_sum = {0};
        integers zeros = {0};
        for (int v = 0; v < VECTORS_PER_BLOCK && position + LANES <= count; v++, position += LANES) {
            lanes x = load(values + position);
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
    }
    totals[SUM] += total_of(&sums);
    totals[SQUARE_SUM] += total_of(&square_sums);
    totals[ABSOLUTE_SUM] += total_of(&absolute_sums);
    totals[ZERO_COUNT] += total_of(&zero_counts);
    for (int lane = 0; lane < LANES; lane++) {
        totals[MINIMUM] = low[lane] < totals[MINIMUM] ? low[lane] : totals[MINIMUM];
        totals[MAXIMUM] = high[lane] > totals[MAXIMUM] ? high[lane] : totals[MAXIMUM];
    }
    for (; position < count; position++) {
        float x = values[position];
        totals[SUM] += x;
        totals[SQUARE_SUM] += x * x; /* float32 like the lanes: the trusted range is the same */
        totals[ABSOLUTE_SUM] += fabsf(x);
        totals[ZERO_COUNT] += x == 0;
        totals[MINIMUM] = x < totals[MINIMUM] ? x : totals[MINIMUM];
        totals[MAXIMUM] = x > totals[MAXIMUM] ? x : totals[MAXIMUM];
    }
}

FOR_EVERY_CPU
static double dot_and_replace(const float *values, float *previous, Py_ssize_t count)
{
    wide_lanes sums = {0};
    Py_ssize_t position = 0;
    while (position + LANES <= count) {
        lanes sum = {0};
        for (int v = 0; v < VECTORS_PER_BLOCK && position + LANES <= count; v++, position += LANES) {
            lanes x = load(values + position);
            sum += x * load(previous + position);
            memcpy(previous + position, &x, sizeof x);
        }
        sums += __builtin_convertvector(sum, wide_lanes);
    }
    double total = total_of(&sums);
    for (; position < count; position++) {
        total += (double)values[position] * previous[position];
        previous[position] = values[position];
    }
    return total;
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

/* Sum of the attention that the real queries of one sequence and head give to later keys, and to keys
 * later than the next one. */
FOR_EVERY_CPU
static void add_future_mass(const float *probabilities, const uint8_t *real, Py_ssize_t length, double *sums)
{
    for (Py_ssize_t query = 0; query < length; query++) {
        if (!real[query])
            continue;
        const float *row = probabilities + query * length;
        float beyond = 0, next = query + 1 < length ? row[query + 1] : 0;
        Py_ssize_t key = query + 2;
        lanes sum = {0};
        for (; key + LANES <= length; key += LANES)
            sum += load(row + key);
        for (; key < length; key++)
            beyond += row[key];
        for (int lane = 0; lane < LANES; lane++)
            beyond += sum[lane];
        sums[0] += (double)next + beyond;
        sums[1] += beyond;
    }
}

static int read_floats(PyObject *object, Py_buffer *view, int flags)
{
    if (PyObject_GetBuffer(object, view, PyBUF_ND | PyBUF_FORMAT | flags) < 0)
        return -1; /* not contiguous: the buffer protocol says so */
    if (view->itemsize == 4 && view->format != NULL && strcmp(view->format, "f") == 0)
        return 0;
    PyBuffer_Release(view);
    PyErr_SetString(PyExc_TypeError, "expected C-contiguous float32 arrays");
    return -1;
}

/* add_totals(arrays, totals): adds each array's sums to its (TOTALS,) row of a float64 buffer. */
static PyObject *add_totals(PyObject *module, PyObject *arguments)
{
    PyObject *arrays;
    Py_buffer totals, view;
    if (!PyArg_ParseTuple(arguments, "O!w*", &PyList_Type, &arrays, &totals))
        return NULL;
    Py_ssize_t count = PyList_Size(arrays), index = 0;
    if (totals.len != count * TOTALS * (Py_ssize_t)sizeof(double))
        PyErr_SetString(PyExc_ValueError, "totals: expected one row of 6 float64 for each array");
    else
        for (; index < count && read_floats(PyList_GetItem(arrays, index), &view, 0) == 0; index++) {
            add_array(view.buf, view.len / 4, (double *)totals.buf + index * TOTALS);
            PyBuffer_Release(&view);
        }
    PyBuffer_Release(&totals);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* dot_and_replace(arrays, previous) -> float: dot product with the flat buffer, which then holds the arrays. */
static PyObject *dot_and_replace_all(PyObject *module, PyObject *arguments)
{
    PyObject *arrays, *flat;
    Py_buffer previous, view;
    if (!PyArg_ParseTuple(arguments, "O!O", &PyList_Type, &arrays, &flat)
        || read_floats(flat, &previous, PyBUF_WRITABLE) < 0)
        return NULL;
    double total = 0;
    Py_ssize_t offset = 0, available = previous.len / 4;
    for (Py_ssize_t index = 0; index < PyList_Size(arrays); index++) {
        if (read_floats(PyList_GetItem(arrays, index), &view, 0) < 0)
            break;
        Py_ssize_t count = view.len / 4;
        if (offset + count <= available)
            total += dot_and_replace(view.buf, (float *)previous.buf + offset, count);
        offset += count;
        PyBuffer_Release(&view);
    }
    PyBuffer_Release(&previous);
    if (!PyErr_Occurred() && offset != available)
        PyErr_SetString(PyExc_ValueError, "previous: expected as many elements as the arrays have");
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(total);
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

/* future_mass(probabilities (B, H, T, T), real (B, T) uint8, sums (H, 2) float64): adds to sums. */
static PyObject *future_mass(PyObject *module, PyObject *arguments)
{
    PyObject *array;
    Py_buffer real, sums, view;
    if (!PyArg_ParseTuple(arguments, "Oy*w*", &array, &real, &sums))
        return NULL;
    if (read_floats(array, &view, 0) == 0) {
        const Py_ssize_t *shape = view.shape;
        if (view.ndim != 4 || shape[2] != shape[3] || real.len != shape[0] * shape[2]
            || sums.len != shape[1] * 2 * (Py_ssize_t)sizeof(double))
            PyErr_SetString(PyExc_ValueError, "expected (B, H, T, T), (B, T) and (H, 2)");
        else
            for (Py_ssize_t b = 0; b < shape[0]; b++)
                for (Py_ssize_t h = 0; h < shape[1]; h++)
                    add_future_mass((const float *)view.buf + (b * shape[1] + h) * shape[2] * shape[2],
                                    (const uint8_t *)real.buf + b * shape[2], shape[2],
                                    (double *)sums.buf + 2 * h);
        PyBuffer_Release(&view);
    }
    PyBuffer_Release(&real);
    PyBuffer_Release(&sums);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"add_totals", add_totals, METH_VARARGS, "Add the sums of float32 arrays to rows of totals."},
    {"dot_and_replace", dot_and_replace_all, METH_VARARGS, "Dot product with a buffer, then overwrite it."},
    {"square_sums_finite", square_sums_finite, METH_O, "Whether every array's sum of squares is finite."},
    {"future_mass", future_mass, METH_VARARGS, "Add attention on later keys to sums per head."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "recorder._kernel", "Fused statistics of float32 arrays.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernel(void) { return PyModuleDef_Init(&definition); }
