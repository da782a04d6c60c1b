"""Device IDs as the checkpoint keeps them."""

from services.node_agent.kubelet.device_ids import compact


def test_many_ids_are_stored_as_runs_and_compare_equal_in_any_order() -> None:
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    ids = [f"0-{digits[n // 36]}{digits[n % 36]}" for n in range(36, 200)]

    assert compact(ids) == ("0-10..0-5j",)
    assert compact(reversed(ids)) == compact(ids)
    assert compact([*ids[:50], *ids[60:]]) == (f"0-10..{ids[49]}", f"{ids[60]}..0-5j")
    assert compact(["b", "a"]) == ("a", "b")
