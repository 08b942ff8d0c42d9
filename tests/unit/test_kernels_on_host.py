"""That the processor runs kernels as CUDA would, and reports what CUDA leaves undefined."""

from __future__ import annotations

import mmap
import os
import re

import numpy as np
import pytest
from kernels_on_host import Buffer, HostKernel, KernelError, compiled

SOURCE = """
constexpr unsigned ALL = 0xffffffffu;

template <int MISTAKE>
__global__ void sum_rows(const float* x, float* sums, int columns) {
    float* parts = static_cast<float*>(dynamic_shared());
    float sum = 0.0f;
    for (int i = threadIdx.x; i < columns; i += blockDim.x) sum += global_load(x + blockIdx.x * columns + i);
    unsigned lanes = MISTAKE == 1 ? 0xffff0000u : ALL;
    for (int other = 16; other > 0; other /= 2) {
        if (MISTAKE == 2 && threadIdx.x == 37) return;
        sum += __shfl_xor_sync(lanes, sum, other);
    }
    if (threadIdx.x % 32 == 0 && !(MISTAKE == 3 && threadIdx.x == 32))
        shared_store(parts + threadIdx.x / 32 + (MISTAKE == 4), sum);
    if (MISTAKE == 5 && threadIdx.x >= 64) return;
    if (MISTAKE != 6) __syncthreads();
    if (threadIdx.x != 0 && MISTAKE != 7) return;
    float total = 0.0f;
    for (unsigned i = 0; i < blockDim.x / 32; ++i) total += shared_load(parts + i);
    global_store(sums + (MISTAKE == 8 ? 0 : blockIdx.x) + (MISTAKE == 9), total);
}

template <int MISTAKE> __global__ void touch(unsigned char* bytes, const unsigned char* given, long long at) {
    if (MISTAKE == 0) global_store(bytes + at, (unsigned char)(global_load(bytes + at) + 1));
    if (MISTAKE == 1) global_store(reinterpret_cast<unsigned*>(bytes + at), 1u);
    if (MISTAKE == 2) global_store(const_cast<unsigned char*>(given), (unsigned char)1);
    if (MISTAKE == 3) global_load(reinterpret_cast<const uint4*>(given + at));
}

template <class V> __global__ void copy(const V* from, V* to, int step) {
    int i = (blockIdx.x * blockDim.x + threadIdx.x) * step;
    global_store(to + i, global_load(from + i));
}

template <bool ATOMIC> __global__ void mark(unsigned* out) {
    unsigned* bits = static_cast<unsigned*>(dynamic_shared());
    if (threadIdx.x == 0) shared_store(bits, 0u);
    __syncthreads();
    if (ATOMIC) shared_or(bits, 1u << threadIdx.x % 32);
    else shared_store(bits, 1u);
    __syncthreads();
    if (threadIdx.x == 0) global_store(out, shared_load(bits));
}

template <int> __global__ void place(int* out) {
    int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    global_store(out + block * (blockDim.x * blockDim.y * blockDim.z) + thread, block * 1000 + thread);
}

template <int> __global__ void from_halves(const unsigned short* halves, float* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    global_store(out + i, half_to_float(global_load(halves + i)));
}

template <int> __global__ void to_halves(const float* values, unsigned short* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    global_store(out + i, float_to_half(global_load(values + i)));
}

template <int> __global__ void lane_of(int* out, int lane) {
    global_store(out + threadIdx.x, __shfl_sync(ALL, (int)threadIdx.x * 10, lane));
}
"""

ROWS, COLUMNS, THREADS = 5, 1000, 96


def kernel(expression: str) -> HostKernel:
    return compiled(SOURCE, expression)


def buffer(name: str, array: np.ndarray, writable: bool = True) -> Buffer:
    return Buffer(name, array.ctypes.data, array.nbytes, writable)


