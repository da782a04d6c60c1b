"""The bucket of GPU time, in C, with a clock of the test."""

import ctypes
from pathlib import Path

import pytest

from services.node_agent import compute_time
from services.node_agent.c_compiler import compile_c
from simcluster.gpu_driver.build import compiler

MS = 1_000_000
S = 1000 * MS
START = 1000 * S
EVENTS_ARE_RIGHT = 1024


class Fields(ctypes.Structure):
    """`struct bucket` of files.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("ready_at", "charged_ns", "asked_at", "long_at")),
        ("shared_at", ctypes.c_int64),
        ("process", ctypes.c_int32),
        ("scale", ctypes.c_uint32),
        ("compared_at", ctypes.c_int64),
        ("compared_charged_ns", ctypes.c_int64),
        ("seen", ctypes.c_double),
        ("raw", ctypes.c_double),
    )


class Bucket:
    """A bucket at a limit, and a clock in ns."""

    def __init__(self, library: ctypes.CDLL, limit: int) -> None:
        self.library = library
        self.fields = Fields()
        self.limit = limit
        self.now = START

    def wait(self, *, was_empty: bool = False) -> int:
        found: int = self.library.bucket_wait(
            ctypes.byref(self.fields), ctypes.c_int64(self.now), self.limit, int(was_empty)
        )
        return found

    def charge(self, ns: int) -> None:
        self.library.bucket_charge(
            ctypes.byref(self.fields), ctypes.c_int64(self.now), self.limit, ctypes.c_int64(ns)
        )

    def compare(self, percent: int) -> None:
        self.library.bucket_compare(ctypes.byref(self.fields), ctypes.c_int64(self.now), percent)

    def run(self, kernel_ns: int, seconds: int, *, guessed_ns: int | None = None) -> float:
        """Run kernels one after the other; return the percent of the time that they ran.

        If a time is guessed, that is charged first, and the rest when a kernel is done.
        """
        began = self.now
        ran = 0
        while self.now < began + seconds * S:
            was_empty = False
            while (wait := self.wait(was_empty=was_empty)) > 0:
                was_empty = True
                self.now += min(wait, 5 * MS)
            charged = kernel_ns if guessed_ns is None else guessed_ns
            self.charge(charged)
            self.now += kernel_ns
            ran += kernel_ns
            self.charge(kernel_ns - charged)
        return 100 * ran / (self.now - began)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if compiler() is None:
        pytest.skip("the bucket needs a C compiler")
    source = Path(compute_time.__path__[0]) / "bucket.c"
    target = tmp_path_factory.mktemp("bucket") / "bucket.so"
    made = ctypes.CDLL(str(compile_c(target, [source], ["-shared", "-fPIC"])))
    made.bucket_wait.restype = ctypes.c_int64
    return made


@pytest.mark.parametrize("limit", [1, 25, 75])
@pytest.mark.parametrize("kernel_ns", [100_000, MS, 20 * MS, 100 * MS])
def test_kernels_get_the_limit_of_the_time(
    library: ctypes.CDLL, limit: int, kernel_ns: int
) -> None:
    bucket = Bucket(library, limit)
    bucket.run(kernel_ns, 1)

    assert bucket.run(kernel_ns, 60 if kernel_ns > MS else 1) == pytest.approx(limit, rel=0.05)


@pytest.mark.parametrize("guessed_ns", [50_000, 500 * MS])
def test_what_was_guessed_wrongly_is_charged_or_given_back(
    library: ctypes.CDLL, guessed_ns: int
) -> None:
    bucket = Bucket(library, 25)

    assert bucket.run(100 * MS, 60, guessed_ns=guessed_ns) == pytest.approx(25, rel=0.05)


def test_a_full_bucket_holds_50_ms_however_long_nothing_ran(library: ctypes.CDLL) -> None:
    bucket = Bucket(library, 25)
    launched = 0

    while bucket.wait() <= 0:
        bucket.charge(MS)
        launched += 1

    assert launched == 51


def test_an_empty_bucket_waits_for_more_than_one_launch_so_that_the_gpu_switches_seldom(
    library: ctypes.CDLL,
) -> None:
    bucket = Bucket(library, 25)
    bucket.fields.ready_at = bucket.now + 4 * MS

    assert bucket.wait() == 4 * MS + 20 * MS
    bucket.now += 23 * MS
    assert bucket.wait(was_empty=True) == MS
    bucket.now += MS
    assert bucket.wait(was_empty=True) == 0


def test_a_new_limit_holds_for_what_is_charged_from_then_on(library: ctypes.CDLL) -> None:
    bucket = Bucket(library, 25)
    bucket.run(MS, 1)
    bucket.limit = 60

    assert bucket.run(MS, 1) == pytest.approx(60, rel=0.05)


def measured(bucket: Bucket, *, charged_percent: int, percent: int, seconds: float = 6) -> float:
    """Charge and measure twice a second; return what charges are multiplied by at last."""
    for _ in range(int(seconds * 2)):
        bucket.now += S // 2
        bucket.charge(charged_percent * S // 200)
        bucket.compare(percent)
    return float(bucket.fields.scale) / EVENTS_ARE_RIGHT


def test_charges_are_corrected_by_what_nvml_measured(library: ctypes.CDLL) -> None:
    bucket = Bucket(library, 25)

    assert measured(bucket, charged_percent=50, percent=25) == pytest.approx(0.5, rel=0.1)
    assert measured(bucket, charged_percent=25, percent=25) == pytest.approx(1, rel=0.1)


def test_the_correction_has_bounds(library: ctypes.CDLL) -> None:
    bucket = Bucket(library, 25)

    assert measured(bucket, charged_percent=99, percent=0) == pytest.approx(0.1, rel=0.1)
    assert measured(bucket, charged_percent=3, percent=99) == pytest.approx(4, rel=0.1)


def test_more_given_back_than_charged_between_two_measurements_frees_no_kernels(
    library: ctypes.CDLL,
) -> None:
    bucket = Bucket(library, 25)
    measured(bucket, charged_percent=25, percent=25)
    bucket.now += S // 2
    bucket.charge(-100 * MS)
    bucket.compare(25)

    assert bucket.fields.scale >= EVENTS_ARE_RIGHT
    assert bucket.fields.charged_ns > 0


def test_without_measurements_events_are_believed_again(library: ctypes.CDLL) -> None:
    bucket = Bucket(library, 100)
    measured(bucket, charged_percent=50, percent=25)
    bucket.charge(0)
    bucket.now += 3 * S
    bucket.charge(10 * MS)

    assert bucket.fields.ready_at == bucket.now - 40 * MS


def test_a_measurement_counts_once(library: ctypes.CDLL) -> None:
    bucket = Bucket(library, 25)
    measured(bucket, charged_percent=50, percent=25)
    scale = bucket.fields.scale
    bucket.compare(99)

    assert bucket.fields.scale == scale
