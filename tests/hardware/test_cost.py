"""What the library costs a program: HAMi publishes 1.3 and 2 percent."""

from statistics import median, quantiles

from tests.hardware.conftest import Add, AddPod
from tests.hardware.machine import Machine
from tests.support.gpu_driver import GpuLoad

MOST_PERCENT = 2.0
ROUNDS = 9


def test_launches_per_second(machine: Machine, pods: AddPod, seen: Add) -> None:
    seconds = 0.3 if machine.quick else 1
    without = machine.load()
    limited = pods("launch", mib=4096).load()

    rates = [
        [one.value(f"launches {seconds}s", "per_s") for one in (without, limited)] for _ in range(5)
    ]

    bare, held = (median(rate) for rate in zip(*rates, strict=True))
    seen("launches of empty kernels per second, without the library", f"{bare:,.0f}")
    cost = (bare - held) / bare * 100
    holds = cost <= MOST_PERCENT if machine.real else held > 0
    target = f"at most {MOST_PERCENT:g} % less"
    seen("with it", f"{held:,.0f}: {cost:.1f} % less", target, holds=holds)
    without.kill()


def measure(seconds: float, *loads: GpuLoad) -> list[dict[str, float]]:
    """Have PyTorch compute in all processes at once; return what each measured."""
    for load in loads:
        load.send(f"model {seconds}")
    results = [dict(word.split("=") for word in load.result().split()) for load in loads]
    return [{name: float(text) for name, text in one.items()} for one in results]


def test_a_matrix_product_and_a_transformer(
    torch_machine: Machine, pods: AddPod, seen: Add
) -> None:
    half = torch_machine.gpu.usable_mib // 2
    bare = torch_machine.torch()
    limited = pods("whole", mib=half).torch()
    for load in (bare, limited):
        measure(0.5, load)
    runs = [(measure(0.4, bare)[0], measure(0.4, limited)[0]) for _ in range(ROUNDS)]
    bare.kill()
    limited.kill()
    halves = [pods(name, mib=half, cores=50).torch() for name in ("a", "b")]
    for load in halves:
        measure(0.5, load)
    both = measure(4, *halves)

    units = {
        "tflops": "TFLOP/s of a bf16 matrix product",
        "first_ms": "ms to the first token of a transformer of 1 GB",
        "token_ms": "ms per further token",
    }
    for name, shows in units.items():
        (low, before, high), (_, after, _) = (
            quantiles([run[n][name] for run in runs], method="inclusive") for n in (0, 1)
        )
        best = [(max if name == "tflops" else min)(run[n][name] for run in runs) for n in (0, 1)]
        cost = (before / after if name == "tflops" else after / before) * 100 - 100
        spread = (high / low - 1) * 100
        figure = f"{before:.2f}, with the library {after:.2f}: {cost:+.1f} %"
        figure += f" (best of {ROUNDS}: {best[0]:.2f}, {best[1]:.2f})"
        target = f"at most +{MOST_PERCENT:g} %; half of those without it are within {spread:.1f} %"
        seen(shows, figure, target, holds=cost <= max(MOST_PERCENT, spread))
        seen(f"{shows}, two pods at 50 %", " and ".join(f"{one[name]:.2f}" for one in both))