def sum_rows(mistake: int, **options: bool):
    x = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) % 7
    sums = np.full(ROWS, np.nan, np.float32)
    counts = kernel(f"sum_rows<{mistake}>").launch(
        (ROWS,),
        (THREADS,),
        [np.uint64(x.ctypes.data), np.uint64(sums.ctypes.data), np.int32(COLUMNS)],
        THREADS // 32 * 4,
        [buffer("sums", sums), buffer("x", x, False)],
        **options,
    )
    return x, sums, counts


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_a_sum_by_shuffles_shared_memory_and_a_barrier(checks, reverse):
    x, sums, counts = sum_rows(0, checks=checks, reverse=reverse)
    assert np.array_equal(sums, x.sum(1))
    if checks:
        reads, writes = counts["x"][0], counts["sums"][1]
        assert (reads.nbytes, reads.accesses) == (x.nbytes, {4: x.size})
        assert (writes.nbytes, writes.accesses) == (sums.nbytes, {4: ROWS})


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (1, r"thread \(0, 0\): __shfl_xor_sync with a mask that it is not in"),
        (2, r"waits in __shfl_xor_sync .* not all of its threads reach: thread \(37, 0\) has ended"),
        (3, "reads byte 4 of shared memory, which nobody has written"),
        (4, "writes 4 bytes at byte 12 of shared memory, which has 12 bytes"),
        (5, r"waits in __syncthreads\(\) .* not all of its threads reach: thread \(64, 0\) has ended"),
        (6, r"reads byte 4 of shared memory, which nobody has written|race: .* shared memory"),
        (7, r"race: block 0, thread \(1, 0\) writes byte 0 of sums, which block 0, thread \(0, 0\) writes"),
        (8, r"race: block 1, thread \(0, 0\) writes byte 0 of sums, which block 0, thread \(0, 0\) writes"),
        (9, "writes 4 bytes at 0x[0-9a-f]+, outside all buffers"),
    ],
)
def test_what_cuda_leaves_undefined_is_reported(mistake, words):
    with pytest.raises(KernelError, match=words) as error:
        sum_rows(mistake)
    assert str(error.value).startswith(f"sum_rows<{mistake}>: ")
    x, sums, _ = sum_rows(0)  # the next launch works
    assert np.array_equal(sums, x.sum(1))


@pytest.mark.parametrize("checks", [True, False])
def test_barriers_that_threads_do_not_reach_are_reported_also_without_checks(checks):
    with pytest.raises(KernelError, match="which not all of its threads reach"):
        sum_rows(5, checks=checks)


@pytest.mark.parametrize("reverse", [True, False])
def test_a_barrier_that_is_missing(reverse):
    """In one order of the threads the values happen to be right; it is reported in both."""
    with pytest.raises(KernelError, match="shared memory"):
        sum_rows(6, reverse=reverse)


@pytest.mark.parametrize(
    ("mistake", "at", "words"),
    [
        (0, 16, "reads 1 bytes at 0x[0-9a-f]+, outside all buffers"),
        (1, 2, "writes 4 bytes at byte 2 of bytes, which is misaligned"),
        (2, 0, "writes byte 0 of given, which is read only"),
        (3, 8, "reads 16 bytes at 0x[0-9a-f]+, outside all buffers"),
    ],
)
def test_access_that_does_not_fit(mistake, at, words):
    given, memory = np.zeros(32, np.uint8), np.zeros(16, np.uint8)
    given = given[-given.ctypes.data % 16 :][:16]
    arguments = [np.uint64(memory.ctypes.data), np.uint64(given.ctypes.data), np.int64(at)]
    with pytest.raises(KernelError, match=words):
        kernel(f"touch<{mistake}>").launch(
            (1,), (1,), arguments, 0, [buffer("bytes", memory), buffer("given", given, False)]
        )


def test_offsets_past_32_bits(tmp_path):
    """In a file of which only what is touched takes room."""
    size, at = 5 << 30, (5 << 30) - 3
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", size)
    with (tmp_path / "sparse").open("r+b") as file, mmap.mmap(file.fileno(), size) as memory:
        array = np.frombuffer(memory, np.uint8)
        array[at] = 41
        kernel("touch<0>").launch(
            (1,), (1,), [np.uint64(array.ctypes.data), np.uint64(0), np.int64(at)], 0, [buffer("bytes", array)]
        )
        assert array[at] == 42
        del array


