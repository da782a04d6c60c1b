"""What NVIDIA's kernel driver shows in `/proc`, for tests."""

from pathlib import Path

from services.node_agent.gpus.kernel_gpus import GPUS


def list_gpu(
    proc: Path,
    address: str,
    uuid: str,
    *,
    model: str = "NVIDIA H100",
    minor: int = 0,
    excluded: bool = False,
) -> Path:
    """Write the file of a GPU as the driver does, and return its path."""
    path = proc / GPUS / address / "information"
    path.parent.mkdir(parents=True)
    path.write_text(
        f"Model: \t\t {model}\n"
        "IRQ:   \t\t 10\n"
        f"GPU UUID: \t {uuid}\n"
        "Video BIOS: \t 96.00.99.00.01\n"
        "Bus Type: \t PCIe\n"
        "DMA Size: \t 52 bits\n"
        "DMA Mask: \t 0xfffffffffffff\n"
        f"Bus Location: \t {address}\n"
        f"Device Minor: \t {minor}\n"
        f"GPU Excluded:\t {'Yes' if excluded else 'No'}\n"
    )
    return path
