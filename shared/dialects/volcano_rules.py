"""The arguments of Volcano's scheduler plugin `deviceshare`, as rules of ours."""

from collections.abc import Mapping

from shared.dialects import volcano_gpushare, volcano_vgpu
from shared.dialects.dialect import Rules
from shared.model.errors import RequestError

SHARING = "deviceshare.GPUSharingEnable"
NUMBER = "deviceshare.GPUNumberEnable"
VGPU = "deviceshare.VGPUEnable"
POLICY = "deviceshare.SchedulePolicy"
_OLD = "predicate."


def rules_of(arguments: Mapping[str, object]) -> Rules:
    """Read `deviceshare` arguments (or the older `predicate.` spelling of the switches).

    Raises RequestError where Volcano's scheduler refuses to start: sharing and number together, or
    either together with vGPU.
    """
    named = {key.replace(_OLD, "deviceshare."): value for key, value in arguments.items()}
    on = [key for key in (SHARING, NUMBER, VGPU) if _switch(named, key)]
    if len(on) > 1:
        raise RequestError(
            f"{' and '.join(on)} are both true: Volcano allows one of them; leave one on, or give "
            "no scheduler configuration to speak all dialects side by side"
        )
    policy = str(named.get(POLICY) or "")
    if policy not in volcano_vgpu.ORDERS:
        raise RequestError(f"{POLICY} must be empty, binpack or spread, got {policy!r}")
    dialects = {
        SHARING: volcano_gpushare.NAME,
        NUMBER: volcano_gpushare.NAME,
        VGPU: volcano_vgpu.NAME,
    }
    return Rules(enabled=tuple(dialects[key] for key in on), policy=policy)


def _switch(arguments: Mapping[str, object], key: str) -> bool:
    value = arguments.get(key, False)
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text not in {"true", "false"}:
        raise RequestError(f"{key} must be true or false, got {value!r}")
    return text == "true"