@pytest.mark.parametrize(
    ("element", "code", "offset", "step", "sectors"),
    [
        (np.float32, "float", 0, 1, 4),  # 128 bytes, side by side
        (np.float32, "float", 1, 1, 5),  # the same, from the middle of a sector
        (np.float32, "float", 0, 8, 32),  # each in a sector of its own
        (np.uint16, "unsigned short", 0, 1, 2),
        (np.complex128, "uint4", 0, 1, 16),
    ],
)
def test_sectors_of_a_warps_access(element, code, offset, step, sectors):
    source = np.arange(2 * 64 * step + 64, dtype=element)
    source = source[-source.ctypes.data % 32 // source.itemsize :][offset : offset + 2 * 64 * step]
    result = np.zeros_like(source)
    result = np.zeros(source.size + 32, element)
    result = result[-result.ctypes.data % 32 // result.itemsize :][: source.size]
    counts = kernel(f"copy<{code}>").launch(
        (2,),
        (64,),
        [np.uint64(source.ctypes.data), np.uint64(result.ctypes.data), np.int32(step)],
        0,
        [buffer("to", result), buffer("from", source, False)],
        sectors=True,
    )
    assert np.array_equal(result[::step], source[::step])
    reads, writes = counts["from"][0], counts["to"][1]
    assert (reads.warp_accesses, reads.sectors) == (4, 4 * sectors)
    assert (writes.warp_accesses, writes.nbytes) == (4, 128 * source.itemsize)


def test_atomic_marks_are_no_race_and_plain_ones_are():
    marks = np.zeros(1, np.uint32)
    arguments = [np.uint64(marks.ctypes.data)]
    kernel("mark<true>").launch((1,), (32,), arguments, 4, [buffer("out", marks)])
    assert marks[0] == 2**32 - 1
    with pytest.raises(KernelError, match=r"race: .* writes byte 0 of shared memory, which .* writes"):
        kernel("mark<false>").launch((1,), (32,), arguments, 4, [buffer("out", marks)])


def test_indices_in_three_dimensions():
    grid, block = (2, 3, 2), (4, 2, 3)
    found = np.full((12, 24), -1, np.int32)
    kernel("place<0>").launch(grid, block, [np.uint64(found.ctypes.data)], 0, [buffer("out", found)])
    assert np.array_equal(found, np.arange(12)[:, None] * 1000 + np.arange(24))


def test_a_lane_reads_another():
    found = np.zeros(64, np.int32)
    kernel("lane_of<0>").launch((1,), (64,), [np.uint64(found.ctypes.data), np.int32(5)], 0, [buffer("out", found)])
    assert np.array_equal(found, np.repeat([50, 370], 32))


def test_every_half_as_a_float():
    halves = np.arange(1 << 16, dtype=np.uint16)
    found = np.zeros(halves.size, np.float32)
    arguments = [np.uint64(halves.ctypes.data), np.uint64(found.ctypes.data)]
    kernel("from_halves<0>").launch((256,), (256,), arguments, checks=False)
    expected = halves.view(np.float16).astype(np.float32)
    assert np.array_equal(found, expected, equal_nan=True)
    assert np.array_equal(np.signbit(found), np.signbit(expected))


def test_floats_round_to_the_nearest_half_and_ties_to_even():
    every = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    between = (every[1:] + every[:-1]) / 2  # exact
    noise = np.random.default_rng(0).integers(0, 2**32, 1 << 16, dtype=np.uint32).view(np.float32)
    edges = np.array([65504, 65519.99, 65520, np.inf, 1e-8, 2**-25, 2**-24, 0, np.nan], np.float32)
    near = np.concatenate([np.nextafter(between, np.float32(0)), np.nextafter(between, np.float32(np.inf))])
    values = np.concatenate([every, between, near, noise, edges])
    values = np.concatenate([values, -values])
    values = np.ascontiguousarray(np.concatenate([values, np.zeros(-values.size % 256, np.float32)]))
    found = np.zeros(values.size, np.uint16)
    arguments = [np.uint64(values.ctypes.data), np.uint64(found.ctypes.data)]
    kernel("to_halves<0>").launch((values.size // 256,), (256,), arguments, checks=False)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    numbers = ~np.isnan(values)
    assert np.array_equal(found[numbers], expected.view(np.uint16)[numbers])
    assert np.isnan(found.view(np.float16)[~numbers]).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([np.uint64(0)], "copy<float>: 1 arguments, expected 3"),
        ([np.uint64(0), np.uint64(0), np.int64(1)], "copy<float>: argument 2 has 8 bytes, expected 4"),
    ],
)
def test_arguments_that_do_not_fit(arguments, words):
    with pytest.raises(KernelError, match=re.escape(words)):
        kernel("copy<float>").launch((1,), (1,), arguments)


def test_a_source_that_does_not_compile():
    with pytest.raises(KernelError, match="nowhere"):
        compiled("template <int> __global__ void f(int* p) { global_store(p, nowhere); }", "f<0>")


def test_too_many_threads():
    with pytest.raises(KernelError, match="2048 threads in a block, expected 1 to 1024"):
        kernel("copy<float>").launch((1,), (2048,), [np.uint64(0), np.uint64(0), np.int32(1)])
