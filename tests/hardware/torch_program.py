"""What PyTorch does in a pod: carries out commands of standard input, as `gpu-load` does.

`info`, `fill MOST` (tensors until none is given, MOST MiB at most), `again` (a tensor after all
were freed), `graph` (capture one and replay it), `product SECONDS` (matrix products for that long),
`model SECONDS` (those, and then a transformer), `serve SECONDS` (the transformer's tokens).
"""

import os
import sys
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import TypeVar

import torch

T = TypeVar("T")
MIB = 1 << 20
WIDTH = 2048
LAYERS = 10
HEADS = 16
PROMPT = 512
TOKENS = 64
"""A decoder with 500 million parameters: 1 GB in bf16."""


def info(_: list[str]) -> str:
    free, total = torch.cuda.mem_get_info()
    return f"free={free} total={total}"


def fill(words: list[str]) -> str:
    kept = []
    given = 0
    piece = 256
    while piece and given < int(words[0]):
        try:
            kept.append(torch.empty(piece * MIB, dtype=torch.uint8, device="cuda"))
            given += piece
        except torch.OutOfMemoryError:
            piece //= 2
    return f"mib={given}"


def again(_: list[str]) -> str:
    torch.cuda.empty_cache()
    torch.ones(512 * MIB, dtype=torch.uint8, device="cuda").max().item()
    return "ok"


def graph(_: list[str]) -> str:
    numbers = torch.zeros(1 << 20, device="cuda")
    numbers.add_(0)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        numbers.add_(1)
    for _number in range(3):
        captured.replay()
    torch.cuda.synchronize()
    return "ok" if numbers[0].item() == 3 else f"{numbers[0].item()} instead of 3"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        parts = self.qkv(self.before(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, keys, values = parts
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys = keys
        self.values = values
        mixed = torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, is_causal=length > 1
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(torch.nn.functional.gelu(self.up(self.after(x))))


def _seconds(work: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def _repeated(work: Callable[[], T], seconds: float) -> list[T]:
    end = time.monotonic() + seconds
    found = [work()]
    while time.monotonic() < end:
        found.append(work())
    return found


_blocks: list[Block] = []


@torch.inference_mode()
def _generate() -> list[float]:
    """Return the seconds of each token; the first includes the prompt."""
    for block in _blocks:
        block.keys = None
        block.values = None
    x = torch.randn(1, PROMPT, WIDTH, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        nonlocal x
        for block in _blocks:
            x = block(x)
        x = x[:, -1:] / x.std()
        x[0, 0, 0].item()  # a token is chosen on the host

    return [_seconds(step, 1) for _number in range(1 + TOKENS)]


def _load_transformer() -> None:
    if not _blocks:
        _blocks.extend(Block().to("cuda", torch.bfloat16) for _number in range(LAYERS))
        _generate()


def product(words: list[str]) -> str:
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _number in "ab")
    _seconds(lambda: left @ right, 5)
    took = _repeated(lambda: _seconds(lambda: left @ right, 20), float(words[0]))
    tera = 2 * 8192**3 / 1e12
    return f"tflops={tera / median(took):.2f} mean_tflops={tera / fmean(took):.2f}"


def model(words: list[str]) -> str:
    _load_transformer()
    tflops = product(words)
    runs = _repeated(_generate, float(words[0]))
    first = median(run[0] for run in runs) * 1000
    token = median(fmean(run[1:]) for run in runs) * 1000
    return f"{tflops} first_ms={first:.3f} token_ms={token:.4f}"


def serve(words: list[str]) -> str:
    _load_transformer()
    runs = _repeated(_generate, float(words[0]))
    tokens = sorted(token for run in runs for token in run[1:])
    per_s = len(tokens) / sum(map(sum, runs))
    p50, p99 = (tokens[len(tokens) * percent // 100] * 1000 for percent in (50, 99))
    return f"per_s={per_s:.1f} p50_ms={p50:.2f} p99_ms={p99:.2f}"


COMMANDS = {
    "info": info,
    "fill": fill,
    "again": again,
    "graph": graph,
    "product": product,
    "model": model,
    "serve": serve,
}


def main() -> None:
    torch.cuda.init()
    print(f"ready {os.getpid()}", flush=True)
    for line in sys.stdin:
        name, *words = line.split()
        try:
            print(COMMANDS[name](words), flush=True)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            print(f"failed: {error}".splitlines()[0], flush=True)


if __name__ == "__main__":
    main()
