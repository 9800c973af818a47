"""The thread pool: every unit is done once, whoever does it, however often."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from colibri_mmap.runtime import pool as pools
from colibri_mmap.runtime.kernels import elementwise
from colibri_mmap.runtime.pool import ARGUMENTS, Job, Launch, Pool, job
from colibri_mmap.runtime.processor import default_threads

WIDTH = 24


def add_job(total: np.ndarray, step: np.ndarray, chunk: int) -> Job:
    """total += step, row by row: doing a row twice, or not at all, shows."""
    rows = (total.ctypes.data, total.strides[0], step.ctypes.data, step.strides[0])
    target = (total.ctypes.data, total.strides[0])
    return job(elementwise.add_rows, len(total), chunk, *rows, *target, total.shape[1])


def arrays(count: int) -> tuple[np.ndarray, np.ndarray]:
    step = np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH) % 97 + 1
    return np.zeros_like(step), step


def wait_until(condition: Callable[[], bool]) -> None:
    """Give way to other threads until it holds; the limit only stops a broken test."""
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0)


def sleepers(pool: Pool) -> int:
    """How many workers sleep on the futex."""
    return ctypes.c_int64.from_address(pool._control + pools._SLEEPERS).value


@pytest.fixture(params=[1, 2, 3, 8])
def pool(request: pytest.FixtureRequest):
    pool = Pool(request.param)
    yield pool
    pool.close()


def test_every_unit_once(pool: Pool) -> None:
    for count, chunk in [(1, 1), (2, 1), (5, 2), (16, 16), (17, 16), (1000, 1), (1000, 7)]:
        total, step = arrays(count)
        pool.run(Launch([[add_job(total, step, chunk)]]))
        assert np.array_equal(total, step)


def test_jobs_of_a_phase_and_phases_in_order(pool: Pool) -> None:
    """Each phase reads what all jobs of the phase before have written."""
    first, step = arrays(37)
    second, third = np.zeros_like(first), np.zeros_like(first)
    phases = [
        [add_job(first[:10], step[:10], 1), add_job(first[10:], step[10:], 3)],
        [add_job(second, first, 2), add_job(third[::2], first[::2], 5)],
        [add_job(third, second, 1)],
    ]
    launch = Launch(phases)
    for times in range(1, 4):
        pool.run(launch)
        # After n runs: first = n, second = 1 + .. + n, third gets first on even rows and second.
        sums = times * (times + 1) // 2
        tetrahedral = times * (times + 1) * (times + 2) // 6
        assert np.array_equal(first, step * times)
        assert np.array_equal(second, step * sums)
        assert np.array_equal(third[1::2], step[1::2] * tetrahedral)
        assert np.array_equal(third[::2], step[::2] * (tetrahedral + sums))


def test_nothing_to_do(pool: Pool) -> None:
    total, step = arrays(4)
    nothing = add_job(total[:0], step[:0], 1)
    pool.run(Launch([]))
    pool.run(Launch([[], [nothing], []]))
    pool.run(Launch([[nothing, nothing]]))
    assert not total.any()
    pool.run(Launch([[nothing, add_job(total, step, 1), nothing], [nothing]]))
    assert np.array_equal(total, step)


def test_thousands_of_launches(pool: Pool) -> None:
    total, step = arrays(6)
    launch = Launch([[add_job(total[:3], step[:3], 1), add_job(total[3:], step[3:], 2)]] * 2)
    for _ in range(3000):
        pool.run(launch)
    assert np.array_equal(total, step * 6000)


def test_arguments_may_change_between_runs(pool: Pool) -> None:
    total, step = arrays(8)
    other = step * 3
    launch = Launch([[add_job(total, step, 1)]])
    pool.run(launch)
    launch.jobs[0, ARGUMENTS + 2] = other.ctypes.data
    pool.run(launch)
    assert np.array_equal(total, step * 4)


def test_sleeping_workers_wake() -> None:
    pool = Pool(3)
    total, step = arrays(64)
    launch = Launch([[add_job(total, step, 1)]])
    for times in range(1, 6):
        wait_until(lambda: sleepers(pool) == 2)
        pool.run(launch)
        assert np.array_equal(total, step * times)
    wait_until(lambda: sleepers(pool) == 2)
    pool.close()


def test_other_python_threads_go_on() -> None:
    """A launch holds no lock of the interpreter: another thread runs while it does."""
    total, step = arrays(200_000)
    launch = Launch([[add_job(total, step, 64)]] * 20)
    pool, seen, done = Pool(2), 0, threading.Event()

    def work() -> None:
        pool.run(launch)
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    while not done.is_set():
        seen += 1
        time.sleep(0)
    thread.join()
    pool.close()
    assert seen > 1
    assert np.array_equal(total, step * 20)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_close_ends_the_threads(threads: int) -> None:
    before = threading.active_count()
    pool = Pool(threads)
    assert threading.active_count() == before + threads - 1
    pool.close()
    pool.close()
    assert threading.active_count() == before


def test_a_forgotten_pool_ends_its_threads() -> None:
    before = threading.active_count()
    total, step = arrays(64)
    for _ in range(20):
        Pool(3).run(Launch([[add_job(total, step, 1)]]))
    assert threading.active_count() == before
    assert np.array_equal(total, step * 20)


def test_default_threads() -> None:
    assert 1 <= default_threads() <= 4096
